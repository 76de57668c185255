"""Products under ⊕ to smaller vertices, where that saves operations."""
