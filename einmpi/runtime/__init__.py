"""DO it: the only arrays, MPI and files."""
