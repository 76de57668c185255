"""uniform, normal, bernoulli: known answers, any ranks and cuts, loops, gradients, statistics."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import einmpi
from einmpi.comm.threads import run_threads
from einmpi.errors import InputError
from einmpi.graph.random_numbers import philox
from einmpi.kernels.cpu.compiled import compute_by_compiled_loops
from tests.soak.random_numbers import philox4x32, random_numbers

# From the file kat_vectors of Random123: counter, key, result of philox4x32 with ten rounds.
KNOWN_ANSWERS = [
    ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
CALLS = [
    "uniform(7, i, j)",
    "uniform32(7, i, j)",
    "normal(7, i, j)",
    "bernoulli(0.3, 7, i, j)",
    "normal(j, i - 3, 5)",
    "uniform(1, i, j, 2, i * j)",
    "normal(1, j, i, 3)",
    "uniform(i // 2)",
]


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN_ANSWERS)
def test_known_answers(counter, key, wanted):
    found = [int(word[0]) for word in philox4x32(words(counter), words(key))]
    assert found == words(wanted)
    c0, c1, c2, c3 = words(counter)
    k0, k1 = words(key)
    numbers = [np.uint64(low | high << 32) for low, high in ((c0, c1), (c2, c3), (k0, k1))]
    first, second = (int(part) for part in philox(tuple(numbers[:2]), numbers[2]))
    assert [first & 0xFFFFFFFF, first >> 32, second & 0xFFFFFFFF, second >> 32] == words(wanted)


def test_numbers_that_never_change():
    """Saved runs rely on them."""
    text = "u = uniform(seed, 1, 2); n = normal(seed, 1, 2); m = uniform(seed, 1, 2, 3)"
    found = einmpi.run(einmpi.program(text, seed=np.int64(42)), seed=np.int64(42))
    assert float(found["u"]) == 0.027359839063548552
    assert float(found["n"]) == -0.7989405414124345
    assert float(found["m"]) == 0.111849465127285


def meant(call, rows, columns):
    i, j = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    name, _, inside = call.partition("(")
    arguments = eval(f"({inside[:-1]},)", {"i": i, "j": j})
    return np.broadcast_to(random_numbers(name, *arguments), (rows, columns))


def agree(found, wanted):
    """Only a normal number depends on how logarithms and sines are rounded."""
    assert found.dtype == wanted.dtype
    if wanted.dtype == np.float64:
        np.testing.assert_allclose(found, wanted, rtol=1e-14, atol=1e-300)
    else:
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("call", CALLS)
def test_numpy_compiled_loops_and_the_reference_have_the_same_bits(call):
    job = einmpi.program(f"Z[i:23,j:17] = {call}")
    vertex = job.graph["Z"]
    wanted = einmpi.reference(job, {})["Z"]
    agree(wanted, meant(call, 23, 17))
    compiled = np.empty((23, 17), vertex.dtype)
    compute_by_compiled_loops(vertex.computed_einsum, [], compiled)
    np.testing.assert_array_equal(compiled, wanted)
    np.testing.assert_array_equal(einmpi.run(job)["Z"].gather(), wanted)


def test_the_text_of_a_graph_is_read_back():
    from einmpi.language.parse import parse_graph

    for call in CALLS:
        graph = einmpi.program(f"Z[i:4,j:3] = {call}").graph
        assert parse_graph(str(graph)) == graph


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_any_ranks_and_cuts(ranks):
    rows, columns = 20, 12
    for call in CALLS[:5]:
        job = einmpi.program(f"Z[i:{rows},j:{columns}] = {call}")
        wanted = einmpi.reference(job, {})["Z"]
        for cut in itertools.product(range(1, ranks + 1), repeat=2):
            if math.prod(cut) != ranks:
                continue

            def on_rank(comm, job=job, cut=cut):
                return einmpi.run(job, {}, comm, pin={"Z": cut})["Z"].gather()

            for found in run_threads(ranks, on_rank):
                np.testing.assert_array_equal(found, wanted)


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 6), min_size=0, max_size=4),
    st.integers(1, 4),
    st.sampled_from(["uniform", "uniform32", "normal", "bernoulli"]),
    st.integers(-(2**63), 2**63 - 1),
    st.randoms(use_true_random=False),
)
def test_any_shape(extents, ranks, name, seed, random):
    labels = "ijkl"[: len(extents)]
    arguments = [*labels, "seed - 1", str(random.randint(0, 2**62))]
    random.shuffle(arguments)
    given_p = "0.4, " if name == "bernoulli" else ""
    call = f"{name}({given_p}seed, {', '.join(arguments)})"
    target = ",".join(f"{label}:{n}" for label, n in zip(labels, extents, strict=True))
    text = f"Z[{target}] = {call}" if labels else f"Z = {call}"
    job = einmpi.program(text, seed=np.int64(seed))
    values = dict(zip(labels, np.indices(extents), strict=True)) if labels else {}
    values["seed"] = np.int64(seed)
    with np.errstate(over="ignore"):
        numbers = [eval(argument, {}, values) for argument in arguments]
    p = (0.4,) if given_p else ()
    wanted = random_numbers(name, *p, values["seed"], *numbers)
    inputs = {"seed": np.int64(seed)}
    for found in run_threads(ranks, lambda comm: einmpi.run(job, inputs, comm)["Z"].gather()):
        agree(np.asarray(found), np.broadcast_to(wanted, tuple(extents)))


def test_equal_calls_are_one_vertex_and_others_are_not():
    text = "a[i:5] = uniform(1, i); b[j:5] = uniform(1, j); c[i:5] = uniform(1, i, 0)"
    job = einmpi.program(text)
    found = {name: array.gather() for name, array in einmpi.run(job).items()}
    np.testing.assert_array_equal(found["a"], found["b"])
    assert str(job.graph).count("uniform") == 2
    # Neither another number of index values nor another function gives the same numbers.
    assert not np.isin(found["a"], found["c"]).any()
    coin = einmpi.run("x[i:1000] = 0.0 + bernoulli(0.5, 1, i); u[i:1000] = uniform(1, i)")
    assert abs(np.corrcoef(coin["x"].gather(), coin["u"].gather())[0, 1]) < 0.15


@pytest.mark.parametrize("ranks", [1, 3])
def test_loops_take_new_numbers_in_each_step(ranks):
    """`step` is read in each step; what does not read it stays the same, whether hoisted or not."""
    text = """
        keep[i:11] = bernoulli(0.5, 3, i, step)
        fixed[i]   = uniform(seed, i) * A[i]
        x_next[i]  = x[i] + where(keep[i], 1.0, 0.0) * normal(4, step, i) + fixed[i]
    """
    a = np.linspace(1, 2, 11)
    seed = np.int64(2**40 + 5)
    job = einmpi.program(text, x=(11,), A=(11,), seed=seed)
    inputs = {"x": np.zeros(11), "A": a, "seed": seed}
    i = np.arange(11)
    wanted = np.zeros(11)
    for step in range(6):
        kept = random_numbers("bernoulli", 0.5, 3, i, step)
        wanted += np.where(kept, 1.0, 0.0) * random_numbers("normal", 4, step, i)
        wanted += random_numbers("uniform", seed, i) * a

    def on_rank(comm):
        done = einmpi.loop(job, inputs, comm, carry={"x": "x_next"}, steps=6)
        return done.outputs["x"].gather()

    for found in run_threads(ranks, on_rank):
        np.testing.assert_allclose(found, wanted, rtol=1e-13, atol=1e-13)  # sums of a few roundings


def test_gradients_around_random_numbers():
    """They are constants for `grad`, p included; dropout sends what it keeps."""
    text = """
        D[i,j] = where(bernoulli(0.9, seed, i, j), X[i,j] / 0.9, 0.0) * normal(1, i, j)
        loss   = sum(D[i,j]**2) + sum(bernoulli(P[i,j], 2, i, j) * 3.0)
        dX[i,j] = grad(loss, X[i,j])
        dP[i,j] = grad(loss, P[i,j]) + 0 * P[i,j]
    """
    x = np.random.default_rng(1).normal(size=(6, 7))
    p = np.full((6, 7), 0.5)
    seed = np.int64(5)
    found = einmpi.run(einmpi.program(text, X=x, P=p, seed=seed), X=x, P=p, seed=seed)
    i, j = np.indices((6, 7))
    factor = random_numbers("bernoulli", 0.9, 5, i, j) / 0.9 * random_numbers("normal", 1, i, j)
    # A few roundings in another order.
    np.testing.assert_allclose(found["dX"].gather(), 2 * x * factor**2, rtol=1e-13)
    np.testing.assert_array_equal(found["dP"].gather(), np.zeros((6, 7)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Z[i:3] = uniform()", "uniform is not called like this; expected uniform(seed, i, …)"),
        ("Z[i:3] = bernoulli(0.5)", "expected bernoulli(p, seed, i, …)"),
        ("Z[i:3] = uniform(0.5, i)", "random numbers are functions of integers, and this is float"),
        ("Z[i] = normal(1, x[i])", "expected an integer seed and integer index values"),
        ("Z[i:3] = normal(1j, i)", "normal does not take complex numbers"),
        ("Z[i:3] = bernoulli(1j, 1, i)", "bernoulli does not take complex numbers"),
        ("Z[i:3] = bernoulli(1.5, 1, i)", "a probability of 1.5; expected a number from 0 to 1"),
        ("Z = bernoulli(-0.5, 1, 2)", "a probability of -0.5; expected a number from 0 to 1"),
    ],
)
def test_messages(text, message):
    with pytest.raises(InputError) as error:
        einmpi.program(text, x=(3,))
    assert message in str(error.value)


def test_limits_of_probabilities():
    text = "never = sum[i:1000](bernoulli(0, 1, i)); always = sum[i:1000](bernoulli(1, 1, i))"
    found = einmpi.run(text)
    assert found["never"].gather() == 0 and found["always"].gather() == 1000


def test_the_ends_of_the_ranges():
    """Logarithms and sines of the words that random numbers hardly ever have."""
    from einmpi.graph import random_numbers as formulas

    counts = np.concatenate([np.arange(1, 3000), 2**53 - np.arange(3000), 2 ** np.arange(54)])
    wanted = [-2 * math.log(int(count) / 2**53) for count in counts]
    found = formulas._minus_two_logs(counts.astype(np.uint64))
    np.testing.assert_allclose(found, wanted, rtol=2e-15, atol=0)  # a few units in the last place
    t = np.linspace(-(2.0**52), 2.0**52, 2001)
    series = formulas._series(t * t, formulas.SCALED_SINE_SERIES) * t
    np.testing.assert_allclose(series, np.sin(np.pi * (t / 2**53)), rtol=2e-15, atol=0)


# ---- statistics ---------------------------------------------------------------------------------


def check_distribution(values, cumulative, mean, variance):
    """Tests at five standard deviations, or a probability of 1e-6: the numbers never change."""
    flat = values.ravel()
    count = flat.size
    assert abs(flat.mean() - mean) < 5 * math.sqrt(variance / count)
    fourth = ((flat - mean) ** 4).mean()
    assert abs(flat.var() - variance) < 5 * math.sqrt((fourth - variance**2) / count)
    observed, _ = np.histogram(cumulative(flat), bins=1000, range=(0, 1))
    assert stats.chisquare(observed).pvalue > 1e-6
    centred = values - mean
    for products in (
        centred[:, 1:] * centred[:, :-1],
        centred[1:] * centred[:-1],
        centred[:, 7:] * centred[:, :-7],
    ):
        assert abs(products.mean()) < 5 * variance / math.sqrt(products.size)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["{}(1, i, j)", "{}(1, j, i)", "{}(i, 3, j)", "{}(1, i, j, 2)"])
def test_ten_million_values(call):
    shape = "[i:2500,j:4000]"
    uniform = einmpi.run(f"Z{shape} = {call.format('uniform')}")["Z"].gather()
    assert uniform.min() >= 0 and uniform.max() < 1
    assert len(np.unique(uniform)) > uniform.size - 10  # 2**53 values hardly ever meet
    check_distribution(uniform, lambda x: x, 0.5, 1 / 12)
    normal = einmpi.run(f"Z{shape} = {call.format('normal')}")["Z"].gather()
    check_distribution(normal, stats.norm.cdf, 0.0, 1.0)
    assert 4.8 < np.abs(normal).max() < 6.5
    coins = einmpi.run(f"Z{shape} = {call.format('bernoulli').replace('(', '(0.9, ', 1)}")["Z"]
    share = coins.gather().mean()
    assert abs(share - 0.9) < 5 * math.sqrt(0.09 / 1e7)
