"""The gradient of a tensor without dimensions: adjoints from the loss back to parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from einmpi.errors import OperationError, one_of
from einmpi.gradients.adjoints import Adjoints
from einmpi.gradients.contributions import Contribution
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.derivatives.simple import ZERO, is_number
from einmpi.graph.dtypes import kind_of
from einmpi.graph.eingraph import Vertex, make_vertex
from einmpi.graph.einsum import make_einsum, reopen
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.recurrences import arranged, in_groups, until_stable
from einmpi.graph.scalar import Arg, Call, Const, Element, Names, Scalar, with_gathers


def add_gradients(
    known: dict[str, Vertex],
    loss: str,
    parameters: Sequence[str],
    names: Names,
    places: tuple[str, ...] = (),
) -> dict[str, str]:
    """Add the gradients of a loss by tensors to a graph; return the name of each gradient.

    `known` has the vertices, each after those that it reads; new ones are added at the end.
    `names` are those in use. OperationError if there is no such gradient.
    """
    for name in parameters:
        if not _is_continuous(known[name]):
            what = f"the gradient is by {name}, which is {known[name].dtype}"
            raise OperationError(what, "a tensor of floating-point or complex numbers")
    leading = _leading_to(known, loss)
    wanted = _depending_on(known, parameters) & leading
    for name in parameters:
        if name not in wanted or loss not in wanted:
            raise _no_path(known, loss, name, leading)
    adjoints = Adjoints(known, names, places, parameters)
    adjoints.send(loss, Contribution((), Const(1.0), (), {}))
    found: dict[str, str] = {}

    def send_back(vertex: Vertex, declared: str | None = None) -> None:
        if vertex.name not in wanted:
            return
        labels = _labels_of_dimensions(vertex, names)
        if declared is None:
            adjoint = adjoints.adjoint_of(vertex.name, labels)
        else:
            adjoint = Element(declared, labels)
        if adjoint is None:
            return
        if vertex.name in parameters:
            found[vertex.name] = adjoints.as_tensor(vertex.name, labels, adjoint)
        if vertex.einsum is not None and not wanted.isdisjoint(vertex.inputs):
            adjoints.send_through(vertex, adjoint, wanted)

    for part in reversed(in_groups(tuple(known.values()))):
        if isinstance(part, Vertex):
            send_back(part)
            continue
        # Later steps send to the adjoints of earlier ones: these are a recurrence too.
        declared = {}
        for name in part.read_at_other_indices():
            if name in wanted:
                declared[name] = adjoints.declare(name)
        adjoints.along = part.along
        for vertex in reversed(part.vertices):
            send_back(vertex, declared.get(vertex.name))
        adjoints.along = {}
        for name, adjoint_name in declared.items():
            adjoints.define(name, adjoint_name, _labels_of_dimensions(known[name], names))
    for name in parameters:
        if name not in found:  # only products with 0 lead there
            labels = _labels_of_dimensions(known[name], names)
            found[name] = adjoints.as_tensor(name, labels, ZERO)
    order = {vertex.name: vertex for vertex in arranged(tuple(known.values()))}
    known.clear()
    known.update(order)
    return found


def with_gradient(known: Mapping[str, Vertex], loss: str) -> set[str]:
    """Return the tensors to which a derivative leads from a loss, the loss included."""
    found = {loss}
    for _ in until_stable(found):
        for vertex in reversed(list(known.values())):
            if vertex.name in found and vertex.einsum is not None and _is_continuous(vertex):
                found.update(_passed_on(vertex))
    return {name for name in found if _is_continuous(known[name])}


def _is_continuous(vertex: Vertex) -> bool:
    return kind_of(np.dtype(vertex.dtype)) in "fc"


def _labels_of_dimensions(vertex: Vertex, names: Names) -> tuple[str, ...]:
    if vertex.einsum is not None:
        return vertex.einsum.output
    return tuple(names.take_new("i") for _ in vertex.bound)


def _leading_to(known: Mapping[str, Vertex], loss: str) -> set[str]:
    """Return the tensors that a tensor is computed from, and itself."""
    found = {loss}
    for _ in until_stable(found):
        for vertex in reversed(list(known.values())):
            if vertex.name in found:
                found.update(vertex.inputs)
    return found


def _depending_on(known: Mapping[str, Vertex], parameters: Collection[str]) -> set[str]:
    """Return the tensors that change with these ones, and these."""
    found = set(parameters)
    for _ in until_stable(found):
        for vertex in known.values():
            if vertex.einsum is None or not _is_continuous(vertex):
                continue
            if vertex.name not in found and not found.isdisjoint(_passed_on(vertex)):
                found.add(vertex.name)
    return found


def _passed_on(vertex: Vertex) -> set[str]:
    """Return the operands of a vertex that its derivative leads to."""
    einsum = vertex.computed_einsum
    if einsum.matrix is not None:
        return set(vertex.inputs)
    if einsum.aggregation is not None and AGGREGATIONS[einsum.aggregation].is_flat:
        return set()
    found: set[str] = set()
    waiting = [einsum.function]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Arg):
            found.add(vertex.inputs[node.position])
        elif isinstance(node, Call) and not OPERATIONS[node.op].is_flat:
            waiting.extend(node.args[1:] if node.op == "where" else node.args)
    return found


def _no_path(
    known: Mapping[str, Vertex], loss: str, parameter: str, leading: Collection[str]
) -> OperationError:
    with_path = with_gradient(known, loss)
    reached = [name for name in leading if known[name].is_input and name in with_path]
    what = f"{loss} does not depend on {parameter} by anything that has a derivative"
    order = list(known)
    reached.sort(key=order.index)
    expected = one_of(reached) if reached else "a tensor that it is computed from"
    return OperationError(what, expected)


def finished(vertices: Mapping[str, Vertex], has_gradients: bool) -> dict[str, Vertex]:
    """Return the vertices without what has a meaning for gradients only, once all are there.

    These are `stop`, and in a program with gradients relu as where(x <= 0, 0, x), which becomes
    maximum(x, 0) again.
    """
    known: dict[str, Vertex] = {}
    for name, vertex in vertices.items():
        if vertex.einsum is not None:
            einsum = vertex.einsum
            expression = reopen(einsum, vertex.inputs)
            plain = _without_stop(expression)
            if has_gradients:
                plain = _with_relu(plain)
            if plain != expression:
                changed, inputs = make_einsum(
                    einsum.output, plain, einsum.aggregation, einsum.aggregated, einsum.extent
                )
                vertex = make_vertex(name, changed, inputs, vertices, vertex.origin, vertex.places)
        known[name] = vertex
    return known


def _without_stop(node: Scalar) -> Scalar:
    if isinstance(node, Element):
        return Element(node.tensor, with_gathers(node.index, _without_stop))
    if not isinstance(node, Call):
        return node
    if node.op == "stop":
        return _without_stop(node.args[0])
    return Call(node.op, tuple(_without_stop(argument) for argument in node.args))


def _with_relu(node: Scalar) -> Scalar:
    if not isinstance(node, Call):
        return node
    match node:
        case Call("where", (Call("<=", (x, limit)), this, that)) if x == that and limit == this:
            if is_number(limit, 0):
                return Call("maximum", (_with_relu(x), limit))
    return Call(node.op, tuple(_with_relu(argument) for argument in node.args))
