"""Graphs evaluated by JAX, whose own derivatives are the reference for those of einmpi."""

from __future__ import annotations

import os

# Graphs are small and run once: compiling them takes longer than anything else.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import erf

from einmpi.graph.eingraph import EinGraph
from einmpi.graph.scalar import Arg, Call, Const, Index

jax.config.update("jax_enable_x64", True)

OPERATIONS = {
    "+": jnp.add,
    "-": jnp.subtract,
    "*": jnp.multiply,
    "/": jnp.true_divide,
    "//": jnp.floor_divide,
    "%": jnp.remainder,
    "**": jnp.power,
    "neg": jnp.negative,
    "~": jnp.invert,
    "&": jnp.bitwise_and,
    "|": jnp.bitwise_or,
    "<": jnp.less,
    "<=": jnp.less_equal,
    ">": jnp.greater,
    ">=": jnp.greater_equal,
    "==": jnp.equal,
    "!=": jnp.not_equal,
    "where": lambda c, x, y: jnp.where(c, x, y),
    "rsqrt": lambda x: 1 / jnp.sqrt(x),
    "sigmoid": jax.nn.sigmoid,
    "erf": erf,
    "round": jnp.rint,
    "clip": lambda x, low, high: jnp.minimum(jnp.maximum(x, low), high),
    "bool": lambda x: jnp.asarray(x).astype(bool),
}
AGGREGATIONS = {
    "sum": jnp.sum,
    "prod": jnp.prod,
    "max": jnp.max,
    "min": jnp.min,
    "any": jnp.any,
    "all": jnp.all,
}


def _operation(name):
    if name in OPERATIONS:
        return OPERATIONS[name]
    try:
        dtype = np.dtype(name)
    except TypeError:
        return getattr(jnp, name)
    return lambda x: jnp.asarray(x).astype(dtype)


def evaluate(graph: EinGraph, inputs):
    """All tensors of a graph, by broadcasting over the labels of each vertex."""
    tensors = {vertex.name: inputs[vertex.name] for vertex in graph.inputs}
    for vertex in graph.computed:
        tensors[vertex.name] = _vertex(vertex, tensors)
    return tensors


def _vertex(vertex, tensors):
    einsum = vertex.einsum
    labels = einsum.labels
    extent = einsum.extent
    counts = {}
    for number, label in enumerate(labels):
        shape = [1] * len(labels)
        shape[number] = extent[label]
        counts[label] = np.arange(extent[label]).reshape(shape)
    elements = []

    def value(node):
        if isinstance(node, Const):
            return node.value
        if isinstance(node, Index):
            return counts[node.label]
        if isinstance(node, Arg):
            return elements[node.position]
        assert isinstance(node, Call)
        return _operation(node.op)(*map(value, node.args))

    for tensor, index in zip(vertex.inputs, einsum.operands, strict=True):
        entries = [counts[entry] if isinstance(entry, str) else value(entry) for entry in index]
        elements.append(tensors[tensor][tuple(entries)] if entries else tensors[tensor])
    shape = tuple(extent[label] for label in labels)
    result = jnp.broadcast_to(value(einsum.function), shape)
    if einsum.aggregation is not None:
        axes = tuple(range(len(einsum.output), len(labels)))
        result = AGGREGATIONS[einsum.aggregation](result, axis=axes)
    return result.astype(vertex.dtype)


def gradients(graph: EinGraph, loss, parameters, inputs):
    """The loss and its gradients by inputs."""

    def loss_of(values):
        return evaluate(graph, {**inputs, **values})[loss]

    inputs = {name: jnp.asarray(array) for name, array in inputs.items()}
    chosen = {name: jnp.asarray(inputs[name]) for name in parameters}
    value, found = jax.jit(jax.value_and_grad(loss_of))(chosen)
    return np.asarray(value), {name: np.asarray(array) for name, array in found.items()}
