"""A rank that fails or is killed ends the whole run: soon, with one line, with nothing left."""

import os
import re
import subprocess
import sys
import time

import pytest
from failing import FAILURES, RANKS, START_LIMIT, Failing, fail
from mpi_helpers import OPEN_MPI, ROOT, STARTS, finished, needs_mpirun, run_mpi

pytestmark = [pytest.mark.mpirun, needs_mpirun]
PAGE = ROOT / "docs/failures.md"
KILLED = (
    r"einmpi: error: rank 1 was killed by SIGKILL in kernel m\[\].*; "
    "perhaps there was not enough memory"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILURES)
def test_a_rank_fails(tmp_path, name):
    run, done = fail(
        tmp_path,
        name,
        lambda run: run_mpi(RANKS, ["failing.py", "job.toml"], env=run.environment, cwd=run.folder),
    )
    run.check(done.returncode, done.stdout, done.stderr)
    if name in ("exception", "memory") and not OPEN_MPI:  # whose mpirun adds a block of its own
        assert done.stderr.count("\n") == 1


# The launcher of einmpi with ranks that fail as above.
LAUNCH = """
import sys
from einmpi.cli.launcher import launch
sys.exit(launch(3, sys.argv[1:], (sys.executable, "failing.py")))
"""
SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in FAILURES
    if name not in ("missing", "killed")
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["missing", "killed", *SLOW])
def test_a_rank_fails_under_our_launcher(tmp_path, name):
    """It makes one line of everything."""
    run, done = fail(
        tmp_path,
        name,
        lambda run: finished(
            [sys.executable, "-c", LAUNCH, "job.toml"], env=run.environment, cwd=run.folder
        ),
    )
    assert done.returncode == (2 if name == "no job" else 1)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    if name == "killed":
        run.line = KILLED
    run.check(done.returncode, done.stdout, done.stderr)


def test_debug_shows_the_traceback(tmp_path):
    _, done = fail(
        tmp_path,
        "exception",
        lambda run: run_mpi(
            RANKS,
            ["failing.py", "job.toml"],
            env={**run.environment, "EINMPI_DEBUG": "1"},
            cwd=run.folder,
        ),
    )
    assert "Traceback" in done.stderr and "ZeroDivisionError: two" in done.stderr


@pytest.mark.parametrize("breakdowns", range(STARTS + 1))
def test_only_a_launcher_that_broke_down_is_started_again(tmp_path, breakdowns):
    """Not a run in which the failure did happen; and a launcher that always breaks down fails."""
    folders = []

    def start(run):
        assert os.listdir(run.folder / "other") == ["job.toml"]
        folders.append(run.folder)
        if len(folders) > breakdowns:
            (run.folder / "failed-at").write_text(str(time.time()))
        (run.folder / "other/rank-0").touch()
        return subprocess.CompletedProcess("srun", 139, "", "srun: error: n1: Segmentation fault")

    run, done = fail(tmp_path, "exception", start)
    assert len({*folders}) == len(folders) == min(breakdowns + 1, STARTS)
    reason = "no line of einmpi" if run.happened() else "before anything was made to fail"
    with pytest.raises(AssertionError, match=reason):
        run.check(done.returncode, done.stdout, done.stderr)


# Rank 1 sends the signal of a segmentation fault to rank 0, which waits for it in MPI_Init.
CRASH_IN_MPI_INIT = """
import os, signal, time
rank = os.environ["PMIX_RANK"]
with open(f"pid-{rank}", "w") as file:
    file.write(str(os.getpid()))
if rank == "1" and not os.path.exists("crashed"):
    time.sleep(3)
    open("crashed", "w").close()
    with open("pid-0") as file:
        os.kill(int(file.read()), signal.SIGSEGV)
    time.sleep(60)
from mpi4py import MPI
print(f"rank {rank} has started\\n", end="")
"""


@pytest.mark.skipif(not OPEN_MPI, reason="only Open MPI says where a rank crashed")
def test_a_crash_of_open_mpi_while_it_starts(tmp_path):
    done = run_mpi(2, CRASH_IN_MPI_INIT, cwd=tmp_path)
    assert (tmp_path / "crashed").exists()
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 has started", "rank 1 has started"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("other", [["--repeat", "2"], ["--help"], ["--quiet"]])
def test_different_command_lines_on_two_ranks(tmp_path, other):
    Failing(tmp_path, "job")
    code = (
        "import sys; from mpi4py import MPI; from einmpi.cli.main import main\n"
        f"sys.exit(main(['job.toml'] + ({other!r} if MPI.COMM_WORLD.rank == 1 else [])))"
    )
    done = run_mpi(2, code, cwd=tmp_path)
    assert done.returncode != 0
    assert [line for line in done.stderr.splitlines() if line.startswith("einmpi:")] == [
        "einmpi: rank 1 has another command, job, BLAS or version of einmpi than rank 0; "
        "all ranks must do the same"
    ]


def test_the_page_shows_what_is_said():
    rows = [
        row.split("|")[2].strip(" `")
        for row in PAGE.read_text().splitlines()
        if row.startswith("| ")
    ][1:]
    lines = [
        line.replace(f"after {START_LIMIT} s", "after 60 s")
        for *_, line in FAILURES.values()
        if line
    ]
    lines.append(KILLED)
    assert all(any(re.fullmatch(line, row) for line in lines) for row in rows)
    assert all(any(re.fullmatch(line, row) for row in rows) for line in lines)
