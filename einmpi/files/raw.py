"""Files whose tensors lie in one piece after a header: .npy and safetensors. Only headers are read here."""

from __future__ import annotations

import json
import os
import warnings
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.files.datasets import LISTED, Dataset, check_file
from einmpi.graph.dtypes import check_installed, cpu_dtypes

_SAFETENSORS = {
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
    "C64": "<c8",
    "I32": "<i4",
    "I64": "<i8",
    "BOOL": "|b1",
    "BF16": "bfloat16",
}
_LONGEST_HEADER = 100 * 10**6  # bytes, as the format has it


def find_npy(file: str, _: str, place: str) -> Dataset:
    check_file(file, place, "an .npy file")
    try:
        # Looks at the header, and compares it with the size of the file. Nothing is ever unpickled.
        with warnings.catch_warnings(action="ignore"):  # about headers that Python 2 wrote
            found = np.lib.format.open_memmap(file, mode="r")
    except (
        Exception
    ) as error:  # it parses the header as Python's text: any kind of error may come of that
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            place or file, f"{file} cannot be read as .npy: {reason}", "an array of numbers"
        ) from None
    if found.dtype.newbyteorder("=").name not in cpu_dtypes():
        shown = "compound" if found.dtype.kind == "V" else found.dtype.name
        raise InputError(
            place or file, f"{file} is {shown}, which is not supported", one_of(cpu_dtypes())
        )
    fortran = found.ndim > 1 and found.flags.f_contiguous and not found.flags.c_contiguous
    return Dataset(
        file, "", place, found.shape, found.dtype.str, offset=int(found.offset), fortran=fortran
    )


def find_safetensors(file: str, tensor: str, place: str) -> Dataset:
    check_file(file, place, "a safetensors file")
    try:
        status = os.stat(file)
        start, header = _safetensors_header(file, status.st_mtime_ns, status.st_size)
        entry = header.get(tensor)
        if entry is None:
            listed = one_of(sorted(header), tensor, LISTED)
            raise InputError(place or file, f"there is no tensor {tensor} in {file}", listed)
        code, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, first, last)
        if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            raise ValueError(f"the header says {numbers} of {tensor}")
        if not first <= last <= status.st_size - start:
            raise ValueError(f"{tensor} ends after the end of the file")
        check_installed(place or file, _SAFETENSORS.get(code, ""))
        if (
            code in _SAFETENSORS
            and last - first != prod(shape) * np.dtype(_SAFETENSORS[code]).itemsize
        ):
            raise ValueError(f"{tensor} has {last - first} bytes, which is not its shape")
    except (ValueError, TypeError, KeyError, OSError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            place or file, f"{file} cannot be read as safetensors: {reason:.200}"
        ) from None
    if code not in _SAFETENSORS:
        raise InputError(
            place or file,
            f"{tensor} in {file} is {code!s:.20}, which is not supported",
            one_of(cpu_dtypes()),
        )
    return Dataset(file, tensor, place, shape, _SAFETENSORS[code], offset=start + first)


@lru_cache(maxsize=8)  # models have hundreds of tensors in a file
def _safetensors_header(file: str, _changed: int, size: int) -> tuple[int, dict[str, Any]]:
    """(where the values begin, the entries by name): eight bytes of length, then JSON."""
    with open(file, "rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise ValueError("its header is longer than the file")
        header = json.loads(handle.read(length))
    if not isinstance(header, dict) or not all(
        isinstance(entry, dict) for entry in header.values()
    ):
        raise ValueError("its header is not a table of tensors")
    header.pop("__metadata__", None)
    return 8 + length, header
