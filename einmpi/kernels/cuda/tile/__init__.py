"""Kernels in tiles: ⊕ over labels that rows and columns share."""
