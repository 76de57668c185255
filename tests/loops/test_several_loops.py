"""Loops one after another: values against numpy, bytes, where tensors lie, resumed runs."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import einmpi_here
from mpi_helpers import environment, needs_mpirun, run_mpi

import einmpi
from einmpi.api import options_of
from einmpi.comm.threads import run_threads
from einmpi.errors import InputError
from einmpi.files.reading import load_array
from einmpi.loops.sequence import LoopSequence
from einmpi.planner.text.compare import compare

JOB = """
title = "Two loops"
sizes = {{ n = {n}, m = {m} }}
[inputs]
A = {{ shape = ["n", "n"], random = "uniform", seed = 1 }}
x = {{ shape = ["n", "m"], random = "uniform", seed = 2 }}
z = {{ shape = ["m"], random = "ones" }}
[[loop]]
program = '''
B[i,k] = A[i,k] / n
x_next[i,j] = sum[k](B[i,k] * x[k,j]) + 1
total = sum(x_next[i,j])
'''
steps = {first}
carry = {{ x = "x_next" }}
record = ["total"]
[[loop]]
program = '''
y[j,l] = sum[i](x[i,j] * x_next[i,l]) / n
z_next[j] = sum[l](y[j,l] * z[l]) / (1 + sum[k](z[k])) + total / n / m + step
least = min(z_next[j])
'''
steps = {second}
carry = {{ z = "z_next" }}
record = ["least"]
until = "least > 1e6"
"""


def expected(job, first, second):
    """The results by numpy, and the values that are recorded."""
    specs = {spec.name: spec for spec in job.inputs}
    a, x, z = (load_array(specs[name], specs[name].shape, "float64") for name in "Axz")
    n, m = x.shape
    totals = []
    for _ in range(first):
        x = a / n @ x + 1
        totals.append(x.sum())
    leasts = []
    for step in range(second):
        z = x.T @ x / n @ z / (1 + z.sum()) + totals[-1] / n / m + step
        leasts.append(z.min())
    return {"x": x, "z": z, "total": totals[-1], "least": leasts[-1]}, totals, leasts


def load(folder, n=6, m=4, first=3, second=4, more=""):
    (folder / "job.toml").write_text(JOB.format(n=n, m=m, first=first, second=second) + more)
    return einmpi.load(folder / "job.toml")


def run_on(ranks, job, pins=None):
    """Run loops on thread ranks; check that all bytes are those that are predicted."""
    pins = pins or {}

    def on_rank(comm):
        loops = LoopSequence(job, comm, lambda each: replace(options_of(each), pins=pins))
        result = loops.run({})
        received = sum(run.measured.received for run in loops.runs)
        predicted = 0
        for run, each in zip(loops.runs, (*result.earlier, result), strict=True):
            predicted += each.steps * run.plan.bytes_predicted
            predicted += sum(arriving.nbytes for arriving in run.plan.loop.arriving.values())
            if run.once_plan is not None:
                predicted += run.once_plan.bytes_predicted
        outputs = {name: array.gather() for name, array in result.outputs.items()}
        return result, outputs, received, predicted, [run.plan for run in loops.runs]

    found = run_threads(ranks, on_rank)
    result, outputs, _, predicted, plans = found[0]
    assert sum(received for _, _, received, _, _ in found) == predicted
    planned = einmpi.plan(job, ranks, pin=pins)
    for own, other in zip(plans, (planned, *planned.loop.later), strict=True):
        assert own.digest == other.digest
        assert own.loop.arriving == other.loop.arriving
        if own.loop.once is not None:
            assert own.loop.once.digest == other.loop.once.digest
    return result, outputs, planned


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", range(1, 10))
def test_two_loops(tmp_path, ranks):
    job = load(tmp_path)
    wanted, totals, leasts = expected(job, 3, 4)
    result, outputs, _ = run_on(ranks, job)
    assert set(outputs) == {"x", "total", "z", "least"}
    for name, array in wanted.items():
        # Sums of at most 24 positive numbers in another order, a few times.
        np.testing.assert_allclose(outputs[name], array, rtol=1e-13)
    (first,) = result.earlier
    np.testing.assert_allclose(first.history["total"], totals, rtol=1e-13)
    np.testing.assert_allclose(result.history["least"], leasts, rtol=1e-13)
    assert (first.steps, result.steps, result.is_done) == (3, 4, False)


@pytest.mark.slow
@settings(max_examples=12)
@given(*[st.integers(1, 7)] * 3, *[st.integers(1, 3)] * 2)
def test_any_shape(tmp_path_factory, ranks, n, m, first, second):
    job = load(tmp_path_factory.mktemp("job"), n, m, first, second)
    wanted, _, _ = expected(job, first, second)
    _, outputs, _ = run_on(ranks, job)
    reference = einmpi.reference(job)
    for name, array in wanted.items():
        np.testing.assert_allclose(outputs[name], array, rtol=1e-12)
        np.testing.assert_allclose(reference[name], array, rtol=1e-12)


ROWS_THEN_COLUMNS = """
sizes = {{ n = 8 }}
[inputs]
u = {{ shape = ["n", "n"], random = "uniform", seed = 1 }}
[[loop]]
program = "u_next[i,j] = u[i,j] / 2 + sum[k](u[i,k])"
steps = 3
carry = {{ u = "u_next" }}
[[loop]]
program = "u_next[i,j] = u[i,j] / 2 + sum[k](u[k,j])"
steps = {steps}
carry = {{ u = "u_next" }}
"""


ONE_STAYS = """
sizes = { n = 8 }
[inputs]
u = { shape = ["n", "n"], random = "uniform", seed = 1 }
w = { shape = ["n", "n"], random = "uniform", seed = 2 }
v = { shape = ["n"], random = "uniform", seed = 3 }
[[loop]]
program = '''
u_next[i,j] = u[i,j] / 2 + sum[k](u[i,k])
w_next[i,j] = w[i,j] / 2 + sum[k](w[k,j])
'''
steps = 3
carry = { u = "u_next", w = "w_next" }
[[loop]]
program = "v_next[j] = sum[k](u[k,j] * v[j]) + sum[k](w[j,k] * v[k])"
steps = 1
carry = { v = "v_next" }
"""


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_plan_is_that_of_the_run_where_one_of_two_tensors_stays(tmp_path, ranks):
    """Parts are prescribed for the later one: the order of inputs on the ranks is the same."""
    (tmp_path / "job.toml").write_text(ONE_STAYS)
    job = einmpi.load(tmp_path / "job.toml")
    _, outputs, plan = run_on(ranks, job, pins={"w": (2, 1)})
    (later,) = plan.loop.later
    assert later.resident == ("v", "w", "u")
    np.testing.assert_allclose(outputs["v"], einmpi.reference(job)["v"], rtol=1e-12)


def test_strategies_are_compared_over_all_loops(tmp_path):
    """The first loop has one step: what the second one moves decides."""
    job = load(tmp_path, n=60, m=40, first=1, second=500)
    comparison = compare(lambda strategy: einmpi.plan(job, 4, strategy=strategy))
    head, *rows = comparison.rows
    assert head[1:5] == ("loop 1, a step", "loop 2, a step", "words, all steps", "bytes, all steps")
    totals = {}
    for plan, row in zip(comparison.plans, rows, strict=True):
        (second,) = plan.loop.later
        words = plan.words_predicted + 500 * second.words_predicted
        for each in (plan.loop, second.loop):
            words += 0 if each.once is None else each.once.words_predicted
            words += sum(arriving.words for arriving in each.arriving.values())
        totals[plan.strategy] = words
        shown = [int(cell.replace(",", "")) for cell in row[1:4]]
        assert shown == [plan.words_predicted, second.words_predicted, words]
    best = min(totals, key=totals.get)
    (winner,) = [text for _, text in comparison.notes if "moves least" in text]
    assert winner.startswith(f"{best} moves least")
    flags = ["--compare", "--report", "page.html"]
    done = einmpi_here(tmp_path, ["plan", "job.toml", "-n", "4", *flags])
    assert (done.returncode, done.stderr) == (0, "")
    assert "loop 2, a step" in (tmp_path / "page.html").read_text()


FIRST_VALUES = """
sizes = {{ n = {n} }}
[inputs]
M = {{ shape = ["n", "n"], random = "uniform", seed = 1 }}
x = {{ shape = ["n"], random = "uniform", seed = 2 }}
[[loop]]
program = "A[i,j] = where(i == j, 2.0 * n, 0.0) + M[i,j] + M[j,i]; r[i] = 1 - sum(A[i,j] * x[j])"
{one_step}
[[loop]]
program = "d[i] = r[i] / n / 3; x_next[i] = x[i] + d[i]; r_next[i] = r[i] - sum(A[i,j] * d[j])"
steps = {steps}
carry = {{ x = "x_next", r = "r_next" }}
"""


def first_values(folder, n=8, steps=5, one_step=""):
    text = FIRST_VALUES.format(n=n, steps=steps, one_step=one_step)
    (folder / "job.toml").write_text(text)
    return einmpi.load(folder / "job.toml")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", range(1, 10))
def test_a_first_value_that_is_computed(tmp_path, ranks):
    job = first_values(tmp_path)
    specs = {spec.name: spec for spec in job.inputs}
    M = load_array(specs["M"], (8, 8), "float64")
    x = load_array(specs["x"], (8,), "float64")
    A = 16 * np.eye(8) + M + M.T
    r = 1 - A @ x
    for _ in range(5):
        d = r / 8 / 3
        x = x + d
        r = r - A @ d
    _, outputs, _ = run_on(ranks, job)
    np.testing.assert_allclose(outputs["x"], x, rtol=1e-11)
    np.testing.assert_allclose(outputs["r"], r, rtol=1e-10, atol=1e-12)


def test_the_steps_of_a_loop_that_carries_nothing(tmp_path):
    first_values(tmp_path, one_step="steps = 1")
    done = einmpi_here(tmp_path, ["job.toml", "--steps", "2", "--json", "found.json"])
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "found.json").read_text())
    assert [each["steps"] for each in data["loops"]] == [1, 2]
    checked = einmpi_here(tmp_path, ["check", "job.toml"])
    assert "loop     one step, which carries nothing\n" in checked.stdout, checked.stderr
    verified = einmpi_here(tmp_path, ["verify", "job.toml"])
    assert verified.returncode == 0, verified.stderr
    with pytest.raises(InputError, match="nothing is carried from step to step"):
        first_values(tmp_path, one_step="steps = 2")


@pytest.mark.slow
def test_a_kill_after_first_values(tmp_path):
    """A checkpoint has what the loop without carry has computed."""
    first_values(tmp_path, steps=9)
    whole = einmpi_here(tmp_path, ["job.toml", "--json", "whole.json"])
    assert whole.returncode == 0, whole.stderr
    (tmp_path / "killed.py").write_text(PROGRAM.format(where=(1, 6), signal="SIGKILL"))
    flags = ["job.toml", "--checkpoint", "saved", "--every", "2steps", "--resume"]
    assert alone(tmp_path, "killed.py", *flags).returncode != 0
    resumed = alone(tmp_path, "-m", "einmpi", *flags, "--json", "resumed.json")
    assert "continues after step 5 of loop 2" in resumed.stderr, resumed.stderr
    found = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "resumed")]
    assert found[0]["outputs"] == found[1]["outputs"]


def rows_then_columns(folder, steps):
    (folder / "job.toml").write_text(ROWS_THEN_COLUMNS.format(steps=steps))
    return einmpi.load(folder / "job.toml")


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_a_tensor_moves_once_if_that_pays(tmp_path, ranks):
    """Sums of rows need whole rows, sums of columns whole columns: it moves between the loops."""
    job = rows_then_columns(tmp_path, steps=50)
    _, outputs, plan = run_on(ranks, job)
    (later,) = plan.loop.later
    assert plan.words_predicted == later.words_predicted == 0
    assert 0 < later.loop.arriving["u"].words <= 64
    np.testing.assert_allclose(outputs["u"], einmpi.reference(job)["u"], rtol=1e-12)


def test_a_tensor_stays_where_it_lies_if_that_pays(tmp_path):
    """For one step it is cheaper to add up parts of the columns than to move all of the tensor."""
    job = rows_then_columns(tmp_path, steps=1)
    _, outputs, plan = run_on(4, job)
    (later,) = plan.loop.later
    assert later.loop.arriving == {} and later.words_predicted > 0
    moved = rows_then_columns(tmp_path, steps=50)
    assert later.words_predicted <= einmpi.plan(moved, 4).loop.later[0].loop.arriving["u"].words
    np.testing.assert_allclose(outputs["u"], einmpi.reference(job)["u"], rtol=1e-12)


def test_loops_called_one_after_another():
    """A DistArray that one loop returns is used by the next where it lies."""
    step = einmpi.program("u_next[i,j] = u[i,j] / 2 + sum[k](u[i,k])", u=(8, 8))
    start = np.random.default_rng(1).random((8, 8))

    def on_rank(comm):
        first = einmpi.loop(step, {"u": start}, comm, carry={"u": "u_next"}, steps=2)
        before = comm.received
        second = einmpi.loop(step, first.outputs, comm, carry={"u": "u_next"}, steps=3)
        assert comm.received == before
        return second.outputs["u"].gather()

    wanted = start
    for _ in range(5):
        wanted = wanted / 2 + wanted.sum(1, keepdims=True)
    for found in run_threads(4, on_rank):
        np.testing.assert_allclose(found, wanted, rtol=1e-13)


def test_results_and_names(tmp_path):
    """The last loop that makes a tensor counts; steps and settings hold for all loops."""
    text = """
    inputs.x = { shape = [4], random = "ones" }
    parameters = { rate = 2.0 }
    [[loop]]
    program = "y[i] = rate * x[i]; s = sum(y[i])"
    steps = 3
    carry = { x = "y" }
    [[loop]]
    program = "s = max(x[i]) + y[0]; x_next[i] = x[i] + steps"
    steps = 2
    carry = { x = "x_next" }
    [outputs]
    s = "s.npy"
    x = "x.npy"
    """
    (tmp_path / "job.toml").write_text(text)
    job = einmpi.load(tmp_path / "job.toml")
    found = {name: array.gather() for name, array in einmpi.run(job).items()}
    assert list(found) == ["s", "x"]
    assert found["s"] == 10 + 8 and found["x"].tolist() == [12] * 4
    faster = einmpi.run(einmpi.load(tmp_path / "job.toml", rate=10.0))
    assert faster["x"].gather().tolist() == [1004] * 4
    given = einmpi.run(job, {"x": [2.0] * 4})
    assert given["x"].gather().tolist() == [20] * 4
    assert einmpi.reference(job, {"x": [2.0] * 4})["x"].tolist() == [20] * 4
    with pytest.raises(InputError, match="unknown input 'y'"):
        einmpi.run(job, {"y": [2.0] * 4})
    with pytest.raises(InputError, match="loop: steps is given, but the job has several loops"):
        einmpi.loop(job, steps=2)


# ---- the command line ----------------------------------------------------------------------------

OUTPUTS = """
history = "history.h5:/second"
[outputs]
x = "out.h5:/x"
z = "out.h5:/z"
"""
# einmpi itself; something happens on rank 0 after a number of steps of a loop.
PROGRAM = """
import os, signal, sys
from einmpi.loops.running import LoopRun

