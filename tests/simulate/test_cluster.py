"""Clusters in words, and their platforms."""

from math import prod
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT

from einmpi.errors import InputError
from einmpi.planner.machine import Machine
from einmpi.simulate.cluster import KEYS, TOPOLOGIES, make_cluster, read_platform


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
    assert (cluster.between, cluster.latency_between) == (2 * 80, 1000)
    assert (cluster.inside, cluster.latency_inside) == (50, 200)
    assert cluster.operation == 20_000_000
    assert make_cluster("speed=50Gflop/s", 1, None).operation == 20_000_000
    assert make_cluster("bw=1GB/s", 1, None).between == 1000
    machine = Machine(700, 9000, 300, 4000, {}, 1_000_000, "here")
    cluster = make_cluster("cores=2", 8, machine)
    # A machine has the bandwidth of one of the ranks of a node, and so has a cluster.
    assert (cluster.nodes, cluster.between, cluster.latency_between) == (4, 4000, 9000)
    assert (cluster.inside, cluster.latency_inside) == (300, 700)
    assert make_cluster("cores=2,bw=1GB", 8, machine).between == 2000
    root = ElementTree.fromstring(cluster.platform())
    assert root.find("zone/cluster").get("bw") == "500000000Bps"


@pytest.mark.parametrize("unit", ["GB", "GB/s", "GBps", " GB", "000MB"])
def test_units_of_bandwidths(unit):
    assert make_cluster(f"bw=2{unit}", 1, None).between == 500


@pytest.mark.parametrize("unit", ["G", "Gf", "Gflop", "Gflops", "Gflop/s", "Gop", "Gop/s", " Gf"])
def test_units_of_speeds(unit):
    assert make_cluster(f"speed=50{unit}", 1, None).operation == 20_000_000


@pytest.mark.parametrize("spec, said", [
    ("bw=fast", "--cluster bw: 'fast' is not a bandwidth"),
    ("bw=5", "--cluster bw: '5' is not a bandwidth"),
    ("speed=fast", "--cluster speed: 'fast' is not a speed"),
    ("speed=5GHz", "--cluster speed: unknown unit 'GHz' of a speed"),
])  # fmt: skip
def test_messages_have_the_words_of_the_user(spec, said):
    with pytest.raises(InputError) as caught:
        make_cluster(spec, 1, None)
    assert str(caught.value).startswith(said)


def test_plans_are_made_for_the_network_of_the_cluster():
    machine = Machine(700, 9000, 300, 4001, {}, 1_000_000, "here")
    # What the cluster does not say is that of the machine, to the picosecond.
    assert make_cluster("cores=2,topology=flat", 8, machine).with_kernels_of(machine) == machine
    spec = "cores=2,bw=1GB,lat=2us,inside_bw=2GB,inside_lat=30ns,topology=flat"
    found = make_cluster(spec, 8, machine).with_kernels_of(machine)
    assert found == Machine(30, 2000, 500, 2000, {}, 1_000_000, "here")
    alone = Machine(0, 0, 0, 0, {}, 1_000_000, "kernels only")
    found = make_cluster("cores=2", 8, alone).with_kernels_of(alone)
    found.check(8, 4)
    assert (found.between, found.inside) == (2 * 80, 200)
    assert [groups.nodes for groups in found.groups] == [2]


@pytest.mark.parametrize(
    "spec",
    ["nodes=99999999999999999999", "nodes=0000000019999999", "cores=-1", "cores=٣", "=", "a=b"],
)
def test_nonsense_is_refused(spec):
    with pytest.raises(InputError):
        make_cluster(spec, 4, None)


WORDS = st.sampled_from(
    ["0", "-1", "8", "nan", "inf", "1e999", "1e-999", "", "12.5GB", "1us", "9" * 30, "٣", "é", "\0"]
)
PAIRS = st.tuples(st.one_of(st.sampled_from(KEYS), st.text(max_size=4)), WORDS)


@given(st.one_of(st.text(max_size=30), st.lists(PAIRS, max_size=4).map(
    lambda pairs: ",".join(f"{key}={value}" for key, value in pairs)
)))  # fmt: skip
def test_any_text_is_a_cluster_or_one_line(spec):
    try:
        platform = make_cluster(spec, 4, None).platform()
    except InputError as error:
        assert "\n" not in str(error)
    else:
        ElementTree.fromstring(platform)


@given(data=st.data())
def test_a_changed_platform_file_is_read_or_refused_in_one_line(data, tmp_path_factory):
    text = (ROOT / "bench" / "platforms" / "fat-tree.xml").read_text()
    for _ in range(data.draw(st.integers(1, 3))):
        first = data.draw(st.integers(0, len(text)))
        last = data.draw(st.integers(first, min(len(text), first + 40)))
        new = data.draw(
            st.one_of(WORDS, st.sampled_from(['"', "<host/>", "<", "&#0;", "0-1", ">"]))
        )
        text = text[:first] + new + text[last:]
    file = tmp_path_factory.mktemp("fuzz") / "platform.xml"
    file.write_text(text)
    try:
        platform = read_platform(str(file))
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert platform.hosts and platform.cores >= 1


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8", "latin-1"])
def test_a_platform_file_is_checked_as_simgrid_reads_it(encoding, tmp_path):
    """SimGrid does not look at the encoding that a file names, so nothing may hide in another."""
    text = f'<?xml version="1.0" encoding="{encoding}"?><!-- Röder --><platform version="4.1">'
    file = tmp_path / "platform.xml"
    file.write_bytes(f'{text}<host id="a"/></platform>'.encode(encoding))
    if encoding == "utf-16":
        with pytest.raises(InputError, match="this is not XML"):
            read_platform(str(file))
    else:
        assert read_platform(str(file)).hosts == ("a",)
