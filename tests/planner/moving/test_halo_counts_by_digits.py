"""Counts of halos over all ranks, by sums that factorise, against counts rank by rank."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

import einmpi
from einmpi.planner.mesh import REVERSED, Mesh
from einmpi.planner.moving.halo import (
    Needed,
    axes_of_labels,
    needed_of,
    share,
    shares_of,
)
from einmpi.planner.moving.halo_words import halo_words, halo_words_of_plan, most_needed_bound
from einmpi.planner.states import named
from einmpi.schedule.halo import halo_moves
from einmpi.schedule.layout import Layout
from einmpi.schedule.regions import elements

PROGRAMS = {
    "stencil": ("V[i,j] = where(i>0, u[i-1,j], 0) + where(j<5, u[i,j+1], 0) + u[i,j]", (6, 6)),
    "one direction": ("V[i,j] = where(i>0, u[i-1,j], u[i,j])", (7, 4)),
    "periodic": ("V[i,j] = u[(i+1)%6,j] + u[i,(j-1)%5]", (6, 5)),
    "window": ("V[x:4,y:4] = sum[a:3,b:2](u[x+a,y+b])", (6, 5)),
    "stride": ("V[x:3,y] = sum[a:2](u[2*x+a,y])", (6, 5)),
    "reversal": ("V[i,j] = u[5-i,j]", (6, 4)),
    "star": ("V[i:5,j:4] = u[i,j+1] + u[i+2,j+1] + u[i+1,j] + u[i+1,j+2]", (7, 6)),
    "wide star": (
        "V[i:6,j:6] = where(i>1, u[i-2,j], 0) + where(j<4, u[i,j+2], 0) + u[(i+1)%6,j]",
        (6, 6),
    ),
    "corners": ("V[i:5,j:5] = u[i,j+1] + u[i+1,j] + u[i,j]", (6, 6)),
    "no middle": ("V[i:5,j:5] = u[i,j+1] + u[i+1,j]", (6, 6)),
    "short label": ("V[i,j:5] = u[i,j+1] + u[i,j]", (6, 6)),
    "short label of a star": ("V[i,j:5,k:5] = u[i,j+1,k] + u[i,j,k+1] + u[i,j,k]", (6, 6, 6)),
    "cube": ("V[i,j,k] = where(i>0, u[i-1,j,k], 0) + u[i,(j+1)%4,k] + u[i,j,(k+3)%4]", (4, 4, 4)),
}
STARS = {
    "stencil",
    "periodic",
    "star",
    "wide star",
    "corners",
    "no middle",
    "cube",
    "short label of a star",
}


def _indices(runs):
    return {index for start, stop in runs for index in range(start, stop)}


def _rank_by_rank(mesh, needed, cuts, state):
    """Return (words received, those of them between nodes), and the most indices, by sets.

    What a rank does not have, but all that lies between what it needs, comes block by block; not
    from blocks at the corners of a star, where every operand lies beside the block.
    """
    dimensions = range(len(needed.bound))
    cutting = [[axis for axis, cut in enumerate(cuts) if cut == at] for at in dimensions]
    blocks = []  # of each dimension: the digits of the axes that cut it, and the indices
    for at in dimensions:
        found = {}
        for digits in itertools.product(*(range(mesh.factors[axis]) for axis in cutting[at])):
            cut = tuple(zip(cutting[at], digits, strict=True))
            found[cut] = share(mesh, needed.sides[at], cut)
        blocks.append(found)
    received = between = 0
    most = [0] * len(needed.bound)
    for rank in range(mesh.ranks):
        own = dict(enumerate(mesh.digits(rank)))
        reached = []
        middle = []
        for at in dimensions:
            axes = axes_of_labels(needed.labels(at), state)
            shares = shares_of(mesh, needed, at, axes, mesh.digits(rank))
            reached.append(_indices(needed.runs(at, shares)))
            most[at] = max(most[at], len(reached[-1]))
            has_gaps = any(len(runs) != 1 for runs in blocks[at].values())
            if needed.middle is None or len({index[at] for index in needed.indices}) == 1:
                middle.append(None)
            else:
                runs = needed.middle.runs(at, shares)
                middle.append(None if has_gaps or len(runs) != 1 else _indices(runs))
        for chosen in itertools.product(*(found.items() for found in blocks)):
            digits = [pair for cut, _ in chosen for pair in cut]
            if all(own[axis] == digit for axis, digit in digits):
                continue  # the own block
            indices = [_indices(runs) for _, runs in chosen]
            outside = 0
            for at in dimensions:
                outside += middle[at] is not None and not middle[at] & indices[at]
            if outside <= 1:
                count = math.prod(len(indices[at] & reached[at]) for at in dimensions)
                received += count
                is_near = all(own[axis] == digit for axis, digit in digits if axis < mesh.node_axes)
                between += 0 if is_near else count
    return (received, between), tuple(most)


def _read_and_not_there(mesh, needed, cuts, state):
    """Return how many elements ranks read that they do not have: of each operand by itself."""
    count = 0
    for rank in range(mesh.ranks):
        digits = mesh.digits(rank)
        read = set()
        for index in needed.indices:
            alone = replace(needed, indices=(index,))
            indices = []
            for at in range(len(needed.bound)):
                axes = axes_of_labels(alone.labels(at), state)
                indices.append(_indices(alone.runs(at, shares_of(mesh, alone, at, axes, digits))))
            read |= set(itertools.product(*indices))
        stored = Layout(mesh, needed.bound, cuts, (), needed.orders).region(digits)
        count += len(read - set(itertools.product(*map(_indices, stored))))
    return count


def _needed(name) -> Needed:
    text, shape = PROGRAMS[name]
    graph = einmpi.program(text, u=shape).graph
    needed = needed_of(graph, graph["V"], "u")
    assert needed is not None
    if name.startswith("short"):  # in programs, a slice would be a vertex before it
        needed = replace(needed, extents=(("i", 4), *needed.extents[1:]))
    return needed


MESHES = [Mesh(2), Mesh(4), Mesh(4, 2), Mesh(6), Mesh(6, 3), Mesh(3), Mesh(5)]


def _label_state(needed, state):
    return named(state, [label for label, _ in needed.extents])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("order", [(), (0, REVERSED), (1, 0)], ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=repr)
@pytest.mark.parametrize("name", PROGRAMS)
def test_words_are_those_rank_by_rank(name, mesh, order):
    """Counts of plans, tables of the search and messages are the same, and no more than needed."""
    needed = _needed(name)
    assert (needed.middle is not None) == (name in STARS)
    if len(needed.extents) == len(needed.bound) == len(order):
        needed = replace(needed, orders=order, label_orders=order)
    cases = 0
    layouts = list(_choices(mesh, needed.sides))
    states = list(_choices(mesh, [needed.side_of[label] for label, _ in needed.extents]))
    table = halo_words(mesh, needed, layouts, states, mesh.ranks)
    for row, cuts in enumerate(layouts):
        layout_cuts = tuple(None if cut == len(needed.bound) else cut for cut in cuts)
        layout = Layout(mesh, needed.bound, layout_cuts, (), needed.orders)
        for column, state in enumerate(states):
            label_state = _label_state(needed, state)
            words, most = _rank_by_rank(mesh, needed, cuts, label_state)
            assert halo_words_of_plan(mesh, needed, cuts, state) == words, (cuts, state)
            assert (table[0][row, column], table[1][row, column]) == words, (cuts, state)
            assert most_needed_bound(mesh, needed, label_state) == most
            assert _read_and_not_there(mesh, needed, layout_cuts, label_state) <= words[0]
            moved = 0
            for rank in range(mesh.ranks):
                moves, _ = halo_moves(layout, needed, label_state, rank)
                moved += 0 if moves is None else moves.words
            assert moved == words[0], (cuts, state)
            cases += words[0] > 0
    assert cases > 0 or len(layouts) == len(states) == 1  # nothing can be cut


def test_corners_do_not_move_where_blocks_are_alike():
    """Each of 4 × 4 blocks fetches rows and columns only."""
    text = "V[i:8,j:8] = u[(i+1)%8,j] + u[(i+7)%8,j] + u[i,(j+1)%8] + u[i,(j+7)%8]"
    graph = einmpi.program(text, u=(8, 8)).graph
    needed = needed_of(graph, graph["V"], "u")
    needed = replace(needed, orders=(0, REVERSED), label_orders=(0, REVERSED))
    mesh = Mesh(16)
    blocks = (0, 0, 1, 1)
    assert halo_words_of_plan(mesh, needed, blocks, blocks) == (16 * 8, 0)
    layout = Layout(mesh, (8, 8), blocks, (), (0, REVERSED))
    moves, region = halo_moves(layout, needed, _label_state(needed, blocks), 5)
    assert [len(list(each)) for each in (moves.incoming(), moves.outgoing())] == [4, 4]
    assert elements(region) - elements(moves.own[1]) - moves.words == 4  # the corners


def _choices(mesh, extents):
    """Yield the rows of symbols in which the axes of each symbol lie in one of its windows."""
    for row in itertools.product(range(len(extents) + 1), repeat=len(mesh.factors)):
        fits = True
        for symbol, extent in enumerate(extents):
            axes = {axis for axis, cut in enumerate(row) if cut == symbol}
            fits &= not axes or any(axes <= set(window) for window in mesh.windows(extent))
        if fits:
            yield row


@pytest.mark.slow
def test_halos_of_many_ranks_are_counted_at_once():
    """Each rank but the first fetches the row before its own."""
    n, ranks = 2**14, 2**14
    text = "V[i,j] = where(i>0, u[i-1,j], 0) + where(j<n-1, u[i,j+1], 0)"
    graph = einmpi.program(text, n=n, u=(n, n)).graph
    needed = needed_of(graph, graph["V"], "u")
    mesh = Mesh(ranks)
    rows_only = (0,) * len(mesh.factors)
    assert halo_words_of_plan(mesh, needed, rows_only, rows_only) == ((ranks - 1) * n, 0)
