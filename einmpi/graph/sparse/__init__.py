"""Sparse tensors: what is stored, what a program needs of it, and the same over edge lists."""
