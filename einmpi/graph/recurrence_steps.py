"""Groups of vertices along a label as what is computed for one index of it, again and again.

h[t,k] ← tanh(h_1[t,k] + x[t,k]) with h_1[t,k] ← Σ[l](W[k,l] × h[t-1,l]) becomes, 10 times,

    h_1_now[k] ← Σ[l](W[k,l] × h_start[t-1,l])
    h_now[k]   ← tanh(h_1_now[k] + x[t,k])
    h[s,k]     ← where(s == t, h_now[k], h_start[s,k])
    t_next     ← t + 1

where t is a number, and h and t_next take the places of h_start and t after each step: a row of h
is written in each. These are EinSums as all others, so that kernels and costs need no other rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from einmpi.graph.eingraph import EinGraph, Recurrence, Vertex, make_vertex
from einmpi.graph.einsum import make_einsum, reopen
from einmpi.graph.recurrences import (
    Group,
    arranged,
    at_index,
    connected,
    in_groups,
    reads_of,
    shift_of,
)
from einmpi.graph.scalar import Call, Const, Element, Index, IndexEntries, Names, Scalar, unique

Optimize = Callable[[EinGraph], EinGraph]


def with_steps(graph: EinGraph, optimize: Optimize) -> EinGraph:
    """Return a graph with steps in the place of groups, all rewritten by `optimize`.

    The steps of each group, and all other vertices, are rewritten on their own: nothing moves
    into a step that can be computed once.
    """
    parts = _with_copies_inside(in_groups(graph.vertices), graph)
    groups = [part for part in parts if isinstance(part, Group)]
    if not groups:
        return optimize(graph)
    names = Names(graph.by_name)
    for vertex in graph.computed:
        for label in vertex.computed_einsum.labels:
            names.add(label)
    loops = [_GroupSteps(graph, group, names).loop(optimize) for group in groups]
    given = list(graph.inputs)
    once = [part for part in parts if isinstance(part, Vertex) and not part.is_input]
    needed: dict[str, None] = {}
    for loop in loops:
        given += [_as_input(graph[name]) for name in loop.results]
        once += loop.once
        needed.update(dict.fromkeys(loop.reads))
    is_given = {vertex.name for vertex in given}
    outputs = [name for name in dict.fromkeys((*graph.outputs, *needed)) if name not in is_given]
    around = optimize(EinGraph(arranged((*given, *once)), tuple(outputs)))
    return EinGraph((*graph.inputs, *_joined(around, loops)), graph.outputs)


def _with_copies_inside(parts: Sequence[Vertex | Group], graph: EinGraph) -> list[Vertex | Group]:
    """Return vertices and groups with the copies that are read by one group alone as part of it."""
    groups: dict[str, Group] = {}  # by the first vertex that they had, with their copies
    first_of: dict[str, str] = {}  # that first vertex, for each vertex of a group
    for part in parts:
        if isinstance(part, Group):
            first = part.vertices[0].name
            groups[first] = part
            for vertex in part.vertices:
                first_of[vertex.name] = first
    for part in reversed(parts):
        if isinstance(part, Group) or not part.is_auxiliary:
            continue
        readers = [graph[name] for name in graph.consumers[part.name]]
        firsts = {first_of.get(reader.name) for reader in readers}
        first_read = firsts.pop() if len(firsts) == 1 else None
        if first_read is None:
            continue
        group = groups[first_read]
        dimension = _dimension_along(part, readers, group.along)
        if dimension is not None:
            first_of[part.name] = first_read
            along = {**group.along, part.name: dimension}
            groups[first_read] = replace(group, vertices=(part, *group.vertices), along=along)
    found: list[Vertex | Group] = []
    for part in parts:
        if isinstance(part, Group):
            found.append(groups[part.vertices[0].name])
        elif part.name not in first_of:
            found.append(part)
    return found


def _dimension_along(
    vertex: Vertex, readers: Sequence[Vertex], along: Mapping[str, int]
) -> int | None:
    """Return the dimension of a tensor that all readers index along their labels; None: no one."""
    for dimension in range(len(vertex.bound)):
        is_along = True
        for reader in readers:
            label = reader.computed_einsum.output[along[reader.name]]
            for _, index in reads_of(reader, {vertex.name: vertex}):
                is_along = is_along and shift_of(index[dimension], label) is not None
        if is_along:
            return dimension
    return None


def _as_input(vertex: Vertex) -> Vertex:
    return Vertex(vertex.name, vertex.bound, vertex.dtype)


def _joined(around: EinGraph, loops: Sequence[_Loop]) -> list[Vertex]:
    """Return the vertices of loops and around them, in the order in which they are computed."""
    loop_of = {result: loop for loop in loops for result in loop.results}
    computed = {vertex.name for vertex in around.computed}
    reads: dict[str, list[str]] = {}
    members: dict[str, Sequence[Vertex]] = {}

    def add(name: str, inputs: Sequence[str], vertices: Sequence[Vertex]) -> None:
        found = []
        for each in inputs:
            loop = loop_of.get(each)
            if loop is not None:
                found.append(loop.name)
                if loop.name not in members:  # as late as possible, before the first that reads it
                    members[loop.name] = ()
                    add(loop.name, loop.reads, loop.vertices)
            elif each in computed:
                found.append(each)
        reads[name] = found
        members[name] = vertices

    for vertex in around.computed:
        add(vertex.name, vertex.inputs, (vertex,))
    for loop in loops:
        if loop.name not in members:
            add(loop.name, loop.reads, loop.vertices)
    vertices: list[Vertex] = []
    for (name,) in connected(reads):
        vertices += members[name]
    return vertices


@dataclass(frozen=True)
class _Loop:
    """A group as steps, and what their rewriting has found that is the same in all of them."""

    name: str
    vertices: tuple[Vertex, ...]  # those before the first step included
    results: tuple[str, ...]  # the tensors of the group that are read elsewhere
    once: tuple[Vertex, ...]
    reads: tuple[str, ...]  # tensors that are computed elsewhere, or given


@dataclass
class _GroupSteps:
    """Makes steps of a group of a graph; `names` are those in use."""

    graph: EinGraph
    group: Group
    names: Names

    def __post_init__(self) -> None:
        first = self.group.vertices[0]
        self.members = {vertex.name: vertex for vertex in self.group.vertices}
        self.rows: dict[str, int] = {}  # of how many steps the values of a tensor are kept
        for name in self.members:
            rows = self._rows_kept(name)
            if rows is not None:
                self.rows[name] = rows
        self.stacked = list(self.rows)
        label = self.group.label(first)
        self.number = self.names.take_new(f"{label}_start")  # the index of a step
        self.next_number = self.names.take_new(f"{label}_next")
        self.now = {name: self.names.take_new(f"{name}_now") for name in self.members}
        self.start = {name: self.names.take_new(f"{name}_start") for name in self.stacked}
        self.known = dict(self.graph.by_name)  # all vertices so far

    def _rows_kept(self, name: str) -> int | None:
        """Return of how many steps the values of a tensor are kept.

        None if only those of the step under way are read.
        """
        readers = self.graph.consumers[name]
        if self.graph.is_output(name) or any(reader not in self.members for reader in readers):
            return self.group.steps
        distances = []
        for reader in readers:
            for tensor, index in reads_of(self.members[reader], self.members):
                if tensor == name:
                    distances.append(abs(self._shift(reader, tensor, index)))
        most = max(distances, default=0)
        return min(most, self.group.steps) if most else None

    def _shift(self, reader: str, tensor: str, index: IndexEntries) -> int:
        """Return at what distance along the label a vertex of the group reads a tensor of it."""
        label = self.group.label(self.members[reader])
        shift = shift_of(index[self.group.along[tensor]], label)
        assert shift is not None
        return shift

    def _place(self, name: str, shift: int) -> Scalar:
        """Return where a tensor has the values at a distance from the step under way.

        If few are kept, they take each other's places in turn.
        """
        rows = self.rows[name]
        if rows == 1:
            return Const(0)
        number = Call("+", (Element(self.number, ()), Const(shift % rows)))
        return Call("%", (number, Const(rows)))

    def loop(self, optimize: Optimize) -> _Loop:
        """Return the steps, rewritten."""
        before = [self._number_before(), *(self._zeros(name) for name in self.stacked)]
        rows = [self._row(vertex) for vertex in self.group.vertices]
        body = self._rewritten(rows, optimize)
        changing = {vertex.name for vertex in before}
        once: list[Vertex] = []
        steps: list[Vertex] = []
        for vertex in body:
            is_changing = not changing.isdisjoint(vertex.inputs)
            (steps if is_changing else once).append(vertex)
            if is_changing:
                changing.add(vertex.name)
        steps += [self._write(name) for name in self.stacked]
        steps.append(self._next_number())
        carry = [(self.start[name], name) for name in self.stacked]
        carry.append((self.number, self.next_number))
        recurrence = Recurrence(self.stacked[0], self.group.steps, tuple(carry))
        inside = changing.union(vertex.name for vertex in steps)
        reads = unique(*(vertex.inputs for vertex in steps))
        return _Loop(
            f"steps of {recurrence.name}",
            (*before, *(replace(vertex, recurrence=recurrence) for vertex in steps)),
            tuple(name for name in self.stacked if self.rows[name] == self.group.steps),
            tuple(once),
            tuple(name for name in reads if name not in inside),
        )

    def _add(
        self,
        name: str,
        output: Sequence[str],
        expression: Scalar,
        like: Vertex,
        aggregation: str | None = None,
        aggregated: Sequence[str] = (),
        rows: int | None = None,
    ) -> Vertex:
        """Return a new vertex over the labels of a vertex of the group, or over so many rows."""
        extent = like.computed_einsum.extent
        if rows is not None:
            extent[self.group.label(like)] = rows
        einsum, inputs = make_einsum(output, expression, aggregation, aggregated, extent)
        vertex = make_vertex(name, einsum, inputs, self.known, places=like.places)
        self.known[name] = vertex
        return vertex

    def _number_before(self) -> Vertex:
        first = self.group.steps - 1 if self.group.backwards else 0
        return self._add(self.number, (), Const(first), self.group.vertices[0])

    def _next_number(self) -> Vertex:
        operation = "-" if self.group.backwards else "+"
        expression = Call(operation, (Element(self.number, ()), Const(1)))
        return self._add(self.next_number, (), expression, self.group.vertices[0])

    def _zeros(self, name: str) -> Vertex:
        """Return what a tensor is before the first step; nothing reads these values."""
        vertex = self.members[name]
        output = vertex.computed_einsum.output
        zero = Call(vertex.dtype, (Const(0),))
        return self._add(self.start[name], output, zero, vertex, rows=self.rows[name])

    def _row(self, vertex: Vertex) -> Vertex:
        """Return the values of a tensor for the index of the step."""
        einsum = vertex.computed_einsum
        label = self.group.label(vertex)
        output = [other for other in einsum.output if other != label]
        expression = self._at_step(reopen(einsum, vertex.inputs), label)
        return self._add(
            self.now[vertex.name],
            output,
            expression,
            vertex,
            einsum.aggregation,
            einsum.aggregated,
        )

    def _at_step(self, expression: Scalar, label: str) -> Scalar:
        """Return an expression with the number of the step in the place of a label."""

        def read(node: Element, index: IndexEntries) -> Scalar:
            if node.tensor not in self.members:
                return Element(node.tensor, index)
            along = self.group.along[node.tensor]
            shift = shift_of(node.index[along], label)
            if shift == 0:
                return Element(self.now[node.tensor], index[:along] + index[along + 1 :])
            assert shift is not None
            if self.rows[node.tensor] < self.group.steps:
                index = (*index[:along], self._place(node.tensor, shift), *index[along + 1 :])
            return Element(self.start[node.tensor], index)

        return at_index(expression, label, Element(self.number, ()), read)

    def _rewritten(self, rows: Sequence[Vertex], optimize: Optimize) -> list[Vertex]:
        """Return the vertices of a step as `optimize` makes them, with names that are new."""
        computed = {vertex.name for vertex in rows}
        given = unique(*(vertex.inputs for vertex in rows))
        inputs = [_as_input(self.known[name]) for name in given if name not in computed]
        outputs = tuple(self.now[name] for name in self.stacked)
        body = optimize(EinGraph((*inputs, *rows), outputs))
        renamed = {}
        for vertex in body.computed:
            if vertex.name not in computed:
                renamed[vertex.name] = self.names.take_new(vertex.name)
        found = []
        for vertex in body.computed:
            read = tuple(renamed.get(name, name) for name in vertex.inputs)
            name = renamed.get(vertex.name, vertex.name)
            self.known[name] = replace(vertex, name=name, inputs=read)
            found.append(self.known[name])
        return found

    def _write(self, name: str) -> Vertex:
        """Return a tensor with the values of a step among those of the steps before."""
        vertex = self.members[name]
        output = vertex.computed_einsum.output
        label = self.group.label(vertex)
        place: Scalar = Element(self.number, ())
        if self.rows[name] < self.group.steps:
            place = self._place(name, 0)
        now = Element(self.now[name], tuple(other for other in output if other != label))
        before = Element(self.start[name], output)
        value = Call("where", (Call("==", (Index(label), place)), now, before))
        written = self._add(name, output, value, vertex, rows=self.rows[name])
        changed = vertex.elements // max(1, self.group.steps)
        return replace(written, origin=vertex.origin, changed=changed)
