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
from einmpi.planner.factor import Name, factor
from einmpi.planner.machine import Machine
from einmpi.planner.memory import (
    Labels,
    Layouts,
    block_bytes,
    bytes_at_vertices,
    least_bytes,
    output_cuts,
    peak_bound,
    stage_of,
)
from einmpi.planner.mesh import Mesh
from einmpi.planner.moving.traffic import Bill, bills
from einmpi.planner.paper.costs import graph_cost
from einmpi.planner.placement import place
from einmpi.planner.plan import Options, Plan
from einmpi.planner.plan_data import Recomputed
from einmpi.planner.prices import BYTES, FLOPS_PER_BYTE, Prices
from einmpi.planner.repetition import repeated_layers, vertices_alike
from einmpi.planner.saving_memory.order import Constraints, orders_that_free_early
from einmpi.planner.saving_memory.recompute import (
    AUTO,
    CutGraph,
    named_splits,
    recomputed_to_fit,
    with_copies,
)
from einmpi.planner.search import EXACT_AXES, is_tangled, search
from einmpi.planner.strategies import DEFAULT_STRATEGY, PAPER, SQRT, STRATEGIES
from einmpi.units import counted

# Up to so many vertices, layers are not tied together, and the search also starts from the cuts of
# other strategies.
FEW_VERTICES = 16
CHEAP_SHARE = 100  # added costs below this share of all operations count as cheap: a hundredth
# With more vertices than this, a search that is not exact takes long unless layers share variables.
MANY_VERTICES = 300
HIGHEST_USEFUL_PRICE = 1 << 20  # from here on memory is all that counts


