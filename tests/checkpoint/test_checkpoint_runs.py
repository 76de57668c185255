"""Checkpoints of real processes: killed, asked to stop by signals of every kind, started again by
the same command."""

import fcntl
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest
from checkpoint_jobs import write_job
from mpi_helpers import environment, needs_mpirun, run_mpi

import einmpi
from einmpi.report.describe import relative_error

# einmpi itself; in its fifth kernel, on some ranks, something happens. `wait` is for a signal from
# outside.
PROGRAM = """
import os, signal, sys, time
from einmpi.runtime.cpu.backend import NumpyBackend

rank = int(os.environ.get("PMI_RANK", os.environ.get("PMIX_RANK", "0")))
compute, count = NumpyBackend.compute_kernel, [0]
def wait():
    open(f"ready-{rank}", "x").close()
    while not os.path.exists("go"):
        time.sleep(0.05)
def special(self, *arguments):
    count[0] += 1
    if count[0] == 5:
        %s
    compute(self, *arguments)
NumpyBackend.compute_kernel = special
from einmpi.cli.main import main
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""
KILL_ONE = "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)"
KILL_ALL = "os.kill(os.getpid(), signal.SIGKILL)"
TERMINATE_ONE = "if rank == 2: os.kill(os.getpid(), signal.SIGTERM)"
TERMINATE_ALL = "os.kill(os.getpid(), signal.SIGTERM)"
TERMINATE_TWICE = (
    "os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGTERM); time.sleep(600)"
)
STOPPED = (
    "saved: {}: stopped after A3, 5 of 12 vertices; the same command with --resume continues\n"
)
FLAGS = ["job.toml", "--checkpoint", "saved", "--every", "0"]


@pytest.fixture
def folder(tmp_path):
    write_job(tmp_path)
    return tmp_path


def script(folder, what):
    (folder / "special.py").write_text(PROGRAM % what)
    return "special.py"


def mpirun(folder, ranks, *arguments):
    return run_mpi(ranks, list(arguments), cwd=folder)


def outputs(folder):
    with h5py.File(folder / "out.h5") as file:
        found = {name: file[name][()] for name in ("Z", "s")}
    (folder / "out.h5").unlink()
    return found


def uninterrupted(folder, ranks):
    assert mpirun(folder, ranks, "-m", "einmpi", "job.toml", "--quiet").returncode == 0
    return outputs(folder)


def assert_same(found, wanted):
    for name, array in wanted.items():
        assert found[name].tobytes() == array.tobytes()


def start(folder, *command, **more):
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def wait_for(folder, ranks):
    """Until so many ranks are in their fifth kernel."""
    end = time.monotonic() + 120
    while len(list(folder.glob("ready-*"))) < ranks:
        assert time.monotonic() < end, "the ranks do not come to their fifth kernel"
        time.sleep(0.02)


# ---- mpirun -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
@pytest.mark.parametrize("what", [KILL_ONE, pytest.param(KILL_ALL, marks=pytest.mark.slow)])
def test_killed_and_started_again(folder, what):
    wanted = uninterrupted(folder, 3)
    assert mpirun(folder, 3, script(folder, what), *FLAGS).returncode != 0
    assert sorted(os.listdir(folder / "saved"))[-1] == "000004" and not (folder / "out.h5").exists()
    done = mpirun(folder, 3, "-m", "einmpi", *FLAGS, "--resume", "--json", "found.json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        "einmpi: saved: continues after A3_1, 4 of 12 vertices\n"
        "einmpi: saved: done; the checkpoint is removed\n"
    )
    assert_same(outputs(folder), wanted)
    assert os.listdir(folder / "saved") == []
    found = json.loads((folder / "found.json").read_text())
    assert (found["resumed_from"], found["checkpoints"]) == ("A3_1", 8) and found["seconds"][
        "checkpoint"
    ] > 0


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
@pytest.mark.parametrize(
    ("before", "after", "what", "name"),
    [
        (4, 3, TERMINATE_ONE, "SIGTERM"),
        pytest.param(
            3, 4, TERMINATE_ALL.replace("TERM", "USR1"), "SIGUSR1", marks=pytest.mark.slow
        ),
    ],
)
def test_ranks_are_asked_to_stop(folder, before, after, what, name):
    """One of them or all; then it goes on with more or fewer."""
    wanted = einmpi.reference(einmpi.load(folder / "job.toml"))
    done = mpirun(folder, before, script(folder, what), *FLAGS[:3])
    assert done.returncode == 75
    assert [line for line in done.stderr.splitlines() if "saved" in line] == [
        STOPPED.format(name).strip()
    ]
    assert "einmpi: error" not in done.stderr and not (folder / "out.h5").exists()
    assert mpirun(folder, after, "-m", "einmpi", *FLAGS[:3], "--resume").returncode == 0
    found = outputs(folder)
    for key, array in wanted.items():
        assert relative_error(array, found[key]) <= 1e-12


@pytest.mark.mpirun
@needs_mpirun
@pytest.mark.slow
def test_a_second_sigterm_ends_at_once(folder):
    done = mpirun(folder, 3, script(folder, f"if rank == 1: {TERMINATE_TWICE}"), *FLAGS)
    assert done.returncode not in (0, 75)
    assert (
        "terminated by SIGTERM" in done.stderr
        and sorted(os.listdir(folder / "saved"))[-1] == "000004"
    )


# ---- einmpi run -n ------------------------------------------------------------------------------

LAUNCH = """
import sys
from einmpi.cli.launcher import launch
if __name__ == "__main__":
    sys.exit(launch(3, sys.argv[1:], (sys.executable, "special.py"), graceful=True))
