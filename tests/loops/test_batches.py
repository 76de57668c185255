"""Batches: rows of files and arrays, step by step, against numpy on whole arrays."""

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace

import h5py
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi_helpers import environment, needs_mpirun, run_mpi
from safetensors.numpy import save_file

import einmpi
from einmpi.api import options_of
from einmpi.cli.sbatch import estimate
from einmpi.comm.base import ALONE
from einmpi.comm.threads import run_threads
from einmpi.errors import EinmpiError
from einmpi.job.batches import Batches, Shuffle
from einmpi.loops import batches as read_ahead
from einmpi.loops.arrival import plan_loop
from einmpi.loops.batches import WINDOW_BLOCKS, EpochOrder, LoopBatches, rows_in_order
from einmpi.loops.running import LoopRun
from einmpi.loops.stages import stages_of
from einmpi.planner.mesh import Mesh
from einmpi.report.describe import describe_job
from einmpi.schedule.layout import Layout
from einmpi.schedule.regions import boxes, elements, packed

RNG = np.random.default_rng(5)
# Gradient descent; the last batch of an epoch may have less than b rows.
PROGRAM = """
r[i]      = where(i < rows, sum(X[i,j] * w[j]) - y[i], 0.0)
w_next[j] = w[j] - 0.05 / rows * sum(X[i,j] * r[i])
loss      = sum(r[i]**2) / rows
when      = 1000.0 * epoch + step
"""
JOB = f"""
program = '''{PROGRAM}'''
sizes.b = 4
[inputs]
X = {{ file = "FILE_X", batch = "b" }}
y = {{ file = "y.npy", batch = "b" }}
w = {{ shape = [3], random = "zeros" }}
[loop]
carry = {{ w = "w_next" }}
record = ["loss", "when"]
"""


def expected_loop(X, y, steps, batches):
    """Return the weights and losses of the program above, by numpy."""
    w = np.zeros(X.shape[1])
    losses = []
    for step in range(steps):
        epoch, number = divmod(step, batches.steps_an_epoch)
        order = rows_in_order(len(X), batches.shuffle, epoch)
        chosen = order[number * batches.batch : (number + 1) * batches.batch]
        residual = X[chosen] @ w - y[chosen]
        losses.append(residual @ residual / len(chosen))
        w = w - 0.05 / len(chosen) * (X[chosen].T @ residual)
    return w, np.array(losses)


def run_on(ranks, job, inputs=None, memory=None):
    """Run the loop of a job on thread ranks; every step moves what the plan says."""

    def on_rank(comm):
        received = []
        run = LoopRun(job, comm, options_of(job, memory=memory))
        run.on_row = lambda number, row: received.append(comm.received)
        run.prepare(inputs or {})
        before = comm.received
        result = run.run()
        outputs = {name: array.gather() for name, array in result.outputs.items()}
        return result, outputs, np.diff([before, *received]), run

    results = run_threads(ranks, on_rank)
    first, outputs, _, run = results[0]
    assert set(sum(steps for _, _, steps, _ in results)) == {run.plan.bytes_predicted}
    for _, _, _, other in results:
        assert other.measured.peak <= run.plan.peak
    return first, outputs, run


def write_x(folder, kind, X):
    """Store X in a file; return what a job says about it."""
    if kind == "npy":
        np.save(folder / "X.npy", X)
        return 'X.npy"'
    if kind == "fortran":
        np.save(folder / "X.npy", np.asfortranarray(X))
        return 'X.npy"'
    if kind == "safetensors":
        save_file({"X": X}, folder / "X.safetensors")
        return 'X.safetensors", tensor = "X"'
    if kind == "zarr":
        store = zarr.create_array(
            folder / "X.zarr", name="X", shape=X.shape, chunks=(5, 2), dtype=X.dtype
        )
        store[...] = X
        return 'X.zarr", dataset = "/X"'
    with h5py.File(folder / "X.h5", "w") as file:
        if kind == "chunks":
            file.create_dataset("X", data=X, chunks=(5, 2), compression="gzip")
        else:
            file["X"] = X
    return 'X.h5", dataset = "/X"'


def write_job(folder, kind, X, y, text=JOB, **loop):
    where = write_x(folder, kind, X)
    np.save(folder / "y.npy", y)
    lines = [f"{key} = {value}" for key, value in loop.items()]
    text = text.replace('FILE_X"', where) + "\n".join(lines)
    (folder / "job.toml").write_text(text)
    return einmpi.load(folder / "job.toml")


