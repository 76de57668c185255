"""A plan and a rank → the rank's schedule. A block is a pure function of layout and rank: nobody has to be asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from einmpi.graph.eingraph import Vertex
from einmpi.graph.einsum import EinSum
from einmpi.planner.make_plan import Plan
from einmpi.planner.memory import operand_cuts, output_cuts
from einmpi.schedule.layout import PARTIAL, Cuts, Layout, split_further
from einmpi.schedule.memory import with_begins, with_frees
from einmpi.schedule.moves import middle_layout
from einmpi.schedule.regions import Region, Runs, length, locate, packed, share
from einmpi.schedule.schedule import SavePoint, Schedule
from einmpi.schedule.spill import with_spills
from einmpi.schedule.steps import (
    FINAL_LAYOUT,
    Exchange,
    Kernel,
    Load,
    Reduce,
    Slot,
    Step,
    Store,
    operand_role,
    slot_for,
)
from einmpi.schedule.transfers import Moves, Reduction
from einmpi.schedule.two_level import exchanges, reductions

_Ways = tuple[
    list[Reduction], list[Moves]
]  # the steps that bring a tensor from one layout to another


def lower(plan: Plan, rank: int) -> Schedule:
    """The schedule of one rank, without looking at those of others."""
    idle = rank >= plan.mesh.ranks
    lowering = _Lowering(plan, 0 if idle else rank)
    steps = with_frees(lowering.run())
    if plan.spilled:
        steps = with_spills(steps, limit=plan.peak)
    steps = with_begins(steps, limit=plan.peak)
    if idle:
        points = [replace(point, steps=0) for point in lowering.points]
        return Schedule(rank, plan.ranks, plan.digest, (), tuple(points))
    # Save points count the steps before those that manage memory were added.
    ends = [number for number, step in enumerate(steps) if not step.manages_memory]
    ends.append(len(steps))
    points = [replace(point, steps=ends[point.steps]) for point in lowering.points]
    return Schedule(rank, plan.ranks, plan.digest, tuple(steps), tuple(points))


@dataclass
class _Lowering:
    plan: Plan
    rank: int
    steps: list[Step] = field(default_factory=list)
    stored: dict[str, tuple[Slot, Cuts]] = field(
        default_factory=dict
    )  # where each tensor is, and its layout
    points: list[SavePoint] = field(default_factory=list)
    # Layers repeat: what was worked out for one is kept for the next.
    blocks: dict[tuple[tuple[int, ...], Cuts], Region] = field(default_factory=dict)
    moves: dict[tuple[tuple[int, ...], Cuts | None, Cuts], _Ways] = field(default_factory=dict)

    def run(self) -> list[Step]:
        graph = self.plan.graph
        for name in self.plan.resident:
            if graph.consumers[name]:
                self.load(graph[name], self.first_layout(name))
        for vertex in graph.computed:
            self.compute(vertex)
        return self.steps

    def first_layout(self, name: str) -> Cuts:
        """The layout in which an input is loaded: its own, or that of the one vertex that reads it."""
        own = self.plan.layouts.get(name)
        if own is not None:
            return own
        user = self.plan.graph.consumers[name][0]
        return operand_cuts(
            self.plan.graph, user, self.plan.graph[user].inputs.index(name), self.plan.states[user]
        )

    def layout(self, vertex: Vertex, cuts: Cuts) -> Layout:
        return Layout(self.plan.mesh, vertex.bound or (1,), cuts)

    def block(self, vertex: Vertex, cuts: Cuts) -> Region:
        if not vertex.bound:
            return ()
        key = vertex.bound, cuts
        if key not in self.blocks:
            self.blocks[key] = self.layout(vertex, cuts).region(self.plan.mesh.digits(self.rank))
        return self.blocks[key]

    # ---- inputs -----------------------------------------------------------------------------------------------------

    def load(self, vertex: Vertex, cuts: Cuts) -> None:
        """One rank loads an element, and it goes from there to others that want it; what is resident lies there."""
        slot = slot_for(vertex.name, self.block(vertex, cuts), vertex.dtype)
        self.stored[vertex.name] = slot, cuts
        wanted, digits = self.layout(vertex, cuts), self.plan.mesh.digits(self.rank)
        if vertex.name in self.plan.resident:
            region = wanted.region(digits)
            self.steps.append(Load(vertex.name, slot, region, packed(region), wanted, kept=True))
            return
        everywhere = [axis for axis, cut in enumerate(cuts) if cut is None]
        pieces = split_further(self.plan.mesh, wanted.bound, cuts, everywhere)
        piece = pieces.region(digits)
        place = tuple(
            locate(part, runs) for part, runs in zip(piece, wanted.region(digits), strict=True)
        )
        self.steps.append(Load(vertex.name, slot, piece, place, pieces))
        key = vertex.bound, None, cuts
        if key not in self.moves:
            first, *then = exchanges(wanted, pieces, wanted, self.rank)
            self.moves[key] = [], [replace(first, own=None), *then]
        if everywhere:
            moving = self.moves[key][1]
            self.steps += [
                Exchange(vertex.name, slot, slot, moves, self.plan.stage) for moves in moving
            ]

    # ---- computed tensors -------------------------------------------------------------------------------------------

    def compute(self, vertex: Vertex) -> None:
        graph, state = self.plan.graph, self.plan.states[vertex.name]
        einsum = vertex.einsum
        assert einsum is not None
        operands = [self.read(vertex, operand) for operand in range(len(vertex.inputs))]
        made = output_cuts(graph, vertex.name, state)
        slot = slot_for(vertex.name, self.block(vertex, made), vertex.dtype)
        self.steps.append(self.kernel(vertex, einsum, state, operands, slot))
        partial = [label is not None and label in einsum.aggregated for label in state]
        self.stored[vertex.name] = (
            slot,
            tuple(PARTIAL if p else cut for p, cut in zip(partial, made, strict=True)),
        )
        layout = self.plan.layouts.get(vertex.name)
        if layout is not None:
            final = self.move(vertex, layout, FINAL_LAYOUT)
            self.stored[vertex.name] = final, layout
        slot, cuts = self.stored[vertex.name]
        if vertex.name in graph.outputs:
            self.steps.append(Store(vertex.name, slot, self.block(vertex, cuts)))
        self.points.append(SavePoint(vertex.name, len(self.steps), slot, self.layout(vertex, cuts)))

    def read(self, user: Vertex, operand: int) -> Slot:
        """The slot with what a vertex needs of an operand."""
        vertex = self.plan.graph[user.inputs[operand]]
        wanted = operand_cuts(self.plan.graph, user.name, operand, self.plan.states[user.name])
        if vertex.name not in self.stored:
            self.load(vertex, self.first_layout(vertex.name))
        return self.move(vertex, wanted, operand_role(user.name, operand))

    def move(self, vertex: Vertex, target: Cuts, role: str) -> Slot:
        """Bring a tensor into a layout: aggregate partial results, then exchange."""
        slot, source = self.stored[vertex.name]
        if source == target:
            return slot
        key = vertex.bound, source, target
        if key not in self.moves:
            have, want = self.layout(vertex, source), self.layout(vertex, target)
            middle = middle_layout(self.plan.mesh, have.bound, source, target)
            stored = PARTIAL not in source
            self.moves[key] = (
                reductions(have, middle, self.rank),
                exchanges(have, middle, want, self.rank, stored),
            )
        reducing, moving = self.moves[key]
        for reduction in reducing:
            assert vertex.einsum is not None and vertex.einsum.aggregation is not None
            self.steps.append(
                Reduce(vertex.name, slot, vertex.einsum.aggregation, reduction, self.plan.stage)
            )
        made = slot_for(vertex.name, self.block(vertex, target), vertex.dtype, role)
        for moves in moving:
            self.steps.append(Exchange(vertex.name, slot, made, moves, self.plan.stage))
            slot = made  # what has arrived is passed on from there
        return made

    def kernel(
        self,
        vertex: Vertex,
        einsum: EinSum,
        state: Sequence[str | None],
        operands: Sequence[Slot],
        target: Slot,
    ) -> Kernel:
        runs = {label: self.share_of(label, extent, state) for label, extent in einsum.extents}
        local = replace(
            einsum, extents=tuple((label, length(runs[label])) for label in einsum.labels)
        )
        # A rank needs to know which indices its positions stand for where a label is a number.
        index = tuple((label, runs[label]) for label in einsum.labels_as_numbers if label in state)
        select = []
        for operand, entries in enumerate(einsum.operands):
            for dimension, entry in enumerate(entries):
                # A diagonal is cut along its first dimension; of the others every rank has all.
                if isinstance(entry, str) and entry in state and entries.index(entry) != dimension:
                    select.append((operand, dimension, runs[entry]))
        return Kernel(vertex.name, target, tuple(operands), local, index, tuple(select))

    def share_of(self, label: str, extent: int, state: Sequence[str | None]) -> Runs:
        digits = self.plan.mesh.digits(self.rank)
        return share(
            self.plan.mesh,
            extent,
            tuple((a, digits[a]) for a, cut in enumerate(state) if cut == label),
        )
