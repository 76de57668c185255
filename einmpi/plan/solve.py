"""Searches for the states that move the fewest bytes: exact, and large neighbourhoods (planner, section 4)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from einmpi.plan.eliminate import Memo, Table, TooWide, minimize
from einmpi.plan.factor import Edge, Factored
from einmpi.plan.layout import Symbols, choices, codes
from einmpi.plan.mesh import Mesh, groupings
from einmpi.plan.volume import Ints, held_factors, in_bytes, mesh_factors, moved

Groups = Sequence[Sequence[int]]
States = list[tuple[int, ...]]  # for every variable the symbol of every axis


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

    def solve(self, groups: Groups, current: States | None = None) -> tuple[int, States]:
        """(bytes over all ranks, states)."""
        fixed = current or self.uncut()
        rows = [self.rows(k, groups, fixed[k]) for k in range(len(self.problem.variables))]
        tables = [self.table(edge, rows, groups, fixed) for edge in self.problem.edges]
        if self.price:
            tables += [self.memory_table(k, rows[k], groups, fixed[k]) for k in range(len(rows))]
        cost, values = minimize([len(r) for r in rows], tables, self.memo)
        return cost, [_expand(rows[k][values[k]], groups, fixed[k]) for k in range(len(rows))]

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


# ---- search ---------------------------------------------------------------------------------------------------------

EXACT_AXES = 3
MAX_SHAPES = 8
MAX_CELLS = 60_000_000  # joined in shapes, and in moves: bounds the time without looking at a clock


def search(solver: Solver, start: States | None = None) -> tuple[int, States, bool]:
    """(cost, states, whether no state could be better). `start` is needed where parts are prescribed."""
    axes = range(len(solver.mesh.factors))
    if len(axes) <= EXACT_AXES:
        try:
            return *solver.solve([(axis,) for axis in axes]), True
        except TooWide:
            pass
    best = solver.solve([], start) if start else min(_shapes(solver), key=lambda result: result[0])
    return *_descend(solver, best), False


def _shapes(solver: Solver) -> Iterator[tuple[int, States]]:
    """Exact solutions over axes merged into at most three, balanced shapes first."""
    for groups in groupings(solver.mesh.factors, EXACT_AXES)[:MAX_SHAPES]:
        if solver.memo.cells < MAX_CELLS:
            try:
                yield solver.solve(groups)
            except TooWide:
                continue
    yield _one_axis_at_a_time(solver)


def _one_axis_at_a_time(solver: Solver) -> tuple[int, States]:
    cost, states = 0, solver.uncut()
    for axis in range(len(solver.mesh.factors)):
        cost, states = solver.solve([(axis,)], states)
    return cost, states


def _descend(solver: Solver, best: tuple[int, States]) -> tuple[int, States]:
    """Free one axis, then two at a time, until a round saves less than a thousandth."""
    solver.memo.cells = 0
    before = best[0] + best[0] // 500 + 1
    while before - best[0] > best[0] // 1000 and solver.memo.cells < MAX_CELLS:
        before = best[0]
        for count in (1, 1, 2):
            for move in _moves(solver.mesh, best[1], count):
                try:
                    best = min(best, solver.solve(move, best[1]), key=lambda result: result[0])
                except TooWide:
                    continue
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
