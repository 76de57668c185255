"""Files that hold a single sparse tensor: .npz of scipy and of the package sparse, MatrixMarket's
.mtx, and .tns of FROSTT. Keys in text count from 1."""

from __future__ import annotations

import io
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.files.atomic import make_draft
from einmpi.files.datasets import Array, Dataset, DType, RawReader, SourceFile
from einmpi.files.sparse.found import (
    GENERAL,
    SparseFile,
    Stored,
    check_shape,
    check_symmetry,
    check_vector,
    mirrored,
    rows_of,
    sources_of,
    sparse_of_rows,
)
from einmpi.files.specs import InputSpec, Place, StorageSpec
from einmpi.graph.dtypes import numpy_dtypes
from einmpi.language.syntax import PYTHON_PARSER
from einmpi.schedule.regions import Box

# ---- npz -----------------------------------------------------------------------------------------

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


# ---- text ----------------------------------------------------------------------------------------

LINES = "lines"  # the only part of a text
_BLOCK_BYTES = 2**16  # read at a time to find the end of a line
_MOST_HEADER_BYTES = 2**20  # of a line of a header
_VALUE = "value"
_IMAGINARY = "imaginary"

# ---- MatrixMarket --------------------------------------------------------------------------------

_BANNER = "%%MatrixMarket"
# The dtype of the values of each field. A pattern has none: all are 1.
_FIELDS = {
    "real": "float64",
    "double": "float64",
    "integer": "int64",
    "unsigned-integer": "uint64",
    "complex": "complex128",
    "pattern": "float64",
}


def find_matrix_market(spec: InputSpec) -> SparseFile:
    """Read the header of an .mtx file."""
    sources = sources_of(spec, "an .mtx file")
    with open(spec.file or "", "rb") as opened:
        banner = opened.readline(_MOST_HEADER_BYTES).decode(errors="replace").lower().split()
        size = b"%"
        while size.startswith(b"%") or not size.strip():
            size = opened.readline(_MOST_HEADER_BYTES)
            if not size:
                break
        start = opened.tell()
    if len(banner) != 5 or banner[0] != _BANNER.lower():
        what = f"{spec.file} does not begin with {_BANNER} and four words"
        raise InputError(spec.where, what, "an .mtx file")
    _, kind, layout, field, symmetry = banner
    if (kind, layout) != ("matrix", "coordinate"):
        what = f"{spec.file} has a {kind:.40} in the format {layout:.40}"
        raise InputError(spec.where, what, "a matrix in the format coordinate")
    if field not in _FIELDS:
        raise InputError(spec.where, f"{spec.file} is {field:.40}", one_of(tuple(_FIELDS), field))
    counts = size.split()
    if len(counts) != 3 or not all(re.fullmatch(rb"[0-9]{1,12}", count) for count in counts):
        what = f"the sizes of {spec.file} are {_shown(size)}"
        raise InputError(spec.where, what, "numbers of rows, columns and stored elements")
    rows, columns, stored = map(int, counts)
    dtype = np.dtype(_FIELDS[field])
    check_symmetry(symmetry, (rows, columns), dtype, spec)
    read = {"pattern": [], "complex": [_VALUE, _IMAGINARY]}.get(field, [_VALUE])
    return SparseFile(
        spec,
        "MatrixMarket",
        (rows, columns),
        dtype,
        stored if symmetry == GENERAL else 2 * stored,
        {LINES: _text(spec, sources, start)},
        partial(_build_matrix, stored=stored, symmetry=symmetry),
        partial(_parse, values=read),
    )


def _build_matrix(
    found: SparseFile, parts: Mapping[str, Array], stored: int, symmetry: str
) -> Stored:
    keys, values = _build(found, parts)
    if len(values) != stored:
        what = f"{found.spec.title} has {len(values)} stored elements"
        raise InputError(found.spec.where, what, f"{stored}, as its header says")
    if _IMAGINARY in parts:
        values = values + 1j * parts[_IMAGINARY]
    return mirrored(found, keys, values, symmetry)


# ---- FROSTT --------------------------------------------------------------------------------------


def find_tns(spec: InputSpec) -> SparseFile:
    """Look at a .tns file. It has no header: unless the job says the shape, all of it is read."""
    text = _text(spec, sources_of(spec, "a .tns file"), 0)
    parse = partial(_parse, values=[_VALUE])
    shape = spec.declared_shape or ()
    dtype = np.dtype("float64")
    found = SparseFile(spec, "FROSTT", shape, dtype, None, {LINES: text}, _build, parse)
    if spec.declared_shape is not None:
        return found
    with open(spec.file or "", "rb") as opened:
        content = opened.read()
    first = re.search(rb"^\s*([^#%\s][^#%\n]*)", content, re.MULTILINE)
    key_dimensions = len(first[1].split()) - 1 if first else 0
    if key_dimensions < 1:
        what = f"{spec.file} has no line with keys and a value"
        raise InputError(spec.where, what, "lines such as 1 2 3 0.5, or its shape")
    parts = parse(replace(found, shape=(0,) * key_dimensions), content, 0)
    *keys, values = parts.values()
    shape = tuple(max(0, int(column.max())) for column in keys)
    return replace(found, shape=shape, stored=len(values))


