"""WHERE and WHEN: what one rank loads, exchanges, computes and frees. No arrays, no MPI."""
