"""Bytes of tensors and message buffers that a rank has in memory while a plan runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.planner.chains.record import FusedChain
from einmpi.planner.memory import (
    MESSAGE_BUFFER_BYTES,
    Labels,
    Layouts,
    block_bytes,
    bytes_of_blocked_update,
    is_partial,
    operand_cuts,
    output_cuts,
    staging,
)
from einmpi.planner.mesh import Mesh
from einmpi.planner.moving.halo import is_inside, needed_of
from einmpi.planner.moving.halo_counts import most_needed


def bytes_at_vertices(
    graph: EinGraph,
    mesh: Mesh,
    states: Labels,
    layouts: Layouts,
    resident: Collection[str],
    stage: int = MESSAGE_BUFFER_BYTES,
    early: Collection[str] = (),
    in_place: Collection[str] = (),
    blocked: Collection[str] = (),
    chains: Sequence[FusedChain] = (),
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
    memory = _Memory(graph, mesh, states, layouts, frozenset(resident), stage)
    memory.in_place = frozenset(in_place)
    memory.blocked = frozenset(blocked)
    memory.overlapped = frozenset(overlapped)
    memory.read_early(early)
    chain_of = {name: chain for chain in chains for name in chain.vertices}
    for vertex in graph.computed:
        chain = chain_of.get(vertex.name)
        if chain is None:
            memory.compute(vertex)
        elif vertex.name == chain.vertices[0]:
            memory.compute_chain(chain)
    return memory.needed


class _Operands(NamedTuple):
    """Bytes of the operands of a vertex."""

    new: int  # of inputs that are read for the first time
    gathered: int  # of operands that are brought into another layout
    buffers: int  # of messages for them


class _Result(NamedTuple):
    """Bytes of the result of a vertex."""

    made: int  # as it is computed
    final: int  # in its layout, if it moves there
    buffers: int  # of messages for that
    stored: int  # of what stays


class _Memory:
    """What a rank has in memory while it computes the vertices of a plan, one after another."""

    in_place: frozenset[str] = frozenset()
    blocked: frozenset[str] = frozenset()
    overlapped: frozenset[str] = frozenset()

    def __init__(
        self,
        graph: EinGraph,
        mesh: Mesh,
        states: Labels,
        layouts: Layouts,
        resident: frozenset[str],
        stage: int,
    ) -> None:
        self.graph = graph
        self.mesh = mesh
        self.states = states
        self.layouts = layouts
        self.resident = resident
        self.stage = stage
        self.stored = input_bytes(graph, mesh, states, layouts, resident)  # tensor → its block
        self.waiting: dict[str, int] = {}  # inputs that are read before they are needed
        self.present = sum(self.stored.values())  # all that is stored or waits
        self.needed = [self.present]  # before the first vertex, and at each so far
        self.gathered_before = 0  # for a blocked vertex, and needed until the next one is complete

    def read_early(self, early: Collection[str]) -> None:
        """Read inputs before the first vertex."""
        names = [name for name in early if name not in self.resident]
        self.waiting = input_bytes(self.graph, self.mesh, self.states, self.layouts, names)
        self.present += sum(self.waiting.values())

    def compute(self, vertex: Vertex) -> None:
        """Compute a vertex, and free what it reads for the last time."""
        for name in vertex.inputs:
            self.present -= self.waiting.pop(name, 0)
        operands = self._bring_operands(vertex)
        result = self._result(vertex)
        self.present += operands.new
        gathered = operands.gathered + self.gathered_before
        while_computing = self.present + gathered + max(result.made, operands.buffers)
        while_moving = self.present + result.made + result.final + result.buffers
        self.needed.append(max(while_computing, while_moving))
        if vertex.name in self.overlapped:
            self.needed[-2] += operands.new + gathered + operands.buffers
            self.needed[-1] = while_moving + gathered + operands.buffers

        self.stored[vertex.name] = result.stored
        self.present += result.stored
        if vertex.name in self.blocked:
            self.gathered_before = gathered
        else:
            self.gathered_before = 0
            self._free_after(vertex)

    def _free_after(self, vertex: Vertex) -> None:
        """Free what is not needed after a vertex, and after the blocked one that it completes."""
        done = list(self.graph.last_reads[vertex.name])
        for name in vertex.inputs:
            if name in self.blocked:
                done += self.graph.last_reads[name]
        self._free(done)

    def _free(self, names: Collection[str]) -> None:
        for name in names:
            if name not in self.resident:
                self.present -= self.stored.pop(name, 0)

    def compute_chain(self, chain: FusedChain) -> None:
        """Compute the vertices of a chain together."""
        for name in chain.vertices:
            for operand in self.graph[name].inputs:
                self.present -= self.waiting.pop(operand, 0)
        peak, added = self._bytes_of_chain(chain)
        self.needed += [self.present + peak] * len(chain.vertices)
        self.present += added
        for name in chain.vertices:
            self._free(self.graph.last_reads[name])

    def _bytes_of_chain(self, chain: FusedChain) -> tuple[int, int]:
        """Return the bytes that a chain needs beside what is there before, and what it leaves.

        All its operands are brought to it before it begins, and its results move when it is
        complete.
        """
        added = 0
        gathered = 0
        buffers = 0
        made = 0
        for name in chain.vertices:
            vertex = self.graph[name]
            operands = self._bring_operands(vertex)
            added += operands.new
            gathered += operands.gathered
            buffers = max(buffers, operands.buffers)
            self.stored[name] = 0
            if name not in chain.inner:
                self.stored[name] = block_bytes(vertex, self.mesh, self._cuts_made(name))
                made += self.stored[name]
        peak = added + gathered + max(made + chain.nbytes, buffers)
        added += made
        for name in chain.outer:
            vertex = self.graph[name]
            if self._moves(vertex, self._cuts_made(name)):
                made = self.stored[name]
                final = block_bytes(vertex, self.mesh, self.layouts[name])
                peak = max(peak, added + final + self._buffers(max(made, final)))
                added += final - made
                self.stored[name] = final
        return peak, added

    def _bring_operands(self, vertex: Vertex) -> _Operands:
        """Bring the operands to a vertex.

        An input that has a layout of its own and is read for the first time is stored from now on.
        """
        new = 0
        gathered = 0
        buffers = 0
        state = self.states[vertex.name]
        stored, layouts = self.stored, self.layouts
        for operand, name in enumerate(vertex.inputs):
            tensor = self.graph[name]
            if tensor.is_input and name not in stored and name in layouts:
                stored[name] = block_bytes(tensor, self.mesh, layouts[name])
                new += stored[name]
                if None in layouts[name]:
                    buffers = max(buffers, self._buffers(stored[name]))
            needed = needed_of(vertex, name, tensor.bound)
            if needed is not None:
                if vertex.inputs.index(name) != operand:
                    continue  # the first operand has brought what all of them need
                if is_inside(self.mesh, needed, layouts[name], state):
                    continue  # it is read where it is stored
                most = most_needed(self.mesh, needed, state)
                size = most * np.dtype(tensor.dtype).itemsize
                gathered += size
                buffers = max(buffers, self._buffers(max(stored.get(name, 0), size)))
                continue
            wanted = operand_cuts(self.graph, vertex.name, operand, state)
            if self._is_there(tensor, wanted):
                continue
            size = block_bytes(tensor, self.mesh, wanted)
            gathered += size
            # An input of which no two ranks need the same is read by each of them: no messages.
            if name in stored or None in wanted:
                buffers = max(buffers, self._buffers(max(stored.get(name, 0), size)))
        return _Operands(new, gathered, buffers)

    def _is_there(self, tensor: Vertex, wanted: tuple[int | None, ...]) -> bool:
        """Return whether a tensor is stored complete, with these cuts."""
        if tensor.name not in self.stored:
            return False
        if tensor.name in self.layouts:
            return self.layouts[tensor.name] == wanted
        if tensor.is_input:
            return True
        return self._cuts_made(tensor.name) == wanted and not is_partial(tensor, self.states)

    def _result(self, vertex: Vertex) -> _Result:
        """Return the bytes of a result, where it is computed and where it is stored."""
        cuts = self._cuts_made(vertex.name)
        if vertex.name in self.blocked:
            made = bytes_of_blocked_update(vertex, self.mesh, cuts)
        else:
            made = block_bytes(vertex, self.mesh, cuts)
        if not self._moves(vertex, cuts):
            made = 0 if vertex.name in self.in_place else made
            return _Result(made, 0, 0, stored=made)
        final = block_bytes(vertex, self.mesh, self.layouts[vertex.name])
        buffers = self._buffers(max(made, final))
        final = 0 if vertex.name in self.in_place else final
        return _Result(made, final, buffers, stored=final)

    def _moves(self, vertex: Vertex, cuts: tuple[int | None, ...]) -> bool:
        """Return whether a result that is computed with these cuts moves to its layout."""
        if vertex.name not in self.layouts:
            return False
        return self.layouts[vertex.name] != cuts or is_partial(vertex, self.states)

    def _cuts_made(self, name: str) -> tuple[int | None, ...]:
        """Return the dimensions that axes cut of a result as it is computed."""
        return output_cuts(self.graph, name, self.states[name])

    def _buffers(self, nbytes: int) -> int:
        """Return the bytes of message buffers while a block of this size moves."""
        return staging(nbytes, self.mesh.ranks, self.stage)


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


def input_bytes(
    graph: EinGraph, mesh: Mesh, states: Labels, layouts: Layouts, inputs: Collection[str]
) -> dict[str, int]:
    """Return the bytes of a rank's block of each of these inputs that is used."""
    found = {}
    for name in inputs:
        for user in graph.consumers.get(name, ()):
            operand = graph[user].inputs.index(name)
            cuts = layouts.get(name) or operand_cuts(graph, user, operand, states[user])
            found[name] = block_bytes(graph[name], mesh, cuts)
    return found
