"""The [inputs] of a job file: where tensors come from. No file is opened here."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import replace

from einmpi.errors import InputError, one_of
from einmpi.files.specs import INSIDE, InputSpec, suffix_of
from einmpi.graph.dtypes import DTYPES, check_installed, cpu_dtypes
from einmpi.graph.labels import MAX_EXTENT
from einmpi.job.generated import generated
from einmpi.language.syntax import integer_text
from einmpi.language.toml_document import (
    Document,
    KeyPath,
    beside,
    get,
    kind_of,
    lookup,
    show,
    table,
)
from einmpi.language.vocabulary import is_reserved

_GENERATED_KEYS = ("random", "shape", "dtype", "seed", "low", "high", "resident", "parts")
_FILE_KEYS = ("file", "dataset", "tensor", "rows", "resident", "parts")
_SHORT = re.compile(r"(.+?\.(?:h5|hdf5|he5|safetensors|npy)):(.+)", re.IGNORECASE | re.DOTALL)


def check_name(place: str, name: str, kind: str, sizes: Mapping[str, int]) -> None:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise InputError(
            place,
            f"{show(name)} cannot name {kind}",
            "letters, digits and _, not starting with a digit, and no word of Python",
        )
    if is_reserved(name) or name in sizes:
        what = "a size" if name in sizes else "a word of the language"
        raise InputError(place, f"{name} is {what} and cannot name {kind}", "any other name")


def read_dtype(document: Document, path: KeyPath) -> str | None:
    found = get(document, path, str)
    return found if found is None else check_dtype(document.place(path), found)


def check_dtype(place: str, dtype: str) -> str:
    check_installed(place, dtype)
    if dtype not in DTYPES:
        raise InputError(place, f"unknown dtype {show(dtype)}", one_of(cpu_dtypes(), dtype))
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
        file, inside = (
            (given, "") if suffix_of(given) == ".npy" else split_short(place, given, tuple(INSIDE))
        )
        return _from_file(
            document,
            InputSpec(name, place=place),
            file,
            {_key(file) or "NAME" * bool(inside): inside},
        )
    if not isinstance(given, dict):
        raise InputError(
            place, f"input {name} is {kind_of(given)}", 'a table or "FILE.h5:/DATASET" is wanted'
        )
    table(document, path, dict.fromkeys([*_GENERATED_KEYS, *_FILE_KEYS]))
    if ("random" in given) == ("file" in given):
        both = "both" if "file" in given else "neither"
        raise InputError(
            place,
            f"input {name} has {both} random {'and' if 'file' in given else 'nor'} file",
            "one of the two",
        )
    chosen, allowed = ("file", _FILE_KEYS) if "file" in given else ("random", _GENERATED_KEYS)
    for key in given:
        if key not in allowed:
            raise InputError(
                document.place((*path, key)), f"{key} does not go with {chosen}", one_of(allowed)
            )
    resident = get(document, (*path, "resident"), bool) or False
    spec = InputSpec(
        name, resident=resident, parts=positive_numbers(document, (*path, "parts")), place=place
    )
    if chosen == "random":
        return generated(document, spec, sizes, read_dtype(document, (*path, "dtype")) or dtype)
    inside_of = {key: get(document, (*path, key), str) for key in ("dataset", "tensor")}
    spec = replace(spec, rows=_rows(document, (*path, "rows"), sizes))
    return _from_file(
        document, spec, get(document, (*path, "file"), str) or "", {"": "", **inside_of}
    )


def _key(file: str) -> str:
    """The key that names a tensor in a file of this kind."""
    return INSIDE.get(suffix_of(file), "")


def split_short(place: str, text: str, suffixes: tuple[str, ...]) -> tuple[str, str]:
    found = _SHORT.fullmatch(text)
    if found:
        return found[1], found[2]
    file = text if suffix_of(text) in suffixes else text.partition(":")[0]
    check_file(place, file, suffixes)
    raise InputError(place, f"{show(text)} names a file but nothing in it", '"FILE.h5:/DATASET"')


def check_file(place: str, file: str, suffixes: tuple[str, ...]) -> None:
    if suffix_of(file) not in suffixes or "\0" in file:
        raise InputError(
            place, f"{show(file)} is not a file of a known kind", f"suffixes: {', '.join(suffixes)}"
        )


def _from_file(
    document: Document, spec: InputSpec, file: str, inside_of: Mapping[str, str | None]
) -> InputSpec:
    """`inside_of` gives the name within the file by the key that has it."""
    check_file(spec.place, file, tuple(INSIDE))
    wanted = INSIDE[suffix_of(file)]
    for key, inside in inside_of.items():
        if key and inside is not None and key != wanted:
            place = document.place(("inputs", spec.name, key))
            allowed = f"{wanted} does" if wanted else "the file is the tensor"
            raise InputError(place, f"{key} does not go with a {suffix_of(file)} file", allowed)
    inside = inside_of.get(wanted)
    if inside is None:
        raise InputError(
            spec.place,
            f"input {spec.name} does not say which {wanted} of the file",
            f'{wanted} = "NAME"',
        )
    if wanted == "dataset":
        inside = dataset_path(spec.place, inside)
    names = {wanted: inside}
    return replace(
        spec, file=beside(document, file), dataset=names.get("dataset"), tensor=names.get("tensor")
    )


def _rows(
    document: Document, path: KeyPath, sizes: Mapping[str, int]
) -> tuple[int | None, int | None] | None:
    """ "START:STOP", either of them left out or whole-number arithmetic over sizes."""
    given = get(document, path, str)
    if given is None:
        return None
    ends = given.split(":")
    if len(ends) != 2:
        raise InputError(
            document.place(path), f"{show(given)} is not a range of rows", 'such as rows = "0:1000"'
        )
    source = document.source(path)
    start, stop = (
        integer_text(replace(source, text=end.strip()), sizes) if end.strip() else None
        for end in ends
    )
    return start, stop


def dataset_path(place: str, text: str) -> str:
    """One spelling a dataset: /a/b."""
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if not parts or "\0" in text:
        raise InputError(
            place, f"{show(text)} is not the path of a dataset", "such as /Z or /group/Z"
        )
    return "/" + "/".join(parts)


def positive_numbers(document: Document, path: KeyPath) -> tuple[int, ...] | None:
    """A list of positive whole numbers."""
    given = get(document, path, list)
    for number, value in enumerate(given or ()):
        if type(value) is not int or not 1 <= value <= MAX_EXTENT:
            raise InputError(
                document.place((*path, number)),
                f"{show(value)} in {path[-1]}",
                f"a whole number from 1 to 2**39 = {MAX_EXTENT}",
            )
    return None if given is None else tuple(given)
