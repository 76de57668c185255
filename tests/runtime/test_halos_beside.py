"""Halos that stay beside the block: the same bits and bytes as with a copy of the block."""

from __future__ import annotations

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
from einmpi.job.loop import StepProgram, make_loop
from einmpi.kernels import halo_parts, index_sets
from einmpi.loops.running import LoopRun
from einmpi.runtime.cpu.backend import NumpyBackend
from einmpi.runtime.kept_memory import keep_memory
from einmpi.schedule import passes
from einmpi.schedule.lower import lower
from einmpi.schedule.memory import peak_bytes
from einmpi.schedule.passes import fuse
from einmpi.schedule.steps import Spill, Transfer

RANKS = [2, 3, 4, 6, 9]
HEAT = """
V[i,j] = where((i > 0) & (i < n-1) & (j > 0) & (j < n-1),
               (U[i-1,j] + U[i+1,j] + U[i,j-1] + U[i,j+1]) / 4, where(i == 0, 100.0, U[i,j]))
"""
PROGRAMS = {
    "heat": HEAT,
    "other_operands": "V[i:n-2,j:n-1] = (U[i,j+1] - U[i+2,j]) * W[i,j] + W[i+2,j+1] + c[j]",
    "corners": "V[i:n-3,j:n-3] = U[i,j] + U[i+3,j+3] * U[i+1,j+2] + U[i+3,j] + U[i,j+3]",
    "plain_and_shifted": "V[i:n-2,j:n-1] = U[i,j] + maximum(U[i+1,j], U[i+2,j+1])",
    "far": "V[i:n-11,j:n-7] = U[i,j] - U[i+11,j+7]",
    "backwards": "V[i:n-1,j:n-2] = U[n-1-i,j] + U[n-2-i,n-1-j] + U[n-1-i,n-2-j]",
    "strided": "V[i:n//2-1,j:n-1] = U[2*i,j] + U[2*i+1,j+1] + U[2*i+3,j]",
    "numbers": "V[i:n-1,j:n-1] = where(U[i+1,j] > 0.1 * i, U[i+1,j+1], U[i,j] + j)",
    "long": "V[i:n-1,j:n//4] = U[i,j] + U[i+1,j+1]",
}

# Where the halo is larger than the block, or the block than what is needed of it.
COPIED = ["far", "backwards", "long"]


@pytest.fixture(autouse=True)
def small_work_counts_as_large(monkeypatch):
    monkeypatch.setattr(index_sets, "MIN_SPLIT_VALUES", 1)
    monkeypatch.setattr(halo_parts, "MIN_SPLIT_VALUES", 1)
    kept(halo_parts.split_at_halos).clear()
    yield
    kept(halo_parts.split_at_halos).clear()


@pytest.fixture
def without_halos_beside(monkeypatch):
    """Return a function that makes all further runs copy blocks."""
    return lambda: monkeypatch.setattr(passes, "with_halo_buffers", lambda schedule, _: schedule)


def has_halo_buffers(step):
    return isinstance(step, Transfer) and bool(step.arriving)


def load(tmp_path, program, n=40):
    text = f'program = """{program}"""\n[sizes]\nn = {n}\n[inputs]\n'
    for seed, name in enumerate("UW"):
        if f"{name}[" in program:
            text += f'{name} = {{ shape = ["n", "n"], random = "normal", seed = {seed} }}\n'
    if "c[" in program:
        text += 'c = { shape = ["n"], random = "uniform", seed = 9 }\n'
    (tmp_path / "job.toml").write_text(text)
    return einmpi.load(tmp_path / "job.toml")


def on_ranks(job, ranks, nodes=1):
    """Return the result, the bytes that each rank receives, its peak, and its schedule."""

    def on_rank(comm):
        compiled = Compiled(job, comm, options_of(job))
        result = compiled({})["V"].gather()
        ((plan, schedule),) = compiled.ready.values()
        measured = compiled.measured
        assert measured.peak <= peak_bytes(schedule) <= peak_bytes(lower(plan, comm.rank))
        assert peak_bytes(schedule) <= plan.peak
        return result, measured.received, plan, schedule

    return run_threads(ranks, on_rank, nodes=nodes)


@pytest.mark.sampled(3, always=["heat-3"])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_same_bits_and_bytes_as_with_a_copy(tmp_path, without_halos_beside, name, ranks):
    job = load(tmp_path, PROGRAMS[name])
    beside = on_ranks(job, ranks)
    without_halos_beside()
    copied = on_ranks(job, ranks)
    for (result, received, _, _), (expected, expected_bytes, _, _) in zip(
        beside, copied, strict=True
    ):
        assert np.array_equal(result, expected)
        assert received == expected_bytes
    plan = beside[0][2]
    assert sum(received for _, received, _, _ in beside) == plan.bytes_predicted
    schedules = [schedule for _, _, _, schedule in beside]
    verify(schedules)
    if name not in COPIED:
        steps = [step for schedule in schedules for step in schedule.steps]
        assert any(computed_as(step) == "stencil" for step in steps)
        assert any(map(has_halo_buffers, steps))


def test_the_heat_equation_against_numpy(tmp_path):
    job = load(tmp_path, HEAT)
    U = einmpi.run(load(tmp_path, "V[i,j] = U[i,j]"))["V"].gather()
    expected = U.copy()
    expected[1:-1, 1:-1] = (U[:-2, 1:-1] + U[2:, 1:-1] + U[1:-1, :-2] + U[1:-1, 2:]) / 4
    expected[0] = 100.0
    for ranks, nodes in ((6, 1), (7, 2)):  # with uneven nodes, ranks count what comes from others
        for result, *_ in on_ranks(job, ranks, nodes):
            assert np.array_equal(result, expected)


