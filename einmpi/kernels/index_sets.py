"""Index-set splitting: the parts of an EinSum in which `where` has to decide nothing.

A concatenation, where(i < 5, x[i], y[i-5]), becomes two copies; a guarded stencil becomes its
inside, which is computed without conditions, and thin borders.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

from einmpi.caches import bounded_cache
from einmpi.graph.arithmetic import infer_over
from einmpi.graph.einsum import EinSum
from einmpi.graph.index_arithmetic import (
    MIRRORED_COMPARISONS,
    Affine,
    Interval,
    affine_of,
    interval_of,
)
from einmpi.graph.scalar import (
    Call,
    Const,
    IndexEntries,
    Scalar,
    gathers_in,
    walk,
    with_gathers,
)
from einmpi.kernels.operands import operands_read, part_of_array, with_operands
from einmpi.schedule.regions import Runs, intersect, length, one_run

Array: TypeAlias = Any  # of any library
LabelRuns: TypeAlias = tuple[tuple[str, Runs], ...]

MIN_SPLIT_VALUES = 2**16  # with fewer, the calls would cost more than the conditions
MAX_PARTS = 32
_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
_CLAMPS = {"minimum": "<=", "maximum": ">="}  # the comparison by which the first one is taken


@dataclass(frozen=True)
class Part:
    """An EinSum for some of the indices of the output.

    `taken` are the operands that it reads, `positions` the start and stop of every split label,
    `index` the indices of labels that do not start at 0.
    """

    einsum: EinSum
    taken: tuple[int, ...]
    positions: tuple[tuple[str, tuple[int, int]], ...]
    index: LabelRuns

    def operands(self, einsum: EinSum, arrays: Sequence[Array]) -> list[Array]:
        """Return what this part reads of the operands of the whole EinSum."""
        return [self.select(arrays[k], einsum.operands[k]) for k in self.taken]

    def output(self, einsum: EinSum, array: Array) -> Array:
        """Return what this part writes of the output of the whole EinSum."""
        return self.select(array, einsum.output)

    def select(self, array: Array, index: IndexEntries) -> Array:
        """Return what this part needs of an array, along the dimensions that labels index."""
        if not self.positions:
            return array
        box = {label: slice(*ends) for label, ends in self.positions}
        return part_of_array(array, index, box)


def split_index_sets(einsum: EinSum, index: LabelRuns, dtypes: tuple[str, ...]) -> tuple[Part, ...]:
    """Return the parts of an EinSum; a single one if there is nothing to gain.

    Only elementwise EinSums are split: the order of a sum must not depend on conditions.

    Parameters
    ----------
    einsum
        What to compute; its extents are those of the arrays.
    index
        The global indices of a label's positions, for labels that do not start at 0.
    dtypes
        Those of the operands.
    """
    if not einsum.is_elementwise or einsum.calls() < MIN_SPLIT_VALUES:
        return (_whole(einsum, index),)
    return _parts(einsum, index, dtypes)


def _whole(einsum: EinSum, index: LabelRuns) -> Part:
    return Part(einsum, tuple(range(len(einsum.operands))), (), index)


@bounded_cache(1024)
def _parts(einsum: EinSum, index: LabelRuns, dtypes: tuple[str, ...]) -> tuple[Part, ...]:
    runs = dict(index)
    for label, extent in einsum.extents:
        runs.setdefault(label, one_run(0, extent))
    pieces: dict[str, list[Runs]] = {}
    for label, borders in _borders(einsum).items():
        cut = _cut(runs[label], borders)
        if len(cut) > 1:
            pieces[label] = cut
    if prod(map(len, pieces.values())) > MAX_PARTS:
        return (_whole(einsum, index),)
    starts = {label: _starts(cut) for label, cut in pieces.items()}
    parts = []
    for numbers in itertools.product(*(range(len(cut)) for cut in pieces.values())):
        chosen = dict(zip(pieces, numbers, strict=True))
        part_runs = {label: pieces[label][number] for label, number in chosen.items()}
        positions = []
        for label, number in chosen.items():
            positions.append((label, (starts[label][number], starts[label][number + 1])))
        parts.append(_part(einsum, {**runs, **part_runs}, tuple(positions), dtypes))
    return tuple(parts)


def _starts(cut: Sequence[Runs]) -> list[int]:
    """Return the position at which each piece of a label begins, and the end of the last one."""
    return [0, *itertools.accumulate(map(length, cut))]


def _cut(runs: Runs, borders: set[int]) -> list[Runs]:
    """Return the indices of a label between borders, without empty pieces."""
    first = runs[0][0]
    end = runs[-1][1]
    inside = sorted(border for border in borders if first < border < end)
    pieces = []
    for start, stop in itertools.pairwise([first, *inside, end]):
        piece = intersect(runs, one_run(start, stop))
        if piece:
            pieces.append(piece)
    return pieces


def _borders(einsum: EinSum) -> dict[str, set[int]]:
    """Return, for each label, the indices from which on a condition or a clamp changes."""
    borders: dict[str, set[int]] = {}
    trees = [einsum.function]
    for entries in einsum.operands:
        trees.extend(gathers_in(entries))
    for tree in trees:
        for node in walk(tree):
            if not isinstance(node, Call) or len(node.args) != 2:
                continue
            op = _CLAMPS.get(node.op, node.op)
            if op not in _COMPARISONS:
                continue
            difference = affine_of(Call("-", node.args))
            if difference is not None and len(difference.terms) == 1:
                ((label, _),) = difference.terms
                borders.setdefault(label, set()).update(_changes(op, difference))
    return borders


def _changes(op: str, difference: Affine) -> list[int]:
    """Return the indices of the label from which on `difference op 0` changes."""
    ((_, coefficient),) = difference.terms
    constant = difference.constant
    if coefficient < 0:  # both sides times -1
        coefficient = -coefficient
        constant = -constant
        op = MIRRORED_COMPARISONS[op]
    at_least_zero = -(constant // coefficient)
    above_zero = -constant // coefficient + 1
    if op in ("<=", ">"):
        return [above_zero]
    if op in ("==", "!="):
        return [at_least_zero, above_zero]
    return [at_least_zero]


def _part(
    einsum: EinSum,
    runs: Mapping[str, Runs],
    positions: tuple[tuple[str, tuple[int, int]], ...],
    dtypes: tuple[str, ...],
) -> Part:
    """Return the EinSum for these indices, without conditions that hold for all or none of them."""
    bounds = {label: (owned[0][0], owned[-1][1] - 1) for label, owned in runs.items()}
    simplify = _Simplifier(bounds, dtypes)
    function = simplify.at_root(einsum.function)
    indices: list[IndexEntries] = []
    for entries in einsum.operands:
        indices.append(with_gathers(entries, simplify.expression))
    taken = operands_read([function], indices)
    extents = tuple((label, length(runs[label])) for label, _ in einsum.extents)
    whole = replace(einsum, operands=tuple(indices), function=function, extents=extents)
    part = with_operands(whole, taken)
    index = tuple((label, runs[label]) for label in part.labels_as_numbers)
    return Part(part, taken, positions, index)


@dataclass(frozen=True)
class _Simplifier:
    """Removes what is decided already, given the bounds of labels and the dtypes of operands."""

    bounds: Mapping[str, Interval]
    dtypes: tuple[str, ...]

    def at_root(self, node: Scalar) -> Scalar:
        """Return ⊗, simplified; the dtype of a constant does not matter here."""
        simple = self.expression(node)
        while isinstance(simple, Call) and simple.op == "where":
            condition, this, that = simple.args
            if not isinstance(condition, Const):
                return simple
            chosen = this if condition.value else that
            if not isinstance(chosen, Const):
                return simple
            simple = chosen
        return simple

    def expression(self, node: Scalar) -> Scalar:
        """Return an expression of the same values and the same dtype."""
        if not isinstance(node, Call):
            return node
        simple = Call(node.op, tuple(self.expression(argument) for argument in node.args))
        if simple.op in _COMPARISONS:
            return self._comparison(simple)
        if simple.op in _CLAMPS:
            return self._clamp(simple)
        if simple.op in ("&", "|"):
            return _connective(simple)
        if simple.op == "where":
            return self._choice(simple)
        return simple

    def _comparison(self, node: Call) -> Scalar:
        difference = interval_of(Call("-", node.args), self.bounds)
        if difference is None:
            return node
        low, high = difference
        decided = {
            "<": (high < 0, low >= 0),
            "<=": (high <= 0, low > 0),
            ">": (low > 0, high <= 0),
            ">=": (low >= 0, high < 0),
            "==": (low == high == 0, low > 0 or high < 0),
            "!=": (low > 0 or high < 0, low == high == 0),
        }
        holds, fails = decided[node.op]
        if holds or fails:
            return Const(holds)
        return node

    def _clamp(self, node: Call) -> Scalar:
        difference = interval_of(Call("-", node.args), self.bounds)
        if difference is None:
            return node
        low, high = difference
        if high > 0 and low < 0:
            return node
        takes_first = (high <= 0) == (node.op == "minimum")
        return self._of_same_type(node, node.args[0 if takes_first else 1])

    def _choice(self, node: Call) -> Scalar:
        condition, this, that = node.args
        if not isinstance(condition, Const):
            return node
        return self._of_same_type(node, this if condition.value else that)

    def _of_same_type(self, node: Scalar, simple: Scalar) -> Scalar:
        is_same = infer_over(simple, self.dtypes) == infer_over(node, self.dtypes)
        return simple if is_same else node


def _connective(node: Call) -> Scalar:
    """Return a & b or a | b, where one of two conditions is decided."""
    for decided, other in (node.args, node.args[::-1]):
        if not isinstance(decided, Const) or type(decided.value) is not bool:
            continue
        if not _is_condition(other):
            continue
        decides = decided.value == (node.op == "|")
        return decided if decides else other
    return node


def _is_condition(node: Scalar) -> bool:
    """Return whether an expression is bool: & and | of others are bitwise."""
    if isinstance(node, Const):
        return type(node.value) is bool
    if not isinstance(node, Call):
        return False
    if node.op in ("&", "|", "~"):
        return all(map(_is_condition, node.args))
    return node.op in _COMPARISONS
