"""Members of groups and their regions, beside lists of all."""

import random
import tracemalloc

import pytest

from einmpi.planner.mesh import Mesh
from einmpi.schedule.layout import Layout, digits_along, rank_of, split_further
from einmpi.schedule.moves import exchange, group_of
from einmpi.schedule.regions import elements
from einmpi.schedule.transfers import Regions


@pytest.mark.parametrize("ranks", [1, 6, 60, 64])
def test_members_are_the_ranks_that_differ_on_some_axes(ranks):
    mesh = Mesh(ranks)
    for rank in range(0, ranks, 7):
        for first in range(len(mesh.factors) + 1):
            axes = range(first, len(mesh.factors), 2)
            members, me = group_of(mesh, axes, rank)
            digits = digits_along(mesh, axes, mesh.digits(rank))
            assert list(members) == [rank_of(mesh, each) for each in digits]
            assert [members.rank(number) for number in range(members.count)] == list(members)
            assert members.rank(me) == rank
            assert (members.first, members.last) == (min(members), max(members))


def test_regions_are_those_of_a_list():
    draw = random.Random(3)
    for _ in range(300):
        factors = [draw.choice([1, 2, 3]) for _ in range(4)]
        axes = []
        count = 1
        for factor in reversed(factors):
            axes.insert(0, (factor, count))
            count *= factor
        free = [axis for axis in axes if draw.random() < 0.5]
        found = {}
        for number in range(count):
            on_free = [number // distance % members for members, distance in free]
            if not any(on_free) and draw.random() < 0.6:
                found[number] = (((number, number + draw.randint(1, 4)),),)
        expected = []
        for number in range(count):
            first = number - sum(number // far % members * far for members, far in free)
            expected.append(found.get(first))
        regions = Regions(count, found, tuple(free), draw.choice([None, draw.randrange(count)]))
        if regions.without is not None:
            expected[regions.without] = None
        present = [(number, each) for number, each in enumerate(expected) if each is not None]
        assert list(regions.listing()) == expected
        assert list(regions.each()) == present
        assert [regions.of(number) for number in range(count)] == expected
        assert regions.elements() == sum(elements(each) for _, each in present)
        even = [(number, each) for number, each in present if number % 2 == 0]
        assert list(regions.only(lambda number: number % 2 == 0).each()) == even
        assert list(Regions.listed(expected).each()) == present
        moved = regions.changed(lambda region: (((0, elements(region)),),))
        assert moved.elements() == regions.elements()


@pytest.mark.parametrize("rank", [0, 2**19, 2**20 - 1])
def test_a_vector_of_three_elements_goes_to_a_million_ranks(rank):
    mesh = Mesh(2**20)
    axes = tuple(range(20))
    everywhere = Layout(mesh, (3,), (None,) * 20)
    pieces = split_further(mesh, (3,), everywhere.cuts, axes)
    tracemalloc.start()
    try:
        moves = exchange(everywhere, pieces, everywhere, axes, rank)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    holds = pieces.block(rank) != ((),)
    assert moves.words == 3 - holds
    assert moves.words_sent == holds * (2**20 - 1)
    assert len(list(moves.incoming())) == moves.words
    assert peak < 2**16
