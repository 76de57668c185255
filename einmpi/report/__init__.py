"""LOOK at it: text for people."""
