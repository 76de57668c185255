"""Carried tensors that are updated in place: the same bits, less memory, nothing lost."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_checks import verify
from step_kinds import computed_as

import einmpi
from einmpi.api import options_of
from einmpi.comm.threads import run_threads
from einmpi.job.loop import StepProgram, make_loop
from einmpi.kernels.cpu import dispatch
from einmpi.kernels.cpu import row_updates as scattered_updates
from einmpi.loops.arrival import plan_loop
from einmpi.loops.running import LoopRun
from einmpi.planner import memory, peak_memory
from einmpi.schedule.lower import lower
from einmpi.schedule.memory import peak_bytes


def run_loop(
    job, inputs, carry, steps, comm, donate=True, record=(), on_row=None, written=None, pin=None
):
    """Run a loop on this rank, with updates in place or without; return what ran and its result."""
    program = StepProgram(job.written, job.sizes, job.inputs)
    loop = make_loop(program, lambda *_: "loop", steps, carry, None, record)
    run = LoopRun(replace(job, loop=loop), comm, options_of(job, pin=pin), on_row=on_row)
    options = replace(run.step.options, donate=donate)
    run.step.options = options
    run.step.planning.options = options
    if written is not None:
        count_writes(run.step.backend, written)
    run.prepare(inputs)
    return run, run.run()


def count_writes(backend, written):
    """Count the elements of a tensor that kernels write, by the name of the tensor."""
    compute_kernel = backend.compute_kernel

    def counting(step, operands, target, *prepared):
        written[step.vertex] = written.get(step.vertex, 0) + target.size
        compute_kernel(step, operands, target, *prepared)

    prepared_row_writes = backend.prepared_row_writes

    def counting_rows(step, operands, target):
        write = prepared_row_writes(step, operands, target)
        if write is None:
            return None

        def write_and_count(operands, target):
            untouched = np.full_like(target, np.nan)
            write([untouched if array is target else array for array in operands], untouched)
            count = np.count_nonzero(~np.isnan(untouched))
            written[step.vertex] = written.get(step.vertex, 0) + count
            write(operands, target)

        return write_and_count

    backend.compute_kernel = counting
    backend.prepared_row_writes = counting_rows


def on_ranks(ranks, job, inputs, carry, steps, donate=True, record=(), pin=None):
    """Run a loop on threads; return its results, the plan of a step, and the measured peaks."""

    def on_rank(comm):
        run, result = run_loop(job, inputs, carry, steps, comm, donate, record, pin=pin)
        gathered = {name: array.gather() for name, array in result.outputs.items()}
        return gathered, run.plan, run.schedule, run.measured

    found = run_threads(ranks, on_rank)
    plan = found[0][1]
    schedules = [lower(plan, rank) for rank in range(ranks)]
    verify(schedules)
    for schedule, (_, _, _, measured) in zip(schedules, found, strict=True):
        assert measured.peak <= peak_bytes(schedule) <= plan.peak
    moved = sum(measured.received for _, _, _, measured in found)
    assert moved == steps * plan.bytes_predicted
    return found[0][0], plan, [schedule for _, _, schedule, _ in found]


# Programs of a step, what they carry, and the same step by numpy. Values stay integers, so that
# every order of a sum gives the same bits.
def shifted(x, a, p):
    return {"x": np.concatenate([x[:1], x[:-1]])}


def with_mean(x, a, p):
    return {"x": x - x.sum(axis=0)}


PROGRAMS = {
    "x_next[i,j] = x[i,j] * 2 + a[i,j]": ({"x": "x_next"}, lambda x, a, p: {"x": x * 2 + a}),
    "x_next[i,j] = a[j,i] - x[i,j]": ({"x": "x_next"}, lambda x, a, p: {"x": a.T - x}),
    "x_next[i,j] = x[j,i] + a[i,j]": ({"x": "x_next"}, lambda x, a, p: {"x": x.T + a}),
    "x_next[i,j] = x[i,j] - x[j,i]": ({"x": "x_next"}, lambda x, a, p: {"x": x - x.T}),
    "x_next[i,j] = x[i,j] - x[0,j]": ({"x": "x_next"}, lambda x, a, p: {"x": x - x[0]}),
    "x_next[i,j] = where(i > 0, x[i-1,j], x[i,j])": ({"x": "x_next"}, shifted),
    "x_next[i,j] = x[p[i],j] + 1": ({"x": "x_next"}, lambda x, a, p: {"x": x[p] + 1}),
    "s[j] = sum(x[i,j])\nx_next[i,j] = x[i,j] - s[j]": ({"x": "x_next"}, with_mean),
    "x_next[i,k] = sum(x[i,j] * a[j,k])": ({"x": "x_next"}, lambda x, a, p: {"x": x @ a}),
    "x_next[i,j] = x[i,j] + 1\na_next[i,j] = a[i,j] + x[i,j]": (
        {"x": "x_next", "a": "a_next"},
        lambda x, a, p: {"x": x + 1, "a": a + x},
    ),
    "y[i,j] = x[i,j] + 1\nb[i,j] = a[i,j] * 2": (
        {"x": "b", "a": "y"},
        lambda x, a, p: {"x": a * 2, "a": x + 1},
    ),
    "x_next[i,j] = x[i,j] + a[i,j]\nt = sum(x[i,j])\na_next[i,j] = a[i,j] - t": (
        {"x": "x_next", "a": "a_next"},
        lambda x, a, p: {"x": x + a, "a": a - x.sum()},
    ),
    "x_next[i,j] = cumsum[i](x[i,j]) - a[i,j]": (
        {"x": "x_next"},
        lambda x, a, p: {"x": x.cumsum(axis=0) - a},
    ),
    "x_next[p[i],j] = sum(x[i,j])": (
        {"x": "x_next"},
        lambda x, a, p: {"x": np.stack([x[p == i].sum(axis=0) for i in range(len(x))])},
    ),
}


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    text=st.sampled_from(list(PROGRAMS)),
    ranks=st.integers(1, 9),
    extent=st.integers(1, 9),
    steps=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_same_bits_with_and_without(text, ranks, extent, steps, seed):
    carry, by_numpy = PROGRAMS[text]
    rng = np.random.default_rng(seed)
    values = {
        "x": rng.integers(-4, 5, (extent, extent)).astype(float),
        "a": rng.integers(-4, 5, (extent, extent)).astype(float),
        "p": rng.integers(0, extent, extent),
    }
    job = einmpi.program(text, **values)
    given_inputs = {name: array.copy() for name, array in values.items()}
    expected = dict(values)
    for _ in range(steps):
        expected.update(by_numpy(expected["x"], expected["a"], expected["p"]))
    used = {name: array for name, array in given_inputs.items() if name in job.graph.by_name}
    for donate in (True, False):
        found, plan, _ = on_ranks(ranks, job, used, carry, steps, donate)
        assert donate or not plan.in_place
        for name in carry:
            np.testing.assert_array_equal(found[name], expected[name])
    for name, array in given_inputs.items():
        np.testing.assert_array_equal(array, values[name])


@pytest.mark.parametrize(
    ("text", "updated"),
    [
        ("x_next[i,j] = x[i,j] * 2 + a[i,j]", {"x": "x_next"}),
        ("x_next[i,j] = x[j,i] + a[i,j]", {}),
        ("x_next[i,j] = x[i,j] - x[0,j]", {}),
        ("x_next[i,j] = where(i > 0, x[i-1,j], x[i,j])", {}),
        ("x_next[i,k] = sum(x[i,j] * a[j,k])", {}),
        # The old value is read before the new one is written, or the order is changed so.
        ("s[j] = sum(x[i,j])\nx_next[i,j] = a[i,j] - s[j]", {"x": "x_next"}),
        ("x_next[i,j] = x[i,j] + 1\nt = sum(x[i,j] * a[i,j])", {"x": "x_next"}),
        ("x_next[i,j] = x[i,j] + 1\nt = sum(x[i,j] * x_next[i,j])", {}),
    ],
)
def test_what_is_updated_in_place(text, updated):
    job = einmpi.program(text, x=(4, 4), a=(4, 4))
    inputs = {"x": np.ones((4, 4)), "a": np.ones((4, 4))}
    used = {name: array for name, array in inputs.items() if name in job.graph.by_name}
    _, plan, _ = on_ranks(1, job, used, {"x": "x_next"}, 2)
    assert plan.in_place == updated
    assert ("in place     x" in str(plan)) == bool(updated)


def test_halos_are_copied_so_that_the_block_can_be_written_over():
    text = "x_next[i] = where((i > 0) & (i < n-1), x[i-1] + x[i+1], x[i])"
    job = einmpi.program(text, x=(100,), n=100)
    x = np.arange(100.0)
    expected = x.copy()
    for _ in range(3):
        expected[1:-1] = expected[:-2] + expected[2:]
    for ranks, updated in ((1, {}), (4, {"x": "x_next"})):
        found, plan, _ = on_ranks(ranks, job, {"x": x}, {"x": "x_next"}, 3)
        assert plan.in_place == updated
        np.testing.assert_array_equal(found["x"], expected)


def test_given_arrays_stay_as_they_are():
    job = einmpi.program("x_next[i] = x[i] + 1", x=(64,))

    def on_rank(comm):
        array = np.zeros(64)
        distributed = einmpi.DistArray.from_global(np.zeros(64), comm)
        for inputs in ({"x": array}, {"x": distributed}):
            run, result = run_loop(job, inputs, {"x": "x_next"}, 3, comm)
            assert run.plan.in_place == {"x": "x_next"}
            assert (result.outputs["x"].gather() == 3).all()
        return array, distributed.gather()

    for array, gathered in run_threads(3, on_rank):
        assert not array.any()
        assert not gathered.any()


def test_blocks_of_rows_that_read_other_rows_of_what_they_overwrite():
    """A group of kernels goes block by block, and would lose rows that later blocks need."""
    text = "m[i] = max[j](x[j,i])\nx_next[i,j] = x[i,j] - m[i]"
    aligned = "m[i] = max[j](x[i,j])\nx_next[i,j] = x[i,j] - m[i]"
    x = np.random.default_rng(1).normal(size=(1500, 1500))
    for program, axis, is_grouped in ((text, 0, False), (aligned, 1, True)):
        job = einmpi.program(program, x=(1500, 1500))
        found, plan, schedules = on_ranks(1, job, {"x": x}, {"x": "x_next"}, 2)
        expected = x
        for _ in range(2):
            expected = expected - expected.max(axis=axis)[:, None]
        assert plan.in_place == {"x": "x_next"}
        assert any(computed_as(step) == "cache" for step in schedules[0].steps) == is_grouped
        np.testing.assert_array_equal(found["x"], expected)


@pytest.mark.parametrize("ranks", [1, 3])
def test_nan_is_found_although_the_update_is_in_place(ranks):
    text = "y = sum(log(x[i]))\ns = y * y\nx_next[i] = x[i] - 1"
    job = einmpi.program(text, x=(6,))
    messages = []
    for donate in (True, False):
        with pytest.raises(einmpi.EinmpiError) as caught:
            on_ranks(ranks, job, {"x": np.full(6, 2.5)}, {"x": "x_next"}, 9, donate, ["s"])
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "nan in step 3, in s; the first tensor with nan in it is" in messages[0]
    assert messages[0].endswith(": y")


def test_a_value_that_is_recorded_after_the_update_keeps_the_old_one():
    job = einmpi.program("x_next[i] = x[i] + 1\ns = sum(x_next[i])", x=(6,))
    _, plan, _ = on_ranks(1, job, {"x": np.ones(6)}, {"x": "x_next"}, 2, True, ["s"])
    assert plan.in_place == {}
    assert "in place     nothing; not x: s is recorded, and computed after x_next" in str(plan)


def test_a_step_allocates_nothing_as_large_as_what_it_carries():
    extent = 1000
    job = einmpi.program(
        "s[j] = sum(x[i,j])\nx_next[i,j] = x[i,j] - s[j] / n", x=(extent, extent), n=extent
    )
    peaks = []

    def on_row(number, row):
        now, peak = tracemalloc.get_traced_memory()
        peaks.append(peak - now)
        tracemalloc.reset_peak()

    def on_rank(comm):
        inputs = {"x": np.ones((extent, extent))}
        tracemalloc.start()
        try:
            return run_loop(job, inputs, {"x": "x_next"}, 6, comm, on_row=on_row)[0]
        finally:
            tracemalloc.stop()

    (run,) = run_threads(1, on_rank)
    assert run.plan.in_place == {"x": "x_next"}
    assert max(peaks[2:]) < extent * extent * 8 / 4
    assert run.plan.peak < 1.1 * extent * extent * 8


def test_a_step_that_needs_both_values_uses_two_blocks_in_turns():
    """New memory for every step would cost page faults."""
    extent = 10**6
    program = "x_next[i] = x[i] / 2 + x[0]\nchange = max(abs(x_next[i] - x[i]))"
    job = einmpi.program(program, x=(extent,))
    inputs = {"x": np.linspace(0, 1, extent)}
    peaks = []

    def on_row(number, row):
        now, peak = tracemalloc.get_traced_memory()
        peaks.append(peak - now)
        tracemalloc.reset_peak()

    def on_rank(comm):
        tracemalloc.start()
        try:
            return run_loop(job, inputs, {"x": "x_next"}, 9, comm, True, ["change"], on_row)[:2]
        finally:
            tracemalloc.stop()

    ((run, result),) = run_threads(1, on_rank)
    expected = inputs["x"]
    for _ in range(9):
        expected = expected / 2 + expected[0]
    assert np.array_equal(result.outputs["x"].gather(), expected)
    assert max(peaks[3:]) < extent * 8 / 4
    assert not run.step.backend.memory.blocks  # what is left belongs to the results


def test_the_first_value_is_not_kept_beside_the_current_one(tmp_path):
    """A generated input used to stay loaded for all steps, although no step reads it again."""
    text = """
