"""Inputs from files on many ranks: the right values wherever they are wanted, each element read
once."""

import json
import threading
import tracemalloc

import h5py
import numpy as np
import pytest
from distributed import run_on_threads
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi_helpers import needs_mpirun, run_mpi

import einmpi
from einmpi.api import options_of
from einmpi.comm.base import ALONE
from einmpi.comm.threads import run_threads
from einmpi.compiled.inputs import Inputs
from einmpi.compiled.program import Compiled
from einmpi.errors import InputError
from einmpi.files.datasets import RawReader
from einmpi.files.hdf5 import datasets as hdf5
from einmpi.graph.dtypes import numpy_dtypes
from einmpi.runtime.cpu.backend import NumpyBackend
from einmpi.runtime.program import Program
from einmpi.schedule import shared_reads
from einmpi.schedule.lower import lower
from einmpi.schedule.memory import peak_bytes
from einmpi.schedule.steps import Begin, Load

RNG = np.random.default_rng(7)
pytestmark = pytest.mark.usefixtures("in_folder")


@pytest.fixture
def small(monkeypatch):
    """Cells and rounds so small that small tensors have many."""
    monkeypatch.setattr(shared_reads, "MIN_CELL_BYTES", 64)
    monkeypatch.setattr(shared_reads, "ROUND_BYTES", 200)
    monkeypatch.setattr(shared_reads, "LONG_RUN_BYTES", 64)


@pytest.fixture
def count(monkeypatch):
    """Elements read from files, by both readers."""
    counted = []
    for reader in (RawReader, hdf5.Hdf5Reader):

        def read(self, there, target, here, done=reader.read):
            done(self, there, target, here)
            counted.append(target[here].size)

        monkeypatch.setattr(reader, "read", read)
    return counted


def sample(shape, dtype):
    dtype = np.dtype(dtype)
    values = RNG.integers(0, 100, shape)
    return (
        (values + 1j * values[..., ::-1]).astype(dtype)
        if dtype.kind == "c"
        else (values % 2 * values).astype(dtype)
    )


def store(array):
    """The same tensor in files of every kind: (file, name)."""
    with h5py.File("x.h5", "w") as file:
        file["whole"] = array
        file["big"] = array.astype(array.dtype.newbyteorder(">"))
        chunks = tuple(min(3 + d, extent) for d, extent in enumerate(array.shape))
        file.create_dataset("chunked", data=array, chunks=chunks)
        file.create_dataset(
            "packed", data=array, chunks=chunks, compression="gzip", shuffle=True, fletcher32=True
        )
    np.save("c.npy", array)
    np.save("f.npy", np.asfortranarray(array))
    np.save("big.npy", array.astype(array.dtype.newbyteorder(">")))
    return [
        ("x.h5", "/whole"),
        ("x.h5", "/big"),
        ("x.h5", "/chunked"),
        ("x.h5", "/packed"),
        ("c.npy", None),
        ("f.npy", None),
        ("big.npy", None),
    ]


@pytest.mark.sampled(3, always=["float32", "complex64", "bool"])
@pytest.mark.parametrize("dtype", numpy_dtypes())
def test_every_dtype_in_every_file(dtype, small, count):
    array = sample((9, 7), dtype)
    for file, name in store(array):
        for parts in (None, (1, 3), (1, 1)):
            count.clear()
            for found in run_threads(
                3, lambda comm, a=(file, name), b=parts: einmpi.open_dataset(*a, comm, b).gather()
            ):
                np.testing.assert_array_equal(found, array)
                assert found.dtype == dtype
            assert sum(count) == array.size, (file, name, parts)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_layout_of_any_rows(small, count, data):
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    array, ranks = sample(shape, "float32"), data.draw(st.sampled_from([1, 2, 3, 4, 6]))
    ends = sorted(data.draw(st.tuples(*[st.integers(0, shape[0])] * 2)))
    rows = data.draw(
        st.sampled_from(
            [None, slice(*ends), slice(None, ends[1]), slice(ends[0] - shape[0] or None, None)]
        )
    )
    wanted = array if rows is None else array[rows]
    parts = None if data.draw(st.booleans()) else (1,) * len(shape)
    with h5py.File("x.h5", "w") as file:
        chunks = tuple(data.draw(st.integers(1, n)) for n in shape) if all(shape) else None
        file.create_dataset("A", data=array, chunks=chunks)
        file.create_dataset("B", data=array)
    np.save("f.npy", np.asfortranarray(array))
    for name in (("x.h5", "/A"), ("x.h5", "/B"), ("f.npy", None)):
        count.clear()
        for found in run_threads(
            ranks, lambda comm, n=name: einmpi.open_dataset(*n, comm, parts, rows).gather()
        ):
            np.testing.assert_array_equal(found, wanted)
        assert sum(count) == wanted.size


