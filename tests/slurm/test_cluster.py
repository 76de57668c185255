"""Launchers on the test cluster: ranks connect on two nodes, or one line says why not."""

import json

import pytest
from mpi_helpers import ROOT, STARTS, crashed_in_mpi_init, started_again
from slurm.submitted import SRUN, TWO_BY_TWO, check, printed

pytestmark = pytest.mark.slurm

NODES = """
from mpi4py import MPI
from einmpi.comm.mpi import comm_of
comm = comm_of(MPI.COMM_WORLD)
# One write per line, so that lines of ranks do not mix.
print(f"{comm.rank} {comm.size} {comm.ranks_on_node}\\n", end="")
"""


def test_ranks_of_two_nodes_meet(slurm):
    done = started_again(
        lambda: slurm.run(*SRUN.split(), *TWO_BY_TWO, "python", "-c", NODES, cwd=ROOT)
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} 4 2" for rank in range(4)]


def test_ranks_without_pmi_are_an_error(slurm):
    """Not four runs of the same job, which write the same files."""
    done = slurm.run(
        "srun", "--mpi=none", *TWO_BY_TWO, "python", "-m", "einmpi", "jobs/chain.toml", cwd=ROOT
    )
    lines = [line for line in done.stderr.splitlines() if not line.startswith("srun: ")]
    assert (done.returncode, done.stdout) == (1, "")
    assert lines == [
        "MPI: srun started 4 processes without PMI, and each is alone; "
        "use srun --mpi=pmi2 for MPICH and its relatives, --mpi=pmix for Open MPI"
    ]


@pytest.mark.parametrize("launch", [SRUN, "mpirun"])
def test_launchers_on_two_nodes(slurm, project, launch):
    for _ in range(STARTS):
        number = slurm.submit(
            *TWO_BY_TWO, "jobs/many_nodes.sbatch", cwd=project, env={"LAUNCH": launch}
        )
        (job,) = slurm.wait(number)
        if not crashed_in_mpi_init(printed(project, job)):
            break
    check(project, job, 4, "jobs/attention.toml")
    data = json.loads((project / f"einmpi-{number}.json").read_text())
    assert (data["ranks"], data["nodes"]) == (4, 2)
    assert data["bytes_moved"] == data["bytes_predicted"] > data["bytes_between"] > 0
    assert data["bytes_between"] == data["bytes_between_predicted"]
