"""`compile(share=…)`: two jobs that keep the inputs they have in common loaded once."""

import gc
import os
import weakref
from dataclasses import replace

import fake_cupy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi_helpers import run_mpi
from refusals import error

import einmpi
from einmpi.comm.threads import run_threads
from einmpi.planner.mesh import Mesh
from einmpi.runtime.sharing import inputs as shared_inputs
from einmpi.schedule.layout import Layout

pytestmark = pytest.mark.usefixtures("in_folder")
WEIGHTS = {"W": {"file": "W.npy"}, "U": {"file": "U.npy"}}


def write_weights(j, k, m):
    random = np.random.default_rng(5)
    weights = random.standard_normal((j, k)), random.standard_normal((k, m))
    np.save("W.npy", weights[0])
    np.save("U.npy", weights[1])
    return weights


def prompt_job(rows, j, **arguments):
    text = "H[i,k] = tanh(sum(X[i,j] * W[j,k]))\nZ[i,m] = sum(H[i,k] * U[k,m])"
    settings = {"inputs": WEIGHTS, "resident": True, **arguments}
    return einmpi.program(text, X=(rows, j), **settings)


def token_job(j, **arguments):
    text = "h[k] = tanh(sum(x[j] * W[j,k]))\nz[m] = sum(h[k] * U[k,m])"
    return einmpi.program(text, x=(j,), inputs=WEIGHTS, resident=True, **arguments)


def plans_of(compiled):
    return [plan for plan, _ in compiled.ready.values()]


def check_measured(compiled_on_ranks):
    """Compare what the last call moved and took on all ranks with the plan."""
    plan = plans_of(compiled_on_ranks[0])[-1]
    received = sum(compiled.measured.received for compiled in compiled_on_ranks)
    assert received == plan.bytes_predicted
    assert max(compiled.measured.peak for compiled in compiled_on_ranks) <= plan.peak


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 6),
    st.tuples(*[st.integers(1, 9)] * 4),
    st.booleans(),
    st.sampled_from(["eindecomp", "sqrt", "replicate"]),
)
def test_both_jobs_keep_one_block_of_each_input(ranks, extents, token_first, strategy):
    rows, j, k, m = extents
    w, u = write_weights(j, k, m)
    x = np.random.default_rng(2).standard_normal((rows, j))
    expected = np.tanh(x @ w) @ u

    def on_rank(comm):
        prompt = einmpi.compile(prompt_job(rows, j), comm, strategy=strategy)
        token = einmpi.compile(token_job(j), comm, share=prompt)
        for _ in range(2):
            calls = [
                lambda: prompt({"X": x})["Z"].gather(),
                lambda: token({"x": x[0]})["z"].gather(),
            ]
            if token_first:
                found_token, found_prompt = [call() for call in calls[::-1]]
            else:
                found_prompt, found_token = [call() for call in calls]
            np.testing.assert_allclose(found_prompt, expected, atol=1e-9)
            np.testing.assert_allclose(found_token, expected[0], atol=1e-9)
        assert token.resident is prompt.resident
        loaded = sorted(name for name, _ in prompt.resident)
        assert loaded == ["U", "W"]
        return prompt, token

    results = run_threads(ranks, on_rank)
    check_measured([prompt for prompt, _ in results])
    check_measured([token for _, token in results])
    prompt_plan, token_plan = (plans_of(compiled)[-1] for compiled in results[0])
    first, later = prompt_plan, token_plan
    if token_first:
        first, later = token_plan, prompt_plan
    assert first.shared is None
    assert later.shared.names == ("W", "U")


@pytest.mark.parametrize("ranks", [1, 3])
def test_parameters_are_not_shared(ranks):
    """Both jobs have a parameter of the same name, with another value."""
    w, _ = write_weights(6, 5, 4)
    text = "z[k] = rate * sum(x[j] * W[j,k])"
    x = np.arange(6.0)

    def on_rank(comm):
        steps = []
        for rate in (2.0, 3.0, 2.0):
            job = einmpi.program(text, x=(6,), rate=rate, resident=True, inputs={"W": WEIGHTS["W"]})
            share = steps[0] if steps else None
            steps.append(einmpi.compile(job, comm, share=share))
        for _ in range(4):
            for step, rate in zip(steps, (2.0, 3.0, 2.0), strict=True):
                np.testing.assert_allclose(step(x=x)["z"].gather(), rate * (x @ w))
                np.testing.assert_allclose(step(x=x, rate=7.0)["z"].gather(), 7 * (x @ w))
            assert all(step.resident is steps[0].resident for step in steps)

    run_threads(ranks, on_rank)


