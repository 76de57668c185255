"""`einmpi sbatch`: a script for Slurm, made from the plan of a job."""
