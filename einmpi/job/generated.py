"""Inputs of a job file that are generated: their distribution, shape, seed and limits."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite

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


def generated(
    document: Document, spec: InputSpec, sizes: Mapping[str, int], dtype: str
) -> InputSpec:
    """The input with what is said about its values."""
    path = ("inputs", spec.name)
    random = choice(document, (*path, "random"), RANDOM, "")
    if random == "normal" and np.dtype(dtype).kind in "ib":
        allowed = "a float or complex dtype, or uniform, zeros, ones, arange"
        raise InputError(spec.place, f"input {spec.name} cannot be normal and {dtype}", allowed)
    seed = get(document, (*path, "seed"), int)
    if seed is None:
        seed = zlib.crc32(spec.name.encode())  # inputs differ, and nothing depends on their order
    if not 0 <= seed < 2**64:
        raise InputError(document.place((*path, "seed")), f"seed is {show(seed)}", "0 to 2**64 - 1")
    low, high = _limits(document, path, random, dtype)
    return replace(
        spec,
        shape=_shape(document, path, sizes),
        dtype=dtype,
        random=random,
        seed=seed,
        low=low,
        high=high,
    )


def _shape(document: Document, path: KeyPath, sizes: Mapping[str, int]) -> tuple[int, ...]:
    given = get(document, (*path, "shape"), list)
    if given is None:
        raise InputError(
            document.place(path), f"input {path[-1]} has no shape", 'such as shape = ["s", 10]'
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
            raise InputError(
                document.place(entry),
                f"extent {show(written if extent is None else extent)} in shape",
                f"a whole number from 0 to 2**39 = {MAX_EXTENT}",
            )
        extents.append(extent)
    return tuple(extents)


def _limits(
    document: Document, path: KeyPath, random: str, dtype: str
) -> tuple[int | float, int | float]:
    """low and high, checked against the dtype."""
    plain = DTYPES[dtype].file_dtype  # numbers of the same size
    info = {"i": np.iinfo, "f": np.finfo, "c": np.finfo}.get(np.dtype(plain).kind)
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
        ends = info(np.dtype(plain))
        least, most = (int(end) if info is np.iinfo else float(end) for end in (ends.min, ends.max))
        if (type(given) is float and not isfinite(given)) or not least <= given <= most:
            raise InputError(
                place, f"{key} = {show(given)} does not fit into {dtype}", f"{least} to {most}"
            )
        limits[key] = given
    place = document.place(path)
    if random == "uniform" and info is np.iinfo and lookup(document, (*path, "high")) is None:
        raise InputError(
            place,
            f"input {path[-1]} is uniform and {dtype} and has no high",
            "high = NUMBER, exclusive",
        )
    if not limits["low"] < limits["high"]:
        shown = f"low = {show(limits['low'])} is not below high = {show(limits['high'])}"
        raise InputError(place, shown, "low < high")
    return limits["low"], limits["high"]