def test_files_are_read_once():
    w, u = write_weights(6, 5, 4)
    x = np.arange(18.0).reshape(3, 6)

    def on_rank(comm):
        prompt = einmpi.compile(prompt_job(3, 6), comm)
        token = einmpi.compile(token_job(6), comm, share=prompt)
        prompt({"X": x})
        comm.barrier()
        if comm.rank == 0:
            os.remove("W.npy")
            os.remove("U.npy")
        comm.barrier()
        return token({"x": x[1]})["z"].gather()

    for found in run_threads(3, on_rank):
        np.testing.assert_allclose(found, np.tanh(x[1] @ w) @ u)


def test_what_one_job_forgets_both_load_again():
    w, u = write_weights(6, 5, 4)
    x = np.arange(6.0)

    def on_rank(comm):
        prompt = einmpi.compile(prompt_job(1, 6), comm)
        token = einmpi.compile(token_job(6), comm, share=prompt)
        third = einmpi.compile(token_job(6), comm, share=token)
        prompt({"X": x[None]})
        token({"x": x})
        comm.barrier()
        if comm.rank == 0:
            np.save("W.npy", 2 * w)
        comm.barrier()
        before = token({"x": x})["z"].gather()
        prompt.forget_inputs()
        after = [token({"x": x})["z"], prompt({"X": x[None]})["Z"], third({"x": x})["z"]]
        assert len(prompt.resident) == 2
        return before, [array.gather().reshape(-1) for array in after]

    for before, after in run_threads(2, on_rank):
        np.testing.assert_allclose(before, np.tanh(x @ w) @ u)
        for found in after:
            np.testing.assert_allclose(found, np.tanh(x @ (2 * w)) @ u)


@pytest.mark.parametrize(("first_mode", "second_mode"), [(True, "fit"), ("fit", True)])
def test_one_job_keeps_inputs_and_the_other_if_they_fit(first_mode, second_mode):
    w, u = write_weights(6, 4, 3)
    x = np.random.default_rng(1).standard_normal((5, 6))

    def on_rank(comm):
        first = einmpi.compile(prompt_job(5, 6, resident=first_mode), comm)
        found = [first(X=x)["Z"].gather()]
        second = einmpi.compile(prompt_job(5, 6, resident=second_mode), comm, share=first)
        found.append(second(X=x)["Z"].gather())
        assert second.resident is first.resident
        assert {name for name, _ in first.resident} == {"W", "U"}
        return found

    for found in run_threads(2, on_rank):
        for result in found:
            np.testing.assert_allclose(result, np.tanh(x @ w) @ u)


def test_memory_is_freed_with_the_last_job():
    w, u = write_weights(6, 5, 4)
    prompt = einmpi.compile(prompt_job(2, 6))
    token = einmpi.compile(token_job(6), share=prompt)
    prompt({"X": np.ones((2, 6))})
    block = weakref.ref(next(iter(prompt.resident.values())))
    del prompt
    gc.collect()
    np.testing.assert_allclose(token({"x": np.ones(6)})["z"].gather(), np.tanh(np.ones(6) @ w) @ u)
    assert block() is not None
    del token
    gc.collect()
    assert block() is None


def test_the_plan_says_what_layouts_of_others_cost():
    write_weights(64, 48, 4)
    x = np.ones((96, 64))

    def on_rank(comm):
        prompt = einmpi.compile(prompt_job(96, 64), comm, pin={"Z": (4, 1)}, memory="40 KiB")
        token = einmpi.compile(token_job(64), comm, share=prompt)
        alone = einmpi.compile(token_job(64), comm)
        prompt({"X": x})
        token({"x": x[0]})
        alone({"x": x[0]})
        return prompt, token, alone

    results = run_threads(4, on_rank)
    check_measured([token for _, token, _ in results])
    prompt, token, alone = (plans_of(compiled)[0] for compiled in results[0])
    assert token.layouts["W"] == results[0][0].residents.layouts["W"].cuts
    assert token.words_predicted > alone.words_predicted
    assert token.shared.words_more == token.words_predicted - alone.words_predicted
    line = f"with other layouts {token.shared.words_more} words less would move"
    assert line in str(token)
    assert "shared" not in str(alone) and "shared" not in str(prompt)
    assert token.digest != alone.digest


