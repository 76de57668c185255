"""The GPU backend without a GPU: the stand-in for CuPy delays copies as long as possible."""

import os
import signal
import sys
from dataclasses import replace

import fake_cupy
import h5py
import numpy as np
import pytest
from distributed import assert_close, run_on_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi_helpers import finished, run_all
from run_cases import JOBS, batches_job, cases, updated_by_numpy, updates_job
from runtime.test_spill import between, least_memory, with_files

import einmpi
from einmpi.cli.main import main
from einmpi.comm.base import ALONE, Comm
from einmpi.comm.threads import ThreadComm, run_threads
from einmpi.compiled import gpu_inputs
from einmpi.errors import InputError
from einmpi.kernels.cuda import driver
from einmpi.planner import memory
from einmpi.process.environment import GRAPHS_VARIABLE, TRANSPORT_VARIABLE
from einmpi.runtime.gpu import backend as binding
from einmpi.runtime.gpu import comm as gpu_comm
from einmpi.runtime.gpu import copies as gpu_copies
from einmpi.runtime.gpu.backend import CupyBackend, gpu_context

CASES = cases()


@pytest.fixture
def small_pieces(monkeypatch):
    """Make pieces so small that even small tensors consist of many."""
    monkeypatch.setattr(gpu_copies, "PINNED_BUFFER_BYTES", 480)
    monkeypatch.setattr(gpu_inputs, "PINNED_BUFFER_BYTES", 480)
    monkeypatch.setattr(gpu_comm, "STAGED_PIECE_BYTES", 64)
    monkeypatch.setattr(gpu_comm, "MESSAGE_BUFFER_BYTES", 400)


def on_gpu(job):
    return replace(job, backend="cupy")


# ---- jobs ---------------------------------------------------------------------------------------


@pytest.mark.sampled(
    6, always=["chain, odd", "kalman, odd", "half", "complex", "integers", "scattered", "nothing"]
)
@pytest.mark.parametrize("name", CASES)
def test_every_case_on_threads(name, monkeypatch, small_pieces):
    fake_cupy.install(monkeypatch)
    job, arrays = CASES[name]
    for ranks in (1, 4) if "odd" in name else (4,):
        assert_close(
            run_on_threads(on_gpu(job), ranks, arrays).outputs, einmpi.reference(job, arrays)
        )


@pytest.mark.parametrize("transport", binding.TRANSPORTS)
def test_every_transport(transport, monkeypatch, small_pieces):
    fake_cupy.install(monkeypatch, gpus=6, nccl=True)
    monkeypatch.setenv(TRANSPORT_VARIABLE, transport)
    for name in ("chain, odd", "four dimensions", "semiring"):
        job, arrays = CASES[name]
        expected = einmpi.reference(job, arrays)
        for found in run_threads(
            6, lambda comm, job=job, arrays=arrays: outputs(job, arrays, comm)
        ):
            assert_close(found, expected)


def outputs(job, arrays, comm):
    found = einmpi.run(on_gpu(job), arrays, comm)
    return {name: array.gather() for name, array in found.items()}


