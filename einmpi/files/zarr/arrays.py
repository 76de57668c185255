"""Arrays in zarr stores: which there are, their elements chunk by chunk, and new ones."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from einmpi.errors import InputError, nearest_of
from einmpi.files.atomic import FileRefused, flush_folder, flush_path
from einmpi.files.datasets import (
    MOST_NAMES_COMPARED,
    Array,
    Dataset,
    FileIdentity,
    SourceFile,
    check_file,
    identity_from,
    is_inside,
)
from einmpi.files.specs import Place, StorageSpec
from einmpi.files.zarr.metadata import (
    COMPRESSORS,
    METADATA_FILE,
    OPEN_FLAGS,
    ChunkNames,
    Compressor,
    Content,
    Pipeline,
    ZarrError,
    array_metadata,
    check_installed,
    parse_content,
    read_metadata,
)
from einmpi.schedule.regions import Box

# ---- reading -------------------------------------------------------------------------------------
#
# Arrays in zarr stores: which there are, how they are stored, their elements chunk by chunk.


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


def find(file: str, array: str, place: str) -> Dataset:
    """Look up an array without reading its elements."""
    where = place or file
    check_file(file, place, STORE, is_folder=True)
    array = array_path(where, array)
    folder = folder_of(file, array)
    title = f"{array} in {file}"
    _check_inside(file, folder, where, title)
    content = _content_at(file, array, where)
    if content is None:
        raise _missing(file, array, folder, place)
    if content["node_type"] == "group":
        names = list_arrays(file, place, MOST_NAMES_COMPARED)
        inside = [name for name in names if name.startswith(array.rstrip("/") + "/")]
        expected = nearest_of(inside, "") if inside else "an array"
        raise InputError(where, f"{title} is a group", expected)
    path = os.path.join(folder, METADATA_FILE)
    with _problems_reported(where, title):
        identity = _identity(path)
        metadata = array_metadata(path, identity)
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


@contextlib.contextmanager
def _problems_reported(where: str, title: str) -> Iterator[None]:
    """Turn what is wrong with an array, or a group, into an InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(where, f"{title} cannot be read: {error.strerror}") from None
    except ZarrError as error:
        expected = error.expected
        if not error.hint:
            expected = expected or "an undamaged array in version 3 of the format"
        what = f"{title} cannot be read as zarr: {error}"
        raise InputError(where, what, expected, error.hint) from None


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
    check_file(file, place, STORE, is_folder=True)
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
        path = os.path.join(self.folder, METADATA_FILE)
        with _problems_reported(dataset.where, dataset.title):
            self.metadata = array_metadata(path, _identity(path))
        self.safe_folders: set[str] = set()

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


# ---- writing -------------------------------------------------------------------------------------
#
# Arrays in zarr stores that are written: rank 0 makes a new store, each rank its chunks.


# New chunks are at most this large, unless the job says otherwise.
_CHUNK_BYTES = 8 * 2**20
_NAMES = ChunkNames("c", "/")

# ---- before the run -----------------------------------------------------------------------------


def check_compression(place: str, compression: str) -> None:
    """Refuse a compression whose package is not installed."""
    try:
        check_installed(COMPRESSORS[compression])
    except ZarrError as error:
        raise InputError(place, str(error), hint=error.hint) from None


def check_target(file: str, arrays: Mapping[str, str]) -> None:
    """Refuse arrays that an existing store cannot take, before anything is computed.

    `arrays` has the place of each in the job file.
    """
    for array, place in arrays.items():
        where = place or file
        if not os.path.isdir(file):
            raise InputError(where, f"{file} is not a folder", STORE)
        if not os.listdir(file):
            continue
        groups = _groups_above(array)
        for node in (*groups, array):
            content = _content_at(file, node, where)
            if content is None and node == "/":
                raise InputError(where, f"{file} is a folder without {METADATA_FILE}", STORE)
            if content is None:
                continue
            if node in groups and content["node_type"] == "array":
                what = f"{node} in {file} is an array"
                raise InputError(where, what, f"a group to hold {array}")
            if node == array and content["node_type"] == "group":
                raise InputError(where, f"{array} in {file} is a group", "an array to replace")


def _groups_above(array: str) -> list[str]:
    """Return the groups that hold an array, the outermost first: / and /a of /a/b."""
    parts = array.strip("/").split("/")
    if parts == [""]:
        return []
    return ["/" + "/".join(parts[:depth]) for depth in range(len(parts))]


def _content_at(file: str, node: str, where: str) -> Content | None:
    """Return the metadata of a node of a store, None if there is no such node."""
    with _problems_reported(where, f"{node} in {file}"):
        try:
            return parse_content(read_metadata(os.path.join(folder_of(file, node), METADATA_FILE)))
        except (FileNotFoundError, NotADirectoryError):
            return None


# ---- making the store ---------------------------------------------------------------------------


def lay_out(
    draft: str, target: str, arrays: Mapping[str, StorageSpec], attributes: Mapping[str, str]
) -> list[Place]:
    """Make a new store with all of the target and with these arrays, without their chunks."""
    os.mkdir(draft)
    if os.path.isdir(target):
        _copy_rest(target, draft, arrays)
    places: list[Place] = []
    for array, spec in arrays.items():
        for group in _groups_above(array):
            _make_group(draft, group)
        chunks = _chunks_of(spec)
        content = _array_content(spec, chunks)
        content["attributes"] = _kept_attributes(target, array, content)
        content["attributes"] |= attributes
        if spec.tensor:
            content["attributes"]["einmpi_tensor"] = spec.tensor
        folder = folder_of(draft, array)
        os.makedirs(folder, exist_ok=True)
        _write_content(folder, content)
        places.append((None, chunks))
    for folder, _, _ in os.walk(draft):
        flush_folder(folder)
    return places


