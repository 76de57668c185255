"""A rank that fails or is killed ends the whole run: soon, with one line, with nothing left."""

import re
import sys

import pytest
from failing import FAILURES, RANKS, START_LIMIT, Failing
from mpi_helpers import OPEN_MPI, ROOT, finished, needs_mpirun, run_mpi

pytestmark = [pytest.mark.mpirun, needs_mpirun]
PAGE = ROOT / "docs/failures.md"
KILLED = (
    r"einmpi: error: rank 1 was killed by SIGKILL in kernel m\[\].*; "
    "perhaps there was not enough memory"
)


@pytest.mark.parametrize("name", FAILURES)
def test_a_rank_fails(tmp_path, name):
    run = Failing(tmp_path, name)
    done = run_mpi(RANKS, ["failing.py", "job.toml"], env=run.environment, cwd=tmp_path)
    run.check(done.returncode, done.stdout, done.stderr)
    if name in ("exception", "memory") and not OPEN_MPI:  # whose mpirun adds a block of its own
        assert done.stderr.count("\n") == 1


# The launcher of einmpi with ranks that fail as above.
LAUNCH = """
import sys
from einmpi.cli.launch.launcher import launch
sys.exit(launch(3, sys.argv[1:], (sys.executable, "failing.py")))
"""
SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in FAILURES
    if name not in ("missing", "killed")
]


@pytest.mark.parametrize("name", ["missing", "killed", *SLOW])
def test_a_rank_fails_under_our_launcher(tmp_path, name):
    """It makes one line of everything."""
    run = Failing(tmp_path, name)
    done = finished([sys.executable, "-c", LAUNCH, "job.toml"], env=run.environment, cwd=tmp_path)
    assert done.returncode == (2 if name == "no job" else 1)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    if name == "killed":
        run.line = KILLED
    run.check(done.returncode, done.stdout, done.stderr)


def test_debug_shows_the_traceback(tmp_path):
    run = Failing(tmp_path, "exception")
    done = run_mpi(
        RANKS,
        ["failing.py", "job.toml"],
        env={**run.environment, "EINMPI_DEBUG": "1"},
        cwd=tmp_path,
    )
    assert "Traceback" in done.stderr and "ZeroDivisionError: two" in done.stderr


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
