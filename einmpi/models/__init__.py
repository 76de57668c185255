"""Known models: their programs, and their checkpoints as the inputs of a job."""
