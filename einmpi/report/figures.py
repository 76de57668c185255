"""The figures of tensors: norm, least and greatest value of all blocks, for JSON and for people."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arrays.dist_array import DistArray
from einmpi.comm.base import Comm

NORM_BLOCK_ELEMENTS = 2**20

Array: TypeAlias = npt.NDArray[Any]
Number: TypeAlias = float | int


@dataclass(frozen=True)
class Figures:
    """The norm and extremes of a tensor. Empty and complex tensors have no extremes."""

    norm: float
    least: Number | None
    greatest: Number | None


def figures(comm: Comm, arrays: Mapping[str, DistArray]) -> dict[str, Figures]:
    """Return norm, least and greatest value of each tensor, on all ranks."""
    own = {}
    for name, array in arrays.items():
        if array.layout.owns(comm.rank):
            own[name] = _figures_of_block(array.host)
    blocks = [json.loads(text) for text in comm.allgather_text(json.dumps(own))]
    found = {}
    for name in arrays:
        norms = []
        low = []
        high = []
        for block in blocks:
            if name not in block:
                continue
            norm, least, greatest = block[name]
            norms.append(norm)
            if least is not None:
                low.append(least)
                high.append(greatest)
        norm = math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)
        found[name] = Figures(norm, _extreme(low, min), _extreme(high, max))
    return found


def _figures_of_block(array: Array) -> tuple[float, Number | None, Number | None]:
    if array.size == 0:
        return 0.0, None, None
    is_complex = array.dtype.kind == "c"
    wide = np.complex128 if is_complex else np.float64
    flat = array.reshape(-1)
    norms = []
    with np.errstate(all="ignore"):
        # Block by block: the array may be larger than memory.
        for start in range(0, flat.size, NORM_BLOCK_ELEMENTS):
            block = flat[start : start + NORM_BLOCK_ELEMENTS].astype(wide, copy=False)
            norms.append(float(np.linalg.norm(block)))
    norm = math.hypot(*norms)
    if is_complex:
        return norm, None, None
    return norm, array.min().item(), array.max().item()


def _extreme(
    values: Sequence[Number], choose: Callable[[Sequence[Number]], Number]
) -> Number | None:
    """Return the least or greatest value; nan wins, as in numpy."""
    for value in values:
        if math.isnan(value):
            return value
    return choose(values) if values else None


def as_json_number(value: complex) -> Number | list[Number | None] | None:
    """Return a number for JSON; a complex one as the list of its two parts."""
    if isinstance(value, complex):
        return [finite(value.real), finite(value.imag)]
    return finite(value)


def finite(value: Number | None) -> Number | None:
    """Replace infinity and nan, which JSON does not have."""
    if value is None or not math.isfinite(value):
        return None
    return value


def show_figures(found: Figures, array: DistArray) -> str:
    """Return the figures of a tensor as text."""
    if array.size == 0:
        return "empty"
    norm = f"norm {found.norm:.6g}"
    if found.least is None:
        return norm
    return f"{norm}  min {found.least:.6g}  max {found.greatest:.6g}"
