"""The [inputs] of a job file: where tensors come from. No file is opened here."""

from __future__ import annotations

import keyword
import os
import zlib
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any, Literal, TypeAlias

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.files.datasets import CONVERTIBLE_DTYPES
from einmpi.files.formats import FileFormat, known_format, name_keys, split_short_form, suffix_of
from einmpi.files.specs import InputSpec, Number, OutputSpec, Resident, SliceEntry
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.scalar import MAX_EXTENT
from einmpi.language.macros import is_reserved
from einmpi.language.syntax import integer_text
from einmpi.language.toml_document import Entry, kind_of, show

Source: TypeAlias = Literal["random", "file", "keys"]
FIT = "fit"  # resident as far as memory allows
_COMMON_KEYS = ("resident", "parts", "batch", "implicit")
GENERATED_KEYS = ("random", "shape", "dtype", "seed", "low", "high", "density", "nnz")
SEPARATE_KEYS = ("keys", "values")  # of a sparse tensor: where its parts are
_SELECTING_KEYS = ("rows", "columns", "slice")


def check_name(place: str, name: str, kind: str, sizes: Mapping[str, int]) -> None:
    """Refuse a name that the language could not refer to."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise InputError(
            place,
            f"{show(name)} cannot name {kind}",
            "a name of letters, digits and _ that does not start with a digit "
            "and is not a Python keyword",
        )
    if name in sizes:
        raise InputError(place, f"{name} is a size and cannot name {kind}", "another name")
    if is_reserved(name):
        raise InputError(
            place, f"{name} is a word of the language and cannot name {kind}", "another name"
        )


def read_dtype(entry: Entry) -> str | None:
    """Return the dtype at a key, None if there is none."""
    dtype = entry.get(str)
    if dtype is not None:
        check_dtype(entry.place, dtype)
    return dtype


def check_dtype(place: str, dtype: str) -> None:
    """Refuse a dtype that the language does not have."""
    if dtype not in DTYPES:
        raise InputError(place, f"unknown dtype {show(dtype)}", one_of(tuple(DTYPES), dtype))


# ---- inputs -------------------------------------------------------------------------------------


def read_inputs(entry: Entry, sizes: Mapping[str, int], dtype: str) -> tuple[InputSpec, ...]:
    """Return the inputs of a table in the order of the file.

    `dtype` is that of generated inputs that do not name their own.
    """
    names = entry.table()
    return tuple(_read_input(entry[name], name, sizes, dtype) for name in names)


def _read_input(entry: Entry, name: str, sizes: Mapping[str, int], dtype: str) -> InputSpec:
    place = entry.place
    given = entry.value
    check_name(place, name, "a tensor", sizes)
    if isinstance(given, str):
        file, inside = read_short_form(place, given)
        return InputSpec(
            name,
            file=entry.relative_path(file),
            inside=inside,
            follow=_own_folders(entry),
            place=place,
        )
    if not isinstance(given, dict):
        raise entry.wrong(
            f"input {name} is {kind_of(given)}", 'a table or a string such as "FILE.h5:/A"'
        )
    source = _check_keys(entry, name, given)
    spec = InputSpec(
        name,
        resident=_read_resident(entry["resident"]),
        parts=positive_integers(entry["parts"]),
        place=place,
        implicit=_read_implicit(entry["implicit"]),
    )
    if source == "random":
        own_dtype = read_dtype(entry["dtype"]) or dtype
        return read_generated(entry, spec, sizes, own_dtype)
    if source == "keys":
        return _read_separate(entry, spec, sizes)
    file = entry["file"].get(str) or ""
    file_format = check_file(place, file)
    return replace(
        spec,
        file=entry.relative_path(file),
        inside=_read_name(entry, file_format, suffix_of(file)),
        slices=_read_slices(entry, sizes),
        declared_shape=read_shape(entry, sizes) if "shape" in given else None,
        declared_dtype=read_dtype(entry["dtype"]),
        convert=_read_conversion(entry["convert"]),
        follow=_read_follow(entry["follow"], file_format),
    )


def _check_keys(entry: Entry, name: str, given: Mapping[str, object]) -> Source:
    """Return where an input comes from; refuse keys that do not belong to that."""
    file_keys: tuple[str, ...] = (
        "file",
        *name_keys(),
        *_SELECTING_KEYS,
        "shape",
        "dtype",
        "convert",
        "follow",
        *_COMMON_KEYS,
    )
    allowed_for: dict[Source, tuple[str, ...]] = {
        "random": (*GENERATED_KEYS, *_COMMON_KEYS),
        "file": file_keys,
        "keys": (*SEPARATE_KEYS, "shape", "dtype", "convert", "follow", *_COMMON_KEYS),
    }
    entry.table(dict.fromkeys([key for keys in allowed_for.values() for key in keys]))
    sources: list[Source] = [source for source in allowed_for if source in given]
    if "random" in sources and "file" in sources:
        raise entry.wrong(f"input {name} has both random and file", "one of the two")
    if not sources:
        raise entry.wrong(f"input {name} has neither random nor file", "one of the two")
    source = sources[0]
    allowed = allowed_for[source]
    for key in given:
        if key not in allowed:
            raise entry[key].wrong(
                f"{key} cannot be combined with {source}",
                one_of(allowed),
            )
    return source


def _read_separate(entry: Entry, spec: InputSpec, sizes: Mapping[str, int]) -> InputSpec:
    """Return the sparse tensor whose keys and values are tensors in files."""
    example = 'keys = ["g.h5:/row", "g.h5:/column"], values = "g.h5:/value", shape = ["n", "n"]'
    texts = entry["keys"].get(list) or []
    values = entry["values"].get(str)
    if values is None or not texts or not all(isinstance(text, str) for text in texts):
        raise entry.wrong(f"input {entry.key} does not say where keys and values are", example)
    parts = []
    for text in (*texts, values):
        file, inside = read_short_form(entry.place, text)
        follow = _read_follow(entry["follow"], check_file(entry.place, file))
        file = entry.relative_path(file)
        parts.append(
            InputSpec(spec.name, file=file, inside=inside, follow=follow, place=spec.place)
        )
    return replace(
        spec,
        file=parts[-1].file,
        inside=parts[-1].inside,
        follow=parts[-1].follow,
        keys=tuple(parts[:-1]),
        declared_shape=read_shape(entry, sizes),
        declared_dtype=read_dtype(entry["dtype"]),
        convert=_read_conversion(entry["convert"]),
    )


def _read_implicit(entry: Entry) -> Number | None:
    """Return the value of elements that are not stored, None if the job does not say it."""
    written = entry.value
    if written is not None and type(written) not in (bool, int, float):
        raise entry.wrong(f"implicit is {show(written)}", "a number such as 0 or inf")
    number: Number | None = written
    return number


def _read_resident(entry: Entry) -> Resident:
    """Return whether an input stays loaded between calls: true, false, or "fit"."""
    written = entry.value
    if written == FIT:
        return "fit"
    if written is None or type(written) is bool:
        return bool(written)
    what = f"resident is {kind_of(written)}"
    raise entry.wrong(what, f'true, false or "{FIT}"')


def _read_conversion(entry: Entry) -> str | None:
    """Return the dtype that elements of a file are converted to, if there is one."""
    dtype = entry.get(str)
    if dtype is not None and dtype not in CONVERTIBLE_DTYPES:
        expected = one_of(CONVERTIBLE_DTYPES, dtype)
        raise entry.wrong(f"convert is {dtype!r}", expected)
    return dtype


def _read_name(entry: Entry, file_format: FileFormat, suffix: str) -> str:
    """Return the name of the tensor inside the file; empty if the file holds a single tensor."""
    key = file_format.key
    for other in name_keys():
        if other != key and entry[other].get(str) is not None:
            expected = key or "no name: the file holds a single tensor"
            raise entry[other].wrong(
                f"{other} cannot be combined with a {suffix} file",
                expected,
            )
    if not key:
        return ""
    name = entry[key].get(str)
    if name is None:
        name = file_format.default_name or None
    if name is None:
        what = f"input {entry.key} does not say which {key} of the file to use"
        raise entry.wrong(what, f'{key} = "{file_format.example_name}"')
    return file_format.check_name(entry.place, name)


def _read_slices(entry: Entry, sizes: Mapping[str, int]) -> tuple[SliceEntry, ...]:
    """Return what is selected of a file: by `rows` and `columns`, or by `slice`."""
    selecting = entry["slice"].get(str)
    rows = _read_range(entry["rows"], sizes)
    columns = _read_range(entry["columns"], sizes)
    if selecting is None:
        if columns is not None:
            return (rows or (None, None, 1), columns)
        return () if rows is None else (rows,)
    place = entry["slice"].place
    if rows is not None or columns is not None:
        raise InputError(place, "slice cannot be combined with rows or columns", "slice alone")
    entries = []
    for text in selecting.split(","):
        selected = _slice_entry(entry["slice"], text, sizes)
        if selected is None:
            expected = 'ranges and indices such as slice = "0:1000, :, 3"'
            raise InputError(place, f"{show(selecting)} is not a slice", expected)
        entries.append(selected)
    return tuple(entries)


def _read_range(
    entry: Entry, sizes: Mapping[str, int]
) -> tuple[int | None, int | None, int] | None:
    """Return start, stop and step of "START:STOP" or "START:STOP:STEP", None without the key."""
    given = entry.get(str)
    if given is None:
        return None
    selected = _slice_entry(entry, given, sizes)
    if selected is None or isinstance(selected, int):
        key = entry.key
        raise entry.wrong(
            f"{show(given)} is not a range of {key}",
            f'a range such as {key} = "0:1000"',
        )
    return selected


def _slice_entry(entry: Entry, text: str, sizes: Mapping[str, int]) -> SliceEntry | None:
    """Return "INDEX", "START:STOP" or "START:STOP:STEP", None if it is none of them.

    Each part may be integer arithmetic over sizes; start, stop and step may be missing.
    """
    source = entry.source
    numbers: list[int | None] = []
    for part in text.split(":"):
        stripped = part.strip()
        numbers.append(integer_text(replace(source, text=stripped), sizes) if stripped else None)
    if len(numbers) == 1:
        return numbers[0]
    if len(numbers) > 3:
        return None
    step = 1
    if len(numbers) == 3 and numbers[2] is not None:
        step = numbers[2]
    if step < 1:
        raise entry.wrong(f"the step is {step}", "a step of 1 or more")
    return numbers[0], numbers[1], step


def _own_folders(entry: Entry) -> tuple[str, ...]:
    """Return the folder of the job file; none for a job that is made in Python."""
    job_file = entry.document.name
    return (os.path.dirname(job_file) or ".",) if job_file else ()


def _read_follow(entry: Entry, file_format: FileFormat) -> tuple[str, ...]:
    """Return the folders to which links of a file may lead: the job's own, and those it lists."""
    folders = list(_own_folders(entry))
    given = entry.get(list)
    if given is not None and not file_format.has_links:
        raise entry.wrong(
            f"follow cannot be combined with a {file_format.suffixes[0]} file",
            "a file of a format that has links",
        )
    for number, folder in enumerate(given or []):
        if type(folder) is not str or not folder or "\0" in folder:
            raise entry[number].wrong(
                f"{show(folder)} in follow",
                'the path of a folder such as "../archive"',
            )
        folders.append(entry.relative_path(os.path.expanduser(folder)))
    return tuple(folders)


