"""Fused chains: attention without its scores in memory, forward and backward, on any ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_cupy
import numpy as np
import pytest
from distributed import run_on_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from step_kinds import computed_as

import einmpi
from einmpi.api import options_of
from einmpi.comm.threads import ThreadComm, run_threads
from einmpi.compiled.program import Compiled
from einmpi.errors import EinmpiError
from einmpi.kernels.cuda.attention import chain as whole_chain
from einmpi.planner import chains as blocks
from einmpi.planner import chains as find
from einmpi.planner.plan import Plan
from einmpi.planner.text.explain import as_json
from einmpi.runtime import actions
from einmpi.runtime import compute as chain_step
from einmpi.runtime.sharing import inputs as sharing_inputs
from einmpi.runtime.threads import THREAD_VARIABLES
from einmpi.schedule.compute import Compute
from einmpi.schedule.lower import lower

ATTENTION = """
T[b,h,s,t] = sum[d](Q[b,s,h,d] * K[b,t,h,d]) * 0.25
M[b,h,s,t] = where(t <= s, T[b,h,s,t], -1e4)
A[b,h,s,t] = softmax[t](M[b,h,s,t])
O[b,s,h,d] = sum[t](A[b,h,s,t] * V[b,t,h,d])
"""


@pytest.fixture(autouse=True)
def small_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuse small chains too, and compute them in blocks of a few rows."""
    fuse_small_chains(monkeypatch)


def fuse_small_chains(monkeypatch: pytest.MonkeyPatch, budget: int = 3000) -> None:
    choose = blocks.choose_block

    def choose_small_block(
        members: Any, inner: Any, rows: Any, least_sizes: Any, _: int
    ) -> tuple[int, ...]:
        return choose(members, inner, rows, [1] * len(least_sizes), budget)

    monkeypatch.setattr(find, "MIN_INNER_BYTES", 0)
    monkeypatch.setattr(find, "choose_block", choose_small_block)


def unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "MIN_INNER_BYTES", 2**60)


def arrays_for(job: einmpi.Job, seed: int = 0) -> dict[str, np.ndarray]:
    """Values for the inputs of a job."""
    rng = np.random.default_rng(seed)
    found = {}
    for vertex in job.graph.inputs:
        dtype = np.dtype(vertex.dtype)
        if dtype.kind in "iu":
            found[vertex.name] = rng.integers(-9, 9, vertex.bound).astype(dtype)
        else:
            found[vertex.name] = rng.standard_normal(vertex.bound).astype(dtype)
    return found


def chains_in(plan: Plan, rank: int = 0) -> list[Compute]:
    return [step for step in lower(plan, rank).steps if computed_as(step) == "memory"]


def numpy_attention(q: Any, k: Any, v: Any, masked: float = -1e4) -> np.ndarray:
    q, k, v = (np.asarray(array, np.float64) for array in (q, k, v))
    scores = np.einsum("bshd,bthd->bhst", q, k) * 0.25
    size = scores.shape[2:]
    allowed = np.arange(size[1])[None, :] <= np.arange(size[0])[:, None]
    scores = np.where(allowed, scores, masked)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhst,bthd->bshd", weights, v)


def error_bound(dtype: str, terms: int, scale: float) -> float:
    """Twice the unit in the last place, times the root of the number of terms."""
    epsilon = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
    return 2 * epsilon[dtype] * float(np.sqrt(terms)) * scale


def assert_within(found: Any, expected: Any, dtype: str, terms: int) -> None:
    found = np.asarray(found, np.float64)
    expected = np.asarray(expected, np.float64)
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    assert np.abs(found - expected).max(initial=0) <= error_bound(dtype, terms, scale)


