"""`resident = "fit"`: inputs stay loaded between calls as far as the memory limit allows."""

import os
import tempfile
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi_helpers import run_mpi
from refusals import error

import einmpi
from einmpi.comm.threads import run_threads

pytestmark = pytest.mark.usefixtures("in_folder")


def layers_job(widths, rows, resident="fit", folder="."):
    """Return a job with a weight in a file for each layer, its input and its result."""
    random = np.random.default_rng(3)
    x = random.standard_normal((rows, widths[0]))
    expected = x
    lines = []
    inputs = {}
    before = "x"
    for layer, (j, k) in enumerate(pairwise(widths)):
        weight = random.standard_normal((j, k))
        path = os.path.join(folder, f"W{layer}.npy")
        np.save(path, weight)
        inputs[f"W{layer}"] = {"file": path}
        lines.append(f"h{layer}[i,k] = tanh(sum({before}[i,j] * W{layer}[j,k]))")
        before = f"h{layer}"
        expected = np.tanh(expected @ weight)
    job = einmpi.program("\n".join(lines), x=x, inputs=inputs, resident=resident)
    return job, x, before, expected


def call_twice(job, x, output, ranks, memory):
    """Return the results of the second call, the plan, and what the ranks measured."""

    def on_rank(comm):
        compiled = einmpi.compile(job, comm, memory=memory)
        compiled({"x": x})
        found = compiled({"x": x})[output].gather()
        return found, compiled

    results = run_threads(ranks, on_rank)
    plan = next(iter(results[0][1].ready.values()))[0]
    return [found for found, _ in results], plan, [compiled for _, compiled in results]


def test_without_a_limit_it_is_the_same_as_true():
    fitting, x, output, expected = layers_job((8, 12, 6), 4)
    staying = layers_job((8, 12, 6), 4, resident=True)[0]
    for ranks in (1, 4):
        plan = einmpi.plan(fitting, ranks)
        assert plan.digest == einmpi.plan(staying, ranks).digest
        assert plan.resident == einmpi.plan(staying, ranks).resident
        assert plan.fitted.kept == ("W0", "W1")
    found, _, _ = call_twice(fitting, x, output, 2, None)
    np.testing.assert_allclose(found[0], expected)
    assert "W0, W1 stay loaded: all that may" in str(plan)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 6),
    st.lists(st.integers(1, 24), min_size=2, max_size=5),
    st.integers(1, 9),
    st.floats(0, 1),
)
def test_any_limit(ranks, widths, rows, share):
    with tempfile.TemporaryDirectory() as folder:
        job, x, output, expected = layers_job(widths, rows, folder=folder)
        loading = layers_job(widths, rows, resident=False, folder=folder)[0]
        staying = layers_job(widths, rows, resident=True, folder=folder)[0]
        least = einmpi.plan(loading, ranks).peak
        most = einmpi.plan(staying, ranks).peak
        limit = int(least + share * max(0, most - least)) + 2**16  # and buffers of messages
        found, plan, compiled = call_twice(job, x, output, ranks, limit)
    for array in found:
        np.testing.assert_allclose(array, expected, atol=1e-9)
    assert plan.peak <= limit
    assert sum(each.measured.received for each in compiled) == plan.bytes_predicted
    assert max(each.measured.peak for each in compiled) <= plan.peak
    names = {f"W{layer}" for layer in range(len(widths) - 1)}
    assert {*plan.fitted.kept, *plan.fitted.loaded} == names
    for each in compiled[: plan.mesh.ranks]:
        assert {name for name, _ in each.resident} == set(plan.fitted.kept)


@pytest.mark.parametrize("count", range(7))
def test_what_is_used_first_stays(count):
    """On one rank, the memory of one more weight lets one more of them stay."""
    nbytes = 64 * 64 * 8
    job, x, output, expected = layers_job((64,) * 7, 1)
    loading = layers_job((64,) * 7, 1, resident=False)[0]
    least = einmpi.plan(loading, 1, memory="1 GiB").peak - 5 * nbytes  # all is read ahead
    limit = least + count * nbytes + nbytes // 2
    found, plan, _ = call_twice(job, x, output, 1, limit)
    np.testing.assert_allclose(found[0], expected)
    names = tuple(f"W{layer}" for layer in range(6))
    kept = count if count < 5 else 6  # the last one is there anyway when it is used
    assert plan.fitted.kept == names[:kept]
    assert plan.fitted.loaded == names[kept:]
    text = str(plan)
    if kept == 0:
        assert "resident     none fits: W0, W1, W2, W3, W4, W5 (192.0 KiB) loaded in each" in text
    if kept == 4:
        line = "resident     W0, W1, W2, W3 stay loaded; W4, W5 (64.0 KiB) loaded in each call"
        assert line in text


