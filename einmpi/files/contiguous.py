"""Formats whose tensors lie in one piece: .npy, safetensors, and an index of several of these."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from hashlib import sha256
from math import prod
from typing import Any, TypeAlias

import numpy as np

from einmpi.caches import bounded_cache
from einmpi.errors import InputError, nearest_of, one_of
from einmpi.files.atomic import make_draft
from einmpi.files.datasets import (
    Dataset,
    FileIdentity,
    RawReader,
    Reader,
    SourceFile,
    StackReader,
    check_file,
    identity_from,
    is_inside,
)
from einmpi.files.specs import Place, StorageSpec
from einmpi.graph.dtypes import DTYPES, numpy_dtypes
from einmpi.language.syntax import PYTHON_PARSER
from einmpi.units import counted

# ---- npy -----------------------------------------------------------------------------------------
#
# NumPy's .npy files: a header, then the elements of one array.


def find_npy(file: str, _: str, place: str) -> Dataset:
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
        reason = str(error) or type(error).__name__
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


def lay_out_npy(
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


# ---- safetensors ---------------------------------------------------------------------------------
#
# safetensors files: eight bytes with the length of the header, a header in JSON, the elements.


Header: TypeAlias = dict[str, dict[str, Any]]

# The dtypes of the format that einmpi has too, as numpy writes them.
SAFETENSORS_DTYPES = {
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
_MOST_NAMES = 10**6


def find_safetensors(
    file: str, tensor: str, place: str, dtypes: Mapping[str, str] = SAFETENSORS_DTYPES
) -> Dataset:
    """Look up a tensor in the header of a file, or all whose names have a number for a `*`."""
    where = place or file
    if "*" in tensor:
        names = list_tensors(file, place, _MOST_NAMES)
        return _stacked(find_safetensors, names, file, tensor, place)
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
    if code not in dtypes:
        raise InputError(
            where,
            f"{tensor} in {file} is {code:.20}, which is not supported",
            one_of(tuple(DTYPES)),
        )
    stored = dtypes[code]
    if last - first != prod(shape) * np.dtype(stored).itemsize:
        raise InputError(
            where,
            f"{file} cannot be read as safetensors: {tensor} has "
            f"{counted(last - first, 'byte')}, which does not match its shape",
            "an undamaged file",
        )
    return Dataset(
        file,
        tensor,
        place,
        shape,
        stored,
        offset=start + first,
        sources=(SourceFile(file, identity),),
        header=digest,
    )


def list_tensors(file: str, place: str, most: int) -> list[str]:
    """Return the names of the first tensors in a file."""
    check_file(file, place, "a safetensors file")
    try:
        header = _read_header(file, identity_from(os.stat(file)))[1]
    except (ValueError, OSError, RecursionError) as error:
        raise _not_safetensors(file, place, error) from None
    return sorted(header)[:most]


def _stacked(
    find: Callable[[str, str, str], Dataset],
    names: Collection[str],
    file: str,
    pattern: str,
    place: str,
) -> Dataset:
    """Return the tensors whose names have 0, 1, 2, … for the `*`, stacked along a new dimension."""
    known = frozenset(names)
    members: list[Dataset] = []
    while (name := pattern.replace("*", str(len(members)), 1)) in known:
        members.append(find(file, name, place))
        kind = members[-1].shape, members[-1].stored
        if kind != (members[0].shape, members[0].stored):
            what = f"{name} in {file} has another shape or dtype than {members[0].name}"
            raise InputError(place or file, what, "tensors that can be stacked")
    if not members:
        expected = nearest_of(sorted(known), name)
        raise InputError(place or file, f"there is no tensor {name} in {file}", expected)
    headers = sha256("".join(member.header for member in members).encode())
    return replace(
        members[0],
        name=pattern,
        shape=(len(members), *members[0].shape),
        offset=None,
        sources=tuple(dict.fromkeys(source for each in members for source in each.sources)),
        header=headers.hexdigest(),
        members=tuple(members),
    )


def open_tensor(dataset: Dataset) -> Reader:
    """Open a tensor, or several that are stacked."""
    return StackReader(dataset) if dataset.members else RawReader(dataset)


def _not_safetensors(file: str, place: str, error: Exception) -> InputError:
    what = f"{file} cannot be read as safetensors: {error!s:.200}"
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


@bounded_cache(8)  # a model has hundreds of tensors in a file
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
    entries = header.values() if isinstance(header, dict) else [None]
    if not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("its header is not a table of tensors")
    header.pop("__metadata__", None)
    digest = sha256(length_bytes + text).hexdigest()
    return _LENGTH_BYTES + length, header, digest


# ---- safetensors index ---------------------------------------------------------------------------
#
# Indices of models in several safetensors files: JSON that says which file has which tensor.


SUFFIX = ".safetensors.index.json"
_MOST_INDEX_BYTES = 100 * 10**6  # as for the header of a safetensors file


def find_indexed(file: str, tensor: str, place: str) -> Dataset:
    """Look up a tensor in the file that the index names for it, or all with a number for a `*`."""
    where = place or file
    index_identity, weight_map = _read_index(file, place)
    if "*" in tensor:
        return _stacked(find_indexed, weight_map, file, tensor, place)
    shard = weight_map.get(tensor)
    if shard is None:
        expected = nearest_of(sorted(weight_map), tensor)
        raise InputError(where, f"there is no tensor {tensor} in {file}", expected)
    _check_shard_name(file, tensor, shard, where)
    path = os.path.join(os.path.dirname(file), shard)
    _check_is_there(file, tensor, path, where)
    found = find_safetensors(path, tensor, place)
    return replace(found, sources=(*found.sources, SourceFile(file, index_identity)))


def list_indexed(file: str, place: str, most: int) -> list[str]:
    """Return the names of the first tensors in an index."""
    weight_map = _read_index(file, place)[1]
    return sorted(weight_map)[:most]


def files_of_tensors(file: str, place: str) -> dict[str, str]:
    """Return the path of the file that an index names for each of its tensors."""
    folder = os.path.dirname(file)
    files = {}
    known = set()
    for tensor, shard in _read_index(file, place)[1].items():
        _check_shard_name(file, tensor, shard, place or file)
        path = os.path.join(folder, shard)
        if path not in known:
            _check_is_there(file, tensor, path, place or file)
            known.add(path)
        files[tensor] = path
    return files


def _check_is_there(file: str, tensor: str, path: str, where: str) -> None:
    """Refuse an index that names a file which does not exist."""
    if not os.path.exists(path):
        what = f"there is no file {path}, which has {tensor} according to {file}"
        raise InputError(where, what, "all files of the model, beside their index")


def _read_index(file: str, place: str) -> tuple[FileIdentity, dict[str, str]]:
    """Return the identity of the index before it was read, and the file of each tensor."""
    check_file(file, place, "the index of a model in safetensors files")
    try:
        identity = identity_from(os.stat(file))
        return identity, _read_weight_map(file, identity)
    except (ValueError, OSError, RecursionError) as error:
        what = f"{file} cannot be read as an index of safetensors files: {error!s:.200}"
        raise InputError(place or file, what, "an undamaged file") from None


@bounded_cache(8)  # a model has hundreds of tensors
def _read_weight_map(file: str, identity: FileIdentity) -> dict[str, str]:
    if identity.size > _MOST_INDEX_BYTES:
        raise ValueError(f"it has more than {_MOST_INDEX_BYTES} bytes")
    with open(file, "rb") as opened:
        index = json.loads(opened.read(_MOST_INDEX_BYTES))
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise ValueError("it has no table weight_map")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise ValueError(f"the file of {tensor:.100} is not a string")
    return weight_map


def _check_shard_name(file: str, tensor: str, shard: str, where: str) -> None:
    """Refuse a name that leads out of the index's folder, or to a file of another format.

    An index often comes from elsewhere, as part of a download. Links to files are followed: they
    are how download tools keep files that several folders share. Links to folders are not.
    """
    parts = shard.replace("\\", "/").split("/")
    leads_out = os.path.isabs(shard) or ".." in parts or "" in parts or "\0" in shard
    if len(parts) > 1 and not leads_out:
        folder = os.path.dirname(file)
        leads_out = not is_inside(folder, os.path.dirname(os.path.join(folder, shard)))
    if leads_out or not shard.lower().endswith(".safetensors"):
        what = f"{file} says that {tensor} is in {shard!r:.100}"
        expected = "a file in the folder of the index" if leads_out else "a .safetensors file"
        raise InputError(where, what, expected)
