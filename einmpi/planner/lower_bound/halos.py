"""What ranks need at least of a tensor that is read with index arithmetic, such as u[i+1], or by
lists of indices that are known.

docs/lower_bound.md, "Halos", has the argument."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from einmpi.caches import bounded_cache
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.einsum import EinSum
from einmpi.graph.index_arithmetic import affine_of
from einmpi.graph.scalar import Call, Const, IndexEntries, Scalar
from einmpi.planner.lower_bound.parts import Floats, PartsEdge
from einmpi.planner.lower_bound.ways import (
    FREE_WORK,
    MOST_WAYS,
    MOST_WORDS,
    ROOT_OF_FRACTIONS,
    Ints,
    Ways,
    Work,
    count_of_ways,
    grids,
    least_ways,
    part_counts,
    role_of,
    shares,
    ways_of_grid,
)
from einmpi.planner.moving.halo import Needed, needed_of
from einmpi.planner.moving.known_lists import count_of_distinct

MOST_ELEMENTS = 1 << 42  # of a tensor whose fractions of a copy are computed in 64 bits


@dataclass(frozen=True)
class Reach:
    """The indices of a dimension: stride · major label + minor label + an offset.

    The offset goes from `first` to `last`, as operands that read the tensor differ in it. Without a
    minor label, its extent is 1. Labels that count backwards are turned round.
    """

    extent: int  # of the dimension
    wraps: bool  # the index is taken modulo the extent
    major: str
    major_extent: int
    stride: int
    minor: str | None
    minor_extent: int
    first: int
    last: int

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels on which the indices depend."""
        return (self.major,) if self.minor is None else (self.major, self.minor)

    def indices(self, parts: Mapping[str, Ints]) -> Ints:
        """Return how many indices all parts of the labels need together, or fewer."""
        majors = parts[self.major]
        if self.wraps:
            return self._indices_of_ring(majors)
        minors = np.ones_like(majors) if self.minor is None else parts[self.minor]
        # A sum of two sets has at least as many elements as both together, less one.
        width = self.last - self.first
        sums = minors * self.major_extent + majors * self.minor_extent
        found = sums + majors * minors * (width - 1)
        window = self.minor_extent + width
        if window >= self.stride:  # without gaps between the windows
            windows = self.stride * self.major_extent + majors * (window - self.stride)
            found = np.where(minors == 1, np.maximum(found, windows), found)
        end = self.stride * (self.major_extent - 1) + self.minor_extent + self.last
        for outside in (-self.first, end - self.extent):
            # So many parts reach the indices outside of the tensor, the nearest of them first.
            for depth in range(1, max(0, outside) + 1):
                found = found - np.minimum(majors, depth) * np.minimum(minors, depth)
        least: Ints = np.maximum(found, 0)
        return least

    def least(self, parts: Ints, ranks: int) -> Ints:
        """Return how many indices a rank needs at least, given into how many parts labels are."""
        needed = shares(self.major_extent, parts, ranks)[0]
        if self.wraps:
            return needed
        if self.minor is None and self.stride == 1:
            needed = needed + self.last - self.first
        end = self.stride * (self.major_extent - 1) + self.minor_extent + self.last
        outside = max(0, -self.first) + max(0, end - self.extent)
        least: Ints = np.maximum(needed - outside, 1)
        return least

    def _indices_of_ring(self, parts: Ints) -> Ints:
        """Return the same where the dimension is a ring: it has an end only if it is not cut.

        A part leaves out at least a quarter of the ring, since parts consist of equal blocks.
        """
        width = self.last - self.first
        if 4 * width > self.extent:
            return np.full_like(parts, self.extent)
        return np.where(parts == 1, self.extent, self.extent + parts * width)