def in_batches(entry: Entry, spec: InputSpec, sizes: Mapping[str, int]) -> InputSpec:
    """Return an input of known shape as each step of a loop sees it: with the rows of a batch.

    `entry` is what the job file says about its batches.
    """
    written = entry.value
    if written is None:
        return spec
    batch = entry.whole_number(sizes)
    if batch is None or not 1 <= batch <= MAX_EXTENT:
        shown = show(written if batch is None else batch)
        expected = f"an integer from 1 to 2**39 = {MAX_EXTENT}, or the name of a size"
        raise entry.wrong(f"batch is {shown}", expected)
    if spec.key_dimensions:
        raise entry.wrong(f"{spec.name} is sparse, and cannot come in batches", "a dense tensor")
    if spec.resident:
        what = f"input {spec.name} has both batch and resident"
        raise entry.wrong(what, "one of the two: a batch stays for one step")
    if not spec.shape:
        what = f"{spec.name} has no dimensions, and cannot come in batches"
        raise entry.wrong(what, "a tensor with rows")
    return replace(spec, rows=spec.shape[0], shape=(batch, *spec.shape[1:]))


# ---- shared with outputs ------------------------------------------------------------------------


def check_file(place: str, file: str, writable: bool = False) -> FileFormat:
    """Return the format of a file; refuse a file of an unknown format."""
    if "\0" in file:
        raise InputError(place, f"{show(file)} is not a file name", "a path without NUL characters")
    return known_format(place, file, writable)


