"""HDF5 files that another program has locked, and file systems without locks."""

import ctypes
import errno
import fcntl
import os
import platform
import struct
import subprocess
import sys

import h5py
import numpy as np
import pytest
from paths import ROOT

from einmpi.cli.main import main

FLOCK = {"x86_64": 73, "aarch64": 32}.get(platform.machine())  # the number of this system call
JOB = """
program = "Z[i] = 2 * A[i]"
inputs.A = "x.h5:/A"
outputs.Z = "x.h5:/Z"
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    with h5py.File("x.h5", "w") as file:
        file["A"] = np.arange(4.0)
    return tmp_path / "job.toml"


def test_a_file_that_somebody_writes(job, capsys):
    with open("x.h5", "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert main([str(job)]) == 2
    assert "x.h5 cannot be opened as HDF5: unable to lock file" in (said := capsys.readouterr().err)
    assert said.endswith("; expected a file that no other program is writing\n")


def without_locks(number):
    """From now on the system refuses locks to this process, as it does on some network file
    systems."""
    # A filter of four steps: is it flock? Then this error, else go on. See seccomp(2).
    steps = (
        (0x20, 0, 0, 0),
        (0x15, 0, 1, FLOCK),
        (0x06, 0, 0, 0x00050000 | number),
        (0x06, 0, 0, 0x7FFF0000),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    )
    no_new_privileges, seccomp, filtered = 38, 22, 2
    for words in ((no_new_privileges, 1, 0, 0, 0), (seccomp, filtered, program, 0, 0)):
        if ctypes.CDLL(None, use_errno=True).prctl(*words):
            raise OSError(ctypes.get_errno(), "no filter")


@pytest.mark.skipif(
    FLOCK is None or sys.platform != "linux",
    reason="knows system calls of Linux on x86-64 and ARM only",
)
@pytest.mark.parametrize("setting", ["TRUE", None])
def test_a_file_system_without_locks(job, setting):
    """HDF5 insists on locks only where it was told to."""
    kept = {key: value for key, value in os.environ.items() if key != "HDF5_USE_FILE_LOCKING"}
    more = {"PYTHONPATH": str(ROOT), **({"HDF5_USE_FILE_LOCKING": setting} if setting else {})}
    done = subprocess.run(
        [sys.executable, "-m", "einmpi", str(job)],
        env={**kept, **more},
        capture_output=True,
        text=True,
        preexec_fn=lambda: without_locks(errno.ENOLCK),
    )
    if setting:
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert done.stderr.endswith(
            "'No locks available'; expected an HDF5 file; "
            "set HDF5_USE_FILE_LOCKING=FALSE in the environment\n"
        )
        return
    assert done.returncode == 0, done.stderr
    with h5py.File("x.h5") as file:
        assert file["Z"][:].tolist() == [0, 2, 4, 6]
