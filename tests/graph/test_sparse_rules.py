"""What is sparse, by the rules alone: backgrounds, supports, formats and demands of expressions."""

import numpy as np
import pytest

import einmpi
from einmpi.graph.scalar import Const
from einmpi.graph.sparse.background import (
    And,
    At,
    Expressions,
    Or,
    aggregate_of,
    in_dtype,
    number_of,
    typed,
)
from einmpi.graph.sparse.coordinates import Blocks, Coordinates
from einmpi.graph.sparse.desugar import desugar, implicit_value
from einmpi.graph.sparse.patterns import Pattern, join, looked_up, over_keys, projected, union

INPUTS = {"A": 0.0, "B": 0.0, "W": np.inf, "V": -np.inf, "M": False, "N": 3}
DTYPES = {"M": "bool", "N": "uint8"}


def facts_of(text):
    """The background and the support of an expression, with the names of operands."""
    names = [name for name in (*INPUTS, "x") if name in text.replace("abs", "").replace("NaN", "")]
    shapes = {name: np.zeros((3, 3), DTYPES.get(name, "float64")) for name in names if name != "x"}
    if "x" in names:
        shapes["x"] = (3,)
    written = einmpi.program(f"Z[i,j] = {text}", **shapes).written["Z"]
    implicit = {
        k: typed(INPUTS[name], DTYPES.get(name, "float64"))
        for k, name in enumerate(written.inputs)
        if name in INPUTS
    }
    dtypes = [DTYPES.get(name, "float64") for name in written.inputs]
    found = Expressions(implicit, dtypes).facts(written.einsum.function)
    return number_of(found.background), shown(found.support, written.inputs)


def shown(support, names):
    if support is None:
        return ""
    if isinstance(support, At):
        return names[support.position]
    sign = " & " if isinstance(support, And) else " | "
    assert isinstance(support, And | Or)
    return "(" + sign.join(shown(part, names) for part in support.parts) + ")"


@pytest.mark.parametrize(
    ("text", "background", "support"),
    [
        ("A[i,j] * x[j]", 0, "A"),
        ("A[i,j] * B[i,j]", 0, "(A & B)"),
        ("A[i,j] * B[i,j] * A[j,i]", 0, "(A & B & A)"),
        ("A[i,j] + B[i,j]", 0, "(A | B)"),
        ("A[i,j] * B[i,j] + A[i,j]", 0, "((A & B) | A)"),
        ("(A[i,j] + B[i,j]) * x[j]", 0, "(A | B)"),
        ("A[i,j] + x[j]", None, "A"),
        ("A[i,j] / x[j]", 0, "A"),
        ("x[j] / A[i,j]", None, "A"),
        ("exp(A[i,j])", 1, "A"),
        ("exp(W[i,j])", np.inf, "W"),
        ("W[i,j] + x[j]", np.inf, "W"),
        ("x[j] - W[i,j]", -np.inf, "W"),
        ("W[i,j] + W[j,i]", np.inf, "(W & W)"),
        ("W[i,j] + V[i,j]", np.nan, "(W | V)"),  # constants first: inf - inf
        ("A[i,j] * W[i,j]", np.nan, "(A | W)"),  # 0 * inf
        ("exp(V[i,j] - x[i])", 0, "V"),
        ("where(M[i,j], x[j], -inf)", -np.inf, "M"),
        ("where(A[i,j] != 0, x[j], B[i,j])", 0, "(A | B)"),
        ("M[i,j] & (x[j] > 0)", False, "M"),
        ("0 * A[i,j]", 0, ""),
        ("N[i,j] + 254", 1, "N"),  # uint8 wraps around
        ("-N[i,j]", 253, "N"),
        ("maximum(A[i,j], 2)", 2, "A"),
    ],
)
def test_background_and_support(text, background, support):
    found, where = facts_of(text)
    if background is None:
        assert found is None
    else:
        np.testing.assert_equal(found, background)
    assert where == support


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64", "float32", "complex64"])
@pytest.mark.parametrize("count", [0, 1, 3, 70])
def test_aggregates_of_a_constant(dtype, count):
    value = np.array(-3 if np.dtype(dtype).kind in "ifc" else 3, dtype)
    copies = np.full(count, value)
    for aggregation, numpy in (("sum", np.sum), ("prod", np.prod)):
        with np.errstate(all="ignore"):
            wanted = numpy(copies)
        found = aggregate_of(aggregation, value.item(), count, wanted.dtype.name)
        np.testing.assert_allclose(found, wanted.item(), rtol=1e-5)
    assert aggregate_of("max", value.item(), 2, dtype) == value.item()