@dataclass(frozen=True)
class _Attempt:
    """Cuts that do not fit into memory."""

    cut: CutGraph
    least: int  # bytes in which it can be done when everything possible is kept outside


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
        self.prices = Prices.of(self.machine())
        self.set_up()
        self.rates = self.operation_rates()
        self.notes: dict[str, str] = {}
        self.prescribed: dict[int, tuple[int, ...]] = {}  # variable → its parts, where prescribed
        self.fixed: dict[int, tuple[int, ...]] = {}  # variable → its state, where given
        self.start: States | None = None  # states with the parts that are prescribed
        # The parts that the strategy asks for; None if it searches itself.
        self.partitionings: Mapping[str, tuple[int, ...]] | None = None
        self.prescribe()

    def set_up(self) -> None:
        """Make the problem. Repeated layers share variables where no search would be exact."""
        # An output that becomes an input of the next step has the layout of that input.
        same_layout = {output: name for name, output in self.options.carry.items()}
        tie: dict[str, str] = {}
        if self.is_default and not self.small:
            tie = self.tied()
        self.problem = factor(self.graph, self.resident, self.pinned, tie, same_layout)
        self.is_tangled = bool(tie) and is_tangled(Solver(self.problem, self.mesh))
        if tie and self.exact_axes and not self.is_tangled:
            self.problem = factor(self.graph, self.resident, self.pinned, {}, same_layout)

    def tied(self) -> dict[str, str]:
        """Return vertices and inputs of repeated layers → those whose variables they share."""
        marks: dict[str, object] = {}
        for name in self.resident:
            marks[name] = "resident"
        for layouts in (self.options.pins, self.options.given, self.options.placed):
            marks.update(layouts)
        if self.exact_axes and len(self.graph.vertices) <= MANY_VERTICES:
            return {}
        tie = repeated_layers(self.graph)
        if not tie and len(self.graph.vertices) > MANY_VERTICES:
            tie = vertices_alike(self.graph, marks)
        return {name: model for name, model in tie.items() if marks.get(name) == marks.get(model)}

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
        recomputing: list[Plan] = []  # plans that fit because they compute tensors again
        previous: States | None = None
        for price in _memory_prices():
            found = self.solve(price)
            cut = self.cut_graph(found.states)
            if limit is None or cut.peak <= limit:
                exact = found.exact and not price and not self.prescribed
                plan = self.describe(cut, exact)
                if limit is not None:
                    plan = self.reading_ahead(plan, limit)
                return min([plan, *recomputing], key=cost_of)
            attempts.append(_Attempt(cut, self.least(cut)))
            if self.options.recompute == AUTO:
                smaller = self.recomputed(cut, limit)
                if smaller.peak <= limit:
                    recomputing.append(self.reading_ahead(self.describe(smaller, False), limit))
                    if self.is_cheap(recomputing[-1]):
                        break
            if limit < bound and (price or cut.peak == bound):
                # No plan fits, so a higher price would not help.
                spilling = self.spilling(limit, attempts)
                if spilling is not None:
                    return min([spilling, *recomputing], key=cost_of)
                if price and not self.resident:
                    break  # without resident inputs, cuts make little difference to the least
            if price > HIGHEST_USEFUL_PRICE and found.states == previous:
                break
            previous = found.states
        if recomputing:
            return min(recomputing, key=cost_of)
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

    def is_cheap(self, plan: Plan) -> bool:
        """Return whether computing tensors again costs so little that other plans are not tried."""
        assert plan.recomputed is not None
        added = plan.recomputed.operations + FLOPS_PER_BYTE * plan.recomputed.nbytes
        return added * CHEAP_SHARE <= plan.graph.operations()

    def reading_ahead(self, plan: Plan, limit: int) -> Plan:
        """Return the plan with the rest of the limit used for reading files ahead.

        At most, all files are read before the first vertex.
        """
        cut = CutGraph(plan.graph, plan.states, plan.layouts)
        peak = min(limit, max(self.memory(cut, self.options.files)))
        return replace(plan, peak=peak, ahead=peak - plan.peak)

    def spilling(self, limit: int, attempts: Sequence[_Attempt]) -> Plan | None:
        """Return the plan that fits with the least outside of memory; None if none can fit.

        Tensors are computed again only where that costs less than to write and read them.
        """
        possible = [attempt for attempt in attempts if attempt.least <= limit]
        if not possible:
            return None
        best = min(possible, key=lambda attempt: attempt.cut.peak)
        cuts = [best.cut]
        if self.options.recompute == AUTO:
            cuts.append(self.recomputed(best.cut, limit, self.price_of_spilling))
        plans = []
        for cut in cuts:
            if cut.peak > limit:
                plan = self.describe(replace(cut, peak=limit), exact=False)
                # What leaves memory and comes back has memory of its own.
                spilled = cut.peak - limit
                plans.append(replace(plan, spilled=spilled, updatable={}, blocked=()))
        return min(plans, key=cost_of)

    @property
    def price_of_spilling(self) -> int:
        """The price of a byte of each rank that is written to disk and read again.

        Each is taken to cost as much as a byte that moves inside a node.
        """
        price = FLOPS_PER_BYTE if self.prices.machine is None else self.prices.inside
        return 2 * self.mesh.ranks * price

    def solve(self, price: int) -> Solution:
        """Return the states with the least time, or without a measured machine the fewest bytes.

        Computing the same on many ranks moves no bytes. So, where bytes are counted, repeated work
        gets a price as soon as there is much of it; where the search is not exact in any case, it
        has a price from the start.
        """
        bytes_only = self.is_default and not self.rates
        weigh_work = bytes_only and (not self.exact_axes or self.is_tangled)
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
            self.is_tangled,
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

    def cut_graph(self, found: States) -> CutGraph:
        """Return the graph with these cuts, in the order that needs least memory.

        It stays in the given order if no other one is found to need less. Tensors that are named
        in the options are computed again.
        """
        states, layouts = self.named(found)
        cut = CutGraph(self.graph, states, layouts)
        best = replace(cut, peak=self.peak(cut))
        for graph in orders_that_free_early(self.graph, self.constraints(states, layouts)):
            other = replace(cut, graph=graph)
            peak = self.peak(other)
            if peak < best.peak:
                best = replace(other, peak=peak)
        if isinstance(self.options.recompute, str):
            return best
        nbytes = self.constraints(states, layouts).nbytes
        splits = named_splits(best.graph, nbytes, self.options.recompute)
        if not splits:
            return best
        again = with_copies(best, splits, nbytes)
        return replace(again, peak=self.peak(again), peak_before=best.peak)

    def recomputed(self, cut: CutGraph, limit: int, highest_price: int | None = None) -> CutGraph:
        """Return the graph with tensors computed again, so that it fits into the limit if it can.

        Tensors that cost more than `highest_price` for each byte are not dropped.
        """
        nbytes = self.constraints(cut.states, cut.layouts).nbytes
        price = {}
        for name, bill in self.bills(cut).items():
            price[name] = bill.time
            if self.prices.machine is None:
                moved = BYTES.bytes(bill.nbytes, bill.between)
                price[name] = cut.graph[name].operations() + FLOPS_PER_BYTE * moved
        found = recomputed_to_fit(cut, limit, nbytes, price, self.memory, highest_price)
        return replace(found, peak_before=cut.peak)

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

    def peak(self, cut: CutGraph) -> int:
        """Return the peak memory of a rank."""
        return max(self.memory(cut))

    def memory(self, cut: CutGraph, early: Sequence[str] = ()) -> list[int]:
        """Return the memory of a rank before the first vertex and at each.

        The inputs in `early` are read from the start.
        """
        updatable = self.updatable(cut.graph, cut.states, cut.layouts)
        return bytes_at_vertices(
            cut.graph,
            self.mesh,
            cut.states,
            cut.layouts,
            self.resident,
            stage_of(self.options.memory),
            early,
            in_place=updatable.values() if self.options.donate else (),
            blocked=self.blocked(cut.graph, cut.states, cut.layouts, updatable),
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

    def least(self, cut: CutGraph) -> int:
        """Return the least memory in which these cuts can be carried out."""
        return least_bytes(cut.graph, self.mesh, cut.states, cut.layouts, self.resident)

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

    def bills(self, cut: CutGraph) -> dict[str, Bill]:
        """Return what each vertex costs."""
        symbols: dict[Name, tuple[int, ...]] = {}
        for name, state in cut.states.items():
            labels = cut.graph[name].computed_einsum.labels
            numbers = {label: number for number, label in enumerate((*labels, None))}
            symbols["vertex", name] = tuple(numbers[label] for label in state)
        for name, layout in cut.layouts.items():
            ndim = len(cut.graph[name].bound)
            symbols["tensor", name] = tuple(ndim if axis is None else axis for axis in layout)
        return bills(cut.graph, self.mesh, symbols, self.resident, tuple(cut.layouts), self.prices)

    def describe(self, cut: CutGraph, exact: bool) -> Plan:
        """Return the plan with these cuts; `exact` if the search has proven them best."""
        graph = cut.graph
        costs = self.bills(cut)
        words = sum(bill.words.total for bill in costs.values())
        # The certificate is about words: a plan with another objective is no lower bound.
        fewest_words = exact and self.mesh.nodes == 1 and not self.rates and not cut.copies
        bound = words
        if not fewest_words:
            bound = lower_bound_words(graph, self.mesh.ranks, self.resident)
        partitionings = self.partitionings
        if not partitionings or cut.copies:
            partitionings = {}
            for name, state in cut.states.items():
                einsum = graph[name].computed_einsum
                partitionings[name] = self.mesh.parts(state, einsum.labels)
        updatable = self.updatable(graph, cut.states, cut.layouts)
        return Plan(
            graph=graph,
            mesh=self.mesh,
            ranks=self.ranks,
            strategy=self.options.strategy,
            states=cut.states,
            layouts=cut.layouts,
            bills=costs,
            peak=cut.peak,
            kind="exact" if words == bound else "gap",
            lower_bound=bound,
            paper_cost=graph_cost(graph, partitionings),
            notes=self.notes,
            resident=self.resident,
            updatable=updatable,
            blocked=self.blocked(graph, cut.states, cut.layouts, updatable),
            nan_checked=self.options.nan_checked,
            donate=self.options.donate,
            memory=self.options.memory,
            nodes=self.options.nodes,
            uneven=self.options.uneven,
            machine=self.prices.machine,
            recomputed=_recomputed_part(cut, costs),
        )


def _recomputed_part(cut: CutGraph, costs: Mapping[str, Bill]) -> Recomputed | None:
    """Return what is computed again and what that costs; None if there is nothing."""
    if not cut.copies:
        return None
    return Recomputed(
        cut.dropped,
        cut.copies,
        operations=sum(cut.graph[copy].operations() for copy in cut.copies),
        nbytes=sum(costs[copy].nbytes for copy in cut.copies),
        peak_before=cut.peak_before,
    )


def cost_of(plan: Plan) -> int:
    """Return the time by the measured machine, or operations + FLOPS_PER_BYTE · bytes.

    Bytes that are kept outside of memory are written and read, each as if it moved.
    """
    copied = 2 * plan.spilled * plan.mesh.ranks
    bills_of_plan = plan.bills.values()
    if plan.machine is not None:
        return sum(bill.time for bill in bills_of_plan) + copied * plan.machine.inside
    moved: int = sum(BYTES.bytes(bill.nbytes, bill.between) for bill in bills_of_plan)
    operations = plan.graph.operations()
    return operations + FLOPS_PER_BYTE * (moved + copied)


def _memory_prices() -> Iterator[int]:
    """Yield rising prices of a byte of memory: first none, then eight times as much each time."""
    yield 0
    for exponent in range(0, 40, 3):
        yield 1 << exponent
