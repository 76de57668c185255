"""Mixtures of cuts: their costs, and the steps that they make."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from einmpi.planner.cut_search import CutSearch
from einmpi.planner.memory import bytes_of_blocks
from einmpi.planner.mesh import Mesh
from einmpi.planner.plan import Options
from einmpi.planner.saving_memory import mixtures as module
from einmpi.planner.saving_memory.mixtures import Mixtures
from tests.planner.test_memory_limits import llama, random_program


def mixtures_of(graph, resident, ranks: int) -> Mixtures:
    search = CutSearch(graph, Mesh(ranks), Options(resident=resident))
    return Mixtures(search)


def costs_of_states(mixtures: Mixtures, states) -> tuple[int, int]:
    """Return what states cost and their resident bytes, added up edge by edge."""
    problem = mixtures.problem
    cost = 0
    for edge in problem.edges:
        source = None if edge.source is None else states[edge.source]
        cost += mixtures.solver.edge_cost(edge, source, states[edge.target])
    resident_bytes = 0
    for blocks, state in zip(problem.permanent, states, strict=True):
        resident_bytes += bytes_of_blocks(mixtures.search.mesh, blocks, state)
    return cost, resident_bytes


@pytest.mark.parametrize("most_starts", [2, 256])
@pytest.mark.parametrize("seed", range(12))
def test_costs_and_bytes_are_those_of_the_states(seed, most_starts, monkeypatch):
    monkeypatch.setattr(module, "MOST_STARTS", most_starts)
    graph, resident = random_program(seed)
    mixtures = mixtures_of(graph, resident, 8)
    for cheap, dear in itertools.combinations(mixtures.priced, 2):
        found = mixtures.between(cheap, dear)
        for mixture in found:
            assert cheap.cost < mixture.cost < dear.cost
            states = mixtures.states(mixture)
            assert costs_of_states(mixtures, states) == (mixture.cost, mixture.resident_bytes)
        for first, second in itertools.pairwise(found):
            assert first.cost < second.cost
            assert first.resident_bytes > second.resident_bytes


def test_random_programs_have_mixtures():
    """So that the test above compares something."""
    count = 0
    for seed in range(12):
        graph, resident = random_program(seed)
        mixtures = mixtures_of(graph, resident, 8)
        for cheap, dear in itertools.combinations(mixtures.priced, 2):
            count += len(mixtures.between(cheap, dear))
    assert count > 20


@pytest.mark.slow
def test_mixtures_of_layers_make_steps_of_less_than_a_tenth():
    """Where weights are what fills memory, and not next to nothing moves."""
    graph, weights = llama(8)
    mixtures = mixtures_of(graph, weights, 8)
    priced = mixtures.priced
    points = [(each.cost, each.resident_bytes) for each in priced]
    for cheap, dear in itertools.pairwise(priced):
        for mixture in mixtures.between(cheap, dear):
            points.append((mixture.cost, mixture.resident_bytes))
    points.sort()
    least = np.minimum.accumulate([nbytes for _, nbytes in points])
    useful = [points[0]]
    for (cost, nbytes), smallest in zip(points[1:], least[:-1], strict=True):
        if nbytes < smallest:
            useful.append((cost, nbytes))
    most = useful[-1][0]
    steps = [
        later / cost for (cost, _), (later, _) in itertools.pairwise(useful) if cost > most / 8
    ]
    assert len(steps) > 40
    assert max(steps) < 1.1
