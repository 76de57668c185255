"""jobs/long.sbatch: stopped before its time is up, requeued, finished later, with the same bits."""

import shutil
import time

import pytest
from mpi_helpers import ROOT
from slurm.submitted import SRUN, printed

pytestmark = pytest.mark.slurm
# Python imports this at its start. A vertex takes some seconds on any machine without using a core;
# after a restart it does not.
SLOW = """
import os, time
if "SLURM_STEP_ID" in os.environ and not os.path.exists("starting"):
    open("starting", "w").close()
    time.sleep({starting})
from einmpi.runtime.cpu.backend import NumpyBackend

def slowly(self, *arguments, compute=NumpyBackend.compute_kernel):
    time.sleep(0 if "SLURM_RESTART_COUNT" in os.environ else {seconds})
    return compute(self, *arguments)

NumpyBackend.compute_kernel = slowly
"""


@pytest.fixture
def folder(project):
    return with_output(project)


@pytest.fixture(scope="module")
def bits(slurm, tmp_path_factory):
    """What the job writes when nothing stops it, whoever launches it."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    shutil.copytree(ROOT / "jobs", folder / "jobs")
    (job,) = slurm.wait(submit(slurm, with_output(folder)))
    assert job["JobState"] == "COMPLETED", printed(folder, job)
    return (folder / "path.npy").read_bytes()


def with_output(folder):
    """A folder to submit from, with a job that writes a file."""
    text = (folder / "jobs/shortest_path.toml").read_text()
    (folder / "path.toml").write_text(text + '[outputs]\nD64 = "path.npy"\n')
    return folder


def submit(slurm, folder, *words, launch=SRUN, seconds=0, starting=0, job="path.toml"):
    """The script on two nodes, two ranks on each."""
    (folder / "slow").mkdir(exist_ok=True)
    (folder / "slow/sitecustomize.py").write_text(SLOW.format(seconds=seconds, starting=starting))
    settings = {"LAUNCH": launch, "PYTHONPATH": f"{folder / 'slow'}:{ROOT}"}
    return slurm.submit(*words, "jobs/long.sbatch", job, cwd=folder, env=settings)


def check(folder, job, bits, restarts=1):
    text = printed(folder, job)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), text
    assert int(job["Restarts"]) >= restarts, text
    assert text.count("stopped after") and text.count("continues after"), text
    assert (folder / "path.npy").read_bytes() == bits
    assert list(folder.glob("saved-*/*")) == []


def test_the_time_limit(slurm, folder, bits):
    """Slurm checks limits every 30 s, and a signal may come early: here at the first check."""
    number = submit(slurm, folder, "--time=1", "--signal=B:USR1@40", seconds=5)
    (job,) = slurm.wait(number, timeout=240)
    check(folder, job, bits)


def test_a_signal_passes_through_mpirun(slurm, folder, bits):
    number = submit(slurm, folder, launch="mpirun", seconds=1)
    until_started(folder, number)
    slurm.run("scancel", "--signal=USR1", "--batch", str(number), cwd=folder)
    (job,) = slurm.wait(number)
    check(folder, job, bits)


def test_a_signal_while_all_is_starting(slurm, folder, bits):
    """Ranks keep the signal until einmpi listens. A launcher loses it, so the script repeats it."""
    other = folder / "other"
    shutil.copytree(folder / "jobs", other / "jobs")
    script = other / "jobs/long.sbatch"
    early = '[ -n "$SLURM_RESTART_COUNT" ] || kill -USR1 $$\n'
    script.write_text(script.read_text().replace("# ==== YOUR SITE", f"{early}# ==== YOUR SITE"))
    numbers = submit(slurm, folder, starting=3), submit(slurm, with_output(other), seconds=1)
    until((folder / "starting").exists)
    slurm.run("scancel", "--signal=USR1", "--batch", str(numbers[0]), cwd=folder)
    for job, its in zip(slurm.wait(*numbers), (folder, other), strict=True):
        check(its, job, bits)


def test_a_cancelled_job_stays_away(slurm, folder):
    number = submit(slurm, folder, seconds=1)
    until_started(folder, number)
    slurm.run("scancel", str(number), cwd=folder)
    (job,) = slurm.wait(number)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0")
    time.sleep(8)
    (job,) = slurm.wait(number)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0"), printed(folder, job)
    assert not (folder / "path.npy").exists()


LOOP = """
program = "y[i] = sum(A[i,j] * x[j]); size = norm(y[i]); x_next[i] = y[i] / size"
inputs.A = { shape = [60, 60], random = "uniform" }
inputs.x = { shape = [60], random = "ones" }
outputs.x = "x.npy"
[loop]
steps = 60
carry = { x = "x_next" }
record = ["size"]
history = "history.csv"
"""


def test_a_loop_continues_with_its_next_step(slurm, folder, tmp_path):
    """Its result has the bits of a run that nothing stops, and each step has one row."""
    whole = tmp_path / "whole"
    shutil.copytree(folder / "jobs", whole / "jobs")
    for place in (folder, whole):
        (place / "loop.toml").write_text(LOOP)
    number = submit(slurm, folder, seconds=0.03, job="loop.toml")
    history = folder / "history.csv"
    until(lambda: history.exists() and history.read_text().count("\n") > 5)
    slurm.run("scancel", "--signal=USR1", "--batch", str(number), cwd=folder)
    job, other = slurm.wait(number, submit(slurm, whole, job="loop.toml"))
    text = printed(folder, job)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), text
    assert int(job["Restarts"]) == 1 and "continues after" in text, text
    assert other["JobState"] == "COMPLETED", printed(whole, other)
    assert (folder / "x.npy").read_bytes() == (whole / "x.npy").read_bytes()
    assert history.read_bytes() == (whole / "history.csv").read_bytes()
    steps = [line.split(",")[0] for line in history.read_text().splitlines()[1:]]
    assert steps == [str(step) for step in range(60)]


def until_started(folder, number):
    """The ranks have begun: this is said before the first vertex."""
    path = folder / f"long-{number}.out"
    until(lambda: path.exists() and "starts from the beginning" in path.read_text())


def until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the job has not started"
        time.sleep(0.1)
