"""Updates of tensors in place, by BLAS."""