program = "x_next[i] = x[i] + x[0]"
inputs.x = { shape = [1000], random = "ones" }
[loop]
steps = 3
carry = { x = "x_next" }
"""
    (tmp_path / "job.toml").write_text(text)
    job = einmpi.load(tmp_path / "job.toml")

    def on_rank(comm):
        run = LoopRun(job, comm, options_of(job))
        run.prepare({})
        assert run.run().outputs["x"].gather()[0] == 8
        return run.step.resident

    (resident,) = run_threads(1, on_rank)
    assert not resident


ROWS = {
    "where(u == at, row[d], cache[u,d])": lambda u, at: u == at,
    "where(at == u, row[d] + u, cache[u,d])": lambda u, at: u == at,
    "where(u != at, cache[u,d], row[d])": lambda u, at: u == at,
    "where((u >= at) & (u < at + 2), rows[u - at,d], cache[u,d])": lambda u, at: at <= u < at + 2,
    "where(u == at % n, row[d], cache[u,d])": lambda u, at: u == at % 7,
    "where((u == at) & (d > 1), row[d], cache[u,d])": lambda u, at: u == at,
    "where(u > at + 0.5, row[d], cache[u,d])": lambda u, at: u > at + 0.5,
    "where((u < at) | (u > at), cache[u,d], row[d])": lambda u, at: u == at,
    "where(~(u <= at), row[d], cache[u,d])": lambda u, at: u > at,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("expression", list(ROWS))
def test_a_row_that_is_written_into_a_cache(expression):
    """Only this row is written; ranks without it do nothing, and all bits are the same."""
    text = f"cache_next[u,d] = {expression}\nat_next = at + 1"
    rng = np.random.default_rng(3)
    inputs = {
        "cache": rng.normal(size=(7, 3)),
        "row": rng.normal(size=3),
        "rows": rng.normal(size=(2, 3)),
        "at": np.array(-2),
    }
    job = einmpi.program(text, n=7, **inputs)
    used = {name: array for name, array in inputs.items() if name in job.graph.by_name}
    carry = {"cache": "cache_next", "at": "at_next"}
    steps = 12
    places = 0
    for step in range(steps):
        places += sum(ROWS[expression](u, step - 2) for u in range(7))
    least_columns = 2 if "d > 1" in expression else 0
    for ranks in (1, 2, 3, 6):

        def on_rank(comm):
            found = {}
            for donate in (True, False):
                written = {}
                run, result = run_loop(job, used, carry, steps, comm, donate, written=written)
                found[donate] = result.outputs["cache"].gather(), written.get("cache_next", 0)
                assert run.plan.mesh.ranks == comm.size
            return found

        results = run_threads(ranks, on_rank)
        expected, _ = results[0][False]
        copies = sum(found[False][1] for found in results) // (steps * 7 * 3)
        for found in results:
            np.testing.assert_array_equal(found[True][0].view("i8"), expected.view("i8"))
        assert sum(found[True][1] for found in results) == copies * places * (3 - least_columns)


@pytest.mark.sampled(11)
@pytest.mark.parametrize("at", [np.nan, np.inf, -np.inf, 2.0, 2.5])
@pytest.mark.parametrize("comparison", ["==", "!=", "<", "<=", ">", ">="])
def test_rows_at_numbers_that_are_no_rows(at, comparison):
    for choice in ("row[d], cache[u,d]", "cache[u,d], row[d]"):
        for condition in (f"u {comparison} at", f"~(at {comparison} u)"):
            text = f"cache_next[u,d] = where({condition}, {choice})"
            inputs = {"cache": np.zeros((5, 2)), "row": np.ones(2), "at": np.array(at)}
            job = einmpi.program(text, **inputs)
            carry = {"cache": "cache_next"}
            in_place, plan, _ = on_ranks(1, job, inputs, carry, 1)
            apart, _, _ = on_ranks(1, job, inputs, carry, 1, donate=False)
            assert plan.in_place == carry
            np.testing.assert_array_equal(in_place["cache"], apart["cache"])


def test_operations_of_a_row():
    text = "cache_next[u,d] = where(u == at, 2 * row[d], cache[u,d])\nat_next = at + 1"
    inputs = {"cache": np.zeros((50, 4)), "row": np.ones(4), "at": np.array(0)}
    job = einmpi.program(text, **inputs)
    _, plan, _ = on_ranks(1, job, inputs, {"cache": "cache_next", "at": "at_next"}, 2)
    every_row = job.graph["cache_next"].operations()
    assert plan.graph["cache_next"].operations() == every_row // 50


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_compiled_step_takes_what_it_is_given(ranks):
    job = einmpi.program("x_next[i] = x[i] + a[i]", x=(40,), a=(40,))

    def on_rank(comm):
        step = einmpi.compile(job, comm, carry={"x": "x_next"}, donate=True)
        array = np.zeros(40)
        ones = einmpi.DistArray.from_global(np.ones(40), comm)
        first = step(x=array, a=ones)["x_next"]
        second = step(x=first, a=ones)["x_next"]
        addresses = [second.local.ctypes.data]
        third = step(x=second, a=ones)["x_next"]
        addresses.append(third.local.ctypes.data)
        for gone in (first, second):
            with pytest.raises(einmpi.InputError, match="given away"):
                gone.gather()
            assert "given away" in repr(gone)
        # The same array for two inputs: neither may change while it is read.
        twice = step(x=third, a=third)["x_next"]
        with pytest.raises(einmpi.InputError, match="given away"):
            third + 1
        assert not array.any()
        return addresses, ones.gather(), twice.gather()

    for addresses, ones, twice in run_threads(ranks, on_rank):
        assert addresses[0] == addresses[1]
        assert (ones == 1).all()
        assert (twice == 6).all()


def test_a_compiled_step_takes_nothing_unless_asked():
    job = einmpi.program("x_next[i] = x[i] + 1", x=(40,))
    step = einmpi.compile(job, carry={"x": "x_next"})
    first = step(x=np.zeros(40))["x_next"]
    second = step(x=first)["x_next"]
    assert (first.gather() == 1).all()
    assert (second.gather() == 2).all()
    with pytest.raises(einmpi.InputError, match="donate is given without carry"):
        einmpi.compile(job, donate=True)


@pytest.fixture
def small_blocks(monkeypatch):
    """Let products be computed in blocks that are as small as tests are."""
    monkeypatch.setattr(memory, "PRODUCT_BLOCK_BYTES", 2000)
    monkeypatch.setattr(memory, "LEAST_BLOCK_ROWS", 1)


SGD = """
P[b,j] = sum(X[b,i] * W[i,j]) - D[b,j]
loss = sum(P[b,j]**2)
G[i,j] = sum(X[b,i] * P[b,j])
W_next[i,j] = W[i,j] - 0.001 * G[i,j]
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_weights_are_in_memory_once(small_blocks, ranks):
    """The gradient is never whole where each rank computes its own part of it."""
    rng = np.random.default_rng(5)
    inputs = {
        "X": rng.normal(size=(4, 120)),
        "D": rng.normal(size=(4, 40)),
        "W": rng.normal(size=(120, 40)),
    }
    job = einmpi.program(SGD, **inputs)
    expected = inputs["W"].copy()
    for _ in range(3):
        residual = inputs["X"] @ expected - inputs["D"]
        expected = expected - 0.001 * (inputs["X"].T @ residual)
    bits = []
    for donate in (True, False):
        found, plan, schedules = on_ranks(ranks, job, inputs, {"W": "W_next"}, 3, donate, ["loss"])
        np.testing.assert_allclose(found["W"], expected, rtol=1e-12)
        bits.append(found["W"].tobytes())
        assert plan.blocked == ("G",)
        assert any(computed_as(step) == "memory" for step in schedules[0].steps)
    assert bits[0] == bits[1]


