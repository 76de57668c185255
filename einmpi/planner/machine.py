"""A measured machine: how long messages and operations take. Read from the file that `einmpi calibrate` writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from einmpi.errors import InputError
from einmpi.graph.dtypes import cpu_dtypes
from einmpi.language.toml_document import Document, get, kind_of, lookup, read_document, table
from einmpi.units import (
    parse_bandwidth,
    parse_latency,
    parse_speed,
    show_bandwidth,
    show_latency,
    show_speed,
)

# What a matrix product can give: numpy adds up int32 and bool as int64.
PRODUCTS = tuple(dtype for dtype in cpu_dtypes() if dtype not in ("int32", "bool"))
_KEYS = ("measured", "inside", "between", "kernels")
_EXAMPLES = {"latency": "1.2 us", "bandwidth": "5.1 GB/s", "other": "1.2 Gop/s"}
_LINK: Mapping[str, Callable[[str, str], int]] = {
    "latency": parse_latency,
    "bandwidth": parse_bandwidth,
}


@dataclass(frozen=True)
class Machine:
    """Times of one rank while all ranks of its node do the same. Whole numbers only, so that every rank plans alike.

    Where it was measured on one node, nothing is known about messages between nodes: they take 0. Likewise inside.
    """

    latency_inside: int  # ns for a message between two ranks of a node
    latency_between: int
    inside: int  # ps for a byte
    between: int
    multiply: Mapping[str, int] = field(
        hash=False
    )  # dtype of the result → fs for an operation of a product
    element: int  # fs for an operation of any other kernel
    source: str  # what was measured where and when, in words
    name: str = field(default="machine", compare=False)  # its file

    @property
    def digest(self) -> str:
        """Equal where all times are."""
        times = (self.latency_inside, self.latency_between, self.inside, self.between, self.element)
        return sha256(repr((times, sorted(self.multiply.items()))).encode()).hexdigest()[:16]

    def check(self, ranks: int, nodes: int) -> None:
        """Refuse a plan for which a time is not known."""
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
        """The text of its file."""
        lines = [f"measured = {_quoted(self.source)}"]
        for title, latency, byte in (
            ("inside", self.latency_inside, self.inside),
            ("between", self.latency_between, self.between),
        ):
            if byte:
                lines += [
                    "",
                    f"[{title}]",
                    f'latency = "{show_latency(latency)}"',
                    f'bandwidth = "{show_bandwidth(byte)}"',
                ]
        lines += [
            "",
            "[kernels]",
            *(f'{dtype} = "{show_speed(time)}"' for dtype, time in self.multiply.items()),
        ]
        return "\n".join([*lines, f'other = "{show_speed(self.element, "op")}"', ""])


def read_machine(path: str) -> Machine:
    document = read_document(path, "a machine file, which einmpi calibrate --save writes")
    table(document, (), _KEYS)
    source = get(document, ("measured",), str) or "not said where and when"
    links = {}
    for title in ("inside", "between"):
        table(document, (title,), _LINK)
        known = lookup(document, (title,)) is not None
        links[title] = [
            _time(document, (title, key), parse) if known else 0 for key, parse in _LINK.items()
        ]
    kernels = table(document, ("kernels",), (*PRODUCTS, "other"))
    multiply = {
        dtype: _time(document, ("kernels", dtype), parse_speed)
        for dtype in PRODUCTS
        if dtype in kernels
    }
    element = _time(document, ("kernels", "other"), parse_speed)
    latencies, times = zip(links["inside"], links["between"], strict=True)
    return Machine(*latencies, *times, multiply, element, " ".join(source.split()), path)


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
    """A string of TOML; what cannot be printed is left out."""
    kept = "".join(letter for letter in text if letter.isprintable())
    return '"' + kept.replace("\\", "\\\\").replace('"', '\\"') + '"'
