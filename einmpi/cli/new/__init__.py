"""`einmpi new`: write a job file."""
