"""The CuPy backend on a real GPU; skipped where there is none."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from distributed import assert_close
from paths import ROOT
from run_cases import batches_job, cases, updated_by_numpy, updates_job
from runtime.test_spill import between, least_memory, with_files

import einmpi
from einmpi.comm.base import ALONE
from einmpi.comm.threads import run_threads
from einmpi.errors import EinmpiError
from einmpi.kernels.cuda import driver
from einmpi.planner import memory
from einmpi.planner.moving import overlap
from einmpi.report.describe import TOLERANCE, relative_error
from einmpi.runtime.gpu import backend as binding

try:
    binding.count_gpus()
    NO_GPU = ""
except EinmpiError as error:
    NO_GPU = str(error)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)]
CASES = cases()


def on_gpu(job):
    return replace(job, backend="cupy")


@pytest.mark.parametrize("name", CASES)
def test_every_case(name):
    job, arrays = CASES[name]
    found = einmpi.run(on_gpu(job), arrays, ALONE)
    assert_close(
        {key: array.gather() for key, array in found.items()}, einmpi.reference(job, arrays)
    )


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "int32"])
def test_again_gives_the_same_bits(dtype):
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-4, 5, (300, 300)).astype(dtype) for _ in "ab")
    job = on_gpu(einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k]); m = sum(A[i,j])", A=a, B=b))
    step = einmpi.compile(job, ALONE)
    first, second = ({k: v.gather() for k, v in step({"A": a, "B": b}).items()} for _ in range(2))
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
    wide = np.complex128 if dtype == "complex64" else np.float64
    np.testing.assert_array_equal(first["Z"], (a.astype(wide) @ b.astype(wide)).astype(dtype))


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
@pytest.mark.parametrize("text", ["-C[i]", "C[i] * -1", "0 - C[i]", "C[i] - 1", "abs(C[i])"])
@pytest.mark.parametrize("factor", ["int32", "int64", "float64"])
def test_small_integers_wrap_before_they_are_multiplied(dtype, text, factor):
    """-(-32768) of int16 is -32768 again; compilers of GPUs may forget that."""
    least = np.iinfo(dtype).min
    arrays = {"C": np.array([least, 5, 7], dtype), "T": np.array([3, 4, -300], factor)}
    job = einmpi.program(f"Z[i] = T[i] * ({text}); total = sum(T[i] * ({text}))", **arrays)
    found = einmpi.run(on_gpu(job), arrays, ALONE)
    for name, wanted in einmpi.reference(job, arrays).items():
        np.testing.assert_array_equal(found[name].gather(), wanted)


def test_bfloat16(tmp_path):
    pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(3)
    job = on_gpu(
        einmpi.program(
            """
        Z[i,k] = sum(A[i,j] * B[j,k]) * 0.5
        m[i] = max(A[i,j]); s[i,j] = softmax[j](A[i,j] * float32(3))
        t[i] = bfloat16(sum(s[i,j] * 1.5))
        """,
            A=(70, 50),
            B=(50, 90),
            dtype="bfloat16",
        )
    )
    arrays = {name: rng.standard_normal(job.graph[name].bound).astype("bfloat16") for name in "AB"}
    found = einmpi.run(job, arrays, ALONE)
    assert {name: array.dtype.name for name, array in found.items()} == dict.fromkeys(
        "Zmt", "bfloat16"
    )
    for name, expected in einmpi.reference(job, arrays).items():
        assert (
            relative_error(expected.astype(float), found[name].gather().astype(float))
            < TOLERANCE["bfloat16"]
        )
    found["Z"].to_hdf5(tmp_path / "o.h5", "/Z")


@pytest.mark.parametrize("name", ["power", "solve"])
def test_loops(name):
    job = einmpi.load(ROOT / "jobs" / f"{name}.toml", n=60)
    found = einmpi.loop(on_gpu(job), comm=ALONE)
    assert found.is_done
    # The loops end when a step changes the result by about 1e-8 or less.
    np.testing.assert_allclose(
        found.outputs["x"].gather(), einmpi.reference(job)["x"], rtol=0, atol=1e-6
    )


def test_batches(tmp_path):
    job = batches_job(tmp_path)
    found = einmpi.loop(on_gpu(job), comm=ALONE)
    expected = einmpi.reference(job)["w"]
    np.testing.assert_allclose(found.outputs["w"].gather(), expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64", "int8", "bool"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_prepared_calls_copy_small_arrays_of_the_host(dtype, order, ranks):
    def on_rank(comm):
        job = einmpi.program("Y[i,j] = X[i,j]", X=given.shape, dtype=dtype)
        step = einmpi.compile(on_gpu(job), comm)
        found = []
        for turn in range(8):
            array = np.asarray(np.roll(given, turn, 0), order=order)
            found.append(step({"X": array})["Y"])
            array[...] = 0  # the call has read it
        return [array.gather() for array in found]

    given = np.random.default_rng(1).integers(0, 2, (9, 7)).astype(np.dtype(dtype))
    for found in run_threads(ranks, on_rank):
        for turn, array in enumerate(found):
            np.testing.assert_array_equal(array, np.roll(given, turn, 0))


@pytest.mark.parametrize("ranks, nodes", [(2, 2), (5, 3)])
def test_kernels_while_messages_travel(ranks, nodes, monkeypatch):
    monkeypatch.setattr(overlap, "PART_UNIT_BYTES", 2**10)
    monkeypatch.setattr(overlap, "LEAST_PART_OPERATIONS", 1)
    job = replace(einmpi.load(ROOT / "jobs" / "chain.toml", s=400), backend="cupy")

    def on_rank(comm):
        step = einmpi.compile(job, comm)
        for _ in range(5):
            found = step()["Z"].gather()
        ((_, schedule),) = step.ready.values()
        return found, schedule.overlaps

    expected = einmpi.reference(job)["Z"]
    for found, overlaps in run_threads(ranks, on_rank, nodes=nodes):
        assert overlaps
        # Sums of 400 to 4000 float32 products in another order.
        np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_updates_in_place(monkeypatch):
    monkeypatch.setattr(memory, "PRODUCT_BLOCK_BYTES", 500)
    monkeypatch.setattr(memory, "LEAST_BLOCK_ROWS", 1)
    job, inputs, carry = updates_job()
    result = einmpi.loop(on_gpu(job), inputs, ALONE, carry=carry, steps=9, record=["loss"])
    for name, expected in updated_by_numpy(inputs, 9).items():
        np.testing.assert_allclose(
            result.outputs[name].gather(), expected, rtol=1e-10, err_msg=name
        )


def test_results_stay_on_the_gpu():
    cupy = driver.cupy()
    job = on_gpu(einmpi.program("Y[i] = X[i] / 2 + W[i]", X=(5,), W=(5,)))
    step, numbers = einmpi.compile(job, ALONE), np.arange(5.0)
    out = step({"X": cupy.asarray(8 * numbers), "W": numbers})["Y"]
    assert isinstance(out.local, cupy.ndarray)
    np.testing.assert_array_equal(step({"X": out, "W": numbers})["Y"].gather(), 3.5 * numbers)


def test_many_pieces_through_pinned_memory(tmp_path):
    """Files of several pieces, read as they lie, and turned around."""
    h5py = pytest.importorskip("h5py")
    numbers = np.random.default_rng(1).standard_normal((3000, 2500))
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["X"] = numbers
    np.save(tmp_path / "turned.npy", np.asfortranarray(numbers))
    (tmp_path / "job.toml").write_text("""
