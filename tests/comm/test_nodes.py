"""Runs on several nodes: results are right, and traffic between nodes is as planned."""

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
from distributed import assert_close, dry_run_on_nodes, run_on_threads
from mpi_helpers import OPEN_MPI, needs_mpirun, run_mpi
from plan_oracle import random_graphs
from run_cases import cases, strategies

import einmpi
from einmpi.api import options_of
from einmpi.cli.main import main
from einmpi.comm.base import Comm, even_nodes
from einmpi.comm.threads import run_threads
from einmpi.compiled.program import Compiled
from einmpi.planner.make_plan import make_plan
from einmpi.planner.mesh import Mesh
from einmpi.planner.plan import Options
from einmpi.runtime import transfer as messages

CASES = cases()
MACHINE = """measured = "in a test"
[inside]
latency = "1 us"
bandwidth = "5 GB/s"
[between]
latency = "20 us"
bandwidth = "0.1 GB/s"
[kernels]
float64 = "10 Gflop/s"
float32 = "20 Gflop/s"
other = "1 Gop/s"
"""


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "machine.toml").write_text(MACHINE)
    return str(tmp_path / "machine.toml")


@pytest.mark.sampled(1, always=["attention, odd", "nothing"])
@pytest.mark.parametrize(
    "name",
    [
        "chain, even",
        "attention, even",
        "attention, odd",
        "single number",
        "diagonal",
        "statistics",
        "nothing",
    ],
)
def test_bytes_between_nodes_are_as_planned(name, machine):
    job, arrays = CASES[name]
    reference = einmpi.reference(job, arrays)
    for ranks, nodes in ((8, 2), (6, 3), (8, 4)):
        for options in ({}, {"strategy": "eindecomp-paper"}, {"machine": machine})[
            : 3 if nodes == 2 else 1
        ]:
            done = run_on_threads(job, ranks, arrays, nodes=nodes, **options)
            assert_close(done.outputs, reference)
            assert (done.plan.nodes, done.plan.mesh) == (nodes, Mesh(ranks, nodes))
            found = done.moved, sum(done.between)
            assert found == (done.plan.bytes_predicted, done.plan.bytes_between), (
                ranks,
                nodes,
                options,
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_strategy_on_nodes(name):
    """Programs take turns with the places: all strategies on one, our own on another."""
    job, arrays = CASES[name]
    reference = einmpi.reference(job, arrays)
    turn = list(CASES).index(name) % 2
    for ranks, nodes, every_strategy in (
        ((8, 2, True), (16, 4, False)),
        ((12, 3, True), (12, 4, False)),
    )[turn]:
        chosen = strategies(job, ranks) if every_strategy else ["eindecomp"]
        for strategy in chosen:
            done = run_on_threads(job, ranks, arrays, nodes=nodes, strategy=strategy)
            assert_close(done.outputs, reference)
            assert (done.moved, sum(done.between)) == (
                done.plan.bytes_predicted,
                done.plan.bytes_between,
            )


PLACES = (
    (2, 1),
    (3, 1),
    (4, 2),
    (5, 1),
    (6, 1),
    (6, 2),
    (6, 3),
    (8, 2),
    (8, 4),
    (9, 3),
    (12, 2),
    (12, 4),
    (16, 4),
)


@pytest.mark.parametrize("seed, graphs", [(1, 12), pytest.param(2, 60, marks=pytest.mark.slow)])
def test_bytes_of_any_graph_are_as_planned(seed, graphs):
    """Extents are all but never those that divide."""
    rng = random.Random(seed)
    for graph in random_graphs(seed, graphs, (2, 4, 7), range(1, 14)):
        ranks, nodes = rng.choice(PLACES)
        for strategy in ("eindecomp", "eindecomp-paper", "sqrt"):
            plan = make_plan(graph, ranks, Options(strategy=strategy, nodes=nodes))
            found = tuple(map(sum, zip(*dry_run_on_nodes(plan), strict=True)))
            assert found == (plan.bytes_predicted, plan.bytes_between), (
                str(graph),
                ranks,
                nodes,
                strategy,
            )


def test_messages_in_pieces(monkeypatch):
    """A buffer of 256 bytes: everything goes pair by pair."""
    monkeypatch.setattr(messages, "MESSAGE_BUFFER_BYTES", 256)
    job, arrays = CASES["chain, even"]
    for strategy in ("eindecomp", "replicate"):
        done = run_on_threads(job, 8, arrays, nodes=4, strategy=strategy)
        assert_close(done.outputs, einmpi.reference(job, arrays))
        assert sum(done.between) == done.plan.bytes_between


@pytest.mark.parametrize("ranks, nodes", [(96, 6), pytest.param(1024, 64, marks=pytest.mark.slow)])
def test_a_dry_run_on_many_nodes(ranks, nodes):
    plan = einmpi.plan(einmpi.load("jobs/chain.toml", s=3 * 1024), ranks, nodes=nodes)
    received, between = zip(*dry_run_on_nodes(plan), strict=True)
    assert (sum(received), sum(between)) == (plan.bytes_predicted, plan.bytes_between)
    assert max(between) * ranks <= 1.05 * sum(between)


@pytest.mark.parametrize(
    "skew, ranks, nodes, total, one_level, two_levels",
    [
        (1, 16, 4, 1500, 900, 600),
        (10, 16, 4, 270, 180, 70),
        pytest.param(1, 64, 8, 2700, 1500, 900, marks=pytest.mark.slow),
        pytest.param(10, 64, 8, 690, 480, 150, marks=pytest.mark.slow),
    ],
)
def test_two_levels_send_less_between_nodes(skew, ranks, nodes, total, one_level, two_levels):
    """In hundredths of s², as docs/planner.md has them."""
    job = einmpi.load("jobs/chain.toml", s=1920, skew=skew)
    flat, aware = einmpi.plan(job, ranks), einmpi.plan(job, ranks, nodes=nodes)
    unit = 1920 * 1920 * 8 // 100
    assert (flat.bytes_predicted, aware.bytes_predicted) == (total * unit, total * unit)
    assert sum(between for _, between in dry_run_on_nodes(flat, nodes)) == one_level * unit
    assert (
        sum(between for _, between in dry_run_on_nodes(aware))
        == two_levels * unit
        == aware.bytes_between
    )


def test_results_feed_the_next_call_on_the_same_nodes():
    job = einmpi.program("Y[i,k] = sum(X[i,j] * X[j,k])", X=(12, 12))
    whole = np.arange(144.0).reshape(12, 12) / 100

    def on_rank(comm):
        step = Compiled(job, comm, options_of(job))
        first = step({"X": einmpi.DistArray.from_global(whole, comm)})["Y"]
        second = step({"X": first})["Y"]
        ((plan, _),) = [ready for kinds, ready in step.ready.items() if kinds[0][1] == first.layout]
        return second.gather(), step.measured.between, plan

    results = run_threads(8, on_rank, nodes=2)
    plan = results[0][2]
    assert (
        plan.mesh == Mesh(8, 2) and sum(between for _, between, _ in results) == plan.bytes_between
    )
    square = whole @ whole
    np.testing.assert_allclose(results[0][0], square @ square)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["chain, even", "attention, odd", "statistics"])
