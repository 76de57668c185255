"""What one element of a vertex sends to the tensor that it is an element of: an EinSum again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from einmpi.graph.derivatives.simple import ZERO, is_number, minus, negative, plus, times
from einmpi.graph.dtypes import Type
from einmpi.graph.eingraph import Vertex
from einmpi.graph.index_arithmetic import (
    Affine,
    Guard,
    Interval,
    affine_of,
    arithmetic_labels,
    clamped,
    guarded_index,
    interval_of,
    is_remainder,
)
from einmpi.graph.scalar import (
    Call,
    Const,
    Element,
    Index,
    IndexEntries,
    Scalar,
    is_plain,
    labels_of,
    rebuild,
)
from einmpi.graph.segments import conjuncts, with_other_guard, without_guard

# ---- indices -------------------------------------------------------------------------------------
#
# Indices solved for their labels: for which values of labels an index has a given value.
#
# So the adjoint of a convolution is a convolution, and that of a reshape is a reshape.


@dataclass(frozen=True)
class Solution:
    """The values of labels for which an index has a given value.

    Attributes
    ----------
    values
        The labels that are determined, with their values.
    conditions
        Where there is such a value.
    summed
        New labels with their extents: each of their values gives another solution.
    """

    values: Mapping[str, Scalar]
    conditions: tuple[Scalar, ...] = ()
    summed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Equation:
    """`index` has the value of the label `place`, which goes through `size` values.

    `free` are the labels that it may be solved for, `extent` has those of all labels.
    """

    place: str
    size: int
    index: Scalar
    free: Sequence[str]
    extent: Mapping[str, int]


def intervals(extent: Mapping[str, int]) -> dict[str, Interval]:
    """Return the least and the greatest value of each label."""
    return {label: (0, max(0, size - 1)) for label, size in extent.items()}


def as_scalar(affine: Affine) -> Scalar:
    """Return an affine index as an expression."""
    result: Scalar = ZERO
    for label, coefficient in affine.terms:
        result = plus(result, times(Const(coefficient), Index(label)))
    return plus(result, Const(affine.constant))


def reduced(index: Scalar, extent: Mapping[str, int]) -> Scalar:
    """Return an index without needless parts: (8·i + j) % 8 is j if j is less than 8."""
    if isinstance(index, Call):
        index = Call(index.op, tuple(reduced(part, extent) for part in index.args))
    match index:
        case Call("%" | "//", (inner, Const(int(divisor)))) if divisor > 0:
            affine = affine_of(inner)
        case _:
            affine = affine_of(index)
            return index if affine is None else as_scalar(affine)
    if affine is None:
        return index
    whole: list[tuple[str, int]] = []
    rest: list[tuple[str, int]] = []
    for label, coefficient in affine.terms:
        if coefficient % divisor == 0:
            whole.append((label, coefficient // divisor))
        else:
            rest.append((label, coefficient))
    quotient, constant = divmod(affine.constant, divisor)
    remainder = as_scalar(Affine(constant, tuple(rest)))
    bounds = interval_of(remainder, intervals(extent))
    is_small = bounds is not None and bounds[0] >= 0 and bounds[1] < divisor
    if index.op == "%":
        return remainder if is_small else Call("%", (remainder, Const(divisor)))
    multiple = as_scalar(Affine(quotient, tuple(whole)))
    if is_small:
        return multiple
    return plus(multiple, Call("//", (remainder, Const(divisor))))


def solve(equation: Equation, new_label: Callable[[str], str]) -> Solution | None:
    """Return for which values of free labels an index has a given value; None if not known."""
    affine = affine_of(equation.index)
    if affine is not None:
        return _solve_affine(equation, affine)
    match equation.index:
        case Call("%", (inner, Const(int(divisor)))) if divisor > 0:
            return _solve_remainder(equation, inner, divisor, new_label)
        case Call("//", (inner, Const(int(divisor)))) if divisor > 0:
            return _solve_quotient(equation, inner, divisor, new_label)
    return None


def range_conditions(value: Scalar, size: int, extent: Mapping[str, int]) -> tuple[Scalar, ...]:
    """Return the conditions under which a value is one of 0, 1, …, size − 1."""
    bounds = None
    if arithmetic_labels(value) is not None:
        bounds = interval_of(value, intervals(extent))
    conditions = []
    if bounds is None or bounds[0] < 0:
        conditions.append(Call(">=", (value, ZERO)))
    if bounds is None or bounds[1] >= size:
        conditions.append(Call("<", (value, Const(size))))
    return tuple(conditions)


def _solve_affine(equation: Equation, affine: Affine) -> Solution | None:
    """Solve constant + Σ coefficient · label = place."""
    extent = equation.extent
    terms = [term for term in affine.terms if term[0] in equation.free]
    if not terms:
        return None
    terms.sort(key=lambda term: -abs(term[1]))
    if not _is_positional(terms, extent):
        # The sum over the other labels stays: the one that is solved for should be the longest.
        terms = [max(terms, key=lambda term: extent[term[0]])]
    solved = {label for label, _ in terms}
    others = tuple(term for term in affine.terms if term[0] not in solved)
    distance = minus(Index(equation.place), as_scalar(Affine(affine.constant, others)))
    if terms[0][1] < 0:
        distance = negative(distance)
    values: dict[str, Scalar] = {}
    conditions: list[Scalar] = []
    remaining = distance
    for label, coefficient in terms:
        size = abs(coefficient)
        value = remaining
        if size != 1:
            value = reduced(Call("//", (remaining, Const(size))), extent)
            remaining = reduced(Call("%", (remaining, Const(size))), extent)
        else:
            remaining = ZERO
        values[label] = value
        conditions.extend(range_conditions(value, extent[label], extent))
    if remaining != ZERO:
        conditions.append(Call("==", (remaining, ZERO)))
    return Solution(values, tuple(conditions))


def _is_positional(terms: Sequence[tuple[str, int]], extent: Mapping[str, int]) -> bool:
    """Return whether labels are like digits of a number: each value has one solution.

    The terms are sorted by their coefficients, the largest first.
    """
    if len(terms) == 1:
        return True
    reach = 0
    for label, coefficient in reversed(terms):
        if coefficient <= reach:
            return False
        reach += coefficient * (extent[label] - 1)
    return True


def _single_label(equation: Equation, inner: Scalar) -> tuple[str, int, Scalar] | None:
    """Return the only free label of an index, its coefficient 1 or −1, and the rest."""
    affine = affine_of(inner)
    if affine is None:
        return None
    terms = [term for term in affine.terms if term[0] in equation.free]
    if len(terms) != 1 or abs(terms[0][1]) != 1:
        return None
    label, coefficient = terms[0]
    others = tuple(term for term in affine.terms if term[0] != label)
    return label, coefficient, as_scalar(Affine(affine.constant, others))


def _solve_remainder(
    equation: Equation, inner: Scalar, divisor: int, new_label: Callable[[str], str]
) -> Solution | None:
    """Solve (± label + rest) % divisor = place."""
    found = _single_label(equation, inner)
    if found is None:
        return None
    label, sign, rest = found
    extent = dict(equation.extent)
    distance = minus(Index(equation.place), rest)
    if sign < 0:
        distance = negative(distance)
    value = reduced(Call("%", (distance, Const(divisor))), extent)
    summed: dict[str, int] = {}
    size = extent[label]
    if size > divisor:
        turn = new_label("turn")
        summed[turn] = -(-size // divisor)
        extent[turn] = summed[turn]
        value = plus(times(Const(divisor), Index(turn)), value)
    conditions = list(range_conditions(value, size, extent))
    if equation.size > divisor:
        conditions.append(Call("<", (Index(equation.place), Const(divisor))))
    return Solution({label: value}, tuple(conditions), summed)


def _solve_quotient(
    equation: Equation, inner: Scalar, divisor: int, new_label: Callable[[str], str]
) -> Solution | None:
    """Solve (± label + rest) // divisor = place."""
    found = _single_label(equation, inner)
    if found is None:
        return None
    label, sign, rest = found
    extent = dict(equation.extent)
    step = new_label("step")
    extent[step] = divisor
    whole = plus(times(Const(divisor), Index(equation.place)), Index(step))
    value = minus(whole, rest)
    if sign < 0:
        value = negative(value)
    conditions = range_conditions(value, extent[label], extent)
    return Solution({label: value}, conditions, {step: divisor})


