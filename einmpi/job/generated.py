"""Inputs of a job file that are generated: their distribution, shape, seed and limits."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from einmpi.errors import InputError
from einmpi.files.specs import InputSpec
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.labels import MAX_EXTENT
from einmpi.language.toml_document import (
    Document,
    KeyPath,
    choice,
    get,
    kind_of,
    lookup,
    show,
    whole_number,
)

RANDOM = ("normal", "uniform", "zeros", "ones", "arange")
MAX_NDIM = 32  # HDF5's limit


def read_generated(
    document: Document, path: KeyPath, spec: InputSpec, sizes: Mapping[str, int], dtype: str
) -> InputSpec:
    """Return the input at a path with its shape and with what its values depend on."""
    random = choice(document, (*path, "random"), RANDOM, "")
    if random == "normal" and DTYPES[dtype].kind in "iub":
        raise InputError(
            spec.place,
            f"input {spec.name} cannot be both normal and {dtype}",
            "a float or complex dtype, or one of uniform, zeros, ones, arange",
        )
    low, high = _read_limits(document, path, random, dtype, sizes)
    return replace(
        spec,
        shape=read_shape(document, path, sizes),
        dtype=dtype,
        random=random,
        seed=_read_seed(document, path, spec.name),
        low=low,
        high=high,
    )


def _read_seed(document: Document, path: KeyPath, name: str) -> int:
    seed = get(document, (*path, "seed"), int)
    if seed is None:
        # Inputs differ from each other, and do not depend on their order in the file.
        return zlib.crc32(name.encode())
    if not 0 <= seed < 2**64:
        place = document.place((*path, "seed"))
        raise InputError(place, f"seed is {show(seed)}", "an integer from 0 to 2**64 - 1")
    return seed


def read_shape(document: Document, path: KeyPath, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of an input."""
    given = get(document, (*path, "shape"), list)
    if given is None:
        raise InputError(
            document.place(path),
            f"input {path[-1]} has no shape",
            'a list such as shape = ["s", 10]',
        )
    if len(given) > MAX_NDIM:
        raise InputError(
            document.place((*path, "shape")),
            f"shape has {len(given)} dimensions",
            f"at most {MAX_NDIM}",
        )
    extents = []
    for number, written in enumerate(given):
        entry = (*path, "shape", number)
        extent = whole_number(document, entry, sizes)
        if extent is None or not 0 <= extent <= MAX_EXTENT:
            shown = show(written if extent is None else extent)
            raise InputError(
                document.place(entry),
                f"extent {shown} in shape",
                f"an integer from 0 to 2**39 = {MAX_EXTENT}",
            )
        extents.append(extent)
    return tuple(extents)


def _read_limits(
    document: Document, path: KeyPath, random: str, dtype: str, sizes: Mapping[str, int]
) -> tuple[int | float, int | float]:
    """Return low and high, checked against the dtype."""
    limits: dict[str, int | float] = {"low": 0, "high": 1}
    for key in ("low", "high"):
        if lookup(document, (*path, key)) is not None:
            limits[key] = _read_limit(document, (*path, key), random, dtype, sizes)
    low = limits["low"]
    high = limits["high"]
    place = document.place(path)
    is_integer = DTYPES[dtype].kind in "iu"
    if random == "uniform" and is_integer and lookup(document, (*path, "high")) is None:
        raise InputError(
            place,
            f"input {path[-1]} is uniform and {dtype} but has no high",
            "high = NUMBER, an exclusive upper bound",
        )
    if not low < high:
        raise InputError(place, f"low = {show(low)} is not below high = {show(high)}", "low < high")
    return low, high


def _read_limit(
    document: Document, path: KeyPath, random: str, dtype: str, sizes: Mapping[str, int]
) -> int | float:
    key = path[-1]
    place = document.place(path)
    given: int | float = lookup(document, path)
    if isinstance(given, str):  # arithmetic on sizes
        number = whole_number(document, path, sizes)
        assert number is not None, "a string is a number, or refused"
        given = number
    kind = DTYPES[dtype].kind
    if random != "uniform":
        raise InputError(
            place, f"{key} cannot be combined with random = {random!r}", 'random = "uniform"'
        )
    if kind == "b":
        raise InputError(
            place,
            f"{key} cannot be combined with dtype {dtype}",
            "an integer, float or complex dtype",
        )
    least: int | float
    most: int | float
    if kind in "iu":
        if type(given) is not int:
            raise InputError(place, f"{key} is {kind_of(given)}", "an integer")
        least = int(np.iinfo(dtype).min)
        most = int(np.iinfo(dtype).max)
    else:
        if type(given) is not int and type(given) is not float:
            raise InputError(place, f"{key} is {kind_of(given)}", "a number")
        # numpy does not know the limits of bfloat16, which are those of float32.
        limits = np.finfo(DTYPES[dtype].file_dtype)
        least = float(limits.min)
        most = float(limits.max)
    if not least <= given <= most:  # nan neither
        raise InputError(
            place, f"{key} = {show(given)} does not fit into {dtype}", f"{least} to {most}"
        )
    return given
