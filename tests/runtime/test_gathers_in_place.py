"""Pieces that follow one another in the target are gathered there, wherever they begin."""

import itertools
from collections import Counter, defaultdict

import numpy as np
import pytest
from paths import ROOT
from random_cuts import random_cuts
from step_kinds import is_exchange

import einmpi
from einmpi.comm.threads import run_threads
from einmpi.planner.make_plan import make_plan
from einmpi.planner.plan import Options
from einmpi.runtime.transfer import Gather, GatherInPlace, messages_of_exchange
from einmpi.schedule.lower import lower

PRODUCT = "Z[i,k] = sum(A[i,j] * B[j,k])"
ROLES = {"batch": ("i",), "hidden": ("k",)}  # k is cut, and all ranks need all of A


def test_every_rank_gathers_in_place():
    """The ranks of a node get different pieces from the other node, each in its place."""
    job = einmpi.program(PRODUCT, roles=ROLES, A=(4096, 4096), B=(4096, 8))
    plan = einmpi.plan(job, 8, nodes=2, strategy="megatron")
    starts = set()
    for rank in range(8):
        exchanges = [step for step in lower(plan, rank).steps if is_exchange(step)]
        of_matrix = [step for step in exchanges if step.vertex == "A"]
        assert of_matrix
        for step in of_matrix:
            messages = messages_of_exchange(step)
            assert isinstance(messages, GatherInPlace)
            assert sum(messages.counts) == messages.place.stop - messages.place.start
            starts.add(messages.place.start)
    assert len(starts) > 1  # not only from the first element on


def test_values_are_those_of_numpy():
    A = np.random.default_rng(1).normal(size=(96, 64))
    B = np.random.default_rng(2).normal(size=(64, 8))

    def on_rank(comm):
        job = einmpi.program(PRODUCT, roles=ROLES, A=A, B=B)
        compiled = einmpi.compile(job, comm=comm, strategy="megatron", shared="off")
        return [
            compiled(A=A, B=B)["Z"].gather() for _ in range(3)
        ]  # then with all bound to its steps

    for found in itertools.chain(*run_threads(8, on_rank, nodes=2)):
        np.testing.assert_allclose(found, A @ B, rtol=1e-12)  # sums of 64 products


def choices_of_groups(plan):
    """Return for each exchange the choices of its members: by the group and how often it met."""
    found = defaultdict(list)
    for rank in range(plan.mesh.ranks):
        meetings = Counter()
        for step in lower(plan, rank).steps:
            if not is_exchange(step) or len(step.group) == 1:
                continue
            messages = messages_of_exchange(step)
            choice = type(messages)
            if isinstance(messages, GatherInPlace):
                choice = (choice, messages.counts, messages.place)
            elif isinstance(messages, Gather):
                choice = (choice, messages.counts)
            found[step.group, meetings[step.group]].append(choice)
            meetings[step.group] += 1
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks, nodes", [(6, 1), (8, 2), (12, 3), (30, 5)])
@pytest.mark.parametrize("name", ["attention", "chain", "convolution", "softmax", "tensor"])
def test_all_members_choose_alike(name, ranks, nodes, monkeypatch):
    """Others would wait for messages that nobody sends."""
    graph = einmpi.load(ROOT / "jobs" / f"{name}.toml").graph
    plans = [make_plan(graph, ranks, Options(nodes=nodes))]
    for seed in range(3):
        random_cuts(monkeypatch, seed)
        plans.append(make_plan(graph, ranks, Options(nodes=nodes)))
    for plan in plans:
        for (group, _), choices in choices_of_groups(plan).items():
            assert choices == choices[:1] * len(group)
