"""Half precision rounded after every operation, as numpy does: casts written into a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from einmpi.graph.arithmetic import compute_types, infer
from einmpi.graph.dtypes import DTYPES, Type
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Arg, Call, Const, Scalar

# Kernels compute half precision in float32 and round where a vertex ends ("float32"), or after
# every operation ("steps").
HALF_MODES = ("float32", "steps")
# Operations whose result is one of the arguments, or exact in every dtype that holds these.
_EXACT = frozenset(
    {"where", "neg", "abs", "sign", "floor", "ceil", "round", "maximum", "minimum", "clip"}
    | {"conj", "real", "imag"}
)


def round_every_step(graph: EinGraph) -> EinGraph:
    """Return the graph with a cast around every operation whose result is in half precision.

    Constants beside half precision are rounded first. An aggregate is still rounded once.
    """
    vertices = []
    for vertex in graph.vertices:
        if vertex.einsum is not None:
            types = [np.dtype(graph[name].dtype) for name in vertex.inputs]
            vertex = _rounded_vertex(vertex, types)
        vertices.append(vertex)
    return replace(graph, vertices=tuple(vertices))


def _rounded_vertex(vertex: Vertex, types: list[np.dtype[np.generic]]) -> Vertex:
    einsum = vertex.computed_einsum

    def leaf(node: Scalar) -> Type:
        assert isinstance(node, Arg)
        return types[node.position]

    return replace(vertex, einsum=replace(einsum, function=_rounded(einsum.function, leaf)))


def _rounded(node: Scalar, leaf: Callable[[Scalar], Type]) -> Scalar:
    """Return an expression with its casts; `leaf` gives the dtype of an operand."""
    if not isinstance(node, Call):
        return node
    kinds = [infer(argument, leaf) for argument in node.args]
    computed = compute_types(node.op, kinds)
    arguments = []
    for argument, dtype in zip(node.args, computed, strict=True):
        is_half = DTYPES[dtype].is_half
        if isinstance(argument, Const) and is_half and not _is_exact(argument, dtype):
            argument = Call(dtype, (argument,))
        arguments.append(_rounded(argument, leaf))
    result = np.dtype(infer(node, leaf)).name
    rounded = Call(node.op, tuple(arguments))
    if OPERATIONS[node.op].is_cast or node.op in _EXACT or not DTYPES[result].is_half:
        return rounded
    return Call(result, (rounded,))


def _is_exact(constant: Const, dtype: str) -> bool:
    value = constant.value
    with np.errstate(over="ignore"):
        stored = float(np.dtype(dtype).type(value.real))
    return stored == value.real or value != value