# ---- expressions ---------------------------------------------------------------------------------
#
# Expressions at other values of their labels, and conditions around them.


def substituted(
    node: Scalar,
    values: Mapping[str, Scalar],
    extent: Mapping[str, int],
    guard: Scalar | None = None,
) -> Scalar:
    """Return an expression at these values of labels.

    Indices of tensors stay inside of them even where a value is no value of its label; what is
    read there must not be used. `extent` has the extents of all labels, old and new. `guard` is the
    condition that a value which is read from a tensor is one of its label.
    """
    inside: dict[str, Scalar] = {}
    for label, value in values.items():
        inside[label] = _inside(value, extent[label], extent, guard)

    def leaf(part: Scalar) -> Scalar:
        if isinstance(part, Index):
            return values.get(part.label, part)
        if isinstance(part, Element):
            return Element(part.tensor, _index(part.index))
        return part

    def index_leaf(part: Scalar) -> Scalar:
        if isinstance(part, Index):
            return inside.get(part.label, part)
        return leaf(part)

    def _index(index: IndexEntries) -> IndexEntries:
        entries: list[str | Scalar] = []
        for entry in index:
            if not isinstance(entry, str):
                entries.append(reduced(rebuild(entry, index_leaf), extent))
            elif entry in values:
                entries.append(_as_entry(inside[entry], extent[entry], extent))
            else:
                entries.append(entry)
        return tuple(entries)

    return rebuild(node, leaf)


