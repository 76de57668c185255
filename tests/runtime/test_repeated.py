"""Programs that are run again and again give the bits, bytes and memory of their first run."""

import threading

import numpy as np
import pytest
from run_cases import cases
from step_kinds import is_exchange, is_reduce

import einmpi
from einmpi.api import options_of
from einmpi.comm.threads import run_threads
from einmpi.compiled.program import Compiled
from einmpi.runtime import kept_memory
from einmpi.runtime.kept_memory import keep_memory
from einmpi.schedule.lower import lower
from einmpi.schedule.memory import peak_bytes

CASES = cases()
POWER = """
y[i]      = sum(S[i,j] * x[j])
value     = sum(x[i] * y[i])
x_next[i] = y[i] / norm(y[k])
turned    = norm(x_next[i] - sign(value) * x[i])
"""


def power_program(size=12):
    outputs = ["value", "x_next", "turned"]
    return einmpi.program(POWER, outputs=outputs, S=(size, size), x=(size,))


def power_inputs(seed, size=12):
    random = np.random.default_rng(seed)
    return {"S": random.random((size, size)), "x": random.random(size)}


def by_numpy(S, x):
    y = S @ x
    value = x @ y
    x_next = y / np.linalg.norm(y)
    turned = np.linalg.norm(x_next - np.sign(value) * x)
    return {"value": value, "x_next": x_next, "turned": turned}


def bits(outputs):
    return {name: array.gather().tobytes() for name, array in outputs.items()}


def bound_calls(compiled):
    """Return the calls that are bound to the steps of a compiled job."""
    ((_, program),) = compiled.runner.programs.values()
    return program.bound is not None and program.bound.calls


@pytest.mark.sampled(10, always=["chain, odd-2", "complex-2", "gather-2", "half-2", "nothing-2"])
@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 6))]
)
@pytest.mark.parametrize("name", CASES)
def test_later_runs_are_like_the_first(name, ranks):
    check_later_runs(name, ranks, "eindecomp")


@pytest.mark.parametrize("ranks", [5, 7])
def test_memory_is_kept_for_all_messages_of_a_step_or_for_none(ranks):
    """In these plans, there is memory for what a step receives, and not for what it sends."""
    check_later_runs("nearest, odd", ranks, "eindecomp-paper")


def check_later_runs(name, ranks, strategy):
    """Check that later runs have the bits and bytes of the first, and the planned memory."""
    job, arrays = CASES[name]

    def on_rank(comm):
        compiled = Compiled(job, comm, options_of(job, strategy=strategy))
        runs = []
        for _ in range(3):
            outputs = bits(compiled(arrays))
            measured = compiled.measured
            runs.append((outputs, measured.received, measured.between))
        ((plan, schedule),) = compiled.ready.values()
        assert measured.peak <= peak_bytes(schedule) <= plan.peak
        assert bound_calls(compiled) or not schedule.steps
        return runs, plan

    results = run_threads(ranks, on_rank)
    for runs, _ in results:
        assert runs[1] == runs[0]
        assert runs[2] == runs[0]
    plan = results[0][1]
    assert sum(runs[2][1] for runs, _ in results) == plan.bytes_predicted


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", range(1, 10))
def test_other_values_in_every_run(ranks):
    """The results of a run are right, and stay as they are in later runs."""

    def on_rank(comm):
        job = power_program()
        compiled = Compiled(job, comm, options_of(job))
        results = [compiled(power_inputs(seed)) for seed in range(5)]
        for seed, outputs in enumerate(results):
            for name, expected in by_numpy(**power_inputs(seed)).items():
                np.testing.assert_allclose(outputs[name].gather(), expected, rtol=1e-12)

    run_threads(ranks, on_rank)


@pytest.mark.parametrize("ranks", [1, 3])
def test_inputs_that_are_stored_otherwise(ranks):
    """Kernels are prepared for arrays as they are stored; others are computed with all the same."""

    def misaligned(array):
        memory = np.empty(array.nbytes + 1, np.uint8)
        copy = np.ndarray(array.shape, array.dtype, memory, 1)
        copy[...] = array
        return copy

    def on_rank(comm):
        job = power_program()
        compiled = Compiled(job, comm, options_of(job))
        inputs = power_inputs(1)
        expected = bits(compiled(inputs))
        transposed = dict(inputs, S=np.asfortranarray(inputs["S"]))
        other_order = {name: inputs[name].astype(">f8") for name in inputs}
        unaligned = {name: misaligned(array) for name, array in inputs.items()}
        for given in (inputs, transposed, inputs, other_order, unaligned, inputs):
            found = compiled(given)
            for name, wanted in by_numpy(**inputs).items():
                np.testing.assert_allclose(found[name].gather(), wanted, rtol=1e-12)
        assert bits(compiled(inputs)) == expected

    run_threads(ranks, on_rank)


