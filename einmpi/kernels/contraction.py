"""Contractions: sums of products of one or two operands, which BLAS can compute."""

from __future__ import annotations

import cmath
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from einmpi.caches import bounded_cache
from einmpi.graph.arithmetic import infer_over
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Call, Const, Number, Scalar, labels_in, unique, walk

Labels: TypeAlias = tuple[str, ...]
Extent: TypeAlias = Mapping[str, int]
Strides: TypeAlias = tuple[tuple[int, ...], ...]


class SummedBlocks(NamedTuple):
    """How sums are divided whose bits must not depend on extents.

    The contracted labels, in this order, are one long label. Its blocks end at so many indices of
    the first label; in the whole program the longest block has `length` of them. `units` are the
    rows and columns of a tile.
    """

    labels: Labels
    ends: tuple[int, ...]
    length: int
    units: tuple[int, int]
    threads: int


@dataclass(frozen=True)
class Contraction:
    """`scale` times the product of some operands, summed over the labels the output does not have.

    The factors are the operands at `positions`; a factor is conjugated where `conj` says so.
    """

    positions: tuple[int, ...]
    conj: tuple[bool, ...]
    indices: tuple[Labels, ...]  # of the factors, then of the output
    extents: tuple[tuple[str, int], ...]
    scale: Number
    blocks: SummedBlocks | None = None


class _Product(NamedTuple):
    """A constant times operands, each given by its position and whether it is conjugated."""

    scale: Number
    factors: tuple[tuple[int, bool], ...]


@bounded_cache(4096)
def recognise_contraction(einsum: EinSum) -> Contraction | None:
    """Return the EinSum as a contraction, or None if it is not one.

    A contraction sums a constant times one or two operands that are indexed by labels alone, such
    as sum(-2 * A[i,j] * conj(B[j,k])). Elementwise work is left to other kernels, but an outer
    product is a contraction even though it sums nothing.
    """
    product = _finite_product(einsum.function)
    if product is None or einsum.aggregation not in (None, "sum"):
        return None
    positions = [position for position, _ in product.factors]
    indices: list[Labels] = []
    for position in positions:
        index = einsum.operands[position]
        labels = labels_in(index)
        if len(labels) < len(index):
            return None  # the operand is gathered
        indices.append(labels)
    if not einsum.aggregated and not _is_outer_product(indices, einsum.output):
        return None
    # A sum over a label that no factor has adds up equal values.
    missing = drop_labels(einsum.aggregated, unique(*indices))
    return Contraction(
        positions=tuple(positions),
        conj=tuple(conjugated for _, conjugated in product.factors),
        indices=(*indices, einsum.output),
        extents=einsum.extents,
        scale=product.scale * size_of(missing, einsum.extent),
    )


def required_contraction(einsum: EinSum) -> Contraction:
    """Return an EinSum that is a contraction as such."""
    contraction = recognise_contraction(einsum)
    assert contraction is not None, f"{einsum} is no contraction"
    return contraction


def exact_contraction(einsum: EinSum, dtypes: Iterable[str], strict: bool) -> Contraction | None:
    """Return an EinSum as a contraction; None if it is not one, or has another meaning then.

    As a contraction, factors are converted to the dtype of the product before they are multiplied,
    and some are summed before. The latter changes inf and nan, which matters only if `strict`.
    """
    contraction = recognise_contraction(einsum)
    if contraction is None or not _keeps_integers(einsum, tuple(dtypes)):
        return None
    if strict and not _multiplies_as_written(contraction):
        return None
    return contraction


@bounded_cache(4096)
def _keeps_integers(einsum: EinSum, dtypes: tuple[str, ...]) -> bool:
    """Return whether a contraction may be computed in the dtype of its product.

    A product of small integers that is multiplied by float64 or int64 wraps around before: the
    same factors converted first would not. `dtypes` are those of the operands.
    """
    whole = np.dtype(infer_over(einsum.function, dtypes)).name
    for node in walk(einsum.function):
        if not isinstance(node, Call):
            continue
        part = np.dtype(infer_over(node, dtypes)).name
        both_are_rounded = DTYPES[part].kind in "fc" and DTYPES[whole].kind in "fc"
        if part not in (whole, "bool") and not both_are_rounded:
            return False
    return True


def _multiplies_as_written(contraction: Contraction) -> bool:
    """Return whether inf, nan and overflow are those of the sum of products as it is written.

    They are not if a constant is moved out of the sum, or a factor is summed on its own over the
    labels that only this factor has.
    """
    *factors, output = contraction.indices
    summed = set(drop_labels(unique(*factors), output))
    for index in factors:
        if not summed <= set(index):
            return False
    return contraction.scale in (1, -1)


def _finite_product(function: Scalar) -> _Product | None:
    """Return ⊗ as a finite constant times one or two operands; None if it is anything else."""
    try:
        product = _as_product(function, conjugate=False)
        if product is None or not cmath.isfinite(product.scale):
            return None
    except OverflowError:  # an integer that is too large for a float
        return None
    return product if len(product.factors) in (1, 2) else None


def _as_product(node: Scalar, conjugate: bool) -> _Product | None:
    """Return an expression, or its conjugate, as a product; None if it is not one.

    The conjugate of a product is the product of the conjugates, so a `conj` is passed down to the
    operands and constants inside it. Two of them cancel out.
    """
    if isinstance(node, Const):
        value = node.value.conjugate() if conjugate else node.value
        return _Product(value, ())
    if isinstance(node, Arg):
        return _Product(1, ((node.position, conjugate),))
    if not isinstance(node, Call) or node.op not in ("*", "conj", "neg"):
        return None
    if node.op == "conj":
        conjugate = not conjugate
    scale: Number = -1 if node.op == "neg" else 1
    factors: tuple[tuple[int, bool], ...] = ()
    for argument in node.args:
        product = _as_product(argument, conjugate)
        if product is None:
            return None
        scale = scale * product.scale
        factors += product.factors
    return _Product(scale, factors)


def _is_outer_product(indices: list[Labels], output: Labels) -> bool:
    """Return whether each of two factors has a label of the output that the other one lacks."""
    kept = [set(index) & set(output) for index in indices]
    left = kept[0]
    right = kept[-1]
    return bool(left - right) and bool(right - left)


def keep_labels(labels: Iterable[str], kept: Container[str]) -> Labels:
    """Return the labels that are among those kept, in order."""
    return tuple(label for label in labels if label in kept)


def drop_labels(labels: Iterable[str], dropped: Container[str]) -> Labels:
    """Return the labels that are not among those dropped, in order."""
    return tuple(label for label in labels if label not in dropped)


def size_of(labels: Iterable[str], extent: Extent) -> int:
    """Return the product of the labels' extents."""
    return prod(extent[label] for label in labels)


def dense_strides(index: Labels, extent: Extent, itemsize: int) -> tuple[int, ...]:
    """Return the strides of a C-contiguous array, in bytes."""
    return tuple(itemsize * size_of(index[axis + 1 :], extent) for axis in range(len(index)))
