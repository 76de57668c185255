"""DistArrays, and numpy's functions on them: by blocks, by small programs, by moving elements."""
