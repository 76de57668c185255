"""Tensors in files: where they are, how they are stored, and reading contiguous ones."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import sha256
from math import prod
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.errors import InputError, one_of
from einmpi.files.specs import Range, SliceEntry, resolve, whole_ranges
from einmpi.schedule.regions import Box

# ---- identity ------------------------------------------------------------------------------------
#
# The identity of a file: it changes when the file is written to or another one takes its name.


class FileIdentity(NamedTuple):
    """What the system says about a file. Times are in nanoseconds.

    `changed_ns` is set by the system alone, so it differs even if someone writes to the file and
    restores its size and time of modification, or replaces it and puts it back.
    """

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @property
    def version(self) -> tuple[int, int, int]:
        """The inode, size and time of modification: the same on all machines and after a boot."""
        return self.inode, self.size, self.modified_ns


@dataclass(frozen=True)
class SourceFile:
    """A file that is read, and its identity before it was opened."""

    path: str
    identity: FileIdentity


def identity_from(status: os.stat_result) -> FileIdentity:
    """Return the identity of the file that os.stat or os.fstat has looked at."""
    return FileIdentity(
        status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    )


def identity_at(path: str) -> FileIdentity | None:
    """Return the identity of the file at a path; None if there is none that can be looked at."""
    try:
        return identity_from(os.stat(path))
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return None


Array: TypeAlias = npt.NDArray[Any]
DType: TypeAlias = np.dtype[Any]

MOST_READ_BYTES = 2**30  # by one system call
MOST_NAMES_COMPARED = 1000  # names of datasets that are compared with one that is missing
LONG_ROW_BYTES = 16 * 2**10  # rows that are skipped rather than read
PATHS_OF_JOB_FILES = "paths are relative to the job file"  # a hint
STRIP_BYTES = 4 * 2**20  # a buffer for elements that are not contiguous in the target


@dataclass(frozen=True)
class Dataset:
    """Where a tensor is and how it is stored. None of its elements has been read.

    `selection` has a range for each dimension; it is None if everything is selected.
    """

    file: str
    name: str  # of the tensor in the file; empty if the file holds a single tensor
    place: str  # in the job file
    shape: tuple[int, ...]
    stored: str  # numpy's text for the dtype in the file, with its byte order
    chunks: tuple[int, ...] | None = None
    offset: int | None = None  # in the file, if the elements are contiguous
    fortran: bool = False  # whether the first dimension varies fastest
    selection: tuple[Range, ...] | None = None
    sources: tuple[SourceFile, ...] = ()  # all files with its elements, `file` first
    header: str = ""  # the SHA-256 digest of what the file says about the tensor
    converted: str = ""  # the dtype that elements are converted to while they are read
    decoded: int = 0  # bytes that it takes to decode a chunk; 0 if it can be read in parts
    dimensions: tuple[str, ...] = ()  # their names, if the file has some
    packing: str = ""  # how netCDF readers compute values from the elements, in words
    members: tuple[Dataset, ...] = ()  # that are stacked along the first dimension

    @property
    def dtype(self) -> DType:
        """Return the dtype of the elements that are read."""
        return np.dtype(self.converted) if self.converted else self.stored_dtype

    @property
    def stored_dtype(self) -> DType:
        """Return the dtype of the file in this machine's byte order."""
        return np.dtype(self.stored).newbyteorder("=")

    @property
    def title(self) -> str:
        """Return what messages call the tensor."""
        return f"{self.name} in {self.file}" if self.name else self.file

    @property
    def where(self) -> str:
        """Return the place that messages name."""
        return self.place or self.file

    @property
    def selected_shape(self) -> tuple[int, ...]:
        """Return the shape of what is selected."""
        return tuple(each.count for each in self.ranges() if not each.dropped)

    def ranges(self) -> tuple[Range, ...]:
        """Return what is selected along each dimension of the file."""
        return whole_ranges(self.shape) if self.selection is None else self.selection

    def as_read(self) -> str:
        """Return what ranks must agree on to read it together; its path may differ."""
        needs_library = self.offset is None
        storage = (self.stored, self.converted, self.chunks, needs_library, self.fortran)
        return repr((*storage, self.shape, self.selection))

    def select(self, entries: Sequence[SliceEntry]) -> Dataset:
        """Return the dataset with only a part selected."""
        return replace(self, selection=resolve(entries, self.shape, self.where, self.title))

    def with_header_of_facts(self) -> Dataset:
        """Return the dataset with the digest of how it is stored, for a file without a header.

        It is that of JSON with sorted keys and without spaces.
        """
        facts = {
            "dataset": self.name,
            "shape": list(self.shape),
            "dtype": self.stored,
            "chunks": None if self.chunks is None else list(self.chunks),
            "offset": self.offset,
        }
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        return replace(self, header=sha256(text.encode()).hexdigest())

    def with_shape(self, shape: tuple[int, ...]) -> Dataset:
        """Return the selected part with another shape, if its elements lie in one piece."""
        found = self.selected_shape
        if shape == found:
            return self
        what = f"{self.title} has shape {list(found)}"
        expected = f"shape {list(shape)}, as declared"
        count = prod(shape)
        if count != prod(found):
            raise InputError(self.where, what, expected)
        offset = self._offset_of_selection()
        if offset is None and count > 0:
            hint = "only a tensor that lies in one piece takes another shape"
            raise InputError(self.where, what, expected, hint)
        return replace(self, shape=shape, offset=offset, chunks=None, fortran=False, selection=None)

    def _offset_of_selection(self) -> int | None:
        """Return where the selected elements begin in the file, None unless they are contiguous."""
        if self.offset is None or self.fortran:
            return None
        offset = self.offset
        itemsize = np.dtype(self.stored).itemsize
        is_inside_run = False  # after a dimension with more than one index, all must be whole
        for dimension, selected in enumerate(self.ranges()):
            extent = self.shape[dimension]
            if selected.count > 1 and selected.step > 1:
                return None
            if is_inside_run and selected.count != extent:
                return None
            is_inside_run = is_inside_run or selected.count > 1
            offset += selected.first * prod(self.shape[dimension + 1 :]) * itemsize
        return offset


