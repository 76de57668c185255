"""Indices of models in several safetensors files: JSON that says which file has which tensor."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import lru_cache

from einmpi.errors import InputError, nearest_of
from einmpi.files import safetensors
from einmpi.files.datasets import (
    Dataset,
    FileIdentity,
    SourceFile,
    check_file,
    identity_from,
    is_inside,
)

SUFFIX = ".safetensors.index.json"
_MOST_INDEX_BYTES = 100 * 10**6  # as for the header of a safetensors file


def find(file: str, tensor: str, place: str) -> Dataset:
    """Look up a tensor in the file that the index names for it."""
    where = place or file
    index_identity, weight_map = _read_index(file, place)
    shard = weight_map.get(tensor)
    if shard is None:
        expected = nearest_of(sorted(weight_map), tensor)
        raise InputError(where, f"there is no tensor {tensor} in {file}", expected)
    _check_shard_name(file, tensor, shard, where)
    path = os.path.join(os.path.dirname(file), shard)
    _check_is_there(file, tensor, path, where)
    check_file(path, place, "a safetensors file")
    try:
        shard_identity = identity_from(os.stat(path))
    except OSError as error:
        raise InputError(where, f"{path} cannot be read: {error.strerror}") from None
    found = safetensors.find(path, tensor, place)
    sources = (SourceFile(path, shard_identity), SourceFile(file, index_identity))
    return replace(found, sources=sources)


def list_tensors(file: str, place: str, most: int) -> list[str]:
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
        reason = " ".join(str(error).split())
        what = f"{file} cannot be read as an index of safetensors files: {reason:.200}"
        raise InputError(place or file, what, "an undamaged file") from None


@lru_cache(maxsize=8)  # a model has hundreds of tensors
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
    if leads_out:
        raise InputError(
            where,
            f"{file} says that {tensor} is in {shard!r:.100}",
            "a file in the folder of the index",
        )
    if not shard.lower().endswith(".safetensors"):
        raise InputError(
            where, f"{file} says that {tensor} is in {shard!r:.100}", "a .safetensors file"
        )
