"""Replays by SimGrid: times that can be computed by hand, the same each time."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from in_process import einmpi_here
from mpi_helpers import environment
from paths import ROOT

import einmpi
from einmpi.planner.machine import Machine
from einmpi.simulate import simulation
from einmpi.simulate.cluster import TOPOLOGIES, make_cluster
from einmpi.simulate.simulation import Place, reason_against, simulate_plan

pytestmark = pytest.mark.skipif(
    shutil.which("smpirun") is None, reason="SimGrid is not installed (libsimgrid-dev)"
)


def place_of(spec, ranks, machine=None):
    cluster = make_cluster(spec, ranks, machine)
    nodes = -(-ranks // cluster.cores)
    return Place(cluster.platform(), cluster.hosts()[:nodes], machine)


def seconds_of(job, ranks, spec, machine=None, **options):
    place = place_of(spec, ranks, machine)
    plan = einmpi.plan(job, ranks, nodes=len(place.hosts))
    return simulate_plan(plan, place, **options).seconds


def test_one_rank_computes():
    job = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=(100, 100), B=(100, 100))
    assert seconds_of(job, 1, "speed=1Gf") == pytest.approx(2e6 / 1e9)


@pytest.mark.parametrize("spec, bandwidth, latency", [
    ("nodes=2,topology=flat,bw=1GB,lat=10us", 1e9, 10e-6),
    ("nodes=2,topology=flat,bw=2GB,lat=30us", 2e9, 30e-6),
    ("nodes=1,cores=2,inside_bw=500MB,inside_lat=40us", 5e8, 40e-6),
])  # fmt: skip
def test_two_ranks_exchange(spec, bandwidth, latency):
    """Both need all of B and have half of it: 40 kB each way, at the same time."""
    job = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=(4000, 100), B=(100, 100))
    operations = 2 * 2000 * 100 * 100
    expected = operations / 1e12 + latency + 40_000 / bandwidth
    found = seconds_of(job, 2, f"{spec},speed=1000Gf", shared=False)
    assert found == pytest.approx(expected, rel=1e-3)  # SimGrid adds headers


def test_a_rank_copies_the_messages_of_its_node_one_by_one():
    """Four ranks have a quarter of B each: a rank receives three messages of 10 kB."""
    job = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=(4000, 100), B=(100, 50))
    spec = "nodes=1,cores=4,inside_bw=500MB,inside_lat=40us,speed=1000Gf"
    operations = 2 * 1000 * 100 * 50
    expected = operations / 1e12 + 3 * (40e-6 + 10_000 / 5e8)
    assert seconds_of(job, 4, spec, shared=False) == pytest.approx(expected, rel=1e-3)


def test_the_ranks_of_a_node_share_its_link():
    """On 2 × 2 ranks, both ranks of a node receive at the same time."""
    machine = Machine(1, 1, 1, 1000, {"float64": 1000}, 1000, "fast but for the network")
    job = einmpi.load(ROOT / "jobs" / "chain.toml")
    alone = seconds_of(job, 4, "cores=2,topology=flat", machine)
    halved = seconds_of(job, 4, "cores=2,topology=flat,bw=1GB", machine)
    assert halved == pytest.approx(2 * alone, rel=0.01)


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_small_networks(topology, nodes):
    """SimGrid accepts them, and messages arrive."""
    place = place_of(f"topology={topology}", nodes)
    assert reason_against(place) is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_same_seconds_twice(topology):
    job = einmpi.load(ROOT / "jobs" / "chain.toml")
    spec = f"cores=4,topology={topology}"
    assert seconds_of(job, 16, spec) == seconds_of(job, 16, spec)


def test_coarser_events_change_little(monkeypatch):
    """Where there are many messages: at most 5 ns for each of up to 20 transfers, of 16 µs."""
    job = einmpi.load(ROOT / "jobs" / "chain.toml", s=50)
    spec = "cores=4,topology=fat-tree"
    exact = seconds_of(job, 28, spec)
    monkeypatch.setattr(simulation, "_MANY_MESSAGES", 1)
    coarse = seconds_of(job, 28, spec)
    assert coarse != exact
    assert abs(coarse - exact) < 20 * 5e-9


def test_the_command(tmp_path):
    shutil.copy(ROOT / "jobs" / "chain.toml", tmp_path)
    words = ["simulate", "chain.toml", "-n", "8", "--cluster", "cores=4", "--traces", "kept"]
    done = einmpi_here(tmp_path, [*words, "--compare", "eindecomp", "sqrt", "--json", "-"])
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["strategy"] for row in rows] == ["eindecomp", "sqrt"]
    for row in rows:
        assert row["bytes_moved"] == row["bytes_predicted"]
        assert row["seconds_simulated"] > 0
    # The files that are kept can be replayed again, on another platform.
    folder = tmp_path / "kept" / "sqrt"
    assert len(list(folder.glob("rank-*.txt"))) == 8
    words = ["simulate", "chain.toml", "-n", "8", "--platform", "kept/sqrt/platform.xml"]
    done = einmpi_here(tmp_path, [*words, "--strategy", "sqrt", "--json", "-"])
    assert json.loads(done.stdout)["seconds_simulated"] == rows[1]["seconds_simulated"]


def test_compared_strategies_that_do_not_apply(tmp_path):
    (tmp_path / "job.toml").write_text(
        'program = "Z[i] = 2 * X[i]"\n[inputs]\nX = { shape = [8], random = "normal" }\n'
    )
    words = ["simulate", "job.toml", "-n", "2", "--traces", "kept", "--compare"]
    done = einmpi_here(tmp_path, [*words, "sqrt", "data", "sqrt"])
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    assert [row.split()[0] for row in rows] == ["strategy", "sqrt", "model:", "data:"]
    done = einmpi_here(tmp_path, [*words, "data", "megatron"])
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "data" in done.stderr


@pytest.mark.parametrize("setting", ['shared = "off"', 'backend = "cupy"'])
def test_ranks_that_share_no_memory(tmp_path, setting):
    """For the simulation and for the planner."""
    (tmp_path / "job.toml").write_text(
        'program = "Z[i,k] = sum(A[i,j] * B[j,k])"\n[inputs]\n'
        'A = { shape = [4000, 300], random = "normal" }\n'
        'B = { shape = [300, 300], random = "normal" }\n'
    )
    shutil.copy(ROOT / "bench" / "platforms" / "cluster.toml", tmp_path)
    words = ["simulate", "job.toml", "-n", "4", "--cluster", "cores=4", "--json", "-"]
    rows = []
    for text in ("", f"[run]\n{setting}\n"):
        with open(tmp_path / "job.toml", "a") as file:
            file.write(text)
        for machine in ([], ["--machine", "cluster.toml"]):
            done = einmpi_here(tmp_path, [*words, *machine])
            assert done.returncode == 0, done.stderr
            rows.append(json.loads(done.stdout))
    assert [row["bytes_shared"] > 0 for row in rows] == [True, True, False, False]
    assert rows[3]["seconds_predicted"] > rows[1]["seconds_predicted"]
    assert rows[3]["seconds_predicted"] == pytest.approx(rows[3]["seconds_simulated"], rel=0.05)


def test_a_machine_that_was_measured_on_one_node(tmp_path):
    """The network is that of --cluster, for the plan as for the simulation."""
    shutil.copy(ROOT / "jobs" / "chain.toml", tmp_path)
    (tmp_path / "machine.toml").write_text('[kernels]\nother = "20 Gop/s"\n')
    words = ["simulate", "chain.toml", "-n", "8", "--machine", "machine.toml", "--json", "-"]
    words += ["--cluster"]
    found = []
    for spec in ("cores=4,topology=flat", "cores=4,topology=flat,bw=1GB"):
        done = einmpi_here(tmp_path, [*words, spec])
        assert done.returncode == 0, done.stderr
        row = json.loads(done.stdout)
        assert row["seconds_predicted"] == pytest.approx(row["seconds_simulated"], rel=0.05)
        found.append(row["seconds_simulated"])
    assert found[1] > 1.3 * found[0]


def test_the_times_of_steps_can_be_computed_by_hand():
    """40 kB at 1 GB/s with 10 us, then 40 M operations at 10 Gop/s."""
    job = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=(4000, 100), B=(100, 100))
    place = place_of("nodes=2,topology=flat,bw=1GB,lat=10us,speed=10Gf", 2)
    plan = einmpi.plan(job, 2, nodes=2)
    done = simulate_plan(plan, place, with_timeline=True)
    assert done.timeline.ranks == 2
    assert done.timeline.seconds == pytest.approx(done.seconds, rel=1e-9)
    for rank in range(2):
        took = {}
        for span in done.timeline.spans:
            if span.rank == rank:
                took[span.kind, span.vertex] = span.end - span.start
        assert took["load", "A"] == 0
        assert took["exchange", "B"] == pytest.approx(50e-6, rel=1e-3)
        assert took["kernel", "Z"] == pytest.approx(4e-3, rel=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["chain", "attention", "ffnn", "digits"])
def test_steps_follow_one_another_until_the_end(name):
    job = einmpi.load(ROOT / "jobs" / f"{name}.toml")
    place = place_of("cores=4", 16)
    plan = einmpi.plan(job, 16, nodes=4)
    done = simulate_plan(plan, place, with_timeline=True)
    # The timeline begins with the first step, after the barrier of ranks that share memory.
    end = max(span.end for span in done.timeline.spans)
    assert done.seconds - 2e-6 < end < done.seconds * (1 + 1e-9)
    ends = {}
    for span in done.timeline.spans:
        assert ends.get(span.rank, 0.0) <= span.start <= span.end
        ends[span.rank] = span.end
    assert set(ends) == set(range(16))
    assert done.seconds == simulate_plan(plan, place).seconds  # as without a timeline


def test_trace_and_report(tmp_path):
    shutil.copy(ROOT / "jobs" / "chain.toml", tmp_path)
    words = ["simulate", "chain.toml", "-n", "8", "--cluster", "cores=4"]
    for number in (1, 2):
        files = ["--trace", f"{number}.json", "--report", f"{number}.html"]
        done = einmpi_here(tmp_path, [*words, *files])
        assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "1.json").read_text())["traceEvents"]
    assert {event["tid"] for event in events if event["ph"] == "X"} == set(range(8))
    assert any(event["ph"] == "s" for event in events)  # arrows from sender to receiver
    page = (tmp_path / "1.html").read_text()
    assert "Predicted and simulated" in page
    assert "measured</h2>" not in page
    for name in ("json", "html"):
        assert (tmp_path / f"1.{name}").read_bytes() == (tmp_path / f"2.{name}").read_bytes()


@pytest.mark.parametrize("old, new", [
    ('value="0:1"', 'value="much"'),
    ('bw="12.5GBps"', 'bw="fast"'),
    ("FAT_TREE", "TREE"),
    ("2;16,32;1,16;1,1", "2;16"),
])  # fmt: skip
def test_what_simgrid_refuses_is_one_line(tmp_path, old, new):
    """The file is XML with hosts; only SimGrid knows that it is wrong."""
    shutil.copy(ROOT / "jobs" / "chain.toml", tmp_path)
    text = (ROOT / "bench" / "platforms" / "fat-tree.xml").read_text()
    assert old in text
    (tmp_path / "platform.xml").write_text(text.replace(old, new))
    done = einmpi_here(
        tmp_path, ["simulate", "chain.toml", "-n", "2", "--platform", "platform.xml"]
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("platform.xml: smpirun: ")


TWO_HOSTS = """<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1"><zone id="z" routing="Full">
<host id="a" speed="1Gf"/><host id="b" speed="1Gf"/>
</zone></platform>
"""


def test_hosts_without_a_path_between_them(tmp_path):
    """SimGrid notices that when the first message is sent."""
    shutil.copy(ROOT / "jobs" / "chain.toml", tmp_path)
    (tmp_path / "two.xml").write_text(TWO_HOSTS)
    done = einmpi_here(tmp_path, ["simulate", "chain.toml", "-n", "2", "--platform", "two.xml"])
    assert done.returncode == 2
    assert done.stderr.startswith("two.xml: smpirun: ") and "path between" in done.stderr


@pytest.mark.parametrize("platform", [True, False])
@pytest.mark.parametrize("program, said", [
    ("kill -9 $$", "smpirun: SimGrid was ended by signal 9, SIGKILL; the system does this"),
    ("exit 137", "smpirun: SimGrid was ended by signal 9, SIGKILL; the system does this"),
    ("exit 139", "smpirun: SimGrid was ended by signal 11, SIGSEGV"),
    ("echo 'what(): std::bad_alloc'; exit 134", "smpirun: not enough memory: what(): std::"),
    ("echo '[0.0] ./src/a.cpp:1: [root/CRITICAL] Failed to allocate stack.'; exit 134",
     "smpirun: not enough memory: Failed to allocate stack."),
    # Whatever is wrong with these traces, a few bytes between the hosts arrive.
    ("if grep -q sleep rank-0.txt || grep -q compute rank-0.txt\nthen echo 'Replay Error: x'\n"
     "exit 134\nfi\necho '0.1 Simulation time 0.1'", "smpirun: Replay Error: x"),
])  # fmt: skip
def test_a_failure_of_simgrid_is_not_one_of_the_platform(
    tmp_path, monkeypatch, platform, program, said
):
    """SimGrid is replaced by a program that ends in some way."""
    script = tmp_path / "smpirun"
    script.write_text(f"#!/bin/sh\n{program}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    shutil.copy(ROOT / "jobs" / "chain.toml", tmp_path)
    (tmp_path / "two.xml").write_text(TWO_HOSTS)
    words = ["simulate", "chain.toml", "-n", "2"]
    done = einmpi_here(tmp_path, [*words, "--platform", "two.xml"] if platform else words)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr


@pytest.mark.parametrize("stop_signal", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_neither_files_nor_processes(tmp_path, stop_signal):
    """SimGrid is replaced: like the real one, a script that waits for a program."""
    script = tmp_path / "smpirun"
    script.write_text("#!/bin/sh\nsleep 600 &\necho $! > ../started\nwait\n")
    script.chmod(0o755)
    (tmp_path / "files").mkdir()
    variables = {**environment(), "TMPDIR": str(tmp_path / "files")}
    variables["PATH"] = f"{tmp_path}:{variables['PATH']}"
    command = [sys.executable, "-m", "einmpi", "simulate", str(ROOT / "jobs/chain.toml"), "-n", "2"]
    with subprocess.Popen(
        command,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Tests that run in the background of a shell ignore Ctrl-C, and so would this process.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        started = tmp_path / "files" / "started"
        while not (started.exists() and started.read_text().endswith("\n")):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        process.send_signal(stop_signal)
        said = process.communicate(timeout=60)[1]
    assert process.returncode in (128 + stop_signal, -stop_signal)
    assert len(said.splitlines()) <= 1
    assert list((tmp_path / "files").iterdir()) == [started]
    with pytest.raises(ProcessLookupError):
        while True:  # a killed process is there until its parent has seen it
            os.kill(int(started.read_text()), 0)
            time.sleep(0.05)
