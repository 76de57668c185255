"""A job made ready to run: plan, schedule, backend, inputs and results on the ranks."""
