"""Bytes of tensors and message buffers that a rank has in memory while a plan runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.planner.memory import (
    MESSAGE_BUFFER_BYTES,
    Cuts,
    bytes_of_blocked_update,
    staging,
)
from einmpi.planner.moving.halo import is_inside, needed_of
from einmpi.planner.moving.halo_counts import most_needed


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
        frozenset(in_place),
        frozenset(blocked),
        frozenset(overlapped),
    )
    memory.read_early(early)
    chain_of = {name: chain for chain in cut.chains for name in chain.vertices}
    for vertex in cut.graph.computed:
        chain = chain_of.get(vertex.name)
        if chain is None:
            memory.compute([vertex.name])
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

    def read_early(self, early: Collection[str]) -> None:
        """Read inputs before the first vertex."""
        names = [name for name in early if name not in self.resident]
        self.waiting = input_bytes(self.cut, names)
        self.present += sum(self.waiting.values())

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
            self.stored[name] = 0 if name in inner else self._bytes_made(vertex)
            made += self.stored[name]
        self.present += new
        while_computing = self.present + gathered + max(made + nbytes, buffers)
        self.present += made
        while_moving = self.present
        for name in names:
            if name not in inner and self.cut.moves(name):
                while_moving = max(while_moving, self._move(name))
        self.needed += [max(while_computing, while_moving)] * len(names)
        if len(names) == 1 and names[0] in self.overlapped:
            self.needed[-2] += new + gathered + buffers
            self.needed[-1] = while_moving + gathered + buffers
        self.gathered_before = gathered if names[0] in self.blocked else 0
        if names[0] not in self.blocked:
            self._free_after(names)

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

    def _bring_operands(self, vertex: Vertex) -> _Operands:
        """Bring the operands to a vertex.

        An input that has a layout of its own and is read for the first time is stored from now on.
        """
        new = gathered = buffers = 0
        cut, stored, layouts = self.cut, self.stored, self.cut.layouts
        state = cut.states[vertex.name]
        for operand, name in enumerate(vertex.inputs):
            tensor = cut.graph[name]
            if tensor.is_input and name not in stored and name in layouts:
                stored[name] = cut.block_bytes(name, layouts[name])
                new += stored[name]
                if None in layouts[name]:
                    buffers = max(buffers, self._buffers(stored[name]))
            needed = needed_of(vertex, name, tensor.bound)
            if needed is not None:
                if vertex.inputs.index(name) != operand:
                    continue  # the first operand has brought what all of them need
                if is_inside(cut.mesh, needed, layouts[name], state):
                    continue  # it is read where it is stored
                size = most_needed(cut.mesh, needed, state) * np.dtype(tensor.dtype).itemsize
                has_messages = True
            else:
                wanted = cut.wanted(vertex.name, operand)
                if self._is_there(tensor, wanted):
                    continue
                size = cut.block_bytes(name, wanted)
                # An input of which no two ranks need the same is read by each: no messages.
                has_messages = name in stored or None in wanted
            gathered += size
            if has_messages:
                buffers = max(buffers, self._buffers(max(stored.get(name, 0), size)))
        return _Operands(new, gathered, buffers)

    def _is_there(self, tensor: Vertex, wanted: tuple[int | None, ...]) -> bool:
        """Return whether a tensor is stored complete, with these cuts."""
        name = tensor.name
        if name not in self.stored:
            return False
        if name in self.cut.layouts:
            return self.cut.layouts[name] == wanted
        if tensor.is_input:
            return True
        return self.cut.made(name) == wanted and not self.cut.is_partial(name)

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
    share.update(dict.fromkeys(without_memory, 0))
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
        for user in cut.graph.consumers.get(name, ()):
            operand = cut.graph[user].inputs.index(name)
            found[name] = cut.block_bytes(name, cut.layouts.get(name) or cut.wanted(user, operand))
    return found
