"""Two nodes: hosts in network namespaces of this machine, each with its own /dev/shm, and a network between them."""

import json

import pytest
from namespaces import hosts, reason_against


@pytest.mark.mpi
def test_bytes_between_nodes_are_as_planned():
    """On 2 hosts × 2 ranks; verify compares the numbers."""
    if reason := reason_against():
        pytest.skip(reason)
    with hosts() as run:
        done = run(2, ["-m", "einmpi", "verify", "jobs/chain.toml", "--set", "skew=10", "--json", "-"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ranks"], found["nodes"]) == (4, 2)
    assert found["bytes_between"] == found["bytes_between_predicted"]
    assert 0 < found["bytes_between"] < found["bytes_moved"] == found["bytes_predicted"]