def test_layouts_on_a_mesh_that_leaves_a_rank_idle():
    w, u = write_weights(10, 20, 4)
    x = np.random.default_rng(1).standard_normal((20, 10))

    def on_rank(comm):
        prompt = einmpi.compile(prompt_job(20, 10), comm)
        token = einmpi.compile(token_job(10), comm, share=prompt)
        prompt({"X": einmpi.DistArray.from_global(x, comm)})
        return token, token({"x": einmpi.DistArray.from_global(x[3], comm)})["z"].gather()

    results = run_threads(11, on_rank)
    check_measured([token for token, _ in results])
    for _, found in results:
        np.testing.assert_allclose(found, np.tanh(x[3] @ w) @ u)


def test_layouts_that_some_ranks_cannot_tell_apart():
    """Some ranks have the same part of B in both plans, but all of them read the file together."""
    random = np.random.default_rng(1)
    a = random.random((8, 64))
    b = random.random((64, 3))
    np.save("B.npy", b)
    text = "Z[i,k] = sum(A[i,j] * B[j,k])"
    job = einmpi.program(text, A=a.shape, inputs={"B": {"file": "B.npy"}}, resident=True)

    def on_rank(comm):
        product = einmpi.compile(job, comm, pin={"B": (1, 2)})
        array = einmpi.DistArray.from_global(a, comm)
        found = []
        for cuts in ((None, None), (None, 0), (1, None), (None, None)):
            given = array.redistribute(Layout(Mesh(4), a.shape, cuts))
            found.append(product({"A": given})["Z"].gather())
        return found, list(product.resident)

    for found, loaded in run_threads(4, on_rank):
        assert len(loaded) == 2
        for each in found:
            np.testing.assert_allclose(each, a @ b)


def test_ranks_of_a_node_share_memory_too(monkeypatch):
    monkeypatch.setattr(shared_inputs, "MIN_SHARED_BYTES", 1)
    w, u = write_weights(8, 6, 4)
    x = np.random.default_rng(1).standard_normal((4, 8))

    def on_rank(comm):
        prompt = einmpi.compile(prompt_job(4, 8), comm, strategy="replicate")
        token = einmpi.compile(token_job(8), comm, share=prompt)
        found = prompt({"X": x})["Z"].gather(), token({"x": x[3]})["z"].gather()
        return prompt, token, found

    results = run_threads(4, on_rank)
    addresses = set()
    for prompt, _, (many, one) in results:
        np.testing.assert_allclose(many, np.tanh(x @ w) @ u)
        np.testing.assert_allclose(one, np.tanh(x[3] @ w) @ u)
        for (name, _), block in prompt.resident.items():
            if name == "W":
                addresses.add(block.__array_interface__["data"][0])
    assert len(addresses) == 1
    check_measured([token for _, token, _ in results])


@pytest.mark.parametrize("ranks", [1, 3])
def test_on_gpus_weights_stay_on_the_device(ranks, monkeypatch):
    fake_cupy.install(monkeypatch)
    w, u = write_weights(8, 6, 4)
    x = np.random.default_rng(1).standard_normal((4, 8))

    def on_rank(comm):
        prompt = einmpi.compile(replace(prompt_job(4, 8), backend="cupy"), comm)
        token = einmpi.compile(replace(token_job(8), backend="cupy"), comm, share=prompt)
        many = prompt({"X": x})["Z"].gather()
        blocks = dict(prompt.backend.resident)
        one = token({"x": x[3]})["z"].gather()
        assert token.backend.resident.keys() == blocks.keys()
        for key, block in blocks.items():
            assert token.backend.resident[key] is block
        return many, one

    for many, one in run_threads(ranks, on_rank):
        np.testing.assert_allclose(many, np.tanh(x @ w) @ u)
        np.testing.assert_allclose(one, np.tanh(x[3] @ w) @ u)


