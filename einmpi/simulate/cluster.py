"""A cluster in words, such as nodes=128,cores=8,bw=12.5GB, the platform that SimGrid reads, and the
links of its network that messages pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from math import ceil, isqrt, prod
from typing import NamedTuple, NoReturn, TypeAlias
from xml.etree import ElementTree
from xml.parsers import expat

import numpy as np
import numpy.typing as npt

from einmpi.errors import InputError, one_of
from einmpi.planner.machine import Machine, NodeGroups
from einmpi.units import ATTOSECONDS, counted, parse_bandwidth, parse_latency, parse_speed

PICOSECONDS = 10**12
TOPOLOGIES: dict[str, Callable[[int], tuple[str, int]]] = {}  # name → (parameters, hosts)
MOST_NODES = 2**20
HOST_PREFIX = "node-"

# What SimGrid would otherwise add to the numbers of a platform: factors that were measured on a
# cluster with a network of 1 Gbit/s, and the traffic of acknowledgements.
CONFIG = {
    "smpi/bw-factor": "0:1",
    "smpi/lat-factor": "0:1",
    "network/weight-S": "0",
    "network/crosstraffic": "0",
}


@dataclass(frozen=True)
class Cluster:
    """Nodes of equally many cores, with a rank on each core, and a network between them.

    Times are whole numbers, as in a Machine, and those of bytes are of one rank while all ranks of
    its node send.
    """

    nodes: int
    cores: int  # ranks of a node
    between: int  # ps for a byte to another node
    latency_between: int  # ns for a message to a node at the same switch
    inside: int  # ps for a byte that a rank sends to another of its node
    latency_inside: int  # ns
    operation: int  # as for an operation of a kernel
    topology: str

    def platform(self) -> str:
        """Return the text of its platform file."""
        parameters, hosts = TOPOLOGIES[self.topology](self.nodes)
        # A message between two nodes at one switch passes two links; in a torus it passes one.
        links = 1 if self.topology == "torus" else 2
        attributes = {
            "id": "cluster",
            "prefix": HOST_PREFIX,
            "radical": f"0-{hosts - 1}",
            "suffix": "",
            "speed": f"{ATTOSECONDS / self.operation:.9g}f",
            "core": str(self.cores),
            "bw": f"{PICOSECONDS * self.cores / self.between:.9g}Bps",
            "lat": f"{self.latency_between / links:.9g}ns",
            "sharing_policy": "SPLITDUPLEX",
            "loopback_bw": f"{PICOSECONDS / self.inside:.9g}Bps",
            "loopback_lat": f"{self.latency_inside}ns",
        }
        if parameters:
            attributes["topology"] = self.topology.replace("-", "_").upper()
            attributes["topo_parameters"] = parameters
        properties = "".join(f'<prop id="{key}" value="{CONFIG[key]}"/>' for key in CONFIG)
        cluster = " ".join(f'{key}="{value}"' for key, value in attributes.items())
        return "\n".join(
            [
                "<?xml version='1.0'?>",
                '<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">',
                '<platform version="4.1">',
                f"<config>{properties}</config>",
                f'<zone id="all" routing="Full"><cluster {cluster}/></zone>',
                "</platform>",
                "",
            ]
        )

    def hosts(self) -> tuple[str, ...]:
        """Return the names of the nodes, in order."""
        return tuple(f"{HOST_PREFIX}{number}" for number in range(self.nodes))

    def with_kernels_of(self, machine: Machine) -> Machine:
        """Return a machine with the kernels of the given one and the network of this cluster."""
        return replace(
            machine,
            latency_inside=self.latency_inside,
            latency_between=self.latency_between,
            inside=self.inside,
            between=self.between,
            groups=self.groups(),
        )

    def groups(self) -> tuple[NodeGroups, ...]:
        """Return which nodes are near to each other, as a machine file would say it.

        A message that leaves a group passes more links, each of which takes half of the latency.
        """
        one_link = self.latency_between // 2
        if self.topology == "fat-tree":
            return (NodeGroups(_nodes_at_a_switch(self.nodes), 4 * one_link),)
        if self.topology == "dragonfly":
            at_switch = _nodes_at_a_router(self.nodes)
            of_group = 2 * at_switch * at_switch
            of_a_link = max(1, self.between // self.cores)
            return (
                NodeGroups(at_switch, 3 * one_link, of_a_link),
                NodeGroups(of_group, 5 * one_link, of_a_link),
            )
        return ()


# ---- topologies ----------------------------------------------------------------------------------


def _flat(nodes: int) -> tuple[str, int]:
    """All nodes at one switch that is never the bottleneck."""
    return "", nodes


def _fat_tree(nodes: int) -> tuple[str, int]:
    """Two levels of switches, with as many links up as down: any pairs of nodes at full speed."""
    down = _nodes_at_a_switch(nodes)
    switches = ceil(nodes / down)
    return f"2;{down},{switches};1,{down};1,1", down * switches


def _nodes_at_a_switch(nodes: int) -> int:
    """Return how many of so many nodes are at one switch of a fat tree: √nodes, rounded up."""
    return isqrt(nodes - 1) + 1


def _torus(nodes: int) -> tuple[str, int]:
    """Three rings, as equal as the number of nodes allows; nodes pass on messages of others."""
    side = next(number for number in count(1) if number**3 >= nodes)
    second = next(number for number in count(1) if side * number * number >= nodes)
    third = ceil(nodes / (side * second))
    # SimGrid cannot build two rings of one node.
    rings = [length for length in (side, second, third) if length > 1] or [1]
    return ",".join(map(str, rings)), prod(rings)


def _dragonfly(nodes: int) -> tuple[str, int]:
    """Groups of switches: inside a group all are connected, and every two groups by one link."""
    at_switch = _nodes_at_a_router(nodes)
    switches = 2 * at_switch
    groups = ceil(nodes / (switches * at_switch))
    return f"{groups},1;1,1;{switches},1;{at_switch}", groups * switches * at_switch


def _nodes_at_a_router(nodes: int) -> int:
    """Return how many of so many nodes are at one switch of a dragonfly."""
    return next(number for number in count(1) if 4 * number**3 >= nodes)


TOPOLOGIES.update({"flat": _flat, "fat-tree": _fat_tree, "torus": _torus, "dragonfly": _dragonfly})

# ---- from text -----------------------------------------------------------------------------------

_WHERE = "--cluster"
_RATES = ("bw", "inside_bw")
_LATENCIES = ("lat", "inside_lat")
KEYS = ("nodes", "cores", *_RATES, *_LATENCIES, "speed", "topology")
# Ends of units that may be short: GB and GBps for GB/s; Gf, Gflops and Gop/s for Gflop/s.
_BYTES = re.compile(r"(?<=B)(ps)?\Z")
_OPERATIONS = re.compile(r"(?<=[kMGTP])(flops?|ops?|f)?(ps|/s)?\Z")
DEFAULTS = {
    "bw": "12.5 GB/s",
    "lat": "1 us",
    "inside_bw": "5 GB/s",
    "inside_lat": "500 ns",
    "speed": "20 Gop/s",
    "topology": "fat-tree",
}


def make_cluster(text: str, ranks: int, machine: Machine | None) -> Cluster:
    """Return a cluster for so many ranks; what the text does not say is that of the machine."""
    given = _given(text)
    cores = _number(given, "cores", 1)
    nodes = _number(given, "nodes", ceil(ranks / cores))
    if "cores" not in given:
        cores = ceil(ranks / nodes)
    if nodes * cores < ranks:
        place = f"{counted(nodes, 'node')} × {counted(cores, 'core')}"
        raise InputError(_WHERE, f"{place} for {ranks} ranks", "a core for each rank")
    topology = given.get("topology", DEFAULTS["topology"])
    if topology not in TOPOLOGIES:
        problem = f"unknown topology {topology!r:.60}"
        raise InputError(_WHERE, problem, one_of(TOPOLOGIES, topology))
    times = _times(given)
    times["bw"] *= cores  # which share the link of their node
    measured: dict[str, int] = {}
    if machine is not None and machine.between:
        measured.update(bw=machine.between, lat=machine.latency_between)
    if machine is not None and machine.inside:
        measured.update(inside_bw=machine.inside, inside_lat=machine.latency_inside)
    times.update({key: time for key, time in measured.items() if key not in given})
    return Cluster(
        nodes=nodes,
        cores=cores,
        between=times["bw"],
        latency_between=times["lat"],
        inside=times["inside_bw"],
        latency_inside=times["inside_lat"],
        operation=times["speed"],
        topology=topology,
    )


def _given(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in text.split(",") if text.strip() else []:
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals:
            problem = f"{part.strip()!r:.60} is not KEY=VALUE"
            raise InputError(_WHERE, problem, "text such as nodes=8,cores=4")
        if key not in KEYS:
            raise InputError(_WHERE, f"unknown key {key!r:.60}", one_of(KEYS, key))
        if key in found:
            raise InputError(_WHERE, f"{key} is given twice", "each key once")
        found[key] = value.strip()
    return found


def _number(given: Mapping[str, str], key: str, default: int) -> int:
    text = given.get(key)
    if text is None:
        return default
    if re.fullmatch("[0-9]{1,9}", text) is None or not 1 <= int(text) <= MOST_NODES:
        problem = f"{key}={text:.60}"
        raise InputError(_WHERE, problem, f"a number from 1 to {MOST_NODES}")
    return int(text)


def _times(given: Mapping[str, str]) -> dict[str, int]:
    """Return the times of bytes on a link, of messages and of operations."""
    found = {}
    for key in (*_RATES, *_LATENCIES, "speed"):
        text = given.get(key, DEFAULTS[key])
        where = f"{_WHERE} {key}"
        if key in _LATENCIES:
            found[key] = parse_latency(text, where)
        elif key == "speed":
            found[key] = parse_speed(_OPERATIONS.sub("flop/s", text), where)
        else:
            found[key] = parse_bandwidth(_BYTES.sub("/s", text), where)
    return found


# ---- platform file -------------------------------------------------------------------------------
#
# A platform file of the user: checked, and the hosts that it has. SimGrid may read it then.


MOST_BYTES = 2**26
MOST_HOSTS = 2**20
# Other settings would let a file write traces, load plugins or run programs.
_SETTINGS = re.compile(
    r"(network/[a-zA-Z0-9/-]+|cpu/[a-zA-Z0-9/-]+|surf/precision|smpi/(os|or|ois|bw-factor|lat-factor))"
)
PLATFORM_EXPECTED = "a platform file of SimGrid, version 4 or 4.1"


@dataclass(frozen=True)
class Platform:
    """The text of a platform, its hosts in order, and the cores of each."""

    text: str
    hosts: tuple[str, ...]
    cores: int


def read_platform(path: str) -> Platform:
    """Read a platform file. Raise InputError if it is not one, or may do more than describe."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(path, error.strerror or str(error), PLATFORM_EXPECTED) from None
    if len(data) > MOST_BYTES:
        raise InputError(path, "the file is larger than 64 MiB", PLATFORM_EXPECTED)
    text = data.decode(errors="replace")  # as SimGrid gets it: just this is checked
    reader = _PlatformReader(path)
    reader.read(text)
    cores = set(reader.cores)
    if not reader.hosts:
        raise InputError(path, "there is no host in it", "elements <host> or <cluster>")
    if len(cores) > 1:
        raise InputError(path, "hosts have different numbers of cores", "the same number")
    return Platform(text, tuple(reader.hosts), cores.pop())


