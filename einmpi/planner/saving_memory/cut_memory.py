"""The memory that a rank needs for a graph with given cuts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from einmpi.graph.eingraph import EinGraph
from einmpi.planner.chains.find import ChainSearch
from einmpi.planner.chains.record import FusedChain
from einmpi.planner.donation import blocked_products, updatable_in_place
from einmpi.planner.memory import (
    Labels,
    Layouts,
    block_bytes,
    operand_cuts,
    output_cuts,
    stage_of,
)
from einmpi.planner.mesh import Mesh
from einmpi.planner.peak_memory import bytes_at_vertices, input_bytes, peak_bound
from einmpi.planner.plan import Options
from einmpi.planner.saving_memory.least_bytes import least_bytes
from einmpi.planner.saving_memory.order import Constraints, other_orders
from einmpi.planner.saving_memory.recompute import CutGraph


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

    def constraints(self, cut: CutGraph) -> Constraints:
        """Return what the order of vertices has to respect, and the memory of each tensor."""
        states = cut.states
        layouts = cut.layouts
        without_own = cut.inner.union(self.resident)
        updatable = self.updatable(self.graph, states, layouts)
        updates = {output: name for name, output in updatable.items()}
        nbytes = {}
        for vertex in cut.graph.vertices:
            cuts = layouts.get(vertex.name)
            takes_none = vertex.name in without_own
            if vertex.name in updates:
                takes_none = self.options.donate
            if cuts is None and vertex.is_input:
                takes_none = True  # it is there for its only reader
            elif cuts is None:
                cuts = output_cuts(cut.graph, vertex.name, states[vertex.name])
            nbytes[vertex.name] = 0
            if cuts is not None and not takes_none:
                nbytes[vertex.name] = block_bytes(vertex, self.mesh, cuts)
        return Constraints(nbytes, updates, self.options.nan_checked, self.options.first)

    def peak(self, cut: CutGraph) -> int:
        """Return the peak memory of a rank."""
        return max(self.at_vertices(cut))

    def at_vertices(
        self, cut: CutGraph, early: Sequence[str] = (), overlapped: Collection[str] = ()
    ) -> list[int]:
        """Return the memory of a rank before the first vertex and at each.

        The inputs in `early` are read from the start. The vertices in `overlapped` are computed
        while tensors move.
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
            blocked=self.blocked(cut, updatable),
            chains=cut.chains,
            overlapped=overlapped,
        )

    def staying(self, cut: CutGraph) -> int:
        """Return the bytes of resident inputs, which a rank has all the time."""
        inputs = input_bytes(cut.graph, self.mesh, cut.states, cut.layouts, self.resident)
        return sum(inputs.values())

    def least(self, cut: CutGraph) -> int:
        """Return the least memory in which these cuts can be carried out."""
        return least_bytes(cut.graph, self.mesh, cut.states, cut.layouts, self.resident)

    def updatable(self, graph: EinGraph, states: Labels, layouts: Layouts) -> dict[str, str]:
        """Return the inputs that can be updated in place, each with the output that it becomes."""
        return updatable_in_place(
            graph, self.mesh, states, layouts, self.options.carry, self.options.nan_checked
        )

    def blocked(self, cut: CutGraph, updatable: Mapping[str, str]) -> tuple[str, ...]:
        """Return the vertices that are computed block by block, together with the next one."""
        found = blocked_products(
            cut.graph, self.mesh, cut.states, cut.layouts, self.resident, updatable
        )
        in_chains = cut.in_chains
        return tuple(name for name in found if name not in in_chains)

    def chain_search(self, cut: CutGraph) -> ChainSearch:
        """Return the search for chains. An update in place belongs to none."""
        return ChainSearch(
            cut.graph,
            self.mesh,
            cut.states,
            cut.layouts,
            self.options.chain_bytes,
            excluded={*self.options.carry.values(), *self.options.first},
        )

    def chains_that_fit(self, cut: CutGraph, limit: int) -> tuple[FusedChain, ...]:
        """Return the chains that can be computed in memory when everything else is outside."""
        staying = self.staying(cut)
        found = []
        for chain in cut.chains:
            if staying + self._slots_of(chain, cut) + chain.nbytes <= limit:
                found.append(chain)
        return tuple(found)

    def _slots_of(self, chain: FusedChain, cut: CutGraph) -> int:
        """Return the bytes of all that a chain reads and writes."""
        graph = cut.graph
        total = 0
        for name in chain.outer:
            total += block_bytes(graph[name], self.mesh, output_cuts(graph, name, cut.states[name]))
        slots = set()
        for name in chain.vertices:
            for operand, tensor in enumerate(graph[name].inputs):
                if tensor not in chain.vertices:
                    cuts = operand_cuts(graph, name, operand, cut.states[name])
                    slots.add((tensor, cuts))
        for tensor, cuts in slots:
            total += block_bytes(graph[tensor], self.mesh, cuts)
            if tensor in cut.layouts:  # with halos, it may be read where it is stored
                total += block_bytes(graph[tensor], self.mesh, cut.layouts[tensor])
        return total
