"""Recurrences: tensors that read themselves at other indices of a label, against loops of numpy."""

import numpy as np
import pytest
from distributed import run_on_threads
from hypothesis import given
from hypothesis import strategies as st
from mpi_helpers import needs_mpirun, run_mpi

import einmpi
from einmpi.comm.threads import run_threads
from einmpi.schedule.lower import lower
from einmpi.schedule.steps import Repeat

RNN = "h[t,k] = tanh(sum(W[k,l] * where(t > 0, h[t-1,l], h0[l])) + sum(U[k,j] * x[t,j]))"

LSTM = """
before[b,t,k] = where(t > 0, h[b,t-1,k], 0.0)
i[b,t,k] = sigmoid(sum(Wi[k,l] * before[b,t,l]) + sum(Ui[k,j] * x[b,t,j]))
f[b,t,k] = sigmoid(sum(Wf[k,l] * before[b,t,l]) + sum(Uf[k,j] * x[b,t,j]))
o[b,t,k] = sigmoid(sum(Wo[k,l] * before[b,t,l]) + sum(Uo[k,j] * x[b,t,j]))
g[b,t,k] = tanh(sum(Wg[k,l] * before[b,t,l]) + sum(Ug[k,j] * x[b,t,j]))
c[b,t,k] = f[b,t,k] * where(t > 0, c[b,t-1,k], 0.0) + i[b,t,k] * g[b,t,k]
h[b,t,k] = o[b,t,k] * tanh(c[b,t,k])
"""

KALMAN = """
guess[t,i] = where(t > 0, sum(A[i,j] * m[t-1,j]), m0[i])
spread[t:steps,i,j] = where(t > 0, sum(A[i,k] * P[t-1,k,l] * A[j,l]), P0[i,j]) + Q[i,j]
s[t] = sum(C[i] * spread[t,i,j] * C[j]) + r
gain[t,i] = sum(spread[t,i,j] * C[j]) / s[t]
m[t,i] = guess[t,i] + gain[t,i] * (y[t] - sum(C[j] * guess[t,j]))
P[t,i,j] = spread[t,i,j] - gain[t,i] * sum(C[k] * spread[t,k,j])
"""

# The distances of the beginnings of two words. Letters are inserted along a row, min-plus.
EDIT = """
down[i:p+1,j:q+1] = where(i > 0, d[i-1,j] + 1, j)
along[i:p+1,j:q+1] = where((i > 0) & (j > 0), d[i-1,j-1] + int64(a[i-1] != b[j-1]), 10**6)
d[i:p+1,j:q+1] = min[k:q+1](where(k <= j, minimum(down[i,k], along[i,k]) + j - k, 10**6))
"""


def normal(seed, **shapes):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape) * 0.5 for name, shape in shapes.items()}


def rnn_inputs(steps=7, width=12, seed=1):
    return normal(seed, W=(width, width), U=(width, 3), x=(steps, 3), h0=(width,))


def rnn(W, U, x, h0):
    h = [h0]
    for row in x:
        h.append(np.tanh(W @ h[-1] + U @ row))
    return np.array(h[1:]).reshape(len(x), len(h0))


def lstm_inputs(batch=3, steps=5, width=4):
    shapes = {f"W{gate}": (width, width) for gate in "ifog"}
    shapes |= {f"U{gate}": (width, 2) for gate in "ifog"}
    return normal(2, **shapes, x=(batch, steps, 2))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm(x, **weights):
    width = len(weights["Wi"])
    h = c = np.zeros((len(x), width))
    found = []
    for t in range(x.shape[1]):
        gate = {k: h @ weights[f"W{k}"].T + x[:, t] @ weights[f"U{k}"].T for k in "ifog"}
        c = sigmoid(gate["f"]) * c + sigmoid(gate["i"]) * np.tanh(gate["g"])
        h = sigmoid(gate["o"]) * np.tanh(c)
        found.append((h, c))
    return [np.stack(each, axis=1) for each in zip(*found, strict=True)]


def kalman(A, C, Q, P0, m0, y, r):
    m, P, found = m0, P0, []
    for t, seen in enumerate(y):
        if t:
            m, P = A @ m, A @ P @ A.T
        P = P + Q
        gain = P @ C / (C @ P @ C + r)
        m = m + gain * (seen - C @ m)
        P = P - np.outer(gain, C @ P)
        found.append((m, P))
    return [np.array(each) for each in zip(*found, strict=True)]


def edit_distances(a, b):
    d = np.zeros((len(a) + 1, len(b) + 1), np.int64)
    for i in range(len(a) + 1):
        for j in range(len(b) + 1):
            if 0 in (i, j):
                d[i, j] = max(i, j)
            else:
                replaced = d[i - 1, j - 1] + (a[i - 1] != b[j - 1])
                d[i, j] = min(d[i - 1, j] + 1, d[i, j - 1] + 1, replaced)
    return d


