"""`einmpi simulate`: replay a plan on a simulated network."""