@pytest.mark.parametrize(
    "program",
    [
        "V[i:n-1,j:n-1] = exp(U[i,j] + U[i+1,j+1])",  # numpy might round another way
        "V[i:n-2,j:n-2] = sum[k:3](U[i+k,j+k])",  # the order of a sum could change
        "V[i:n-2,k:3,j:n-2] = U[i+k,j+k]",  # windows are in two places at once
    ],
)
def test_kernels_that_need_a_copy(tmp_path, program):
    job = load(tmp_path, program)
    for _, _, plan, schedule in on_ranks(job, 2):
        assert plan.bytes_predicted > 0
        assert not any(map(has_halo_buffers, schedule.steps))
        assert not any(computed_as(step) == "stencil" for step in schedule.steps)


@pytest.mark.parametrize("ranks", [2, 4, 9, 16])
def test_every_rank_of_a_plate_computes_in_one_pass(ranks):
    """Also a rank without an edge of the plate, and one whose memory is full while it computes."""
    job = einmpi.load("jobs/plate.toml", n=4000)
    plan = einmpi.plan(job, ranks)
    for rank in range(ranks):
        schedule = fuse(lower(plan, rank), plan, NumpyBackend().fusions)
        assert peak_bytes(schedule) <= plan.peak
        assert sum(map(has_halo_buffers, schedule.steps)) == 1
        (computed,) = [step for step in schedule.steps if step.kernels]
        assert [kernel.vertex for kernel in computed.kernels] == ["V", "change"]
        kept = keep_memory(schedule)
        for number, step in enumerate(schedule.steps):
            if isinstance(step, Transfer):
                assert number in kept.received
                for slot in filter(None, step.arriving):  # it is where its message arrives
                    assert np.shares_memory(kept.slots[slot.name], kept.received[number])


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 9])
def test_loops_whose_carried_tensor_has_a_halo(tmp_path, ranks, watched):
    """Without `watched`, the plan lets V be written over U, because it expects a copy of U."""
    program = HEAT + "change = max(abs(V[i,j] - U[i,j]))\n" * watched
    job = load(tmp_path, program)
    written = StepProgram(job.written, job.sizes, job.inputs)
    record = ["change"] if watched else []
    loop = make_loop(written, lambda *_: "loop", 7, {"U": "V"}, None, record)
    rng = np.random.default_rng(0)
    first = rng.normal(size=(40, 40))
    given = first.copy()

    def on_rank(comm):
        run = LoopRun(replace(job, loop=loop), comm, options_of(job))
        run.prepare({"U": given})
        result = run.run()
        assert run.measured.peak <= run.plan.peak
        is_sweep = [computed_as(step) == "stencil" for step in run.schedule.steps]
        return result.outputs["U"].gather(), result.history, any(is_sweep)

    expected = first
    changes = []
    for _ in range(7):
        U = expected
        expected = U.copy()
        expected[1:-1, 1:-1] = (U[:-2, 1:-1] + U[2:, 1:-1] + U[1:-1, :-2] + U[1:-1, 2:]) / 4
        expected[0] = 100.0
        changes.append(np.abs(expected - U).max())
    for found, history, has_sweep in run_threads(ranks, on_rank):
        assert np.array_equal(found, expected)
        assert has_sweep == (ranks > 1)
        if watched:
            assert history["change"].tolist() == changes
    assert np.array_equal(given, first)


def test_the_block_is_not_copied(tmp_path):
    """On the schedule: the halo takes the memory of two rows, and nothing else is allocated."""
    job = load(tmp_path, HEAT + "s = sum(U[i,j])\n")
    plan = einmpi.plan(job, ranks=3)
    steps = fuse(lower(plan, 1), plan, NumpyBackend().fusions).steps
    (halo,) = filter(has_halo_buffers, steps)
    assert [slot.shape for slot in halo.writes] == [(1, 40), (1, 40)]
    (copied,) = [
        step for step in lower(plan, 1).steps if step.kind == "exchange" and step.moves.own
    ]
    assert replace(halo, arriving=()) == copied
    assert "to halo buffers" in str(halo)
    freed = [slot.name for step in steps for slot in step.frees]
    assert all(slot.name in freed for slot in halo.writes)


def test_a_block_that_leaves_memory_keeps_the_copy(tmp_path):
    schedule = lower(einmpi.plan(load(tmp_path, HEAT), ranks=2), 0)
    reads_halos = NumpyBackend().fusions.reads_halos
    assert passes.with_halo_buffers(schedule, reads_halos) != schedule
    loaded = schedule.steps[0].writes[0]
    steps = (schedule.steps[0], Spill(loaded, "evict"), *schedule.steps[1:])
    spilled = replace(schedule, steps=steps)
    assert passes.with_halo_buffers(spilled, reads_halos) == spilled


@pytest.mark.parametrize("factor", [1, 2, 3, -1, -2])
def test_positions_at_which_places_pass_a_border(factor):
    for constant in range(-4, 5):
        for border in range(-6, 7):
            first = halo_parts._first_position_at(border, constant, factor)
            for position in range(-20, 20):
                is_past = (constant + factor * position >= border) == (factor > 0)
                assert is_past == (position >= first)
