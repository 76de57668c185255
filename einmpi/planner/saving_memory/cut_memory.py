"""The memory that a rank needs for a graph with given cuts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from einmpi.graph.eingraph import EinGraph
from einmpi.planner.chains.find import ChainSearch
from einmpi.planner.chains.record import FusedChain
from einmpi.planner.donation import blocked_products, updatable_in_place
from einmpi.planner.memory import Cuts, stage_of
from einmpi.planner.mesh import Mesh
from einmpi.planner.peak_memory import bytes_at_vertices, input_bytes, peak_bound
from einmpi.planner.plan import Options
from einmpi.planner.saving_memory.least_bytes import least_bytes
from einmpi.planner.saving_memory.order import Constraints, other_orders


@dataclass(frozen=True)
class CutMemory:
    """The memory of a rank on one mesh, for any cuts and any order of a graph's vertices."""

    graph: EinGraph
    mesh: Mesh
    options: Options
    resident: tuple[str, ...]  # inputs that are already where they are needed

    def peak_bound(self, inner: Collection[str] = ()) -> int:
        """Return what no plan is expected to stay below, whatever the order of vertices.

        `inner` are the tensors inside of chains.
        """
        without_memory = set(inner)
        if self.options.donate:
            without_memory.update(self.options.carry.values())
        resident = frozenset(self.resident)
        nbytes = {}
        for vertex in self.graph.vertices:
            takes_none = vertex.name in resident or vertex.name in without_memory
            nbytes[vertex.name] = 0 if takes_none else -(-vertex.nbytes // self.mesh.ranks)
        constraints = Constraints(nbytes, first=self.options.first)
        bounds = []
        for graph in (self.graph, *other_orders(self.graph, constraints)):
            bounds.append(peak_bound(graph, self.mesh.ranks, self.resident, without_memory))
        return min(bounds)

    def constraints(self, cut: Cuts) -> Constraints:
        """Return what the order of vertices has to respect, and the memory of each tensor."""
        without_own = cut.inner.union(self.resident)
        updatable = self.updatable(replace(cut, graph=self.graph))
        updates = {output: name for name, output in updatable.items()}
        nbytes = {}
        for vertex in cut.graph.vertices:
            cuts = cut.layouts.get(vertex.name)
            takes_none = vertex.name in without_own
            if vertex.name in updates:
                takes_none = self.options.donate
            if cuts is None and vertex.is_input:
                takes_none = True  # it is there for its only reader
            elif cuts is None:
                cuts = cut.made(vertex.name)
            nbytes[vertex.name] = 0
            if cuts is not None and not takes_none:
                nbytes[vertex.name] = cut.block_bytes(vertex.name, cuts)
        return Constraints(nbytes, updates, self.options.nan_checked, self.options.first)

    def peak(self, cut: Cuts) -> int:
        """Return the peak memory of a rank."""
        return max(self.at_vertices(cut))

    def at_vertices(
        self, cut: Cuts, early: Sequence[str] = (), overlapped: Collection[str] = ()
    ) -> list[int]:
        """Return the memory of a rank before the first vertex and at each.

        The inputs in `early` are read from the start. The vertices in `overlapped` are computed
        while tensors move.
        """
        updatable = self.updatable(cut)
        return bytes_at_vertices(
            cut,
            self.resident,
            stage_of(self.options.memory),
            early,
            in_place=updatable.values() if self.options.donate else (),
            blocked=self.blocked(cut, updatable),
            overlapped=overlapped,
        )

    def staying(self, cut: Cuts) -> int:
        """Return the bytes of resident inputs, which a rank has all the time."""
        return sum(input_bytes(cut, self.resident).values())

    def least(self, cut: Cuts) -> int:
        """Return the least memory in which these cuts can be carried out."""
        return least_bytes(cut, self.resident)

    def updatable(self, cut: Cuts) -> dict[str, str]:
        """Return the inputs that can be updated in place, each with the output that it becomes."""
        return updatable_in_place(cut, self.options.carry, self.options.nan_checked)

    def blocked(self, cut: Cuts, updatable: Mapping[str, str]) -> tuple[str, ...]:
        """Return the vertices that are computed block by block, together with the next one."""
        found = blocked_products(cut, self.resident, updatable)
        in_chains = cut.in_chains
        return tuple(name for name in found if name not in in_chains)

    def chain_search(self, cut: Cuts) -> ChainSearch:
        """Return the search for chains. An update in place belongs to none."""
        excluded = {*self.options.carry.values(), *self.options.first}
        return ChainSearch(cut, self.options.chain_bytes, excluded)

    def chains_that_fit(self, cut: Cuts, limit: int) -> tuple[FusedChain, ...]:
        """Return the chains that can be computed in memory when everything else is outside."""
        staying = self.staying(cut)
        found = []
        for chain in cut.chains:
            if staying + _slots_of(chain, cut) + chain.nbytes <= limit:
                found.append(chain)
        return tuple(found)


def _slots_of(chain: FusedChain, cut: Cuts) -> int:
    """Return the bytes of all that a chain reads and writes."""
    total = sum(cut.block_bytes(name, cut.made(name)) for name in chain.outer)
    slots = set()
    for name in chain.vertices:
        for operand, tensor in enumerate(cut.graph[name].inputs):
            if tensor not in chain.vertices:
                slots.add((tensor, cut.wanted(name, operand)))
    for tensor, cuts in slots:
        total += cut.block_bytes(tensor, cuts)
        if tensor in cut.layouts:  # with halos, it may be read where it is stored
            total += cut.block_bytes(tensor, cut.layouts[tensor])
    return total
