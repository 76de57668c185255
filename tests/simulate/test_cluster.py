"""Clusters in words, and their platforms."""

from math import prod
from xml.etree import ElementTree

import pytest

from einmpi.errors import InputError
from einmpi.planner.machine import Machine
from einmpi.simulate.cluster import TOPOLOGIES, make_cluster
from einmpi.simulate.platform_file import read_platform


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("nodes", [1, 2, 3, 7, 8, 12, 16, 100, 128, 1000])
def test_a_topology_has_room_for_all_nodes(topology, nodes, tmp_path):
    parameters, hosts = TOPOLOGIES[topology](nodes)
    assert nodes <= hosts <= 4 * nodes + 8
    if topology == "torus":
        assert prod(map(int, parameters.split(","))) == hosts
    cluster = make_cluster(f"nodes={nodes},topology={topology}", nodes, None)
    file = tmp_path / "platform.xml"
    file.write_text(cluster.platform())
    platform = read_platform(str(file))
    assert len(platform.hosts) == hosts
    assert platform.hosts[:nodes] == cluster.hosts()


def test_units_and_what_a_machine_says():
    spec = "nodes=4,cores=2,bw=12.5GB,lat=1us,inside_bw=20GBps,inside_lat=200ns,speed=50Gf"
    cluster = make_cluster(spec, 8, None)
    assert (cluster.between, cluster.latency_between) == (80, 1000)
    assert (cluster.inside, cluster.latency_inside) == (50, 200)
    assert cluster.operation == 20_000
    assert make_cluster("speed=50Gflop/s", 1, None).operation == 20_000
    assert make_cluster("bw=1GB/s", 1, None).between == 1000
    machine = Machine(700, 9000, 300, 4000, {}, 1000, "here")
    cluster = make_cluster("cores=2", 8, machine)
    # A machine has the bandwidth of one of the ranks of a node.
    assert (cluster.nodes, cluster.between, cluster.latency_between) == (4, 2000, 9000)
    assert (cluster.inside, cluster.latency_inside) == (300, 700)
    assert make_cluster("cores=2,bw=1GB", 8, machine).between == 1000
    root = ElementTree.fromstring(cluster.platform())
    assert root.find("zone/cluster").get("bw") == "500000000Bps"


@pytest.mark.parametrize("spec", ["nodes=99999999999999999999", "cores=-1", "cores=٣", "=", "a=b"])
def test_nonsense_is_refused(spec):
    with pytest.raises(InputError):
        make_cluster(spec, 4, None)
