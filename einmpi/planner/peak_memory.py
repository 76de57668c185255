"""The memory of a rank while a plan runs, and which carried tensors are updated in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.scalar import IndexEntries
from einmpi.planner import memory
from einmpi.planner.grids import NUMBERS, grid_of, inner_words, working_bytes
from einmpi.planner.memory import (
    MESSAGE_BUFFER_BYTES,
    Cuts,
    bytes_of_blocked_update,
    find_sparse_update,
    is_worth_blocks,
    longest_share,
    places_filled,
    row_bytes,
    scattered_label,
    staging,
)
from einmpi.planner.moving.halo import is_inside
from einmpi.planner.moving.halo_words import most_needed


def bytes_at_vertices(
    cut: Cuts,
    resident: Collection[str],
    stage: int = MESSAGE_BUFFER_BYTES,
    early: Collection[str] = (),
    in_place: Collection[str] = (),
    blocked: Collection[str] = (),
    overlapped: Collection[str] = (),
) -> list[int]:
    """Return a bound on the bytes that a rank has in memory before the first vertex and at each.

    Goes through the vertices in order and adds up what is stored, what the vertex gathers of its
    operands, and what it makes. Message buffers are there while a tensor moves. The inputs in
    `early` are read before the first vertex. The outputs in `in_place` take the memory of resident
    inputs. The vertices in `blocked` are computed together with the next one, block by block.
    Those of a chain, which follow one another, have the memory of the whole chain. Those in
    `overlapped` are computed while what they need, and what they make, moves between nodes; what
    they need may begin to move while the vertex before is computed.
    """
    memory = _Memory(
        cut,
        frozenset(resident),
        stage,
        frozenset((*in_place, *cut.graph.carried)),
        frozenset(blocked),
        frozenset(overlapped),
    )
    memory.read_early(early)
    chain_of = {name: chain for chain in cut.chains for name in chain.vertices}
    members: tuple[Vertex, ...] = ()
    for vertex in cut.graph.computed:
        if vertex.recurrence is not None and vertex not in members:
            members = cut.graph.members[vertex.recurrence]
            memory.begin_steps(members)
        chain = chain_of.get(vertex.name)
        if chain is None:
            memory.compute([vertex.name])
            if members and vertex is members[-1]:
                memory.end_steps()
        elif vertex.name == chain.vertices[0]:
            memory.compute(chain.vertices, chain.inner, chain.nbytes)
    return memory.needed


class _Operands(NamedTuple):
    """Bytes of the operands of a vertex."""

    new: int  # of inputs that are read for the first time
    gathered: int  # of operands that are brought into another layout
    buffers: int  # of messages for them


@dataclass
class _Memory:
    """What a rank has in memory while it computes the vertices of a plan, one after another."""

    cut: Cuts
    resident: frozenset[str]
    stage: int
    in_place: frozenset[str]
    blocked: frozenset[str]
    overlapped: frozenset[str]

    def __post_init__(self) -> None:
        self.stored = input_bytes(self.cut, self.resident)  # tensor → its block
        self.waiting: dict[str, int] = {}  # inputs that are read before they are needed
        self.present = sum(self.stored.values())  # all that is stored or waits
        self.needed = [self.present]  # before the first vertex, and at each so far
        self.gathered_before = 0  # for a blocked vertex, and needed until the next one is complete
        self.gathered_for_steps = 0  # what all steps of a recurrence read
        self.while_gathering = 0

    def read_early(self, early: Collection[str]) -> None:
        """Read inputs before the first vertex."""
        names = [name for name in early if name not in self.resident]
        self.waiting = input_bytes(self.cut, names)
        self.present += sum(self.waiting.values())

    def begin_steps(self, members: Sequence[Vertex]) -> None:
        """Bring to the vertices of a recurrence what is the same in all steps."""
        for vertex in members:
            operands = self._bring_operands(vertex, in_each_step=False)
            self.gathered_for_steps += operands.gathered
            self.present += operands.new + operands.gathered
            self.while_gathering = max(self.while_gathering, self.present + operands.buffers)

    def end_steps(self) -> None:
        """Free what was brought to the vertices of a recurrence."""
        self.present -= self.gathered_for_steps
        self.gathered_for_steps = 0

    def compute(self, names: Sequence[str], inner: Collection[str] = (), nbytes: int = 0) -> None:
        """Compute a vertex, or those of a chain, and free what is read for the last time.

        All operands of a chain are brought to it before it begins, and its results move when it is
        complete. Of those in `inner` there are only blocks, which take `nbytes`.
        """
        new = made = buffers = 0
        gathered = self.gathered_before
        for name in names:
            vertex = self.cut.graph[name]
            for operand in vertex.inputs:
                self.present -= self.waiting.pop(operand, 0)
            operands = self._bring_operands(vertex)
            new += operands.new
            gathered += operands.gathered
            buffers = max(buffers, operands.buffers)
            nbytes += self._bytes_on_grid(vertex)
            self.stored[name] = 0 if name in inner else self._bytes_made(vertex)
            made += self.stored[name]
        self.present += new
        while_computing = self.present + gathered + max(made + nbytes, buffers)
        self.present += made
        while_moving = self.present
        for name in names:
            if name not in inner and self.cut.moves(name):
                while_moving = max(while_moving, self._move(name))
        most = max(while_computing, while_moving, self.while_gathering)
        self.while_gathering = 0
        self.needed += [most] * len(names)
        if len(names) == 1 and names[0] in self.overlapped:
            self.needed[-2] += new + gathered + buffers
            self.needed[-1] = while_moving + gathered + buffers
        self.gathered_before = gathered if names[0] in self.blocked else 0
        if names[0] not in self.blocked:
            self._free_after(names)

    def _bytes_on_grid(self, vertex: Vertex) -> int:
        """Return the bytes of panels and their messages, if many ranks share one matrix."""
        inner = inner_words(self.cut.graph, vertex)
        others = sum(map(self._bytes_made, self.cut.graph.computed_at(vertex)[1:]))
        if inner is None:
            return others
        grid = grid_of(self.cut, vertex)
        shares = [
            longest_share(grid.mesh, side, axes)
            for side, axes in zip(grid.sides, grid.axes, strict=True)
        ]
        longest = max(*shares, inner.right, grid.ranks[0] * (grid.widest + NUMBERS))
        buffers = self._buffers(grid.widest * longest * inner.itemsize)
        return others + working_bytes(inner, grid, shares) + buffers

    def _bytes_made(self, vertex: Vertex) -> int:
        """Return the bytes of a result where it is computed."""
        name = vertex.name
        cuts = self.cut.made(name)
        if name in self.blocked:
            return bytes_of_blocked_update(vertex, self.cut.mesh, cuts)
        if name in self.in_place and not self.cut.moves(name):
            return 0
        return self.cut.block_bytes(name, cuts)

    def _move(self, name: str) -> int:
        """Move a result to its layout; return the bytes in memory meanwhile."""
        made = self.stored[name]
        final = self.cut.block_bytes(name, self.cut.layouts[name])
        buffers = self._buffers(max(made, final))
        self.stored[name] = 0 if name in self.in_place else final
        needed = self.present + self.stored[name] + buffers
        self.present += self.stored[name] - made
        return needed

    def _free_after(self, names: Collection[str]) -> None:
        """Free what is not needed after vertices, and after the blocked ones that they complete."""
        last_reads = self.cut.graph.last_reads
        done: list[str] = []
        for name in names:
            done += last_reads[name]
            for operand in self.cut.graph[name].inputs:
                if operand in self.blocked:
                    done += last_reads[operand]
        for name in done:
            if name not in self.resident:
                self.present -= self.stored.pop(name, 0)

    def _bring_operands(self, vertex: Vertex, in_each_step: bool = True) -> _Operands:
        """Bring operands to a vertex: of one in a recurrence, those that change, or the others.

        An input that has a layout of its own and is read for the first time is stored from now on.
        """
        new = gathered = buffers = 0
        cut, stored, layouts = self.cut, self.stored, self.cut.layouts
        state = cut.states[vertex.name]
        for operand, name in enumerate(vertex.inputs):
            tensor = cut.graph[name]
            if vertex.recurrence is not None and vertex.is_fixed(tensor) == in_each_step:
                continue
            if tensor.is_input and name not in stored and name in layouts:
                stored[name] = cut.block_bytes(name, layouts[name])
                new += stored[name]
                if None in layouts[name]:
                    buffers = max(buffers, self._buffers(stored[name]))
            needed = cut.needed(vertex, name)
            if needed is not None:
                if vertex.inputs.index(name) != operand:
                    continue  # the first operand has brought what all of them need
                if is_inside(cut.mesh, needed, layouts[name], state):
                    continue  # it is read where it is stored
                size = most_needed(cut.mesh, needed, state) * np.dtype(tensor.dtype).itemsize
                has_messages = True
            else:
                if name in stored and cut.is_there(vertex.name, operand):
                    continue
                wanted = cut.wanted(vertex.name, operand)
                size = cut.block_bytes(name, wanted)
                # An input of which no two ranks need the same is read by each: no messages.
                has_messages = name in stored or None in wanted
            gathered += size
            if has_messages:
                buffers = max(buffers, self._buffers(max(stored.get(name, 0), size)))
        return _Operands(new, gathered, buffers)

    def _buffers(self, nbytes: int) -> int:
        """Return the bytes of message buffers while a block of this size moves."""
        return staging(nbytes, self.cut.mesh.ranks, self.stage)


def peak_bound(
    graph: EinGraph, ranks: int, resident: Collection[str], without_memory: Collection[str] = ()
) -> int:
    """Return a lower bound on the peak memory of any plan.

    Every tensor that is needed lies somewhere, at best evenly on all ranks, but for those in
    `without_memory`: outputs that may take the memory of inputs, and tensors inside of chains.
    """
    share = {vertex.name: -(-vertex.nbytes // ranks) for vertex in graph.vertices}
    share.update(dict.fromkeys((*without_memory, *graph.carried), 0))
    resident = frozenset(resident)
    present = {name for name in resident if graph.consumers.get(name)}
    nbytes = sum(share[name] for name in present)
    peak = nbytes
    for vertex in graph.computed:
        new = {*vertex.inputs, vertex.name} - present
        present |= new
        nbytes += sum(share[name] for name in new)
        peak = max(peak, nbytes)
        done = present.intersection(graph.last_reads[vertex.name]).difference(resident)
        present -= done
        nbytes -= sum(share[name] for name in done)
    return peak


def input_bytes(cut: Cuts, inputs: Collection[str]) -> dict[str, int]:
    """Return the bytes of a rank's block of each of these inputs that is used."""
    found = {}
    for name in inputs:
        users = cut.graph.consumers.get(name, ())
        if users:
            found[name] = cut.block_bytes(name, cut.loaded(name)) if cut.is_loaded(name) else 0
        for user in users if cut.graph[name].known is not None else ():
            for each in cut.numbered_lists(cut.graph[user]):
                if cut.graph[user].inputs[each.operand] == name:
                    found[name] += cut.block_bytes(name, cut.wanted(user, each.operand))
    return found