def test_integers_wrap_around():
    assert in_dtype(300, "uint8") == 44 and in_dtype(-1, "uint64") == 2**64 - 1
    assert in_dtype(2**63, "int64") == -(2**63) and in_dtype(0.1, "float32") == np.float32(0.1)


# ---- patterns -----------------------------------------------------------------------------------


@pytest.mark.parametrize("extent", [4, 2**40])  # with numbers for all positions, and without
def test_joins_and_unions(extent):
    rng = np.random.default_rng(0)
    extents = dict.fromkeys("ijk", extent)
    for count in (0, 1, 5, 12):
        a = sorted({tuple(rng.integers(0, 4, 2)) for _ in range(count)})
        b = sorted({tuple(rng.integers(0, 4, 2)) for _ in range(7)})
        left = iteration(("i", "j"), a, 0)
        right = iteration(("j", "k"), b, 1)
        found = join(left, right, extents)
        pairs = [(i, j, k) for i, j in a for other, k in b if other == j]
        assert found.labels == ("i", "j", "k") and rows(found.columns("ijk")) == pairs
        assert [a[n] for n in found.at(0)] == [(i, j) for i, j, _ in pairs]
        assert [b[n] for n in found.at(1)] == [(j, k) for _, j, k in pairs]
        both = union(left, iteration(("j", "i"), b, 1))
        assert rows(both.columns("ij")) == sorted({*a, *((i, j) for j, i in b)})
        pattern = Pattern("A", left.columns("ij"), (extent, extent), Blocks((0, left.count)))
        places = looked_up(pattern, right.columns("jk"))
        assert places.tolist() == [a.index(each) if each in a else -1 for each in b]
        keys, place = projected((left.column("j"),))
        assert keys[0][place].tolist() == left.column("j").tolist()


def iteration(labels, keys, operand):
    columns = tuple(np.array(keys, np.uint32).reshape(-1, 2).T)
    return over_keys(labels, columns, (operand,))


def rows(keys):
    return list(zip(*(column.tolist() for column in keys), strict=True))


# ---- results ------------------------------------------------------------------------------------


def desugared(text, formats=None, gradients=None):
    """A program over small tensors: A and B with two keys, T with three, R with one."""
    rng = np.random.default_rng(1)
    given = {}
    for name, keys, dimensions in (("A", 2, 2), ("B", 2, 2), ("T", 3, 3), ("R", 1, 2)):
        if f"{name}[" in text:
            columns = np.nonzero(rng.random((6,) * keys) < 0.3)
            values = rng.random((len(columns[0]), *(6,) * (dimensions - keys)))
            given[name] = Coordinates.of(columns, values, (6,) * dimensions)
    shapes = {name: tensor.shape for name, tensor in given.items()}
    if "x[" in text:
        shapes["x"] = (6,)
    if "U[" in text:
        shapes["U"] = (6, 6)
    job = einmpi.program(text, **shapes)
    return desugar(job.written, given, formats or {}, gradients or {}, 1, {}, ())


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("Z[i] = sum(A[i,j] * x[j])", None),  # one key
        ("Z[i,j] = A[i,j] * x[j]", (0, 1)),
        ("Z[j,i] = sqrt(A[i,j])", (0, 1)),
        ("Z[i,j] = A[i,j] + x[j]", None),  # the background depends on the position
        ("Z[i,j] = exp(A[i,j])", (0, 1)),
        ("Z[i,k] = sum(A[i,j] * B[j,k])", (0, 1)),
        ("Z[i,j] = sum(T[i,j,k] * x[k])", (0, 1)),
        ("Z[i,j,r] = sum(T[i,j,k] * U[k,r])", (0, 1)),
        ("Z[r,i,j] = sum(T[i,j,k] * U[k,r])", None),  # keys of an output come first
        ("Z[i,f] = 2 * R[i,f]", None),
        ("Z[i,k] = A[i,i] * B[k,k]", (0, 1)),
        ("Z[i,j] = where(A[i,j] > 0, x[j], 0)", (0, 1)),
    ],
)
def test_which_results_are_sparse(text, keys):
    formats = desugared(text).formats
    assert (formats["Z"].keys if "Z" in formats else None) == keys