def kalman_case():
    inputs = normal(3, A=(3, 3), C=(3,), m0=(3,), y=(6,))
    inputs |= {"Q": np.eye(3), "P0": 2 * np.eye(3), "r": np.array(0.5)}
    m, P = kalman(**inputs)
    return KALMAN, inputs, {"steps": 6}, {"m": m, "P": P}


def lstm_case():
    inputs = lstm_inputs()
    h, c = lstm(**inputs)
    return LSTM, inputs, {}, {"h": h, "c": c}


def edit_case():
    a, b = np.random.default_rng(4).integers(0, 3, (2, 8))
    b = b[:6]
    return EDIT, {"a": a, "b": b}, {"p": 8, "q": 6}, {"d": edit_distances(a, b)}


def backwards_case():
    x = normal(5, x=(10,))["x"]
    f = np.zeros(11)
    for t in reversed(range(10)):
        f[t] = 0.5 * f[t + 1] + x[t]
    return "f[t] = where(t < 9, 0.5 * f[t+1], 0) + x[t]", {"x": x}, {}, {"f": f[:10]}


def horner_case():
    # p(x) for many x at once: the coefficients are read one by one.
    inputs = normal(6, a=(9,), x=(5,))
    text = "v[t,i] = where(t > 0, v[t-1,i], 0) * x[i] + a[t]; p[i] = v[8,i]"
    return text, inputs, {}, {"p": np.polyval(inputs["a"], inputs["x"])}


def wide_case():
    # The kernels of a step are large enough to be compiled, and to be asked for groups.
    x = normal(7, x=(300_000,))["x"]
    y = [np.exp(-np.tanh(x))]
    for _ in range(2):
        y.append(np.exp(-np.tanh(y[-1])))
    return "y[t:3,i] = exp(-tanh(where(t > 0, y[t-1,i], x[i])))", {"x": x}, {}, {"y": np.array(y)}


