"""Arrays in zarr stores: which there are, how they are stored, their elements chunk by chunk."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy.typing as npt

from einmpi.errors import InputError, nearest_of
from einmpi.files.datasets import (
    MOST_NAMES_COMPARED,
    Dataset,
    FileIdentity,
    SourceFile,
    identity_from,
    is_inside,
)
from einmpi.files.zarr.codecs import ZarrError
from einmpi.files.zarr.metadata import (
    METADATA_FILE,
    OPEN_FLAGS,
    ArrayMetadata,
    array_metadata,
    parse_content,
    read_metadata,
)
from einmpi.schedule.regions import Box

Array: TypeAlias = npt.NDArray[Any]

STORE = "a zarr store, which is a folder"
_VERSION_2_FILES = (".zarray", ".zgroup", ".zattrs")


def array_path(place: str, text: str) -> str:
    """Return the one spelling of an array's path that is used: /a/b, or / for the store itself."""
    parts = [part for part in text.split("/") if part]
    for part in parts:
        if part.strip(".") == "" or part.startswith("__") or "\0" in part or part == METADATA_FILE:
            raise InputError(
                place, f"{text!r:.60} is not the path of an array", "a path such as / or /group/a"
            )
    return "/" + "/".join(parts)


def folder_of(store: str, array: str) -> str:
    """Return the folder of an array or a group in a store."""
    return os.path.join(store, *array.strip("/").split("/"))


def check_store(file: str, place: str) -> None:
    """Refuse what is not a folder that can be read."""
    where = place or file
    if not os.path.exists(file):
        hint = "paths are relative to the job file"
        raise InputError(where, f"there is no folder {file}", STORE, hint)
    if not os.path.isdir(file):
        raise InputError(where, f"{file} is not a folder", STORE)
    if not os.access(file, os.R_OK | os.X_OK):
        raise InputError(where, f"there is no permission to read {file}", "a readable folder")


def find(file: str, array: str, place: str) -> Dataset:
    """Look up an array without reading its elements."""
    where = place or file
    check_store(file, place)
    array = array_path(where, array)
    folder = folder_of(file, array)
    title = f"{array} in {file}"
    _check_inside(file, folder, where, title)
    try:
        path = os.path.join(folder, METADATA_FILE)
        content = parse_content(read_metadata(path))
        if content["node_type"] == "group":
            names = list_arrays(file, place, MOST_NAMES_COMPARED)
            inside = [name for name in names if name.startswith(array.rstrip("/") + "/")]
            expected = nearest_of(inside, "") if inside else "an array"
            raise InputError(where, f"{title} is a group", expected)
        identity = _identity(path)
        metadata = array_metadata(path, identity)
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(file, array, folder, place) from None
    except OSError as error:
        raise InputError(where, f"{title} cannot be read: {error.strerror}") from None
    except ZarrError as error:
        raise not_readable(where, title, error) from None
    return Dataset(
        file,
        array,
        place,
        metadata.shape,
        metadata.pipeline.stored.str,
        metadata.chunks,
        sources=(SourceFile(path, identity),),
        header=metadata.digest,
        decoded=2 * metadata.pipeline.nbytes,
    )


def not_readable(where: str, title: str, error: ZarrError) -> InputError:
    """Return the error for an array that is damaged or of an unsupported kind."""
    expected = error.expected or "an undamaged array in version 3 of the format"
    if error.hint:
        expected = error.expected
    return InputError(where, f"{title} cannot be read as zarr: {error}", expected, error.hint)


def _identity(path: str) -> FileIdentity:
    return identity_from(os.stat(path, follow_symlinks=False))


def _check_inside(file: str, folder: str, where: str, title: str) -> None:
    """Refuse an array that a symbolic link puts elsewhere: data could name any file."""
    if not is_inside(file, folder):
        raise InputError(where, f"{title} is a link out of the store", "an array in the store")


def _missing(file: str, array: str, folder: str, place: str) -> InputError:
    where = place or file
    for version_2 in (folder, file):
        if any(os.path.exists(os.path.join(version_2, name)) for name in _VERSION_2_FILES):
            what = f"{file} is a zarr store in version 2 of the format"
            return InputError(where, what, "version 3", f"convert it: zarr migrate v3 {file}")
    names = list_arrays(file, place, MOST_NAMES_COMPARED)
    expected = nearest_of(names, array) if names else "a store that has arrays"
    return InputError(where, f"there is no array {array} in {file}", expected)