@pytest.mark.parametrize(
    ("text", "is_demanded"),
    [
        ("Z[i,j] = A[i,j] * sum(U[i,k] * U[j,k])", True),
        ("Z[i,j] = A[i,j] / sum(U[i,k] * U[j,k])", True),
        ("Z[i,j] = where(A[i,j] > 0, sum(U[i,k] * U[j,k]), 0)", True),
        ("Z[j] = sum(A[i,j] * exp(sum(U[i,k] * U[j,k])))", True),
        ("Z[i,j] = A[i,j] + sum(U[i,k] * U[j,k])", False),
        ("Z[i,j] = A[i,j] * x[i] * (1 + sum(U[i,k] * U[j,k]))", True),
        ("Y[i,j] = sum(U[i,k] * U[j,k]); Z[i,j] = A[i,j] * Y[i,j]; t = sum(Y[i,j])", False),
        ("Y[i,j] = sum(U[i,k] * U[j,k]); Z[i,j] = A[i,j] * Y[i,j]; t = sum(B[i,j] * Y[i,j])", True),
        ("Y[i,j] = sum(U[i,k] * U[j,k]); Z[i,j] = A[i,j] * Y[i,j]; t = sum(A[j,i] * Y[i,j])", True),
        ("Z[i,j] = B[i,j] + A[i,j] * log(1 + sum(U[i,k] * U[j,k]))", True),
    ],
)
def test_what_is_computed_only_where_it_is_needed(text, is_demanded):
    graph = desugared(text).graph
    sizes = [vertex.elements for vertex in graph.computed if len(vertex.bound) == 2]
    inside = [vertex for vertex in graph.computed if vertex.name.startswith(("Z_", "Y"))]
    assert any(vertex.elements == 36 for vertex in inside) != is_demanded, sizes


@pytest.mark.parametrize(
    ("text", "copied"),
    [
        ("Z[i,k] = A[i,k] * x[i] + A[i,i]", ["A_dense"]),
        ("Z[i,k] = sum(A[i,j] * (1 + B[k,j]))", ["B_dense"]),
        ("Z[i,j] = A[i,j] * B[j,i] + A[i,i] * B[j,j]", []),
        ("Z[i,j] = A[i,j] + B[j,i]", []),
        ("Z[i,k] = sum(A[i,j] * B[j,k])", []),
        ("t = sum(T[i,j,k] + A[i,j])", ["A_dense"]),
    ],
)
def test_unlike_keys_make_the_smaller_tensors_dense(text, copied):
    graph = desugared(text).graph
    assert sorted(name for name in graph.by_name if name.endswith("_dense")) == copied


def test_two_dense_tensors_that_wait_for_each_other():
    """The keys of each demand follow from the other tensor: one of them is computed whole."""
    text = """
    P[i,j] = sum(U[i,k] * U[j,k])
    Q[i,j] = sum(U[k,i] * U[k,j])
    C[i,k] = sum(A[i,j] * (A[j,k] * P[j,k]))
    Z[i,j] = C[i,j] * Q[i,j] + A[i,j] * P[i,j]
    """
    assert "Z" in desugared(text).formats


def test_gradients_are_at_the_keys_of_their_tensor():
    text = "loss = sum[i](sum[j](A[i,j] * x[j])**2); dA[i,j] = grad(loss, A[i,j])"
    found = desugared(text, gradients={"dA": "A"})
    assert found.patterns["dA"] is found.patterns["A"]
    assert "dA" not in desugared(text, {"dA": "dense"}, {"dA": "A"}).formats
    assert implicit_value("dA", found.formats["dA"]) == 0


def test_equal_arrays_are_one_input():
    found = desugared("y[i] = sum(A[i,j] * x[j]); z[i] = sum(A[i,j] * x[i]); w[j] = sum(A[i,j])")
    assert len(found.arrays) == 2  # the keys of A


def test_constants_are_equal_as_numbers():
    assert number_of(Const(2)) == 2 and number_of(typed(0.0, "float32")) == 0
    assert number_of(None) is None
