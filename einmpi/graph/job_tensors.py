"""The [inputs] and [outputs] of a job file: where tensors come from and where they go. No file is opened here."""

from __future__ import annotations

import keyword
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.graph.builder import RESERVED
from einmpi.graph.eingraph import EinGraph
from einmpi.graph.job_generated import generated
from einmpi.graph.labels import MAX_EXTENT
from einmpi.graph.scalar import DTYPES
from einmpi.graph.syntax import integer_text
from einmpi.graph.toml_text import Document, KeyPath, beside, choice, get, kind_of, lookup, show, table

COMPRESSIONS = ("gzip", "lzf")
# What names a tensor inside a file, by the file's suffix; nothing where the file is the tensor.
INSIDE = {".h5": "dataset", ".hdf5": "dataset", ".he5": "dataset", ".safetensors": "tensor", ".npy": ""}
HDF5_SUFFIXES = tuple(suffix for suffix, key in INSIDE.items() if key == "dataset")
_GENERATED_KEYS = ("random", "shape", "dtype", "seed", "low", "high", "resident", "parts")
_FILE_KEYS = ("file", "dataset", "tensor", "rows", "resident", "parts")
_OUTPUT_KEYS = ("file", "dataset", "chunks", "compression", "dtype", "parts")
_SHORT = re.compile(r"(.+?\.(?:h5|hdf5|he5|safetensors|npy)):(.+)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class InputSpec:
    """A tensor the job starts from: generated (`random`) or in a file. `place` is its position in the job file."""

    name: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    random: str | None = None
    seed: int = 0
    low: int | float = 0
    high: int | float = 1
    file: str | None = None
    dataset: str | None = None
    tensor: str | None = None
    rows: tuple[int | None, int | None] | None = None
    resident: bool = False
    parts: tuple[int, ...] | None = None
    place: str = ""


@dataclass(frozen=True)
class OutputSpec:
    """A tensor the job stores. Without a dtype the tensor keeps its own."""

    name: str
    file: str
    dataset: str
    chunks: tuple[int, ...] | None = None
    compression: str | None = None
    dtype: str | None = None
    parts: tuple[int, ...] | None = None
    place: str = ""


def check_name(place: str, name: str, kind: str, sizes: Mapping[str, int]) -> None:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise InputError(place, f"{show(name)} cannot name {kind}",
                         "letters, digits and _, not starting with a digit, and no word of Python")  # fmt: skip
    if name in RESERVED or name in sizes:
        what = "a size" if name in sizes else "a word of the language"
        raise InputError(place, f"{name} is {what} and cannot name {kind}", "any other name")


def read_dtype(document: Document, path: KeyPath) -> str | None:
    found = get(document, path, str)
    return found if found is None else check_dtype(document.place(path), found)


def check_dtype(place: str, dtype: str) -> str:
    if dtype == "bfloat16":
        raise InputError(place, "bfloat16 needs a GPU backend and is not available here", one_of(DTYPES))
    if dtype not in DTYPES:
        raise InputError(place, f"unknown dtype {show(dtype)}", one_of(DTYPES, dtype))
    return dtype


# ---- inputs ---------------------------------------------------------------------------------------------------------


def read_inputs(document: Document, sizes: Mapping[str, int], dtype: str) -> tuple[InputSpec, ...]:
    """The inputs in the order of the file; `dtype` is that of generated ones that do not say theirs."""
    return tuple(_input(document, name, sizes, dtype) for name in table(document, ("inputs",)))


def _input(document: Document, name: str, sizes: Mapping[str, int], dtype: str) -> InputSpec:
    path = ("inputs", name)
    place, given = document.place(path), lookup(document, path)
    check_name(place, name, "a tensor", sizes)
    if isinstance(given, str):
        file, inside = (given, "") if _suffix(given) == ".npy" else _split_short(place, given, tuple(INSIDE))
        return _from_file(document, InputSpec(name, place=place), file, {_key(file) or "NAME" * bool(inside): inside})
    if not isinstance(given, dict):
        raise InputError(place, f"input {name} is {kind_of(given)}", 'a table or "FILE.h5:/DATASET" is wanted')
    table(document, path, dict.fromkeys([*_GENERATED_KEYS, *_FILE_KEYS]))
    if ("random" in given) == ("file" in given):
        both = "both" if "file" in given else "neither"
        raise InputError(place, f"input {name} has {both} random {'and' if 'file' in given else 'nor'} file",
                         "one of the two")  # fmt: skip
    chosen, allowed = ("file", _FILE_KEYS) if "file" in given else ("random", _GENERATED_KEYS)
    for key in given:
        if key not in allowed:
            raise InputError(document.place((*path, key)), f"{key} does not go with {chosen}", one_of(allowed))
    resident = get(document, (*path, "resident"), bool) or False
    spec = InputSpec(name, resident=resident, parts=_numbers(document, (*path, "parts")), place=place)
    if chosen == "random":
        return generated(document, spec, sizes, read_dtype(document, (*path, "dtype")) or dtype)
    inside_of = {key: get(document, (*path, key), str) for key in ("dataset", "tensor")}
    spec = replace(spec, rows=_rows(document, (*path, "rows"), sizes))
    return _from_file(document, spec, get(document, (*path, "file"), str) or "", {"": "", **inside_of})


def _suffix(file: str) -> str:
    return os.path.splitext(file)[1].lower()


def _key(file: str) -> str:
    """The key that names a tensor in a file of this kind."""
    return INSIDE.get(_suffix(file), "")


def _split_short(place: str, text: str, suffixes: tuple[str, ...]) -> tuple[str, str]:
    found = _SHORT.fullmatch(text)
    if found:
        return found[1], found[2]
    file = text if _suffix(text) in suffixes else text.partition(":")[0]
    _check_file(place, file, suffixes)
    raise InputError(place, f"{show(text)} names a file but nothing in it", '"FILE.h5:/DATASET"')


def _check_file(place: str, file: str, suffixes: tuple[str, ...]) -> None:
    if _suffix(file) not in suffixes or "\0" in file:
        raise InputError(place, f"{show(file)} is not a file of a known kind", f"suffixes: {', '.join(suffixes)}")


def _from_file(document: Document, spec: InputSpec, file: str, inside_of: Mapping[str, str | None]) -> InputSpec:
    """`inside_of` gives the name within the file by the key that has it."""
    _check_file(spec.place, file, tuple(INSIDE))
    wanted = INSIDE[_suffix(file)]
    for key, inside in inside_of.items():
        if key and inside is not None and key != wanted:
            place = document.place(("inputs", spec.name, key))
            allowed = f"{wanted} does" if wanted else "the file is the tensor"
            raise InputError(place, f"{key} does not go with a {_suffix(file)} file", allowed)
    inside = inside_of.get(wanted)
    if inside is None:
        raise InputError(spec.place, f"input {spec.name} does not say which {wanted} of the file",
                         f'{wanted} = "NAME"')  # fmt: skip
    if wanted == "dataset":
        inside = _dataset_path(spec.place, inside)
    names = {wanted: inside}
    return replace(spec, file=beside(document, file), dataset=names.get("dataset"), tensor=names.get("tensor"))


def _rows(document: Document, path: KeyPath, sizes: Mapping[str, int]) -> tuple[int | None, int | None] | None:
    """ "START:STOP", either of them left out or whole-number arithmetic over sizes."""
    given = get(document, path, str)
    if given is None:
        return None
    ends = given.split(":")
    if len(ends) != 2:
        raise InputError(document.place(path), f"{show(given)} is not a range of rows", 'such as rows = "0:1000"')
    source = document.source(path)
    start, stop = (integer_text(replace(source, text=end.strip()), sizes) if end.strip() else None for end in ends)
    return start, stop


def _dataset_path(place: str, text: str) -> str:
    """One spelling a dataset: /a/b."""
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if not parts or "\0" in text:
        raise InputError(place, f"{show(text)} is not the path of a dataset", "such as /Z or /group/Z")
    return "/" + "/".join(parts)


# ---- outputs --------------------------------------------------------------------------------------------------------


def read_outputs(document: Document, computed: tuple[str, ...]) -> tuple[OutputSpec, ...]:
    """The outputs in the order of the file; `computed` are the tensors the program makes."""
    found: list[OutputSpec] = []
    for name in table(document, ("outputs",)):
        spec = _output(document, name, computed)
        for other in found:
            same_file, one, two = other.file == spec.file, other.dataset + "/", spec.dataset + "/"
            if same_file and (one.startswith(two) or two.startswith(one)):
                shown = f"{spec.file}:{spec.dataset}"
                raise InputError(spec.place, f"outputs {other.name} and {name} would both be {shown}" if one == two
                                 else f"outputs {other.name} and {name} would be one inside the other in {spec.file}",
                                 "a dataset of its own for each output")  # fmt: skip
        found.append(spec)
    return tuple(found)


def _output(document: Document, name: str, computed: tuple[str, ...]) -> OutputSpec:
    path = ("outputs", name)
    place, given = document.place(path), lookup(document, path)
    if name not in computed:
        raise InputError(place, f"unknown output {show(name)}", one_of(computed, name))
    if isinstance(given, str):
        file, dataset = _split_short(place, given, HDF5_SUFFIXES)
        _check_file(place, file, HDF5_SUFFIXES)
        return OutputSpec(name, beside(document, file), _dataset_path(place, dataset), place=place)
    if not isinstance(given, dict):
        raise InputError(place, f"output {name} is {kind_of(given)}", 'a table or "FILE.h5:/DATASET" is wanted')
    table(document, path, _OUTPUT_KEYS)
    for key in ("file", "dataset"):
        if get(document, (*path, key), str) is None:
            raise InputError(place, f"output {name} has no {key}", 'file = "FILE.h5", dataset = "/NAME"')
    _check_file(place, given["file"], HDF5_SUFFIXES)
    compression = choice(document, (*path, "compression"), COMPRESSIONS, "") or None
    return OutputSpec(name, beside(document, given["file"]), _dataset_path(place, given["dataset"]),
                      _numbers(document, (*path, "chunks")), compression, read_dtype(document, (*path, "dtype")),
                      _numbers(document, (*path, "parts")), place)  # fmt: skip


def _numbers(document: Document, path: KeyPath) -> tuple[int, ...] | None:
    """A list of positive whole numbers."""
    given = get(document, path, list)
    for number, value in enumerate(given or ()):
        if type(value) is not int or not 1 <= value <= MAX_EXTENT:
            raise InputError(document.place((*path, number)), f"{show(value)} in {path[-1]}",
                             f"a whole number from 1 to 2**39 = {MAX_EXTENT}")  # fmt: skip
    return None if given is None else tuple(given)


def check_outputs(outputs: tuple[OutputSpec, ...], graph: EinGraph) -> None:
    """What can be said only when shapes and dtypes are known."""
    for spec in outputs:
        vertex = graph[spec.name]
        target = np.dtype(spec.dtype or vertex.dtype)
        if not np.can_cast(vertex.dtype, target, "same_kind"):
            allowed = [dtype for dtype in DTYPES if np.can_cast(vertex.dtype, dtype, "same_kind")]
            raise InputError(spec.place, f"{spec.name} is {vertex.dtype} and cannot be stored as {target.name}",
                             one_of(allowed))  # fmt: skip
        if spec.chunks is None:
            continue
        if len(spec.chunks) != len(vertex.bound):
            raise InputError(spec.place, f"chunks of {spec.name} has {len(spec.chunks)} numbers",
                             f"{spec.name} has {len(vertex.bound)} dimensions")  # fmt: skip
        size = prod(spec.chunks) * target.itemsize
        if size >= 2**32:
            raise InputError(spec.place, f"a chunk of {spec.name} would have {size} bytes", "less than 4 GiB")
