"""The benchmarks run: every kernel, very small, each result compared with its peers' by the
benchmark itself.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib import import_module

import fake_cupy
import pytest
from mpi_helpers import (
    MPIRUN,
    MPIRUN_WITH_OPTIONS,
    OPEN_MPI,
    environment,
    finished,
    mpi_command,
    needs_mpirun,
    run_mpi,
)
from paths import ROOT

from einmpi.planner.mesh import Mesh
from einmpi.schedule.layout import Layout

BENCH = (sys.executable, "-m", "bench")


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
    command = [*BENCH, "kernels", "--scale", "0.02", "--repeat", "1", "--threads", "2"]
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
    lines = [line for line in done.stdout.splitlines() if "torch is left out" not in line]
    assert len(lines) == len(rows) + 1
    assert len({row["kernel"] for row in rows}) == len(rows) >= 25
    assert sum("laid out" in row["peers"] for row in rows) >= 12  # contractions
    for row in rows:
        assert row["threads"] == 2 and row["seconds"] > 0 and row["peers"]
        assert all(peer["ratio"] > 0 for peer in row["peers"].values())


def test_spill():
    command = [*BENCH, "spill", "--size", "100", "--repeat", "1", "--part", "4"]
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
        [*BENCH, "decode", "--cpu-time", *sizes.split()],
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if " is left out: " not in line]
    assert lines[0] == "1 ranks, 1 threads each, median processor time of a token"
    assert " einmpi " in lines[1] and lines[1].endswith("einmpi takes 1.00 times as long")


def test_step():
    command = [*BENCH, "step", "--steps", "20", "--repeat", "2", "--calls", "3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    texts = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines()[1:]]
    assert len(texts) == 17
    assert texts[0] == "step of a power iteration" and texts[-1] == "numpy.einsum, the same"


def test_factorisations():
    command = [*BENCH, "factorisations", "--size", "60", "--repeat", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    cases = [line.split()[0] for line in done.stdout.splitlines()]
    assert cases == ["cholesky", "lu", "solve", "qr"]


def test_arrays():
    command = [*BENCH, "arrays", "--size", "100", "--repeat", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for row in done.stdout.splitlines()[2:]:
        assert row.endswith("| 0 |"), row  # nothing is received by a rank that is alone


@pytest.mark.slow
def test_sparse(tmp_path):
    """Each product equals that of scipy or numpy, which the benchmark checks itself."""
    command = [*BENCH, "sparse", "--small", "--repeat", "1", "--json", str(tmp_path / "rows.json")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = read_rows(tmp_path / "rows.json")
    assert len(rows) == 20 and all(row["ratio"] > 0 for row in rows)


@needs_mpirun
@pytest.mark.slow
@pytest.mark.mpirun
def test_loops(tmp_path):
    """Each loop equals its peer, which the benchmark checks itself."""
    rows_file = tmp_path / "rows.json"
    command = ["-m", "bench", "loops", "--size", "small", "--repeat", "1", "--json", str(rows_file)]
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
    command = ["-m", "bench", "experiment2", *arguments, "--json", str(target)]
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
    command = ["-m", "bench", "chain", "--size", "200", "--repeats", "1"]
    command += ["--strategies", "eindecomp"]
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
    command = [*BENCH, "node", "--sizes", "80", "--cores", "1", "--repeat", "1"]
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
    command = [*BENCH, "experiment3", "--models", "tiny", "--layers", "2"]
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
    command = ["-m", "bench", "experiment3", "--run", "--layers", "2", "--cases", "4x16"]
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
    command = [*BENCH, "experiment4", "--backend", "numpy", "--dtype", "float32"]
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
    fake_cupy.install(monkeypatch)
    experiment4 = import_module("bench.paper.experiment4")
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


@pytest.mark.slow
def test_experiment4_plans(tmp_path):
    target = tmp_path / "rows.json"
    command = [*BENCH, "experiment4", "--plan", "--models", "tiny"]
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
    paths = sorted(str(path) for path in (ROOT / "bench" / "gpu").glob("*.py"))
    paths += [f"bench/paper/experiment{number}.py" for number in (1, 3, 4)]
    paths += ["bench/paper/mpi_algorithms.py"]
    command = [sys.executable, "-c", HELP_OF_ALL, *paths]
    done = finished(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr


def test_a_missing_package_is_named():
    script = "import sys; sys.modules['cupy'] = None; import runpy; "
    script += "sys.argv = ['gpu.py']; runpy.run_path('bench/gpu/gpu.py', run_name='__main__')"
    done = finished(
        [sys.executable, "-c", script], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 1
    assert done.stderr.startswith("this benchmark needs cupy, which is not installed; pip install")


# ---- experiment 1 --------------------------------------------------------------------------------

MPICC = MPIRUN.with_name("mpicc")
needs_mpicc = pytest.mark.skipif(
    not MPICC.exists() or shutil.which("cc") is None, reason="there is no mpicc, or no compiler"
)

# What each call receives over all ranks, in elements; p is the number of ranks.
CALLS_OF_MPI = """
import sys
import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
p, rank = world.size, world.rank
six, many = np.zeros(6), np.zeros(6 * p)
following, preceding = (rank + 1) % p, (rank - 1) % p
lengths = [r + 1 for r in range(p)]
pieces = np.zeros(sum(lengths))
prepared = world.Send_init(six, following), world.Recv_init(np.zeros(6), preceding)
pair = world.Split(rank % 2, -rank)  # its ranks have other numbers than in the world


