"""Which labels of a result can be swapped: against values, and on forms that are known."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import einmpi
from einmpi.errors import InputError
from einmpi.graph.forms.symmetry import Symmetry, find_symmetry

SHAPES = {"A": (3, 4), "B": (3, 4), "w": (4,), "u": (3,), "S": (3, 3)}


def symmetry_of(graph):
    vertex = graph["Z"]
    dtypes = [graph[name].dtype for name in vertex.inputs]
    return find_symmetry(vertex.computed_einsum, vertex.inputs, dtypes)


def swap_of(text, **more):
    found = symmetry_of(einmpi.program(text, **(SHAPES | more)).graph)
    assert found is None or not found.conjugates
    return found and found.swap


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
        "exp(u[k] - 2 * S[i,k] * S[k,i] * u[i] * u[k] + u[i])",
        "exp(1 - u[i] - (u[k] - 3)) * u[k] * u[i]",
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
    assert symmetry_of(job.graph) is None


@pytest.mark.parametrize(
    ("expression", "conjugates"),
    [
        ("sum(A[i,j] * conj(A[k,j]))", True),
        ("sum(conj(A[i,j]) * A[k,j])", True),
        ("sum(A[i,j] * A[k,j])", False),
        ("sum(conj(A[i,j] * A[k,j]))", False),
        ("sum((A[i,j] - A[k,j]) * conj(A[i,j] - A[k,j]))", False),
        ("sum(conj(A[i,j] - 2j) * (A[k,j] - 2j))", True),
        ("sum(conj(A[i,j] - 2j) * (A[k,j] + 2j))", None),
        ("sum(1j * A[i,j] * conj(A[k,j]))", None),
        ("sum(exp(A[i,j] - conj(A[k,j]))**2)", None),
        ("sum(exp(A[i,j] + conj(A[k,j]))**2)", True),
        ("sum(real(A[i,j] * conj(A[k,j])))", False),
        ("sum(imag(A[i,j] * conj(A[k,j])))", None),
        ("sum(imag(A[i,j] * conj(A[k,j]))**2)", False),
        ("max(abs(A[i,j] * conj(A[k,j])))", False),
        ("sum(where(i == k, 2, A[i,j] * conj(A[k,j]) + conj(A[i,j]) * A[k,j]))", False),
        ("sum(where(i == k, 2j, A[i,j] * conj(A[k,j])))", None),
        ("sum(sqrt(A[i,j] * conj(A[k,j])))", None),
    ],
)
def test_symmetric_but_for_conjugates(expression, conjugates):
    job = einmpi.program(f"Z[i,k] = {expression}", A=(3, 4), dtype="complex128")
    found = symmetry_of(job.graph)
    assert found == (conjugates if conjugates is None else Symmetry((("i", "k"),), conjugates))


ELEMENTS = ["A[i,j]", "A[k,j]", "B[i,j]", "B[k,j]", "w[j]", "u[i]", "u[k]", "S[i,k]", "i", "k", "2"]
BINARY = ["({} + {})", "({} - {})", "({} * {})", "maximum({}, {})", "({} <= {})"]
UNARY = ["abs({})", "({})**2", "({})**3", "(-{})", "sin({})"]
OF_COMPLEX = ["conj({})", "real({})", "imag({})", "({})**2", "({})**3", "(-{})", "exp({})"]


def texts(binary=BINARY, unary=UNARY):
    return st.recursive(
        st.sampled_from(ELEMENTS),
        lambda inner: st.one_of(
            st.builds(lambda form, x, y: form.format(x, y), st.sampled_from(binary), inner, inner),
            st.builds(lambda form, x: form.format(x), st.sampled_from(unary), inner),
            # Forms that often are symmetric: f(x) and the same with i and k swapped.
            st.builds(lambda form, x: form.format(x, swapped(x)), st.sampled_from(binary), inner),
        ),
        max_leaves=6,
    )


def swapped(text):
    return (
        text.translate(str.maketrans("ik", "ki"))
        .replace("skn(", "sin(")
        .replace("maxkmum(", "maximum(")
    )


def program_of(text, dtype="float64"):
    try:
        return einmpi.program(text, **SHAPES, dtype=dtype)
    except InputError:  # differences of bools
        assume(False)


def assert_symmetric_if_found(job, seed):
    rng = np.random.default_rng(seed)
    arrays = {}
    for vertex in job.graph.inputs:
        name = vertex.name
        array = rng.standard_normal((*SHAPES[name], 2)) / 2
        is_complex = vertex.dtype == "complex128"
        arrays[name] = array.view(complex)[..., 0] if is_complex else array[..., 0]
    found = symmetry_of(job.graph)
    if found is None:
        return
    values = einmpi.reference(job, arrays)["Z"]
    mirrored = values.conj().T if found.conjugates else values.T
    np.testing.assert_allclose(values, mirrored, rtol=1e-12, atol=1e-12)


@given(texts(), st.integers(0, 9))
def test_what_is_found_symmetric_has_symmetric_values(text, seed):
    both = text + " + 0*A[i,j]*A[k,j]"  # so that all labels occur
    assert_symmetric_if_found(program_of(f"Z[i,k] = sum({both})"), seed)


@given(
    texts([*BINARY[:3], "({} * conj({}))", "({} + conj({}))", "({} / ({} + 3))"], OF_COMPLEX),
    st.integers(0, 9),
)
def test_the_same_of_complex_numbers(text, seed):
    both = text + " + 0*A[i,j]*conj(A[k,j])"
    assert_symmetric_if_found(program_of(f"Z[i,k] = sum({both})", "complex128"), seed)


@given(texts())
def test_an_expression_times_its_mirror_image_is_symmetric(text):
    product = f"({text}) * ({swapped(text)}) + A[i,j] * A[k,j]"
    job = program_of(f"Z[i,k] = max({product})")
    assume("S[" not in text and len(job.graph.computed) == 1)
    assert symmetry_of(job.graph) == Symmetry((("i", "k"),), False)
