"""Loops one after another that read files: batches in each, and inputs that are loaded once."""

import json
import subprocess
import sys

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi_helpers import environment, needs_mpirun, run_mpi

import einmpi
from einmpi.api import options_of
from einmpi.comm.threads import run_threads
from einmpi.loops.sequence import LoopSequence

JOB = """
[inputs]
A = "data.h5:/A"
X = {{ file = "data.h5", dataset = "/X", batch = {batch} }}
x = {{ shape = [{n}], random = "ones" }}
z = {{ shape = [{n}], random = "zeros" }}
[[loop]]
program = '''
y[i] = sum(A[i,j] * x[j]) / {n} + (step + 1) * sum(X[k,i])
total = sum(y[i])
'''
epochs = {epochs}
last = "pad"
carry = {{ x = "y" }}
record = ["total"]
{more}
[[loop]]
program = '''
z_next[i] = z[i] / 2 + sum(A[i,j] * z[j]) / {n} + (step + 1) * sum(X[k,i]) + x[i] + rows + epoch
least = min(z_next[i])
'''
steps = {steps}
carry = {{ z = "z_next" }}
record = ["least"]
{more}
[outputs]
x = "out.h5:/x"
z = "out.h5:/z"
"""


def write(folder, n=12, rows=10, batch=4, epochs=2, steps=5, more=""):
    """Write the job and its file; return the two tensors in the file."""
    rng = np.random.default_rng(n + rows)
    A = rng.normal(size=(n, n))
    X = rng.normal(size=(rows, n))
    with h5py.File(folder / "data.h5", "w") as file:
        file["A"] = A
        file.create_dataset("X", data=X, chunks=(min(3, rows), n))
    text = JOB.format(n=n, batch=batch, epochs=epochs, steps=steps, more=more)
    (folder / "job.toml").write_text(text)
    return A, X


