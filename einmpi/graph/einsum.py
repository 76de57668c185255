"""One EinSum: the labels of output and operands, the function ⊗, the aggregation ⊕ (section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from einmpi.errors import OperationError
from einmpi.graph.aggregations import AGGREGATIONS, aggregate_type
from einmpi.graph.arithmetic import infer
from einmpi.graph.dtypes import Type
from einmpi.graph.forms.scan_blocks import (
    BlockedScan,
    BlockTotals,
    recognise_blocked_scan,
    recognise_totals,
)
from einmpi.graph.index_arithmetic import arithmetic_labels, major_label
from einmpi.graph.matrices import COLUMNS, MATRIX_RESULTS, ROWS, MatrixResult
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import (
    Arg,
    Call,
    Const,
    Element,
    Index,
    IndexEntries,
    Number,
    Scalar,
    gathers_in,
    labels_in,
    labels_of,
    project,
    rebuild,
    unique,
    walk,
    with_gathers,
)
from einmpi.graph.segments import Pick, Segments, find_pick, find_segments, used_labels

# ---- notation ------------------------------------------------------------------------------------
#
# Expressions as text in the paper's notation, which the language reads back.


# How tightly a text binds: operators have the precedence of their record, these are around them.
_SUM_PRECEDENCE = OPERATIONS["+"].precedence
_SIGN_PRECEDENCE = OPERATIONS["neg"].precedence
_ATOM_PRECEDENCE = OPERATIONS["**"].precedence + 1


def text(node: Scalar, names: Sequence[str] = ()) -> str:
    """Return the expression as text; `names` are the texts of the operands."""
    return _text_and_precedence(node, names)[0]


def element_text(tensor: str, index: Sequence[str | Scalar], names: Sequence[str] = ()) -> str:
    """Return an element of a tensor as text."""
    if not index:
        return tensor
    entries = [entry if isinstance(entry, str) else text(entry, names) for entry in index]
    return f"{tensor}[{','.join(entries)}]"


def _text_and_precedence(node: Scalar, names: Sequence[str]) -> tuple[str, int]:
    """Return the text of an expression and how tightly it binds.

    A sum inside a product needs brackets, because it binds less tightly: (a + b) × c.
    """
    if isinstance(node, Const):
        return _number(node.value)
    if isinstance(node, Index):
        return node.label, _ATOM_PRECEDENCE
    if isinstance(node, Arg):
        name = names[node.position] if names else f"x{node.position}"
        return name, _ATOM_PRECEDENCE
    if isinstance(node, Element):
        return element_text(node.tensor, node.index, names), _ATOM_PRECEDENCE
    operation = OPERATIONS.get(node.op)
    if operation is None or operation.is_function:
        arguments = ", ".join(text(arg, names) for arg in node.args)
        return f"{node.op}({arguments})", _ATOM_PRECEDENCE
    precedence = operation.precedence
    if operation.arity == 1:
        return operation.symbol + _bracketed(node.args[0], precedence, names), precedence
    # Comparisons would chain and ** binds to the right: brackets keep the tree as it is.
    left_precedence = precedence
    if operation.is_comparison or node.op == "**":
        left_precedence += 1
    left = _bracketed(node.args[0], left_precedence, names)
    right = _bracketed(node.args[1], precedence + 1, names)
    return f"{left} {operation.symbol} {right}", precedence


def _number(value: Number) -> tuple[str, int]:
    """Return the text of a constant and how tightly it binds, as −1 in (-1)**2."""
    if isinstance(value, complex) and not math.isfinite(value.imag):
        return f"{value.real!r} + {value.imag!r} × 1j", _SUM_PRECEDENCE
    shown = repr(value)
    return shown, _SIGN_PRECEDENCE if shown.startswith("-") else _ATOM_PRECEDENCE


def _bracketed(node: Scalar, needed: int, names: Sequence[str]) -> str:
    """Return the text of a node, in brackets if it binds less tightly than needed."""
    shown, precedence = _text_and_precedence(node, names)
    return shown if precedence >= needed else f"({shown})"


@dataclass(frozen=True)
class Scan:
    """⊕ of all values up to an index: along `along`, over the values at `scanned`."""

    along: str
    scanned: str
    masked: Number  # takes the place of the values after an index


@dataclass(frozen=True)
class Reproducible:
    """What bits follow from where they must not depend on how labels are cut.

    These are the extents in the whole program, and into how many blocks the first aggregated label
    is divided: 0 if nothing that is aggregated is rounded.
    """

    extents: tuple[tuple[str, int], ...]
    blocks: int


@dataclass(frozen=True)
class EinSum:
    """⊕ over `aggregated` of ⊗ over the operands, for every value of the `output` labels.

    `extents` has every label with its extent: the output's first, then the aggregated ones.
    `picked_extent` is given where an index picks values of a label, and must not be outside of it:
    the extent of the label in the whole program. ⊗ may be where(condition, value, neutral) with
    values for few combinations of the labels, which are found by their keys: `matches` is how many.
    Such an EinSum is never cut.
    With `reproducible`, bits follow from the extents of the whole program alone.
    """

    output: tuple[str, ...]
    operands: tuple[IndexEntries, ...]
    function: Scalar
    aggregation: str | None
    aggregated: tuple[str, ...]
    extents: tuple[tuple[str, int], ...]
    picked_extent: int | None = None
    matches: int | None = None
    reproducible: Reproducible | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels: the output's first, then the aggregated ones."""
        return self.output + self.aggregated

    @property
    def extent(self) -> dict[str, int]:
        """The extent of each label."""
        return dict(self.extents)

    @property
    def bound(self) -> tuple[int, ...]:
        """The extents of the output."""
        return project([extent for _, extent in self.extents], self.output, self.labels)

    @property
    def is_elementwise(self) -> bool:
        """Whether nothing is aggregated, and each element is computed alone."""
        return not self.aggregated and self.matrix is None

    @cached_property
    def matrix(self) -> MatrixResult | None:
        """The function of matrices of which this is a result, None for all else."""
        function = self.function
        return MATRIX_RESULTS.get(function.op) if isinstance(function, Call) else None

    @property
    def required_matrix(self) -> MatrixResult:
        """The function of matrices of an EinSum that has one."""
        assert self.matrix is not None, f"{self} is no function of matrices"
        return self.matrix

    @cached_property
    def whole_labels(self) -> tuple[str, ...]:
        """The labels of matrices that no rank has a part of: all but those that a grid cuts."""
        cut = (*self.operands[0][:-2], ROWS, COLUMNS) if self.matrix is not None else self.labels
        return tuple(label for label in self.labels if label not in cut)

    @cached_property
    def matrix_labels(self) -> dict[str, str]:
        """The labels of the dimensions of a matrix, by the letters that its function has."""
        *_, rows, columns = map(str, self.operands[0])
        found = dict(zip(self.required_matrix.record.operands[0], (rows, columns), strict=True))
        stacked = self.operands[0][:-2]
        for letters, index in zip(self.required_matrix.record.operands, self.operands, strict=True):
            others = [entry for entry in map(str, index) if entry not in (*stacked, rows)]
            found.update(zip(letters[1:], others, strict=False))
        letters = self.required_matrix.letters
        found.update(zip(letters, self.output[len(stacked) :], strict=False))
        return found

    @cached_property
    def is_gathering(self) -> bool:
        """Whether a tensor is an index, and so may be out of range."""
        for index in self.operands:
            for entry in index:
                if not isinstance(entry, str) and arithmetic_labels(entry) is None:
                    return True
        return False

    @property
    def is_indexed_by_labels(self) -> bool:
        """Whether every index of every operand is a label: nothing is gathered or shifted."""
        for index in self.operands:
            for entry in index:
                if not isinstance(entry, str):
                    return False
        return True

    @property
    def reads_diagonals(self) -> bool:
        """Whether an operand has the same index in two dimensions."""
        return any(len(set(index)) < len(index) for index in self.operands)

    def calls(self) -> int:
        """Return how often ⊗ is applied: the size of the joined index space, or what matches."""
        if self.matches is not None:
            return self.matches
        return prod(extent for _, extent in self.extents)

    @cached_property
    def calls_in_program(self) -> int:
        """How often ⊗ is applied, in the whole program if bits must not depend on cuts."""
        known = self.reproducible
        return prod(dict(self.extents if known is None else known.extents).values())

    @property
    def sums_blocks(self) -> bool:
        """Whether it adds up rounded values in an order that does not depend on cuts."""
        known = self.reproducible
        return known is not None and known.blocks > 0 and bool(self.aggregated)

    @property
    def sums_many_blocks(self) -> bool:
        """Whether it does so in more than one block."""
        return self.reproducible is not None and self.reproducible.blocks > 1

    def operations(self) -> int:
        """Return the number of scalar operations."""
        return self._operations

    @cached_property
    def _operations(self) -> int:
        """The number of scalar operations.

        For every combination of labels these are the steps of ⊗ and one for ⊕. A value that is
        scattered is computed once, not for every place where it might go; of values from which an
        index picks, only one is computed. What is found by keys is not compared with all others.
        """
        if self.scan is not None or self.blocked_scan is not None:
            (scanned,) = self.aggregated
            return self.calls() // max(1, self.extent[scanned])
        if self.block_totals is not None:
            return self.calls()
        if self.segments is not None:
            return self._scattered_operations(self.segments)
        if self.matrix is not None:
            return self._matrix_operations(self.matrix)
        steps = _steps(self.function)
        if self.matches is not None:
            assert isinstance(self.function, Call)
            steps = _steps(self.function.args[1])
        if self.aggregated:
            steps += 1
        if self.pick is not None:
            return self.calls() // max(1, self.extent[self.pick.label]) * steps
        return self.calls() * steps

    def _matrix_operations(self, matrix: MatrixResult) -> int:
        """Return the operations for all matrices of a stack."""
        extent = self.extent
        letters = {letter: extent[label] for letter, label in self.matrix_labels.items()}
        stack = prod(extent[str(label)] for label in self.operands[0][:-2])
        return stack * matrix.record.operations({"k": 1, **letters})

    def _scattered_operations(self, segments: Segments) -> int:
        """Return the steps of all values, one for each ⊕, and the steps of all indices."""
        extent = self.extent
        values = prod(extent[label] for label in self.labels if label not in segments.labels)
        total = values * (_steps(segments.body) + 1)
        for index in segments.indices:
            own_labels = used_labels(index, segments.operands)
            total += _steps(index) * prod(extent[label] for label in own_labels)
        return total

    def is_one_number(self, expression: Scalar) -> bool:
        """Return whether an expression over Args has one value: it reads no label, no dimension."""
        for node in walk(expression):
            is_plain_number = isinstance(node, Arg) and self.operands[node.position] == ()
            if not isinstance(node, Call | Const) and not is_plain_number:
                return False
        return True

    @property
    def required_aggregation(self) -> str:
        """The aggregation of an EinSum that has one."""
        assert self.aggregation is not None, f"{self} aggregates nothing"
        return self.aggregation

    @property
    def required_segments(self) -> Segments:
        """The segments of an EinSum that scatters."""
        assert self.segments is not None, f"{self} scatters nothing"
        return self.segments

    @property
    def required_pick(self) -> Pick:
        """The pick of an EinSum that picks."""
        assert self.pick is not None, f"{self} picks nothing"
        return self.pick

    @cached_property
    def segments(self) -> Segments | None:
        """What Y[k,f] ← ⊕[e](where(dst[e] == k, X[e,f], neutral)) scatters, None for all else."""
        if self.aggregation is None:
            return None
        record = AGGREGATIONS[self.aggregation]
        return find_segments(self.function, self.operands, self.output, record)

    @cached_property
    def pick(self) -> Pick | None:
        """What Y[e,f] ← ⊕[k](where(src[e] == k, X[k,f], neutral)) picks, None for all else."""
        if self.aggregation is None or self.segments is not None:
            return None
        record = AGGREGATIONS[self.aggregation]
        return find_pick(self.function, self.operands, self.aggregated, record)

    @cached_property
    def scan(self) -> Scan | None:
        """The labels of Y[a,i] ← ⊕[k](where(k <= i, X[a,k], neutral)), None for all else."""
        if self.aggregation is None or len(self.aggregated) != 1 or len(self.operands) != 1:
            return None
        match self.function:
            case Call("where", (Call("<=", (Index(scanned), Index(along))), Arg(0), Const(masked))):
                pass
            case _:
                return None
        (index,) = self.operands
        renamed = [along if entry == scanned else entry for entry in index]
        is_scan = self.aggregated == (scanned,) and along in self.output and along not in index
        if not is_scan or len(index) != len(self.output) or set(renamed) != set(self.output):
            return None
        # Taking the number once must be the same as taking it for each value after an index.
        record = AGGREGATIONS[self.aggregation]
        is_taken_once = record.is_idempotent or masked == record.empty
        return Scan(along, scanned, masked) if is_taken_once else None

    @cached_property
    def block_totals(self) -> BlockTotals | None:
        """The first pass of a scan in two passes, None for all else."""
        if self.aggregation is None or len(self.aggregated) != 1:
            return None
        (inside,) = self.aggregated
        return recognise_totals(self.function, self.operands, self.output, inside)

    @cached_property
    def blocked_scan(self) -> BlockedScan | None:
        """The second pass of a scan in two passes, None for all else."""
        if self.aggregation is None or len(self.aggregated) != 1:
            return None
        (inside,) = self.aggregated
        return recognise_blocked_scan(
            self.function, self.operands, self.output, inside, self.aggregation
        )

    @property
    def has_special_form(self) -> bool:
        """Whether it has kernels of its own: it scans, scatters, picks, or finds values by keys.

        So does a function of matrices.
        """
        forms = self.scan, self.segments, self.pick, self.matches, self.matrix
        return any(form is not None for form in forms)

    @property
    def is_pass_of_scan(self) -> bool:
        """Whether it is the first or the second pass of a scan in two passes."""
        return self.block_totals is not None or self.blocked_scan is not None

    def __str__(self) -> str:
        return self.show([f"x{k}" for k in range(len(self.operands))])

    def show(self, tensors: Sequence[str]) -> str:
        """Return the right-hand side in the paper's notation, with these names of operands."""
        elements: list[str] = []
        for tensor, index in zip(tensors, self.operands, strict=True):
            elements.append(element_text(tensor, index, elements))
        body = text(self.function, elements)
        if self.aggregation is None:
            return body
        bounded = self.bounded_labels()
        listed = []
        for label in self.aggregated:
            listed.append(label if label in bounded else f"{label}:{self.extent[label]}")
        return f"{AGGREGATIONS[self.aggregation].symbol}[{','.join(listed)}]({body})"

    def summary(self, tensors: Sequence[str]) -> str:
        """Return the right-hand side for people: as `show`, but in words for scans in blocks."""
        if self.aggregation is None:
            return self.show(tensors)
        symbol = AGGREGATIONS[self.aggregation].symbol
        if self.block_totals is not None:
            return f"{symbol} of {tensors[0]} in each block"
        if self.blocked_scan is not None:
            along = self.blocked_scan.along
            return f"{symbol} of {tensors[1]} up to {along} in its block, after {tensors[0]}"
        return self.show(tensors)

    @cached_property
    def labels_as_numbers(self) -> tuple[str, ...]:
        """Labels whose values are used, as in X[i] + i."""
        trees = [self.function]
        for index in self.operands:
            trees.extend(gathers_in(index))
        used: set[str] = set()
        for tree in trees:
            used.update(node.label for node in walk(tree) if isinstance(node, Index))
        return tuple(label for label in self.labels if label in used)

    @cached_property
    def has_any_arithmetic(self) -> bool:
        """Whether an index of any operand is arithmetic on labels, or fixed."""
        return any(self._arithmetic)

    def has_arithmetic(self, operand: int) -> bool:
        """Return whether an index of an operand is arithmetic on labels, as in X[i+1], or fixed."""
        return self._arithmetic[operand]

    @cached_property
    def _arithmetic(self) -> tuple[bool, ...]:
        found = []
        for index in self.operands:
            found.append(any(arithmetic_labels(entry) is not None for entry in index))
        return tuple(found)

    def dimension_cut_by(self, operand: int, label: str) -> int | None:
        """Return the dimension of an operand that is cut along with a label; None if none is.

        A diagonal is cut along its first dimension. An index that is arithmetic is cut by the label
        that changes it most. A gathered dimension is needed whole.
        """
        return self._cut_dimensions[operand].get(label)

    @cached_property
    def _cut_dimensions(self) -> tuple[dict[str, int], ...]:
        """Of each operand, the labels that cut it and the dimensions that they cut."""
        found = []
        for index in self.operands:
            dimension_of: dict[str, int] = {}
            for dimension, entry in enumerate(index):
                if isinstance(entry, str):
                    dimension_of.setdefault(entry, dimension)
            for dimension, entry in enumerate(index):
                if not isinstance(entry, str):
                    label = major_label(entry, self.extents)
                    if label is not None:
                        dimension_of.setdefault(label, dimension)
            found.append(dimension_of)
        return tuple(found)

    @cached_property
    def output_dimensions(self) -> dict[str, int]:
        """The labels of the result, and their dimensions."""
        return {label: dimension for dimension, label in enumerate(self.output)}

    def bounded_labels(self) -> tuple[str, ...]:
        """Return the labels whose extent follows from an operand."""
        found: list[str] = []
        for index in self.operands:
            found.extend(labels_in(index))
        return unique(found)