program = "Z[i,j] = X[i,j] - 2 * T[i,j]"
[inputs]
X = "in.h5:/X"
T = "turned.npy"
[run]
backend = "cupy"
""")
    out = einmpi.run(einmpi.load(tmp_path / "job.toml"), comm=ALONE)["Z"]
    out.to_hdf5(tmp_path / "out.h5", "/Z")
    with h5py.File(tmp_path / "out.h5") as file:
        np.testing.assert_array_equal(file["Z"][...], -numbers)


def test_copies_between_tiers():
    from einmpi.runtime.gpu.copies import DeviceCopies

    cupy, copies = driver.cupy(), DeviceCopies()
    values = np.arange(300 * 500 * 7.0).reshape(300, 500, 7)
    slow = copies.memory.array(values.nbytes).view(np.float64).reshape(values.shape)
    slow[...] = values
    for box in (
        ...,
        slice(3, 200),
        (slice(None), slice(10, 77)),
        (slice(5, 50), slice(10, 77), slice(1, 4)),
    ):
        fast = cupy.empty(values[box].shape)
        copies.begin(slow[box], fast).join()
        fast *= 2
        copies.begin(fast, slow[box]).wait()
        np.testing.assert_array_equal(slow[box], 2 * values[box])
        slow[box] = values[box]


@pytest.mark.parametrize("name", ["chain, odd", "four dimensions", "gather", "diagonal"])
def test_with_little_memory(name, tmp_path):
    job, arrays = CASES[name]
    expected, job = (
        einmpi.reference(job, arrays),
        on_gpu(with_files(job, arrays, tmp_path) if arrays else job),
    )
    memory = between(least_memory(job, 1), einmpi.plan(job, 1).peak, 0.5)
    found = einmpi.run(job, comm=ALONE, memory=memory)
    assert_close({key: array.gather() for key, array in found.items()}, expected)


def test_a_large_chain_with_little_memory():
    """Copies beside kernels, of tensors that take a while to copy."""
    job = on_gpu(einmpi.load(ROOT / "jobs" / "chain.toml", s=3000, dtype="float32"))
    whole = einmpi.run(job, comm=ALONE)["Z"].gather()
    for part in (2, 3, 5):
        found = einmpi.run(job, comm=ALONE, memory=einmpi.plan(job, 1).peak // part)["Z"].gather()
        np.testing.assert_allclose(found, whole, rtol=0, atol=1e-4 * abs(whole).max())


def test_nccl_with_itself():
    """One GPU has one member: that takes the same calls."""
    from einmpi.runtime.gpu.comm import NcclComm
    from einmpi.runtime.gpu.copies import DeviceCopies

    cupy = driver.cupy()
    if not driver.nccl_version():
        pytest.skip("CuPy finds no NCCL library")
    comm = NcclComm(ALONE, DeviceCopies())
    send, receive = cupy.arange(10**6), cupy.zeros(10**6, np.int64)
    comm.sendrecv(0, send, 0, receive)
    assert bool((receive == send).all())
    values = np.zeros(1000)
    comm.sendrecv(0, np.arange(1000.0), 0, values)
    np.testing.assert_array_equal(values, np.arange(1000.0))


MPIRUN = shutil.which("mpirun")


@pytest.mark.skipif(MPIRUN is None, reason="there is no mpirun")
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_a_gpu(ranks):
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "lib")))
    settings = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PYTHONPATH": path,
    }
    done = subprocess.run(
        [MPIRUN, "-n", str(ranks), sys.executable, "tests/lib/run_cases.py", "cupy"],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == f"{len(CASES)} cases\n"
