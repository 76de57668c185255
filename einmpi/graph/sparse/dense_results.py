"""Dense tensors that are computed from sparse ones: from what is stored, and from the rest."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, prod
from typing import TYPE_CHECKING

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.eingraph import Vertex
from einmpi.graph.scalar import (
    Call,
    Const,
    Element,
    Number,
    Scalar,
    labels_of,
)
from einmpi.graph.sparse.background import (
    aggregate_of,
    in_dtype,
    number_of,
    typed,
)
from einmpi.graph.sparse.combinations import Aggregate, Body
from einmpi.graph.sparse.formats import Analysis, as_dense, wrong

if TYPE_CHECKING:
    from einmpi.graph.sparse.desugar import Desugaring


class DenseResult:
    """A dense tensor that is computed from sparse ones: from what is stored, and from the rest."""

    def __init__(
        self, desugaring: Desugaring, vertex: Vertex, analysis: Analysis, body: Body
    ) -> None:
        self.desugaring = desugaring
        self.vertex = vertex
        self.einsum = vertex.computed_einsum
        self.body = body
        self.background = analysis.facts.background
        self.own = [label for label in self.einsum.output if label in body.iteration.labels]
        labels = body.iteration.labels
        self.others = [label for label in self.einsum.aggregated if label not in labels]
        self.keys = [label for label in self.einsum.aggregated if label in labels]

    def add(self) -> None:
        """Add the vertices of the result."""
        self.desugaring.check_size(self.vertex, self.vertex.elements)
        if self.background is None:
            what = (
                f"{self.vertex.name} needs elements that are not stored, and that are not computed"
            )
            raise wrong(self.vertex, what, "an expression that the stored elements decide")
        number = number_of(self.background)
        if self.einsum.aggregation is None:
            self._add_filled(self.background)
        elif number is not None:
            self._add_counted(number)
        else:
            self._add_corrected(self.background)

    def _finish(self, expression: Scalar) -> None:
        self.desugaring.add(self.vertex, self.einsum.output, expression, None, ())

    def _scatter(
        self,
        value: Scalar,
        aggregation: str,
        ending: str = "",
        output: Sequence[str] | None = None,
    ) -> Element:
        """Add the aggregates of what is stored, by the labels of the result or some of them.

        They are the result itself, or with an ending of its name a part of it.
        """
        iteration = self.body.iteration
        others = self.others
        if output is None:
            output = self.einsum.output
        else:
            others = []
        name = self.desugaring.names.take_new(f"{self.vertex.name}_{ending}") if ending else None
        goals = {label: iteration.column(label) for label in self.own}
        wanted = Aggregate(self.vertex, value, aggregation, output, others, name)
        stored = self.body.aggregate(wanted, goals, iteration.divided in goals)
        return Element(stored, tuple(output))

    def _add_filled(self, background: Scalar) -> None:
        """Add a result without aggregation: the background where nothing is stored."""
        plain = self._in_dtype(self.body.plain(background))
        if not self.body.iteration.count:
            self._finish(plain)
            return
        value = self.body.value(self.einsum.function)
        aggregation = "any" if self.vertex.dtype == "bool" else "sum"
        stored = self._scatter(value, aggregation, "stored")
        inside = self._scatter(Const(True), "any", "inside", self.own)
        self._finish(Call("where", (inside, self._in_dtype(stored), plain)))

    def _in_dtype(self, value: Scalar) -> Scalar:
        return self.body.converted(value, self.vertex.dtype)

    def _add_counted(self, background: Number) -> None:
        """Add a result whose background is constant: it is taken as often as nothing is stored."""
        aggregation = self.einsum.required_aggregation
        dtype = self.vertex.dtype
        body = self.body
        total = prod(self.einsum.extent[label] for label in self.keys)
        times = prod(self.einsum.extent[label] for label in self.others)
        count = body.iteration.count
        if not count:
            number = aggregate_of(aggregation, background, total * times, dtype)
            self._finish(typed(number, dtype))
            return
        value = body.value(self.einsum.function)
        is_neutral = self.desugaring.formats.is_neutral(self.vertex, background)
        if is_neutral or (not self.own and count == total):
            self._scatter(value, aggregation)
            return
        stored = self._scatter(value, aggregation, "stored")
        record = AGGREGATIONS[aggregation]
        if not self.own:
            rest = typed(
                aggregate_of(aggregation, background, (total - count) * times, dtype), dtype
            )
            self._finish(Call(record.operation, (stored, rest)))
            return
        counted = self._scatter(Const(1), "sum", "count", self.own)
        missing = Call("-", (Const(total), counted))
        if record.is_idempotent:
            rest = typed(in_dtype(background, dtype), dtype)
        else:
            number = background
            if isinstance(number, int):
                number = in_dtype(int(number), "int64")
            all_missing = Call("*", (missing, Const(times)))
            op = "*" if aggregation == "sum" else "**"
            rest = Call(dtype, (Call(op, (Const(number), all_missing)),))
        combined = Call(record.operation, (stored, rest))
        self._finish(Call("where", (Call(">", (missing, Const(0))), combined, stored)))

    def _add_corrected(self, background: Scalar) -> None:
        """Add a sum: that of all backgrounds, and how much what is stored differs from them."""
        vertex = self.vertex
        for k, each in self.body.sparse.items():
            number = number_of(each.implicit)
            if number is not None and not isfinite(abs(number)):
                self._refuse(f"what is not stored of {vertex.inputs[k]} is {number}")
        if self.einsum.aggregation != "sum":
            self._refuse(f"{self.einsum.aggregation} needs the elements that are not stored")
        plain = self._in_dtype(self.body.plain(background))
        free = labels_of(plain)
        elements = prod(self.einsum.extent[label] for label in free)
        self.desugaring.check_size(vertex, elements)
        kept = [label for label in self.einsum.output if label in free]
        gone = [label for label in self.einsum.aggregated if label in free]
        times = prod(
            self.einsum.extent[label] for label in self.einsum.aggregated if label not in gone
        )
        rest = self.desugaring.add(
            vertex,
            kept,
            plain,
            "sum" if gone else None,
            gone,
            name=self.desugaring.names.take_new(f"{vertex.name}_rest"),
        )
        whole: Scalar = Call("*", (Const(times), Element(rest, tuple(kept))))
        if self.body.iteration.count:
            here = self._in_dtype(self.body.value(background))
            value = Call("-", (self._in_dtype(self.body.value(self.einsum.function)), here))
            whole = Call("+", (self._scatter(value, "sum", "stored"), whole))
        self._finish(whole)

    def _refuse(self, why: str) -> None:
        what = f"{self.vertex.name}: {why}, and these depend on their position"
        hint = "an expression that the stored elements decide"
        raise wrong(self.vertex, what, as_dense(self.vertex.name), hint)
