"""Inputs that stay in memory between runs: once for all ranks of a node that need the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from einmpi.schedule.layout import Layout, axes_that_cut, split_further
from einmpi.schedule.moves import group_of
from einmpi.schedule.regions import Slot
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Load, numbered

# Smaller slots are not shared. Their messages take a few microseconds more, but no rank waits for
# ranks from which it gets nothing.
MIN_SHARED_BYTES = 2**17

Group: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class SharedInput:
    """An input that stays in memory between runs, once for all ranks of a group."""

    group: Group
    pieces: Layout  # which rank of the group loads which part of the block

    def bytes_saved(self, slot: Slot) -> int:
        """Return how much less memory this rank takes than without the others."""
        return slot.nbytes - -(-slot.nbytes // len(self.group))


def find_shared_inputs(schedule: Schedule, nodes: Sequence[int]) -> dict[str, SharedInput]:
    """Return the inputs of which ranks of a node need the same block, by the name of the slot.

    The ranks may read a file together, so all ranks find the same inputs.
    """
    found = {}
    for _, step in numbered(schedule.lowered_steps, Load):
        if not step.kept or step.overwritten or step.numbers is not None:
            continue
        layout = step.layout
        mesh = layout.mesh
        axes = [axis for axis in axes_that_cut(layout.cuts, None) if axis >= mesh.node_axes]
        nbytes = layout.max_elements() * np.dtype(step.slot.dtype).itemsize
        if nbytes < MIN_SHARED_BYTES:
            continue
        groups = [tuple(group_of(mesh, axes, rank)[0]) for rank in range(mesh.ranks)]
        if all(is_inside_node(group, nodes) for group in groups):
            pieces = split_further(mesh, layout.bound, layout.cuts, axes, orders=layout.orders)
            found[step.slot.name] = SharedInput(groups[schedule.rank], pieces)
    return found


def is_inside_node(group: Group, nodes: Sequence[int]) -> bool:
    """Return whether a group has several ranks, which share memory."""
    return len(group) > 1 and len({nodes[rank] for rank in group}) == 1
