"""Classes of ranks: what follows from one of them is what each rank does when it is lowered."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT
from rank_traces import rank_traces

import einmpi
from einmpi.simulate.classes import classes_of, ranks_of_classes, shifts_of, traces_of

JOBS = ("chain", "attention", "ffnn", "heat", "softmax", "convolution", "pagerank", "kalman")
PLACES = [(1, 1), (4, 1), (6, 3), (8, 2), (12, 4), (16, 16), (27, 3), (30, 5), (64, 8)]


def check(plan, shared):
    """Compare each trace with that of the rank's own dry run; return the number of classes."""
    expected = {trace.rank: trace for trace in rank_traces(plan, None, shared)}
    found = {}
    classes = list(classes_of(plan, None, shared))
    for each in classes:
        for trace in traces_of(plan, each):
            assert trace.rank not in found
            found[trace.rank] = trace
    assert found.keys() == expected.keys() == set(range(plan.ranks))
    for rank, trace in found.items():
        own = expected[rank]
        assert trace.lines == own.lines
        assert trace.messages == own.messages
        assert trace.received == own.received
        assert trace.received_shared == own.received_shared
    operations = {rank: each.comm.operations for each in classes for rank in each.ranks.tolist()}
    assert operations == {rank: own.operations for rank, own in expected.items()}
    check_steps(plan, shared, expected)
    return len(classes)


def check_steps(plan, shared, expected):
    """Classes of one rank each have the steps of the ranks, which begin at the same lines."""
    for each in classes_of(plan, None, shared, apart=True):
        (trace,) = traces_of(plan, each)
        own = expected[trace.rank]
        assert trace.lines == own.lines
        assert [(line, str(step)) for line, step in trace.steps] == [
            (line, str(step)) for line, step in own.steps
        ]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("ranks, nodes", PLACES)
@pytest.mark.parametrize("name", JOBS)
def test_jobs(name, ranks, nodes, shared):
    job = einmpi.load(ROOT / "jobs" / f"{name}.toml")
    check(einmpi.plan(job, ranks, nodes=nodes), shared)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("ranks, nodes", [*PLACES, (36, 6), (128, 4)])
@pytest.mark.parametrize("size", [60, 96, 97, 128])
def test_extents(size, ranks, nodes):
    """Even and uneven ones, and a prime; with 60 on 128 ranks, two axes slice the same digit."""
    job = einmpi.load(ROOT / "jobs" / "chain.toml", s=size)
    check(einmpi.plan(job, ranks, nodes=nodes), shared=True)


@pytest.mark.slow
def test_axes_that_slice_the_same_digit():
    job = einmpi.load(ROOT / "jobs" / "chain.toml", s=60)
    check(einmpi.plan(job, 128, nodes=4), shared=False)


@pytest.mark.slow
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([(2, 1), (3, 1), (4, 2), (6, 2), (8, 4), (12, 3), (16, 2), (18, 6), (32, 8)]),
    st.sampled_from(["eindecomp", "sqrt", "eindecomp-paper"]),
    st.booleans(),
)
def test_any_extents(rows, columns, inner, where, strategy, shared):
    ranks, nodes = where
    job = einmpi.program(
        "Z[i,k] = sum(A[i,j] * B[j,k]) * 2; Y[i,k] = sum(Z[j,i] * C[j,k]); M[k] = max(Y[i,k])",
        A=(rows, inner),
        B=(inner, columns),
        C=(rows, columns),
    )
    check(einmpi.plan(job, ranks, nodes=nodes, strategy=strategy), shared)


@pytest.mark.slow
@pytest.mark.parametrize("size, ranks, classes", [(4096, 64, 1), (512, 512, 1), (500, 64, 32)])
def test_how_many_classes_there_are(size, ranks, classes):
    job = einmpi.load(ROOT / "jobs" / "chain.toml", s=size)
    assert check(einmpi.plan(job, ranks, nodes=ranks // 8), shared=True) == classes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("most", [None, 100, 1])
@pytest.mark.parametrize("name, ranks", [("chain", 4096), ("heat", 64), ("ffnn", 60)])
def test_each_rank_is_in_one_class(name, ranks, most):
    """Where there are too many classes, too."""
    plan = einmpi.plan(einmpi.load(ROOT / "jobs" / f"{name}.toml"), ranks, nodes=4)
    classes, is_exact = ranks_of_classes(shifts_of(plan), most)
    assert sorted(np.concatenate(classes).tolist()) == list(range(plan.mesh.ranks))
    assert len({len(each) for each in classes}) == 1
    assert most is None or len(classes) <= most
    if most is None:
        assert is_exact
