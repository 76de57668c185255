"""What a job says about its inputs and outputs: which part of a file is read, how results are
stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from einmpi.errors import InputError
from einmpi.units import counted

if TYPE_CHECKING:
    from einmpi.files.datasets import Dataset

COMPRESSIONS = ("gzip", "lzf")
Number: TypeAlias = bool | int | float | complex
Resident: TypeAlias = bool | Literal["fit"]

# What is written for a dimension: an index, or start, stop and step, where None means from the
# first or to the last element. Negative numbers count from the end.
SliceEntry: TypeAlias = int | tuple[int | None, int | None, int]

# Where the elements of a stored tensor go: the offset of its first byte in the file, or the shape
# of its HDF5 chunks. Both are None for a tensor without elements.
Place: TypeAlias = tuple[int | None, tuple[int, ...] | None]


@dataclass(frozen=True)
class InputSpec:
    """A tensor the job starts from: generated (`random`), read from a file, or a parameter.

    `inside` names the tensor within the file; it is empty if the file holds a single tensor.
    `slices` select a part of it, dimension by dimension; those without an entry are read whole.
    `declared_shape` and `declared_dtype` are what the job says about the file, which may not exist
    yet; a tensor that lies in one piece takes the declared shape.
    `convert` is the dtype that elements of the file are converted to while they are read.
    `follow` are the folders to which links of the file may lead, besides its own. `place` is the
    position of the input in the job file. `value` is that of a parameter, which has no dimensions.
    `resident` is "fit" for an input that stays loaded between calls if memory allows it.
    `rows` is the number of rows of an input that comes in batches; `shape` is then that of a batch,
    and `chunk_rows` the number of rows that are stored together.

    A sparse tensor has keys in its first `key_dimensions`; a dense one in none. `stored` is the
    number of its stored elements, at most, if that is known before it is read, and `implicit` the
    value of all others, where the job says it. `keys` are the sources of its keys if these are
    tensors in files of their own.
    """

    name: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    random: str | None = None
    seed: int = 0
    low: int | float = 0
    high: int | float = 1
    file: str | None = None
    inside: str = ""
    slices: tuple[SliceEntry, ...] = ()
    declared_shape: tuple[int, ...] | None = None
    declared_dtype: str | None = None
    convert: str | None = None
    follow: tuple[str, ...] = ()
    resident: Resident = False
    parts: tuple[int, ...] | None = None
    place: str = ""
    value: Number | None = None
    rows: int | None = None
    chunk_rows: int = 1
    key_dimensions: int = 0
    stored: int | None = None
    implicit: Number | None = None
    keys: tuple[InputSpec, ...] = ()

    @property
    def title(self) -> str:
        """What messages call a tensor in a file."""
        return f"{self.inside} in {self.file}" if self.inside else str(self.file)

    @property
    def where(self) -> str:
        """The place that messages name."""
        return self.place or str(self.file)

    @property
    def whole_shape(self) -> tuple[int, ...] | None:
        """The shape of the tensor that the input is taken from."""
        if self.rows is None or self.shape is None:
            return self.shape
        return (self.rows, *self.shape[1:])


@dataclass(frozen=True)
class OutputSpec:
    """A tensor the job stores. It keeps its own dtype unless `dtype` names another.

    `inside` and `place` are as in `InputSpec`.
    """

    name: str
    file: str
    inside: str = ""
    chunks: tuple[int, ...] | None = None
    compression: str | None = None
    dtype: str | None = None
    parts: tuple[int, ...] | None = None
    place: str = ""

    @property
    def target(self) -> str:
        """Return the target as the short form of a job file writes it."""
        if self.inside:
            return f"{self.file}:{self.inside}"
        return self.file


@dataclass(frozen=True)
class StorageSpec:
    """The shape, dtype and layout that a tensor gets in the file it is written to.

    `labels` name its dimensions, and `tensor` is its name in the program, if they are known. It
    takes over the coordinates of the `inputs`. Of a part of a sparse tensor, `group` are the
    attributes of the group that holds all parts, and `header` is what comes before it in a text.
    """

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...] | None = None
    compression: str | None = None
    labels: tuple[str, ...] | None = None
    tensor: str = ""
    inputs: tuple[Dataset, ...] = field(default=(), repr=False)
    group: Mapping[str, Any] = field(default_factory=dict)
    header: bytes = b""


# ---- parts of files ------------------------------------------------------------------------------

_NAMES = ("rows", "columns")  # of the first dimensions in messages


@dataclass(frozen=True)
class Range:
    """What is selected along a dimension: `count` indices from `first` on, `step` apart.

    A single index that is `dropped` leaves the tensor without this dimension.
    """

    first: int
    count: int
    step: int = 1
    dropped: bool = False

    def in_file(self, start: int, stop: int) -> slice:
        """Return the indices in the file for those from start to before stop of the tensor."""
        if start == stop:
            return slice(self.first, self.first)
        last = self.first + (stop - 1) * self.step
        return slice(self.first + start * self.step, last + 1, self.step)


def whole_ranges(shape: Sequence[int]) -> tuple[Range, ...]:
    """Return the ranges that select everything."""
    return tuple(Range(0, extent) for extent in shape)


def resolve(
    entries: Sequence[SliceEntry], shape: Sequence[int], where: str, title: str
) -> tuple[Range, ...]:
    """Return the range along each dimension; those without an entry are selected whole."""
    if len(entries) > len(shape):
        expected = f"at least {len(entries)}, as many as are selected from"
        raise InputError(where, f"{title} has {counted(len(shape), 'dimension')}", expected)
    ranges = []
    for dimension, extent in enumerate(shape):
        if dimension >= len(entries):
            ranges.append(Range(0, extent))
            continue
        entry = entries[dimension]
        name = _NAMES[dimension] if dimension < len(_NAMES) else f"dimension {dimension}:"
        if isinstance(entry, int):
            index = _from_start(entry, extent, 0)
            if not 0 <= index < extent:
                what = f"{name} {entry} of {title}, which has {extent}"
                raise InputError(where, what, f"an index within 0:{extent}")
            ranges.append(Range(index, 1, dropped=True))
            continue
        start = _from_start(entry[0], extent, 0)
        stop = _from_start(entry[1], extent, extent)
        step = entry[2]
        if not 0 <= start <= stop <= extent:
            shown = ":".join("" if end is None else str(end) for end in entry[:2])
            what = f"{name} {shown} of {title}, which has {extent}"
            raise InputError(where, what, f"a range within 0:{extent}")
        ranges.append(Range(start, -(-(stop - start) // step), step))
    return tuple(ranges)


def _from_start(end: int | None, extent: int, default: int) -> int:
    if end is None:
        return default
    return end + extent if end < 0 else end
