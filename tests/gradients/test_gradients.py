"""Gradients in programs and from Python: what they look like, loops, ranks, dtypes, messages."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import run_on_threads
from gradient_programs import arrays_of, gradient_text
from graph_helpers import build, results

import einmpi
from einmpi.errors import InputError
from einmpi.language.parse import build_graphs
from einmpi.language.syntax import Source


def lines(text, inputs):
    """The statements that the gradients of a program need, rewritten, without inputs."""
    outputs = [name for name in build(text, inputs).outputs if name != "loss"]
    return [str(vertex) for vertex in build(text, inputs, outputs=outputs).computed]


def test_a_classifier_reads_as_written_by_hand():
    text = """
    H[b,h] = relu(sum(X[b,i] * W1[i,h]) + b1[h])
    Z[b,l] = sum(H[b,h] * W2[h,l])
    loss   = mean[b](logsumexp[l](Z[b,l]) - Z[b,y[b]])
    dW1[i,h] = grad(loss, W1[i,h])
    dW2[h,l] = grad(loss, W2[h,l])
    db1[h]   = grad(loss, b1[h])
    """
    inputs = {
        "X": ((16, 6), "float64"),
        "y": ((16,), "int64"),
        "W1": ((6, 5), "float64"),
        "b1": ((5,), "float64"),
        "W2": ((5, 4), "float64"),
    }
    found = lines(text, inputs)
    assert found[6:] == [
        "dloss_3[b] ← 0.0625 / loss_3[b]",
        "dZ[b,l] ← dloss_3[b] × exp(Z[b,l] - loss_2[b]) + where(y[b] == l, -0.0625, 0)",
        "dH[b,h] ← Σ[l](dZ[b,l] × W2[h,l])",
        "dH_2[b,h] ← where(H[b,h] <= 0, 0, dH[b,h])",
        "dW1[i,h] ← Σ[b](dH_2[b,h] × X[b,i])",
        "dW2[h,l] ← Σ[b](dZ[b,l] × H[b,h])",
        "db1[h] ← Σ[b](dH_2[b,h])",
    ]
    assert found[1] == "H[b,h] ← maximum(H_1[b,h] + b1[h], 0)"


@pytest.mark.parametrize(
    "text",
    [
        "P[i,j] = softmax[j](X[i,j])",
        "E[i,j] = exp(X[i,j]); s[i] = sum(E[i,j]); P[i,j] = E[i,j] / s[i]",
        "E[i,j] = exp(X[i,j]); s[a] = sum(E[a,b]); P[i,j] = E[i,j] * (1 / s[i])",
    ],
)
def test_gradient_of_softmax_needs_its_result_alone(text):
    inputs = {"X": ((6, 5), "float64"), "W": ((6, 5), "float64")}
    text = f"{text}; loss = sum(P[i,j] * W[i,j]); g[i,j] = grad(loss, X[i,j])"
    total, gradient = lines(text, inputs)[-2:]
    name, _, body = total.partition("[i] ← ")
    assert body == "Σ[j](W[i,j] × P[i,j])"
    assert gradient == f"g[i_1,i_2] ← (W[i_1,i_2] - {name}[i_1]) × P[i_1,i_2]"


@pytest.mark.parametrize(
    "changed", ["s[i] = sum(E[i,j] + 1)", "s[j] = sum(E[i,j])", "s[i] = 2 * E[i,0]"]
)
def test_other_quotients_are_no_softmax(changed):
    label = changed[2]
    text = f"E[i,j] = exp(X[i,j]); {changed}; P[i,j] = E[i,j] / s[{label}]"
    text += "; loss = sum(P[i,j] * W[i,j]); g[i,j] = grad(loss, X[i,j])"
    rng = np.random.default_rng(2)
    arrays = {"X": rng.normal(size=(4, 4)), "W": rng.normal(size=(4, 4))}
    found = results(text, arrays)["g"]
    step = 1e-6 * rng.normal(size=(4, 4))
    high, low = (results(text, arrays | {"X": arrays["X"] + s * step})["loss"] for s in (1, -1))
    np.testing.assert_allclose((found * step).sum(), (high - low) / 2, rtol=1e-7)


def test_gradients_by_the_parts_of_a_softmax():
    text = """
    E[i,j] = exp(X[i,j])
    s[i]   = sum(E[i,j])
    P[i,j] = E[i,j] / s[i]
    loss   = sum(P[i,j] * W[i,j])
    dX[i,j] = grad(loss, X[i,j])
    dE[i,j] = grad(loss, E[i,j])
    ds[i]   = grad(loss, s[i])
    """
    rng = np.random.default_rng(1)
    arrays = {"X": rng.normal(size=(4, 5)), "W": rng.normal(size=(4, 5))}
    found = results(text, arrays)
    exponentials = np.exp(arrays["X"])
    total = exponentials.sum(1, keepdims=True)
    by_total = -(arrays["W"] * exponentials).sum(1, keepdims=True) / total**2
    by_exponential = arrays["W"] / total + by_total
    np.testing.assert_allclose(found["ds"], by_total[:, 0], rtol=1e-12)
    np.testing.assert_allclose(found["dE"], by_exponential, rtol=1e-12)
    np.testing.assert_allclose(found["dX"], by_exponential * exponentials, rtol=1e-11)


def test_gradient_of_a_computed_factor_is_a_matrix_product_and_a_map():
    """However the layer is written, in one statement or in two."""
    loss = "loss = sum(Y[b,l] * V[b,l]); g[b,h] = grad(loss, X[b,h])"
    inputs = {"X": ((7, 6), "float64"), "W": ((6, 5), "float64"), "V": ((7, 5), "float64")}
    found = lines(f"Y[b,l] = sum(gelu(X[b,h]) * W[h,l]); {loss}", inputs)
    product, gradient = found[-2:]
    name, _, body = product.partition("[b,h] ← ")
    assert body == "Σ[l](V[b,l] × W[h,l])"
    assert gradient.startswith(f"g[i,i_1] ← 0.5 × ({name}[i,i_1] × ") and "Σ" not in gradient
    written = lines(f"G[b,h] = gelu(X[b,h]); Y[b,l] = sum(G[b,h] * W[h,l]); {loss}", inputs)
    assert [line.replace("dG", name) for line in written[-2:]] == found[-2:]


def test_nothing_is_multiplied_by_one():
    inputs = {"x": ((4,), "float64"), "w": ((4,), "float64")}
    assert lines("loss = sum(x[i] * w[i]); g[i] = grad(loss, x[i])", inputs) == ["g[i] ← w[i]"]
    assert lines("loss = sum(x[i]); g[i] = grad(loss, x[i])", inputs) == ["g[i_1:4] ← float64(1.0)"]
    assert lines("loss = sum(x[i]**2); g[i] = grad(loss, x[i])", inputs) == ["g[i_1] ← 2 × x[i_1]"]


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "E[b,a] = W[tok[b],a]; loss = sum(E[b,a] * v[b])",
            "Σ[b](where(tok[b] == place, v[b], 0))",
        ),
        ("Y[tok[b]:9] = sum(v[b] * s); loss = sum(Y[k] * u[k])", "u[where("),
    ],
)
def test_a_gather_and_a_scatter_are_adjoint(text, expected):
    arrays = {
        "W": np.ones((9, 2)),
        "tok": np.arange(5),
        "v": np.ones(5),
        "u": np.ones(9),
        "s": np.ones(()),
    }
    name = "W[i,a]" if "W[" in text else "v[i]"
    target = "g[i,a]" if "W[" in text else "g[i]"
    graph = build(f"{text}; {target} = grad(loss, {name})", arrays)
    assert expected in str(graph)
    assert graph.outputs == ("loss", "g")  # a gradient does not use its loss
    for vertex in graph.computed:
        assert vertex.einsum.operations() < 9 * 5  # sparse in work


def test_work_of_an_embedding_is_sparse():
    text = "E[b,a] = W[tok[b],a]; loss = sum(E[b,a]**2 * v[a]); g[i,a] = grad(loss, W[i,a])"
    inputs = {"W": ((32000, 64), "float32"), "tok": ((100,), "int64"), "v": ((64,), "float32")}
    graphs = build_graphs(Source("p", text), inputs)
    assert graphs.rewritten.operations() < 100 * 64 * 10
    assert any(vertex.einsum.segments for vertex in graphs.rewritten.computed)


def test_adjoint_of_a_convolution_is_a_convolution():
    inputs = {"x": ((10,), "float64"), "w": ((3,), "float64"), "v": ((8,), "float64")}
    text = "y[i] = sum(x[i+k] * w[k]); loss = sum(y[i] * v[i]); g[p] = grad(loss, x[p])"
    (line,) = lines(text, inputs)
    assert line == (
        "g[place:10] ← Σ[k](where((place - k >= 0) & (place - k < 8), "
        "v[maximum(minimum(place - k, 7), 0)] × w[k], 0))"
    )


def test_adjoint_of_a_reshape_is_a_reshape():
    inputs = {"x": ((12,), "float64"), "w": ((3, 4), "float64")}
    text = "h[n:3,d:4] = x[n*4+d]; loss = sum(h[n,d] * w[n,d]); g[p] = grad(loss, x[p])"
    assert lines(text, inputs) == ["g[i:12] ← w[i // 4,i % 4]"]


def test_second_derivatives():
    rng = np.random.default_rng(1)
    x = rng.normal(size=4)
    v = rng.normal(size=4)
    text = """
    loss  = sum(exp(x[i]) * x[i]) + sum(softmax[i](x[i])**2)
    slope = sum(grad(loss, x[i]) * v[i])
    Hv[i] = grad(slope, x[i])
    g[i]  = grad(loss, x[i])
    """
    found = results(text, {"x": x, "v": v}, outputs=["Hv", "g"])
    moved = [results(text, {"x": x + s * 1e-6 * v, "v": v}, outputs=["g"])["g"] for s in (1, -1)]
    np.testing.assert_allclose(found["Hv"], (moved[0] - moved[1]) / 2e-6, rtol=1e-6, atol=1e-8)


def test_by_intermediates_inside_expressions_and_of_expressions():
    x = np.array([1.0, 2.0, 3.0])
    text = """
    h[i]  = x[i]**2
    loss  = sum(h[i] * x[i])
    a[i]  = grad(loss, h[i])
    b[i]  = x[i] - 0.1 * grad(loss, x[i])
    c     = sum(grad(loss, x[i])**2)
    d[i]  = grad(sum(x[k]**3), x[i])
    e     = grad(loss, x[1])
    """
    found = results(text, {"x": x})
    np.testing.assert_allclose(found["a"], x)
    np.testing.assert_allclose(found["b"], x - 0.3 * x**2)
    np.testing.assert_allclose(found["c"], np.sum(9 * x**4))
    np.testing.assert_allclose(found["d"], 3 * x**2)
    np.testing.assert_allclose(found["e"], 12)


def test_a_program_without_gradients_stays_as_it_is():
    inputs = {"x": ((3, 4), "float64")}
    text = "y[i,j] = softmax[j](relu(x[i,j])); z[i] = logsumexp[j](silu(x[i,j]))"
    graph = build(text, inputs)
    assert "maximum(x[i,j], 0)" in str(graph) and "sigmoid" not in str(graph)
    graph = build("y[i,j] = where(x[i,j] <= 0, 0, x[i,j]) + stop(x[i,j])", inputs)
    (line,) = [str(vertex) for vertex in graph.computed]
    assert line == "y[i,j] ← where(x[i,j] <= 0, 0, x[i,j]) + x[i,j]"


def test_grad_may_still_name_a_tensor():
    found = results("grad[i] = 2 * x[i]; y[i] = grad[i] + 1", {"x": np.ones(3)})
    np.testing.assert_array_equal(found["y"], [3, 3, 3])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_gradients_have_the_dtype_of_their_tensor(dtype):
    text = "Y[i,k] = sum(A[i,j] * B[j,k]); loss = sum(float64(abs(Y[i,k]))**2) / 8"
    rng = np.random.default_rng(2)
    arrays = {
        "A": rng.normal(size=(3, 4)).astype(dtype),
        "B": rng.normal(size=(4, 2)).astype(dtype),
    }
    job = einmpi.program(text, **arrays)
    _, gradients = einmpi.value_and_grad(job, "loss", ["A"], arrays)
    assert gradients["A"].dtype == np.dtype(dtype)
    wide = {
        name: array.astype("complex128" if dtype == "complex64" else float)
        for name, array in arrays.items()
    }
    expected = (wide["A"] @ wide["B"]) @ np.conj(wide["B"].T) / 4
    rtol = {"float16": 1e-2, "bfloat16": 8e-2}.get(dtype, 1e-5)
    np.testing.assert_allclose(
        gradients["A"].gather().astype(expected.dtype), expected, rtol=rtol, atol=rtol
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_numbers_that_a_gather_sends_back_keep_the_dtype(dtype):
    """A number in `where` is float64 for itself, and made all that followed float64."""
    text = "loss = sum(real(Z[b,l]) * 2) - sum(real(Z[b,y[b]]) * 3); g[b,l] = grad(loss, Z[b,l])"
    inputs = {"Z": ((3, 4), dtype), "y": ((3,), "int64")}
    graph = build_graphs(Source("p", text), inputs).rewritten
    assert {graph[name].dtype for name in graph.by_name if name.startswith(("dZ", "g"))} == {dtype}
    y = np.array([3, 0, 0])
    found = results(text, {"Z": np.ones((3, 4), np.dtype(dtype)), "y": y})
    expected = np.full((3, 4), 2.0)
    expected[np.arange(3), y] = -1
    np.testing.assert_array_equal(found["g"].astype(complex), expected)


@pytest.mark.sampled(3, always=["cross_entropy-1", "embedding-4", "segment_max-7"])
@pytest.mark.parametrize(
    "name, ranks",
    [
        ("cross_entropy", 1),
        ("cross_entropy", 4),
        ("cross_entropy", 9),
        ("convolution", 3),
        ("embedding", 4),
        ("messages", 6),
        ("cumsum", 2),
        ("causal", 8),
        ("max", 5),
        ("segment_max", 7),
        ("short_diagonal", 3),
        ("gather_and_arithmetic", 4),
    ],
)
def test_on_ranks(name, ranks):
    """Bytes that move are those of the plan, and results are those of one rank."""
    text, arrays, parameters = arrays_of(name)
    job = einmpi.program(gradient_text(text, parameters, arrays), **arrays)
    done = run_on_threads(job, ranks, arrays)
    expected = einmpi.reference(job, arrays)
    for output, array in done.outputs.items():
        np.testing.assert_allclose(array, expected[output], rtol=1e-11, atol=1e-12)


def test_a_loop_that_descends():
    """A step with a gradient inside; what does not change is computed once."""
    rng = np.random.default_rng(4)
    A = rng.normal(size=(12, 3))
    b = rng.normal(size=12)
    text = """
    S[j,k] = sum(A[i,j] * A[i,k])
    r[i]   = sum(A[i,j] * x[j]) - b[i]
    loss   = sum(r[i]**2) + 0.1 * sum(x[j] * S[j,k] * x[k])
    x_next[j] = x[j] - 0.01 * grad(loss, x[j])
    """
    job = einmpi.program(text, A=A, b=b, x=(3,))
    inputs = {"A": A, "b": b, "x": np.zeros(3)}
    result = einmpi.loop(job, inputs, carry={"x": "x_next"}, steps=20, record=["loss"])
    x = np.zeros(3)
    losses = []
    for _ in range(20):
        residual = A @ x - b
        losses.append(residual @ residual + 0.1 * x @ (A.T @ A) @ x)
        x = x - 0.01 * (2 * A.T @ residual + 0.2 * (A.T @ A) @ x)
    np.testing.assert_allclose(result.outputs["x"].gather(), x, rtol=1e-12)
    np.testing.assert_allclose(result.history["loss"], losses, rtol=1e-12)


def test_vjp():
    rng = np.random.default_rng(6)
    A = rng.normal(size=(3, 4)) + 1j * rng.normal(size=(3, 4))
    x = rng.normal(size=4)
    dY = rng.normal(size=3) + 1j * rng.normal(size=3)
    job = einmpi.program("Y[i] = sum(A[i,j] * x[j]); n = sum(x[j]**2)", A=A, x=x)
    product = einmpi.vjp(job, {"Y": "dY", "n": "dn"}, ["A", "x"])
    found = einmpi.run(product, {"A": A, "x": x, "dY": dY, "dn": np.array(2.0)})
    np.testing.assert_allclose(found["dA"].gather(), np.outer(dY, x))
    np.testing.assert_allclose(found["dx"].gather(), np.real(A.conj().T @ dY) + 4 * x)


def test_grad_of_a_job_with_a_size_a_parameter_and_other_outputs():
    x = np.array([1.0, 2.0])
    text = "Y[i,c:n] = rate * X[i]; loss = sum(Y[i,c]); other = sum(V[k])"
    job = einmpi.program(text, X=x, V=(3,), n=5, rate=0.5, outputs=["loss"])
    changed = einmpi.grad(job, "loss", ["X", "rate"])
    assert changed.graph.outputs == ("loss", "dX", "drate")
    found = einmpi.run(changed, {"X": x})
    np.testing.assert_allclose(found["dX"].gather(), [2.5, 2.5])
    np.testing.assert_allclose(found["drate"].gather(), 15)


NO_DERIVATIVE = "by anything that has a derivative; expected"


@pytest.mark.parametrize(
    "text, message",
    [
        ("g[i] = grad(loss, V[i])", f"loss does not depend on V {NO_DERIVATIVE} X"),
        (
            "g[i] = grad(loss, k[i])",
            "the gradient is by k, which is int64; "
            "expected a tensor of floating-point or complex numbers",
        ),
        (
            "n = sum(sign(X[i])); g[i] = grad(n, X[i])",
            f"n does not depend on X {NO_DERIVATIVE} a tensor that it is computed from",
        ),
        (
            "g[i] = grad(X, V[i])",
            "grad is of X, which has labels; expected a real number without labels; "
            "add up its elements: grad(sum(Y[i]), X[i])",
        ),
        ("g[i] = grad(loss)", "grad is not called like this; expected grad(loss, W[labels])"),
        (
            "g[i] = grad(loss, 2 * X[i])",
            "grad is by 2 * X[i]; expected a tensor with labels, such as W[i,j]",
        ),
        (
            "m = sum(k[i]); g[i] = grad(m, X[i])",
            "grad is of m, which is int64; expected a real number in floating point",
        ),
    ],
)
def test_messages(text, message):
    program = f"loss = sum(X[i]**2)\n{text}"
    with pytest.raises(InputError) as error:
        einmpi.program(program, X=(3,), V=(3,), k=np.zeros(3, int))
    assert str(error.value).partition(": ")[2] == message


def test_messages_from_python():
    job = einmpi.program("loss = sum(X[i]**2)", X=(3,))
    for arguments, message in [
        (("los", ["X"]), "grad: 'los' is not computed; expected loss (did you mean loss?)"),
        (("loss", ["Y"]), "grad: unknown tensor 'Y'; expected one of X, loss"),
        (("loss", []), 'grad: wrt is empty; expected a list of names such as ["W"]'),
        (("loss", ["X", "X"]), "grad: X is in wrt twice; expected each name once"),
    ]:
        with pytest.raises(InputError) as error:
            einmpi.grad(job, *arguments)
        assert str(error.value) == message
    with pytest.raises(InputError, match="vjp: loss is given the derivative 'X'"):
        einmpi.vjp(job, {"loss": "X"}, ["X"])


def on_two_ranks(text, arrays):
    return run_on_threads(einmpi.program(text, **arrays), 2, arrays).outputs


def test_a_label_that_is_set_to_a_short_integer():
    """It is kept inside of a dimension whose last index is no uint8."""
    rng = np.random.default_rng(2)
    at, column = (rng.integers(0, 120, size).astype("uint8") for size in (40, 300))
    arrays = {"X": rng.normal(size=(40, 300)), "at": at, "column": column}
    text = "y[p:300] = sum(where(2*at[j] == p, X[j,column[p]], 0)); loss = sum(y[p]**2)"
    found = on_two_ranks(f"{text}; g[i,j] = grad(loss, X[i,j])", arrays)["g"]
    places = 2 * at
    totals = np.zeros(300)
    np.add.at(totals, places, arrays["X"][np.arange(40), column[places]])
    expected = np.zeros((40, 300))
    expected[np.arange(40), column[places]] = 2 * totals[places]
    np.testing.assert_allclose(found, expected, rtol=1e-14)


def test_flatten_of_several_dimensions_is_a_reshape():
    inputs = {"x": ((2, 4, 3), "float64"), "w": ((24,), "float64")}
    for index in ("z//12,(z%12)//3,z%3", "z//12,z//3%4,z%3", "(z%24)//12,(z//3)%4,z%3"):
        text = f"f[z:24] = x[{index}]; loss = sum(f[z] * w[z]); g[i,j,k] = grad(loss, x[i,j,k])"
        assert lines(text, inputs) == ["g[i_1:2,i_2:4,i_3:3] ← w[12 × i_1 + 3 × i_2 + i_3]"]


def test_an_index_of_an_index_is_guarded():
    """Where a condition does not hold, an index that is read for another one reads nothing."""
    arrays = {
        "X": np.arange(9.0),
        "K": np.array([9, 1, 2, 3, 4, 5, 6, 7, 8]),
        "L": np.array([20, -1, 2, 3, 8, 5, 6, 7, 4]),
        "n": np.array([5, -3, 1, 12, 0]),
    }
    text = "y[b:9] = where(b > 1, X[K[L[b]]]**2, 0)"
    text += "; s[n[e]:9] = sum(X[K[n[e]] % 9]); loss = sum(y[b]) + sum(s[k] * X[k])"
    found = on_two_ranks(f"{text}; g[i] = grad(loss, X[i])", arrays)["g"]
    expected = np.zeros(9)
    totals = np.zeros(9)
    np.add.at(expected, arrays["L"][2:], 2 * arrays["X"][arrays["L"][2:]])
    for place in (5, 1, 0):
        totals[place] += arrays["X"][arrays["K"][place] % 9]
        expected[arrays["K"][place] % 9] += arrays["X"][place]
    np.testing.assert_allclose(found, expected + totals, rtol=1e-14)


@pytest.mark.parametrize("aggregation", ["max", "prod", "sum"])
@pytest.mark.parametrize(
    "values", ["exp(x[src[e]]) * w[e]", "maximum(x[src[e]], w[e])", "maximum(sin(x[src[e]]), w[e])"]
)
def test_values_that_go_nowhere_read_nothing(values, aggregation):
    """Their gradients are those of a program without them."""
    rng = np.random.default_rng(4)
    dst, src = np.array([0, 1, 1, -1, 2, 9, 0]), np.array([1, 2, 4, 99, 0, -5, 3])
    arrays = {"x": rng.normal(size=5), "w": rng.normal(size=7), "dst": dst, "src": src}
    text = f"y[dst[e]:3] = {aggregation}({values}); loss = sum(y[k]**2)"
    text += "; dx[i] = grad(loss, x[i]); dw[i] = grad(loss, w[i])"
    kept = (dst >= 0) & (dst < 3)
    only_kept = {name: arrays[name][kept] for name in ("w", "dst", "src")}
    found = on_two_ranks(text, arrays)
    expected = on_two_ranks(text, {**arrays, **only_kept})
    # The same operations, but sums of up to two terms in another order.
    np.testing.assert_allclose(found["dx"], expected["dx"], rtol=1e-14)
    np.testing.assert_allclose(found["dw"][kept], expected["dw"], rtol=1e-14)
    assert not found["dw"][~kept].any()


@pytest.mark.parametrize(("element", "count"), [("x[e+{}]", 4), ("x[k[(e+{})%7]]", 2)])
def test_choices_of_choices_do_not_double_with_each(element, count):
    """Neither the adjoint of a maximum, nor the conditions that guard its indices."""
    inputs = {"x": ((20,), "float64"), "w": ((7,), "float64"), "k": ((7,), "int64")}
    sizes = []
    for choices in (count, 2 * count):
        chosen = "w[e]"
        for number in range(choices):
            chosen = f"maximum({chosen}, {element.format(number)})"
        text = f"loss = sum({chosen}); g[i] = grad(loss, x[i])"
        sizes.append(len(str(build_graphs(Source("p", text), inputs, {}, None).rewritten)))
    assert sizes[1] < 2**4 * sizes[0]  # as a polynomial; it was 36 and 664 times as long
