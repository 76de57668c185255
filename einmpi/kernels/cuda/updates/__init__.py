"""Updates in place on a GPU that change only a part of an array."""
