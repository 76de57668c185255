"""Sparse tensors to files: the arrays or lines that a format has, written by all ranks."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arrays.dist_array import DistArray
from einmpi.comm.base import Comm
from einmpi.errors import InputError
from einmpi.files.formats import FROSTT, HDF5, MATRIX_MARKET, NPZ, FileFormat
from einmpi.files.hdf5.sparse_groups import COORDINATES, ENCODING_VERSION
from einmpi.files.sparse.text import matrix_market_header, written_lines
from einmpi.files.specs import StorageSpec
from einmpi.files.writing import Tensor, tensor_of
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.scalar import Number

Array: TypeAlias = npt.NDArray[Any]
Keys: TypeAlias = Sequence[npt.NDArray[np.int64]]


def is_matrix(keys: Keys, shape: Sequence[int], implicit: Number) -> bool:
    """Return whether a tensor is what others call a sparse matrix: two keys, and zeros."""
    return len(keys) == len(shape) == 2 and implicit == 0


def sparse_tensors(
    file_format: FileFormat,
    name: str,
    keys: Keys,
    values: DistArray,
    shape: Sequence[int],
    implicit: Number,
    compression: str | None = None,
    tensor: str = "",
) -> list[Tensor]:
    """Return what to write to a file for a sparse tensor. All ranks call it."""
    if file_format is HDF5:
        return _group(name, keys, values, shape, implicit, compression, tensor)
    if file_format is NPZ:
        return [_archive(keys, values, shape, implicit)]
    header = b""
    if file_format is MATRIX_MARKET:
        header = matrix_market_header(shape, len(keys[0]), values.dtype)
    return [_lines(keys, values, header)]


def names_in_group(name: str, is_matrix: bool, key_dimensions: int) -> list[str]:
    """Return the datasets of a sparse tensor in an HDF5 file, the values first."""
    group = name.rstrip("/")
    if is_matrix:
        return [f"{group}/data", f"{group}/indices", f"{group}/indptr"]
    return [f"{group}/values", *(f"{group}/key_{n}" for n in range(key_dimensions))]


def check_sparse_output(
    file_format: FileFormat,
    where: str,
    title: str,
    shape: Sequence[int],
    key_dimensions: int,
    implicit: Number,
    dtype: str,
) -> None:
    """Refuse a tensor that a format cannot hold. All of this is known before it is computed."""
    what = ""
    expected = "an HDF5 file, which can have all sparse tensors"
    has_tiles = key_dimensions < len(shape)
    if file_format.write is None or not file_format.write.sparse:
        what = f"{title} is sparse"
        expected = f'an .h5, .npz, .mtx or .tns file, or formats: {title} = "dense"'
    elif file_format is not HDF5 and has_tiles:
        what = f"{title} has dense tiles"
    elif file_format in (MATRIX_MARKET, FROSTT) and implicit != 0:
        what = f"what {title} does not store is {implicit}"
        expected = "an .h5 or .npz file, which can say that"
    elif file_format is MATRIX_MARKET and len(shape) != 2:
        what = f"{title} has {len(shape)} dimensions"
        expected = "a matrix in an .mtx file"
    elif file_format is FROSTT and DTYPES[dtype].kind == "c":
        what = f"{title} is {dtype}"
        expected = "real numbers in a .tns file"
    if what:
        raise InputError(where, what, expected)


# ---- HDF5 ----------------------------------------------------------------------------------------


def _group(
    name: str,
    keys: Keys,
    values: DistArray,
    shape: Sequence[int],
    implicit: Number,
    compression: str | None,
    tensor: str,
) -> list[Tensor]:
    """Return the datasets of a group: those of AnnData for a matrix, else keys and values."""
    whole: list[Array] = list(keys)
    attributes: dict[str, Any] = {"shape": np.array(shape, np.int64)}
    attributes["encoding-version"] = ENCODING_VERSION
    matrix = is_matrix(keys, shape, implicit)
    if matrix:
        attributes["encoding-type"] = "csr_matrix"
        rows = np.searchsorted(keys[0], np.arange(shape[0] + 1))
        width = np.int32 if max(*shape, len(keys[0])) < 2**31 else np.int64
        whole = [keys[1].astype(width), rows.astype(width)]
    else:
        attributes["encoding-type"] = COORDINATES
        attributes["implicit"] = implicit
    names = names_in_group(name, matrix, len(keys))
    arrays = [values, *(distributed_rows(each, values.own_comm) for each in whole)]
    found = []
    for path, array in zip(names, arrays, strict=True):
        made = tensor_of(array, path, None, None, compression, None, tensor)
        found.append(replace(made, storage=replace(made.storage, group=attributes)))
    return found


def distributed_rows(whole: Array, comm: Comm) -> DistArray:
    """Return an array that every rank has, cut over the ranks."""
    return DistArray.from_global(whole, comm)


# ---- files that are made of bytes ----------------------------------------------------------------


def _archive(keys: Keys, values: DistArray, shape: Sequence[int], implicit: Number) -> Tensor:
    """Return the bytes of an .npz file as scipy writes it, or the package sparse if it must."""
    whole = values.gather()
    parts = {"shape": np.array(shape), "data": whole}
    if is_matrix(keys, shape, implicit):
        parts["format"] = np.array(b"csr")
        parts["indices"] = keys[1]
        parts["indptr"] = np.searchsorted(keys[0], np.arange(shape[0] + 1))
    else:
        parts["format"] = np.array("coo")
        parts["coords"] = np.stack(keys)
        parts["fill_value"] = np.array(implicit, whole.dtype)
    memory = io.BytesIO()
    np.savez(memory, **parts)
    return _bytes_tensor(np.frombuffer(memory.getbuffer(), np.uint8), values.own_comm)


def _bytes_tensor(whole: Array, comm: Comm) -> Tensor:
    array = distributed_rows(whole, comm)
    return Tensor("", array, StorageSpec(array.shape, "uint8"))


def _lines(keys: Keys, values: DistArray, header: bytes) -> Tensor:
    """Return lines of one length, of which each rank makes some: all know where theirs begin."""
    comm = values.own_comm
    count = len(keys[0])
    own = slice(count * comm.rank // comm.size, count * (comm.rank + 1) // comm.size)
    lines = written_lines([column[own] for column in keys], values.gather()[own])
    longest = -comm.lowest(-max(map(len, lines), default=0))
    text = "".join(f"{line:>{longest}}\n" for line in lines)
    table = np.frombuffer(text.encode(), np.uint8).reshape(len(lines), longest + 1)
    array = DistArray.from_local(table, comm=comm)
    return Tensor("", array, StorageSpec(array.shape, "uint8", header=header))