def test_weights_of_one_unit_need_one_unit():
    weights = 4000 * 4000 * 8
    job = einmpi.program(SGD, X=(8, 4000), D=(8, 4000), W=(4000, 4000))
    program = StepProgram(job.written, job.sizes, job.inputs)
    loop = make_loop(program, lambda *_: "loop", 9, {"W": "W_next"}, None, ["loss"])
    for ranks in (1, 4):
        plan = plan_loop(replace(job, loop=loop), ranks, options_of(job), {})
        assert plan.peak < 1.35 * weights / ranks if ranks == 1 else plan.peak < weights
        assert peak_bytes(lower(plan, 0)) <= plan.peak


def test_nan_in_an_update_by_blocks(small_blocks):
    job = einmpi.program(SGD, X=(4, 120), D=(4, 40), W=(120, 40))
    inputs = {"X": np.ones((4, 120)), "D": np.ones((4, 40)), "W": np.ones((120, 40))}
    inputs["D"][0, 0] = np.nan
    with pytest.raises(einmpi.EinmpiError, match=r"nan in step 0, in loss; .*: P"):
        on_ranks(2, job, inputs, {"W": "W_next"}, 3, True, ["loss"])


# ---- updates of some rows ------------------------------------------------------------------------

SCATTERED = """
H[b,j] = sum[k](v[b,k] * W[at[b,k],j])
D[b,j] = H[b,j] - T[b,j]
loss = sum(D[b,j]**2)
G[at[b,k]:n, j] = sum(D[b,j] * v[b,k])
W_next[i,j] = {update}
"""


