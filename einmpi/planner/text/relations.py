"""One vertex in the tensor-relational algebra: the tiles that are moved, joined and aggregated.

Paper, section 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
from math import prod

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.eingraph import EinGraph
from einmpi.graph.einsum import EinSum, element_text
from einmpi.planner.paper import Cost, Parts, cost_repartition, needs, vertex_cost
from einmpi.planner.text.summary import show_parts
from einmpi.units import counted

Key = tuple[int, ...]  # of a tile: the number of its part in each dimension, or of each label

MOST_LISTED = 64  # a longer list shows only its first entries
FIRST_LISTED = 16  # so many of them


def relations(graph: EinGraph, name: str, partitionings: Mapping[str, Parts]) -> str:
    """Return, as text, how a vertex's tiles are made, meet in kernel calls, and are added up."""
    vertex = graph[name]
    einsum = vertex.computed_einsum
    parts = partitionings[name]
    cost = vertex_cost(graph, name, partitionings)
    cuts = [f"{label} {count}" for label, count in zip(einsum.labels, parts, strict=True)]
    listed = ", ".join(cuts) or "no labels"
    lines = [vertex.summary, f"cut into {listed}: {counted(prod(parts), 'kernel call')}"]
    for operand in range(len(einsum.operands)):
        lines += _repartition(graph, name, operand, partitionings)
    lines += _join(einsum, vertex.inputs, parts, cost)
    lines += _aggregate(einsum, name, parts, cost)
    return "\n".join(lines)


def _repartition(
    graph: EinGraph, name: str, operand: int, partitionings: Mapping[str, Parts]
) -> list[str]:
    """Return which tiles, as the producer leaves them, make up each tile that is needed."""
    vertex = graph[name]
    einsum = vertex.computed_einsum
    source = graph[vertex.inputs[operand]]
    wanted = needs(einsum, operand, partitionings[name])
    head = f"repartition {_elements(einsum, vertex.inputs)[operand]}: "
    if source.is_input:
        return [f"{head}an input, stored in {show_parts(wanted)}"]
    made = partitionings[source.name][: len(source.bound)]
    if made == wanted:
        return [f"{head}none, made and needed in {show_parts(wanted)}"]
    moved = counted(cost_repartition(wanted, made, source.bound), "element")
    head += f"made in {show_parts(made)}, needed in {show_parts(wanted)}, {moved}"

    def line(key: Key) -> str:
        return f"{source.name}{_key(key)} ← {_pieces(key, wanted, made, source.bound)}"

    return [head, *_some(map(line, _keys(wanted)), prod(wanted))]


def _pieces(key: Key, wanted: Parts, made: Parts, bound: Sequence[int]) -> str:
    """Return the producer's tiles that overlap one tile.

    Part k of d holds the indices i with ⌊i·d / extent⌋ = k.
    """
    ranges = []
    for part, parts, made_parts, extent in zip(key, wanted, made, bound, strict=True):
        if not extent:
            ranges.append(range(1))
            continue
        first = -(-part * extent // parts)
        last = -(-(part + 1) * extent // parts) - 1
        ranges.append(range(first * made_parts // extent, last * made_parts // extent + 1))
    return _list(product(*ranges), prod(map(len, ranges)))


def _join(einsum: EinSum, tensors: Sequence[str], parts: Parts, cost: Cost) -> list[str]:
    """Return which tiles of the operands meet in each kernel call."""
    shared = []  # labels that several operands have
    for label in einsum.labels:
        if sum(label in index for index in einsum.operands) > 1:
            shared.append(label)
    operands = " ⋈ ".join(_elements(einsum, tensors)) or "of nothing"
    on = f" on {', '.join(shared)}" if shared else ""
    moved = counted(cost.join, "element")
    head = f"join {operands}{on}, key {_key(einsum.labels)}, {moved}"

    def line(key: Key) -> str:
        # A dimension that is not cut has one tile, 0; so has a gathered one.
        tiles = []
        for operand, tensor in enumerate(tensors):
            tiles.append(f"{tensor}{_key(needs(einsum, operand, key, 0))}")
        return f"{' ⋈ '.join(tiles)} → {_key(key)}".lstrip()

    return [head, *_some(map(line, _keys(parts)), prod(parts))]


def _aggregate(einsum: EinSum, name: str, parts: Parts, cost: Cost) -> list[str]:
    """Return which calls' results are combined into each tile of the output."""
    kept = parts[: len(einsum.output)]
    added = parts[len(einsum.output) :]
    if einsum.aggregation is None or prod(added) == 1:
        why = f": {', '.join(einsum.aggregated)} not cut" if einsum.aggregated else ""
        return [f"aggregate nothing{why}; each call makes one tile of {name}"]
    symbol = AGGREGATIONS[einsum.aggregation].symbol
    groups = (
        f"{counted(prod(kept), 'group')} of {prod(added)}, {counted(cost.aggregate, 'element')}"
    )

    def line(key: Key) -> str:
        calls = _list(((*key, *rest) for rest in _keys(added)), prod(added))
        return f"{name}{_key(key)} ← {symbol} {calls}"

    head = f"aggregate {symbol} over {', '.join(einsum.aggregated)}: {groups}"
    return [head, *_some(map(line, _keys(kept)), prod(kept))]


def _elements(einsum: EinSum, tensors: Sequence[str]) -> list[str]:
    shown: list[str] = []
    for tensor, index in zip(tensors, einsum.operands, strict=True):
        shown.append(element_text(tensor, index, shown))
    return shown


def _keys(parts: Parts) -> Iterator[Key]:
    return product(*map(range, parts))


def _key(key: Iterable[object]) -> str:
    return f"⟨{','.join(map(str, key))}⟩"


def _some(lines: Iterable[str], total: int) -> list[str]:
    """Return the lines, indented, or some of them."""
    return [f"  {line}" for line in _first(lines, total)]


def _list(keys: Iterable[Key], total: int) -> str:
    """Return the keys on one line, or some of them."""
    return " ".join(_first(map(_key, keys), total))


def _first(texts: Iterable[str], total: int) -> list[str]:
    """Return the texts, or the first of them and a count of the rest."""
    shown = list(islice(texts, total if total <= MOST_LISTED else FIRST_LISTED))
    if len(shown) < total:
        shown.append(f"… {total - len(shown)} more")
    return shown
