"""safetensors files: eight bytes with the length of the header, a header in JSON, the elements."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from hashlib import sha256
from math import prod
from typing import Any, TypeAlias

import numpy as np

from einmpi.errors import InputError, nearest_of, one_of
from einmpi.files.datasets import Dataset, FileIdentity, check_file, identity_from
from einmpi.graph.dtypes import DTYPES
from einmpi.units import counted

Header: TypeAlias = dict[str, dict[str, Any]]

# The dtypes of the format that einmpi has too, as numpy writes them.
_DTYPES = {
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
    "C64": "<c8",
    "I8": "|i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
    "U8": "|u1",
    "U16": "<u2",
    "U32": "<u4",
    "U64": "<u8",
    "BOOL": "|b1",
    "BF16": "bfloat16",
}
_MOST_HEADER_BYTES = 100 * 10**6  # the limit that the format sets
_LENGTH_BYTES = 8


def find(file: str, tensor: str, place: str) -> Dataset:
    """Look up a tensor in the header of a file."""
    where = place or file
    check_file(file, place, "a safetensors file")
    try:
        identity = identity_from(os.stat(file))
        start, header, digest = _read_header(file, identity)
        entry = header.get(tensor)
        if entry is not None:
            code, shape, first, last = _parse_entry(tensor, entry, identity.size - start)
    except (ValueError, TypeError, KeyError, OSError, RecursionError) as error:
        raise _not_safetensors(file, place, error) from None
    if entry is None:
        expected = nearest_of(sorted(header), tensor)
        raise InputError(where, f"there is no tensor {tensor} in {file}", expected)
    if code not in _DTYPES:
        raise InputError(
            where,
            f"{tensor} in {file} is {code:.20}, which is not supported",
            one_of(tuple(DTYPES)),
        )
    stored = _DTYPES[code]
    if last - first != prod(shape) * np.dtype(stored).itemsize:
        raise InputError(
            where,
            f"{file} cannot be read as safetensors: {tensor} has "
            f"{counted(last - first, 'byte')}, which does not match its shape",
            "an undamaged file",
        )
    return Dataset(file, tensor, place, shape, stored, offset=start + first, header=digest)


def list_tensors(file: str, place: str, most: int) -> list[str]:
    """Return the names of the first tensors in a file."""
    check_file(file, place, "a safetensors file")
    try:
        header = _read_header(file, identity_from(os.stat(file)))[1]
    except (ValueError, OSError, RecursionError) as error:
        raise _not_safetensors(file, place, error) from None
    return sorted(header)[:most]


def _not_safetensors(file: str, place: str, error: Exception) -> InputError:
    reason = " ".join(str(error).split())
    what = f"{file} cannot be read as safetensors: {reason:.200}"
    return InputError(place or file, what, "an undamaged file")


def _parse_entry(
    tensor: str, entry: dict[str, Any], available_bytes: int
) -> tuple[str, tuple[int, ...], int, int]:
    """Return the dtype code, shape, first and last offset; raise ValueError or TypeError."""
    code = entry["dtype"]
    if not isinstance(code, str):
        raise TypeError(f"the dtype of {tensor} is not a string")
    shape = tuple(entry["shape"])
    first, last = entry["data_offsets"]
    numbers = (*shape, first, last)
    for number in numbers:
        if type(number) is not int or not 0 <= number < 2**63:
            raise ValueError(f"the header says {numbers} about {tensor}")
    if not first <= last <= available_bytes:
        raise ValueError(f"{tensor} ends after the end of the file")
    return code, shape, first, last


@lru_cache(maxsize=8)  # a model has hundreds of tensors in a file
def _read_header(file: str, identity: FileIdentity) -> tuple[int, Header, str]:
    """Return the offset of the first element, the header's entries by tensor name, its digest."""
    with open(file, "rb") as opened:
        length_bytes = opened.read(_LENGTH_BYTES)
        length = int.from_bytes(length_bytes, "little")
        most = min(identity.size - _LENGTH_BYTES, _MOST_HEADER_BYTES)
        if identity.size < _LENGTH_BYTES or length > most:
            raise ValueError("its header is longer than the file")
        text = opened.read(length)
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("its header is not a table of tensors")
    for entry in header.values():
        if not isinstance(entry, dict):
            raise ValueError("its header is not a table of tensors")
    header.pop("__metadata__", None)
    digest = sha256(length_bytes + text).hexdigest()
    return _LENGTH_BYTES + length, header, digest
