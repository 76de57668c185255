"""The adjoints of tensors, sent from every vertex to its operands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from einmpi.errors import OperationError
from einmpi.gradients.adjoint_tensors import PREFIX, AdjointTensors, Sweep
from einmpi.gradients.contributions import (
    Contribution,
    ContributionBuilder,
    conditions_around,
    is_cheap,
    substituted,
)
from einmpi.gradients.matrices import send_through_matrices
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.derivatives.aggregations import AdjointOfAggregate
from einmpi.graph.derivatives.simple import (
    ZERO,
    AdjointOfScan,
    ScanDerivative,
    choose,
    is_number,
    minus,
    times,
)
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.eingraph import Vertex
from einmpi.graph.einsum import EinSum, inside_segments, reopen
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.recurrences import unclamped
from einmpi.graph.scalar import (
    Call,
    Const,
    Element,
    Index,
    Names,
    Scalar,
    labels_of,
    relabel,
    walk,
    with_gathers,
)
from einmpi.graph.segments import without_guard

# ---- factors -------------------------------------------------------------------------------------
#
# Factors of products under a sum that are computed, and not just read.


def computed_factors(
    expression: Scalar, labels: Collection[str], is_wanted: Callable[[Scalar], bool]
) -> list[Scalar]:
    """Return the factors of a product that should become tensors before it is differentiated.

    These are wanted, are more than an element and a number, and have not all of the labels. In
    Σ[j](tanh(A[i,j]) × B[j,k]) the derivative of tanh would be computed for every k, inside of a
    sum that is no matrix product any more.
    """
    found: list[Scalar] = []
    for factor in _parts(expression, set(labels)):
        own = set(labels_of(factor))
        is_repeated = bool(own) and own < set(labels)
        if is_repeated and not is_cheap(factor) and is_wanted(factor) and factor not in found:
            found.append(factor)
    return found


def _parts(node: Scalar, labels: set[str]) -> list[Scalar]:
    """Return a product as few factors.

    Factors stay together if one of them has all of their labels, but not those of the whole:
    x[b,f] × tanh(x[b,f]) is one factor of a product with W[f,a].
    """
    own = set(labels_of(node))
    factors = _factors(node)
    if own < labels and any(set(labels_of(factor)) == own for factor in factors):
        return [node]
    match node:
        case Call("*", (left, right)):
            return _parts(left, labels) + _parts(right, labels)
        case Call("neg", (inner,)):
            return _parts(inner, labels)
        case Call("/", (dividend, divisor)) if not labels_of(divisor):
            return _parts(dividend, labels)
    return [node]


def _factors(node: Scalar) -> list[Scalar]:
    """Return all factors of a product; an expression that is none is its only factor."""
    match node:
        case Call("*", (left, right)):
            return _factors(left) + _factors(right)
        case Call("neg", (inner,)):
            return _factors(inner)
    return [node]


def with_elements(node: Scalar, elements: Mapping[Scalar, Element]) -> Scalar:
    """Return a product with elements in the place of factors."""
    if node in elements:
        return elements[node]
    if isinstance(node, Call) and node.op in ("*", "neg", "/"):
        return Call(node.op, tuple(with_elements(argument, elements) for argument in node.args))
    return node


# ---- softmax -------------------------------------------------------------------------------------
#
# Tensors that are a softmax: exp(x) over its own sum, whose derivative needs nothing else.


@dataclass(frozen=True)
class Softmax:
    """A tensor that is exp(x) over its own sum.

    Attributes
    ----------
    exponent
        x, over the labels of the tensor.
    normalised
        The labels of the sum.
    numerator, total
        The tensors with exp(x) and with its sum.
    """

    exponent: Scalar
    normalised: tuple[str, ...]
    numerator: str
    total: str

    @property
    def bypassed(self) -> tuple[str, str]:
        """The tensors that no part of the adjoint goes through."""
        return self.numerator, self.total


def find_softmax(vertex: Vertex, known: Mapping[str, Vertex]) -> Softmax | None:
    """Return a vertex as a softmax, None if it is none."""
    einsum = vertex.computed_einsum
    if not einsum.is_elementwise:
        return None
    match reopen(einsum, vertex.inputs):
        case Call("*", (Element() as numerator, Call("/", (one, Element() as total)))):
            if not is_number(one, 1):
                return None
        case Call("/", (Element() as numerator, Element() as total)):
            pass
        case _:
            return None
    if sorted(map(str, numerator.index)) != sorted(einsum.output):
        return None
    exponential = known[numerator.tensor].einsum
    if exponential is None or not exponential.is_elementwise:
        return None
    exponentials = reopen(exponential, known[numerator.tensor].inputs)
    if not isinstance(exponentials, Call) or exponentials.op != "exp":
        return None
    summed = known[total.tensor].einsum
    if summed is None or summed.aggregation != "sum" or summed.scan is not None:
        return None
    if summed.segments is not None or known[total.tensor].inputs != (numerator.tensor,):
        return None
    # The same element of exp(x) above and below, with labels named as in the quotient.
    read = reopen(summed, (numerator.tensor,))
    if not isinstance(read, Element) or set(read.index) != set(summed.labels):
        return None
    if len(set(read.index)) != len(read.index):
        return None
    own_label = dict(zip(map(str, read.index), map(str, numerator.index), strict=True))
    if tuple(own_label[label] for label in summed.output) != total.index:
        return None
    normalised = tuple(own_label[label] for label in summed.aggregated)
    exponent_label = dict(zip(exponential.output, map(str, numerator.index), strict=True))
    exponent = exponentials.args[0]
    if not set(labels_of(exponent)) <= set(exponent_label):
        return None
    return Softmax(relabel(exponent, exponent_label), normalised, numerator.tensor, total.tensor)


class Adjoints(AdjointTensors):
    """Adjoint tensors, and how each kind of vertex sends its adjoint to its operands.

    The adjoints of `parameters` are asked for in any case.
    """

    def __init__(
        self,
        known: dict[str, Vertex],
        names: Names,
        places: tuple[str, ...],
        parameters: Collection[str] = (),
    ) -> None:
        super().__init__(known, names, places)
        self.parameters = frozenset(parameters)
        self.along: Mapping[str, int] = {}  # of a group that sends to itself (graph/recurrences.py)

    # ---- one vertex -----------------------------------------------------------------------------

    def send_through(self, vertex: Vertex, adjoint: Scalar, wanted: Collection[str]) -> None:
        """Send the adjoint of a computed tensor to those of its operands that are wanted."""
        einsum = vertex.computed_einsum
        entries = [entry for index in einsum.operands for entry in index]
        if einsum.calls() == 0 and not all(isinstance(entry, str) for entry in entries):
            return  # nothing is read, and arithmetic on labels without values cannot be solved
        if einsum.matrix is not None:
            send_through_matrices(self, vertex, adjoint, wanted)
            return
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
        mean = self.emit(
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
            elements[factor] = self.emit(name, labels_of(factor), factor, einsum.extent)
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
        self.emit(
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
        along = self.along.get(element.tensor)
        if along is not None:
            # A step reads another one under a condition: where it fails, there is nothing to send.
            before, after = element.index[:along], element.index[along + 1 :]
            entries = with_gathers(element.index[along : along + 1], unclamped)
            element = Element(element.tensor, before + entries + after)
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
                shared[part] = self.emit(name, einsum.output, part, einsum.extent)
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
        record = AGGREGATIONS[einsum.required_aggregation]
        if record.derivative is None:
            what = f"the derivative of {record.name} is not known"
            raise OperationError(what, "an aggregation with a derivative")
        mask: Scalar | None = None
        values = expression
        if einsum.segments is not None:
            assert isinstance(expression, Call)
            mask = expression.args[0]
            inside = inside_segments(einsum, vertex.inputs)
            values = without_guard(expression.args[1], mask, inside)
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
            return self.emit(
                new_name(), einsum.output, node, einsum.extent, name, einsum.aggregated
            )

        def for_each_result(node: Scalar) -> Scalar:
            if is_cheap(node):
                return node
            return self.emit(new_name(), einsum.output, node, einsum.extent)

        sent = record.derivative(
            AdjointOfAggregate(
                values,
                Element(vertex.name, einsum.output),
                adjoint,
                vertex.dtype,
                aggregate,
                for_each_result,
                self.conjugate,
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
        element = self.emit(name, output, values, einsum.extent)
        expression: Scalar = element
        if mask is not None:
            expression = Call("where", (mask, element, Const(einsum.required_segments.masked)))
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
            values = self.emit(
                self.names.take_new(PREFIX + vertex.name), einsum.output, node, extent
            )
            up_to = Call("<=", (Index(scan.scanned), Index(scan.along)))
            scanned = relabel(values, {scan.along: scan.scanned})
            return self.emit(
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
                    self.conjugate,
                )
            )
        sent = relabel(sent, {scan.along: scan.scanned})
        self.send(vertex.inputs[0], Contribution(labels, sent, (), extent))