def _steps(function: Scalar) -> int:
    """Return the number of operations in an expression. To conjugate an operand is none."""
    count = 0
    for node in walk(function):
        match node:
            case Call("conj", (Arg(),)):
                continue
            case Call():
                count += 1
    return count


def close(expression: Scalar) -> tuple[Scalar, tuple[IndexEntries, ...], tuple[str, ...]]:
    """Turn elements into numbered operands.

    Return the function over Args, the operands' indices, and their tensors. The same element
    twice is one operand. The index tensors of a gather come before the tensor they index.
    """
    position: dict[tuple[str, IndexEntries], int] = {}

    def leaf(node: Scalar) -> Scalar:
        if not isinstance(node, Element):
            return node
        index = _rebuilt_index(node.index, leaf)
        return Arg(position.setdefault((node.tensor, index), len(position)))

    function = rebuild(expression, leaf)
    indices = tuple(index for _, index in position)
    tensors = tuple(tensor for tensor, _ in position)
    return function, indices, tensors


def reopen(einsum: EinSum, tensors: Sequence[str]) -> Scalar:
    """Return the function with its operands written as Elements: the inverse of `close`."""
    elements: list[Scalar] = []

    def leaf(node: Scalar) -> Scalar:
        return elements[node.position] if isinstance(node, Arg) else node

    for tensor, index in zip(tensors, einsum.operands, strict=True):
        elements.append(Element(tensor, _rebuilt_index(index, leaf)))
    return rebuild(einsum.function, leaf)


