"""The flow model: beside times that can be computed by hand, and beside SimGrid."""

import json
import shutil

import numpy as np
import pytest
from in_process import einmpi_here
from paths import ROOT

import einmpi
from einmpi.planner.machine import read_machine
from einmpi.simulate.cluster import (
    NO_LINK,
    TOPOLOGIES,
    Network,
    make_cluster,
    read_network,
    routes_between,
)
from einmpi.simulate.flow_model import SharedLinks
from einmpi.simulate.simulation import Place, simulate_plan

NETWORK = Network("FLAT", (), 4, 1e9, 1e9, 5e-6, 5e9, 1e-6)
needs_simgrid = pytest.mark.skipif(
    shutil.which("smpirun") is None, reason="SimGrid is not installed (libsimgrid-dev)"
)


def ends(flows, network=NETWORK):
    """Return when flows (source, target, bytes with header, start) end."""
    sources, targets, nbytes, starts = (np.array(column) for column in zip(*flows, strict=True))
    links = SharedLinks(network)
    numbers = np.arange(len(flows))
    routes = routes_between(network, sources, targets)
    links.send(starts.astype(float), nbytes - 16, routes, np.stack([numbers, numbers], axis=1))
    found = np.full(len(flows), np.nan)
    while np.isnan(found).any():
        tags, times = links.end_next()
        found[tags[:, 0]] = times
    return found


def test_flows_that_can_be_computed_by_hand():
    alone = 10e-6 + 1e-3
    assert ends([(0, 1, 10**6, 0.0)]) == pytest.approx([alone])
    # Other links, then the same link of the target for all the time, and for a part of it.
    assert ends([(0, 1, 10**6, 0.0), (1, 2, 10**6, 0.0)]) == pytest.approx([alone, alone])
    both = [(0, 2, 10**6, 0.0), (1, 2, 10**6, 0.0)]
    assert ends(both) == pytest.approx([10e-6 + 2e-3] * 2)
    later = [(0, 2, 10**6, 0.0), (1, 2, 10**6, 5e-4)]
    assert ends(later) == pytest.approx([10e-6 + 1.5e-3, 10e-6 + 2e-3])
    # The third flow gets what the first two leave of its link: half of 1 GB/s.
    three = [*both, (0, 3, 10**6, 0.0)]
    assert ends(three) == pytest.approx([10e-6 + 2e-3] * 3)


def test_flows_with_less_latency_get_more():
    """On a fat tree, 2 links or 4: 2/3 and 1/3 of the link that they share, as in SimGrid."""
    parameters = ((2,), (3, 3), (1, 3), (1, 1))
    network = NETWORK._replace(topology="FAT_TREE", parameters=parameters, nodes=9)
    found = ends([(0, 1, 10**6, 0.0), (0, 3, 10**6, 0.0)], network)
    # 10 us before the other begins, then 1.5 ns for a byte.
    assert found[0] == pytest.approx(20e-6 + 1.5 * (1e-3 - 10e-6), rel=1e-6)
    assert found[1] == pytest.approx(10e-6 + 2e-3, rel=1e-6)


@pytest.mark.parametrize("nodes", [2, 9, 40])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_own_platforms_are_known(topology, nodes):
    cluster = make_cluster(f"cores=4,nodes={nodes},topology={topology}", 4 * nodes, None)
    network = read_network(cluster.platform())
    assert network is not None and network.nodes >= nodes
    assert network.bandwidth == pytest.approx(12.5e9)
    sources, targets = np.nonzero(~np.eye(nodes, dtype=bool))
    routes = routes_between(network, sources, targets)
    assert (routes.links != NO_LINK).any(axis=1).all()


@pytest.mark.parametrize("old, new", [
    ('value="0:1"', 'value="0:2"'),
    ("FAT_TREE", "VIVALDI"),
    ("2;16,32;1,16;1,1", "3;2,2,2;1,2,2;1,1,1"),
    ("SPLITDUPLEX", "SHARED"),
    ('loopback_bw="5GBps"', ""),
    ("</zone>", '<host id="other" speed="1Gf"/></zone>'),
])  # fmt: skip
def test_platforms_whose_flows_are_not_known(old, new):
    text = (ROOT / "bench" / "platforms" / "fat-tree.xml").read_text()
    assert read_network(text) is not None
    assert old in text
    assert read_network(text.replace(old, new)) is None


def ratio(job, ranks, platform, hosts, machine=None, **options):
    """Return the seconds of the flow model as a multiple of those of SimGrid."""
    plan = einmpi.plan(job, ranks, nodes=len(hosts), machine=machine, **options)
    place = Place(platform, hosts, machine)
    flows = simulate_plan(plan, place, network=read_network(platform))
    simgrid = simulate_plan(plan, place)
    assert flows.messages == simgrid.messages
    assert flows.nbytes == simgrid.nbytes
    assert flows.shared == simgrid.shared
    return flows.seconds / simgrid.seconds


@needs_simgrid
@pytest.mark.slow
@pytest.mark.parametrize("ranks, cores", [(16, 4), (64, 1), (64, 8)])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name", ["chain", "attention", "ffnn", "heat", "kalman", "digits"])
def test_beside_simgrid(name, topology, ranks, cores):
    job = einmpi.load(ROOT / "jobs" / f"{name}.toml")
    cluster = make_cluster(f"cores={cores},topology={topology}", ranks, None)
    found = ratio(job, ranks, cluster.platform(), cluster.hosts())
    assert found == pytest.approx(1, abs=0.05)


@needs_simgrid
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["eindecomp", "sqrt"])
@pytest.mark.parametrize("size", [480, 997, 4096])
@pytest.mark.parametrize("network", ["fat-tree", "dragonfly"])
def test_platform_files_beside_simgrid(network, size, strategy):
    """512 ranks on a measured machine."""
    job = einmpi.load(ROOT / "jobs" / "chain.toml", s=size)
    folder = ROOT / "bench" / "platforms"
    machine = read_machine(str(folder / f"{network}.toml"))
    hosts = tuple(f"node-{number}" for number in range(64))
    text = (folder / f"{network}.xml").read_text()
    found = ratio(job, 512, text, hosts, machine, strategy=strategy)
    assert found == pytest.approx(1, abs=0.05)


@pytest.mark.slow
def test_more_ranks_than_simgrid_takes(tmp_path, monkeypatch):
    """SimGrid is not needed, and the result is the same each time."""
    monkeypatch.setenv("PATH", str(tmp_path))
    shutil.copy(ROOT / "jobs" / "chain.toml", tmp_path)
    words = ["simulate", "chain.toml", "-n", "8192", "--cluster", "cores=8", "--set", "s=4096"]
    found = []
    for _ in range(2):
        done = einmpi_here(tmp_path, [*words, "--json", "-"])
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert found[0] == found[1]
    assert found[0]["model"] == "flows"
    assert found[0]["ranks_lowered"] == 1
    assert found[0]["bytes_moved"] == found[0]["bytes_predicted"]
    # Files for SimGrid need SimGrid.
    done = einmpi_here(tmp_path, [*words, "--traces", "kept"])
    assert done.returncode == 2 and "smpirun is not installed" in done.stderr