def _as_entry(value: Scalar, size: int, extent: Mapping[str, int]) -> str | Scalar:
    """Return a value as an index; a label alone goes through the whole dimension."""
    if not isinstance(value, Index):
        return value
    return value.label if extent[value.label] == size else Call("+", (value, ZERO))


def _inside(value: Scalar, size: int, extent: Mapping[str, int], guard: Scalar | None) -> Scalar:
    """Return a value of a label that is kept in the label's range."""
    bounds = None
    if arithmetic_labels(value) is not None:
        bounds = interval_of(value, intervals(extent))
    if bounds is None:
        return value if guard is None else Call("where", (guard, value, ZERO))
    return clamped(value, bounds[0], bounds[1], size)


def conditions_around(node: Scalar) -> tuple[list[Scalar], Scalar]:
    """Return the conditions of where(…, where(…, x, 0), 0), the outermost first, and x."""
    conditions: list[Scalar] = []
    while isinstance(node, Call) and node.op == "where" and is_number(node.args[2], 0):
        conditions.append(node.args[0])
        node = node.args[1]
    return conditions, node


def under_conditions(conditions: Sequence[Scalar], node: Scalar) -> Scalar:
    """Return where(…, where(…, x, 0), 0), the first condition outermost."""
    for condition in reversed(conditions):
        node = Call("where", (condition, node, ZERO))
    return node


def conjunction(conditions: Sequence[Scalar]) -> Scalar:
    """Return the conditions joined by &; there is at least one."""
    joined = conditions[0]
    for condition in conditions[1:]:
        joined = Call("&", (joined, condition))
    return joined


def with_guarded_indices(
    node: Scalar, bounds: Mapping[str, Vertex], guards: Sequence[Guard] = ()
) -> Scalar:
    """Return an expression whose gathers read nothing where no branch of a `where` needs them.

    Programs have the same indices when they are read. Conditions stay as they are: with guards
    in conditions, which are in other guards, expressions would grow without bound. `bounds` has the
    tensors by their names.
    """
    if isinstance(node, Call) and node.op == "where":
        condition, this, that = node.args
        changed_this = with_guarded_indices(this, bounds, [*guards, (condition, True)])
        changed_that = with_guarded_indices(that, bounds, [*guards, (condition, False)])
        return Call("where", (condition, changed_this, changed_that))
    if isinstance(node, Call):
        arguments = [with_guarded_indices(argument, bounds, guards) for argument in node.args]
        return Call(node.op, tuple(arguments))
    if not isinstance(node, Element):
        return node
    entries: list[str | Scalar] = []
    for entry, extent in zip(node.index, bounds[node.tensor].bound, strict=True):
        is_arithmetic = isinstance(entry, str) or arithmetic_labels(entry) is not None
        if isinstance(entry, str) or is_arithmetic or is_remainder(entry, extent):
            entries.append(entry)
        else:
            entries.append(guarded_index(entry, guards))
    return Element(node.tensor, tuple(entries))


def is_cheap(node: Scalar) -> bool:
    """Return whether an expression is a number, an element, or the product of the two."""
    match node:
        case Const() | Element():
            return not isinstance(node, Element) or is_plain(node)
        case Call("neg", (inner,)) | Call("*", (Const(), inner)) | Call("/", (inner, Const())):
            return is_cheap(inner)
    return False


@dataclass(frozen=True)
class Contribution:
    """A part of a tensor's adjoint.

    Attributes
    ----------
    output
        The labels of the tensor's dimensions.
    expression
        What is summed over `aggregated`.
    aggregated
        The labels of the sum; none if there is no sum.
    extent
        The extents of all labels.
    places
        Conditions on the labels of the output, outside of which the part is 0.
    """

    output: tuple[str, ...]
    expression: Scalar
    aggregated: tuple[str, ...]
    extent: dict[str, int]
    places: tuple[Scalar, ...] = ()