"""


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)]
)
def test_the_launcher_passes_it_on(folder, number):
    """With any MPI: it asks mpirun in the way that all of them pass on, and lets the ranks take
    their time."""
    script(folder, "wait()")
    with start(folder, "-c", LAUNCH, *FLAGS) as process:
        wait_for(folder, 3)
        process.send_signal(number)
        time.sleep(0.5)
        assert process.poll() is None
        (folder / "go").touch()
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (75, "", STOPPED.format("SIGUSR1"))
    assert os.listdir(folder / "saved") == ["000005"]


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
def test_a_signal_before_the_ranks_can_hear_it(folder):
    """The launcher keeps it until they can."""
    script(folder, "pass")
    slow = (
        "import os, time\nopen(f'ready-{os.getpid()}', 'x').close()\n"
        "while not os.path.exists('go'): time.sleep(0.05)\n"
    )
    (folder / "special.py").write_text(slow + (folder / "special.py").read_text())
    with start(folder, "-c", LAUNCH, *FLAGS) as process:
        wait_for(folder, 3)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        (folder / "go").touch()
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (75, "")
    line = (
        r"saved: SIGUSR1: stopped after \w+, \d+ of 12 vertices; "
        r"the same command with --resume continues\n"
    )
    assert re.fullmatch(line, err)


@pytest.mark.mpirun
@needs_mpirun
@pytest.mark.slow
def test_the_launcher_ends_at_the_second(folder):
    script(folder, "wait()")
    with start(folder, "-c", LAUNCH, *FLAGS) as process:
        wait_for(folder, 3)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 143 and err.startswith(
        "einmpi: error: terminated by SIGTERM in kernel A3"
    )
    assert sorted(os.listdir(folder / "saved"))[-1] == "000004"


@pytest.mark.mpirun
@needs_mpirun
def test_the_command_line_is_patient(folder, monkeypatch):
    """`einmpi run -n` with --checkpoint, and without."""
    from einmpi.cli import launcher
    from einmpi.cli import main as cli

    calls = []
    monkeypatch.setattr(
        launcher, "launch", lambda *arguments, graceful: calls.append((*arguments, graceful)) or 0
    )
    monkeypatch.chdir(folder)
    for more in (["--checkpoint", "saved"], []):
        assert cli.main(["run", "job.toml", "-n", "3", *more]) == 0
    assert calls == [
        (3, ["run", "job.toml", "--checkpoint", "saved"], True),
        (3, ["run", "job.toml"], False),
    ]


# ---- one process --------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_process(folder):
    """The same command starts, is stopped, goes on, and cleans up; then it starts anew."""
    script(folder, TERMINATE_ALL)
    with start(folder, "special.py", *FLAGS, "--resume") as process:
        out, err = process.communicate(timeout=120)
    begins = "einmpi: saved: there is no checkpoint; starts from the beginning\n"
    assert (process.returncode, out, err) == (75, "", begins + STOPPED.format("SIGTERM"))
    with start(folder, "-m", "einmpi", *FLAGS, "--resume", "--json", "-", "--quiet") as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err, os.listdir(folder / "saved")) == (0, "", [])
    found = json.loads(out)
    assert (found["resumed_from"], found["checkpoints"]) == ("A3", 7)


def test_a_second_sigterm_ends_one_process(folder):
    script(folder, TERMINATE_TWICE)
    with start(folder, "special.py", *FLAGS) as process:
        process.communicate(timeout=120)
    assert process.returncode == -signal.SIGTERM
    assert sorted(os.listdir(folder / "saved")) == ["000004"]


def test_without_checkpoints_signals_do_what_they_did(folder):
    script(folder, TERMINATE_ALL + "; time.sleep(600)")
    with start(folder, "special.py", "job.toml") as process:
        process.communicate(timeout=120)
    assert process.returncode == -signal.SIGTERM


def test_a_disk_that_is_really_full(folder):
    """A limit on the size of files: the blocks do not fit, the results do."""
    write_job(
        folder,
        "A[i,k] = sum(X[i,j] * X[j,k]); z = sum(A[i,k] * X[k,i])",
        'X = { shape = [200, 200], random = "uniform" }',
        'z = "out.h5:/z"',
    )

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    # -B: Python would leave a part of large bytecode files, too.
    with start(folder, "-B", "-m", "einmpi", *FLAGS, "--quiet", preexec_fn=limit) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert err == "einmpi: saved: no checkpoint after A: File too large; the run continues\n"
    with h5py.File(folder / "out.h5") as file:
        assert np.isfinite(file["z"][()])
    assert os.listdir(folder / "saved") == []


def test_one_run_a_folder(folder, monkeypatch, capsys):
    from einmpi.cli.main import main

    monkeypatch.chdir(folder)
    (folder / "saved").mkdir()
    with open("saved/.checkpoint.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(FLAGS) == 1
    line = "--checkpoint saved: saved/checkpoint cannot be written: another run is writing it\n"
    assert capsys.readouterr() == ("", line) and not (folder / "out.h5").exists()
    assert main([*FLAGS, "--quiet"]) == 0 and os.listdir("saved") == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--resume"], "--resume: alone it does nothing; expected --checkpoint DIR with it"),
        (["--every", "1h"], "--every: alone it does nothing; expected --checkpoint DIR with it"),
        (
            ["--checkpoint", "saved", "--every", "soon"],
            "--every: 'soon' is not a time; expected a number and a unit, such as 30s, "
            "10min or 1h, or 0",
        ),
        (
            ["--checkpoint", "saved", "--every", "3 weeks"],
            "--every: unknown unit 'weeks' of time; expected one of s, min, h",
        ),
        (
            ["--checkpoint", "saved", "--repeat", "3"],
            "--repeat: it cannot be combined with --checkpoint; expected only one of them",
        ),
        (
            ["--checkpoint", "job.toml"],
            "--checkpoint job.toml: File exists; expected a writable folder",
        ),
    ],
)
def test_flags(folder, monkeypatch, capsys, flags, message):
    from einmpi.cli.main import main

    monkeypatch.chdir(folder)
    assert main(["job.toml", *flags]) == 2
    assert capsys.readouterr() == ("", message + "\n")
