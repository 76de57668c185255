"""The cuts with which a rank needs the least memory, when all that can be is kept outside of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from einmpi.graph.eingraph import Vertex
from einmpi.planner.cut_search import CutSearch
from einmpi.planner.memory import Cuts, block_bytes, longest_shares
from einmpi.planner.saving_memory.cut_memory import least_bytes_of_vertex, with_message_buffers
from einmpi.planner.search import EXACT_AXES, merged_shapes
from einmpi.planner.solving.move_costs import Groups, Move, States
from einmpi.planner.solving.solver import Solver, Unreachable


@dataclass(frozen=True)
class _Choice:
    """A state of a variable."""

    resident_bytes: int  # of all vertices, or tensors, that share the variable
    piece_bytes: int  # of the smallest pieces of the vertex
    state: tuple[int, ...]


def least_memory_states(search: CutSearch) -> States:
    """Return the states of the search's variables for which the least memory is lowest.

    That memory is what stays, which is resident inputs, and either message buffers or the smallest
    pieces of a vertex. What stays is a sum over variables, and the pieces are those of one vertex,
    so each variable can be decided alone once it is known how large pieces may be.
    """
    choices = []
    for variable in range(len(search.problem.variables)):
        choices.append(_best_choices(_LeastOfVariable(search, variable).choices()))
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


def _best_choices(choices: Iterator[_Choice]) -> list[_Choice]:
    """Return the choices that no other one beats: pieces grow, and resident bytes fall."""
    kept: list[_Choice] = []
    for choice in sorted(choices, key=lambda each: (each.piece_bytes, each.resident_bytes)):
        if not kept or choice.resident_bytes < kept[-1].resident_bytes:
            kept.append(choice)
    return kept


class _LeastOfVariable:
    """The memory that the states of one variable need."""

    def __init__(self, search: CutSearch, variable: int) -> None:
        self.search = search
        self.variable = variable
        problem = search.problem
        self.kind = problem.variables[variable].kind
        self.vertex: Vertex = search.graph[problem.variables[variable].name]
        self.extents = problem.variables[variable].extents
        sharing = [number for number in problem.number.values() if number == variable]
        self.copies = len(sharing)

    def choices(self) -> Iterator[_Choice]:
        """Yield a choice for each size of the blocks that a rank may have."""
        seen = set()
        for state in self._states():
            symbols = range(len(self.extents))
            shares = longest_shares(self.search.mesh, self.extents, state, symbols)
            if shares not in seen:
                seen.add(shares)
                yield self._choice(state)

    def _states(self) -> Iterator[tuple[int, ...]]:
        """Yield the states that the variable may have, on many axes with the axes merged."""
        search = self.search
        mesh = search.mesh
        solver = Solver(search.problem, mesh, search.prescribed, search.fixed, across_windows=True)
        uncut = (len(self.extents),) * len(mesh.factors)
        if search.start is not None:
            yield search.start[self.variable]
        if len(mesh.factors) <= EXACT_AXES:
            shapes: Sequence[Groups] = [[(axis,) for axis in range(len(mesh.factors))]]
        else:
            shapes = merged_shapes(mesh)
        for shape in shapes:
            move = Move(mesh, shape)
            try:
                rows = solver.rows(self.variable, move, uncut)
            except Unreachable:
                continue
            for row in rows:
                yield move.expand(row, uncut)

    def _choice(self, state: tuple[int, ...]) -> _Choice:
        """Return what a state needs."""
        search = self.search
        mesh = search.mesh
        if self.kind == "tensor":
            if self.vertex.name not in search.resident:
                return _Choice(0, 0, state)
            layout = [None if cut == len(self.extents) else cut for cut in state]
            return _Choice(self.copies * block_bytes(self.vertex, mesh, layout), 0, state)
        einsum = self.vertex.computed_einsum
        labels = tuple((*einsum.labels, None)[cut] for cut in state)
        whole: tuple[None, ...] = (None,) * len(mesh.factors)
        layouts = dict.fromkeys(self.vertex.inputs, whole)
        cut_vertex = Cuts(search.graph, mesh, {self.vertex.name: labels}, layouts)
        staying = 0
        for operand, name in enumerate(self.vertex.inputs):
            if name in search.resident and ("tensor", name) not in search.problem.number:
                cuts = cut_vertex.wanted(self.vertex.name, operand)
                staying += cut_vertex.block_bytes(name, cuts)
        piece = least_bytes_of_vertex(cut_vertex, self.vertex)
        return _Choice(self.copies * staying, piece, state)
