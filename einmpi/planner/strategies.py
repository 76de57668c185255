"""Strategies that cut each vertex by a rule, one function each: the paper's algorithm and its peers (paper, section 9).

`place` brings a strategy's cuts to what the axes of the mesh can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import gcd, isqrt, prod

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.graph.eingraph import EinGraph
from einmpi.graph.einsum import EinSum
from einmpi.graph.labels import unique
from einmpi.planner.mesh import Mesh, allowed_masks
from einmpi.planner.paper.dynamic_program import decompose
from einmpi.planner.paper.viable import Parts, divisors, fullest
from einmpi.planner.plan import ROLES

Roles = Mapping[str, tuple[str, ...]]

_EXAMPLES = {"batch": "b", "sequence": "s", "head": "h", "hidden": "f"}


@dataclass(frozen=True)
class Choice:
    """The parts of every computed vertex's labels, and in words where a strategy's rule had to give way."""

    partitionings: Mapping[str, Parts]
    notes: Mapping[str, str]


def eindecomp_paper(graph: EinGraph, ranks: int, roles: Roles) -> Choice:
    """The paper's algorithm."""
    found = decompose(graph, ranks)
    return Choice(
        found, {name: _short(parts, ranks) for name, parts in found.items() if prod(parts) < ranks}
    )


def sqrt(graph: EinGraph, ranks: int, roles: Roles) -> Choice:
    """Every label, aggregated ones too, in ⌊√ranks⌋ parts: more calls than ranks where a vertex has three labels."""
    root = isqrt(ranks)
    return Choice(
        {name: tuple(min(root, max(e, 1)) for _, e in x.extents) for name, x in _einsums(graph)}, {}
    )


def replicate(graph: EinGraph, ranks: int, roles: Roles) -> Choice:
    """Nothing is cut: every rank computes everything."""
    return Choice({name: (1,) * len(einsum.labels) for name, einsum in _einsums(graph)}, {})


def by_role(
    strategy: str,
    wanted: tuple[str, ...],
    needed: tuple[str, ...],
    graph: EinGraph,
    ranks: int,
    roles: Roles,
) -> Choice:
    """Each vertex is cut along its labels of the first of the `wanted` roles that it has.

    The prime factors of `ranks` go to these labels in the order given, the first label taking as many as fit; a prime
    that fits none of them is left out. A vertex with no such label is cut along those of the first role that it does
    have of batch, sequence, head, hidden; one with none of these along its output labels, the longest first, or its
    aggregated ones if there is nothing else to cut. Needs a label for at least one of the `needed` roles.
    """
    _check_roles(strategy, needed, graph, roles)
    partitionings: dict[str, Parts] = {}
    notes: dict[str, str] = {}
    for name, einsum in _einsums(graph):
        role, labels = _labels_to_cut(einsum, unique(wanted, ROLES), roles)
        cuts = dict(
            zip(labels, fullest(tuple(einsum.extent[x] for x in labels), ranks), strict=True)
        )
        parts = tuple(cuts.get(label, 1) for label in einsum.labels)
        said = []
        if role != wanted[0] and labels:
            cut = [label for label in labels if cuts[label] > 1] or labels
            said.append(f"no {wanted[0]} label: cut {role} {', '.join(cut)}")
        if prod(parts) < ranks:
            said.append(_short(parts, ranks))
        partitionings[name] = parts
        if said:
            notes[name] = "; ".join(said)
    return Choice(partitionings, notes)


Partitioner = Callable[[EinGraph, int, Roles], Choice]

PARTITIONERS: dict[str, Partitioner] = {
    "eindecomp-paper": eindecomp_paper,
    "sqrt": sqrt,
    "data": partial(by_role, "data", ("batch",), ("batch",)),
    "model": partial(by_role, "model", ("hidden",), ("hidden",)),
    "sequence": partial(by_role, "sequence", ("sequence",), ("sequence",)),
    "attention": partial(by_role, "attention", ("head",), ("head",)),
    "megatron": partial(by_role, "megatron", ("head", "hidden", "sequence"), ("head", "hidden")),
    "replicate": replicate,
}


def _einsums(graph: EinGraph) -> list[tuple[str, EinSum]]:
    return [(vertex.name, vertex.einsum) for vertex in graph.vertices if vertex.einsum is not None]


def _short(parts: Parts, ranks: int) -> str:
    return f"only {prod(parts)} of {ranks} ways fit its labels"


def _labels_to_cut(
    einsum: EinSum, order: tuple[str, ...], roles: Roles
) -> tuple[str, tuple[str, ...]]:
    """(what they are, the labels to cut, the first to be filled first)."""
    for role in order:
        found = tuple(label for label in unique(roles.get(role, ())) if label in einsum.labels)
        if found:
            return role, found
    extent = einsum.extent
    kind, labels = "output", einsum.output
    if all(extent[label] <= 1 for label in labels):
        kind, labels = "aggregated", einsum.aggregated
    return kind, tuple(
        sorted(labels, key=lambda label: (-extent[label], einsum.labels.index(label)))
    )


def _check_roles(strategy: str, needed: tuple[str, ...], graph: EinGraph, roles: Roles) -> None:
    if not any(roles.get(role) for role in needed):
        example = f'such as {needed[0]} = ["{_EXAMPLES[needed[0]]}"]'
        raise InputError(
            "[roles]", f"strategy {strategy} needs the role {' or '.join(needed)}", example
        )
    known = unique(*(einsum.labels for _, einsum in _einsums(graph)))
    for role, labels in roles.items():
        for label in labels:
            if label not in known:
                raise InputError(
                    "[roles]",
                    f"role {role} names the label {label}, which no vertex has",
                    one_of(known, label),
                )


# ---- what a mesh can hold -------------------------------------------------------------------------------------------


def place(mesh: Mesh, extents: Sequence[int], parts: Sequence[int]) -> tuple[int, ...]:
    """For each axis of the mesh the label (by number) it cuts, or len(extents): these cuts as far as the axes can make
    them.

    Each axis cuts one label, and one label only by axes of the same window (Mesh.windows). The labels, first to last,
    keep the largest divisor of their cut for which axes are left: so the last ones, which are the aggregated labels of
    an EinSum, lose theirs first.
    """
    return _placed(mesh, tuple(extents), tuple(parts))


@cache
def _placed(mesh: Mesh, extents: tuple[int, ...], parts: Parts) -> tuple[int, ...]:
    masks = np.arange(1 << len(mesh.factors))
    product = np.ones_like(masks)
    for axis, factor in enumerate(mesh.factors):
        product[masks >> axis & 1 == 1] *= factor
    reached: list[dict[int, int]] = []  # for each label: axes taken up to it → its own among them
    taken = masks[:1]
    for extent, count in zip(extents, parts, strict=True):
        for cut in reversed(divisors(gcd(count, mesh.ranks))):
            own = masks[allowed_masks(mesh.factors, extent) & (product == cut)]
            before, mine = np.nonzero(taken[:, None] & own == 0)
            if len(before):
                together = taken[before] | own[mine]
                reached.append(dict(zip(together.tolist(), own[mine].tolist(), strict=True)))
                taken = np.unique(together)
                break
    symbols = [len(extents)] * len(mesh.factors)
    last = int(taken[0])
    for label in reversed(range(len(extents))):
        own_axes = reached[label][last]
        for axis in range(len(mesh.factors)):
            if own_axes >> axis & 1:
                symbols[axis] = label
        last &= ~own_axes
    return tuple(symbols)
