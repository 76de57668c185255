"""BLAS libraries other than the one that numpy brings: which there are, and how they are used."""
