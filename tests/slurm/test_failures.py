"""Ranks that srun started fail like those of mpirun: one line, a status, nobody left on any node, files as they were."""

import pytest
from failing import FAILURES, RANKS, Failing
from mpi_helpers import OPEN_MPI, ROOT

pytestmark = pytest.mark.slurm
PMI = "--mpi=pmix" if OPEN_MPI else "--mpi=pmi2"
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if OPEN_MPI else {}
# A rank that is killed ends the others only where srun is told to do so, as in all of our scripts.
ALONE = ("killed",)


@pytest.mark.parametrize("name", FAILURES)
def test_a_rank_fails(slurm, tmp_path, name):
    run = Failing(tmp_path, name)
    options = ["--kill-on-bad-exit=1"] if name in ALONE else []
    done = slurm.run("srun", PMI, f"--ntasks={RANKS}", "--nodes=2", *options, "python", "failing.py", "job.toml",
                     cwd=tmp_path, env={**run.environment, **ROOT_MAY, "PYTHONPATH": str(ROOT)})  # fmt: skip
    if name == "killed":  # Slurm terminates the others, on both nodes, and they say so
        run.line = "einmpi: error: rank .: terminated by SIGTERM in (exchange|reduce) m.*"
    run.check(done.returncode, done.stdout, done.stderr)
