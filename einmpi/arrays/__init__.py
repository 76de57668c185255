"""Numpy's functions on DistArrays: block by block, by small programs, or by moving elements."""