def test_a_loop(monkeypatch, small_pieces):
    """Carried tensors stay on the GPU; what never changes is computed once."""
    fake_cupy.install(monkeypatch)
    job = einmpi.load(JOBS / "power.toml", n=24)
    expected = einmpi.reference(job)["x"]

    def on_rank(comm):
        result = einmpi.loop(on_gpu(job), comm=comm)
        assert result.is_done and result.history["turned"].shape == (result.steps,)
        assert isinstance(result.outputs["x"].local, driver.cupy().ndarray)
        return result.outputs["x"].gather()

    for ranks in (1, 3):
        for found in run_threads(ranks, on_rank):
            # The loop ends when a step changes the vector by 1e-10.
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("ranks", [1, 3])
def test_given_arrays_are_copied_to_the_gpu_once_in_a_loop(ranks, monkeypatch):
    fake_cupy.install(monkeypatch)
    shapes = []
    upload = gpu_copies.DeviceCopies.upload

    def counting(self, values, array):
        shapes.append(values.shape)
        upload(self, values, array)

    monkeypatch.setattr(gpu_copies.DeviceCopies, "upload", counting)
    rng = np.random.default_rng(5)
    inputs = {"A": rng.normal(size=(12, 12)) / 12, "x": rng.normal(size=12)}
    job = einmpi.program("x_next[i] = sum(A[i,j] * x[j]) + step", step=(), **inputs)

    def on_rank(comm):
        found = []
        for steps in (5, 3):  # a second loop gets other values in the same array
            result = einmpi.loop(on_gpu(job), inputs, comm, carry={"x": "x_next"}, steps=steps)
            found.append(result.outputs["x"].gather())
            comm.barrier()
            if comm.rank == 0:
                inputs["A"] *= 2
            comm.barrier()
        return found

    matrix = inputs["A"].copy()
    expected = []
    for steps in (5, 3):
        x = inputs["x"]
        for step in range(steps):
            x = matrix @ x + step
        expected.append(x)
        matrix *= 2
    for found in run_threads(ranks, on_rank):
        np.testing.assert_allclose(found, expected, rtol=1e-10)
    matrices = [shape for shape in shapes if len(shape) == 2]
    assert len(matrices) == 2 * ranks


def test_batches(tmp_path, monkeypatch, small_pieces):
    """A batch is read into host memory, and copied to the GPU like any input."""
    fake_cupy.install(monkeypatch)
    job = batches_job(tmp_path)
    expected = einmpi.reference(job)["w"]

    def on_rank(comm):
        result = einmpi.loop(on_gpu(job), comm=comm)
        assert isinstance(result.outputs["w"].local, driver.cupy().ndarray)
        return result.outputs["w"].gather()

    for ranks in (1, 3):
        for found in run_threads(ranks, on_rank):
            np.testing.assert_allclose(found, expected, rtol=1e-12)
    plan = einmpi.plan(on_gpu(job), 2)
    assert plan.loop.batches.bytes_ahead > 0 and plan.ahead == 0


@pytest.mark.parametrize("ranks", [1, 3])
def test_updates_in_place(ranks, monkeypatch, small_pieces):
    fake_cupy.install(monkeypatch)
    monkeypatch.setattr(memory, "PRODUCT_BLOCK_BYTES", 500)
    monkeypatch.setattr(memory, "LEAST_BLOCK_ROWS", 1)
    job, inputs, carry = updates_job()

    def on_rank(comm):
        result = einmpi.loop(on_gpu(job), inputs, comm, carry=carry, steps=9, record=["loss"])
        return {name: result.outputs[name].gather() for name in carry}

    for found in run_threads(ranks, on_rank):
        for name, expected in updated_by_numpy(inputs, 9).items():
            np.testing.assert_allclose(found[name], expected, rtol=1e-10, err_msg=name)


@pytest.mark.parametrize("ranks", [1, 3])
def test_updates_of_some_rows(ranks, monkeypatch, small_pieces):
    """The rows that a scattered sum has values for are taken out, changed, and put back."""
    fake_cupy.install(monkeypatch)
    monkeypatch.setattr(memory, "SPARSE_BLOCK_BYTES", 200)  # several blocks
    rng = np.random.default_rng(4)
    inputs = {"W": rng.normal(size=(60, 6)), "at": rng.integers(0, 60, 9), "v": rng.normal(size=9)}
    text = """
loss = sum(v[b] * W[at[b],j]**2)
G[at[b]:60, j] = sum(2 * v[b] * W[at[b],j])
W_next[i,j] = W[i,j] - 0.1 * G[i,j]
"""
    job = einmpi.program(text, **inputs)
    expected = inputs["W"].copy()
    for _ in range(3):
        G = np.zeros_like(expected)
        np.add.at(G, inputs["at"], 2 * inputs["v"][:, None] * expected[inputs["at"]])
        expected -= 0.1 * G

    def on_rank(comm):
        result = einmpi.loop(
            on_gpu(job), inputs, comm, carry={"W": "W_next"}, steps=3, record=["loss"]
        )
        return result.outputs["W"].gather()

    for found in run_threads(ranks, on_rank):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_step_takes_what_it_is_given(monkeypatch):
    fake_cupy.install(monkeypatch)
    job = on_gpu(einmpi.program("Y[i] = X[i] / 2", X=(5,)))
    step = einmpi.compile(job, ALONE, carry={"X": "Y"}, donate=True)
    given_array = driver.cupy().asarray(8 * np.ones(5))
    first = step(X=given_array)["Y"]
    address = first.local.data.ptr
    second = step(X=first)["Y"]
    assert second.local.data.ptr == address
    np.testing.assert_array_equal(second.gather(), 2 * np.ones(5))
    np.testing.assert_array_equal(driver.cupy().asnumpy(given_array), 8 * np.ones(5))


