"""What functions with a bounded cache have kept, for tests that count or forget it."""

import inspect


def kept(function):
    """The results of a function by its arguments, which a test may also clear."""
    return inspect.getclosurevars(function).nonlocals["results"]