JOB = """program = '''
Z[i,k] = sum(A[i,j] * B[j,k]) * n
Y[i,l] = sum(Z[i,k] * C[k,l])
X[i,l] = Y[i,l] + D[l] + T[l,i]
'''
inputs.A = "x.h5:/A"
inputs.B = { file = "b.npy", rows = "1:r + 1" }
inputs.C = { file = "x.h5", dataset = "/C", resident = true }
inputs.D = "d.safetensors:D"
inputs.T = "t.npy"
inputs.n = "x.h5:/n"
sizes.r = 12
"""


def write_job():
    save = pytest.importorskip("safetensors.numpy").save_file
    arrays = {
        "A": sample((10, 12), "float64"),
        "B": sample((14, 9), "float64"),
        "C": sample((9, 8), "float64"),
        "D": sample(8, "float64"),
        "T": sample((8, 10), "float64"),
        "n": np.array(3.0),
    }
    with h5py.File("x.h5", "w") as file:
        file["A"], file["n"] = arrays["A"], arrays["n"]
        file.create_dataset("C", data=arrays["C"], chunks=(4, 3), compression="lzf")
    np.save("b.npy", arrays["B"])
    np.save("t.npy", np.asfortranarray(arrays["T"]))
    save({"D": arrays["D"], "other": np.ones(3)}, "d.safetensors")
    with open("job.toml", "w") as file:
        file.write(JOB)
    a, b, c, d, t, n = arrays.values()
    return (a @ b[1:13] * n) @ c + d + t.T


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 12])
def test_a_job_on_threads(ranks, small, count):
    """Schedules are verified, predicted bytes are moved ones, and memory stays below the plan's."""
    expected = write_job()
    done = run_on_threads(einmpi.load("job.toml"), ranks)
    np.testing.assert_allclose(done.outputs["X"], expected)
    assert sum(count) == 10 * 12 + 12 * 9 + 9 * 8 + 8 + 8 * 10 + 1
    assert done.moved == done.plan.bytes_predicted


def test_repeats_and_residents_are_read_once(small, count):
    write_job()
    job = einmpi.load("job.toml")

    def on_rank(comm):
        compiled = Compiled(job, comm, options_of(job))
        plan, schedule, _ = compiled.prepare({})
        inputs = Inputs(job, {}, compiled.files, keep=True)
        first, second = (compiled.run_schedule(plan, schedule, inputs) for _ in range(2))
        assert second[1].shuffled == 0 and first[1].received == second[1].received
        return first[0]["X"].gather(), second[0]["X"].gather(), first[1].shuffled

    one, two, shuffled = zip(*run_threads(4, on_rank), strict=True)
    np.testing.assert_array_equal(one, two)
    assert sum(count) == 389 and sum(shuffled) > 0
    count.clear()
    compiled = Compiled(job, ALONE, options_of(job))
    compiled(), compiled()
    assert sum(count) == 2 * 389 - 72  # C stays


def test_datasets_that_are_given(small, count):
    array = sample((8, 6), "float32")
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("A", data=array, chunks=(3, 4))
    job = einmpi.program("Z[i] = sum(A[i,j])", A=(8, 6), dtype="float32")
    with h5py.File("x.h5") as file:
        assert hdf5.find_given(file["A"]) == hdf5.find("x.h5", "/A")
        np.testing.assert_allclose(
            run_on_threads(job, 3, {"A": file["A"]}).outputs["Z"], array.sum(1)
        )
        assert sum(count) == 48
    with h5py.File("x.h5", "r+") as file:  # what it holds is not all on disk
        file["A"][0] = 5
        assert hdf5.find_given(file["A"]) is None
        assert einmpi.run(job, {"A": file["A"]})["Z"].gather()[0] == 30
    with h5py.File("none.h5", "w", driver="core", backing_store=False) as file:
        file["A"] = array
        assert hdf5.find_given(file["A"]) is None
        np.testing.assert_allclose(
            run_on_threads(job, 2, {"A": file["A"]}).outputs["Z"], array.sum(1)
        )


