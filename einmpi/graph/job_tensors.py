"""The [inputs] of a job file: where tensors come from. No file is opened here."""

from __future__ import annotations

import keyword
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.graph.builder import RESERVED
from einmpi.graph.labels import MAX_EXTENT
from einmpi.graph.scalar import DTYPES
from einmpi.graph.toml_text import Document, KeyPath, beside, choice, get, kind_of, lookup, show, table, whole_number

RANDOM = ("normal", "uniform", "zeros", "ones", "arange")
# What names a tensor inside a file, by the file's suffix.
INSIDE = {".h5": "dataset", ".hdf5": "dataset", ".he5": "dataset", ".safetensors": "tensor"}
HDF5_SUFFIXES = tuple(suffix for suffix, key in INSIDE.items() if key == "dataset")
MAX_NDIM = 32  # HDF5's limit
_GENERATED_KEYS = ("random", "shape", "dtype", "seed", "low", "high", "resident", "parts")
_FILE_KEYS = ("file", "dataset", "tensor", "resident", "parts")
_SHORT = re.compile(r"(.+?\.(?:h5|hdf5|he5|safetensors)):(.+)", re.IGNORECASE | re.DOTALL)


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
    resident: bool = False
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
        file, inside = split_short(place, given, tuple(INSIDE))
        return _from_file(document, InputSpec(name, place=place), file, {suffix_of(file): inside})
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
    spec = InputSpec(name, resident=resident, parts=positive_numbers(document, (*path, "parts")), place=place)
    if chosen == "random":
        return _generated(document, spec, sizes, dtype)
    inside_of = {suffix: get(document, (*path, key), str) for suffix, key in INSIDE.items()}
    return _from_file(document, spec, get(document, (*path, "file"), str) or "", inside_of)


def suffix_of(file: str) -> str:
    return os.path.splitext(file)[1].lower()


def split_short(place: str, text: str, suffixes: tuple[str, ...]) -> tuple[str, str]:
    found = _SHORT.fullmatch(text)
    if found:
        return found[1], found[2]
    file = text if suffix_of(text) in suffixes else text.partition(":")[0]
    check_file(place, file, suffixes)
    raise InputError(place, f"{show(text)} names a file but nothing in it", '"FILE.h5:/DATASET"')


def check_file(place: str, file: str, suffixes: tuple[str, ...]) -> None:
    if suffix_of(file) not in suffixes or "\0" in file:
        raise InputError(place, f"{show(file)} is not a file of a known kind", f"suffixes: {', '.join(suffixes)}")


def _from_file(document: Document, spec: InputSpec, file: str, inside_of: Mapping[str, str | None]) -> InputSpec:
    """`inside_of` gives the name within the file for each suffix the file might have."""
    check_file(spec.place, file, tuple(INSIDE))
    wanted = INSIDE[suffix_of(file)]
    for suffix, inside in inside_of.items():
        if inside is not None and INSIDE[suffix] != wanted:
            place = document.place(("inputs", spec.name, INSIDE[suffix]))
            raise InputError(place, f"{INSIDE[suffix]} does not go with a {suffix_of(file)} file", f"{wanted} does")
    inside = inside_of[suffix_of(file)]
    if inside is None:
        raise InputError(spec.place, f"input {spec.name} does not say which {wanted} of the file",
                         f'{wanted} = "NAME"')  # fmt: skip
    if wanted == "dataset":
        inside = dataset_path(spec.place, inside)
    names = {wanted: inside}
    return InputSpec(spec.name, file=beside(document, file), dataset=names.get("dataset"), tensor=names.get("tensor"),
                     resident=spec.resident, parts=spec.parts, place=spec.place)  # fmt: skip


def dataset_path(place: str, text: str) -> str:
    """One spelling a dataset: /a/b."""
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if not parts or "\0" in text:
        raise InputError(place, f"{show(text)} is not the path of a dataset", "such as /Z or /group/Z")
    return "/" + "/".join(parts)


