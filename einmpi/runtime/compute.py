"""What a step that computes does: the backend's first implementation that can, or, as it works for
everything on every device, one kernel after another, tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from functools import partial
from math import prod
from threading import Lock
from typing import Any, TypeAlias

import numpy as np

from einmpi.graph.scalar import Arg, walk
from einmpi.kernels.cpu.blas_library.choice import one_blas_thread
from einmpi.kernels.cpu.compiled import pool
from einmpi.kernels.cpu.row_updates import changed_rows
from einmpi.kernels.cpu.scatter import Scatter, scatter_places
from einmpi.kernels.operands import operands_read
from einmpi.kernels.prepared import apply
from einmpi.kernels.updates import compute_in_place
from einmpi.runtime.backend import PLACES, Array, Arrays, Backend, ComputeCall, Copy, HostArray
from einmpi.runtime.buffers import Buffers, PartBuffers
from einmpi.schedule.blocked_updates import ScatteredRows
from einmpi.schedule.compute import Compute, Kernel, KernelTile, Tile, box_of, fused
from einmpi.schedule.passes import with_groups_in_tile
from einmpi.schedule.regions import Region, Slot, boxes, indices, packed, shape, whole
from einmpi.schedule.steps import Step

CarryOut: TypeAlias = Callable[[Sequence[Step], Buffers], None]  # does steps on some buffers


def compute(step: Compute, buffers: Buffers, carry_out: CarryOut) -> None:
    """Compute the kernels of a step."""
    if step.is_plain:
        compute_kernel(step, buffers)
        return
    if step.tiles.bounds:
        compute(step.part, _part_buffers(step, buffers), carry_out)
        return
    if step.tiles.kind == "slow":
        _compute_out_of_core(step, buffers)
        return
    if step.tiles.kind == "scattered":
        _compute_scattered(step, buffers)
        return
    early = step.early_begins
    carry_out((*early, *step.reuse_steps), buffers)
    made = [slot for slot in step.writes if slot.name not in buffers]
    nbytes = _by_implementation(step, buffers)
    if nbytes is None and step.tiles.kind == "memory":
        nbytes = _compute_tiles(step, _arrays_of(step, buffers), buffers.backend, carry_out)
    if nbytes is not None:
        buffers.grow(nbytes)
        buffers.shrink(nbytes)
        for slot in step.frees:
            buffers.free(slot)
    else:
        for slot in made:  # one by one they need not be there all the time
            buffers.free(slot)
        carry_out(step.one_by_one, buffers)
    carry_out(step.begins[len(early) :], buffers)


def compute_kernel(step: Compute, buffers: Buffers) -> None:
    """Compute a step that is nothing but one kernel, on whole slots."""
    (kernel,) = step.kernels
    operands = [buffers[slot] for slot in kernel.operands]
    target = buffers.make(kernel.target)
    backend = buffers.backend
    if kernel.part or id(target) not in map(id, operands):
        backend.compute_kernel(kernel, operands, target)
    elif _ask_implementations(step, _arrays_of(step, buffers), backend) is None:
        compute_in_place(kernel, operands, target, backend.to_host, backend.compute_kernel)


def _arrays_of(step: Compute, buffers: Buffers) -> dict[str, Array]:
    """Return the arrays of the slots of a step by name, once their values are there."""
    arrays = {slot.name: buffers.make(slot) for slot in step.writes}
    for slot in step.reads:
        arrays[slot.name] = buffers[slot]
    return arrays


def _part_buffers(step: Compute, buffers: Buffers) -> PartBuffers:
    """Return views of the parts of slots that a step uses."""
    arrays = _arrays_of(step, buffers)
    views = {}
    for view in step.views:
        views[view.name] = arrays[view.slot.name][(*view.place(step.tiles.bounds), ...)]
    return PartBuffers(buffers, views)


# ---- implementations -----------------------------------------------------------------------------


def _by_implementation(step: Compute, buffers: Buffers) -> int | None:
    """Compute a step by an implementation of the backend; return the bytes it took besides.

    Return None, with nothing computed, if there is none.
    """
    target = step.writes[-1]
    if step.replaced is None or target.name in buffers or target.name in buffers.shared.arrays:
        return _ask_implementations(step, _arrays_of(step, buffers), buffers.backend)
    arrays = {slot.name: buffers[slot] for slot in step.reads}
    arrays[target.name] = arrays[step.replaced.name]
    nbytes = _ask_implementations(step, arrays, buffers.backend)
    if nbytes is not None:
        buffers.hand_over(step.replaced, target)
    return nbytes


def _ask_implementations(step: Compute, arrays: Arrays, backend: Backend) -> int | None:
    """Do the same on arrays of all slots of the step, by name."""
    for call in prepared_calls(step, arrays, backend):
        nbytes = call(arrays)
        if nbytes is not None:
            return nbytes
    return None


def prepared_calls(step: Compute, arrays: Arrays, backend: Backend) -> Sequence[ComputeCall]:
    """Return the implementations of a step for arrays that are stored as these are."""

    def prepare() -> list[ComputeCall]:
        found = []
        for implementation in backend.implementations:
            call = implementation(step, arrays)
            if call is not None:
                found.append(call)
        return found

    calls: Sequence[ComputeCall] = backend.calls.get(step, backend.key_of(arrays), prepare)
    return calls


# ---- tiles in memory -----------------------------------------------------------------------------

MIN_ROWS_OF_THREAD = 64  # of a tile: with fewer, a matrix product takes longer than by all threads


def _compute_tiles(step: Compute, arrays: Arrays, backend: Backend, carry_out: CarryOut) -> int:
    """Compute all tiles on views of whole arrays; return the most bytes that inner slots took."""
    compute_tiles = partial(_compute_tiles_of_thread, arrays, carry_out)
    workers = backend.one_thread_backends
    smaller_step = backend.calls.get(step, len(workers), partial(_cut_for, step, len(workers)))
    if smaller_step is None:
        return compute_tiles(backend, step, _SharedTiles(step))
    tiles = _SharedTiles(smaller_step)
    compute_share = partial(compute_tiles, step=smaller_step, tiles=tiles)
    with one_blas_thread():  # each of the threads calls BLAS, whose own threads would disturb them
        shares = [pool(len(workers)).submit(compute_share, worker) for worker in workers]
        try:
            return sum(share.result() for share in shares)
        finally:
            # After an error or Ctrl-C the threads need not go on, but must not write any more
            # when the memory of this run is used for another one.
            tiles.stop()
            wait(shares)


class _SharedTiles:
    """The tiles of a step, of which each thread takes the next ones when it has done some.

    Those that add to the same results are done one after another by one thread.
    """

    def __init__(self, step: Compute) -> None:
        together: dict[Tile, list[Tile]] = {}
        for tile in step.all_tiles():
            place = tuple(tile[row] for row in step.rows_of_all_results)
            together.setdefault(place, []).append(tile)
        self.remaining: Iterator[list[Tile]] = iter(together.values())
        self.lock = Lock()

    def stop(self) -> None:
        """Leave out the tiles that no thread has taken yet."""
        with self.lock:
            self.remaining = iter(())

    def __iter__(self) -> Iterator[list[Tile]]:
        return self

    def __next__(self) -> list[Tile]:
        with self.lock:
            return next(self.remaining)


def _compute_tiles_of_thread(
    arrays: Arrays, carry_out: CarryOut, backend: Backend, step: Compute, tiles: _SharedTiles
) -> int:
    """Compute the tiles that a thread takes; return the most bytes that its inner slots took."""
    inside = Buffers(backend)
    shared_bytes = inside.bytes_in_use  # which the run has counted already
    for together in tiles:
        for tile in together:
            prepare = partial(_steps_of_tile, step, tile, backend)
            steps = backend.calls.get(step, step.kind_of_tile(tile), prepare)
            for view in step.views:
                inside.arrays[view.name] = arrays[view.slot.name][(*view.place(tile), ...)]
            try:
                carry_out(steps, inside)
            except BaseException:
                tiles.stop()
                raise
    return inside.peak - shared_bytes


def _steps_of_tile(step: Compute, tile: Tile, backend: Backend) -> tuple[Step, ...]:
    """Return the steps of a tile, grouped as the backend computes them best."""
    return with_groups_in_tile(step.steps_of_tile(tile), backend.fusions)


def _cut_for(step: Compute, threads: int) -> Compute | None:
    """Return a step with tiles so small that threads can compute one each in the same memory.

    None if the threads should rather compute one tile together.
    """
    free_rows = step.rows_of_all_results
    if threads == 1 or not free_rows:
        return None
    if step.combines_tiles:
        return _cut_sums_for(step, threads)
    block = list(step.tiles.block)
    for row in free_rows[:-1]:  # batches come first, then rows of matrices
        if block[row] >= threads:
            block[row] //= threads
            return _with_block(step, block)
    if block[free_rows[-1]] < threads * MIN_ROWS_OF_THREAD:
        return None
    block[free_rows[-1]] //= threads
    return _with_block(step, block)


def _with_block(step: Compute, block: Sequence[int]) -> Compute:
    rows = step.tiles.rows
    return fused(step.kernels, step.inner, rows, tuple(block))


def _cut_sums_for(step: Compute, threads: int) -> Compute | None:
    """Return a step whose tiles add to results, with smaller tiles; None as in `_cut_for`.

    Threads have different results, so there must be enough of these. Each thread has memory for
    what its tile adds, so tiles may have to be smaller still.
    """
    extent = step.kernels[0].einsum.extent
    block = step.tiles.block
    places = 1
    cut_row = 0
    for row, labels in enumerate(step.tiles.rows):
        if row in step.rows_of_all_results:
            places *= -(-extent[labels[0]] // block[row])
        elif block[row] < extent[labels[0]]:
            cut_row = row
    if places < threads:
        return None
    size = block[cut_row] // threads
    while size >= MIN_ROWS_OF_THREAD:
        smaller = _with_block(step, (*block[:cut_row], size, *block[cut_row + 1 :]))
        if threads * smaller.working_bytes <= step.working_bytes:
            return smaller
        size -= 1 + size // 8
    return None


# ---- tiles from the slow tier --------------------------------------------------------------------

Fetched: TypeAlias = tuple[Array, list[Copy]]  # an array, and the copies that fill it


def _compute_out_of_core(step: Compute, buffers: Buffers) -> None:
    """Compute a kernel tile by tile, from operands that have their values to the slow tier.

    The next tile is fetched while one is computed, if there is memory for both.
    """
    with ExitStack() as stack:
        memory = _TilesInMemory(step, buffers, stack)
        following = step.all_tiles()
        tile = next(following)
        operands = memory.fetch(tile)
        for after in following:
            is_complete = step.is_first(0, after)
            if step.tiles.ahead:
                operands_after = memory.fetch(after)
                memory.compute_tile(tile, operands, is_complete)
            else:
                memory.compute_tile(tile, operands, is_complete)
                operands_after = memory.fetch(after)
            tile = after
            operands = operands_after
        memory.compute_tile(tile, operands, is_complete=True)
        memory.finish()


class _TilesInMemory:
    """The tiles in memory: of each operand the one in use, and the next one if there is room."""

    def __init__(self, step: Compute, buffers: Buffers, stack: ExitStack) -> None:
        self.step = step
        (self.kernel,) = step.kernels
        self.buffers = buffers
        self.sources = [buffers[slot] for slot in self.kernel.operands]
        self.copied = [k for k in range(len(self.sources)) if k not in step.tiles.inside]
        count = 2 if step.tiles.ahead else 1
        self.operand_buffers = [_TileBuffers(buffers, stack, count) for _ in self.sources]
        self.result_buffers = _TileBuffers(buffers, stack, count)
        self.partial_buffer = _TileBuffers(buffers, stack, 1)
        self.fetched: list[tuple[Region, Fetched] | None] = [None] * len(self.sources)
        self.target = buffers.slow[self.kernel.target.name]
        self.evicting: dict[int, Copy] = {}  # the copy of each of the result buffers
        self.last_copy: Copy | None = None
        self.result: Array = None

    def _at(self, tile: Tile) -> KernelTile:
        return self.step.kernel_at(0, tile, self.copied)

    def fetch(self, tile: Tile) -> list[Fetched]:
        """Begin to copy what the tile needs and is not there."""
        regions = self._at(tile).operands
        return [self._fetch_operand(number, region) for number, region in enumerate(regions)]

    def _fetch_operand(self, number: int, region: Region) -> Fetched:
        source = self.sources[number]
        if number not in self.copied:
            return source[(*box_of(region), ...)], []
        known = self.fetched[number]
        if known is not None and known[0] == region:
            return known[1]
        array = self.operand_buffers[number].next(shape(region), self.kernel.operands[number].dtype)
        self.buffers.fetched += array.nbytes
        copies = []
        for there, here in boxes(region, packed(region)):
            copy = self.buffers.backend.begin_copy(source[(*there, ...)], array[(*here, ...)])
            copies.append(copy)
        self.fetched[number] = region, (array, copies)
        return array, copies

    def compute_tile(self, tile: Tile, operands: list[Fetched], is_complete: bool) -> None:
        """Compute a tile, and begin to copy the result out if its part is complete."""
        backend = self.buffers.backend
        dtype = self.kernel.target.dtype
        for _, copies in operands:
            for copy in copies:
                copy.join()
            copies.clear()
        arrays = [array for array, _ in operands]
        own = self._at(tile)
        # The same object for all tiles that are alike: calls are prepared once.
        kernel = backend.calls.get(self.step, self.step.kind_of_tile(tile), lambda: own.kernel)
        extents = shape(own.target)
        if self.step.is_first(0, tile):
            self.result = self.result_buffers.next(extents, dtype)
            if self.result_buffers.turn in self.evicting:
                self.evicting.pop(self.result_buffers.turn).join()
            backend.compute_kernel(kernel, arrays, self.result)
        else:
            partial_result = self.partial_buffer.next(extents, dtype)
            backend.compute_kernel(kernel, arrays, partial_result)
            aggregation = kernel.einsum.required_aggregation
            everything = tuple(map(whole, extents or (1,)))
            backend.unpack(partial_result.reshape(-1), self.result, everything, aggregation)
        if is_complete:
            target = self.target[(*box_of(own.target), ...)]
            self.last_copy = backend.begin_copy(self.result, target)
            self.evicting[self.result_buffers.turn] = self.last_copy

    def finish(self) -> None:
        """Wait until the buffers are free. Whoever reads the target waits for the last copy."""
        for copy in self.evicting.values():
            copy.join()
        assert self.last_copy is not None
        self.buffers.evicting[self.kernel.target.name] = self.last_copy


class _TileBuffers:
    """Buffers for the tiles of one tensor, used in turn.

    They are as large as the first tile, which is the largest.
    """

    def __init__(self, buffers: Buffers, stack: ExitStack, count: int) -> None:
        self.buffers = buffers
        self.stack = stack
        self.count = count
        self.arrays: list[Array] = []
        self.turn = -1
        self.largest = 0

    def next(self, extents: tuple[int, ...], dtype: str) -> Array:
        """Return the buffer whose turn it is, in the shape of a tile."""
        size = prod(extents)
        self.largest = self.largest or size
        self.turn = (self.turn + 1) % self.count
        if self.turn == len(self.arrays):
            array = self.buffers.backend.allocate((self.largest,), dtype)
            self.arrays.append(self.stack.enter_context(self.buffers.counted(array)))
        return self.arrays[self.turn][:size].reshape(extents)


# ---- rows that values are scattered to -----------------------------------------------------------


def _compute_scattered(step: Compute, buffers: Buffers) -> None:
    """Add up the values of each row that gets any, and update these rows, block by block."""
    backend = buffers.backend
    rows = backend.calls.get(step, "rows", lambda: ScatteredRows(*step.kernels))
    target = buffers.make(rows.update.target)
    old = buffers[rows.update.operands[rows.form.old]]
    if old is not target:
        target[...] = old
    places = _places(rows.product, buffers)
    changes_all = _changes_without_values(rows, buffers)
    if not changes_all:
        arrays = {**_arrays_of(step, buffers), PLACES: places}
        if _ask_implementations(step, arrays, backend) is not None:
            return
    product, update = rows.block_kernels
    product_operands = [buffers[slot] for slot in rows.product.operands]
    update_operands = [_array_or_none(buffers, slot) for slot in rows.update.operands]
    dtype = rows.product.target.dtype
    changed_dtype = rows.update.target.dtype
    every = (slice(None),) * rows.dimension
    with (
        buffers.counted(backend.allocate(rows.block_shape, dtype)) as sums,
        buffers.counted(backend.allocate(rows.block_shape, changed_dtype)) as changed,
        buffers.counted(backend.allocate(places.shape, "int64")) as block_places,
    ):
        update_operands[rows.form.change] = sums
        update_operands[rows.form.old] = changed
        for numbers, place in _blocks_of_rows(rows, places, changes_all):
            backend.from_host(place, block_places)
            backend.compute_kernel(product, [*product_operands, block_places], sums)
            own = backend.allocate(numbers.shape, "int64")
            backend.from_host(numbers, own)
            used = changed[(*every, slice(0, len(numbers)))]
            used[...] = target[(*every, own)]
            backend.compute_kernel(update, update_operands, changed)
            target[(*every, own)] = used


def _array_or_none(buffers: Buffers, slot: Slot) -> Array:
    return buffers[slot] if slot.name in buffers else None


def _places(kernel: Kernel, buffers: Buffers) -> HostArray:
    """Return the row of this rank that each value goes to; others are none of its rows."""
    segments = kernel.einsum.required_segments
    needed = operands_read(segments.indices, segments.operands)
    operands: list[Any] = []
    for number, slot in enumerate(kernel.operands):
        operands.append(buffers.backend.to_host(buffers[slot]) if number in needed else None)
    for operand, dimension, runs in kernel.select:
        if operands[operand] is not None:
            operands[operand] = np.take(operands[operand], indices(runs), axis=dimension)
    index = {label: indices(runs) for label, runs in kernel.index}
    (places,) = scatter_places(Scatter(kernel.einsum, segments, tuple(operands), index))
    return np.asarray(places)


def _blocks_of_rows(
    step: ScatteredRows, places: HostArray, changes_all: bool
) -> Iterator[tuple[HostArray, HostArray]]:
    """Yield the rows of each block, and to which of these rows values go.

    These are the rows that get values. Only if the others change too, as by 0 × inf, all rows.
    """
    extent = step.product.target.shape[step.dimension]
    if changes_all:
        for start in range(0, extent, step.rows):
            yield np.arange(start, min(start + step.rows, extent)), places - start
        return
    changed = changed_rows(places, extent)
    rows = changed.rows
    flat_numbers = np.full(places.size, -1)
    flat_numbers[changed.order] = np.repeat(np.arange(len(rows)), np.diff(changed.starts))
    numbers = flat_numbers.reshape(places.shape)
    for start in range(0, len(rows), step.rows):
        yield rows[start : start + step.rows], numbers - start


def _changes_without_values(step: ScatteredRows, buffers: Buffers) -> bool:
    """Return whether the update changes a row whose sums are 0, if only the sign of a zero."""
    form = step.form
    values: list[Any] = [None] * len(step.update.operands)
    for node in walk(form.multiple):
        if isinstance(node, Arg) and node.position != form.change:
            array = buffers[step.update.operands[node.position]]
            values[node.position] = np.asarray(buffers.backend.to_host(array)).reshape(())
    values[form.change] = np.zeros((), step.product.target.dtype)
    negative_zero = -np.zeros((), step.update.target.dtype)
    with np.errstate(all="ignore"):
        multiple = apply(form.multiple, values, {})
        is_added = form.operation == "+"
        result = negative_zero + multiple if is_added else negative_zero - multiple
    result = np.asarray(result).astype(step.update.target.dtype)
    return bool(result.tobytes() != negative_zero.tobytes())
