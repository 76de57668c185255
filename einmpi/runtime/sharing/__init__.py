"""Memory that the ranks of a node share, and exchanges and reductions in it."""
