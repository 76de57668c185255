"""Training written out as statements: gradients, optimisers and their state."""
