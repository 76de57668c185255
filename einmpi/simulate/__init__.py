"""Replay the schedules of all ranks on a network that SimGrid simulates: the command `simulate`."""