def expected(A, X, batch, epochs, steps):
    """The two results by numpy. The first loop pads the last batch, the second one drops it."""
    n = len(A)
    rows = len(X)
    x = np.ones(n)
    steps_an_epoch = -(-rows // batch)
    for step in range(epochs * steps_an_epoch):
        start = step % steps_an_epoch * batch
        x = A @ x / n + (step + 1) * X[start : start + batch].sum(0)
    z = np.zeros(n)
    for step in range(steps):
        epoch, place = divmod(step, rows // batch)
        part = X[place * batch : (place + 1) * batch]
        z = z / 2 + A @ z / n + (step + 1) * part.sum(0) + x + batch + epoch
    return x, z


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    ranks=st.integers(1, 5),
    n=st.integers(1, 9),
    rows=st.integers(2, 9),
    batch=st.integers(1, 9),
    epochs=st.integers(1, 2),
    steps=st.integers(1, 5),
)
def test_batches_in_two_loops(tmp_path_factory, ranks, n, rows, batch, epochs, steps):
    batch = min(batch, rows)
    folder = tmp_path_factory.mktemp("two")
    A, X = write(folder, n, rows, batch, epochs, steps)
    job = einmpi.load(folder / "job.toml")

    def on_rank(comm):
        loops = LoopSequence(job, comm, options_of)
        result = loops.run({})
        predicted = 0
        for run, each in zip(loops.runs, (*result.earlier, result), strict=True):
            predicted += each.steps * run.plan.bytes_predicted
            predicted += sum(arriving.nbytes for arriving in run.plan.loop.arriving.values())
        outputs = {name: array.gather() for name, array in result.outputs.items()}
        received = sum(run.measured.received for run in loops.runs)
        staying = [run.plan.loop.staying for run in loops.runs]
        return outputs, received, predicted, staying

    found = run_threads(ranks, on_rank)
    outputs, _, predicted, staying = found[0]
    assert sum(received for _, received, _, _ in found) == predicted
    x, z = expected(A, X, batch, epochs, steps)
    np.testing.assert_allclose(outputs["x"], x, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(outputs["z"], z, rtol=1e-11, atol=1e-11)
    planned = einmpi.plan(job, ranks)
    assert staying == [(), planned.loop.later[0].loop.staying]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_input_of_two_loops_is_loaded_once(tmp_path, ranks):
    """The file is gone when the second loop begins."""
    A = np.random.default_rng(1).normal(size=(12, 12))
    np.save(tmp_path / "A.npy", A)
    (tmp_path / "job.toml").write_text(
        """
        [inputs]
        A = "A.npy"
        x = { shape = [12], random = "ones" }
        [[loop]]
        program = "y[i] = sum(A[i,j] * x[j])"
        steps = 3
        carry.x = "y"
        [[loop]]
        program = "y[i] = sum(A[i,j] * x[j]) + 1"
        steps = 2
        carry.x = "y"
        """
    )
    job = einmpi.load(tmp_path / "job.toml")
    assert einmpi.plan(job, ranks).loop.later[0].loop.staying == ("A",)

    def on_rank(comm):
        loops = LoopSequence(job, comm, options_of)

        def remove_file(number, row):
            if number == 2:  # all ranks have loaded it in the first step
                comm.allgather_text("")
                (tmp_path / "A.npy").unlink(missing_ok=True)

        loops.runs[0].on_row = remove_file
        result = loops.run({})
        # What only the first loop has used is forgotten.
        assert not loops.runs[0].values and not loops.runs[0].step.resident
        return result.outputs["x"].gather()

    x = np.linalg.matrix_power(A, 3) @ np.ones(12)
    x = A @ (A @ x + 1) + 1
    for found in run_threads(ranks, on_rank):
        np.testing.assert_allclose(found, x, rtol=1e-10)


def test_an_input_that_is_needed_elsewhere_is_loaded_again(tmp_path):
    """The first loop cuts A by rows, the second one by columns."""
    A = np.random.default_rng(1).normal(size=(200, 200)) / 20
    np.save(tmp_path / "A.npy", A)
    (tmp_path / "job.toml").write_text(
        """
        [inputs]
        A = "A.npy"
        x = { shape = [200], random = "ones" }
        [[loop]]
        program = "y[i] = sum(A[i,j] * x[j])"
        steps = 3
        carry.x = "y"
        [[loop]]
        program = "y[j] = sum(A[i,j] * x[i])"
        steps = 3
        carry.x = "y"
        """
    )
    job = einmpi.load(tmp_path / "job.toml")
    plan = einmpi.plan(job, 2)
    assert plan.states["y"] == ("i",) and plan.loop.later[0].states["y"] == ("j",)
    assert plan.loop.later[0].loop.staying == ()

    def on_rank(comm):
        return LoopSequence(job, comm, options_of).run({}).outputs["x"].gather()

    x = np.linalg.matrix_power(A.T, 3) @ np.linalg.matrix_power(A, 3) @ np.ones(200)
    for found in run_threads(2, on_rank):
        np.testing.assert_allclose(found, x, rtol=1e-9)


KILLED = """
import os, sys
from einmpi.cli.main import main
from einmpi.loops.running import LoopRun

add_row = LoopRun.add_row

def killed_there(self, number, row):
    add_row(self, number, row)
    if (self.number, number) == (1, int(os.environ["KILLED_AT"])):
        os._exit(9)

LoopRun.add_row = killed_there
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_kill_in_the_second_loop_with_batches(tmp_path):
    """The run continues with the rows that would have come next, in the order of the shuffle."""
    results = {}
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        write(folder, steps=9, more="shuffle = 5")
        (folder / "run.py").write_text(KILLED)
        command = ["run.py", "job.toml", "--quiet"]
        if name == "killed":
            command += ["--checkpoint", "saved", "--every", "2steps"]
            done = run_in(folder, command, KILLED_AT="6")
            assert done.returncode == 9
            assert not (folder / "out.h5").exists()
            command.append("--resume")
        done = run_in(folder, [*command, "--json", "run.json"], KILLED_AT="-1")
        assert (done.returncode, done.stderr) == (0, "")
        with h5py.File(folder / "out.h5") as file:
            tensors = {key: file[key][...] for key in ("x", "z")}
        loops = json.loads((folder / "run.json").read_text())["loops"]
        results[name] = tensors, [loop["history"] for loop in loops]
    whole, whole_history = results["whole"]
    killed, killed_history = results["killed"]
    for key, array in whole.items():
        assert killed[key].tobytes() == array.tobytes()
    assert killed_history == whole_history


def run_in(folder, arguments, **variables):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**environment(), **variables},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@needs_mpirun
@pytest.mark.mpirun
def test_real_ranks(tmp_path):
    A, X = write(tmp_path)
    done = run_mpi(3, ["-m", "einmpi", "job.toml", "--json", "run.json"], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads((tmp_path / "run.json").read_text())
    assert data["bytes_moved"] == data["bytes_predicted"]
    x, z = expected(A, X, 4, 2, 5)
    with h5py.File(tmp_path / "out.h5") as file:
        np.testing.assert_allclose(file["x"][...], x, rtol=1e-11)
        np.testing.assert_allclose(file["z"][...], z, rtol=1e-11)