def test_results_stay_on_the_gpu(monkeypatch):
    fake_cupy.install(monkeypatch)
    job = on_gpu(einmpi.program("Y[i] = X[i] / 2 + W[i]", X=(5,), W=(5,)))
    step = einmpi.compile(job, ALONE)
    cupy, numbers = driver.cupy(), np.arange(5.0)
    out = step({"X": cupy.asarray(8 * numbers), "W": numbers})["Y"]
    assert isinstance(out.local, cupy.ndarray) and out.dtype == np.float64
    again = step({"X": out, "W": einmpi.DistArray.from_global(numbers)})["Y"]
    np.testing.assert_array_equal(again.gather(), 3.5 * numbers)
    assert "3.5" in repr(again)


def test_memory_is_not_reserved_for_what_is_on_the_gpu(monkeypatch):
    """A weight that was given there takes no memory twice; what a run computes is reserved."""
    fake_cupy.install(monkeypatch)
    cupy = driver.cupy()
    empty = cupy.empty
    reserved = []

    def counting_empty(shape, dtype=np.float64):
        if dtype is np.uint8:
            reserved.append(shape)
        return empty(shape, dtype)

    monkeypatch.setattr(cupy, "empty", counting_empty)
    job = on_gpu(einmpi.program("y[i] = sum(W[i,j] * x[j])", W=(64, 32), x=(32,)))
    weight = np.ones((64, 32))
    peaks = {}
    for place in ("host", "gpu"):
        step = einmpi.compile(job, ALONE)
        reserved.clear()
        given_weight = cupy.asarray(weight) if place == "gpu" else weight
        step(W=given_weight, x=np.ones(32))
        peaks[place] = sum(reserved)
        (plan, _) = next(iter(step.ready.values()))
        assert plan.peak >= weight.nbytes
    assert peaks["host"] - peaks["gpu"] == weight.nbytes


def test_numbers_on_the_gpu(monkeypatch):
    """CuPy's ascontiguousarray makes a vector of a number."""
    fake_cupy.install(monkeypatch)
    job = einmpi.program("n = sum(X[i]) + s; Z[i] = X[i] * s", X=(5,), s=())
    number, numbers = driver.cupy().asarray(np.array(2.0)), np.arange(5.0)
    for each in (job, on_gpu(job)):
        step = einmpi.compile(each, ALONE)
        first = step({"X": numbers, "s": number})
        again = step({"X": numbers, "s": first["n"]})
        np.testing.assert_array_equal(first["Z"].gather(), 2 * numbers)
        assert (first["n"].gather(), again["n"].gather()) == (12, 22) and again[
            "n"
        ].gather().shape == ()


class Tensor:
    """An array of another library on the GPU, whose dtypes are not numpy's."""

    dtype = "torch.float64"

    def __init__(self, values):
        self.shape = values.shape
        self.__cuda_array_interface__ = values.__array_interface__
        self.__array_interface__ = values.__array_interface__  # for the stand-in for CuPy
        self.values = values

    __cuda_array_interface__ = None
    __dlpack__ = None


