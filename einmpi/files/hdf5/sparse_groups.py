"""Sparse tensors in groups of HDF5 files: as AnnData writes them, as Binsparse, or as keys."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.files.datasets import Array, Dataset
from einmpi.files.hdf5.datasets import find, follow_inside, open_reader
from einmpi.files.hdf5.opening import damage_reported, opened
from einmpi.files.sparse.found import (
    GENERAL,
    SparseFile,
    Stored,
    check_shape,
    check_symmetry,
    check_vector,
    mirrored,
    numbered_rows,
    rows_of,
    sparse_of_keys,
    sparse_of_rows,
)
from einmpi.files.specs import InputSpec, Number

if TYPE_CHECKING:
    import h5py

# AnnData's names for encodings, with the dimension whose parts are stored one after another.
COMPRESSED = {"csr_matrix": ("CSR", 0), "csc_matrix": ("CSC", 1)}
COORDINATES = "einmpi_coordinates"  # keys in datasets key_0, key_1, …, and values
ENCODING_VERSION = "0.1.0"


def find_group(spec: InputSpec) -> SparseFile | None:
    """Look up a sparse tensor in a group; None if there is another thing, or nothing."""
    import h5py

    file = spec.file or ""
    with opened(file, spec.place) as handle, damage_reported(file, spec.inside, spec.place):
        found = follow_inside(handle, spec.inside).found
        if not isinstance(found, h5py.h5g.GroupID):
            return None
        attributes = h5py.Group(found).attrs
        encoding = _text(attributes, "encoding-type")
        description = _text(attributes, "binsparse")
        facts = {key: attributes[key] for key in ("shape", "implicit") if key in attributes}
    if encoding in COMPRESSED:
        form, axis = COMPRESSED[encoding]
        arrays = _parts(spec, ("data", "indices", "indptr"))
        return sparse_of_rows(spec, form, check_shape(facts.get("shape"), spec, 2), arrays, (axis,))
    if encoding == COORDINATES:
        return _find_coordinates(spec, facts)
    if description:
        return _find_binsparse(spec, description)
    return None


def _text(attributes: h5py.AttributeManager, name: str) -> str:
    """Return an attribute that is a text, empty if there is none."""
    value = attributes.get(name, "")
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    return value if isinstance(value, str) else ""


def _parts(spec: InputSpec, names: Sequence[str]) -> dict[str, Dataset]:
    """Return datasets of a group by their names."""
    group = spec.inside.rstrip("/")
    file = spec.file or ""
    return {name: find(file, f"{group}/{name}", spec.place, spec.follow) for name in names}


def _find_coordinates(spec: InputSpec, facts: Mapping[str, Any]) -> SparseFile:
    """Look up what einmpi writes for tensors that are no matrices, or have an implicit value."""
    shape = check_shape(facts.get("shape"), spec)
    values = _parts(spec, ["values"])["values"]
    names = [f"key_{number}" for number in range(len(shape) + 1 - len(values.shape))]
    implicit = np.asarray(facts.get("implicit", 0)).item()
    return sparse_of_keys(spec, list(_parts(spec, names).values()), values, shape, implicit)


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
_VERSIONS = ("0.1", "0.1.0")  # the draft has the first, libraries write the second


def _find_binsparse(spec: InputSpec, description: str) -> SparseFile:
    facts = _read_description(description, spec)
    if facts.get("version") not in _VERSIONS:
        what = f"{spec.title} has version {facts.get('version')!r:.40} of Binsparse"
        raise InputError(spec.where, what, one_of(_VERSIONS))
    form = str(facts.get("format"))
    if form not in _FORMATS:
        what = f"{spec.title} has the Binsparse format {form!r:.40}"
        raise InputError(spec.where, what, one_of(tuple(_FORMATS), form))
    shape = check_shape(facts.get("shape"), spec, 1 if form == "CVEC" else 2)
    arrays = _parts(spec, (*_FORMATS[form], "values"))
    *keys, values = arrays.values()
    for dataset in keys:
        stored = check_vector(dataset, spec.title)  # in the end that of the last dimension
    told = facts.get("number_of_stored_values", stored)
    if told != stored:
        what = f"{spec.title} has {stored} stored values"
        raise InputError(spec.where, what, f"{told!r:.40}, as its description says")
    types = facts.get("data_types")
    kind = str(types.get("values", "")) if isinstance(types, dict) else ""
    numbers = 2 if "complex" in kind and values.dtype.kind == "f" else 1
    check_vector(values, spec.title, numbers * (1 if kind.startswith("iso") else stored))
    dtype = np.dtype(bool) if "bint8" in kind else values.dtype
    if numbers == 2:
        dtype = np.dtype(f"c{2 * dtype.itemsize}")
    symmetry = str(facts.get("structure", "")).rpartition("_")[0].replace("_", "-") or GENERAL
    check_symmetry(symmetry, shape, dtype, spec)
    return SparseFile(
        spec,
        form,
        shape,
        dtype,
        stored if symmetry == GENERAL else 2 * stored,
        arrays,
        partial(_build_binsparse, is_iso=kind.startswith("iso"), symmetry=symmetry),
        implicit=_read_fill(spec) if facts.get("fill") else 0,
    )


def _read_description(text: str, spec: InputSpec) -> dict[str, Any]:
    """Return what the JSON of a group says."""
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        facts = None
    if isinstance(facts, dict) and "binsparse" in facts:
        facts = facts["binsparse"]
    if not isinstance(facts, dict):
        what = f"the Binsparse description of {spec.title} is no table"
        raise InputError(spec.where, what, "JSON")
    return facts


def _read_fill(spec: InputSpec) -> Number:
    """Return the only element of the dataset that holds the implicit value."""
    (dataset,) = _parts(spec, ["fill_value"]).values()
    check_vector(dataset, spec.title, 1)
    with closing(open_reader(dataset)) as reader:
        number: Number = rows_of(dataset, reader, 0, 1)[0].item()
    return number


def _build_binsparse(
    found: SparseFile, parts: Mapping[str, Array], is_iso: bool, symmetry: str
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
    if is_iso:
        values = np.repeat(values, stored)
    return mirrored(found, keys, values, symmetry)
