"""Chains of kernels, computed one block of rows at a time on views of whole arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from einmpi.runtime.backend import Array, Backend
from einmpi.runtime.buffers import Buffers
from einmpi.schedule.fused.chain import Accumulate, Block, Chain
from einmpi.schedule.regions import whole
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Step


def compute_chain(
    step: Chain, buffers: Buffers, carry_out: Callable[[Sequence[Step], Buffers], None]
) -> None:
    """Compute a chain: by a kernel for all of it if the backend has one, or else block by block.

    `carry_out` does steps on the slots of some buffers.
    """
    backend = buffers.backend
    for slot in step.writes:
        buffers.make(slot)
    arrays = {slot.name: buffers[slot] for slot in (*step.reads, *step.writes)}
    workspace = backend.compute_chain(step, arrays)
    if workspace is None:
        workspace = _compute_blocks(step, arrays, backend, carry_out)
    buffers.grow(workspace)
    buffers.bytes_in_use -= workspace


def _compute_blocks(
    step: Chain,
    arrays: Mapping[str, Array],
    backend: Backend,
    carry_out: Callable[[Sequence[Step], Buffers], None],
) -> int:
    """Compute all blocks of a chain; return the most bytes that its inner slots took."""
    inside = Buffers(backend)
    for block in step.blocks():
        prepare = partial(_steps_of_block, step, block, backend)
        steps = backend.calls.get(step, step.kind_of(block), prepare)
        for name, view in step.views.items():
            inside.arrays[name] = arrays[view.slot.name][(*view.place(block), ...)]
        carry_out(steps, inside)
    return inside.peak


def _steps_of_block(step: Chain, block: Block, backend: Backend) -> tuple[Step, ...]:
    """Return the steps of a block, grouped as the backend computes them best."""
    return backend.group_block(Schedule(0, 1, "", tuple(step.steps_of(block)))).steps


def accumulate(step: Accumulate, buffers: Buffers) -> None:
    """Combine what one block adds to a result with what is there."""
    part = buffers[step.part]
    region = tuple(map(whole, part.shape or (1,)))
    buffers.backend.combine(step.aggregation, buffers[step.total], region, part.reshape(-1))
    buffers.free(step.part)
