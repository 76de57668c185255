"""Picked values, `Y[e,f] ← Σ[k](where(src[e] == k, X[k,f], 0))`, gathered from a rank's own part.

Each index reads one value instead of comparing itself with all values of the label.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from einmpi.graph.einsum import EinSum, einsum_type, make_einsum, reopen
from einmpi.graph.scalar import Call, Const, Element, Index, Scalar, rebuild


@lru_cache(maxsize=1024)
def as_gather(
    einsum: EinSum, first: int, dtypes: tuple[np.dtype[Any], ...]
) -> tuple[EinSum, tuple[int, ...]] | None:
    """Return the EinSum that reads only what is picked, and the numbers of its operands.

    Parameters
    ----------
    einsum
        What to compute; its extents are those of the arrays.
    first
        The global index of the first position of the picked label.
    dtypes
        Those of the operands.

    Returns
    -------
    None if nothing is picked, by an integer, or if the values would have to change their dtype.
    """
    pick = einsum.pick
    if pick is None or einsum.extent[pick.label] == 0:
        return None
    by_index = replace(einsum, function=pick.index, aggregation=None)
    if einsum_type(by_index, dtypes).kind not in "iu":
        return None  # a label may be compared with any number, as in where(k == y[b], …)
    names = [str(number) for number in range(len(einsum.operands))]
    index = reopen(by_index, names)
    body = reopen(replace(einsum, function=pick.body), names)
    last = first + einsum.extent[pick.label] - 1
    is_here = _is_between(index, first, last)
    position = Call("-", (index, Const(first)))
    reads = is_here
    if einsum.picked_extent is not None:
        # An index that no rank has is outside of this rank's part too, and found out of range.
        is_somewhere = _is_between(index, 0, einsum.picked_extent - 1)
        reads = Call("|", (is_here, Call("~", (is_somewhere,))))
    place = Call("where", (reads, position, Const(0)))
    value = _with_label(body, pick.label, index, place)
    expression = Call("where", (is_here, value, Const(pick.masked)))
    aggregated = [label for label in einsum.aggregated if label != pick.label]
    aggregation = einsum.aggregation if aggregated else None
    gather, used = make_einsum(einsum.output, expression, aggregation, aggregated, einsum.extent)
    operands = tuple(int(name) for name in used)
    if einsum_type(gather, [dtypes[number] for number in operands]) != einsum_type(einsum, dtypes):
        return None
    return gather, operands


def _is_between(index: Scalar, first: int, last: int) -> Scalar:
    return Call("&", (Call(">=", (index, Const(first))), Call("<=", (index, Const(last)))))


def _with_label(body: Scalar, label: str, index: Scalar, place: Scalar) -> Scalar:
    """Return an expression with an index instead of a label, and its place in the tensors."""

    def leaf(node: Scalar) -> Scalar:
        if isinstance(node, Index):
            return index if node.label == label else node
        if not isinstance(node, Element):
            return node
        entries: list[str | Scalar] = []
        for entry in node.index:
            if isinstance(entry, str):
                entries.append(place if entry == label else entry)
            else:
                entries.append(rebuild(entry, leaf))
        return Element(node.tensor, tuple(entries))

    return rebuild(body, leaf)


def out_of_range(einsum: EinSum) -> IndexError:
    """Return the error of an index that no rank has."""
    assert einsum.picked_extent is not None
    return IndexError(f"an index is out of range; expected 0 to {einsum.picked_extent - 1}")