def list_arrays(file: str, place: str, most: int) -> list[str]:
    """Return the paths of the first arrays in a store. Links are not followed."""
    check_store(file, place)
    names: list[str] = []
    waiting = [""]
    while waiting and len(names) < most:
        path = waiting.pop()
        folder = folder_of(file, path)
        try:
            content = parse_content(read_metadata(os.path.join(folder, METADATA_FILE)))
        except (OSError, ZarrError):
            continue
        if content["node_type"] == "array":
            names.append(path or "/")
            continue
        with os.scandir(folder) as entries:
            inside = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        waiting += [f"{path}/{name}" for name in sorted(inside, reverse=True)]
    return names


class ZarrReader:
    """An array whose chunks are read and decoded one by one."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.folder = folder_of(dataset.file, dataset.name)
        self.metadata = self._metadata()
        self.safe_folders: set[str] = set()

    def _metadata(self) -> ArrayMetadata:
        path = os.path.join(self.folder, METADATA_FILE)
        try:
            return array_metadata(path, _identity(path))
        except ZarrError as error:
            raise not_readable(self.dataset.where, self.dataset.title, error) from None
        except OSError as error:
            raise self._failed(METADATA_FILE, error.strerror or str(error)) from None

    def close(self) -> None:
        """Nothing is open between two reads."""

    def read(self, there: Box, target: Array, here: Box) -> None:
        """Read a box of the array into a box of the target."""
        place: Any = (*here, ...)  # gives an array even for a single element
        out = target[place]
        if not out.size:
            return
        sides = []
        for side, chunk in zip(there, self.metadata.chunks, strict=True):
            sides.append(list(_chunks_of_side(side, chunk)))
        for combination in itertools.product(*sides):
            index = tuple(part.number for part in combination)
            in_chunk: Any = (*(part.in_chunk for part in combination), ...)
            in_target: Any = (*(part.in_target for part in combination), ...)
            chunk_values = self._chunk(index)
            if chunk_values is None:
                out[in_target] = self.metadata.fill_value
            else:
                out[in_target] = chunk_values[in_chunk]

    def _chunk(self, index: tuple[int, ...]) -> Array | None:
        """Return the elements of a chunk, None if there is no file for it."""
        name = self.metadata.names.name_of(index)
        data = self._read_file(name)
        if data is None:
            return None
        try:
            return self.metadata.pipeline.decode(data)
        except ValueError as error:
            raise self._failed(name, str(error)) from None

    def _read_file(self, name: str) -> bytes | None:
        path = os.path.join(self.folder, name)
        self._check_folder(os.path.dirname(path), name)
        try:
            with open(os.open(path, OPEN_FLAGS), "rb") as opened:
                before = os.fstat(opened.fileno())
                if not stat.S_ISREG(before.st_mode):
                    raise self._failed(name, "it is not a regular file")
                if before.st_size > self.metadata.pipeline.most_encoded:
                    raise self._failed(name, "it is larger than a chunk can be")
                content = opened.read()
                if identity_from(os.fstat(opened.fileno())) != identity_from(before):
                    raise self._failed(name, "it was changed during the run")
                return content
        except FileNotFoundError:
            return None
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno == errno.ELOOP:
                reason = "it is a symbolic link"
            raise self._failed(name, reason) from None

    def _check_folder(self, folder: str, name: str) -> None:
        """Refuse chunks in a folder that a symbolic link puts out of the store."""
        if folder in self.safe_folders:
            return
        if not is_inside(self.dataset.file, folder):
            raise self._failed(name, "it is behind a link out of the store")
        self.safe_folders.add(folder)

    def _failed(self, name: str, reason: str) -> InputError:
        what = f"{self.dataset.title} cannot be read: {name}: {reason}"
        return InputError(self.dataset.where, what, "an undamaged array")


class _PartOfChunk(NamedTuple):
    """What is read of a chunk, along one dimension."""

    number: int  # of the chunk
    in_chunk: slice
    in_target: slice


def _chunks_of_side(side: slice, chunk: int) -> Iterator[_PartOfChunk]:
    """Yield the chunks along a side of a box."""
    step = side.step or 1
    start = side.start
    done = 0
    while start < side.stop:
        number = start // chunk
        end = min(side.stop, (number + 1) * chunk)
        count = -(-(end - start) // step)
        first = start - number * chunk
        in_chunk = slice(first, first + (count - 1) * step + 1, step)
        yield _PartOfChunk(number, in_chunk, slice(done, done + count))
        done += count
        start += count * step
