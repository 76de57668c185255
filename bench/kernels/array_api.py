"""Score einmpi.array_api by the test suite of the Python array API standard.

    git clone --recursive https://github.com/data-apis/array-api-tests
    pip install -r array-api-tests/requirements.txt
    python -m bench array_api array-api-tests
    mpirun -n 2 python -m bench array_api array-api-tests

On several ranks all of them run the suite side by side. Hypothesis draws the same examples on all
ranks, and a test has passed if it has passed on every rank. Further arguments are for pytest.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

import einmpi
import einmpi.array_api
from einmpi.comm.mpi import comm_of
from einmpi.units import counted

EXAMPLES = 20  # of each test


class Score:
    """A pytest plugin that keeps the ranks in step and counts outcomes."""

    def __init__(self) -> None:
        self.comm = comm_of()
        self.outcomes: dict[str, Counter[str]] = {}
        self.failed: list[str] = []
        self.outcome = "passed"

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Make Hypothesis draw the same examples on all ranks, whatever the time they take."""
        from hypothesis import HealthCheck, Phase, settings

        settings.register_profile(
            "ranks",
            max_examples=config.getoption("--hypothesis-max-examples"),
            derandomize=True,
            database=None,
            deadline=None,
            phases=(Phase.explicit, Phase.generate),
            suppress_health_check=list(HealthCheck),
        )
        settings.load_profile("ranks")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Wait for the other ranks before each test."""
        self.outcome = "passed"
        if self.comm.compare(nodeid) is not None:
            sys.exit(f"another rank runs another test than {nodeid}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what became of the setup, the call or the teardown of a test."""
        if report.outcome != "passed":
            self.outcome = report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Count the outcome of a test: it is passed only if it is on all ranks."""
        outcomes = set(self.comm.allgather_text(self.outcome))
        outcome = self.outcome if len(outcomes) == 1 else "failed"
        section = Path(nodeid.split("::")[0]).stem.removeprefix("test_")
        self.outcomes.setdefault(section, Counter())[outcome] += 1
        if outcome == "failed":
            self.failed.append(nodeid)

    def print_score(self) -> None:
        """Print the outcomes of each section, all of them, and the tests that failed."""
        if self.comm.rank != 0:
            return
        total: Counter[str] = Counter()
        rows = [*sorted(self.outcomes.items()), ("all", total)]
        print("| section | passed | failed | skipped |\n|---|---|---|---|")
        for section, counts in rows:
            total.update({} if section == "all" else counts)
            print(f"| {section} | {counts['passed']} | {counts['failed']} | {counts['skipped']} |")
        run = total["passed"] + total["failed"]
        share = 100 * total["passed"] / max(run, 1)
        program = f"einmpi {einmpi.__version__}, {counted(self.comm.size, 'rank')}"
        version = einmpi.array_api.__array_api_version__
        print(f"\n{program}, version {version}: {share:.1f} % of {run} tests")
        for nodeid in self.failed:
            print("failed", nodeid)


def main() -> None:
    """Run the suite in the folder that is the first argument."""
    suite = Path(sys.argv[1]).resolve()
    os.environ["ARRAY_API_TESTS_MODULE"] = "einmpi.array_api"
    score = Score()
    sys.path.insert(0, str(suite))
    # One rank speaks for all.
    output = (
        ["-q", "--no-header", "--no-summary"] if score.comm.rank == 0 else ["-p", "no:terminal"]
    )
    pytest.main(
        [
            f"--rootdir={suite}",
            f"--confcutdir={suite}",
            "-c",
            str(suite / "pytest.ini"),
            f"--hypothesis-max-examples={EXAMPLES}",
            "-p",
            "no:cacheprovider",
            *output,
            *(sys.argv[2:] or [str(suite / "array_api_tests")]),
        ],
        plugins=[score],
    )
    score.print_score()


if __name__ == "__main__":
    main()
