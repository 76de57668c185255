"""Prepared kernels give the bits of unprepared ones, on any arrays that are stored alike."""

import numpy as np
import pytest

import einmpi
from einmpi.comm.base import ALONE
from einmpi.compiled.program import Compiled
from einmpi.kernels.cpu import broadcast, prepared_products
from einmpi.kernels.prepared import bare_call, bound_call, view_maker
from einmpi.planner.plan import Options
from einmpi.runtime.cpu import kernels as cpu_kernels
from einmpi.runtime.cpu.backend import NumpyBackend
from einmpi.schedule.lower import lower

STATEMENTS = [
    "Z[i] = sum(A[i,j] * x[j])",
    "Z[i,k] = sum[j](A[i,j] * B[j,k])",
    "Z[k,i] = sum[j](A[i,j] * B[j,k])",
    "Z[i,k] = -2 * sum[j](A[i,j] * B[j,k])",
    "Z[i,j] = A[i,j] * x[j]",
    "Z[i,j] = y[i] * x[j]",
    "Z = sum(x[j] * x[j])",
    "Z = s * s + 2",
    "Z[j] = sum[i](abs(A[i,j] - y[i]) ** 2)",
    "Z[i] = A[i,i] + x[0]",
    "Z[i] = sum[j](A[i,j] * B[j,j])",
    "Z[i] = y[i] * s - 1",
    "Z[i,j] = A[j,i] + i",
    "Z[i] = x[5-i] - x[i]",
    "Z[i,j] = where(i < j, A[i,j], x[i])",
    "Z[j] = sum[i](A[i,j])",
]
REAL_STATEMENTS = [
    "Z[i] = max[j](A[i,j] - x[j])",
    "Z = sqrt(abs(s)) + 2",
    "Z[j] = sign(s) * x[j] + maximum(x[j], 0.5)",
    "Z[i] = y[i] / sqrt(abs(s))",
    "Z[i] = sum[j](where(A[i,j] < B[i,j], 1, 0))",
]
SHAPES = {"A": (6, 6), "B": (6, 6), "x": (6,), "y": (6,), "s": ()}
REAL_DTYPES = ["float64", "float32", "float16", "int32", "int8"]


def kernel_steps(statement, dtype):
    """Return the kernels of a program on one rank."""
    used = {name: shape for name, shape in SHAPES.items() if name in statement.partition("=")[2]}
    job = einmpi.program(statement, dtype=dtype, **used)
    _, schedule = Compiled(job, ALONE, Options(job.strategy)).planning.make_ready()
    found = []
    for step in schedule.steps:
        found += step.kernels
    return found


def operands_of(step, random):
    found = []
    for slot in step.operands:
        values = 4 * random.standard_normal(slot.shape)
        if np.dtype(slot.dtype).kind == "c":
            values = values + 1j * random.standard_normal(slot.shape)
        found.append(np.asarray(values).astype(slot.dtype))
    return found


def computed(backend, step, operands):
    target = np.full(step.target.shape, 1, step.target.dtype)
    backend.compute_kernel(step, operands, target)
    return target


def check(statement, dtype, monkeypatch):
    random = np.random.default_rng(0)
    prepared = NumpyBackend()
    for step in kernel_steps(statement, dtype):
        computed(prepared, step, operands_of(step, random))
        for _ in range(2):
            operands = operands_of(step, random)
            found = computed(prepared, step, operands)
            with monkeypatch.context() as patch:
                for module in (prepared_products, broadcast, cpu_kernels):
                    patch.setattr(module, "view_maker", lambda array, view: None)
                wanted = computed(NumpyBackend(), step, operands)
            assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("statement", STATEMENTS)
def test_prepared_kernels_give_the_bits_of_unprepared_ones(statement, monkeypatch):
    for dtype in (*REAL_DTYPES, "complex128"):
        check(statement, dtype, monkeypatch)


@pytest.mark.parametrize("statement", REAL_STATEMENTS)
def test_prepared_kernels_of_real_numbers(statement, monkeypatch):
    for dtype in REAL_DTYPES:
        check(statement, dtype, monkeypatch)