# ---- updates in place ----------------------------------------------------------------------------
#
# Which carried tensors are updated in place: the next value is written over the old one.


def why_not_in_place(cut: Cuts, name: str, output: str, nan_checked: Collection[str]) -> str:
    """Return why an output cannot take the memory of an input; nothing if it can.

    `nan_checked` are tensors that must be computed before the input is lost: if one of them is nan,
    the step is run again from its inputs.
    """
    graph = cut.graph
    if not graph[name].bound:
        return "a number is not worth it"
    if graph[output].recurrence is not None:
        return f"{output} is computed step by step"
    if not graph.consumers[name]:
        return "no step reads it"
    position = graph.position
    for reader in graph.consumers[name]:
        if position[reader] > position[output]:
            return f"{reader} reads {name} after {output} is computed"
    for checked in nan_checked:
        if position.get(checked, -1) >= position[output]:
            return f"{checked} is recorded, and computed after {output}"
    if cut.moves(output):
        return ""  # it is computed elsewhere, and then moved to the memory of the input
    vertex = graph[output]
    for operand in _operands_read(cut, vertex, name):
        if not reads_where_it_writes(vertex, operand):
            return f"{output} reads other elements of {name} than it writes"
    return ""


def reads_where_it_writes(vertex: Vertex, operand: int) -> bool:
    """Return whether each element of a result needs just the same element of an operand."""
    einsum = vertex.computed_einsum
    if not einsum.is_elementwise or einsum.scan is not None or einsum.segments is not None:
        return False
    labels = einsum.operands[operand]
    return labels == einsum.output and len(set(labels)) == len(labels)