class _PlatformReader:
    """Goes through the elements of a platform file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.depth = 0
        self.in_config = False
        self.hosts: list[str] = []
        self.cores: list[int] = []
        self.parser = expat.ParserCreate()
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.EntityDeclHandler = self._refuse_entity

    def read(self, text: str) -> None:
        try:
            self.parser.Parse(text, True)
        except InputError:
            raise
        except (expat.ExpatError, ValueError, LookupError) as error:
            raise InputError(self.path, f"this is not XML: {error}", PLATFORM_EXPECTED) from None

    def _refuse(self, problem: str, expected: str = PLATFORM_EXPECTED) -> NoReturn:
        line = self.parser.CurrentLineNumber
        raise InputError(f"{self.path}:{line}", problem, expected)

    def _refuse_entity(self, name: str, *_: object) -> None:
        self._refuse(f"the entity {name!r:.60}", "no entities")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self.depth += 1
        if self.depth == 1:
            version = attributes.get("version", "")
            if name != "platform" or version not in ("4", "4.1"):
                self._refuse(f"<{name:.60}> of version {version!r:.20}")
        elif name == "include":
            self._refuse("<include>", "a file that needs no others")
        elif name == "prop":
            self._check_setting(attributes.get("id", ""))
        elif name == "config":
            self.in_config = True
        elif name == "host":
            self._add(iter([attributes.get("id", "")]), attributes)
        elif name == "cluster":
            self._add(self._cluster_hosts(attributes), attributes)

    def _end(self, name: str) -> None:
        self.depth -= 1
        if name == "config":
            self.in_config = False

    def _check_setting(self, key: str) -> None:
        if self.in_config and not _SETTINGS.fullmatch(key):
            self._refuse(f"the setting {key!r:.60}", "settings of the network and of CPUs only")

    def _add(self, names: Iterator[str], attributes: dict[str, str]) -> None:
        cores = attributes.get("core", "1")
        if not re.fullmatch("[1-9][0-9]{0,5}", cores):
            self._refuse(f"core={cores!r:.60}", "a number of cores")
        for name in names:
            if not re.fullmatch(r"[A-Za-z0-9_.-]{1,200}", name):
                self._refuse(f"the host {name!r:.60}", "letters, digits and . _ - in its name")
            if len(self.hosts) == MOST_HOSTS:
                self._refuse(f"more than {MOST_HOSTS} hosts", "fewer")
            self.hosts.append(name)
        self.cores.append(int(cores))

    def _cluster_hosts(self, attributes: dict[str, str]) -> Iterator[str]:
        radical = attributes.get("radical", "")
        prefix = attributes.get("prefix", "")
        suffix = attributes.get("suffix", "")
        for part in radical.split(","):
            found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part.strip())
            if found is None:
                self._refuse(f"radical={radical!r:.60}", "numbers such as 0-127")
            first = int(found[1])
            last = first if found[2] is None else int(found[2])
            for number in range(first, last + 1):
                yield f"{prefix}{number}{suffix}"


# ---- network -------------------------------------------------------------------------------------

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
NO_LINK = 0  # its place in routes that are shorter than others; it is never full


class Network(NamedTuple):
    """A platform that is one cluster, as numbers."""

    topology: str
    parameters: tuple[tuple[int, ...], ...]
    nodes: int
    # All of these are more than 0.
    speed: float  # operations per second of a core
    bandwidth: float  # bytes per second of a link
    latency: float  # of a link
    bandwidth_inside: float
    latency_inside: float


_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "ps": 1e-12}


def read_network(text: str) -> Network | None:
    """Return the network of a platform file; None if it is no cluster whose routes are known."""
    root = ElementTree.fromstring(text)
    settings = {each.get("id"): each.get("value") for each in root.iterfind("config/prop")}
    clusters = list(root.iter("cluster"))
    if len(clusters) != 1 or next(root.iter("host"), None) is not None or settings != CONFIG:
        return None
    given = clusters[0].attrib
    parameters = []
    for part in filter(None, given.get("topo_parameters", "").split(";")):
        parameters.append(tuple(map(int, part.split(","))))
    found = Network(
        given.get("topology", "FLAT"),
        tuple(parameters),
        _nodes(given.get("radical", "")),
        _quantity(given.get("speed", ""), _UNITS, "f"),
        _quantity(given.get("bw", ""), _UNITS, "Bps"),
        _quantity(given.get("lat", ""), _SECONDS, ""),
        _quantity(given.get("loopback_bw", ""), _UNITS, "Bps"),
        _quantity(given.get("loopback_lat", ""), _SECONDS, ""),
    )
    is_known = found.topology in _ROUTES and given.get("sharing_policy") in (None, "SPLITDUPLEX")
    if found.topology == "FAT_TREE":
        is_known = is_known and len(parameters) == 4 and parameters[0] == (2,)
        is_known = is_known and parameters[2][0] == 1 == prod(parameters[-1])
    return found if is_known and min(found[3:]) > 0 else None


def _nodes(radical: str) -> int:
    count = 0
    for part in radical.split(","):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return count


def _quantity(text: str, units: Mapping[str, float], end: str) -> float:
    """Return a number with a unit; 0 if it is something else."""
    found = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?)([a-zA-Z]*)", text.strip())
    if found is None:
        return 0.0
    return float(found[1]) * units.get(found[2].removesuffix(end), 0.0)


# ---- routes --------------------------------------------------------------------------------------
#
# The links from nodes to others, as SimGrid chooses them. A link of each direction has a number.

Column: TypeAlias = tuple[Ints, int]  # a link of each flow, or -1; how many in parallel it is


class Routes(NamedTuple):
    """The links that flows pass: arrays [flow, link]."""

    links: Ints  # NO_LINK where a flow has fewer than others
    capacity: Floats  # in bytes per second


def routes_between(network: Network, sources: Ints, targets: Ints) -> Routes:
    """Return the links from nodes to others."""
    columns = _ROUTES[network.topology](network, sources, targets)
    links = np.stack([column for column, _ in columns], axis=1) + 1
    parallel = np.array([parallel for _, parallel in columns])
    return Routes(links, np.where(links == NO_LINK, np.inf, network.bandwidth * parallel))


def _flat_links(network: Network, sources: Ints, targets: Ints) -> list[Column]:
    return [(sources, 1), (network.nodes + targets, 1)]


def _fat_tree_links(network: Network, sources: Ints, targets: Ints) -> list[Column]:
    """Up to the root that the target chooses, if the nodes are at different switches."""
    (_, (down, switches), (_, roots), _) = network.parameters
    nodes = down * switches
    source_switch, target_switch = sources // down, targets // down
    root = targets % roots
    is_far = source_switch != target_switch
    up = np.where(is_far, 2 * nodes + source_switch * roots + root, -1)
    below = 2 * nodes + switches * roots
    last = np.where(is_far, below + target_switch * roots + root, -1)
    return [(sources, 1), (up, 1), (last, 1), (nodes + targets, 1)]


def _torus_links(network: Network, sources: Ints, targets: Ints) -> list[Column]:
    """One ring after the other, the shorter way round."""
    (lengths,) = network.parameters
    columns = []
    here = sources.copy()
    stride = 1
    for dimension, length in enumerate(lengths):
        start = sources // stride % length
        end = targets // stride % length
        rises = ((end > start) & (end <= start + length // 2)) | (
            (start > length // 2) & ((start + length // 2) % length >= end)
        )
        for _ in range(length):
            place = here // stride % length
            moves = place != end
            if not moves.any():
                break
            following = np.where(rises, (place + 1) % length, (place - 1) % length)
            there = here + np.where(moves, following - place, 0) * stride
            owner = np.where(rises, here, there)  # a link belongs to the node before it
            number = (owner * len(lengths) + dimension) * 2 + rises
            columns.append((np.where(moves, number, -1), 1))
            here = there
        stride *= length
    return columns


def _dragonfly_links(network: Network, sources: Ints, targets: Ints) -> list[Column]:
    """To the switch with the link to the target's group, over it, and to the target's switch."""
    (groups, global_links), (chassis, of_chassis), (blades, of_blades), (at_switch,) = (
        network.parameters
    )
    of_group = chassis * blades
    here, last = sources // at_switch, targets // at_switch  # switches
    columns = [(sources, 1)]

    def hop(is_taken: npt.NDArray[np.bool_], there: Ints, parallel: int) -> None:
        nonlocal here
        number = 2 * network.nodes + here * of_group + there % of_group
        columns.append((np.where(is_taken, number, -1), parallel))
        here = np.where(is_taken, there, here)

    group, last_group = here // of_group, last // of_group
    leaves = group != last_group
    hop(leaves & (here % blades != last_group), here // blades * blades + last_group, of_blades)
    hop(leaves & (here % of_group >= blades), group * of_group + here % blades, of_chassis)
    between = 2 * network.nodes + groups * of_group**2 + group * groups + last_group
    columns.append((np.where(leaves, between, -1), global_links))
    here = np.where(leaves, last_group * of_group + group, here)
    hop(here % blades != last % blades, here // blades * blades + last % blades, of_blades)
    hop(here != last, last, of_chassis)
    return [*columns, (network.nodes + targets, 1)]


_ROUTES: dict[str, Callable[[Network, Ints, Ints], list[Column]]] = {
    "FLAT": _flat_links,
    "FAT_TREE": _fat_tree_links,
    "TORUS": _torus_links,
    "DRAGONFLY": _dragonfly_links,
}
