"""What a tensor costs on its way between two variables, for all choices of states at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from einmpi.planner.factor import Edge
from einmpi.planner.mesh import Mesh
from einmpi.planner.moving.halo_counts import HALO_NEIGHBOURS, halo_table
from einmpi.planner.moving.volume import (
    NO_AXES,
    Factors,
    Ints,
    axes_factors,
    kept_elements_table,
    layout_factors,
    overlap_share,
    received,
    sharing_on_nodes,
)
from einmpi.planner.prices import Prices
from einmpi.planner.solving.move import Move
from einmpi.planner.states import Symbols, distinct_layouts

_Item = TypeVar("_Item")
ByVariable: TypeAlias = Sequence[_Item] | Mapping[int, _Item]


class StayingFactors(NamedTuple):
    """The products for an edge over the axes that stay, and over those of them between nodes."""

    every: Factors[int]
    between: Factors[int]


def staying_factors(edge: Edge, move: Move, states: ByVariable[tuple[int, ...]]) -> StayingFactors:
    """Return the products for an edge over the axes that stay."""
    target_state = move.staying_symbols(states[edge.target])
    targets = [edge.target_symbols[symbol] for symbol in target_state]
    if edge.source is None:
        sources = [0] * len(targets)
    else:
        source_state = move.staying_symbols(states[edge.source])
        sources = [edge.source_symbols[symbol] for symbol in source_state]
    axes = tuple(zip(move.staying_lengths, sources, targets, strict=True))
    between = axes[: move.staying_between]
    return StayingFactors(axes_factors(axes, edge.ndim), axes_factors(between, edge.ndim))


@dataclass(frozen=True)
class EdgeCosts:
    """The costs of an edge that stands for itself alone, in units of the solver."""

    mesh: Mesh
    prices: Prices
    unit: int
    counts_messages: bool  # the time of messages, besides that of bytes

    def of_input(self, edge: Edge, rows: Symbols, move: Move, staying: StayingFactors) -> Ints:
        """Return the costs of an input, which is stored once: every copy but the first moves."""
        targets, target_of_row = distinct_layouts(rows, edge.target_symbols, edge.ndim)
        every, between = self._factors(edge, targets[:1], targets, move, staying)
        copies, nodes = every.target[0], np.ravel(between.target)
        nbytes = edge.nbytes // self.unit
        costs: Ints = self.prices.bytes((copies - 1) * nbytes, (nodes - 1) * nbytes)
        if self.counts_messages:
            costs = costs + self._messages(copies, nodes)
        return costs[target_of_row]

    def of_computed(
        self,
        edge: Edge,
        source_rows: Symbols,
        target_rows: Symbols,
        move: Move,
        staying: StayingFactors,
    ) -> Ints:
        """Return the costs [choice of the source, choice of the target] of a computed tensor.

        They are computed for the distinct layouts of both ends, then spread over the choices.
        """
        ndim = edge.ndim
        nbytes = edge.nbytes // self.unit
        sources, source_of_row = distinct_layouts(source_rows, edge.source_symbols, ndim)
        targets, target_of_row = distinct_layouts(target_rows, edge.target_symbols, ndim)

        every, between = self._factors(edge, sources, targets, move, staying)
        overlap = self._overlap(edge, move, len(self.mesh.factors), every, sources, targets)
        crossing: Ints | int = 0  # bytes between nodes
        sharing = None
        if self.mesh.nodes > 1:
            kept = self._overlap(edge, move, self.mesh.node_axes, between, sources, targets)
            crossing = received(between, nbytes, kept)
            sharing = sharing_on_nodes(every, between)
        costs: Ints = self.prices.bytes(received(every, nbytes, overlap, sharing), crossing)
        if self.counts_messages:
            costs = costs + self._messages(every.peers, between.peers)
        return costs[np.ix_(source_of_row, target_of_row)]

    def of_halo(
        self, edge: Edge, rows: ByVariable[Symbols], move: Move, states: ByVariable[tuple[int, ...]]
    ) -> Ints:
        """Return the costs [choice of the layout, choice of the state] of index arithmetic."""
        assert edge.source is not None and edge.needed is not None
        dimensions = (*range(edge.ndim), None)
        labels = (*(label for label, _ in edge.needed.extents), None)
        layouts = []
        for row in rows[edge.source]:
            symbols = move.expand(row, states[edge.source])
            layouts.append(tuple(dimensions[symbol] for symbol in symbols))
        label_states = []
        for row in rows[edge.target]:
            symbols = move.expand(row, states[edge.target])
            label_states.append(tuple(labels[symbol] for symbol in symbols))
        words = halo_table(self.mesh, edge.needed, layouts, label_states)
        itemsize = edge.nbytes // max(1, prod(edge.bound))
        total = words.total * itemsize // self.unit
        between = words.between * itemsize // self.unit
        costs: Ints = self.prices.bytes(total, between)
        if self.counts_messages:
            receives = (words.total > 0).astype(np.int64)
            receives_between = (words.between > 0).astype(np.int64)
            inside = 1 + (HALO_NEIGHBOURS - 1) * receives
            nodes = 1 + (HALO_NEIGHBOURS - 1) * receives_between
            costs = costs + self._messages(inside * nodes, nodes)
        return costs

    def _factors(
        self, edge: Edge, sources: Ints, targets: Ints, move: Move, staying: StayingFactors
    ) -> tuple[Factors[Ints], Factors[Any]]:
        """Return the products over all axes, and over those between nodes."""
        every = layout_factors(move.lengths, edge.ndim, sources, targets, staying.every)
        if self.mesh.nodes == 1:
            return every, NO_AXES
        lengths = move.lengths_between
        return every, layout_factors(lengths, edge.ndim, sources, targets, staying.between)

    def _messages(self, exchanging: Ints, nodes: Ints) -> Ints:
        """Return the price of the messages among `exchanging` ranks, which lie on `nodes` nodes."""
        costs: Ints = self.prices.messages(exchanging // nodes, nodes)
        return costs // self.unit * self.mesh.ranks

    def _overlap(
        self,
        edge: Edge,
        move: Move,
        axes: int,
        products: Factors[Ints],
        sources: Ints,
        targets: Ints,
    ) -> Ints:
        """Return the bytes that stay where they are, by the first `axes` axes alone.

        Exact where all axes are free, one in each group; else by the formula, which is exact
        where extents divide.
        """
        extents_divide = not any(extent % self.mesh.ranks for extent in edge.bound)
        every_axis_free = move.groups == tuple((a,) for a in range(len(self.mesh.factors)))
        if extents_divide or self.unit > 1 or not every_axis_free:
            ranks = prod(self.mesh.factors[:axes])
            share: Ints = overlap_share(products, ranks, edge.nbytes // self.unit)
            return share
        itemsize = edge.nbytes // max(1, prod(edge.bound))
        kept = kept_elements_table(self.mesh, edge.bound, axes, sources, targets)
        return products.replicas * kept * itemsize
