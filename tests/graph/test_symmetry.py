"""Which labels of a result can be swapped: against values, and on forms that are known."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import einmpi
from einmpi.graph.forms.symmetry import find_swap

SHAPES = {"A": (3, 4), "B": (3, 4), "w": (4,), "u": (3,), "S": (3, 3)}


def swap_of(text, **more):
    job = einmpi.program(text, **(SHAPES | more))
    vertex = job.graph["Z"]
    return find_swap(vertex.computed_einsum, vertex.inputs)


@pytest.mark.parametrize(
    "expression",
    [
        "sum(A[i,j] * A[k,j])",
        "sum(A[k,j] * A[i,j])",
        "sum((A[i,j] - A[k,j])**2)",
        "sum((A[i,j] - A[k,j]) * (A[i,j] - A[k,j]))",
        "sum((A[k,j] - A[i,j]) * (A[i,j] - A[k,j]))",
        "sum((A[i,j] - A[k,j]) * conj(A[i,j] - A[k,j]))",
        "max(abs(A[i,j] - A[k,j]))",
        "min(maximum(A[i,j], A[k,j]))",
        "any(A[i,j] * w[j] == A[k,j] * w[j])",
        "sum(where(i == k, 0.0, A[i,j] + A[k,j]))",
        "sum(exp(-(A[i,j] - A[k,j])**2))",
        "u[i] * u[k] + abs(i - k)",
    ],
)
def test_symmetric(expression):
    assert swap_of(f"Z[i,k] = {expression}") == (("i", "k"),)


@pytest.mark.parametrize(
    "expression",
    [
        "sum(A[i,j] * B[k,j])",
        "sum(A[i,j] - A[k,j])",
        "sum((A[i,j] - A[k,j])**3)",
        "sum(A[i,j] / (2 + A[k,j]))",
        "sum(A[i,j] * A[k,j] * (i + 1))",
        "sum(where(i <= k, A[i,j] * A[k,j], 0.0))",
        "sum(conj(A[i,j]) * A[k,j])",
        "sum(A[i,j] * A[k,j] * B[k,j])",
        "S[i,k] * u[i] * u[k]",
    ],
)
def test_not_symmetric(expression):
    assert swap_of(f"Z[i,k] = {expression}") is None


def test_several_labels_are_swapped_together():
    assert swap_of("Z[a,i,b,k] = sum(T[a,i,j] * T[b,k,j])", T=(2, 3, 4)) == (("a", "b"), ("i", "k"))


def test_a_batch_is_not_swapped():
    assert swap_of("Z[b,i,k] = sum(T[b,i,j] * T[b,k,j])", T=(2, 3, 4)) == (("i", "k"),)


def test_only_equal_extents_are_swapped():
    assert swap_of("Z[i,k] = sum(P[i,j] * Q[k,j])", P=(3, 4), Q=(5, 4)) is None


def test_differences_of_unsigned_integers_wrap_around():
    job = einmpi.program("Z[i,k] = max(abs(A[i,j] - A[k,j]))", A=(3, 4), dtype="uint8")
    vertex = job.graph["Z"]
    assert find_swap(vertex.computed_einsum, vertex.inputs, unsigned=True) is None


ELEMENTS = ["A[i,j]", "A[k,j]", "B[i,j]", "B[k,j]", "w[j]", "u[i]", "u[k]", "S[i,k]", "i", "k", "2"]
BINARY = ["({} + {})", "({} - {})", "({} * {})", "maximum({}, {})", "({} <= {})"]
UNARY = ["abs({})", "({})**2", "({})**3", "(-{})", "sin({})"]


def texts():
    return st.recursive(
        st.sampled_from(ELEMENTS),
        lambda inner: st.one_of(
            st.builds(lambda form, x, y: form.format(x, y), st.sampled_from(BINARY), inner, inner),
            st.builds(lambda form, x: form.format(x), st.sampled_from(UNARY), inner),
            # Forms that often are symmetric: f(x) and the same with i and k swapped.
            st.builds(lambda form, x: form.format(x, swapped(x)), st.sampled_from(BINARY), inner),
        ),
        max_leaves=6,
    )


def swapped(text):
    return (
        text.translate(str.maketrans("ik", "ki"))
        .replace("skn(", "sin(")
        .replace("maxkmum(", "maximum(")
    )


@given(texts(), st.integers(0, 9))
def test_what_is_found_symmetric_has_symmetric_values(text, seed):
    both = text + " + 0*A[i,j]*A[k,j]"  # so that all labels occur
    job = einmpi.program(f"Z[i,k] = sum({both})", **SHAPES)
    rng = np.random.default_rng(seed)
    arrays = {name: rng.standard_normal(SHAPES[name]) for name in job.inputs}
    vertex = job.graph["Z"]
    if find_swap(vertex.computed_einsum, vertex.inputs) is None:
        return
    values = einmpi.reference(job, arrays)["Z"]
    np.testing.assert_allclose(values, values.T, rtol=1e-12, atol=1e-12)


@given(texts())
def test_an_expression_times_its_mirror_image_is_symmetric(text):
    product = f"({text}) * ({swapped(text)}) + A[i,j] * A[k,j]"
    job = einmpi.program(f"Z[i,k] = max({product})", **SHAPES)
    assume("S[" not in text and len(job.graph.computed) == 1)
    vertex = job.graph["Z"]
    assert find_swap(vertex.computed_einsum, vertex.inputs) == (("i", "k"),)