def inside_segments(einsum: EinSum, tensors: Sequence[str]) -> Scalar:
    """Return the condition that a scattered value goes to a place, and not nowhere."""
    inside: Scalar | None = None
    segments = einsum.required_segments
    for label, index in zip(segments.labels, segments.indices, strict=True):
        element = reopen(replace(einsum, function=index), tensors)
        extent = Const(einsum.extent[label])
        is_inside = Call("&", (Call(">=", (element, Const(0))), Call("<", (element, extent))))
        inside = is_inside if inside is None else Call("&", (inside, is_inside))
    assert inside is not None
    return inside


def _rebuilt_index(index: IndexEntries, leaf: Callable[[Scalar], Scalar]) -> IndexEntries:
    """Return an index with `leaf` applied inside of its gathers."""
    return with_gathers(index, lambda gather: rebuild(gather, leaf))


def einsum_over(
    output: Sequence[str],
    operands: Sequence[IndexEntries],
    function: Scalar,
    aggregation: str | None,
    aggregated: Sequence[str],
    extent: Mapping[str, int],
) -> EinSum:
    """Return an EinSum, given the extents of its labels and perhaps of others."""
    extents = tuple((label, extent[label]) for label in (*output, *aggregated))
    return EinSum(tuple(output), tuple(operands), function, aggregation, tuple(aggregated), extents)


