"""One vertex on one rank: what both CPUs and GPUs share, and the reference evaluator."""