# ---- forward ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7])
def test_attention(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (2, 23, 3, 4)
    job = einmpi.program(ATTENTION, Q=shape, K=shape, V=shape)
    arrays = arrays_for(job)
    done = run_on_threads(job, ranks, arrays)
    assert_within(done.outputs["O"], numpy_attention(**lower_case(arrays)), "float64", 23)
    assert len(done.plan.chains) == 1 or any(cut == "t" for cut in done.plan.states["A"])
    unfused(monkeypatch)
    whole = run_on_threads(job, ranks, arrays)
    assert not whole.plan.chains
    assert done.moved == whole.moved
    assert_within(done.outputs["O"], whole.outputs["O"], "float64", 23)


def lower_case(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.lower(): array for name, array in arrays.items()}


@pytest.mark.slow
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    rows=st.integers(1, 40),
    keys=st.integers(1, 40),
    width=st.integers(1, 5),
    ranks=st.sampled_from([1, 2, 3, 4, 5, 6]),
    dtype=st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    budget=st.sampled_from([1, 400, 3000, 20000]),
    resident=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_attention_of_any_shape(
    batch: int,
    heads: int,
    rows: int,
    keys: int,
    width: int,
    ranks: int,
    dtype: str,
    budget: int,
    resident: bool,
) -> None:
    shapes = {
        "Q": (batch, rows, heads, width),
        "K": (batch, keys, heads, width),
        "V": (batch, keys, heads, width),
    }
    job = einmpi.program(ATTENTION, dtype=dtype, **shapes)
    if resident:
        job = replace(job, inputs=tuple(replace(spec, resident=True) for spec in job.inputs))
    arrays = arrays_for(job)
    with pytest.MonkeyPatch.context() as patch:
        fuse_small_chains(patch, budget)
        done = run_on_threads(job, ranks, arrays)
        unfused(patch)
        whole = run_on_threads(job, ranks, arrays)
    assert done.moved == whole.moved == done.plan.bytes_predicted
    assert done.plan.peak <= whole.plan.peak
    assert_within(done.outputs["O"], whole.outputs["O"], dtype, keys)
    assert_within(done.outputs["O"], numpy_attention(**lower_case(arrays)), dtype, 4 * keys)


@pytest.mark.slow
@given(
    batch=st.integers(1, 2),
    heads=st.integers(1, 3),
    rows=st.integers(1, 260),
    keys=st.integers(30, 260),
    width=st.sampled_from([1, 3, 8]),
    spread=st.sampled_from([0.1, 1.0, 6.0]),
    dtype=st.sampled_from(["float32", "float64"]),
    budget=st.sampled_from([1, 40_000, 300_000]),
    threads=st.integers(1, 3),
)
@settings(max_examples=8, deadline=None)
def test_fusing_changes_results_by_two_units_times_the_root_of_the_terms(
    batch: int,
    heads: int,
    rows: int,
    keys: int,
    width: int,
    spread: float,
    dtype: str,
    budget: int,
    threads: int,
) -> None:
    """Units in the last place of the largest result, for flat and for pointed weights."""
    shapes = dict.fromkeys("KV", (batch, keys, heads, width))
    job = einmpi.program(ATTENTION, dtype=dtype, Q=(batch, rows, heads, width), **shapes)
    arrays = arrays_for(job)
    arrays["Q"] = (spread * arrays["Q"]).astype(dtype)
    with pytest.MonkeyPatch.context() as patch:
        use_threads(patch, threads)
        fuse_small_chains(patch, budget)
        fused = einmpi.run(job, arrays)["O"].gather()
        unfused(patch)
        whole = einmpi.run(job, arrays)["O"].gather()
    scale = float(np.abs(whole).max())
    difference = np.abs(fused.astype(np.float64) - whole.astype(np.float64))
    assert difference.max() <= error_bound(dtype, keys, scale)


OTHER_CHAINS = {
    "grouped queries": (
        """
        T[g,r,s,t] = sum[d](Q[s,g,r,d] * K[t,g,d])
        A[g,r,s,t] = softmax[t](T[g,r,s,t])
        O[s,g,r,d] = sum[t](A[g,r,s,t] * V[t,g,d])
        """,
        {"Q": (19, 2, 3, 2), "K": (17, 2, 2), "V": (17, 2, 2)},
        "float64",
    ),
    "no row reduction": (
        """
        T[s,t] = sum[d](Q[s,d] * K[t,d])
        O[s,d] = sum[t](relu(T[s,t]) * V[t,d])
        """,
        {"Q": (40, 2), "K": (33, 2), "V": (33, 2)},
        "float64",
    ),
    "bias and one row for all": (
        """
        T[b,s,t] = sum[d](X[b,s,d] * X[b,t,d]) + bias[s,t]
        A[b,s,t] = softmax[t](T[b,s,t])
        O[b,s,d] = sum[t](A[b,s,t] * X[b,t,d])
        """,
        {"X": (3, 29, 2), "bias": (29, 29)},
        "float32",
    ),
    "largest paths": (
        """
        T[s,t] = max[d](Q[s,d] + K[t,d])
        R[s] = max[t](T[s,t])
        P[s,t] = T[s,t] - R[s]
        O[s,d] = max[t](P[s,t] + V[t,d])
        """,
        {"Q": (31, 3), "K": (37, 3), "V": (37, 3)},
        "float32",
    ),
    "integers": (
        """
        T[s,t] = sum[d](Q[s,d] * K[t,d])
        P[s,t] = where(T[s,t] > t - s, T[s,t], -s)
        O[s,d] = sum[t](P[s,t] * V[t,d])
        """,
        {"Q": (30, 3), "K": (28, 3), "V": (28, 3)},
        "int32",
    ),
    "sums over rows": (
        """
        T[s,t] = sum[d](Q[s,d] * K[t,d])
        A[s,t] = softmax[t](T[s,t])
        O[t,d] = sum[s](A[s,t] * V[s,d])
        most[t,d] = max[s](A[s,t] * V[s,d])
        """,
        {"Q": (41, 3), "K": (20, 3), "V": (41, 3)},
        "float64",
    ),
    "a gathered tensor": (
        """
        T[s,t] = sum[d](Q[s,d] * K[t,d])
        A[s,t] = softmax[t](T[s,t] + shift[group[s]])
        O[s,d] = sum[t](A[s,t] * V[t,d])
        """,
        {"Q": (27, 3), "K": (25, 3), "V": (25, 3), "shift": (4,)},
        "float64",
    ),
}


@pytest.mark.parametrize("name", OTHER_CHAINS)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_other_chains(name: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text, shapes, dtype = OTHER_CHAINS[name]
    given: dict[str, Any] = dict(shapes)
    if "group" in text and "shift" in text:
        given["group"] = np.arange(27) % 4
    job = einmpi.program(text, dtype=dtype, **given)
    arrays = arrays_for(job)
    if "group" in arrays:
        arrays["group"] = np.arange(27) % 4
    done = run_on_threads(job, ranks, arrays)
    if ranks == 1:
        assert len(done.plan.chains) == 1
        assert "T" in "".join(done.plan.chains[0].inner)
    expected = einmpi.reference(job, arrays)
    unfused(monkeypatch)
    whole = run_on_threads(job, ranks, arrays)
    assert not whole.plan.chains
    assert done.moved == whole.moved
    for output in job.graph.outputs:
        if dtype == "int32":
            np.testing.assert_array_equal(done.outputs[output], expected[output])
        else:
            assert_within(done.outputs[output], expected[output], dtype, 40)
            assert_within(done.outputs[output], whole.outputs[output], dtype, 40)


REFUSED: dict[str, Callable[[], einmpi.Job]] = {
    "the scores are an output": lambda: einmpi.program(
        ATTENTION, outputs=["A", "O"], Q=(1, 30, 1, 2), K=(1, 30, 1, 2), V=(1, 30, 1, 2)
    ),
    "scores are not larger than what they are computed from": lambda: einmpi.program(
        ATTENTION, Q=(1, 8, 1, 20), K=(1, 8, 1, 20), V=(1, 8, 1, 20)
    ),
    "nothing is contracted": lambda: einmpi.program(
        "T[s,t] = sum[d](Q[s,d] * K[t,d])\nO[s] = max[t](T[s,t])", Q=(30, 2), K=(30, 2)
    ),
    "rows depend on one another": lambda: einmpi.program(
        """
        T[s,t] = sum[d](Q[s,d] * K[t,d])
        A[s,t] = T[s,t] / sum[s,t](T[s,t])
        O[s,d] = sum[t](A[s,t] * V[t,d])
        """,
        Q=(30, 2),
        K=(30, 2),
        V=(30, 2),
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_no_chain(why: str) -> None:
    plan = einmpi.plan(REFUSED[why](), ranks=1)
    assert not plan.chains
    assert not chains_in(plan)


# ---- gradients ----------------------------------------------------------------------------------

BLOCK = """
q[s,h,d] = sum[m](X[s,m] * Wq[m,h,d])
k[s,h,d] = sum[m](X[s,m] * Wk[m,h,d])
v[s,h,d] = sum[m](X[s,m] * Wv[m,h,d])
T[h,s,t] = sum[d](q[s,h,d] * k[t,h,d]) * 0.25
A[h,s,t] = softmax[t](where(t <= s, T[h,s,t], -1e4))
O[s,h,d] = sum[t](A[h,s,t] * v[t,h,d])
Y[s,m] = tanh(sum[h,d](O[s,h,d] * Wo[m,h,d]))
loss = sum[s,m]((Y[s,m] - target[s,m]) ** 2)
"""
WEIGHTS = ["Wq", "Wk", "Wv", "Wo"]


def block_with_gradients(rows: int, dtype: str = "float64") -> einmpi.Job:
    width, heads, each = 5, 3, 2
    shapes = dict.fromkeys(WEIGHTS, (width, heads, each))
    job = einmpi.program(BLOCK, dtype=dtype, X=(rows, width), target=(rows, width), **shapes)
    return einmpi.grad(job, "loss", WEIGHTS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_gradients_compute_scores_again(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of all scores is whole in memory, and the gradients are those of the unfused."""
    job = block_with_gradients(48)
    arrays = arrays_for(job)
    done = run_on_threads(job, ranks, arrays)
    unfused(monkeypatch)
    whole = run_on_threads(job, ranks, arrays)
    assert done.moved == whole.moved
    for name in job.graph.outputs:
        assert_within(done.outputs[name], whole.outputs[name], "float64", 48 * 16)
    if ranks > 1:
        return
    plan = done.plan
    assert len(plan.chains) == 2
    assert plan.recomputed is not None and plan.recomputed.tensors
    assert plan.recomputed.operations > 0
    assert plan.graph.operations() == whole.plan.graph.operations() + plan.recomputed.operations
    inner = {name for chain in plan.chains for name in chain.inner}
    for vertex in plan.graph.computed:
        assert vertex.name in inner or vertex.elements <= 48 * 15
    assert plan.peak < whole.plan.peak / 2


TWICE = """
T[h,s,t] = sum[d](Q[h,s,d] * K[h,t,d]) * 0.25
A[h,s,t] = softmax[t](where(t <= s, T[h,s,t], -1e4))
O[h,s,d] = sum[t](A[h,s,t] * V[h,t,d])
L = sum[h,s,d](O[h,s,d] ** 3)
G[h,s,d] = grad(L, Q[h,s,d])
M = sum[h,s,d](G[h,s,d] ** 2)
H[h,t,d] = grad(M, K[h,t,d])
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(2, 17, 3), (0, 17, 3), (2, 0, 3), (2, 17, 0)], ids=str)
@pytest.mark.parametrize("ranks", [1, 3])
def test_second_derivatives_of_any_extent(
    shape: tuple[int, ...], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = einmpi.program(TWICE, Q=shape, K=shape, V=shape, outputs=["H", "G", "L"])
    arrays = arrays_for(job)
    done = run_on_threads(job, ranks, arrays)
    assert bool(done.plan.chains) == (0 not in shape[:2])
    assert done.moved == done.plan.bytes_predicted
    unfused(monkeypatch)
    whole = run_on_threads(job, ranks, arrays)
    expected = einmpi.reference(job, arrays)
    for name in job.graph.outputs:
        assert_within(done.outputs[name], expected[name], "float64", 17 * 64)
        assert_within(done.outputs[name], whole.outputs[name], "float64", 17 * 64)


def test_gradients_by_finite_differences() -> None:
    job = block_with_gradients(21)
    arrays = arrays_for(job)
    found = run_on_threads(job, 2, arrays)
    assert found.plan.chains
    rng = np.random.default_rng(1)
    step = 1e-6
    for name in WEIGHTS:
        direction = rng.standard_normal(arrays[name].shape)
        losses = []
        for sign in (1, -1):
            moved = {**arrays, name: arrays[name] + sign * step * direction}
            losses.append(float(einmpi.reference(job, moved)["loss"]))
        expected = (losses[0] - losses[1]) / (2 * step)
        gradient = found.outputs[f"d{name}"]
        assert float((gradient * direction).sum()) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.slow
@given(rows=st.integers(2, 40), ranks=st.sampled_from([1, 2, 3, 4, 7]), budget=st.integers(1, 9000))
@settings(max_examples=10, deadline=None)
def test_gradients_of_any_shape(rows: int, ranks: int, budget: int) -> None:
    job = block_with_gradients(rows, "float32")
    arrays = arrays_for(job)
    with pytest.MonkeyPatch.context() as patch:
        fuse_small_chains(patch, budget)
        done = run_on_threads(job, ranks, arrays)
    expected = einmpi.reference(job, arrays)
    for name in job.graph.outputs:
        assert_within(done.outputs[name], expected[name], "float32", rows * 64)


def test_gradients_where_the_first_product_of_the_backward_pass_comes_first() -> None:
    """The chain of dA alone, with A kept, is smaller than the one that computes A again."""
    shape = (64, 2, 3)
    text = BLOCK[BLOCK.index("T[h,s,t]") : BLOCK.index("Y[s,m]")]
    text += "N = sum(O[s,h,d] ** 2)\nloss = sum(O[s,h,d] * W[s,h,d]) / N"
    job = einmpi.program(text, q=shape, k=shape, v=shape, W=shape)
    job = einmpi.grad(job, "loss", ["q", "k", "v"])
    arrays = arrays_for(job)
    done = run_on_threads(job, 1, arrays)
    assert len(done.plan.chains) == 2
    assert done.plan.recomputed is not None and done.plan.recomputed.tensors == ("A",)
    expected = einmpi.reference(job, arrays)
    for name in ("dq", "dk", "dv"):
        assert_within(done.outputs[name], expected[name], "float64", 64 * 16)


def test_no_tensor_is_computed_again_unless_the_options_allow_it() -> None:
    job = block_with_gradients(48)
    plan = einmpi.plan(job, ranks=1, recompute="none")
    assert plan.recomputed is None
    for chain in plan.chains:
        assert "A" not in chain.inner
    named = einmpi.plan(job, ranks=1, recompute=["A"])
    assert named.recomputed is not None
    assert len(named.chains) == 2


# ---- plans --------------------------------------------------------------------------------------


def long_attention(rows: int, dtype: str = "float32", heads: int = 1) -> einmpi.Job:
    shape = (1, rows, heads, 64)
    return einmpi.program(ATTENTION, dtype=dtype, Q=shape, K=shape, V=shape)


def test_a_plan_says_what_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    plan = einmpi.plan(long_attention(8192), ranks=2)
    (chain,) = plan.chains
    assert chain.outer == ("O",)
    assert "fused" in str(plan) and "A → O: " in str(plan)
    data = as_json(plan)
    assert data["fused"][0]["vertices"] == list(chain.vertices)
    assert data["fused"][0]["bytes_of_blocks"] == chain.nbytes <= 9 * 2**20
    assert plan.digest == einmpi.plan(long_attention(8192), ranks=2).digest
    assert plan.peak < 32 * 2**20
    assert not einmpi.plan(long_attention(512), ranks=1).chains  # scores of a mebibyte


def test_the_blocks_of_a_gpu_are_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    job = replace(long_attention(32768, "float16", 32), backend="cupy")
    plan = einmpi.plan(job, ranks=1)
    (chain,) = plan.chains
    assert 2**26 < chain.nbytes <= 2**28
    assert plan.peak < 2**31


def test_a_memory_limit_that_only_a_chain_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    plan = einmpi.plan(long_attention(8192), ranks=1, memory="40 MiB")
    assert plan.chains and not plan.spilled
    monkeypatch.setattr(find, "MIN_INNER_BYTES", 2**60)
    assert einmpi.plan(long_attention(8192), ranks=1, memory="40 MiB").spilled


@pytest.mark.slow
def test_chains_where_memory_is_short(tmp_path: Path) -> None:
    """What does not fit is kept outside, with and without the chain."""
    shape = (2, 40, 2, 4)
    names = ["X", "Y", "U", "W", "P"]
    terms = " + ".join(f"{name}[b,s,h,d]" for name in ["O", *names])
    text = ATTENTION + f"Z[b,s,h,d] = {terms}"
    shapes = dict.fromkeys(["Q", "K", "V", *names], shape)
    arrays = arrays_for(einmpi.program(text, **shapes))
    lines = [f"program = '''{text}'''", "[inputs]"]
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
        lines.append(f'{name} = {{ file = "{name}.npy" }}')
    (tmp_path / "job.toml").write_text("\n".join(lines))
    job = einmpi.load(tmp_path / "job.toml")
    expected = einmpi.reference(job)["Z"]
    kinds = set()
    for memory in (6_000, 14_000, 22_000, 24_000, 40_000):
        for ranks in (1, 2):
            done = run_on_threads(job, ranks, memory=memory)
            assert max(done.peaks) <= done.plan.peak <= memory
            np.testing.assert_allclose(done.outputs["Z"], expected, rtol=1e-12, atol=1e-12)
            kinds.add((bool(done.plan.spilled), bool(done.plan.chains)))
    assert kinds == {(True, True), (True, False), (False, True)}


# ---- elsewhere ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_computes_blocks(ranks: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains without a kernel of their own go block by block, gradients too."""
    fake_cupy.install(monkeypatch)
    monkeypatch.setattr(whole_chain, "CHAIN_KERNELS", [])
    shape = (2, 31, 2, 4)
    job = einmpi.program(ATTENTION, dtype=dtype, Q=shape, K=shape, V=shape)
    arrays = arrays_for(job)
    done = run_on_threads(replace(job, backend="cupy"), ranks, arrays)
    assert done.plan.chains
    assert_within(done.outputs["O"], numpy_attention(**lower_case(arrays)), dtype, 4 * 31)
    if dtype == "float32":
        job = block_with_gradients(30, dtype)
        arrays = arrays_for(job)
        done = run_on_threads(replace(job, backend="cupy"), ranks, arrays)
        assert done.plan.chains
        expected = einmpi.reference(job, arrays)
        for name in job.graph.outputs:
            assert_within(done.outputs[name], expected[name], dtype, 30 * 64)


def test_a_kernel_for_a_whole_chain_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy.install(monkeypatch)
    shape = (1, 31, 1, 4)
    job = einmpi.program(ATTENTION, Q=shape, K=shape, V=shape)
    arrays = arrays_for(job)
    asked = []

    def prepare(step: Compute, given: Any) -> whole_chain.PreparedChain:
        asked.append((step, sorted(given)))

        def compute(now: Any) -> None:
            now["O"].values[...] = 7

        return whole_chain.PreparedChain(compute)

    monkeypatch.setattr(whole_chain, "CHAIN_KERNELS", [lambda *_: None, prepare])
    done = run_on_threads(replace(job, backend="cupy"), 1, arrays)
    assert (done.outputs["O"] == 7).all()
    ((step, names),) = asked
    assert names == ["K", "O", "Q", "V"]
    assert [kernel.vertex for kernel in step.kernels][-1] == "O"


def test_a_repeated_call_and_other_threads() -> None:
    """A compiled job is called again with the same bits, with several threads a rank."""
    shape = (1, 33, 2, 4)
    job = einmpi.program(ATTENTION, Q=shape, K=shape, V=shape)
    arrays = arrays_for(job)
    compiled = einmpi.compile(job)
    first = compiled(arrays)["O"].gather()
    for _ in range(3):
        np.testing.assert_array_equal(compiled(arrays)["O"].gather(), first)
    other = {name: 2 * array for name, array in arrays.items()}
    assert_within(
        compiled(other)["O"].gather(), numpy_attention(**lower_case(other)), "float64", 99
    )


def test_memory_that_ranks_share_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a chain lie beside it."""
    monkeypatch.setattr(sharing_inputs, "MIN_SHARED_BYTES", 1)
    text = """
    Q[s,h,d] = sum[m](X[s,m] * A[m,h,d])
    K[s,h,d] = sum[m](X[s,m] * B[m,h,d])
    T[h,s,t] = sum[d](Q[s,h,d] * K[t,h,d])
    P[h,s,t] = softmax[t](T[h,s,t])
    O[s,h,d] = sum[t](P[h,s,t] * K[t,h,d])
    """
    job = einmpi.program(text, X=(64, 6), A=(6, 2, 3), B=(6, 2, 3))
    arrays = arrays_for(job)

    def peak_of(comm: ThreadComm, mode: str) -> int:
        compiled = Compiled(replace(job, shared=mode), comm, options_of(job, strategy="sqrt"))
        found = compiled(arrays)["O"].gather()
        assert_within(found, einmpi.reference(job, arrays)["O"], "float64", 64)
        measured = compiled.measured
        assert (measured.shared > 0) == (mode == "auto")
        return measured.peak

    shared = run_threads(4, lambda comm: peak_of(comm, "auto"))
    alone = run_threads(4, lambda comm: peak_of(comm, "off"))
    assert max(shared) < min(alone)


def use_threads(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Let a process use some threads, each for blocks of any size."""
    for variable in THREAD_VARIABLES:
        monkeypatch.setenv(variable, str(threads))
    monkeypatch.setattr(chain_step, "MIN_ROWS_OF_THREAD", 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "gradients", *OTHER_CHAINS])
def test_threads_compute_blocks_side_by_side(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes the next block of rows, in as much memory, with the same bits in every call.

    Blocks that add to the same results are done by one thread.
    """
    shape = (2, 43, 3, 4)
    text, shapes, dtype = ATTENTION, dict.fromkeys("QKV", shape), "float64"
    if name in OTHER_CHAINS:
        text, shapes, dtype = OTHER_CHAINS[name]
    given: dict[str, Any] = dict(shapes)
    if name == "a gathered tensor":
        given["group"] = np.arange(27) % 4
    job = einmpi.program(text, dtype=dtype, **given)
    if name == "gradients":
        job = block_with_gradients(48)
    arrays = arrays_for(job)
    if name == "a gathered tensor":
        arrays["group"] = np.arange(27) % 4
    used_threads = set()
    steps_of_threads: list[Compute] = []
    compute = chain_step._compute_tiles_of_thread

    def compute_share(*arguments: Any, **others: Any) -> int:
        used_threads.add(threading.current_thread().name)
        if "step" in others:
            steps_of_threads.append(others["step"])
        return compute(*arguments, **others)

    monkeypatch.setattr(chain_step, "_compute_tiles_of_thread", compute_share)
    found = []
    for threads in (1, 2, 3):
        used_threads.clear()
        use_threads(monkeypatch, threads)
        compiled = einmpi.compile(job)
        found.append({name: array.gather() for name, array in compiled(arrays).items()})
        for _ in range(3):
            for output, array in compiled(arrays).items():
                np.testing.assert_array_equal(array.gather(), found[-1][output])
        ((plan, _),) = compiled.ready.values()
        assert compiled.measured.peak <= plan.peak
        is_in_pool = any("einmpi-kernel" in thread for thread in used_threads)
        assert is_in_pool == (threads > 1 and name != "sums over rows")
    has_sums = any(step.combines_tiles for step in steps_of_threads)
    assert has_sums == (name == "gradients")
    for outputs in found[1:]:
        for output, array in outputs.items():
            assert_within(array, found[0][output], "float64" if dtype == "int32" else dtype, 100)


def test_an_error_in_a_thread_of_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other threads leave out what they have not begun; the next call works."""
    use_threads(monkeypatch, 2)
    taken = []
    take = chain_step._SharedTiles.__next__

    def noted_take(blocks: chain_step._SharedTiles) -> Any:
        found = take(blocks)
        taken.append(found)
        return found

    monkeypatch.setattr(chain_step._SharedTiles, "__next__", noted_take)
    text, shapes, dtype = OTHER_CHAINS["a gathered tensor"]
    job = einmpi.program(text, dtype=dtype, group=np.arange(27) % 4, **shapes)
    arrays = arrays_for(job)
    compiled = einmpi.compile(job)
    for groups in (np.arange(27), np.arange(27) % 4):
        arrays["group"] = groups
        if groups[-1] == 26:
            with pytest.raises(EinmpiError, match=r"A_1.*index"):
                compiled(arrays)
            taken_before_error = len(taken)
        else:
            taken.clear()
            expected = einmpi.reference(job, arrays)["O"]
            assert_within(compiled(arrays)["O"].gather(), expected, dtype, 40)
    assert 0 < taken_before_error < len(taken)


def test_after_an_error_no_thread_of_a_chain_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is in the middle of a block ends it before the error is raised."""
    use_threads(monkeypatch, 2)
    text, shapes, dtype = OTHER_CHAINS["a gathered tensor"]
    job = einmpi.program(text, dtype=dtype, group=np.arange(27) % 4, **shapes)
    compute = chain_step._steps_of_tile
    both_began = threading.Barrier(2)
    names = []
    ended = []

    def fail_or_wait(*arguments: Any) -> Any:
        names.append(threading.current_thread().name)
        is_first = both_began.wait(60) == 0
        if is_first:
            raise ValueError("the first thread fails")
        time.sleep(0.2)
        ended.append(compute(*arguments))
        return ended[-1]

    monkeypatch.setattr(chain_step, "_steps_of_tile", fail_or_wait)
    with pytest.raises(Exception, match="the first thread fails"):
        einmpi.compile(job)(arrays_for(job) | {"group": np.arange(27) % 4})
    assert len(set(names)) == 2
    assert len(ended) == 1


def test_an_error_inside_of_a_chain_names_the_vertex() -> None:
    text, shapes, dtype = OTHER_CHAINS["a gathered tensor"]
    job = einmpi.program(text, dtype=dtype, group=np.arange(27) % 4, **shapes)
    arrays = arrays_for(job)
    arrays["group"] = np.arange(27)
    assert einmpi.plan(job, ranks=1).chains
    with pytest.raises(EinmpiError, match=r"A_1.*index"):
        einmpi.run(job, arrays)


def test_training_in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a training have chains, and the losses are those of the unfused steps."""
    shapes = dict.fromkeys(WEIGHTS, (5, 3, 2))
    job = einmpi.program(BLOCK, X=(40, 5), target=(40, 5), **shapes)
    arrays = arrays_for(job)
    fused_steps = []
    compute = actions.compute

    def compute_and_note(step: Compute, *others: Any) -> None:
        if computed_as(step) == "memory":
            fused_steps.append(step)
        compute(step, *others)

    monkeypatch.setattr(actions, "compute", compute_and_note)
    options = {
        "loss": "loss",
        "parameters": WEIGHTS,
        "optimizer": {"name": "sgd", "rate": 0.01},
        "steps": 4,
        "record": ["loss"],
    }
    found = einmpi.train(job, arrays, **options)
    assert len(fused_steps) == 8
    unfused(monkeypatch)
    whole = einmpi.train(job, arrays, **options)
    assert len(fused_steps) == 8
    np.testing.assert_allclose(found.history["loss"], whole.history["loss"], rtol=1e-12)
    assert found.history["loss"][-1] < found.history["loss"][0]


def test_checkpoints_are_not_inside_of_a_chain() -> None:
    shape = (1, 40, 1, 4)
    job = einmpi.program(
        ATTENTION + "Z[b,s,h,d] = exp(O[b,s,h,d])", Q=shape, K=shape, V=shape, outputs=["Z"]
    )
    schedule = lower(einmpi.plan(job, ranks=2), 0)
    inside = {point.vertex: point.inside for point in schedule.points}
    assert not inside.pop("O") and not inside.pop("Z")
    assert inside and all(inside.values())


def test_ranks_without_rows() -> None:
    """More ranks than rows: some ranks have none, but their sums over rows are neutral."""
    text, _, _ = OTHER_CHAINS["sums over rows"]
    job = einmpi.program(text, Q=(3, 2), K=(60, 2), V=(3, 2))
    arrays = arrays_for(job)
    expected = einmpi.reference(job, arrays)
    for ranks in (5, 7):
        done = run_on_threads(job, ranks, arrays)
        for name in ("O", "most"):
            assert_within(done.outputs[name], expected[name], "float64", 60)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_weighted_sum_is_divided_inside_of_the_chain(ranks: int) -> None:
    """In one statement, the softmax's total divides the sum, not the weights."""
    shape = (2, 40, 2, 4)
    text = "T[b,h,s,t] = sum[d](Q[b,s,h,d] * K[b,t,h,d]) * 0.25\n"
    text += "O[b,s,h,d] = sum(softmax[t](T[b,h,s,t]) * V[b,t,h,d])"
    job = einmpi.program(text, Q=shape, K=shape, V=shape)
    arrays = arrays_for(job)
    done = run_on_threads(job, ranks, arrays)
    (chain,) = done.plan.chains
    assert chain.outer == ("O",)
    assert_within(done.outputs["O"], einmpi.reference(job, arrays)["O"], "float64", 40)


def test_a_result_that_others_read_is_no_part_of_a_last_product() -> None:
    shape = (2, 40, 2, 4)
    text = "T[b,h,s,t] = sum[d](Q[b,s,h,d] * K[b,t,h,d]) * 0.25\nE[b,h,s,t] = exp(T[b,h,s,t])\n"
    text += "L[b,h,s] = sum(E[b,h,s,t])\nN[b,s,h,d] = sum[t](E[b,h,s,t] * V[b,t,h,d])\n"
    text += "O[b,s,h,d] = N[b,s,h,d] / L[b,h,s]\nP = sum(N[b,s,h,d])"
    job = einmpi.program(text, Q=shape, K=shape, V=shape)
    (chain,) = einmpi.plan(job, ranks=1).chains
    assert set(chain.outer) == {"L", "N"}
