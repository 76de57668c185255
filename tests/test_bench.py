"""The benchmarks run: every kernel, very small, each result compared with its peers' by the
benchmark itself.
"""

import importlib
import json
import os
import re
import subprocess
import sys

import fake_cupy
import pytest
from mpi_helpers import MPIRUN, finished, needs_mpirun, run_mpi
from paths import ROOT


def module_of_bench(monkeypatch, name):
    """Import a module of bench/ as its scripts do."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module(name)


def read_rows(file):
    """Return the rows of results, after comparing their form with the one that all have."""
    record = json.loads(file.read_text())
    assert list(record) == ["bench", "machine", "date", "command", "rows"]
    assert record["command"].startswith("python ") and record["bench"] in record["command"]
    assert record["machine"]["cores"] >= 1 and re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])
    for row in record["rows"]:
        assert row and all(isinstance(name, str) for name in row)
    return record["rows"]


@pytest.mark.slow
def test_kernels(tmp_path):
    command = [
        sys.executable,
        "bench/kernels.py",
        "--scale",
        "0.02",
        "--repeat",
        "1",
        "--threads",
        "2",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "rows.json")],
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    rows = read_rows(tmp_path / "rows.json")
    assert len(done.stdout.splitlines()) == len(rows) + 1
    assert len({row["kernel"] for row in rows}) == len(rows) >= 25
    assert sum("laid out" in row["peers"] for row in rows) >= 12  # contractions
    for row in rows:
        assert row["threads"] == 2 and row["seconds"] > 0 and row["peers"]
        assert all(peer["ratio"] > 0 for peer in row["peers"].values())


def test_spill():
    command = [sys.executable, "bench/spill.py", "--size", "100", "--repeat", "1", "--part", "4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "times as long" in done.stdout


def test_decode():
    sizes = "--width 16 --layers 2 --heads 2 --hidden 24 --vocabulary 50 --length 9 --steps 3"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "bench/decode.py", "--cpu-time", *sizes.split()],
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "1 ranks, 1 threads each, median processor time of a token"
    assert " einmpi " in lines[1] and lines[1].endswith("einmpi takes 1.00 times as long")


def test_step():
    command = [sys.executable, "bench/step.py", "--steps", "20", "--repeat", "2", "--calls", "3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    texts = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines()[1:]]
    assert len(texts) == 14
    assert texts[0] == "step of a power iteration" and texts[-1] == "numpy.einsum, the same"


def test_arrays():
    command = [sys.executable, "bench/arrays.py", "--size", "100", "--repeat", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for row in done.stdout.splitlines()[2:]:
        assert row.endswith("| 0 |"), row  # nothing is received by a rank that is alone


@needs_mpirun
@pytest.mark.slow
@pytest.mark.mpirun
def test_loops(tmp_path):
    """Each loop equals its peer, which the benchmark checks itself."""
    rows_file = tmp_path / "rows.json"
    command = ["bench/loops.py", "--size", "small", "--repeat", "1", "--json", str(rows_file)]
    done = run_mpi(2, command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = read_rows(rows_file)
    assert [row["case"] for row in rows] == ["kmeans", "jacobi", "cg"]
    for row in rows:
        assert row["ranks"] == 2 and row["ratio"] > 0


@needs_mpirun
@pytest.mark.slow
def test_experiment2(tmp_path):
    """JAX is asked for the same losses, if it is installed."""
    arguments = ["--form", "dense", "sparse", "--batch", "16", "--sizes", "300", "40", "50"]
    arguments += ["--values", "5", "--steps", "2", "--repeat", "1"]
    arguments += ["--peers", "jax", "products"]
    target = tmp_path / "rows.json"
    command = ["bench/experiment2.py", *arguments, "--json", str(target)]
    done = run_mpi(2, command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = read_rows(target)
    ways = {(row["form"], row["way"]) for row in rows}
    for form in ("dense", "sparse"):
        for strategy in ("eindecomp", "data", "model"):
            assert (form, strategy) in ways
    assert ("dense", "products") in ways and ("sparse", "products") not in ways
    for row in rows:
        assert row["median"] >= row["least"] > 0
        assert row["way"] in ("jax", "products") or row["bytes"] > 0


@needs_mpirun
@pytest.mark.slow
@pytest.mark.mpirun
def test_chain():
    """numpy is a process of its own, and the ranks have the threads that are printed."""
    command = ["bench/chain.py", "--size", "200", "--repeats", "1", "--strategies", "eindecomp"]
    done = run_mpi(2, command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    assert [row.split()[0] for row in rows] == ["chain,", "numpy", "eindecomp"] * 2
    assert "bound" in rows[2] and " 0 B" not in rows[2]


@needs_mpirun
@pytest.mark.slow
@pytest.mark.mpirun
def test_node(tmp_path):
    """Every peer has the same result, which the benchmark checks itself."""
    target = tmp_path / "node.json"
    command = [sys.executable, "bench/node.py", "--sizes", "80", "--cores", "1", "--repeat", "1"]
    command += ["--calls", "3", "--sequence", "64", "--json", str(target)]
    command += ["--peers", "numpy", "mpi4py", "--mpirun", str(MPIRUN)]
    done = finished(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "differs" not in done.stderr and "has ended" not in done.stderr
    found = {}
    for row in read_rows(target):
        found.setdefault(row["case"], []).append(row)
    peers = [(row["peer"], row["ranks"], row["threads"]) for row in found["chain"]]
    assert peers == [("numpy", 1, 1), ("einmpi", 1, 1), ("mpi4py", 1, 1)] * 2
    assert [row["peer"] for row in found["attention"]] == ["einmpi", "einmpi, unfused"]
    assert {row["ranks"] for row in found["calls"]} == {1}


@pytest.mark.slow
def test_experiment3_plans(tmp_path):
    """Every strategy has a row: a plan, or why there is none."""
    target = tmp_path / "rows.json"
    command = [sys.executable, "bench/experiment3.py", "--models", "tiny", "--layers", "2"]
    command += ["--cases", "4x32", "--devices", "2x1GB", "4x500kB", "--json", str(target)]
    command += ["--machine", "bench/machines/v100x8.toml"]
    done = finished(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    rows = read_rows(target)
    assert len(rows) == 12 == len(done.stdout.splitlines()) - 1
    fitting = [row for row in rows if row["memory"] == "1GB"]
    assert {row["strategy"] for row in fitting} >= {"eindecomp", "eindecomp-paper", "megatron"}
    for row in fitting:
        assert row["words"] >= 0 and row["operations_max_rank"] > 0 and row["seconds"] > 0
        assert 0 < row["bytes_peak"] <= 1e9
    assert any("refused" in row for row in rows if row["memory"] == "500kB")


@needs_mpirun
@pytest.mark.slow
@pytest.mark.mpirun
def test_experiment3_runs(tmp_path):
    """The benchmark itself compares the logits of all strategies, and bytes with the plan."""
    target = tmp_path / "rows.json"
    command = ["bench/experiment3.py", "--run", "--layers", "2", "--cases", "4x16"]
    done = run_mpi(2, [*command, "--repeat", "2", "--json", str(target)], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = {row["strategy"]: row for row in read_rows(target)}
    assert len(rows) == 6
    for row in rows.values():
        assert row["ranks"] == 2 and len(row["times"]) == 2 and row["seconds"] >= row["fastest"] > 0
    assert rows["eindecomp"]["bytes"] <= min(row["bytes"] for row in rows.values())


@pytest.mark.slow
def test_experiment4_on_a_cpu(tmp_path):
    """Its logits are compared with transformers', if that is installed."""
    target = tmp_path / "rows.json"
    command = [sys.executable, "bench/experiment4.py", "--backend", "numpy", "--dtype", "float32"]
    command += ["--model", "tiny", "--layers", "2", "--batches", "1", "2", "--sequences", "16"]
    command += ["--peers", "zero-inference", "flexgen", "torch-prefetch", "transformers"]
    command += ["--repeat", "1", "--json", str(target)]
    done = finished(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    rows = read_rows(target)
    own = [row for row in rows if row["way"] == "einmpi"]
    assert [row["batch"] for row in own] == [1, 2] and all(row["seconds"] > 0 for row in own)
    for peer in ("zero-inference", "flexgen", "torch-prefetch"):
        assert f"{peer} is left out: " in done.stdout
    with_transformers = {row["way"] for row in rows} - {"einmpi"}
    assert with_transformers or "transformers is left out: " in done.stdout


@pytest.mark.slow
def test_experiment4_on_a_gpu_pages_its_weights(monkeypatch, tmp_path):
    """Without a GPU: fake_cupy copies as one does, later than it has to."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    fake_cupy.install(monkeypatch)
    experiment4 = importlib.import_module("experiment4")
    monkeypatch.setattr(experiment4, "bus_seconds", lambda nbytes: nbytes / 1e9)
    target = tmp_path / "rows.json"
    arguments = ["--model", "tiny", "--layers", "2", "--batches", "1", "--sequences", "16"]
    arguments += ["--dtype", "float32", "--peers", "flexgen", "--repeat", "1", "--json"]
    monkeypatch.setattr(sys, "argv", ["experiment4.py", *arguments, str(target)])
    experiment4.main()
    own, bus = read_rows(target)
    weights = bus["seconds"] * 1e9
    assert own["way"] == "einmpi" and bus["way"] == "bus"
    assert own["bytes_peak"] <= own["bytes_limit"] < weights


def test_experiment4_plans(tmp_path):
    target = tmp_path / "rows.json"
    command = [sys.executable, "bench/experiment4.py", "--plan", "--models", "tiny"]
    command += ["--layers", "1", "--batches", "2", "--sequences", "16", "--devices", "4x300kB"]
    command += ["--strategies", "eindecomp", "megatron", "--json", str(target)]
    done = finished(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    best, megatron = read_rows(target)
    assert best["words"] < megatron["words"]
    assert best["bytes_peak"] < 300_000 < 4 * best["bytes_read_by_a_rank"]


HELP_OF_ALL = """
import contextlib, io, runpy, sys
sys.path.insert(0, "bench")
for package in ("cupy", "torch", "transformers", "accelerate"):
    sys.modules[package] = None  # an import of it fails
for path in sys.argv[1:]:
    sys.argv = [path, "--help"]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        assert not end.code, (path, end.code)
    assert printed.getvalue().startswith("usage: "), path
"""


def test_help_needs_neither_a_gpu_nor_peers():
    paths = sorted(str(path) for path in (ROOT / "bench").glob("gpu*.py"))
    paths += ["bench/experiment3.py", "bench/experiment4.py"]
    command = [sys.executable, "-c", HELP_OF_ALL, *paths]
    done = finished(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr


def test_a_missing_package_is_named():
    script = "import sys; sys.modules['cupy'] = None; sys.path.insert(0, 'bench'); import runpy; "
    script += "sys.argv = ['gpu.py']; runpy.run_path('bench/gpu.py', run_name='__main__')"
    done = finished(
        [sys.executable, "-c", script], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 1
    assert done.stderr == "this benchmark needs cupy, which is not installed here\n"
