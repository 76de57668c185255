"""Tables of what each edge moves for every choice of states, and their minimum over some mesh axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from einmpi.planner.eliminate import Limits, Memo, Table, minimize
from einmpi.planner.factor import Edge, Factored
from einmpi.planner.mesh import Mesh
from einmpi.planner.prices import BYTES, FLOPS_PER_BYTE, Prices
from einmpi.planner.states import MAX_SYMBOLS, Symbols, choices, distinct_layouts
from einmpi.planner.volume import (
    Ints,
    common_share,
    held_factors,
    layout_factors,
    meetings,
    peers,
    received,
    sharing,
)

Groups = Sequence[Sequence[int]]
States = list[tuple[int, ...]]  # for every variable the symbol of every axis


@dataclass(frozen=True)
class Solution:
    cost: int  # what all ranks do at its prices, and the price of memory, in units of the solver
    states: States
    exact: bool  # nothing better with these axes


class Unreachable(Exception):
    """A variable has no choice with the parts that are prescribed for it."""


class Move:
    """The groups of axes that are free, the axes that are held, and the length of each."""

    def __init__(self, mesh: Mesh, groups: Groups) -> None:
        self.groups = tuple(map(tuple, groups))
        free = {axis for group in groups for axis in group}
        self.held = tuple(axis for axis in range(len(mesh.factors)) if axis not in free)
        self.factors = tuple(prod(mesh.factors[axis] for axis in group) for group in groups)
        self.between = tuple(
            prod(mesh.factors[a] for a in group if a < mesh.node_axes) for group in groups
        )
        self.held_factors = tuple(mesh.factors[axis] for axis in self.held)
        self.held_between = sum(axis < mesh.node_axes for axis in self.held)  # the first of them

    def hold(self, state: Sequence[int]) -> tuple[int, ...]:
        return tuple(state[axis] for axis in self.held)

    def row_of(self, rows: Symbols, state: Sequence[int]) -> int:
        """The number of the choice that leaves everything as it is."""
        now = np.array([state[group[0]] for group in self.groups], np.int64)
        same = (rows == now).all(axis=1)
        assert same.any(), "the state that stays is not among the choices"
        return int(same.argmax())

    def expand(self, row: Symbols, state: Sequence[int]) -> tuple[int, ...]:
        """A state with its free axes as in the row."""
        full = list(state)
        for symbol, group in zip(row.tolist(), self.groups, strict=True):
            for axis in group:
                full[axis] = symbol
        return tuple(full)


@dataclass(frozen=True)
class _Held:
    """Of the axes that are not free, those between nodes also by themselves: the five products, and of the peers."""

    products: tuple[int, ...]
    between: tuple[int, ...]
    peers: tuple[int, int]


@dataclass
class Solver:
    """Minimises a factored graph over some groups of mesh axes, the other axes staying as they are."""

    problem: Factored
    mesh: Mesh
    wanted: Mapping[int, tuple[int, ...]] = field(
        default_factory=dict
    )  # parts of each symbol, where prescribed
    fixed: Mapping[int, tuple[int, ...]] = field(
        default_factory=dict
    )  # variables whose state is given
    price: int = 0  # of a byte of memory on one rank, in bytes moved over all ranks, times 16
    weigh_work: bool = (
        False  # whether operations done more than once cost anything, where no machine was measured
    )
    prices: Prices = BYTES
    rates: Sequence[
        int
    ] = ()  # femtoseconds for an operation of each variable, where a machine was measured
    memo: Memo = field(default_factory=Memo)
    cache: dict[object, Ints] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Costs are counted in units, larger than one where sums would not fit into 64 bits."""
        ranks, prices, operations = self.mesh.ranks, self.prices, self.problem.operations
        dearest = max(prices.inside, prices.between if self.mesh.nodes > 1 else 0)
        worst = sum(2 * edge.weight * ranks * edge.nbytes * dearest for edge in self.problem.edges)
        kept = sum(nbytes for blocks in self.problem.blocks for nbytes, _ in blocks)
        worst += kept * ranks * self.price * prices.memory
        worst += sum(operations) * ranks * self.weigh_work
        # A vertex with a tenth of the average work may do it twice.
        least = sum(operations) // (10 * max(1, len(operations))) if not self.rates else 0
        self.heavy = [k for k, count in enumerate(operations) if count > least]
        if self.rates:
            worst += sum(
                count * rate * ranks // 1000
                for count, rate in zip(operations, self.rates, strict=True)
            )
            worst += (
                2
                * ranks**2
                * prices.messages(2, 2)
                * sum(edge.weight for edge in self.problem.edges)
            )
        self.unit = 1 + (worst >> 60)

    def solve(
        self, groups: Groups, current: States | None = None, limits: Limits | None = None
    ) -> Solution:
        """The best states with the axes outside of `groups` as in `current` (None: every axis is in a group)."""
        move = Move(self.mesh, groups)
        states = current or self.uncut()
        rows = [self.rows(k, move, state) for k, state in enumerate(states)]
        tables = [self.table(edge, rows, move, states) for edge in self.problem.edges]
        if self.price:
            tables += [self.memory_table(k, rows[k], move, state) for k, state in enumerate(states)]
        if self.weigh_work or self.rates:
            tables += [self.work_table(k, rows[k], move, states[k]) for k in self.heavy]
        fallback = (
            None
            if current is None
            else [move.row_of(rows[k], state) for k, state in enumerate(states)]
        )
        found = minimize([len(r) for r in rows], tables, self.memo, limits, fallback)
        best = [move.expand(rows[k][value], states[k]) for k, value in enumerate(found.values)]
        some = any(len(variable.extents) > MAX_SYMBOLS for variable in self.problem.variables)
        return Solution(found.cost, best, found.exact and not some)

    def uncut(self) -> States:
        return [
            (len(variable.extents),) * len(self.mesh.factors) for variable in self.problem.variables
        ]

    def rows(self, variable: int, move: Move, state: Sequence[int]) -> Symbols:
        """The choices of a variable; equal ones are the same object."""
        extents = self.problem.variables[variable].extents
        wanted, fixed = self.wanted.get(variable), self.fixed.get(variable)
        key = ("rows", extents, move.groups, move.hold(state), wanted, fixed)
        rows = self.cache.get(key)
        if rows is None:
            rows = choices(self.mesh, extents, move.groups, state)
            if wanted is not None:
                parts = self.parts(rows, len(extents), move, state)
                rows = rows[(parts[:, :-1] == np.array(wanted, np.int64)).all(axis=1)]
            if fixed is not None:
                rows = rows[[move.expand(row, state) == fixed for row in rows]]
            if not len(rows):
                raise Unreachable(variable)
            self.cache[key] = rows
        return rows

    def parts(self, rows: Symbols, symbols: int, move: Move, state: Sequence[int]) -> Ints:
        """Into how many parts each choice cuts each symbol (the last column: R)."""
        parts = np.ones((len(rows), symbols + 1), np.int64)
        for factor, symbol in zip(move.held_factors, move.hold(state), strict=True):
            parts[:, symbol] *= factor
        for column, factor in enumerate(move.factors):
            parts[np.arange(len(rows)), rows[:, column]] *= factor
        return parts

    def memory_table(self, variable: int, rows: Symbols, move: Move, state: Sequence[int]) -> Table:
        """The price of the blocks that a choice keeps on every rank."""
        blocks = self.problem.blocks[variable]
        key = ("memory", self.price, blocks, move.hold(state), id(rows))
        if key not in self.cache:
            parts = self.parts(rows, len(self.problem.variables[variable].extents), move, state)
            total = np.zeros(len(rows), np.int64)
            for nbytes, symbols in blocks:
                total += nbytes // self.unit // parts[:, list(symbols)].prod(axis=1)
            self.cache[key] = total * self.mesh.ranks * self.price // 16 * self.prices.memory
        return Table((variable,), self.cache[key], self.memo.number(key))

    def work_table(self, variable: int, rows: Symbols, move: Move, state: Sequence[int]) -> Table:
        """The price of what the ranks compute: of all, where a machine was measured, else of what is done again."""
        operations = self.problem.operations[variable]
        rate = self.rates[variable] if self.rates else None
        key = ("work", operations, rate, move.hold(state), id(rows))
        if key not in self.cache:
            times = self.parts(rows, len(self.problem.variables[variable].extents), move, state)[
                :, -1
            ]
            if rate is not None:
                self.cache[key] = operations * rate // 1000 // self.unit * times
            else:
                self.cache[key] = operations // self.unit * (times - 1) // FLOPS_PER_BYTE
        return Table((variable,), self.cache[key], self.memo.number(key))

    def table(self, edge: Edge, rows: Sequence[Symbols], move: Move, states: States) -> Table:
        """What an edge costs, for all choices at its ends."""
        ends = (edge.target,) if edge.source is None else (edge.source, edge.target)
        held = self.held_axes(edge, move, states)
        # `id` because equal choices are the same object, kept in the cache.
        key = (
            "table",
            move.factors,
            move.between,
            edge.bound,
            edge.nbytes,
            edge.weight,
            held,
            edge.source_symbols,
            edge.target_symbols,
            *(id(rows[end]) for end in ends),
        )
        costs = self.cache.get(key)
        if costs is None:
            costs = self.cache[key] = self.costs(edge, rows, move, held) * edge.weight
        if edge.source == edge.target:  # a layer that feeds its own repetition
            return Table((edge.target,), costs.diagonal(), self.memo.number(("diagonal", key)))
        return Table(ends, costs, self.memo.number(key))

    def costs(self, edge: Edge, rows: Sequence[Symbols], move: Move, held: _Held) -> Ints:
        ranks, nodes, ndim, nbytes = (
            self.mesh.ranks,
            self.mesh.nodes,
            edge.ndim,
            edge.nbytes // self.unit,
        )
        targets, target_of = distinct_layouts(rows[edge.target], edge.target_symbols, ndim)
        exchanging: tuple[Ints, Ints]
        cells: tuple[Any, ...]
        if edge.source is None:  # an input is stored once: all copies but one are moved
            every, between = (
                np.array(factors, np.int64) for factors in (move.factors, move.between)
            )
            copies: Ints = np.where(targets == ndim, every, 1).prod(axis=1) * held.products[0]
            on_nodes: Ints = np.where(targets == ndim, between, 1).prod(axis=1) * held.between[0]
            costs = self.prices.bytes((copies - 1) * nbytes, (on_nodes - 1) * nbytes)
            exchanging, cells = (copies // on_nodes, on_nodes), (target_of,)
        else:
            sources, source_of = distinct_layouts(rows[edge.source], edge.source_symbols, ndim)
            products: Sequence[Ints]
            products = (
                layout_factors(move.factors, ndim, sources, targets).scaled(held.products).parts()
            )
            common = self.common(edge, move, len(self.mesh.factors), products, sources, targets)
            crossing: Ints | int = 0
            if nodes > 1:
                across = (
                    layout_factors(move.between, ndim, sources, targets)
                    .scaled(held.between)
                    .parts()
                )
                staying = self.common(edge, move, self.mesh.node_axes, across, sources, targets)
                products, crossing = sharing(products, across), received(across, nbytes, staying)
            costs = self.prices.bytes(received(products, nbytes, common), crossing)
            if self.rates:
                every = peers(move.factors, ndim, sources, targets) * held.peers[0]
                between = peers(move.between, ndim, sources, targets) * held.peers[1]
                exchanging = every // between, between
            cells = np.ix_(source_of, target_of)
        if self.rates:
            costs = costs + self.prices.messages(*exchanging) // self.unit * ranks
        found: Ints = costs[cells]
        return found

    def common(
        self,
        edge: Edge,
        move: Move,
        axes: int,
        products: Sequence[Ints],
        sources: Ints,
        targets: Ints,
    ) -> Ints:
        """Bytes that stay where they are by the first axes alone. All axes free: exact, whatever the extents."""
        divide = not any(extent % self.mesh.ranks for extent in edge.bound)
        if (
            divide
            or self.unit > 1
            or move.groups != tuple((axis,) for axis in range(len(self.mesh.factors)))
        ):
            found: Ints = common_share(
                products, prod(self.mesh.factors[:axes]), edge.nbytes // self.unit
            )
            return found
        size = edge.nbytes // max(1, prod(edge.bound))
        return products[-1] * meetings(self.mesh, edge.bound, axes, sources, targets) * size

    @staticmethod
    def held_axes(edge: Edge, move: Move, states: States) -> _Held:
        """The products over the axes that are not free."""
        targets = [edge.target_symbols[symbol] for symbol in move.hold(states[edge.target])]
        if edge.source is None:
            sources = [0] * len(targets)
        else:
            sources = [edge.source_symbols[symbol] for symbol in move.hold(states[edge.source])]
        axes = tuple(zip(move.held_factors, sources, targets, strict=True))
        between = axes[: move.held_between]
        exchanging = [
            prod(f for f, s, t in some if s not in (t, edge.ndim)) for some in (axes, between)
        ]
        return _Held(
            held_factors(axes, edge.ndim),
            held_factors(between, edge.ndim),
            (exchanging[0], exchanging[1]),
        )
