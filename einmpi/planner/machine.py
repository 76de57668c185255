"""A measured machine: how long messages and operations take, as `einmpi calibrate` found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from einmpi.errors import InputError
from einmpi.language.toml_document import Document, get, kind_of, lookup, read_document, table
from einmpi.units import (
    parse_bandwidth,
    parse_latency,
    parse_speed,
    show_bandwidth,
    show_latency,
    show_speed,
)

# What a matrix product can give. Integers are added up as int64, and uint64 takes as long.
PRODUCTS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "int64")
_KEYS = ("measured", "inside", "between", "kernels")
_EXAMPLES = {"latency": "1.2 us", "bandwidth": "5.1 GB/s", "other": "1.2 Gop/s"}


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
    name: str = field(default="machine", compare=False)  # its file

    @property
    def digest(self) -> str:
        """A short hash, equal where all times are."""
        times = (self.latency_inside, self.latency_between, self.inside, self.between, self.element)
        return sha256(repr((times, sorted(self.multiply.items()))).encode()).hexdigest()[:16]

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
        lines = [f"measured = {_quoted(self.source)}"]
        if self.inside:
            lines += _link_lines("inside", self.latency_inside, self.inside)
        if self.between:
            lines += _link_lines("between", self.latency_between, self.between)
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
    table(document, (), _KEYS)
    source = get(document, ("measured",), str) or "not said where and when"
    latency_inside, inside = _link(document, "inside")
    latency_between, between = _link(document, "between")
    kernels = table(document, ("kernels",), (*PRODUCTS, "other"))
    multiply = {}
    for dtype in PRODUCTS:
        if dtype in kernels:
            multiply[dtype] = _time(document, ("kernels", dtype), parse_speed)
    return Machine(
        latency_inside,
        latency_between,
        inside,
        between,
        multiply,
        element=_time(document, ("kernels", "other"), parse_speed),
        source=" ".join(source.split()),
        name=path,
    )


def _link(document: Document, title: str) -> tuple[int, int]:
    """Return (latency, time of a byte) of a section; zeros where there is none."""
    table(document, (title,), ("latency", "bandwidth"))
    if lookup(document, (title,)) is None:
        return 0, 0
    latency = _time(document, (title, "latency"), parse_latency)
    byte_time = _time(document, (title, "bandwidth"), parse_bandwidth)
    return latency, byte_time


def _time(document: Document, path: tuple[str, ...], parse: Callable[[str, str], int]) -> int:
    given = lookup(document, path)
    if given is None:
        raise InputError(
            document.place(path),
            f"there is no {path[-1]} in [{path[0]}]",
            f'a value such as {path[-1]} = "{_EXAMPLES[path[-1]]}"',
        )
    if not isinstance(given, str):
        raise InputError(
            document.place(path),
            f"{path[-1]} is {kind_of(given)}",
            "a string with a unit",
        )
    return parse(given, document.place(path))


def _quoted(text: str) -> str:
    """Return a string of TOML, without characters that cannot be printed."""
    kept = "".join(letter for letter in text if letter.isprintable())
    return '"' + kept.replace("\\", "\\\\").replace('"', '\\"') + '"'
