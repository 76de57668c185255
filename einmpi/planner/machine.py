"""A measured machine: how long messages and operations take, as `einmpi calibrate` found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from einmpi.errors import InputError
from einmpi.graph.eingraph import Vertex
from einmpi.graph.scalar import Arg, Call, Const, walk
from einmpi.language.toml_document import Entry, kind_of, read_document, show, toml_text
from einmpi.units import (
    counted,
    parse_bandwidth,
    parse_latency,
    parse_speed,
    show_bandwidth,
    show_latency,
    show_speed,
)

# What a matrix product can give. Integers are added up as int64, and uint64 takes as long.
PRODUCTS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "int64")
_KEYS = ("measured", "inside", "between", "groups", "kernels")
_PARSERS = {"latency": parse_latency, "bandwidth": parse_bandwidth}
_EXAMPLES = {"latency": "1.2 us", "bandwidth": "5.1 GB/s", "other": "1.2 Gop/s"}


@dataclass(frozen=True)
class NodeGroups:
    """Nodes that follow one another and are near to each other, as those at one switch.

    A time of 0 means that messages between groups take no longer than those between nodes.
    """

    nodes: int  # of a group
    latency: int = 0  # ns for a message to another group
    pair: int = 0  # ps for a byte from all ranks of a group to those of one other group


@dataclass(frozen=True)
class Machine:
    """The times of one rank while all ranks of its node do the same.

    They are whole numbers, so that every rank plans alike. A time that was not measured is 0: that
    of messages between nodes where there was one node, that inside where a node had one rank.
    """

    latency_inside: int  # ns for a message between two ranks of a node
    latency_between: int  # ns for a message between two nodes
    inside: int  # ps for a byte inside a node
    between: int  # ps for a byte between nodes
    # dtype of the result → as for an operation of a matrix product
    multiply: Mapping[str, int] = field(hash=False)
    element: int  # as for an operation of any other kernel
    source: str  # what was measured where and when, in words
    groups: tuple[NodeGroups, ...] = ()  # of nodes, the smallest first
    shared: bool = True  # ranks of a node can read each other's memory, as those on GPUs cannot
    name: str = field(default="machine", compare=False)  # its file

    @property
    def digest(self) -> str:
        """A short hash, equal where all times are."""
        times = (self.latency_inside, self.latency_between, self.inside, self.between, self.element)
        known: tuple[object, ...] = (times, sorted(self.multiply.items()))
        if self.groups or not self.shared:
            known = (*known, self.groups, self.shared)
        return sha256(repr(known).encode()).hexdigest()[:16]

    def check(self, ranks: int, nodes: int) -> None:
        """Raise InputError if a time is not known that a plan needs."""
        if nodes > 1 and not self.between:
            raise InputError(
                self.name,
                "says nothing about messages between nodes",
                "a section [between], which einmpi calibrate writes on two nodes",
            )
        if ranks > nodes and not self.inside:
            raise InputError(
                self.name,
                "says nothing about messages inside a node",
                "a section [inside], which einmpi calibrate writes with two ranks per node",
            )

    def __str__(self) -> str:
        """Return the text of its file."""
        lines = [f"measured = {toml_text(self.source)}"]
        if self.inside:
            lines += _link_lines("inside", self.latency_inside, self.inside)
            if not self.shared:
                lines.append("shared = false")
        if self.between:
            lines += _link_lines("between", self.latency_between, self.between)
        for group in self.groups:
            lines += ["", "[[groups]]", f"nodes = {group.nodes}"]
            if group.latency:
                lines.append(f'latency = "{show_latency(group.latency)}"')
            if group.pair:
                lines.append(f'bandwidth = "{show_bandwidth(group.pair)}"')
        lines += ["", "[kernels]"]
        for dtype, time in self.multiply.items():
            lines.append(f'{dtype} = "{show_speed(time)}"')
        lines += [f'other = "{show_speed(self.element, "op")}"', ""]
        return "\n".join(lines)


def _link_lines(title: str, latency: int, byte_time: int) -> list[str]:
    return [
        "",
        f"[{title}]",
        f'latency = "{show_latency(latency)}"',
        f'bandwidth = "{show_bandwidth(byte_time)}"',
    ]


def read_machine(path: str) -> Machine:
    """Read the file of a machine. Raise InputError if it is not right."""
    document = read_document(path, "a machine file, which einmpi calibrate --save writes")
    document.table(_KEYS)
    source = document["measured"].get(str) or "not said where and when"
    latency_inside, inside = _link(document["inside"], ("shared",))
    latency_between, between = _link(document["between"])
    shared = document["inside"]["shared"].get(bool)
    kernels = document["kernels"].table((*PRODUCTS, "other"))
    multiply = {}
    for dtype in PRODUCTS:
        if dtype in kernels:
            multiply[dtype] = _time(document["kernels"][dtype])
    return Machine(
        latency_inside,
        latency_between,
        inside,
        between,
        multiply,
        element=_time(document["kernels"]["other"]),
        source=" ".join(source.split()),
        groups=_groups(document["groups"]),
        shared=shared is not False,
        name=path,
    )


def _groups(tables: Entry) -> tuple[NodeGroups, ...]:
    """Return what the tables [[groups]] say, the smallest groups first."""
    found: dict[int, NodeGroups] = {}
    for number in range(len(tables.get(list) or ())):
        group = tables[number]
        given = group.table(("nodes", "latency", "bandwidth"))
        nodes = group["nodes"].get(int)
        if nodes is None or nodes < 1:
            what = f"nodes is {show(nodes)}" if "nodes" in given else "nodes is missing"
            raise group["nodes"].wrong(what, "a number of nodes, such as 4")
        if nodes in found:
            what = f"there are groups of {counted(nodes, 'node')} already"
            raise group["nodes"].wrong(what, "one table for each size")
        times = []
        for key in ("latency", "bandwidth"):
            times.append(_time(group[key]) if key in given else 0)
        found[nodes] = NodeGroups(nodes, *times)
    return tuple(found[nodes] for nodes in sorted(found))


def _link(section: Entry, more: tuple[str, ...] = ()) -> tuple[int, int]:
    """Return (latency, time of a byte) of a section; zeros where there is none."""
    section.table(("latency", "bandwidth", *more))
    if section.value is None:
        return 0, 0
    return _time(section["latency"]), _time(section["bandwidth"])


def _time(entry: Entry) -> int:
    given = entry.value
    key = str(entry.key)
    if given is None:
        example = f'a value such as {key} = "{_EXAMPLES[key]}"'
        raise entry.wrong(f"there is no {key} in [{entry.path[0]}]", example)
    if not isinstance(given, str):
        raise entry.wrong(f"{key} is {kind_of(given)}", "a string with a unit")
    return _PARSERS.get(key, parse_speed)(given, entry.place)


# ---- prices --------------------------------------------------------------------------------------
#
# The planner's objective: bytes that move, or the time on a measured machine (docs/planner.md).


# Operations that are taken to cost as much time as one byte, where no machine was measured.
FLOPS_PER_BYTE = 16
# Operations that are taken to last as long as a short message, about a microsecond.
OPERATIONS_OF_A_MESSAGE = 4096
# Bytes inside a node that are taken to cost as much as one byte between nodes, where no machine
# was measured. All ranks of a node share its network card, and memory is faster than that: say, 8
# ranks with 5 GB/s each and a card of 5 GB/s.
BETWEEN = 8
ATTOSECONDS_OF_A_PICOSECOND = 10**6
_PRODUCT_OPERATIONS = ("*", "conj", "neg")


PER_MILLE = 1000


@dataclass(frozen=True)
class Weights:
    """How a search counts the times of a machine.

    What a message takes depends on what else is on its way, and on what ranks share. A search adds
    up a price for each byte and each message instead. Plans that are found with several weights are
    compared by the times of their schedules.
    """

    inside: int = PER_MILLE  # thousandths of the time of what moves inside nodes
    between: int = PER_MILLE
    latency: str = "message"  # it counts for each "message", or for each "exchange"


@dataclass(frozen=True)
class Prices:
    """The price of what all ranks do together.

    The unit is a byte, or a picosecond of all ranks together where a machine was measured.
    """

    inside: int = 1  # a byte that stays inside a node
    between: int = BETWEEN  # a byte between nodes
    message_inside: int = 0  # a message that a rank receives
    message_between: int = 0
    memory: int = 1  # a byte of memory, at a memory price of one byte moved
    machine: Machine | None = None
    each_message: bool = True  # every message has a price, not only every exchange

    @classmethod
    def of(cls, machine: Machine | None, weights: Weights | None = None) -> Prices:
        """Return the prices of a measured machine, or those of bytes if it is None."""
        if machine is None:
            return cls()
        weights = weights or Weights()
        return cls(
            inside=-(-machine.inside * weights.inside // PER_MILLE),
            between=-(-machine.between * weights.between // PER_MILLE),
            # Latencies are nanoseconds and prices are picoseconds: a thousandth of a weight.
            message_inside=machine.latency_inside * weights.inside,
            message_between=machine.latency_between * weights.between,
            memory=max(1, machine.inside, machine.between),
            machine=machine,
            each_message=weights.latency == "message",
        )

    def bytes(self, total: Any, between: Any) -> Any:
        """Return the price of `total` bytes, of which `between` move between nodes.

        The amounts are whole numbers, or numpy arrays of them.
        """
        return (total - between) * self.inside + between * self.between

    def messages(self, inside: Any, between: Any) -> Any:
        """Return the price of the messages of an exchange for one rank.

        `inside` and `between` are the products of the axes that change on each level: a rank gets
        a message from each other rank.
        """
        others_inside = inside - 1
        others_between = between - 1
        if not self.each_message:
            others_inside = (inside > 1) * 1
            others_between = (between > 1) * 1
        return others_inside * self.message_inside + others_between * self.message_between

    def operation(self, vertex: Vertex) -> int:
        """Return the attoseconds that one operation of a vertex takes."""
        assert self.machine is not None, "no machine was measured"
        if _is_product(vertex):
            dtype = "int64" if vertex.dtype == "uint64" else vertex.dtype
            return self.machine.multiply.get(dtype, self.machine.element)
        return self.machine.element


BYTES = Prices()


def _is_product(vertex: Vertex) -> bool:
    """Return whether a vertex is a matrix product, or a batch of them."""
    einsum = vertex.einsum
    if einsum is None or einsum.aggregation != "sum" or len(einsum.operands) < 2:
        return False
    for node in walk(einsum.function):
        if isinstance(node, Call):
            if node.op not in _PRODUCT_OPERATIONS:
                return False
        elif not isinstance(node, Arg | Const):
            return False
    return True