def test_a_large_input_that_does_not_fit_is_passed_over():
    job, x, output, expected = layers_job((4, 256, 4, 16, 16, 4), 1)
    large = 4 * 256 * 8
    small = (4 * 16 + 16 * 16 + 16 * 4) * 8
    hidden = 256 * 8
    found, plan, _ = call_twice(job, x, output, 1, large + small + 2 * hidden + 1000)
    np.testing.assert_allclose(found[0], expected)
    assert plan.fitted.loaded == ("W0", "W1")


def test_files_that_stay_are_not_read_again():
    job, x, output, expected = layers_job((64,) * 4, 1)
    limit = 64 * 64 * 8 * 5 // 2

    def on_rank(comm):
        compiled = einmpi.compile(job, comm, memory=limit)
        compiled({"x": x})
        comm.barrier()
        plan = next(iter(compiled.ready.values()))[0]
        if comm.rank == 0:
            for name in plan.fitted.kept:
                os.remove(f"{name}.npy")
        comm.barrier()
        return plan, compiled({"x": x})[output].gather()

    for plan, found in run_threads(1, on_rank):
        assert plan.fitted.kept and plan.fitted.loaded
        np.testing.assert_allclose(found, expected)


def test_shared_with_another_job():
    """The job that is planned first decides what stays, for all."""
    job, x, output, expected = layers_job((64,) * 4, 1)
    limit = 64 * 64 * 8 * 5 // 2

    def on_rank(comm):
        first = einmpi.compile(job, comm, memory=limit)
        second = einmpi.compile(job, comm, memory="1 GiB", share=first)
        found = [first({"x": x})[output].gather() for _ in range(2)]
        found += [second({"x": x})[output].gather() for _ in range(2)]
        assert second.measured.received == first.measured.received
        plans = [next(iter(each.ready.values()))[0] for each in (first, second)]
        return found, plans, len(first.resident)

    for found, (first, second), blocks in run_threads(2, on_rank):
        for array in found:
            np.testing.assert_allclose(array, expected)
        assert first.fitted == second.fitted
        assert blocks == len(first.fitted.kept)


def test_in_a_job_file():
    np.save("W.npy", np.ones((8, 8)))
    text = 'program = "z[k] = sum(x[j] * W[j,k])"\n'
    text += 'inputs.x = { random = "ones", shape = [8] }\n'
    with open("job.toml", "w") as file:
        file.write(text + 'inputs.W = { file = "W.npy", resident = "fit" }\n')
    job = einmpi.load("job.toml")
    assert einmpi.plan(job, 2, memory="1 MiB").fitted.kept == ("W",)
    assert einmpi.run(job, memory="1 MiB")["z"].gather().tolist() == [8.0] * 8
    with open("job.toml", "w") as file:
        file.write(text + 'inputs.W = { file = "W.npy", resident = "some" }\n')
    assert error(einmpi.load, "job.toml") == (
        "job.toml:3:30: resident is 'some'; expected true, false or \"fit\""
    )


def test_a_loop_keeps_all_its_inputs():
    np.save("W.npy", np.eye(8) / 2)
    with open("job.toml", "w") as file:
        file.write(
            'program = "y[k] = sum(x[j] * W[j,k])"\n'
            'inputs.x = { random = "ones", shape = [8] }\n'
            'inputs.W = { file = "W.npy", resident = "fit" }\n'
            'loop.steps = 3\nloop.carry = { x = "y" }\n'
        )
    job = einmpi.load("job.toml")

    def on_rank(comm):
        return einmpi.run(job, comm=comm, memory="1 MiB")["x"].gather()

    for found in run_threads(2, on_rank):
        assert found.tolist() == [0.125] * 8


ON_REAL_RANKS = """
import numpy as np
import einmpi
from einmpi.comm.mpi import comm_of

comm = comm_of()
inputs = {f"W{number}": {"file": f"W{number}.npy"} for number in range(3)}
text = "a[k] = sum(x[j] * W0[j,k])\\nb[k] = sum(a[j] * W1[j,k])\\nc[k] = sum(b[j] * W2[j,k])"
job = einmpi.program(text, x=(64,), inputs=inputs, resident="fit")
compiled = einmpi.compile(job, memory=2 * 64 * 64 * 8)
x = np.ones(64)
for _ in range(2):
    found = compiled({"x": x})["c"].gather()
plan = next(iter(compiled.ready.values()))[0]
received = sum(map(int, comm.allgather_text(str(compiled.measured.received))))
assert received == plan.bytes_predicted, (received, plan.bytes_predicted)
assert compiled.measured.peak <= plan.peak <= 2 * 64 * 64 * 8
expected = x
for number in range(3):
    expected = expected @ np.load(f"W{number}.npy")
np.testing.assert_allclose(found, expected)
if comm.rank == 0:
    print(len(plan.fitted.kept) + len(plan.fitted.loaded))
"""


@pytest.mark.slow
def test_on_real_ranks():
    layers_job((64,) * 4, 1)
    done = run_mpi(2, ON_REAL_RANKS, timeout=120, cwd=os.getcwd())
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3\n"
