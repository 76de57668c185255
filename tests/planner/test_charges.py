"""The charges of the lower bound: the linear program, and outer products with their readers."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from plan_oracle import R, axes_of, fits, owned, random_graph
from scipy.optimize import linprog
from target_graphs import attention, chain, llama

import einmpi
from einmpi.planner.lower_bound import units, words
from einmpi.planner.lower_bound.charges import Charging
from einmpi.planner.lower_bound.ways import most_kept, ways_to_cut


def best_of_scipy(charging: Charging) -> float:
    """Return the highest bound by another solver, from all ways to cut all parts."""
    parts = len(charging.parts)
    rows, most = [], []
    for number, part in enumerate(charging.parts):
        for copies, moved, spare in zip(*part.ways[:3], strict=True):
            row = np.zeros(parts + charging.charges)
            row[number] = 1
            for charge, count in zip(part.charges, copies, strict=True):
                if charge is not None:
                    row[parts + charge] -= count
            for charge in part.charges_for_result:
                row[parts + charge] += spare
            rows.append(row)
            most.append(moved)
    for limit in charging.limits:
        row = np.zeros(parts + charging.charges)
        for charge in limit.charges:
            row[parts + charge] += 1
        rows.append(row)
        most.append(limit.elements)
    times = [-part.times for part in charging.parts] + [0] * charging.charges
    ranges = [(None, None)] * parts + [(0, None)] * charging.charges
    scale = max(most)
    found = linprog(times, np.array(rows), np.array(most) / scale, bounds=ranges)
    return -found.fun * scale


@pytest.mark.parametrize("ranks", [6, 64])
def test_the_charges_are_the_best_ones(ranks):
    rng = random.Random(ranks)
    graphs = [chain(1), chain(10), attention(), llama()[0]]
    graphs += [random_graph(rng, 6, (2, 4, 8, 16, 100)) for _ in range(20)]
    for graph in graphs:
        ((charging, *_),) = units.charging_of(graph, ranks, ())
        if charging.charges:
            best = best_of_scipy(charging)
            assert charging.bound(charging.best(1024), 1024) / 1024 == pytest.approx(best, abs=1)


def test_vertices_that_are_alike_have_the_same_charges():
    """Layers together have the bound of single ones, in a linear program that stays small."""
    four, eight = llama(8, 1024, 4)[0], llama(8, 1024, 8)[0]
    ((charging, *_),) = units.charging_of(eight, 64, ())
    assert len(charging.parts) + charging.charges < units.MOST_ROWS
    bound = words.lower_bound_words(eight, 64)
    assert bound == pytest.approx(2 * words.lower_bound_words(four, 64), rel=1e-6)


def test_a_graph_in_pieces_has_a_lower_bound_that_is_not_much_lower(monkeypatch):
    graph = llama()[0]
    whole = words.lower_bound_words(graph, 64)
    monkeypatch.setattr(units, "MOST_ROWS", 20)
    assert 0.5 * whole < words.lower_bound_words(graph, 64) <= whole


def test_charges_for_one_tensor_are_together_at_most_its_elements():
    graph = llama()[0]
    ((charging, *_),) = units.charging_of(graph, 64, ())
    found = charging.best(16)
    assert min(found) >= 0
    for limit in charging.limits:
        assert sum(found[charge] for charge in limit.charges) <= 16 * limit.elements


def test_the_ways_to_cut_a_product_of_matrices():
    """Two ranks: cut i, k or j, or compute everything twice."""
    graph = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=(4, 5), B=(5, 6)).graph
    ways = ways_to_cut(graph["Z"].computed_einsum, 24, 2)
    rows = {
        tuple(map(int, (*copies, moved, spare)))
        for copies, moved, spare in zip(*ways[:3], strict=True)
    }
    assert rows == {(0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 24, 0), (1, 1, 0, 1)}


def test_a_label_is_cut_into_no_more_parts_than_it_has_indices():
    graph = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=(3, 1), B=(1, 1)).graph
    ways = ways_to_cut(graph["Z"].computed_einsum, 3, 4)
    rows = {
        tuple(map(int, (*copies, moved, spare)))
        for copies, moved, spare in zip(*ways[:3], strict=True)
    }
    assert rows == {(1, 3, 0, 1), (3, 3, 0, 3)}


@pytest.mark.sampled(15)
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("bound", [(2, 2), (3, 5), (4, 4), (6, 2), (7, 9), (8, 8), (8, 3)])
def test_ranks_keep_no_more_of_an_outer_product_than_is_taken_off(ranks, bound):
    """Every way to cut it, and every way in which its reader needs it, by sets of elements."""
    factors = axes_of(ranks)
    every = list(itertools.product((0, 1, R), repeat=len(factors)))
    states = [axes for axes in every if fits(ranks, bound, axes)]
    blocks = {}
    parts = {}
    for axes in states:
        blocks[axes] = [
            [
                set(owned(factors, extent, [a for a, s in enumerate(axes) if s == d], rank))
                for d, extent in enumerate(bound)
            ]
            for rank in range(ranks)
        ]
        parts[axes] = [
            int(np.prod([f for f, s in zip(factors, axes, strict=True) if s == symbol]))
            for symbol in (0, 1, R)
        ]
    for made, read in itertools.product(states, repeat=2):
        kept = 0
        for before, after in zip(blocks[made], blocks[read], strict=True):
            common = [len(a & b) for a, b in zip(before, after, strict=True)]
            kept += int(np.prod(common))
        most = most_kept(np.array([parts[made]]), np.array([parts[read]]), bound, ranks)
        assert kept <= most[0, 0], (made, read)
        if made == read:
            assert kept == most[0, 0]
