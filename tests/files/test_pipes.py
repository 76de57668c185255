"""Pipes and devices where a file is expected: refused in one line, never waited for."""

import os
import signal
import subprocess
import sys

import pytest
from refusals import error

import einmpi
from einmpi.planner.machine import read_machine

pytestmark = pytest.mark.usefixtures("in_folder")
JOB = "program = 'n = sum(A[i])'\ninputs.A = { shape = [4], random = 'ones' }\n"


def einmpi_says(*arguments, **options):
    """Return the status and what is printed to standard error."""
    ran = subprocess.run(
        [sys.executable, "-m", "einmpi", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )
    return ran.returncode, ran.stderr


@pytest.fixture
def time_limit():
    def give_up(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("time_limit")
def test_a_job_or_machine_that_is_a_pipe_or_a_device():
    os.mkfifo("pipe.toml")
    end = "this is not a regular file; expected a"
    assert error(einmpi.load, "pipe.toml") == f"pipe.toml: {end} job file in TOML"
    assert error(read_machine, "/dev/tty").startswith(f"/dev/tty: {end} machine file")


@pytest.mark.usefixtures("time_limit")
def test_jobs_that_the_shell_pipes():
    """A shell makes /dev/fd/63 of <(COMMAND)."""
    reader, writer = os.pipe()
    os.write(writer, JOB.encode())
    os.close(writer)
    assert einmpi.load(f"/dev/fd/{reader}").sizes == {}
    os.close(reader)


def test_a_manifest_that_is_a_pipe():
    with open("job.toml", "w") as file:
        file.write(JOB)
    os.makedirs("saved/000001", 0o700)
    os.chmod("saved", 0o700)
    os.mkfifo("saved/000001/manifest.json", 0o600)
    status, said = einmpi_says("job.toml", "--checkpoint", "saved", "--resume")
    assert status == 2
    assert said.startswith("saved/000001: the checkpoint is damaged: manifest.json: it is not a re")
