"""Memory that the ranks of a real mpirun share: bits, physical memory, and what is left behind."""

from __future__ import annotations

import os

import pytest
from mpi_helpers import needs_mpirun, run_mpi

from einmpi.comm.shared_memory import _File, _open_file_of

pytestmark = needs_mpirun

SAME_BITS = """
from dataclasses import replace
import resource, sys
import numpy as np
import einmpi
from einmpi.api import options_of
from einmpi.comm.mpi import comm_of
from einmpi.compiled.program import Compiled

comm = comm_of()
limit = int(sys.argv[1])
text = "T[i,k] = sum(A[i,j] * B[j,k])\\nZ[i,j] = sum(T[i,k] * T[j,k])\\nM[i] = max(T[k,i])"
arrays = {"A": np.random.default_rng(0).random((300, 310))}
arrays["B"] = np.random.default_rng(1).random((310, 290))
job = einmpi.program(text, A=(300, 310), B=(310, 290))
# Whole rows on each rank, so that columns have to move.
blocks = {}
for name, array in arrays.items():
    blocks[name] = einmpi.run("Y[i,j] = X[i,j] + 0", X=array)["Y"]
found = {}
for mode in ("off", "auto"):
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    compiled = Compiled(replace(job, shared=mode), comm, options_of(job, "sqrt"))
    for _ in range(3):
        outputs = compiled(blocks)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    found[mode] = [outputs[name].gather() for name in ("Z", "M")]
    measured = compiled.measured
    assert measured.shared == measured.shared_planned
    shared = sum(int(text) for text in comm.allgather_text(str(measured.shared)))
    assert (shared > 0) == (mode == "auto" and not limit), (mode, shared)
for one, other in zip(found["off"], found["auto"]):
    assert np.array_equal(one, other)
T = arrays["A"] @ arrays["B"]
assert np.allclose(found["auto"][0], T @ T.T) and np.allclose(found["auto"][1], T.max(0))
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_results_have_the_same_bits(ranks):
    done = run_mpi(ranks, ["-c", SAME_BITS, "0"], timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_ranks_without_memory_to_share_send_messages():
    """Files may have 64 KiB: enough to find out that memory can be shared, but not for slots."""
    done = run_mpi(3, ["-c", SAME_BITS, str(2**16)], timeout=120)
    assert done.returncode == 0, done.stderr


PHYSICAL_MEMORY = """
from dataclasses import replace
import sys
import einmpi
from einmpi.api import options_of
from einmpi.comm.mpi import comm_of
from einmpi.compiled.program import Compiled

comm = comm_of()
job = replace(einmpi.load(sys.argv[1]), shared=sys.argv[2])
compiled = Compiled(job, comm, options_of(job, "replicate"))
compiled()
compiled()
comm.barrier()
shared = total = 0
with open("/proc/self/smaps") as file:
    for line in file:
        first, *others = line.split()
        if "-" in first:
            is_shared = "memfd:einmpi" in line
        elif first == "Pss:":
            total += int(others[0]) * 1024
            shared += is_shared * int(others[0]) * 1024
comm.barrier()
texts = comm.allgather_text(f"{shared} {total} {compiled.measured.peak}")
if comm.rank == 0:
    print(*[sum(map(int, column)) for column in zip(*map(str.split, texts))])
"""
RESIDENT = """
program = "total = sum(W[i,j] * W[i,j])"
[inputs]
W = { shape = [4096, 2048], random = "uniform", resident = true }
"""


@pytest.mark.slow
def test_an_input_that_stays_takes_memory_once_a_node(tmp_path):
    (tmp_path / "job.toml").write_text(RESIDENT)
    found = {}
    for mode in ("auto", "off"):
        arguments = ["-c", PHYSICAL_MEMORY, str(tmp_path / "job.toml"), mode]
        done = run_mpi(4, arguments, timeout=120)
        assert done.returncode == 0, done.stderr
        found[mode] = list(map(int, done.stdout.split()))
    shared, total, peaks = found["auto"]
    shared_without, total_without, peaks_without = found["off"]
    nbytes = 4096 * 2048 * 8
    assert shared_without == 0
    assert 0.99 * nbytes < shared < 1.01 * nbytes  # each page in parts, rounded
    assert total_without - total > 2.8 * nbytes
    assert nbytes <= peaks < 1.1 * nbytes
    assert 4 * nbytes <= peaks_without


PRODUCT = """
program = "Z[i,k] = sum(A[i,j] * B[j,k])"
[inputs]
A = { shape = [400, 400], random = "uniform" }
B = { shape = [400, 400], random = "uniform" }
"""
NO_MEMORY_ANY_MORE = """
import resource, sys
import numpy as np
import einmpi
from einmpi.comm.mpi import comm_of
from einmpi.runtime.sharing import memory

memory.MOST_KEPT_BYTES = 0
comm = comm_of()
job = einmpi.load(sys.argv[1])
step = einmpi.compile(job, strategy="sqrt")
expected = step()["Z"].gather()
assert sum(int(text) for text in comm.allgather_text(str(step.measured.shared))) > 0
if comm.rank == 0:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))
try:
    step()
except einmpi.EinmpiError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
assert np.array_equal(step()["Z"].gather(), expected)
"""


@pytest.mark.slow
def test_memory_that_cannot_be_had_again_is_an_error_on_all_ranks(tmp_path):
    """The files of one rank may have 64 KiB: what it shared in the first call does not fit."""
    (tmp_path / "job.toml").write_text(PRODUCT)
    arguments = ["-c", f"import sys\n{NO_MEMORY_ANY_MORE}", str(tmp_path / "job.toml")]
    done = run_mpi(4, arguments, timeout=60)
    assert done.returncode == 0, done.stderr
    message = 'no memory for what the ranks of a node share; set shared = "off" in [run]'
    assert done.stdout.splitlines() == 4 * [message]


KILLED = """
import os, signal, sys
import numpy as np
import einmpi
from einmpi.comm.mpi import comm_of

comm = comm_of()
job = einmpi.load(sys.argv[1])
step = einmpi.compile(job, strategy="sqrt")
step()
assert sum(int(text) for text in comm.allgather_text(str(step.measured.shared))) > 0
if comm.rank == 1:
    print("running", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    step()
"""


@pytest.mark.slow
def test_a_killed_rank_leaves_nothing_behind(tmp_path):
    (tmp_path / "job.toml").write_text(PRODUCT)
    before = set(os.listdir("/dev/shm"))
    done = run_mpi(4, ["-c", KILLED, str(tmp_path / "job.toml")], timeout=60)
    assert done.returncode != 0 and "running" in done.stdout
    left = set(os.listdir("/dev/shm")) - before
    assert not [name for name in left if "einmpi" in name or "memfd" in name]


def test_a_process_number_of_another_container_is_noticed():
    descriptor = os.memfd_create("test")
    try:
        status = os.fstat(descriptor)
        os.close(_open_file_of(_File(os.getpid(), descriptor, status.st_dev, status.st_ino)))
        with pytest.raises(OSError, match="another file"):
            _open_file_of(_File(os.getpid(), descriptor, status.st_dev, status.st_ino + 1))
    finally:
        os.close(descriptor)
