"""One graph on one mesh: what is prescribed, the search for the best cuts, and the plan that they make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NoReturn

from einmpi.errors import InputError
from einmpi.graph.eingraph import EinGraph
from einmpi.planner.bounds import lower_bound_words
from einmpi.planner.cost_tables import Solution, Solver, States, Unreachable
from einmpi.planner.factor import factor, repeated_layers
from einmpi.planner.machine import Machine
from einmpi.planner.memory import least_bytes, peak_bound, peak_bytes, stage_of
from einmpi.planner.mesh import Mesh
from einmpi.planner.paper.costs import graph_cost
from einmpi.planner.placement import place
from einmpi.planner.plan import Options, Plan
from einmpi.planner.prices import Prices
from einmpi.planner.search import EXACT_AXES, search
from einmpi.planner.strategies import DEFAULT_STRATEGY, PAPER, SQRT, STRATEGIES
from einmpi.planner.traffic import bills
from einmpi.units import counted

FEW_VERTICES = (
    16  # then layers are not tied together, and the search looks at what other strategies cut
)


@dataclass(frozen=True)
class _Tried:
    peak: int  # bytes
    least: int  # bytes with which it can be done, when all that can be is outside
    states: States


@dataclass
class Planning:
    """One graph on one mesh: the problem is set up once, and solved once for each price of memory."""

    graph: EinGraph
    mesh: Mesh
    ranks: int
    options: Options

    def __post_init__(self) -> None:
        tied = (
            len(self.mesh.factors) > EXACT_AXES
            and self.options.strategy == DEFAULT_STRATEGY
            and not self.small
        )
        tie = repeated_layers(self.graph) if tied else {}
        given = [name for name in self.options.given if name not in self.options.resident]
        self.resident = (*self.options.resident, *given)
        self.pinned = {**self.options.pins, **self.options.given}
        self.problem = factor(self.graph, self.resident, self.pinned, tie)
        self.prices = Prices.of(self.machine())
        self.rates: tuple[int, ...] = ()
        if self.prices.machine is not None:
            self.rates = tuple(
                self.prices.operation(self.graph[variable.name]) if variable.kind == "vertex" else 0
                for variable in self.problem.variables
            )
        self.fixed: dict[int, tuple[int, ...]] = {}
        self.notes: dict[str, str] = {}
        self.start: States | None = None
        self.wanted: dict[int, tuple[int, ...]] = {}
        self.partitionings: Mapping[str, tuple[int, ...]] | None = (
            None  # as the strategy wants them
        )
        self.prescribe()

    @property
    def small(self) -> bool:
        return len(self.graph.computed) <= FEW_VERTICES

    @cached_property
    def others(self) -> list[States]:
        """The cuts of strategies that need no roles, where it takes little to find them and may help: where labels are
        shorter than the ranks, a search from the axes merged in equal parts can end far from the best."""
        short = any(
            1 < extent < self.mesh.ranks for v in self.problem.variables for extent in v.extents
        )
        if not short or not self.small or self.wanted or len(self.mesh.factors) <= EXACT_AXES:
            return []
        found = (
            strategy.choose_parts(self.graph, self.mesh.ranks, {}) for strategy in (PAPER, SQRT)
        )
        return [
            self.placed(
                {
                    self.problem.number["vertex", name]: parts
                    for name, parts in each.partitionings.items()
                }
            )
            for each in found
        ]

    def machine(self) -> Machine | None:
        """Where a mesh knows nothing of the nodes, every message may go from node to node."""
        machine = self.options.machine
        if machine is None or self.options.nodes == 1 or self.mesh.nodes > 1:
            return machine
        return replace(machine, inside=machine.between, latency_inside=machine.latency_between)

    # ---- prescribed cuts --------------------------------------------------------------------------------------------

    def prescribe(self) -> None:
        """The parts that pins and the strategy ask for, and axes that make them."""
        for name, parts in self.options.pins.items():
            self.wanted[self.problem.number["tensor", name]] = parts
        for name, cuts in self.options.given.items():
            number, ndim = self.problem.number["tensor", name], len(self.graph[name].bound)
            self.fixed[number] = tuple(ndim if cut is None else cut for cut in cuts)
            self.wanted[number] = self.mesh.parts(cuts, range(ndim))
        if self.options.strategy != DEFAULT_STRATEGY:
            choice = STRATEGIES[self.options.strategy].choose_parts(
                self.graph, self.mesh.ranks, self.options.roles
            )
            self.notes, self.partitionings = dict(choice.notes), choice.partitionings
            for name, parts in choice.partitionings.items():
                self.prescribe_vertex(name, parts)
        if self.wanted:
            self.start = self.placed(self.wanted)
            for number, state in self.fixed.items():
                self.start[number] = state

    def placed(self, parts: Mapping[int, tuple[int, ...]]) -> States:
        """States with so many parts, of variables by number; all others are not cut."""
        return [
            place(self.mesh, variable.extents, parts.get(k, (1,) * len(variable.extents)))
            for k, variable in enumerate(self.problem.variables)
        ]

    def prescribe_vertex(self, name: str, parts: tuple[int, ...]) -> None:
        einsum = self.graph[name].einsum
        assert einsum is not None
        extents = [extent for _, extent in einsum.extents]
        fitting = self.mesh.parts(place(self.mesh, extents, parts), range(len(extents)))
        self.wanted[self.problem.number["vertex", name]] = fitting
        if fitting != tuple(parts):
            cut = " ".join(f"{x}:{d}" for x, d in zip(einsum.labels, fitting, strict=True) if d > 1)
            note = f"{prod(parts)} parts do not fit {self.mesh.ranks} ranks: cut {cut or 'nothing'}"
            self.notes[name] = f"{self.notes[name]}; {note}" if name in self.notes else note

    # ---- solving ----------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """The first plan that fits into memory when a byte of it gets dearer and dearer. Where none does, one of which
        some has to lie outside at times."""
        limit, before = self.options.memory, None
        bound = peak_bound(self.graph, self.mesh.ranks, self.resident)
        tried: list[_Tried] = []
        for price in _prices():
            found = self.solve(price)
            peak = self.peak(found.states)
            if limit is None or peak <= limit:
                plan = self.describe(
                    found.states, peak, found.exact and not price and not self.wanted
                )
                return plan if limit is None else self.reading_ahead(plan, found.states, limit)
            tried.append(_Tried(peak, self.least(found.states), found.states))
            if limit < bound and (price or peak == bound):  # dearer memory would not help
                if (spilling := self.spilling(limit, tried)) is not None:
                    return spilling
                if price and not self.resident:
                    break  # cuts make much of a difference to the least only where something stays in memory
            if price > 1 << 20 and found.states == before:
                break  # memory is all that counts by now
            before = found.states
        assert limit is not None
        spilling = self.spilling(limit, tried)
        if spilling is None:
            ranks = counted(self.mesh.ranks, "rank")
            raise InputError(
                "memory",
                f"no plan on {ranks} was found below {limit} bytes a rank",
                f"at least {min(each.least for each in tried)} bytes, or more ranks",
            )
        return spilling

    def reading_ahead(self, plan: Plan, found: States, limit: int) -> Plan:
        """Where a limit leaves room, files are read before they are wanted: at the most all from the start."""
        ahead = min(limit, self.peak(found, self.options.files)) - plan.peak
        return replace(plan, peak=plan.peak + ahead, ahead=ahead)

    def spilling(self, limit: int, tried: Sequence[_Tried]) -> Plan | None:
        """Of the plans that can be done in so much memory at all, the one that has the least to lay outside."""
        able = [each for each in tried if each.least <= limit]
        if not able:
            return None
        best = min(able, key=lambda each: each.peak)
        return replace(self.describe(best.states, limit, exact=False), spilled=best.peak - limit)

    def solve(self, price: int) -> Solution:
        """The least time, where a machine was measured; else the fewest bytes, but not at the price of computing much
        of the graph again and again on many ranks."""
        bytes_only = self.options.strategy == DEFAULT_STRATEGY and not self.rates
        # Where the search is not exact in any case, work is weighed from the start.
        weigh_work = bytes_only and len(self.mesh.factors) > EXACT_AXES
        try:
            found = search(self.solver(price, weigh_work), self.start, self.others)
        except Unreachable as error:
            self.refuse_pin(error.args[0])
        if bytes_only and not weigh_work and self.repeats_work(found.states):
            found = search(self.solver(price, weigh_work=True), self.start, self.others)
            weigh_work = True
        return replace(found, exact=found.exact and not weigh_work)

    def solver(self, price: int, weigh_work: bool) -> Solver:
        return Solver(
            self.problem,
            self.mesh,
            self.wanted,
            self.fixed,
            price,
            weigh_work,
            self.prices,
            self.rates,
        )

    def repeats_work(self, found: States) -> bool:
        """Whether ranks do more than a tenth of all operations again."""
        needed = sum(self.problem.operations)
        done = 0
        for variable, state, operations in zip(
            self.problem.variables, found, self.problem.operations, strict=True
        ):
            done += operations * self.mesh.parts(state, [len(variable.extents)])[0]
        return 10 * done > 11 * needed

    def refuse_pin(self, variable: int) -> NoReturn:
        name, parts = self.problem.variables[variable].name, self.wanted[variable]
        raise InputError(
            "pin",
            f"{name} cannot be cut {'×'.join(map(str, parts))} over {self.mesh.ranks} ranks",
            f"products of the prime factors of {self.mesh.ranks}, none above its extent",
        )

    def peak(self, found: States, early: Sequence[str] = ()) -> int:
        stage = stage_of(self.options.memory)
        return peak_bytes(self.graph, self.mesh, *self.named(found), self.resident, stage, early)

    def least(self, found: States) -> int:
        return least_bytes(self.graph, self.mesh, *self.named(found), self.resident)

    def named(
        self, found: States
    ) -> tuple[dict[str, tuple[str | None, ...]], dict[str, tuple[int | None, ...]]]:
        """(states with labels, layouts with dimensions) of all vertices and tensors, repeated layers included."""
        states: dict[str, tuple[str | None, ...]] = {}
        layouts: dict[str, tuple[int | None, ...]] = {}
        for (kind, name), number in self.problem.number.items():
            if kind == "tensor":
                layouts[name] = tuple(
                    s if s < len(self.graph[name].bound) else None for s in found[number]
                )
            elif (einsum := self.graph[name].einsum) is not None:
                states[name] = tuple(
                    einsum.labels[s] if s < len(einsum.labels) else None for s in found[number]
                )
        return states, layouts

    def describe(self, found: States, peak: int, exact: bool) -> Plan:
        states, layouts = self.named(found)
        every = {name: found[number] for name, number in self.problem.number.items()}
        costs = bills(self.graph, self.mesh, every, self.resident, self.pinned, self.prices)
        total = sum(bill.words.total for bill in costs.values())
        # The certificate is about words: a plan that makes something else small is no bound.
        fewest = exact and self.mesh.nodes == 1 and not self.rates
        bound = total if fewest else lower_bound_words(self.graph, self.mesh.ranks, self.resident)
        exact = total == bound  # whoever found it
        partitionings = self.partitionings or {
            name: self.mesh.parts(state, einsum.labels)
            for name, state in states.items()
            if (einsum := self.graph[name].einsum) is not None
        }
        return Plan(
            self.graph,
            self.mesh,
            self.ranks,
            self.options.strategy,
            states,
            layouts,
            costs,
            peak,
            "exact" if exact else "gap",
            bound,
            graph_cost(self.graph, partitionings),
            self.notes,
            self.resident,
            self.options.memory,
            nodes=self.options.nodes,
            uneven=self.options.uneven,
            machine=self.prices.machine,
        )


def _prices() -> Iterator[int]:
    yield 0
    for exponent in range(0, 40, 3):
        yield 1 << exponent
