"""The cheapest way to do a contraction by BLAS: which operands are copied, how, and in which pieces."""

from __future__ import annotations

import cmath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import numpy as np

from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Call, Const, Number, Scalar

Labels: TypeAlias = tuple[str, ...]
Extent: TypeAlias = Mapping[str, int]
Strides: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Contraction:
    """`scale` times a product of the operands at `positions`, or their conjugates, summed to the output's labels."""

    positions: tuple[int, ...]
    conj: tuple[bool, ...]
    indices: tuple[Labels, ...]  # of the factors, then of the output
    extents: tuple[tuple[str, int], ...]
    scale: Number


@lru_cache(maxsize=4096)
def recognise_contraction(einsum: EinSum) -> Contraction | None:
    """The EinSum as a contraction; None where it is none."""
    try:
        scale, leaves = _product(einsum.function, False)
        usable = (
            einsum.aggregation in (None, "sum") and 1 <= len(leaves) <= 2 and cmath.isfinite(scale)
        )
    except (TypeError, OverflowError):
        return None
    labels = [
        tuple(entry for entry in einsum.operands[k] if isinstance(entry, str)) for k, _ in leaves
    ]
    if not usable or labels != [einsum.operands[k] for k, _ in leaves]:
        return None  # too many operands, or a gather
    kept = [set(index) & set(einsum.output) for index in labels]
    if not einsum.aggregated and (len(kept) == 1 or kept[0] <= kept[1] or kept[1] <= kept[0]):
        return None  # elementwise work, no outer product
    scale *= prod(
        einsum.extent[label]
        for label in einsum.aggregated
        if not any(label in index for index in labels)
    )
    positions, conj = zip(*leaves, strict=True)
    return Contraction(positions, conj, (*labels, einsum.output), einsum.extents, scale)


def _product(node: Scalar, conj: bool) -> tuple[Any, tuple[tuple[int, bool], ...]]:
    """A product as its constant and its operands, each conjugated or not; TypeError where it is no product."""
    if isinstance(node, Const):
        return (node.value.conjugate() if conj else node.value), ()
    if isinstance(node, Arg):
        return 1, ((node.position, conj),)
    if not isinstance(node, Call) or node.op not in ("*", "conj", "neg"):
        raise TypeError("no product")
    parts = [_product(arg, conj != (node.op == "conj")) for arg in node.args]
    scale = prod((part[0] for part in parts), start=-1 if node.op == "neg" else 1)
    return scale, tuple(leaf for part in parts for leaf in part[1])


def dense_strides(index: Labels, extent: Extent, dtype: str) -> tuple[int, ...]:
    """Those of a C-contiguous array."""
    return tuple(
        np.dtype(dtype).itemsize * size_of(index[k + 1 :], extent) for k in range(len(index))
    )


def size_of(labels: Iterable[str], extent: Extent) -> int:
    return prod(extent[label] for label in labels)
