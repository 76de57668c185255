"""Arithmetic on a real GPU: every kernel, operation, dtype and layout against the reference."""

from dataclasses import replace

import numpy as np
import pytest
from cuda_cases import (
    CONTRACTIONS,
    DISTANCES,
    GROUPS,
    SCANS,
    SCATTERED,
    check_alignment,
    check_arithmetic_indices,
    check_contraction,
    check_distance,
    check_gathers,
    check_group,
    check_named,
    check_out_of_range,
    check_scan,
    check_scatter,
    check_scattered_shares,
    compute,
    on_device,
    operation_agrees,
    operation_functions,
    operation_signature,
    operations,
)
from kernels.cpu.test_compiled import LAYOUTS, NAMED, SIZES, vertex
from row_write_cases import check_all_row_writes

import einmpi
from einmpi.kernels import reference
from einmpi.kernels.cuda import dispatch
from einmpi.kernels.cuda.device_functions import COMMON, DEVICE
from einmpi.kernels.cuda.nest import EXACT_OPTIONS


def _missing():
    try:
        import cupy

        return "" if cupy.cuda.runtime.getDeviceCount() else "no GPU"
    except Exception as error:  # CuPy raises all kinds of errors if it does not work
        return f"no CuPy or no GPU: {type(error).__name__}"


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(_missing()), reason=_missing() or "-"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


@pytest.mark.parametrize("name", NAMED)
def test_named(cupy, name):
    for size in SIZES:
        check_named(cupy, name, size)


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
)
def test_contractions(cupy, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    for subscripts in CONTRACTIONS:
        check_contraction(cupy, subscripts, dtype)
        if dtype.startswith("complex"):
            check_contraction(cupy, subscripts, dtype, conj=True)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", GROUPS)
def test_groups(cupy, monkeypatch, name, dtype):
    check_group(cupy, name, dtype, monkeypatch)


@pytest.mark.parametrize("case", SCANS)
def test_scans(cupy, monkeypatch, case):
    check_scan(cupy, case, monkeypatch)


def test_row_writes(cupy):
    check_all_row_writes(cupy)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "complex64"])
def test_long_scans(cupy, dtype):
    """A million values, which take a trillion operations if computed as written."""
    x = np.random.default_rng(1).integers(-2, 3, 1_000_003).astype(dtype)
    job = einmpi.program("Z[i] = cumsum[i](x[i])", x=x)
    kind = job.graph["Z"].dtype
    found = [compute(cupy, job.graph["Z"].einsum, kind, [x]) for _ in range(2)]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_allclose(found[0], einmpi.reference(job, {"x": x})["Z"], rtol=1e-3)
    wide = np.random.default_rng(2).integers(-2, 3, (300, 9001)).astype(dtype)
    job = einmpi.program("Z[i,j] = cummax[i](x[i,j])", x=wide.real)
    found = compute(cupy, job.graph["Z"].einsum, wide.real.dtype.name, [wide.real])
    np.testing.assert_array_equal(found, np.maximum.accumulate(wide.real, 0))


