"""Sparse tensors as sorted keys and values: what is made of keys in any order, what is refused."""

import numpy as np
import pytest

from einmpi.errors import InputError
from einmpi.graph.sparse.coordinates import Coordinates


def of(keys, values, shape=(4, 3), implicit=0):
    return Coordinates.of([np.asarray(column) for column in keys], values, shape, implicit)


def test_keys_are_sorted():
    found = of([[3, 0, 0, 2], [1, 2, 0, 0]], [1.0, 2.0, 3.0, 4.0])
    assert [column.tolist() for column in found.keys] == [[0, 0, 2, 3], [0, 2, 0, 1]]
    assert found.values.tolist() == [3, 2, 4, 1]
    assert all(column.dtype == np.uint32 for column in found.keys)
    assert found.dense().tolist() == [[3, 0, 2], [0, 0, 0], [4, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize("extent", [5, 2**40])
def test_random_keys_against_a_dict(extent):
    rng = np.random.default_rng(0)
    for count in (0, 1, 2, 50):
        keys = [rng.integers(0, 5, count) for _ in range(3)]
        values = rng.integers(-3, 3, (count, 2))
        wanted = {}
        for number, place in enumerate(zip(*keys, strict=True)):
            wanted[place] = wanted.get(place, 0) + values[number]
        found = of(keys, values, (extent, extent, extent, 2))
        assert list(zip(*found.keys, strict=True)) == sorted(wanted)
        for number, place in enumerate(sorted(wanted)):
            assert (found.values[number] == wanted[place]).all()


def test_duplicates_are_added_up_if_what_is_not_stored_is_0():
    assert of([[1, 1], [2, 2]], [5.0, 7.0]).values.tolist() == [12]
    assert of([[1, 1], [2, 2]], [True, True], implicit=False).values.tolist() == [True]
    assert of([[1, 1], [2, 2]], np.int8([5, 7])).values.dtype == np.int8
    with pytest.raises(
        InputError, match=r"\[1, 2\] is stored twice, and what is not stored is inf"
    ):
        of([[1, 1], [2, 2]], [5.0, 7.0], implicit=np.inf)


def test_tiles():
    found = of([[2, 0]], [[1, 2, 3], [4, 5, 6]])
    assert found.tile == (3,)
    assert found.dense().tolist() == [[4, 5, 6], [0, 0, 0], [1, 2, 3], [0, 0, 0]]


@pytest.mark.parametrize(
    ("keys", "values", "shape", "implicit", "message"),
    [
        ([[0.0], [1.0]], [1.0], (4, 3), 0, "the keys of dimension 0 are float64; expected integ"),
        ([[0], [3]], [1.0], (4, 3), 0, "key 3 of dimension 1 is out of range; expected 0 to 2"),
        ([[-1], [0]], [1.0], (4, 3), 0, "key -1 of dimension 0 is out of range"),
        ([[2**63], [0]], [1.0], (4, 3), 0, "key 9223372036854775808 of dimension 0 is out"),
        ([[0], [0]], [1.0], (4, 0), 0, "key 0 of dimension 1 is out of range; expected no key"),
        ([[0, 1], [0]], [1.0, 2.0], (4, 3), 0, "dimension 0 has 2 keys and dimension 1 1"),
        ([[[0]], [0]], [1.0], (4, 3), 0, "the keys of dimension 0 have 2 dimensions"),
        ([[0], [0]], [1.0, 2.0], (4, 3), 0, r"the values have shape \(2,\); expected \(1,\)"),
        ([[0]], [[1.0, 2.0]], (4, 3), 0, r"the values have shape \(1, 2\); expected \(1, 3\)"),
        ([[0], [0]], [1.0], (4,), 0, "there are keys of dimension 1, and shape has length 1"),
        ([], [1.0], (4,), 0, "there are no keys"),
        ([[0]], [1.0], (-4,), 0, "out of range|extents of 0 or more"),
        ([[0], [0]], [1], (4, 3), np.inf, "the implicit value inf is no int64"),
        ([[0], [0]], [1], (4, 3), "zero", "the implicit value is 'zero'; expected a number"),
        ([[0], [0]], [1], (4, 3), [0], "the implicit value is .0.; expected a number"),
    ],
)
def test_refused(keys, values, shape, implicit, message):
    arrays = [np.asarray(column) for column in keys]
    with pytest.raises(InputError, match=message) as error:
        Coordinates.of(arrays, np.asarray(values), shape, implicit, where="A")
    assert str(error.value).startswith("A: ") and "\n" not in str(error.value)
