"""The plan of a graph whose cuts are found: what it moves, how good it is, what memory is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from einmpi.planner.cut_search import CutSearch
from einmpi.planner.lower_bound.words import lower_bound_words
from einmpi.planner.machine import BYTES, FLOPS_PER_BYTE
from einmpi.planner.moving import overlap
from einmpi.planner.moving.volume import Bill, bills, total_bill
from einmpi.planner.paper import graph_cost
from einmpi.planner.plan import Options, Plan
from einmpi.planner.plan_data import Recomputed, cuts_of
from einmpi.planner.saving_memory.cut_memory import CutMemory
from einmpi.planner.saving_memory.recompute import CutGraph


@dataclass
class Finishing:
    """Makes plans of the cuts that are found for one graph on one mesh."""

    search: CutSearch
    memory: CutMemory
    ranks: int
    options: Options
    # The graph whose bills were computed last, and these bills.
    last_bills: tuple[CutGraph, dict[str, Bill]] | None = None

    def __post_init__(self) -> None:
        self.mesh = self.search.mesh
        self.resident = self.search.resident
        self.prices = self.search.prices

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
        bound = words
        if not fewest_words:
            bound = lower_bound_words(graph, self.mesh.ranks, self.resident, words)
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
        names = [None, *(vertex.name for vertex in plan.graph.computed)]
        peak = plan.peak
        while overlapped:
            needed = self.memory.at_vertices(cuts_of(plan), overlapped=overlapped)
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
        most = max(self.memory.at_vertices(cuts_of(plan), self.options.files)) + plan.overlap
        peak = max(plan.peak, min(limit, most))
        return replace(plan, peak=peak, ahead=peak - plan.peak)


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