def test_arrays_of_other_libraries_on_the_gpu(monkeypatch):
    fake_cupy.install(monkeypatch)
    numbers = np.arange(5.0)
    job = einmpi.program("Z[i] = X[i] * 2", X=Tensor(numbers))
    for each in (job, on_gpu(job)):
        step = einmpi.compile(each, ALONE)
        for _ in range(3):
            np.testing.assert_array_equal(step(X=Tensor(numbers))["Z"].gather(), 2 * numbers)
    whole = einmpi.DistArray.from_global(Tensor(numbers))
    np.testing.assert_array_equal(whole.gather(), numbers)


def test_a_call_does_little_before_its_first_kernel(monkeypatch):
    """The GPU waits for this work. Count function calls, because times depend on the machine."""
    fake_cupy.install(monkeypatch)
    monkeypatch.setenv(GRAPHS_VARIABLE, "off")
    package, counts, calls = os.path.dirname(einmpi.__file__), [], 0

    def kernel(*arguments):
        counts.append(calls)

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(package)

    monkeypatch.setattr("einmpi.kernels.cuda.dispatch.prepare_einsum", lambda *given: kernel)
    step = einmpi.compile(on_gpu(einmpi.load(JOBS / "chain.toml", s=8)), ALONE)
    arrays = {name: driver.cupy().asarray(np.ones((8, 8))) for name in "ABCDE"}
    step(arrays)
    counts.clear()
    others = {name: array.copy() for name, array in arrays.items()}  # that look alike
    sys.setprofile(count)
    try:
        step(others)
    finally:
        sys.setprofile(None)
    assert len(counts) == 4 and counts[0] < 90 and counts[1] - counts[0] < 20, counts


# ---- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [None, (3, 4)])
def test_files_in_and_out(tmp_path, monkeypatch, small_pieces, chunks):
    fake_cupy.install(monkeypatch)
    numbers = np.random.default_rng(1).standard_normal((13, 11))
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file.create_dataset("X", data=numbers, chunks=chunks)
        file["n"] = 2.5
    np.save(tmp_path / "turned.npy", np.asfortranarray(numbers))
    (tmp_path / "job.toml").write_text("""
program = "Z[i,k] = sum(X[i,j] * T[k,j]) + n"
[inputs]
X = "in.h5:/X"
n = "in.h5:/n"
T = { file = "turned.npy", resident = true }
[run]
backend = "cupy"
""")
    job = einmpi.load(tmp_path / "job.toml")
    for ranks in (1, 3):

        def on_rank(comm):
            compiled = einmpi.compile(job, comm)
            first, second = compiled()["Z"], compiled()["Z"]  # T is on the GPU by now
            first.to_hdf5(tmp_path / "out.h5", "/Z", chunks=chunks)
            return second.gather()

        found = run_threads(ranks, on_rank)
        for array in found:
            np.testing.assert_allclose(array, numbers @ numbers.T + 2.5)
        with h5py.File(tmp_path / "out.h5") as file:
            np.testing.assert_array_equal(file["Z"][...], found[0])
        os.remove(tmp_path / "out.h5")


def test_inputs_read_early_are_copied_while_kernels_run(tmp_path, monkeypatch):
    """The copy of D waits only for work from before its slot was made: for no kernel."""
    fake_cupy.install(monkeypatch)
    started, waits, record, wait = [], [], fake_cupy.Event.record, fake_cupy.Stream.wait_event

    def noted(event, stream):
        event.kernels = len(started)
        record(event, stream)

    def waited(stream, event):
        if not stream.null and event.stream.null:
            waits.append(event.kernels)
        wait(stream, event)

    def counted(*arguments):
        started.append(arguments)
        return fake_cupy.prepare(*arguments)

    monkeypatch.setattr(fake_cupy.Event, "record", noted)
    monkeypatch.setattr(fake_cupy.Stream, "wait_event", waited)
    monkeypatch.setattr("einmpi.kernels.cuda.dispatch.prepare_einsum", counted)
    arrays = {
        name: np.random.default_rng(ord(name)).standard_normal((20, 40 if name == "D" else 20))
        for name in "ABD"
    }
    job = einmpi.program("Y[i,k] = sum(A[i,j] * B[j,k]); Z[i,l] = sum(Y[i,k] * D[k,l])", **arrays)
    found = einmpi.run(on_gpu(with_files(job, arrays, tmp_path)), comm=ALONE)["Z"]
    assert len(started) == 2 and waits and set(waits) == {0}
    np.testing.assert_allclose(found.gather(), arrays["A"] @ arrays["B"] @ arrays["D"])


