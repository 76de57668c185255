"""The adjoints of tensors as new vertices of a graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from einmpi.errors import OperationError
from einmpi.gradients.contributions import Contribution, ContributionBuilder
from einmpi.gradients.expressions import (
    conditions_around,
    is_cheap,
    substituted,
    under_conditions,
    with_guarded_indices,
)
from einmpi.gradients.factors import computed_factors, with_elements
from einmpi.gradients.softmax import Softmax, find_softmax
from einmpi.gradients.sweep import Sweep
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.arithmetic import infer
from einmpi.graph.derivatives.aggregations import AdjointOfAggregate
from einmpi.graph.derivatives.scans import AdjointOfScan, ScanDerivative
from einmpi.graph.derivatives.simple import ZERO, choose, minus, plus, times
from einmpi.graph.dtypes import DTYPES, Type, kind_of
from einmpi.graph.eingraph import Vertex, make_vertex
from einmpi.graph.einsum import EinSum, make_einsum, reopen
from einmpi.graph.labels import Names
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import (
    Call,
    Const,
    Element,
    Index,
    Scalar,
    labels_of,
    relabel,
    walk,
)
from einmpi.graph.segments import without_guard

PREFIX = "d"  # the adjoint of W is called dW, if that name is free


class Adjoints:
    """Adjoint vertices, which are added to `known` one after another.

    `names` are those in use, of tensors and labels. What tensors are sent is kept until their
    adjoints are asked for. The adjoints of `parameters` are asked for in any case.
    """

    def __init__(
        self,
        known: dict[str, Vertex],
        names: Names,
        places: tuple[str, ...],
        parameters: Collection[str] = (),
    ) -> None:
        self.known = known
        self.names = names
        self.places = places
        self.parameters = frozenset(parameters)
        self._sent: dict[str, list[Contribution]] = {}

    # ---- types ----------------------------------------------------------------------------------

    def type_of(self, node: Scalar) -> Type:
        return infer(node, self._leaf_type)

    def _leaf_type(self, node: Scalar) -> Type:
        assert isinstance(node, Element)
        return np.dtype(self.known[node.tensor].dtype)

    def kind(self, node: Scalar) -> str:
        """Return the kind of numbers of an expression."""
        return kind_of(np.dtype(self.type_of(node)))

    def _conjugate(self, node: Scalar) -> Scalar:
        return Call("conj", (node,)) if self.kind(node) == "c" else node

    # ---- vertices -------------------------------------------------------------------------------

    def _emit(
        self,
        name: str,
        output: Sequence[str],
        expression: Scalar,
        extent: Mapping[str, int],
        aggregation: str | None = None,
        aggregated: Sequence[str] = (),
    ) -> Element:
        """Add a vertex and return the element that reads it."""
        guarded = with_guarded_indices(expression, self.known)
        einsum, inputs = make_einsum(output, guarded, aggregation, aggregated, extent)
        self.known[name] = make_vertex(name, einsum, inputs, self.known, places=self.places)
        return Element(name, tuple(output))

    def send(self, tensor: str, contribution: Contribution) -> None:
        """Add a part to the adjoint of a tensor."""
        self._sent.setdefault(tensor, []).append(contribution)

    def adjoint_of(self, tensor: str, labels: Sequence[str]) -> Scalar | None:
        """Return the adjoint of a tensor, over these labels of its dimensions.

        All vertices that read the tensor must have sent their parts. None if there are none.
        """
        parts = self._sent.pop(tensor, [])
        if not parts:
            return None
        stem = PREFIX + tensor
        dtype = self.known[tensor].dtype
        is_alone = len(parts) == 1 and self._is_plain_sum(parts[0], dtype)
        has_sums = any(part.aggregated for part in parts)
        # The adjoint itself gets the plain name, its parts get numbers.
        name = self.names.take_new(stem) if has_sums and not is_alone else ""
        total: Scalar = ZERO
        for part in parts:
            summed = self._without_sum(stem, part, dtype)
            total = plus(total, relabel(summed, dict(zip(part.output, labels, strict=True))))
        if is_cheap(total):
            return total
        extent = dict(zip(labels, self.known[tensor].bound, strict=True))
        return self._emit(name or self.names.take_new(stem), labels, total, extent)

    def _is_plain_sum(self, part: Contribution, dtype: str) -> bool:
        """Return whether a part is a sum and nothing else."""
        is_same = np.dtype(self.type_of(part.expression)) == np.dtype(dtype)
        return len(part.aggregated) > 0 and not part.places and is_same

    def as_tensor(self, tensor: str, labels: Sequence[str], adjoint: Scalar) -> str:
        """Return the name of the tensor that has an adjoint; one is added if there is none."""
        if isinstance(adjoint, Element) and adjoint.index == tuple(labels):
            return adjoint.tensor
        vertex = self.known[tensor]
        extent = dict(zip(labels, vertex.bound, strict=True))
        name = self.names.take_new(PREFIX + tensor)
        return self._emit(name, labels, self._cast(adjoint, vertex.dtype), extent).tensor

    def _cast(self, node: Scalar, dtype: str) -> Scalar:
        if isinstance(node, Const) or np.dtype(self.type_of(node)) != np.dtype(dtype):
            return Call(dtype, (node,))
        return node

    def _without_sum(self, stem: str, part: Contribution, dtype: str) -> Scalar:
        """Return a part as an expression without a sum, over the labels of its output."""
        expression = part.expression
        if part.aggregated:
            used = labels_of(expression)
            output = [label for label in part.output if label in used]
            name = self.names.take_new(stem)
            expression = self._emit(name, output, expression, part.extent, "sum", part.aggregated)
        if not isinstance(expression, Const):
            if self.kind(expression) == "c" and DTYPES[dtype].kind != "c":
                expression = Call("real", (expression,))
            expression = self._cast(expression, dtype)
        elif part.places and dtype not in ("float64", "complex128"):
            # A number in `where` no longer takes the dtype of what it is added to.
            expression = Call(dtype, (expression,))
        return under_conditions(part.places, expression)

    # ---- one vertex -----------------------------------------------------------------------------

    def send_through(self, vertex: Vertex, adjoint: Scalar, wanted: Collection[str]) -> None:
        """Send the adjoint of a computed tensor to those of its operands that are wanted."""
        einsum = vertex.computed_einsum
        if einsum.scan is not None and einsum.aggregation is not None:
            scan_derivative = AGGREGATIONS[einsum.aggregation].scan_derivative
            if scan_derivative is not None:
                self._send_through_scan(vertex, adjoint, scan_derivative)
                return
        expression = reopen(einsum, vertex.inputs)
        sweep = Sweep(self.kind, lambda tensor: tensor in wanted)
        softmax = find_softmax(vertex, self.known)
        if softmax is not None and self.parameters.isdisjoint(softmax.bypassed):
            self._send_through_softmax(vertex, softmax, adjoint, sweep)
            return
        if einsum.aggregation is None:
            sweep.stored[expression] = Element(vertex.name, einsum.output)
            sweep.send(expression, adjoint)
            self._share_equal_parts(vertex, sweep)
        elif einsum.aggregation == "sum":
            factors = computed_factors(expression, einsum.labels, sweep.leads_to_wanted)
            if factors:
                self._send_through_factors(vertex, adjoint, factors, wanted)
                return
            sweep.send(expression, adjoint)
        else:
            self._send_through_aggregate(vertex, adjoint, expression, sweep, wanted)
        for element, part in sweep.found.items():
            self._send_to_element(einsum, element, part)

    def _send_through_softmax(
        self, vertex: Vertex, softmax: Softmax, adjoint: Scalar, sweep: Sweep
    ) -> None:
        """Send the adjoint of y = softmax(x) to x: y (dy - Σ y dy), from y alone."""
        einsum = vertex.computed_einsum
        value = Element(vertex.name, einsum.output)
        mean = self._emit(
            self.names.take_new(PREFIX + softmax.total),
            [label for label in einsum.output if label not in softmax.normalised],
            times(adjoint, value),
            einsum.extent,
            "sum",
            softmax.normalised,
        )
        sweep.send(softmax.exponent, times(minus(adjoint, mean), value))
        for element, part in sweep.found.items():
            self._send_to_element(einsum, element, part)

    def _send_through_factors(
        self,
        vertex: Vertex,
        adjoint: Scalar,
        factors: Sequence[Scalar],
        wanted: Collection[str],
    ) -> None:
        """Send the adjoint of a sum of products to factors that are tensors of their own then.

        The adjoint of such a factor is one sum of products too, and what is inside of the factor
        comes after it.
        """
        einsum = vertex.computed_einsum
        elements: dict[Scalar, Element] = {}
        for factor in factors:
            name = self.names.take_new(vertex.name)
            elements[factor] = self._emit(name, labels_of(factor), factor, einsum.extent)
        expression = with_elements(reopen(einsum, vertex.inputs), elements)
        self._replace_vertex(vertex, expression, [element.tensor for element in elements.values()])
        names = {element.tensor for element in elements.values()}
        self.send_through(self.known[vertex.name], adjoint, {*wanted, *names})
        for element in elements.values():
            labels = tuple(str(label) for label in element.index)
            adjoint_of_factor = self.adjoint_of(element.tensor, labels)
            if adjoint_of_factor is not None:
                self.send_through(self.known[element.tensor], adjoint_of_factor, wanted)

    def _replace_vertex(self, vertex: Vertex, expression: Scalar, new_names: list[str]) -> None:
        """Give an aggregate another expression, which reads new tensors that come before it."""
        einsum = vertex.computed_einsum
        self._emit(
            vertex.name,
            einsum.output,
            expression,
            einsum.extent,
            einsum.aggregation,
            einsum.aggregated,
        )
        self.known[vertex.name] = replace(self.known[vertex.name], places=vertex.places)
        new_vertices = {name: self.known.pop(name) for name in new_names}
        later = list(self.known.items())
        self.known.clear()
        for name, known in later:
            if name == vertex.name:
                self.known.update(new_vertices)
            self.known[name] = known

    def _send_to_element(self, einsum: EinSum, element: Element, part: Scalar) -> None:
        builder = ContributionBuilder(
            einsum.labels, einsum.extent, self.type_of, self.names.take_new
        )
        target = self.known[element.tensor]
        self.send(element.tensor, builder.build(element, target.bound, part))

    def _share_equal_parts(self, vertex: Vertex, sweep: Sweep) -> None:
        """Compute once what several elements of an elementwise vertex are sent."""
        einsum = vertex.computed_einsum
        parts = list(sweep.found.values())
        shared: dict[Scalar, Scalar] = {}
        for part in parts:
            is_whole = set(labels_of(part)) == set(einsum.labels)
            if parts.count(part) > 1 and is_whole and not is_cheap(part) and part not in shared:
                name = self.names.take_new(PREFIX + vertex.name)
                shared[part] = self._emit(name, einsum.output, part, einsum.extent)
        for element, part in sweep.found.items():
            sweep.found[element] = shared.get(part, part)

    # ---- aggregations ---------------------------------------------------------------------------

    def _send_through_aggregate(
        self,
        vertex: Vertex,
        adjoint: Scalar,
        expression: Scalar,
        sweep: Sweep,
        wanted: Collection[str],
    ) -> None:
        """Send the adjoint of an aggregate that is not a sum."""
        einsum = vertex.computed_einsum
        assert einsum.aggregation is not None
        record = AGGREGATIONS[einsum.aggregation]
        if record.derivative is None:
            what = f"the derivative of {record.name} is not known"
            raise OperationError(what, "an aggregation with a derivative")
        mask: Scalar | None = None
        values = expression
        if einsum.segments is not None:
            assert isinstance(expression, Call)
            mask = expression.args[0]
            values = without_guard(expression.args[1], mask)
        stored: Element | None = None
        if record.is_idempotent and not self._is_reproducible(values):
            stored = self._store_values(vertex, values, mask)
            values = stored

        def new_name() -> str:
            return self.names.take_new(vertex.name)

        def aggregate(name: str, node: Scalar) -> Scalar:
            if mask is not None:
                empty = AGGREGATIONS[name].empty
                assert empty is not None
                node = Call("where", (mask, node, Const(empty)))
            return self._emit(
                new_name(), einsum.output, node, einsum.extent, name, einsum.aggregated
            )

        def for_each_result(node: Scalar) -> Scalar:
            if is_cheap(node):
                return node
            return self._emit(new_name(), einsum.output, node, einsum.extent)

        sent = record.derivative(
            AdjointOfAggregate(
                values,
                Element(vertex.name, einsum.output),
                adjoint,
                vertex.dtype,
                aggregate,
                for_each_result,
                self._conjugate,
            )
        )
        if mask is not None:
            sent = choose(mask, self._as_product(sent, vertex.dtype), ZERO)
        if stored is None:
            sweep.send(values, sent)
            return
        self._send_to_element(einsum, stored, sent)
        labels = tuple(str(label) for label in stored.index)
        adjoint_of_values = self.adjoint_of(stored.tensor, labels)
        if adjoint_of_values is not None:
            self.send_through(self.known[stored.tensor], adjoint_of_values, wanted)

    def _as_product(self, sent: Scalar, dtype: str) -> Scalar:
        """Return where(condition, x, 0) as a product: x is finite for all values in a segment.

        Indices that read x for a segment need no condition on its values then.
        """
        conditions, product = conditions_around(sent)
        for condition in conditions:
            product = times(product, Call(dtype, (condition,)))
        return product

    def _is_reproducible(self, values: Scalar) -> bool:
        """Return whether every kernel computes the same bits, so that they can be compared."""
        if isinstance(values, Element):
            return True
        if DTYPES[np.dtype(self.type_of(values)).name].is_half:
            return False  # rounded where a vertex ends
        for node in walk(values):
            if isinstance(node, Call) and not OPERATIONS[node.op].is_reproducible:
                return False
        return True

    def _store_values(self, vertex: Vertex, values: Scalar, mask: Scalar | None) -> Element:
        """Make what is aggregated a tensor of its own, which the aggregate reads."""
        einsum = vertex.computed_einsum
        used = labels_of(values)
        output = [label for label in einsum.labels if label in used]
        name = self.names.take_new(vertex.name)
        element = self._emit(name, output, values, einsum.extent)
        expression: Scalar = element
        if mask is not None:
            assert einsum.segments is not None
            expression = Call("where", (mask, element, Const(einsum.segments.masked)))
        self._replace_vertex(vertex, expression, [name])
        return element

    def _send_through_scan(
        self, vertex: Vertex, adjoint: Scalar, derivative: ScanDerivative
    ) -> None:
        """Send the adjoint of running aggregates, by scans of the same labels."""
        einsum = vertex.computed_einsum
        scan = einsum.scan
        assert scan is not None
        extent = einsum.extent
        (operand,) = einsum.operands
        labels = tuple(str(label) for label in operand)  # those of the values
        last = Const(extent[scan.scanned] - 1)
        mirrored = {scan.along: minus(last, Index(scan.along))}

        def running(aggregation: str, node: Scalar, masked: Const) -> Scalar:
            values = self._emit(
                self.names.take_new(PREFIX + vertex.name), einsum.output, node, extent
            )
            up_to = Call("<=", (Index(scan.scanned), Index(scan.along)))
            scanned = relabel(values, {scan.along: scan.scanned})
            return self._emit(
                self.names.take_new(PREFIX + vertex.name),
                einsum.output,
                Call("where", (up_to, scanned, masked)),
                extent,
                aggregation,
                (scan.scanned,),
            )

        def from_end(aggregation: str, node: Scalar, masked: Const) -> Scalar:
            backwards = running(aggregation, substituted(node, mirrored, extent), masked)
            return substituted(backwards, mirrored, extent)

        def at(node: Scalar, index: Scalar) -> Scalar:
            return substituted(node, {scan.along: index}, extent)

        if scan.along not in labels_of(adjoint) and einsum.aggregation == "sum":
            count = minus(Const(extent[scan.along]), Index(scan.along))
            sent = times(adjoint, count)
        else:
            sent = derivative(
                AdjointOfScan(
                    relabel(Element(vertex.inputs[0], operand), {scan.scanned: scan.along}),
                    Element(vertex.name, einsum.output),
                    adjoint,
                    Index(scan.along),
                    extent[scan.along],
                    vertex.dtype,
                    running,
                    from_end,
                    at,
                    self._conjugate,
                )
            )
        sent = relabel(sent, {scan.along: scan.scanned})
        self.send(vertex.inputs[0], Contribution(labels, sent, (), extent))