@pytest.mark.parametrize("statement", ["Z[i,k] = sum[j](A[i,j] * B[j,k])", "Z[i,j] = A[j,i] + i"])
def test_arrays_that_are_stored_otherwise_are_prepared_again(statement, monkeypatch):
    random = np.random.default_rng(1)
    backend = NumpyBackend()
    (step,) = kernel_steps(statement, "float64")
    operands = operands_of(step, random)
    wanted = computed(backend, step, operands)
    by_columns = [np.asfortranarray(operand) for operand in operands]
    unaligned = []
    for operand in operands:
        raw = np.zeros(operand.nbytes + 1, np.uint8)
        view = raw[1:].view(operand.dtype).reshape(operand.shape)
        view[...] = operand
        unaligned.append(view)
    for stored_otherwise in (by_columns, unaligned, operands):
        found = computed(backend, step, stored_otherwise)
        np.testing.assert_allclose(found, wanted, rtol=1e-14)


def test_a_prepared_kernel_keeps_no_value_of_the_arrays_it_was_prepared_with():
    """Numbers are read when the kernel is called, not when it is prepared."""
    backend = NumpyBackend()
    (step,) = kernel_steps("Z = s * s + 2", "float64")
    number = np.array(3.0)
    assert computed(backend, step, [number] * len(step.operands)) == 11
    number[()] = 5
    assert computed(backend, step, [number] * len(step.operands)) == 27


def test_views_are_made_of_contiguous_arrays_alone():
    array = np.arange(24.0).reshape(4, 6)
    other = -array
    for view in (array.T, array[1:3, ::2], array[::-1], array[2, 3, ...], array.reshape(2, 2, 6)):
        make_view = view_maker(array, view)
        made = make_view(other)
        assert np.shares_memory(made, other)
        np.testing.assert_array_equal(made, -view)
    assert view_maker(array, array.copy()) is None
    assert view_maker(array.T, array) is None
    assert view_maker(array[:, :3], array[1, :3]) is None


def test_views_of_a_dtype_that_is_not_the_usual_object():
    """A dtype in native byte order may be another object than numpy's own."""
    dtype = np.dtype("float64").newbyteorder("=")
    array = np.arange(6, dtype=dtype)
    for view in (array.reshape(2, 3), array[::2], array[2:3].reshape(())):
        np.testing.assert_array_equal(view_maker(array, view)(2 * array), 2 * view)


@pytest.mark.parametrize(
    "program",
    [
        "Z[i,k] = sum[j](A[i,j] * B[j,k])",
        "Z = sum[i,j](A[i,j] * B[i,j])",
        "Z[i] = sum[j]((A[i,j] - B[i,j])**2)",
        "Z = max(abs(A[i,j]))",
        "Z = sum(abs(A[i,j]) ** 2)",
        "Z[i,j] = A[j,i] / B[i,j]",
        "Z[i] = A[i,i] + B[0,i]",
    ],
)
def test_kernels_that_are_bound_to_arrays_have_the_same_bits(program):
    random = np.random.default_rng(5)
    backend = NumpyBackend()
    job = einmpi.program(program, A=(7, 7), B=(7, 7))
    steps = [kernel for step in lower(einmpi.plan(job, 1), 0).steps for kernel in step.kernels]
    for step in steps:
        operands = [random.normal(size=slot.shape) for slot in step.operands]
        wanted = np.empty(step.target.shape, step.target.dtype)
        prepared = backend.prepared_kernel(step, operands, wanted)
        prepared(operands, wanted)
        found = np.empty_like(wanted)
        bound = bound_call(prepared, operands, found)
        for _ in range(2):
            for operand in operands:
                operand[...] = random.normal(size=operand.shape)
            prepared(operands, wanted)
            with np.errstate(all="ignore"):
                bound((), found)
                assert found.tobytes() == wanted.tobytes()
                bare = np.empty_like(wanted)
                bare_call(prepared)(operands, bare)
            assert bare.tobytes() == wanted.tobytes()