# ---- messages -----------------------------------------------------------------------------------


class ThroughDevice:
    """A GPU communicator that takes host arrays, so that it can run the common scenarios."""

    prepare_alltoallv = Comm.prepare_alltoallv
    prepare_allgatherv = Comm.prepare_allgatherv

    def __init__(self, comm, mixed):
        self.comm, self.host = comm, mixed and comm.rank % 2

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def moved(self, call, arrays):
        """Copy arrays to the device, call, and copy back; ranks in the slow tier copy nothing."""
        if self.host:
            return call(*arrays)
        cupy = driver.cupy()
        devices = [None if array is None else cupy.asarray(array) for array in arrays]
        done = call(*devices)
        for array, device in zip(arrays, devices, strict=True):
            if array is not None:
                array[...] = cupy.asnumpy(device)
        return done

    def alltoallv(self, group, send, send_counts, receive, receive_counts):
        return self.moved(
            lambda s, r: self.comm.alltoallv(group, s, send_counts, r, receive_counts),
            [send, receive],
        )

    def allgatherv(self, group, buffer, counts):
        return self.moved(lambda b: self.comm.allgatherv(group, b, counts), [buffer])

    def reduce_scatter(self, group, send, counts, receive):
        return self.moved(
            lambda s, r: self.comm.reduce_scatter(group, s, counts, r), [send, receive]
        )

    def sendrecv(self, to, send, source, receive):
        return self.moved(lambda s, r: self.comm.sendrecv(to, s, source, r), [send, receive])


@pytest.mark.sampled(2, always=["mpi-False", "nccl-True"])
@pytest.mark.parametrize(
    "transport, mixed",
    [("host", False), ("host", True), ("mpi", False), ("nccl", False), ("nccl", True)],
)
def test_messages(transport, mixed, monkeypatch, small_pieces):
    fake_cupy.install(monkeypatch, gpus=3, nccl=True)
    monkeypatch.setenv(TRANSPORT_VARIABLE, transport)
    received = run_threads(
        3, lambda comm: run_all(ThroughDevice(gpu_context(comm, "test").comm, mixed))
    )
    assert received == run_threads(3, run_all)


# ---- copies -------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.data())
def test_copies_between_tiers(data):
    """Copies of any boxes, in both directions, happen in the order in which they began."""
    with pytest.MonkeyPatch.context() as patch:
        fake_cupy.install(patch)
        cupy, copies = driver.cupy(), gpu_copies.DeviceCopies()
        shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=4)))
        sides = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        box = (*(slice(*side) for side in sides), ...)
        dtype = data.draw(st.sampled_from(["float16", "float64", "complex128"]))
        values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
        slow, fast = values.copy(), cupy.empty(values[box].shape, dtype)
        copies.begin(slow[box], fast).join()
        np.testing.assert_array_equal(cupy.asnumpy(fast), values[box])
        fast[...] = cupy.asarray(-values[box])
        copies.begin(fast, slow[box]).wait()
        expected = values.copy()
        expected[box] *= -1
        np.testing.assert_array_equal(slow, expected)
        other = cupy.empty(fast.shape, dtype)
        copies.begin(fast, other).join()
        np.testing.assert_array_equal(cupy.asnumpy(other), cupy.asnumpy(fast))