@dataclass(frozen=True)
class Listed:
    """The indices of a dimension that a known list names, however its labels are cut."""

    labels: tuple[str, ...]
    distinct: int

    def indices(self, parts: Mapping[str, Ints]) -> Ints:
        """Return how many indices all parts of the labels need together, or fewer."""
        return np.full_like(parts[self.labels[0]], self.distinct)

    def least(self, parts: Ints, ranks: int) -> Ints:
        """Return how many indices a rank needs at least."""
        return np.ones_like(parts)


@dataclass(frozen=True)
class Reading:
    """How operands of a vertex together read a tensor: one index is arithmetic, or a known list.

    With lists, the first operand is looked at: all together need no less.
    """

    elements: int
    reaches: tuple[Reach | Listed, ...]  # of each dimension; if it is no box, without lists
    is_box: bool  # whether the corners are read: all dimensions at their ends together

    @property
    def labels(self) -> frozenset[str]:
        """The labels on which its indices depend."""
        return frozenset(label for each in self.reaches for label in each.labels)

    def needed(self, labels: Sequence[str], grid: Ints) -> Ints:
        """Return the elements that all ranks need, or fewer, but no fewer than the tensor has.

        `grid` has a row for each way to cut the vertex: the parts of each label, and how many ranks
        compute the same.
        """
        parts = dict(zip(labels, grid.T, strict=False))
        needed: Ints = self._alike(parts, grid) * self._needed_of_each(parts)
        return np.maximum(needed, self.elements)

    def needed_of_middle(self, labels: Sequence[str], grid: Ints, ranks: int) -> Ints:
        """Return the elements that all ranks need, or fewer: of a star, of one of its operands.

        Then follows how many indices of each dimension a rank needs at least.
        """
        parts = dict(zip(labels, grid.T, strict=False))
        reaches = self.reaches if self.is_box else self._middle
        columns = [self._alike(parts, grid) * prod(reach.indices(parts) for reach in reaches)]
        columns += [reach.least(parts[reach.labels[0]], ranks) for reach in reaches]
        return np.column_stack(columns)

    def _alike(self, parts: Mapping[str, Ints], grid: Ints) -> Ints:
        """Return how many ranks have the same indices of the tensor."""
        others = grid[:, -1].copy()
        for label, count in parts.items():
            if label not in self.labels:
                others *= count
        return others

    @property
    def _middle(self) -> list[Reach]:
        """What one operand of a star reaches, that with the offsets that are nearest to 0."""
        found = []
        for reach in self.reaches:
            assert isinstance(reach, Reach), "lists have no corners"
            offset = max(reach.first, min(0, reach.last))
            found.append(replace(reach, first=offset, last=offset))
        return found

    def _needed_of_each(self, parts: Mapping[str, Ints]) -> Ints:
        """Return what one rank with each combination of shares needs, all these together."""
        reached = [reach.indices(parts) for reach in self.reaches]
        if self.is_box:
            return np.asarray(prod(reached))
        # A star: what a rank would need with one of the offsets, and arms in each dimension.
        cores = [reach.indices(parts) for reach in self._middle]
        total: Ints = np.asarray(prod(cores))
        for dimension, (reach_of_all, core) in enumerate(zip(reached, cores, strict=True)):
            beside = prod(cores[:dimension]) * prod(cores[dimension + 1 :])
            total = total + np.maximum(reach_of_all - core, 0) * beside
        return total


