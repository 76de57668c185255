"""Known lists of indices: what moves is what was planned, and values are right."""

import numpy as np
import pytest
from distributed import assert_close, run_on_threads
from hypothesis import given
from hypothesis import strategies as st
from known_lists import program_with_known, read_in
from random_cuts import random_cuts

import einmpi

RNG = np.random.default_rng(3)
BLOCKS = np.arange(24) // 2
LISTS = {
    "k": RNG.integers(3, 17, 23),
    "m": RNG.integers(0, 20, 23).astype(np.uint32),
    "t": RNG.integers(0, 20, (5, 4)),
    "h": RNG.integers(0, 8, 23),
    "b": np.where(BLOCKS % 5 == 4, 12, BLOCKS),  # 12 is nowhere
    "c": RNG.integers(0, 20, 24),
}
PROGRAMS = {
    "vector": "V[q] = x[k[q]]",
    "rows": "V[q,f] = X[k[q],f]",
    "both dimensions": "V[q] = X[k[q],h[q]] * x[m[q]]",
    "two lists": "V[q] = x[k[q]] - x[m[q]]",
    "list of two labels": "V[a,f] = sum[e](X[t[a,e],f])",
    "rows and neighbours": "V[a,e,f] = X[t[a,e],f] * X[t[a,e],maximum(f-1, 0)]",
    "aligned": "V[i:12] = sum[q](where(b[q] == i, v[q] * x[c[q]], 0))",
    "aligned rows": "V[i:12,f] = sum[q](where(b[q] == i, v[q] * X[c[q],f], 0))",
    "not aligned": "V[i:20] = sum[q](where(c[q] == i, v[q], 0))",
    "computed": "w[j] = sum(X[j,f]); V[i:12] = sum[q](where(b[q] == i, v[q] * w[c[q]], 0))",
    "two steps": """
        w[i:20] = sum[q](where(c[q] == i, v[q] * x[c[q]], 0))
        V[i:12] = max[q](where(b[q] == i, w[c[q]], -inf)) * 2
    """,
}
ARRAYS = {
    "x": RNG.standard_normal(20),
    "X": RNG.standard_normal((20, 8)),
    "v": RNG.standard_normal(24),
}


def case(name):
    text = PROGRAMS[name]
    lists, inputs = read_in(text, LISTS), read_in(text, ARRAYS)
    return program_with_known(text, lists, **inputs), {**lists, **inputs}


def check(name, ranks, **options):
    job, inputs = case(name)
    done = run_on_threads(job, ranks, inputs, **options)
    assert done.moved == done.plan.bytes_predicted
    assert done.plan.lower_bound <= done.plan.words_predicted
    assert_close(done.outputs, einmpi.reference(job, inputs))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", PROGRAMS)
def test_plans(name, ranks):
    check(name, ranks)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ranks", [2, 4, 6])
@pytest.mark.parametrize("name", PROGRAMS)
def test_any_cuts(name, ranks, seed, monkeypatch):
    random_cuts(monkeypatch, seed)
    check(name, ranks, nodes=2 if seed % 2 else 1)


@given(st.data(), st.integers(2, 5))
def test_any_lists(data, ranks):
    """Each rank receives the distinct indices of its list that it does not own."""
    extent = data.draw(st.integers(ranks, 40))
    indices = st.integers(0, extent - 1)
    listed = data.draw(st.lists(indices, min_size=ranks, max_size=60).map(np.array))
    job = program_with_known("V[q] = x[k[q]]", {"k": listed}, x=(extent,))
    pins = {"x": (ranks,), "V": (ranks,)}
    plan = einmpi.plan(job, ranks, pin=pins)
    count = 0
    for rank in range(ranks):
        own = listed[np.arange(len(listed)) * ranks // len(listed) == rank]
        count += len(set(own[own * ranks // extent != rank].tolist()))
    assert plan.words_predicted == count
