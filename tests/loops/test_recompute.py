"""Loops whose steps drop tensors and compute them again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_programs import Step, classifier, perceptron, transformer_block, values_for

import einmpi
from einmpi.api import options_of
from einmpi.comm.threads import ThreadComm, run_threads
from einmpi.errors import InputError
from einmpi.job.loop import StepProgram, make_loop
from einmpi.loops.running import LoopRun
from einmpi.planner.plan import Plan

STEPS = {
    "perceptron": lambda: perceptron(5, 40, 24, "silu"),
    "transformer block": lambda: transformer_block(24, 12, 8, 20),
    "classifier": lambda: classifier(16, 30, 20, 11),
}

JOB = """
program = '''
H[b,j] = silu(sum(X[b,i] * V[i,j]))
G[b,j] = silu(sum(H[b,i] * W[i,j]))
loss = sum(G[b,j]**2)
V_next[u,v] = V[u,v] - 0.01 * grad(loss, V[u,v])
W_next[u,v] = W[u,v] - 0.01 * grad(loss, W[u,v])
'''
[inputs]
X = { shape = [20, 12], random = "normal", seed = 1 }
V = { shape = [12, 12], random = "normal", seed = 2 }
W = { shape = [12, 12], random = "normal", seed = 3 }
[loop]
steps = 4
carry = { V = "V_next", W = "W_next" }
record = ["loss"]
"""


def load(folder: Path, last_line: str) -> einmpi.Job:
    path = folder / "job.toml"
    path.write_text(JOB + last_line)
    return einmpi.load(path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_loop_gives_the_same_bits(tmp_path: Path, ranks: int) -> None:
    plain = load(tmp_path, 'recompute = "none"')
    job = load(tmp_path, 'recompute = ["H"]')
    plan = einmpi.plan(job, ranks)
    assert plan.recomputed is not None
    assert plan.recomputed.tensors == ("H",)
    assert einmpi.plan(plain, ranks).recomputed is None

    def run(comm: ThreadComm) -> list[Any]:
        return [
            einmpi.loop(plain, comm=comm),
            einmpi.loop(job, comm=comm),
            einmpi.loop(plain, comm=comm, recompute=["H"]),
        ]

    for wanted, *others in run_threads(ranks, run):
        for found in others:
            assert found.history["loss"].tobytes() == wanted.history["loss"].tobytes()
            for name in ("V", "W"):
                np.testing.assert_array_equal(found.outputs[name].local, wanted.outputs[name].local)


def test_the_table_of_a_loop_comes_before_that_of_the_plan(tmp_path: Path) -> None:
    job = load(tmp_path, 'recompute = "none"\n[plan]\nrecompute = ["H"]')
    assert einmpi.plan(job, 2).recomputed is None
    job = load(tmp_path, '[plan]\nrecompute = ["H"]')
    assert einmpi.plan(job, 2).recomputed is not None


def test_a_name_that_is_no_intermediate_is_refused(tmp_path: Path) -> None:
    for name, what in (("V", "V is an input"), ("W_next", "W_next is a result"), ("K", "K")):
        with pytest.raises(InputError, match=f"job.toml:17:1: .*{what}"):
            load(tmp_path, f'recompute = ["{name}"]')


def steps_on_threads(step: Step, ranks: int, limit: int | None) -> list[tuple[Any, int, Plan]]:
    """Run three steps; return the history, the measured peak and the plan of each rank."""
    job, carry = step
    program = StepProgram(job.written, job.sizes, job.inputs)
    loop = make_loop(program, lambda *_: "loop", 3, carry, record=["loss"])
    values = values_for(job)

    def run(comm: ThreadComm) -> tuple[Any, int, Plan]:
        loop_run = LoopRun(replace(job, loop=loop), comm, options_of(job, memory=limit))
        loop_run.prepare(values)
        result = loop_run.run()
        return result.history["loss"], loop_run.measured.peak, loop_run.plan

    return run_threads(ranks, run)


SLOW = pytest.mark.slow


@pytest.mark.sampled(3)
@pytest.mark.parametrize("share", [100, 75, 50])
@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=SLOW)])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_stays_within_its_prediction(name: str, ranks: int, share: int) -> None:
    """Whether it computes tensors again, or keeps some on disk, or both."""
    step = STEPS[name]()
    wanted, _, whole = steps_on_threads(step, ranks, None)[0]
    limit = whole.peak * share // 100
    try:
        found = steps_on_threads(step, ranks, limit)
    except InputError as error:
        assert "no plan on" in str(error)
        return
    for history, peak, plan in found:
        assert peak <= plan.peak <= limit
        np.testing.assert_allclose(history, wanted, rtol=1e-9)


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(
    layers=st.integers(1, 5),
    batch=st.integers(1, 30),
    width=st.integers(1, 30),
    function=st.sampled_from(["tanh", "relu", "silu"]),
    ranks=st.integers(1, 6),
)
def test_steps_of_any_perceptron(
    layers: int, batch: int, width: int, function: str, ranks: int
) -> None:
    for _, peak, plan in steps_on_threads(perceptron(layers, batch, width, function), ranks, None):
        assert peak <= plan.peak
