"""Pipes and devices where a file is expected: refused in one line, never waited for."""

import os
import signal
import socket
import stat
import subprocess
import sys

import pytest
from refusals import error

import einmpi
from einmpi.cli.main import main
from einmpi.planner.machine import read_machine

pytestmark = pytest.mark.usefixtures("in_folder")
JOB = "program = 'n = sum(A[i])'\ninputs.A = { shape = [4], random = 'ones' }\n"


def einmpi_says(*arguments, **options):
    """Return the status and what is printed to standard error."""
    ran = subprocess.run(
        [sys.executable, "-m", "einmpi", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
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


# ---- in the place of a lock ---------------------------------------------------------------------


def make_symbolic_link(path):
    with open("other", "w") as file:
        file.write("unchanged")
    os.symlink("other", path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)


def make_device(path):
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))  # /dev/null
    except PermissionError:
        pytest.skip("only root can make a device")


NOT_LOCKS = {
    "a named pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a socket": make_socket,
    "a device": make_device,
    "a symbolic link": make_symbolic_link,
    "a symbolic link that dangles": lambda path: os.symlink("nowhere", path),
    "a symbolic link to itself": lambda path: os.symlink(os.path.basename(path), path),
}


@pytest.mark.usefixtures("time_limit")
@pytest.mark.parametrize("name", NOT_LOCKS)
def test_something_else_in_the_place_of_a_lock(name, capsys):
    """One line names it and what it is. It stays as it was, and so does the output."""
    with open("job.toml", "w") as file:
        file.write(JOB.replace("n =", "N[j:2] =") + "outputs.N = 'n.npy'\n")
    with open("n.npy", "w") as file:
        file.write("old")
    NOT_LOCKS[name](".n.npy.lock")
    before = os.lstat(".n.npy.lock")
    assert main(["job.toml"]) == 1
    path = os.path.realpath(".") + "/.n.npy.lock"
    kind = name.split(" that")[0].split(" to")[0]
    assert capsys.readouterr().err == (
        f"job.toml:3:9: n.npy cannot be written: its lock file {path} is {kind}; "
        "expected a regular file; remove it\n"
    )
    after = os.lstat(".n.npy.lock")
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert set(os.listdir(".")) - {"other"} == {".n.npy.lock", "job.toml", "n.npy"}
    with open("n.npy") as file:
        assert file.read() == "old"


@pytest.mark.usefixtures("time_limit")
def test_a_pipe_in_the_place_of_the_lock_of_checkpoints(capsys):
    with open("job.toml", "w") as file:
        file.write(JOB)
    os.mkdir("saved", 0o700)
    os.mkfifo("saved/.checkpoint.lock")
    assert main(["job.toml", "--checkpoint", "saved"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("--checkpoint saved: saved/checkpoint cannot be written: its lock file ")
    assert said.endswith(".lock is a named pipe; expected a regular file; remove it\n")
