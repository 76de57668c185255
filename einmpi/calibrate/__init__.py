"""Measures a machine: what messages and operations take, for plans that count in seconds."""