def scattered_inputs(rows, columns, batch, values, seed=0, dtype="float64"):
    rng = np.random.default_rng(seed)
    return {
        "W": rng.normal(size=(rows, columns)).astype(dtype),
        "T": rng.normal(size=(batch, columns)).astype(dtype),
        "v": rng.normal(size=(batch, values)).astype(dtype),
        "at": rng.integers(0, rows, (batch, values)),
        "rate": np.array(0.01, dtype),
    }


def scattered_job(inputs, update="W[i,j] - rate * G[i,j]"):
    return einmpi.program(
        SCATTERED.format(update=update), n=len(inputs["W"]), dtype=inputs["W"].dtype.name, **inputs
    )


def scattered_by_numpy(inputs, steps, factor):
    W = inputs["W"].copy()
    for _ in range(steps):
        D = np.einsum("bk,bkj->bj", inputs["v"], W[inputs["at"]]) - inputs["T"]
        G = np.zeros_like(W)
        np.add.at(G, inputs["at"], D[:, None, :] * inputs["v"][:, :, None])
        W = W + factor * G
    return W


def is_sparse(schedules):
    """Return whether every rank that does anything updates some rows only."""
    kinds = []
    for schedule in schedules:
        if schedule.steps:
            kinds.append(any(computed_as(step) == "scattered" for step in schedule.steps))
    return all(kinds)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cut", [None, "rows", "columns"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 9])
