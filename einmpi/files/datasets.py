"""A tensor in a file: how it lies there, and how values that lie in one piece are read."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import numpy as np

from einmpi.errors import InputError
from einmpi.schedule.regions import Box

AT_ONCE = 2**30  # bytes: what one call of the system reads at the most
LISTED = 8  # names of tensors in a file, where one is not there
STRIP = 4 * 2**20  # bytes of a buffer for values that go elsewhere in memory than one after another


@dataclass(frozen=True)
class Dataset:
    """Where a tensor is and how it is stored. Nothing of it has been read."""

    file: str
    name: str  # of the tensor in the file; nothing where the file is the tensor
    place: str  # in the job file
    shape: tuple[int, ...]
    stored: str  # numpy's text for the dtype in the file, with its byte order
    chunks: tuple[int, ...] | None = None
    offset: int | None = None  # in the file, where the values lie in one piece
    fortran: bool = False  # the first dimension is the fast one
    first_row: int = 0  # of those that are wanted
    rows: int | None = None  # how many of them; all where there is no number

    @property
    def dtype(self) -> np.dtype:
        """In this machine's byte order."""
        found = np.dtype(self.stored)
        return found if found.isnative else found.newbyteorder("=")

    @property
    def title(self) -> str:
        return f"{self.name} in {self.file}" if self.name else self.file

    @property
    def where(self) -> str:
        return self.place or self.file

    @property
    def wanted(self) -> tuple[int, ...]:
        """The shape of what is wanted of it."""
        return self.shape if self.rows is None else (self.rows, *self.shape[1:])

    def as_read(self) -> str:
        """What ranks need to agree upon to read it together; where it lies may differ."""
        how = self.stored, self.chunks, self.offset is None, self.fortran
        return repr((*how, self.shape, self.first_row, self.rows))

    def select(self, rows: tuple[int | None, int | None]) -> Dataset:
        """Only the rows from one to before another; counted from the end where negative, as in Python."""
        if not self.shape:
            raise InputError(
                self.where, f"{self.title} is a number and has no rows", "leave out rows"
            )
        extent = self.shape[0]
        start, stop = (
            default if end is None else end + extent * (end < 0)
            for end, default in zip(rows, (0, extent), strict=True)
        )
        if not 0 <= start <= stop <= extent:
            shown = ":".join("" if end is None else str(end) for end in rows)
            raise InputError(
                self.where,
                f"rows {shown} of {self.title}, which has {extent}",
                f"within 0:{extent}",
            )
        return replace(self, first_row=start, rows=stop - start)


class Reader(Protocol):
    """An open dataset. Boxes count from its first row, wanted or not."""

    def read(self, there: Box, target: np.ndarray, here: Box) -> None: ...
    def close(self) -> None: ...


class RawReader:
    """Values that lie in one piece, read without a library: Python's lock is free while the system reads."""

    def __init__(self, dataset: Dataset) -> None:
        assert dataset.offset is not None
        self.dataset, self.stored = dataset, np.dtype(dataset.stored)
        self.shape = dataset.shape[::-1] if dataset.fortran else dataset.shape
        self.descriptor = os.open(dataset.file, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self.descriptor)

    def read(self, there: Box, target: np.ndarray, here: Box) -> None:
        """In the file's order of dimensions."""
        place: Any = (*here, ...)  # an array even where it is a single element
        self._read([(side.start, side.stop) for side in there], target[place])

    def _read(self, bounds: list[tuple[int, int]], out: np.ndarray) -> None:
        """Run by run: the last dimensions that are taken whole lie in one run, with a part of the one before."""
        if not out.size:
            return
        alone = max(len(bounds) - 1, 0)
        while alone > 0 and bounds[alone] == (0, self.shape[alone]):
            alone -= 1
        outer = out.shape[:alone]
        if not out[(0,) * alone].flags.c_contiguous:
            self._in_strips(bounds, out)
            return
        starts = np.array(self.dataset.offset)
        for dimension, (first, last) in enumerate(bounds):
            stride = prod(self.shape[dimension + 1 :]) * self.stored.itemsize
            along = np.arange(first, last) if dimension < alone else np.array([first])
            starts = starts[..., None] + along * stride
        if out.flags.c_contiguous:
            memory = out.reshape(-1).view(np.uint8).data
            run = len(memory) // prod(outer)
            for k, start in enumerate(starts.ravel().tolist()):
                self._fill(memory[k * run : (k + 1) * run], start)
        else:
            for index, start in zip(np.ndindex(*outer), starts.ravel().tolist(), strict=True):
                self._fill(out[(*index, ...)].reshape(-1).view(np.uint8).data, start)
        if self.stored.kind == "b":
            np.not_equal(out.view(np.uint8), 0, out=out)  # whatever else a byte may be
        elif not self.stored.isnative:
            out.byteswap(inplace=True)

    def _in_strips(self, bounds: list[tuple[int, int]], out: np.ndarray) -> None:
        """Where the target has its dimensions in another order."""
        longest = max(
            range(out.ndim), key=lambda d: (out.shape[d] > 1, -d)
        )  # the first that can be cut
        count = max(1, min(out.shape[longest], STRIP * out.shape[longest] // out.nbytes))
        for start in range(0, out.shape[longest], count):
            part = out[(slice(None),) * longest + (slice(start, start + count),)]
            first = bounds[longest][0] + start
            cut = [*bounds[:longest], (first, first + part.shape[longest]), *bounds[longest + 1 :]]
            strip = np.empty(part.shape, out.dtype)
            self._read(cut, strip)
            part[...] = strip

    def _fill(self, left: memoryview, offset: int) -> None:
        while left:
            try:
                got = os.preadv(self.descriptor, [left[:AT_ONCE]], offset)
            except OSError as error:
                raise InputError(
                    self.dataset.where, f"{self.dataset.title} cannot be read: {error.strerror}"
                ) from None
            if not got:
                raise InputError(
                    self.dataset.where,
                    f"{self.dataset.title} ends before its last value",
                    "a file that is whole",
                )
            left, offset = left[got:], offset + got


def check_file(file: str, place: str, kind: str) -> None:
    """Refuse what is no file that can be read, before anything waits for it."""
    where = place or file
    if not os.path.exists(file):
        raise InputError(where, f"there is no file {file}", "paths are relative to the job file")
    if not os.path.isfile(file):
        raise InputError(where, f"{file} is not a file", kind)
    if not os.access(file, os.R_OK):
        raise InputError(where, f"{file} may not be read", "a file with read permission")
