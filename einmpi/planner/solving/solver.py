"""Tables and eliminations that the searches on one mesh share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from einmpi.planner.factor import Edge, Factored
from einmpi.planner.machine import (
    ATTOSECONDS_OF_A_PICOSECOND,
    BYTES,
    FLOPS_PER_BYTE,
    OPERATIONS_OF_A_MESSAGE,
    Prices,
)
from einmpi.planner.mesh import Mesh, sides
from einmpi.planner.moving.halo_words import halo_words
from einmpi.planner.moving.volume import (
    NO_AXES,
    Factors,
    Flow,
    Ints,
    axes_factors,
    computed_flow,
    halo_flow,
    input_flow,
    kept_elements_table,
    layout_factors,
    overlap_share,
)
from einmpi.planner.solving.elimination import (
    Limits,
    Memo,
    Table,
    largest_join,
    minimize,
    minimize_without_dominated,
)
from einmpi.planner.states import (
    MAX_SYMBOLS,
    Groups,
    Move,
    States,
    Symbols,
    choices,
    distinct_layouts,
    symbols_to_cut,
)

# ---- edge costs ----------------------------------------------------------------------------------
#
# What a tensor costs on its way between two variables, for all choices of states at once.


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


# ---- solver --------------------------------------------------------------------------------------
#
# Tables of what each edge and variable costs for every choice of states, and their minimum.


MEMORY_PRICE_SCALE = 1024  # the memory price is a multiple of 1/1024 byte moved


@dataclass(frozen=True)
class Solution:
    """The states found, and their cost."""

    cost: int  # in units of the solver, the price of memory included
    states: States
    exact: bool  # nothing is better with these axes


class Unreachable(Exception):
    """A variable has no choice with the parts that are prescribed for it."""


def _light_operations(operations: Sequence[int]) -> int:
    """Return up to how many operations a vertex may be computed on several ranks for free.

    It has less than a tenth of the average work. The average is that of all variables, with the
    layouts; but where ranks save no more than a message by sharing it, that of the vertices.
    """
    vertices = sum(1 for count in operations if count)
    of_variables = sum(operations) // (10 * max(1, len(operations)))
    of_vertices = sum(operations) // (10 * max(1, vertices))
    return max(of_variables, min(of_vertices, OPERATIONS_OF_A_MESSAGE))


@dataclass
class Solver:
    """Minimises a factored graph over some groups of mesh axes; the other axes stay."""

    problem: Factored
    mesh: Mesh
    # Variable → parts of each symbol, where they are prescribed.
    prescribed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    # Variable → its state, where that is given.
    fixed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    # Price of a byte of memory on one rank, in 1/1024 of a byte moved on every rank.
    price: int = 0
    # Whether repeated operations cost anything, where no machine was measured.
    weigh_work: bool = False
    prices: Prices = BYTES
    # Whether no search over all axes at once can be exact: joined tables would be too large.
    is_tangled: bool = False
    # Whether axes of several windows may cut one label.
    across_windows: bool = False
    memo: Memo = field(default_factory=Memo)
    cache: dict[object, Ints] = field(default_factory=dict)
    known_costs: dict[object, int] = field(default_factory=dict)  # of edges between given states

    def __post_init__(self) -> None:
        operations = self.problem.operations
        self.rates = self.problem.rates
        # The variables whose work costs something.
        self.heavy: set[int] = set()
        if self.weigh_work or self.rates:
            light = 0 if self.rates else _light_operations(operations)
            self.heavy.update(number for number, count in enumerate(operations) if count > light)
        # Costs are counted in units, larger than one where sums would not fit into 64 bits.
        self.unit = 1 + (self._largest_cost() >> 60)

    def _largest_cost(self) -> int:
        """Return a number that no sum of costs exceeds."""
        ranks = self.mesh.ranks
        dearest = self.prices.inside
        if self.mesh.nodes > 1:
            dearest = max(dearest, self.prices.between)
        largest = 0
        for edge in self.problem.edges:
            largest += 2 * edge.weight * ranks * edge.nbytes * dearest
        for variable in self.problem.variables:
            if variable.inner is not None:
                largest += variable.inner.most(ranks) * dearest
        memory = 0
        for blocks in self.problem.blocks:
            memory += sum(nbytes for nbytes, _ in blocks)
        largest += memory * ranks * self.price * self.prices.memory
        if self.weigh_work:
            largest += sum(self.problem.operations) * ranks
        if self.rates:
            for operations, rate in zip(self.problem.operations, self.rates, strict=True):
                largest += operations * rate * ranks // ATTOSECONDS_OF_A_PICOSECOND
            edges = sum(edge.weight for edge in self.problem.edges)
            largest += 2 * ranks**2 * self.prices.messages(2, 2) * edges
        return largest

    def solve(
        self, groups: Groups, current: States | None = None, limits: Limits | None = None
    ) -> Solution:
        """Return the best states with the axes outside of `groups` as in `current`.

        Without `current`, every axis must be in a group.
        """
        move = Move(self.mesh, groups)
        states = current or self.uncut()
        rows = [self.rows(number, move, state) for number, state in enumerate(states)]
        tables = [self.edge_table(edge, rows, move, states) for edge in self.problem.edges]
        for number, state in enumerate(states):
            inner = self.problem.variables[number].inner
            if self.price or number in self.heavy or inner is not None:
                tables.append(self.own_table(number, rows[number], move, state))
        fallback = None
        if current is not None:
            fallback = [move.row_of(rows[number], state) for number, state in enumerate(states)]
        sizes = [len(choices_of_variable) for choices_of_variable in rows]
        if self.is_tangled and fallback is not None and limits is not None:
            found = minimize_without_dominated(sizes, tables, self.memo, limits, fallback)
        else:
            found = minimize(sizes, tables, self.memo, limits, fallback)

        best = []
        for number, value in enumerate(found.values):
            best.append(move.expand(rows[number][value], states[number]))
        all_symbols = all(len(each.extents) <= MAX_SYMBOLS for each in self.problem.variables)
        return Solution(found.cost, best, found.exact and all_symbols)

    def largest_join(self, groups: Groups, limit: int) -> int:
        """Return the cells of the largest table that solving for all `groups` would join.

        Above the limit it may be any number above it.
        """
        move = Move(self.mesh, groups)
        sizes = []
        for number, state in enumerate(self.uncut()):
            sizes.append(len(self.rows(number, move, state)))
        scopes = []
        for edge in self.problem.edges:
            scopes.append((edge.target,) if edge.source is None else (edge.source, edge.target))
        return largest_join(sizes, scopes, limit)

    def uncut(self) -> States:
        """Return the states that cut nothing."""
        axes = len(self.mesh.factors)
        return [(len(variable.extents),) * axes for variable in self.problem.variables]

    # ---- given states ---------------------------------------------------------------------------

    def edge_cost(self, edge: Edge, source: Sequence[int] | None, target: Sequence[int]) -> int:
        """Return what an edge costs between given states of its ends."""
        key = (
            edge.form,
            edge.source == edge.target,
            None if edge.source is None or source is None else tuple(source),
            tuple(target),
        )
        cost = self.known_costs.get(key)
        if cost is None:
            cost = self._edge_cost(edge, source, target)
            self.known_costs[key] = cost
        return cost

    def _edge_cost(self, edge: Edge, source: Sequence[int] | None, target: Sequence[int]) -> int:
        rows = {edge.target: self._row_of_state(target)}
        states = {edge.target: tuple(target)}
        if edge.source is not None and source is not None:
            rows[edge.source] = self._row_of_state(source)
            states[edge.source] = tuple(source)
        return int(self.edge_table(edge, rows, self.every_axis, states).costs.sum())

    def own_cost(self, variable: int, state: Sequence[int]) -> int:
        """Return what a variable costs in a given state, without what moves."""
        rows = self._row_of_state(state)
        return int(self.own_table(variable, rows, self.every_axis, state).costs.sum())

    def _row_of_state(self, state: Sequence[int]) -> Symbols:
        """Return the only choice of a variable whose state is given."""
        key = ("state", tuple(state))
        if key not in self.cache:
            self.cache[key] = np.array([state], np.int64)
        return self.cache[key]

    @cached_property
    def every_axis(self) -> Move:
        """The move that frees every axis."""
        return Move(self.mesh, [(axis,) for axis in range(len(self.mesh.factors))])

    # ---- choices of one variable ----------------------------------------------------------------

    def rows(self, variable: int, move: Move, state: Sequence[int]) -> Symbols:
        """Return the choices of a variable; equal ones are the same object."""
        extents = self.problem.variables[variable].extents
        with_orders = self.problem.variables[variable].sides
        prescribed = self.prescribed.get(variable)
        fixed = self.fixed.get(variable)
        symbols = symbols_to_cut(extents, state, prescribed)
        staying = move.staying_symbols(state)
        # A tensor that is given may lie as another plan has left it.
        across = self.across_windows or fixed is not None
        across = across and self.mesh.mixes_windows(with_orders)
        key = ("rows", with_orders, move.groups, staying, symbols, prescribed, fixed, across)
        rows = self.cache.get(key)
        if rows is None:
            rows = choices(self.mesh, with_orders, move.groups, state, symbols, across)
            if prescribed is not None:
                parts = move.parts(rows, len(extents), state)
                as_prescribed = (parts[:, :-1] == np.array(prescribed, np.int64)).all(axis=1)
                rows = rows[as_prescribed]
            if fixed is not None:
                rows = rows[[move.expand(row, state) == fixed for row in rows]]
            if not len(rows):
                raise Unreachable(variable)
            self.cache[key] = rows
        return rows

    def own_table(self, variable: int, rows: Symbols, move: Move, state: Sequence[int]) -> Table:
        """Return the price of each choice alone: of its blocks on every rank, of its work, and of
        what it moves inside of itself.

        Where a machine was measured, work costs the time of all operations; else the repeated ones
        have a price.
        """
        blocks = self.problem.blocks[variable] if self.price else ()
        operations = self.problem.operations[variable] if variable in self.heavy else 0
        rate = self.rates[variable] if self.rates else None
        work = operations, rate
        inner = self.problem.variables[variable].inner
        key = ("own", self.price, blocks, work, inner, move.staying_symbols(state), id(rows))
        if key not in self.cache:
            parts = move.parts(rows, len(self.problem.variables[variable].extents), state)
            memory = np.zeros(len(rows), np.int64)
            for nbytes, cut_symbols in blocks:
                memory += nbytes // self.unit // parts[:, list(cut_symbols)].prod(axis=1)
            costs = memory * self.mesh.ranks * self.price // MEMORY_PRICE_SCALE
            costs = costs * self.prices.memory
            replicas = parts[:, -1]
            if rate is None:
                costs += operations // self.unit * (replicas - 1) // FLOPS_PER_BYTE
            else:
                picoseconds = operations * rate // ATTOSECONDS_OF_A_PICOSECOND
                costs += picoseconds // self.unit * replicas
            if inner is not None:
                costs += self.prices.bytes(inner.about(parts) // self.unit, 0)
            self.cache[key] = costs
        return Table((variable,), self.cache[key], self.memo.number(key))

    # ---- costs of an edge -----------------------------------------------------------------------

    def edge_table(
        self, edge: Edge, rows: ByVariable[Symbols], move: Move, states: ByVariable[tuple[int, ...]]
    ) -> Table:
        """Return what an edge costs for all choices at its ends."""
        ends = (edge.target,) if edge.source is None else (edge.source, edge.target)
        staying = staying_factors(edge, move, states)
        key = (
            "table",
            tuple(move.lengths),
            tuple(move.lengths_between),
            edge.form,
            staying,
            *(id(rows[end]) for end in ends),  # equal choices are the same object, in the cache
        )
        if edge.needed is not None:
            staying_states = [move.staying_symbols(states[end]) for end in ends]
            key = (*key, move.groups, *staying_states)
        costs = self.cache.get(key)
        if costs is None:
            if edge.needed is None:
                costs = self._costs_of_blocks(edge, rows, move, staying)
            else:
                costs = self._costs_of_halo(edge, rows, move, states)
            costs = costs * edge.weight
            self.cache[key] = costs
        if edge.source == edge.target:  # a layer that feeds its own repetition
            return Table((edge.target,), costs.diagonal(), self.memo.number(("diagonal", key)))
        return Table(ends, costs, self.memo.number(key))

    def _costs_of_blocks(
        self, edge: Edge, rows: ByVariable[Symbols], move: Move, staying: StayingFactors
    ) -> Ints:
        """Return the costs [choice of the source, choice of the target]; of an input, [target].

        They are computed for the distinct layouts of both ends, then spread over the choices.
        """
        ndim = edge.ndim
        nbytes = edge.nbytes // self.unit
        targets, target_of_row = distinct_layouts(rows[edge.target], edge.target_symbols, ndim)
        sources = targets[:1]  # any layout: an input has none
        if edge.source is not None:
            sources, source_of_row = distinct_layouts(rows[edge.source], edge.source_symbols, ndim)
        every = layout_factors(move.lengths, ndim, sources, targets, staying.every)
        between: Factors[Any] = NO_AXES
        is_on_nodes = self.mesh.nodes > 1
        if is_on_nodes:
            lengths = move.lengths_between
            between = layout_factors(lengths, ndim, sources, targets, staying.between)
        if edge.source is None:
            costs: Ints = self._price(input_flow(every, between, nbytes))[0][target_of_row]
            return costs
        kept = self._kept(edge, move, len(self.mesh.factors), every, sources, targets)
        on_nodes: Ints | int = 0
        if is_on_nodes:
            on_nodes = self._kept(edge, move, self.mesh.node_axes, between, sources, targets)
        costs = self._price(computed_flow(every, between, nbytes, kept, on_nodes))
        return costs[np.ix_(source_of_row, target_of_row)]

    def _costs_of_halo(
        self, edge: Edge, rows: ByVariable[Symbols], move: Move, states: ByVariable[tuple[int, ...]]
    ) -> Ints:
        """Return the costs [choice of the layout, choice of the state] of index arithmetic."""
        assert edge.source is not None and edge.needed is not None
        layouts, label_states = (
            [move.expand(row, states[end]) for row in rows[end]]
            for end in (edge.source, edge.target)
        )
        words = halo_words(self.mesh, edge.needed, layouts, label_states)
        flow = halo_flow(self.mesh, edge.needed, *words)
        itemsize = edge.nbytes // max(1, prod(edge.bound))
        total = flow.total * itemsize // self.unit
        between = flow.between * itemsize // self.unit
        return self._price(flow._replace(total=total, between=between))

    def _price(self, flow: Flow) -> Ints:
        """Return the price of what moves; where a machine was measured, with that of messages."""
        costs: Ints = self.prices.bytes(flow.total, flow.between)
        if self.rates:
            messages = self.prices.messages(flow.peers // flow.nodes, flow.nodes)
            costs = costs + messages // self.unit * self.mesh.ranks
        return costs

    def _kept(
        self,
        edge: Edge,
        move: Move,
        axes: int,
        products: Factors[Any],
        sources: Ints,
        targets: Ints,
    ) -> Ints:
        """Return the bytes that stay where they are, by the first `axes` axes alone.

        Exact where all axes are free, one in each group; else by the formula, which is exact
        where extents divide.
        """
        extents_divide = not any(extent % self.mesh.ranks for extent in edge.bound)
        every_axis_free = move.groups == self.every_axis.groups
        share: Ints
        if extents_divide or self.unit > 1 or not every_axis_free:
            ranks = prod(self.mesh.factors[:axes])
            share = overlap_share(products, ranks, edge.nbytes // self.unit)
            return share
        itemsize = edge.nbytes // max(1, prod(edge.bound))
        kept = kept_elements_table(
            self.mesh, sides(edge.bound, edge.orders), axes, sources, targets
        )
        share = products.replicas * kept * itemsize
        return share


@dataclass
class SharedTables:
    """What several searches on one mesh share, which have the same prices but for that of memory.

    Forms of a graph and prices of memory differ in few tables. Costs are counted in units, and
    each unit has its own tables.
    """

    costs: dict[int, dict[object, Ints]] = field(default_factory=dict)
    # Without a price of memory: there is one search for each other price.
    memos: dict[int, Memo] = field(default_factory=dict)

    def use_for(self, solver: Solver) -> None:
        """Give a solver what is known in its unit, and keep what it finds."""
        solver.cache = self.costs.setdefault(solver.unit, solver.cache)
        if not solver.price:
            solver.memo = self.memos.setdefault(solver.unit, solver.memo)
            solver.memo.cells = 0
