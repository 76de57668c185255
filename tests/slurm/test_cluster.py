"""The test cluster itself: ranks on two nodes see each other, and einmpi sees two nodes."""

import pytest
from mpi_helpers import OPEN_MPI, ROOT

pytestmark = pytest.mark.slurm
PMI = "--mpi=pmix" if OPEN_MPI else "--mpi=pmi2"

NODES = """
from mpi4py import MPI
from einmpi.runtime.comm_mpi import comm_of
comm = comm_of(MPI.COMM_WORLD)
print(comm.rank, comm.size, comm.ranks_on_node, flush=True)
"""


def test_ranks_of_two_nodes_meet(slurm):
    done = slurm.run("srun", PMI, "--nodes=2", "--ntasks-per-node=2", "python", "-c", NODES, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} 4 2" for rank in range(4)]
