"""Slices, joins, shifts and reshapes of DistArrays: right, and only what a rank lacks moves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from einmpi import DistArray
from einmpi.comm.threads import run_threads
from einmpi.planner.mesh import REVERSED, Mesh, sides
from einmpi.schedule.layout import Layout


def numbered(shape):
    """Return an array whose elements say where they come from."""
    return np.arange(np.prod(shape, dtype=int), dtype="float64").reshape(shape)


def draw_layout(data, ranks, shape):
    """Draw any layout of a tensor: each axis of the mesh cuts a dimension or none, in any order."""
    mesh = Mesh(ranks)
    cuts = []
    orders = ()
    if mesh.factors and data.draw(st.booleans()):
        possible_orders = st.integers(REVERSED, len(mesh.factors) - 1)
        orders = tuple(data.draw(possible_orders) for _ in shape)
    for axis in range(len(mesh.factors)):
        possible = [None]
        for dimension, extent in enumerate(sides(shape, orders)):
            axes = {axis, *(number for number, cut in enumerate(cuts) if cut == dimension)}
            if any(axes <= set(window) for window in mesh.windows(extent)):
                possible.append(dimension)
        cuts.append(data.draw(st.sampled_from(possible)))
    return Layout(mesh, shape, tuple(cuts), (), orders)


def check(ranks, whole, layout, function):
    """Compare with numpy, and count the elements of a rank's result that it did not have."""
    expected = np.asarray(function(whole))

    def on_rank(comm):
        x = DistArray.from_global(whole, comm).redistribute(layout)
        before = comm.received
        found = function(x)
        received = comm.received - before
        assert found.shape == expected.shape
        np.testing.assert_array_equal(found.gather(), expected)
        had = x.local if x.region is not None else []
        assert received == 8 * int((~np.isin(found.local, had)).sum())

    run_threads(ranks, on_rank)


SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=8)


@settings(max_examples=50, deadline=None)
@given(data=st.data(), shape=SHAPES, ranks=st.integers(1, 9))
def test_a_slice_moves_what_a_rank_lacks(data, shape, ranks):
    key = data.draw(hnp.basic_indices(shape, allow_ellipsis=True, allow_newaxis=True))
    check(ranks, numbered(shape), draw_layout(data, ranks, shape), lambda x: x[key])


@settings(max_examples=25, deadline=None)
@given(data=st.data(), shape=SHAPES, ranks=st.integers(1, 9))
def test_a_reshape_moves_what_a_rank_lacks(data, shape, ranks):
    size = int(np.prod(shape))
    others = [(size,), (1, size), (*shape[::-1],), (*shape, 1)]
    if size % 4 == 0 and size:
        others += [(4, size // 4), (2, size // 4, 2)]
    other = data.draw(st.sampled_from(others))
    layout = draw_layout(data, ranks, shape)
    check(ranks, numbered(shape), layout, lambda x: x.reshape(other))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), shape=SHAPES, ranks=st.integers(1, 9))
def test_flip_roll_and_take_move_what_a_rank_lacks(data, shape, ranks):
    layout = draw_layout(data, ranks, shape)
    axis = data.draw(st.integers(0, len(shape) - 1))
    shift = data.draw(st.integers(-10, 10))
    whole = numbered(shape)
    check(ranks, whole, layout, lambda x: np.flip(x, axis))
    check(ranks, whole, layout, lambda x: np.roll(x, shift, axis))
    if shape[axis]:
        indices = data.draw(st.lists(st.integers(-shape[axis], shape[axis] - 1), max_size=9))
        check(ranks, whole, layout, lambda x: np.take(x, np.array(indices, int), axis))


@settings(max_examples=20, deadline=None)
@given(data=st.data(), shape=SHAPES, ranks=st.integers(1, 9))
def test_a_join_of_tensors_in_different_layouts(data, shape, ranks):
    axis = data.draw(st.integers(0, len(shape) - 1))
    longer = list(shape)
    longer[axis] += data.draw(st.integers(0, 3))
    arrays = [numbered(shape), numbered(longer) + 1000]
    layouts = [draw_layout(data, ranks, array.shape) for array in arrays]

    def on_rank(comm):
        tensors = []
        for array, layout in zip(arrays, layouts, strict=True):
            tensors.append(DistArray.from_global(array, comm).redistribute(layout))
        before = comm.received
        found = np.concatenate(tensors, axis)
        received = comm.received - before
        np.testing.assert_array_equal(found.gather(), np.concatenate(arrays, axis))
        had = np.concatenate([tensor.local.reshape(-1) for tensor in tensors])
        assert received == 8 * int((~np.isin(found.local, had)).sum())

    run_threads(ranks, on_rank)


@pytest.mark.parametrize("ranks", [2, 3])
def test_tensors_on_some_of_the_ranks(ranks):
    whole = numbered((6, 4))

    def on_rank(comm):
        x = DistArray.from_global(whole, comm).redistribute(Layout(Mesh(1), (6, 4), ()))
        np.testing.assert_array_equal(x[1:, ::-1].gather(), whole[1:, ::-1])
        np.testing.assert_array_equal(np.roll(x, 1, 0).gather(), np.roll(whole, 1, 0))
        np.testing.assert_array_equal(x.reshape(3, 8).gather(), whole.reshape(3, 8))
        np.testing.assert_array_equal(np.concatenate([x, x]).gather(), np.concatenate([whole] * 2))
        np.testing.assert_array_equal(np.sort(x, axis=None).gather(), np.arange(24.0))
        np.testing.assert_array_equal(np.cumsum(x, 0).gather(), np.cumsum(whole, 0))

    run_threads(ranks, on_rank)
