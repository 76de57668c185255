"""Functions written with numpy, traced: values, bits, words, programs and messages."""

import numpy as np
import pytest
from traced_cases import BY_HAND

import einmpi
from einmpi.comm.threads import run_threads

RNG = np.random.default_rng(5)


def arguments_of(shapes):
    rng = np.random.default_rng(1)
    return {
        name: rng.normal(size=shape) if isinstance(shape, tuple) else shape
        for name, shape in shapes.items()
    }


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", BY_HAND)
def test_a_traced_function_is_the_program_written_by_hand(name):
    """Same words on all ranks, and the same bits."""
    function, shapes, text = BY_HAND[name]
    given = arguments_of(shapes)
    traced = einmpi.trace(function, *given.values())
    outputs = [name for name in ("out", "out1") if f"{name}[" in text]
    job = einmpi.program(text, outputs=outputs, **given)
    for ranks in (1, 2, 3, 4, 7, 8, 64):
        own = einmpi.plan(traced.job, ranks=ranks)
        by_hand = einmpi.plan(job, ranks=ranks)
        assert own.bytes_predicted == by_hand.bytes_predicted, ranks

    def on_rank(comm):
        arrays = {
            name: einmpi.DistArray.from_global(value, comm)
            for name, value in given.items()
            if not isinstance(value, float)
        }
        numbers = {name: value for name, value in given.items() if isinstance(value, float)}
        results = as_tuple(einmpi.jit(function)(*arrays.values(), *numbers.values()))
        wanted = einmpi.run(job, arrays, comm)
        return [
            (result.gather(), wanted[output].gather())
            for result, output in zip(results, outputs, strict=True)
        ]

    for ranks in (1, 3, 4):
        for own, by_hand in run_threads(ranks, on_rank)[0]:
            np.testing.assert_array_equal(own, by_hand)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ["chain", "attention", "kmeans", "heat", "pca"])
def test_a_traced_function_moves_no_more_than_its_calls(name, ranks):
    """DistArrays as calls leave them; a traced function reads them where they are."""
    function, shapes, _ = BY_HAND[name]
    given = arguments_of(shapes)

    def on_rank(comm):
        arrays = [einmpi.DistArray.from_global(value, comm) for value in given.values()]
        before = comm.received
        function(*arrays)
        between = comm.received
        einmpi.jit(function)(*arrays)
        return between - before, comm.received - between

    counts = run_threads(ranks, on_rank)
    # The halo of a stencil is whole rows; the slices leave out both ends, which are not updated.
    ends = 2 * 8 * 2 * (ranks - 1) if name == "heat" else 0
    assert sum(traced for _, traced in counts) <= sum(eager for eager, _ in counts) + ends


FUNCTIONS = {
    "elementwise": lambda a, b: np.exp(-a) * np.abs(b) + np.sin(a) / (1 + b**2),
    "reductions": lambda a, b: (a.sum(0), a.mean(), b.std(1, ddof=1), (a * b).max(1), b.argmin(0)),
    "where": lambda a, b: np.where(a > b, a, b - 1),
    "slices": lambda a, b: a[1:, ::2] - b[:-1, ::-1][:, : a[:, ::2].shape[1]],
    "einsum": lambda a, b: np.einsum("ij,kj->ik", a, b) + a @ b.T,
    "broadcast": lambda a, b: (a - a.mean(0)) / np.sqrt((b**2).sum(1, keepdims=True)),
    "shapes": lambda a, b: a.reshape(-1)[::3] + b.T.reshape(-1)[::3],
    "joins": lambda a, b: np.concatenate([a, np.stack([a[0], b[1]]), b], axis=0),
    "scans": lambda a, b: np.cumsum(a, axis=1) + np.cumsum(b).reshape(4, 6),
    "gathers": lambda a, b: a[np.array([3, 0, 0]), 1:] + b[[1, 2, 3]][:, 1:],
    "writes": lambda a, b: _writes(a, b),
    "sorts": lambda a, b: np.sort(a * 2, axis=0) + np.median(b, axis=0),
    "matrices": lambda a, b: np.linalg.solve(a @ a.T + 9 * np.eye(4), b)[::-1],
    "loops": lambda a, b: _unrolled(a, b),
    "several": lambda a, b: {"sum": a + b, "pair": [a.min(), (b, 3)]},
    "triangles": lambda a, b: np.tril(a @ b.T) + np.triu(a @ b.T, 1) * 2,
    "rolls": lambda a, b: np.roll(a, 1, 0) + np.roll(b, (2, 1), (1, 0)) + np.pad(a, 1)[2:, 2:],
    "composed": lambda a, b: (
        *(np.convolve(a[0], b[0, :3]), np.correlate(a[0], b[1], "same"), np.kron(a[:2], b)),
        *(np.diag(a[0], 1), np.gradient(a)[0], np.trapezoid(b), np.insert(a, 1, 0.0, axis=1)),
        *(np.select([a > 0.5, b > 0.5], [a, b], 7), np.nanmedian(a, axis=0), np.delete(b, 2, 1)),
        np.lib.stride_tricks.sliding_window_view(a, 2, 1),
    ),
}


