"""`einmpi sbatch`: write a Slurm script from a plan."""
