"""Runs of indices, compared with plain sets."""

import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_oracle import axes_of, layouts, owned

from einmpi.planner.mesh import Mesh
from einmpi.schedule import layout
from einmpi.schedule.layout import Layout, digits_along, even_layout, split_further
from einmpi.schedule.regions import (
    boxes,
    chunks,
    elements,
    flat_range,
    indices,
    intersect,
    locate,
    share,
    split,
    subtract,
    union,
)

RANKS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 30)
EXTENTS = (0, 1, 2, 3, 5, 7, 8, 12, 16, 31, 97)


@st.composite
def index_sets(draw):
    """Runs of a random set of indices."""
    return as_runs(draw(st.sets(st.integers(0, 30))))


def as_runs(found):
    ordered = sorted(found)
    starts = [i for i in ordered if i - 1 not in found]
    stops = [i + 1 for i in ordered if i + 1 not in found]
    return tuple(zip(starts, stops, strict=True))


def as_set(runs):
    return set(indices(runs).tolist())


@given(index_sets(), index_sets())
def test_intersect_agrees_with_sets(one, two):
    assert intersect(one, two) == as_runs(as_set(one) & as_set(two))


@given(index_sets(), index_sets())
def test_subtract_and_union_agree_with_sets(one, two):
    difference = subtract(one, two)
    assert difference == as_runs(as_set(one) - as_set(two))
    assert union([two, difference]) == as_runs(as_set(one) | as_set(two))


@given(index_sets(), index_sets())
def test_locate_gives_the_places_of_indices(one, two):
    inner = intersect(one, two)
    places = indices(locate(inner, two))
    assert indices(two)[places].tolist() == indices(inner).tolist()


@given(index_sets(), st.integers(1, 7))
def test_split_gives_nearly_equal_pieces_in_order(runs, pieces):
    found = [indices(split(runs, pieces, which)).tolist() for which in range(pieces)]
    assert [i for piece in found for i in piece] == indices(runs).tolist()
    assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize("ranks", RANKS)
