"""Sorted DistArrays and what follows from them, on any number of ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from einmpi import DistArray
from einmpi.comm.threads import run_threads

NUMBERS = st.sampled_from([0.0, -0.0, 1.0, 2.0, -3.5, np.inf, -np.inf, np.nan])


@settings(max_examples=30, deadline=None)
@given(
    values=st.lists(NUMBERS, max_size=40),
    dtype=st.sampled_from(["float64", "float32", "complex128"]),
    ranks=st.integers(1, 9),
    copies=st.booleans(),
)
def test_a_vector_with_many_equal_elements(values, dtype, ranks, copies):
    whole = np.array(values, dtype)

    def on_rank(comm):
        x = DistArray.from_global(whole, comm, parts=(1,) if copies else None)
        np.testing.assert_array_equal(np.sort(x).gather(), np.sort(whole))
        order = np.argsort(x)
        assert order.dtype == np.int64
        np.testing.assert_array_equal(order.gather(), np.argsort(whole, kind="stable"))

    run_threads(ranks, on_rank)


@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_a_sorted_vector_is_even_on_the_ranks(ranks):
    """All elements but a few are equal: they are divided by their places."""
    whole = np.ones(1000)
    whole[::100] = np.arange(10)

    def on_rank(comm):
        return np.sort(DistArray.from_global(whole, comm)).local.size

    assert set(run_threads(ranks, on_rank)) == {1000 // ranks}


@settings(max_examples=12, deadline=None)
@given(
    values=st.lists(st.integers(-3, 3), max_size=30),
    ranks=st.integers(1, 6),
    rows=st.sampled_from([1, 2]),
)
def test_sets(values, ranks, rows):
    whole = np.array(values, "int64").repeat(rows).reshape(-1, rows)
    expected, places, inverse, counts = np.unique(
        whole, return_index=True, return_inverse=True, return_counts=True
    )

    def on_rank(comm):
        x = DistArray.from_global(whole, comm)
        found = np.unique_all(x)
        np.testing.assert_array_equal(found.values.gather(), expected)
        np.testing.assert_array_equal(found.indices.gather(), places)
        np.testing.assert_array_equal(found.inverse_indices.gather(), inverse.reshape(whole.shape))
        np.testing.assert_array_equal(found.counts.gather(), counts)
        for ours, numpys in zip(np.nonzero(x), np.nonzero(whole), strict=True):
            np.testing.assert_array_equal(ours.gather(), numpys)

    run_threads(ranks, on_rank)


def test_every_nan_is_different():
    x = DistArray.from_global([np.nan, 1.0, np.nan])
    assert np.unique_counts(x).counts.tolist() == [1, 1, 1]
