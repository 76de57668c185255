"""The memory that a rank needs for a graph with given cuts, and the cuts that need least."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.planner.chains import ChainSearch
from einmpi.planner.cut_search import CutSearch
from einmpi.planner.factor import Variable
from einmpi.planner.memory import (
    LEAST_MESSAGE_BUFFER_BYTES,
    MESSAGE_BUFFER_BYTES,
    MESSAGE_BUFFER_SHARE,
    ROUNDING_BYTES,
    Cuts,
    FusedChain,
    Pieces,
    block_bytes,
    least_bytes_of_pieces,
    longest_shares,
    on_a_rank,
    stage_of,
)
from einmpi.planner.mesh import Mesh, sides
from einmpi.planner.moving.halo import is_inside
from einmpi.planner.moving.halo_words import most_needed_bound
from einmpi.planner.peak_memory import (
    blocked_products,
    bytes_at_vertices,
    input_bytes,
    peak_bound,
    why_not_in_place,
)
from einmpi.planner.plan import Options, Plan
from einmpi.planner.saving_memory.order import Constraints, other_orders
from einmpi.planner.search import merged_shapes
from einmpi.planner.solving.solver import Solver, Unreachable
from einmpi.planner.states import Groups, Move, States, named

# ---- least bytes ---------------------------------------------------------------------------------
#
# The least memory in which a rank can carry out a plan: most tensors are outside of it.


def least_bytes_of_vertex(cut: Cuts, vertex: Vertex) -> int:
    """Return the bytes of the smallest pieces in which a rank can compute its part of a vertex."""
    einsum = on_a_rank(vertex.computed_einsum, cut.mesh, cut.states[vertex.name])
    tensors = [*(cut.graph[name] for name in vertex.inputs), vertex]
    bounds = [_bound_of_operand(cut, vertex, name) for name in vertex.inputs]
    itemsizes = tuple(np.dtype(tensor.dtype).itemsize for tensor in tensors)
    return least_bytes_of_pieces(Pieces(einsum, (*bounds, vertex.bound), itemsizes))


def with_message_buffers(staying: int, pieces_bytes: int, ranks: int) -> int:
    """Return the least memory limit with room for what stays, and for pieces or message buffers.

    Each of the two buffers takes an eighth of the limit (`stage_of`), but no less than its least
    size and no more than its greatest. Where it takes an eighth, the other six eighths must hold
    everything else.
    """
    with_pieces = staying + pieces_bytes
    if ranks == 1:
        return with_pieces
    without_buffers = staying + ROUNDING_BYTES * ranks
    shares_for_the_rest = MESSAGE_BUFFER_SHARE - 2
    with_an_eighth = -(-without_buffers * MESSAGE_BUFFER_SHARE // shares_for_the_rest)
    with_greatest = without_buffers + 2 * MESSAGE_BUFFER_BYTES
    with_least = without_buffers + 2 * LEAST_MESSAGE_BUFFER_BYTES
    return max(with_pieces, min(with_an_eighth, with_greatest), with_least)


def _bound_of_operand(cut: Cuts, vertex: Vertex, name: str) -> tuple[int, ...]:
    """Return a bound on what a rank has of an operand in dimensions that are not cut in pieces.

    Of a dimension whose index is arithmetic, that is what the rank needs, or its block.
    """
    bound = cut.graph[name].bound
    state = cut.states[vertex.name]
    needed = cut.needed(vertex, name)
    if needed is None:
        return bound
    if not is_inside(cut.mesh, needed, cut.layouts[name], state):
        return most_needed_bound(cut.mesh, needed, state)
    return longest_shares(
        cut.mesh, sides(bound, cut.orders_of(name)), cut.layouts[name], range(len(bound))
    )


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
            if vertex.name in cut.graph.carried:
                takes_none = True  # it takes the memory of what it was before the step
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
        """Return the least memory in which a rank can carry out these cuts.

        Everything but resident inputs is then kept outside of memory, and each vertex is computed
        in the smallest pieces. Those computed in steps have all of their tensors in memory.
        """
        pieces = [least_bytes_of_vertex(cut, vertex) for vertex in cut.graph.computed]
        least = with_message_buffers(self.staying(cut), max(pieces, default=0), self.mesh.ranks)
        if not any(vertex.has_steps for vertex in cut.graph.computed):
            return least
        for vertex, nbytes in zip(cut.graph.computed, self.at_vertices(cut)[1:], strict=True):
            if vertex.has_steps:
                least = max(least, nbytes)
        return least

    def updatable(self, cut: Cuts) -> dict[str, str]:
        """Return the inputs that can be updated in place, each with the output that it becomes."""
        found = {}
        for name, output in self.options.carry.items():
            if not why_not_in_place(cut, name, output, self.options.nan_checked):
                found[name] = output
        return found

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


# ---- fit -----------------------------------------------------------------------------------------
#
# Which inputs can stay loaded between calls within a memory limit.


MOST_TRIALS = 100  # sets of inputs whose memory is computed


def inputs_that_fit(plan: Plan, options: Options, names: Sequence[str]) -> tuple[str, ...]:
    """Return the inputs that can stay loaded if they are cut as a plan without them cuts them.

    They are tried in the order of their first use: what is used later can be read while earlier
    vertices are computed. An input that does not fit is passed over.
    """
    assert options.memory is not None
    limit = options.memory
    graph = plan.graph
    kept: list[str] = []
    waiting = [sorted(names, key=lambda name: graph.position[graph.consumers[name][0]])]
    for _ in range(MOST_TRIALS):
        if not waiting:
            break
        tried = waiting.pop()
        resident = (*plan.resident, *kept, *tried)
        if CutMemory(graph, plan.mesh, options, resident).peak(plan) <= limit:
            kept += tried
        elif len(tried) > 1:
            half = len(tried) // 2
            waiting += [tried[half:], tried[:half]]  # the first half is tried next
    return tuple(kept)


# ---- least memory --------------------------------------------------------------------------------
#
# The cuts with which a rank needs the least memory, when all that can be is kept outside of it.


class _Choice(NamedTuple):
    """A state of a variable."""

    piece_bytes: int  # of the smallest pieces of the vertex
    resident_bytes: int  # of all vertices, or tensors, that share the variable
    state: tuple[int, ...]


def least_memory_states(search: CutSearch) -> States:
    """Return the states of the search's variables for which the least memory is lowest.

    That memory is what stays, which is resident inputs, and either message buffers or the smallest
    pieces of a vertex. What stays is a sum over variables, and the pieces are those of one vertex,
    so each variable can be decided alone once it is known how large pieces may be.
    """
    choices = []
    for variable in range(len(search.problem.variables)):
        found = sorted(_choices(search, variable), key=lambda choice: choice[:2])
        # Those that no other one beats: pieces grow, and resident bytes fall.
        kept: list[_Choice] = []
        for choice in found:
            if not kept or choice.resident_bytes < kept[-1].resident_bytes:
                kept.append(choice)
        choices.append(kept)
    largest_needed = max(of_variable[0].piece_bytes for of_variable in choices)
    sizes = {largest_needed}
    for of_variable in choices:
        sizes.update(choice.piece_bytes for choice in of_variable)
    best_bytes: int | None = None
    best: list[_Choice] = []
    for size in sorted(sizes):
        if size < largest_needed:
            continue
        chosen = []
        for of_variable in choices:
            possible = [choice for choice in of_variable if choice.piece_bytes <= size]
            chosen.append(possible[-1])
        staying = sum(choice.resident_bytes for choice in chosen)
        nbytes = with_message_buffers(staying, size, search.mesh.ranks)
        if best_bytes is None or nbytes < best_bytes:
            best_bytes = nbytes
            best = chosen
    return [choice.state for choice in best]


def _choices(search: CutSearch, number: int) -> Iterator[_Choice]:
    """Yield a choice for each size of the blocks that a rank may have of a variable."""
    variable = search.problem.variables[number]
    sharing = list(search.problem.number.values()).count(number)
    seen = set()
    for state in _states(search, number):
        symbols = range(len(variable.extents))
        shares = longest_shares(search.mesh, variable.sides, state, symbols)
        if shares not in seen:
            seen.add(shares)
            piece, staying = _needs(search, variable, state)
            yield _Choice(piece, sharing * staying, state)


def _states(search: CutSearch, variable: int) -> Iterator[tuple[int, ...]]:
    """Yield the states that a variable may have, on many axes with the axes merged."""
    mesh = search.mesh
    solver = Solver(search.problem, mesh, search.prescribed, search.fixed, across_windows=True)
    uncut = solver.uncut()[variable]
    if search.start is not None:
        yield search.start[variable]
    shapes: Sequence[Groups] = [solver.every_axis.groups]
    if not search.exact_axes:
        shapes = merged_shapes(mesh)
    for shape in shapes:
        move = Move(mesh, shape)
        try:
            rows = solver.rows(variable, move, uncut)
        except Unreachable:
            continue
        for row in rows:
            yield move.expand(row, uncut)


def _needs(search: CutSearch, variable: Variable, state: tuple[int, ...]) -> tuple[int, int]:
    """Return the bytes of the smallest pieces in a state, and of resident inputs."""
    mesh = search.mesh
    vertex = search.graph[variable.name]
    if variable.kind == "tensor":
        if vertex.name not in search.resident:
            return 0, 0
        return 0, block_bytes(
            vertex, mesh, named(state, range(len(variable.extents))), variable.orders
        )
    labels = named(state, vertex.computed_einsum.labels)
    whole: tuple[None, ...] = (None,) * len(mesh.factors)
    layouts = dict.fromkeys(vertex.inputs, whole)
    cut_vertex = Cuts(search.graph, mesh, {vertex.name: labels}, layouts, orders=search.orders)
    staying = 0
    for operand, name in enumerate(vertex.inputs):
        if name in search.resident and ("tensor", name) not in search.problem.number:
            staying += cut_vertex.block_bytes(name, cut_vertex.wanted(vertex.name, operand))
    return least_bytes_of_vertex(cut_vertex, vertex), staying