def _writes(a, b):
    found = np.zeros_like(a)
    found[1:3, ::2] = b[:2, ::2]
    found[0] += a[2]
    found[:, -1] *= 2
    found[found > 1] = 1
    return found


def _unrolled(a, b):
    for power in range(4):
        if power % 2 == 0:
            a = np.tanh(a + b)
        else:
            a -= a.mean(axis=power % 2, keepdims=True)
    return a


def flat(value):
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in flat(each)]
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in flat(each)]
    return [value]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_numpy(name, ranks):
    """As numpy, up to the rounding of sums in another order: a few units of 1e-15 each."""
    a, b = np.random.default_rng(3).normal(size=(2, 4, 6))
    with np.errstate(all="ignore"):
        expected = flat(FUNCTIONS[name](a.copy(), b.copy()))

    def on_rank(comm):
        function = einmpi.jit(FUNCTIONS[name])
        given = [einmpi.DistArray.from_global(each, comm) for each in (a, b)]
        first = flat(function(*given))
        again = flat(function(*given))
        return [
            (x.gather(), y.gather()) if isinstance(x, einmpi.DistArray) else (x, y)
            for x, y in zip(first, again, strict=True)
        ]

    found = run_threads(ranks, on_rank)[0]
    assert len(found) == len(expected)
    for (first, again), wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(first, wanted, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(first, again)
        assert np.asarray(first).dtype == np.asarray(wanted).dtype


def test_a_number_may_differ_from_call_to_call_and_does_not_decide_about_dtypes():
    calls = []

    @einmpi.jit
    def scaled(x, rate, power):
        calls.append(power)
        return rate * x**power

    x = np.arange(3, dtype="float32")
    for rate in (0.5, 2.0):
        found = scaled(x, rate, 2)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found.gather(), np.float32(rate) * x**2)
    assert calls == [2]  # traced once
    scaled(x, 0.5, 3)
    scaled(x.astype("float64"), 0.5, 3)
    assert calls == [2, 3, 3]


def test_the_program_is_that_of_the_language(tmp_path):
    @einmpi.jit
    def distances(X, Y):
        return np.sqrt(((X[:, None, :] - Y[None, :, :]) ** 2).sum(-1))

    X, Y = RNG.normal(size=(2, 4, 3))
    result = distances(X, Y).gather()
    assert distances.program == "out[i, j] = sqrt(sum[k]((X[i, k] - Y[j, k]) ** 2))"
    assert einmpi.plan(distances.job, ranks=2).bytes_predicted >= 0
    distances.trace(X, Y).to_toml(tmp_path / "job.toml")
    job = einmpi.load(tmp_path / "job.toml")
    np.testing.assert_array_equal(einmpi.run(job, {"X": X, "Y": Y})["out"].gather(), result)


