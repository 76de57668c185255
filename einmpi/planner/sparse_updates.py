"""Updates that change a tensor only where a scattered sum has values, as W − rate × sum(…) does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from einmpi.graph.dtypes import DTYPES
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Call, Const, Index, Scalar
from einmpi.graph.segments import used_labels


@dataclass(frozen=True)
class SparseUpdate:
    """An EinSum that adds a multiple of one operand to another, element by element.

    Attributes
    ----------
    old, change
        The operand that is changed, and the one that is multiplied.
    operation
        "+" or "-".
    multiple
        What is added or subtracted: `change` times numbers, over Args.
    """

    old: int
    change: int
    operation: str
    multiple: Scalar


@lru_cache(maxsize=1024)
def find_sparse_update(einsum: EinSum, change: int) -> SparseUpdate | None:
    """Return what an EinSum adds a multiple of an operand to; None if it is of another form."""
    function = einsum.function
    if not einsum.is_elementwise or not isinstance(function, Call):
        return None
    if function.op not in ("+", "-"):
        return None
    left, right = function.args
    if function.op == "+" and _is_multiple(einsum, left, change):
        left, right = right, left
    if not isinstance(left, Arg) or not _is_multiple(einsum, right, change):
        return None
    for position in (left.position, change):
        labels = einsum.operands[position]
        if labels != einsum.output or len(set(labels)) < len(labels):
            return None
    return SparseUpdate(left.position, change, function.op, right)


def _is_multiple(einsum: EinSum, node: Scalar, change: int) -> bool:
    """Return whether an expression is an operand times numbers."""
    match node:
        case Arg(position):
            return position == change
        case Call("neg", (inner,)):
            return _is_multiple(einsum, inner, change)
        case Call(op, (inner,)) if op in DTYPES and DTYPES[op].kind in "fc":
            return _is_multiple(einsum, inner, change)
        case Call("*", (left, right)):
            if _is_multiple(einsum, left, change):
                return einsum.is_one_number(right)
            return einsum.is_one_number(left) and _is_multiple(einsum, right, change)
        case Call("/", (left, right)):
            return _is_multiple(einsum, left, change) and einsum.is_one_number(right)
    return False


def scattered_label(einsum: EinSum) -> str | None:
    """Return the label along which sums are scattered to some indices only; None for all else.

    The values that are added up must not depend on the place where they go.
    """
    segments = einsum.segments
    if segments is None or einsum.aggregation != "sum" or len(segments.labels) != 1:
        return None
    (label,) = segments.labels
    if label in used_labels(segments.body, segments.operands):
        return None
    return label


def places_filled(einsum: EinSum) -> int:
    """Return how many indices of the scattered label get values at most."""
    extent = einsum.extent
    return prod(extent[label] for label in einsum.required_segments.index_labels)


def with_given_places(einsum: EinSum, places: int) -> EinSum:
    """Return a scattered EinSum for fewer places, with a further operand that says where to go.

    The operand has an index for each combination of the labels that the old index depends on.
    """
    segments = einsum.required_segments
    (label,) = segments.labels
    index = Arg(len(einsum.operands))
    condition = Call("==", (index, Index(label)))
    extents = []
    for other, extent in einsum.extents:
        extents.append((other, places if other == label else extent))
    return replace(
        einsum,
        operands=(*segments.operands, segments.index_labels),
        function=Call("where", (condition, segments.body, Const(segments.masked))),
        extents=tuple(extents),
    )
