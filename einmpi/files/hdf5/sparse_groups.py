"""Sparse tensors in groups of HDF5 files: as AnnData writes them, as Binsparse, or as keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.files.datasets import Dataset
from einmpi.files.hdf5.datasets import find, follow_inside, open_reader
from einmpi.files.hdf5.opening import check_hdf5, damage_reported, opened
from einmpi.files.sparse.found import (
    Array,
    SparseFile,
    Stored,
    check_shape,
    check_symmetry,
    check_vector,
    compressed_keys,
    mirrored,
    numbered_rows,
    sparse_of_keys,
    title_of,
)
from einmpi.files.specs import InputSpec, Number

if TYPE_CHECKING:
    import h5py

# AnnData's names for encodings.
COMPRESSED = {"csr_matrix": "CSR", "csc_matrix": "CSC"}
COORDINATES = "einmpi_coordinates"  # keys in datasets key_0, key_1, …, and values
ENCODING_VERSION = "0.1.0"
FindPart: TypeAlias = Callable[[str], Dataset]


def find_group(spec: InputSpec) -> SparseFile | None:
    """Look up a sparse tensor in a group; None if there is another thing, or nothing."""
    import h5py

    file = spec.file or ""
    group = spec.inside
    place = spec.place
    check_hdf5(file, place)
    with opened(file, place) as handle, damage_reported(file, group, place):
        found = follow_inside(handle, group).found
        if not isinstance(found, h5py.h5g.GroupID):
            return None
        attributes = h5py.Group(found).attrs
        encoding = _text(attributes, "encoding-type")
        description = _text(attributes, "binsparse")
        facts = {key: attributes[key] for key in ("shape", "implicit") if key in attributes}
    finder = partial(_part, file, group.rstrip("/"), place, spec.follow)
    if encoding in COMPRESSED:
        return _find_compressed(file, group, place, finder, encoding, facts)
    if encoding == COORDINATES:
        return _find_coordinates(file, group, place, finder, facts)
    if description:
        return _find_binsparse(file, group, place, finder, description)
    return None


def _text(attributes: h5py.AttributeManager, name: str) -> str:
    """Return an attribute that is a text, empty if there is none."""
    value = attributes.get(name, "")
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    return value if isinstance(value, str) else ""


def _part(file: str, group: str, place: str, follow: Sequence[str], name: str) -> Dataset:
    return find(file, f"{group}/{name}", place, follow)


# ---- AnnData -------------------------------------------------------------------------------------


def _find_compressed(
    file: str, group: str, place: str, find_part: FindPart, encoding: str, facts: Mapping[str, Any]
) -> SparseFile:
    title = title_of(file, group)
    shape = check_shape(facts.get("shape"), place or file, title, 2)
    arrays = {name: find_part(name) for name in ("data", "indices", "indptr")}
    stored = check_vector(arrays["data"], title)
    check_vector(arrays["indices"], title, stored)
    check_vector(arrays["indptr"], title)
    dtype = arrays["data"].dtype
    form = COMPRESSED[encoding]
    return SparseFile(file, group, place, form, shape, dtype, 2, stored, arrays, _build_compressed)


def _build_compressed(found: SparseFile, parts: Mapping[str, Array]) -> Stored:
    axes = (0,) if found.form == "CSR" else (1,)
    return compressed_keys(found, parts["indptr"], parts["indices"], axes), parts["data"]


# ---- keys ----------------------------------------------------------------------------------------


def _find_coordinates(
    file: str, group: str, place: str, find_part: FindPart, facts: Mapping[str, Any]
) -> SparseFile:
    """Look up what einmpi writes for tensors that are no matrices, or have an implicit value."""
    title = title_of(file, group)
    shape = check_shape(facts.get("shape"), place or file, title)
    values = find_part("values")
    keys = [find_part(f"key_{number}") for number in range(len(shape) + 1 - len(values.shape))]
    implicit = np.asarray(facts.get("implicit", 0)).item()
    return sparse_of_keys(file, group, place, keys, values, shape, implicit)


# ---- Binsparse -----------------------------------------------------------------------------------
#
# https://graphblas.org/binsparse-specification, draft 0.1: for each format its arrays of keys.

_FORMATS: dict[str, tuple[str, ...]] = {
    "CVEC": ("indices_0",),
    "COO": ("indices_0", "indices_1"),
    "COOR": ("indices_0", "indices_1"),
    "COOC": ("indices_0", "indices_1"),
    "CSR": ("pointers_to_1", "indices_1"),
    "CSC": ("pointers_to_1", "indices_1"),
    "DCSR": ("indices_0", "pointers_to_1", "indices_1"),
    "DCSC": ("indices_0", "pointers_to_1", "indices_1"),
}
_BY_COLUMNS = ("COOC", "CSC", "DCSC")
_VERSION = "0.1"


def _find_binsparse(
    file: str, group: str, place: str, find_part: FindPart, description: str
) -> SparseFile:
    where = place or file
    title = title_of(file, group)
    facts = _read_description(description, where, title)
    if facts.get("version") != _VERSION:
        what = f"{title} has version {facts.get('version')!r:.40} of Binsparse"
        raise InputError(where, what, _VERSION)
    form = facts.get("format")
    if form not in _FORMATS:
        what = f"{title} has the Binsparse format {form!r:.40}"
        raise InputError(where, what, one_of(tuple(_FORMATS), str(form)))
    shape = check_shape(facts.get("shape"), where, title, 1 if form == "CVEC" else 2)
    arrays = {name: find_part(name) for name in _FORMATS[form]}
    for dataset in arrays.values():
        stored = check_vector(dataset, title)  # in the end that of the last dimension
    types = facts.get("data_types")
    kind = str(types.get("values", "")) if isinstance(types, dict) else ""
    values = find_part("values")
    numbers = 2 if "complex" in kind and values.dtype.kind == "f" else 1
    check_vector(values, title, numbers * (1 if kind.startswith("iso") else stored))
    dtype = np.dtype(bool) if "bint8" in kind else values.dtype
    if numbers == 2:
        dtype = np.dtype(f"c{2 * dtype.itemsize}")
    symmetry = str(facts.get("structure", "")).rpartition("_")[0].replace("_", "-")
    if symmetry:
        check_symmetry(symmetry, shape, dtype, where)
    return SparseFile(
        file,
        group,
        place,
        form,
        shape,
        dtype,
        len(shape),
        2 * stored if symmetry else stored,
        {**arrays, "values": values},
        partial(_build_binsparse, kind=kind, symmetry=symmetry),
        implicit=_read_number(find_part("fill_value")) if facts.get("fill") else 0,
    )


def _read_description(text: str, where: str, title: str) -> dict[str, Any]:
    """Return what the JSON of a group says."""
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        facts = None
    if isinstance(facts, dict) and "binsparse" in facts:
        facts = facts["binsparse"]
    if not isinstance(facts, dict):
        raise InputError(where, f"the Binsparse description of {title} is no table", "JSON")
    return facts


def _read_number(dataset: Dataset) -> Number:
    """Return the only element of a dataset."""
    check_vector(dataset, dataset.name, 1)
    whole = slice(0, 1)
    value = np.empty(1, dataset.dtype)
    reader = open_reader(dataset)
    reader.read((whole,), value, (whole,))
    reader.close()
    number: Number = value[0].item()
    return number


def _build_binsparse(
    found: SparseFile, parts: Mapping[str, Array], kind: str, symmetry: str
) -> Stored:
    keys = [parts[name] for name in _FORMATS[found.form] if name.startswith("indices")]
    stored = len(keys[-1])
    if "pointers_to_1" in parts:
        rows = found.shape[1 if found.form in _BY_COLUMNS else 0]
        is_hypersparse = len(keys) == 2
        numbers = numbered_rows(
            found, parts["pointers_to_1"], stored, len(keys[0]) if is_hypersparse else rows
        )
        keys = [keys[0][numbers] if is_hypersparse else numbers, keys[-1]]
    if found.form in _BY_COLUMNS:
        keys.reverse()
    values = parts["values"]
    if values.dtype != found.dtype:  # bools are bytes there, and complex numbers pairs
        is_complex = found.dtype.kind == "c"
        values = values.view(found.dtype) if is_complex else values.astype(found.dtype)
    if kind.startswith("iso"):
        values = np.repeat(values, stored)
    return mirrored(keys, values, symmetry) if symmetry else (keys, values)
