"""Moves between any two layouts: the values are right, and as many words move as planned."""

import itertools
import random

import numpy as np
import pytest
from plan_oracle import R, crossing, layouts, volume

from einmpi.comm.threads import run_threads
from einmpi.planner.mesh import Mesh
from einmpi.planner.moving.volume import traffic
from einmpi.runtime import transfer
from einmpi.runtime import transfer as messages
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.cpu.backend import NumpyBackend
from einmpi.schedule.layout import PARTIAL, Layout
from einmpi.schedule.moves import middle_layout, redistribution
from einmpi.schedule.regions import Slot, elements, indices, shape
from einmpi.schedule.steps import Transfer
from einmpi.schedule.two_level import exchanges, reductions

P = "P"


def sources(ranks, bound, nodes=1):
    """Yield layouts of a tensor; any axes that cut nothing may hold partial results."""
    for axes in layouts(ranks, bound, nodes):
        free = [axis for axis, cut in enumerate(axes) if cut == R]
        for partial in itertools.product((False, True), repeat=len(free)):
            chosen = list(axes)
            for axis, flag in zip(free, partial, strict=True):
                chosen[axis] = P if flag else R
            yield tuple(chosen)


def cuts_of(axes):
    return tuple(None if cut == R else PARTIAL if cut == P else cut for cut in axes)


def pairs(ranks, bound, count, seed=1, nodes=1):
    every = [(s, t) for s in sources(ranks, bound, nodes) for t in layouts(ranks, bound, nodes)]
    return random.Random(seed).sample(every, min(count, len(every)))


def way(mesh, bound, source, target, rank):
    """Return the transfers between two layouts, as lowering chooses them."""
    have, want = Layout(mesh, bound, source), Layout(mesh, bound, target)
    middle = middle_layout(mesh, bound, source, target)
    return reductions(have, middle, rank), exchanges(
        have, middle, want, rank, stored=PARTIAL not in source
    )


