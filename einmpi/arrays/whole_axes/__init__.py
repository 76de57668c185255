"""Functions of DistArrays along dimensions that are whole on a rank: matrices, transforms."""