@pytest.mark.parametrize("array_on_host", [True, False])
@pytest.mark.parametrize("packed_on_host", [True, False])
def test_regions_are_packed_within_and_between_tiers(monkeypatch, array_on_host, packed_on_host):
    """An exchange may read a slot that is in one tier, and fill one that is in the other."""
    fake_cupy.install(monkeypatch)
    cupy = driver.cupy()
    backend = CupyBackend(gpu_context(ALONE, "test"))

    def placed(values, on_host):
        return values.copy() if on_host else cupy.asarray(values)

    values = np.arange(35.0).reshape(5, 7)
    region = (((1, 3), (4, 5)), ((2, 6),))
    rows, columns = np.ix_([1, 2, 4], range(2, 6))
    packed = placed(np.zeros(12), packed_on_host)
    backend.pack(placed(values, array_on_host), region, packed)
    np.testing.assert_array_equal(backend.to_host(packed), values[rows, columns].ravel())

    array = placed(np.zeros((5, 7)), array_on_host)
    backend.unpack(packed, array, region)
    expected = np.zeros((5, 7))
    expected[rows, columns] = values[rows, columns]
    np.testing.assert_array_equal(backend.to_host(array), expected)


def test_pinned_memory_is_used_again_only_after_its_copies(monkeypatch):
    fake_cupy.install(monkeypatch)
    cupy, copies = driver.cupy(), gpu_copies.DeviceCopies()
    first = copies.memory.array(80).view(np.float64)
    first[...] = np.arange(10)
    fast, place = cupy.empty(10), first.ctypes.data
    copy = copies.begin(first, fast)
    del first  # the copy still reads it
    second = copies.memory.array(80).view(np.float64)
    second[...] = -1
    assert second.ctypes.data != place
    copy.join()
    np.testing.assert_array_equal(cupy.asnumpy(fast), np.arange(10))
    copies.to_host.synchronize()
    assert copies.memory.array(80).ctypes.data == place
    assert copies.memory.array(81, limit=80) is None


# ---- which GPU, which transport -----------------------------------------------------------------


def test_ranks_take_gpus_in_turn(monkeypatch):
    fake_cupy.install(monkeypatch, gpus=2)
    bound = run_threads(5, lambda comm: binding.bind(comm, "test"))
    assert [gpu.number for gpu in bound] == [0, 1, 0, 1, 0]
    assert [gpu.ranks for gpu in bound] == [3, 2, 3, 2, 3]
    assert {gpu.transport for gpu in bound} == {"host"}
    assert str(bound[0]) == "Paper GPU, shared by 3 ranks"


@pytest.mark.parametrize(
    "wish, own_gpus, cuda_aware, has_nccl, transport",
    [
        ("", True, True, True, "mpi"),
        ("", True, False, True, "nccl"),
        ("", False, False, True, "host"),
        ("", True, False, False, "host"),
        ("", False, True, False, "mpi"),
        ("host", True, True, True, "host"),
        ("nccl", True, True, True, "nccl"),
        ("mpi", True, False, True, "mpi"),
    ],
)
def test_choice_of_a_transport(wish, own_gpus, cuda_aware, has_nccl, transport):
    assert binding.choose_transport(wish, own_gpus, cuda_aware, has_nccl) == transport


def test_one_rank_that_is_not_aware_decides_for_all(monkeypatch):
    fake_cupy.install(monkeypatch, gpus=4)

    def on_rank(comm):
        comm.cuda_aware = comm.rank != 2
        return binding.bind(comm, "test").transport

    assert run_threads(4, on_rank) == ["host"] * 4


def test_the_libraries_here_are_not_aware():
    """The MPI libraries from PyPI are not CUDA-aware.

    A wrong yes would end the process, and so would asking before MPI is initialized.
    """
    code = (
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
        "from einmpi.comm.mpi_library import cuda_aware; before = cuda_aware(); MPI.Init(); "
        "print(before, cuda_aware())"
    )
    done = finished([sys.executable, "-c", code])
    assert (done.returncode, done.stdout, done.stderr) == (0, "False False\n", "")
    assert ThreadComm(0, 1, None).cuda_aware is False


def refused(action):
    with pytest.raises(InputError) as error:
        action()
    return str(error.value)


