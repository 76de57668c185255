"""The planning of one graph on one mesh: cuts are found and made to fit into memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from einmpi.errors import InputError
from einmpi.graph.eingraph import EinGraph
from einmpi.graph.forms.summed_blocks import with_summed_blocks
from einmpi.planner.factor import Factored
from einmpi.planner.grids import with_grids
from einmpi.planner.lower_bound.pieces import CUTS_OF_MESH, Bound, known_plan
from einmpi.planner.lower_bound.symmetric import bound_with_pairs
from einmpi.planner.lower_bound.words import best_lower_bound
from einmpi.planner.machine import BYTES, FLOPS_PER_BYTE
from einmpi.planner.mesh import Mesh
from einmpi.planner.moving import overlap
from einmpi.planner.moving.known_lists import with_aligned_labels
from einmpi.planner.moving.volume import Bill, bills, total_bill
from einmpi.planner.paper import graph_cost
from einmpi.planner.plan import AUTO, Options, Plan, Recomputed
from einmpi.planner.saving_memory.cut_memory import CutMemory, least_memory_states
from einmpi.planner.saving_memory.mixtures import Mixture, PricedCuts, searches_of
from einmpi.planner.saving_memory.recompute import (
    CutGraph,
    in_best_order,
    named_splits,
    recomputed_to_fit,
    with_copies,
    with_fused_chains,
)
from einmpi.planner.solving.solver import MEMORY_PRICE_SCALE, SharedTables
from einmpi.planner.states import States
from einmpi.planner.strategies import DEFAULT_STRATEGY, STRATEGIES
from einmpi.units import counted

CHEAP_SHARE = 100  # added costs below this share of all operations count as cheap: a hundredth
# Cuts are mixed if they are at most so many places apart in the order of what they move.
NEIGHBOURS = 3
NEIGHBOURS_OF_LARGE = 1  # of a graph with many vertices: its layers make small steps already
# A byte of memory is worth a sixteenth of a byte moved.
LOW_MEMORY_PRICE = MEMORY_PRICE_SCALE // 16


class TooLittleMemory(InputError):
    """No plan fits into the memory limit, not even one that keeps all it can outside of memory."""

    def __init__(self, ranks: int, limit: int, least: int, decoded: int = 0) -> None:
        what = (
            f"no plan on {counted(ranks, 'rank')} was found below {counted(limit, 'byte')} a rank"
        )
        hint = f"{decoded} of them decode a chunk of a file, which is done whole" if decoded else ""
        super().__init__("memory", what, f"at least {least} bytes, or more ranks", hint)
        self.least = least  # the lowest limit for which there is a plan


@dataclass
class Planning:
    """One graph on one mesh."""

    graph: EinGraph
    mesh: Mesh
    ranks: int
    options: Options
    tables: SharedTables = field(default_factory=SharedTables)

    def __post_init__(self) -> None:
        if self.options.strategy == DEFAULT_STRATEGY:
            self.graph = with_grids(self.graph, self.mesh)
        self.graph = with_aligned_labels(self.graph, self.mesh)
        if self.options.reproducible:
            self.graph = with_summed_blocks(self.graph)
        self.searches = searches_of(self.graph, self.mesh, self.options, self.tables)
        self.search = self.searches.search
        self.resident = self.search.resident
        self.prices = self.search.prices
        self.memory = CutMemory(self.graph, self.mesh, self.options, self.resident)
        # The graph whose bills were computed last, and these bills.
        self.last_bills: tuple[CutGraph, dict[str, Bill]] | None = None

    def plan(self) -> Plan:
        """Return the plan that moves least among those that fit into memory.

        Where none does, return one that computes tensors again or keeps some of them outside of
        memory at times.
        """
        limit = self.options.memory
        found = self.searches.first
        cut = self.cut_graph(found.states)
        if limit is None or cut.peak <= limit:
            exact = found.exact and not self.search.prescribed
            return self.finish(cut, limit, exact)
        attempts = [self.attempt(cut)]
        recomputing: list[Plan] = []  # plans that fit because they compute tensors again
        self.try_recomputing(cut, limit, recomputing)
        if recomputing and self.is_cheap(recomputing[0]):
            return recomputing[0]
        bound = self.memory.peak_bound()
        if cut.chains:
            bound = min(bound, self.memory.peak_bound(cut.inner))
        if limit < bound:
            # Every plan keeps something outside of memory. One that needs less is tried.
            if cut.peak > bound or attempts[0].least > limit:
                low = self.search.solve(LOW_MEMORY_PRICE).states
                problem = self.search.problem_at(LOW_MEMORY_PRICE)
                if self.search.named(low, problem) != self.search.named(found.states):
                    other = self.cut_graph(low, problem)
                    attempts.append(self.attempt(other))
                    self.try_recomputing(other, limit, recomputing)
        else:
            fitting = self.cheapest_that_fits(limit, attempts, recomputing)
            cuts = self.of_strategies(limit)
            if fitting is not None:
                cuts.insert(0, fitting)  # of equal ones, the first is taken
            if cuts:
                plans = [self.finish(each, limit, False) for each in cuts]
                return min([*plans, *recomputing], key=cost_of)
        spilling = self.spilling(limit, attempts)
        if spilling is not None and limit < bound:
            recomputing.append(spilling)
        if recomputing:
            return min(recomputing, key=cost_of)
        return spilling or self.with_least_memory(limit, attempts)

    def attempt(self, cut: CutGraph) -> CutGraph:
        """Return cuts that do not fit into memory with the least memory in which they can be done.

        Everything possible is then kept outside, unless they need less with nothing outside.
        """
        return replace(cut, least=min(cut.peak, self.memory.least(cut)))

    def try_recomputing(self, cut: CutGraph, limit: int, recomputing: list[Plan]) -> None:
        """Add the plan with these cuts that fits because tensors are computed again, if any."""
        # Resident inputs are not computed, so that they must fit in any case.
        if self.options.recompute == AUTO and self.memory.staying(cut) <= limit:
            smaller = self.recomputed(cut, limit)
            if smaller.peak <= limit:
                recomputing.append(self.finish(smaller, limit, False))

    def cheapest_that_fits(
        self, limit: int, attempts: list[CutGraph], recomputing: list[Plan]
    ) -> CutGraph | None:
        """Return the cuts that move least among those that fit into memory.

        Candidates are the best cuts at each price of memory and mixtures of them. They do not
        depend on the limit, so that more memory never moves more. Cuts that do not fit are added to
        the attempts.
        """
        priced = self.searches.priced
        for number, each in enumerate(priced):
            if each.resident_bytes > limit:
                continue
            cut = self.cut_of(each, attempts)
            if cut.peak <= limit:
                return self.mixture_that_fits(number, cut, limit) or cut
            if cut is not attempts[0]:
                attempts.append(self.attempt(cut))
                self.try_recomputing(cut, limit, recomputing)
        return None

    def mixture_that_fits(self, first: int, first_cut: CutGraph, limit: int) -> CutGraph | None:
        """Return the mixture that moves least among those that fit; None if there is none.

        `first` is the number of the first cuts that fit, in the order of what they move. A mixture
        is one of cuts that do not fit and of others that do. It is taken to need as much memory
        beside resident inputs as the latter, which saves looking at many that will not fit.
        """
        if not self.resident:
            return None
        priced = self.searches.priced
        reach = NEIGHBOURS_OF_LARGE if self.search.is_large else NEIGHBOURS
        candidates: list[Mixture] = []
        for number, dear in enumerate(priced[first : first + reach], first):
            cut = first_cut
            if number > first:
                cut = self.cut_graph(dear.states, self.searches.problem)
            transient = cut.peak - dear.resident_bytes
            if cut.peak > limit:
                continue
            for cheap in priced[max(0, number - reach) : first]:
                for mixture in self.searches.between(cheap, dear):
                    if mixture.resident_bytes + transient <= limit:
                        candidates.append(mixture)
        candidates.sort(key=lambda mixture: mixture.cost)
        for mixture in candidates:
            if mixture.cost >= priced[first].cost:
                break
            states = self.searches.states(mixture)
            cut = self.cut_graph(states, self.searches.problem)
            if cut.peak <= limit:
                return cut
        return None

    def of_strategies(self, limit: int) -> list[CutGraph]:
        """Return the cuts of other strategies that fit into memory, where they are soon found.

        A price of memory leads to few of all cuts that trade bytes for memory, so that another
        strategy may have better ones. Those that repeat much work are left out.
        """
        search = self.search
        is_quick = search.small or (search.exact_axes and not search.is_large)
        if not search.is_default or not is_quick:
            return []
        found = []
        for name in STRATEGIES:
            if name == DEFAULT_STRATEGY:
                continue
            try:
                other = Planning(
                    self.graph, self.mesh, self.ranks, replace(self.options, strategy=name)
                )
                states = other.searches.first.states
            except InputError:
                continue  # the strategy asks for roles that are not given
            if not other.search.repeats_work(states, 0):
                cut = other.cut_graph(states)
                if cut.peak <= limit:
                    found.append(cut)
        return found

    def cut_of(self, priced: PricedCuts, attempts: Sequence[CutGraph]) -> CutGraph:
        """Return the graph with the best cuts at a price; the first attempt had no price."""
        if priced is self.searches.without_price:
            return attempts[0]
        return self.cut_graph(priced.states, self.searches.problem)

    def with_least_memory(self, limit: int, attempts: Sequence[CutGraph]) -> Plan:
        """Return a plan that keeps all it can outside of memory, or refuse the limit.

        It is refused only if the cuts that need least memory do not fit either.
        """
        cut = self.cut_graph(least_memory_states(self.search))
        last = self.attempt(cut)
        least = min(attempt.least for attempt in (*attempts, last))
        if least > limit:
            # These are taken off the limit before planning; the message counts as the user does.
            besides = bytes_besides(self.graph, self.ranks, self.options)
            raise TooLittleMemory(
                self.mesh.ranks, limit + besides, least + besides, self.options.decoded
            )
        plan: Plan | None = None
        if self.resident:
            fewer_bytes = []
            for priced in self.searches.priced:
                if priced.resident_bytes <= limit:
                    fewer_bytes.append(self.attempt(self.cut_of(priced, attempts)))
            plan = self.spilling(limit, fewer_bytes)
        plan = plan or self.spilling(limit, [last])
        assert plan is not None, "these cuts fit into the limit"
        return plan

    def is_cheap(self, plan: Plan) -> bool:
        """Return whether computing tensors again costs so little that other plans are not tried."""
        assert plan.recomputed is not None
        added = plan.recomputed.operations + FLOPS_PER_BYTE * plan.recomputed.nbytes
        return added * CHEAP_SHARE <= plan.graph.operations()

    def spilling(self, limit: int, attempts: Sequence[CutGraph]) -> Plan | None:
        """Return the plan that fits with the least outside of memory; None if none can fit.

        Tensors are computed again only where that costs less than to write and read them.
        """
        possible = [attempt for attempt in attempts if attempt.least <= limit]
        if not possible:
            return None
        best = min(possible, key=lambda attempt: attempt.peak)
        cuts = [best]
        if self.options.recompute == AUTO:
            cuts.append(self.recomputed(best, limit, self.price_of_spilling))
        plans = []
        for cut in cuts:
            if cut.peak <= limit:  # as those may that need least memory, or compute tensors again
                plans.append(self.finish(cut, limit, False))
                continue
            plan = self.describe(replace(cut, peak=limit), exact=False)
            # What leaves memory and comes back has memory of its own.
            spilled = cut.peak - limit
            chains = self.memory.chains_that_fit(cut, limit)
            plans.append(replace(plan, spilled=spilled, updatable={}, blocked=(), chains=chains))
        return min(plans, key=cost_of)

    @property
    def price_of_spilling(self) -> int:
        """The price of a byte of each rank that is written to disk and read again.

        Each is taken to cost as much as a byte that moves inside a node.
        """
        price = FLOPS_PER_BYTE if self.prices.machine is None else self.prices.inside
        return 2 * self.mesh.ranks * price

    def cut_graph(self, found: States, problem: Factored | None = None) -> CutGraph:
        """Return the graph with these cuts, in the order that needs least memory.

        `problem` is the one that the states belong to, if that is not the one of the search.
        It stays in the given order if no other one is found to need less. Tensors that are named
        in the options are computed again. Chains are fused where that needs no more memory.
        """
        states, layouts = self.search.named(found, problem)
        cut = CutGraph(self.graph, self.mesh, states, layouts, orders=self.search.orders)
        best = in_best_order(cut, self.memory, limit=0)
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

    # ---- the plan of cuts that are found ---------------------------------------------------------

    def finish(self, cut: CutGraph, limit: int | None, exact: bool) -> Plan:
        """Return the plan with these cuts, which fit into memory."""
        plan = self.overlapping(self.describe(cut, exact), limit)
        return plan if limit is None else self.reading_ahead(plan, limit)

    def bills(self, cut: CutGraph) -> dict[str, Bill]:
        """Return what each vertex costs, whatever is fused."""
        if self.last_bills is not None:
            known, found = self.last_bills
            if (known.graph, known.states, known.layouts) == (cut.graph, cut.states, cut.layouts):
                return found
        found = bills(cut, self.resident, self.prices)
        self.last_bills = cut, found
        return found

    def describe(self, cut: CutGraph, exact: bool) -> Plan:
        """Return the plan with these cuts; `exact` if the search has proven them best."""
        graph = cut.graph
        costs = self.bills(cut)
        words = total_bill(costs.values()).words.total
        # The certificate is about words: a plan with another objective is no lower bound.
        counts_bytes = self.mesh.nodes == 1 and self.prices.machine is None
        fewest_words = exact and counts_bytes and not cut.copies
        bound = Bound(words, CUTS_OF_MESH)
        if not fewest_words:
            known = known_plan(cut, words, self.options.memory, self.options.carry)
            bound = best_lower_bound(
                graph, self.mesh.ranks, self.resident, known, self.search.is_default
            )
        bound = bound_with_pairs(graph, self.mesh.ranks, self.resident, bound)
        partitionings = self.search.partitionings
        if not partitionings or cut.copies:
            partitionings = {}
            for name, state in cut.states.items():
                einsum = graph[name].computed_einsum
                partitionings[name] = self.mesh.parts(state, einsum.labels)
        updatable = self.memory.updatable(cut)
        return Plan(
            graph=graph,
            mesh=self.mesh,
            ranks=self.ranks,
            strategy=self.options.strategy,
            states=cut.states,
            layouts=cut.layouts,
            orders=cut.orders,
            bills=costs,
            peak=cut.peak,
            kind="exact" if words == bound.words else "gap",
            lower_bound=bound.words,
            among=bound.among,
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

    def overlapping(self, plan: Plan, limit: int | None) -> Plan:
        """Return the plan with memory for computing while tensors move between nodes.

        Vertices for which the limit leaves too little are computed when everything has arrived.
        """
        if not self.options.overlap or plan.nodes == 1:
            return plan
        overlapped = []
        for name, bill in plan.bills.items():
            nbytes = bill.nbytes if plan.uneven else bill.between
            is_once = not plan.graph[name].has_steps
            if is_once and nbytes // self.mesh.ranks >= overlap.PART_UNIT_BYTES:
                overlapped.append(name)
        names = [None, *(vertex.name for vertex in plan.graph.computed)]
        peak = plan.peak
        while overlapped:
            needed = self.memory.at_vertices(plan, overlapped=overlapped)
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
        most = max(self.memory.at_vertices(plan, self.options.files)) + plan.overlap
        peak = max(plan.peak, min(limit, most))
        return replace(plan, peak=peak, ahead=peak - plan.peak)


def bytes_besides(graph: EinGraph, ranks: int, options: Options) -> int:
    """Return the bytes that a rank has besides the memory of the plan: batches, a chunk."""
    names = [name for name in options.batched if name in graph.by_name]
    return options.decoded + sum(-(-graph[name].nbytes // ranks) for name in names)


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
    if plan.machine is not None:
        return price_of(plan) + copied * plan.machine.inside
    return plan.graph.operations() + FLOPS_PER_BYTE * (price_of(plan) + copied)


def price_of(plan: Plan) -> int:
    """Return what a plan minimises: time by the measured machine, or bytes that move."""
    if plan.machine is not None:
        return plan.total.time
    price: int = BYTES.bytes(plan.total.nbytes, plan.total.between)
    return price
