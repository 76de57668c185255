"""Counts of halos over all ranks, by sums that factorise, against counts rank by rank."""

from __future__ import annotations

import itertools

import pytest

import einmpi
from einmpi.planner.mesh import Mesh
from einmpi.planner.moving.halo import (
    Needed,
    axes_of_labels,
    halo_words_of_plan,
    most_needed_bound,
    needed_of,
    share,
    shares_of,
)
from einmpi.planner.states import named

PROGRAMS = {
    "stencil": ("V[i,j] = where(i>0, u[i-1,j], 0) + where(j<5, u[i,j+1], 0) + u[i,j]", (6, 6)),
    "one direction": ("V[i,j] = where(i>0, u[i-1,j], u[i,j])", (7, 4)),
    "periodic": ("V[i,j] = u[(i+1)%6,j] + u[i,(j-1)%5]", (6, 5)),
    "window": ("V[x:4,y:4] = sum[a:3,b:2](u[x+a,y+b])", (6, 5)),
    "stride": ("V[x:3,y] = sum[a:2](u[2*x+a,y])", (6, 5)),
    "reversal": ("V[i,j] = u[5-i,j]", (6, 4)),
}


def _indices(runs):
    return {index for start, stop in runs for index in range(start, stop)}


def _rank_by_rank(mesh, needed, cuts, state):
    """Return (words received, those of them between nodes), and the most indices, by sets."""
    received = between = 0
    most = [0] * len(needed.bound)
    for rank in range(mesh.ranks):
        digits = mesh.digits(rank)
        wanted, stored, on_node = [], [], []
        for dimension, extent in enumerate(needed.bound):
            axes = axes_of_labels(needed.labels(dimension), state)
            runs = needed.runs(dimension, shares_of(mesh, needed, dimension, axes, digits))
            wanted.append(_indices(runs))
            most[dimension] = max(most[dimension], len(wanted[-1]))
            cutting = [axis for axis, cut in enumerate(cuts) if cut == dimension]
            for found, last in ((stored, len(mesh.factors)), (on_node, mesh.node_axes)):
                own = tuple((axis, digits[axis]) for axis in cutting if axis < last)
                found.append(_indices(share(mesh, extent, own)))
        for elements in itertools.product(*wanted):
            pairs = list(zip(elements, range(len(elements)), strict=True))
            received += not all(index in stored[at] for index, at in pairs)
            between += not all(index in on_node[at] for index, at in pairs)
    return (received, between), tuple(most)


def _needed(name) -> Needed:
    text, shape = PROGRAMS[name]
    vertex = einmpi.program(text, u=shape).graph["V"]
    needed = needed_of(vertex, "u", shape)
    assert needed is not None
    return needed


@pytest.mark.parametrize("mesh", [Mesh(2), Mesh(4), Mesh(4, 2), Mesh(6), Mesh(6, 3)], ids=repr)
@pytest.mark.parametrize("name", PROGRAMS)
def test_sums_over_digits_are_those_rank_by_rank(name, mesh):
    """Every layout with every state, however the two share axes."""
    needed = _needed(name)
    labels = [label for label, _ in needed.extents]
    cases = 0
    for cuts in _choices(mesh, needed.bound):
        for state in _choices(mesh, [extent for _, extent in needed.extents]):
            label_state = named(state, labels)
            words, most = _rank_by_rank(mesh, needed, cuts, label_state)
            assert halo_words_of_plan(mesh, needed, cuts, state) == words, (cuts, state)
            assert most_needed_bound(mesh, needed, label_state) == most
            cases += words[0] > 0
    assert cases > 0


def _choices(mesh, extents):
    """Yield the rows of symbols in which the axes of each symbol lie in one of its windows."""
    for row in itertools.product(range(len(extents) + 1), repeat=len(mesh.factors)):
        fits = True
        for symbol, extent in enumerate(extents):
            axes = {axis for axis, cut in enumerate(row) if cut == symbol}
            fits &= not axes or any(axes <= set(window) for window in mesh.windows(extent))
        if fits:
            yield row


def test_halos_of_many_ranks_are_counted_at_once():
    """Each rank but the first fetches the row before its own."""
    n, ranks = 2**14, 2**14
    text = "V[i,j] = where(i>0, u[i-1,j], 0) + where(j<n-1, u[i,j+1], 0)"
    needed = needed_of(einmpi.program(text, n=n, u=(n, n)).graph["V"], "u", (n, n))
    mesh = Mesh(ranks)
    rows_only = (0,) * len(mesh.factors)
    assert halo_words_of_plan(mesh, needed, rows_only, rows_only) == ((ranks - 1) * n, 0)