def words(mesh, bound, source, target, rank):
    """Return the words that a rank receives, and those of them from other nodes."""
    each = mesh.ranks // mesh.nodes
    total = between = 0

    def receive(member, count):
        nonlocal total, between
        total += count
        between += count * (member // each != rank // each)

    reducing, moving = way(mesh, bound, source, target, rank)
    for reduction in reducing:
        for member, region in reduction.incoming():
            receive(member, elements(region))
    for moves in moving:
        assert moves.words <= moves.max_elements
        assert (
            moves.same_to_all
            or sum(elements(r) for r in moves.sends if r is not None) <= moves.max_elements
        )
        for member, region in zip(moves.group, moves.receives, strict=True):
            receive(member, 0 if region is None else elements(region))
    return total, between


@pytest.mark.sampled(2, always=["3-bound1", "8-bound4"])
@pytest.mark.parametrize(
    "ranks, bound",
    [
        (2, (4, 6)),
        (3, (6, 3)),
        (4, (8, 4)),
        (6, (6, 12)),
        (8, (8, 16)),
        (12, (12, 24)),
        (16, (16, 16)),
        (8, (8, 8, 8)),
        (4, (4,)),
    ],
)
def test_as_many_words_move_as_planned(ranks, bound):
    mesh = Mesh(ranks)
    size = int(np.prod(bound))
    for source, target in pairs(ranks, bound, 120):
        found = [
            words(mesh, bound, cuts_of(source), cuts_of(target), rank)[0] for rank in range(ranks)
        ]
        expected = volume(mesh.factors, source, target) * size
        assert sum(found) == expected, (source, target)
        turned = {
            t for s, t in zip(source, target, strict=True) if s not in (R, P) and t not in (R, s)
        }
        # Every rank moves the same, but where partial results meet axes that turn both ways.
        assert max(found) * ranks == sum(found) or (P in source and len(turned) == len(bound)), (
            source,
            target,
            found,
        )


def planned(mesh, bound, source, target):
    """Return what the planner predicts for `words`, summed over all ranks."""
    symbols = {R: len(bound), P: len(bound) + 1}
    cuts = [tuple(symbols.get(x, x) for x in axes) for axes in (source, target)]
    moved = traffic(mesh, bound, *cuts)
    return moved.words.total, sum(moved.between)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "ranks, nodes, bound",
    [
        (4, 2, (8, 4)),
        (4, 4, (4, 8)),
        (6, 2, (12, 6)),
        (6, 3, (6, 12)),
        (8, 2, (8, 16)),
        (8, 4, (16, 16)),
        (12, 2, (24, 12)),
        (8, 2, (16,)),
        (16, 4, (16, 16)),
        (8, 4, (8, 8, 8)),
    ],
)
def test_words_between_nodes_are_as_planned_and_the_fewest_possible(ranks, nodes, bound):
    """Two levels move no more words in all than a direct exchange does.

    The exception: replicas on other nodes do not help with sums inside a node.
    """
    mesh = Mesh(ranks, nodes)
    size = int(np.prod(bound))
    between = mesh.node_axes
    for source, target in pairs(ranks, bound, 80, nodes=nodes):
        found = [
            words(mesh, bound, cuts_of(source), cuts_of(target), rank) for rank in range(ranks)
        ]
        total, across = (sum(column) for column in zip(*found, strict=True))
        assert (total, across) == planned(mesh, bound, source, target)
        assert total == volume(mesh.factors, source, target, between) * size, (source, target)
        node = volume(mesh.factors[:between], source[:between], target[:between])
        assert across == node * size, (source, target)
        if P not in source and size <= 256:
            assert across == crossing(mesh.factors, between, bound, source, target), (
                source,
                target,
            )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "ranks, nodes, bound",
    [
        (3, 1, (5, 7)),
        (4, 1, (7, 9)),
        (8, 1, (3, 5, 2)),
        (12, 1, (29, 31)),
        (4, 2, (7, 9)),
        (6, 3, (11, 13)),
        (8, 2, (17, 19)),
        (8, 4, (3, 5, 7)),
        (12, 2, (5, 13)),
        (16, 4, (9, 6)),
        (8, 4, (3,)),
        (12, 4, (1, 7)),
        (9, 3, (10, 2, 4)),
        (8, 2, (0, 5)),
    ],
)
def test_as_many_words_move_as_planned_when_extents_do_not_divide(ranks, nodes, bound):
    mesh = Mesh(ranks, nodes)
    for source, target in pairs(ranks, bound, 100, nodes=nodes):
        found = [
            words(mesh, bound, cuts_of(source), cuts_of(target), rank) for rank in range(ranks)
        ]
        expected = planned(mesh, bound, source, target)
        assert tuple(sum(column) for column in zip(*found, strict=True)) == expected, (
            source,
            target,
        )


# ---- values -------------------------------------------------------------------------------------


def move_on_threads(mesh, bound, source, target, aggregation, dtype, tensor_of):
    """Return each rank's block in the target layout.

    `tensor_of(digits)` is what the ranks with these digits on the partial axes hold.
    """
    have, want = Layout(mesh, bound, source), Layout(mesh, bound, target)
    partial = [axis for axis, cut in enumerate(source) if cut == PARTIAL]

    def on_rank(comm):
        digits = mesh.digits(comm.rank)
        region = have.block(comm.rank)
        local = tensor_of(tuple(digits[axis] for axis in partial))[np.ix_(*map(indices, region))]
        before = Slot("before", shape(region), dtype)
        after = Slot("after", shape(want.block(comm.rank)), dtype)
        buffers = Buffers(NumpyBackend())
        buffers.make(before)[...] = local
        reducing, moving = way(mesh, bound, source, target, comm.rank)
        for reduction in reducing:
            step = Transfer("T", before, before, reduction, aggregation=aggregation)
            transfer.transfer(step, buffers, comm)
        for number, moves in enumerate(moving):
            transfer.transfer(
                Transfer("T", after if number else before, after, moves), buffers, comm
            )
        return buffers[after], (comm.received, comm.received_between)

    return run_threads(mesh.ranks, on_rank, nodes=mesh.nodes)


