"""The condition of a loop, prepared once: it is checked after every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.graph.eingraph import EinGraph
from einmpi.kernels.ufuncs import Evaluate, prepare_expression
from einmpi.loops.reference import condition_holds

Array: TypeAlias = npt.NDArray[Any]


class _Expression(NamedTuple):
    """A vertex of the condition as a function of numbers that are known before."""

    name: str
    dtype: np.dtype[Any]
    operands: tuple[str, ...]
    evaluate: Evaluate


class Condition:
    """A condition over numbers. What is not an expression of numbers is left to the reference."""

    def __init__(self, graph: EinGraph) -> None:
        self.graph = graph
        self.expressions: list[_Expression] | None = _expressions(graph)

    def holds(self, values: Mapping[str, Array]) -> bool:
        """Return whether the condition holds, given the values that it reads."""
        if self.expressions is None:
            return condition_holds(self.graph, values)
        known: dict[str, Any] = dict(values)
        with np.errstate(all="ignore"):
            for name, dtype, operands, evaluate in self.expressions:
                numbers = [known[operand] for operand in operands]
                known[name] = np.asarray(evaluate(numbers)).astype(dtype)
        return bool(known[self.graph.outputs[0]])


def _expressions(graph: EinGraph) -> list[_Expression] | None:
    """Return the computed vertices as expressions; None if one of them is anything else."""
    found = []
    for vertex in graph.vertices:
        einsum = vertex.einsum
        if einsum is None:
            continue
        has_dimensions = bool(einsum.labels) or any(einsum.operands)
        if has_dimensions or not einsum.is_elementwise or einsum.scan is not None:
            return None
        dtypes = [np.dtype(graph[name].dtype) for name in vertex.inputs]
        evaluate = prepare_expression(einsum.function, dtypes, ())
        if evaluate is None:
            return None
        found.append(_Expression(vertex.name, np.dtype(vertex.dtype), vertex.inputs, evaluate))
    return found
