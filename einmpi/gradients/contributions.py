"""What one element of a vertex sends to the tensor that it is an element of: an EinSum again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from einmpi.gradients.expressions import (
    conditions_around,
    conjunction,
    substituted,
    under_conditions,
)
from einmpi.gradients.indices import Equation, range_conditions, reduced, solve
from einmpi.graph.derivatives.simple import times
from einmpi.graph.dtypes import Type
from einmpi.graph.scalar import Call, Const, Element, Index, Scalar, labels_of
from einmpi.graph.segments import conjuncts, with_other_guard, without_guard


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