CASES = [
    (2, 1, (5,)),
    (3, 1, (5, 4)),
    (4, 1, (6, 7)),
    (6, 1, (7, 9)),
    (8, 1, (9, 8)),
    (12, 1, (13, 5)),
    (4, 1, (1,)),
    (8, 1, (3, 2, 4)),
    (4, 2, (6, 7)),
    (6, 3, (7, 9)),
    (8, 2, (9, 8)),
    (8, 4, (1,)),
    (8, 4, (7,)),
    (12, 2, (13, 5)),
    (8, 4, (4, 4, 4)),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", [16 * 2**20, 64], ids=["at once", "in pieces"])
@pytest.mark.parametrize("ranks, nodes, bound", CASES)
def test_the_right_values_arrive(monkeypatch, ranks, nodes, bound, stage):
    """The values are whole numbers, whose sums are exact in any order."""
    monkeypatch.setattr(messages, "MESSAGE_BUFFER_BYTES", stage)
    mesh, rng = Mesh(ranks, nodes), np.random.default_rng(3)
    for number, (source, target) in enumerate(pairs(ranks, bound, 25, nodes=nodes)):
        aggregation, dtype = [
            ("sum", "float64"),
            ("max", "int64"),
            ("sum", "float16"),
            ("any", "bool"),
        ][number % 4]
        partial = [mesh.factors[axis] for axis, cut in enumerate(source) if cut == P]
        stack = rng.integers(0, 2 if dtype == "bool" else 50, (*partial, *bound)).astype(dtype)
        axes = tuple(range(len(partial)))
        whole = {
            "sum": stack.sum(axis=axes, dtype=dtype),
            "max": stack.max(axis=axes),
            "any": stack.any(axis=axes),
        }[aggregation]
        results = move_on_threads(
            mesh, bound, cuts_of(source), cuts_of(target), aggregation, dtype, stack.__getitem__
        )
        want = Layout(mesh, bound, cuts_of(target))
        for rank, (block, received) in enumerate(results):
            np.testing.assert_array_equal(
                block, whole[np.ix_(*map(indices, want.block(rank)))], err_msg=f"{source} {target}"
            )
            expected = words(mesh, bound, cuts_of(source), cuts_of(target), rank)
            assert received == tuple(count * block.dtype.itemsize for count in expected)


@pytest.mark.sampled(2, always=["4-3-bound0", "7-6-bound3"])
@pytest.mark.parametrize(
    "ranks, used, bound", [(4, 3, (7, 5)), (6, 6, (9, 4)), (5, 2, (8,)), (7, 6, (3, 3, 3))]
)
def test_redistribution_between_meshes(ranks, used, bound):
    whole = np.random.default_rng(1).random(bound)
    for one, two in itertools.product(layouts(ranks, bound)[:9], layouts(used, bound)[:9]):
        first, second = (
            Layout(Mesh(ranks), bound, cuts_of(one)),
            Layout(Mesh(used), bound, cuts_of(two)),
        )
        for source, target in ((first, second), (second, first)):
            for rank in range(ranks):
                moves = redistribution(source, target, ranks, rank)
                block = target.block(rank)
                assert (block is None) == (rank >= target.mesh.ranks)
                if block is None:
                    assert moves.words == 0 and moves.own is None
                    continue
                found = np.full(shape(block), np.nan)
                for member, place in enumerate(moves.receives):
                    if place is None:
                        continue
                    sent = redistribution(source, target, ranks, member).sends[rank]
                    theirs = whole[np.ix_(*map(indices, source.block(member)))]
                    found[np.ix_(*map(indices, place))] = theirs[np.ix_(*map(indices, sent))]
                if moves.own is not None:
                    mine = whole[np.ix_(*map(indices, source.block(rank)))]
                    found[np.ix_(*map(indices, moves.own[1]))] = mine[
                        np.ix_(*map(indices, moves.own[0]))
                    ]
                np.testing.assert_array_equal(found, whole[np.ix_(*map(indices, block))])
