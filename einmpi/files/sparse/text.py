"""Sparse tensors in text: MatrixMarket's .mtx, and .tns of FROSTT. Keys count from 1."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, TypeAlias

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.files.atomic import make_draft
from einmpi.files.datasets import Dataset, RawReader, SourceFile, check_file, identity_at
from einmpi.files.sparse.found import (
    SYMMETRIES,
    Array,
    SparseFile,
    Stored,
    check_symmetry,
    mirrored,
)
from einmpi.files.specs import InputSpec, Place, StorageSpec

DType: TypeAlias = np.dtype[Any]
LINES = "lines"  # the only part of a text
_BLOCK_BYTES = 2**16  # read at a time to find the end of a line
_MOST_HEADER_BYTES = 2**20  # of a line of a header
_MOST_SHOWN = 60  # characters of a line in a message
_VALUE = "value"

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
    file = spec.file or ""
    place = spec.place
    where = place or file
    check_file(file, place, "an .mtx file")
    identity = identity_at(file)
    with open(file, "rb") as opened:
        banner = _header_line(opened, file, where).split()
        size = b"%"
        while size.startswith(b"%") or not size.strip():
            size = opened.readline(_MOST_HEADER_BYTES)
            if not size:
                break
        start = opened.tell()
    words = [word.lower() for word in banner[1:]]
    if not banner or banner[0].lower() != _BANNER.lower() or len(words) != 4:
        raise InputError(where, f"{file} does not begin with {_BANNER}", "an .mtx file")
    kind, layout, field, symmetry = words
    if (kind, layout) != ("matrix", "coordinate"):
        what = f"{file} has a {kind} in the format {layout:.40}"
        raise InputError(where, what, "a matrix in the format coordinate")
    if field not in _FIELDS:
        raise InputError(where, f"{file} is {field:.40}", one_of(tuple(_FIELDS), field))
    counts = size.split()
    if len(counts) != 3 or not all(re.fullmatch(rb"[0-9]{1,12}", count) for count in counts):
        what = f"the sizes of {file} are {_shown(size)}"
        raise InputError(where, what, "numbers of rows, columns and stored elements")
    rows, columns, stored = map(int, counts)
    shape = (rows, columns)
    dtype = np.dtype(_FIELDS[field])
    if symmetry != "general":
        if symmetry not in SYMMETRIES:
            expected = one_of(("general", *SYMMETRIES), symmetry)
            raise InputError(where, f"{file} is {symmetry:.40}", expected)
        check_symmetry(symmetry, shape, dtype, where)
    read = [] if field == "pattern" else [_VALUE]
    if field == "complex":
        read.append("imaginary")
    text = _text(file, place, start, identity)
    return SparseFile(
        file,
        "",
        place,
        "MatrixMarket",
        shape,
        dtype,
        2,
        stored if symmetry == "general" else 2 * stored,
        {LINES: text},
        partial(_build_matrix, stored=stored, symmetry=symmetry),
        partial(_parse, values=read),
    )


def _header_line(opened: Any, file: str, where: str) -> str:
    """Return the first line of a file."""
    try:
        line: str = opened.readline(_MOST_HEADER_BYTES).decode("ascii")
    except UnicodeDecodeError:
        raise InputError(where, f"{file} is no text", "an .mtx file") from None
    return line


def _build_matrix(
    found: SparseFile, parts: Mapping[str, Array], stored: int, symmetry: str
) -> Stored:
    keys, values = _build(found, parts)
    if len(values) != stored:
        what = f"{found.title} has {len(values)} stored elements"
        raise InputError(found.where, what, f"{stored}, as its header says")
    if "imaginary" in parts:
        values = values + 1j * parts["imaginary"]
    return (keys, values) if symmetry == "general" else mirrored(keys, values, symmetry)


# ---- FROSTT --------------------------------------------------------------------------------------


def find_tns(spec: InputSpec) -> SparseFile:
    """Look at a .tns file. It has no header: unless the job says the shape, all of it is read."""
    file = spec.file or ""
    place = spec.place
    check_file(file, place, "a .tns file")
    text = _text(file, place, 0, identity_at(file))
    parse = partial(_parse, values=[_VALUE])
    if spec.declared_shape is not None:
        return _tns(text, spec.declared_shape, None, parse)
    with open(file, "rb") as opened:
        content = opened.read()
    first = next(_content_lines(content), b"")
    key_dimensions = len(first.split()) - 1
    if key_dimensions < 1:
        what = f"{file} has no line with keys and a value"
        raise InputError(place or file, what, "lines such as 1 2 3 0.5, or its shape")
    unlimited = _tns(text, (2**62,) * key_dimensions, None, parse)
    parts = _parse(unlimited, content, 0, values=[_VALUE])
    largest = [int(parts[f"key_{number}"].max()) + 1 for number in range(key_dimensions)]
    return _tns(text, tuple(largest), len(parts[_VALUE]), parse)


def _tns(text: Dataset, shape: tuple[int, ...], stored: int | None, parse: Any) -> SparseFile:
    return SparseFile(
        text.file,
        "",
        text.place,
        "FROSTT",
        shape,
        np.dtype("float64"),
        len(shape),
        stored,
        {LINES: text},
        _build,
        parse,
    )


# ---- lines ---------------------------------------------------------------------------------------


def _text(file: str, place: str, start: int, identity: Any) -> Dataset:
    """Return the bytes of a file from `start` on as a dataset."""
    sources = () if identity is None else (SourceFile(file, identity),)
    size = 0 if identity is None else identity.size
    return Dataset(file, "", place, (size - start,), "|u1", offset=start, sources=sources)


def own_lines(text: Dataset, rank: int, ranks: int) -> tuple[bytes, int]:
    """Return the lines that begin in a rank's share of a text, and where in the text they do."""
    (size,) = text.shape
    reader = RawReader(text)
    try:
        start = _line_from(reader, size * rank // ranks)
        stop = _line_from(reader, size * (rank + 1) // ranks)
        return _read(reader, start, stop), start
    finally:
        reader.close()


def _line_from(reader: RawReader, place: int) -> int:
    """Return where the first line begins that begins at a place or after it."""
    (size,) = reader.shape
    if place == 0:
        return 0
    place -= 1  # a line may begin just there: then the byte before ends a line
    while place < size:
        end = min(size, place + _BLOCK_BYTES)
        found = _read(reader, place, end).find(b"\n")
        if found >= 0:
            return place + found + 1
        place = end
    return size


def _read(reader: RawReader, start: int, stop: int) -> bytes:
    target = np.empty(stop - start, np.uint8)
    reader.read((slice(start, stop),), target, (slice(0, stop - start),))
    return target.tobytes()


def _parse(
    found: SparseFile, lines: bytes, start: int, values: Sequence[str]
) -> Mapping[str, Array]:
    """Return the keys, from 0, and the values of lines; `start` is where they are in the text."""
    stored = "float64" if found.dtype.kind == "c" else found.dtype.str
    columns = [f"key_{number}" for number in range(found.key_dimensions)]
    dtype = np.dtype([*((name, "i8") for name in columns), *((name, stored) for name in values)])
    try:
        table = _table(lines, dtype)
    except (ValueError, OverflowError):
        raise _bad_line(found, lines, start, dtype) from None
    parts = {name: np.ascontiguousarray(table[name]) for name in dtype.names or ()}
    for name, extent in zip(columns, found.shape, strict=True):
        keys = parts[name]
        if keys.size and not (keys.min() >= 1 and keys.max() <= extent):
            wrong = keys.min() if keys.min() < 1 else keys.max()
            what = f"key {wrong} of dimension {columns.index(name)} in {found.file} is out of range"
            expected = f"1 to {extent}" if extent else "no key at all"
            raise InputError(found.where, what, expected)
        keys -= 1
    return parts


def _build(found: SparseFile, parts: Mapping[str, Array]) -> Stored:
    keys = [parts[f"key_{number}"] for number in range(found.key_dimensions)]
    return keys, parts[_VALUE] if _VALUE in parts else np.ones(len(keys[0]))


def _table(lines: bytes, dtype: DType) -> Array:
    """Return lines of numbers as an array with a field for each column."""
    text = io.StringIO(lines.decode("ascii"))
    with warnings.catch_warnings(action="ignore"):  # there may be no line
        return np.loadtxt(text, dtype, comments=["#", "%"], ndmin=1)


def _content_lines(lines: bytes) -> Iterator[bytes]:
    """Yield the lines that are neither empty nor comments."""
    for line in lines.split(b"\n"):
        if re.split(rb"[#%]", line)[0].strip():
            yield line


def _bad_line(found: SparseFile, lines: bytes, start: int, dtype: DType) -> InputError:
    """Return the error for the first line that cannot be read."""
    names = dtype.names or ()
    expected = f"{len(names)} numbers, the first {found.key_dimensions} of them integers"
    with open(found.file, "rb") as opened:
        number = opened.read((found.arrays[LINES].offset or 0) + start).count(b"\n")
    for line in lines.split(b"\n"):
        number += 1
        if not any(_content_lines(line)):
            continue
        try:
            _table(line, dtype)
        except (ValueError, OverflowError):
            what = f"line {number} of {found.file} is {_shown(line)}"
            return InputError(found.where, what, expected)
    return InputError(found.where, f"{found.file} cannot be read", expected)


def _shown(line: bytes) -> str:
    text = line.decode("ascii", errors="replace").strip()
    return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…")


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
    if values.dtype.kind == "c":
        columns.append(map(repr, values.real.tolist()))
        columns.append(map(repr, values.imag.tolist()))
    elif values.dtype.kind == "b":
        columns.append(map(repr, values.astype(int).tolist()))
    else:
        columns.append(map(repr, values.tolist()))
    return [" ".join(line) for line in zip(*columns, strict=True)]