@dataclass(frozen=True)
class HaloEdge(PartsEdge):
    """A tensor on its way from its layout to a vertex that reads it with index arithmetic.

    What the target needs is a row: the elements that all ranks need together, those without the
    arms of a star, and the indices of each dimension that a rank needs at least.
    """

    reading: Reading
    labels: tuple[str, ...]  # of the target

    def after(self, parts: Ints) -> Ints:
        """Return what ranks need at least, for each value of the target."""
        needed = self.reading.needed(self.labels, parts)
        middle = self.reading.needed_of_middle(self.labels, parts, self.ranks)
        return np.column_stack([needed, middle])

    def charged_to_reader(self, after: Ints) -> Floats:
        """Return what the target pays for what it needs beyond one copy."""
        copies: Floats = after[:, 0] / prod(self.edge.bound)
        return self.weight * self.charge * (copies - 1)

    def words(self, before: Ints, after: Ints) -> Ints:
        """Return what ranks need and cannot have stored, for each pair.

        A rank has no more of a dimension than the longest part of the layout: where it needs more,
        it lacks that share of what it needs.
        """
        stored = prod(self.edge.bound) * before[:, -2]
        kept = np.ones((len(before), len(after)))
        for dimension, extent in enumerate(self.edge.bound):
            _, longest = shares(extent, before[:, dimension], self.ranks)
            kept *= np.minimum(1, longest[:, None] / after[:, 2 + dimension])
        # Words are whole. No rounding of these numbers is as large as what is subtracted.
        lacking = np.ceil(after[:, 1] * (1 - 1e-14 - kept)).astype(np.int64)
        words: Ints = np.maximum(after[:, 0] - stored[:, None], np.maximum(lacking, 0))
        return self.weight * words


def readings_of(graph: EinGraph, vertex: Vertex) -> tuple[Reading | None, ...]:
    """Return how a vertex reads tensors with index arithmetic, for the first operand of each.

    None for all other operands, and where it is not known what a rank needs at least.
    """
    found: list[Reading | None] = []
    for operand, name in enumerate(vertex.inputs):
        bound = graph[name].bound
        is_first = vertex.inputs.index(name) == operand
        needed = needed_of(graph, vertex, name) if is_first else None
        if needed is None:
            found.append(None)
            continue
        if needed.lists:
            found.append(_reading_by_lists(needed))
            continue
        einsum = vertex.computed_einsum
        indices = [
            index
            for index, tensor in zip(einsum.operands, vertex.inputs, strict=True)
            if tensor == name
        ]
        found.append(_reading(tuple(indices), bound, einsum.extents))
    return tuple(found)


@bounded_cache(1024)
def _reading_by_lists(needed: Needed) -> Reading | None:
    lists = dict(needed.lists)
    reaches: list[Reach | Listed] = []
    for entry, extent in zip(needed.indices[0], needed.bound, strict=True):
        listed = None if isinstance(entry, str) else lists.get(entry)
        if listed is None:
            reach = _reach(entry, extent, dict(needed.extents))
            if reach is None:
                return None
            reaches.append(reach)
        elif listed.labels:
            reaches.append(Listed(listed.labels, count_of_distinct(listed.known)))
        else:
            return None
    return _box(needed.bound, reaches)


def _box(bound: tuple[int, ...], reaches: Sequence[Reach | Listed]) -> Reading | None:
    """Return the reading of a box; None if its sides depend on each other, or it is empty."""
    labels = [label for reach in reaches for label in reach.labels]
    if len(set(labels)) < len(labels) or 0 in bound:
        return None
    return Reading(prod(bound), tuple(reaches), is_box=True)


@bounded_cache(1024)
def _reading(
    indices: tuple[IndexEntries, ...], bound: tuple[int, ...], extents: tuple[tuple[str, int], ...]
) -> Reading | None:
    reaches = []
    corners = []  # for each dimension with several offsets: the first and the last
    offsets = []  # for each dimension: that of each operand
    for dimension, extent in enumerate(bound):
        each = [_reach(index[dimension], extent, dict(extents)) for index in indices]
        known = [reach for reach in each if reach is not None]
        if len(known) < len(each):
            return None
        firsts = [reach.first for reach in known]
        wraps = any(reach.wraps for reach in known)
        if wraps and any(reach.first and not reach.wraps for reach in known):
            return None  # a ring in one direction, with an end in the other
        joined = replace(known[0], first=min(firsts), last=max(firsts), wraps=wraps)
        for reach in known:
            if replace(joined, first=reach.first, last=reach.last, wraps=reach.wraps) != reach:
                return None  # operands read it along other labels
        if wraps and (joined.minor or joined.stride > 1 or joined.major_extent != extent):
            return None
        reaches.append(joined)
        offsets.append(firsts)
        corners.append({joined.first, joined.last})
    read = set(zip(*offsets, strict=True))
    is_box = all(corner in read for corner in itertools.product(*corners))
    box = _box(bound, reaches)
    return None if box is None else replace(box, is_box=is_box)


