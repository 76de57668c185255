"""Between any two layouts: the right values arrive, and exactly the planner's words move."""

import itertools
import random

import numpy as np
import pytest
from plan_oracle import R, layouts, volume

from einmpi.plan.mesh import Mesh
from einmpi.runtime import transfer
from einmpi.runtime.backend import NumpyBackend
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.comm_threads import run_threads
from einmpi.schedule.layout import Layout
from einmpi.schedule.moves import PARTIAL, exchange, redistribution, reduced, reduction
from einmpi.schedule.regions import elements, indices, shape
from einmpi.schedule.steps import Exchange, Reduce, Slot

P = "P"


def sources(ranks, bound):
    """Layouts of a tensor, with any of the axes that cut nothing holding partial results."""
    for axes in layouts(ranks, bound):
        free = [axis for axis, cut in enumerate(axes) if cut == R]
        for partial in itertools.product((False, True), repeat=len(free)):
            chosen = list(axes)
            for axis, flag in zip(free, partial, strict=True):
                chosen[axis] = P if flag else R
            yield tuple(chosen)


def cuts_of(axes):
    return tuple(None if cut == R else PARTIAL if cut == P else cut for cut in axes)


def pairs(ranks, bound, count, seed=1):
    every = [(s, t) for s in sources(ranks, bound) for t in layouts(ranks, bound)]
    return random.Random(seed).sample(every, min(count, len(every)))


def words(mesh, bound, source, target, rank):
    middle = reduced(mesh, bound, source, target)
    have, want = Layout(mesh, bound, source), Layout(mesh, bound, target)
    partial = [axis for axis, cut in enumerate(source) if cut == PARTIAL]
    moves = exchange(have, middle, want, rank)
    assert max(moves.words, sum(elements(r) for r in moves.sends if r is not None)) <= moves.most
    group, me, pieces = reduction(have, middle, partial, rank)
    return moves.words + (0 if pieces[me] is None else (len(group) - 1) * elements(pieces[me]))


@pytest.mark.parametrize("ranks, bound", [(2, (4, 6)), (3, (6, 3)), (4, (8, 4)), (6, (6, 12)), (8, (8, 16)),
                                          (12, (12, 24)),
                                          (16, (16, 16)), (8, (8, 8, 8)), (4, (4,))])  # fmt: skip
def test_words_are_the_planners(ranks, bound):
    mesh = Mesh(ranks)
    size = int(np.prod(bound))
    for source, target in pairs(ranks, bound, 300):
        found = [words(mesh, bound, cuts_of(source), cuts_of(target), rank) for rank in range(ranks)]
        expected = volume(mesh.factors, source, target) * size
        assert sum(found) == expected, (source, target)
        turned = {t for s, t in zip(source, target, strict=True) if s not in (R, P) and t not in (R, s)}
        # Every rank moves the same, but where partial results meet axes that turn both ways.
        assert max(found) * ranks == sum(found) or (P in source and len(turned) == len(bound)), (source, target, found)


@pytest.mark.parametrize("ranks, bound", [(3, (5, 7)), (4, (7, 9)), (6, (11, 13)), (8, (17, 19)), (12, (29, 31))])
def test_words_are_nearly_the_planners_for_uneven_extents(ranks, bound):
    """Only a change from one dimension to another meets blocks of different sizes: few elements more or less."""
    mesh = Mesh(ranks)
    size = int(np.prod(bound))
    for source, target in pairs(ranks, bound, 200):
        found = sum(words(mesh, bound, cuts_of(source), cuts_of(target), rank) for rank in range(ranks))
        turned = any(s not in (R, P) and t != R and s != t for s, t in zip(source, target, strict=True))
        expected = volume(mesh.factors, source, target) * size
        assert abs(found - expected) <= (0.02 * size * ranks if turned else 0), (source, target)


# ---- values ---------------------------------------------------------------------------------------------------------


def move_on_threads(ranks, bound, source, target, aggregation, dtype, tensor_of):
    """Each rank's block in the target layout; `tensor_of(digits)` is what the ranks with these partial digits hold."""
    mesh = Mesh(ranks)
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
        middle = reduced(mesh, bound, source, target)
        if partial:
            step = Reduce("T", before, aggregation, *reduction(have, middle, partial, comm.rank))
            transfer.reduce(step, buffers, comm)
        transfer.exchange(Exchange("T", before, after, exchange(have, middle, want, comm.rank)), buffers, comm)
        return buffers[after], comm.received

    return run_threads(ranks, on_rank)


CASES = [(2, (5,)), (3, (5, 4)), (4, (6, 7)), (6, (7, 9)), (8, (9, 8)), (12, (13, 5)), (4, (1,)), (8, (3, 2, 4))]


@pytest.mark.parametrize("stage", [16 * 2**20, 64], ids=["at once", "in pieces"])
@pytest.mark.parametrize("ranks, bound", CASES)
def test_values_arrive(monkeypatch, ranks, bound, stage):
    """Sums of whole numbers are exact in any order."""
    monkeypatch.setattr(transfer, "STAGE", stage)
    mesh, rng = Mesh(ranks), np.random.default_rng(3)
    for number, (source, target) in enumerate(pairs(ranks, bound, 25)):
        aggregation, dtype = [("sum", "float64"), ("max", "int64"), ("sum", "float16"), ("any", "bool")][number % 4]
        partial = [mesh.factors[axis] for axis, cut in enumerate(source) if cut == P]
        stack = rng.integers(0, 2 if dtype == "bool" else 50, (*partial, *bound)).astype(dtype)
        axes = tuple(range(len(partial)))
        whole = {"sum": stack.sum(axis=axes, dtype=dtype), "max": stack.max(axis=axes), "any": stack.any(axis=axes)}[
            aggregation
        ]
        results = move_on_threads(ranks, bound, cuts_of(source), cuts_of(target), aggregation, dtype, stack.__getitem__)
        want = Layout(mesh, bound, cuts_of(target))
        for rank, (block, received) in enumerate(results):
            np.testing.assert_array_equal(
                block, whole[np.ix_(*map(indices, want.block(rank)))], err_msg=f"{source} {target}"
            )
            assert received == words(mesh, bound, cuts_of(source), cuts_of(target), rank) * block.dtype.itemsize


@pytest.mark.parametrize("ranks, used, bound", [(4, 3, (7, 5)), (6, 6, (9, 4)), (5, 2, (8,)), (7, 6, (3, 3, 3))])
def test_redistribution_between_meshes(ranks, used, bound):
    whole = np.random.default_rng(1).random(bound)
    for one, two in itertools.product(layouts(ranks, bound)[:9], layouts(used, bound)[:9]):
        first, second = Layout(Mesh(ranks), bound, cuts_of(one)), Layout(Mesh(used), bound, cuts_of(two))
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
                    found[np.ix_(*map(indices, moves.own[1]))] = mine[np.ix_(*map(indices, moves.own[0]))]
                np.testing.assert_array_equal(found, whole[np.ix_(*map(indices, block))])
