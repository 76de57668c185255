"""Functions of numpy on DistArrays that are combinations of other such functions."""
