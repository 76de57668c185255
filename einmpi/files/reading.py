"""Read a tensor from a file to the ranks of a layout: each element once, in large pieces."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.comm.base import ALONE, Comm
from einmpi.errors import InputError
from einmpi.files.datasets import Array, Dataset, DType, Reader, check_unchanged
from einmpi.files.formats import find, find_sparse, open_reader
from einmpi.files.specs import InputSpec, Range
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.eingraph import StoredForm
from einmpi.process.startup import LOADING_GENERATORS, first_use
from einmpi.schedule.layout import Layout, on_one_rank
from einmpi.schedule.regions import Box, Region, boxes, sides
from einmpi.schedule.shared_reads import Bounds, shared_read
from einmpi.special_functions import special_function

Cells: TypeAlias = dict[int, tuple[Bounds, Array]]
# For each dimension: runs of the tensor, each with its place in the target.
Sides: TypeAlias = list[list[tuple[slice, slice]]]


class Reading:
    """A tensor that is being read into `target`.

    If the blocks of the layout suit the file, each rank reads its own. Otherwise all ranks of the
    layout read cells in the order of the file, round by round, and pass them on.
    """

    def __init__(
        self,
        dataset: Dataset,
        layout: Layout,
        rank: int,
        target: Array,
        region: Region,
        place: Region,
    ) -> None:
        self.dataset = dataset
        self.rank = rank
        self.target = target
        self.region = region
        self.place = place
        self.ranges = dataset.ranges()  # one for each dimension of the file
        self.is_number = not dataset.selected_shape
        if self.is_number:  # it is read as a vector of one element
            self.target = target.reshape(1)
        if dataset.fortran:  # with its dimensions reversed it is stored like any other
            self.ranges = self.ranges[::-1]
            self.region = region[::-1]
            self.place = place[::-1]
            self.target = target.T
        self.spans: Sides = []
        for runs, places in zip(self.region, self.place, strict=True):
            self.spans.append(sides(runs, places))
        self.shared = shared_read(layout, stored_form(dataset))
        self.reader: Reader | None = None
        self.pending: Future[Any] | None = None
        self.failure: Exception | None = None  # the first of this rank
        # One buffer is read into while the cells in the other are passed on.
        self.buffers: list[Array | None] = [None, None]

    @property
    def alone(self) -> bool:
        """Return whether each rank reads its own block, without the others."""
        return self.shared is None

    def begin(self, background: Executor) -> None:
        """Start to read in the background: everything, or the first round."""
        if self.shared is None:
            self.pending = background.submit(self._read_own_block)
        else:
            self.pending = background.submit(self._read_cells, 0)

    def finish(self, comm: Comm, background: Executor | None = None) -> None:
        """Read and pass on what is left. All ranks of the layout call it.

        A rank that cannot read its file still passes messages on, and raises its error in the end.
        """
        try:
            if self.shared is not None:
                assert background is not None
                self._read_together(comm, background)
            elif self.pending is not None:
                self.pending.result()
            else:
                self._read_own_block()
            if self.reader is not None:
                check_unchanged(self.dataset)
        finally:
            self.close()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Wait for the background, whatever comes of it, and close the file."""
        if self.pending is not None and not self.pending.cancel():
            self.pending.exception()
        if self.reader is not None:
            self.reader.close()
            self.reader = None

    # ---- from the file --------------------------------------------------------------------------

    def _read_own_block(self) -> None:
        for there, here in boxes(self.region, self.place):
            bounds = tuple((side.start, side.stop) for side in there)
            self._read_box(bounds, self.target, here)

    def _read_cells(self, turn: int) -> Cells:
        """Read this rank's cells of a round.

        A cell that is contiguous in the target is read there, any other into a buffer.
        """
        assert self.shared is not None
        grid = self.shared.grid
        cells: Cells = {}
        start = 0
        for number in self.shared.cells_read(self.rank, turn):
            bounds = grid.bounds(number)
            extents = tuple(last - first for first, last in bounds)
            places = _places_in_target(self.spans, bounds)
            array = self.target[:0]
            if len(places) == 1:
                array = self.target[places[0]]
            if array.shape != extents or not array.flags.c_contiguous:
                buffer = self._buffer(turn)
                array = buffer[start : start + prod(extents)].reshape(extents)
                start += array.size
            self._read_box(bounds, array, (slice(None),) * array.ndim)
            cells[number] = bounds, array
        return cells

    def _buffer(self, turn: int) -> Array:
        """Return the buffer of a round, made when it is first needed."""
        assert self.shared is not None
        buffer = self.buffers[turn % 2]
        if buffer is None:
            size = self.shared.cells_per_round * prod(self.shared.grid.cell)
            buffer = np.empty(size, self.dataset.dtype)
            self.buffers[turn % 2] = buffer
        return buffer

    def _read_box(self, bounds: Bounds, target: Array, here: tuple[slice, ...]) -> None:
        """Read a box, unless an earlier one could not be read."""
        if self.failure is not None:
            return
        try:
            self._read_from_file(bounds, target, here)
        except Exception as error:
            self.failure = error

    def _read_from_file(self, bounds: Bounds, target: Array, here: tuple[slice, ...]) -> None:
        if self.reader is None:
            self.reader = open_reader(self.dataset)
        if self.is_number:  # all dimensions of the file are dropped
            bounds, target, here = (), target.reshape(()), ()
        _read_ranges(self.reader, self.ranges, bounds, target, here)

    # ---- together -------------------------------------------------------------------------------

    def _read_together(self, comm: Comm, background: Executor) -> None:
        assert self.shared is not None
        if self.pending is None:
            self.begin(background)
        for turn, coming in enumerate(self.shared.cells_needed(self.rank)):
            assert self.pending is not None
            cells = self.pending.result()
            if turn + 1 < self.shared.rounds:
                self.pending = background.submit(self._read_cells, turn + 1)
            self._pass_on(turn, cells, coming, comm)

    def _pass_on(self, turn: int, cells: Cells, coming: dict[int, list[int]], comm: Comm) -> None:
        """Send cells to the ranks that need them.

        Each rank sends to the one `shift` after it while it receives from the one `shift` before.
        """
        assert self.shared is not None
        rank = self.rank
        ranks = self.shared.ranks
        going = self.shared.cells_to_send(rank, turn)
        shifts = {(user - rank) % ranks for user in going}
        shifts |= {(rank - source) % ranks for source in coming}
        for shift in sorted(shifts):
            to = (rank + shift) % ranks
            source = (rank - shift) % ranks
            sent: list[Array] = []
            for number, region in going.get(to, ()):
                bounds, array = cells[number]
                sent.extend(_runs_in_cell(bounds, array, region))
            received: list[Array] = []
            for number in coming.get(source, ()):
                places = _places_in_target(self.spans, self.shared.grid.bounds(number))
                received.extend(self.target[box] for box in places)
            if shift == 0:
                _copy_each(sent, received)
            else:
                self._exchange(turn, sent, to, received, source, comm)

    def _exchange(
        self, turn: int, sent: list[Array], to: int, received: list[Array], source: int, comm: Comm
    ) -> None:
        """Send arrays as one message and receive others, packed only if they are not contiguous."""
        outgoing = _as_one_run(sent, self.target, self.buffers[turn % 2])
        if outgoing is None:
            outgoing = np.concatenate([array.reshape(-1) for array in sent])
        incoming = _as_one_run(received, self.target)
        is_packed = incoming is None
        if incoming is None:
            incoming = np.empty(sum(array.size for array in received), self.target.dtype)
        comm.sendrecv(to if sent else None, outgoing, source if received else None, incoming)
        if is_packed:
            start = 0
            for place in received:
                place[...] = incoming[start : start + place.size].reshape(place.shape)
                start += place.size