def start_twice():
    for _ in range(2):
        MPI.Prequest.Startall(prepared)
        MPI.Request.Waitall(prepared)


def send_in_pair():
    if pair.size > 1 and pair.rank < 2:
        pair.Sendrecv(six, 1 - pair.rank, 0, np.zeros(6), 1 - pair.rank)


calls = {
    "sendrecv": lambda: world.Sendrecv(six, following, 0, np.zeros(6), preceding),
    "control": lambda: world.Sendrecv(six, following, 1, np.zeros(6), preceding, 1),
    "prepared": start_twice,
    "self": lambda: world.Sendrecv(six, rank, 0, np.zeros(6), rank),
    "pair": send_in_pair,
    "bcast": lambda: world.Bcast(six, root=p - 1),
    "gather": lambda: world.Gather(six, many, root=0),
    "scatter": lambda: world.Scatter(many, six, root=0),
    "allgather": lambda: world.Allgather(six, many),
    "allgatherv": lambda: world.Allgatherv(np.zeros(rank + 1), [pieces, lengths]),
    "in place": lambda: world.Iallgatherv(MPI.IN_PLACE, [pieces, lengths]).Wait(),
    "alltoall": lambda: world.Alltoall(many, many.copy()),
    "reduce": lambda: world.Reduce(six, np.zeros(6), root=0),
    "allreduce": lambda: world.Allreduce(six, np.zeros(6)),
    "reduce_scatter": lambda: world.Reduce_scatter(pieces, np.zeros(rank + 1), lengths),
}
for name, call in calls.items():
    MPI.Pcontrol(1)
    call()
    MPI.Pcontrol(0)