def make_einsum(
    output: Sequence[str],
    expression: Scalar,
    aggregation: str | None,
    aggregated: Sequence[str],
    extent: Mapping[str, int],
) -> tuple[EinSum, tuple[str, ...]]:
    """Return an EinSum and the tensors it reads, from an expression over Elements."""
    labels = (*output, *aggregated)
    missing = [label for label in labels_of(expression) if label not in labels]
    assert not missing, f"labels {missing} are neither in the output nor aggregated"
    function, operands, tensors = close(expression)
    return einsum_over(output, operands, function, aggregation, aggregated, extent), tensors


def einsum_type(einsum: EinSum, types: Sequence[Type]) -> np.dtype[Any]:
    """Return the dtype of the result, given those of the operands; OperationError if none."""

    def leaf(node: Scalar) -> Type:
        assert isinstance(node, Arg)
        return types[node.position]

    for index in einsum.operands:
        for entry in index:
            if isinstance(entry, str | Const):
                continue
            dtype = np.dtype(infer(entry, leaf))
            if dtype.kind not in "iu":
                raise OperationError(f"an index is {dtype.name}", "an integer")
    if einsum.matrix is not None:
        return einsum.matrix.record.result_type(einsum.matrix.name, types)
    return aggregate_type(einsum.aggregation, infer(einsum.function, leaf))
