"""Sparse tensors in files: what their headers say, and how arrays and lines become keys."""