def test_rows_that_get_values_are_updated(ranks, cut):
    """Whatever the cut of the weights, the bits are those of whole gradients."""
    inputs = scattered_inputs(rows=200, columns=18, batch=5, values=4)
    job = scattered_job(inputs)
    expected = scattered_by_numpy(inputs, 3, -0.01)
    pins = None
    if cut is not None:
        pins = {"W": {"rows": (ranks, 1), "columns": (1, ranks)}[cut]}
    bits = []
    for donate in (True, False):
        found, plan, schedules = on_ranks(
            ranks, job, inputs, {"W": "W_next"}, 3, donate, ["loss"], pins
        )
        np.testing.assert_allclose(found["W"], expected, rtol=1e-12)
        bits.append(found["W"].tobytes())
        assert plan.blocked == ("G",)
        assert is_sparse(schedules)
        if cut is not None and ranks > 1:
            assert plan.parts("W_next")[{"rows": "i", "columns": "j"}[cut]] == ranks
        assert "G is computed for the rows that change" in str(plan)
    assert bits[0] == bits[1]


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 60),
    columns=st.integers(1, 4),
    batch=st.integers(0, 5),
    values=st.integers(0, 4),
    ranks=st.sampled_from([1, 2, 3, 5]),
    block=st.sampled_from([1, 64, 2**23]),
    dtype=st.sampled_from(["float64", "float32", "float16", "bfloat16", "complex64"]),
    update=st.sampled_from(
        [
            "W[i,j] - rate * G[i,j]",
            "W[i,j] - G[i,j] / 100",
            "W[i,j] + rate * G[i,j]",  # changes the sign of -0.0 everywhere
            "W[i,j] - (-rate) * G[i,j]",
            "W[i,j] - 1 / (rate - rate) * G[i,j]",  # nan everywhere
            "-rate * (2 * G[i,j]) + W[i,j]",
        ]
    ),
    outside=st.booleans(),
    seed=st.integers(0, 99),
)
def test_bits_of_scattered_updates(
    rows, columns, batch, values, ranks, block, dtype, update, outside, seed
):
    """The same as without updates in place, and as with whole gradients."""
    inputs = scattered_inputs(rows, columns, batch, values, seed, dtype)
    inputs["W"][::2] *= -0.0
    text = f"G[at[b,k]:n, j] = sum(T[b,j] * v[b,k] * c)\nW_next[i,j] = {update}\nc_next = c / 2"
    inputs["c"] = np.array(1, dtype)
    if outside and batch * values:
        inputs["at"][0, 0] = rows  # goes nowhere
    job = einmpi.program(text, n=rows, dtype=dtype, **inputs)
    used = {name: array for name, array in inputs.items() if name in job.graph.by_name}
    carry = {"W": "W_next", "c": "c_next"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(memory, "SPARSE_BLOCK_BYTES", block)
        found = []
        for donate in (True, False):
            found.append(on_ranks(ranks, job, used, carry, 2, donate))
        patched.setattr(peak_memory, "is_sparse_update", lambda *_: False)
        found.append(on_ranks(ranks, job, used, carry, 2))
    assert found[2][1].blocked == ()
    for outputs, _, _ in found[:2]:
        assert outputs["W"].tobytes() == found[2][0]["W"].tobytes()


@pytest.fixture
def compiled_updates(monkeypatch):
    """Compile whatever the size, and count the updates that are one compiled pass."""
    counts = []
    compute = scattered_updates.ScatteredUpdate.compute

    def counting(self, *arguments):
        counts.append(1)
        compute(self, *arguments)

    monkeypatch.setattr(dispatch, "WORTH_COMPILING", 0)
    monkeypatch.setattr(scattered_updates.ScatteredUpdate, "compute", counting)
    return counts


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "update", ["W[i,j] - rate * G[i,j]", "W[i,j] - G[i,j]", "W[i,j] - G[i,j] / 100"]
)
def test_bits_of_updates_in_one_pass(monkeypatch, compiled_updates, update, ranks, dtype):
    inputs = scattered_inputs(70, 9, 6, 5, 3, dtype)
    inputs["W"][:4] = -0.0
    job = scattered_job(inputs, update)
    carry = {"W": "W_next"}
    used = {name: array for name, array in inputs.items() if name in job.graph.by_name}
    together, _, _ = on_ranks(ranks, job, used, carry, 2)
    assert len(compiled_updates) == 2 * ranks
    monkeypatch.setattr(peak_memory, "is_sparse_update", lambda *_: False)
    apart, plan, _ = on_ranks(ranks, job, used, carry, 2)
    assert plan.blocked == () and len(compiled_updates) == 2 * ranks
    assert together["W"].tobytes() == apart["W"].tobytes()


