"""What a job says about its inputs and outputs, and how a tensor is to be stored in a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from einmpi.files.selection import SliceEntry

COMPRESSIONS = ("gzip", "lzf")

# Where the elements of a stored tensor go: the offset of its first byte in the file, or the shape
# of its HDF5 chunks. Both are None for a tensor without elements.
Place: TypeAlias = tuple[int | None, tuple[int, ...] | None]


@dataclass(frozen=True)
class InputSpec:
    """A tensor the job starts from: generated (`random`) or read from a file.

    `inside` names the tensor within the file; it is empty if the file holds a single tensor.
    `slices` select a part of it, dimension by dimension; those without an entry are read whole.
    `declared_shape` and `declared_dtype` are what the job says about the file, which may not exist
    yet; a tensor that lies in one piece takes the declared shape.
    `follow` are the folders to which links of the file may lead, besides its own. `place` is the
    position of the input in the job file.
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
    follow: tuple[str, ...] = ()
    resident: bool = False
    parts: tuple[int, ...] | None = None
    place: str = ""


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
    """The shape, dtype and layout that a tensor gets in the file it is written to."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...] | None = None
    compression: str | None = None
