"""What kind of step computes: as tests tell them apart."""

from einmpi.schedule.compute import Compute
from einmpi.schedule.steps import Transfer


def computed_as(step):
    """Return how a step computes; "" if it computes nothing.

    A "kernel" is computed alone. A "stencil" reads halos in buffers, or computes aggregates in the
    same pass. Otherwise it is the kind of its tiles, and "part" for a part of any of them.
    """
    if not isinstance(step, Compute):
        return ""
    if step.tiles.bounds:
        return "part"
    if step.only_kernel is not None:
        return "kernel"
    return step.tiles.kind or "stencil"


def is_exchange(step):
    """Return whether a step moves elements among ranks, or on this rank, and aggregates none."""
    return isinstance(step, Transfer) and step.aggregation is None


def is_reduce(step):
    """Return whether a step aggregates partial results."""
    return isinstance(step, Transfer) and step.aggregation is not None