def _operands_read(cut: Cuts, user: Vertex, name: str) -> list[int]:
    """Return the operands of a vertex that are an input where it is stored, not a copy of it."""
    found = []
    needed = cut.needed(user, name)
    layout = cut.layouts.get(name)
    for operand, operand_name in enumerate(user.inputs):
        if operand_name != name:
            continue
        if needed is None or layout is None:
            is_there = cut.is_there(user.name, operand)
        else:
            is_there = is_inside(cut.mesh, needed, layout, cut.states[user.name])
        if is_there:
            found.append(operand)
    return found


def blocked_products(
    cut: Cuts, resident: Collection[str], updatable: Mapping[str, str]
) -> tuple[str, ...]:
    """Return large aggregates that are needed only for an update that follows them at once.

    Such an aggregate, the sum of W - rate * sum(…) say, is computed block by block, each of which
    is used at once and then forgotten; a scattered one, only for the rows that get values.
    `updatable` has the inputs that can be updated in place, and the output that takes their memory.
    """
    found = []
    graph = cut.graph
    overwritten = {output: name for name, output in updatable.items()}
    for vertex, following in pairwise(graph.computed):
        if following.name not in overwritten or graph.consumers[vertex.name] != (following.name,):
            continue
        if graph.is_output(vertex.name) or vertex.name in cut.layouts or not vertex.bound:
            continue
        if cut.is_partial(vertex.name):
            continue
        name = overwritten[following.name]
        is_read_first = name in following.inputs and _reads_own_rows(vertex, name)
        if not is_read_first and _operands_read(cut, vertex, name):
            continue  # later blocks would read what earlier ones have written over it
        is_sparse = is_sparse_update(vertex, following)
        if not is_sparse and not _is_large_product(cut, vertex, following):
            continue
        if _is_updated_where_it_is(cut, following, vertex.name, resident):
            found.append(vertex.name)
    return tuple(found)


