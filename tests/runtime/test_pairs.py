"""Ways to execute a program, two at a time: the values, the bytes and the peak are as ever.

Programs have what the passes look for: halos, fused kernels, updates in place. Settings ask for
shared memory, a limit that makes slots leave memory, transfers in the background. Runs are called
once, again and again, or in a loop.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from kept_results import kept
from schedule_checks import verify
from step_kinds import computed_as

import einmpi
from einmpi.api import options_of
from einmpi.comm.threads import run_threads
from einmpi.compiled.program import Compiled
from einmpi.kernels import halo_parts, index_sets
from einmpi.planner import chains
from einmpi.planner.moving import overlap
from einmpi.runtime.sharing import inputs as shared_inputs
from einmpi.schedule.memory import peak_bytes

N = 48

PROGRAMS = {
    "halos": (
        "V[i,j] = where((i > 0) & (i < n-1), (U[i-1,j] + U[i+1,j]) / 2 + 0.1 * W[i,j], U[i,j])",
        {"U": "V"},
    ),
    "fused": (
        "S[i,t] = sum(U[i,d] * W[t,d])\nP[i,t] = softmax[t](0.1 * S[i,t])\n"
        "V[i,d] = sum(P[i,t] * W[t,d])",
        {"U": "V"},
    ),
    "update": ("G[i,j] = sum(W[b,i] * W[b,j])\nV[i,j] = U[i,j] - 0.01 * G[i,j]", {"U": "V"}),
}
SETTINGS = {
    "shared": {"shared": "auto"},
    "limit": {},  # a share of the memory without one
    "overlap": {"overlap": "auto"},
}
RUNS = ("once", "again", "loop")
STEPS = 3


choose_block = chains.choose_block


def choose_few_rows(members, inner, rows, least_sizes, _):
    return choose_block(members, inner, rows, [1] * len(least_sizes), 3000)


@pytest.fixture(autouse=True)
def small_work_counts_as_large(monkeypatch):
    monkeypatch.setattr(index_sets, "MIN_SPLIT_VALUES", 1)
    monkeypatch.setattr(halo_parts, "MIN_SPLIT_VALUES", 1)
    monkeypatch.setattr(overlap, "PART_UNIT_BYTES", 64)
    monkeypatch.setattr(overlap, "LEAST_PART_OPERATIONS", 1)
    monkeypatch.setattr(shared_inputs, "MIN_SHARED_BYTES", 64)
    monkeypatch.setattr(chains, "MIN_INNER_BYTES", 0)
    monkeypatch.setattr(chains, "choose_block", choose_few_rows)
    kept(halo_parts.split_at_halos).clear()
    yield
    kept(halo_parts.split_at_halos).clear()


def job_of(name):
    program, _ = PROGRAMS[name]
    shapes = {tensor: array.shape for tensor, array in arrays(name).items()}
    return einmpi.program(program, n=N, **shapes)


def arrays(name):
    rng = np.random.default_rng(0)
    columns = 4 if name == "fused" else N  # the scores are larger than what they are made of
    return {tensor: rng.standard_normal((N, columns)) for tensor in "UW"}


def expected(name, steps):
    """The values of a few steps, by numpy."""
    U, W = arrays(name).values()
    for _ in range(steps):
        if name == "halos":
            V = U.copy()
            V[1:-1] = (U[:-2] + U[2:]) / 2 + 0.1 * W[1:-1]
        elif name == "fused":
            S = 0.1 * U @ W.T
            P = np.exp(S - S.max(axis=1, keepdims=True))
            V = P / P.sum(axis=1, keepdims=True) @ W
        else:
            V = U - 0.01 * W.T @ W
        U = V
    return U


def with_settings(job, names, ranks, nodes):
    settings = {}
    for name in names:
        settings.update(SETTINGS[name])
    changed = replace(job, **{"shared": "off", "overlap": "off", **settings})
    if "limit" in names:
        share = 0.9 if changed.graph["V"].computed_einsum.is_elementwise else 0.8
        without = einmpi.plan(changed, ranks, nodes=nodes)
        changed = replace(changed, memory=int(share * without.peak))
    return changed


def run_calls(name, job, comm, calls):
    compiled = Compiled(job, comm, options_of(job))
    for _ in range(calls):
        given = dict(arrays(name))
        if name == "halos":  # of an array that every rank has, no halo is sent
            given["U"] = einmpi.DistArray.from_global(given["U"], comm=comm)
        found = compiled(given)["V"].gather()
        ((plan, schedule),) = compiled.ready.values()
        measured = compiled.measured
        assert measured.peak <= peak_bytes(schedule) <= plan.peak
    return found, measured.received, plan, schedule


@pytest.mark.sampled(7)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("names", [*itertools.combinations(SETTINGS, 2), ()], ids="-".join)
@pytest.mark.parametrize("name", PROGRAMS)
def test_pairs(name, names, run):
    ranks, nodes = 4, 2
    job = with_settings(job_of(name), names, ranks, nodes)
    if run == "loop":
        carry = PROGRAMS[name][1]

        def on_rank(comm):
            done = einmpi.loop(job, arrays(name), comm, carry=carry, steps=STEPS)
            return done.outputs["U"].gather()

        for found in run_threads(ranks, on_rank, nodes=nodes, limit=60):
            # Sums of 48 products in another order; the softmax shrinks what differs.
            np.testing.assert_allclose(found, expected(name, STEPS), rtol=1e-10, atol=1e-10)
        return
    calls = 1 if run == "once" else 4
    results = run_threads(ranks, lambda comm: run_calls(name, job, comm, calls), 60, nodes)
    plan = results[0][2]
    assert sum(received for _, received, _, _ in results) == plan.bytes_predicted
    for found, _, _, _ in results:
        np.testing.assert_allclose(found, expected(name, 1), rtol=1e-10, atol=1e-10)
    verify([schedule for _, _, _, schedule in results])


def test_the_programs_have_what_passes_look_for():
    kinds = {}
    for name in PROGRAMS:
        job = with_settings(job_of(name), (), 4, 1)
        results = run_threads(4, lambda comm, name=name, job=job: run_calls(name, job, comm, 2))
        kinds[name] = {
            computed_as(step) for _, _, _, schedule in results for step in schedule.steps
        }
    assert "stencil" in kinds["halos"]
    assert "memory" in kinds["fused"]
