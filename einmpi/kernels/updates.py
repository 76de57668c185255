"""Updates in place that write one index of a label, which a tensor gives for each of the others.

where(u == at[b], row[b,d], cache[b,u,d]), written over `cache`, writes a row for each b.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, isinf, isnan
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.caches import bounded_cache
from einmpi.graph.einsum import EinSum
from einmpi.graph.index_arithmetic import MIRRORED_COMPARISONS
from einmpi.graph.scalar import Arg, Call, Const, Index, Scalar, gathers_in, labels_in, unique, walk
from einmpi.kernels.operands import operands_read, part_of_array, with_operands
from einmpi.kernels.prepared import apply
from einmpi.schedule.compute import Kernel
from einmpi.schedule.regions import Runs, intersect, length, one_run

# ---- partial updates -----------------------------------------------------------------------------
#
# Updates in place that change only a part of a tensor, such as one row of a cache.
#
# where(u == at, row[d], cache[u,d]), written over `cache`, is computed for u = at alone.


Array: TypeAlias = Any  # of any library
HostArray: TypeAlias = npt.NDArray[Any]

_NEGATED = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}


@dataclass(frozen=True)
class Condition:
    """A condition on the index of a label, such as u < at + 2."""

    label: str
    comparison: str
    number: Scalar  # of operands without dimensions, and constants
    holds_for_nan: bool = False  # the negation of a comparison does

    def range_of(self, value: float) -> tuple[int, int | None]:
        """Return the first index that may meet the condition, and the end, if there is one."""
        if isnan(value):
            return (0, None) if self.holds_for_nan else (0, 0)
        if isinf(value):
            above_all = value > 0
            holds = self.comparison in ("<", "<=") if above_all else self.comparison in (">", ">=")
            return (0, None) if holds else (0, 0)
        match self.comparison:
            case "==":
                return ceil(value), floor(value) + 1
            case "<":
                return 0, ceil(value)
            case "<=":
                return 0, floor(value) + 1
            case ">":
                return floor(value) + 1, None
        return ceil(value), None


@dataclass(frozen=True)
class PartialUpdate:
    """An EinSum whose results are elements of an operand, but for those that meet conditions."""

    operand: int
    conditions: tuple[Condition, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The operands that the conditions depend on."""
        found: set[int] = set()
        for condition in self.conditions:
            for node in walk(condition.number):
                if isinstance(node, Arg):
                    found.add(node.position)
        return tuple(sorted(found))


@bounded_cache(1024)
def find_partial_update(einsum: EinSum) -> PartialUpdate | None:
    """Return which operand an EinSum changes in part; None if it may change all of it.

    Gathers must be guarded by the same condition: an index that is out of range is an error
    wherever it is read.
    """
    function = einsum.function
    if not einsum.is_elementwise or not isinstance(function, Call) or function.op != "where":
        return None
    condition, this, that = function.args
    for old, is_changed_if in ((that, True), (this, False)):
        if not isinstance(old, Arg) or einsum.operands[old.position] != einsum.output:
            continue
        if not _is_guarded(einsum, condition):
            return None
        conditions = _conditions(einsum, condition, is_changed_if)
        if conditions:
            return PartialUpdate(old.position, tuple(conditions))
    return None


def _is_guarded(einsum: EinSum, condition: Scalar) -> bool:
    """Return whether every index that is computed from tensors depends on the condition."""
    for entries in einsum.operands:
        for entry in gathers_in(entries):
            if not any(isinstance(node, Arg) for node in walk(entry)):
                continue
            if not isinstance(entry, Call) or entry.op != "where" or entry.args[0] != condition:
                return False
    return True


def _conditions(einsum: EinSum, node: Scalar, holds: bool) -> list[Condition]:
    """Return what all indices meet for which an expression holds, or for which it does not."""
    if not isinstance(node, Call):
        return []
    if node.op == "~":
        return _conditions(einsum, node.args[0], not holds)
    if node.op == ("&" if holds else "|"):
        both = [_conditions(einsum, argument, holds) for argument in node.args]
        return [*both[0], *both[1]]
    if node.op not in _NEGATED:
        return []
    comparison = node.op if holds else _NEGATED[node.op]
    left, right = node.args
    if isinstance(right, Index):
        left, right = right, left
        comparison = MIRRORED_COMPARISONS[comparison]
    if comparison == "!=" or not isinstance(left, Index) or not einsum.is_one_number(right):
        return []
    holds_for_nan = not holds and comparison != "=="
    return [Condition(left.label, comparison, right, holds_for_nan)]