def _reads_own_rows(vertex: Vertex, name: str) -> bool:
    """Return whether each row of an aggregate needs just the same row of an input.

    A scattered sum has a row for each index of the scattered label, all others for each index of
    the first one.
    """
    einsum = vertex.computed_einsum
    segments = einsum.segments
    label = scattered_label(einsum)
    if segments is not None and label is not None:
        (index,) = segments.indices
        dimension = einsum.output.index(label)
        found = [entries[dimension : dimension + 1] for entries in segments.operands]
        row: IndexEntries = (index,)
    else:
        found = [entries[:1] for entries in einsum.operands]
        row = einsum.output[:1]
    return all(
        entries == row
        for operand, entries in zip(vertex.inputs, found, strict=True)
        if operand == name
    )


def is_sparse_update(vertex: Vertex, update: Vertex) -> bool:
    """Return whether an update changes those rows only for which a vertex adds up values.

    These must be less than half of all rows, or the sums large.
    """
    einsum = vertex.computed_einsum
    label = scattered_label(einsum)
    if label is None or update.inputs.count(vertex.name) != 1:
        return False
    change = update.inputs.index(vertex.name)
    if find_sparse_update(update.computed_einsum, change) is None:
        return False
    is_large = vertex.nbytes > 2 * memory.PRODUCT_BLOCK_BYTES
    return is_large or 2 * places_filled(einsum) <= einsum.extent[label]


def _is_large_product(cut: Cuts, vertex: Vertex, update: Vertex) -> bool:
    """Return whether a vertex is worth to be computed in blocks of rows, and can be."""
    if not _goes_by_rows(vertex) or not _goes_by_rows(update):
        return False
    cuts = cut.made(vertex.name)
    nbytes = cut.block_bytes(vertex.name, cuts)
    return is_worth_blocks(nbytes, row_bytes(vertex, cut.mesh, cuts, 0))


def _goes_by_rows(vertex: Vertex) -> bool:
    """Return whether a vertex can be computed for some indices of its first dimension only."""
    einsum = vertex.computed_einsum
    if einsum.scan is not None or einsum.segments is not None:
        return False
    if einsum.is_pass_of_scan:
        return False
    if einsum.reads_diagonals or not einsum.is_indexed_by_labels:
        return False
    return einsum.output[0] not in einsum.labels_as_numbers


def _is_updated_where_it_is(
    cut: Cuts, update: Vertex, product: str, resident: Collection[str]
) -> bool:
    """Return whether an update of single elements moves nothing, neither before nor after."""
    if cut.moves(update.name):
        return False
    for operand, name in enumerate(update.inputs):
        if name == product and not reads_where_it_writes(update, operand):
            return False
        if cut.graph[name].is_input and name not in resident:
            return False
        if not cut.is_there(update.name, operand):
            return False
    return update.computed_einsum.is_elementwise