ON_REAL_RANKS = """
import numpy as np
import einmpi
from einmpi.comm.mpi import comm_of

comm = comm_of()
w = np.random.default_rng(1).standard_normal((300, 200))
if comm.rank == 0:
    np.save("w.npy", w)
comm.barrier()
inputs = {"W": {"file": "w.npy"}}
many = einmpi.program("Z[i,k] = sum(X[i,j] * W[j,k])", X=(30, 300), inputs=inputs, resident=True)
one = einmpi.program("z[k] = sum(x[j] * W[j,k])", x=(300,), inputs=inputs, resident=True)
prompt = einmpi.compile(many)
token = einmpi.compile(one, share=prompt)
x = np.random.default_rng(2).standard_normal((30, 300))
for _ in range(2):
    np.testing.assert_allclose(prompt({"X": x})["Z"].gather(), x @ w, atol=1e-9)
    np.testing.assert_allclose(token({"x": x[0]})["z"].gather(), x[0] @ w, atol=1e-9)
assert len(prompt.resident) == 1 and token.resident is prompt.resident
plan = next(iter(token.ready.values()))[0]
received = sum(map(int, comm.allgather_text(str(token.measured.received))))
assert received == plan.bytes_predicted, (received, plan.bytes_predicted)
assert token.measured.peak <= plan.peak
if comm.rank == 0:
    print("shared")
"""


@pytest.mark.slow
def test_on_real_ranks():
    done = run_mpi(3, ON_REAL_RANKS, timeout=120, cwd=os.getcwd())
    assert done.returncode == 0, done.stderr
    assert done.stdout == "shared\n"


def test_messages():
    write_weights(6, 5, 4)
    prompt = einmpi.compile(prompt_job(2, 6))

    def refusal(job, share=prompt):
        return error(lambda: einmpi.compile(job, share=share))

    assert refusal(token_job(6), 3) == (
        "compile: share is int; expected a job that einmpi.compile has made ready"
    )
    other = einmpi.program("z = sum(W[j,k])", W=(6, 5))
    assert refusal(other) == (
        "compile: the two jobs have no resident input in common; "
        "expected inputs of the same name that are resident in both"
    )
    np.save("V.npy", np.zeros((6, 5)))
    other = einmpi.program("z = sum(W[j,k])", inputs={"W": {"file": "V.npy"}}, resident=True)
    assert refusal(other) == (
        "compile: W is float64[6, 5] of V.npy here and float64[6, 5] of W.npy in the job to share "
        "with; expected the same source in both jobs"
    )
    generated = {"W": {"random": "ones", "shape": (6, 5), "seed": 3}}
    other = einmpi.program("z = sum(W[j,k])", inputs=generated, resident=True)
    assert refusal(other) == (
        "compile: W is float64[6, 5], ones with seed 3, here and float64[6, 5] of W.npy in the job "
        "to share with; expected the same source in both jobs"
    )
    assert refusal(replace(token_job(6), backend="cupy")) == (
        "compile: the job runs on cupy, the one to share with on numpy; expected the same backend"
    )

    def on_rank(comm):
        return error(lambda: einmpi.compile(token_job(6), comm, share=prompt))

    for message in run_threads(2, on_rank):
        assert message == (
            "compile: the job to share with is on another communicator; "
            "expected the same communicator"
        )


@pytest.mark.parametrize("ranks", [1, 2])
def test_calls_with_inputs_that_stay_are_prepared(ranks):
    w, u = write_weights(6, 5, 4)
    x = np.random.default_rng(1).standard_normal((5, 6))

    def on_rank(comm):
        prompt = einmpi.compile(prompt_job(1, 6), comm)
        token = einmpi.compile(token_job(6), comm, share=prompt)
        for row in x:
            found = token({"x": row})["z"].gather()
            np.testing.assert_allclose(found, np.tanh(row @ w) @ u)
        prepared = [known.prepared is not None for known in token.known_calls.calls.values()]
        comm.barrier()
        if comm.rank == 0:
            np.save("W.npy", 2 * w)
        comm.barrier()
        prompt.forget_inputs()
        for row in x:
            found = token({"x": row})["z"].gather()
            np.testing.assert_allclose(found, np.tanh(row @ (2 * w)) @ u)
        prepared += [known.prepared is not None for known in token.known_calls.calls.values()]
        return prepared, token

    results = run_threads(ranks, on_rank)
    for prepared, _ in results:
        assert prepared == [True, True]
    check_measured([token for _, token in results])