def test_arrays_from_elsewhere_are_inputs(tmp_path):
    table = RNG.normal(size=(5, 3))
    distributed = einmpi.DistArray.from_global(table)

    @einmpi.jit
    def looked_up(indices):
        return distributed[indices] + table[:3]

    indices = np.array([4, 0, 4])
    expected = table[indices] + table[:3]
    np.testing.assert_array_equal(looked_up(indices).gather(), expected)
    looked_up.trace(indices).to_toml(tmp_path / "job.toml")
    assert (tmp_path / "job_constant.npy").exists()
    job = einmpi.load(tmp_path / "job.toml")
    found = einmpi.run(job, {"indices": indices})["out"].gather()
    np.testing.assert_array_equal(found, expected)


# ---- gradients -----------------------------------------------------------------------------------

LOSSES = {
    "products": lambda w, x: (np.tanh(x @ w) ** 2).sum(),
    "slices": lambda w, x: ((w[1:] - w[:-1]) ** 2).sum() * x.mean(),
    "softmax": lambda w, x: -np.log(_softmax(x @ w))[:, 0].mean(),
    "where": lambda w, x: np.where(w > 0, w**3, -w).sum(),
    "gathers": lambda w, x: (w[[0, 2, 2]] * x[:3, : w.shape[1]]).sum(),
    "shapes": lambda w, x: (w.reshape(-1) * np.arange(w.size)).sum() + (w.T @ w).sum(),
    "writes": lambda w, x: (_written(w) ** 2).sum(),
}


def _softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _written(w):
    found = w.copy()
    found[1:, 0] = 3 * w[:-1, 1]
    return found


@pytest.mark.sampled(9)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_differences(name, ranks):
    """Central differences with steps of 1e-6: their error is about 1e-9 of the values here."""
    loss = LOSSES[name]
    rng = np.random.default_rng(2)
    w, x = rng.normal(size=(4, 3)), rng.normal(size=(5, 4))
    expected = np.zeros_like(w)
    for place in np.ndindex(w.shape):
        step = np.zeros_like(w)
        step[place] = 1e-6
        expected[place] = (loss(w + step, x) - loss(w - step, x)) / 2e-6

    def on_rank(comm):
        given = [einmpi.DistArray.from_global(each, comm) for each in (w, x)]
        value, gradient = einmpi.value_and_grad(loss)(*given)
        return value.gather(), gradient.gather(), einmpi.grad(loss)(*given).gather()

    value, gradient, again = run_threads(ranks, on_rank)[0]
    np.testing.assert_allclose(value, loss(w, x), rtol=1e-12)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(gradient, again)


def test_gradients_by_containers():
    def loss(parameters, x):
        return ((x @ parameters["w"] + parameters["b"]) ** 2).sum()

    parameters = {"w": RNG.normal(size=(3, 2)), "b": RNG.normal(size=2)}
    x = RNG.normal(size=(4, 3))
    found = einmpi.grad(loss)(parameters, x)
    residual = x @ parameters["w"] + parameters["b"]
    np.testing.assert_allclose(found["w"].gather(), 2 * x.T @ residual, rtol=1e-12)
    np.testing.assert_allclose(found["b"].gather(), 2 * residual.sum(0), rtol=1e-12)


# ---- loops ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3])
def test_loops(ranks):
    A = RNG.normal(size=(6, 6))
    A = A @ A.T
    v = np.ones(6)

    def power(step, x, total):
        y = A @ x
        return y / np.sqrt((y**2).sum()), total + step

    expected = v
    for _ in range(20):
        expected = A @ expected
        expected /= np.sqrt((expected**2).sum())

    def on_rank(comm):
        start = einmpi.DistArray.from_global(v, comm)
        zero = einmpi.DistArray.from_global(np.array(0), comm)
        alone = einmpi.fori(20, power, start, zero)
        inside = einmpi.jit(lambda x: einmpi.fori(20, power, 2 * x, zero)[0] + 1)(start)
        return alone[0].gather(), alone[1].gather(), inside.gather()

    found, total, inside = run_threads(ranks, on_rank)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    np.testing.assert_allclose(inside, expected + 1, rtol=1e-10)
    assert total == sum(range(20))


# ---- messages ------------------------------------------------------------------------------------


def branches(x):
    return x if x.sum() > 0 else -x


def converts(x):
    return x * float(x.max())


def changes_its_argument(x):
    x += 1
    return x


