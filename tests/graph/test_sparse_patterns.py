"""Joins and unions of patterns against loops over all pairs, as Python runs them and compiled."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from einmpi.graph.sparse import sorting as sorting_module
from einmpi.graph.sparse.patterns import join, over_keys, projected, union
from einmpi.graph.sparse.sorting import are_sorted, key_dtype, sorting, sorting_order
from einmpi.kernels.cpu import key_loops

EXTENTS = (1, 3, 5, 2**20, 2**40)


@pytest.fixture(params=[0, 10**9], ids=["compiled", "interpreted"], autouse=True, scope="module")
def elements_that_are_compiled(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_loops, "MIN_COMPILED", request.param)
        yield


@st.composite
def stored(draw, labels, extent):
    """Sorted different keys of these labels; a few of them, however many are possible."""
    places = st.tuples(*[st.integers(0, min(5, extent[label]) - 1) for label in labels])
    keys = sorted(draw(st.sets(places, max_size=12)))
    far = [extent[label] - min(5, extent[label]) for label in labels]  # near the last ones
    return [tuple(key + more for key, more in zip(each, far, strict=True)) for each in keys]


def iteration(labels, keys, operand):
    columns = np.array(keys, np.int64).reshape(-1, len(labels)).T
    return over_keys(labels, tuple(column.copy() for column in columns), (operand,))


def rows(columns):
    return list(zip(*(column.tolist() for column in columns), strict=True))


@given(st.data())
def test_joins(data):
    extent = {label: data.draw(st.sampled_from(EXTENTS)) for label in "ijkl"}
    some = st.lists(st.sampled_from("ijkl"), min_size=1, max_size=3, unique=True).map(tuple)
    of_a, of_b = data.draw(some), data.draw(some)
    a, b = data.draw(stored(of_a, extent)), data.draw(stored(of_b, extent))
    labels = tuple(dict.fromkeys(of_a + of_b))
    goals = data.draw(st.none() | st.permutations(labels).map(tuple))
    if goals is not None:
        goals = goals[: data.draw(st.integers(0, len(labels)))]
    found = join(iteration(of_a, a, 0), iteration(of_b, b, 1), extent, goals)
    wanted = []
    for x, y in product(range(len(a)), range(len(b))):
        left = dict(zip(of_a, a[x], strict=True))
        right = dict(zip(of_b, b[y], strict=True))
        if all(left[label] == right[label] for label in left.keys() & right.keys()):
            wanted.append((x, y, left | right))
    ats = [np.arange(found.count) if found.at(k) is None else found.at(k) for k in (0, 1)]
    pairs = list(zip(*(at.tolist() for at in ats), strict=True))
    assert sorted(pairs) == [(x, y) for x, y, _ in wanted]
    keys = {(x, y): tuple(each[label] for label in labels) for x, y, each in wanted}
    assert rows(found.columns(labels)) == [keys[pair] for pair in pairs]
    ordered = found.sorted_by(goals or labels)
    results = rows(ordered.columns(goals or labels))
    assert results == sorted(results)
    assert rows(ordered.distinct()) == sorted(set(results))
    assert [sorted(set(results))[n] for n in ordered.result] == results


@given(st.data())
def test_unions_know_where_elements_are(data):
    extent = {label: data.draw(st.sampled_from(EXTENTS)) for label in "ij"}
    lists = [data.draw(stored("ij", extent)) for _ in range(3)]
    first = union(iteration("ij", lists[0], 0), iteration("ij", lists[1], 1))
    found = union(first, iteration("ij", lists[2], 2))
    keys = rows(found.columns("ij"))
    assert keys == sorted(set(lists[0]) | set(lists[1]) | set(lists[2]))
    for operand, own in enumerate(lists):
        places = [own.index(key) if key in own else -1 for key in keys]
        assert found.at(operand).tolist() == places
    turned = union(iteration("ij", lists[0], 0), iteration("ji", [(j, i) for i, j in lists[1]], 1))
    assert rows(turned.columns("ij")) == sorted(set(lists[0]) | set(lists[1]))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=20))
def test_projections(keys):
    columns = tuple(np.array(keys, np.uint32).reshape(-1, 2).T)
    found, place = projected(columns)
    assert rows(found) == sorted(set(keys))
    assert [rows(found)[n] for n in place] == keys


@given(
    st.integers(0, 40), st.integers(1, 3), st.sampled_from([1, 4, 2**32 - 1, 2**40]), st.integers(0)
)
def test_keys_in_any_order(count, dimensions, extent, seed):
    """Equal keys stay as they are given; sorted ones are recognised."""
    rng = np.random.default_rng(seed)
    dtype = key_dtype(extent)
    columns = [(extent - 1 - rng.integers(0, min(extent, 4), count)) for _ in range(dimensions)]
    columns = [column.astype(dtype) for column in columns]
    keys = rows(columns) if count else []
    order = sorted(range(count), key=lambda n: keys[n])
    assert sorting_order(columns).tolist() == order
    assert are_sorted(columns)[0] == (keys == sorted(keys))
    ordered = [column[order] for column in columns]
    assert are_sorted(ordered) == (True, len(set(keys)) == count)
    assert sorting(ordered) is None


@given(st.lists(st.integers(0, 9), max_size=20))
def test_orders_of_numbers(numbers):
    given_ = np.array(numbers, np.uint32)
    starts, order = key_loops.order_by(given_, 10)
    assert order.tolist() == np.argsort(given_, kind="stable").tolist()
    wanted = np.searchsorted(np.sort(given_), np.arange(11)).tolist()
    assert starts.tolist() == wanted
    assert key_loops.starts_of(np.sort(given_) + np.uint32(7), 7, 11).tolist() == wanted


def test_blocks_of_keys_are_compared_with_the_next_ones():
    column = np.arange(3 * sorting_module._BLOCK, dtype=np.uint32)
    for place in (sorting_module._BLOCK, 2 * sorting_module._BLOCK - 1, len(column) - 1):
        twice = column.copy()
        twice[place] = twice[place - 1]
        assert are_sorted([twice]) == (True, False)
        assert are_sorted([twice, column]) == (True, True)
        twice[place] -= 1
        assert are_sorted([twice]) == (False, False)


def test_a_row_with_many_results():
    """Pairs of a result come in the order of the label that they have in common."""
    rng = np.random.default_rng(0)
    extent = {"i": 2, "j": 300, "k": 1000}
    a = sorted({(i, int(j)) for i in (0, 1) for j in rng.integers(0, 300, 100)})
    b = sorted({(int(j), int(k)) for j, k in rng.integers(0, (300, 1000), (3000, 2))})
    found = join(iteration("ij", a, 0), iteration("jk", b, 1), extent, ("i", "k"))
    wanted = sorted({(i, k) for i, j in a for other, k in b if j == other})
    assert rows(found.distinct()) == wanted
    pairs = rows(found.columns(("i", "k", "j")))
    assert pairs == sorted(pairs)
