"""One matrix on a grid of ranks: panels, and the steps that send and use them."""
