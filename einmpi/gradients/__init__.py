"""Gradients: a graph in, the same graph with the derivatives of a tensor out."""
