"""What people compute every day (bench/kernels/daily_cases.py): numpy's values, and the bytes that
a person would count.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from distributed import run_from_files
from paths import ROOT

from bench.kernels.daily_cases import CASES


@pytest.mark.sampled(20)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("name", CASES)
def test_values_and_bytes(name, ranks):
    case = CASES[name]
    inputs = case.inputs(np.random.default_rng(3), case.small)
    outputs, moved = run_from_files(ranks, case.program, inputs, case.small)
    wanted = case.by_numpy(np, **inputs)
    assert len(outputs) == len(wanted)
    for found, expected in zip(outputs.values(), wanted, strict=True):
        # Sums are added in another order.
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)
    counted = 8 * case.words(ranks, case.small)
    assert moved == counted if case.is_exact else moved <= counted


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path):
    command = [sys.executable, "-m", "bench", "daily", "--small", "--repeat", "1"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "rows.json")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["case"] for row in rows] == list(CASES)
    assert all(row["ratio"] > 0 for row in rows)