def test_refusals(monkeypatch):
    job = on_gpu(einmpi.program("Y[i] = X[i]", X=(2**31,)))
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert refused(lambda: einmpi.compile(job, ALONE)) == (
        "program: backend cupy needs CuPy, which is not installed; expected a working installation "
        "of CuPy, or backend numpy; pip install 'einmpi[cuda13]', or 'einmpi[cuda12]' for an older "
        "driver"
    )
    fake_cupy.install(monkeypatch, gpus=0)
    assert refused(lambda: einmpi.compile(job, ALONE)) == (
        "program: backend cupy needs a GPU: CUDA sees none; CUDA_VISIBLE_DEVICES may hide them; "
        "expected an NVIDIA GPU with its driver, or backend numpy"
    )
    fake_cupy.install(monkeypatch)
    assert refused(
        lambda: einmpi.compile(job, ALONE)({"X": fake_cupy.ndarray(np.broadcast_to(0.0, (2**31,)))})
    ) == (
        "program: this needs 32.0 GiB on one GPU; expected at most the 8.0 GiB of the Paper GPU; "
        'use more GPUs, or limit the memory with [plan] memory = "…"'
    )
    monkeypatch.setenv(TRANSPORT_VARIABLE, "nccl")
    monkeypatch.setattr("einmpi.runtime.gpu.backend._contexts", {})
    assert refused(lambda: einmpi.compile(job, ALONE)) == (
        "EINMPI_GPU_MESSAGES: nccl does not work here: CuPy finds no NCCL library; "
        "expected one of mpi, nccl, host"
    )
    monkeypatch.setenv(TRANSPORT_VARIABLE, "ncll")
    assert refused(lambda: einmpi.compile(job, ALONE)) == (
        "EINMPI_GPU_MESSAGES: there is no transport 'ncll'; "
        "expected one of mpi, nccl, host (did you mean nccl?)"
    )


# ---- little memory ------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["chain, odd", "four dimensions", "gather", "diagonal"])
def test_with_little_memory(name, tmp_path, monkeypatch):
    """Slots wait in the slow tier, kernels run in passes, and host arrays come when needed."""
    fake_cupy.install(monkeypatch)
    job, arrays = CASES[name]
    expected, job = (
        einmpi.reference(job, arrays),
        on_gpu(with_files(job, arrays, tmp_path) if arrays else job),
    )
    for ranks, part in ((1, 0.6), (3, 0.4)):
        memory = between(least_memory(job, ranks), einmpi.plan(job, ranks).peak, part)
        for inputs in ({}, arrays) if arrays else ({},):
            done = run_on_threads(job, ranks, inputs, memory=memory)
            assert_close(done.outputs, expected)
            assert done.plan.spilled and max(done.peaks) <= memory


# ---- the command line ---------------------------------------------------------------------------


@pytest.fixture
def signals():
    """Restore the signals: a process that was asked to stop ignores them from then on."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
def test_a_run_that_is_stopped_goes_on(tmp_path, monkeypatch, capfd):
    fake_cupy.install(monkeypatch)
    job = CASES["chain, odd"][0]
    (tmp_path / "job.toml").write_text(
        (JOBS / "chain.toml").read_text() + '[outputs]\nZ = "out.h5:/Z"\n'
    )
    monkeypatch.chdir(tmp_path)
    command = ["job.toml", "--backend", "cupy", "--set", "s=37", "--checkpoint", "saved"]

    def stopping(*arguments):
        os.kill(os.getpid(), signal.SIGUSR1)
        return fake_cupy.prepare(*arguments)

    monkeypatch.setattr("einmpi.kernels.cuda.dispatch.prepare_einsum", stopping)
    assert main(command) == 75
    monkeypatch.setattr("einmpi.kernels.cuda.dispatch.prepare_einsum", fake_cupy.prepare)
    assert main([*command, "--resume", "--trace", "trace.json"]) == 0
    said = capfd.readouterr()
    assert "continues after Z_1" in said.err and "; Paper GPU" in said.out
    with h5py.File(tmp_path / "out.h5") as file:
        np.testing.assert_allclose(file["Z"][...], einmpi.reference(job)["Z"])