def compute_in_place(
    kernel: Kernel,
    operands: Sequence[Array],
    target: Array,
    to_host: Callable[[Array], HostArray],
    compute_kernel: Callable[[Kernel, Sequence[Array], Array], None],
) -> None:
    """Compute a kernel whose target is one of its operands; only the part that changes, if known.

    `to_host` returns values in memory of the host, `compute_kernel` computes a whole kernel.
    """
    update = find_partial_update(kernel.einsum)
    if update is None or kernel.select or operands[update.operand] is not target:
        compute_kernel(kernel, operands, target)
        return
    numbers: list[Any] = [None] * len(operands)
    for position in update.numbers:
        numbers[position] = np.asarray(to_host(operands[position])).reshape(())
    ranges = _changed_indices(kernel, update, numbers)
    if ranges is None:
        compute_kernel(kernel, operands, target)
        return
    positions = {}
    for label, (runs, changed) in ranges.items():
        if not changed:
            return
        first = length(intersect(runs, one_run(0, changed[0][0])))
        positions[label] = slice(first, first + length(changed))
    changed_runs = {label: changed for label, (_, changed) in ranges.items()}
    parts = [
        part_of_array(array, entries, positions)
        for array, entries in zip(operands, kernel.einsum.operands, strict=True)
    ]
    part = part_of_array(target, kernel.einsum.output, positions)
    compute_kernel(kernel.restricted_to(changed_runs), parts, part)


def _changed_indices(
    kernel: Kernel, update: PartialUpdate, numbers: Sequence[Any]
) -> dict[str, tuple[Runs, Runs]] | None:
    """Return, for labels with conditions, the indices of this rank and those that may change.

    None if a number is complex: it is not compared by size.
    """
    known = dict(kernel.index)
    extent = kernel.einsum.extent
    found: dict[str, tuple[Runs, Runs]] = {}
    for condition in update.conditions:
        with np.errstate(all="ignore"):
            value = np.asarray(apply(condition.number, numbers, {}))
        if value.dtype.kind not in "biuf":
            return None
        label = condition.label
        runs = known.get(label, one_run(0, extent[label]))
        before = found[label][1] if label in found else runs
        end_of_runs = runs[-1][1] if runs else 0
        start, end = condition.range_of(value.item())
        stop = end_of_runs if end is None else min(end, end_of_runs)
        changed: Runs = ()
        if max(start, 0) < stop:
            changed = intersect(before, one_run(max(start, 0), stop))
        found[label] = runs, changed
    return found


def changes_a_part(kernel: Kernel) -> bool:
    """Return whether a kernel may change only a part of what it is written over."""
    einsum = kernel.einsum
    return find_placed_rows(einsum) is not None or find_partial_update(einsum) is not None


MOST_VALUE_BYTES = 2**25  # of the values of all rows, which no plan counts


@dataclass(frozen=True)
class PlacedRows:
    """An EinSum whose results are elements of an operand, but for one index of a label.

    Attributes
    ----------
    operand
        The operand that is changed.
    label
        The label of which one index is written.
    place
        That index, an expression of operands with the labels `place_labels`.
    value
        What is written there, an EinSum without the label; `value_operands` are its operands.
    """

    operand: int
    label: str
    place: Scalar
    place_labels: tuple[str, ...]
    place_operands: tuple[int, ...]
    value: EinSum
    value_operands: tuple[int, ...]


@bounded_cache(1024)
def find_placed_rows(einsum: EinSum) -> PlacedRows | None:
    """Return which rows of an operand an EinSum writes; None if it may change all of it."""
    function = einsum.function
    if not einsum.is_elementwise or not isinstance(function, Call) or function.op != "where":
        return None
    condition, value, old = function.args
    if not isinstance(old, Arg) or einsum.operands[old.position] != einsum.output:
        return None
    if not isinstance(condition, Call) or condition.op != "==":
        return None
    for index, place in (condition.args, condition.args[::-1]):
        if not isinstance(index, Index) or not _is_place(einsum, place, index.label):
            continue
        place_operands = operands_read([place], einsum.operands)
        entries = [labels_in(einsum.operands[position]) for position in place_operands]
        place_labels = unique(*entries)
        written = _value_without(einsum, value, index.label)
        if written is not None:
            found, value_operands = written
            return PlacedRows(
                old.position,
                index.label,
                place,
                place_labels,
                place_operands,
                found,
                value_operands,
            )
    return None


def _is_place(einsum: EinSum, place: Scalar, label: str) -> bool:
    """Return whether an expression is of constants and of operands with other labels, each once."""
    for node in walk(place):
        if isinstance(node, Arg):
            entries = einsum.operands[node.position]
            is_plain = all(isinstance(entry, str) for entry in entries)
            if not is_plain or label in entries or len(set(entries)) < len(entries):
                return False
        elif not isinstance(node, Const | Call):
            return False
    return True


def _value_without(
    einsum: EinSum, value: Scalar, label: str
) -> tuple[EinSum, tuple[int, ...]] | None:
    """Return an expression as an EinSum without a label, and the operands that it reads.

    None if the expression depends on the label.
    """
    positions = operands_read([value], einsum.operands)
    expressions = [value]
    for position in positions:
        for entry in einsum.operands[position]:
            if entry == label:
                return None
            if not isinstance(entry, str):
                expressions.append(entry)
    for expression in expressions:
        if Index(label) in walk(expression):
            return None
    found = replace(
        einsum,
        output=tuple(other for other in einsum.output if other != label),
        function=value,
        extents=tuple((other, extent) for other, extent in einsum.extents if other != label),
    )
    return with_operands(found, positions), positions
