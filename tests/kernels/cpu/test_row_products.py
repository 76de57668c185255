"""Sums of products with small integers and few rows: quantised weights as plain programs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_programs import settled

import einmpi
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Call, Const, Scalar
from einmpi.kernels.cpu import compiled
from einmpi.kernels.cpu.small_integers.label_blocks import in_blocks
from einmpi.kernels.cpu.small_integers.narrow_integers import narrowed
from einmpi.kernels.cpu.small_integers.row_products import bind_row_products
from einmpi.kernels.loop_nest import IndexedArray

RNG = np.random.default_rng
INT8 = "y[b,o] = sum(float32(W[o,i]) * scale[o,i//{group}] * x[b,i])"
INT4 = "y[b,o] = sum(float32((W[o,i//2] >> 4*(i%2) & 15) - 8) * scale[o,i//{group}] * x[b,i])"


def quantised(bits: int, outputs: int, inputs: int, group: int, rows: int) -> Any:
    """Return a program, its arrays, and what numpy makes of the dequantised matrix in float64."""
    rng = RNG(outputs * 1000 + inputs + rows)
    scale = rng.random((outputs, inputs // group)).astype("float32")
    x = rng.standard_normal((rows, inputs)).astype("float32")
    if bits == 8:
        weights = rng.integers(-128, 128, (outputs, inputs), dtype="int8")
        whole = weights.astype("float64")
    else:
        weights = rng.integers(0, 256, (outputs, inputs // 2), dtype="uint8")
        whole = np.stack([weights & 15, weights >> 4], -1).reshape(outputs, inputs) - 8.0
    text = (INT8 if bits == 8 else INT4).format(group=group)
    wanted = x.astype("float64") @ (whole * np.repeat(scale, group, axis=1)).T
    return text, {"W": weights, "scale": scale, "x": x}, wanted


def assert_near(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


def by_loops(text: str, arrays: dict[str, Any], threads: int = 1, **more: Any) -> np.ndarray:
    """Compute the last statement of a program by compiled loops, however small it is."""
    vertex = einmpi.program(text, **arrays).graph.computed[-1]
    out = np.empty(vertex.bound, vertex.dtype)
    operands = [arrays[name] for name in vertex.inputs]
    compiled.prepare_by_compiled_loops(vertex.einsum, operands, out, {}, threads, **more)(
        operands, out
    )
    return out


def uses_row_products(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list of whether each nest that is bound from now on is one for few rows."""
    found: list[bool] = []

    def bind(*arguments: Any) -> Any:
        bound = bind_row_products(*arguments)
        found.append(bound is not None)
        return bound

    monkeypatch.setattr(compiled, "bind_row_products", bind)
    return found


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("outputs", "inputs", "group", "rows"),
    [(5, 128, 64, 1), (64, 192, 64, 3), (1, 256, 32, 1), (33, 64, 64, 16), (7, 640, 128, 5)],
)
def test_few_rows_of_quantised_weights(
    bits: int, outputs: int, inputs: int, group: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = uses_row_products(monkeypatch)
    text, arrays, wanted = quantised(bits, outputs, inputs, group, rows)
    job = einmpi.program(text, **arrays)
    assert len(job.graph.computed) == 1  # there is no dequantised matrix
    found = by_loops(text, arrays)
    assert used == [True]
    assert_near(found, wanted)
    np.testing.assert_array_equal(by_loops(text, arrays, threads=3), found)
    assert_near(by_loops(text, arrays, strict=True), wanted)
    assert_near(einmpi.run(job, arrays)["y"].gather(), wanted)
    assert_near(einmpi.reference(job, arrays)["y"], wanted)


@pytest.mark.parametrize("bits", [8, 4])
def test_many_rows_have_the_matrix_once(bits: int) -> None:
    text, arrays, wanted = quantised(bits, 96, 128, 64, 40)
    job = einmpi.program(text, **arrays)
    assert len(job.graph.computed) == 2
    assert_near(einmpi.run(job, arrays)["y"].gather(), wanted)


def test_memory_of_a_large_product() -> None:
    text, arrays, wanted = quantised(8, 2048, 2048, 64, 4)
    given_bytes = sum(array.nbytes for array in arrays.values())
    job = einmpi.program(text, **arrays)
    plan = einmpi.plan(job, ranks=1)
    assert plan.peak < given_bytes + 2**18
    assert_near(einmpi.run(job, arrays)["y"].gather(), wanted)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("bits", [8, 4])
def test_ranks(ranks: int, bits: int) -> None:
    from distributed import run_on_threads

    text, arrays, wanted = quantised(bits, 96, 512, 64, 2)
    job = einmpi.program(text, **arrays)
    assert_near(run_on_threads(job, ranks, arrays).outputs["y"], wanted)


@settled(40)
@given(st.data())
def test_any_product_of_small_integers(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["int8", "uint8", "int16"]))
    kind = data.draw(st.sampled_from(["float32", "float64"]))
    rows = data.draw(st.integers(1, 6))
    columns = data.draw(st.integers(1, 9))
    depth = data.draw(st.sampled_from([16, 31, 48, 64, 80, 200, 4096]))
    body = data.draw(
        st.sampled_from(
            [
                "sum({k}(W[o,i]) * x[b,i])",
                "sum({k}(W[o,i]) * x[b,i] * s[o] * z[i])",
                "sum(({k}(W[o,i]) - z[i])**2 * x[b,i])",
                "max({k}(W[o,i]) * x[b,i])",
                "sum({k}((W[o,i] & 7) << 1) * x[b,i])",
                "sum({k}(W[o,i]) * x[b,i] * i)",
            ]
        )
    )
    rng = RNG(data.draw(st.integers(0, 99)))
    arrays = {
        "W": rng.integers(0, 100, (columns, depth), dtype=dtype),
        "x": rng.standard_normal((rows, depth)).astype(kind),
        "s": rng.random(columns).astype(kind),
        "z": rng.random(depth).astype(kind),
    }
    text = "y[b,o] = " + body.format(k=kind)
    used = {name: array for name, array in arrays.items() if f"{name}[" in text}
    vertex = einmpi.program(text, **used).graph.computed[-1]
    if len(einmpi.program(text, **used).graph.computed) > 1:
        return
    found = by_loops(text, used)
    wanted = einmpi.reference(einmpi.program(text, **used), used)["y"]
    scale = depth * max(1, np.abs(wanted).max())
    eps = float(np.finfo(kind).eps)
    np.testing.assert_allclose(found, wanted, rtol=64 * eps, atol=8 * eps * scale, err_msg=text)
    assert vertex.dtype == np.dtype(kind if " * i)" not in body else "float64")


