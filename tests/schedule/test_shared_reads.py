"""Files that ranks read together: every element has one reader, and cells are large pieces."""

import itertools
from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from einmpi.graph.eingraph import StoredForm
from einmpi.planner.mesh import Mesh
from einmpi.schedule import shared_reads
from einmpi.schedule.layout import Layout, split_further
from einmpi.schedule.regions import indices
from einmpi.schedule.shared_reads import (
    Grid,
    SharedRead,
    bytes_passed_on,
    grid_of,
    shared_read,
    suits_single_ranks,
)


@st.composite
def layouts(draw):
    """Draw any layout that a plan may ask for, split further or not."""
    bound = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    mesh = Mesh(draw(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12])))
    cuts = []
    for axis in range(len(mesh.factors)):
        taken = {
            d: {a for a, cut in enumerate(cuts) if cut == d} | {axis} for d in range(len(bound))
        }
        fitting = [
            d for d, axes in taken.items() if any(axes <= set(w) for w in mesh.windows(bound[d]))
        ]
        cuts.append(draw(st.sampled_from([None, *fitting])))
    if draw(st.booleans()):
        return split_further(
            mesh, bound, tuple(cuts), [axis for axis, cut in enumerate(cuts) if cut is None]
        )
    return Layout(mesh, bound, tuple(cuts))


@st.composite
def grids(draw, shape):
    chunks = tuple(draw(st.integers(1, 5)) for _ in shape)
    first = tuple(draw(st.integers(0, 7)) if d == 0 else 0 for d in range(len(shape)))
    times = tuple(draw(st.integers(1, 3)) for _ in shape)
    return Grid(
        shape,
        tuple(c * t for c, t in zip(chunks, times, strict=True)),
        tuple(f % c for f, c in zip(first, chunks, strict=True)),
    )


def paint(array, region):
    array[np.ix_(*map(indices, region))] += 1


@settings(max_examples=60)
@given(st.data())
def test_every_element_arrives_once(data):
    layout = data.draw(layouts())
    made = SharedRead(data.draw(grids(layout.bound)), layout, data.draw(st.integers(1, 4)))
    ranks = layout.mesh.ranks
    read = np.zeros(layout.bound, int)
    arrived = [np.zeros(layout.bound, int) for _ in range(ranks)]
    for turn in range(made.rounds):
        for rank in range(ranks):
            for cell in made.cells_read(rank, turn):
                paint(read, [(ends,) for ends in made.grid.bounds(cell)])
            for user, pieces in made.cells_to_send(rank, turn).items():
                # Both sides know of the same cells, in the same order.
                assert [cell for cell, _ in pieces] == made.cells_needed(user)[turn][rank]
                for _, region in pieces:
                    paint(arrived[user], region)
        for rank in range(ranks):
            for reader in made.cells_needed(rank)[turn]:
                assert rank in made.cells_to_send(reader, turn)
    assert (read == 1).all()
    for rank in range(ranks):
        wanted = np.zeros(layout.bound, int)
        paint(wanted, layout.block(rank))
        assert (arrived[rank] == wanted).all()


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=3),
    st.integers(1, 64),
    st.sampled_from([1, 2, 8, 16]),
)
def test_cells_of_a_contiguous_tensor_are_contiguous(shape, ranks, itemsize):
    grid = grid_of(tuple(shape), itemsize, None, [0] * len(shape), ranks)
    assert prod(grid.cell) * itemsize <= shared_reads.MAX_CELL_BYTES
    cut = [
        d for d, (cell, extent) in enumerate(zip(grid.cell, shape, strict=True)) if cell < extent
    ]
    assert not cut or all(cell == 1 for cell in grid.cell[: cut[-1]])
    enough = (
        prod(shape) * itemsize >= shared_reads.MIN_CELL_BYTES * ranks * shared_reads.CELLS_PER_RANK
    )
    assert not enough or grid.cells >= ranks


def test_cells_are_whole_chunks():
    grid = grid_of((1000, 1000), 8, (30, 70), (45, 0), 3)
    assert grid.cell[0] % 30 == grid.cell[1] % 70 == 0
    assert (
        grid.bounds(0)[0][0] == 0 and (grid.bounds(0)[0][1] + 45) % 30 == 0
    )  # rows start within a chunk


def test_which_layouts_let_ranks_read_alone():
    mesh, long = Mesh(4), shared_reads.LONG_RUN_BYTES // 8
    rows, columns = Layout(mesh, (8, 4 * long), (0, 0)), Layout(mesh, (8, 4 * long), (1, 1))
    replicas = Layout(mesh, (8, 4 * long), (0, None))
    in_one_piece = StoredForm(8, None, (0, 0))
    assert suits_single_ranks(rows, in_one_piece)
    assert suits_single_ranks(columns, in_one_piece)
    assert not suits_single_ranks(columns, StoredForm(4, None, (0, 0)))  # half the bytes in a run
    assert not suits_single_ranks(replicas, in_one_piece)  # two want the same
    assert suits_single_ranks(rows, StoredForm(8, (2, 5), (0, 0)))
    assert not suits_single_ranks(rows, StoredForm(8, (3, 5), (0, 0)))
    assert not suits_single_ranks(rows, StoredForm(8, (2, 5), (1, 0)))  # they begin in a chunk
    assert suits_single_ranks(Layout(Mesh(1), (8,), ()), StoredForm(8, (3,), (1,)))


def test_thousands_of_ranks_take_little_time():
    """A rank looks at its own cells only: 4096 ranks, both dimensions cut 64 times."""
    mesh = Mesh(4096)
    layout = Layout(mesh, (40960, 40960), tuple(axis % 2 for axis in range(12)))
    made = shared_read(layout, StoredForm(8, None, (0, 0)))
    going = made.cells_to_send(1234, 0)
    assert sum(
        prod(sum(b - a for a, b in runs) for runs in region)
        for pieces in going.values()
        for _, region in pieces
    ) == sum(prod(b - a for a, b in made.grid.bounds(cell)) for cell in made.cells_read(1234, 0))
    cells = list(
        itertools.chain.from_iterable(c for turn in made.cells_needed(77) for c in turn.values())
    )
    assert (
        len(cells) == len(set(cells))
        and made.rounds * made.cells_per_round * prod(made.grid.cell) * 4096 >= 40960**2
    )


def test_of_a_hundred_thousand_ranks_only_readers_are_looked_at(monkeypatch):
    """They are fewer than the cells of the file, which has few chunks for so many ranks."""
    asked = []

    def counting_region(self, digits):
        asked.append(digits)
        return region(self, digits)

    region = Layout.region
    monkeypatch.setattr(Layout, "region", counting_region)
    mesh = Mesh(2**17)
    layout = Layout(mesh, (2**17, 64), (0,) * 17)
    stored = StoredForm(8, (1024, 64), (0, 0))
    read = shared_read(layout, stored)
    assert bytes_passed_on(layout, stored) == (2**17 - read.grid.cells) * 64 * 8
    assert 0 < len(asked) <= read.grid.cells <= 128
