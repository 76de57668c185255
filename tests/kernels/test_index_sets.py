"""EinSums in parts in which conditions are decided: the same values, and no conditions left."""

from dataclasses import replace

import numpy as np
import pytest
from distributed import run_on_threads
from hypothesis import given, settings
from hypothesis import strategies as st

import einmpi
from einmpi.graph.scalar import Arg, Call, walk
from einmpi.kernels import index_sets
from einmpi.kernels.index_sets import split_index_sets
from einmpi.schedule.regions import one_run

X = np.random.default_rng(1).normal(size=(13, 11))
V = np.arange(13)

PROGRAMS = {
    "concatenation": "Z[i:26,j] = where(i < 13, X[i,j], X[i-13,j])",
    "stencil": (
        "Z[i,j] = where((i > 0) & (i < 12) & (j > 0) & (j < 10),"
        " X[i-1,j] + X[i+1,j] + X[i,j-1] + X[i,j+1], X[i,j])"
    ),
    "padding": "Z[i,j] = where(i > 0, X[i-1,j], 0) - 2 * X[i,j] + where(i < 12, X[i+1,j], 0)",
    "reversed": "Z[i:13,j] = where(12 - i > 3, X[9-i,j], -1.5)",
    "strides": "Z[i:40,j] = where(3*i < 13, X[3*i,j], 7)",
    "one row": "Z[i,j] = where(i == 4, 2 * X[i,j], X[i,j])",
    "all but one": "Z[i,j] = where((i != 4) | (j != 2), X[i,j], inf)",
    "values as well": "Z[i,j] = where((X[i,j] > 0) & (i > 2), X[i-3,j], i)",
    "two labels": "Z[i,j] = where((j <= i) & (i < 9), X[i,j], -inf)",
    "clamped": "Z[i,j] = minimum(i, 5) * maximum(3, j) + X[i,j]",
    "integers": "Z[i,j:9] = where(i < 5, V[i], 0) * 3000000000 + where(j < 3, 1, 2)",
    "dtypes": "Z[i,j] = where(i < 5, V[i], X[i,j]) / 3",
    "bits": "Z[i,j] = where((i > 4) & V[i] > 0, X[i,j], 0)",
    "gather": "Z[i,j] = where(i > 2, X[V[i-3],j], X[V[i],j])",
    "constants": "Z[i:30,j:7] = where(i < 5, where(j < 2, 1, 2.5), 3)",
    "never": "Z[i,j] = where(i > 99, 1, X[i,j])",
}


@pytest.fixture
def split_everything(monkeypatch):
    monkeypatch.setattr(index_sets, "MIN_SPLIT_VALUES", 0)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
@pytest.mark.parametrize("name", PROGRAMS)
def test_parts_have_the_values_of_the_whole(name, ranks, monkeypatch):
    used = {key: array for key, array in (("X", X), ("V", V)) if f"{key}[" in PROGRAMS[name]}
    job = einmpi.program(PROGRAMS[name], **used)
    whole = run_on_threads(job, ranks, used).outputs["Z"]
    monkeypatch.setattr(index_sets, "MIN_SPLIT_VALUES", 0)
    parts = run_on_threads(job, ranks, used).outputs["Z"]
    assert parts.dtype == whole.dtype
    assert np.array_equal(parts, whole)
    assert np.array_equal(einmpi.reference(job, used)["Z"], whole)


def parts_of(text, **inputs):
    (vertex,) = einmpi.program(text, **inputs).graph.computed
    return split_index_sets(vertex.einsum, (), ("float64",) * len(vertex.inputs))


def operations_of(part):
    """Return the operations that a part does, and those in its indices."""
    nodes = walk(part.einsum.function)
    for index in part.einsum.operands:
        for entry in index:
            nodes += [] if isinstance(entry, str) else walk(entry)
    return {node.op for node in nodes if isinstance(node, Call)}


def test_a_concatenation_is_two_copies(split_everything):
    parts = parts_of("Z[i:9] = where(i < 5, x[i], y[i-5])", x=np.ones(5), y=np.ones(4))
    assert [part.einsum.function for part in parts] == [Arg(0), Arg(0)]
    assert [part.taken for part in parts] == [(0,), (1,)]
    assert [part.positions for part in parts] == [(("i", (0, 5)),), (("i", (5, 9)),)]


def test_the_inside_of_a_stencil_has_no_conditions(split_everything):
    parts = parts_of(PROGRAMS["stencil"], X=X)
    assert len(parts) == 9
    largest = max(parts, key=lambda part: part.einsum.calls())
    assert largest.einsum.bound == (11, 9)
    assert operations_of(largest) == {"+", "-"}


def test_a_rank_that_is_all_inside_has_no_conditions_either(split_everything):
    """None of its indices is at a border, so there is nothing to cut."""
    (vertex,) = einmpi.program(PROGRAMS["stencil"], X=X).graph.computed
    einsum = replace(vertex.einsum, extents=(("i", 4), ("j", 5)))
    index = (("i", one_run(3, 7)), ("j", one_run(2, 7)))
    (part,) = split_index_sets(einsum, index, ("float64",) * len(vertex.inputs))
    assert operations_of(part) == {"+", "-"}
    assert part.positions == ()
    assert part.einsum.bound == (4, 5)


def test_sums_and_small_work_stay_whole(monkeypatch):
    assert len(parts_of(PROGRAMS["stencil"], X=X)) == 1
    monkeypatch.setattr(index_sets, "MIN_SPLIT_VALUES", 0)
    (vertex,) = einmpi.program("Z[j] = sum(where(i < 5, X[i,j], 0))", X=X).graph.computed
    assert len(split_index_sets(vertex.einsum, (), ("float64",))) == 1


@st.composite
def conditions(draw):
    """A condition on the labels i and j, in the syntax of the language and of numpy."""
    kind = draw(st.sampled_from(["one", "one", "&", "|", "~"]))
    if kind == "one":
        label = draw(st.sampled_from("ij"))
        factor = draw(st.sampled_from([-3, -2, -1, 1, 2, 3]))
        comparison = draw(st.sampled_from(["<", "<=", ">", ">=", "==", "!="]))
        return f"({factor}*{label} {comparison} {draw(st.integers(-25, 25))})"
    if kind == "~":
        return f"(~{draw(conditions())})"
    return f"({draw(conditions())} {kind} {draw(conditions())})"


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(conditions(), conditions())
def test_random_conditions(first, second):
    text = f"Z[i,j] = where({first}, X[i,j], where({second}, 2 * X[i,j], X[12-i,j]))"
    i, j = np.ogrid[:13, :11]
    names = {"i": i, "j": j}
    first_holds = np.broadcast_to(eval(first, names), X.shape)
    second_holds = np.broadcast_to(eval(second, names), X.shape)
    expected = np.where(first_holds, X, np.where(second_holds, 2 * X, X[::-1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_sets, "MIN_SPLIT_VALUES", 0)
        found = einmpi.run(text, X=X)["Z"]
    assert np.array_equal(found, expected)