def read_selected_box(
    reader: Reader, dataset: Dataset, there: Box, target: Array, here: Box
) -> None:
    """Read a box of what is selected of an open dataset, which has dimensions."""
    ranges = dataset.ranges()
    bounds = tuple((side.start, side.stop) for side in there)
    if dataset.fortran:  # with its dimensions reversed it is stored like any other
        ranges = ranges[::-1]
        bounds = bounds[::-1]
        here = here[::-1]
        target = target.T
    _read_ranges(reader, ranges, bounds, target, here)


def _read_ranges(
    reader: Reader, ranges: Sequence[Range], bounds: Bounds, target: Array, here: Box
) -> None:
    """Read a box, given what is selected along each dimension in the order of the file."""
    there = []  # both boxes have the dimensions of the file
    places = []
    dropped = []
    sides_left = iter(zip(bounds, here, strict=True))
    for number, selected in enumerate(ranges):
        if selected.dropped:
            there.append(selected.in_file(0, 1))
            places.append(slice(0, 1))
            dropped.append(number)
        else:
            (start, stop), place = next(sides_left)
            there.append(selected.in_file(start, stop))
            places.append(place)
    if dropped:
        target = np.expand_dims(target, tuple(dropped))
    reader.read(tuple(there), target, tuple(places))


