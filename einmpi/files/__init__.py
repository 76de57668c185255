"""Tensors in files: find, read together, write together, replace atomically."""