class ContributionBuilder:
    """Builds the contribution of one element, step by step.

    `labels` and `extent` are those of the vertex that reads the element.
    """

    def __init__(
        self,
        labels: Sequence[str],
        extent: dict[str, int],
        dtype_of: Callable[[Scalar], Type],
        new_label: Callable[[str], str],
    ) -> None:
        self.labels = labels
        self.extent = dict(extent)
        self.dtype_of = dtype_of
        self.new_label = new_label
        self.conditions: list[Scalar] = []

    def build(self, element: Element, bound: Sequence[int], adjoint: Scalar) -> Contribution:
        """Return what an element with this adjoint sends to its tensor."""
        self.conditions, self.expression = conditions_around(adjoint)
        output: list[str] = []
        equations: list[tuple[str, int, Scalar]] = []
        for entry, size in zip(element.index, bound, strict=True):
            if isinstance(entry, str) and entry not in output:
                output.append(entry)
                continue
            place = self.new_label("place")
            self.extent[place] = size
            output.append(place)
            equations.append((place, size, Index(entry) if isinstance(entry, str) else entry))
        self.free = [label for label in self.labels if label not in output]
        equations = self._eliminate_compared(equations)
        unsolved: list[tuple[str, int, Scalar]] = []
        while equations:
            place, size, index = equations.pop(0)
            equation = Equation(place, size, index, self.free, self.extent)
            solution = solve(equation, self.new_label)
            if solution is None:
                unsolved.append((place, size, index))
                continue
            self.extent.update(solution.summed)
            self.free.extend(solution.summed)
            # With these values, equations that were not solved before may have a solution.
            equations = self._replace(solution.values, unsolved + equations)
            unsolved = []
            if solution.conditions:
                self.conditions.append(conjunction(solution.conditions))
        scattered: list[Scalar] = []
        places: list[Scalar] = []
        for place, _, index in unsolved:
            condition = Call("==", (index, Index(place)))
            if set(labels_of(index)) <= set(output):
                places.append(condition)
            else:
                scattered.append(condition)
        expression = under_conditions(self.conditions, self.expression)
        if scattered:
            expression = under_conditions([conjunction(scattered)], expression)
        used = labels_of(expression)
        repeats = math.prod(self.extent[label] for label in self.free if label not in used)
        aggregated = tuple(label for label in self.free if label in used)
        if repeats != 1:
            expression = times(Const(repeats), expression)
        return Contribution(tuple(output), expression, aggregated, self.extent, tuple(places))

    def _replace(
        self,
        values: Mapping[str, Scalar],
        equations: list[tuple[str, int, Scalar]],
        guard: Scalar | None = None,
    ) -> list[tuple[str, int, Scalar]]:
        """Put values in the place of free labels everywhere; return the changed equations."""
        extent = self.extent
        self.free = [label for label in self.free if label not in values]
        self.expression = substituted(self.expression, values, extent, guard)
        self.conditions = [substituted(node, values, extent, guard) for node in self.conditions]
        changed = []
        for place, size, index in equations:
            at_values = substituted(index, values, extent, guard)
            changed.append((place, size, reduced(at_values, self.extent)))
        return changed

    def _eliminate_compared(
        self, equations: list[tuple[str, int, Scalar]]
    ) -> list[tuple[str, int, Scalar]]:
        """Replace free labels that conditions compare with an index: that sum has one term.

        So the adjoint of values that are scattered is a gather.
        """
        position = 0
        while position < len(self.conditions):
            condition = self.conditions[position]
            found = self._compared_label(condition)
            if found is None:
                position += 1
                continue
            label, value, others = found
            in_range = range_conditions(value, self.extent[label], self.extent)
            remaining = [*others, *in_range]
            left = [conjunction(remaining)] if remaining else []
            self.conditions[position : position + 1] = left
            # Indices that the condition guarded must not be outside where nothing is left of it.
            guard = left[0] if left else None
            self.expression = without_guard(self.expression, condition, guard)
            self.conditions = [without_guard(node, condition, guard) for node in self.conditions]
            for number, (place, size, index) in enumerate(equations):
                equations[number] = place, size, with_other_guard(index, condition, guard)
            is_inside = conjunction(in_range) if in_range else None
            equations = self._replace({label: value}, equations, is_inside)
        return equations

    def _compared_label(self, condition: Scalar) -> tuple[str, Scalar, list[Scalar]] | None:
        """Return a free label that a condition sets to a value, the value, other conditions."""
        parts = conjuncts(condition)
        for number, part in enumerate(parts):
            if not isinstance(part, Call) or part.op != "==":
                continue
            left, right = part.args
            for side, other in ((right, left), (left, right)):
                if not isinstance(side, Index) or side.label not in self.free:
                    continue
                is_integer = np.dtype(self.dtype_of(other)).kind in "iu"
                if is_integer and side.label not in labels_of(other):
                    return side.label, other, parts[:number] + parts[number + 1 :]
        return None