add_row = LoopRun.add_row
def special(self, number, row):
    add_row(self, number, row)
    if (self.number, number) == {where} and self.comm.rank == 0:
        os.kill(os.getpid(), signal.{signal})
LoopRun.add_row = special
from einmpi.cli.main import main
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


def alone(folder, *arguments):
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)


def stored(folder):
    with h5py.File(folder / "out.h5") as file:
        return {name: file[name][...].tobytes() for name in file}


def recorded(folder):
    with h5py.File(folder / "history.h5") as file:
        return file["second"][...].tobytes()


def test_the_command_line(tmp_path):
    load(tmp_path, more=OUTPUTS)
    checked = einmpi_here(tmp_path, ["check", "job.toml"])
    assert "input    x float64 6×4, 192 B  of an earlier loop" in checked.stdout, checked.stderr
    assert checked.stdout.index("loop 1 of 2") < checked.stdout.index("loop 2 of 2")
    done = einmpi_here(tmp_path, ["job.toml", "--json", "found.json"])
    assert done.returncode == 0, done.stderr
    assert "loop 1: 3 steps" in done.stdout and "loop 2: 4 steps" in done.stdout
    data = json.loads((tmp_path / "found.json").read_text())
    assert [each["steps"] for each in data["loops"]] == [3, 4] and "loop" not in data
    shorter = einmpi_here(tmp_path, ["job.toml", "--steps", "2", "--json", "found.json"])
    assert shorter.returncode == 0, shorter.stderr
    data = json.loads((tmp_path / "found.json").read_text())
    assert [each["steps"] for each in data["loops"]] == [2, 2]
    verified = einmpi_here(tmp_path, ["verify", "job.toml"])
    assert verified.returncode == 0, verified.stderr
    planned = einmpi_here(tmp_path, ["plan", "job.toml", "-n", "4", "--json", "-"])
    data = json.loads(planned.stdout)
    assert len(data["loop"]["later"]) == 1
    assert "bytes_arriving" in data["loop"]["later"][0]["loop"]