@pytest.mark.parametrize(
    "nodes", [(0, 0, 0, 1), (0, 0, 0, 0, 1, 1, 1), (0, 1, 1, 1, 1, 1), (0, 1, 2, 0, 1)]
)
def test_uneven_nodes(name, nodes):
    """The plan ignores nodes here, but traffic between them is still known before the run."""
    job, arrays = CASES[name]

    def on_rank(comm):
        comm.nodes = nodes
        assert even_nodes(comm) is None
        compiled = Compiled(job, comm, options_of(job))
        outputs = {name: array.gather() for name, array in compiled(arrays).items()}
        ((plan, _),) = compiled.ready.values()
        return outputs, compiled.measured.between, plan

    results = run_threads(len(nodes), on_rank)
    plan = results[0][2]
    assert_close(results[0][0], einmpi.reference(job, arrays))
    assert plan.mesh.nodes == 1 and plan.nodes == max(nodes) + 1 and not plan.knows_nodes
    assert plan.bytes_between == sum(between for _, between, _ in results) > 0


def test_which_nodes_are_even():
    comm = Comm(0, 6, 3)
    assert comm.nodes == (0, 0, 1, 1, 2, 2) and even_nodes(comm) == 3
    for nodes in ((0, 1, 0, 1, 0, 1), (0, 0, 0, 0, 1, 1)):
        comm.nodes = nodes
        assert even_nodes(comm) is None