def test_updates_with_two_factors_are_computed_block_by_block(compiled_updates):
    inputs = scattered_inputs(70, 3, 6, 5)
    job = scattered_job(inputs, "W[i,j] - rate * (2 * G[i,j])")
    used = {name: array for name, array in inputs.items() if name in job.graph.by_name}
    on_ranks(1, job, used, {"W": "W_next"}, 1)
    assert not compiled_updates


def test_rows_that_get_values_in_order():
    changed = scattered_updates.changed_rows(np.array([[5, -1, 2], [9, 5, 2]]), 8)
    assert changed.rows.tolist() == [2, 5]
    assert changed.starts.tolist() == [0, 2, 4]
    assert changed.order.tolist() == [2, 5, 0, 4]
    nothing = scattered_updates.changed_rows(np.empty((0, 3), np.int64), 8)
    assert [len(nothing.rows), nothing.starts.tolist()] == [0, [0]]


def test_columns_that_get_values_are_updated():
    rng = np.random.default_rng(1)
    inputs = {"W": rng.normal(size=(3, 50)), "v": rng.normal(size=(3, 7)), "at": np.arange(7) * 5}
    text = "G[j, at[b]:n] = sum(v[j,b] * W[j,at[b]])\nW_next[j,i] = W[j,i] - 0.5 * G[j,i]"
    job = einmpi.program(text, n=50, **inputs)
    expected = inputs["W"].copy()
    for _ in range(2):
        expected[:, inputs["at"]] -= 0.5 * inputs["v"] * expected[:, inputs["at"]]
    for ranks in (1, 2, 3, 5):
        found, plan, _ = on_ranks(ranks, job, inputs, {"W": "W_next"}, 2)
        assert plan.blocked == ("G",)
        np.testing.assert_allclose(found["W"], expected, rtol=1e-14)