"""


def received_elements(p):
    """Return what the calls above receive over all ranks."""
    everything = p * (p + 1) // 2
    in_pairs = sum(12 for parity in range(2) if len(range(parity, p, 2)) > 1)
    return {
        "sendrecv": 6 * p,
        "control": 0,
        "prepared": 12 * p,
        "self": 0,
        "pair": in_pairs,
        "bcast": 6 * (p - 1),
        "gather": 6 * (p - 1),
        "scatter": 6 * (p - 1),
        "allgather": 6 * p * (p - 1),
        "allgatherv": (p - 1) * everything,
        "in place": (p - 1) * everything,
        "alltoall": 6 * p * (p - 1),
        "reduce": 6 * (p - 1),
        "allreduce": 12 * (p - 1),
        "reduce_scatter": (p - 1) * everything,
    }


@pytest.mark.slow
@needs_mpirun
@needs_mpicc
@pytest.mark.mpirun
@pytest.mark.parametrize("ranks", [2, 3])
def test_calls_of_mpi_are_counted(tmp_path, ranks):
    counts = import_module("bench.lib.pmpi_counts")
    layer = counts.build_layer(str(MPICC), tmp_path)
    script = tmp_path / "calls.py"
    script.write_text(CALLS_OF_MPI)
    *launcher, python, name = mpi_command(ranks, [str(script)])
    command = [*launcher, "env", *counts.settings(layer, tmp_path, True), python, name]
    done = finished(command, cwd=tmp_path, env=environment())
    assert done.returncode == 0, done.stderr
    sections = counts.read_counts(tmp_path)
    wanted = received_elements(ranks)
    assert len(sections) == len(wanted)
    for (name, elements), counted in zip(wanted.items(), sections, strict=True):
        assert sum(counted.payload) == 8 * elements, name
        assert sum(counted.control) == (48 * ranks if name == "control" else 0), name


@needs_mpirun
@needs_mpicc
@pytest.mark.slow
@pytest.mark.mpirun
def test_experiment1_counts_what_is_predicted(tmp_path):
    """The benchmark ends with status 1 if a plan said something else."""
    target = tmp_path / "rows.json"
    command = [*BENCH, "experiment1", "--parts", "words", "contractions"]
    command += ["--count-size", "60", "--count-ranks", "2", "3", "--contraction-ranks", "2", "3"]
    command += ["--peers", "mpi4py", "cosma", "--scale", "0.2", "--repeat", "1"]
    command += ["--mpirun", MPIRUN_WITH_OPTIONS, "--json", str(target)]
    done = finished(command, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stderr
    assert "cosma is left out: " in done.stdout
    found = json.loads(target.read_text())
    assert set(found) == {"bench", "machine", "date", "command", "rows"}
    chains = [row for row in found["rows"] if row["part"] == "words"]
    assert len(chains) == 2 * 2 * 5
    own = [row for row in chains if row["peer"].startswith("einmpi")]
    for row in own:
        assert row["words"] == row["predicted"] > 0
        assert row["bytes"] == row["bytes_predicted"] == 8 * row["words"]
    least = {(row["kind"], row["ranks"]): row for row in own if row["peer"] == "einmpi eindecomp"}
    for row in chains:
        assert row["words"] >= least[row["kind"], row["ranks"]]["words"]
    contractions = [row for row in found["rows"] if row["part"] == "contraction words"]
    assert len({row["contraction"] for row in contractions}) == 14
    assert [row["ranks"] for row in contractions] == [2] * 14 + [3] * 14
    for row in contractions:
        assert row["words"] == row["predicted"] >= row["bound"]
        assert row["bytes"] == row["bytes_predicted"] == 8 * row["words"]
    times = [row for row in found["rows"] if row["part"] == "contractions"]
    assert len(times) == 14 and all(row["seconds"] > 0 for row in times)


HLO = """
ENTRY %main {
  %all-gather.1 = f64[240,480]{0,1} all-gather(%p), replica_groups=mesh['a'=2,'b'=2] {'b'}, dimensions={1}
  %all-gather.2 = f64[10]{0} all-gather(%p), replica_groups={{0,1},{2,3}}, dimensions={0}
  %all-reduce = (f64[3,5]{1,0}, f64[]) all-reduce(%a, %b), replica_groups=[1,4]<=[4], to_apply=%add
  %reduce-scatter = f32[6]{0} reduce-scatter(%c), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
  %permute = f64[7]{0} collective-permute(%d), source_target_pairs={{0,1},{1,0},{2,2},{3,3}}
  %dot = f64[240,240]{1,0} dot(%all-gather.1, %e)
}
"""  # noqa: E501


def test_words_of_a_compiled_program_of_xla():
    words_of_hlo = import_module("bench.paper.peer_words").words_of_hlo
    gathers = 2 * 240 * 480 + 2 * 10
    assert words_of_hlo(HLO) == gathers + 2 * 3 * 16 + 2 * 2 * 6 + 2 * 7
    for line in (
        "%a = f64[2] all-gather-start(%b)",
        "%a = f64[2] while(%b)",
        "%a = f64[2] all-to-all(%b)",
    ):
        with pytest.raises(ValueError, match=r"counted|devices"):
            words_of_hlo(line)


def test_a_peer_that_moves_fewer_words_is_named():
    words_below_ours = import_module("bench.paper.experiment1").words_below_ours
    own = {"part": "words", "kind": "uniform", "peer": "einmpi eindecomp", "ranks": 4, "words": 9}
    equal = {**own, "peer": "mpi4py"}
    less = {**own, "peer": "heat", "words": 8}
    assert words_below_ours([own, equal, {**less, "ranks": 2}]) == []
    assert words_below_ours([own, less]) == ["heat moves fewer words: uniform, 4 ranks"]
    assert words_below_ours([own, {**less, "peer": "dask"}]) == []  # its work is not shared evenly


def test_words_that_no_plan_has_predicted_are_named():
    not_as_predicted = import_module("bench.paper.experiment1").not_as_predicted
    right = {"part": "contraction words", "contraction": "1MM", "ranks": 3}
    right |= {"words": 5, "predicted": 5, "bytes": 40, "bytes_predicted": 40}
    assert not_as_predicted([right, {"part": "words", "words": 3}]) == []
    (line,) = not_as_predicted([right, right | {"words": 6}])
    assert line.startswith("1MM, 3 ranks: 6 words, but 5 predicted")
    (line,) = not_as_predicted([right | {"bytes": 48}])
    assert line.endswith("48 bytes, but 40 scheduled")


def test_a_peer_that_is_not_installed_is_named(monkeypatch, capsys):
    experiment1 = import_module("bench.paper.experiment1")
    packages = import_module("bench.lib.packages")
    for module in (experiment1, packages):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    options = experiment1.make_parser().parse_args(["--scalapack-mpirun", "no-such-mpirun"])
    assert experiment1.find_peers(experiment1.PEERS, options, ROOT) == []
    assert not packages.has_package("opt_einsum", "opt_einsum")
    lines = capsys.readouterr().out.splitlines()
    text = "\n".join(lines)
    assert "dask is left out: distributed is not installed; pip install 'einmpi[peers]'" in text
    assert "scalapack is left out: there is no no-such-mpirun; Debian has it: apt-get" in text
    assert "opt_einsum is left out: opt_einsum is not installed; pip install" in text
    assert [line.split()[0] for line in lines] == [*experiment1.PEERS, "opt_einsum"]


def test_contractions_without_opt_einsum_have_no_ratio(monkeypatch):
    """Words are counted and times are measured; opt_einsum is another process."""
    experiment1 = import_module("bench.paper.experiment1")
    monkeypatch.setattr(experiment1, "has_package", lambda peer, name: False)
    monkeypatch.setattr(experiment1, "Peer", FakePeer)
    own = {"seconds": 0.5, "all": [0.5], "threads": 1}
    monkeypatch.setattr(experiment1, "take_turns", lambda peers, *_: [own] * len(peers))
    options = experiment1.make_parser().parse_args([])
    setup = experiment1.Setup(options, [0, 1], ROOT, [])
    rows = experiment1.time_contractions(setup, [])
    assert len(rows) == 14 and all(row["seconds"] == 0.5 for row in rows)
    assert not any("ratio" in row or "opt_einsum" in row for row in rows)


class FakePeer:
    def __init__(self, *arguments, **options):
        pass

    def end(self):
        pass


def test_peers_get_the_packages_of_this_process(monkeypatch):
    node = import_module("bench.paper.node")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    assert node.environment_of_peers()["PYTHONPATH"] == f"{ROOT}{os.pathsep}/somewhere"
    monkeypatch.delenv("PYTHONPATH")
    assert node.environment_of_peers()["PYTHONPATH"] == str(ROOT)


def test_a_peer_that_cannot_start_is_left_out_in_one_line(capfd):
    node = import_module("bench.paper.node")
    peers = [(node.Peer("numpy", [min(os.sched_getaffinity(0))]), name) for name in ("numpy", "x")]
    try:
        rows = node.take_turns(peers, {"case": "chain", "size": 20, "skew": 1}, 1)
    finally:
        for peer, _ in peers:
            peer.end()
    assert [row["peer"] for row in rows] == ["numpy"]
    assert capfd.readouterr().err == "  x is left out: KeyError: 'x'\n"


def test_blocks_that_a_plan_reads_are_cuts_of_an_array():
    """On 8 = 2·2·2 ranks, 7 indices have the windows (0, 1) and (2,)."""
    layout_of_cuts = import_module("bench.lib.node_peers").layout_of_cuts
    mesh = Mesh(8)
    cuts = (None, None, None)
    for bound, splits, wanted in (
        ((7, 7), ((0, 0), (1, 1), (2, 0)), (0, 0, 1)),
        ((16, 16), ((0, 0), (1, 1), (2, 0)), (0, 1, 0)),
        ((1, 7), ((0, 1), (1, 1), (2, 1)), None),
    ):
        found = layout_of_cuts(Layout(mesh, bound, cuts, splits))
        assert found == (wanted and Layout(mesh, bound, wanted))


@needs_mpirun
@pytest.mark.slow
@pytest.mark.mpirun
def test_experiment1_times(tmp_path):
    """Every way has the same result, which the benchmark checks itself.

    It starts the mpirun beside its Python, whatever the system has.
    """
    target = tmp_path / "rows.json"
    command = [*BENCH, "experiment1", "--parts", "time", "--sizes", "60"]
    command += ["--dtypes", "float64", "--repeat", "1", "--peers", "numpy", "mpi4py", "ctf"]
    command += ["--json", str(target)]
    done = finished(command, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stderr
    assert "differs" not in done.stderr and "has ended" not in done.stderr
    rows = json.loads(target.read_text())["rows"]
    assert [row["kind"] for row in rows] == ["uniform"] * 6 + ["skewed"] * 6
    assert rows[0]["peer"] == "einmpi eindecomp" and rows[0]["ratio"] == 1


@needs_mpirun
@needs_mpicc
@pytest.mark.slow
@pytest.mark.mpirun
@pytest.mark.skipif(OPEN_MPI, reason="it counts what MPICH sends by UCX")
def test_algorithms_of_mpi_send_no_less_than_the_payload(tmp_path):
    target = tmp_path / "rows.json"
    command = [*BENCH, "mpi_algorithms", "--ranks", "2", "--kib", "1", "100"]
    command += ["--mpirun", str(MPIRUN), "--json", str(target)]
    done = finished(command, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stderr
    rows = json.loads(target.read_text())["rows"]
    assert len(rows) == 20 and len(done.stdout.splitlines()) == 11
    for row in rows:
        assert row["sent"] >= row["payload"] > 0, row


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("smpirun") is None, reason="needs SimGrid")
def test_scaling_on_two_networks(tmp_path):
    """A network beside another one has the seconds that it has alone."""

    def run(*arguments):  # a process of its own, because it registers a strategy
        command = [*BENCH, "scaling", *map(str, arguments)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)

    point = ["--works", "mttkrp", "--ranks", 64, "--strategies", "data"]
    both, single = tmp_path / "both.json", tmp_path / "single.json"
    run(*point, "--networks", "fat-tree", "dragonfly", "--json", both)
    run(*point, "--networks", "dragonfly", "--json", single)
    tree, dragonfly = read_rows(both)
    assert [dragonfly] == read_rows(single) and tree["seconds"] < dragonfly["seconds"]
    picture = tmp_path / "curves.svg"
    run("--read", both, single, "--plot", picture)
    text = picture.read_text()
    assert "mttkrp, strong, fat-tree" in text and text.count("<polyline") == 1


# ---- points in several processes ----------------------------------------------------------------


def square(number):
    if number == 3:
        raise ValueError("three")
    if number == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def test_tasks_in_processes_fail_alone(capfd):
    """An error and a killed process cost their own result only."""
    processes = import_module("bench.lib.processes")
    for jobs in (1, 3):
        found = {each.task: each for each in processes.outcomes(square, range(6), jobs, 60)}
        assert {task: each.result for task, each in found.items()} == {
            0: 0, 1: 1, 2: 4, 3: None, 4: None, 5: 25,
        }  # fmt: skip
        assert found[3].failed == "ValueError: three"
        assert found[4].failed == "its process ended with status -9"
        assert found[5].failed == "" and found[5].memory > 0
    assert capfd.readouterr().err.count("Traceback") == 2


def test_tasks_begin_in_order():
    processes = import_module("bench.lib.processes")
    assert [each.task for each in processes.outcomes(square, [5, 0, 2, 1], 1, 60)] == [5, 0, 2, 1]


@pytest.mark.parametrize("leaves_early", [False, True])
def test_a_task_whose_time_is_over_ends_what_it_started(tmp_path, leaves_early):
    processes = import_module("bench.lib.processes")
    replays = import_module("einmpi.simulate.simulation")
    started = tmp_path / "started"

    def start_a_long_program(task):
        if task == "short":
            while not started.exists():
                time.sleep(0.05)
            return
        program = "sleep 600 & echo $! > draft; mv draft started; wait"
        with replays._running(["sh", "-c", program], tmp_path):
            time.sleep(600)

    tasks = processes.outcomes(
        start_a_long_program, ["long", "short"], 2, 600 if leaves_early else 5
    )
    if leaves_early:
        assert next(tasks).task == "short"
        tasks.close()
    else:
        found = {each.task: each.failed for each in tasks}
        assert found == {"short": "", "long": "more than 5 s"}
    with pytest.raises(ProcessLookupError):
        while True:  # a killed process is there until its parent has seen it
            os.kill(int(started.read_text()), 0)
            time.sleep(0.05)


def point_row(
    work="chain", curve="strong", ranks=64, strategy="eindecomp", network="fat-tree", **figures
):
    names = {"work": work, "curve": curve, "network": network, "strategy": strategy, "ranks": ranks}
    return {**names, **figures}


def test_table_of_scaling():
    table = import_module("bench.paper.scaling_table")
    rows = [
        point_row(seconds=0.0222, error=-0.01),
        point_row(seconds=0.0241, error=0.125, network="dragonfly"),
        point_row(strategy="data", refused="more than 5 s"),
        point_row(ranks=1024, seconds=38.311, error=0.5),
        point_row(ranks=1024, seconds=38.309, error=-0.25, network="dragonfly"),
        point_row(work="mttkrp", curve="weak", ranks=8, seconds=1.0, error=0.0),
        # The same points again: what has seconds counts more than what has none.
        point_row(strategy="data", seconds=0.9996, error=0.02),
        point_row(strategy="data", seconds=0.9996, error=0.03, network="dragonfly"),
        point_row(strategy="data", refused="more than 5 s"),
        point_row(ranks=1024, strategy="data", refused="21,000,000 messages"),
        point_row(ranks=4096, strategy="data", seconds=0.0028, error=0.0),
    ]
    where = "(chain, strong, eindecomp)"
    assert table.tables(rows, ["eindecomp", "data"]).splitlines() == [
        "| work | ranks | eindecomp | data |",
        "|---|---|---|---|",
        "| chain, strong | 64 | 22.2 / 24.1 | 1,000 |",
        "| chain, strong | 1,024 | 38,310 | not simulated |",
        "| chain, strong | 4,096 | not simulated | 2.8 / — |",
        "",
        "| network | ranks | points | least error | largest error |",
        "|---|---|---|---|---|",
        "| fat-tree | 8 | 1 | +0.0% (MTTKRP, weak, eindecomp) | +0.0% (MTTKRP, weak, eindecomp) |",
        "| fat-tree | 64 | 2 | -1.0% (chain, strong, eindecomp) | +2.0% (chain, strong, data) |",
        f"| fat-tree | 1,024 | 1 | +50.0% {where} | +50.0% {where} |",
        "| fat-tree | 4,096 | 1 | +0.0% (chain, strong, data) | +0.0% (chain, strong, data) |",
        "| dragonfly | 64 | 2 | +3.0% (chain, strong, data) | +12.5% (chain, strong, eindecomp) |",
        f"| dragonfly | 1,024 | 1 | -25.0% {where} | -25.0% {where} |",
        "",
        "- chain, strong, 1,024 ranks, data: 21,000,000 messages",
    ]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("smpirun") is None, reason="needs SimGrid")
def test_scaling_in_processes_has_the_same_rows(tmp_path):
    def run(*arguments):  # a process of its own, because it registers a strategy
        command = [*BENCH, "scaling", *map(str, arguments)]
        done = subprocess.run(
            command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300
        )
        return done.stdout

    alone, together, few, added = (tmp_path / f"{number}.json" for number in range(4))
    wanted = ["--works", "mttkrp", "--ranks", 8, 2, "--strategies", "data", "summa"]
    run(*wanted, "--json", alone)
    printed = run(*wanted, "--jobs", 3, "--json", together)
    rows = read_rows(alone)
    assert [(row["ranks"], row["strategy"]) for row in rows] == [
        (2, "data"), (2, "summa"), (8, "data"), (8, "summa"),
    ]  # fmt: skip
    assert read_rows(together) == rows
    assert printed.count(" s of CPU time, ") == 4
    # Of the first rank's messages, those that one point has are too many.
    messages = [row["messages"] for row in rows]
    run(*wanted, "--most-messages", max(messages) - 1, "--json", few)
    for row, whole in zip(read_rows(few), rows, strict=True):
        if whole["messages"] == max(messages):
            assert row["refused"] == f"{whole['messages']:,} messages" and "seconds" not in row
        else:
            assert row == whole
    # Points of an earlier run are taken as they are, and only the others are simulated.
    printed = run(*wanted, "--done", few, "--json", added)
    assert read_rows(added) == rows
    assert printed.count(" s of CPU time, ") == messages.count(max(messages))
