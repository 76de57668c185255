"""Lists of indices that are known before planning: which indices of a dimension ranks read by them,
and where lists send what ranks compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.caches import bounded_cache
from einmpi.graph.eingraph import Aligned, EinGraph, Known, Vertex
from einmpi.graph.scalar import Arg, Scalar, labels_in
from einmpi.planner.mesh import Mesh

FEW_RUNS = 8  # of a set of indices: with more it is a list

Runs: TypeAlias = tuple[tuple[int, int], ...]  # see halo.py


class Listed(Runs):
    """The runs of indices that are listed, as there are many runs: they are rarely asked for."""

    indices: npt.NDArray[np.int64]

    def __new__(cls, indices: npt.NDArray[np.int64]) -> Listed:
        found = super().__new__(cls)
        indices.setflags(write=False)
        found.indices = indices
        return found

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        return _ends_of_runs(self.indices)

    @cached_property
    def _runs(self) -> Runs:
        starts = self.indices[self._ends[:-1]]
        stops = self.indices[self._ends[1:] - 1] + 1
        return tuple(zip(starts.tolist(), stops.tolist(), strict=True))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._runs)

    def __getitem__(self, which: Any) -> Any:
        return self._runs[which]

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __bool__(self) -> bool:
        return True

    def __hash__(self) -> int:
        return hash((len(self.indices), int(self.indices[0]), int(self.indices[-1])))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Listed) and np.array_equal(self.indices, other.indices)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __repr__(self) -> str:
        return f"Listed({self.indices!r})"


def runs_of(indices: npt.NDArray[np.int64]) -> Runs:
    """Return the runs of indices in ascending order."""
    if not len(indices):
        return ()
    ends = _ends_of_runs(indices)
    if len(ends) - 1 > FEW_RUNS:
        return Listed(indices)
    return tuple((int(indices[k]), int(indices[m - 1]) + 1) for k, m in pairwise(ends.tolist()))


def _ends_of_runs(indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return where runs begin, and where the last one ends."""
    jumps = np.flatnonzero(np.diff(indices) != 1) + 1
    return np.concatenate(([0], jumps, [len(indices)]))


def indices_of(runs: Runs) -> npt.NDArray[np.int64]:
    """Return all indices of the runs, in order."""
    if isinstance(runs, Listed):
        return runs.indices
    if not runs:
        return np.arange(0)
    return np.concatenate([np.arange(start, stop) for start, stop in runs])


def listed_inside(indices: npt.NDArray[np.int64], runs: Runs) -> Runs:
    """Return those of some indices that are in runs, too."""
    if isinstance(runs, Listed):
        return runs_of(np.intersect1d(indices, runs.indices, assume_unique=True))
    ends = np.searchsorted(indices, np.array(runs, np.int64).reshape(-1, 2))
    return runs_of(np.concatenate([indices[:0], *(indices[k:m] for k, m in ends)]))


def located_listed(inner: Runs, outer: Runs) -> Runs:
    """Return the places of indices in a buffer that holds others, where one of both is listed."""
    wanted = indices_of(inner)
    if isinstance(outer, Listed):
        return runs_of(np.searchsorted(outer.indices, wanted))
    starts, stops = np.array(outer, np.int64).T
    before = np.cumsum(stops - starts) - (stops - starts)
    run = np.searchsorted(starts, wanted, side="right") - 1
    return runs_of(before[run] + wanted - starts[run])


@dataclass(frozen=True)
class KnownList:
    """A tensor of indices that is known, and the labels that index it."""

    known: Known
    labels: tuple[str, ...]

    def mark(self, flags: npt.NDArray[np.bool_], shares: Mapping[str, Runs]) -> None:
        """Set the flags of the elements at these indices of its labels."""
        parts = [self.known.values]
        for dimension, label in enumerate(self.labels):
            before = (slice(None),) * dimension
            parts = [part[(*before, slice(*run))] for part in parts for run in shares[label]]
        for part in parts:
            flags[part] = True