def selects_by_values(x):
    return x[x > 0].sum()


def counts(x):
    return np.unique(x)


def keeps(x, kept=[]):  # noqa: B006  # that is the mistake
    kept.append(x)
    return kept[0] + x


def gathers_all(x):
    return x.gather()


@pytest.mark.parametrize(
    ("function", "line", "message"),
    [
        (branches, 1, "the branch depends on the values of a tensor"),
        (converts, 1, "needs values"),
        (changes_its_argument, 1, "writes into x, which the function is given"),
        (selects_by_values, 1, "a mask selects as many values as are true"),
        (counts, 1, "as many results as the values say"),
        (gathers_all, 1, "gather() needs values"),
    ],
)
def test_messages_name_the_line(function, line, message):
    with pytest.raises(einmpi.InputError) as caught:
        einmpi.jit(function)(np.ones(3))
    number = function.__code__.co_firstlineno + line
    assert str(caught.value).startswith(f"test_jit.py:{number}: "), caught.value
    assert message in str(caught.value)
    assert "; expected " in str(caught.value)


def test_a_symbol_that_is_kept():
    function = einmpi.jit(keeps)
    function(np.ones(3))
    with pytest.raises(einmpi.InputError, match="symbol of another call"):
        function(np.ones(4))


def test_a_program_that_is_too_long():
    @einmpi.jit(most_statements=50)
    def long(x):
        for number in range(2000):
            x = np.sin(x) + x.sum() * number
        return x

    with pytest.raises(einmpi.InputError, match=r"statements; expected .*einmpi\.fori"):
        long(np.ones(3))


def test_there_is_no_gradient_through_a_call_between_programs():
    with pytest.raises(
        einmpi.InputError, match=r"^test_jit.py:\d+: there is no gradient of <lambda> through sort"
    ):
        einmpi.grad(lambda x: np.sort(x)[0] * 1.0)(np.ones(3))
    with pytest.raises(einmpi.InputError, match="real number without dimensions"):
        einmpi.grad(lambda x: x * 2)(np.ones(3))


# ---- what readers of the page have tried ---------------------------------------------------------


def test_a_gradient_is_by_the_argument_alone():
    """A tensor that is also used in other ways counts as a constant there."""
    three = np.full(3, 3.0)
    grad = einmpi.grad

    def values(function):
        found = einmpi.jit(function)(three)
        return [each.gather()[0] for each in as_tuple(found)]

    assert values(lambda x: grad(lambda z: (z * x).sum())(x)) == [3]
    assert values(lambda x: grad(lambda y, z: (y * z * z).sum(), wrt=(0, 1))(x, x)) == [9, 18]
    assert values(lambda x: grad(lambda z: (x**2).sum())(x)) == [0]
    assert values(lambda x: grad(lambda z: (z * x).sum())(np.ones(3)) + x) == [6]

    def twice(x):
        return grad(lambda y: grad(lambda z: (z**2 * y).sum())(y).sum())(x)

    assert values(twice) == [12]


def test_results_are_arrays_of_their_own():
    given = einmpi.DistArray.from_global(np.ones(3))
    copy = einmpi.jit(lambda x: x.copy())(given)
    given[0] = 5
    np.testing.assert_array_equal(copy.gather(), np.ones(3))
    function = einmpi.jit(lambda x: (np.zeros(3), x))
    function(np.ones(3))[0][0] = 100
    zeros, same = function(np.ones(3))
    np.testing.assert_array_equal(zeros, np.zeros(3))
    assert isinstance(same, einmpi.DistArray)


@pytest.mark.parametrize(
    ("body", "state", "expected"),
    [
        (lambda t, x: x, [1], [1]),
        (lambda t, x, y: (y, x), [1, 2], [2, 1]),
        (lambda t, x, y: (x + y, y), [1, 2], [7, 2]),
        (lambda t, a, b: (b, a + b), [0, 1], [2, 3]),
        (lambda t, u, v: (u + 1, u * 2), [1, 1], [4, 6]),
        (lambda t, x: np.zeros(2) + t, [1], [2]),
    ],
)
def test_states_of_loops_may_stay_swap_or_be_unread(body, state, expected):
    found = einmpi.fori(3, body, *(np.full(2, float(value)) for value in state))
    for each, value in zip(as_tuple(found), expected, strict=True):
        np.testing.assert_array_equal(each.gather(), np.full(2, value))


