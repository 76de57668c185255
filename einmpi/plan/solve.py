"""Searches for the states that move the fewest bytes: exact, and large neighbourhoods (planner, section 4)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from einmpi.plan.eliminate import Limits, Memo, Table, minimize
from einmpi.plan.factor import Edge, Factored
from einmpi.plan.layout import Symbols, choices, codes
from einmpi.plan.mesh import Mesh, groupings
from einmpi.plan.volume import Ints, held_factors, in_bytes, mesh_factors, moved

Groups = Sequence[Sequence[int]]
States = list[tuple[int, ...]]  # for every variable the symbol of every axis


@dataclass(frozen=True)
class Solution:
    cost: int  # bytes over all ranks, and the price of memory
    states: States
    exact: bool  # nothing better with these axes


class Unreachable(Exception):
    """A variable has no choice with the parts that are prescribed for it."""


@dataclass
class Solver:
    """Minimises a factored graph over some groups of mesh axes, the other axes staying as they are."""

    problem: Factored
    mesh: Mesh
    wanted: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # parts of each symbol, where prescribed
    price: int = 0  # of a byte of memory on one rank, in bytes moved over all ranks, times 16
    memo: Memo = field(default_factory=Memo)
    cache: dict[object, Ints] = field(default_factory=dict)

    def solve(self, groups: Groups, current: States | None = None, limits: Limits | None = None) -> Solution:
        """The best states with the axes outside of `groups` as in `current` (None: every axis is in a group)."""
        fixed = current or self.uncut()
        rows = [self.rows(k, groups, fixed[k]) for k in range(len(self.problem.variables))]
        tables = [self.table(edge, rows, groups, fixed) for edge in self.problem.edges]
        if self.price:
            tables += [self.memory_table(k, rows[k], groups, fixed[k]) for k in range(len(rows))]
        fallback = None if current is None else [_row(rows[k], groups, fixed[k]) for k in range(len(rows))]
        found = minimize([len(r) for r in rows], tables, self.memo, limits, fallback)
        states = [_expand(rows[k][value], groups, fixed[k]) for k, value in enumerate(found.values)]
        return Solution(found.cost, states, found.exact)

    def uncut(self) -> States:
        return [(len(variable.extents),) * len(self.mesh.factors) for variable in self.problem.variables]

    def rows(self, variable: int, groups: Groups, fixed: Sequence[int]) -> Symbols:
        """The choices of a variable; equal ones are the same object."""
        extents = self.problem.variables[variable].extents
        free = {axis for group in groups for axis in group}
        held = tuple(-1 if axis in free else symbol for axis, symbol in enumerate(fixed))
        wanted = self.wanted.get(variable)
        key = ("rows", extents, tuple(map(tuple, groups)), held, wanted)
        if key not in self.cache:
            rows = choices(self.mesh, extents, groups, fixed)
            if wanted is not None:
                parts = self.parts(rows, len(extents), groups, held)
                rows = rows[(parts[:, :-1] == np.array(wanted, np.int64)).all(axis=1)]
            if not len(rows):
                raise Unreachable(variable)
            self.cache[key] = rows
        return self.cache[key]

    def parts(self, rows: Symbols, symbols: int, groups: Groups, held: Sequence[int]) -> Ints:
        """Into how many parts each choice cuts each symbol (the last column: R)."""
        parts = np.ones((len(rows), symbols + 1), np.int64)
        for axis, symbol in enumerate(held):
            if symbol >= 0:
                parts[:, symbol] *= self.mesh.factors[axis]
        for column, factor in enumerate(self.factors(groups)):
            parts[np.arange(len(rows)), rows[:, column]] *= factor
        return parts

    def memory_table(self, variable: int, rows: Symbols, groups: Groups, fixed: Sequence[int]) -> Table:
        """The price of the blocks that a choice keeps on every rank."""
        free = {axis for group in groups for axis in group}
        held = tuple(-1 if axis in free else symbol for axis, symbol in enumerate(fixed))
        blocks = self.problem.blocks[variable]
        key = ("memory", self.price, blocks, held, id(rows))
        if key not in self.cache:
            parts = self.parts(rows, len(self.problem.variables[variable].extents), groups, held)
            total = np.zeros(len(rows), np.int64)
            for nbytes, symbols in blocks:
                total += nbytes // parts[:, list(symbols)].prod(axis=1)
            self.cache[key] = total * self.mesh.ranks * self.price // 16
        return Table((variable,), self.cache[key], self.memo.number(key))

    def table(self, edge: Edge, rows: Sequence[Symbols], groups: Groups, fixed: States) -> Table:
        """The bytes an edge moves, for all choices at its ends."""
        ends = (edge.target,) if edge.source is None else (edge.source, edge.target)
        held = self.held_axes(edge, groups, fixed)
        key = ("table", self.factors(groups), edge.ndim, edge.nbytes, edge.weight, held,
               edge.source_symbols, edge.target_symbols, tuple(id(rows[end]) for end in ends))  # fmt: skip
        if key not in self.cache:
            self.cache[key] = self.costs(edge, rows, groups, held) * edge.weight
        costs = self.cache[key]
        if edge.source == edge.target:  # a layer that feeds its own repetition
            return Table((edge.target,), costs.diagonal(), self.memo.number(("diagonal", key)))
        return Table(ends, costs, self.memo.number(key))

    def factors(self, groups: Groups) -> tuple[int, ...]:
        return tuple(prod(self.mesh.factors[axis] for axis in group) for group in groups)

    def costs(self, edge: Edge, rows: Sequence[Symbols], groups: Groups, held: tuple[int, ...]) -> Ints:
        ranks, ndim = self.mesh.ranks, edge.ndim
        unit = mesh_factors(self.factors(groups), ndim).scaled(held)
        targets = codes(rows[edge.target], edge.target_symbols, ndim + 1)
        if edge.source is None:  # an input is stored once: all copies but one are moved
            copies: Ints = unit.wanted[0] - 1
            return copies[targets] * edge.nbytes
        sources = codes(rows[edge.source], edge.source_symbols, ndim + 2)
        return in_bytes(moved(unit, ranks), ranks, edge.nbytes)[np.ix_(sources, targets)]

    def held_axes(self, edge: Edge, groups: Groups, fixed: States) -> tuple[int, ...]:
        """The five products over the axes that are not free."""
        free = {axis for group in groups for axis in group}
        held = [axis for axis in range(len(self.mesh.factors)) if axis not in free]
        sources = fixed[edge.source] if edge.source is not None else ()
        key = tuple(
            (self.mesh.factors[axis], edge.source_symbols[sources[axis]] if sources else 0,
             edge.target_symbols[fixed[edge.target][axis]])
            for axis in held
        )  # fmt: skip
        return held_factors(key, edge.ndim)


def _expand(row: Symbols, groups: Groups, fixed: Sequence[int]) -> tuple[int, ...]:
    full = list(fixed)
    for symbol, group in zip(row.tolist(), groups, strict=True):
        for axis in group:
            full[axis] = symbol
    return tuple(full)


def _row(rows: Symbols, groups: Groups, fixed: Sequence[int]) -> int:
    """The number of the choice that leaves everything as it is."""
    now = np.array([fixed[group[0]] for group in groups], np.int64)
    return int((rows == now).all(axis=1).argmax())


# ---- search ---------------------------------------------------------------------------------------------------------

EXACT_AXES = 3
PLACED_AXES = 6  # with prescribed parts few states are left
MAX_SHAPES = 8
# Counted in cells of joined tables: bounds the time without looking at a clock.
SHAPES_BUDGET = 40_000_000
MOVES_BUDGET = 30_000_000
SHAPE_LIMITS = Limits(1 << 22, 30_000_000, 1 << 15)
MOVE_LIMITS = Limits(1 << 18, 5_000_000, 1 << 12)


def search(solver: Solver, start: States | None = None) -> Solution:
    """The best states found; `start` is needed where parts are prescribed and the mesh has many axes."""
    axes = range(len(solver.mesh.factors))
    best = None
    if len(axes) <= (EXACT_AXES if start is None else PLACED_AXES):
        best = solver.solve([(axis,) for axis in axes], limits=Limits(budget=SHAPES_BUDGET))
        if best.exact:
            return best
    if start is not None and best is None:
        best = solver.solve([], start)
    elif best is None:
        best = min(_shapes(solver), key=lambda result: result.cost)
    return replace(_descend(solver, best), exact=False)


def _shapes(solver: Solver) -> Iterator[Solution]:
    """Solutions over axes merged into at most three, balanced shapes first."""
    for groups in groupings(solver.mesh.factors, EXACT_AXES)[:MAX_SHAPES]:
        yield solver.solve(groups, limits=SHAPE_LIMITS)
        if solver.memo.cells > SHAPES_BUDGET:
            return


def _descend(solver: Solver, best: Solution) -> Solution:
    """Free one axis, then two at a time, until a round saves less than a thousandth."""
    solver.memo.cells = 0
    before = best.cost + best.cost // 500 + 1
    while before - best.cost > best.cost // 1000:
        before = best.cost
        for count in (1, 1, 2):
            for move in _moves(solver.mesh, best.states, count):
                if solver.memo.cells > MOVES_BUDGET:
                    return best
                best = min(best, solver.solve(move, best.states, MOVE_LIMITS), key=lambda result: result.cost)
    return best


def _moves(mesh: Mesh, states: States, count: int) -> Sequence[Groups]:
    """Which `count` axes to free. Axes of equal length that cut everything alike are tried once."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for axis, factor in enumerate(mesh.factors):
        alike.setdefault((factor, *(state[axis] for state in states)), []).append(axis)
    classes = list(alike.values())
    if count == 1:
        return [((axes[0],),) for axes in classes]
    pairs = [((axes[0],), (axes[1],)) for axes in classes if len(axes) > 1]
    return pairs + [((first[0],), (second[0],)) for first, second in itertools.combinations(classes, 2)]
