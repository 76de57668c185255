"""The values of generated inputs: they depend on the spec and the element's number, never on how a tensor is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TypeAlias

import numpy as np

from einmpi.files.specs import InputSpec
from einmpi.graph.dtypes import DTYPES
from einmpi.schedule.regions import Box

CHUNK = 2**20  # elements at a time: temporaries stay at a few dozen MiB
SPARE = 2**12  # elements: to make them takes no longer than to begin once more
Maker: TypeAlias = Callable[[InputSpec, np.dtype, int, int], np.ndarray]


def generate(spec: InputSpec, dtype: str, start: int, stop: int) -> np.ndarray:
    """Elements [start, stop) of the tensor in row-major order."""
    assert spec.random is not None and 0 <= start <= stop
    make, target = GENERATORS[spec.random], np.dtype(dtype)
    wider = DTYPES[target.name].file_dtype
    if wider != target.name:  # generated in the dtype of files, then rounded
        return _rounded(generate(spec, wider, start, stop), target, spec)
    with np.errstate(over="ignore"):  # float16 counts up to infinity
        return make(spec, target, start, stop)


def _rounded(values: np.ndarray, dtype: np.dtype, spec: InputSpec) -> np.ndarray:
    found = values.astype(dtype)
    if spec.random == "uniform":  # rounding may reach `high`, which is outside
        found[found >= dtype.type(spec.high)] = np.nextafter(
            dtype.type(spec.high), dtype.type(spec.low)
        )
    return found


def fill_box(spec: InputSpec, bound: Sequence[int], there: Box, target: np.ndarray) -> None:
    """The elements of a box of the tensor, into an array of the box's shape."""
    if not target.size:
        return
    # Dimensions that are taken whole at the end are one with the last that is not: a row.
    cut = max(
        (d for d, (s, n) in enumerate(zip(there, bound, strict=True)) if s != slice(0, n)),
        default=0,
    )
    inner = prod(bound[cut + 1 :])
    first, last = (there[cut].start * inner, there[cut].stop * inner) if bound else (0, 1)
    row = prod(bound[cut:])
    name = target.dtype.name
    if cut == 0:
        _fill_run(spec, name, first, target)
        return
    # Short rows of which little is not wanted are made whole, many at once.
    whole = row <= CHUNK and row - (last - first) <= SPARE
    many = CHUNK // row if whole else 1
    for position in np.ndindex(target.shape[: cut - 1]):
        number = 0
        for k, extent, along in zip((*position, 0), bound, there, strict=False):
            number = number * extent + along.start + k
        for done in range(0, target.shape[cut - 1], many):
            rows = target[position][done : done + many]
            begin = (number + done) * row
            if whole:
                values = generate(spec, name, begin, begin + len(rows) * row)
                rows[...] = values.reshape(len(rows), row)[:, first:last].reshape(rows.shape)
            else:
                _fill_run(spec, name, begin + first, rows)


def _fill_run(spec: InputSpec, name: str, first: int, target: np.ndarray) -> None:
    """Elements in a row, from a number on. Large arrays in parts: they may lie in a file, for want of memory."""
    if target.size <= CHUNK:
        target[...] = generate(spec, name, first, first + target.size).reshape(target.shape)
    elif len(target) == 1:
        _fill_run(spec, name, first, target[0])
    else:
        half = len(target) // 2
        _fill_run(spec, name, first, target[:half])
        _fill_run(spec, name, first + half * target[0].size, target[half:])


def words(seed: int, start: int, stop: int) -> np.ndarray:
    """Random 64-bit words [start, stop) of the stream of a seed, made directly: Philox counts, four words a step."""
    stream = np.random.Philox(key=seed)
    stream.advance(start // 4)
    return stream.random_raw(stop - start // 4 * 4)[start % 4 :]


def _real(part: Callable[[InputSpec, np.dtype, np.ndarray], np.ndarray]) -> Maker:
    """A maker of real numbers from one word each, or complex ones from two."""

    def make(spec: InputSpec, dtype: np.dtype, start: int, stop: int) -> np.ndarray:
        if dtype.kind != "c":
            return part(spec, dtype, words(spec.seed, start, stop))
        real = np.dtype(f"f{dtype.itemsize // 2}")
        return part(spec, real, words(spec.seed, 2 * start, 2 * stop)).view(dtype)

    return make


def _normal(spec: InputSpec, dtype: np.dtype, word: np.ndarray) -> np.ndarray:
    from scipy.special import ndtri

    # 52 bits and a half are exact, so this is never 0 or 1, where the inverse distribution is infinite.
    values: np.ndarray = ndtri(((word >> 12) + 0.5) * 2.0**-52)
    return values.astype(dtype)


def _uniform(spec: InputSpec, dtype: np.dtype, word: np.ndarray) -> np.ndarray:
    return _UNIFORM[dtype.kind](spec, dtype, word)


def _uniform_float(spec: InputSpec, dtype: np.dtype, word: np.ndarray) -> np.ndarray:
    share = (word >> 11) * 2.0**-53
    values = (spec.low * (1.0 - share) + spec.high * share).astype(dtype)
    # Rounding may reach `high`, which is outside.
    below = np.nextafter(dtype.type(spec.high), dtype.type(spec.low))
    clipped: np.ndarray = np.clip(values, dtype.type(spec.low), below)
    return clipped


def _uniform_integer(spec: InputSpec, dtype: np.dtype, word: np.ndarray) -> np.ndarray:
    # Unsigned arithmetic wraps, so the widest range works too.
    offset = word % np.uint64(int(spec.high) - int(spec.low))
    return (offset + np.uint64(int(spec.low) % 2**64)).view(np.int64).astype(dtype)


def _uniform_bool(spec: InputSpec, dtype: np.dtype, word: np.ndarray) -> np.ndarray:
    return (word & np.uint64(1)).astype(dtype)


def _constant(value: int) -> Maker:
    return lambda spec, dtype, start, stop: np.full(stop - start, value, dtype)


def _arange(spec: InputSpec, dtype: np.dtype, start: int, stop: int) -> np.ndarray:
    return np.arange(start, stop, dtype=np.int64).astype(dtype)


_UNIFORM = {"f": _uniform_float, "i": _uniform_integer, "b": _uniform_bool}
GENERATORS: dict[str, Maker] = {
    "normal": _real(_normal),
    "uniform": _real(_uniform),
    "zeros": _constant(0),
    "ones": _constant(1),
    "arange": _arange,
}
