"""The memory that a rank needs for a graph with given cuts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from einmpi.graph.eingraph import EinGraph
from einmpi.planner.donation import blocked_products, updatable_in_place
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
from einmpi.planner.plan import Options
from einmpi.planner.saving_memory.order import Constraints, orders_that_free_early
from einmpi.planner.saving_memory.recompute import CutGraph


@dataclass(frozen=True)
class CutMemory:
    """The memory of a rank on one mesh, for any cuts and any order of a graph's vertices."""

    graph: EinGraph
    mesh: Mesh
    options: Options
    resident: tuple[str, ...]  # inputs that are already where they are needed

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
        return max(self.at_vertices(cut))

    def at_vertices(self, cut: CutGraph, early: Sequence[str] = ()) -> list[int]:
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

    def least(self, cut: CutGraph) -> int:
        """Return the least memory in which these cuts can be carried out."""
        return least_bytes(cut.graph, self.mesh, cut.states, cut.layouts, self.resident)

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