def test_several_threads_at_once():
    job = power_program(40)
    compiled = einmpi.compile(job)
    inputs = [power_inputs(seed, 40) for seed in range(4)]
    expected = []
    for given in inputs:
        expected.append(bits(compiled(given)))
    wrong = []

    def call_often(number):
        for _ in range(50):
            if bits(compiled(inputs[number])) != expected[number]:
                wrong.append(number)

    threads = [threading.Thread(target=call_often, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_error_in_a_later_run(ranks):
    """All ranks raise an error that names the statement, and further runs are right."""
    text = "z[i] = x[p[i]]\nw = sum(z[i])\nu[i] = z[i] + w"

    def on_rank(comm):
        x = np.arange(12.0)
        right = np.arange(12)[::-1].copy()
        wrong = right.copy()
        wrong[-1] = 12
        job = einmpi.program(text, x=x, p=right)
        compiled = Compiled(job, comm, options_of(job))
        expected = x[right] + x.sum()
        for given in (right, right, right, wrong, right, wrong, right):
            if given is wrong:
                with pytest.raises(einmpi.EinmpiError, match="1:1: z"):
                    compiled(x=x, p=given)
            else:
                found = compiled(x=x, p=given)["u"].gather()
                np.testing.assert_array_equal(found, expected)

    run_threads(ranks, on_rank)


@pytest.mark.parametrize("most", [0, 100, 2**18])
@pytest.mark.parametrize("name", ["chain, odd", "statistics", "softmax, odd", "stencil"])
def test_kept_arrays_that_are_needed_at_once_do_not_overlap(name, most, monkeypatch):
    monkeypatch.setattr(kept_memory, "MOST_BYTES_OF_A_SCHEDULE", most)
    job, _ = CASES[name]
    for ranks in (1, 2, 5):
        plan = einmpi.plan(job, ranks)
        for rank in range(ranks):
            schedule = lower(plan, rank)
            kept = keep_memory(schedule)
            total = 0
            for array in kept.slots.values():
                array[...] = 0
            for number, step in enumerate(schedule.steps):
                arrays = []
                for slot in (*step.reads, *step.writes):
                    if slot.name in kept.slots:
                        arrays.append(kept.slots[slot.name])
                for buffers in (kept.sent, kept.received):
                    if number in buffers:
                        arrays.append(buffers[number])
                total += len(arrays)
                for position, array in enumerate(arrays):
                    for other in arrays[position + 1 :]:
                        assert array is other or not np.shares_memory(array, other)
            assert total == 0 or most > 0


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_small_messages_keep_memory_that_is_not_planned(ranks):
    """They are counted while they are in use, so that the peak is still the planned one."""
    text = "C[i,k] = sum[j](A[i,j] * B[j,k])"
    left = np.arange(100.0).reshape(10, 10)

    def on_rank(comm):
        job = einmpi.program(text, A=left, B=left)
        compiled = Compiled(job, comm, options_of(job))
        right = einmpi.DistArray.from_global(left + 1, comm=comm)
        peaks = []
        for _ in range(5):
            found = compiled(A=left, B=right)["C"]
            np.testing.assert_array_equal(found.gather(), left @ (left + 1))
            peaks.append(compiled.measured.peak)
        ((_, schedule),) = compiled.ready.values()
        ((_, program),) = compiled.runner.programs.values()
        assert max(peaks) <= peak_bytes(schedule)
        for number, step in enumerate(schedule.steps):
            if is_exchange(step) and len(step.group) > 1:
                assert number in program.bound.kept.received
        return sum(program.bound.kept.beside_the_plan.values())

    beside = run_threads(ranks, on_rank)
    assert max(beside) <= kept_memory.MOST_BYTES_BESIDE_THE_PLAN
    assert ranks != 4 or min(beside) > 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_numbers_and_messages_of_a_small_program_keep_their_memory(ranks):
    plan = einmpi.plan(power_program(100), ranks)
    for rank in range(ranks):
        schedule = lower(plan, rank)
        kept = keep_memory(schedule)
        for number, step in enumerate(schedule.steps):
            if is_reduce(step) and not step.target.shape:
                assert number in kept.sent
                assert number in kept.received
            for slot in step.frees:
                assert slot.shape or slot.name in kept.slots


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_leaves_memory_keeps_none(ranks):
    """Its arrays are in two tiers in turn, in every call."""
    job = einmpi.program(
        "Y[i,k] = sum(A[i,j] * B[j,k])\nZ[i,l] = sum(Y[i,k] * C[k,l])",
        A=(24, 20),
        B=(20, 16),
        C=(16, 28),
    )
    plan = einmpi.plan(job, ranks, memory=einmpi.plan(job, ranks).peak // 2)
    assert plan.spilled
    for rank in range(ranks):
        schedule = lower(plan, rank)
        spilled = {
            slot.name for step in schedule.steps for slot in step.spills("place", "evict", "fetch")
        }
        assert spilled and spilled.isdisjoint(keep_memory(schedule).slots)


@pytest.mark.filterwarnings("error::DeprecationWarning")
def test_maxima_of_several_ranks_are_combined_without_a_warning():
    job = einmpi.program("M[k] = max(A[j,k] * B[j,k])", A=(4096, 2), B=(4096, 2))
    arrays = dict(zip("AB", np.random.default_rng(0).random((2, 4096, 2)), strict=True))

    def on_rank(comm):
        compiled = einmpi.compile(job, comm, strategy="sqrt")
        for _ in range(3):
            found = compiled(arrays)["M"].gather()
        return found

    for found in run_threads(4, on_rank, limit=20):
        np.testing.assert_array_equal(found, (arrays["A"] * arrays["B"]).max(0))
