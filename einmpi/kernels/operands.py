"""What a kernel computes and with what: operands in order, indices as operands, constant indices taken off."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from einmpi.graph.einsum import EinSum
from einmpi.graph.labels import unique
from einmpi.graph.scalar import Arg, Const, Index, Scalar, rebuild, walk


def expressions_of(einsum: EinSum) -> Iterator[Scalar]:
    yield einsum.function
    for index in einsum.operands:
        yield from (entry for entry in index if not isinstance(entry, str))


@lru_cache(maxsize=1024)
def number_operands(
    einsum: EinSum,
) -> tuple[Scalar, tuple[tuple[str | Scalar, ...], ...], tuple[str, ...]]:
    """⊗ and the operands' indices over Args alone, and the labels whose values are further operands."""
    nodes = [node for part in expressions_of(einsum) for node in walk(part)]
    labels = unique(node.label for node in nodes if isinstance(node, Index))

    def leaf(node: Scalar) -> Scalar:
        return (
            Arg(len(einsum.operands) + labels.index(node.label))
            if isinstance(node, Index)
            else node
        )

    indices = [
        tuple(e if isinstance(e, str) else rebuild(e, leaf) for e in index)
        for index in einsum.operands
    ]
    return rebuild(einsum.function, leaf), (*indices, *((label,) for label in labels)), labels


def apply_constant_indices(
    array: Any, entries: tuple[str | Scalar, ...]
) -> tuple[Any, tuple[str | Scalar, ...]]:
    """An operand, of any array library, without the dimensions that have a constant index."""
    if any(isinstance(entry, Const) for entry in entries):
        places = [
            int(entry.value.real) if isinstance(entry, Const) else slice(None) for entry in entries
        ]
        for place, extent in zip(places, array.shape, strict=True):
            if isinstance(place, int):
                check_index_range(place, place, extent)
        array = array[(*places, ...)]  # ...: a view even where no dimension is left
        entries = tuple(entry for entry in entries if not isinstance(entry, Const))
    return array, entries


def check_index_range(low: int, high: int, extent: int) -> None:
    if low < 0 or high >= extent:
        raise IndexError(
            f"an index from {low} to {high} is out of range; expected 0 to {extent - 1}"
        )
