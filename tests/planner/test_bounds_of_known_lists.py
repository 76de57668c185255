"""Lower bounds of programs in which lists of indices that are known say what ranks read: no plan
moves less, whatever the lists are.
"""

import itertools

import numpy as np
import pytest
from bound_cases import is_among
from known_lists import program_with_known, read_in
from random_cuts import random_cuts

import einmpi
from einmpi.planner.lower_bound.pieces import ALL_CUTS
from einmpi.planner.make_plan import make_plan
from einmpi.planner.plan import Options

PROGRAMS = (
    "y[i] = x[k[i]]",
    "z[q,f] = X[k[q],f] * a[q]",
    "s = sum(x[k[q]] * a[q])",
    "z[q] = sum[f](X[k[q],f] * Y[m[q],f])",
    "y[r[q]:n] = sum[q](a[q] * x[k[q]]); s = sum[i](y[i] * x[i])",
    "y[r[q]:n] = sum[q](a[q] * x[k[q]]); z[r[q]:n] = sum[q](a[q] * y[k[q]])",
    "y[r[q]:n] = max[q](a[q] + x[k[q]]); t = sum[i](y[i])",
    "y[k[q]:n] = sum[q](a[q] * x[r[q]]); u = sum(y[i]); w[i] = y[i] / u",
    "P[r[q]:n,f] = sum[q](a[q] * X[k[q],f]); G[f,g] = sum[i](P[i,f] * P[i,g])",
    "z[v,f] = sum[c](X[N[v,c],f]); u[v] = sum[f](z[v,f] * Z[v,f])",
    "z[v,c] = X[N[v,c],c]",
    "T[q] = x[k[q]] * a[q]; u = sum(T[q]); v[q] = T[q] / u; y[r[q]:n] = sum[q](v[q])",
    "b[i] = x[i] + x[k[i]]; c[i] = b[m[i]] * x[i]",
)


def arrays_of(rng):
    """Inputs of the programs: the lists, of which `r` ascends, and all others."""
    n, stored, width = (int(rng.integers(low, high)) for low, high in ((4, 30), (4, 60), (1, 6)))
    most = int(rng.choice([1, 2, n]))  # few different indices, or many
    lists = {
        "k": rng.integers(0, most, max(stored, n)),
        "m": rng.integers(0, n, max(stored, n)),
        "r": np.sort(rng.integers(0, n, max(stored, n))),
        "N": rng.integers(0, most, (int(rng.integers(1, 9)), 3)),
    }
    shapes = {
        "x": (n,),
        "a": lists["k"].shape,
        "X": (n, width),
        "Y": (n, width),
        "Z": (len(lists["N"]), width),
    }
    return lists, shapes, n


def plans_of(text, rng, monkeypatch, ranks):
    """Plans of one program: of some strategies, and such with random cuts."""
    lists, shapes, n = arrays_of(rng)
    if "X[N[v,c],c]" in text:
        shapes["X"] = (n, 3)
    if "[k[i]]" in text:
        lists = {name: each[:n] for name, each in lists.items()}
    graph = program_with_known(
        text.replace(":n", f":{n}"), read_in(text, lists), **read_in(text, shapes)
    ).graph
    plans = [
        make_plan(graph, ranks, Options(strategy))
        for strategy in ("eindecomp", "sqrt", "replicate")
    ]
    for seed in range(8):
        with monkeypatch.context() as patches:
            random_cuts(patches, seed)
            plans.append(make_plan(graph, ranks))
    return plans


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("text", PROGRAMS)
def test_no_plan_moves_less(text, seed, monkeypatch):
    rng = np.random.default_rng(seed)
    plans = plans_of(text, rng, monkeypatch, int(rng.choice([2, 3, 4, 6, 8, 12])))
    for plan, other in itertools.product(plans, plans):
        if is_among(other, plan):
            assert plan.lower_bound <= other.words_predicted, f"{plan.among}\n{plan}\n{other}"


def test_ranks_that_compute_the_same_need_what_lists_name_again():
    k = np.arange(24)[::-1].copy()
    job = program_with_known("s = sum(x[k[q]] * a[q])", {"k": k}, x=(24,), a=(24,))
    plan = einmpi.plan(job, 4)
    assert 0 < plan.lower_bound <= plan.words_predicted
    assert plan.among != ALL_CUTS or plan.lower_bound <= 6  # the parts of the sum
