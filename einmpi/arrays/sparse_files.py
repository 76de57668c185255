"""Sparse tensors to files: the arrays or lines that a format has, written by all ranks."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arguments import path_name
from einmpi.arrays.dist_array import DistArray
from einmpi.arrays.record import attributes_of
from einmpi.comm.agreement import together
from einmpi.comm.base import Comm
from einmpi.errors import InputError
from einmpi.files.claims import claimed
from einmpi.files.formats import (
    FROSTT,
    HDF5,
    MATRIX_MARKET,
    NPZ,
    FileFormat,
    known_format,
    split_short_form,
)
from einmpi.files.hdf5.sparse_groups import COORDINATES, ENCODING_VERSION
from einmpi.files.sparse.single_files import matrix_market_header, written_lines
from einmpi.files.specs import StorageSpec
from einmpi.files.writing import (
    OutputFile,
    Tensor,
    check_compression,
    check_target,
    tensor_of,
    write,
)
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.scalar import Number

Array: TypeAlias = npt.NDArray[Any]
Keys: TypeAlias = Sequence[npt.NDArray[Any]]


class SparseOutline(Protocol):
    """A sparse tensor without its values."""

    @property
    def pattern(self) -> Keys: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def implicit(self) -> Number: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...


class SparseTensor(SparseOutline, Protocol):
    """A sparse tensor, as much of it as writing needs; a SparseArray is one."""

    @property
    def values(self) -> DistArray: ...
    @property
    def own_comm(self) -> Comm: ...


def save_sparse(
    array: SparseTensor, where: str, given: Any, group: str | None, compression: str | None = None
) -> None:
    """Write a sparse tensor to a group of an HDF5 file, or as the name of the file says.

    All ranks call it. `where` is the function that messages name.
    """
    comm = array.own_comm

    def check_arguments() -> tuple[FileFormat, str, str]:
        file = path_name(where, given)
        name = group
        file_format = HDF5
        if name is None:
            file, name = split_short_form(file)
            file_format = known_format(where, file, writable=True)
        if not isinstance(name, str) or (file_format.key and not name.strip("/")):
            raise InputError(where, f"{name!r} is not the path of a group", "a path such as /A")
        check_compression(where, file_format, compression)
        check_sparse_output(file_format, where, "the tensor", array)
        return file_format, file, file_format.check_name(where, name)

    file_format, file, checked = together(
        comm, check_arguments, lambda found: repr((found[1:], compression))
    )
    tensors = sparse_tensors(file_format, checked, array, compression)
    names = {tensor.name: "" for tensor in tensors}
    check = partial(check_target, file, names, file_format)
    with claimed({file: ""}, comm, check) as claim:
        output = OutputFile(file, "", file_format, tensors)
        write([output], lambda: attributes_of(None, comm.size), claim)


def is_matrix(array: SparseOutline) -> bool:
    """Return whether a tensor is what others call a sparse matrix: two keys, and zeros."""
    return len(array.pattern) == len(array.shape) == 2 and array.implicit == 0


def sparse_tensors(
    file_format: FileFormat,
    name: str,
    array: SparseTensor,
    compression: str | None = None,
    tensor: str = "",
) -> list[Tensor]:
    """Return what to write to a file for a sparse tensor. All ranks call it.

    `tensor` is its name in the program, if it has one.
    """
    if file_format is HDF5:
        return _group(name, array, compression, tensor)
    if file_format is NPZ:
        return [_archive(array)]
    header = b""
    if file_format is MATRIX_MARKET:
        header = matrix_market_header(array.shape, len(array.pattern[0]), array.values.dtype)
    return [_lines(array, header)]


def check_sparse_output(
    file_format: FileFormat, where: str, title: str, array: SparseOutline
) -> None:
    """Refuse a tensor that a format cannot hold."""
    what = ""
    expected = "an HDF5 file, which can have all sparse tensors"
    if file_format.write is None or not file_format.write.sparse:
        what = f"{title} is sparse"
        expected = "an .h5, .npz, .mtx or .tns file"
    elif file_format is not HDF5 and len(array.pattern) < len(array.shape):
        what = f"{title} has dense tiles"
    elif file_format in (MATRIX_MARKET, FROSTT) and array.implicit != 0:
        what = f"what {title} does not store is {array.implicit}"
        expected = "an .h5 or .npz file, which can say that"
    elif file_format is MATRIX_MARKET and len(array.shape) != 2:
        what = f"{title} has {len(array.shape)} dimensions"
        expected = "a matrix in an .mtx file"
    elif file_format is FROSTT and array.dtype.kind == "c":
        what = f"{title} is {array.dtype}"
        expected = "real numbers in a .tns file"
    if what:
        raise InputError(where, what, expected)


# ---- HDF5 ----------------------------------------------------------------------------------------


def paths_in_group(name: str, array: SparseOutline) -> list[str]:
    """Return the paths of the datasets of a sparse tensor, that of its values first."""
    names = ["data", "indices", "indptr"]
    if not is_matrix(array):
        names = ["values", *(f"key_{number}" for number in range(len(array.pattern)))]
    return [f"{name.rstrip('/')}/{each}" for each in names]


def _group(name: str, array: SparseTensor, compression: str | None, tensor: str) -> list[Tensor]:
    """Return the datasets of a group: those of AnnData for a matrix, else keys and values."""
    keys = array.pattern
    attributes: dict[str, Any] = {
        "shape": np.array(array.shape, np.int64),
        "encoding-version": ENCODING_VERSION,
    }
    parts: Keys = keys
    if is_matrix(array):
        attributes["encoding-type"] = "csr_matrix"
        width = np.int32 if max(*array.shape, len(keys[0])) < 2**31 else np.int64
        parts = (keys[1].astype(width), _row_starts(array).astype(width))
    else:
        attributes["encoding-type"] = COORDINATES
        attributes["implicit"] = array.implicit
    arrays = [array.values]
    arrays += [DistArray.from_global(part, array.own_comm) for part in parts]
    found = []
    for path, each in zip(paths_in_group(name, array), arrays, strict=True):
        made = tensor_of(each, path, None, None, compression, None, tensor)
        found.append(replace(made, storage=replace(made.storage, group=attributes)))
    return found


def _row_starts(array: SparseTensor) -> Array:
    """Return where each row of a matrix begins, and where the last one ends."""
    return np.searchsorted(array.pattern[0], np.arange(array.shape[0] + 1))


# ---- files that are made of bytes ----------------------------------------------------------------


def _archive(array: SparseTensor) -> Tensor:
    """Return the bytes of an .npz file as scipy writes it, or the package sparse if it must."""
    values = _gathered_values(array)
    parts: dict[str, Any] = {"shape": np.array(array.shape), "data": values}
    if is_matrix(array):
        parts["format"] = np.array(b"csr")
        parts["indices"] = array.pattern[1]
        parts["indptr"] = _row_starts(array)
    else:
        parts["format"] = np.array("coo")
        parts["coords"] = np.stack(array.pattern)
        parts["fill_value"] = np.array(array.implicit, values.dtype)
    memory = io.BytesIO()
    np.savez(memory, **parts)
    whole = np.frombuffer(memory.getbuffer(), np.uint8)
    return _bytes_tensor(DistArray.from_global(whole, array.own_comm))


def _gathered_values(array: SparseTensor) -> Array:
    """Return all values in a dtype that files have."""
    values: Array = array.values.gather()
    return values.astype(DTYPES[values.dtype.name].file_dtype, copy=False)


def _bytes_tensor(array: DistArray, header: bytes = b"") -> Tensor:
    return Tensor("", array, StorageSpec(array.shape, "uint8", header=header))


def _lines(array: SparseTensor, header: bytes) -> Tensor:
    """Return lines of one length, of which each rank makes some: all know where theirs begin."""
    comm = array.own_comm
    count = len(array.pattern[0])
    own = slice(count * comm.rank // comm.size, count * (comm.rank + 1) // comm.size)
    lines = written_lines([column[own] for column in array.pattern], _gathered_values(array)[own])
    longest = -comm.lowest(-max(map(len, lines), default=0))
    text = "".join(f"{line:>{longest}}\n" for line in lines)
    table = np.frombuffer(text.encode(), np.uint8).reshape(len(lines), longest + 1)
    return _bytes_tensor(DistArray.from_local(table, comm=comm), header)