def test_a_file_that_is_replaced_during_a_run():
    with h5py.File("x.h5", "w") as file:
        file["A"] = np.ones((4, 4))
    with open("job.toml", "w") as file:
        file.write("program = 'Z[i] = sum(A[i,j])'\ninputs.A = 'x.h5:/A'\n")
    job = einmpi.load("job.toml")
    compiled = einmpi.compile(job)
    compiled()
    with h5py.File("x.h5", "w") as file:
        file["A"] = np.ones((4, 5))
    with pytest.raises(
        InputError,
        match=r"^job.toml:2:8: A in x.h5 is now float64\[4, 5\]; expected float64\[4, 4\], as plan",
    ):
        compiled()
    with pytest.raises(
        InputError,
        match=r"^job.toml:2:8: A in x.h5 is now float64\[4, 5\]; expected float64\[4, 4\], as plan",
    ):
        einmpi.run(job)


def test_buffers_stay_small(monkeypatch):
    """A rank holds its block and four buffers of a round: two for cells, two for messages."""
    monkeypatch.setattr(shared_reads, "ROUND_BYTES", 2**18)
    monkeypatch.setattr(shared_reads, "MAX_CELL_BYTES", 2**16)
    whole = np.arange(2.0**20).reshape(1024, 1024)
    np.save("x.npy", whole)
    tracemalloc.start()
    try:
        blocks = run_threads(4, lambda comm: einmpi.open_dataset("x.npy", None, comm, (1, 4)).local)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(sum(block.sum() for block in blocks), whole.sum())
    # Messages between threads are copied once more, and wait for who takes them.
    assert most < whole.nbytes + 4 * 6 * 2**18


# ---- reading while kernels run ------------------------------------------------------------------

CHAIN = """program = '''
Y[i,j] = sum(A[i,k] * B[k,j])
Z[i,j] = sum(Y[i,k] * C[k,j])
n = sum(Z[i,j])
'''
inputs.A = "a.npy"
inputs.B = "b.npy"
inputs.C = "c.npy"
"""


def chain(memory=None):
    for name in "abc":
        np.save(f"{name}.npy", sample((20, 20), "float64"))
    with open("job.toml", "w") as file:
        file.write(CHAIN + (f"plan.memory = {memory}\n" if memory else ""))
    return einmpi.load("job.toml")


def test_a_load_begins_before_the_kernel_before_it():
    job = chain()
    steps = lower(einmpi.plan(job, 1), 0).steps
    begun = [step.load.tensor for step in steps if isinstance(step, Begin)]
    assert begun == []  # the first kernel has A, B and Y, as much memory as the second one
    roomy = einmpi.plan(job, 1, memory=4 * 20 * 20 * 8)
    schedule = lower(roomy, 0)
    kinds = [f"{type(step).__name__} {step.vertex}" for step in schedule.steps]
    assert kinds.index("Begin C") + 1 == kinds.index("Compute Y")
    assert str(schedule.steps[kinds.index("Begin C")]) == "begin     C[20, 20] ← C"
    assert peak_bytes(schedule) == roomy.memory == roomy.peak
    assert "12.5 KiB a rank; up to 3.1 KiB of it for reading files ahead" in str(roomy)
    assert einmpi.plan(job, 1, memory=10**6).peak == roomy.peak  # more is never there at once


@pytest.mark.parametrize("memory", [None, 13000, 20000])
def test_memory_stays_below_the_limit(memory):
    job = chain(memory)
    for ranks in (1, 2, 3):
        done = run_on_threads(job, ranks)  # compares what was held with the bounds
        assert max(done.peaks) <= done.plan.peak  # which says what is read ahead
        assert done.plan.peak <= max(memory or 0, einmpi.plan(job, ranks, memory=None).peak)


class Watched(NumpyBackend):
    """Tells when the first kernel has begun, and lets it end when the file was read."""

    def __init__(self):
        super().__init__()
        self.started, self.read = threading.Event(), threading.Event()

    def compute_kernel(self, step, operands, target):
        self.started.set()
        assert step.vertex != "Y" or self.read.wait(60), "nothing was read while the kernel ran"
        super().compute_kernel(step, operands, target)