# ---- labels in blocks ----------------------------------------------------------------------------


def _block_case(text: str, **arrays: Any) -> EinSum:
    (vertex,) = einmpi.program(text, **arrays).graph.computed
    assert vertex.einsum is not None
    return vertex.einsum


def test_labels_in_blocks() -> None:
    x = np.arange(48.0)
    einsum = _block_case("y = sum(x[i] * s[i//8] * t[i%8//4] * (i%4))", x=x, s=x[:6], t=x[:2])
    split = in_blocks(einsum, ())
    assert split is not None
    assert [extent for _, extent in split.einsum.extents] == [6, 2, 4]
    assert split.shape == ()
    assert [view.shape for view in split.views([x, x[:6], x[:2]])] == [(6, 2, 4), (6,), (2,)]
    # A rank's part: labels that begin at 16, and only its part of s.
    einsum = _block_case("y[i:32] = x[i] * s[i//8 + 1 - 1]", x=x[:32], s=x[:6])
    shifted = in_blocks(einsum, (("i", 16),))
    assert shifted is not None
    assert [view.tolist() for view in shifted.views([x[:32], x[:6]])][1] == [2, 3, 4, 5]


@pytest.mark.parametrize(
    "text",
    [
        "y = sum(x[i] * s[i//7])",  # 48 is no multiple of 7
        "y = sum(x[i] * s[i//8] * t[i//12])",  # nor 12 of 8
        "y = sum(x[i] * s[i//8 + t[i%2]])",
        "y = sum(x[i] * s[(i+1)//8])",
    ],
)
def test_labels_that_stay_whole(text: str) -> None:
    x = np.arange(48.0)
    t = np.zeros(4, int) if "+ t" in text else x[:4]
    einsum = (
        _block_case(text, x=x, s=x[:7], t=t) if "t[" in text else _block_case(text, x=x, s=x[:7])
    )
    assert in_blocks(einsum, ()) is None


# ---- small integers ------------------------------------------------------------------------------


@settled(200)
@given(st.data())
def test_narrowed_integers_have_the_same_values(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["int8", "uint8", "int16", "uint16"]))

    def expression(depth: int) -> Scalar:
        if depth == 0 or data.draw(st.integers(0, 4)) == 0:
            return Arg(0)
        op = data.draw(st.sampled_from(["+", "-", "*", "&", "|", "^", "<<", ">>", "int64"]))
        inner = expression(depth - 1)
        if op == "int64":
            return Call(op, (inner,))
        other = Const(data.draw(st.integers(0, 7)))
        return Call(op, (inner, other if data.draw(st.booleans()) else Call("int64", (other,))))

    whole = Call("float64", (expression(4),))
    limits = np.iinfo(dtype)
    x = np.arange(limits.min, limits.max + 1, 37).astype(dtype)
    operand = IndexedArray(dtype, x.shape, x.strides, ("i",))
    vertex = narrowed(whole, (operand,))
    from einmpi.kernels.prepared import apply

    with np.errstate(all="ignore"):
        wanted = apply(whole, [x], {})
        found = apply(vertex, [x], {})
    np.testing.assert_array_equal(np.broadcast_to(found, x.shape), np.broadcast_to(wanted, x.shape))
