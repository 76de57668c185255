"""Arrays in zarr stores that are written: rank 0 makes a new store, each rank its chunks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.errors import InputError
from einmpi.files.atomic import FileRefused, flush_folder
from einmpi.files.specs import Place, StorageSpec
from einmpi.files.zarr.codecs import COMPRESSORS, Compressor, Pipeline, ZarrError, check_installed
from einmpi.files.zarr.metadata import (
    METADATA_FILE,
    ChunkNames,
    Content,
    parse_content,
    read_metadata,
)
from einmpi.files.zarr.reading import STORE, folder_of, not_readable

Array: TypeAlias = npt.NDArray[Any]

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
    try:
        return parse_content(read_metadata(os.path.join(folder_of(file, node), METADATA_FILE)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InputError(where, f"{node} in {file} cannot be read: {error.strerror}") from None
    except ZarrError as error:
        raise not_readable(where, f"{node} in {file}", error) from None


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
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            folder = os.path.dirname(path)
            while folder not in folders and len(folder) >= len(self.folder):
                folders[folder] = None
                folder = os.path.dirname(folder)
        for folder in folders:
            flush_folder(folder)
