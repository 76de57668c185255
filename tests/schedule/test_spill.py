"""What leaves memory, compared with all other choices, and kernels cut into passes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_checks import verify

import einmpi
from einmpi.planner.make_plan import make_plan
from einmpi.planner.memory import MOST_PASSES, Pieces
from einmpi.schedule.compute import Compute, Kernel
from einmpi.schedule.layout import Layout
from einmpi.schedule.lower import lower
from einmpi.schedule.memory import bytes_needed, with_frees
from einmpi.schedule.regions import Slot, elements, indices, stretch
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.spill import TILE_OVERHEAD_BYTES, out_of_core, with_spills
from einmpi.schedule.steps import Load

COPY = einmpi.program("Z[i] = X[i]", X=(0,)).graph["Z"].einsum


def load(name):
    layout = Layout(make_plan(einmpi.program("Z[i] = X[i]", X=(1,)).graph, 1).mesh, (1,), ())
    return Load(name, Slot(name, (1,), "float64"), (((0, 1),),), (((0, 1),),), layout)


def compute(name, *operands):
    return Compute((Kernel(name, Slot(name, (0,), "float64"), operands, COPY, (), ()),))


def trace_of(trace):
    """Return steps that load each slot at its first use; each kernel uses one slot."""
    steps, seen = [], set()
    for number, name in enumerate(trace):
        if name not in seen:
            steps.append(load(name))
            seen.add(name)
        steps.append(compute(f"V{number}", load(name).slot))
    return with_frees(steps)


def fewest_fetches(trace, room):
    """Return the fewest fetches of all ways to choose what leaves memory."""
    last = {name: number for number, name in enumerate(trace)}
    states = {frozenset(): 0}
    seen = set()
    for number, name in enumerate(trace):
        following = {}
        for inside, fetches in states.items():
            cost = fetches + (name in seen and name not in inside)
            for stays in itertools.combinations(
                sorted(inside - {name}), min(len(inside - {name}), room - 1)
            ):
                after = frozenset(each for each in (*stays, name) if last[each] > number)
                following[after] = min(cost, following.get(after, cost))
        seen.add(name)
        states = following
    return min(states.values())


@settings(max_examples=60)
@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=14), st.integers(1, 4))
def test_no_other_choice_fetches_less(trace, room):
    steps = with_spills(trace_of(trace), 8 * room)
    assert sum(len(step.spills("fetch")) for step in steps) == fewest_fetches(trace, room)
    assert max(bytes_needed(steps)) <= 8 * room
    verify([Schedule(0, 1, "", tuple(steps))])


def test_a_slot_that_has_not_changed_is_copied_out_once():
    """The copy begins as soon as the values are there."""
    steps = with_spills(trace_of("abcabcc"), 16)
    evicted = [slot for step in steps for slot in step.spills("evict")]
    dropped = [slot for step in steps for slot in step.spills("drop")]
    fetched = [slot for step in steps for slot in step.spills("fetch")]
    assert len(evicted) == len(set(evicted)) <= len(dropped) == len(fetched)
    for before, step in itertools.pairwise(steps):
        if step.spills("evict"):
            assert isinstance(before, Load) and before.writes == step.spills("evict")


def test_a_fetch_moves_before_kernels_that_leave_room():
    a, b = Slot("a", (4,), "float64"), Slot("b", (4,), "float64")
    big = Slot("big", (8,), "float64")
    names = {"a": a, "b": b, "big": big}
    loads = {
        name: Load(name, slot, (((0, 1),),), (((0, 1),),), load("x").layout)
        for name, slot in names.items()
    }

    steps = [
        loads["a"],
        compute("K0", a),
        loads["big"],
        compute("K1", big),
        loads["b"],
        compute("K2", b),
        compute("K3", a),
    ]
    found = with_spills(with_frees(steps), 64)
    order = []
    for step in found:
        if step.kernels:
            order.append(step.vertex)
        if step.spills("fetch"):
            order.append("fetch")
    assert order == ["K0", "K1", "fetch", "K2", "K3"]


def test_nothing_is_added_where_everything_fits():
    steps = trace_of("abcabc")
    assert with_spills(steps, 24) == steps


def test_slots_that_are_too_large_are_created_outside():
    job = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=(32, 32), B=(32, 32))
    schedule = lower(einmpi.plan(job, 1), 0)
    steps = with_spills(schedule.steps, 3 * 32 * 32 * 8 // 4)
    assert [slot.name for step in steps for slot in step.spills("place")] == ["A", "B", "Z"]
    assert not any(step.spills("evict", "drop", "fetch") for step in steps)
    assert any(step.is_out_of_core for step in steps)


# ---- pieces -------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=5),
    st.integers(0, 12),
    st.integers(0, 12),
)
def test_stretch_agrees_with_slices(gaps, one, two):
    runs, end = [], 0
    for gap, size in gaps:
        runs.append((end + gap + 1, end + gap + 1 + size))
        end = runs[-1][1]
    low, high = min(one, two), max(one, two)
    np.testing.assert_array_equal(
        indices(stretch(tuple(runs), low, high)), indices(tuple(runs))[low:high]
    )


def tiles_of(step):
    return [step.kernel_at(0, tile) for tile in step.all_tiles()]


def product(m, n, k):
    job = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=(m, n), B=(n, k))
    (kernel,) = (kernel for step in lower(einmpi.plan(job, 1), 0).steps for kernel in step.kernels)
    return kernel


@pytest.mark.parametrize(
    ("m", "n", "k", "memory"), [(64, 64, 64, 12_000), (100, 10, 7, 2000), (16, 300, 5, 1500)]
)
def test_every_element_is_computed_once(m, n, k, memory):
    step = out_of_core(product(m, n, k), memory)
    seen = np.zeros((m, n, k), int)
    for piece in tiles_of(step):
        (i, k_runs), (j, _) = piece.target, piece.operands[1]
        assert piece.operands == ((i, j), (j, k_runs))
        seen[np.ix_(indices(i), indices(j), indices(k_runs))] += 1
    assert (seen == 1).all() and step.working_bytes <= memory


def test_a_kernel_with_many_labels():
    """Of the 2²⁰ ways to cut twenty labels few are considered, the smallest pieces among them.

    A plan is refused where a vertex would take more than 4096 passes; a schedule is not.
    """
    labels = ",".join(f"i{k}" for k in range(20))
    job = einmpi.program(f"Z[{labels}] = exp(A[{labels}])", A=(2,) * 20)
    (kernel,) = (kernel for step in lower(einmpi.plan(job, 1), 0).steps for kernel in step.kernels)
    assert [out_of_core(kernel, memory).working_bytes for memory in (2**24, 2**21, 4096, 16)] == [
        2**24,
        2**21,
        4096,
        16,
    ]
    with pytest.raises(einmpi.InputError, match="at least 4096 bytes, or more ranks"):
        einmpi.plan(job, 1, memory=4095)


@pytest.mark.parametrize(
    "extents", [(7, 300, 1), (64, 64, 64), (1000, 3, 1000), (0, 5, 2), (5000, 1, 1)]
)
def test_the_sizes_of_blocks_that_are_considered(extents):
    """They make few passes and are no larger than the labels; the whole kernel comes first."""
    einsum = product(*extents).einsum
    pieces = Pieces(einsum, (), ())
    sizes = pieces.sizes()
    whole = np.maximum([extent for _, extent in einsum.extents], 1)
    assert (sizes >= 1).all() and (sizes <= whole).all() and (sizes[0] == whole).all()
    assert pieces.parts(sizes).prod(axis=1).max() <= MOST_PASSES


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(100, 2000), st.booleans()
)
def test_the_best_cut_costs_least_when_its_passes_are_counted(m, n, k, memory, given):
    """The bytes of every way to cut are counted piece by piece."""
    kernel = product(m, n, k)
    inside = (1,) if given else ()
    found = out_of_core(kernel, memory, inside)
    if found is None or not found.tiles.ahead:
        return
    pieces = Pieces(kernel.einsum, ((m, n), (n, k), (m, k)), (8, 8, 8), inside)
    sizes = pieces.sizes()
    fitting = sizes[pieces.nbytes(sizes, ahead=True) <= memory]

    def cost(blocks):
        rows, block = zip(*(((label,), size) for label, size in blocks), strict=True)
        step = replace(found, tiles=replace(found.tiles, rows=rows, block=block))
        fetched, passes, last = 0, 0, [None, None]
        for piece in tiles_of(step):
            passes += 1
            for operand, region in enumerate(piece.operands):
                if operand not in inside and last[operand] != region:
                    fetched, last[operand] = fetched + elements(region) * 8, region
        combined = (-(-n // dict(blocks)["j"]) - 1) * m * k * 8
        return fetched + combined + TILE_OVERHEAD_BYTES * passes, fetched

    costs = []
    for i, k_size, j in fitting.tolist():
        costs += [
            cost((("i", i), ("k", k_size), ("j", j))),
            cost((("k", k_size), ("i", i), ("j", j))),
        ]
    chosen = [
        (label, size) for (label,), size in zip(found.tiles.rows, found.tiles.block, strict=True)
    ]
    assert cost(chosen) == (min(each[0] for each in costs), found.tiles.fetched)


def test_less_memory_never_takes_fewer_copies():
    kernel = product(64, 64, 64)
    sizes = [out_of_core(kernel, memory) for memory in (10**6, 50_000, 20_000, 6000, 1500, 400)]
    fetched = [step.tiles.fetched for step in sizes]
    assert fetched[0] == 2 * 64 * 64 * 8 and fetched == sorted(fetched) and fetched[-1] > fetched[0]
    assert out_of_core(kernel, 16) is None


def test_blocks_of_a_product_are_nearly_square():
    """So the fewest bytes are fetched: with little memory, each operand only a few times."""
    step = out_of_core(product(512, 512, 512), 3 * 512 * 512)
    assert step.tiles.fetched <= 9 * 512 * 512 * 8
