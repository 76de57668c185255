"""NumPy's .npy files: a header, then the elements of one array."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from hashlib import sha256
from math import prod

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.files.atomic import make_draft
from einmpi.files.datasets import Dataset, check_file
from einmpi.files.specs import Place, StorageSpec
from einmpi.graph.dtypes import numpy_dtypes
from einmpi.language.syntax import PYTHON_PARSER


def find(file: str, _: str, place: str) -> Dataset:
    """Read the header of an .npy file."""
    check_file(file, place, "an .npy file")
    try:
        # This parses the header and compares it with the size of the file; it never unpickles.
        with (
            PYTHON_PARSER,
            warnings.catch_warnings(action="ignore"),  # about headers that Python 2 wrote
        ):
            array = np.lib.format.open_memmap(file, mode="r")
        offset = int(array.offset)
        with open(file, "rb") as opened:
            header = sha256(opened.read(offset)).hexdigest()
    except Exception as error:  # the header is parsed as Python text, so anything may be raised
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            place or file, f"{file} cannot be read as .npy: {reason}", "an array of numbers"
        ) from None
    if array.dtype.newbyteorder("=").name not in numpy_dtypes():
        dtype = "compound" if array.dtype.kind == "V" else array.dtype.name
        raise InputError(
            place or file, f"{file} is {dtype}, which is not supported", one_of(numpy_dtypes())
        )
    fortran = array.ndim > 1 and array.flags.f_contiguous and not array.flags.c_contiguous
    return Dataset(
        file,
        "",
        place,
        array.shape,
        array.dtype.str,
        offset=offset,
        fortran=fortran,
        header=header,
    )


def lay_out(
    draft: str, target: str, tensors: Mapping[str, StorageSpec], attributes: Mapping[str, str]
) -> list[Place]:
    """Write the header and make room for the elements. The format has no place for attributes."""
    make_draft(draft, target, None)
    (spec,) = tensors.values()
    dtype = np.dtype(spec.dtype)
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": spec.shape,
    }
    with open(draft, "r+b") as file:
        np.lib.format.write_array_header_1_0(file, header)
        offset = file.tell()
        os.ftruncate(file.fileno(), offset + prod(spec.shape) * dtype.itemsize)
    return [(offset, None)]
