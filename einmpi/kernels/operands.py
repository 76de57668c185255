"""The operands of a kernel: labels whose values are used become further operands, and constant
indices are applied beforehand.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy.typing as npt

from einmpi.caches import bounded_cache
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import (
    Arg,
    Call,
    Const,
    Index,
    IndexEntries,
    Scalar,
    gathers_in,
    rebuild,
    unique,
    walk,
    with_gathers,
)

Array: TypeAlias = npt.NDArray[Any]


class NumberedOperands(NamedTuple):
    """⊗ and the indices of the operands, written over numbered operands alone.

    The values of `labels` are the last operands, one array for each label.
    """

    function: Scalar
    indices: tuple[IndexEntries, ...]
    labels: tuple[str, ...]


def expressions_of(einsum: EinSum) -> Iterator[Scalar]:
    """Yield ⊗ and every index expression of a gather."""
    yield einsum.function
    for index in einsum.operands:
        yield from gathers_in(index)


def operands_read(
    expressions: Iterable[Scalar], indices: Sequence[IndexEntries]
) -> tuple[int, ...]:
    """Return the operands that expressions need, those that gathers need among them."""
    found: set[int] = set()
    waiting = list(expressions)
    while waiting:
        for node in walk(waiting.pop()):
            if isinstance(node, Arg) and node.position not in found:
                found.add(node.position)
                waiting.extend(gathers_in(indices[node.position]))
    return tuple(sorted(found))


def with_operands(einsum: EinSum, taken: Sequence[int]) -> EinSum:
    """Return an EinSum with these of its operands, numbered anew; it must read no others."""
    number = {position: k for k, position in enumerate(taken)}

    def renumber(leaf: Scalar) -> Scalar:
        return Arg(number[leaf.position]) if isinstance(leaf, Arg) else leaf

    operands = []
    for position in taken:
        index = einsum.operands[position]
        operands.append(with_gathers(index, lambda gather: rebuild(gather, renumber)))
    function = rebuild(einsum.function, renumber)
    return replace(einsum, operands=tuple(operands), function=function)


@bounded_cache(1024)
def number_operands(einsum: EinSum) -> NumberedOperands:
    """Replace every use of a label's value by an operand that holds these values.

    In Z[i] = A[i] + i, for example, the label i becomes a second operand with the index (i,).
    """
    used: list[str] = []
    for expression in expressions_of(einsum):
        used += (node.label for node in walk(expression) if isinstance(node, Index))
    labels = unique(used)

    def as_operand(leaf: Scalar) -> Scalar:
        if isinstance(leaf, Index):
            return Arg(len(einsum.operands) + labels.index(leaf.label))
        return leaf

    def renumber(gather: Scalar) -> Scalar:
        return rebuild(gather, as_operand)

    indices = [with_gathers(index, renumber) for index in einsum.operands]
    label_indices = [(label,) for label in labels]
    return NumberedOperands(
        function=rebuild(einsum.function, as_operand),
        indices=(*indices, *label_indices),
        labels=labels,
    )


def apply_constant_indices(array: Any, entries: IndexEntries) -> tuple[Any, IndexEntries]:
    """Return an operand, and what indexes it, without the dimensions that have a constant index.

    The array may be of any library. The result is a view, even where no dimension is left.
    """
    if not any(isinstance(entry, Const) for entry in entries):
        return array, entries
    places: list[int | slice] = []
    remaining: list[str | Scalar] = []
    for entry, extent in zip(entries, array.shape, strict=True):
        if isinstance(entry, Const):
            place = int(entry.value.real)
            check_index_range(place, place, extent)
            places.append(place)
        else:
            places.append(slice(None))
            remaining.append(entry)
    return array[(*places, ...)], tuple(remaining)


def check_index_range(low: int, high: int, extent: int) -> None:
    """Raise IndexError unless 0 ≤ low and high < extent."""
    if low < 0 or high >= extent:
        raise IndexError(
            f"an index from {low} to {high} is out of range; expected 0 to {extent - 1}"
        )


# ---- indices that are numbers --------------------------------------------------------------------


Number: TypeAlias = Callable[[Sequence[Array]], int]  # of the operands
# Of numbers of Python, which do not wrap around: an index that does is out of range.
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "maximum": max,
    "minimum": min,
}


class ReadAtNumbers(NamedTuple):
    """An EinSum that reads views of operands, without the dimensions whose index is a number."""

    einsum: EinSum
    # For each of its operands, that of the old one, and the number or None for each dimension.
    views: tuple[tuple[int, tuple[Number | None, ...]], ...]


@bounded_cache(1024)
def read_at_numbers(einsum: EinSum) -> ReadAtNumbers | None:
    """Return an EinSum as one of views at numbers that operands have; None if it has no such."""
    if not einsum.is_gathering or einsum.has_special_form or einsum.is_pass_of_scan:
        return None
    indices: list[IndexEntries] = []
    numbers: list[tuple[Number | None, ...]] = []
    for entries in einsum.operands:
        found = [None if isinstance(entry, str) else _number(einsum, entry) for entry in entries]
        kept = zip(entries, found, strict=True)
        indices.append(tuple(entry for entry, number in kept if number is None))
        numbers.append(tuple(found))
    if not any(any(found) for found in numbers):
        return None
    inside = replace(einsum, operands=tuple(indices))
    taken = operands_read(expressions_of(inside), indices)
    views = tuple((position, numbers[position]) for position in taken)
    return ReadAtNumbers(with_operands(inside, taken), views)


def _number(einsum: EinSum, index: Scalar) -> Number | None:
    """Return what gives an index that is arithmetic on numbers of operands; None for all else."""
    match index:
        case Const(int(value)):
            return lambda _: value
        case Arg(position) if einsum.operands[position] == ():
            return lambda operands: int(operands[position])
        case Call(op, (first, second)) if op in _ARITHMETIC:
            left, right = _number(einsum, first), _number(einsum, second)
            if left is None or right is None:
                return None
            combine = _ARITHMETIC[op]
            return lambda operands: combine(left(operands), right(operands))
    return None


# ---- boxes ---------------------------------------------------------------------------------------
#
# Boxes: parts of a space of labels, given by a slice of each label.


Box: TypeAlias = dict[str, slice]

_WHOLE = slice(None)


def part_of_array(array: Any, entries: Iterable[Any], box: Mapping[str, slice]) -> Any:
    """Return the part of an array, of any library, that lies in a box: a view in any case.

    Dimensions that are not indexed by labels of the box are taken whole.
    """
    return array[(*[box.get(entry, _WHOLE) for entry in entries], ...)]


def halve_step(steps: dict[str, int], label: str, most_elements: int, least: int = 1) -> None:
    """Halve the step of a label until a box has few enough elements, or the step is `least`."""
    while prod(steps.values()) > most_elements and steps[label] > least:
        steps[label] = -(-steps[label] // 2)


def boxes(extent: Mapping[str, int], steps: Mapping[str, int]) -> Iterator[Box]:
    """Yield the boxes that together cover some labels.

    A box reaches at most `steps[label]` along a label; those at the end may be smaller. They come
    in the order of nested loops over the labels.
    """
    cuts = []
    for label, step in steps.items():
        stop = extent[label]
        cuts.append([slice(start, min(start + step, stop)) for start in range(0, stop, step)])
    for slices in itertools.product(*cuts):
        yield dict(zip(steps, slices, strict=True))