class Reader(Protocol):
    """An open dataset. Boxes count from its first element, selected or not, and may have steps."""

    def read(self, there: Box, target: Array, here: Box) -> None: ...
    def close(self) -> None: ...


def strips(there: Box, target: Array, itemsize: int) -> Iterator[tuple[Box, Array]]:
    """Cut a box along its first dimension that can be cut, so that a part fits into a buffer.

    Yield each part with its place in the target.
    """
    if not target.size:
        return
    if not target.ndim:
        yield there, target
        return
    dimension = _dimension_to_cut(target)
    extent = target.shape[dimension]
    count = max(1, STRIP_BYTES * extent // (target.size * itemsize))
    side = there[dimension]
    step = side.step or 1
    for start in range(0, extent, count):
        part = target[(slice(None),) * dimension + (slice(start, start + count),)]
        first = side.start + start * step
        last = first + (part.shape[dimension] - 1) * step
        cut = slice(first, last + 1, side.step)
        yield (*there[:dimension], cut, *there[dimension + 1 :]), part


def _dimension_to_cut(target: Array) -> int:
    """Return the first dimension with more than one index; else the last one."""
    dimension = 0
    while dimension < target.ndim - 1 and target.shape[dimension] == 1:
        dimension += 1
    return dimension


class RawReader:
    """Reads contiguous elements without a library: Python's lock is free during system calls."""

    def __init__(self, dataset: Dataset) -> None:
        assert dataset.offset is not None
        self.dataset = dataset
        self.stored = np.dtype(dataset.stored)
        self.shape = dataset.shape[::-1] if dataset.fortran else dataset.shape
        # A pipe that has replaced the file must not block; `check_identity` will refuse it.
        self.descriptor = os.open(dataset.file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            check_identity(dataset, os.fstat(self.descriptor))
        except InputError:
            self.close()
            raise

    def close(self) -> None:
        os.close(self.descriptor)

    def read(self, there: Box, target: Array, here: Box) -> None:
        """Read a box, with dimensions in the file's order, into a box of the target."""
        place: Any = (*here, ...)  # gives an array even for a single element
        if any(side.step not in (None, 1) for side in there):
            self._read_steps(there, target[place])
            return
        self._read_box(there, target[place])

    def _read_steps(self, there: Box, out: Array) -> None:
        """Read a box with steps: small boxes whole, large ones strip by strip.

        Long rows between two that are selected are not read.
        """
        if not out.size:
            return
        extents = [side.stop - side.start for side in there]
        nbytes = prod(extents) * out.itemsize
        dimension = _dimension_to_cut(out)
        row_bytes = nbytes // extents[dimension]
        skips_rows = (there[dimension].step or 1) > 1 and row_bytes >= LONG_ROW_BYTES
        if out.shape[dimension] > 1 and (skips_rows or nbytes > STRIP_BYTES):
            # So large that a strip has one row, or that all it covers fits into a strip.
            itemsize = STRIP_BYTES if skips_rows else -(-nbytes // out.size)
            for box, part in strips(there, out, itemsize):
                self._read_steps(box, part)
            return
        covering = np.empty(extents, out.dtype)
        self._read_box(there, covering)
        out[...] = covering[tuple(slice(None, None, side.step) for side in there)]

    def _read_box(self, there: Box, out: Array) -> None:
        """Read run by run, without steps.

        The last dimensions that are read whole make one run in the file, together with a part of
        the dimension before them. The dimensions before that are the outer ones.
        """
        if not out.size:
            return
        bounds = [(side.start, side.stop) for side in there]
        outer_ndim = max(len(bounds) - 1, 0)
        while outer_ndim > 0 and bounds[outer_ndim] == (0, self.shape[outer_ndim]):
            outer_ndim -= 1
        if not out[(0,) * outer_ndim].flags.c_contiguous:
            for box, part in strips(there, out, out.itemsize):
                strip = np.empty(part.shape, out.dtype)
                self._read_box(box, strip)
                part[...] = strip
            return
        starts = self._run_offsets(bounds, outer_ndim)
        outer_shape = out.shape[:outer_ndim]
        if out.flags.c_contiguous:
            memory = out.reshape(-1).view(np.uint8).data
            run_bytes = len(memory) // prod(outer_shape)
            for number, start in enumerate(starts):
                self._read_exactly(memory[number * run_bytes : (number + 1) * run_bytes], start)
        else:
            for index, start in zip(np.ndindex(*outer_shape), starts, strict=True):
                self._read_exactly(out[(*index, ...)].reshape(-1).view(np.uint8).data, start)
        if self.stored.kind == "b":
            np.not_equal(out.view(np.uint8), 0, out=out)  # any byte but 0 means True
        elif not self.stored.isnative:
            out.byteswap(inplace=True)

    def _run_offsets(self, bounds: list[tuple[int, int]], outer_ndim: int) -> list[int]:
        """Return the offset in the file of each run, in order."""
        starts = np.array(self.dataset.offset)
        for dimension, (first, last) in enumerate(bounds):
            stride = prod(self.shape[dimension + 1 :]) * self.stored.itemsize
            if dimension >= outer_ndim:
                last = first + 1
            starts = starts[..., None] + np.arange(first, last) * stride
        offsets: list[int] = starts.ravel().tolist()
        return offsets

    def _read_exactly(self, remaining: memoryview, offset: int) -> None:
        title = self.dataset.title
        while remaining:
            try:
                count = os.preadv(self.descriptor, [remaining[:MOST_READ_BYTES]], offset)
            except OSError as error:
                raise InputError(
                    self.dataset.where, f"{title} cannot be read: {error.strerror}"
                ) from None
            if not count:
                raise InputError(
                    self.dataset.where, f"{title} ends before its last value", "a complete file"
                )
            remaining = remaining[count:]
            offset += count


class StackReader:
    """Reads tensors that are one after another along the first dimension, each from its file."""

    def __init__(self, dataset: Dataset) -> None:
        self.members = dataset.members

    def close(self) -> None:
        pass

    def read(self, there: Box, target: Array, here: Box) -> None:
        """Read a box, with dimensions in the file's order, into a box of the target."""
        place: Any = (*here, ...)
        numbers = range(len(self.members))[there[0]]
        for part, number in zip(target[place], numbers, strict=True):
            with closing(RawReader(self.members[number])) as reader:
                reader.read(there[1:], part, (slice(None),) * part.ndim)


# ---- files that stay as they are ----------------------------------------------------------------


def check_identity(dataset: Dataset, opened: os.stat_result) -> None:
    """Refuse an open file that is not the one in which the dataset was found."""
    if dataset.sources and identity_from(opened) != dataset.sources[0].identity:
        raise _changed(dataset, dataset.sources[0])


def files_as_read(files: Mapping[str, Dataset]) -> str:
    """Return a text that is equal on ranks that read the same files in the same way."""
    return repr([(name, dataset.as_read()) for name, dataset in files.items()])


def is_unchanged(dataset: Dataset) -> bool:
    """Return whether all files of a dataset are those in which it was found."""
    return all(identity_at(source.path) == source.identity for source in dataset.sources)


def check_unchanged(dataset: Dataset) -> None:
    """Refuse a dataset if one of its files is no longer the one that was found.

    All ranks agree on what they have found before any of them calls this. So files that have not
    changed since then on each rank are the same on all ranks.
    """
    for source in dataset.sources:
        if identity_at(source.path) != source.identity:
            raise _changed(dataset, source)


def _changed(dataset: Dataset, source: SourceFile) -> InputError:
    title = dataset.title
    if source.path != dataset.file:
        title = f"{source.path}, which {title} needs,"
    found = identity_at(source.path)
    expected = "a file that stays unchanged"
    if found is None:
        return InputError(dataset.where, f"{title} was removed during the run", expected)
    if found.inode == source.identity.inode and found.device == source.identity.device:
        return InputError(dataset.where, f"{title} was changed during the run", expected)
    return InputError(dataset.where, f"{title} was replaced during the run", expected)


def is_inside(folder: str, path: str) -> bool:
    """Return whether a path is in a folder once links are followed."""
    real_folder = os.path.realpath(folder)
    return os.path.commonpath([real_folder, os.path.realpath(path)]) == real_folder


def check_file(file: str, place: str, expected: str, is_folder: bool = False) -> None:
    """Refuse what is not a readable file, or folder, before anything waits for it."""
    where = place or file
    kind = "folder" if is_folder else "file"
    if not os.path.exists(file):
        raise InputError(where, f"there is no {kind} {file}", expected, PATHS_OF_JOB_FILES)
    if not (os.path.isdir(file) if is_folder else os.path.isfile(file)):
        raise InputError(where, f"{file} is not a {kind}", expected)
    if not os.access(file, os.R_OK | os.X_OK if is_folder else os.R_OK):
        raise InputError(where, f"there is no permission to read {file}", f"a readable {kind}")


# ---- converting ----------------------------------------------------------------------------------
#
# Floating-point elements that are converted to another dtype while they are read.


CONVERTIBLE_DTYPES = ("float16", "bfloat16", "float32", "float64")


def converted(dataset: Dataset, dtype: str) -> Dataset:
    """Return the dataset with its elements converted to a dtype; refuse others than floats."""
    if dataset.dtype.name == dtype:
        return dataset
    if dataset.dtype.name not in CONVERTIBLE_DTYPES:
        what = f"{dataset.title} is {dataset.dtype.name}, which is not converted"
        raise InputError(dataset.where, what, one_of(CONVERTIBLE_DTYPES))
    return replace(dataset, converted=dtype)


class ConvertingReader:
    """Reads elements as they are stored, strip by strip, and converts each strip."""

    def __init__(self, dataset: Dataset, reader: Reader) -> None:
        self.stored = dataset.stored_dtype
        self.reader = reader

    def close(self) -> None:
        self.reader.close()

    def read(self, there: Box, target: Array, here: Box) -> None:
        """Read a box, with dimensions in the file's order, into a box of the target."""
        place: Any = (*here, ...)  # gives an array even for a single element
        for box, part in strips(there, target[place], self.stored.itemsize):
            strip = np.empty(part.shape, self.stored)
            self.reader.read(box, strip, tuple(slice(0, extent) for extent in part.shape))
            part[...] = strip
