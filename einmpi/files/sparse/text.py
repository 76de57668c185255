"""Sparse tensors in text: MatrixMarket's .mtx, and .tns of FROSTT. Keys count from 1."""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from math import prod

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.files.atomic import make_draft
from einmpi.files.datasets import Array, Dataset, DType, RawReader, SourceFile
from einmpi.files.sparse.found import (
    GENERAL,
    SparseFile,
    Stored,
    check_symmetry,
    mirrored,
    rows_of,
    sources_of,
)
from einmpi.files.specs import InputSpec, Place, StorageSpec

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