# ---- lines ---------------------------------------------------------------------------------------


def _text(spec: InputSpec, sources: tuple[SourceFile, ...], start: int) -> Dataset:
    """Return the bytes of a file from `start` on as a dataset."""
    file = spec.file or ""
    shape = (os.path.getsize(file) - start,)
    return Dataset(file, "", spec.place, shape, "|u1", offset=start, sources=sources)


def own_lines(text: Dataset, rank: int, ranks: int) -> tuple[bytes, int]:
    """Return the lines that begin in a rank's share of a text, and where in the text they do."""
    (size,) = text.shape
    with closing(RawReader(text)) as reader:
        start = _line_from(text, reader, size * rank // ranks)
        stop = _line_from(text, reader, size * (rank + 1) // ranks)
        return rows_of(text, reader, start, stop).tobytes(), start


def _line_from(text: Dataset, reader: RawReader, place: int) -> int:
    """Return where the first line begins that begins at a place or after it."""
    (size,) = text.shape
    if place == 0:
        return 0
    place -= 1  # a line may begin just there: then the byte before ends a line
    while place < size:
        end = min(size, place + _BLOCK_BYTES)
        found = rows_of(text, reader, place, end).tobytes().find(b"\n")
        if found >= 0:
            return place + found + 1
        place = end
    return size


def _parse(
    found: SparseFile, lines: bytes, start: int, values: Sequence[str]
) -> Mapping[str, Array]:
    """Return the keys, from 1, and the values of lines; `start` is where they are in the text."""
    stored = "float64" if found.dtype.kind == "c" else found.dtype.str
    keys = [(f"key_{number}", "i8") for number in range(found.key_dimensions)]
    dtype = np.dtype([*keys, *((name, stored) for name in values)])
    try:
        table = _table(lines, dtype)
    except (ValueError, OverflowError):
        raise _bad_line(found, lines, start, dtype) from None
    return {name: np.ascontiguousarray(table[name]) for name in dtype.names or ()}


def _build(found: SparseFile, parts: Mapping[str, Array]) -> Stored:
    keys = []
    for number, extent in enumerate(found.shape):
        column = parts[f"key_{number}"]
        outside = column[(column < 1) | (column > extent)]
        if outside.size:
            what = f"key {outside[0]} of dimension {number} in {found.spec.file} is out of range"
            expected = f"1 to {extent}" if extent else "keys that count from 1"
            raise InputError(found.spec.where, what, expected)
        keys.append(column - 1)
    return keys, parts[_VALUE] if _VALUE in parts else np.ones(len(keys[0]))


def _table(lines: bytes, dtype: DType) -> Array:
    """Return lines of numbers as an array with a field for each column."""
    text = io.StringIO(lines.decode("latin-1"))  # comments may be in any encoding
    with warnings.catch_warnings(action="ignore"):  # there may be no line
        return np.loadtxt(text, dtype, comments=["#", "%"], ndmin=1)


def _bad_line(found: SparseFile, lines: bytes, start: int, dtype: DType) -> InputError:
    """Return the error for the first line that cannot be read."""
    names = dtype.names or ()
    expected = f"{len(names)} numbers, the first {found.key_dimensions} of them integers"
    with open(found.spec.file or "", "rb") as opened:
        number = opened.read((found.arrays[LINES].offset or 0) + start).count(b"\n")
    for line in lines.split(b"\n"):
        number += 1
        try:
            _table(line, dtype)
        except (ValueError, OverflowError):
            what = f"line {number} of {found.spec.file} is {_shown(line)}"
            return InputError(found.spec.where, what, expected)
    return InputError(found.spec.where, f"{found.spec.file} cannot be read", expected)


def _shown(line: bytes) -> str:
    return f"{line.decode(errors='replace').strip()!r:.60}"


# ---- writing -------------------------------------------------------------------------------------


def lay_out_text(
    draft: str, target: str, tensors: Mapping[str, StorageSpec], attributes: Mapping[str, str]
) -> list[Place]:
    """Write the header and make room for the lines, which have one length, as bytes.

    The formats have no place for attributes.
    """
    make_draft(draft, target, None)
    (spec,) = tensors.values()
    with open(draft, "r+b") as file:
        file.write(spec.header)
        file.truncate(len(spec.header) + prod(spec.shape))
    return [(len(spec.header), None)]


def matrix_market_header(shape: Sequence[int], stored: int, dtype: DType) -> bytes:
    """Return the first lines of an .mtx file."""
    field = {"f": "real", "c": "complex", "u": "unsigned-integer"}.get(dtype.kind, "integer")
    rows, columns = shape
    return f"{_BANNER} matrix coordinate {field} general\n{rows} {columns} {stored}\n".encode()


def written_lines(keys: Sequence[Array], values: Array) -> list[str]:
    """Return a line for each stored element: its keys from 1 on, and its value."""
    columns = [map(str, (column + 1).tolist()) for column in keys]
    if values.dtype.kind == "b":
        values = values.astype(np.int8)
    parts = [values.real, values.imag] if values.dtype.kind == "c" else [values]
    columns.extend(map(repr, part.tolist()) for part in parts)
    return [" ".join(line) for line in zip(*columns, strict=True)]
