"""One vertex in the tensor-relational algebra: repartition, join and aggregation of tiles (paper, section 4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
from math import prod

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.eingraph import EinGraph
from einmpi.graph.einsum import EinSum
from einmpi.graph.notation import element_text
from einmpi.planner.paper.costs import Cost, cost_repartition, needs, vertex_cost
from einmpi.planner.paper.viable import Parts

Key = tuple[int, ...]  # of a tile: which part of each dimension, or of each label, it is

MOST_LISTED = 64  # longer lists show only their first tuples
_SHOWN = 16


def relations(graph: EinGraph, name: str, partitionings: Mapping[str, Parts]) -> str:
    """How the tiles of a vertex's operands are made, meet in kernel calls, and are added up; as text."""
    vertex, parts = graph[name], partitionings[name]
    einsum = vertex.einsum
    assert einsum is not None, f"{name} is an input"
    cost = vertex_cost(graph, name, partitionings)
    cuts = (
        ", ".join(f"{label} {d}" for label, d in zip(einsum.labels, parts, strict=True))
        or "no labels"
    )
    lines = [str(vertex), f"cut into {cuts}: {_count(prod(parts), 'kernel call')}"]
    for operand in range(len(einsum.operands)):
        lines += _repartition(graph, name, operand, partitionings)
    lines += _join(einsum, vertex.inputs, parts, cost)
    lines += _aggregate(einsum, name, parts, cost)
    return "\n".join(lines)


def _repartition(
    graph: EinGraph, name: str, operand: int, partitionings: Mapping[str, Parts]
) -> list[str]:
    """Which tiles, as the producer leaves them, make up each tile that is needed."""
    einsum, source = graph[name].einsum, graph[graph[name].inputs[operand]]
    assert einsum is not None
    wanted = needs(einsum, operand, partitionings[name])
    head = f"repartition {_elements(einsum, graph[name].inputs)[operand]}: "
    if source.is_input:
        return [f"{head}an input, stored in {_vector(wanted)}"]
    made = partitionings[source.name][: len(source.bound)]
    if made == wanted:
        return [f"{head}none, made and needed in {_vector(wanted)}"]
    moved = cost_repartition(wanted, made, source.bound)
    lines = [
        f"{head}made in {_vector(made)}, needed in {_vector(wanted)}, {_count(moved, 'element')}"
    ]
    listed = (
        f"{source.name}{_key(key)} ← {_pieces(key, wanted, made, source.bound)}"
        for key in _keys(wanted)
    )
    return lines + _some(listed, prod(wanted))


def _pieces(key: Key, wanted: Parts, made: Parts, bound: Sequence[int]) -> str:
    """The producer's tiles that overlap one tile: part k of d holds the indices i with ⌊i·d / extent⌋ = k."""
    ranges = []
    for k, d, have, extent in zip(key, wanted, made, bound, strict=True):
        first, last = -(-k * extent // d), -(-(k + 1) * extent // d) - 1
        ranges.append(
            range(first * have // extent, last * have // extent + 1) if extent else range(1)
        )
    return _list(product(*ranges), prod(map(len, ranges)))


def _join(einsum: EinSum, tensors: Sequence[str], parts: Parts, cost: Cost) -> list[str]:
    """Which tiles of the operands meet in each kernel call."""
    elements = _elements(einsum, tensors)
    used = [
        list(dict.fromkeys(e for e in index if isinstance(e, str))) for index in einsum.operands
    ]
    shared = [label for label in einsum.labels if sum(label in labels for labels in used) > 1]
    on = f" on {', '.join(shared)}" if shared else ""
    head = f"join {' ⋈ '.join(elements) or 'of nothing'}{on}, key {_key(einsum.labels)}, {_count(cost.join, 'element')}"

    def line(key: Key) -> str:
        # A dimension that is not cut has one tile, 0: so has a gathered one.
        met = [f"{tensor}{_key(needs(einsum, k, key, 0))}" for k, tensor in enumerate(tensors)]
        return f"{' ⋈ '.join(met)} → {_key(key)}".lstrip()

    return [head, *_some(map(line, _keys(parts)), prod(parts))]


def _aggregate(einsum: EinSum, name: str, parts: Parts, cost: Cost) -> list[str]:
    """Which calls' results are added into each tile of the output."""
    kept, added = parts[: len(einsum.output)], parts[len(einsum.output) :]
    if einsum.aggregation is None or prod(added) == 1:
        why = f": {', '.join(einsum.aggregated)} not cut" if einsum.aggregated else ""
        return [f"aggregate nothing{why}; each call makes one tile of {name}"]
    symbol = AGGREGATIONS[einsum.aggregation].symbol
    groups = f"{_count(prod(kept), 'group')} of {prod(added)}, {_count(cost.aggregate, 'element')}"

    def line(key: Key) -> str:
        return f"{name}{_key(key)} ← {symbol} {_list(((*key, *rest) for rest in _keys(added)), prod(added))}"

    return [
        f"aggregate {symbol} over {', '.join(einsum.aggregated)}: {groups}",
        *_some(map(line, _keys(kept)), prod(kept)),
    ]


def _elements(einsum: EinSum, tensors: Sequence[str]) -> list[str]:
    shown: list[str] = []
    for tensor, index in zip(tensors, einsum.operands, strict=True):
        shown.append(element_text(tensor, index, shown))
    return shown


def _keys(parts: Parts) -> Iterator[Key]:
    return product(*map(range, parts))


def _key(key: Iterable[object]) -> str:
    return f"⟨{','.join(map(str, key))}⟩"


def _vector(parts: Parts) -> str:
    return f"[{','.join(map(str, parts))}]"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _some(lines: Iterable[str], total: int) -> list[str]:
    shown = [f"  {line}" for line in islice(lines, total if total <= MOST_LISTED else _SHOWN)]
    return shown if len(shown) == total else [*shown, f"  … {total - len(shown)} more"]


def _list(keys: Iterable[Key], total: int) -> str:
    shown = [_key(key) for key in islice(keys, total if total <= MOST_LISTED else _SHOWN)]
    return " ".join(shown if len(shown) == total else [*shown, f"… {total - len(shown)} more"])
