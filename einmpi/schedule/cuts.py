"""Which transfers between nodes are done in parts, so that kernels can work on one part while the
next one travels. All ranks decide alike: a transfer has the same parts on all its members."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import isqrt

import numpy as np

from einmpi.planner.moving import overlap
from einmpi.planner.plan import Plan
from einmpi.schedule.compute import Kernel
from einmpi.schedule.regions import Slot
from einmpi.schedule.steps import Step, Transfer
from einmpi.schedule.transfers import Cut, Members, Part

# A tensor moves by a route of one or several transfers: a reduction, perhaps a second one between
# nodes, then an exchange, perhaps another one inside nodes. All of them have the same parts, and
# part k takes all its transfers before part k + 1:
#
#     kernel    Z[120, 1200] ← Σ[l](D[j,l] × E[l,k])
#     reduce    Z[:, 0:600]                                 part 1
#     exchange  Z[:, 0:600]
#     reduce    Z[:, 600:1200]                              part 2
#     exchange  Z[:, 600:1200]
#
# A part has some indices of a dimension that the transfers do not change. The kernel that uses the
# result can work part by part if that dimension is a label of its output: each element of its
# result is then computed as it would be without parts. A label that is summed over would change
# the order of the sum.

# BLAS computes blocks of some rows and columns, and what is left over in other ways. Parts are
# multiples of this many indices, and none has fewer, so that they are computed like the whole.
PART_MULTIPLE = 16  # indices


@dataclass
class _Route:
    """Consecutive transfers of one tensor, from the slot that a kernel or a load has filled."""

    numbers: list[int]  # of the steps
    transfers: list[Transfer]
    producer: Kernel | None = None  # that has just computed the first slot
    consumer: Kernel | None = None  # that reads the last slot next
    is_early: bool = False  # an input that can be loaded before the kernel before

    @property
    def last_slot(self) -> Slot:
        return self.transfers[-1].target


def with_cuts(steps: Sequence[Step], plan: Plan) -> list[Step]:
    """Return the steps of a rank with parts in the transfers that are worth it."""
    found = list(steps)
    for route in _routes(steps, plan.files):
        choice = _choose_cut(route, plan)
        if choice is None:
            continue
        dimension, count = choice
        parts = _equal_parts(dimension, route.last_slot.shape[dimension], count)
        cut = Cut(parts, route.producer is not None, route.is_early)
        for number, transfer in zip(route.numbers, route.transfers, strict=True):
            found[number] = replace(transfer, cut=cut)
    return found


def _routes(steps: Sequence[Step], files: Collection[str]) -> list[_Route]:
    """Find the routes of transfers, and the kernels before and after each of them.

    Inputs from files are not loaded earlier: they are read while kernels run already.
    """
    found: list[_Route] = []
    latest: Kernel | None = None  # the kernel before, if nothing was computed since
    open_routes: list[_Route] = []  # since that kernel
    previous: Step | None = None
    for number, step in enumerate(steps):
        kernel = step.only_kernel
        if step.manages_memory:  # a save point
            continue
        if isinstance(step, Transfer):
            if _is_continued(previous, step):
                open_routes[-1].numbers.append(number)
                open_routes[-1].transfers.append(step)
            else:
                route = _Route([number], [step])
                (source,) = step.reads
                if latest is not None:
                    if latest.target == source:
                        route.producer = latest
                    is_loaded = previous is not None and previous.kind == "load"
                    is_source = previous is not None and previous.writes == (source,)
                    route.is_early = is_loaded and is_source and step.vertex not in files
                open_routes.append(route)
                found.append(route)
        elif kernel is not None:
            for route in open_routes:
                if route.last_slot in kernel.operands:
                    route.consumer = kernel
            latest = kernel
            open_routes = []
        elif step.computes:
            latest = None
            open_routes = []
        previous = step
    return found


def _is_continued(previous: Step | None, step: Transfer) -> bool:
    """Return whether a transfer moves the result of the step before it on."""
    if previous is None or previous.transfer is None:
        return False
    return previous.vertex == step.vertex and previous.writes == step.reads


def _choose_cut(route: _Route, plan: Plan) -> tuple[int, int] | None:
    """Return the dimension along which a route is cut, and into how many parts at most.

    None if it is not worth it. The choice depends on numbers that are the same on all ranks.
    """
    nbytes = 0
    lengths = dict(route.transfers[0].moves.unchanged)  # of dimensions that no transfer changes
    for transfer in route.transfers:
        moves = transfer.moves
        itemsize = np.dtype(transfer.target.dtype).itemsize
        nbytes = max(nbytes, moves.max_elements * itemsize)
        unchanged = dict(moves.unchanged)
        for dimension in list(lengths):
            if dimension in unchanged:
                lengths[dimension] = unchanged[dimension]
            else:
                del lengths[dimension]
    count = min(overlap.MOST_PARTS, isqrt(nbytes // overlap.PART_UNIT_BYTES))
    crosses_nodes = any(
        _crosses_nodes(transfer.moves.members, plan) for transfer in route.transfers
    )
    if count < 2 or not crosses_nodes or not route.last_slot.shape:
        return None
    long_kernels = []  # those that take long enough to be computed in so many parts
    is_planned = False
    for kernel in (route.producer, route.consumer):
        if kernel is None:
            continue
        if kernel.vertex in plan.overlapped:
            is_planned = True
        operations = plan.graph[kernel.vertex].operations() // plan.mesh.ranks
        if operations >= count * overlap.LEAST_PART_OPERATIONS:
            long_kernels.append(kernel)
    if not is_planned:
        return None
    best: tuple[int, int] | None = None
    most_kernels = 0
    for dimension, length in sorted(lengths.items()):
        if length < 2 * PART_MULTIPLE:
            continue
        useful = sum(_can_be_cut(kernel, route, dimension) for kernel in long_kernels)
        if useful > most_kernels:
            best = dimension, count
            most_kernels = useful
    return best


def _equal_parts(dimension: int, extent: int, count: int) -> tuple[Part, ...]:
    """Divide the indices of a dimension into at most `count` parts, none of them very small."""
    size = -(-extent // count)
    size = -(-size // PART_MULTIPLE) * PART_MULTIPLE
    found = []
    start = 0
    while start < extent:
        stop = start + size
        if stop + PART_MULTIPLE > extent:
            stop = extent
        found.append(Part(dimension, start, stop, extent))
        start = stop
    return tuple(found)


def _crosses_nodes(members: Members, plan: Plan) -> bool:
    """Return whether a group has ranks on several nodes, or may have as far as the mesh knows."""
    if members.count == 1:
        return False
    if plan.uneven:
        return True
    ranks_per_node = plan.mesh.ranks // plan.mesh.nodes
    return members.first // ranks_per_node != members.last // ranks_per_node


def _can_be_cut(kernel: Kernel, route: _Route, dimension: int) -> bool:
    """Return whether a kernel can make, or use, one part of a moved tensor after another."""
    if kernel is route.producer:
        return label_of_part(kernel, kernel.target, dimension) is not None
    return label_of_part(kernel, route.last_slot, dimension) is not None


def label_of_part(kernel: Kernel, slot: Slot, dimension: int) -> str | None:
    """Return the label of a kernel's output that a dimension of one of its slots is.

    None if there is no such label, or if the kernel cannot be computed for some of its indices.
    """
    einsum = kernel.einsum
    if einsum.scan is not None or einsum.is_pass_of_scan or einsum.picked_extent is not None:
        return None
    if einsum.labels_as_numbers:
        return None  # values may be scattered, or picked, by these labels
    if kernel.select or kernel.target in kernel.operands:
        return None
    if not einsum.is_indexed_by_labels:
        return None
    if slot == kernel.target:
        return einsum.output[dimension]
    if kernel.operands.count(slot) != 1:
        return None
    label = einsum.operands[kernel.operands.index(slot)][dimension]
    if not isinstance(label, str) or label not in einsum.output:
        return None  # it is summed over
    return label
