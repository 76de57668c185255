"""Scalar expression trees: the ⊗ of an EinSum (paper, section 3)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Number: TypeAlias = bool | int | float | complex


@dataclass(frozen=True)
class Const:
    """A number. 1, 1.0 and True are different constants, and -0.0 is not 0.0."""

    value: Number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and repr(self.value) == repr(other.value)

    def __hash__(self) -> int:
        return hash(repr(self.value))


@dataclass(frozen=True)
class Index:
    """The value of a label: 0, 1, …, extent − 1."""

    label: str


@dataclass(frozen=True)
class Arg:
    """The element of operand number `position`."""

    position: int


@dataclass(frozen=True)
class Element:
    """An element of a named tensor. Each index is a label, or an integer expression (a gather)."""

    tensor: str
    index: IndexEntries


@dataclass(frozen=True)
class Call:
    """An operation, by its name in OPERATIONS, applied to arguments."""

    op: str
    args: tuple[Scalar, ...]


Scalar: TypeAlias = Const | Index | Arg | Element | Call
# What indexes the dimensions of a tensor: labels, or integer expressions, which are gathers.
IndexEntries: TypeAlias = tuple[str | Scalar, ...]


def labels_in(index: IndexEntries) -> tuple[str, ...]:
    """Return the entries of an index that are labels."""
    return tuple(entry for entry in index if isinstance(entry, str))


def gathers_in(index: IndexEntries) -> tuple[Scalar, ...]:
    """Return the entries of an index that are expressions."""
    return tuple(entry for entry in index if not isinstance(entry, str))


def with_gathers(
    index: IndexEntries,
    change: Callable[[Scalar], Scalar],
    entries: Mapping[str, str | Scalar] | None = None,
) -> IndexEntries:
    """Return an index with its expressions changed; labels stay, or become other `entries`."""
    known = entries or {}
    return tuple(
        known.get(entry, entry) if isinstance(entry, str) else change(entry) for entry in index
    )


def children(node: Scalar) -> tuple[Scalar, ...]:
    """Return the expressions directly below a node: arguments, or gather indices."""
    if isinstance(node, Call):
        return node.args
    if isinstance(node, Element):
        return gathers_in(node.index)
    return ()


def walk(node: Scalar) -> list[Scalar]:
    """Return the node and all nodes below it, left to right, gather indices included."""
    found: list[Scalar] = []
    waiting = [node]
    while waiting:
        part = waiting.pop()
        found.append(part)
        waiting.extend(reversed(children(part)))
    return found


def labels_of(node: Scalar) -> tuple[str, ...]:
    """Return every label the expression depends on.

    Labels that index tensors come first, as they occur, then labels used as numbers.
    """
    indexing: dict[str, None] = {}
    as_numbers: dict[str, None] = {}
    waiting: list[str | Scalar] = [node]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            indexing[part] = None
        elif isinstance(part, Call):
            waiting.extend(reversed(part.args))
        elif isinstance(part, Element):
            waiting.extend(reversed(part.index))
        elif isinstance(part, Index):
            as_numbers[part.label] = None
    return tuple(indexing | as_numbers)


def rebuild(node: Scalar, leaf: Callable[[Scalar], Scalar]) -> Scalar:
    """Return a copy with `leaf` applied to every node that is not a Call.

    `leaf` has to look after gather indices itself.
    """
    if isinstance(node, Call):
        return Call(node.op, tuple(rebuild(arg, leaf) for arg in node.args))
    return leaf(node)


def relabel(node: Scalar, names: Mapping[str, str]) -> Scalar:
    """Return a copy with labels renamed; labels that `names` does not have stay."""

    def leaf(part: Scalar) -> Scalar:
        if isinstance(part, Index):
            return Index(names.get(part.label, part.label))
        if not isinstance(part, Element):
            return part
        return Element(part.tensor, relabel_index(part.index, names))

    return rebuild(node, leaf)


def relabel_index(index: IndexEntries, names: Mapping[str, str]) -> IndexEntries:
    """Return an index with labels renamed; labels that `names` does not have stay."""
    return with_gathers(index, lambda gather: relabel(gather, names), names)


def is_plain(expression: Scalar) -> bool:
    """Return whether an expression is an element indexed by labels, each once.

    Gathers and diagonals are not plain.
    """
    if not isinstance(expression, Element):
        return False
    labels = set(labels_in(expression.index))
    return len(labels) == len(expression.index)


# ---- labels --------------------------------------------------------------------------------------
#
# Lists of labels: projecting extents onto them (paper, section 3), joining them, new names.


# i·p stays below 2**59 for every index i and 2**20 ranks: it fits into 64 bits.
MAX_EXTENT = 2**39
MAX_LABELS = 64  # of one EinSum, and dimensions of a tensor: numpy's limit
# Bytes of a tensor, and values of ⊗ that one rank computes, stay below it: they fit into 64 bits.
MAX_COUNT = 2**63


def project(vector: Sequence[int], wanted: Sequence[str], labels: Sequence[str]) -> tuple[int, ...]:
    """Return the paper's b[wanted; labels]: the entry of `vector` for each wanted label."""
    return tuple(vector[labels.index(label)] for label in wanted)


def unique(*lists: Iterable[str]) -> tuple[str, ...]:
    """Return the paper's ⊙: the lists joined, each label once, in order of first occurrence."""
    return tuple(dict.fromkeys(itertools.chain(*lists)))


def unlike(name: str, taken: Container[str]) -> str:
    """Return a name, with as many underscores after it as make it unlike those taken."""
    while name in taken:
        name += "_"
    return name


class Names:
    """The names in use. None becomes free again, so each new one is found in constant time."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._next_number: dict[str, int] = {}  # of each stem; all smaller ones are taken

    def __contains__(self, name: str) -> bool:
        return name in self._taken

    def copy(self) -> Names:
        """Return the same names, to which others can be added."""
        copied = Names(self._taken)
        copied._next_number = dict(self._next_number)
        return copied

    def add(self, name: str) -> None:
        """Note that a name is in use."""
        self._taken.add(name)

    def take_new(self, stem: str) -> str:
        """Take and return `stem` if it is free, else the first of stem_1, stem_2, … that is."""
        number = self._next_number.get(stem, 0)
        name = f"{stem}_{number}" if number else stem
        while name in self._taken:
            number += 1
            name = f"{stem}_{number}"
        self._next_number[stem] = number + 1
        self._taken.add(name)
        return name
