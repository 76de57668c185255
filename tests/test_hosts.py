"""Two nodes: hosts in network namespaces, each with its own /dev/shm, and a network in between."""

import json
import subprocess
import sys

import pytest
from namespaces import ROOT, hosts, reason_against


@pytest.mark.mpirun
def test_bytes_between_nodes_are_as_planned():
    """On 2 hosts × 2 ranks; verify compares the numbers."""
    if reason := reason_against():
        pytest.skip(reason)
    with hosts() as run:
        done = run(
            2, ["-m", "einmpi", "verify", "jobs/chain.toml", "--set", "skew=10", "--json", "-"]
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ranks"], found["nodes"]) == (4, 2)
    assert found["bytes_between"] == found["bytes_between_predicted"]
    assert 0 < found["bytes_between"] < found["bytes_moved"] == found["bytes_predicted"]


@pytest.mark.mpirun
@pytest.mark.slow
def test_bytes_between_nodes_are_as_planned_by_every_strategy():
    """The benchmark, very small."""
    if reason := reason_against():
        pytest.skip(reason)
    command = [sys.executable, "bench/hosts.py", "--size", "120", "--repeat", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    tables = [
        table.split("\n\n")[0].splitlines()[3:] for table in done.stdout.split("chain, skewed")[1:]
    ]
    assert len(tables) == 2 and all(
        len(rows) == 8 and all("the same" in row for row in rows) for rows in tables
    )
