"""Products of two sparse matrices by kernels that find the pairs, against lists of pairs."""

import numpy as np
import pytest

import einmpi
from einmpi.graph.sparse import products
from einmpi.kernels.cpu import segment_loops

ROWS, INSIDE, COLUMNS = 70, 190, 150
SHAPES = {
    "A": (ROWS, INSIDE),
    "B": (INSIDE, COLUMNS),
    "T": (INSIDE, ROWS),
    "U": (COLUMNS, INSIDE),
}
PRODUCT = "C[i,k] = sum(A[i,j] * B[j,k])"
CASES = [  # the program, the dtypes and what is not stored
    *((PRODUCT, dtype, 0) for dtype in ("float64", "float32", "complex64", "int8", "uint16")),
    ("C[k,i] = sum(B[j,k] * A[i,j])", "complex128", 0),
    ("C[i,k] = sum(T[j,i] * U[k,j])", "float32", 0),
    ("C[i,k] = sum(where(A[i,j] > 1, A[i,j], 2 * A[i,j]) * abs(B[j,k]))", "float64", 0),
    ("C[i,k] = any(A[i,j] & B[j,k])", "bool", 0),
    ("C[i,k] = min(A[i,j] + B[j,k])", "float32", np.inf),
    ("C[i,k] = max(T[j,i] + B[j,k])", "float64", -np.inf),
    ("C[i,k] = prod(1 + A[i,j] * B[j,k])", "int64", 0),
]


def matrix(rng, shape, dtype, implicit):
    """Small whole numbers at random places, so that sums are exact; some rows are empty."""
    keys = np.nonzero((rng.random(shape) < 0.8) & (rng.random((shape[0], 1)) < 0.9))
    values = rng.integers(1, 4, len(keys[0]))
    if dtype[0] == "c":
        values = values * (1 + 1j)
    return einmpi.SparseArray.from_keys(keys, values.astype(dtype), shape, implicit)


def computed(text, inputs, monkeypatch, least_pairs, threads=1):
    """The result, and how many pairs its vertex finds by itself."""
    with monkeypatch.context() as patch:
        patch.setattr(products, "MIN_PAIRS", least_pairs)
        job = einmpi.program(text, **inputs, threads=threads)
        step = einmpi.compile(job)
        results = [step(inputs)["C"] for _ in range(2)]  # the second call is prepared
        plan = einmpi.plan(job, 1, inputs)
    first, second = (each.coordinates() for each in results)
    np.testing.assert_array_equal(first.values, second.values)
    assert step.measured.peak <= plan.peak
    return first, plan.graph["C"].computed_einsum.matches


@pytest.mark.parametrize(("text", "dtype", "implicit"), CASES)
def test_results_are_those_of_listed_pairs(text, dtype, implicit, monkeypatch):
    """Some rows have more terms than a part of a sum in float32."""
    rng = np.random.default_rng(len(text))
    inputs = {
        name: matrix(rng, SHAPES[name], dtype, implicit) for name in SHAPES if f"{name}[" in text
    }
    found, pairs = computed(text, inputs, monkeypatch, 0)
    wanted, listed = computed(text, inputs, monkeypatch, 2**62)
    assert pairs > found.stored
    assert listed is None
    for a, b in zip((*found.keys, found.values), (*wanted.keys, wanted.values), strict=True):
        np.testing.assert_array_equal(a, b)
    again, _ = computed(text, inputs, monkeypatch, 0, threads=3)
    np.testing.assert_array_equal(again.values, found.values)
    monkeypatch.setattr(segment_loops, "MOST_PLACES", 2 * max(COLUMNS, ROWS))  # of two threads
    fewer, _ = computed(text, inputs, monkeypatch, 0, threads=3)
    np.testing.assert_array_equal(fewer.values, found.values)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_threads_change_no_bit(dtype, monkeypatch):
    """Some rows have as many terms as two parts of a sum."""
    rng = np.random.default_rng(1)
    inputs = {}
    for name in "AB":
        exact = matrix(rng, SHAPES[name], dtype, 0)
        keys = exact.pattern
        values = rng.standard_normal(len(keys[0])).astype(dtype)
        inputs[name] = einmpi.SparseArray.from_keys(keys, values, SHAPES[name])
    one, pairs = computed(PRODUCT, inputs, monkeypatch, 0)
    assert pairs
    for threads in (2, 5):
        more, _ = computed(PRODUCT, inputs, monkeypatch, 0, threads)
        np.testing.assert_array_equal(more.values, one.values)
    A, B = (inputs[name].gather().toarray().astype(np.float64) for name in "AB")
    wanted = (A @ B)[one.keys]
    tolerance = 1e-12 if dtype == "float64" else 1e-4
    np.testing.assert_allclose(one.values, wanted, rtol=0, atol=tolerance)


def test_half_precision_and_other_forms_list_their_pairs(monkeypatch):
    rng = np.random.default_rng(0)
    A, B = (matrix(rng, SHAPES[name], "float16", 0) for name in "AB")
    _, pairs = computed(PRODUCT, {"A": A, "B": B}, monkeypatch, 0)
    assert pairs is None
    A, B = A.astype("float64"), B.astype("float64")
    _, pairs = computed("C[i,k] = sum(j * A[i,j] * B[j,k])", {"A": A, "B": B}, monkeypatch, 0)
    assert pairs is None
    _, pairs = computed("C[i,j] = A[i,j] * abs(A[i,j])", {"A": A}, monkeypatch, 0)
    assert pairs is None


def test_few_pairs_are_listed():
    A = matrix(np.random.default_rng(0), (9, 9), "float64", 0)
    job = einmpi.program("C[i,k] = sum(A[i,j] * A[j,k])", A=A)
    assert einmpi.plan(job, 1, {"A": A}).graph["C"].computed_einsum.matches is None


def test_values_in_memory_that_is_not_aligned(monkeypatch):
    monkeypatch.setattr(products, "MIN_PAIRS", 0)
    A = matrix(np.random.default_rng(0), (30, 30), "float64", 0).gather().tocsr()
    wanted = (A @ A).toarray()
    packed = np.frombuffer(b"." + A.data.tobytes(), np.uint8)[1:].view("float64")
    A.data = packed
    assert not A.data.flags.aligned
    found = einmpi.run("C[i,k] = sum(A[i,j] * A[j,k])", A=A)["C"].gather()
    np.testing.assert_array_equal(found.toarray(), wanted)


def test_too_little_memory_says_how_much_is_needed(monkeypatch):
    monkeypatch.setattr(products, "MIN_PAIRS", 0)
    A = matrix(np.random.default_rng(0), (90, 90), "float64", 0)
    text = "C[i,k] = sum(A[i,j] * A[j,k])"
    needed = einmpi.plan(einmpi.program(text, A=A), 1, {"A": A}).peak
    with pytest.raises(einmpi.InputError, match=f"at least {needed} bytes"):
        einmpi.run(einmpi.program(text, A=A, memory=needed - 1), A=A)
    einmpi.run(einmpi.program(text, A=A, memory=needed), A=A)