@pytest.mark.parametrize(("ranks", "memory"), [(1, 10**6), (2, 10**6), (1, 5000), (2, 4000)])
def test_reading_overlaps_with_kernels(ranks, memory):
    """Reading starts after the kernel has started and ends before the kernel does, even if there is
    no memory for the file and it is read to the slow tier."""
    job = chain()
    plan = einmpi.plan(job, ranks, memory=memory)
    assert bool(plan.spilled) == (memory < 10**6)

    def on_rank(comm):
        watched, compiled = Watched(), Compiled(job, comm, options_of(job, memory=memory))
        compiled.prepare({})
        inputs = Inputs(job, {}, compiled.files)
        schedule = lower(plan, comm.rank)
        assert [step.load.tensor for step in schedule.steps if isinstance(step, Begin)] == ["C"]
        begin = inputs.begin

        def waiting(step, make, comm, outside):
            assert outside == bool(plan.spilled)
            inputs.pool().submit(
                watched.started.wait, 20
            )  # the one thread in the background: others queue up
            begin(step, make, comm, outside)
            inputs.pool().submit(watched.read.set)

        inputs.begin = waiting
        try:
            outputs, buffers = Program(schedule, watched, comm).run(inputs)
        finally:
            inputs.close()
        assert buffers.peak <= peak_bytes(schedule) <= plan.peak <= memory
        return outputs["n"]

    a, b, c = (np.load(f"{name}.npy") for name in "abc")
    for found in run_threads(ranks, on_rank):
        np.testing.assert_allclose(found, (a @ b @ c).sum())


def test_errors_in_the_background_are_those_of_the_load():
    job = chain(memory=10**6)
    compiled = einmpi.compile(job)
    assert any(isinstance(step, Begin) for step in compiled.prepare({})[1].steps)
    steps = []

    def cut_file_at_first_step(step):
        if not steps:
            with open("c.npy", "r+b") as file:
                file.truncate(2000)
        steps.append(step)

    compiled.runner.on_step = cut_file_at_first_step
    with pytest.raises(
        InputError,
        match=r"^job.toml:8:8: c.npy was changed during the run; expected a file that stays unch",
    ):
        compiled()
    assert isinstance(steps[-1], Load) and steps[-1].tensor == "C"  # the kernel before it was done
    assert any(step.kernels for step in steps)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reading")]


# ---- with mpirun --------------------------------------------------------------------------------


@needs_mpirun
@pytest.mark.mpirun
def test_a_damaged_chunk_ends_all_ranks(tmp_path):
    """One rank finds it, the others wait for what it reads."""
    with h5py.File("x.h5", "w") as file:
        made = file.create_dataset("A", data=np.ones((60, 60)), chunks=(60, 4), fletcher32=True)
        offset = made.id.get_chunk_info(13).byte_offset
    with open("x.h5", "r+b") as file:
        file.seek(offset)
        file.write(b"1")
    with open("job.toml", "w") as file:
        file.write(
            "program = 'Z[i] = sum(A[i,j])'\n"
            "inputs.A = { file = 'x.h5', dataset = '/A', parts = [3, 1] }\n"
        )
    done = run_mpi(3, ["-m", "einmpi", "job.toml"], cwd=tmp_path)
    said = [line for line in done.stderr.splitlines() if "einmpi: error" in line]
    assert done.returncode != 0 and len(said) == 1
    assert "load A[20, 60] ← " in said[0] and "job.toml:2:8: /A in x.h5 cannot be read: " in said[0]


@pytest.mark.slow
@needs_mpirun
@pytest.mark.mpirun
def test_a_run_says_what_was_read_for_others(tmp_path):
    with h5py.File("x.h5", "w") as file:
        file["W"] = np.ones((64, 64))
    with open("job.toml", "w") as file:
        file.write(
            "program = 'Z[i] = sum(W[i,j] * W[j,i])'\nplan.strategy = 'replicate'\n"
            "inputs.W = { file = 'x.h5', dataset = '/W', resident = true }\n"
        )
    done = run_mpi(2, ["-m", "einmpi", "job.toml", "--json", "run.json"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "  32.0 KiB of the inputs were read by one rank for another\n" in done.stdout
    with open("run.json") as file:
        found = json.load(file)
    assert (found["bytes_shuffled_loading"], found["bytes_moved"]) == (
        32768,
        found["bytes_predicted"],
    )
