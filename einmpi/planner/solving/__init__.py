"""The states that cost least with some mesh axes free: choices, what they cost, their minimum."""
