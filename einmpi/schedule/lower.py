"""From a plan to the schedule of one rank. The block of a rank follows from layout and rank alone,
so that every rank lowers the plan for itself."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from einmpi.caches import bounded_cache
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.eingraph import Recurrence, Vertex
from einmpi.graph.einsum import EinSum
from einmpi.graph.matrices import ROWS
from einmpi.graph.scalar import Arg, IndexEntries, Scalar, rebuild
from einmpi.planner.memory import FusedChain, NumberedList
from einmpi.planner.mesh import Extent, Mesh
from einmpi.planner.moving.halo import Needed
from einmpi.planner.plan import Plan
from einmpi.schedule.compute import Compute, Kernel, fused
from einmpi.schedule.halo import halo_moves, index_in_region, select_in_region
from einmpi.schedule.layout import PARTIAL, Cuts, Layout, axes_that_cut, split_further
from einmpi.schedule.memory import repeat
from einmpi.schedule.moves import middle_layout
from einmpi.schedule.panels.functions import steps_on_grid
from einmpi.schedule.panels.grid import Piece
from einmpi.schedule.passes import LOWERING_PASSES, Context, run_passes
from einmpi.schedule.regions import (
    FINAL_LAYOUT,
    Region,
    Runs,
    Slot,
    length,
    locate,
    operand_role,
    packed,
    share,
    slot_for,
)
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Load, Numbers, Reuse, SavePoint, Step, Store, Transfer, numbered
from einmpi.schedule.transfers import Moves
from einmpi.schedule.two_level import exchanges, reductions

# The schedule of rank 0 for Z[i,k] = sum(A[i,j] * B[j,k]) on two ranks, which share the rows of A
# and Z and both need all of B. Each loads one half of B and sends it to the other:
#
#     load      A[32, 4] ← [0:32, 0:4] of A
#     load      B[4, 4] ← [0:2, 0:4] of B
#     exchange  B[4, 4] → B[4, 4] among 2 ranks, 64 B received
#     kernel    Z[32, 4] ← Σ[j](A[i,j] × B[j,k])
#     free      A[32, 4]
#     free      B[4, 4]
#     store     Z[32, 4] → [0:32, 0:4] of Z


def lower(plan: Plan, rank: int) -> Schedule:
    """Return the schedule of one rank, without looking at the schedules of others."""
    idle = rank >= plan.mesh.ranks
    lowering = _Lowering(plan, 0 if idle else rank)
    lowering.add_steps()
    steps = lowering.steps
    if idle:
        points = [point for _, point in numbered(steps, SavePoint)]
        return Schedule(rank, plan.ranks, plan.digest, tuple(points))
    schedule = Schedule(
        rank,
        plan.ranks,
        plan.digest,
        tuple(steps),
        updates=tuple(lowering.updates()),
        may_share=not plan.overlapped
        and not plan.spilled
        and not any(vertex.has_steps for vertex in plan.graph.computed),
    )
    reuses = lowering.reuses() if plan.donate else []
    schedule = run_passes(schedule, LOWERING_PASSES, Context(plan, reuses))
    return replace(schedule, lowered_steps=schedule.steps)


def arrival_layout(plan: Plan, name: str) -> Layout:
    """Return which rank reads which elements of an input, before copies are sent to others.

    A resident input is read by all ranks that need it, any other by one rank each.
    """
    bound = plan.graph[name].bound or (1,)
    cuts = plan.loaded(name)
    if name in plan.resident:
        return _layout(plan.mesh, bound, cuts, plan.orders_of(name))
    return _pieces(plan.mesh, bound, cuts, plan.orders_of(name))


def result_layout(plan: Plan, name: str) -> Layout:
    """Return which rank has which elements of a tensor in the layout that the plan gives it."""
    bound = plan.graph[name].bound
    return Layout(plan.mesh, bound, plan.layouts[name], (), plan.orders_of(name))


# All ranks have the same layouts. A process that lowers a plan for many ranks makes them once.


@bounded_cache(1024)
def _layout(mesh: Mesh, bound: tuple[int, ...], cuts: Cuts, orders: tuple[int, ...]) -> Layout:
    return Layout(mesh, bound, cuts, (), orders)


@bounded_cache(1024)
def _pieces(mesh: Mesh, bound: tuple[int, ...], cuts: Cuts, orders: tuple[int, ...]) -> Layout:
    """Return the layout of a tensor whose replicas have different pieces of it."""
    return split_further(mesh, bound, cuts, axes_that_cut(cuts, None), orders=orders)


def vertices_while_dropped(plan: Plan) -> frozenset[str]:
    """Return the vertices after which a dropped tensor, or a copy of one, is still needed.

    A checkpoint after one of them would lack the tensor: it has tensors of the program only, and
    only those that the program still reads. What only copies read from then on is missing, too.
    """
    if plan.recomputed is None:
        return frozenset()
    graph = plan.graph
    position = graph.position
    copies = plan.recomputed.copies
    names = []
    for copy, tensor in copies.items():
        start = position[copy]
        if tensor in plan.recomputed.tensors:
            start = max(position[reader] for reader in graph.consumers[tensor])
        end = max(position[reader] for reader in graph.consumers[copy])
        names += [vertex.name for vertex in graph.vertices[start:end]]
        for name in graph[copy].inputs:
            if not graph[name].is_input and not graph.is_output(name):
                readers = [
                    position[reader] for reader in graph.consumers[name] if reader not in copies
                ]
                last = max(readers, default=end)
                names += [vertex.name for vertex in graph.vertices[last : position[copy]]]
    return frozenset(names)


# Extents of a tensor and the orders of their digits.
_Kind = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass
class _Lowering:
    """Collects the steps of one rank, vertex by vertex."""

    plan: Plan
    rank: int
    steps: list[Step] = field(default_factory=list)
    # The vertices after which a tensor is missing that is computed again, or its copy is there.
    while_dropped: frozenset[str] = frozenset()
    # The slot of each tensor so far, and the layout in which the tensor is there.
    stored: dict[str, tuple[Slot, Cuts]] = field(default_factory=dict)
    # Layers repeat: blocks and moves are worked out once and used again.
    blocks: dict[tuple[_Kind, Cuts], Region] = field(default_factory=dict)
    load_moves: dict[tuple[_Kind, Cuts], list[Moves]] = field(default_factory=dict)
    halos: dict[tuple[Needed, Cuts, tuple[str | None, ...]], tuple[Moves | None, Region]] = field(
        default_factory=dict
    )
    moves: dict[tuple[_Kind, Cuts, Cuts, tuple[int, ...]], tuple[list[Moves], list[Moves]]] = field(
        default_factory=dict
    )

    def add_steps(self) -> None:
        graph = self.plan.graph
        self.while_dropped = vertices_while_dropped(self.plan)
        for name in self.plan.resident:
            if graph.consumers[name] and self.plan.is_loaded(name):
                self.load(graph[name], self.plan.loaded(name))
        chain_of = {}
        for each in self.plan.chains:
            for name in each.vertices:
                chain_of[name] = each
        for vertex in graph.computed:
            chain = chain_of.get(vertex.name)
            if vertex.recurrence is not None:
                if vertex is graph.members[vertex.recurrence][0]:
                    self.lower_recurrence(vertex.recurrence)
            elif vertex.computed_einsum.matrix is not None:
                if not vertex.computed_with:
                    self.lower_matrix(vertex)
            elif chain is None:
                self.steps.append(Compute((self.lower_kernel(vertex),)))
                self.complete(vertex, inside=False)
            elif vertex.name == chain.vertices[0]:
                self.lower_chain(chain)

    def layout(self, vertex: Vertex, cuts: Cuts) -> Layout:
        return _layout(self.plan.mesh, vertex.bound or (1,), cuts, self.plan.orders_of(vertex.name))

    def kind(self, vertex: Vertex) -> _Kind:
        """Return what the blocks of a tensor depend on, besides its cuts."""
        return vertex.bound, self.plan.orders_of(vertex.name)

    def block(self, vertex: Vertex, cuts: Cuts) -> Region:
        """Return the elements of a tensor that this rank holds."""
        if not vertex.bound:
            return ()
        key = self.kind(vertex), cuts
        if key not in self.blocks:
            self.blocks[key] = self.layout(vertex, cuts).region(self.plan.mesh.digits(self.rank))
        return self.blocks[key]

    # ---- inputs ---------------------------------------------------------------------------------

    def load(self, vertex: Vertex, cuts: Cuts) -> None:
        """Load an input: each element is read by one rank, which sends it to others that need it.

        A resident input is already on all ranks that need it.
        """
        slot = slot_for(vertex.name, self.block(vertex, cuts), vertex.dtype)
        self.stored[vertex.name] = slot, cuts
        digits = self.plan.mesh.digits(self.rank)
        wanted = self.layout(vertex, cuts)
        block = wanted.region(digits)
        if vertex.name in self.plan.resident:
            overwritten = vertex.name in self.plan.in_place
            place = packed(block)
            self.steps.append(Load(vertex.name, slot, block, place, wanted, True, overwritten))
            return
        replicated = axes_that_cut(cuts, None)
        pieces = _pieces(self.plan.mesh, wanted.bound, cuts, wanted.orders)
        piece = pieces.region(digits)
        place = tuple(map(locate, piece, block))
        self.steps.append(Load(vertex.name, slot, piece, place, pieces))
        if not replicated:
            return
        key = self.kind(vertex), cuts
        if key not in self.load_moves:
            first, *others = exchanges(wanted, pieces, wanted, self.rank)
            self.load_moves[key] = [replace(first, own=None), *others]
        for moves in self.load_moves[key]:
            self.transfer(vertex, slot, slot, moves)

    def transfer(
        self,
        vertex: Vertex,
        source: Slot,
        target: Slot,
        moves: Moves,
        aggregation: str | None = None,
    ) -> None:
        """Add a transfer."""
        number = len(self.steps)
        stage = self.plan.stage
        step = Transfer(vertex.name, source, target, moves, stage, aggregation, number=number)
        self.steps.append(step)

    def reuses(self) -> list[Reuse]:
        """Return which outputs take the memory of which inputs, when all steps are there."""
        nan_checked = []
        for name in self.plan.nan_checked:
            slot, _ = self.stored[name]
            if DTYPES[slot.dtype].kind in "fc":
                nan_checked.append(slot)
        return [Reuse(target, source, tuple(nan_checked)) for source, target in self.updates()]

    def updates(self) -> list[tuple[Slot, Slot]]:
        """Return the slots of inputs that can be updated in place, and of what is written there."""
        found = []
        for name, output in self.plan.updatable.items():
            source, _ = self.stored[name]
            target, _ = self.stored[output]
            found.append((source, target))
        return found

    # ---- computed tensors -----------------------------------------------------------------------

    def lower_chain(self, chain: FusedChain) -> None:
        """Add the steps that compute a chain: operands move before it, and results after it."""
        vertices = [self.plan.graph[name] for name in chain.vertices]
        kernels = [self.lower_kernel(vertex) for vertex in vertices]
        inner = frozenset(kernel.target for kernel in kernels if kernel.vertex in chain.inner)
        self.steps.append(fused(kernels, inner, chain.rows, chain.block))
        for vertex in vertices:
            self.complete(vertex, inside=vertex is not vertices[-1])

    def lower_recurrence(self, recurrence: Recurrence) -> None:
        """Add the step that repeats the steps of a recurrence.

        What is the same in all of them moves before. What is carried stays in its slot.
        """
        members = self.plan.graph.members[recurrence]
        brought = [self.bring_operands(vertex, fixed=True) for vertex in members]
        outer_steps = self.steps
        self.steps = []
        for vertex, operands in zip(members, brought, strict=True):
            operands.update(self.bring_operands(vertex, fixed=False))
            self.steps.append(Compute((self.kernel_on(vertex, operands),)))
            self.move_to_layout(vertex)
        outer_steps.append(repeat(recurrence.name, self.steps, recurrence.steps))
        self.steps = outer_steps
        for vertex in members:
            self.store(vertex, inside=vertex is not members[-1])

    def lower_matrix(self, vertex: Vertex) -> None:
        """Add the step that computes a function of matrices: whole ones, or one on a grid."""
        brought = self.bring_operands(vertex, fixed=True)
        vertices = self.plan.graph.computed_at(vertex)
        kernels = [self.kernel_on(each, brought) for each in vertices]
        results = [kernel.target for kernel in kernels]
        steps: list[Step] = [Compute(tuple(kernels))]
        if ROWS in vertex.computed_einsum.labels:
            operands = []
            for operand, slot in enumerate(kernels[0].operands):
                tensor = self.plan.graph[vertex.inputs[operand]]
                cuts = self.plan.wanted(vertex.name, operand)
                operands.append(Piece(slot, self.block(tensor, cuts)))
            pieces = {}
            for each, slot in zip(vertices, results, strict=True):
                name = each.computed_einsum.required_matrix.name
                pieces[name] = Piece(slot, self.block(each, self.plan.made(each.name)))
            steps = steps_on_grid(self.plan, vertex, self.rank, pieces, operands)
        self.steps.append(repeat(vertex.name, steps, 1, results))
        for each in vertices:
            self.complete(each, inside=each is not vertices[-1])

    def slot_of_result(self, vertex: Vertex, cuts: Cuts, role: str = "") -> Slot:
        """Return the slot of a result; what is carried from step to step keeps its slot."""
        start = self.plan.graph.carried.get(vertex.name)
        if start is not None and cuts == self.plan.layouts[start]:
            return self.stored[start][0]
        return slot_for(vertex.name, self.block(vertex, cuts), vertex.dtype, role)

    def lower_kernel(self, vertex: Vertex) -> Kernel:
        """Add the steps that move operands to where a vertex needs them; return its kernel."""
        return self.kernel_on(vertex, self.bring_operands(vertex, fixed=True))

    def bring_operands(self, vertex: Vertex, fixed: bool) -> dict[int, tuple[Slot, Region | None]]:
        """Add the steps that move operands to where a vertex needs them; return their slots.

        `fixed` are those that are the same in all steps of a recurrence. For operands with index
        arithmetic, return the region of the tensor that is in the slot, too.
        """
        graph = self.plan.graph
        found: dict[int, tuple[Slot, Region | None]] = {}
        shared: dict[str, tuple[Slot, Region]] = {}
        lists = self.plan.numbered_lists(vertex)
        numbered = {each.operand for each in lists if each.replaces(vertex)}
        for operand, name in enumerate(vertex.inputs):
            if vertex.is_fixed(graph[name]) != fixed or operand in numbered:
                continue
            needed = self.plan.needed(vertex, name)
            if needed is None:
                found[operand] = self.operand(vertex, operand), None
                continue
            if name not in shared:
                shared[name] = self.operand_with_halo(vertex, operand, needed)
            found[operand] = shared[name]
        return found

    def kernel_on(
        self, vertex: Vertex, brought: Mapping[int, tuple[Slot, Region | None]]
    ) -> Kernel:
        """Return the kernel of a vertex, given the slots of its operands."""
        state = self.plan.states[vertex.name]
        brought, einsum = self.with_numbered_lists(vertex, brought)
        operands = []
        regions: dict[int, Region] = {}  # what is in the slots of operands with index arithmetic
        for operand in range(len(einsum.operands)):
            slot, region = brought[operand]
            operands.append(slot)
            if region is not None:
                regions[operand] = region
        cuts = self.plan.made(vertex.name)
        slot = self.slot_of_result(vertex, cuts)
        computed_cuts = []
        for label, cut in zip(state, cuts, strict=True):
            is_partial = label is not None and label in vertex.partial_labels
            computed_cuts.append(PARTIAL if is_partial else cut)
        self.stored[vertex.name] = slot, tuple(computed_cuts)
        return self.kernel(vertex, einsum, state, operands, regions, slot)

    def with_numbered_lists(
        self, vertex: Vertex, brought: Mapping[int, tuple[Slot, Region | None]]
    ) -> tuple[Mapping[int, tuple[Slot, Region | None]], EinSum]:
        """Return the slots of operands, and the EinSum, with lists that count what the rank has.

        A list that is read for something else, too, stays: the other one comes before all operands.
        """
        einsum = vertex.computed_einsum
        found = dict(brought)
        added: dict[tuple[str, int, Scalar], tuple[Slot, IndexEntries]] = {}
        for each in self.plan.numbered_lists(vertex):
            region = found[vertex.inputs.index(each.tensor)][1]
            assert region is not None, "there is a region of what lists name"
            slot = self.load_numbers(vertex, each, region[each.dimension])
            if each.replaces(vertex):
                found[each.operand] = slot, None
            else:
                key = each.tensor, each.dimension, Arg(each.operand)
                added[key] = slot, einsum.operands[each.operand]
        if not added:
            return found, einsum
        position = {key: number for number, key in enumerate(added)}

        def later(node: Scalar) -> Scalar:
            return Arg(node.position + len(added)) if isinstance(node, Arg) else node

        operands = [index for _, index in added.values()]
        for name, index in zip(vertex.inputs, einsum.operands, strict=True):
            entries: list[str | Scalar] = []
            for dimension, entry in enumerate(index):
                if isinstance(entry, str):
                    entries.append(entry)
                    continue
                number = position.get((name, dimension, entry))
                entries.append(rebuild(entry, later) if number is None else Arg(number))
            operands.append(tuple(entries))
        function = rebuild(einsum.function, later)
        slots = {operand + len(added): slot for operand, slot in found.items()}
        slots.update((number, (slot, None)) for number, (slot, _) in enumerate(added.values()))
        return slots, replace(einsum, operands=tuple(operands), function=function)

    def load_numbers(self, vertex: Vertex, each: NumberedList, indices: Runs) -> Slot:
        """Load a list that is known as places among the indices that this rank has."""
        listed = self.plan.graph[vertex.inputs[each.operand]]
        assert listed.known is not None
        wanted = self.layout(listed, self.plan.wanted(vertex.name, each.operand))
        block = wanted.region(self.plan.mesh.digits(self.rank))
        role = f"{operand_role(vertex.name, each.operand)} in {each.tensor}.{each.dimension}"
        slot = slot_for(listed.name, block, listed.dtype, role)
        numbers = Numbers(listed.known, block, indices)
        place = packed(block)
        load = Load(listed.name, slot, block, place, wanted, kept=True, numbers=numbers)
        self.steps.append(load)
        return slot

    def complete(self, vertex: Vertex, inside: bool) -> None:
        """Add the steps that bring a result to its layout and store it, and the save point.

        `inside` says that the save point is inside of a chain.
        """
        self.move_to_layout(vertex)
        self.store(vertex, inside)

    def move_to_layout(self, vertex: Vertex) -> None:
        """Add the steps that bring a result to its layout, if it has one."""
        final_cuts = self.plan.layouts.get(vertex.name)
        if final_cuts is not None:
            final_slot = self.move(vertex, final_cuts, FINAL_LAYOUT)
            self.stored[vertex.name] = final_slot, final_cuts

    def store(self, vertex: Vertex, inside: bool) -> None:
        """Add the steps that store an output, and the save point."""
        graph = self.plan.graph
        slot, cuts = self.stored[vertex.name]
        if graph.is_output(vertex.name):
            self.steps.append(Store(vertex.name, slot, self.block(vertex, cuts)))
        if vertex.is_auxiliary:
            return  # a checkpoint has tensors of the program only
        layout = self.layout(vertex, cuts)
        inside = inside or vertex.name in self.while_dropped
        self.steps.append(SavePoint(vertex.name, slot, layout, inside))

    def operand(self, user: Vertex, operand: int) -> Slot:
        """Return the slot with what a vertex needs of an operand; load and move it if needed."""
        vertex = self.plan.graph[user.inputs[operand]]
        if vertex.name not in self.stored:
            self.load(vertex, self.plan.loaded(vertex.name))
        wanted = self.plan.wanted(user.name, operand)
        return self.move(vertex, wanted, operand_role(user.name, operand))

    def operand_with_halo(self, user: Vertex, operand: int, needed: Needed) -> tuple[Slot, Region]:
        """Return a slot with what a vertex needs of an operand with index arithmetic.

        Return the region of the tensor that is in the slot, too.
        """
        vertex = self.plan.graph[user.inputs[operand]]
        if vertex.name not in self.stored:
            self.load(vertex, self.plan.loaded(vertex.name))
        slot, cuts = self.stored[vertex.name]
        state = self.plan.states[user.name]
        key = needed, cuts, state
        if key not in self.halos:
            self.halos[key] = halo_moves(self.layout(vertex, cuts), needed, state, self.rank)
        moves, region = self.halos[key]
        if moves is None:
            return slot, region
        role = operand_role(user.name, operand)
        result = slot_for(vertex.name, region, vertex.dtype, role)
        self.transfer(vertex, slot, result, moves)
        return result, region

    def tree(self, vertex: Vertex, source: Cuts) -> tuple[int, ...]:
        """Return the axes with partial results if these are added in a tree, its root first.

        The root is the first axis that halves the label.
        """
        if PARTIAL not in source or not vertex.computed_einsum.sums_blocks:
            return ()
        einsum = vertex.computed_einsum
        side = self.plan.sides(vertex.name)[len(einsum.output)]
        axes = self.plan.mesh.windows(side)[0]
        return tuple(axis for axis in axes if source[axis] == PARTIAL)

    def move(self, vertex: Vertex, target: Cuts, role: str) -> Slot:
        """Bring a tensor to a layout: aggregate partial results, then exchange."""
        slot, source = self.stored[vertex.name]
        if source == target:
            return slot
        tree = self.tree(vertex, source)
        key = self.kind(vertex), source, target, tree
        if key not in self.moves:
            have = self.layout(vertex, source)
            want = self.layout(vertex, target)
            mesh = self.plan.mesh
            middle = middle_layout(mesh, have.bound, source, target, have.orders, tree)
            self.moves[key] = (
                reductions(have, middle, self.rank, tree),
                exchanges(have, middle, want, self.rank, stored=PARTIAL not in source),
            )
        reducing, moving = self.moves[key]
        for reduction in reducing:
            aggregation = vertex.computed_einsum.required_aggregation
            self.transfer(vertex, slot, slot, reduction, aggregation)
        result = slot_for(vertex.name, self.block(vertex, target), vertex.dtype, role)
        if role == FINAL_LAYOUT:
            result = self.slot_of_result(vertex, target, role)
        for moves in moving:
            self.transfer(vertex, slot, result, moves)
            slot = result  # later moves pass on what has arrived
        return result

    def kernel(
        self,
        vertex: Vertex,
        einsum: EinSum,
        state: Sequence[str | None],
        operands: Sequence[Slot],
        regions: Mapping[int, Region],
        target: Slot,
    ) -> Kernel:
        """Return the kernel on this rank's share of each label.

        `regions` are those parts of the operands with index arithmetic that are in their slots.
        """
        sides = zip(einsum.labels, self.plan.sides(vertex.name), strict=True)
        cutting = {label: {label} for label in einsum.labels}
        for each in vertex.aligned:
            cutting[each.scattered].add(each.aggregated)
        runs = {label: self.share_of(cutting[label], side, state) for label, side in sides}
        extents = tuple((label, length(runs[label])) for label in einsum.labels)
        # Where a label is used as a number, the kernel must know the indices of its positions.
        # Blocks of a sum follow from the indices, too.
        known_labels = set(einsum.labels_as_numbers)
        if einsum.sums_blocks:
            known_labels.add(einsum.aggregated[0])
        cut_labels = [x for x in einsum.labels if x in known_labels and cutting[x] & set(state)]
        index = tuple((label, runs[label]) for label in cut_labels)
        select: list[tuple[int, int, Runs]] = []
        indices = []
        for operand, entries in enumerate(einsum.operands):
            region = regions.get(operand)
            if region is not None:
                select += select_in_region(operand, entries, region, runs)
                indices.append(index_in_region(entries, region, runs))
                continue
            indices.append(entries)
            # A diagonal is cut along its first dimension; along the others every rank has it all.
            for dimension, entry in enumerate(entries):
                if not isinstance(entry, str) or entry not in state:
                    continue
                if entries.index(entry) != dimension:
                    select.append((operand, dimension, runs[entry]))
        local = replace(einsum, operands=tuple(indices), extents=extents)
        return Kernel(
            vertex.name,
            target,
            tuple(operands),
            local,
            index,
            tuple(select),
            vertex.located_name,
        )

    def share_of(
        self, labels: Container[str | None], side: Extent, state: Sequence[str | None]
    ) -> Runs:
        """Return the indices of a label that this rank computes with, if these labels cut it."""
        digits = self.plan.mesh.digits(self.rank)
        cuts = tuple((axis, digits[axis]) for axis, cut in enumerate(state) if cut in labels)
        return share(self.plan.mesh, side, cuts)
