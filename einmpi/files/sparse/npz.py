"""Sparse tensors in .npz files, as scipy and the package sparse write them."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, TypeAlias

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.files.datasets import Dataset, SourceFile, check_file, identity_at
from einmpi.files.sparse.found import (
    Array,
    SparseFile,
    Stored,
    check_shape,
    check_vector,
    compressed_keys,
)
from einmpi.files.specs import InputSpec
from einmpi.graph.dtypes import numpy_dtypes
from einmpi.language.syntax import PYTHON_PARSER
from einmpi.schedule.regions import Box

_EXPECTED = "a sparse tensor that scipy.sparse.save_npz or sparse.save_npz has written"
# What zipfile and numpy raise for files that are damaged, or no such files.
_DAMAGE = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, RuntimeError)
# The arrays of each form besides the values, which are `data`.
_ARRAYS = {
    "csr": ("indptr", "indices"),
    "csc": ("indptr", "indices"),
    "gcxs": ("indptr", "indices"),
    "bsr": ("indptr", "indices"),
    "coo": ("coords",),
}
Headers: TypeAlias = Mapping[str, Dataset]


def find_npz(spec: InputSpec) -> SparseFile:
    """Read the headers of the arrays in a file, and the few numbers that say what they are."""
    file = spec.file or ""
    place = spec.place
    where = place or file
    check_file(file, place, "an .npz file")
    identity = identity_at(file)
    sources = () if identity is None else (SourceFile(file, identity),)
    try:
        with zipfile.ZipFile(file) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            headers = {name: _header(archive, file, name, place, sources) for name in names}
            small: dict[str, Any] = {}
            for name in ("format", "shape", "fill_value", "compressed_axes"):
                if name in headers and prod(headers[name].shape) <= 64:
                    small[name] = _member(archive, name)
    except _DAMAGE as error:
        raise _damaged(file, where, error) from None
    return _sparse_of(headers, small, file, place)


def _sparse_of(headers: Headers, small: Mapping[str, Any], file: str, place: str) -> SparseFile:
    where = place or file
    form = np.asarray(small.get("format", "")).item()
    if isinstance(form, bytes):
        form = form.decode(errors="replace")
    if form not in _ARRAYS or "data" not in headers:
        what = f"{file} has the format {form!r:.40}" if form else f"{file} says no format"
        raise InputError(where, what, f"{_EXPECTED}, as {one_of(tuple(_ARRAYS))}")
    shape = check_shape(small.get("shape"), where, file)
    names = _ARRAYS[form]
    if form == "coo" and "row" in headers:  # as scipy writes matrices
        names = ("row", "col")
    missing = [name for name in names if name not in headers]
    if missing:
        raise InputError(where, f"{file} has no {missing[0]}", _EXPECTED)
    data = headers["data"]
    if data.dtype.name not in numpy_dtypes():
        raise InputError(where, f"data in {file} is {data.dtype.name}", one_of(numpy_dtypes()))
    if form != "bsr":
        check_vector(data, file)
    axes: tuple[int, ...] = {"csr": (0,), "bsr": (0,), "csc": (1,)}.get(form, ())
    if form == "gcxs":
        axes = tuple(np.ravel(small.get("compressed_axes", ())).tolist())
    if not set(axes) <= set(range(len(shape))):
        raise InputError(where, f"{file} compresses axes {list(axes)} of {len(shape)}", _EXPECTED)
    return SparseFile(
        file,
        "",
        place,
        form.upper(),
        shape,
        data.dtype,
        len(shape),
        prod(data.shape),
        {name: headers[name] for name in (*names, "data")},
        partial(_build, axes=axes),
        implicit=np.asarray(small.get("fill_value", 0)).item(),
    )


def _build(found: SparseFile, parts: Mapping[str, Array], axes: Sequence[int]) -> Stored:
    data = parts["data"]
    if found.form == "COO":
        keys = parts["coords"] if "coords" in parts else (parts["row"], parts["col"])
        return list(keys), data
    if found.form != "BSR":
        return compressed_keys(found, parts["indptr"], parts["indices"], axes), data
    return _build_blocks(found, parts)


def _build_blocks(found: SparseFile, parts: Mapping[str, Array]) -> Stored:
    """Return the keys of all elements of blocks, which follow one another in rows of blocks."""
    data = parts["data"]
    expected = "blocks that divide the matrix"
    if data.ndim != 3 or len(found.shape) != 2 or 0 in data.shape[1:]:
        raise InputError(found.where, f"the blocks of {found.file} have no shape", expected)
    block = data.shape[1:]
    if found.shape[0] % block[0] or found.shape[1] % block[1]:
        raise InputError(found.where, f"{found.file} has blocks of {block[0]}×{block[1]}", expected)
    blocks = replace(found, shape=(found.shape[0] // block[0], found.shape[1] // block[1]))
    keys = compressed_keys(blocks, parts["indptr"], parts["indices"], (0,))
    inside = np.indices(block)
    wide = []
    for column, extent, within in zip(keys, block, inside, strict=True):
        wide.append((column[:, None, None] * extent + within).reshape(-1))
    return wide, data.reshape(-1)


# ---- members of the archive ----------------------------------------------------------------------


def _header(
    archive: zipfile.ZipFile, file: str, name: str, place: str, sources: tuple[SourceFile, ...]
) -> Dataset:
    """Return what the header of an array says, compared with its size."""
    with archive.open(f"{name}.npy") as member, PYTHON_PARSER:
        version = np.lib.format.read_magic(member)
        read: Callable[..., Any] = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            read = np.lib.format.read_array_header_2_0
        shape, _, dtype = read(member)
        size = archive.getinfo(f"{name}.npy").file_size - member.tell()
    if size != prod(shape) * dtype.itemsize or dtype.hasobject:
        raise ValueError(f"{name} does not have the size that its header says")
    return Dataset(file, name, place, shape, dtype.str, sources=sources)


def _member(archive: zipfile.ZipFile, name: str) -> Array:
    """Return an array of an archive."""
    with archive.open(f"{name}.npy") as member, PYTHON_PARSER:
        found: Array = np.lib.format.read_array(member, allow_pickle=False)
    return found


class NpzReader:
    """An array of an archive. What is compressed has no middle, so it is read from its start."""

    def __init__(self, dataset: Dataset) -> None:
        try:
            with zipfile.ZipFile(dataset.file) as archive:
                self.array = _member(archive, dataset.name)
        except _DAMAGE as error:
            raise _damaged(dataset.file, dataset.where, error) from None

    def close(self) -> None:
        """Do nothing: the file is closed already."""

    def read(self, there: Box, target: Array, here: Box) -> None:
        """Read a box of the array into a box of the target."""
        target[here] = self.array[there]


def _damaged(file: str, where: str, error: Exception) -> InputError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return InputError(where, f"{file} cannot be read as .npz: {reason:.200}", _EXPECTED)
