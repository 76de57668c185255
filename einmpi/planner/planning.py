"""The planning of one graph on one mesh: cuts are found, made to fit into memory, and described."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from einmpi.errors import InputError
from einmpi.graph.eingraph import EinGraph
from einmpi.planner.bounds import lower_bound_words
from einmpi.planner.cost_tables import States
from einmpi.planner.cut_search import CutSearch
from einmpi.planner.factor import Name
from einmpi.planner.mesh import Mesh
from einmpi.planner.moving import overlap
from einmpi.planner.moving.traffic import Bill, bills
from einmpi.planner.paper.costs import graph_cost
from einmpi.planner.plan import Options, Plan
from einmpi.planner.plan_data import Recomputed
from einmpi.planner.prices import BYTES, FLOPS_PER_BYTE
from einmpi.planner.saving_memory.cut_memory import CutMemory
from einmpi.planner.saving_memory.fuse import with_fused_chains
from einmpi.planner.saving_memory.order import orders_that_free_early
from einmpi.planner.saving_memory.recompute import (
    AUTO,
    CutGraph,
    named_splits,
    recomputed_to_fit,
    with_copies,
)
from einmpi.units import counted

CHEAP_SHARE = 100  # added costs below this share of all operations count as cheap: a hundredth
HIGHEST_USEFUL_PRICE = 1 << 20  # from here on memory is all that counts


@dataclass(frozen=True)
class _Attempt:
    """Cuts that do not fit into memory."""

    cut: CutGraph
    least: int  # bytes in which it can be done when everything possible is kept outside


@dataclass
class Planning:
    """One graph on one mesh."""

    graph: EinGraph
    mesh: Mesh
    ranks: int
    options: Options

    def __post_init__(self) -> None:
        self.search = CutSearch(self.graph, self.mesh, self.options)
        self.resident = self.search.resident
        self.prices = self.search.prices
        self.memory = CutMemory(self.graph, self.mesh, self.options, self.resident)
        # The graph whose bills were computed last, and these bills.
        self.last_bills: tuple[CutGraph, dict[str, Bill]] | None = None

    def plan(self) -> Plan:
        """Return the first plan that fits into memory while the price of memory rises.

        Where none does, return one that keeps some tensors outside of memory at times.
        """
        limit = self.options.memory
        bound = 0 if limit is None else self.memory.peak_bound()
        attempts: list[_Attempt] = []
        recomputing: list[Plan] = []  # plans that fit because they compute tensors again
        previous: States | None = None
        for price in _memory_prices():
            found = self.search.solve(price)
            is_new = found.states != previous
            if is_new:
                cut = self.cut_graph(found.states)
                if limit is not None and cut.chains:
                    bound = min(bound, self.memory.peak_bound(cut.inner))
            if limit is None or cut.peak <= limit:
                exact = found.exact and not price and not self.search.prescribed
                plan = self.overlapping(self.describe(cut, exact), limit)
                if limit is not None:
                    plan = self.reading_ahead(plan, limit)
                return min([plan, *recomputing], key=cost_of)
            if is_new:
                attempts.append(_Attempt(cut, self.memory.least(cut)))
            if is_new and self.options.recompute == AUTO:
                smaller = self.recomputed(cut, limit)
                if smaller.peak <= limit:
                    plan = self.overlapping(self.describe(smaller, False), limit)
                    recomputing.append(self.reading_ahead(plan, limit))
                    if self.is_cheap(recomputing[-1]):
                        break
            if limit < bound and (price or cut.peak == bound):
                # No plan fits, so a higher price would not help.
                spilling = self.spilling(limit, attempts)
                if spilling is not None:
                    return min([spilling, *recomputing], key=cost_of)
                if price and not self.resident:
                    break  # without resident inputs, cuts make little difference to the least
            if price > HIGHEST_USEFUL_PRICE and not is_new:
                break
            previous = found.states
        if recomputing:
            return min(recomputing, key=cost_of)
        assert limit is not None
        spilling = self.spilling(limit, attempts)
        if spilling is None:
            # Batches are taken off the limit before planning; the message counts as the user does.
            batches = bytes_of_batches(self.graph, self.ranks, self.options)
            least = min(attempt.least for attempt in attempts) + batches
            ranks = counted(self.mesh.ranks, "rank")
            expected = f"at least {least} bytes, or more ranks"
            if self.resident:
                # The price of memory does not tell inputs that stay from tensors that come and go,
                # so the search can miss plans that need less.
                expected = (
                    f"at least {least} bytes for the plans that were found, or more ranks "
                    "(with resident inputs, other strategies may need less)"
                )
            given = counted(limit + batches, "byte")
            what = f"no plan on {ranks} was found below {given} a rank"
            raise InputError("memory", what, expected)
        return spilling

    def is_cheap(self, plan: Plan) -> bool:
        """Return whether computing tensors again costs so little that other plans are not tried."""
        assert plan.recomputed is not None
        added = plan.recomputed.operations + FLOPS_PER_BYTE * plan.recomputed.nbytes
        return added * CHEAP_SHARE <= plan.graph.operations()

    def overlapping(self, plan: Plan, limit: int | None) -> Plan:
        """Return the plan with memory for computing while tensors move between nodes.

        Vertices for which the limit leaves too little are computed when everything has arrived.
        """
        if not self.options.overlap or plan.nodes == 1:
            return plan
        overlapped = []
        for name, bill in plan.bills.items():
            nbytes = bill.nbytes if plan.uneven else bill.between
            if nbytes // self.mesh.ranks >= overlap.PART_UNIT_BYTES:
                overlapped.append(name)
        cut = CutGraph(plan.graph, plan.states, plan.layouts, chains=plan.chains)
        names = [None, *(vertex.name for vertex in plan.graph.computed)]
        peak = plan.peak
        while overlapped:
            needed = self.memory.at_vertices(cut, overlapped=overlapped)
            peak = max(plan.peak, *needed)
            if limit is None or peak <= limit:
                break
            # Memory for a vertex is needed while that before it is computed, too.
            excessive = set()
            for number, nbytes in enumerate(needed):
                if nbytes > limit:
                    excessive.update(names[number : number + 2])
            overlapped = [name for name in overlapped if name not in excessive]
            peak = plan.peak
        return replace(
            plan,
            peak=peak,
            overlapped=tuple(overlapped),
            overlap=peak - plan.peak,
            files=self.options.files,
        )

    def reading_ahead(self, plan: Plan, limit: int) -> Plan:
        """Return the plan with the rest of the limit used for reading files ahead.

        At most, all files are read before the first vertex.
        """
        cut = CutGraph(plan.graph, plan.states, plan.layouts, chains=plan.chains)
        most = max(self.memory.at_vertices(cut, self.options.files)) + plan.overlap
        peak = max(plan.peak, min(limit, most))
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
                chains = self.memory.chains_that_fit(cut, limit)
                plans.append(
                    replace(plan, spilled=spilled, updatable={}, blocked=(), chains=chains)
                )
        return min(plans, key=cost_of)

    @property
    def price_of_spilling(self) -> int:
        """The price of a byte of each rank that is written to disk and read again.

        Each is taken to cost as much as a byte that moves inside a node.
        """
        price = FLOPS_PER_BYTE if self.prices.machine is None else self.prices.inside
        return 2 * self.mesh.ranks * price

    def cut_graph(self, found: States) -> CutGraph:
        """Return the graph with these cuts, in the order that needs least memory.

        It stays in the given order if no other one is found to need less. Tensors that are named
        in the options are computed again. Chains are fused where that needs no more memory.
        """
        states, layouts = self.search.named(found)
        cut = CutGraph(self.graph, states, layouts)
        best = replace(cut, peak=self.memory.peak(cut))
        for graph in orders_that_free_early(self.graph, self.memory.constraints(cut)):
            other = replace(cut, graph=graph)
            peak = self.memory.peak(other)
            if peak < best.peak:
                best = replace(other, peak=peak)
        if not isinstance(self.options.recompute, str):
            nbytes = self.memory.constraints(cut).nbytes
            splits = named_splits(best.graph, nbytes, self.options.recompute)
            if splits:
                again = with_copies(best, splits, nbytes)
                best = replace(again, peak=self.memory.peak(again), peak_before=best.peak)

        def bytes_moved_for(cut: CutGraph, names: Collection[str]) -> int:
            costs = self.bills(cut)
            return sum(costs[name].nbytes for name in names)

        return with_fused_chains(best, self.memory, self.options, bytes_moved_for)

    def recomputed(self, cut: CutGraph, limit: int, highest_price: int | None = None) -> CutGraph:
        """Return the graph with tensors computed again, so that it fits into the limit if it can.

        Tensors that cost more than `highest_price` for each byte are not dropped.
        """
        nbytes = self.memory.constraints(cut).nbytes
        price = {}
        for name, bill in self.bills(cut).items():
            price[name] = bill.time
            if self.prices.machine is None:
                moved = BYTES.bytes(bill.nbytes, bill.between)
                price[name] = cut.graph[name].operations() + FLOPS_PER_BYTE * moved
        found = recomputed_to_fit(cut, limit, nbytes, price, self.memory.at_vertices, highest_price)
        return replace(found, peak_before=cut.peak_before or cut.peak)

    def bills(self, cut: CutGraph) -> dict[str, Bill]:
        """Return what each vertex costs, whatever is fused."""
        if self.last_bills is not None:
            known, found = self.last_bills
            if (known.graph, known.states, known.layouts) == (cut.graph, cut.states, cut.layouts):
                return found
        symbols: dict[Name, tuple[int, ...]] = {}
        for name, state in cut.states.items():
            labels = cut.graph[name].computed_einsum.labels
            numbers = {label: number for number, label in enumerate((*labels, None))}
            symbols["vertex", name] = tuple(numbers[label] for label in state)
        for name, layout in cut.layouts.items():
            ndim = len(cut.graph[name].bound)
            symbols["tensor", name] = tuple(ndim if axis is None else axis for axis in layout)
        layouts = tuple(cut.layouts)
        found = bills(cut.graph, self.mesh, symbols, self.resident, layouts, self.prices)
        self.last_bills = cut, found
        return found

    def describe(self, cut: CutGraph, exact: bool) -> Plan:
        """Return the plan with these cuts; `exact` if the search has proven them best."""
        graph = cut.graph
        costs = self.bills(cut)
        words = sum(bill.words.total for bill in costs.values())
        # The certificate is about words: a plan with another objective is no lower bound.
        fewest_words = exact and self.mesh.nodes == 1 and not self.search.rates and not cut.copies
        bound = words
        if not fewest_words:
            bound = lower_bound_words(graph, self.mesh.ranks, self.resident)
        partitionings = self.search.partitionings
        if not partitionings or cut.copies:
            partitionings = {}
            for name, state in cut.states.items():
                einsum = graph[name].computed_einsum
                partitionings[name] = self.mesh.parts(state, einsum.labels)
        updatable = self.memory.updatable(graph, cut.states, cut.layouts)
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
            notes=self.search.notes,
            resident=self.resident,
            updatable=updatable,
            blocked=self.memory.blocked(cut, updatable),
            chains=cut.chains,
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


def bytes_of_batches(graph: EinGraph, ranks: int, options: Options) -> int:
    """Return the bytes of batched inputs that a rank has besides the memory of the plan."""
    names = [name for name in options.batched if name in graph.by_name]
    return sum(-(-graph[name].nbytes // ranks) for name in names)
