"""How a plan needs less memory: the order of its vertices, and tensors that are computed again."""