def batches_read(job, ranks, cuts, inputs=None, ahead=True):
    """Return for every step the batches of X that ranks have read, put together."""
    batches = job.loop.batches
    mesh = Mesh(ranks)
    layout = Layout(mesh, job.graph["X"].bound, cuts)
    found = [np.full(layout.bound, np.nan) for _ in range(job.loop.steps)]
    used = 0
    for rank in range(ranks):
        sources = LoopBatches(job, batches, ALONE, inputs or {}).sources
        (spec,) = [spec for spec in job.inputs if spec.name == "X"]
        block = read_ahead.rows_read_together(batches, spec.chunk_rows)
        region = layout.block(rank)
        own_block = block if ahead else 1
        rows = read_ahead.RankRows("X", "float64", region, sources["X"], batches, own_block)
        reading = read_ahead.ReadAhead(batches, [rows], ahead, job.loop.steps)
        for step, batch in enumerate(found):
            values = reading.take(step)["X"]
            for there, here in boxes(region, packed(region)):
                batch[there] = values[here]
        used = max(used, reading.bytes_used)
        reading.close()
        assert used <= read_ahead.bytes_ahead(batches, layout, 8, block)
    return found


def expected_batches(X, batches, steps):
    found = []
    for step in range(steps):
        epoch, number = divmod(step, batches.steps_an_epoch)
        order = rows_in_order(len(X), batches.shuffle, epoch)
        chosen = X[order[number * batches.batch : (number + 1) * batches.batch]]
        padding = np.zeros((batches.batch - len(chosen), *X.shape[1:]))
        found.append(np.concatenate([chosen, padding]))
    return found


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", ["npy", "fortran", "safetensors", "zarr", "hdf5", "chunks"])
@pytest.mark.parametrize("shuffle", [None, "7", "{ seed = 7, block = 6 }"])
def test_files_of_every_format(tmp_path, kind, shuffle):
    X = RNG.normal(size=(23, 3))
    keys = {} if shuffle is None else {"shuffle": shuffle}
    job = write_job(tmp_path, kind, X, X[:, 0], epochs=3, last='"pad"', **keys)
    batches = job.loop.batches
    assert (batches.rows, batches.batch, batches.steps_an_epoch) == (23, 4, 6)
    if shuffle == "7":
        assert batches.shuffle.block == (5 if kind in ("zarr", "chunks") else 1)
    expected = expected_batches(X, batches, 18)
    np.testing.assert_array_equal(batches_read(job, 1, ()), expected)
    np.testing.assert_array_equal(batches_read(job, 6, (0, 1)), expected)
    np.testing.assert_array_equal(batches_read(job, 2, (0,), ahead=False), expected)


