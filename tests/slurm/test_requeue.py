"""jobs/long.sbatch: stopped before its time is up, requeued, finished later, with the same bits."""

import shutil
import time

import pytest
from mpi_helpers import OPEN_MPI, ROOT

pytestmark = pytest.mark.slurm
SRUN = "srun --mpi=pmix" if OPEN_MPI else "srun --mpi=pmi2"
# Python imports this by itself at its start. A vertex takes some seconds, whatever the machine, and no core; what is
# left after a restart does not.
SLOW = """
import os, time
if "SLURM_STEP_ID" in os.environ and not os.path.exists("starting"):
    open("starting", "w").close()
    time.sleep({starting})
from einmpi.runtime.backend import NumpyBackend

def slowly(self, *arguments, compute=NumpyBackend.compute):
    time.sleep(0 if "SLURM_RESTART_COUNT" in os.environ else {seconds})
    return compute(self, *arguments)

NumpyBackend.compute = slowly
"""


@pytest.fixture
def project(tmp_path):
    """A folder to submit from, and a job that writes a file."""
    (tmp_path / "jobs").mkdir()
    shutil.copy(ROOT / "jobs/long.sbatch", tmp_path / "jobs")
    text = (ROOT / "jobs/shortest_path.toml").read_text()
    (tmp_path / "path.toml").write_text(text + '[outputs]\nD64 = "path.npy"\n')
    return tmp_path


def submit(slurm, project, *words, launch=SRUN, seconds=0, starting=0):
    """The script on two nodes, two ranks on each."""
    (project / "slow").mkdir(exist_ok=True)
    (project / "slow/sitecustomize.py").write_text(SLOW.format(seconds=seconds, starting=starting))
    settings = {"LAUNCH": launch, "PYTHONPATH": f"{project / 'slow'}:{ROOT}"}
    return slurm.submit(*words, "jobs/long.sbatch", "path.toml", cwd=project, env=settings)


def text_of(project, job):
    return (project / job["StdOut"]).read_text()


def uninterrupted(slurm, project, launch=SRUN):
    (job,) = slurm.wait(submit(slurm, project, launch=launch))
    assert job["JobState"] == "COMPLETED", text_of(project, job)
    return (project / "path.npy").read_bytes()


def check(project, job, bits, restarts=1):
    text = text_of(project, job)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), text
    assert int(job["Restarts"]) >= restarts, text
    assert text.count("stopped after") and text.count("goes on after"), text
    assert (project / "path.npy").read_bytes() == bits
    assert list(project.glob("saved-*/*")) == []


def test_the_time_limit(slurm, project):
    """Slurm looks at limits every 30 s, and a signal may come early: with a limit of 60 s, at the first look."""
    bits = uninterrupted(slurm, project)
    (project / "path.npy").unlink()
    number = submit(slurm, project, "--time=1", "--signal=B:USR1@40", seconds=5)
    (job,) = slurm.wait(number, timeout=240)
    check(project, job, bits)


def test_a_signal_passes_through_mpirun(slurm, project):
    bits = uninterrupted(slurm, project, launch="mpirun")
    (project / "path.npy").unlink()
    number = submit(slurm, project, launch="mpirun", seconds=1)
    until_started(project, number)
    slurm.run("scancel", "--signal=USR1", "--batch", str(number), cwd=project)
    (job,) = slurm.wait(number)
    check(project, job, bits)


def test_a_signal_before_the_ranks_listen(slurm, project):
    """It kills them: the script requeues the job, which starts from the beginning."""
    number = submit(slurm, project, starting=30)
    until((project / "starting").exists)
    slurm.run("scancel", "--signal=USR1", "--batch", str(number), cwd=project)
    (job,) = slurm.wait(number)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), text_of(project, job)
    assert (project / "path.npy").exists()


def test_a_cancelled_job_stays_away(slurm, project):
    number = submit(slurm, project, seconds=1)
    until_started(project, number)
    slurm.run("scancel", str(number), cwd=project)
    (job,) = slurm.wait(number)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0")
    time.sleep(8)
    (job,) = slurm.wait(number)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0"), text_of(project, job)
    assert not (project / "path.npy").exists()


def until_started(project, number):
    """The ranks have begun: this is said before the first vertex."""
    path = project / f"long-{number}.out"
    until(lambda: path.exists() and "starts from the beginning" in path.read_text())


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the job has not started"
        time.sleep(0.1)
