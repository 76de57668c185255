"""Searches that share tables find what they find alone, and do less."""

from __future__ import annotations

import numpy as np
import pytest
from plan_oracle import random_graphs

import einmpi
from einmpi.errors import InputError
from einmpi.graph.eingraph import EinGraph
from einmpi.planner.mesh import Mesh
from einmpi.planner.plan import Options
from einmpi.planner.planning import Planning
from einmpi.planner.solving import elimination as eliminate
from einmpi.planner.solving.solver import SharedTables


def digest(graph: EinGraph, ranks: int, options: Options, tables: SharedTables) -> str:
    """Return the digest of the plan, or why there is none."""
    try:
        return Planning(graph, Mesh(ranks), ranks, options, tables).plan().digest
    except InputError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 6, 16, 64])
def test_plans_are_the_same_with_tables_of_other_graphs(ranks):
    tables = SharedTables()
    for graph in random_graphs(ranks, 12, (3, 5, 8), (4, 6, 8, 30, 64)):
        peak = Planning(graph, Mesh(ranks), ranks, Options()).plan().peak
        for options in (Options(), Options(memory=peak * 3 // 4)):
            alone = digest(graph, ranks, options, SharedTables())
            assert digest(graph, ranks, options, tables) == alone


def test_picked_gathers_are_planned_with_the_tables_of_the_first_plan(monkeypatch):
    """Most of the second form of a graph is as in the first, and is not eliminated again."""
    text = "X0[b,k] = E[y[b],k]\n"
    tensors = {"E": (4096, 64), "y": np.zeros(512, int)}
    for layer in range(6):
        text += f"X{layer + 1}[b,k] = relu(sum[j](X{layer}[b,j] * W{layer}[j,k]))\n"
        tensors[f"W{layer}"] = (64, 64)
    job = einmpi.program(text, **tensors)
    joined = []
    minimum = eliminate._minimum_over_first

    def counted(aligned, shape):
        joined.append(shape)
        return minimum(aligned, shape)

    monkeypatch.setattr(eliminate, "_minimum_over_first", counted)
    mesh = Mesh(8)
    Planning(job.graph, mesh, 8, Options()).plan()
    of_first_form = len(joined)
    joined.clear()
    einmpi.plan(job, 8)
    assert of_first_form < len(joined) < 1.5 * of_first_form
