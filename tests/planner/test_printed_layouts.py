"""A layout that a plan prints can be prescribed: the plan with it is the same or as good."""

import random
from dataclasses import replace

import pytest
from plan_oracle import random_graph

import einmpi
from einmpi.graph.eingraph import EinGraph
from einmpi.planner.make_plan import make_plan
from einmpi.planner.plan import Options, Plan
from einmpi.planner.strategies import STRATEGIES

RANKS = (1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 16, 18, 22, 24, 30, 36)
EXTENTS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 16, 30, 100)
FREE = [name for name in STRATEGIES if not STRATEGIES[name].roles]
MANY = "abcdefghijkl"  # more labels than a search tries to cut


def ends_of(graph: EinGraph) -> list[str]:
    """The tensors that can be pinned."""
    return [vertex.name for vertex in graph.inputs] + list(graph.outputs)


def printed_parts(plan: Plan) -> dict[str, tuple[int, ...]]:
    found = {}
    for name in ends_of(plan.graph):
        if name in plan.layouts:
            dimensions = range(len(plan.graph[name].bound))
            found[name] = plan.mesh.parts(plan.layouts[name], dimensions)
    return found


def random_options(rng: random.Random, graph: EinGraph, ranks: int) -> Options:
    """Options with any strategy, some resident inputs, and ranks on nodes, even or not."""
    nodes = rng.choice([number for number in range(1, ranks + 1) if ranks % number == 0])
    uneven = rng.random() < 0.2
    resident = tuple(vertex.name for vertex in graph.inputs if rng.random() < 0.6)
    strategy = rng.choice(FREE)
    return Options(strategy=strategy, nodes=nodes, uneven=uneven, resident=resident)


def check_round_trip(graph: EinGraph, ranks: int, options: Options) -> None:
    plan = make_plan(graph, ranks, options)
    pins = printed_parts(plan)
    assert set(pins) >= set(graph.outputs)
    again = make_plan(graph, ranks, replace(options, pins=pins))
    assert printed_parts(again).items() >= pins.items()
    # Arrays that already lie so are read where they are; results are left where they were.
    layouts = plan.layouts
    given = {v.name: layouts[v.name] for v in graph.inputs if v.name in layouts}
    placed = {name: layouts[name] for name in graph.outputs}
    kept = replace(options, mesh=plan.mesh, given=given, placed=placed)
    same = make_plan(graph, ranks, kept)
    assert {name: same.layouts[name] for name in (*given, *placed)} == given | placed


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_accepts_the_layouts_that_it_prints(seed):
    rng = random.Random(seed)
    extents = rng.sample(EXTENTS, 4)
    graph = random_graph(rng, rng.choice((1, 2, 3, 5)), extents)
    ranks = rng.choice(RANKS)
    check_round_trip(graph, ranks, random_options(rng, graph, ranks))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(20))
def test_tensors_of_many_dimensions(seed):
    """The search cuts the longest dimensions only; strategies and pins may ask for others."""
    rng = random.Random(seed)
    labels = MANY[: rng.randint(9, 12)]
    shape = [rng.choice((2, 2, 3, 4)) for _ in labels]
    kept = rng.sample(labels, rng.randint(2, len(labels)))
    inputs = {"X": {"shape": shape, "dtype": "float32", "random": "ones"}}
    text = f"Z[{','.join(kept)}] = sum(X[{','.join(labels)}] * 2)"
    if len(kept) == len(labels):
        text = f"Z[{','.join(kept)}] = X[{','.join(labels)}] * 2"
    job = einmpi.program(text, inputs=inputs)
    ranks = rng.choice((2, 4, 6, 8, 12, 16))
    check_round_trip(job.graph, ranks, random_options(rng, job.graph, ranks))
    shortest = shape.index(min(shape))
    parts = tuple(2 if number == shortest else 1 for number in range(len(shape)))
    pinned = einmpi.plan(job, ranks, pin={"X": parts})
    assert pinned.mesh.parts(pinned.layouts["X"], range(len(shape))) == parts


def test_a_search_from_the_cuts_of_other_strategies_with_many_labels():
    """They cut labels that are not among the longest, which the search has to keep."""
    labels = ",".join(MANY[:9])
    inputs = {"X": {"shape": [2] + [3] * 8, "dtype": "float32", "random": "ones"}}
    job = einmpi.program(f"Z[{labels}] = X[{labels}] * 2", inputs=inputs)
    assert einmpi.plan(job, 16).words_predicted == 0
