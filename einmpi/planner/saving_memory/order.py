"""Orders of a graph's vertices in which tensors are freed early."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from einmpi.graph.eingraph import EinGraph, Recurrence, Vertex
from einmpi.planner.memory import FusedChain

# For a unit, the key by which it is chosen among those that are ready: the least is computed next.
Priority = tuple[int, int]


@dataclass(frozen=True)
class Constraints:
    """What an order has to respect besides the graph itself.

    Attributes
    ----------
    nbytes : mapping of str to int
        The memory of each tensor on a rank; 0 for those that take none of their own.
    updates : mapping of str to str
        Outputs that are written over an input, and that input: all other vertices that read it
        come before, if they do so in the given order.
    checked : collection of str
        Tensors that come before all updates, if they do so in the given order.
    first : collection of str
        Vertices that stay at the beginning, in the given order.
    """

    nbytes: Mapping[str, int]
    updates: Mapping[str, str] = field(default_factory=dict)
    checked: Collection[str] = ()
    first: Collection[str] = ()


def other_orders(graph: EinGraph, constraints: Constraints) -> Iterator[EinGraph]:
    """Yield the graph in orders that may need less memory, each once, but not as given.

    The first takes, of all vertices that can be computed, the one after which the memory in use has
    grown least. The second one keeps to the given order, but brings forward what needs no memory.
    The time is about linear in the size of the graph.
    """
    units = _units(graph, _with_updates(graph, constraints), constraints)
    known = [graph.computed]
    for keeps_order in (False, True):
        order = _Ordering(graph, units, constraints, keeps_order).order()
        assert len(order) == len(graph.computed), "the constraints contradict each other"
        if order not in known:
            known.append(order)
            yield replace(graph, vertices=(*graph.inputs, *order))


def with_chains_together(graph: EinGraph, chains: Sequence[FusedChain]) -> EinGraph | None:
    """Return the graph with the vertices of each chain one after another, in their order.

    Everything else stays as near to the given order as it can. None if there is no such order,
    because two chains need results of each other.
    """
    chain_of = {name: chain.vertices for chain in chains for name in chain.vertices}
    for members in graph.members.values():
        chain_of.update({vertex.name: tuple(each.name for each in members) for vertex in members})
    groups: dict[tuple[str, ...], None] = {}  # in the order of their first vertices
    for vertex in graph.computed:
        groups[chain_of.get(vertex.name, (vertex.name,))] = None
    constraints = Constraints(dict.fromkeys(graph.by_name, 0))
    units = _units(graph, groups, constraints)
    order = _Ordering(graph, units, constraints, keeps_order=True).order()
    if len(order) < len(graph.computed):
        return None
    return replace(graph, vertices=(*graph.inputs, *order))


@dataclass(frozen=True)
class _Unit:
    """Vertices that are computed one after another: an update, with what only it reads, or those
    of a recurrence."""

    vertices: tuple[Vertex, ...]
    reads: tuple[str, ...]  # tensors from outside, each once
    nbytes: int  # of its results that are left when it is complete
    needs: tuple[str, ...]  # vertices that come before


def _with_updates(graph: EinGraph, constraints: Constraints) -> list[list[str]]:
    """Return the computed vertices in order, but a product stays with the update that it is for.

    The vertices of a recurrence stay together.
    """
    joined: dict[str, str] = {}  # update → the last vertex before it that only it reads
    for vertex in graph.computed:
        if vertex.recurrence is not None:
            continue
        readers = graph.consumers[vertex.name]
        if len(readers) != 1 or graph.is_output(vertex.name):
            continue
        update = readers[0]
        # Another update that must come after the vertex may have to come before this one.
        is_free = not any(name in constraints.updates.values() for name in vertex.inputs)
        if update in constraints.updates and is_free and vertex.name not in constraints.checked:
            joined[update] = vertex.name
    products = set(joined.values())
    groups = []
    steps: dict[Recurrence, list[str]] = {}
    of_first: dict[str, list[str]] = {}  # vertices that are computed with one
    for vertex in graph.computed:
        if vertex.recurrence in steps:
            steps[vertex.recurrence].append(vertex.name)
        elif vertex.computed_with:
            of_first[vertex.computed_with].append(vertex.name)
        elif vertex.name in joined:
            groups.append([joined[vertex.name], vertex.name])
        elif vertex.name not in products:
            groups.append([vertex.name])
            of_first[vertex.name] = groups[-1]
            if vertex.recurrence is not None:
                steps[vertex.recurrence] = groups[-1]
    return groups


def _units(
    graph: EinGraph, groups: Iterable[Sequence[str]], constraints: Constraints
) -> list[_Unit]:
    """Return groups of vertices as units."""
    earlier = _required_before(graph, constraints)
    units = []
    for names in groups:
        vertices = tuple(graph[name] for name in names)
        reads: dict[str, None] = {}
        needs: dict[str, None] = {}
        for vertex in vertices:
            needs.update(dict.fromkeys(earlier.get(vertex.name, ())))
            for name in vertex.inputs:
                if name not in names:
                    reads[name] = None
        for name in reads:
            if not graph[name].is_input:
                needs[name] = None
        units.append(_Unit(vertices, tuple(reads), constraints.nbytes[names[-1]], tuple(needs)))
    return units


def _required_before(graph: EinGraph, constraints: Constraints) -> dict[str, list[str]]:
    """Return, for each update, the vertices that must be computed before its input is lost."""
    position = graph.position
    found: dict[str, list[str]] = {}
    for output, name in constraints.updates.items():
        others = [*graph.consumers[name], *constraints.checked]
        found[output] = [other for other in others if position[other] < position[output]]
    return found


class _Ordering:
    """The state of memory while units are chosen one by one."""

    def __init__(
        self, graph: EinGraph, units: list[_Unit], constraints: Constraints, keeps_order: bool
    ) -> None:
        self.graph = graph
        self.units = units
        self.nbytes = constraints.nbytes
        self.keeps_order = keeps_order
        self.first = frozenset(constraints.first)
        self.readers: dict[str, list[int]] = {vertex.name: [] for vertex in graph.vertices}
        self.waiting_for: list[int] = []  # of each unit: how many vertices must come before
        self.unblocks: dict[str, list[int]] = {}  # vertex → units that wait for it
        for number, unit in enumerate(units):
            self.waiting_for.append(len(unit.needs))
            for name in unit.reads:
                self.readers[name].append(number)
            for name in unit.needs:
                self.unblocks.setdefault(name, []).append(number)
        self.readers_left = {name: len(numbers) for name, numbers in self.readers.items()}
        self.is_done = [False] * len(units)
        self.ready: list[tuple[Priority, int]] = []  # a heap; entries that are outdated stay in it

    def _priority(self, number: int) -> Priority:
        """Return the key of a unit: by how much more memory is in use after it than before it.

        Of equal ones, the first in the given order is taken.
        """
        unit = self.units[number]
        growth = unit.nbytes
        for name in unit.reads:
            readers_left = self.readers_left[name]
            if self.graph[name].is_input and readers_left == len(self.readers[name]):
                growth += self.nbytes[name]
            if readers_left == 1 and not self.graph.is_output(name):
                growth -= self.nbytes[name]
        if self.keeps_order:
            growth = min(growth, 1)  # all that needs more memory counts alike
        return growth, number

    def _push(self, number: int) -> None:
        heapq.heappush(self.ready, (self._priority(number), number))

    def order(self) -> tuple[Vertex, ...]:
        """Return the computed vertices in the order found: all, if there is an order."""
        for number, count in enumerate(self.waiting_for):
            if not count:
                self._push(number)
        chosen: list[int] = []
        for number, unit in enumerate(self.units):
            if unit.vertices[-1].name in self.first:
                self._take(number)
                chosen.append(number)
        while self.ready:
            priority, number = heapq.heappop(self.ready)
            if not self.is_done[number] and priority == self._priority(number):
                self._take(number)
                chosen.append(number)
        order: list[Vertex] = []
        for number in chosen:
            order += self.units[number].vertices
        return tuple(order)

    def _take(self, number: int) -> None:
        """Note that a unit is computed next."""
        self.is_done[number] = True
        unit = self.units[number]
        for name in unit.reads:
            self._note_read(name)
        for vertex in unit.vertices:
            for other in self.unblocks.get(vertex.name, ()):
                self.waiting_for[other] -= 1
                if not self.waiting_for[other]:
                    self._push(other)

    def _note_read(self, name: str) -> None:
        """Renew the keys of the other readers of a tensor, now that one has read it."""
        readers = self.readers[name]
        is_first = self.readers_left[name] == len(readers)
        self.readers_left[name] -= 1
        is_loaded_now = is_first and self.graph[name].is_input
        if not self.nbytes[name] or not (is_loaded_now or self.readers_left[name] == 1):
            return
        for other in readers:
            if not self.is_done[other] and not self.waiting_for[other]:
                self._push(other)
