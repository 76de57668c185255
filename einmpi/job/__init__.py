"""A job file to a Job: what to compute, where tensors come from, where results go."""
