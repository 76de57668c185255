"""Build graphs for tests, checking that their text reads back, and evaluate them both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from einmpi.graph.eingraph import EinGraph
from einmpi.kernels.reference import evaluate
from einmpi.language.parse import build_graphs, parse_graph, parse_program
from einmpi.language.syntax import Source

Inputs = Mapping[str, Any]  # name → array, or (shape, dtype)


def declared(inputs: Inputs) -> dict[str, tuple[tuple[int, ...], str]]:
    return {
        name: given if isinstance(given, tuple) else (np.shape(given), np.asarray(given).dtype.name)
        for name, given in inputs.items()
    }


def reads_back(graph: EinGraph) -> EinGraph:
    assert parse_graph(str(graph)) == graph, f"not what was printed:\n{graph}"
    return graph


def build(
    text: str,
    inputs: Inputs,
    sizes: Mapping[str, int] | None = None,
    outputs: Sequence[str] | None = None,
) -> EinGraph:
    """The rewritten graph of a program."""
    return reads_back(build_graphs(Source("p", text), declared(inputs), sizes, outputs).rewritten)


def as_written(
    text: str,
    inputs: Inputs,
    sizes: Mapping[str, int] | None = None,
    outputs: Sequence[str] | None = None,
) -> EinGraph:
    """The graph of a program before any rewrite."""
    return reads_back(parse_program(Source("p", text), declared(inputs), sizes or {}, outputs))


def results(
    text: str,
    inputs: Inputs,
    sizes: Mapping[str, int] | None = None,
    outputs: Sequence[str] | None = None,
) -> dict[str, np.ndarray]:
    """The outputs of a program over arrays, by the rewritten graph; the graph as written must give
    the same.
    """
    arrays = {name: np.asarray(array) for name, array in inputs.items()}
    plain = evaluate(as_written(text, arrays, sizes, outputs), arrays)
    found = evaluate(build(text, arrays, sizes, outputs), arrays)
    assert list(found) == list(plain)
    for name, array in found.items():
        assert array.dtype == plain[name].dtype, (
            f"{name}: rewriting made {array.dtype} of {plain[name].dtype}"
        )
        # A rewritten sum adds in another order: a few roundings apart, float16 having 11 bits and
        # float32 24.
        rtol = {"float16": 1e-2, "float32": 1e-5, "complex64": 1e-5}.get(array.dtype.name, 1e-12)
        np.testing.assert_allclose(array, plain[name], rtol=rtol, atol=rtol, err_msg=name)
    return found


def result(text: str, inputs: Inputs, sizes: Mapping[str, int] | None = None) -> np.ndarray:
    """The only output of a program."""
    (array,) = results(text, inputs, sizes).values()
    return array
