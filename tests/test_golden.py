"""EXPLAIN as a regression test: the plans of all example jobs are those in tests/golden.

A change of the planner or of its text shows as a difference here. If it is intended, renew the
files with `python tests/test_golden.py`, review the difference, and commit it. A change of the
engine alone must leave the digests and bytes in tests/golden_bytes.json as they are.
"""

import difflib
import json

import pytest
from paths import ROOT

import einmpi
from einmpi.planner.text.compare import compare

JOBS = sorted(path.stem for path in (ROOT / "jobs").glob("*.toml"))
LARGE = ("digits", "text")  # a step with its gradients, and every strategy for it: seconds
CASES = [pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name for name in JOBS]
RANKS = (1, 4, 6, 8)
BYTES = ROOT / "tests" / "golden_bytes.json"
RANKS_OF_BYTES = (1, 2, 3, 4, 7, 8, 64, 512, 4096)


def golden(name):
    return ROOT / "tests" / "golden" / f"{name}.txt"


def explained(name):
    """All plans of a job, each under the command that prints it."""
    job = einmpi.load(ROOT / "jobs" / f"{name}.toml")
    texts = [
        f"$ einmpi plan jobs/{name}.toml -n {ranks}\n{einmpi.plan(job, ranks)}" for ranks in RANKS
    ]
    comparison = compare(lambda strategy: einmpi.plan(job, RANKS[-1], strategy=strategy))
    return (
        "\n\n".join(
            [*texts, f"$ einmpi plan jobs/{name}.toml -n {RANKS[-1]} --compare\n{comparison.text}"]
        )
        + "\n"
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_plans_are_as_they_were(name):
    assert golden(name).exists(), "this job is new: python tests/test_golden.py"
    before, now = golden(name).read_text(), explained(name)
    difference = "\n".join(
        difflib.unified_diff(before.split("\n"), now.split("\n"), "as it was", "now", lineterm="")
    )
    assert before == now, f"if this is intended: python tests/test_golden.py\n{difference}"


def test_there_is_a_job_for_every_file():
    assert sorted(path.stem for path in (ROOT / "tests" / "golden").iterdir()) == JOBS


def digests_and_bytes(name):
    """The digest of each plan of a job, the bytes it moves in all, and those of the busiest rank,
    by the number of ranks."""
    job = einmpi.load(ROOT / "jobs" / f"{name}.toml")
    found = {}
    for ranks in RANKS_OF_BYTES:
        plan = einmpi.plan(job, ranks)
        found[str(ranks)] = [plan.digest, plan.bytes_predicted, plan.bytes_busiest]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_digests_and_bytes_are_as_they_were(name):
    assert digests_and_bytes(name) == json.loads(BYTES.read_text())[name]


def renew():
    for old in (ROOT / "tests" / "golden").glob("*.txt"):
        old.unlink()
    for name in JOBS:
        golden(name).parent.mkdir(exist_ok=True)
        golden(name).write_text(explained(name))
    found = {name: digests_and_bytes(name) for name in JOBS}
    BYTES.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    renew()