def _reach(entry: str | Scalar, extent: int, extents: Mapping[str, int]) -> Reach | None:
    """Return what one index reaches; None if it is of another form, such as a square."""
    inner, wraps = _inside(entry, extent)
    affine = affine_of(inner)
    if affine is None or not 1 <= len(affine.terms) <= 2:
        return None
    offset = affine.constant
    terms = sorted(affine.terms, key=lambda term: -abs(term[1]))
    for label, factor in terms:
        if factor < 0:
            offset += factor * (extents[label] - 1)
    (major, stride), *others = terms
    minor = others[0][0] if others else None
    if others and abs(others[0][1]) != 1:
        return None
    if others and abs(stride) == 1 and extents[others[0][0]] > extents[major]:
        major, minor = others[0][0], major
    if wraps:
        offset = (offset + extent // 2) % extent - extent // 2  # the nearer way round
    minor_extent = 1 if minor is None else extents[minor]
    return Reach(
        extent, wraps, major, extents[major], abs(stride), minor, minor_extent, offset, offset
    )


def _inside(entry: str | Scalar, extent: int) -> tuple[str | Scalar, bool]:
    """Return an index without what keeps it inside of its dimension, and whether it wraps."""
    match entry:
        case Call("maximum", (inner, Const(0))):
            return _inside(inner, extent)
        case Call("minimum", (inner, Const(last))) if last == extent - 1:
            return _inside(inner, extent)
        case Call("%", (inner, Const(divisor))) if divisor == extent:
            return inner, True
    return entry, False


@bounded_cache(256)
def ways_with_halos(
    einsum: EinSum,
    readings: tuple[Reading | None, ...],
    elements: int,
    ranks: int,
    work: Work = FREE_WORK,
    partial_labels: tuple[str, ...] | None = None,
) -> Ways:
    """Return the ways to cut a vertex that reads tensors with index arithmetic, or by lists.

    What is not known of an operand counts as nothing: only those with a reading may charge, and
    those that are read as blocks.
    """
    labels = einsum.labels
    if count_of_ways(ranks, len(labels) + 1) > MOST_WAYS:
        return least_ways(len(einsum.operands), ranks)
    counts = tuple(part_counts([extent], ranks) for _, extent in einsum.extents)
    grid = work.allowed(grids(ranks, counts))
    if not len(grid):
        return least_ways(len(einsum.operands), ranks)
    roles = [role_of(einsum, label, partial_labels) for label in labels]
    ways = ways_of_grid(grid, roles, len(einsum.operands), elements, work)
    copies = ways.copies.copy()
    fractions = np.zeros_like(copies)
    for operand, reading in enumerate(readings):
        if reading is None:
            continue
        copies[:, operand] = 0
        if ranks * reading.elements > MOST_WORDS or reading.elements > MOST_ELEMENTS:
            continue
        more = reading.needed(labels, grid) - reading.elements
        copies[:, operand], rest = np.divmod(more, reading.elements)
        for _ in range(2):  # half the bits at a time, so that products fit into 64 bits
            digits, rest = np.divmod(rest * ROOT_OF_FRACTIONS, reading.elements)
            fractions[:, operand] = fractions[:, operand] * ROOT_OF_FRACTIONS + digits
    return Ways(copies, ways.words, ways.spare, fractions)


def not_charged(
    graph: EinGraph, vertex: Vertex, readings: Sequence[Reading | None]
) -> Iterator[int]:
    """Yield the operands that charge nothing: those of which parts of a copy may be enough.

    Of operands that read the same tensor with index arithmetic, the first charges for all.
    """
    for operand, name in enumerate(vertex.inputs):
        if readings[operand] is None and needed_of(graph, vertex, name) is not None:
            yield operand
