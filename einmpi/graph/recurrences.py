"""Tensors that read themselves at earlier or later indices of one label: groups of vertices.

In a graph as it is written, h[t,k] ← tanh(h_1[t,k] + x[t,k]) reads h_1[t,k], which reads
h[t-1,l]: the vertices depend on each other, and each has a value for every t. What is not in such
a group, such as x[t,k], or the gradient of a weight, is an ordinary vertex over all t at once.
`graph/recurrence_steps.py` makes of a group what is computed for one t.

The gradient of h[t,k] ← o[t,k] × tanh(c[t,k]) reads o, which later steps do not need. If a step
backwards computes it again, from h[t-1,l], it needs one row of it, and steps forwards keep none of
it. What later steps need, such as h, is kept: the rest is computed from that.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from einmpi.errors import OperationError
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.einsum import EinSum, make_einsum, reopen
from einmpi.graph.index_arithmetic import affine_of
from einmpi.graph.scalar import (
    Call,
    Const,
    Element,
    Index,
    IndexEntries,
    Names,
    Scalar,
    rebuild,
    with_gathers,
)

ALLOWED = "reads of h[t-1,k], h[t-2,k] and so on, or of h[t+1,k] and so on, along one label t"


@dataclass(frozen=True)
class Group:
    """Vertices that depend on each other along a label.

    Attributes
    ----------
    vertices
        In the order in which they are computed for one index of the label.
    along
        The dimension of each tensor that the label indexes.
    steps
        The extent of the label.
    backwards
        Whether the last index is computed first.
    """

    vertices: tuple[Vertex, ...]
    along: Mapping[str, int]
    steps: int
    backwards: bool

    def label(self, vertex: Vertex) -> str:
        """Return the label of a vertex along which the group is computed."""
        return vertex.computed_einsum.output[self.along[vertex.name]]

    def read_at_other_indices(self) -> Iterator[str]:
        """Yield the tensors that some vertex reads at another index of the label than its own."""
        known = {vertex.name: vertex for vertex in self.vertices}
        found: set[str] = set()
        for vertex in self.vertices:
            for name, index in reads_of(vertex, known):
                if shift_of(index[self.along[name]], self.label(vertex)) != 0:
                    found.add(name)
        yield from (name for name in known if name in found)

    @property
    def indices(self) -> Sequence[int]:
        """The indices of the label, in the order in which they are computed."""
        forwards = range(self.steps)
        return forwards[::-1] if self.backwards else forwards


# ---- vertices that depend on each other ----------------------------------------------------------


def connected(reads: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return names in groups that read each other, each group after those that it reads.

    `reads` has for each name those that it reads. Of groups that are ready, the one with the first
    name comes next; in a group, names are in the order of `reads`.
    """
    group_of = _components(reads)
    members: dict[str, list[str]] = {}
    for name in reads:
        members.setdefault(group_of[name], []).append(name)
    missing: dict[str, set[str]] = {group: set() for group in members}
    readers: dict[str, set[str]] = {group: set() for group in members}
    for name, names in reads.items():
        for needed in names:
            if group_of[needed] != group_of[name]:
                missing[group_of[name]].add(group_of[needed])
                readers[group_of[needed]].add(group_of[name])
    position = {group: number for number, group in enumerate(members)}
    ready = [(position[group], group) for group, needed in missing.items() if not needed]
    heapq.heapify(ready)
    order = []
    while ready:
        _, group = heapq.heappop(ready)
        order.append(members[group])
        for reader in sorted(readers[group], key=position.__getitem__):
            missing[reader].discard(group)
            if not missing[reader]:
                heapq.heappush(ready, (position[reader], reader))
    return order