def read_short_form(place: str, text: str, writable: bool = False) -> tuple[str, str]:
    """Return the file and the name of the tensor inside it of "FILE:NAME" or "FILE"."""
    file, name = split_short_form(text)
    file_format = check_file(place, file, writable)
    if not name:
        name = file_format.default_name
    if file_format.key and not name:
        raise InputError(
            place,
            f"{show(text)} names a file but no {file_format.key} in it",
            file_format.short_form,
        )
    if name and not file_format.key:
        raise InputError(
            place,
            f"{show(text)} names a tensor in a file that holds a single tensor",
            file_format.short_form,
        )
    if not name:
        return file, ""
    return file, file_format.check_name(place, name)


def check_parts(spec: InputSpec | OutputSpec, dimensions: int) -> None:
    """Refuse `parts` unless there is one for each dimension of the tensor."""
    if spec.parts is not None and isinstance(spec, InputSpec) and spec.key_dimensions:
        raise InputError(spec.place, f"{spec.name} is sparse, and has parts", "a dense tensor")
    if spec.parts is not None and len(spec.parts) != dimensions:
        raise InputError(
            spec.place,
            f"parts of {spec.name} has length {len(spec.parts)}",
            f"{dimensions}, the number of its dimensions",
        )


def positive_integers(entry: Entry) -> tuple[int, ...] | None:
    """Return a list of positive integers, None if there is none."""
    given = entry.get(list)
    if given is None:
        return None
    for number, value in enumerate(given):
        if type(value) is not int or not 1 <= value <= MAX_EXTENT:
            raise entry[number].wrong(
                f"{show(value)} in {entry.key}",
                f"an integer from 1 to 2**39 = {MAX_EXTENT}",
            )
    return tuple(given)


