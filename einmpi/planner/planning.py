"""The planning of one graph on one mesh: prescribed cuts, the search, and the plan that results."""

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
from einmpi.planner.donation import blocked_products, updatable_in_place
from einmpi.planner.factor import factor, repeated_layers
from einmpi.planner.machine import Machine
from einmpi.planner.memory import (
    Labels,
    Layouts,
    block_bytes,
    least_bytes,
    output_cuts,
    peak_bound,
    peak_bytes,
    stage_of,
)
from einmpi.planner.mesh import Mesh
from einmpi.planner.moving.traffic import bills
from einmpi.planner.order import Constraints, orders_that_free_early
from einmpi.planner.paper.costs import graph_cost
from einmpi.planner.placement import place
from einmpi.planner.plan import Options, Plan
from einmpi.planner.prices import Prices
from einmpi.planner.search import EXACT_AXES, search
from einmpi.planner.strategies import DEFAULT_STRATEGY, PAPER, SQRT, STRATEGIES
from einmpi.units import counted

# Up to so many vertices, layers are not tied together, and the search also starts from the cuts of
# other strategies.
FEW_VERTICES = 16
HIGHEST_USEFUL_PRICE = 1 << 20  # from here on memory is all that counts


@dataclass(frozen=True)
class _Attempt:
    """States that do not fit into memory."""

    peak: int  # bytes
    least: int  # bytes in which it can be done when everything possible is kept outside
    states: States
    graph: EinGraph  # in the order that has this peak


