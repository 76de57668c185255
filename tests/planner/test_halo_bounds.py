"""The lower bound of tensors that are read with index arithmetic: never above a plan, and close."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from bound_cases import optimum

import einmpi
from einmpi.planner.lower_bound.halos import Reach, readings_of
from einmpi.planner.lower_bound.words import lower_bound_words
from einmpi.planner.make_plan import make_plan
from einmpi.planner.plan import Options
from einmpi.planner.strategies import DEFAULT_STRATEGY

# ---- indices of one dimension -----------------------------------------------------------------


def _reach(extent, major, stride=1, minor=1, first=0, last=0, wraps=False) -> Reach:
    return Reach(extent, wraps, "i", major, stride, None if minor == 1 else "k", minor, first, last)


REACHES = {
    "a stencil": _reach(7, 7, first=-1, last=1),
    "one side": _reach(7, 7, first=-2, last=0),
    "far": _reach(6, 6, first=-4, last=3),
    "inside": _reach(9, 7, first=0, last=2),
    "a part": _reach(9, 4, first=3, last=4),
    "a window": _reach(8, 6, minor=3),
    "a window outside": _reach(6, 6, minor=3, first=-1, last=-1),
    "two labels and offsets": _reach(9, 5, minor=4, first=0, last=1),
    "pooling": _reach(12, 6, stride=2, minor=2),
    "overlapping pooling": _reach(13, 6, stride=2, minor=3),
    "gaps": _reach(18, 6, stride=3, minor=2),
    "every second": _reach(12, 6, stride=2, first=0, last=1),
}
LOOSE = {"far", "pooling", "overlapping pooling", "gaps"}  # where sets of sums are hard to count


def _partitions(indices, parts):
    """Yield all ways to put the indices into so many sets, none of them empty."""
    if parts == 1:
        yield [indices]
    elif len(indices) == parts:
        yield [[index] for index in indices]
    elif len(indices) > parts:
        first, *others = indices
        for partition in _partitions(others, parts - 1):
            yield [[first], *partition]
        for partition in _partitions(others, parts):
            for at, chosen in enumerate(partition):
                yield [*partition[:at], [first, *chosen], *partition[at + 1 :]]


def _reached(reach: Reach, majors, minors):
    """Return how many indices of the tensor lie between the least and the greatest reached."""
    low = reach.stride * min(majors) + min(minors) + reach.first
    high = reach.stride * max(majors) + max(minors) + reach.last
    return max(0, min(high + 1, reach.extent) - max(low, 0))


@pytest.mark.parametrize("name", REACHES)
def test_no_partition_needs_fewer_indices(name):
    """All ways to divide both labels, whatever the shape of the parts."""
    reach = REACHES[name]
    tight = True
    for d, e in itertools.product(range(1, 4), range(1, 4)):
        least = None
        for majors in _partitions(list(range(reach.major_extent)), d):
            for minors in _partitions(list(range(reach.minor_extent)), e):
                total = sum(_reached(reach, i, k) for i in majors for k in minors)
                least = total if least is None else min(least, total)
        if least is not None:
            bound = int(reach.indices({"i": np.array([d]), "k": np.array([e])})[0])
            assert bound <= least, (d, e)
            tight &= bound == least
    assert tight == (name not in LOOSE)


@pytest.mark.parametrize(("first", "last"), [(-1, 1), (0, 1), (-2, 1), (-3, 2)])
def test_no_part_of_a_ring_is_without_its_neighbours(first, last):
    """Equal blocks of a ring, dealt out to the parts in any way."""
    for extent, blocks in ((8, 4), (12, 6), (9, 4), (16, 8)):
        borders = [-(-block * extent // blocks) for block in range(blocks + 1)]
        for parts in range(1, blocks + 1):
            if blocks % parts:
                continue
            least = extent * parts
            for partition in _partitions(list(range(blocks)), parts):
                if {len(part) for part in partition} != {blocks // parts}:
                    continue
                total = 0
                for part in partition:
                    own = [i for block in part for i in range(*borders[block : block + 2])]
                    offsets = range(first, last + 1)
                    total += len({(i + offset) % extent for i in own for offset in offsets})
                least = min(least, total)
            reach = _reach(extent, extent, first=first, last=last, wraps=True)
            assert int(reach.indices({"i": np.array([parts])})[0]) <= least


# ---- plans ------------------------------------------------------------------------------------

STAR = "V[i,j] = where((i>0)&(i<n-1)&(j>0)&(j<n-1), u[i-1,j]+u[i+1,j]+u[i,j-1]+u[i,j+1], u[i,j])"
SQUARE = (
    "V[i:n,j:n] = where((i>0)&(i<n-1)&(j>0)&(j<n-1),"
    " u[i-1,j-1] + u[i-1,j+1] + u[i+1,j-1] + u[i+1,j+1], 0)"
)
PROGRAMS = {
    "star": (STAR, {"u": (12, 12)}),
    "square": (SQUARE, {"u": (12, 12)}),
    "two steps": (
        f"{STAR}\n{STAR.replace('u[', 'V[').replace('V[i,j] =', 'W[i,j] =', 1)}",
        {"u": (12, 12)},
    ),
    "upwind": ("V[i,j] = where(i>0, u[i-1,j], 0) * u[i,j] + u[0,j] * 0", {"u": (12, 9)}),
    "periodic": ("V[i:n,j:n] = u[(i+1)%n,j] + u[(i-1)%n,j] + u[i,(j+11)%n]", {"u": (12, 12)}),
    "convolution": (
        "V[b,o,x,y] = sum[c,v,w](X[b,c,x+v,y+w] * K[o,c,v,w])",
        {"X": (2, 3, 10, 10), "K": (4, 3, 3, 3)},
    ),
    "pooled": (
        "C[x,y] = sum[v,w](X[x+v,y+w] * K[v,w]); V[x,y] = max[a:2,b:2](C[2*x+a,2*y+b])",
        {"X": (18, 18), "K": (3, 3)},
    ),
    "a wide one": (
        "V[i:n,k] = sum[j](where(i>1, u[i-2,j], 0) * B[j,k])",
        {"u": (12, 40), "B": (40, 3)},
    ),
    "both ways": ("V[i,j] = u[i,j] + u[n-1-i,j]; W = sum(V[i,j] * u[i,j])", {"u": (12, 12)}),
    "the same twice": (
        "V[i,j] = u[i,j] + where(i>0, u[i-1,i], 0) + w[j]",
        {"u": (12, 12), "w": (12,)},
    ),
    "a product of it": (
        "T[i:n,j] = where(i>0, a[i-1], 0) * b[j]; Z[i,k] = sum(T[i,j] * C[j,k])",
        {"a": (12,), "b": (12,), "C": (12, 12)},
    ),
}


def _graph(name):
    text, shapes = PROGRAMS[name]
    return einmpi.program(text, n=12, dtype="float32", **shapes).graph


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 8, 12])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_bound_is_never_above_the_best_plan(name, ranks):
    graph = _graph(name)
    best = optimum(graph, ranks)
    assert 0 <= lower_bound_words(graph, ranks) <= best
    for each in graph.inputs:
        kept = (each.name,)
        assert lower_bound_words(graph, ranks, kept) <= optimum(graph, ranks, kept)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("strategy", [DEFAULT_STRATEGY, "eindecomp-paper", "sqrt", "replicate"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_strategy_moves_less_than_the_bound(name, strategy):
    graph = _graph(name)
    for ranks in (4, 9, 16, 24, 36, 64):
        plan = make_plan(graph, ranks, Options(strategy))
        assert 0 <= lower_bound_words(graph, ranks) <= plan.words_predicted


def _random_stencils(rng) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Return a program of one to three statements, each with some offsets in each dimension."""
    ndim = rng.choice((1, 2, 2, 3))
    labels = "ijk"[:ndim]
    shape = tuple(rng.choice((5, 6, 8, 9, 16)) for _ in labels)
    lines = []
    for number in range(rng.choice((1, 1, 2, 3))):
        terms = []
        for _ in range(rng.choice((1, 2, 3, 5))):
            entries = []
            for label, extent in zip(labels, shape, strict=True):
                offset = rng.choice((0, 0, 0, -1, 1, 2))
                form = f"({label}{offset:+d})%{extent}"
                if rng.random() < 0.6:
                    form = f"minimum(maximum({label}{offset:+d}, 0), {extent - 1})"
                entries.append(form if offset else label)
            terms.append(f"t{number}[{','.join(entries)}]")
        head = ",".join(f"{label}:{extent}" for label, extent in zip(labels, shape, strict=True))
        lines.append(f"t{number + 1}[{head}] = {' + '.join(terms)}")
    return "\n".join(lines), {"t0": shape}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_the_bound_is_never_above_a_plan_of_random_stencils(seed):
    rng = random.Random(seed)
    above_zero = equal = 0
    for _ in range(40):
        text, shapes = _random_stencils(rng)
        graph = einmpi.program(text, dtype="float32", **shapes).graph
        ranks = rng.choice((2, 3, 4, 6, 8))
        bound = lower_bound_words(graph, ranks)
        best = optimum(graph, ranks)
        assert 0 <= bound <= best, f"{ranks} ranks\n{text}"
        above_zero += bound > 0
        equal += best > 0 and bound == best
        many = rng.choice((12, 16, 32, 60))
        plan = make_plan(graph, many, Options(rng.choice((DEFAULT_STRATEGY, "sqrt"))))
        assert lower_bound_words(graph, many) <= plan.words_predicted, f"{many} ranks\n{text}"
    assert above_zero > 4
    assert equal > 0


# ---- how close it is --------------------------------------------------------------------------


def test_a_star_pays_for_its_arms_and_a_square_for_its_corners():
    n, cuts = 256, 8
    for text, words in (
        (STAR, 2 * 2 * (cuts - 1) * n),
        (SQUARE, (n + 2 * (cuts - 1)) ** 2 - n**2),
    ):
        graph = einmpi.program(text, n=n, u=(n, n)).graph
        (reading,) = {reading for reading in readings_of(graph, graph["V"]) if reading}
        assert reading.is_box == (text == SQUARE)
        assert lower_bound_words(graph, cuts**2) == words
