"""CUDA kernels without a GPU: tests/lib/cupy_on_cpu.py runs them on the CPU; nvcc compiles some."""

import itertools
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

if shutil.which("g++") is None:
    pytest.skip("no g++ to compile kernels for the CPU", allow_module_level=True)

import cupy_on_cpu
from cuda_cases import (
    CONTRACTIONS,
    DISTANCES,
    GROUPS,
    SCANS,
    SCATTERED,
    WEIGHTED_DIFFERENCES,
    check_alignment,
    check_arithmetic_indices,
    check_contraction,
    check_distance,
    check_first_extreme,
    check_gathers,
    check_group,
    check_named,
    check_out_of_range,
    check_scan,
    check_scatter,
    check_scattered_shares,
    check_weighted_difference,
    compute,
    operation_agrees,
    operation_functions,
    operation_signature,
    operations,
)
from hypothesis import given
from kept_results import kept
from kernels.cpu.test_compiled import NAMED, SIZES, close, random_arrays, vertex, vertices_of
from random_programs import programs, settled
from row_write_cases import check_all_row_writes

import einmpi
from einmpi.kernels import reference
from einmpi.kernels.cpu.broadcast import compute_by_broadcasting
from einmpi.kernels.cuda import dispatch, group
from einmpi.kernels.cuda.device_functions import COMMON
from einmpi.kernels.cuda.nest import EXACT_OPTIONS, compile_kernel
from einmpi.kernels.cuda.problem import Problem
from einmpi.kernels.cuda.work_split import split_work
from einmpi.kernels.loop_nest import IndexedArray
from einmpi.kernels.operands import number_operands
from einmpi.schedule.groups import with_groups
from einmpi.schedule.lower import lower

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


@pytest.fixture
def cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", cupy_on_cpu.module())
    forget()
    yield sys.modules["cupy"]
    forget()


def forget():
    """Remove prepared calls and kernels, so that none is left from another stand-in."""
    dispatch.CALLS.entries.clear()
    kept(compile_kernel).clear()


# ---- values -------------------------------------------------------------------------------------


# In tiles, folded, and transposed through shared memory.
@pytest.mark.parametrize("name", ["farthest", "columns", "turned"])
def test_named(cupy, name):
    check_named(cupy, name, SIZES[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_every_name_and_size(cupy, name):
    for size in SIZES:
        check_named(cupy, name, size)


@pytest.mark.slow
def test_row_writes(cupy):
    check_all_row_writes(cupy, ["u == at[b]", "u == (at[b] + 1) % 4", "u == shift"])


def test_contractions(cupy):
    for subscripts in CONTRACTIONS[:6]:
        check_contraction(cupy, subscripts, "float32")
    check_contraction(cupy, "ij,jk->ik", "complex128", conj=True)
    check_contraction(cupy, "ji,jk->ik", "complex128", conj=True)


@pytest.mark.slow
@pytest.mark.parametrize("subscripts", CONTRACTIONS)
def test_every_contraction(cupy, subscripts):
    for dtype in ("float16", "float64", "complex64"):
        check_contraction(cupy, subscripts, dtype)
    check_contraction(cupy, subscripts, "complex128", conj=True)


@pytest.mark.parametrize(
    "case", [DISTANCES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in DISTANCES[1:])]
)
def test_distances(cupy, monkeypatch, case):
    check_distance(cupy, monkeypatch, *case)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", WEIGHTED_DIFFERENCES)
def test_weighted_differences(cupy, monkeypatch, case):
    check_weighted_difference(cupy, monkeypatch, *case)


def test_alignment(cupy):
    check_alignment(cupy)


def test_copies_for_a_product_stay_small(cupy, monkeypatch):
    """Operands that cuBLAS cannot take as they are stored are copied in parts."""
    arrays = random_arrays("float64", {"A": (9, 40, 8), "B": (8, 9, 5)})
    einsum, kind, operands = vertex("Z[i,k] = sum(A[a,i,b] * B[b,a,k])", arrays)
    shapes, empty = [], cupy.empty
    monkeypatch.setattr(dispatch, "MAX_TEMPORARY_BYTES", 9 * 8 * 8 * 10)
    monkeypatch.setattr(dispatch, "MIN_MATRIX_SIDE", 2)
    monkeypatch.setattr(
        cupy, "empty", lambda shape, dtype: shapes.append(shape) or empty(shape, dtype)
    )
    found = compute(cupy, einsum, kind, operands)
    np.testing.assert_allclose(found, reference.evaluate_einsum(einsum, operands, kind), rtol=1e-12)
    assert len(shapes) >= 4
    assert max(np.prod(shape) for shape in shapes) * 8 <= dispatch.MAX_TEMPORARY_BYTES


def test_sums_over_columns_are_no_group():
    """A thread block would read a column, and throw away its neighbours."""
    job = einmpi.program(
        "s[j] = sum(x[i,j] * y[i,j]); z[j] = sqrt(abs(s[j])); P[i,k] = sum(x[i,j] * z[j]) * y[i,k]",
        x=(8192, 2048),
        y=(8192, 2048),
    )
    schedule = with_groups(lower(einmpi.plan(job, ranks=1), 0), group.RULE)
    assert not any(len(step.kernels) > 1 for step in schedule.steps)


@pytest.mark.parametrize("name", ["softmax", "maps", "equal values"])
def test_groups(cupy, monkeypatch, name):
    check_group(cupy, name, "float16", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPS)
def test_every_group(cupy, monkeypatch, name):
    check_group(cupy, name, "float32", monkeypatch)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_both_passes_of_argmax_see_the_same_values(cupy, monkeypatch, dtype):
    check_first_extreme(cupy, dtype, monkeypatch)


def test_second_passes_of_scans(cupy, monkeypatch):
    check_scan(cupy, "second passes", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in SCANS if case != "second passes"])
