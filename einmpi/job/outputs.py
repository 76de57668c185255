"""The [outputs] of a job file: where results go. No file is opened here."""

from __future__ import annotations

from math import prod

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.files.specs import COMPRESSIONS, HDF5_SUFFIXES, OutputSpec, suffix_of
from einmpi.graph.dtypes import DTYPES, cpu_dtypes
from einmpi.graph.eingraph import EinGraph
from einmpi.job.inputs import (
    check_file,
    dataset_path,
    positive_numbers,
    read_dtype,
    split_short,
)
from einmpi.language.toml_document import (
    Document,
    KeyPath,
    beside,
    choice,
    get,
    kind_of,
    lookup,
    show,
    table,
)

OUTPUT_SUFFIXES = (*HDF5_SUFFIXES, ".npy")
_OUTPUT_KEYS = ("file", "dataset", "chunks", "compression", "dtype", "parts")
_NPY_OUTPUT_KEYS = ("file", "dtype", "parts")


def read_outputs(document: Document, computed: tuple[str, ...]) -> tuple[OutputSpec, ...]:
    """The outputs in the order of the file; `computed` are the tensors the program makes."""
    found: list[OutputSpec] = []
    for name in table(document, ("outputs",)):
        spec = _output(document, name, computed)
        for other in found:
            same_file, one, two = other.file == spec.file, other.dataset + "/", spec.dataset + "/"
            if same_file and (one.startswith(two) or two.startswith(one)):
                where = (
                    f"both be {spec.target}"
                    if one == two
                    else f"be one inside the other in {spec.file}"
                )
                raise InputError(
                    spec.place,
                    f"outputs {other.name} and {name} would {where}",
                    "a dataset of its own for each output",
                )
        found.append(spec)
    return tuple(found)


def _output(document: Document, name: str, computed: tuple[str, ...]) -> OutputSpec:
    path = ("outputs", name)
    place, given = document.place(path), lookup(document, path)
    if name not in computed:
        raise InputError(place, f"unknown output {show(name)}", one_of(computed, name))
    if isinstance(given, str):
        if suffix_of(given) == ".npy":
            check_file(place, given, OUTPUT_SUFFIXES)
            return OutputSpec(name, beside(document, given), place=place)
        file, dataset = split_short(place, given, OUTPUT_SUFFIXES)
        check_file(place, file, HDF5_SUFFIXES)
        return OutputSpec(name, beside(document, file), dataset_path(place, dataset), place=place)
    if not isinstance(given, dict):
        raise InputError(
            place, f"output {name} is {kind_of(given)}", 'a table or "FILE.h5:/DATASET" is wanted'
        )
    table(document, path, _OUTPUT_KEYS)
    npy = suffix_of(get(document, (*path, "file"), str) or "") == ".npy"
    for key in given if npy else ():
        if key not in _NPY_OUTPUT_KEYS:
            raise InputError(
                document.place((*path, key)),
                f"{key} does not go with an .npy file",
                one_of(_NPY_OUTPUT_KEYS),
            )
    for key in ("file",) if npy else ("file", "dataset"):
        if get(document, (*path, key), str) is None:
            raise InputError(
                place, f"output {name} has no {key}", 'file = "FILE.h5", dataset = "/NAME"'
            )
    check_file(place, given["file"], OUTPUT_SUFFIXES)
    compression = choice(document, (*path, "compression"), COMPRESSIONS, "") or None
    chunks, parts = (positive_numbers(document, (*path, key)) for key in ("chunks", "parts"))
    return OutputSpec(
        name,
        beside(document, given["file"]),
        "" if npy else dataset_path(place, given["dataset"]),
        chunks,
        compression,
        _dtype(document, (*path, "dtype")),
        parts,
        place,
    )


def _dtype(document: Document, path: KeyPath) -> str | None:
    name = get(document, path, str)
    if name in DTYPES and DTYPES[name].file_dtype != name:
        raise InputError(document.place(path), f"files have no {name}", one_of(cpu_dtypes()))
    return read_dtype(document, path)


def check_outputs(outputs: tuple[OutputSpec, ...], graph: EinGraph) -> None:
    """What can be said only when shapes and dtypes are known."""
    for spec in outputs:
        vertex = graph[spec.name]
        own = DTYPES[vertex.dtype].file_dtype
        target = np.dtype(spec.dtype or own)
        if not np.can_cast(own, target, "same_kind"):
            allowed = [dtype for dtype in cpu_dtypes() if np.can_cast(own, dtype, "same_kind")]
            raise InputError(
                spec.place,
                f"{spec.name} is {vertex.dtype} and cannot be stored as {target.name}",
                one_of(allowed),
            )
        if spec.chunks is None:
            continue
        if len(spec.chunks) != len(vertex.bound):
            raise InputError(
                spec.place,
                f"chunks of {spec.name} has {len(spec.chunks)} numbers",
                f"{spec.name} has {len(vertex.bound)} dimensions",
            )
        size = prod(spec.chunks) * target.itemsize
        if size >= 2**32:
            raise InputError(
                spec.place, f"a chunk of {spec.name} would have {size} bytes", "less than 4 GiB"
            )
