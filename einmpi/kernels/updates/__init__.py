"""Kernels that are written over one of their operands, and change only a part of it."""