def test_a_loop_over_a_file_on_several_ranks(tmp_path):
    X = RNG.normal(size=(23, 3))
    y = RNG.normal(size=23)
    job = write_job(tmp_path, "chunks", X, y, epochs=3, last='"pad"', shuffle=7)
    w, losses = expected_loop(X, y, 18, job.loop.batches)
    for ranks in (1, 2, 3):
        result, outputs, run = run_on(ranks, job)
        np.testing.assert_allclose(outputs["w"], w, rtol=1e-12)
        np.testing.assert_allclose(result.history["loss"], losses, rtol=1e-12)
        assert result.steps == 18
        assert run.plan.ahead == run.plan.loop.batches.bytes_ahead > 0
    expected_when = [1000.0 * (step // 6) + step for step in range(18)]
    np.testing.assert_array_equal(result.history["when"], expected_when)
    np.testing.assert_allclose(einmpi.reference(job)["w"], w, rtol=1e-12)


@st.composite
def layouts(draw, mesh, bound):
    """Draw which dimension each axis of a mesh cuts, of those that are long enough for it."""
    cuts = []
    for axis in range(len(mesh.factors)):
        possible = [None]
        for dimension, extent in enumerate(bound):
            axes = {axis, *(earlier for earlier, cut in enumerate(cuts) if cut == dimension)}
            if any(axes <= set(window) for window in mesh.windows(extent)):
                possible.append(dimension)
        cuts.append(draw(st.sampled_from(possible)))
    return tuple(cuts)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_rows_batch_layout_and_order(tmp_path_factory, data):
    rows = data.draw(st.integers(1, 40))
    batch = data.draw(st.integers(2, 14))
    columns = data.draw(st.integers(1, 5))
    ranks = data.draw(st.integers(1, 9))
    cuts = data.draw(layouts(Mesh(ranks), (batch, columns)))
    chunks = (data.draw(st.integers(1, rows)), data.draw(st.integers(1, columns)))
    keys = {"epochs": data.draw(st.integers(1, 2))}
    if rows < batch or data.draw(st.booleans()):
        keys["last"] = '"pad"'
    if data.draw(st.booleans()):
        seed = data.draw(st.integers(0, 2**63 - 1))
        block = data.draw(st.integers(1, 12))
        keys["shuffle"] = f"{{ seed = {seed}, block = {block} }}"
    X = RNG.normal(size=(rows, columns))
    folder = tmp_path_factory.mktemp("job")
    with h5py.File(folder / "X.h5", "w") as file:
        file.create_dataset("X", data=X, chunks=chunks)
    lines = [f"{key} = {value}" for key, value in keys.items()]
    text = f"""
    program = "s_next[j] = s[j] + sum(X[i,j])"
    [inputs]
    X = {{ file = "X.h5", dataset = "/X", batch = {batch} }}
    s = {{ shape = [{columns}], random = "zeros" }}
    [loop]
    carry = {{ s = "s_next" }}
    """
    (folder / "job.toml").write_text(text + "\n".join(lines))
    job = einmpi.load(folder / "job.toml")
    expected = expected_batches(X, job.loop.batches, job.loop.steps)
    ahead = data.draw(st.booleans())
    np.testing.assert_array_equal(batches_read(job, ranks, cuts, ahead=ahead), expected)


@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_loops_over_arrays(data):
    rows = data.draw(st.integers(1, 40))
    batch = data.draw(st.integers(1, 12))
    last = data.draw(st.sampled_from(["drop", "pad"])) if rows >= batch else "pad"
    columns = data.draw(st.integers(1, 4))
    shuffle = None
    if data.draw(st.booleans()):
        shuffle = {"seed": data.draw(st.integers(0, 2**64 - 1))}
        shuffle["block"] = data.draw(st.integers(1, 12))
    epochs = data.draw(st.integers(1, 3))
    ranks = data.draw(st.integers(1, 9))
    X = RNG.normal(size=(rows, columns))
    y = RNG.normal(size=rows)
    job = einmpi.program(
        PROGRAM,
        X=(batch, columns),
        y=(batch,),
        w=(columns,),
        rows=np.zeros((), "int64"),
        epoch=np.zeros((), "int64"),
        step=np.zeros((), "int64"),
    )

    def on_rank(comm):
        found = einmpi.loop(
            job,
            {"X": X, "y": y, "w": np.zeros(columns)},
            comm,
            carry={"w": "w_next"},
            batch=["X", "y"],
            epochs=epochs,
            shuffle=shuffle,
            last=last,
            record=["loss"],
        )
        return found.outputs["w"].gather(), found.history["loss"], found.steps

    w, losses, steps = run_threads(ranks, on_rank)[0]
    order = None if shuffle is None else Shuffle(**shuffle)
    batches = Batches(("X", "y"), rows, batch, last == "pad", order)
    assert steps == epochs * batches.steps_an_epoch
    expected_w, expected_losses = expected_loop(X, y, steps, batches)
    np.testing.assert_allclose(w, expected_w, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-10, atol=1e-12)


class Watched:
    """An array that counts the elements that are read from it, and knows the threads that read."""

    def __init__(self, array):
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype
        self.elements = 0
        self.threads = set()

    def __getitem__(self, index):
        found = self.array[index]
        self.elements += found.size
        self.threads.add(threading.current_thread().name)
        return found


@pytest.mark.parametrize("ranks", range(1, 10))
def test_every_rank_reads_only_its_part(tmp_path, ranks):
    X = RNG.normal(size=(37, 6))
    text = """
    program = "G[j,k] = sum(X[i,j] * X[i,k]); S_next[j,k] = S[j,k] + G[j,k]"
    [inputs]
    X = { shape = [37, 6], random = "ones", batch = 12 }
    S = { shape = [6, 6], random = "zeros" }
    [loop]
    steps = 5
    shuffle = 3
    carry = { S = "S_next" }
    """
    (tmp_path / "job.toml").write_text(text)
    job = einmpi.load(tmp_path / "job.toml")

    def on_rank(comm):
        watched = Watched(X)
        run = LoopRun(job, comm, options_of(job))
        run.prepare({"X": watched})
        before = comm.received
        result = run.run()
        return watched, run, comm.received - before, result.outputs["S"].gather()

    results = run_threads(ranks, on_rank)
    chosen = np.concatenate([rows_in_order(37, Shuffle(3, 1), e)[:36] for e in (0, 1)])[:60]
    for rank, (watched, run, _, found) in enumerate(results):
        np.testing.assert_allclose(found, X[chosen].T @ X[chosen], rtol=1e-12)
        block = run.batches.layouts["X"].block(rank)
        own = 0 if block is None else elements(block)
        assert watched.elements == 5 * own
        assert all(name.startswith("batches") for name in watched.threads)
    assert sum(moved for _, _, moved, _ in results) == 5 * run.plan.bytes_predicted


def test_the_next_batch_is_read_during_a_step(tmp_path):
    text = """
    program = "s_next[j] = s[j] + sum(X[i,j])"
    [inputs]
    X = { shape = [12, 2], random = "ones", batch = 3 }
    s = { shape = [2], random = "zeros" }
    [loop]
    epochs = 2
    carry = { s = "s_next" }
    """
    (tmp_path / "job.toml").write_text(text)
    job = einmpi.load(tmp_path / "job.toml")
    reads = threading.Semaphore(0)

    class Signalling(Watched):
        def __getitem__(self, index):
            reads.release()
            return super().__getitem__(index)

    run = LoopRun(job, ALONE, options_of(job))
    run.prepare({"X": Signalling(np.ones((12, 2)))})
    assert reads.acquire(blocking=False) is False

    def wait_for_next(number, row):
        # The step has ended; nobody has asked for the next batch, but it is read.
        wanted = 2 if number == 0 else 1
        for _ in range(wanted if number < 7 else 0):
            assert reads.acquire(timeout=30)

    run.on_row = wait_for_next
    result = run.run()
    assert not reads.acquire(blocking=False)
    np.testing.assert_array_equal(result.outputs["s"].gather(), [24.0, 24.0])


def test_what_depends_on_batches_is_computed_in_every_step(tmp_path):
    text = """
    program = "D[i,j] = X[i,j] * 2; B[j] = A[j] * 3; s_next[j] = s[j] + sum(D[i,j]) * B[j]"
    [inputs]
    X = { shape = [8, 3], random = "normal", batch = 4 }
    A = { shape = [3], random = "normal" }
    s = { shape = [3], random = "zeros" }
    [loop]
    epochs = 1
    carry = { s = "s_next" }
    """
    (tmp_path / "job.toml").write_text(text)
    job = einmpi.load(tmp_path / "job.toml")
    assert stages_of(job).hoisted == ("B",)
    X = RNG.normal(size=(8, 3))
    A = RNG.normal(size=3)
    found = einmpi.run(job, {"X": X, "A": A})
    np.testing.assert_allclose(found["s"].gather(), X.sum(0) * 6 * A, rtol=1e-13)


def test_without_memory_nothing_is_read_ahead(tmp_path):
    X = RNG.normal(size=(64, 3))
    y = RNG.normal(size=64)
    text = JOB.replace("b = 4", "b = 8")
    keys = {"epochs": 2, "shuffle": "{ seed = 1, block = 5 }"}
    job = write_job(tmp_path, "chunks", X, y, text, **keys)
    _, outputs, run = run_on(2, job)
    assert run.plan.ahead > 0
    tight = run.plan.peak - 1
    plan = plan_loop(job, 2, replace(options_of(job), memory=tight), {})
    assert plan.loop.batches.bytes_ahead == 0 and plan.peak <= tight
    assert "not read ahead" in str(plan)
    _, same, run = run_on(2, job, memory=tight)
    assert run.batches.bytes_ahead == 0
    assert same["w"].tobytes() == outputs["w"].tobytes()


@pytest.mark.parametrize("block", [1, 5, 100])
@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_that_copies_share_are_counted_as_rows_that_are_cut(ranks, block):
    """Of a batch that all ranks want, each rank reads some rows, as if it were cut."""
    batches = Batches(("X",), 2500, 50, False, Shuffle(1, block), None)
    cut = Layout(Mesh(ranks), (50, 10), (0,))
    shared = Layout(Mesh(ranks), (50, 10), (None,), splits=((0, 0),))
    of_shared = read_ahead.bytes_ahead(batches, shared, 4, block)
    assert of_shared == read_ahead.bytes_ahead(batches, cut, 4, block)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_file_that_changes_ends_the_run(tmp_path, ranks):
    X = RNG.normal(size=(64, 3))
    job = write_job(tmp_path, "chunks", X, RNG.normal(size=64), epochs=50)

    def on_rank(comm):
        run = LoopRun(job, comm, options_of(job))
        run.prepare({})

        def change(number, row):
            if number == 3 and comm.rank == 0:
                os.utime(tmp_path / "X.h5")

        run.on_row = change
        return run.run()

    with pytest.raises(EinmpiError, match=r"X\.h5 was changed during the run"):
        run_threads(ranks, on_rank)
    assert not [one for one in threading.enumerate() if one.name.startswith("batches")]


def test_a_batch_script_counts_what_all_steps_read(tmp_path):
    """A job can be planned and submitted before its files are there."""
    text = """
    program = "s_next[j] = s[j] + sum(X[i,j])"
    [inputs]
    X = { file = "X.h5", dataset = "/X", shape = [1000000, 1000], dtype = "float64", batch = 1000 }
    s = { shape = [1000], random = "zeros" }
    [loop]
    epochs = 5
    carry = { s = "s_next" }
    """
    (tmp_path / "job.toml").write_text(text)
    job = einmpi.load(tmp_path / "job.toml")
    plan = einmpi.plan(job, 2)
    assert plan.loop.batches.nbytes == 8_000_000 and plan.loop.steps == 5000
    read = estimate(plan, "numpy", 1).seconds
    short = replace(plan.loop, steps=1)
    assert read - estimate(replace(plan, loop=short), "numpy", 1).seconds >= 2 * 40e9 / 1e8 - 2


def test_what_check_and_plan_say(tmp_path):
    X = RNG.normal(size=(23, 3))
    job = write_job(tmp_path, "chunks", X, X[:, 0], epochs=3, shuffle=7)
    lines = describe_job(job).splitlines()
    assert [line for line in lines if line.startswith("batches")] == [
        "batches  X, y: 5 steps an epoch, 3 epochs; 3 rows left out; "
        "shuffled by seed 7 in blocks of 5 rows"
    ]
    (line,) = [line for line in lines if line.startswith("input    X")]
    assert line.endswith("X.h5, 4 of 23 rows a step")
    (line,) = [line for line in lines if line.startswith("input    rows")]
    assert line.endswith("of each step")
    (line,) = [line for line in str(einmpi.plan(job, 2)).splitlines() if line[:7] == "batches"]
    assert line.split(maxsplit=1)[1] == (
        "X, y: 4 of 23 rows a step, 128 B; 5 steps an epoch, 3 rows left out; "
        "shuffled by seed 7 in blocks of 5 rows; read ahead"
    )


def test_rows_that_a_job_selects(tmp_path):
    X = RNG.normal(size=(40, 2, 3))
    np.save(tmp_path / "X.npy", X)
    text = """
    program = "s_next[j] = s[j] + sum(X[i,j])"
    [inputs]
    X = { file = "X.npy", slice = "4:36:3, 1", batch = 4 }
    s = { shape = [3], random = "zeros" }
    [loop]
    epochs = 1
    last = "pad"
    carry = { s = "s_next" }
    """
    (tmp_path / "job.toml").write_text(text)
    job = einmpi.load(tmp_path / "job.toml")
    assert job.loop.steps == 3 and job.loop.batches.rows == 11
    found = einmpi.run(job)["s"].gather()
    np.testing.assert_allclose(found, X[4:36:3, 1].sum(0), rtol=1e-13)


def test_generated_rows_and_an_h5py_dataset(tmp_path):
    text = """
    program = "s_next[j] = s[j] + sum(X[i,j] * step)"
    [inputs]
    X = { shape = [30, 3], random = "normal", seed = 4, batch = 5 }
    s = { shape = [3], random = "zeros" }
    [loop]
    epochs = 2
    shuffle = 5
    carry = { s = "s_next" }
    """
    (tmp_path / "job.toml").write_text(text)
    job = einmpi.load(tmp_path / "job.toml")
    whole = einmpi.reference(job)["s"]
    for ranks in (1, 4):
        _, outputs, _ = run_on(ranks, job)
        np.testing.assert_allclose(outputs["s"], whole, rtol=1e-12)
    X = einmpi.run(einmpi.program("Y[i,j] = X[i,j]", X=(30, 3)), {"X": RNG.normal(size=(30, 3))})
    X = X["Y"].gather()
    with h5py.File(tmp_path / "given.h5", "w") as file:
        file.create_dataset("X", data=X, chunks=(4, 3))
    with h5py.File(tmp_path / "given.h5") as file:
        found = einmpi.run(job, {"X": file["X"]})["s"].gather()
    np.testing.assert_allclose(found, einmpi.reference(job, {"X": X})["s"], rtol=1e-12)


def test_a_condition_may_read_the_epoch():
    job = einmpi.program("s_next = s + sum(X[i])", X=(3,), s=())
    found = einmpi.loop(
        job,
        {"X": np.ones(9), "s": 0.0},
        carry={"s": "s_next"},
        batch=["X"],
        steps=100,
        until="(epoch == 2) & (rows == 3)",
    )
    assert found.steps == 7 and found.is_done
    assert float(found.outputs["s"]) == 21


# ---- the order ----------------------------------------------------------------------------------


def order_by_hand(seed, epoch, rows, block):
    """Return the order as the documentation defines it."""
    count = -(-rows // block)
    of_blocks = np.random.Philox(key=seed + (2 * epoch + 1) * 2**64).random_raw(count)
    of_rows = np.random.Philox(key=seed + (2 * epoch + 2) * 2**64).random_raw(rows)
    blocks = sorted(range(count), key=lambda block_number: of_blocks[block_number])
    found = []
    for start in range(0, count, 16):
        window = []
        for number in blocks[start : start + 16]:
            window += range(number * block, min((number + 1) * block, rows))
        if block > 1:
            words = of_rows[len(found) : len(found) + len(window)]
            window = [row for _, row in sorted(zip(words, window, strict=True))]
        found += window
    return found


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**40),
    rows=st.integers(1, 200),
    block=st.integers(1, 30),
    data=st.data(),
)
def test_the_order_is_a_function_of_seed_epoch_rows_and_block(seed, epoch, rows, block, data):
    order = EpochOrder(rows, Shuffle(seed, block), epoch)
    expected = order_by_hand(seed, epoch, rows, block)
    assert sorted(expected) == list(range(rows))
    assert order.rows_at(0, rows).tolist() == expected
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    assert order.rows_at(start, stop).tolist() == expected[start:stop]


def test_known_orders():
    """These numbers never change: resumed runs rely on them."""
    assert rows_in_order(10, Shuffle(7, 1), 0).tolist() == [3, 9, 1, 6, 2, 5, 4, 8, 0, 7]
    assert rows_in_order(10, Shuffle(7, 3), 1).tolist() == [7, 3, 2, 1, 6, 0, 9, 5, 4, 8]


def test_rows_of_a_block_stay_in_one_window():
    block = 8
    order = rows_in_order(1000, Shuffle(1, block), 0)
    for start in range(1000 // (block * WINDOW_BLOCKS)):
        window = order[start * block * WINDOW_BLOCKS : (start + 1) * block * WINDOW_BLOCKS]
        assert len(np.unique(window // block)) <= WINDOW_BLOCKS + 1
    assert not np.array_equal(order, rows_in_order(1000, Shuffle(1, block), 1))
    assert not np.array_equal(order, rows_in_order(1000, Shuffle(2, block), 0))


def test_each_element_is_read_by_one_rank(tmp_path):
    """A step that needs all of X on each rank sends copies of it, and counts them."""
    X = RNG.normal(size=(24, 6))
    V = RNG.normal(size=(24, 300))
    np.save(tmp_path / "X.npy", X)
    np.save(tmp_path / "V.npy", V)
    (tmp_path / "job.toml").write_text("""
program = "w_next[i,k] = w[i,k] + sum(X[b,i] * V[b,k])"
sizes.b = 8
[inputs]
X = { file = "X.npy", batch = "b" }
V = { file = "V.npy", batch = "b" }
w = { shape = [6, 300], random = "zeros" }
[loop]
epochs = 1
carry = { w = "w_next" }
""")
    job = einmpi.load(tmp_path / "job.toml")
    _, outputs, run = run_on(3, job)
    assert run.plan.bytes_predicted == 2 * 8 * 6 * 8  # X to two more ranks
    np.testing.assert_allclose(outputs["w"], X.T @ V, rtol=1e-13, atol=1e-13)
    read = sum(elements(run.batches.layouts[name].block(0)) for name in ("X", "V"))
    assert read == 8 * (6 + 300) / 3


# ---- real processes -----------------------------------------------------------------------------

# einmpi itself; something happens on one rank after the row of a step.
SPECIAL = """
import os, signal, sys
from einmpi.loops.running import LoopRun

add_row = LoopRun.add_row
def special(self, number, row):
    add_row(self, number, row)
    if number == {step} and self.comm.rank == {rank}:
        {action}
LoopRun.add_row = special
from einmpi.cli.main import main
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


def write_fit(folder):
    X = RNG.normal(size=(45, 3))
    text = JOB.replace("[loop]", '[outputs]\nw = "out.h5:/w"\n[loop]')
    keys = {"epochs": 5, "last": '"pad"', "shuffle": 3, "history": '"history.csv"'}
    job = write_job(folder, "chunks", X, X @ [1.0, 2, 3], text, **keys)
    return job, X


def weights(folder):
    with h5py.File(folder / "out.h5") as file:
        return file["w"][...]


def alone(folder, *arguments):
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)


@pytest.mark.slow
def test_a_resumed_loop_takes_the_rows_that_come_next(tmp_path):
    """The bits are those of a run that was never stopped; on other ranks the rows are the same."""
    job, X = write_fit(tmp_path)
    whole = alone(tmp_path, "-m", "einmpi", "job.toml", "--json", "found.json")
    assert whole.returncode == 0, whole.stderr
    data = json.loads((tmp_path / "found.json").read_text())
    assert data["loop"]["steps"] == 60 == job.loop.steps
    assert data["loop"]["batches"]["rows"] == 45
    wanted = weights(tmp_path)
    history = (tmp_path / "history.csv").read_bytes()
    expected, _ = expected_loop(X, X @ [1.0, 2, 3], 60, job.loop.batches)
    np.testing.assert_allclose(wanted, expected, rtol=1e-12)
    kill = SPECIAL.format(step=31, rank=0, action="os.kill(os.getpid(), signal.SIGKILL)")
    (tmp_path / "killed.py").write_text(kill)
    flags = ["job.toml", "--checkpoint", "saved", "--every", "7steps", "--resume"]
    killed = alone(tmp_path, "killed.py", *flags)
    assert killed.returncode == -9
    for ranks in ("2", "1"):  # each from the checkpoint after step 27
        shutil.copytree(tmp_path / "saved", tmp_path / f"saved{ranks}")
        flags[2] = f"saved{ranks}"
        resumed = alone(tmp_path, "-m", "einmpi", "run", *flags, "-n", ranks)
        assert resumed.returncode == 0, resumed.stderr
        np.testing.assert_allclose(weights(tmp_path), wanted, rtol=1e-12)
    assert weights(tmp_path).tobytes() == wanted.tobytes()
    assert (tmp_path / "history.csv").read_bytes() == history
    shuffled = (tmp_path / "job.toml").read_text().replace("shuffle = 3", "shuffle = 4")
    (tmp_path / "job.toml").write_text(shuffled)
    shutil.copytree(tmp_path / "saved", tmp_path / "other")
    refused = alone(tmp_path, "-m", "einmpi", "job.toml", "--checkpoint", "other", "--resume")
    assert refused.returncode == 2, refused.stderr
    assert "the program with its sizes" in refused.stderr


@needs_mpirun
@pytest.mark.mpirun
def test_an_error_of_the_reader_ends_all_ranks_with_one_line(tmp_path):
    write_fit(tmp_path)
    text = SPECIAL.format(step=4, rank=1, action='os.utime("X.h5")')
    (tmp_path / "special.py").write_text(text)
    done = run_mpi(2, ["special.py", "job.toml"], cwd=tmp_path)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "X.h5" in line]
    assert len(lines) == 1 and "was changed during the run" in lines[0], done.stderr
    assert not (tmp_path / "out.h5").exists()