@pytest.mark.slow
@needs_mpirun
@pytest.mark.mpirun
def test_a_kill_in_the_second_loop(tmp_path):
    """On the same ranks the bits are those of a run that was never stopped."""
    load(tmp_path, first=4, second=9, more=OUTPUTS)
    whole = run_mpi(2, ["-m", "einmpi", "job.toml", "--json", "found.json"], cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    data = json.loads((tmp_path / "found.json").read_text())
    assert data["bytes_moved"] == data["bytes_predicted"] > 0
    wanted = stored(tmp_path)
    history = recorded(tmp_path)
    (tmp_path / "out.h5").unlink()
    flags = ["job.toml", "--checkpoint", "saved", "--every", "2steps", "--resume"]
    (tmp_path / "killed.py").write_text(PROGRAM.format(where=(1, 6), signal="SIGKILL"))
    killed = run_mpi(2, ["killed.py", *flags], cwd=tmp_path)
    assert killed.returncode != 0 and not (tmp_path / "out.h5").exists()
    resumed = run_mpi(2, ["-m", "einmpi", *flags, "--json", "found.json"], cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "continues after step 5 of loop 2, 6 of at most 9 steps" in resumed.stderr
    data = json.loads((tmp_path / "found.json").read_text())
    assert data["bytes_moved"] == data["bytes_predicted"]
    assert [len(each["history"]["total"]) for each in data["loops"][:1]] == [4]
    assert stored(tmp_path) == wanted and recorded(tmp_path) == history


@pytest.mark.slow
@pytest.mark.parametrize("where", [(0, 1), (1, 2)])
def test_a_signal_in_either_loop_and_more_ranks(tmp_path, where):
    load(tmp_path, first=4, second=9, more=OUTPUTS)
    job = einmpi.load(tmp_path / "job.toml")
    wanted, _, _ = expected(job, 4, 9)
    (tmp_path / "stopped.py").write_text(PROGRAM.format(where=where, signal="SIGTERM"))
    flags = ["job.toml", "--checkpoint", "saved", "--resume"]
    stopped = alone(tmp_path, "stopped.py", *flags)
    assert stopped.returncode == 75, stopped.stderr
    loop, step = where
    place = re.search(r"SIGTERM: stopped after step (\d) of loop (\d)", stopped.stderr)
    assert int(place[1]) >= step and int(place[2]) == loop + 1
    more = alone(tmp_path, "-m", "einmpi", "run", *flags, "-n", "3")
    assert more.returncode == 0, more.stderr
    with h5py.File(tmp_path / "out.h5") as file:
        for name in file:
            np.testing.assert_allclose(file[name][...], wanted[name], rtol=1e-13)


@pytest.mark.parametrize(
    "text, message",
    [
        ('loop.loop = { steps = 2 }\nprogram = "y = 1"', "2:6: there is a loop inside a loop"),
        ('[[loop]]\nprogram = "y = x"\n[loop.loop]\nsteps = 2', "4:7: there is a loop inside"),
        ('program = "y = x"\n[[loop]]\nsteps = 3', "2:1: there is a program besides those of"),
        ("[[loop]]\nsteps = 3", "2:3: this loop has no program; expected program ="),
        ("loop = []", "2:1: there is no loop in the list"),
        ("loop = [3]", "2:9: loop has 3; expected"),
        ('[loop]\nsteps = 3\nprogram = "y = x"', "4:1: unknown key 'program' in loop"),
        (
            '[[loop]]\nprogram = "y = x"\nsteps = 1\ncarry = { x = "y" }\n'
            '[[loop]]\nprogram = "w = q + x"\nsteps = 1\ncarry = { x = "w" }',
            "7:16: unknown .*'q'",
        ),
        (
            '[[loop]]\nprogram = "y = x; step = y"\nsteps = 1\ncarry = { x = "y" }\n'
            'record = ["step"]\n[[loop]]\nprogram = "w = x + step"\nsteps = 1\ncarry = { x = "w" }',
            "7:3: in a loop, step is the number of the step; expected another name",
        ),
    ],
)
def test_refused(tmp_path, text, message):
    (tmp_path / "job.toml").write_text(f'inputs.x = {{ shape = [], random = "ones" }}\n{text}\n')
    with pytest.raises(InputError, match=message):
        einmpi.load(tmp_path / "job.toml")


def test_the_history_of_two_loops(tmp_path):
    text = JOB.format(n=2, m=2, first=2, second=2)
    same = text.replace("record =", 'history = "h.csv"\nrecord =')
    (tmp_path / "job.toml").write_text(same)
    with pytest.raises(InputError, match=r"h.csv is also the history of another loop; expected"):
        einmpi.load(tmp_path / "job.toml")


# Runs the same command again and again, in processes that are killed after a random time.
KILLER = """
import os, random, signal, sys, time
import einmpi.cli.run, einmpi.loops.sequence, h5py
from einmpi.cli.main import main

def checkpoints():
    return set(os.listdir("saved")) if os.path.isdir("saved") else set()

times = random.Random(18)
killed = 0
longest = 0.3  # seconds; longer on a machine on which no checkpoint is reached in that time
for _ in range(50):
    before = checkpoints()
    child = os.fork()
    if child == 0:
        os._exit(main(sys.argv[1:]))
    time.sleep(times.uniform(0.0, longest))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    killed += os.WIFSIGNALED(status)
    if checkpoints() == before:
        longest = min(4.0, 1.1 * longest)
print(killed)
"""


@pytest.mark.slow
def test_fifty_kills_at_any_time(tmp_path):
    """The result has the bits of a run that was never stopped; histories have each row once."""
    load(tmp_path, first=300, second=100_000, more='history = "history.h5:/second"\n')
    text = (tmp_path / "job.toml").read_text()
    text = text.replace('record = ["total"]', 'record = ["total"]\nhistory = "first.csv"')
    (tmp_path / "job.toml").write_text(text + '[outputs]\nx = "out.h5:/x"\nz = "out.h5:/z"\n')
    (tmp_path / "killer.py").write_text(KILLER)
    flags = ["job.toml", "--checkpoint", "saved", "--every", "20steps", "--resume", "--quiet"]
    done = alone(tmp_path, "killer.py", *flags)
    assert done.returncode == 0 and int(done.stdout.split()[-1]) >= 40, done.stderr
    # From here on few steps are left, however far the killed runs came.
    saved = sorted(int(path.name) for path in (tmp_path / "saved").glob("[0-9]*"))
    text = (tmp_path / "job.toml").read_text()
    steps = max(1, (saved[-1] if saved else 0) - 300) + 40
    (tmp_path / "job.toml").write_text(text.replace("steps = 100000", f"steps = {steps}"))
    resumed = alone(tmp_path, "-m", "einmpi", *flags)
    assert resumed.returncode == 0, resumed.stderr
    found = stored(tmp_path), recorded(tmp_path), (tmp_path / "first.csv").read_bytes()
    whole = alone(tmp_path, "-m", "einmpi", "job.toml", "--quiet")
    assert whole.returncode == 0, whole.stderr
    wanted = stored(tmp_path), recorded(tmp_path), (tmp_path / "first.csv").read_bytes()
    assert found == wanted and saved
    assert not list(tmp_path.glob(".*"))


KEPT = """
sizes = {{ n = {n} }}
[inputs]
u = {{ shape = ["n", "n"], random = "uniform", seed = 1 }}
v = {{ shape = ["n"], random = "uniform", seed = 2 }}
[[loop]]
program = "u_next[i,j] = u[i,j] / 2 + sum[k](u[i,k]); T[i,j] = u_next[i,j] + 1"
steps = 2
carry = {{ u = "u_next" }}
[[loop]]
program = "v_next[i] = v[i] / 2 + 1"
steps = 2
carry = {{ v = "v_next" }}
[[loop]]
program = "w_next[i] = sum[j](T[i,j] * v[j]); v_last[i] = v[i] + w_next[i]"
steps = 2
carry = {{ v = "v_last" }}
[outputs]
u = "out.h5:/u"
v = "out.h5:/v"
"""


def kept_loops(folder, n, ranks, memory=None):
    """Run three loops; the second one has no use for what the first one leaves."""
    (folder / "job.toml").write_text(KEPT.format(n=n))
    job = einmpi.load(folder / "job.toml")

    def on_rank(comm):
        sequence = LoopSequence(job, comm, lambda each: options_of(each, memory=memory))
        sequence.run({})
        return [(run.measured.peak, run.plan) for run in sequence.runs]

    planned = einmpi.plan(job, ranks, memory=memory)
    return job, [planned, *planned.loop.later], run_threads(ranks, on_rank)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("n", [1, 5, 24])
def test_what_is_kept_for_later_loops_counts(tmp_path, n, ranks):
    _, plans, found = kept_loops(tmp_path, n, ranks)
    share = n * (n // ranks) * 8
    assert plans[0].loop.bytes_kept == 0
    assert plans[1].loop.bytes_kept >= 2 * share  # u and T
    assert plans[1].peak > plans[1].loop.bytes_kept
    assert plans[2].loop.bytes_kept >= share  # u; T is in use
    for on_rank in found:
        for (peak, own), planned in zip(on_rank, plans, strict=True):
            assert own.loop.bytes_kept == planned.loop.bytes_kept
            assert peak <= own.peak == planned.peak
    most = max(peaks[1][0] for peaks in found)
    assert most >= 2 * share


def test_a_memory_limit_allows_for_what_is_kept(tmp_path):
    limit = 3 * 64 * 64 * 8
    _, plans, found = kept_loops(tmp_path, 64, 1, limit)
    assert plans[1].loop.bytes_kept == 2 * 64 * 64 * 8
    for on_rank in found:
        for peak, own in on_rank:
            assert peak <= own.peak <= limit
