"""The files of MPI in /dev/shm: failed runs leave none, and old ones are removed unless in use."""

import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import uuid

import pytest
from mpi_helpers import OPEN_MPI, environment, needs_mpirun, run_mpi

from einmpi.cli.doctor import examine_shared_memory
from einmpi.process import names as segments

needs_folder = pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="there is no /dev/shm")


def write_segment(path, nbytes=2**20):
    with open(path, "xb") as file:
        file.write(bytes(nbytes))


# A process in which a segment is mapped but not open.
MAPS = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
sys.stdin.read()
"""


@needs_folder
def test_unused_segments_are_removed(monkeypatch):
    folder = tempfile.mkdtemp(dir="/dev/shm")
    monkeypatch.setattr(segments, "_FOLDER", folder)
    try:
        for name in ("mpich_shm_1_0", "sm_segment.n1.0.2.0", "mpich_shm_used_0", "other"):
            write_segment(f"{folder}/{name}")
        os.symlink(f"{folder}/other", f"{folder}/mpich_shm_link_0")
        user = subprocess.Popen(
            [sys.executable, "-c", MAPS, f"{folder}/mpich_shm_used_0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with user:
            assert user.stdout.readline() == b"mapped\n"
            stale = [f"{folder}/mpich_shm_1_0", f"{folder}/sm_segment.n1.0.2.0"]
            assert segments.stale_segments() == [(path, 2**20) for path in stale]
            found = examine_shared_memory()
            assert found.state == "note"
            assert found.text.endswith("; failed runs have left 2 files with 2.0 MiB")
            assert found.advice.endswith("einmpi run JOB.toml -n 2")
            segments.stale_segments(remove=True)
            kept = {"mpich_shm_used_0", "mpich_shm_link_0", "other"}
            assert set(os.listdir(folder)) == kept
            user.communicate()
        assert segments.stale_segments() == [(f"{folder}/mpich_shm_used_0", 2**20)]
    finally:
        shutil.rmtree(folder)


# Ranks that write down where their segment is, exchange messages, and then fail. What a rank prints
# before it aborts may be lost.
FAILING = """
import os, signal, sys
from mpi4py import MPI
with open("/proc/self/maps") as file:
    paths = {line.split()[5] for line in file if "/dev/shm/mpich_shm_" in line}
assert len(paths) == 1, paths
from einmpi.comm.mpi import comm_of
comm = comm_of()
assert comm.allgather_text(str(comm.rank)) == ["0", "1"]
if comm.rank == 1:
    with open(sys.argv[2], "w") as file:
        file.write(paths.pop())
comm.barrier()
if comm.rank == 1:
    if sys.argv[1] == "abort":
        MPI.COMM_WORLD.Abort(1)
    os.kill(os.getpid(), signal.SIGKILL)
comm.barrier()
"""


@pytest.mark.mpirun
@needs_mpirun
@pytest.mark.skipif(OPEN_MPI, reason="Open MPI removes its segments")
@pytest.mark.parametrize("how", ["abort", "killed"])
def test_failed_runs_leave_no_segment(how, tmp_path):
    done = run_mpi(2, ["-c", FAILING, how, str(tmp_path / "path")])
    assert done.returncode
    path = (tmp_path / "path").read_text()
    assert path.startswith("/dev/shm/mpich_shm_") and not os.path.exists(path)


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
@needs_folder
def test_launcher_removes_old_segments():
    old = f"/dev/shm/mpich_shm_{uuid.uuid4().hex}_0"
    used = f"/dev/shm/mpich_shm_{uuid.uuid4().hex}_0"
    write_segment(old)
    # It is open until it is mapped: the launcher of another test would remove an unused one.
    with open(used, "x+b") as file:
        file.write(bytes(2**20))
        file.flush()
        memory = mmap.mmap(file.fileno(), 0)
    try:
        command = [sys.executable, "-m", "einmpi", "run", "jobs/distances.toml", "-n", "2"]
        subprocess.run(command, env=environment(), check=True, capture_output=True)
        assert not os.path.exists(old)
        assert os.path.exists(used)
        memory.close()
    finally:
        for path in (old, used):
            if os.path.exists(path):
                os.unlink(path)
