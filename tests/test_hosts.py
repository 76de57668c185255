"""Two nodes: hosts in network namespaces, each with its own /dev/shm, and a network in between."""

import json
import subprocess
import sys

import pytest
from namespaces import ROOT, hosts, reason_against

FAILING = """
program = \"\"\"
m[i] = where(i > 590, 700, n[i])
w[i] = A[i, m[i]]
Z[i,k] = sum(B[i,j] * C[j,k]) + w[i]
Y[i,k] = sum(Z[i,j] * D[j,k])
\"\"\"
[inputs]
A = { shape = [600, 600], random = "normal" }
B = { shape = [600, 600], random = "normal" }
C = { shape = [600, 600], random = "normal" }
D = { shape = [600, 600], random = "normal" }
n = { shape = [600], random = "uniform", high = 600, seed = 3, dtype = "int64" }
"""


@pytest.mark.slow
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
@pytest.mark.parametrize("per_host, ranks", [(1, 2), (2, 3)])
def test_kernels_run_while_tensors_move(per_host, ranks):
    """On 2 hosts; both ways have the same bits."""
    if reason := reason_against():
        pytest.skip(reason)
    found = []
    with hosts() as run:
        for mode in ("auto", "off"):
            options = ["--set", "s=600", "--overlap", mode, "--json", "-"]
            arguments = ["-m", "einmpi", "run", "jobs/chain.toml", *options]
            done = run(per_host, arguments, ranks=ranks)
            assert done.returncode == 0, done.stderr
            found.append(json.loads(done.stdout))
    auto, off = found
    assert (auto["ranks"], auto["nodes"]) == (ranks, 2)
    assert auto["seconds_hidden"] > off["seconds_hidden"] == 0
    assert auto["outputs"] == off["outputs"]
    for each in found:
        assert each["bytes_moved"] == each["bytes_predicted"] == off["bytes_moved"]
        assert each["bytes_peak"] <= each["bytes_peak_predicted"]


@pytest.mark.mpirun
@pytest.mark.slow
def test_a_rank_that_fails_while_tensors_move_ends_the_run(tmp_path):
    """Without a hang: the other rank, which has no such index, waits for messages."""
    if reason := reason_against():
        pytest.skip(reason)
    job = tmp_path / "job.toml"
    job.write_text(FAILING)
    with hosts() as run:
        done = run(1, ["-m", "einmpi", str(job)])
    assert done.returncode != 0
    assert "out of range" in done.stderr or "outside" in done.stderr, done.stderr
    assert len([line for line in done.stderr.splitlines() if "error" in line]) == 1, done.stderr


@pytest.mark.mpirun
@pytest.mark.slow
def test_bytes_between_nodes_are_as_planned_by_every_strategy():
    """The benchmark, very small."""
    if reason := reason_against():
        pytest.skip(reason)
    command = [sys.executable, "-m", "bench", "hosts", "--size", "120", "--repeat", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    tables = [
        table.split("\n\n")[0].splitlines()[3:] for table in done.stdout.split("chain, skewed")[1:]
    ]
    assert len(tables) == 2 and all(
        len(rows) == 8 and all("the same" in row for row in rows) for rows in tables
    )