def test_scans(cupy, monkeypatch, case):
    check_scan(cupy, case, monkeypatch)


@pytest.mark.parametrize("text", SCATTERED[:1])
def test_scattered(cupy, text):
    check_scatter(cupy, text)


@pytest.mark.slow
@pytest.mark.parametrize("text", SCATTERED[1:])
def test_scattered_in_all_ways(cupy, text):
    check_scatter(cupy, text)
    check_scatter(cupy, text, 300, 4, 9, "float32")
    check_scatter(cupy, text, 1, 3, 2)


def test_scattered_shares(cupy):
    check_scattered_shares(cupy)


@pytest.mark.slow
def test_gathers_and_labels(cupy):
    check_gathers(cupy)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("shift", "extent", "dtype"),
    [(64, 128, "float32"), (3, 16, "float64"), (4, 12, "float32"), (6, 7, "float64")],
)
def test_indices_that_are_arithmetic(cupy, shift, extent, dtype):
    check_arithmetic_indices(cupy, shift, extent, dtype)


def nest_of(text, arrays, first=0):
    """Return the nest of the kernel for a vertex whose label d begins at `first`."""
    einsum, kind, operands = vertex(text, arrays)
    function, entries, labels = number_operands(einsum)
    layouts = []
    target = np.empty(einsum.bound, kind)
    for array, index in zip(
        (*operands, target), (*entries[: len(operands)], einsum.output), strict=True
    ):
        strides = tuple(stride // array.itemsize for stride in array.strides)
        layouts.append(IndexedArray(array.dtype.name, array.shape, strides, index))
    layout = layouts.pop()
    for label in labels:
        layouts.append(IndexedArray("int64", (einsum.extent[label],), (1,), (label,), first))
    problem = Problem(function, tuple(layouts), layout, None, einsum.extents, True)
    return split_work(problem).nest


def test_labels_that_are_compared_with_numbers(cupy):
    """The loops of a sum are unrolled, and then numbers are compared with numbers."""
    text = "Z = sum[i:2,j:5](where(1 == i, where(4 == j, x, 0), 0))"
    einsum, kind, operands = vertex(text, {"x": np.array(3.0)})
    assert compute(cupy, einsum, kind, operands) == 3


def test_an_index_that_cannot_be_out_of_range_is_not_checked():
    arrays = {"x": np.zeros((5, 16), "float32"), "w": np.zeros((5, 16), "float32")}
    assert nest_of("y[i,d] = w[i,d] * x[i,(d+8)%16]", arrays).checked == ()
    places = {**arrays, "t": np.zeros(16, int)}
    assert nest_of("y[i,d] = w[i,d] * x[i,t[d]]", places).checked == ((2, 0),)
    # A part of a label may begin anywhere.
    assert nest_of("y[i,d] = w[i,d] * x[i,d//2]", arrays, 16).checked == ()
    assert nest_of("y[i,d] = w[i,d] * x[i,d//2]", arrays, 32).checked == ((1, 0),)


def test_an_index_that_moves_along_with_a_pack_is_read_in_packs():
    arrays = {"x": np.zeros((5, 16), "float32"), "w": np.zeros((5, 16), "float32")}

    def packs(index, first=0):
        nest = nest_of(f"y[i,d] = w[i,d] * x[i,{index}]", arrays, first)
        return nest.pack, nest.packed

    assert packs("(d+8)%16") == (4, (0, 1))
    assert packs("(d+2)%16") == (2, (0, 1))
    assert packs("(3+d)%16") == (1, ())
    assert packs("(d-4)%12") == (4, (0, 1))
    assert packs("(d+4)%14") == (2, (0, 1))
    assert packs("(d+8)%16", 6) == (2, (0, 1))
    assert packs("(d*2)%16") == (1, ())
    assert packs("15-d%16") == (1, ())


def test_index_out_of_range(cupy):
    for bad in (-1, 50, 2**40):
        check_out_of_range(cupy, bad)


def test_nothing_to_aggregate(cupy):
    empty = {"X": np.zeros((3, 0))}
    for text, wanted in (
        ("Z[i] = sum(X[i,j])", 0),
        ("Z[i] = prod(X[i,j])", 1),
        ("Z[i] = all(X[i,j] > 0)", True),
    ):
        einsum, kind, operands = vertex(text, empty)
        np.testing.assert_array_equal(compute(cupy, einsum, kind, operands), np.full(3, wanted))
    einsum, kind, operands = vertex("Z[i] = max(X[i,j])", {"X": np.zeros((3, 1))})
    with pytest.raises(ValueError, match="max of nothing has no value"):
        compute(cupy, replace(einsum, extents=(("i", 3), ("j", 0))), kind, [operands[0][:, :0]])
    einsum, kind, operands = vertex("Z[j] = max(X[i,j])", empty)
    assert compute(cupy, einsum, kind, operands).shape == (0,)


@pytest.mark.slow
def test_integers_at_the_ends_of_their_range(cupy):
    """Floats outside the range, negative powers, and products that wrap before they are widened."""
    floats = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 3.75, -3.75])
    for dtype, target in itertools.product(("float32", "float64"), ("int32", "uint8", "int64")):
        limits = np.iinfo(target)
        wanted = [0, limits.max, limits.min, limits.max, limits.min, 3, max(-3, limits.min)]
        einsum, kind, operands = vertex(f"Z[i] = {target}(x[i])", {"x": floats.astype(dtype)})
        np.testing.assert_array_equal(compute(cupy, einsum, kind, operands), wanted)
    einsum, kind, operands = vertex("Z[i:4] = 2**(i-1)", {})
    np.testing.assert_array_equal(compute(cupy, einsum, kind, operands), [0, 1, 2, 4])
    many = np.full((3, 40), 2**20, "int32")
    for text in ("Z[i] = sum(m[i,j]*m[i,j])", "Z[i,k] = sum(2.0*(m[i,j]*m[k,j]))"):
        einsum, kind, operands = vertex(text, {"m": many})
        found = compute(cupy, einsum, kind, operands)
        np.testing.assert_array_equal(found, np.zeros_like(found))
    stamps = np.full((3, 40), 17 * 10**17)
    total, _ = einmpi.program("Z[i] = mean(x[i,j])", x=stamps).graph.computed
    found = compute(cupy, total.einsum, total.dtype, [stamps])
    np.testing.assert_array_equal(found, np.full(3, 40 * 17e17))


