"""Start ranks with mpirun and pass on what they print."""
