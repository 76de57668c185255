"""One record for one kind of thing: operations and aggregations registered at run time work
everywhere.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import replace

import cupy_on_cpu
import numpy as np
import pytest
from cuda_cases import compute as compute_on_gpu
from distributed import run_on_threads
from graph_helpers import results

import einmpi
from einmpi.errors import InputError
from einmpi.graph.aggregations import (
    AGGREGATIONS,
    Aggregation,
    register_aggregation,
    unregister_aggregation,
)
from einmpi.graph.dtypes import DTYPES, as_ufunc, numpy_dtypes
from einmpi.graph.operations import (
    OPERATIONS,
    Operation,
    register_operation,
    unregister_operation,
)
from einmpi.graph.scalar import Call, Const
from einmpi.kernels.cpu.compiled import KERNELS
from einmpi.kernels.cpu.dispatch import WORTH_COMPILING
from einmpi.language.macros import callables, is_reserved


def softsign(x):
    return x / (1 + np.abs(x))


SOFTSIGN = Operation(
    name="softsign",
    arity=1,
    documentation="x / (1 + |x|)",
    function=softsign,
    dtypes=as_ufunc(np.sqrt),
    takes_complex=False,
    cpu={"f": "{0} / ({t}(1) + abs({0}))"},
    cuda="softsign_({0})",
    cuda_source="template <class T> FN T softsign_(T x) { return x / ((T)1 + abs_(x)); }\n",
)
LOGADD = Operation(
    name="logadd",
    arity=2,
    documentation="log(exp(x) + exp(y))",
    function=np.logaddexp,
    dtypes=as_ufunc(np.logaddexp),
    takes_complex=False,
    cpu={
        "f": (
            "{n}m = fmax({0}, {1}); {n}d = abs({0} - {1}); "
            "pick({0} == {1}, {n}m + {t}(math.log(2.0)), {n}m + math.log1p(exp(-{n}d)))"
        )
    },
    cuda="logadd_({0}, {1})",
    cuda_source=(
        "template <class T> FN T logadd_(T x, T y) {\n"
        "  if (x == y) return x + log_((T)2);\n"
        "  return maximum_(x, y) + log1p_(exp_(-abs_(x - y)));\n"
        "}\n"
    ),
)
LOGTOTAL = Aggregation(
    name="logtotal",
    symbol="logtotal",
    documentation="log(exp(x) + exp(y))",
    operation="logadd",
    combine=np.logaddexp,
    neutral=lambda dtype: -np.inf,
    empty=-np.inf,
    result_dtype=lambda dtype: np.dtype(np.float64) if dtype.kind in "bi" else dtype,
    result_text="float64 for bool and integers",
    takes_complex=False,
    distributes_over=frozenset({"+"}),
    is_rounded=True,
)


@contextmanager
def registered():
    register_operation(SOFTSIGN)
    register_operation(LOGADD)
    register_aggregation(LOGTOTAL)
    try:
        yield
    finally:
        unregister_aggregation("logtotal")
        unregister_operation("logadd")
        unregister_operation("softsign")


@pytest.fixture
def records():
    with registered():
        yield


@pytest.fixture
def cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", cupy_on_cpu.module())
    return sys.modules["cupy"]


TEXT = "Y[i,j] = softsign(X[i,j]); Z[i] = logtotal(Y[i,j] * W[j])"


def arrays(rows, columns, dtype="float64"):
    rng = np.random.default_rng(7)
    shapes = {"X": (rows, columns), "W": (columns,)}
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def expected(given):
    X = given["X"].astype("float64")
    return np.log(np.exp(softsign(X) * given["W"].astype("float64")).sum(axis=1))


def test_in_a_program_and_the_reference(records):
    given = arrays(5, 6)
    found = results(TEXT, given)
    np.testing.assert_allclose(found["Z"], expected(given), rtol=1e-12)
    job = einmpi.program(TEXT, **given)
    assert "logtotal[j](softsign(X[i,j]) × W[j])" in str(job.graph)
    assert (
        einmpi.program("Z[i] = X[i] + softsign(2)", X=(3,)).graph["Z"].einsum.function.args[1]
        == (einmpi.program("Z[i] = X[i] + 2/3", X=(3,)).graph["Z"].einsum.function.args[1])
    )


def test_dtypes_and_messages(records):
    job = einmpi.program("Z[i] = softsign(X[i])", X=np.zeros(3, "float32"))
    assert job.graph["Z"].dtype == "float32"
    assert is_reserved("softsign") and is_reserved("logtotal")
    assert {"softsign", "logtotal"} <= set(callables())
    with pytest.raises(InputError, match="softsign does not take complex numbers"):
        einmpi.program("Z[i] = softsign(X[i])", X=np.zeros(3, "complex64"))
    with pytest.raises(InputError, match=r"did you mean softsign\?"):
        einmpi.program("Z[i] = softsin(X[i])", X=(3,))
    with pytest.raises(InputError, match=r"expected softsign\(x\)"):
        einmpi.program("Z[i] = softsign(X[i], 2)", X=(3,))
    with pytest.raises(InputError, match="softsign is a word of the language"):
        einmpi.program("softsign[i] = X[i]", X=(3,))


def test_a_distributive_aggregation_is_split(records):
    graph = einmpi.program("Z[i] = logtotal(A[i,j] + B[j,k])", A=(3, 4), B=(4, 5)).graph
    assert len(graph.computed) == 2


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_in_compiled_kernels(records, dtype):
    given = arrays(700, 700, dtype)
    assert given["X"].size >= WORTH_COMPILING
    found = einmpi.run(einmpi.program(TEXT, **given), given)["Z"].gather()
    # Kernels that serve any nest of a kind are known by another key.
    compiled = [key for key in KERNELS if getattr(key, "aggregation", None) == "logtotal"]
    assert any(nest.out.dtype == dtype for nest in compiled), "the kernel was not compiled"
    assert found.dtype == dtype
    np.testing.assert_allclose(found, expected(given), rtol=1e-12 if dtype == "float64" else 1e-5)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_on_several_ranks(records, ranks):
    given = arrays(3, 40)
    job = einmpi.program(TEXT, **given)
    done = run_on_threads(job, ranks, given)
    np.testing.assert_allclose(done.outputs["Z"], expected(given), rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_in_cuda_text(records, cupy, dtype):
    given = arrays(9, 70, dtype)
    vertex = einmpi.program(TEXT, **given).graph["Z"]
    operands = [given[name] for name in vertex.inputs]
    found = compute_on_gpu(cupy, vertex.einsum, vertex.dtype, operands)
    np.testing.assert_allclose(found, expected(given), rtol=1e-12 if dtype == "float64" else 1e-5)


def test_nothing_is_left_behind():
    before = (dict(OPERATIONS), dict(AGGREGATIONS))
    with registered():
        assert "softsign" in OPERATIONS
    assert before == (OPERATIONS, AGGREGATIONS)
    assert not is_reserved("softsign")
    with pytest.raises(InputError, match="unknown function 'softsign'"):
        einmpi.program("Z[i] = softsign(X[i])", X=(3,))


def test_names_are_taken_once(records):
    with pytest.raises(ValueError, match="there is an operation softsign already"):
        register_operation(SOFTSIGN)
    with pytest.raises(ValueError, match="there is an aggregation logtotal already"):
        register_aggregation(LOGTOTAL)


@pytest.mark.parametrize("name", list(DTYPES))
def test_dtypes_agree_with_numpy(name):
    record = DTYPES[name]
    dtype = np.dtype(name)
    assert dtype.itemsize == record.itemsize
    if name in numpy_dtypes():
        assert dtype.kind == record.kind
        assert np.zeros(1, dtype).real.dtype == record.real
    assert np.dtype(record.accumulator).itemsize >= dtype.itemsize
    assert {record.accumulator, record.real, record.file_dtype} <= set(DTYPES)
    assert OPERATIONS[name].is_cast


@pytest.mark.parametrize("is_reproducible", [False, True])
def test_maxima_are_found_again_by_values_that_every_kernel_rounds_alike(is_reproducible):
    """What may be rounded in another way by another kernel is stored, and compared with itself."""

    def derivative(call):
        size = Call("abs", call.args)
        slope = Call("/", (Const(1.0), Call("**", (Call("+", (Const(1.0), size)), Const(2)))))
        return (Call("*", (call.adjoint, slope)),)

    record = replace(SOFTSIGN, derivative=derivative, is_reproducible=is_reproducible)
    register_operation(record)
    try:
        text = "loss = max(softsign(x[i]) * w[i]); dx[i] = grad(loss, x[i])"
        x = np.array([0.5, 3.0, -1.0])
        w = np.array([1.0, 2.0, 1.0])
        job = einmpi.program(text, outputs=["dx"], x=x, w=w)
        stored = [vertex for vertex in job.graph.computed if "softsign" in str(vertex)]
        assert (len(stored) > 1) == is_reproducible  # otherwise it is computed at one place only
        found = run_on_threads(job, 1, {"x": x, "w": w}).outputs["dx"]
        np.testing.assert_allclose(found, [0, 2 / 16, 0])
    finally:
        unregister_operation("softsign")