def test_every_operation_in_every_dtype(cupy):
    cases, wrong = list(operations()), []
    for start in range(0, len(cases), 200):
        part = cases[start : start + 200]
        text = DEVICE + COMMON + operation_functions(part)
        for number, (_, kind, operands) in enumerate(part):
            given, args = operation_signature(kind, operands)
            text += f'extern "C" __global__ void run{number}({given}) {{\n'
            text += "  Long i = blockIdx.x * 256 + threadIdx.x;\n"
            text += f"  if (i < n) y[i] = k{number}::otimes({args});\n}}\n"
        module = cupy.RawModule(code=text, options=EXACT_OPTIONS)
        for number, (einsum, kind, operands) in enumerate(part):
            target = cupy.empty(operands[0].shape, kind)
            given = (*map(cupy.asarray, operands), target, target.size)
            module.get_function(f"run{number}")((-(-target.size // 256),), (256,), given)
            try:
                operation_agrees(einsum, kind, operands, target.get())
            except AssertionError as error:
                wrong.append(str(error))
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(text[:700] for text in wrong[:12])


@pytest.mark.parametrize(
    "layout", [name for name in LAYOUTS if name not in ("unaligned", "swapped bytes", "a field")]
)
def test_layouts(cupy, layout):
    for text in (
        "Z[i,k] = sum(A[i,j] * B[j,k])",
        "Z[i,k] = max(abs(A[i,j] - B[j,k]))",
        "Z[j,i] = A[i,j] + B[i,j]",
        "Z[i] = sum(A[i,j] * B[i,j])",
        "Z[j] = min(A[i,j] + B[i,j])",
    ):
        rng = np.random.default_rng(2)
        a, b = (LAYOUTS[layout](rng.normal(size=(70, 70))) for _ in range(2))
        einsum, kind, operands = vertex(text, {"A": a, "B": b})
        assert on_device(cupy, a).strides == a.strides, "the copy has other strides"
        wanted = reference.evaluate_einsum(einsum, operands, kind)
        np.testing.assert_allclose(
            compute(cupy, einsum, kind, operands), wanted, rtol=1e-12, atol=1e-11
        )


@pytest.mark.parametrize("case", DISTANCES)
def test_distances(cupy, monkeypatch, case):
    check_distance(cupy, monkeypatch, *case)


def test_alignment(cupy):
    check_alignment(cupy)


@pytest.mark.parametrize("text", SCATTERED)
def test_scattered(cupy, text):
    check_scatter(cupy, text)
    check_scatter(cupy, text, 1, 3, 2)
    for dtype in ("float32", "int32"):
        if dtype != "int32" or "0.25" not in text:
            check_scatter(cupy, text, 300, 4, 9, dtype)


@pytest.mark.parametrize("text", SCATTERED[:4])
def test_many_scattered_values(cupy, text):
    check_scatter(cupy, text, 20_000, 7, 40)


def test_scattered_shares(cupy):
    check_scattered_shares(cupy)


def test_gathers_and_labels(cupy):
    check_gathers(cupy)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(("shift", "extent"), [(64, 128), (3, 16), (4, 12), (6, 7)])
def test_indices_that_are_arithmetic(cupy, shift, extent, dtype):
    check_arithmetic_indices(cupy, shift, extent, dtype)


@pytest.mark.parametrize("bad", [-1, 50, 2**40])
def test_index_out_of_range(cupy, bad):
    check_out_of_range(cupy, bad)


def test_more_than_two_to_the_31_elements(cupy):
    count = 2**31 + 12345
    x = cupy.arange(count, dtype=np.int8).reshape(1, -1).view(np.bool_)
    einsum, _, _ = vertex("Z[i,j] = ~X[i,j]", {"X": np.zeros((1, 2), bool)})
    whole = replace(einsum, extents=(("i", 1), ("j", count)))
    target = cupy.zeros((1, count), bool)
    dispatch.compute_einsum(whole, [x], target)
    assert bool((target == ~(x.view(np.int8) != 0)).all())
    total, _, _ = vertex("Z = sum(X[i,j])", {"X": np.zeros((1, 2), bool)})
    result = cupy.zeros((), np.int64)
    dispatch.compute_einsum(replace(total, extents=(("i", 1), ("j", count))), [x], result)
    assert int(result) == int((x.view(np.int8) != 0).sum())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_long_sums_keep_their_digits_and_bits(cupy, dtype):
    x = np.random.default_rng(1).uniform(size=(3, 1_000_000)).astype(dtype)
    for text in ("Z[i] = sum(X[i,j])", "Z = sum(X[i,j])", "Z[i] = sum(X[i,j]**2)"):
        einsum, kind, operands = vertex(text, {"X": x})
        found = [compute(cupy, einsum, kind, operands) for _ in range(2)]
        wanted = reference.evaluate_einsum(einsum, [x.astype("float64")], "float64")
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(found[0], wanted.astype(dtype), rtol=3 * np.finfo(dtype).eps)
        assert found[0].tobytes() == found[1].tobytes()