CASES = {
    "rnn": lambda: (RNN, rnn_inputs(), {}, {"h": rnn(**rnn_inputs())}),
    "lstm": lstm_case,
    "kalman": kalman_case,
    "edit": edit_case,
    "backwards": backwards_case,
    "horner": horner_case,
    "wide": wide_case,
    "fibonacci": lambda: (
        "f[t:10] = where(t > 1, f[t-1] + f[t-2], 1)",
        {},
        {},
        {"f": np.array([1, 1, 2, 3, 5, 8, 13, 21, 34, 55])},
    ),
    "no steps": lambda: (RNN, rnn_inputs(steps=0), {}, {"h": np.zeros((0, 12))}),
    "one step": lambda: (RNN, rnn_inputs(1), {}, {"h": rnn(**rnn_inputs(1))}),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("ranks", (1, 2, 3, 4))
@pytest.mark.parametrize("name", CASES)
def test_a_recurrence_is_a_loop(name, ranks):
    text, inputs, sizes, expected = CASES[name]()
    job = einmpi.program(text, outputs=list(expected), **inputs, **sizes)
    reference = einmpi.reference(job, inputs)
    outputs = run_on_threads(job, ranks, inputs).outputs
    for tensor, values in expected.items():
        for found in (reference[tensor], outputs[tensor]):
            assert found.dtype == values.dtype
            np.testing.assert_allclose(found, values, rtol=1e-10)  # sums in another order


@pytest.mark.sampled(13)
@pytest.mark.parametrize("ranks", (2, 3, 4, 6))
@pytest.mark.parametrize("strategy", ("eindecomp-paper", "sqrt", "replicate", "pinned", "along t"))
def test_bytes_are_those_of_the_plan_however_it_is_cut(strategy, ranks):
    """`run_on_threads` compares what ranks receive, and their memory, with schedules and plan."""
    inputs = rnn_inputs()
    options = {"strategy": strategy}
    if strategy in ("pinned", "along t"):
        options = {"pin": {"h": (1, ranks) if strategy == "pinned" else (ranks, 1)}}
    done = run_on_threads(einmpi.program(RNN, **inputs), ranks, inputs, **options)
    assert done.moved == done.plan.bytes_predicted
    if strategy in ("pinned", "along t", "eindecomp-paper"):
        assert done.moved > 0
    np.testing.assert_allclose(done.outputs["h"], rnn(**inputs), rtol=1e-10)


def test_the_plan_counts_all_steps():
    job = einmpi.program(RNN, W=(64, 64), U=(64, 3), x=(20, 3), h0=(64,))
    longer = einmpi.program(RNN, W=(64, 64), U=(64, 3), x=(40, 3), h0=(64,))
    pin = {"h": (1, 2)}
    plan, twice = (einmpi.plan(each, ranks=2, pin=pin) for each in (job, longer))
    for name in ("h_1_now", "h"):  # the product, and what is written
        assert twice.bills[name].nbytes == 2 * plan.bills[name].nbytes
        assert twice.graph[name].operations() == 2 * plan.graph[name].operations()
    assert plan.bills["h_1_now"].nbytes == 20 * 64 * 8  # half of a row to the other rank
    assert "20 times: h_1_now[k] ← Σ[l](W[k,l] × h_1_now_1[l])" in str(plan)
    assert plan.digest != twice.digest
    # W is the same in all steps: it moves before the first one, if at all.
    (repeat,) = [step for step in lower(plan, 0).steps if isinstance(step, Repeat)]
    assert repeat.times == 20
    assert "W" not in {step.vertex for step in repeat.steps if step.transfer}


@pytest.mark.slow
@given(
    steps=st.sampled_from((1, 2, 3, 5, 7)),
    width=st.sampled_from((1, 2, 3, 5, 8, 13)),
    ranks=st.sampled_from((1, 2, 3, 4)),
    shift=st.integers(1, 3),
    backwards=st.booleans(),
    dtype=st.sampled_from(("float32", "float64", "complex128")),
    last=st.booleans(),
)
def test_any_shape_and_dtype(steps, width, ranks, shift, backwards, dtype, last):
    """A sum over the state `shift` steps before or after, with the label first or last."""
    inputs = normal(steps, W=(width, width), x=(steps, width), s=(width,))
    inputs = {name: array.astype(dtype) for name, array in inputs.items()}
    if dtype == "complex128":
        inputs["W"] = inputs["W"] * (0.6 + 0.8j)
    sign = "+" if backwards else "-"
    guard = f"t < {steps - shift}" if backwards else f"t >= {shift}"
    read = f"h[l,t{sign}{shift}]" if last else f"h[t{sign}{shift},l]"
    target = "h[k,t]" if last else "h[t,k]"
    text = f"{target} = sum(W[k,l] * where({guard}, {read}, s[l])) + x[t,k]"
    expected = np.zeros((steps, width), dtype)
    for t in reversed(range(steps)) if backwards else range(steps):
        earlier = t + shift if backwards else t - shift
        state = expected[earlier] if 0 <= earlier < steps else inputs["s"]
        expected[t] = inputs["W"] @ state + inputs["x"][t]
    job = einmpi.program(text, **inputs)
    parts = (ranks, 1) if last else (1, ranks)
    options = {"pin": {"h": parts}} if width % ranks == 0 else {}
    outputs = run_on_threads(job, ranks, inputs, **options).outputs
    scale = np.abs(expected).max() * width * steps
    found = outputs["h"].T if last else outputs["h"]
    assert found.dtype == dtype
    assert np.abs(found - expected).max() <= 8 * np.finfo(dtype).eps * scale  # of the sums


@pytest.mark.parametrize(
    "text, dtype",
    (
        ("f[t] = where(t > 0, 0.5 * f[t-1], 0) + x[t]", "float32"),
        ("f[t] = where(t > 0, f[t-1], 0) + int64(x[t] > 0)", "int64"),
        ("f[t:9] = where(t > 1, f[t-1] + f[t-2], 1)", "int64"),
        ("f[t:9] = where(t > 0, -f[t-1], 1)", "int64"),
        ("f[t:9] = int32(where(t > 0, f[t-1], 1) + 1)", "int32"),
        ("f[t:9] = where(t > 0, f[t-1] / 2, 1)", "float64"),
        ("f[t] = where(t > 0, f[t-1], True) & (x[t] > 0)", "bool"),
        ("f[t] = where(t > 0, 1j * f[t-1], 1) * x[t]", "complex64"),
    ),
)
def test_dtypes(text, dtype):
    assert einmpi.program(text, x=(9,), dtype="float32").graph["f"].dtype == dtype


def test_dtypes_that_take_turns():
    """From bool on, one of the three tensors is a float64 in turn; from float32 on, none is."""
    text = """
    f[t] = maximum(where(t < 7, h[t+2], 0), x[t])
    h[t] = x[t] - g[t]
    g[t] = tanh(x[t] - f[t])
    """
    graph = einmpi.program(text, outputs=["f", "g", "h"], x=(9,), dtype="float32").graph
    assert {graph[name].dtype for name in "fgh"} == {"float32"}


@pytest.mark.parametrize("ranks", (1, 3))
def test_repeated_calls_give_the_same_bits(ranks):
    """The first call does steps one by one; later ones call what was bound."""
    inputs = rnn_inputs()
    other = rnn_inputs(seed=9)
    strided = {**inputs, "W": np.asfortranarray(inputs["W"]), "x": inputs["x"][:, ::-1][:, ::-1]}
    job = einmpi.program(RNN, **inputs)

    def on_rank(comm):
        compiled = einmpi.compile(job, comm=comm, pin={"h": (1, ranks)})
        return [
            compiled(each)["h"].gather()
            for each in (inputs, inputs, inputs, inputs, other, strided, inputs)
        ]

    for found in run_threads(ranks, on_rank):
        for number in (1, 2, 3, 6):
            assert found[number].tobytes() == found[0].tobytes()
        np.testing.assert_allclose(found[4], rnn(**other), rtol=1e-10)
        np.testing.assert_allclose(found[5], rnn(**inputs), rtol=1e-10)


def test_a_failed_step_ends_all_ranks():
    """An index out of range in the middle of the steps: ranks go on until all can be told."""
    text = "h[t,k] = sum(x[place[t],k,l] * where(t > 0, h[t-1,l], 1)) / 6"
    x = np.ones((4, 6, 6))
    place = np.array([0, 1, 7, 2, 3])
    job = einmpi.program(text, x=x, place=place)

    def on_rank(comm):
        compiled = einmpi.compile(job, comm=comm, pin={"h": (1, 2)})
        found = []
        for _ in range(3):
            with pytest.raises(einmpi.EinmpiError) as error:
                compiled({"x": x, "place": place})
            found.append(str(error.value))
        good = compiled({"x": x, "place": place % 4})["h"].gather()
        return found, good

    for found, good in run_threads(2, on_rank):
        for message in found:
            assert "an index from 7 to 7 is out of range" in message
        assert good.tolist() == [[1.0] * 6] * 5


def test_steps_of_a_loop_may_have_recurrences():
    """Weights of an RNN are trained: the loss of each step is that of numpy."""
    text = f"""
    {RNN}
    loss = mean((sum(V[k] * h[t,k]) - y[t])**2)
    W_next[k,l] = W[k,l] - 0.05 * grad(loss, W[k,l])
    V_next[k] = V[k] - 0.05 * grad(loss, V[k])
    """
    inputs = rnn_inputs(steps=9, width=6) | normal(7, V=(6,), y=(9,))
    job = einmpi.program(text, **inputs)
    state = dict(inputs)
    losses = []
    for _ in range(8):
        losses.append(rnn_loss(**state))
        state |= {name: state[name] - 0.05 * rnn_gradients(**state)[name] for name in "WV"}

    def on_rank(comm):
        carry = {"W": "W_next", "V": "V_next"}
        done = einmpi.loop(job, inputs, carry=carry, steps=8, record=["loss"], comm=comm)
        return done.history["loss"], done.outputs["W"].gather()

    for ranks in (1, 2, 4):
        for history, W in run_threads(ranks, on_rank):
            np.testing.assert_allclose(history, losses, rtol=1e-9)  # of eight steps
            np.testing.assert_allclose(W, state["W"], rtol=1e-9)


def decaying(x, rate=0.5):
    h = np.zeros_like(x)
    for t, row in enumerate(x):
        h[t] = (rate * h[t - 1] if t else 0) + row
    return h


def test_a_number_in_brackets_of_a_recurrence():
    """Here the number of a step: each one has another row."""
    x = np.arange(12.0).reshape(3, 4)
    text = "h[t] = 0.5 * where(t > 0, h[t-1], 0.0) + x[step,t]; total = s + sum(h[t])"
    job = einmpi.program(text, x=x, s=())
    done = einmpi.loop(job, {"x": x, "s": 0.0}, carry={"s": "total"}, steps=3)
    assert float(done.outputs["s"]) == sum(decaying(row).sum() for row in x)


@pytest.mark.parametrize("ranks", (1, 2, 3))
def test_recurrences_before_in_and_as_what_a_loop_carries(ranks):
    """That of h is the same in all steps of the loop, that of z is not; then h is carried."""
    text = """
    h[t,k]    = where(t > 0, 0.5 * h[t-1,k], 0) + x[t,k]
    s_next[k] = s[k] * 0.5 + sum(h[t,k])
    z[t]      = where(t > 0, z[t-1] * 0.9, 0) + sum(s_next[k] * h[t,k])
    """
    inputs = normal(1, x=(5, 4), s=(4,))
    job = einmpi.program(text, outputs=["s_next", "z"], **inputs)
    alone = einmpi.program(text.splitlines()[1], x=inputs["x"])

    def on_rank(comm):
        done = einmpi.loop(job, inputs, carry={"s": "s_next"}, steps=4, comm=comm)
        carried = einmpi.loop(alone, {"x": inputs["x"]}, carry={"x": "h"}, steps=3, comm=comm)
        compiled = einmpi.compile(alone, comm=comm, carry={"x": "h"}, donate=True)
        given_away = einmpi.DistArray.from_global(inputs["x"], comm)
        for _ in range(3):
            given_away = compiled(x=given_away)["h"]
        found = (done.outputs["z"], carried.outputs["x"], given_away)
        return [array.gather() for array in found]

    h, s = decaying(inputs["x"]), inputs["s"]
    for _ in range(4):
        s = s * 0.5 + h.sum(axis=0)
    thrice = decaying(decaying(h))
    for z, carried, given_away in run_threads(ranks, on_rank):
        np.testing.assert_allclose(z, decaying(h @ s, 0.9), rtol=1e-12)
        np.testing.assert_allclose(carried, thrice, rtol=1e-12)
        np.testing.assert_allclose(given_away, thrice, rtol=1e-12)


@pytest.mark.slow
def test_training_on_batches():
    text = """
    h[b,t,k] = tanh(sum(W[k,l] * where(t > 0, h[b,t-1,l], 0)) + sum(U[k,j] * x[b,t,j]))
    loss = mean((sum(V[k] * h[b,5,k]) - y[b])**2)
    """
    inputs = normal(1, W=(8, 8), U=(8, 3), V=(8,), x=(32, 6, 3))
    inputs["y"] = 0.3 * inputs["x"].sum(axis=(1, 2))
    shapes = {name: array.shape for name, array in inputs.items()} | {"x": (8, 6, 3), "y": (8,)}
    job = einmpi.program(text, **shapes)

    def on_rank(comm):
        done = einmpi.train(
            job,
            inputs,
            comm,
            loss="loss",
            parameters=["W", "U", "V"],
            optimizer={"name": "adam", "rate": 0.02},
            batch=["x", "y"],
            epochs=10,
            record=["loss"],
        )
        return done.history["loss"]

    (alone,) = run_threads(1, on_rank)
    assert alone[-1] < alone[0] / 3
    for together in run_threads(3, on_rank):
        np.testing.assert_allclose(together, alone, rtol=1e-9)  # sums in another order


# ---- gradients -----------------------------------------------------------------------------------


def rnn_loss(V, y, **others):
    return np.mean((rnn(**others) @ V - y) ** 2)


def rnn_gradients(W, U, x, h0, V, y):
    """Back-propagation through time, written by hand."""
    h = rnn(W, U, x, h0)
    error = 2 / len(y) * (h @ V - y)
    found = {name: np.zeros_like(array) for name, array in {"W": W, "U": U, "x": x}.items()}
    found["V"] = h.T @ error
    later = np.zeros_like(h0)
    for t in reversed(range(len(x))):
        inside = (error[t] * V + later) * (1 - h[t] ** 2)
        found["W"] += np.outer(inside, h[t - 1] if t else h0)
        found["U"] += np.outer(inside, x[t])
        found["x"][t] = U.T @ inside
        later = W.T @ inside
    return {**found, "h0": later}


def with_gradients(text, loss, names, inputs):
    lines = [text, f"loss = {loss}"]
    for name in names:
        labels = ",".join("abcd"[: inputs[name].ndim])
        element = f"[{labels}]" if labels else ""
        lines.append(f"grad_{name}{element} = grad(loss, {name}{element})")
    return "\n".join(lines)


@pytest.mark.parametrize("ranks", (1, 2, 3, 4))
def test_gradients_through_time(ranks):
    inputs = rnn_inputs() | normal(7, V=(12,), y=(7,))
    names = ("W", "U", "x", "h0", "V")
    text = with_gradients(RNN, "mean((sum(V[k] * h[t,k]) - y[t])**2)", names, inputs)
    job = einmpi.program(text, outputs=[f"grad_{name}" for name in names], **inputs)
    done = run_on_threads(job, ranks, inputs, pin={"grad_W": (ranks, 1)})
    for name, expected in rnn_gradients(**inputs).items():
        np.testing.assert_allclose(done.outputs[f"grad_{name}"], expected, rtol=1e-9, atol=1e-12)


def test_gradients_of_weights_are_sums_over_all_steps():
    """One large product after the steps backwards, not one for each step."""
    inputs = rnn_inputs() | normal(7, V=(12,), y=(7,))
    text = with_gradients(RNN, "mean((sum(V[k] * h[t,k]) - y[t])**2)", "W", inputs)
    graph = einmpi.program(text, outputs=["grad_W"], **inputs).graph
    assert graph["grad_W"].recurrence is None
    assert graph["grad_W"].einsum.aggregated == ("t",)
    assert [each.steps for each in graph.members] == [7, 7]


GRADIENTS = {
    "lstm": (LSTM, lstm_inputs(), {}, "sum(h[b,t,k]**2) + sum(c[b,4,k])"),
    "kalman": (KALMAN, kalman_case()[1], {"steps": 6}, "sum(m[t,i]**2) + sum(P[t,i,j]**2)"),
    "two steps": (
        "f[t] = where(t > 1, a[t] * f[t-1] + sin(f[t-2]) * b, a[t])",
        normal(8, a=(10,), b=()),
        {},
        "sum(f[t]**2)",
    ),
    "backwards": (
        "f[t] = where(t < 9, 0.5 * sin(f[t+1]), 0) + x[t]",
        normal(8, x=(10,)),
        {},
        "sum(f[t]**3)",
    ),
    "a condition around a sum": (
        "h[t,k] = where(t > 0, sum(W[k,l] * h[t-1,l]), 0) + x[t,k]",
        normal(8, W=(4, 4), x=(6, 4)),
        {},
        "sum(h[t,k]**2)",
    ),
    "greatest of neighbours": (
        "h[t,k] = max[l:4](where(t > 0, h[t-1,l] + W[k,l], x[t,l])) + x[t,k]",
        normal(8, W=(4, 4), x=(6, 4)),
        {},
        "sum(h[t,k]**2)",
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_slopes(name):
    text, inputs, sizes, loss = GRADIENTS[name]
    inputs = {key: np.asarray(array, np.float64) for key, array in inputs.items()}
    names = list(inputs)
    outputs = ["loss", *(f"grad_{each}" for each in names)]
    job = einmpi.program(
        with_gradients(text, loss, names, inputs), outputs=outputs, **inputs, **sizes
    )
    found = run_on_threads(job, 2, inputs).outputs
    plain = einmpi.program(f"{text}\nloss = {loss}", outputs=["loss"], **inputs, **sizes)
    rng = np.random.default_rng(0)
    step = 1e-6
    for each in names:
        direction = rng.normal(size=inputs[each].shape)
        sides = []
        for sign in (1, -1):
            moved = {**inputs, each: inputs[each] + sign * step * direction}
            sides.append(einmpi.reference(plain, moved)["loss"])
        slope = (sides[0] - sides[1]) / (2 * step)
        # Differences of a step of 1e-6 are precise to about its square, relative to the third
        # derivative, and to 1e-16 / 1e-6.
        assert np.sum(found[f"grad_{each}"] * direction) == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_gradient_of_a_gradient():
    """The adjoint steps have adjoints too."""
    text = """
    f[t] = where(t > 0, sin(f[t-1]) * a, a) + x[t]
    loss = sum(f[t]**2)
    slope = sum(grad(loss, x[t])**2)
    second = grad(slope, a)
    """
    inputs = {"a": np.array(0.7), "x": normal(1, x=(6,))["x"]}
    job = einmpi.program(text, outputs=["slope", "second"], **inputs)
    step = 1e-6
    sides = []
    for sign in (1, -1):
        moved = {**inputs, "a": inputs["a"] + sign * step}
        sides.append(einmpi.reference(job, moved)["slope"])
    found = run_on_threads(job, 2, inputs).outputs["second"]
    assert found == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-6)


# ---- memory, several kinds of runs ---------------------------------------------------------------


@pytest.mark.slow
def test_memory_limits():
    """Other tensors leave memory or are computed again; the steps keep theirs."""
    sizes = {"W": (40, 40), "U": (40, 3), "x": (50, 3), "h0": (40,), "M": (100, 100)}
    text = f"{RNN}\nloss = sum(h[t,k]**2)\ng[k,l] = grad(loss, W[k,l])"
    text += "\nz[a,b] = sum(M[a,c] * M[c,b])\nq = sum(z[a,b]) + loss"
    inputs = normal(1, **sizes)
    inputs["W"] /= 3
    job = einmpi.program(text, outputs=["g", "q"], **inputs)
    expected = einmpi.reference(job, inputs)
    peak = einmpi.plan(job, ranks=2).peak
    spilled = []
    for share in (0.9, 0.7, 0.5):
        done = run_on_threads(job, 2, inputs, memory=int(share * peak))
        spilled.append(done.plan.spilled)
        for name, values in expected.items():
            np.testing.assert_allclose(done.outputs[name], values, rtol=1e-9, atol=1e-9)
    assert spilled[-1] > 0
    with pytest.raises(einmpi.InputError, match="no plan on 2 ranks was found below"):
        run_on_threads(job, 2, inputs, memory=peak // 5)


@pytest.mark.slow
@given(
    steps=st.integers(0, 9),
    width=st.sampled_from((1, 3, 4)),
    ranks=st.sampled_from((1, 2, 3)),
    shift=st.integers(1, 4),
    backwards=st.booleans(),
)
def test_values_that_are_read_in_few_steps_take_the_memory_of_these(
    steps, width, ranks, shift, backwards
):
    """Nothing but the steps reads q: `shift` rows of it are enough. All of p are kept."""
    sign = "+" if backwards else "-"
    guard = f"t < {steps - shift}" if backwards else f"t >= {shift}"
    text = f"""
    p[t,k] = where({guard}, q[k,t{sign}{shift}], 1.0) + x[t,k]
    q[k,t] = sum(W[k,l] * p[t,l])
    """
    inputs = normal(steps, W=(width, width), x=(steps, width))
    p, q = np.zeros((2, steps, width))
    for t in reversed(range(steps)) if backwards else range(steps):
        earlier = t + shift if backwards else t - shift
        p[t] = (q[earlier] if 0 <= earlier < steps else 1.0) + inputs["x"][t]
        q[t] = inputs["W"] @ p[t]
    job = einmpi.program(text, outputs=["p"], **inputs)
    assert job.graph["q"].bound == (width, min(shift, steps))
    assert job.graph["p"].bound == (steps, width)
    found = run_on_threads(job, ranks, inputs).outputs["p"]
    np.testing.assert_allclose(found, p, rtol=1e-10, atol=1e-12)  # sums in another order


# ---- tensors of steps that are computed again ----------------------------------------------------

GATES = ["before", "i", "f", "o", "g"]


def lstm_gradients(steps):
    inputs = lstm_inputs(batch=2, steps=steps, width=8)
    names = [name for name in inputs if name != "x"]
    text = with_gradients(LSTM, "sum(h[b,t,k]**2)", names, inputs)
    job = einmpi.program(text, outputs=[f"grad_{name}" for name in names], **inputs)
    return job, inputs


def test_gates_that_are_computed_again_take_no_memory():
    """Tensors of all steps: without, before, i, f, o, g, c, h and four gradients of gates.

    With names, c and h and the four gradients. The rest is one row of each, whatever the steps.
    """
    for recompute, tensors in (("none", 11), (GATES, 6), (["o"], 10), (["h", "c"], 11)):
        peaks = []
        for steps in (64, 128):
            job, _ = lstm_gradients(steps)
            peaks.append(einmpi.plan(job, ranks=1, recompute=recompute).peak)
        assert peaks[1] - peaks[0] == 64 * 8 * (tensors * 2 * 8 + 2 * 2)  # and x


@pytest.mark.sampled(5)
@pytest.mark.parametrize("ranks", (1, 2, 3))
@pytest.mark.parametrize("name", GRADIENTS)
def test_what_is_computed_again_has_the_same_values(name, ranks):
    text, inputs, sizes, loss = GRADIENTS[name]
    inputs = {key: np.asarray(array, np.float64) for key, array in inputs.items()}
    outputs = [f"grad_{each}" for each in inputs]
    text = with_gradients(text, loss, list(inputs), inputs)
    job = einmpi.program(text, outputs=outputs, **inputs, **sizes)
    names = [vertex.name for vertex in job.written.computed if vertex.name not in outputs]
    expected = run_on_threads(job, ranks, inputs, recompute="none")
    found = run_on_threads(job, ranks, inputs, recompute=names)
    assert found.plan.peak <= expected.plan.peak
    for output in outputs:  # products of one row add up in another order than those of all
        np.testing.assert_allclose(
            found.outputs[output], expected.outputs[output], rtol=1e-10, atol=1e-13
        )


def test_training_with_gates_that_are_computed_again(tmp_path):
    (tmp_path / "lstm.toml").write_text(
        f'''program = """{LSTM}
loss = mean((sum(V[k] * h[b,t,k]) - y[b,t])**2)
V_next[k] = V[k] - 0.1 * grad(loss, V[k])
Wi_next[k,l] = Wi[k,l] - 0.1 * grad(loss, Wi[k,l])
"""
[plan]
recompute = {GATES}
[loop]
steps = 4
carry = {{V = "V_next", Wi = "Wi_next"}}
record = ["loss"]
[inputs]
x = {{random = "normal", seed = 1, shape = [3, 20, 2]}}
y = {{random = "normal", seed = 2, shape = [3, 20]}}
V = {{random = "normal", seed = 3, shape = [4]}}
'''
        + "".join(
            f'{kind}{gate} = {{random = "normal", seed = 4, shape = [4, {width}]}}\n'
            for kind, width in (("W", 4), ("U", 2))
            for gate in "ifog"
        )
    )
    job = einmpi.load(tmp_path / "lstm.toml")

    def on_rank(comm, **settings):
        done = einmpi.loop(job, comm=comm, **settings)
        return done.history["loss"], done.outputs["Wi"].gather()

    tensor = 3 * 20 * 4 * 8
    assert einmpi.plan(job, 1).peak < einmpi.plan(job, 1, recompute="none").peak - 3 * tensor
    ((history, Wi),) = run_threads(1, lambda comm: on_rank(comm, recompute="none"))
    for ranks in (1, 3):
        for other_history, other_Wi in run_threads(ranks, on_rank):
            np.testing.assert_allclose(other_history, history, rtol=1e-10)
            np.testing.assert_allclose(other_Wi, Wi, rtol=1e-10, atol=1e-12)


def test_bytes_between_nodes():
    inputs = rnn_inputs(width=16)
    done = run_on_threads(einmpi.program(RNN, **inputs), 4, inputs, nodes=2, pin={"h": (1, 4)})
    assert sum(done.between) == done.plan.bytes_between
    np.testing.assert_allclose(done.outputs["h"], rnn(**inputs), rtol=1e-10)


@pytest.mark.slow
@needs_mpirun
@pytest.mark.mpirun
def test_on_real_ranks(tmp_path):
    """A job file: bytes as planned, the reference agrees, with a trace and a checkpoint."""
    (tmp_path / "rnn.toml").write_text(
        '''program = """
h[t,k] = tanh(sum(W[k,l] / 8 * where(t > 0, h[t-1,l], 0)) + x[t,k])
loss = mean(h[t,k]**2)
g[k,l] = grad(loss, W[k,l])
"""
[inputs]
W = {random = "normal", seed = 1, shape = [48, 48]}
x = {random = "normal", seed = 2, shape = [30, 48]}
[outputs]
h = {file = "h.npy"}
g = {file = "g.npy"}
'''
    )
    job = str(tmp_path / "rnn.toml")
    trace = str(tmp_path / "trace.json")
    done = run_mpi(3, ["-m", "einmpi", "run", job, "--trace", trace])
    assert "(as planned)" in done.stdout + done.stderr
    assert '"cat": "repeat"' in (tmp_path / "trace.json").read_text()
    expected = einmpi.reference(einmpi.load(job))
    for name in ("h", "g"):
        np.testing.assert_allclose(np.load(tmp_path / f"{name}.npy"), expected[name], atol=1e-12)


# ---- what is refused -----------------------------------------------------------------------------

DIRECTIONS = "reads of h[t-1,k], h[t-2,k] and so on, or of h[t+1,k] and so on, along one label t"


@pytest.mark.parametrize(
    "text, message",
    (
        (
            "f[t:9] = f[t-1] + x[t]",
            "program:1:12: the index t - 1 goes from -1 to 7; expected 0 to 8; give its labels "
            "extents, such as i:n-1, or use where(i > 0, ..., ...)",
        ),
        (
            "f[t:9] = f[maximum(t-1, 0)] + x[t]",
            "program:1:12: the index maximum(t - 1, 0) goes from -1 to 7; expected 0 to 8; give "
            "its labels extents, such as i:n-1, or use where(i > 0, ..., ...)",
        ),
        (
            "f[t:9] = where(t > 1, f[t-1] + f[t-3], x[t])",
            "program:1:34: the index t - 3 goes from -1 to 5; expected 0 to 8; the condition of "
            "where has to exclude the rest",
        ),
        (
            "f[t] = where((t > 0) & (t < 8), f[t-1] + f[t+1], x[t])",
            "program:1:1: f is read at earlier and f at later indices of t; expected one direction",
        ),
        (
            "f[t] = where(t > 0, f[t-1], 0) + g[t]; g[t] = f[t] + x[t]",
            f"program:1:1: f depends on itself at the same t; expected {DIRECTIONS}",
        ),
        (
            "d[i,j] = where((i > 0) & (j > 0), d[i-1,j] + d[i,j-1], y[i,j])",
            f"program:1:1: d depends on itself at the same i; expected {DIRECTIONS}",
        ),
        (
            "f[t] = where(t > 0, f[t//2], 1) + x[t]",
            f"program:1:1: f depends on itself, and not along one of its labels; expected "
            f"{DIRECTIONS}",
        ),
        (
            "f[t] = where(t > 0, f[place[t]], 1) + x[t]",
            f"program:1:1: f depends on itself, and not along one of its labels; expected "
            f"{DIRECTIONS}",
        ),
        (
            "f[t] = where((t > 0) & (t < 6), g[t-1], 0) + x[t]; g[t:5] = f[t+0]",
            "program:1:1: f and g depend on each other along t, which has extents 9 and 5; "
            "expected one extent",
        ),
        (
            "f[t] = where(t > 0, f[t-1], 0)",
            "program:1:1: label t has no extent: no tensor here is indexed by it; expected an "
            "extent, written as t:EXTENT",
        ),
        (
            "f[t] = where(t > 0, f[t-1], x[t]) * grad(a, x[t]); a = sum(x[t]**2)",
            "program:1:37: f depends on itself and has a gradient; expected a gradient in a "
            "statement of its own",
        ),
        (
            "f[place[t]:9] = sum(where(t > 0, f[t-1], x[t]))",
            "program:1:1: f depends on itself and has an index left of =; expected labels alone",
        ),
    ),
)
def test_what_is_no_recurrence(text, message):
    with pytest.raises(einmpi.InputError) as error:
        einmpi.program(text, x=(9,), y=(9, 9), place=np.zeros(9, "int64"))
    assert str(error.value) == message
