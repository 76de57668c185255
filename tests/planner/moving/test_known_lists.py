"""What ranks need by lists of indices that are known, counted rank by rank."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_lists import known, program_with_known, read_in

import einmpi
from einmpi.graph.eingraph import Aligned
from einmpi.planner.mesh import Mesh
from einmpi.planner.moving.halo import (
    axes_of_labels,
    intersect,
    length,
    needed_of,
    share,
    shares_of,
)
from einmpi.planner.moving.halo_words import halo_words, halo_words_of_plan
from einmpi.planner.moving.known_lists import (
    FEW_RUNS,
    Listed,
    indices_of,
    runs_of,
    with_aligned_labels,
)
from einmpi.planner.states import choices, named
from einmpi.planner.text.explain import as_json
from einmpi.schedule.halo import halo_moves
from einmpi.schedule.layout import Layout
from einmpi.schedule.regions import locate, split, subtract

index_sets = st.sets(st.integers(0, 60)).map(sorted).map(lambda each: np.array(each, np.int64))


@given(index_sets, index_sets, st.integers(1, 4))
def test_listed_indices_are_sets_as_runs_are(one, two, pieces):
    a, b = runs_of(one), runs_of(two)
    plain = tuple((int(index), int(index) + 1) for index in one)
    assert isinstance(a, Listed) == (len(a) > FEW_RUNS)
    assert len(tuple(a)) == len(a)
    assert list(indices_of(a)) == list(one) == [k for run in a for k in range(*run)]
    assert length(a) == len(one) == length(plain)
    both = np.intersect1d(one, two)
    assert intersect(a, b) == intersect(b, a) == runs_of(both)
    assert subtract(a, b) == runs_of(np.setdiff1d(one, two))
    assert list(indices_of(locate(intersect(a, b), a))) == list(np.searchsorted(one, both))
    divided = [indices_of(split(a, pieces, which)) for which in range(pieces)]
    assert list(np.concatenate(divided)) == list(one)


RNG = np.random.default_rng(5)
LISTS = {
    "k": RNG.integers(3, 17, 23),
    "m": RNG.integers(0, 20, 23).astype(np.uint32),
    "n": np.arange(10) % 2,
    "t": RNG.integers(0, 20, (5, 4)),
}
PROGRAMS = {
    "vector": "V[q] = x[k[q]]",
    "rows": "V[q,c] = X[k[q],c]",
    "both dimensions": "V[q] = X[k[q],m[q]]",
    "two lists": "V[q] = x[k[q]] * x[m[q]]",
    "list of two labels": "V[a,b] = x[t[a,b]]",
    "scattered": "V[a,c] = sum[b](x[t[a,b]] * y[a,c])",
    "list and neighbours": "V[i] = x[i] * x[maximum(i-1, 0)] * sum[a,b](x[t[a,b]])",
    "few rows": "V[q,f] = W[n[q],f]",
    "rows and neighbours": "V[a,b,c] = X[t[a,b],c] * X[t[a,b],maximum(c-1, 0)]",
}
SHAPES = {"W": (3, 1), "x": (20,), "X": (20, 20), "y": (5, 6)}


def needed_for(name):
    text = PROGRAMS[name]
    tensor = next(name for name in "XWx" if name in text)
    graph = program_with_known(text, read_in(text, LISTS), **read_in(text, SHAPES)).graph
    for vertex in graph.computed:
        if tensor in vertex.inputs:
            needed = needed_of(graph, vertex, tensor)
            assert needed is not None and needed.lists
            return needed
    raise AssertionError


def indices_read(needed, mesh, state, digits):
    """Return the indices of each dimension that a rank reads."""
    found = []
    for dimension in range(len(needed.bound)):
        axes = axes_of_labels(needed.labels(dimension), state)
        shares = shares_of(mesh, needed, dimension, axes, digits)
        own = {label: indices_of(runs) for label, runs in shares.items()}
        read = set()
        for index in needed.indices:
            entry = index[dimension]
            if isinstance(entry, str):
                read.update(own[entry])
            elif any(index[dimension] in dict(needed.lists) for index in needed.indices):
                if not needed.is_listed(dimension):  # arithmetic beside a list
                    read.update(range(needed.bound[dimension]))
                    continue
                listed = dict(needed.lists)[entry]
                grid = np.ix_(*(own[label] for label in listed.labels))
                read.update(listed.known.values[grid].ravel().tolist())
            elif len(own["c"]):  # the number before
                read.update(range(max(own["c"][0] - 1, 0), own["c"][-1]))
        found.append(read)
    return found


@pytest.mark.sampled(22)
@pytest.mark.parametrize("mesh", [Mesh(2), Mesh(4), Mesh(4, 2), Mesh(6, 3), Mesh(3)], ids=repr)
@pytest.mark.parametrize("name", PROGRAMS)
def test_words_are_those_rank_by_rank(name, mesh):
    needed = needed_for(name)
    labels = [label for label, _ in needed.extents]

    def states_of(extents):
        axes = [(axis,) for axis in range(len(mesh.factors))]
        uncut = (len(extents),) * len(axes)
        return [
            tuple(row)
            for row in choices(mesh, extents, axes, uncut, range(len(extents) + 1)).tolist()
        ]

    layouts = states_of(needed.bound)
    states = states_of([extent for _, extent in needed.extents])
    total, between = halo_words(mesh, needed, layouts, states, mesh.ranks)
    some = RNG.permutation(len(layouts) * len(states))[:60]
    for row, column in [divmod(int(number), len(states)) for number in some]:
        cuts, state = layouts[row], named(states[column], labels)
        layout_cuts = tuple(None if cut == len(needed.bound) else cut for cut in cuts)
        layout = Layout(mesh, needed.bound, layout_cuts)
        received = far = moved = 0
        for rank in range(mesh.ranks):
            digits = mesh.digits(rank)
            read = indices_read(needed, mesh, state, digits)
            stored, near = [], []
            for dimension, extent in enumerate(needed.bound):
                cutting = [axis for axis, cut in enumerate(cuts) if cut == dimension]
                for axes, blocks in ((len(cuts), stored), (mesh.node_axes, near)):
                    digits_of_block = tuple((axis, digits[axis]) for axis in cutting if axis < axes)
                    blocks.append(set(indices_of(share(mesh, extent, digits_of_block))))
            needs = np.prod([len(each) for each in read])
            received += needs - np.prod([len(r & s) for r, s in zip(read, stored, strict=True)])
            far += needs - np.prod([len(r & s) for r, s in zip(read, near, strict=True)])
            moves, _ = halo_moves(layout, needed, state, rank)
            if moves is not None:
                moved += moves.words
                assert max(moves.words, moves.words_sent) <= moves.max_elements
        assert moved == received == total[row, column]
        assert (
            halo_words_of_plan(mesh, needed, cuts, states[column])
            == (
                received,
                far if mesh.nodes > 1 else 0,
            )
            or mesh.nodes == 1
        )
        assert between[row, column] == (far if mesh.nodes > 1 else 0)


def test_a_list_that_leaves_its_dimension_is_not_taken():
    graph = program_with_known("V[q] = x[k[q]]", {"k": np.array([0, 25])}, x=(20,)).graph
    assert needed_of(graph, graph["V"], "x") is None


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_values_are_aligned_if_each_block_goes_to_its_own(ranks):
    text = "y[i:12] = sum[q](where(k[q] == i, x[q], 0))"
    position, place = np.arange(24), np.arange(12)
    for values in itertools.chain(
        [position // 2, 11 - position // 2, np.repeat(place[::-1].reshape(3, 4)[::-1], 2)],
        [np.where(position % 5 == 0, 12, position // 2)],
    ):
        graph = program_with_known(text, {"k": values}, x=(24,)).graph
        (vertex,) = with_aligned_labels(graph, Mesh(ranks)).computed
        goes_there = position * ranks // 24 == values * ranks // 12
        is_aligned = bool((goes_there | (values == 12)).all())
        assert vertex.aligned == ((Aligned("q", "i"),) if is_aligned else ())
        assert vertex.partial_labels == (() if is_aligned else ("q",))


def test_equal_lists_are_equal():
    assert known(np.arange(3)) == known(np.arange(3)) != known(np.arange(4))


def test_plans_say_what_lists_save():
    """Each of two ranks lacks two of the 20 elements: 4 words move, and 20 without the list."""
    listed = np.arange(20)[::-1].copy()
    listed[2:18] = np.sort(listed[2:18])
    job = program_with_known("V[q] = x[k[q]]", {"k": listed}, x=(20,))
    plan = einmpi.plan(job, 2, pin={"x": (2,), "V": (2,)})
    assert "\nghosts       of x, 4 words of 20\n" in str(plan)
    assert as_json(plan)["ghosts"] == {"x": {"words": 4, "words_unlisted": 20}}
    assert "not_cut" not in as_json(plan)["certificate"]