def _components(reads: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return for each name the same name as for all that it reads and that read it (Tarjan)."""
    number: dict[str, int] = {}  # in the order in which names are found
    lowest: dict[str, int] = {}  # the first of those on the stack that a name leads to
    stack: list[str] = []
    found: dict[str, str] = {}
    for root in reads:
        waiting: list[tuple[str, Iterator[str]]] = []
        if root not in number:
            number[root] = lowest[root] = len(number)
            stack.append(root)
            waiting.append((root, iter(reads[root])))
        while waiting:
            name, others = waiting[-1]
            for other in others:
                if other not in number:
                    number[other] = lowest[other] = len(number)
                    stack.append(other)
                    waiting.append((other, iter(reads[other])))
                    break
                if other not in found:
                    lowest[name] = min(lowest[name], number[other])
            else:
                waiting.pop()
                if waiting:
                    reader = waiting[-1][0]
                    lowest[reader] = min(lowest[reader], lowest[name])
                if lowest[name] == number[name]:
                    while name not in found:
                        found[stack.pop()] = name
    return found


def until_stable(found: set[str]) -> Iterator[None]:
    """Yield as long as names are added to a set: twice where vertices are in order."""
    size = -1
    while size != len(found):
        size = len(found)
        yield


def in_groups(vertices: Sequence[Vertex]) -> list[Vertex | Group]:
    """Return the vertices of a graph in the order in which they are computed, some in groups.

    OperationError if some depend on each other and cannot be computed one index after another.
    """
    if _is_ordered(vertices):
        return list(vertices)
    known = {vertex.name: vertex for vertex in vertices}
    found: list[Vertex | Group] = []
    for names in connected({vertex.name: vertex.inputs for vertex in vertices}):
        members = [known[name] for name in names]
        is_group = len(members) > 1 or members[0].name in members[0].inputs
        found.append(find_group(members) if is_group else members[0])
    return found


def arranged(vertices: Sequence[Vertex]) -> tuple[Vertex, ...]:
    """Return vertices in the order in which they are computed."""
    found: list[Vertex] = []
    for each in in_groups(vertices):
        found += each.vertices if isinstance(each, Group) else (each,)
    return tuple(found)


def _is_ordered(vertices: Sequence[Vertex]) -> bool:
    known: set[str] = set()
    for vertex in vertices:
        if not known.issuperset(vertex.inputs):
            return False
        known.add(vertex.name)
    return True


# ---- groups along a label ------------------------------------------------------------------------


def find_group(members: Sequence[Vertex]) -> Group:
    """Return vertices that depend on each other as a group; OperationError if they are none."""
    problems: list[OperationError] = []
    for dimension in range(len(members[0].bound)):
        along = _dimensions_along(members, dimension)
        if along is None:
            continue
        try:
            return _group_along(members, along)
        except OperationError as error:
            problems.append(error)
    if problems:
        raise problems[0]
    name = members[0].name
    raise OperationError(f"{name} depends on itself, and not along one of its labels", ALLOWED)


def _dimensions_along(members: Sequence[Vertex], first: int) -> dict[str, int] | None:
    """Return the dimension of each tensor that is indexed by the label of a group.

    `first` is that of the first vertex. None if some tensor is read elsewhere than at a constant
    distance from the label.
    """
    known = {vertex.name: vertex for vertex in members}
    along = {members[0].name: first}
    waiting = [members[0]]
    while waiting:
        vertex = waiting.pop()
        label = vertex.computed_einsum.output[along[vertex.name]]
        for name, index in reads_of(vertex, known):
            if name not in along:
                possible = [
                    k for k, entry in enumerate(index) if shift_of(entry, label) is not None
                ]
                if not possible:
                    return None
                along[name] = possible[0]
                waiting.append(known[name])
            elif shift_of(index[along[name]], label) is None:
                return None
    return along


def _group_along(members: Sequence[Vertex], along: Mapping[str, int]) -> Group:
    """Return the group, given the dimensions of its label; OperationError if there is no order."""
    known = {vertex.name: vertex for vertex in members}
    steps = members[0].bound[along[members[0].name]]
    directions: dict[bool, str] = {}  # whether backwards → a tensor that is read so
    same_step: dict[str, list[str]] = {vertex.name: [] for vertex in members}
    for vertex in members:
        label = vertex.computed_einsum.output[along[vertex.name]]
        extent = vertex.bound[along[vertex.name]]
        if extent != steps:
            what = f"{members[0].name} and {vertex.name} depend on each other along {label}"
            raise OperationError(f"{what}, which has extents {steps} and {extent}", "one extent")
        for name, index in reads_of(vertex, known):
            shift = shift_of(index[along[name]], label)
            assert shift is not None
            if shift == 0:
                same_step[vertex.name].append(name)
            else:
                directions[shift > 0] = name
    if len(directions) == 2:
        what = (
            f"{directions[False]} is read at earlier and {directions[True]} at later indices of "
            f"{members[0].computed_einsum.output[along[members[0].name]]}"
        )
        raise OperationError(what, "one direction")
    order = connected(same_step)
    for names in order:
        if len(names) > 1 or names[0] in same_step[names[0]]:
            label = known[names[0]].computed_einsum.output[along[names[0]]]
            what = f"{names[0]} depends on itself at the same {label}"
            raise OperationError(what, ALLOWED)
    vertices = tuple(known[names[0]] for names in order)
    return Group(vertices, along, steps, backwards=True in directions)


def reads_of(vertex: Vertex, known: Mapping[str, Vertex]) -> Iterator[tuple[str, IndexEntries]]:
    """Yield the operands of a vertex among known ones, with their indices."""
    for name, index in zip(vertex.inputs, vertex.computed_einsum.operands, strict=True):
        if name in known:
            yield name, index


def shift_of(entry: str | Scalar, label: str) -> int | None:
    """Return the constant distance of an index from a label; None if there is none."""
    affine = affine_of(entry if isinstance(entry, str) else unclamped(entry))
    if affine is None or affine.terms != ((label, 1),):
        return None
    return affine.constant


def unclamped(index: Scalar) -> Scalar:
    """Return an index without what keeps it inside of its tensor where a condition fails."""
    match index:
        case Call("maximum" | "minimum", (inner, Const())):
            return unclamped(inner)
        case Call("where", (_, inner, Const(0)) | (_, Const(0), inner)):
            return unclamped(inner)
    return index


def at_index(
    expression: Scalar,
    label: str,
    number: Scalar,
    read: Callable[[Element, IndexEntries], Scalar],
) -> Scalar:
    """Return an expression with a number in the place of a label.

    `read` returns what is read in the place of an element, given the index that it has then.
    """

    def leaf(node: Scalar) -> Scalar:
        if node == Index(label):
            return number
        if not isinstance(node, Element):
            return node
        return read(node, with_gathers(node.index, inside, {label: number}))

    def inside(part: Scalar) -> Scalar:
        return rebuild(part, leaf)

    return inside(expression)


def vertex_at(group: Group, vertex: Vertex, index: int) -> tuple[EinSum, tuple[str, ...]]:
    """Return the EinSum of a vertex of a group at one index of its label, and what it reads."""
    einsum = vertex.computed_einsum
    label = group.label(vertex)
    expression = at_index(
        reopen(einsum, vertex.inputs),
        label,
        Const(index),
        lambda node, entries: Element(node.tensor, entries),
    )
    output = [other for other in einsum.output if other != label]
    return make_einsum(output, expression, einsum.aggregation, einsum.aggregated, einsum.extent)


# ---- tensors that are computed again ------------------------------------------------------------

# An operand of at most this share of what is computed again from it is kept: an eighth.
SMALL_SHARE = 8

_Reader = Group | None  # the group of a reader; None for all that are in no group


def computed_again(graph: EinGraph, names: Collection[str]) -> EinGraph:
    """Return a graph in which readers of named tensors of groups, outside of these, read copies."""
    if not names:
        return graph
    groups = [part for part in in_groups(graph.vertices) if isinstance(part, Group)]
    group_of = {vertex.name: group for group in groups for vertex in group.vertices}
    for group in groups:
        graph = _Copies(graph, group, group_of).read_instead(names)
    return graph


@dataclass
class _Copies:
    """Copies of tensors of a group, for readers in each other group and in none."""

    graph: EinGraph
    group: Group
    group_of: Mapping[str, Group]
    made: dict[tuple[str, str], Vertex] = field(default_factory=dict)  # by tensor and reader

    def __post_init__(self) -> None:
        self.members = {vertex.name: vertex for vertex in self.group.vertices}
        self.states = set(self.group.read_at_other_indices())
        self.names = Names(self.graph.by_name)

    def read_instead(self, names: Collection[str]) -> EinGraph:
        """Return the graph in which copies are read in place of the named tensors."""
        self.dropped = {name for name in names if name in self.members and self._may_drop(name)}
        vertices = []
        for vertex in self.graph.vertices:
            if vertex.name not in self.members:
                reader = self.group_of.get(vertex.name)
                inputs = [
                    self._copy(reader, name) if name in self.dropped else name
                    for name in vertex.inputs
                ]
                vertex = replace(vertex, inputs=tuple(inputs))
            vertices.append(vertex)
        if not self.made:
            return self.graph
        return EinGraph(arranged((*vertices, *self.made.values())), self.graph.outputs)

    def _may_drop(self, name: str) -> bool:
        """Return whether all that read a tensor of the group can read copies of it."""
        if name in self.states or self.graph.is_output(name):
            return False
        return all(self._can_compute(reader, name) for reader in self._other_readers(name))

    def _other_readers(self, name: str) -> Iterator[Vertex]:
        for reader in self.graph.consumers[name]:
            if reader not in self.members:
                yield self.graph[reader]

    def _can_compute(self, reader: Vertex, name: str) -> bool:
        """Return whether the steps of a reader can compute a tensor, before they read it."""
        group = self.group_of.get(reader.name)
        if group is None:
            return True
        if group.steps != self.group.steps:
            return False
        for _, index in reads_of(reader, {name: self.graph[name]}):
            shift = shift_of(index[self.group.along[name]], group.label(reader))
            if shift is None or (shift != 0 and (shift > 0) != group.backwards):
                return False
        return True

    def _copy(self, reader: _Reader, name: str) -> str:
        """Return the copy that a reader reads in the place of a tensor."""
        key = (name, "" if reader is None else reader.vertices[0].name)
        if key not in self.made:
            vertex = self.graph[name]
            inputs = []
            for operand, index in zip(vertex.inputs, vertex.computed_einsum.operands, strict=True):
                is_gone = self._is_gone(reader, vertex, operand, index)
                inputs.append(self._copy(reader, operand) if is_gone else operand)
            copied = self.names.take_new(f"{name}_again")
            self.made[key] = replace(vertex, name=copied, inputs=tuple(inputs), is_auxiliary=True)
        return self.made[key].name

    def _is_gone(
        self, reader: _Reader, vertex: Vertex, operand: str, index: Sequence[object]
    ) -> bool:
        """Return whether an operand of what is computed again need not have been kept."""
        if operand in self.members:
            has_other_readers = any(self._other_readers(operand))
            is_kept = operand in self.states or self.graph.is_output(operand) or has_other_readers
            return operand in self.dropped or not is_kept
        read = self.graph[operand]
        if reader is None or read.is_input or self.graph.is_output(operand):
            return False
        if any(self._other_readers(operand)) or operand in self.group_of:
            return False
        # Along the label, a step computes one row of it.
        label = self.group.label(vertex) if vertex.name in self.members else None
        return label in index and SMALL_SHARE * read.nbytes > vertex.nbytes