# ---- generated inputs ----------------------------------------------------------------------------


SPARSE = "sparse"
RANDOM = ("normal", "uniform", "zeros", "ones", "arange", SPARSE)
_WITH_LIMITS = ("uniform", SPARSE)
MAX_NDIM = 32  # HDF5's limit


def read_generated(
    entry: Entry, spec: InputSpec, sizes: Mapping[str, int], dtype: str
) -> InputSpec:
    """Return the input at a path with its shape and with what its values depend on."""
    random = entry["random"].choice(RANDOM, "")
    if random == "normal" and DTYPES[dtype].kind in "iub":
        raise InputError(
            spec.place,
            f"input {spec.name} cannot be both normal and {dtype}",
            "a float or complex dtype, or one of uniform, zeros, ones, arange",
        )
    low, high = _read_limits(entry, random, dtype, sizes)
    shape = read_shape(entry, sizes)
    stored = _read_stored(entry, random, shape, sizes)
    if stored is None and spec.implicit is not None:
        raise entry["implicit"].wrong(
            "implicit is the value of sparse tensors", 'random = "sparse"'
        )
    return replace(
        spec,
        shape=shape,
        key_dimensions=0 if stored is None else len(shape),
        stored=stored,
        dtype=dtype,
        random=random,
        seed=_read_seed(entry, spec.name),
        low=low,
        high=high,
    )


