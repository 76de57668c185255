"""Generate the values of inputs.

An element depends on the spec and on its number, never on how the tensor is cut.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.comm.base import ALONE
from einmpi.errors import InputError
from einmpi.files.datasets import Dataset
from einmpi.files.formats import find
from einmpi.files.reading import Reading
from einmpi.files.specs import InputSpec
from einmpi.graph.dtypes import DTYPES
from einmpi.process.startup import LOADING_GENERATORS, first_use
from einmpi.schedule.layout import on_one_rank
from einmpi.schedule.regions import Box
from einmpi.special_functions import special_function

Array: TypeAlias = npt.NDArray[Any]
DType: TypeAlias = np.dtype[Any]
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


def words(seed: int, start: int, stop: int) -> npt.NDArray[np.uint64]:
    """Return the random 64-bit words [start, stop) of the stream of a seed.

    Philox is a counter that gives four words a step, so it can start anywhere.
    """
    stream = np.random.Philox(key=seed)
    stream.advance(start // 4)
    found: npt.NDArray[np.uint64] = stream.random_raw(stop - start // 4 * 4)
    return found[start % 4 :]


def _from_words(
    convert: Callable[[InputSpec, DType, npt.NDArray[np.uint64]], Array],
) -> Generator:
    """Return a generator that takes one word for a real number and two for a complex one."""

    def generator(spec: InputSpec, dtype: DType, start: int, stop: int) -> Array:
        if dtype.kind != "c":
            return convert(spec, dtype, words(spec.seed, start, stop))
        part = np.dtype(f"f{dtype.itemsize // 2}")
        return convert(spec, part, words(spec.seed, 2 * start, 2 * stop)).view(dtype)

    return generator


def _normal(spec: InputSpec, dtype: DType, word: npt.NDArray[np.uint64]) -> Array:
    with first_use(LOADING_GENERATORS):
        ndtri = special_function("ndtri")
    # 52 bits plus a half are exact, so this is never 0 or 1, where the inverse is infinite.
    values: Array = ndtri(((word >> 12) + 0.5) * 2.0**-52)
    return values.astype(dtype)


def _uniform(spec: InputSpec, dtype: DType, word: npt.NDArray[np.uint64]) -> Array:
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


def _zeros(spec: InputSpec, dtype: DType, start: int, stop: int) -> Array:
    return np.zeros(stop - start, dtype)


def _ones(spec: InputSpec, dtype: DType, start: int, stop: int) -> Array:
    return np.ones(stop - start, dtype)


def _arange(spec: InputSpec, dtype: DType, start: int, stop: int) -> Array:
    return np.arange(start, stop, dtype=np.int64).astype(dtype)


GENERATORS: dict[str, Generator] = {
    "normal": _from_words(_normal),
    "uniform": _from_words(_uniform),
    "zeros": _zeros,
    "ones": _ones,
    "arange": _arange,
}


# ---- load ----------------------------------------------------------------------------------------
#
# Describe and load whole inputs, generated or from files.


def describe(spec: InputSpec) -> tuple[tuple[int, ...], str]:
    """Return the shape and dtype of an input without reading its elements."""
    if spec.file is None:
        assert spec.shape is not None and spec.dtype is not None
        return spec.shape, spec.dtype
    if spec.declared_shape is not None and spec.declared_dtype is not None and is_missing(spec):
        return spec.declared_shape, spec.convert or spec.declared_dtype
    found = find(spec)
    return found.selected_shape, found.dtype.name


def decoded_bytes(spec: InputSpec) -> int:
    """Return the memory that it takes to decode a chunk of an input."""
    return 0 if spec.file is None or is_missing(spec) else find(spec).decoded


def is_missing(spec: InputSpec) -> bool:
    """Return whether the file of an input does not exist yet."""
    return spec.file is not None and not os.path.lexists(spec.file)


def rows_of_chunks(spec: InputSpec) -> int:
    """Return how many rows of an input are stored together; 1 where it has no chunks."""
    if spec.file is None or is_missing(spec):
        return 1
    return rows_of_chunks_in(find(spec))


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


def load_array(spec: InputSpec, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
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
