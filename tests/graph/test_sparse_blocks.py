"""Stored elements in equal blocks, one for each rank."""

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

import einmpi
from einmpi.comm.threads import run_threads
from einmpi.graph.sparse.coordinates import MOST_UNEVEN, Coordinates, blocks_by
from einmpi.graph.sparse.desugar import desugar
from einmpi.planner.make_plan import make_plan
from einmpi.planner.mesh import Mesh
from einmpi.planner.moving.known_lists import with_aligned_labels


@given(st.integers(1, 40), st.integers(1, 9), st.data())
def test_elements_are_in_the_block_of_their_keys(extent, ranks, data):
    keys = data.draw(st.lists(st.integers(0, extent - 1), max_size=60).map(sorted))
    column = np.array(keys, np.int64)
    blocks = blocks_by(column, extent, ranks)
    values = np.arange(len(column)) + 100
    places = blocks.placed(np.arange(len(column)))
    spread = blocks.spread(values, empty=-1)
    assert len(spread) == blocks.size
    np.testing.assert_array_equal(spread[places], values)
    assert (spread == -1).sum() == blocks.size - len(column)
    # What repeats what is before it adds no new value.
    if len(column):
        assert set(blocks.spread(values)) == set(values)
    if blocks.length is None:
        assert blocks.size == len(column)
    else:
        assert blocks.size <= MOST_UNEVEN * len(column)
        np.testing.assert_array_equal(places // blocks.length, column * ranks // extent)


def desugared(text, ranks, **inputs):
    """A program over what these inputs store, for so many ranks."""
    job = einmpi.program(text, **inputs)
    stored = {}
    for name, each in inputs.items():
        if scipy.sparse.issparse(each):
            found = each.tocoo()
            stored[name] = Coordinates.of(found.coords, found.data, each.shape)
    return desugar(job.written, stored, {}, {}, ranks, {}, ())


def aligned(job, name, ranks=3):
    """The labels of a vertex that so many ranks cut alike."""
    return with_aligned_labels(job.graph, Mesh(ranks))[name].aligned


UNEVEN = scipy.sparse.csr_array(np.triu(np.ones((9, 9)))[:, :5])  # rows of 5, 4, 3, 2, 1, 0, …
TWO_LINES = scipy.sparse.csr_array(np.eye(9) + np.eye(9, k=1))
EVEN = scipy.sparse.csr_array((np.arange(81).reshape(9, 9) % 4 == 0) * 1.0)


def test_results_are_cut_like_the_rows_that_elements_are_in():
    job = desugared("y[i] = sum(A[i,j] * x[j])", 3, A=EVEN, x=np.ones(9))
    ((aggregated, scattered),) = aligned(job, "y")
    assert scattered == "i"
    assert aggregated in job.graph["y"].einsum.aggregated
    columns = job.graph["y_j"].known.values
    np.testing.assert_array_equal(columns, job.arrays["y_j"])
    assert columns.dtype == np.uint32


def test_ranks_send_parts_of_what_comes_together_along_columns():
    """There are fewer parts than columns on all ranks: each rank has some columns only."""
    job = desugared("y[j] = sum(A[i,j] * x[i])", 3, A=TWO_LINES, x=np.ones(9))
    parts, result = job.graph["y_parts"], job.graph["y"]
    assert aligned(job, "y_parts")[0].scattered == parts.einsum.output[0]
    assert aligned(job, "y")[0].scattered == "j"
    assert result.inputs[0] == "y_parts" or "y_parts" in result.inputs


def test_dense_columns_come_together_at_once():
    full = scipy.sparse.csr_array(np.ones((9, 9)))
    job = desugared("y[j] = sum(A[i,j] * x[i])", 3, A=full, x=np.ones(9))
    assert "y_parts" not in job.graph.by_name
    assert aligned(job, "y") == ()


def test_uneven_rows_follow_one_another_and_come_together_in_parts():
    job = desugared("y[i] = sum(A[i,j] * x[j])", 3, A=UNEVEN, x=np.ones(5))
    assert "A" in job.graph["y_parts"].inputs
    assert aligned(job, "y")[0].scattered == "i"
    assert job.graph["A"].bound == (UNEVEN.nnz,)


@pytest.mark.sampled(27)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("y = sum(A[i,j])", lambda a, b: a.sum()),
        ("y = min(A[i,j] - 9)", lambda a, b: (a - 9).min()),
        (
            "y = sum(A[i,j] * (i - j))",
            lambda a, b: (a * np.subtract.outer(*[np.arange(9)] * 2)).sum(),
        ),
        ("y[j] = sum(A[i,j] * B[j,i])", lambda a, b: (a * b.T).sum(0)),
        ("y[i,k] = sum(A[i,j] * B[j,k])", lambda a, b: a @ b),
        ("y[i,j] = A[i,j] + B[j,i]", lambda a, b: a + b.T),
        ("y[j] = max(A[i,j] * 2)", lambda a, b: (a * 2).max(0)),
        ("y[j] = sum(T[i,j] * (i + 1))", lambda a, b: TWO_LINES.T @ np.arange(1, 10)),
        ("y[j,k] = sum(T[i,j] * T[k,i])", lambda a, b: (TWO_LINES @ TWO_LINES).toarray().T),
    ],
)
def test_empty_places_change_nothing(ranks, text, wanted):
    """The last places of blocks, which have no element."""
    b = np.where(np.arange(81).reshape(9, 9) % 5 == 0, 2.0, 0)
    B = scipy.sparse.csr_array(b)

    def run(comm):
        given = {"A": EVEN, "B": B, "T": TWO_LINES}
        read = {name: each for name, each in given.items() if f"{name}[" in text}
        return einmpi.run(text, read, comm=comm)["y"].gather()

    for found in run_threads(ranks, run):
        dense = found.toarray() if scipy.sparse.issparse(found) else found
        np.testing.assert_allclose(dense, wanted(EVEN.toarray(), b))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_values_are_in_the_order_of_the_keys(ranks):
    """However they lie on the ranks."""

    def run(comm):
        array = einmpi.SparseArray.from_keys(
            EVEN.tocoo().coords, np.arange(EVEN.nnz), (9, 9), comm=comm
        )
        assert array.nnz == EVEN.nnz
        return array.values.gather(), array.coordinates().values

    for values, all_values in run_threads(ranks, run):
        np.testing.assert_array_equal(values, np.arange(EVEN.nnz))
        np.testing.assert_array_equal(all_values, np.arange(EVEN.nnz))


def test_keys_are_on_all_ranks_before_a_plan_is_made():
    job = desugared("y[j] = sum(A[i,j] * x[i])", 3, A=TWO_LINES, x=np.ones(9))
    plan = make_plan(job.graph, 3)
    assert set(plan.resident) == set(job.arrays)