# ---- real mpirun ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
@pytest.mark.skipif(OPEN_MPI, reason="only MPICH can be told to see several nodes on one machine")
def test_ranks_dealt_to_nodes_in_turn(machine):
    """Ranks 0 and 2 on one node, 1 and 3 on the other: they are numbered node by node."""
    job = [
        "-m",
        "einmpi",
        "verify",
        "jobs/chain.toml",
        "--machine",
        machine,
        "--json",
        "-",
        "--set",
        "s=96",
    ]
    done = run_mpi(4, job, env={"MPIR_CVAR_ODD_EVEN_CLIQUES": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (
        found["nodes"] == 2
        and 0 < found["bytes_between"] == found["bytes_between_predicted"] < found["bytes_moved"]
    )
    assert found["seconds_predicted"] > 0
    # One write per line: without a buffer, print would mix parts of it with lines of other ranks.
    code = (
        "from einmpi.comm.mpi import comm_of; c = comm_of()\n"
        "print(f'{c.rank} {c.nodes}\\n', end='')"
    )
    done = run_mpi(3, code, env={"MPIR_CVAR_ODD_EVEN_CLIQUES": "1"})  # two and one
    assert sorted(done.stdout.splitlines()) == [f"{rank} (0, 0, 1)" for rank in range(3)]
    done = run_mpi(3, job, env={"MPIR_CVAR_ODD_EVEN_CLIQUES": "1"})
    found = json.loads(done.stdout)
    assert 0 < found["bytes_between"] == found["bytes_between_predicted"] < found["bytes_moved"]


# ---- the command line ----------------------------------------------------------------------------


def test_plan_on_nodes_with_a_machine(machine, capsys):
    assert main(["plan", "jobs/chain.toml", "-n", "64", "--nodes", "8", "--machine", machine]) == 0
    text = capsys.readouterr().out
    assert text.startswith("64 ranks on 8 nodes (mesh 2·2·2 | 2·2·2), strategy eindecomp\n")
    assert (
        " between nodes\n" in text
        and "objective    these seconds, by a machine in a test\n" in text
    )
    assert (
        main(
            [
                "plan",
                "jobs/chain.toml",
                "-n",
                "64",
                "--nodes",
                "8",
                "--machine",
                machine,
                "--json",
                "-",
            ]
        )
        == 0
    )
    data = json.loads(capsys.readouterr().out)
    assert data["nodes"] == 8 and data["bytes_between_predicted"] < data["bytes_predicted"]
    for key in ("seconds_predicted", "bytes_between_predicted"):
        assert sum(vertex[key] for vertex in data["vertices"]) == pytest.approx(data[key])
    assert (
        main(
            [
                "plan",
                "jobs/chain.toml",
                "-n",
                "8",
                "--nodes",
                "2",
                "--machine",
                machine,
                "--compare",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert text.split("\n")[0].split("  ")[0] == "strategy" and "between nodes  seconds" in text
    assert "eindecomp takes least, " in text
    assert main(["plan", "jobs/chain.toml", "-n", "8", "--nodes", "3"]) == 2
    assert (
        capsys.readouterr().err
        == "nodes: 8 ranks on 3 nodes; expected a divisor of the ranks: 1, 2, 4, 8\n"
    )


def test_the_machine_of_a_job_file(machine, tmp_path):
    (tmp_path / "job.toml").write_text(
        'program = "Z[i] = 2 * X[i]"\ninputs.X = { shape = [8], random = "ones" }\n'
        '[plan]\nmachine = "machine.toml"\n'
    )
    job = einmpi.load(tmp_path / "job.toml")
    assert job.machine == machine and einmpi.plan(job, 2).seconds_predicted > 0


@pytest.mark.slow
def test_every_process_makes_the_same_plan(machine):
    code = f"""import einmpi
job = einmpi.load("jobs/chain.toml")
print(einmpi.plan(job, 12, nodes=4, machine={machine!r}).digest)
print(einmpi.plan(job, 12, nodes=4).digest)"""
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