@dataclass
class Planning:
    """One graph on one mesh. The problem is set up once, and solved for each price of memory."""

    graph: EinGraph
    mesh: Mesh
    ranks: int
    options: Options

    def __post_init__(self) -> None:
        # What a loop carries is already where the previous step has left it.
        in_place = dict.fromkeys((*self.options.given, *self.options.carry))
        not_listed = [name for name in in_place if name not in self.options.resident]
        self.resident = (*self.options.resident, *not_listed)
        carried_outputs = set(self.options.carry.values())
        pins = [name for name in self.options.pins if name not in carried_outputs]
        self.pinned = (*in_place, *pins)
        tie = {}
        if self.is_default and not self.exact_axes and not self.small:
            tie = repeated_layers(self.graph)
        # An output that becomes an input of the next step has the layout of that input.
        for name, output in self.options.carry.items():
            tie[output] = name
        self.problem = factor(self.graph, self.resident, self.pinned, tie)
        self.prices = Prices.of(self.machine())
        self.rates = self.operation_rates()
        self.notes: dict[str, str] = {}
        self.prescribed: dict[int, tuple[int, ...]] = {}  # variable → its parts, where prescribed
        self.fixed: dict[int, tuple[int, ...]] = {}  # variable → its state, where given
        self.start: States | None = None  # states with the parts that are prescribed
        # The parts that the strategy asks for; None if it searches itself.
        self.partitionings: Mapping[str, tuple[int, ...]] | None = None
        self.prescribe()

    @property
    def is_default(self) -> bool:
        """Whether the exact planner chooses the cuts."""
        return self.options.strategy == DEFAULT_STRATEGY

    @property
    def exact_axes(self) -> bool:
        """Whether the mesh has so few axes that the search is exact."""
        return len(self.mesh.factors) <= EXACT_AXES

    @property
    def small(self) -> bool:
        """Whether the graph has few vertices."""
        return len(self.graph.computed) <= FEW_VERTICES

    def machine(self) -> Machine | None:
        """Return the machine to plan for.

        If the mesh does not show the nodes, any message may go from node to node.
        """
        machine = self.options.machine
        if machine is None or self.options.nodes == 1 or self.mesh.nodes > 1:
            return machine
        return replace(machine, inside=machine.between, latency_inside=machine.latency_between)

    def operation_rates(self) -> tuple[int, ...]:
        """Return femtoseconds for an operation of each variable; nothing without a machine."""
        if self.prices.machine is None:
            return ()
        rates = []
        for variable in self.problem.variables:
            is_vertex = variable.kind == "vertex"
            rates.append(self.prices.operation(self.graph[variable.name]) if is_vertex else 0)
        return tuple(rates)

    # ---- prescribed cuts ------------------------------------------------------------------------

    def prescribe(self) -> None:
        """Collect the parts that pins and the strategy ask for, and find axes that make them."""
        for name, parts in self.options.pins.items():
            number = self.problem.number["tensor", name]
            if self.prescribed.setdefault(number, parts) != parts:
                other = "×".join(map(str, self.prescribed[number]))
                raise InputError(
                    self.options.pin_place(name),
                    f"{name} is cut {'×'.join(map(str, parts))}",
                    f"{other}, because what is carried has one layout",
                )
        for name, cuts in (*self.options.given.items(), *self.options.placed.items()):
            number = self.problem.number["tensor", name]
            ndim = len(self.graph[name].bound)
            self.fixed[number] = tuple(ndim if cut is None else cut for cut in cuts)
            self.prescribed[number] = self.mesh.parts(cuts, range(ndim))
        if not self.is_default:
            strategy = STRATEGIES[self.options.strategy]
            choice = strategy.choose_parts(self.graph, self.mesh.ranks, self.options.roles)
            self.notes = dict(choice.notes)
            self.partitionings = choice.partitionings
            for name, parts in choice.partitionings.items():
                self.prescribe_vertex(name, parts)
        if self.prescribed:
            self.start = self.placed(self.prescribed)
            for number, state in self.fixed.items():
                self.start[number] = state

    def prescribe_vertex(self, name: str, parts: tuple[int, ...]) -> None:
        """Ask for these parts of a vertex's labels, as far as the mesh can make them."""
        einsum = self.graph[name].computed_einsum
        extents = [extent for _, extent in einsum.extents]
        fitting = self.mesh.parts(place(self.mesh, extents, parts), range(len(extents)))
        self.prescribed[self.problem.number["vertex", name]] = fitting
        if fitting == tuple(parts):
            return
        cuts = []
        for label, count in zip(einsum.labels, fitting, strict=True):
            if count > 1:
                cuts.append(f"{label}:{count}")
        shown = " ".join(cuts) or "nothing"
        ranks = counted(self.mesh.ranks, "rank")
        note = f"{prod(parts)} parts do not fit {ranks}: cut {shown}"
        if name in self.notes:
            note = f"{self.notes[name]}; {note}"
        self.notes[name] = note

    def placed(self, parts: Mapping[int, tuple[int, ...]]) -> States:
        """Return states with these parts of some variables; the others are not cut."""
        states = []
        for number, variable in enumerate(self.problem.variables):
            uncut = (1,) * len(variable.extents)
            states.append(place(self.mesh, variable.extents, parts.get(number, uncut)))
        return states

    @cached_property
    def other_starts(self) -> list[States]:
        """The cuts of strategies that need no roles, as further starts of the search.

        Where labels are shorter than the number of ranks, a search that starts from axes merged in
        equal parts can end far from the best. This is done only where it takes little time.
        """
        if not self.small or self.prescribed or self.exact_axes:
            return []
        has_short_label = False
        for variable in self.problem.variables:
            if any(1 < extent < self.mesh.ranks for extent in variable.extents):
                has_short_label = True
        if not has_short_label:
            return []
        starts = []
        for strategy in (PAPER, SQRT):
            choice = strategy.choose_parts(self.graph, self.mesh.ranks, {})
            parts_of = {}
            for name, parts in choice.partitionings.items():
                parts_of[self.problem.number["vertex", name]] = parts
            starts.append(self.placed(parts_of))
        return starts

    # ---- solving --------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Return the first plan that fits into memory while the price of memory rises.

        Where none does, return one that keeps some tensors outside of memory at times.
        """
        limit = self.options.memory
        bound = 0 if limit is None else self.peak_bound()
        attempts: list[_Attempt] = []
        previous: States | None = None
        for price in _memory_prices():
            found = self.solve(price)
            graph, peak = self.in_best_order(found.states)
            if limit is None or peak <= limit:
                exact = found.exact and not price and not self.prescribed
                plan = self.describe(graph, found.states, peak, exact)
                return plan if limit is None else self.reading_ahead(plan, found.states, limit)
            attempts.append(_Attempt(peak, self.least(found.states), found.states, graph))
            if limit < bound and (price or peak == bound):
                # No plan fits, so a higher price would not help.
                spilling = self.spilling(limit, attempts)
                if spilling is not None:
                    return spilling
                if price and not self.resident:
                    break  # without resident inputs, cuts make little difference to the least
            if price > HIGHEST_USEFUL_PRICE and found.states == previous:
                break
            previous = found.states
        assert limit is not None
        spilling = self.spilling(limit, attempts)
        if spilling is None:
            least = min(attempt.least for attempt in attempts)
            ranks = counted(self.mesh.ranks, "rank")
            expected = f"at least {least} bytes, or more ranks"
            if self.resident:
                # The price of memory does not tell inputs that stay from tensors that come and go,
                # so the search can miss plans that need less.
                expected = (
                    f"at least {least} bytes for the plans that were found, or more ranks "
                    "(with resident inputs, other strategies may need less)"
                )
            what = f"no plan on {ranks} was found below {counted(limit, 'byte')} a rank"
            raise InputError("memory", what, expected)
        return spilling

    def peak_bound(self) -> int:
        """Return what no plan is expected to stay below, whatever the order of vertices."""
        donated = self.options.carry.values() if self.options.donate else ()
        nbytes = {}
        for vertex in self.graph.vertices:
            takes_none = vertex.name in self.resident or vertex.name in donated
            nbytes[vertex.name] = 0 if takes_none else -(-vertex.nbytes // self.mesh.ranks)
        constraints = Constraints(nbytes, first=self.options.first)
        bounds = []
        for graph in (self.graph, *orders_that_free_early(self.graph, constraints)):
            bounds.append(peak_bound(graph, self.mesh.ranks, self.resident, donated))
        return min(bounds)

    def reading_ahead(self, plan: Plan, states: States, limit: int) -> Plan:
        """Return the plan with the rest of the limit used for reading files ahead.

        At most, all files are read before the first vertex.
        """
        labels, layouts = self.named(states)
        peak = min(limit, self.peak(plan.graph, labels, layouts, self.options.files))
        return replace(plan, peak=peak, ahead=peak - plan.peak)

    def spilling(self, limit: int, attempts: Sequence[_Attempt]) -> Plan | None:
        """Return the plan that fits with the least outside of memory; None if none can fit."""
        possible = [attempt for attempt in attempts if attempt.least <= limit]
        if not possible:
            return None
        best = min(possible, key=lambda attempt: attempt.peak)
        plan = self.describe(best.graph, best.states, limit, exact=False)
        # What leaves memory and comes back has memory of its own.
        return replace(plan, spilled=best.peak - limit, updatable={}, blocked=())

    def solve(self, price: int) -> Solution:
        """Return the states with the least time, or without a measured machine the fewest bytes.

        Computing the same on many ranks moves no bytes. So, where bytes are counted, repeated work
        gets a price as soon as there is much of it; where the search is not exact in any case, it
        has a price from the start.
        """
        bytes_only = self.is_default and not self.rates
        weigh_work = bytes_only and not self.exact_axes
        try:
            found = self.search(price, weigh_work)
        except Unreachable as error:
            self.refuse_pin(error.args[0])
        if bytes_only and not weigh_work and self.repeats_work(found.states):
            weigh_work = True
            found = self.search(price, weigh_work)
        return replace(found, exact=found.exact and not weigh_work)

    def search(self, price: int, weigh_work: bool) -> Solution:
        """Return the best states at this price of memory, with a price on repeated work or not."""
        solver = Solver(
            self.problem,
            self.mesh,
            self.prescribed,
            self.fixed,
            price,
            weigh_work,
            self.prices,
            self.rates,
        )
        return search(solver, self.start, self.other_starts)

    def repeats_work(self, states: States) -> bool:
        """Return whether ranks repeat more than a tenth of all operations."""
        needed = sum(self.problem.operations)
        done = 0
        for number, variable in enumerate(self.problem.variables):
            replicas = self.mesh.parts(states[number], [len(variable.extents)])[0]
            done += self.problem.operations[number] * replicas
        return 10 * done > 11 * needed

    def refuse_pin(self, variable: int) -> NoReturn:
        """Raise InputError: the parts that are prescribed for this variable cannot be made."""
        name = self.problem.variables[variable].name
        parts = "×".join(map(str, self.prescribed[variable]))
        ranks = counted(self.mesh.ranks, "rank")
        raise InputError(
            self.options.pin_place(name),
            f"{name} cannot be cut {parts} over {ranks}",
            self.mesh.possible_parts(self.graph[name].bound),
        )

    # ---- the plan -------------------------------------------------------------------------------

    def in_best_order(self, found: States) -> tuple[EinGraph, int]:
        """Return the graph in the order that needs least memory with these states, and its peak.

        It stays in the given order if no other one is found to need less.
        """
        states, layouts = self.named(found)
        best = self.graph
        peak = self.peak(best, states, layouts)
        constraints = self.constraints(states, layouts)
        for graph in orders_that_free_early(self.graph, constraints):
            other_peak = self.peak(graph, states, layouts)
            if other_peak < peak:
                best = graph
                peak = other_peak
        return best, peak

    def constraints(self, states: Labels, layouts: Layouts) -> Constraints:
        """Return what the order of vertices has to respect, and the memory of each tensor."""
        updatable = self.updatable(self.graph, states, layouts)
        updates = {output: name for name, output in updatable.items()}
        nbytes = {}
        for vertex in self.graph.vertices:
            cuts = layouts.get(vertex.name)
            takes_none = vertex.name in self.resident
            if vertex.name in updates:
                takes_none = self.options.donate
            if cuts is None and vertex.is_input:
                takes_none = True  # it is there for its only reader
            elif cuts is None:
                cuts = output_cuts(self.graph, vertex.name, states[vertex.name])
            nbytes[vertex.name] = 0
            if cuts is not None and not takes_none:
                nbytes[vertex.name] = block_bytes(vertex, self.mesh, cuts)
        return Constraints(nbytes, updates, self.options.nan_checked, self.options.first)

    def peak(
        self, graph: EinGraph, states: Labels, layouts: Layouts, early: Sequence[str] = ()
    ) -> int:
        """Return the peak memory of a graph, with the inputs in `early` read from the start."""
        stage = stage_of(self.options.memory)
        updatable = self.updatable(graph, states, layouts)
        return peak_bytes(
            graph,
            self.mesh,
            states,
            layouts,
            self.resident,
            stage,
            early,
            in_place=updatable.values() if self.options.donate else (),
            blocked=self.blocked(graph, states, layouts, updatable),
        )

    def updatable(self, graph: EinGraph, states: Labels, layouts: Layouts) -> dict[str, str]:
        """Return the inputs that can be updated in place, each with the output that it becomes."""
        return updatable_in_place(
            graph, self.mesh, states, layouts, self.options.carry, self.options.nan_checked
        )

    def blocked(
        self, graph: EinGraph, states: Labels, layouts: Layouts, updatable: Mapping[str, str]
    ) -> tuple[str, ...]:
        """Return the vertices that are computed block by block, together with the next one."""
        return blocked_products(
            graph, self.mesh, states, layouts, self.resident, updatable.values()
        )

    def least(self, found: States) -> int:
        """Return the least memory in which these states can be carried out."""
        states, layouts = self.named(found)
        return least_bytes(self.graph, self.mesh, states, layouts, self.resident)

    def named(
        self, found: States
    ) -> tuple[dict[str, tuple[str | None, ...]], dict[str, tuple[int | None, ...]]]:
        """Return (states with labels, layouts with dimensions), repeated layers included.

        The variables of the problem have numbers for both, and a number past the last for R.
        """
        states: dict[str, tuple[str | None, ...]] = {}
        layouts: dict[str, tuple[int | None, ...]] = {}
        for (kind, name), number in self.problem.number.items():
            symbols = found[number]
            if kind == "tensor":
                ndim = len(self.graph[name].bound)
                layouts[name] = tuple(symbol if symbol < ndim else None for symbol in symbols)
            else:
                einsum = self.graph[name].computed_einsum
                label_or_none = (*einsum.labels, None)
                states[name] = tuple(label_or_none[symbol] for symbol in symbols)
        return states, layouts

    def describe(self, graph: EinGraph, found: States, peak: int, exact: bool) -> Plan:
        """Return the plan with these states; `exact` if the search has proven them best.

        The graph is that of the problem, in the order in which it is computed.
        """
        states, layouts = self.named(found)
        symbols = {name: found[number] for name, number in self.problem.number.items()}
        costs = bills(graph, self.mesh, symbols, self.resident, self.pinned, self.prices)
        words = sum(bill.words.total for bill in costs.values())
        # The certificate is about words: a plan with another objective is no lower bound.
        fewest_words = exact and self.mesh.nodes == 1 and not self.rates
        bound = words
        if not fewest_words:
            bound = lower_bound_words(graph, self.mesh.ranks, self.resident)
        partitionings = self.partitionings
        if not partitionings:
            partitionings = {}
            for name, state in states.items():
                einsum = graph[name].computed_einsum
                partitionings[name] = self.mesh.parts(state, einsum.labels)
        updatable = self.updatable(graph, states, layouts)
        return Plan(
            graph=graph,
            mesh=self.mesh,
            ranks=self.ranks,
            strategy=self.options.strategy,
            states=states,
            layouts=layouts,
            bills=costs,
            peak=peak,
            kind="exact" if words == bound else "gap",
            lower_bound=bound,
            paper_cost=graph_cost(graph, partitionings),
            notes=self.notes,
            resident=self.resident,
            updatable=updatable,
            blocked=self.blocked(graph, states, layouts, updatable),
            nan_checked=self.options.nan_checked,
            donate=self.options.donate,
            memory=self.options.memory,
            nodes=self.options.nodes,
            uneven=self.options.uneven,
            machine=self.prices.machine,
        )


def _memory_prices() -> Iterator[int]:
    """Yield rising prices of a byte of memory: first none, then eight times as much each time."""
    yield 0
    for exponent in range(0, 40, 3):
        yield 1 << exponent
