"""Ranks under srun fail like those of mpirun: one line, no process left, no file changed."""

import re

import pytest
from failing import FAILURES, RANKS, fail
from mpi_helpers import OPEN_MPI, started_again

pytestmark = pytest.mark.slurm
PMI = "--mpi=pmix" if OPEN_MPI else "--mpi=pmi2"
TERMINATED = "einmpi: error: rank .: terminated by SIGTERM in (exchange|reduce) m.*"


def srun(slurm, folder, name, *options, **changes):
    command = ("srun", PMI, f"--ntasks={RANKS}", "--nodes=2", *options, "python", "failing.py")

    def start(run):
        return started_again(
            lambda: slurm.run(
                *command, "job.toml", cwd=run.folder, env={**run.environment, **changes}
            )
        )

    return fail(folder, name, start)


@pytest.mark.parametrize("name", FAILURES)
def test_a_rank_fails(slurm, tmp_path, name):
    """Only a rank that is killed needs an option of srun to end the others; our scripts have it."""
    # So that ranks 0 and 2 are on one node.
    options = ["--kill-on-bad-exit=1", "--distribution=cyclic"] if name == "killed" else []
    run, done = srun(slurm, tmp_path, name, *options)
    if name == "killed" and not OPEN_MPI:
        # Slurm terminates the others, and one of each node says so.
        run.line = TERMINATED
    run.check(done.returncode, done.stdout, done.stderr)


def test_more_memory_than_the_job_has(slurm, tmp_path):
    """Slurm ends the step, and says why."""
    takes = "import numpy; held = numpy.ones(10**8); time.sleep(600)"
    run, done = srun(slurm, tmp_path, "killed", "--mem=600M", IN_KERNEL=takes)
    assert re.search(
        r"StepId=\S+ exceeded memory limit \(\d+ > 629145600\), being killed", done.stderr
    ), done.stderr
    run.check(done.returncode, done.stdout, done.stderr)
