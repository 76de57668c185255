"""Find chains: vertices around large tensors that nothing else reads, which share rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Call, Const, gathers_in, labels_of, walk
from einmpi.planner.memory import Cuts, FusedChain, on_a_rank
from einmpi.planner.orders import Classes

# ---- rows ----------------------------------------------------------------------------------------
#
# The rows of a chain: labels that all its vertices have, under one name or another.


@dataclass(frozen=True)
class Member:
    """A vertex of a chain on one rank."""

    name: str  # of its result
    inputs: tuple[str, ...]
    einsum: EinSum  # with the extents that the rank has
    itemsize: int  # of its result


def shared_rows(members: Sequence[Member]) -> list[tuple[str, ...]]:
    """Return the labels that all members have, once each: of each row, its label in each member.

    Labels of two members are the same row if one member reads the other's result at them. An index
    that is no label, such as s+1, needs more of a result than one block has. The rows are in the
    order of the first member's labels.
    """
    classes: Classes[tuple[int, str]] = Classes()  # of labels, each with the number of its member
    gathered = []
    makers: dict[str, int] = {}
    for number, member in enumerate(members):
        for name, entries in zip(member.inputs, member.einsum.operands, strict=True):
            if name not in makers:
                continue
            maker = makers[name]
            for entry, label in zip(entries, members[maker].einsum.output, strict=True):
                if isinstance(entry, str):
                    classes.join((maker, label), (number, entry))
                else:
                    gathered.append((maker, label))
        makers[member.name] = number
    rows: dict[tuple[int, str], list[tuple[int, str]]] = {}
    for number, member in enumerate(members):
        for label in member.einsum.labels:
            rows.setdefault(classes.root((number, label)), []).append((number, label))
    for node in gathered:
        rows.pop(classes.root(node), None)
    found = []
    for row in rows.values():
        if [number for number, _ in row] == list(range(len(members))):
            found.append(tuple(label for _, label in row))
    return found


class _Row(NamedTuple):
    """A label that all vertices of a chain have."""

    is_aggregated: bool  # a vertex aggregates it
    is_batch: bool  # all operands of the first contraction have it
    labels: tuple[str, ...]  # its name in each vertex


def _rows(members: Sequence[Member], seed: int) -> list[_Row]:
    """Return the rows of a chain: first those in which all operands of the seed are cut.

    Rows that a vertex aggregates come last. The seed is the first contraction of the chain.
    """
    read = {name for member in members for name in member.inputs}
    found = []
    for labels in shared_rows(members):
        is_aggregated = False
        is_usable = True
        for label, member in zip(labels, members, strict=True):
            if label in member.einsum.aggregated:
                is_aggregated = True
                is_usable = is_usable and member.name not in read  # parts cannot be used
                is_usable = is_usable and not member.einsum.sums_blocks
            for index in member.einsum.operands:
                for entry in gathers_in(index):
                    is_usable = is_usable and label not in labels_of(entry)
        is_batch = all(labels[seed] in index for index in members[seed].einsum.operands)
        if is_usable:
            found.append(_Row(is_aggregated, is_batch, labels))
    return sorted(found, key=lambda row: (row.is_aggregated, not row.is_batch))


# ---- blocks --------------------------------------------------------------------------------------
#
# The blocks of rows in which a chain is computed: how large they are, and the memory they take.


# Of all blocks of a chain, so that they stay in the cache of a CPU: two large tensors with a power
# of two as the number of rows, and what there is for each row.
CHAIN_BLOCK_BYTES = 9 * 2**20
OPERATIONS_OF_A_BYTE = 8  # that take as long on a CPU as to read or write a byte of memory
MIN_MATRIX_ROWS = 64  # of a block: with fewer, a matrix product would take longer


def bytes_of_blocks(
    members: Sequence[Member],
    inner: Collection[str],
    rows: Sequence[Sequence[str]],
    block: Sequence[int],
) -> int:
    """Return the most memory that the blocks of a chain's inner tensors take at once.

    A result that aggregates rows of several blocks needs memory for what one block adds to it.
    """
    last_use: dict[str, int] = {}
    for number, member in enumerate(members):
        for name in (*member.inputs, member.name):
            last_use[name] = number
    in_use: dict[str, int] = {}
    peak = 0
    for number, member in enumerate(members):
        extent = member.einsum.extent
        is_partial = False
        for labels, size in zip(rows, block, strict=True):
            label = labels[number]
            if label in member.einsum.aggregated and size < extent[label]:
                is_partial = True
            extent[label] = min(size, extent[label])
        nbytes = prod(extent[label] for label in member.einsum.output) * member.itemsize
        added = 0
        if member.name in inner:
            in_use[member.name] = nbytes
        elif is_partial:
            added = nbytes
        peak = max(peak, sum(in_use.values()) + added)
        for name in (*member.inputs, member.name):
            if last_use[name] == number:
                in_use.pop(name, None)
    return peak


def choose_block(
    members: Sequence[Member],
    inner: Collection[str],
    rows: Sequence[Sequence[str]],
    least_sizes: Sequence[int],
    budget: int,
) -> tuple[int, ...]:
    """Return how many indices of each row make a block of at most `budget` bytes.

    Rows are halved one after another, the first one first, but not below their least size.
    """
    block = [members[0].einsum.extent[labels[0]] for labels in rows]
    for row, least in enumerate(least_sizes):
        while block[row] > least and bytes_of_blocks(members, inner, rows, block) > budget:
            block[row] = max(least, -(-block[row] // 2))
    return tuple(block)


MIN_INNER_BYTES = 2**22  # of a rank's first contraction: smaller ones stay as they are
MIN_GROWTH = 4  # the elements of the first contraction over those of its largest operand
MOST_VERTICES = 64  # of a chain


@dataclass(frozen=True)
class ChainSearch:
    """The search for chains in a graph with given cuts.

    A chain begins with a contraction whose result is large: it has more elements than all that it
    is computed from. Such a tensor, and every other one of its size that is computed from it, is
    read inside of the chain only. At least one vertex contracts it with another tensor.
    """

    cut: Cuts
    budget: int  # bytes of a block
    excluded: Collection[str] = ()  # vertices that belong to no chain

    @property
    def graph(self) -> EinGraph:
        return self.cut.graph

    def chains(self) -> tuple[FusedChain, ...]:
        """Return all chains. Their vertices need not follow one another in the graph.

        Of two that have vertices in common, the one with more of them is taken.
        """
        candidates: list[tuple[str, set[str]]] = []
        for seed in self.seeds:
            members = self._with_vertices_between(self._closure(seed), seed)
            if members is not None:
                candidates.append((seed, members))
        found: list[FusedChain] = []
        used: set[str] = set()
        for seed, members in sorted(candidates, key=lambda candidate: -len(candidate[1])):
            if members & used:
                continue
            chain = self._longest(members, seed, used)
            if chain is not None:
                found.append(chain)
                used.update(chain.vertices)
        return tuple(sorted(found, key=lambda chain: self.graph.position[chain.vertices[0]]))

    @cached_property
    def seeds(self) -> tuple[str, ...]:
        """The contractions that a chain may begin with."""
        found = []
        for vertex in self.graph.computed:
            einsum = vertex.computed_einsum
            if not einsum.aggregated or len(einsum.operands) < 2:
                continue
            largest = max(self.graph[name].elements for name in vertex.inputs)
            if vertex.elements <= MIN_GROWTH * largest:
                continue
            nbytes = self.cut.block_bytes(vertex.name, self.cut.made(vertex.name))
            if nbytes >= MIN_INNER_BYTES:
                found.append(vertex.name)
        return tuple(found)

    def splits(self) -> dict[str, int]:
        """Return tensors whose readers would be in two chains if late ones had copies of them.

        For each, return the number of the last computed vertex that reads the tensor itself.
        """
        numbers = {vertex.name: number for number, vertex in enumerate(self.graph.computed)}
        found: dict[str, int] = {}
        for seed in self.seeds:
            members = self._closure(seed)
            if members is None:
                continue
            late = self._late_members(members)
            if not late or seed in late:
                continue
            for name in sorted(members - late, key=numbers.__getitem__):
                if not self._is_wide(name, seed):
                    continue
                early_reads = []
                late_reads = []
                for reader in self.graph.consumers[name]:
                    if reader in late:
                        late_reads.append(numbers[reader])
                    else:
                        early_reads.append(numbers[reader])
                if not early_reads or not late_reads:
                    continue
                if max(early_reads) < min(late_reads):
                    found[name] = max(early_reads)
        return found

    # ---- which vertices -------------------------------------------------------------------------

    def _is_wide(self, name: str, seed: str) -> bool:
        """Return whether a tensor is as large as the one that a chain begins with."""
        return 2 * self.graph[name].elements > self.graph[seed].elements

    def _closure(self, seed: str) -> set[str] | None:
        """Return the seed with all that read large tensors of the chain, and compute others.

        None if something else needs such a tensor.
        """
        members = {seed}
        waiting = [seed]
        while waiting:
            name = waiting.pop()
            if not self._can_be_member(self.graph[name]) or len(members) > MOST_VERTICES:
                return None
            new: list[str] = []
            if self._is_wide(name, seed):
                if self.graph.is_output(name):
                    return None
                new += self.graph.consumers[name]
            if not waiting:
                new += self._producers_only_for(members | set(new), seed)
            for reader in new:
                if reader not in members:
                    members.add(reader)
                    waiting.append(reader)
        return members

    def _producers_only_for(self, members: set[str], seed: str) -> Iterator[str]:
        """Yield the vertices of other large tensors that only these vertices read."""
        for name in sorted(members, key=self.graph.position.__getitem__):
            for operand in self.graph[name].inputs:
                tensor = self.graph[operand]
                if tensor.is_input or operand in members or self.graph.is_output(operand):
                    continue
                is_wide = self._is_wide(operand, seed) and self._can_be_member(tensor)
                if is_wide and members.issuperset(self.graph.consumers[operand]):
                    yield operand

    def _can_be_member(self, vertex: Vertex) -> bool:
        if vertex.is_input or vertex.recurrence is not None or vertex.name in self.excluded:
            return False
        einsum = vertex.computed_einsum
        if einsum.has_special_form or einsum.is_pass_of_scan:
            return False
        return not einsum.reads_diagonals

    def _span(self, names: Collection[str]) -> tuple[Vertex, ...]:
        """Return the vertices from the first of these to the last."""
        places = [self.graph.position[name] for name in names]
        return self.graph.vertices[min(places) : max(places) + 1]

    def _after(self, names: Collection[str]) -> set[str]:
        """Return the vertices before the last of these that depend on some, without these."""
        found: set[str] = set()
        for vertex in self._span(names):
            if vertex.name in names:
                continue
            inputs = set(vertex.inputs)
            if inputs.intersection(names) or inputs & found:
                found.add(vertex.name)
        return found

    def _late_members(self, members: set[str]) -> set[str]:
        """Return the members that depend on a vertex outside which depends on a member."""
        outside_users = self._after(members)
        late: set[str] = set()
        for vertex in self._span(members):
            if vertex.name not in members:
                continue
            if (outside_users | late).intersection(vertex.inputs):
                late.add(vertex.name)
        return late

    def _with_vertices_between(self, members: set[str] | None, seed: str) -> set[str] | None:
        """Return the members with what is computed between them, from one and for another.

        None if that cannot be in a chain.
        """
        if members is None:
            return None
        after = self._after(members)
        needed: set[str] = set()  # by members, directly or not
        for vertex in reversed(self._span(members)):
            if vertex.name in members or vertex.name in needed:
                needed.update(vertex.inputs)
        between = (after & needed) - members
        members = members | between
        if len(members) > MOST_VERTICES:
            return None
        for name in between:
            vertex = self.graph[name]
            is_contraction = vertex.computed_einsum.aggregated and len(set(vertex.inputs)) > 1
            if self._is_wide(name, seed) or is_contraction or not self._can_be_member(vertex):
                return None
        return members

    def _last_products(self, members: set[str]) -> set[str]:
        """Return the products and quotients of results of a chain that nothing else reads.

        Such are a weighted sum and the total of the weights, which divides it.
        """
        found: set[str] = set()
        waiting: set[str] = set()  # vertices outside that read results of the chain
        for name in members:
            waiting.update(self.graph.consumers[name])
        waiting -= members
        while waiting:
            vertex = self.graph[min(waiting, key=self.graph.position.__getitem__)]
            waiting.remove(vertex.name)
            inputs = set(vertex.inputs)
            inside = members | found
            if not inputs <= inside:
                continue
            if not _is_product(vertex) or not self._can_be_member(vertex):
                continue
            readers: set[str] = set()
            for name in inputs:
                if self.graph[name].elements == vertex.elements:
                    readers.update(self.graph.consumers[name])
            is_needed = any(self.graph.is_output(name) for name in inputs)
            if readers <= inside | {vertex.name} and not is_needed:
                found.add(vertex.name)
                waiting.update(self.graph.consumers[vertex.name])
        # A result that is only scaled is a matter of its own.
        useless = set()
        for name in found:
            has_reader = found.intersection(self.graph.consumers[name])
            if len(set(self.graph[name].inputs)) == 1 and not has_reader:
                useless.add(name)
        return found - useless

    # ---- the chain ------------------------------------------------------------------------------

    def _longest(self, members: set[str], seed: str, used: set[str]) -> FusedChain | None:
        """Return some vertices as a chain, with the last products if no row is lost with them.

        Vertices that are `used` are in another chain.
        """
        chain = self._fused(members, seed)
        last = self._last_products(members)
        if chain is None or not last or last & used:
            return chain
        longer = self._fused(members | last, seed)
        if longer is None or len(longer.rows) < len(chain.rows):
            return chain
        return longer

    def _fused(self, members: set[str], seed: str) -> FusedChain | None:
        """Return some vertices as a chain; None if they are none, or not worth it."""
        places = sorted(self.graph.position[name] for name in members)
        vertices = [self.graph.vertices[place] for place in places]
        names = tuple(vertex.name for vertex in vertices)
        inner = []
        for vertex in vertices:
            readers = self.graph.consumers[vertex.name]
            is_read_inside = bool(readers) and members.issuperset(readers)
            if is_read_inside and not self.graph.is_output(vertex.name):
                inner.append(vertex.name)
            elif self._is_wide(vertex.name, seed):
                return None
            if members.intersection(readers) and not self._stays_where_it_is(vertex, members):
                return None
        if not any(self._contracts(vertex, members, seed) for vertex in vertices):
            return None
        parts = [self._member(vertex) for vertex in vertices]
        rows = _rows(parts, names.index(seed))
        if not rows:
            return None
        labels = tuple(row.labels for row in rows)
        least_sizes = [1 if row.is_batch else MIN_MATRIX_ROWS for row in rows]
        whole = [parts[0].einsum.extent[row.labels[0]] for row in rows]
        saved = bytes_of_blocks(parts, inner, labels, whole)
        most = min(self.budget, saved // 2)  # a chain that saves less is not worth it
        block = choose_block(parts, inner, labels, least_sizes, most)
        nbytes = bytes_of_blocks(parts, inner, labels, block)
        if 2 * nbytes > saved:
            return None
        return FusedChain(names, tuple(inner), labels, block, nbytes, saved)

    def _stays_where_it_is(self, vertex: Vertex, members: set[str]) -> bool:
        """Return whether the result of a vertex does not move before members read it."""
        if self.cut.is_partial(vertex.name) or self.cut.moves(vertex.name):
            return False
        cuts = self.cut.made(vertex.name)
        for reader in members.intersection(self.graph.consumers[vertex.name]):
            for operand, name in enumerate(self.graph[reader].inputs):
                if name == vertex.name and self.cut.wanted(reader, operand) != cuts:
                    return False
        return True

    def _contracts(self, vertex: Vertex, members: set[str], seed: str) -> bool:
        """Return whether a vertex contracts a large tensor of the chain with another one."""
        if not vertex.computed_einsum.aggregated or self._is_wide(vertex.name, seed):
            return False
        from_inside = [name for name in vertex.inputs if name in members]
        is_wide = any(self._is_wide(name, seed) for name in from_inside)
        return is_wide and len(from_inside) < len(vertex.inputs)

    def _member(self, vertex: Vertex) -> Member:
        """Return a vertex as the rank with the most indices has it."""
        state = self.cut.states[vertex.name]
        einsum = on_a_rank(vertex.computed_einsum, self.cut.mesh, state)
        return Member(vertex.name, vertex.inputs, einsum, np.dtype(vertex.dtype).itemsize)


def _is_product(vertex: Vertex) -> bool:
    """Return whether a vertex only multiplies and divides elements and numbers."""
    einsum = vertex.computed_einsum
    if einsum.aggregated:
        return False
    for node in walk(einsum.function):
        is_allowed_call = isinstance(node, Call) and node.op in ("*", "/")
        if not is_allowed_call and not isinstance(node, Arg | Const):
            return False
    return True