def _copy_each(sources: list[Array], targets: list[Array]) -> None:
    for source, target in zip(sources, targets, strict=True):
        if source.ctypes.data != target.ctypes.data:  # otherwise it was read to its place
            target[...] = source


def _runs_in_cell(bounds: Bounds, array: Array, region: Region) -> list[Array]:
    """Return the runs of a region of the tensor that are in a cell, as views of its array."""
    slices = []
    for runs, (first, _) in zip(region, bounds, strict=True):
        slices.append([slice(start - first, stop - first) for start, stop in runs])
    return [array[box] for box in itertools.product(*slices)]


def _places_in_target(spans: Sides, bounds: Bounds) -> list[tuple[slice, ...]]:
    """Return the places in the target of the runs that are in a cell, in the same order."""
    places = []
    for pairs, (first, last) in zip(spans, bounds, strict=True):
        side = []
        for there, here in pairs:
            start = max(there.start, first)
            stop = min(there.stop, last)
            if start < stop:
                shift = here.start - there.start
                side.append(slice(start + shift, stop + shift))
        places.append(side)
    return list(itertools.product(*places))


def _as_one_run(pieces: list[Array], *arrays: Array | None) -> Array | None:
    """Return adjacent pieces as one run of the array that holds them, so that nothing is copied.

    Return None if they are not adjacent.
    """
    if not pieces:
        return np.empty(0, np.uint8)
    start = pieces[0].ctypes.data
    end = start
    for piece in pieces:
        if not piece.flags.c_contiguous or piece.ctypes.data != end:
            return None
        end += piece.nbytes
    for array in arrays:
        if array is None or not array.flags.c_contiguous:
            continue
        first = array.ctypes.data
        if first <= start and end <= first + array.nbytes:
            flat = array.reshape(-1)
            return flat[(start - first) // flat.itemsize : (end - first) // flat.itemsize]
    return None


def stored_form(dataset: Dataset) -> StoredForm:
    """Return how a tensor is stored, in its own dimensions and indices.

    With steps this is only about right, which decides how fast a file is read, and nothing else.
    """
    chunks: list[int] = []
    first = []
    for dimension, selected in enumerate(dataset.ranges()):
        if not selected.dropped:
            first.append(selected.first // selected.step)
            if dataset.chunks is not None:
                chunks.append(max(1, dataset.chunks[dimension] // selected.step))
    itemsize = dataset.dtype.itemsize
    if not first:
        return StoredForm(itemsize, None, (0,))
    in_chunks = None if dataset.chunks is None else tuple(chunks)
    return StoredForm(itemsize, in_chunks, tuple(first), dataset.fortran)


# ---- generate ------------------------------------------------------------------------------------
#
# Generate the values of inputs.
#
# An element depends on the spec and on its number, never on how the tensor is cut.


Words: TypeAlias = npt.NDArray[np.uint64]
# (spec, dtype, first element, element after the last) → the elements.
Generator: TypeAlias = Callable[[InputSpec, DType, int, int], Array]

CHUNK_ELEMENTS = 2**20  # generated at a time, so that temporary arrays take a few dozen MiB
SPARE_ELEMENTS = 2**12  # generating so many that are not used takes no longer than one more call


def generate(spec: InputSpec, dtype: str, start: int, stop: int) -> Array:
    """Return the elements [start, stop) of the tensor in row-major order."""
    assert spec.random is not None and 0 <= start <= stop
    generator = GENERATORS[spec.random]
    target = np.dtype(dtype)
    wider = DTYPES[target.name].file_dtype
    if wider != target.name:
        return _rounded(generate(spec, wider, start, stop), target, spec)
    with np.errstate(over="ignore"):  # arange in float16 reaches infinity
        return generator(spec, target, start, stop)


def _rounded(values: Array, dtype: DType, spec: InputSpec) -> Array:
    """Round values to a dtype that files do not have."""
    rounded = values.astype(dtype)
    if spec.random == "uniform":  # rounding may reach `high`, which is excluded
        high = dtype.type(spec.high)
        rounded[rounded >= high] = np.nextafter(high, dtype.type(spec.low))
    return rounded


# ---- boxes --------------------------------------------------------------------------------------


def fill_box(spec: InputSpec, bound: Sequence[int], there: Box, target: Array) -> None:
    """Put the elements of a box of the tensor into an array of the box's shape."""
    if not target.size:
        return
    if spec.value is not None:
        target[...] = spec.value
        return
    # The last dimension that is not taken whole, with all dimensions after it, is one row.
    row_dimension = 0
    for dimension, (side, extent) in enumerate(zip(there, bound, strict=True)):
        if side != slice(0, extent):
            row_dimension = dimension
    row = prod(bound[row_dimension:])
    inner = prod(bound[row_dimension + 1 :])
    first = 0
    last = 1
    if bound:
        first = there[row_dimension].start * inner
        last = there[row_dimension].stop * inner
    name = target.dtype.name
    if row_dimension == 0:
        _fill_run(spec, name, first, target)
        return
    # Short rows of which almost all is wanted are generated whole, many at once.
    whole_rows = row <= CHUNK_ELEMENTS and row - (last - first) <= SPARE_ELEMENTS
    rows_at_once = CHUNK_ELEMENTS // row if whole_rows else 1
    for position in np.ndindex(target.shape[: row_dimension - 1]):
        first_row = 0
        for index, extent, side in zip((*position, 0), bound, there, strict=False):
            first_row = first_row * extent + side.start + index
        for done in range(0, target.shape[row_dimension - 1], rows_at_once):
            rows = target[position][done : done + rows_at_once]
            begin = (first_row + done) * row
            if whole_rows:
                values = generate(spec, name, begin, begin + len(rows) * row)
                wanted = values.reshape(len(rows), row)[:, first:last]
                rows[...] = wanted.reshape(rows.shape)
            else:
                _fill_run(spec, name, begin + first, rows)


def _fill_run(spec: InputSpec, name: str, first: int, target: Array) -> None:
    """Generate consecutive elements.

    A large array is filled in parts: where memory is short, it is mapped from a file.
    """
    if target.size <= CHUNK_ELEMENTS:
        target[...] = generate(spec, name, first, first + target.size).reshape(target.shape)
    elif len(target) == 1:
        _fill_run(spec, name, first, target[0])
    else:
        half = len(target) // 2
        _fill_run(spec, name, first, target[:half])
        _fill_run(spec, name, first + half * target[0].size, target[half:])


# ---- distributions ------------------------------------------------------------------------------


def words(seed: int, start: int, stop: int) -> Words:
    """Return the random 64-bit words [start, stop) of the stream of a seed.

    Philox is a counter that gives four words a step, so it can start anywhere.
    """
    stream = np.random.Philox(key=seed)
    stream.advance(start // 4)
    found: Words = stream.random_raw(stop - start // 4 * 4)
    return found[start % 4 :]


def _from_words(
    convert: Callable[[InputSpec, DType, Words], Array],
) -> Generator:
    """Return a generator that takes one word for a real number and two for a complex one."""

    def generator(spec: InputSpec, dtype: DType, start: int, stop: int) -> Array:
        if dtype.kind != "c":
            return convert(spec, dtype, words(spec.seed, start, stop))
        part = np.dtype(f"f{dtype.itemsize // 2}")
        return convert(spec, part, words(spec.seed, 2 * start, 2 * stop)).view(dtype)

    return generator


def _normal(spec: InputSpec, dtype: DType, word: Words) -> Array:
    with first_use(LOADING_GENERATORS):
        ndtri = special_function("ndtri")
    # 52 bits plus a half are exact, so this is never 0 or 1, where the inverse is infinite.
    values: Array = ndtri(((word >> 12) + 0.5) * 2.0**-52)
    return values.astype(dtype)


def _uniform(spec: InputSpec, dtype: DType, word: Words) -> Array:
    if dtype.kind == "b":
        return (word & np.uint64(1)).astype(dtype)
    if dtype.kind in "iu":
        # Unsigned arithmetic wraps around, so the widest range works too.
        offset = word % np.uint64(int(spec.high) - int(spec.low))
        return (offset + np.uint64(int(spec.low) % 2**64)).astype(dtype)
    fraction = (word >> 11) * 2.0**-53
    values = (spec.low * (1.0 - fraction) + spec.high * fraction).astype(dtype)
    # Rounding may reach `high`, which is excluded.
    below_high = np.nextafter(dtype.type(spec.high), dtype.type(spec.low))
    clipped: Array = np.clip(values, dtype.type(spec.low), below_high)
    return clipped


GENERATORS: dict[str, Generator] = {
    "normal": _from_words(_normal),
    "uniform": _from_words(_uniform),
    "zeros": lambda _, dtype, start, stop: np.zeros(stop - start, dtype),
    "ones": lambda _, dtype, start, stop: np.ones(stop - start, dtype),
    "arange": lambda _, dtype, start, stop: np.arange(start, stop, dtype=np.int64).astype(dtype),
}


# ---- load ----------------------------------------------------------------------------------------
#
# Describe and load whole inputs, generated or from files.


def describe(spec: InputSpec) -> InputSpec:
    """Return an input in a file with its shape, its dtype, and how it is sparse, if it is.

    None of its elements is read, but of a text without a header.
    """
    if spec.declared_shape is not None and spec.declared_dtype is not None and is_missing(spec):
        dtype = spec.convert or spec.declared_dtype
        return replace(spec, shape=spec.declared_shape, dtype=dtype)
    sparse = find_sparse(spec)
    if sparse is not None:
        return replace(
            spec,
            shape=sparse.shape,
            dtype=spec.convert or sparse.dtype.name,
            key_dimensions=sparse.key_dimensions,
            stored=sparse.stored,
            implicit=sparse.implicit,
        )
    if spec.implicit is not None:
        what = f"{spec.name} is dense, and has no implicit value"
        raise InputError(spec.place, what, "a sparse tensor")
    found = find(spec)
    return replace(spec, shape=found.selected_shape, dtype=found.dtype.name)


def has_dataset(spec: InputSpec) -> bool:
    """Return whether an input is a dense tensor in a file that exists."""
    return spec.file is not None and not spec.key_dimensions and not is_missing(spec)


def decoded_bytes(spec: InputSpec) -> int:
    """Return the memory that it takes to decode a chunk of an input."""
    return find(spec).decoded if has_dataset(spec) else 0


def is_missing(spec: InputSpec) -> bool:
    """Return whether the file of an input does not exist yet."""
    return spec.file is not None and not os.path.lexists(spec.file)


def rows_of_chunks(spec: InputSpec) -> int:
    """Return how many rows of an input are stored together; 1 where it has no chunks."""
    return rows_of_chunks_in(find(spec)) if has_dataset(spec) else 1


def rows_of_chunks_in(dataset: Dataset) -> int:
    """Return how many rows of what is selected of a dataset are stored together."""
    if dataset.chunks is None:
        return 1
    for chunk, selected in zip(dataset.chunks, dataset.ranges(), strict=True):
        if not selected.dropped:
            return max(1, chunk // selected.step)
    return 1


def find_planned(spec: InputSpec, shape: tuple[int, ...], dtype: str) -> Dataset:
    """Look up an input; raise InputError if it lacks the shape and dtype of the plan."""
    found = find(spec)
    if found.selected_shape != tuple(shape) or found.dtype.name != dtype:
        raise InputError(
            spec.place,
            f"{spec.name} in {spec.file} is now {found.dtype.name}{list(found.selected_shape)}",
            f"{dtype}{list(shape)}, as planned",
        )
    return found


def load_array(spec: InputSpec, shape: tuple[int, ...], dtype: str) -> Array:
    """Return all elements of an input."""
    array = np.empty(shape, dtype)
    if spec.file is None:
        fill_box(spec, shape, tuple(slice(0, extent) for extent in shape), array)
        return array
    dataset = find_planned(spec, shape, dtype)
    layout = on_one_rank(tuple(shape) or (1,))
    region = layout.region(())
    Reading(dataset, layout, 0, array, region, region).finish(ALONE)
    return array