def list_of(graph: EinGraph, vertex: Vertex, entry: Scalar, extent: int) -> KnownList | None:
    """Return the list that an index of a vertex is, if it is known and inside of a dimension."""
    if not isinstance(entry, Arg):
        return None
    operand = graph[vertex.inputs[entry.position]]
    labels = vertex.computed_einsum.operands[entry.position]
    names = tuple(label for label in labels if isinstance(label, str))
    if operand.known is None or len(set(names)) < len(labels):
        return None
    first, last = _ends(operand.known)
    return KnownList(operand.known, names) if first >= 0 and last < extent else None


@bounded_cache(1024)
def _ends(known: Known) -> tuple[int, int]:
    """Return the least and the greatest element; nothing is outside if there is none."""
    if not known.values.size:
        return 0, -1
    return int(known.values.min()), int(known.values.max())


@bounded_cache(1024)
def count_of_distinct(known: Known) -> int:
    """Return how many different elements a list has."""
    return len(np.unique(known.values))


def has_known_lists(graph: EinGraph) -> bool:
    """Return whether a list says what ranks read of a tensor, or where their results go."""
    for vertex in graph.computed:
        if vertex.aligned:
            return True
        for name, index in zip(vertex.inputs, vertex.computed_einsum.operands, strict=True):
            for entry, extent in zip(index, graph[name].bound, strict=True):
                if not isinstance(entry, str) and list_of(graph, vertex, entry, extent):
                    return True
    return False


# ---- results that stay ---------------------------------------------------------------------------
#
# If the block of a rank goes to its own block of the result, the result is complete there.


def with_aligned_labels(graph: EinGraph, mesh: Mesh) -> EinGraph:
    """Return a graph whose vertices say which of their labels can be cut alike on a mesh."""
    vertices = []
    for vertex in graph.vertices:
        aligned = () if vertex.einsum is None else tuple(_aligned(graph, vertex, mesh))
        vertices.append(vertex if vertex.aligned == aligned else replace(vertex, aligned=aligned))
    is_same = all(new is old for new, old in zip(vertices, graph.vertices, strict=True))
    return graph if is_same else replace(graph, vertices=tuple(vertices))


def _aligned(graph: EinGraph, vertex: Vertex, mesh: Mesh) -> Iterator[Aligned]:
    """Yield the aggregated labels whose blocks go to blocks of a result with the same numbers."""
    einsum = vertex.computed_einsum
    if einsum.segments is None:
        return
    extent = einsum.extent
    read = {label for index in einsum.operands for label in labels_in(index)}
    for scattered, index in zip(einsum.segments.labels, einsum.segments.indices, strict=True):
        if scattered in read or not isinstance(index, Arg):
            continue
        known = graph[vertex.inputs[index.position]].known
        labels = einsum.operands[index.position]
        if known is None or len(labels) != 1 or labels[0] not in einsum.aggregated:
            continue
        (label,) = labels
        sides = extent[scattered], len(known.values)
        has_one_window = all(len(mesh.windows(side)) == 1 for side in sides)
        if min(sides) >= mesh.ranks and has_one_window and _goes_to_blocks(known, *sides, mesh):
            assert isinstance(label, str)
            yield Aligned(label, scattered)
            return


@bounded_cache(1024)
def _goes_to_blocks(known: Known, extent: int, length: int, mesh: Mesh) -> bool:
    """Return whether all elements are in the block of a dimension with the number of their own.

    Those that are no index of the dimension go nowhere.
    """
    ranks = mesh.ranks
    borders = -(-np.arange(ranks + 1) * length // ranks)
    first = -(-np.arange(ranks + 1) * extent // ranks)
    own = np.diff(borders)
    values = known.values
    inside = (values >= np.repeat(first[:-1], own)) & (values < np.repeat(first[1:], own))
    return bool((inside | (values < 0) | (values >= extent)).all())