@pytest.mark.parametrize(
    "call",
    [
        "uniform(7, i, j)",
        "uniform32(seed, j)",
        "normal(seed, i, j)",
        "normal(1, j, i - 3, i, 2)",
        "bernoulli(0.3, seed, i, j, 4)",
        "uniform(seed)",
    ],
)
def test_random_numbers_have_the_bits_of_numpy(cupy, call):
    seed = {"seed": np.array(-(2**40))} if "seed" in call else {}
    einsum, kind, operands = vertex(f"Z[i:9,j:70] = {call}", seed)
    wanted = np.empty((9, 70), kind)
    compute_by_broadcasting(einsum, operands, wanted, {})
    np.testing.assert_array_equal(compute(cupy, einsum, kind, operands), wanted)


def operations_agree(cases):
    text, wrong = operation_functions(cases), []
    for number, (_, kind, operands) in enumerate(cases):
        given, args = operation_signature(kind, operands)
        text += f'extern "C" void run{number}({given}) {{\n'
        text += f"for (Long i = 0; i < n; ++i) y[i] = k{number}::otimes({args}); }}\n"
    library = cupy_on_cpu.build(cupy_on_cpu.HOST + COMMON + text)
    for number, (einsum, kind, operands) in enumerate(cases):
        found = np.empty(operands[0].shape, kind)
        addresses = [cupy_on_cpu.address_of(array) for array in (*operands, found)]
        cupy_on_cpu.call(library[f"run{number}"], *addresses, found.size)
        try:
            operation_agrees(einsum, kind, operands, found)
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(text[:700] for text in wrong[:12])


@pytest.mark.slow
def test_operations_with_equal_dtypes():
    operations_agree(list(operations(mixed=False)))


