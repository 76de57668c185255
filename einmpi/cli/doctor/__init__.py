"""`einmpi doctor`: does a run work on this machine, and what to do if not."""
