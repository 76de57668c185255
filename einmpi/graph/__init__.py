"""WHAT to compute: labels, scalar functions, EinSum, EinGraph. No rank count, no arrays."""
