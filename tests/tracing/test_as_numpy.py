"""What traced functions take as numpy does: writes by tables, where=, states, threads, errors."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import einmpi
import einmpi.array_api as xp
from einmpi.comm.threads import run_threads


def results(function, *arrays, ranks):
    """Return what a traced function computes of arrays on some ranks."""

    def on_rank(comm):
        own = [einmpi.DistArray.from_global(each, comm) for each in arrays]
        return einmpi.jit(function)(*own).gather()

    return run_threads(ranks, on_rank)[0]


# ---- writes --------------------------------------------------------------------------------------


def replaced(x, indices, values):
    x = x.copy()
    x[indices] = values
    return x


def added(x, indices, values):
    x = x.copy()
    x[indices] += values
    return x


def written_in_rows(x, indices, values):
    x = np.stack([x, 2 * x])
    x[1, indices] = values
    x[:, indices] *= 3
    return x


@pytest.mark.sampled(1)
@pytest.mark.parametrize("function", [replaced, added, written_in_rows])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_writes_by_tables(function, data):
    """The tables are arrays or traced; of equal indices the last one counts, as in numpy."""
    extent = data.draw(st.integers(1, 6))
    indices = np.array(data.draw(st.lists(st.integers(-extent, extent - 1), max_size=5)), int)
    x = np.arange(extent) + 0.5
    values = np.arange(len(indices)) - 10.0
    ranks = data.draw(st.sampled_from([1, 3]))
    expected = function(x, indices, values)
    np.testing.assert_array_equal(results(function, x, indices, values, ranks=ranks), expected)
    by_array = results(lambda x, y: function(x, indices, y), x, values, ranks=ranks)
    np.testing.assert_array_equal(by_array, expected)


def test_writes_into_views_of_views():
    def function(x):
        y = x.copy()
        y.reshape(2, 3).T[0] = 7
        y[::2][1:] *= 3
        part = y.reshape(3, 2)[1]
        part[...] = part[::-1].copy()
        return y

    x = np.arange(6.0)
    np.testing.assert_array_equal(results(function, x, ranks=2), function(x))


def test_writes_out_of_range_change_nothing():
    """Nor the element at the same place in row-major order."""

    def function(x, rows, columns):
        y = x.copy()
        y[rows, columns] = 9
        return y

    x = np.zeros((3, 4))
    rows = np.array([0, 1, 3, -1, -4])
    columns = np.array([5, 2, -9, -4, 1])
    expected = np.zeros((3, 4))
    expected[1, 2] = expected[-1, -4] = 9
    for ranks in (1, 3):
        np.testing.assert_array_equal(results(function, x, rows, columns, ranks=ranks), expected)


def test_the_gradient_of_writes_by_tables():
    """Of z0 = x2², z1 = x0 and z2 = x1², times x: what is overwritten has no part in it."""

    def loss(x):
        z = np.zeros_like(x)
        z[[0, 2, 0]] = x**2
        z[np.array([1])] += x[0]
        return (z * x).sum()

    np.testing.assert_array_equal(einmpi.grad(loss)(np.array([1.0, 2, 3])).gather(), [11, 13, 10])


def test_masks_that_are_known():
    mask = np.array([True, False, True])

    def function(x):
        x = x * 2
        x[mask] = x[~mask] + np.array([1.0, 2.0])
        return np.concatenate([x, x[mask]])

    x = np.arange(3.0)
    np.testing.assert_array_equal(results(function, x, ranks=2), function(x))


# ---- aggregations --------------------------------------------------------------------------------

AGGREGATIONS = {
    "sum": lambda x, mask, axis: np.sum(x, axis, where=mask, initial=2),
    "prod": lambda x, mask, axis: np.prod(x, axis, where=mask, keepdims=True),
    "max": lambda x, mask, axis: x.max(axis, where=mask, initial=1),
    "min": lambda x, mask, axis: np.min(x, axis, where=mask[0], initial=3),
    "initial": lambda x, mask, axis: np.max(x, axis, initial=2),
    "empty": lambda x, mask, axis: np.min(x[:0], 0, initial=1),
    "any": lambda x, mask, axis: np.any(x, axis, where=mask),
    "all": lambda x, mask, axis: x.all(axis, where=mask),
    "mean": lambda x, mask, axis: x.mean(axis, where=mask, keepdims=True),
    "std": lambda x, mask, axis: np.std(x, axis, where=mask, ddof=1),
    "reduce": lambda x, mask, axis: np.maximum.reduce(x, axis, where=mask, initial=0),
}


@pytest.mark.sampled(8)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a mean of nothing
@pytest.mark.parametrize("dtype", ["float64", "float32", "int32", "bool"])
@pytest.mark.parametrize("name", AGGREGATIONS)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6), axis=st.sampled_from([None, 0, 1]), ranks=st.integers(1, 3))
def test_aggregations_of_some_elements(name, dtype, seed, axis, ranks):
    """Traced and eager, as numpy; sums in another order differ by their last digits."""
    rng = np.random.default_rng(seed)
    x = (3 * rng.normal(size=(3, 4))).astype(dtype)
    mask = rng.random((3, 4)) > 0.4
    expected = AGGREGATIONS[name](x, mask, axis)

    def on_rank(comm):
        given = [einmpi.DistArray.from_global(each, comm) for each in (x, mask)]
        eager = AGGREGATIONS[name](*given, axis)
        traced = einmpi.jit(lambda x, mask: AGGREGATIONS[name](x, mask, axis))(*given)
        return eager.gather(), traced.gather(), AGGREGATIONS[name](given[0], mask, axis).gather()

    for found in run_threads(ranks, on_rank)[0]:
        assert found.dtype == expected.dtype
        rtol = 64 * float(np.finfo("float32").eps) if found.dtype == "float32" else 1e-12
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol)


def test_an_extreme_of_nothing_needs_initial():
    with pytest.raises(einmpi.InputError, match=r"^test_as_numpy.py:\d+: where is given without"):
        einmpi.jit(lambda x: np.max(x, where=x > 0))(np.ones(3))


# ---- loops ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_step_reads_and_writes_by_its_number(ranks):
    def step(number, x):
        x = x.copy()
        x[number] = x[number - 1] + number
        x[1, 0] += 1
        return x

    start = np.arange(8.0).reshape(4, 2)
    expected = start
    for number in range(4):
        expected = step(number, expected)

    def on_rank(comm):
        return einmpi.fori(4, step, einmpi.DistArray.from_global(start, comm)).gather()

    np.testing.assert_array_equal(run_threads(ranks, on_rank)[0], expected)


def test_states_in_containers():
    def step(number, state, last):
        x, (y, z) = state["x"], state["pair"]
        return {"x": x + y, "pair": (y * 2, z)}, last + number

    state = {"x": np.zeros(2), "pair": (np.ones(2), np.array(5))}
    for function in (einmpi.fori, einmpi.jit(lambda *given: einmpi.fori(3, step, *given[2:]))):
        found, last = function(3, step, state, np.array(0))
        assert list(found) == ["x", "pair"] and isinstance(found["pair"], tuple)
        np.testing.assert_array_equal(found["x"].gather(), [7, 7])
        np.testing.assert_array_equal(found["pair"][0].gather(), [8, 8])
        assert (int(found["pair"][1]), int(last)) == (5, 3)
    swapped = {"y": np.ones(2), "x": np.zeros(2)}  # a step returns them in another order
    found = einmpi.fori(3, lambda number, s: {"x": s["x"] + s["y"], "y": s["y"]}, swapped)
    assert [(name, each.tolist()) for name, each in found.items()] == [("y", [1, 1]), ("x", [3, 3])]
    with pytest.raises(einmpi.InputError, match="in the same containers"):
        einmpi.fori(3, lambda number, state: {"y": state["x"]}, {"x": np.ones(2)})


# ---- messages ------------------------------------------------------------------------------------


def compares(z):
    return z < 1j


def has_a_large_integer(x):
    return x < 2**63


def converts(x):
    return np.asarray(x) + 1


def sorts(x):
    return np.sort(x)[0] * 2.0


def rounds(x):
    return np.floor(x).sum()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (compares, "< does not take complex numbers"),
        (has_a_large_integer, "this integer is too large"),
        (converts, r"x is an array for np\.asarray\(x\), and x\.copy\(\) for np\.array\(x\)"),
        (sorts, "there is no gradient of sorts through sort"),
    ],
)
def test_messages_name_the_line(function, message):
    array = np.ones(3, int if function is has_a_large_integer else float)
    line = function.__code__.co_firstlineno + 1
    traced = einmpi.grad(function) if function is sorts else einmpi.jit(function)
    with pytest.raises(einmpi.InputError, match=f"^test_as_numpy.py:{line}: .*{message}"):
        traced(array)


def test_a_gradient_that_does_not_exist():
    message = r"^test_as_numpy.py:\d+, gradient of rounds: .* anything that has a derivative"
    with pytest.raises(einmpi.InputError, match=message):
        einmpi.grad(rounds)(np.ones(3))


def test_the_namespace_converts_symbols():
    found = einmpi.jit(lambda x: xp.asarray(x, dtype=xp.float32) + xp.asarray(x, copy=True))
    np.testing.assert_array_equal(found(np.ones(3)).gather(), [2, 2, 2])


# ---- threads -------------------------------------------------------------------------------------


def test_threads_trace_at_the_same_time():
    """Each waits, in the middle of its trace, for the others; and one computes without a trace."""
    together = threading.Barrier(3, timeout=60)
    found = {}

    def work(number):
        @einmpi.jit
        def function(x):
            y = x * number
            together.wait()
            z = np.concatenate([y, x[::-1]])
            together.wait()
            return z.sum() + number

        found[number] = float(function(np.arange(4.0)))

    def compute():
        together.wait()
        x = einmpi.DistArray.from_global(np.arange(4.0))
        found["eager"] = np.concatenate([x * 2, x[::-1]]).gather().tolist()
        together.wait()

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
    threads.append(threading.Thread(target=compute))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {1: 13, 2: 20, "eager": [0, 2, 4, 6, 3, 2, 1, 0]}
