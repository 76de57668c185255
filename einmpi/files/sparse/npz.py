"""Sparse tensors in .npz files, as scipy and the package sparse write them."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.files.datasets import Array, Dataset, SourceFile
from einmpi.files.sparse.found import (
    SparseFile,
    Stored,
    check_shape,
    check_vector,
    sources_of,
    sparse_of_rows,
)
from einmpi.files.specs import InputSpec
from einmpi.graph.dtypes import numpy_dtypes
from einmpi.language.syntax import PYTHON_PARSER
from einmpi.schedule.regions import Box

_EXPECTED = "a sparse tensor that scipy.sparse.save_npz or sparse.save_npz has written"
# What zipfile and numpy raise for files that are damaged, or no such files.
_DAMAGE = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, RuntimeError)
# The arrays of each form besides the values, which are `data`.
_ROWS = ("indptr", "indices")
_ARRAYS = {"csr": _ROWS, "csc": _ROWS, "gcxs": _ROWS, "coo": ("coords",)}
_FACTS = ("format", "shape", "fill_value", "compressed_axes")


def find_npz(spec: InputSpec) -> SparseFile:
    """Read the headers of the arrays in a file, and the few numbers that say what they are."""
    sources = sources_of(spec, "an .npz file")
    try:
        with zipfile.ZipFile(spec.file or "") as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            headers = {name: _header(archive, spec, name, sources) for name in names}
            facts: dict[str, Any] = {}
            for name in _FACTS:
                if name in headers and prod(headers[name].shape) <= 64:
                    facts[name] = _member(archive, name)
    except _DAMAGE as error:
        raise _damaged(spec.title, spec.where, error) from None
    return _sparse_of(headers, facts, spec)


def _sparse_of(
    headers: Mapping[str, Dataset], facts: Mapping[str, Any], spec: InputSpec
) -> SparseFile:
    """Return the sparse tensor of an archive whose members look as `headers` say."""
    form = _number_or_text("format", facts, spec)
    if form is None:  # as the package sparse wrote until version 0.15
        form = "coo" if "coords" in headers else "gcxs" if "compressed_axes" in headers else ""
    if form not in _ARRAYS:
        what = f"{spec.file} has the format {form!r:.40}" if form else f"{spec.file} says no format"
        raise InputError(spec.where, what, f"{_EXPECTED}, as {one_of(tuple(_ARRAYS))}")
    shape = check_shape(facts.get("shape"), spec)
    names = _ARRAYS[form]
    if form == "coo" and "row" in headers:  # as scipy writes matrices
        names = ("row", "col")
    for name in (*names, "data"):
        if name not in headers:
            raise InputError(spec.where, f"{spec.file} has no {name}", _EXPECTED)
    data = headers["data"]
    if data.dtype.name not in numpy_dtypes():
        what = f"data in {spec.file} is {data.dtype.name}"
        raise InputError(spec.where, what, one_of(numpy_dtypes()))
    arrays = {name: headers[name] for name in (*names, "data")}
    implicit = _number_or_text("fill_value", facts, spec) or 0
    if form != "coo":
        axes = {"csr": (0,), "csc": (1,)}.get(form, ())
        if form == "gcxs":
            axes = tuple(np.ravel(facts.get("compressed_axes", ())).tolist())
        is_known = all(axis in range(len(shape)) and isinstance(axis, int) for axis in axes)
        if not is_known or len({*axes}) < len(axes):
            what = f"{spec.file} compresses axes {list(axes)!s:.40} of {len(shape)}"
            raise InputError(spec.where, what, _EXPECTED)
        return sparse_of_rows(spec, form.upper(), shape, arrays, axes, implicit)
    stored = check_vector(data, spec.title)
    return SparseFile(
        spec, "COO", shape, data.dtype, stored, arrays, _build_of_coords, implicit=implicit
    )


def _number_or_text(name: str, facts: Mapping[str, Any], spec: InputSpec) -> Any:
    """Return a fact that is no list; None if the file does not say it."""
    if name not in facts:
        return None
    if np.size(facts[name]) != 1:
        raise InputError(spec.where, f"{name} in {spec.file} is a list", _EXPECTED)
    value = np.asarray(facts[name]).item()
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _build_of_coords(found: SparseFile, parts: Mapping[str, Array]) -> Stored:
    keys = parts["coords"] if "coords" in parts else (parts["row"], parts["col"])
    return list(keys), parts["data"]


# ---- members of the archive ----------------------------------------------------------------------


def _header(
    archive: zipfile.ZipFile, spec: InputSpec, name: str, sources: tuple[SourceFile, ...]
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
    return Dataset(spec.file or "", name, spec.place, shape, dtype.str, sources=sources)


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
    reason = str(error) or type(error).__name__
    return InputError(where, f"{file} cannot be read as .npz: {reason:.200}", _EXPECTED)
