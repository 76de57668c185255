"""Rows of certificates.json: how many words a plan may move, and how high its lower bound must be.

A row is a program, an example job, layers of LLaMA-7B with weights that stay on the ranks, or the
random graph of `python -m bench planning` with so many vertices and a seed.
"""

import json
from functools import cache
from pathlib import Path

import pytest
from paths import JOBS
from target_graphs import llama

import einmpi
from bench.paper.planning import random_graph
from einmpi.api import options_of
from einmpi.planner.make_plan import make_plan
from einmpi.planner.plan import Options

ROWS = json.loads((Path(__file__).parent / "certificates.json").read_text())
BOTH = ("words", "bound")
# What holds for the rows of each kind; where a row has a line of its own, for that row.
HOLDS = {
    "stencil5": BOTH,
    "stencil9": BOTH,
    "stencil5-periodic": BOTH,
    "stencil7": BOTH,
    "conv2d": BOTH,
    "heat": BOTH,
    "syrk": BOTH,
    "llama-resident": BOTH,
    "llama-memory": BOTH,
    "random": BOTH,
    "network": BOTH,
    "many-ranks": BOTH,
}
# Seconds each; others of their kinds are fast.
SLOW = (
    "llama-memory-64",
    "llama-memory-65",
    "llama-memory-66",
    "llama-resident-54",
    "random-61",
    "random-62",
    "random-63",
    "syrk-32",
    "syrk-34",
)


def holds(row):
    return HOLDS.get(row["id"], HOLDS[row["kind"]])


@cache
def source(row_id):
    """The graph of a row, and the inputs that stay on the ranks."""
    row = next(row for row in ROWS if row["id"] == row_id)
    if "llama" in row:
        return llama(*row["llama"])
    if "random" in row:
        return random_graph(*row["random"]), ()
    if "job" in row:
        job = einmpi.load(JOBS / f"{row['job']}.toml", **row.get("sizes", {}))
        return job.graph, options_of(job).resident
    shapes = {name: tuple(shape) for name, shape in row["shapes"].items()}
    return einmpi.program(row["program"], **shapes).graph, ()


def operations_in_order(graph):
    """Sums and products: opt_einsum counts both of them where a label is summed."""
    count = 0
    for vertex in graph.computed:
        einsum = vertex.computed_einsum
        count += einsum.calls() * (2 if einsum.aggregated else 1)
    return count


CASES = []
for row in ROWS:
    if holds(row):
        marks = [pytest.mark.slow] if row["id"] in SLOW else []
        CASES.append(pytest.param(row, id=row["id"], marks=marks))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("row", CASES)
def test_a_plan_is_as_good_as_its_row_says(row):
    graph, resident = source(row["id"])
    options = Options(memory=row.get("memory"), resident=resident)
    plan = make_plan(graph, row["ranks"], options)
    assert plan.lower_bound <= plan.words_predicted
    if "words" in holds(row):
        assert plan.words_predicted <= row["words_at_most"]
    if "bound" in holds(row):
        assert plan.lower_bound >= row["bound_at_least"]
    if "operations_at_most" in row:
        assert operations_in_order(graph) <= row["operations_at_most"]


def test_there_is_a_row_of_every_kind():
    kinds = {row["kind"] for row in ROWS}
    assert len(ROWS) == 70 and kinds <= HOLDS.keys() <= kinds | {row["id"] for row in ROWS}