def test_indices_count_from_the_end():
    values = np.arange(5.0)
    indices = np.array([0, -1, 3])
    found = einmpi.jit(lambda x, i: x[i])(values, indices)
    np.testing.assert_array_equal(found.gather(), values[indices])
    gradient = einmpi.grad(lambda x, i: (x[i] ** 2).sum())(values, indices)
    np.testing.assert_array_equal(gradient.gather(), [0, 0, 0, 6, 8])


def test_methods_names_and_numbers():
    class Scaled:
        factor = 2.0

        @einmpi.jit
        def call(self, α, sum):
            return α * self.factor + sum

    np.testing.assert_array_equal(Scaled().call(np.ones(2), np.ones(2)).gather(), [3, 3])
    one = einmpi.jit(lambda x: x[np.array(1)] + np.einsum(",i->", 2.0, x))(np.ones(2))
    assert float(one) == 5


@pytest.mark.parametrize(
    "function",
    [
        lambda x: np.pad(x, 1, mode="mean"),
        lambda x: np.add(x, 1, where=x > 0),
        lambda x: np.zeros(3).__iadd__(x),
        lambda x: einmpi.grad(lambda y: y.sum(), wrt=9)(x),
    ],
)
def test_what_is_not_supported_is_refused(function):
    with pytest.raises(einmpi.InputError, match=r"^test_jit.py:\d+: "):
        einmpi.jit(function)(np.ones(3))


def test_arrays_that_differ_between_ranks_are_refused():
    def on_rank(comm):
        own = np.arange(3.0) ** 2 + comm.rank
        given = einmpi.DistArray.from_global(np.ones(3), comm)
        with pytest.raises(einmpi.EinmpiError, match="constant"):
            einmpi.jit(lambda x: x + own)(given)

    run_threads(2, on_rank)


def test_an_argument_may_be_called_constant(tmp_path):
    table = np.array([1.0, 5.0, 2.0])
    function = einmpi.jit(lambda constant, z: constant * table * z)
    np.testing.assert_array_equal(function(np.full(3, 2.0), 2j).gather(), 4j * table)
    function.trace(np.full(3, 2.0), 2j).to_toml(tmp_path / 'a "job".toml')
    job = einmpi.load(tmp_path / 'a "job".toml')
    found = einmpi.run(job, {"constant": np.full(3, 2.0)})["out"].gather()
    np.testing.assert_array_equal(found, 4j * table)


def test_a_function_that_fails_on_one_rank_fails_on_all():
    """Ranks that have traced it do not wait for the one that has not."""

    def on_rank(comm):
        def function(x):
            if comm.rank == 1:
                raise ValueError("only here")
            return x + 1

        given = einmpi.DistArray.from_global(np.ones(3), comm)
        with pytest.raises((ValueError, einmpi.EinmpiError), match="only here"):
            einmpi.jit(function)(given)
        return float(given.sum())  # and they go on together

    assert run_threads(3, on_rank) == [3, 3, 3]


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "int32", "bool", "complex128"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, t: abs(x) > t,
        lambda x, t: t <= x.real,
        lambda x, t: x == t,
        lambda x, t: np.where(x != t, x, t),
        lambda x, t: np.logical_and(x, t),
        lambda x, t: np.logical_xor(x, t),
        lambda x, t: abs(x - t) < t,
    ],
)
def test_numbers_in_comparisons_keep_their_fraction(function, dtype):
    """The result is a truth, which a number of Python must not become before."""
    x = np.array([0, 0.1, 0.5, 1, 2, 3]).astype(dtype)
    jitted = einmpi.jit(function)
    for number in (0.0, 0.1, 0.5, 2.5):
        try:
            wanted = function(x, number)
        except TypeError:  # truths have no difference
            return
        found = jitted(x, number)
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found.gather(), wanted)
