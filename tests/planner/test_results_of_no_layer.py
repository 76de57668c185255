"""Layers that all read one small result, such as the cosines of positions, still repeat."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import einmpi
from einmpi.graph.eingraph import EinGraph
from einmpi.models.config import NAMED
from einmpi.models.programs import prefill_program
from einmpi.planner.cut_search import CutSearch
from einmpi.planner.make_plan import make_plan
from einmpi.planner.mesh import Mesh
from einmpi.planner.plan import Options
from einmpi.planner.repetition import repeated_layers, small_results_of_no_layer


def prefill(layers: int) -> EinGraph:
    """Return the prefill of LLaMA-7B with fewer layers, weights loaded in every call."""
    program = prefill_program(replace(NAMED["7B"], layers=layers), 8, 1024, "float16")
    tensors = {name: weight.shape for name, weight in program.weights.items()}
    for name, (shape, dtype) in program.inputs.items():
        tensors[name] = np.broadcast_to(np.zeros((), dtype), shape)
    text = program.text
    return einmpi.program(text, dtype="float16", outputs=program.outputs, **tensors).graph


def scaled(layers: int, rows: int) -> EinGraph:
    """Return layers that multiply by a computed matrix with some rows, which all of them read."""
    shapes = {"f": (64,), "X0": (4096, 64)}
    lines = [f"S[t:{rows},k] = cos(f[k] * t)"]
    for layer in range(layers):
        lines.append(f"Y{layer}[i,k] = sum(X{layer}[i,j] * W{layer}[j,k])")
        lines.append(f"X{layer + 1}[i,k] = Y{layer}[i,k] + sum[t](S[t,k] * V{layer}[t])")
        shapes[f"W{layer}"] = (64, 64)
        shapes[f"V{layer}"] = (rows,)
    return einmpi.program("\n".join(lines), dtype="float32", **shapes).graph


def test_layers_repeat_whatever_small_result_they_read():
    graph = scaled(12, 16)
    assert repeated_layers(graph) == {}
    assert small_results_of_no_layer(graph, 16) == ["S"]
    search = CutSearch(graph, Mesh(16), Options())
    assert search.held
    assert len(search.problem.variables) < len(search.with_own_variables.variables) / 2


def test_a_large_result_is_not_held_on_all_ranks():
    graph = scaled(12, 4096)
    assert small_results_of_no_layer(graph, 16) == []
    assert not CutSearch(graph, Mesh(16), Options()).held


def test_nothing_is_held_where_layouts_are_prescribed():
    graph = scaled(12, 16)
    assert not CutSearch(graph, Mesh(16), Options(pins={"W3": (16, 1)})).held
    plan = make_plan(graph, 16, Options(pins={"W3": (16, 1)}))
    assert plan.layouts["W3"] == (0, 0, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "ranks", "most"), [(12, 8, 6.88), (6, 64, 11.5), (6, 1024, 37.2)]
)
def test_words_of_llama_from_a_configuration(layers, ranks, most):
    """G words; without the repetition they were 6.89, 11.7 and 40."""
    graph = prefill(layers)
    plan = make_plan(graph, ranks)
    assert plan.words_predicted <= most * 1e9
    assert plan.words_predicted >= plan.lower_bound
    assert plan.kind == "gap"