def test_share_agrees_with_the_definition(ranks):
    mesh = Mesh(ranks)
    assert mesh.factors == axes_of(ranks)
    for extent, rank in itertools.product(EXTENTS, range(0, ranks, max(1, ranks // 4))):
        for window in mesh.windows(extent):
            for count in range(len(window) + 1):
                for axes in itertools.combinations(window, count):
                    cuts = tuple((axis, mesh.digits(rank)[axis]) for axis in axes)
                    assert indices(share(mesh, extent, cuts)).tolist() == owned(
                        mesh.factors, extent, axes, rank
                    )


@given(st.lists(index_sets(), min_size=1, max_size=3), st.integers(1, 40))
def test_chunks_cover_a_region_once(region, limit):
    region = tuple(region)
    if not all(region):
        return
    array = np.zeros([31] * len(region), int)
    for chunk in chunks(region, limit):
        assert elements(chunk) <= limit
        array[np.ix_(*map(indices, chunk))] += 1
    expected = np.zeros_like(array)
    expected[np.ix_(*map(indices, region))] = 1
    np.testing.assert_array_equal(array, expected)


@given(
    st.lists(index_sets(), min_size=1, max_size=3),
    st.lists(index_sets(), min_size=3, max_size=3),
    st.integers(1, 40),
)
def test_regions_of_equal_shape_are_cut_alike(one, other, limit):
    """Sender and receiver have the same shape and different runs."""
    pair = [(a, b) for a, b in zip(one, other, strict=False) if a and b]
    lengths = [min(len(as_set(a)), len(as_set(b))) for a, b in pair]
    regions = [
        tuple(as_runs(set(sorted(as_set(runs))[:n])) for runs, n in zip(side, lengths, strict=True))
        for side in zip(*pair, strict=True)
    ]
    if pair:
        shapes = [
            [tuple(len(indices(runs)) for runs in chunk) for chunk in chunks(region, limit)]
            for region in regions
        ]
        assert shapes[0] == shapes[1]


@given(st.lists(index_sets(), min_size=1, max_size=3))
def test_a_flat_range_is_exactly_the_region(region):
    extents = [31] * len(region)
    if not all(region):
        return
    places = np.arange(prod(extents)).reshape(extents)[np.ix_(*map(indices, region))].ravel()
    in_a_row = bool((np.diff(places) == 1).all())
    found = flat_range(tuple(region), extents)
    assert found == ((places[0], places[-1] + 1) if in_a_row else None)


@given(st.lists(st.tuples(index_sets(), index_sets()), min_size=1, max_size=3))
def test_boxes_copy_each_element_to_its_place(pairs):
    region = tuple(intersect(*pair) for pair in pairs)
    outer = tuple(pair[1] for pair in pairs)
    place = tuple(locate(part, runs) for part, runs in zip(region, outer, strict=True))
    tensor = np.random.default_rng(1).random([31] * len(pairs))
    block = np.zeros([len(indices(runs)) for runs in outer])
    for there, here in boxes(region, place):
        block[here] += tensor[there]
    expected = np.zeros(tensor.shape)
    where = np.ix_(*map(indices, region))
    expected[where] = tensor[where]
    np.testing.assert_array_equal(block, expected[np.ix_(*map(indices, outer))])


def check_runs_along(dealt: Layout, axes: list[int]) -> None:
    """Compare the indices of ranks that differ on some axes with those of each rank."""
    last = dealt.mesh.digits(dealt.mesh.ranks - 1)
    for dimension in range(len(dealt.bound)):
        found = list(dealt.runs_along(dimension, axes, last))
        expected = []
        for digits in digits_along(dealt.mesh, axes, last):
            runs = dealt.runs(dimension, digits)
            if runs:
                expected.append((digits, runs))
        assert sorted(found) == sorted(expected)


def test_of_a_million_ranks_only_those_are_looked_at_that_get_something(monkeypatch):
    asked = []

    def counting_split(runs, pieces, which):
        asked.append(which)
        return split(runs, pieces, which)

    monkeypatch.setattr(layout, "split", counting_split)
    mesh = Mesh(2**20)
    axes = range(20)
    dealt = split_further(mesh, (3,), (None,) * 20, axes)
    found = list(dealt.runs_along(0, axes, mesh.digits(0)))
    assert len(asked) == 3
    assert [runs for _, runs in found] == [((0, 1),), ((1, 2),), ((2, 3),)]
    assert [dealt.runs(0, digits) for digits, _ in found] == [runs for _, runs in found]


@pytest.mark.parametrize("ranks", RANKS)
def test_split_blocks_hold_every_element_once(ranks):
    mesh = Mesh(ranks)
    for bound in ((1,), (7, 3), (16, 5), (2, 2, 2)):
        for cuts in layouts(ranks, bound)[:: max(1, len(layouts(ranks, bound)) // 20)]:
            plain = tuple(cut if isinstance(cut, int) else None for cut in cuts)
            free = [axis for axis, cut in enumerate(plain) if cut is None]
            held = np.zeros(bound, int)
            dealt = split_further(mesh, bound, plain, free)
            check_runs_along(dealt, free)
            check_runs_along(dealt, free[1:])
            check_runs_along(dealt, list(range(len(mesh.factors)))[::-1])
            for rank in range(ranks):
                region = dealt.block(rank)
                held[np.ix_(*map(indices, region))] += 1
                assert elements(region) <= dealt.max_elements()
            np.testing.assert_array_equal(held, 1)
            owners = np.zeros(bound, int)
            stored = Layout(mesh, bound, plain)
            for rank in range(ranks):
                if stored.owns(rank):
                    owners[np.ix_(*map(indices, stored.block(rank)))] += 1
            np.testing.assert_array_equal(owners, 1)


def test_even_layouts_cut_dimensions_that_are_long_enough():
    assert str(even_layout(Mesh(8), (100, 3))) == "[8,1] on 8 ranks"
    assert str(even_layout(Mesh(8), (3, 100))) == "[2,4] on 8 ranks"
    assert str(even_layout(Mesh(6), (1, 1))) == "[1,1] on 6 ranks"
