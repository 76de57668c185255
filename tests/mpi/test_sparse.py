"""Sparse tensors on real ranks: the golden cases, and one plan on all ranks."""

import numpy as np
import pytest
import scipy.sparse
from sparse_cases import NAMES, read_case

import einmpi

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.mark.parametrize("name", NAMES)
def test_case(world, name):
    case = read_case(name)
    if case.record["refused"]:
        with pytest.raises(einmpi.InputError, match=case.record["refused"]):
            case.run()
        return
    results = case.run()
    case.check(results)
    digests = []
    for found in results.values():
        digests.append(found.origin.plan_digest())
    assert len({tuple(each) for each in world.allgather(digests)}) == 1


def test_patterns_that_differ_between_ranks_are_refused(world):
    keys = [0, 1 + (world.rank == world.size - 1)]
    given = einmpi.SparseArray.from_keys((keys, keys), np.ones(2), (4, 4), comm=world)
    if world.size > 1:
        with pytest.raises(einmpi.EinmpiError):
            einmpi.run("y[i] = sum(A[i,j])", A=given)


@pytest.mark.parametrize(
    "function",
    [
        lambda S, T, x: S @ x,
        lambda S, T, x: x @ T.T,
        lambda S, T, x: (S - T) * x,
        lambda S, T, x: S @ T.T,
        lambda S, T, x: np.where(S > 1, S, 0).sum(axis=0),
        lambda S, T, x: np.maximum(S.T, T.T).mean(axis=1),
    ],
)
@pytest.mark.parametrize("rows", [1, 6, 40])
def test_operators(world, function, rows):
    rng = np.random.default_rng(rows)
    S, T = (np.where(rng.random((rows, 9)) < 0.3, rng.uniform(0, 2, (rows, 9)), 0) for _ in "ST")
    x = rng.standard_normal(9)
    wanted = function(S, T, x)
    given = (einmpi.SparseArray.from_sparse(scipy.sparse.csr_array(each), world) for each in (S, T))
    found = function(*given, einmpi.DistArray.from_global(x, world)).gather()
    dense = found.toarray() if scipy.sparse.issparse(found) else found
    # Sums of at most 40 products of numbers below 4, in another order.
    np.testing.assert_allclose(dense, wanted, rtol=1e-13, atol=1e-13)


def words_needed(rows, columns, n, ranks):
    """Return how many elements of a vector ranks lack, each of which has the rows of its block."""
    block = np.arange(n) * ranks // n
    pairs = np.unique(np.stack([block[rows], columns]), axis=1)
    return int((block[pairs[1]] != pairs[0]).sum())


@pytest.mark.parametrize("columns", [(), (3,)], ids=["vector", "matrix"])
def test_what_moves_is_what_rows_name(world, columns):
    """A 5-point matrix, and its transpose, times what is spread over the ranks."""
    side = 30
    n = side * side
    place = np.arange(n).reshape(side, side)
    beside = [(place, place), (place[1:], place[:-1]), (place[:-1], place[1:])]
    beside += [(place[:, 1:], place[:, :-1]), (place[:, :-1], place[:, 1:])]
    rows, named = (np.concatenate([np.ravel(each[k]) for each in beside]) for k in (0, 1))
    values = np.arange(len(rows)) % 7 - 3.0
    A = einmpi.SparseArray.from_keys((rows, named), values, (n, n), comm=world)
    whole = np.arange(float(n * int(np.prod(columns)))).reshape(n, *columns) % 11
    x = einmpi.DistArray.from_global(whole, world)
    k = ",k" if columns else ""
    for text, sources, targets in (
        (f"y[i{k}] = sum[j](A[i,j] * x[j{k}])", named, rows),
        (f"y[j{k}] = sum[i](A[i,j] * x[i{k}])", rows, named),
    ):
        step = einmpi.compile(einmpi.program(text, A=A, x=x), comm=world)
        for _ in range(2):  # the second call is prepared
            found = step(A=A, x=x)["y"].gather()
        wanted = np.zeros_like(whole)
        np.add.at(wanted, targets, values.reshape(-1, *[1] * len(columns)) * whole[sources])
        np.testing.assert_array_equal(found, wanted)  # whole numbers: sums are exact
        words = words_needed(rows, named, n, world.size) * int(np.prod(columns))
        assert world.allreduce(step.measured.received) == 8 * words
