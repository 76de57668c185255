"""Chains of kernels, computed one block of rows at a time on views of whole arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from threading import Lock

from einmpi.kernels.cpu.blas_library.choice import one_blas_thread
from einmpi.kernels.cpu.compiled import pool
from einmpi.runtime.backend import Array, Backend
from einmpi.runtime.buffers import Buffers
from einmpi.schedule.chain import Accumulate, Block, Chain
from einmpi.schedule.regions import whole
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Step

MIN_ROWS_OF_THREAD = 64  # of a block: with fewer, a matrix product takes longer than by all threads


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
    compute = partial(_compute_blocks_of_thread, arrays, carry_out)
    workers = backend.one_thread_backends
    smaller_step = backend.calls.get(step, len(workers), partial(_cut_for, step, len(workers)))
    if smaller_step is None:
        return compute(backend, step, _SharedBlocks(step))
    blocks = _SharedBlocks(smaller_step)
    compute_share = partial(compute, step=smaller_step, blocks=blocks)
    with one_blas_thread():  # each of the threads calls BLAS, whose own threads would disturb them
        shares = [pool(len(workers)).submit(compute_share, worker) for worker in workers]
        try:
            return sum(share.result() for share in shares)
        finally:
            # After an error or Ctrl-C the threads need not go on, but must not write any more
            # when the memory of this run is used for another one.
            blocks.stop()
            wait(shares)


class _SharedBlocks:
    """The blocks of a chain, of which each thread takes the next ones when it has done some.

    Those that add to the same results are done one after another by one thread.
    """

    def __init__(self, step: Chain) -> None:
        together: dict[Block, list[Block]] = {}
        for block in step.blocks():
            place = tuple(block[row] for row in step.rows_of_all_results)
            together.setdefault(place, []).append(block)
        self.remaining: Iterator[list[Block]] = iter(together.values())
        self.lock = Lock()

    def stop(self) -> None:
        """Leave out the blocks that no thread has taken yet."""
        with self.lock:
            self.remaining = iter(())

    def __iter__(self) -> Iterator[list[Block]]:
        return self

    def __next__(self) -> list[Block]:
        with self.lock:
            return next(self.remaining)


def _compute_blocks_of_thread(
    arrays: Mapping[str, Array],
    carry_out: Callable[[Sequence[Step], Buffers], None],
    backend: Backend,
    step: Chain,
    blocks: _SharedBlocks,
) -> int:
    """Compute the blocks that a thread takes; return the most bytes that its inner slots took."""
    inside = Buffers(backend)
    shared_bytes = inside.bytes_in_use  # which the run has counted already
    for together in blocks:
        for block in together:
            prepare = partial(_steps_of_block, step, block, backend)
            steps = backend.calls.get(step, step.kind_of(block), prepare)
            for name, view in step.views.items():
                inside.arrays[name] = arrays[view.slot.name][(*view.place(block), ...)]
            try:
                carry_out(steps, inside)
            except BaseException:
                blocks.stop()
                raise
    return inside.peak - shared_bytes


def _cut_for(step: Chain, threads: int) -> Chain | None:
    """Return a chain with blocks so small that threads can compute one each in the same memory.

    None if the threads should rather compute one block together.
    """
    free_rows = step.rows_of_all_results
    if threads == 1 or not free_rows:
        return None
    if step.combines_blocks:
        return _cut_sums_for(step, threads)
    block = list(step.block)
    for row in free_rows[:-1]:  # batches come first, then rows of matrices
        if block[row] >= threads:
            block[row] //= threads
            return replace(step, block=tuple(block))
    if block[free_rows[-1]] < threads * MIN_ROWS_OF_THREAD:
        return None
    block[free_rows[-1]] //= threads
    return replace(step, block=tuple(block))


def _cut_sums_for(step: Chain, threads: int) -> Chain | None:
    """Return a chain whose blocks add to results, with smaller blocks; None as in `_cut_for`.

    Threads have different results, so there must be enough of these. Each thread has memory for
    what its block adds, so blocks may have to be smaller still.
    """
    extent = step.parts[0].einsum.extent
    places = 1
    cut_row = 0
    for row, labels in enumerate(step.rows):
        if row in step.rows_of_all_results:
            places *= -(-extent[labels[0]] // step.block[row])
        elif step.block[row] < extent[labels[0]]:
            cut_row = row
    if places < threads:
        return None
    size = step.block[cut_row] // threads
    while size >= MIN_ROWS_OF_THREAD:
        block = (*step.block[:cut_row], size, *step.block[cut_row + 1 :])
        smaller = replace(step, block=block)
        if threads * smaller.working_bytes <= step.working_bytes:
            return smaller
        size -= 1 + size // 8
    return None


def _steps_of_block(step: Chain, block: Block, backend: Backend) -> tuple[Step, ...]:
    """Return the steps of a block, grouped as the backend computes them best."""
    return backend.group_block(Schedule(0, 1, "", tuple(step.steps_of(block)))).steps


def accumulate(step: Accumulate, buffers: Buffers) -> None:
    """Combine what one block adds to a result with what is there."""
    part = buffers[step.part]
    region = tuple(map(whole, part.shape or (1,)))
    buffers.backend.combine(step.aggregation, buffers[step.total], region, part.reshape(-1))
    buffers.free(step.part)