def _generated(document: Document, spec: InputSpec, sizes: Mapping[str, int], default: str) -> InputSpec:
    path = ("inputs", spec.name)
    random = choice(document, (*path, "random"), RANDOM, "")
    dtype = read_dtype(document, (*path, "dtype")) or default
    if random == "normal" and np.dtype(dtype).kind in "ib":
        allowed = "a float or complex dtype, or uniform, zeros, ones, arange"
        raise InputError(spec.place, f"input {spec.name} cannot be normal and {dtype}", allowed)
    seed = get(document, (*path, "seed"), int)
    if seed is None:
        seed = zlib.crc32(spec.name.encode())  # inputs differ, and nothing depends on their order
    if not 0 <= seed < 2**64:
        raise InputError(document.place((*path, "seed")), f"seed is {show(seed)}", "0 to 2**64 - 1")
    low, high = _limits(document, path, random, dtype)
    return InputSpec(spec.name, _shape(document, path, sizes), dtype, random, seed, low, high, resident=spec.resident,
                     parts=spec.parts, place=spec.place)  # fmt: skip


def _shape(document: Document, path: KeyPath, sizes: Mapping[str, int]) -> tuple[int, ...]:
    given = get(document, (*path, "shape"), list)
    if given is None:
        raise InputError(document.place(path), f"input {path[-1]} has no shape", 'such as shape = ["s", 10]')
    if len(given) > MAX_NDIM:
        raise InputError(document.place((*path, "shape")), f"shape has {len(given)} dimensions", f"at most {MAX_NDIM}")
    extents = []
    for number, written in enumerate(given):
        entry = (*path, "shape", number)
        extent = whole_number(document, entry, sizes)
        if extent is None or not 0 <= extent <= MAX_EXTENT:
            raise InputError(document.place(entry), f"extent {show(written if extent is None else extent)} in shape",
                             f"a whole number from 0 to 2**39 = {MAX_EXTENT}")  # fmt: skip
        extents.append(extent)
    return tuple(extents)


def _limits(document: Document, path: KeyPath, random: str, dtype: str) -> tuple[int | float, int | float]:
    """low and high, checked against the dtype."""
    info = {"i": np.iinfo, "f": np.finfo, "c": np.finfo}.get(np.dtype(dtype).kind)
    limits: dict[str, int | float] = {"low": 0, "high": 1}
    for key in ("low", "high"):
        place, given = document.place((*path, key)), lookup(document, (*path, key))
        if given is None:
            continue
        if random != "uniform" or info is None:
            kind = f"random = {random!r}" if random != "uniform" else f"dtype {dtype}"
            raise InputError(place, f"{key} does not go with {kind}", "only with uniform numbers")
        if type(given) is not int and (type(given) is not float or info is np.iinfo):
            wanted = "a whole number" if info is np.iinfo else "a number"
            raise InputError(place, f"{key} is {kind_of(given)}", f"{wanted} is wanted")
        ends = info(np.dtype(dtype))
        least, most = (int(end) if info is np.iinfo else float(end) for end in (ends.min, ends.max))
        if (type(given) is float and not isfinite(given)) or not least <= given <= most:
            raise InputError(place, f"{key} = {show(given)} does not fit into {dtype}", f"{least} to {most}")
        limits[key] = given
    place = document.place(path)
    if random == "uniform" and info is np.iinfo and lookup(document, (*path, "high")) is None:
        raise InputError(place, f"input {path[-1]} is uniform and {dtype} and has no high", "high = NUMBER, exclusive")
    if not limits["low"] < limits["high"]:
        shown = f"low = {show(limits['low'])} is not below high = {show(limits['high'])}"
        raise InputError(place, shown, "low < high")
    return limits["low"], limits["high"]


def positive_numbers(document: Document, path: KeyPath) -> tuple[int, ...] | None:
    """A list of positive whole numbers."""
    given = get(document, path, list)
    for number, value in enumerate(given or ()):
        if type(value) is not int or not 1 <= value <= MAX_EXTENT:
            raise InputError(document.place((*path, number)), f"{show(value)} in {path[-1]}",
                             f"a whole number from 1 to 2**39 = {MAX_EXTENT}")  # fmt: skip
    return None if given is None else tuple(given)