def test_only_rows_that_get_values_are_touched():
    """Neither allocations nor kernels grow with the number of rows."""
    written_by_rows = []
    peaks_by_rows = []
    for rows in (20_000, 200_000):
        inputs = scattered_inputs(rows, columns=16, batch=16, values=8)
        job = scattered_job(inputs)
        written = {}
        peaks = []

        def on_row(number, row, peaks=peaks):
            now, peak = tracemalloc.get_traced_memory()
            peaks.append(peak - now)
            tracemalloc.reset_peak()

        def on_rank(comm, job=job, inputs=inputs, written=written, on_row=on_row):
            tracemalloc.start()
            try:
                return run_loop(
                    job, inputs, {"W": "W_next"}, 6, comm, True, ["loss"], on_row, written
                )[0]
            finally:
                tracemalloc.stop()

        (run,) = run_threads(1, on_rank)
        assert run.plan.in_place == {"W": "W_next"}
        weights = rows * 16 * 8
        assert run.plan.peak < weights + 2**18
        written_by_rows.append(written["G"] + written["W_next"])
        peaks_by_rows.append(max(peaks[2:]))
    assert written_by_rows[0] == written_by_rows[1] == 6 * 2 * 16 * 8 * 16
    assert max(peaks_by_rows) < 2**18 < 20_000 * 16 * 8 / 4