def _read_stored(
    entry: Entry, random: str, shape: tuple[int, ...], sizes: Mapping[str, int]
) -> int | None:
    """Return how many elements of a random tensor are stored; None if it is dense."""
    density = entry["density"]
    nnz = entry["nnz"]
    if random != SPARSE:
        for each in (density, nnz):
            if each.value is not None:
                raise each.wrong(
                    f"{each.key} cannot be combined with random = {random!r}", 'random = "sparse"'
                )
        return None
    if (density.value is None) == (nnz.value is None):
        what = f"input {entry.key} is sparse, and does not say how many elements are stored"
        raise entry.wrong(what, "either density or nnz")
    elements = prod(shape)
    if not shape:
        raise entry.wrong(f"input {entry.key} is sparse, and has no dimensions", "a shape")
    given: int | float | None = density.value
    if given is not None:
        if type(given) not in (int, float) or not 0 <= given <= 1:
            raise density.wrong(f"density is {show(given)}", "a number from 0 to 1")
        return round(given * elements)
    count: int | None = nnz.whole_number(sizes)
    if count is None or not 0 <= count <= elements:
        shown = show(nnz.value if count is None else count)
        raise nnz.wrong(f"nnz is {shown}", f"an integer from 0 to {elements}, the elements of it")
    return count


def _read_seed(entry: Entry, name: str) -> int:
    seed = entry["seed"].get(int)
    if seed is None:
        # Inputs differ from each other, and do not depend on their order in the file.
        return zlib.crc32(name.encode())
    if not 0 <= seed < 2**64:
        place = entry["seed"].place
        raise InputError(place, f"seed is {show(seed)}", "an integer from 0 to 2**64 - 1")
    return seed


def read_shape(entry: Entry, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of an input."""
    shape = entry["shape"]
    given = shape.get(list)
    if given is None:
        raise entry.wrong(
            f"input {entry.key} has no shape",
            'a list such as shape = ["s", 10]',
        )
    if len(given) > MAX_NDIM:
        raise shape.wrong(
            f"shape has {len(given)} dimensions",
            f"at most {MAX_NDIM}",
        )
    extents = []
    for number, written in enumerate(given):
        extent = shape[number].whole_number(sizes)
        if extent is None or not 0 <= extent <= MAX_EXTENT:
            shown = show(written if extent is None else extent)
            expected = f"an integer from 0 to 2**39 = {MAX_EXTENT}"
            raise shape[number].wrong(f"extent {shown} in shape", expected)
        extents.append(extent)
    return tuple(extents)


def _read_limits(
    entry: Entry, random: str, dtype: str, sizes: Mapping[str, int]
) -> tuple[int | float, int | float]:
    """Return low and high, checked against the dtype."""
    low = _read_limit(entry["low"], 0, random, dtype, sizes)
    high = _read_limit(entry["high"], 1, random, dtype, sizes)
    is_integer = DTYPES[dtype].kind in "iu"
    if random in _WITH_LIMITS and is_integer and entry["high"].value is None:
        raise entry.wrong(
            f"input {entry.key} is {random} and {dtype} but has no high",
            "high = NUMBER, an exclusive upper bound",
        )
    if not low < high:
        raise entry.wrong(f"low = {show(low)} is not below high = {show(high)}", "low < high")
    return low, high


def _read_limit(
    entry: Entry, default: int, random: str, dtype: str, sizes: Mapping[str, int]
) -> int | float:
    key = entry.key
    given: Any = entry.value
    if given is None:
        return default
    if isinstance(given, str):  # arithmetic on sizes
        given = entry.whole_number(sizes)
    kind = DTYPES[dtype].kind
    if random not in _WITH_LIMITS:
        raise entry.wrong(
            f"{key} cannot be combined with random = {random!r}", 'random = "uniform"'
        )
    if kind == "b":
        raise entry.wrong(
            f"{key} cannot be combined with dtype {dtype}",
            "an integer, float or complex dtype",
        )
    is_integer = kind in "iu"
    if type(given) is not int and (is_integer or type(given) is not float):
        raise entry.wrong(f"{key} is {kind_of(given)}", "an integer" if is_integer else "a number")
    # numpy does not know the limits of bfloat16, which are those of float32.
    limits = np.iinfo(dtype) if is_integer else np.finfo(DTYPES[dtype].file_dtype)
    least, most = (end if is_integer else float(end) for end in (limits.min, limits.max))
    if not least <= given <= most:  # nan neither
        raise entry.wrong(f"{key} = {show(given)} does not fit into {dtype}", f"{least} to {most}")
    number: int | float = given
    return number
