"""Memory that the ranks of a real mpirun share: bits, physical memory, and what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from mpi_helpers import OPEN_MPI, environment, mpi_command, needs_mpirun, run_mpi

from einmpi.comm.base import _File, _open_file_of

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
sys.dont_write_bytecode = True  # of a large file, a part would be left
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
    compiled = Compiled(replace(job, shared=mode), comm, options_of(job, strategy="sqrt"))
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
compiled = Compiled(job, comm, options_of(job, strategy="replicate"))
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
sys.dont_write_bytecode = True  # of a large file, a part would be left
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
    done = run_mpi(4, arguments, timeout=300)
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
    done = run_mpi(4, ["-c", KILLED, str(tmp_path / "job.toml")], timeout=300)
    assert done.returncode != 0 and "running" in done.stdout
    left = set(os.listdir("/dev/shm")) - before
    assert not [name for name in left if "einmpi" in name or "memfd" in name]


WAITING = """
import os, sys
from pathlib import Path
import numpy as np
import einmpi
from einmpi.comm.mpi import comm_of

comm = comm_of()
step = einmpi.compile(einmpi.load(sys.argv[1]), strategy="sqrt")
step()
assert sum(int(text) for text in comm.allgather_text(str(step.measured.shared))) > 0
own = Path(sys.argv[2], f"new{comm.rank}")
own.write_text(str(os.getpid()))
own.rename(Path(sys.argv[2], f"pid{comm.rank}"))
while True:
    step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_ranks_that_wait_for_each_other(tmp_path, sent):
    """One rank is stopped, so that the others wait for it in a barrier of a group."""
    (tmp_path / "job.toml").write_text(PRODUCT)
    arguments = ["-c", WAITING, str(tmp_path / "job.toml"), str(tmp_path)]
    command = mpi_command(4, arguments)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as started:
        processes = []
        for rank in range(4):
            processes.append(wait_for_text(tmp_path / f"pid{rank}"))
        os.kill(processes[1], signal.SIGSTOP)
        time.sleep(0.5)
        if sent == signal.SIGINT:
            started.send_signal(sent)
        else:
            os.kill(processes[2], sent)
        _, errors = started.communicate(timeout=120)
    assert started.returncode != 0
    if sent == signal.SIGINT and not OPEN_MPI:  # whose mpirun kills ranks, and passes nothing on
        assert "interrupted" in errors
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{process}/exe").exists() for process in processes):
        assert time.monotonic() < deadline, "a rank is left"
        time.sleep(0.05)


def wait_for_text(file):
    """Return the number in a file, as soon as it is there."""
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} does not appear"
        time.sleep(0.05)
    return int(file.read_text())


TWO_THREADS = """
import threading
import numpy as np
from mpi4py import MPI
import einmpi

random = np.random.default_rng(0)
left = random.random((300, 310))
right = random.random((310, 290))
text = "T[i,k] = sum(A[i,j] * B[j,k])\\nZ[i,j] = sum(T[i,k] * T[j,k])"
job = einmpi.program(text, A=left.shape, B=right.shape)
comms = [MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Dup()]
finished = []

def compute(number):
    step = einmpi.compile(job, comm=comms[number], strategy="sqrt")
    for call in range(8):
        changed = left + number + call
        product = changed @ right
        found = step(A=changed, B=right)["Z"].gather()
        assert np.allclose(found, product @ product.T)
    finished.append(number)

threads = [threading.Thread(target=compute, args=(number,)) for number in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert sorted(finished) == [0, 1]
for comm in comms:
    comm.Free()
"""


@pytest.mark.slow
def test_two_threads_share_memory_on_communicators_of_their_own():
    done = run_mpi(3, ["-c", TWO_THREADS], timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_process_number_of_another_container_is_noticed():
    descriptor = os.memfd_create("test")
    try:
        status = os.fstat(descriptor)
        os.close(_open_file_of(_File(os.getpid(), descriptor, status.st_dev, status.st_ino)))
        with pytest.raises(OSError, match="another file"):
            _open_file_of(_File(os.getpid(), descriptor, status.st_dev, status.st_ino + 1))
    finally:
        os.close(descriptor)
