"""What type checkers say about a user's program: public names are known, wrong ones refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAM = """\
import numpy as np

import einmpi
from einmpi import Compiled, DistArray, Job, LoopResult, Plan

job: Job = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=(4, 5), B=(5, 6))
plan: Plan = einmpi.plan(job, 8)
words: int = plan.words_predicted + plan.lower_bound
step: Compiled = einmpi.compile(job)
found: dict[str, DistArray] = step({"A": np.ones((4, 5)), "B": np.ones((5, 6))})
shape: tuple[int, ...] = found["Z"].shape
halving: Job = einmpi.program("y[i] = x[i] / 2", x=(3,))
result: LoopResult = einmpi.loop(halving, {"x": np.ones(3)}, carry={"x": "y"}, steps=2)
"""
MISTAKES = """\
import einmpi

einmpi.progam("Z[i] = X[i]", X=(4,))
einmpi.plan("Z[i] = X[i]", 8)
job = einmpi.program("Z[i] = X[i]", X=(4,))
einmpi.plan(job, ranks="8")
einmpi.compile(job).shape
"""
LINES_OF_MISTAKES = [3, 4, 6, 7]
CHECKERS = {
    "mypy": ("mypy", "--strict", "--no-error-summary", "--hide-error-context"),
    "pyright": ("pyright", "--level", "error", "--pythonpath", sys.executable),
}


def lines_refused(checker: str, text: str, folder: Path) -> list[int]:
    """Return the lines of a program in which a type checker finds something wrong."""
    if find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed")
    file = folder / "program.py"
    file.write_text(text, encoding="utf-8")
    module, *options = CHECKERS[checker]
    environment = {**os.environ, "MYPY_CACHE_DIR": str(folder / "cache")}
    ran = subprocess.run(
        (sys.executable, "-m", module, *options, str(file)),
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=300,
    )
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    found = re.findall(r"program\.py:(\d+)(?::\d+)?(?:: error| - error)", ran.stdout)
    return sorted({int(line) for line in found})


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_right_program_is_accepted(checker: str, tmp_path: Path) -> None:
    assert lines_refused(checker, PROGRAM, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_mistakes_are_refused(checker: str, tmp_path: Path) -> None:
    assert lines_refused(checker, MISTAKES, tmp_path) == LINES_OF_MISTAKES