@pytest.mark.slow
def test_every_operation_in_every_dtype():
    cases = list(operations())
    for start in range(0, len(cases), 200):
        operations_agree(cases[start : start + 200])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    "integer", ["Wq[o,i]", "(Wp[o,i//2] >> 4*(i%2) & 15) - 8", "(Wp[o,i//2] << 1 ^ 3) & 15"]
)
def test_quantised_weights(cupy, integer, dtype):
    rng = np.random.default_rng(3)
    arrays = {
        "Wq": rng.integers(-127, 128, (40, 128), dtype="int8"),
        "Wp": rng.integers(0, 256, (40, 64), dtype="uint8"),
        "scale": rng.random((40, 2)).astype(dtype),
        "x": rng.standard_normal((3, 128)).astype(dtype),
    }
    del arrays["Wp" if "Wq" in integer else "Wq"]
    text = f"y[b,o] = sum({dtype}({integer}) * scale[o,i//64] * x[b,i])"
    einsum, kind, operands = vertex(text, arrays)  # one vertex: there is no large matrix
    exact = [array if array.dtype.kind in "iu" else array.astype(float) for array in operands]
    plain, wide, _ = vertex(text.replace(dtype, "float64"), dict(zip(arrays, exact, strict=True)))
    wanted = reference.evaluate_einsum(plain, exact, wide)
    tolerance = 2e-3 if dtype == "float16" else 1e-5
    found = compute(cupy, einsum, kind, operands).astype(float)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * abs(wanted).max())


# ---- texts --------------------------------------------------------------------------------------


@pytest.fixture
def texts(cupy, monkeypatch):
    """The texts of kernels, which are neither compiled nor run."""
    found = []

    def keep_text(text, fast, in_place):
        found.append(text)
        return lambda *arguments: None

    monkeypatch.setattr(dispatch, "compile_kernel", keep_text)
    return found


def test_texts_contain_no_words_of_the_user(cupy, texts):
    arrays = {"secret": np.ones((40, 40)), "hidden": np.ones((40, 40))}
    for text in (
        "Z[evil,k] = max(secret[evil,jam] + hidden[jam,k] * evil)",
        "Z[evil] = sum(secret[evil,jam] + jam)",
        "Z[evil,jam] = secret[jam,evil] + hidden[evil,jam]",
    ):
        einsum, kind, operands = vertex(text, arrays)
        compute(cupy, einsum, kind, operands)
    assert len(texts) == 3
    assert not any(word in text for text in texts for word in ("secret", "hidden", "evil", "jam"))


def test_other_extents_need_no_other_kernel(cupy, texts):
    for size in ((131, 200), (259, 333), (1000, 77)):
        einsum, kind, operands = vertex(
            NAMED["farthest"][0], random_arrays("float32", {"A": size, "B": size[::-1]})
        )
        compute(cupy, einsum, kind, operands)
    assert len(set(texts)) <= 2  # small outputs use smaller tiles


def test_shared_memory_is_enough_for_many_transposed_arrays(cupy, texts):
    names = [f"a{k}" for k in range(14)]
    arrays = {name: np.ones((64, 64)) for name in names}
    einsum, kind, operands = vertex(
        "Z[i,j] = " + " + ".join(f"{name}[j,i]" for name in names), arrays
    )
    compute(cupy, einsum, kind, operands)
    tiles = re.findall(r"__shared__ double transposed[0-9]+\[([0-9]+)\]\[([0-9]+)\];", texts[0])
    assert tiles
    assert sum(8 * int(a) * int(b) for a, b in tiles) <= 48 * 2**10


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="no nvcc")
def test_texts_compile_without_spills(cupy, texts, tmp_path):
    """On a real GPU registers are few: nothing may be spilled to local memory."""
    for name in (
        "farthest",
        "distances",
        "min-plus",
        "columns",
        "softmax",
        "complex",
        "turned",
        "whole",
    ):
        text, dtype, labels = NAMED[name]
        sizes = {"i": 2000, "j": 30, "k": 2000, "b": 2}
        shapes = {x: tuple(sizes[label] for label in index) for x, index in labels.items()}
        einsum, kind, operands = vertex(
            text, {x: np.zeros(shape, dtype) for x, shape in shapes.items()}
        )
        compute(cupy, einsum, kind, operands)
    for number, text in enumerate(texts):
        path = Path(tmp_path) / f"{number}.cu"
        path.write_text(text)
        command = [
            NVCC,
            "-arch=sm_90",
            *EXACT_OPTIONS,
            "-cubin",
            "-Xptxas",
            "-v",
            "-o",
            str(tmp_path / "out"),
            path,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "0 bytes spill stores" in done.stderr, f"{number}: {done.stderr}"


# ---- random programs ----------------------------------------------------------------------------


@pytest.mark.slow
@settled(40)
@given(programs())
def test_random_programs(program):
    with pytest.MonkeyPatch.context() as patch:
        library = cupy_on_cpu.module()
        patch.setitem(sys.modules, "cupy", library)
        for made, operands, wanted in vertices_of(program):
            found = compute(library, made.einsum, made.dtype, operands)
            close(found, wanted, [operand.dtype for operand in operands])
    forget()