def _copy_rest(target: str, draft: str, arrays: Mapping[str, StorageSpec]) -> None:
    """Copy a store without the arrays that are replaced.

    Chunks get a second name instead of a copy where the file system allows it. They are never
    written in place. Metadata is copied: it is what tells readers that a store was changed.
    """
    replaced = {os.path.normpath(folder_of(target, array)) for array in arrays}

    def ignored(folder: str, names: list[str]) -> list[str]:
        return names if os.path.normpath(folder) in replaced else []

    def copy_file(source: str, copy: str) -> None:
        if os.path.basename(source) != METADATA_FILE:
            with contextlib.suppress(OSError):
                os.link(source, copy, follow_symlinks=False)
                return
        shutil.copy2(source, copy, follow_symlinks=False)

    try:
        shutil.copytree(
            target,
            draft,
            symlinks=True,
            ignore=ignored,
            copy_function=copy_file,
            dirs_exist_ok=True,
        )
    except shutil.Error as error:  # it lists all files that could not be copied
        source, _, reason = error.args[0][0]
        name = os.path.relpath(source, target)
        raise FileRefused(f"{name} in it cannot be copied: {reason}") from error


def _make_group(draft: str, group: str) -> None:
    """Make a group, or remove what an existing one says about its arrays: it is no longer true."""
    content = _content_at(draft, group, draft)
    if content is None:
        content = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    elif "consolidated_metadata" not in content:
        return
    content.pop("consolidated_metadata", None)
    folder = folder_of(draft, group)
    os.makedirs(folder, exist_ok=True)
    _write_content(folder, content)


def _write_content(folder: str, content: Content) -> None:
    path = os.path.join(folder, METADATA_FILE)
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)
    with open(path, "x", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _chunks_of(spec: StorageSpec) -> tuple[int, ...]:
    """Return the shape of a chunk: as asked for, or cut in halves until it is small enough."""
    if spec.chunks is not None:
        return spec.chunks
    chunks = [max(1, extent) for extent in spec.shape]
    itemsize = np.dtype(spec.dtype).itemsize
    while prod(chunks) * itemsize > _CHUNK_BYTES:
        longest = chunks.index(max(chunks))
        chunks[longest] = -(-chunks[longest] // 2)
    return tuple(chunks)


def _array_content(spec: StorageSpec, chunks: tuple[int, ...]) -> Content:
    dtype = np.dtype(spec.dtype)
    fill_value: Any = {"b": False, "c": [0.0, 0.0], "f": 0.0}.get(dtype.kind, 0)
    codecs: list[Content] = [{"name": "bytes"}]
    if dtype.itemsize > 1:
        codecs[0]["configuration"] = {"endian": "little"}
    if spec.compression is not None:
        compressor = COMPRESSORS[spec.compression]
        assert compressor.configuration is not None
        configuration = dict(compressor.configuration(dtype.itemsize))
        codecs.append({"name": compressor.name, "configuration": configuration})
    content: Content = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(spec.shape),
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunks)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill_value,
        "codecs": codecs,
    }
    if spec.labels is not None:
        content["dimension_names"] = list(spec.labels)
    return content


def _kept_attributes(target: str, array: str, new: Content) -> dict[str, Any]:
    """Return the attributes of the old array if it has the same shape, dtype and storage."""
    old = _content_at(target, array, target)
    if old is None:
        return {}
    for key in ("shape", "data_type", "chunk_grid", "codecs"):
        if old.get(key) != new[key]:
            return {}
    attributes = old.get("attributes")
    return dict(attributes) if isinstance(attributes, dict) else {}


# ---- chunks -------------------------------------------------------------------------------------


class ChunkFiles:
    """The files of an array's chunks that one rank writes to a draft of the store."""

    def __init__(
        self, draft: str, array: str, storage: StorageSpec, chunks: tuple[int, ...]
    ) -> None:
        compressors: tuple[Compressor, ...] = ()
        if storage.compression is not None:
            compressors = (COMPRESSORS[storage.compression],)
        little = np.dtype(storage.dtype).newbyteorder("<")
        self.pipeline = Pipeline(little, chunks, (), compressors)
        self.folder = folder_of(draft, array)
        self.dtype = little
        self.written: list[str] = []

    def write(self, index: Sequence[int], chunk: Array) -> None:
        """Write a whole chunk to its file."""
        data = self.pipeline.encode(chunk.astype(self.dtype, copy=False))
        path = os.path.join(self.folder, _NAMES.name_of(index))
        try:
            self._write_file(path, data)
        except FileNotFoundError:
            self._make_folders(os.path.dirname(path))
            self._write_file(path, data)
        self.written.append(path)

    def _write_file(self, path: str, data: bytes) -> None:
        with open(path, "xb") as file:
            file.write(data)

    def _make_folders(self, folder: str) -> None:
        """Make the folders of a chunk, but not that of the array.

        A rank on a machine that does not share the folder must not make one of its own.
        """
        path = self.folder
        for part in os.path.relpath(folder, self.folder).split(os.sep):
            path = os.path.join(path, part)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)

    def flush(self) -> None:
        """Flush to disk what was written; all at the end, so that one flush helps the next."""
        folders: dict[str, None] = {}
        for path in self.written:
            flush_path(path)
            folder = os.path.dirname(path)
            while folder not in folders and len(folder) >= len(self.folder):
                folders[folder] = None
                folder = os.path.dirname(folder)
        for folder in folders:
            flush_folder(folder)