def test_operations_of_rows_that_get_values():
    inputs = scattered_inputs(rows=5000, columns=4, batch=5, values=4)
    job = scattered_job(inputs)
    _, plan, _ = on_ranks(1, job, inputs, {"W": "W_next"}, 1)
    assert plan.graph["W_next"].operations() == 5 * 4 * 4 * 2
    assert plan.graph.operations() < 5 * 4 * 4 * 20


@pytest.mark.parametrize(
    "update",
    [
        "0.9 * W[i,j] - rate * G[i,j]",  # every row
        "W[i,j] - rate * (G[i,j] + 0.1 * W[i,j])",
        "W[i,j] - rate * abs(G[i,j])",
        "rate * G[i,j] - W[i,j]",
        "W[i,j] - rate * G[i,j] * i",
    ],
)
def test_other_updates_are_computed_for_every_row(update):
    inputs = scattered_inputs(rows=200, columns=2, batch=5, values=4)
    _, plan, _ = on_ranks(1, scattered_job(inputs, update), inputs, {"W": "W_next"}, 1)
    assert plan.blocked == ()
    assert plan.graph["W_next"].changed is None


def test_a_gradient_that_something_else_needs_is_whole():
    inputs = scattered_inputs(rows=200, columns=2, batch=5, values=4)
    text = SCATTERED.format(update="W[i,j] - rate * G[i,j]") + "steepness = sum(G[i,j]**2)"
    job = einmpi.program(text, n=200, **inputs)
    _, plan, _ = on_ranks(2, job, inputs, {"W": "W_next"}, 2)
    assert plan.blocked == ()


def test_a_rank_that_fails_in_a_sparse_update(monkeypatch):
    """An index that is out of range is an error of the forward pass, on all ranks."""
    inputs = scattered_inputs(rows=200, columns=4, batch=5, values=4)
    inputs["at"][2, 1] = 200
    with pytest.raises(einmpi.EinmpiError, match="out of range; expected 0 to 199"):
        on_ranks(3, scattered_job(inputs), inputs, {"W": "W_next"}, 2)


def test_gradients_come_right_before_their_updates():
    """Statements between a sum and its update no longer keep the sum in memory."""
    text = "D[b,j] = sum(X[b,i] * W[i,j])\nE[b,i] = sum(D[b,j] * V[j,i])\n"
    text += "G[i,j] = sum(X[b,i] * D[b,j])\nF[j,i] = sum(D[b,j] * E[b,i])\n"
    text += "V_next[j,i] = V[j,i] - F[j,i]\nW_next[i,j] = W[i,j] - G[i,j]"
    job = einmpi.program(text, X=(4, 30), W=(30, 20), V=(20, 30))
    inputs = {name: np.ones(job.graph[name].bound) for name in ("X", "W", "V")}
    carry = {"W": "W_next", "V": "V_next"}
    _, plan, _ = on_ranks(1, job, inputs, carry, 2)
    assert [vertex.name for vertex in plan.graph.computed] == [
        *("D", "E", "G", "W_next", "F", "V_next")
    ]
