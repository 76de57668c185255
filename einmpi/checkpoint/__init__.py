"""Save a run, and resume it on the same or another number of ranks."""
