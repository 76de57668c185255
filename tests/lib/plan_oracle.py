"""Layouts, volumes and best plans from their definitions, without the planner; random graphs."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.language.parse import build_graphs, parse_program
from einmpi.language.syntax import Source

if TYPE_CHECKING:
    from einmpi.planner.mesh import Mesh

R, P = "R", "P"
Symbol = int | str  # a dimension or label by its number, R, or P
Axes = tuple[Symbol, ...]  # one symbol a mesh axis


@cache
def axes_of(ranks: int, nodes: int = 1) -> tuple[int, ...]:
    """Return the lengths of the mesh axes: the prime factors in turns, the largest first.

    Those between nodes come first.
    """
    if nodes > 1:
        return (*axes_of(nodes), *axes_of(ranks // nodes))
    turn = [p for p in range(ranks, 1, -1) if ranks % p == 0 and all(p % d for d in range(2, p))]
    return (*turn, *axes_of(ranks // prod(turn))) if turn else ()


def windows(factors: Sequence[int], extent: int) -> list[set[int]]:
    """Neighbouring axes, taken from the first on, for as long as their product fits the extent."""
    found: list[set[int]] = [set()]
    for axis, factor in enumerate(factors):
        if factor <= extent:
            if prod(factors[a] for a in found[-1]) * factor > extent:
                found.append(set())
            found[-1].add(axis)
    return [window for window in found if window]


def in_order(factors: Sequence[int], found: Sequence[set[int]]) -> list[list[int]]:
    """The axes of each window in the order of the digits that they slice.

    Lengths that most windows have come first. One that a window has several times counts anew each
    time: the second axis of a length comes after all first ones that as many windows have.
    """
    if len(found) < 2:
        return [sorted(window) for window in found]
    turns = [
        {axis: sum(factors[a] == factors[axis] for a in window if a <= axis) for axis in window}
        for window in found
    ]
    kinds = Counter((factors[axis], turn) for window in turns for axis, turn in window.items())
    order = sorted(kinds, key=lambda kind: (-kinds[kind], kind[1], -kind[0]))
    return [
        [axis for kind in order for axis in window if (factors[axis], window[axis]) == kind]
        for window in turns
    ]


@cache
def places(factors: Sequence[int], extent: int) -> dict[int, tuple[int, ...]]:
    """For each axis its length and those before it in its window: the digit that it slices."""
    return {
        axis: tuple(factors[a] for a in window[: place + 1])
        for window in in_order(factors, windows(factors, extent))
        for place, axis in enumerate(window)
    }


@cache
def may_cut(factors: Sequence[int], extent: int, axes: frozenset[int]) -> bool:
    """Whether these axes slice different digits, all of them digits of one window."""
    place_of = places(factors, extent)
    if not axes <= place_of.keys():
        return False
    sliced = {place_of[axis] for axis in axes}
    longest = max(sliced, key=len, default=())
    nested = all(longest[: len(place)] == place for place in sliced)
    return nested and len(sliced) == len(axes)


def fits(ranks: int, extents: Sequence[int], axes: Axes, nodes: int = 1) -> bool:
    """Whether the axes given to each dimension (or label) can cut it together."""
    return all(
        may_cut(
            axes_of(ranks, nodes),
            extent,
            frozenset(axis for axis, symbol in enumerate(axes) if symbol == d),
        )
        for d, extent in enumerate(extents)
    )


@cache
def layouts(ranks: int, extents: tuple[int, ...], nodes: int = 1) -> tuple[Axes, ...]:
    """Every way to give each axis to a dimension (or label) of these extents, or to R."""
    every = itertools.product((*range(len(extents)), R), repeat=len(axes_of(ranks, nodes)))
    return tuple(axes for axes in every if fits(ranks, extents, axes, nodes))


# ---- volumes ----------------------------------------------------------------------------------


def owned(factors: Sequence[int], extent: int, axes: Collection[int], rank: int) -> list[int]:
    """The indices of a dimension whose digit on each of these axes is the rank's."""
    place_of = places(tuple(factors), extent)
    found = []
    for index in range(extent):
        digits = {a: index * prod(place_of[a]) // extent % factors[a] for a in axes}
        if all(digits[axis] == rank // prod(factors[axis + 1 :]) % factors[axis] for axis in axes):
            found.append(index)
    return found


def received(factors: Sequence[int], extents: Sequence[int], source: Axes, target: Axes) -> int:
    """Return the words that all ranks receive: what a rank needs and does not have. No P."""
    total = 0
    for rank in range(prod(factors)):
        wanted = common = 1
        for d, extent in enumerate(extents):
            have, want = (
                set(owned(factors, extent, [a for a, s in enumerate(axes) if s == d], rank))
                for axes in (source, target)
            )
            wanted *= len(want)
            common *= len(want & have)
        total += wanted - common
    return total


def crossing(
    factors: Sequence[int], between: int, extents: Sequence[int], source: Axes, target: Axes
) -> int:
    """Return the words that all nodes receive: what a node needs and does not have. No P."""
    each, total = prod(factors[between:]), 0
    for first in range(0, prod(factors), each):
        held, wanted = (
            {
                element
                for rank in range(first, first + each)
                for element in itertools.product(
                    *(
                        owned(factors, extent, [a for a, s in enumerate(axes) if s == d], rank)
                        for d, extent in enumerate(extents)
                    )
                )
            }
            for axes in (source, target)
        )
        total += len(wanted - held)
    return total


def row(factor: int, source: Symbol, target: Symbol) -> tuple[Fraction, ...]:
    """(BD, BS, G, OV, SG) of one axis, as the planner's table has them."""
    f, one = Fraction(factor), Fraction(1)
    if source == P:
        return (one if target == R else 1 / f), one, f, 1 / f, one
    if source == R:
        return (one, one, one, one, 1 / f) if target == R else (1 / f, 1 / f, one, 1 / f, one)
    if target == R:
        return one, 1 / f, one, 1 / f, one
    return 1 / f, 1 / f, one, 1 / f if source == target else 1 / f**2, one


@cache
def _share(pairs: tuple[tuple[int, Symbol, Symbol], ...], alone: int) -> Fraction:
    wanted, held, partials, common, _ = (
        prod(c) for c in zip(*(row(*pair) for pair in pairs), strict=True)
    )
    shared = prod(row(*pair)[-1] for pair in pairs[alone:])
    rest = (1 - 1 / partials) * held - common
    return wanted + (rest * shared if rest > 0 else rest)


def volume(factors: Sequence[int], source: Axes, target: Axes, between: int = 0) -> Fraction:
    """Tensors' worth of words that all ranks together receive, by the closed formula.

    The first axes are `between` nodes: replicas there share a reduction only if it goes from node
    to node.
    """
    pairs = tuple(zip(factors, source, target, strict=True))
    return (
        prod(factors) * _share(pairs, 0 if P in source[:between] else between)
        if pairs
        else Fraction(0)
    )


@cache
def _with_digit(factors: tuple[int, ...], extent: int, axis: int, digit: int) -> frozenset[int]:
    return frozenset(owned(factors, extent, [axis], digit * prod(factors[axis + 1 :])))


@cache
def _staying(
    factors: tuple[int, ...],
    extents: tuple[int, ...],
    turns: tuple[tuple[int, Symbol, Symbol], ...],
) -> int:
    """Return the elements that stay on their rank, over all digits of the axes that turn."""
    total = 0
    for digits in itertools.product(*(range(factors[axis]) for axis, _, _ in turns)):
        count = 1
        for d, extent in enumerate(extents):
            cutting = [
                (axis, k) for k, (axis, *pair) in zip(digits, turns, strict=True) if d in pair
            ]
            found = [_with_digit(factors, extent, *each) for each in cutting]
            count *= len(found[0].intersection(*found[1:])) if found else extent
        total += count
    return total


@cache
def moved(
    factors: tuple[int, ...], extents: tuple[int, ...], source: Axes, target: Axes, between: int = 0
) -> int:
    """Return the words that all ranks receive, for any extents: the formula but for axes that turn.

    With fewer symbols than axes, nodes take the place of ranks: only the first axes count.
    """
    axes = list(enumerate(zip(source, target, strict=True)))
    turns = tuple((axis, s, t) for axis, (s, t) in axes if s != t and s not in (R, P) and t != R)
    idle = [axis for axis, pair in axes if pair == (R, R)]
    sharing = [axis for axis in idle if P in source and (P in source[:between] or axis >= between)]
    again = prod(factors[axis] for axis in idle if axis not in sharing)
    even = Fraction(prod(extents), prod(factors[axis] for axis, _, _ in turns))
    words = volume(factors[: len(source)], source, target, between) * prod(extents)
    words += again * (even - _staying(factors, extents, turns) if turns else 0)
    assert words.denominator == 1
    return int(words)


# ---- a plan -----------------------------------------------------------------------------------


def copies(factors: Sequence[int], axes: Axes) -> int:
    return prod(f for f, symbol in zip(factors, axes, strict=True) if symbol == R)


def wanted_names(vertex: Vertex, operand: int) -> tuple[Symbol, ...]:
    """Return for each label the dimension of an operand that it cuts; R if none."""
    index = vertex.einsum.operands[operand]
    return tuple(index.index(label) if label in index else R for label in vertex.einsum.labels)


def made_names(vertex: Vertex) -> tuple[Symbol, ...]:
    """For each label of a vertex the dimension of the result; P for an aggregated label."""
    return (*range(len(vertex.bound)), *(P for _ in vertex.einsum.aggregated))


def seen(state: Axes, names: Sequence[Symbol]) -> Axes:
    """What a vertex's state means for a tensor."""
    return tuple(R if symbol == R else names[symbol] for symbol in state)


def moved_bytes(
    factors: tuple[int, ...], tensor: Vertex, source: Axes, target: Axes, between: int = 0
) -> int:
    return moved(factors, tensor.bound, source, target, between) * np.dtype(tensor.dtype).itemsize


def plan_bytes(
    graph: EinGraph,
    ranks: int,
    states: Mapping[str, Axes],
    placed: Mapping[str, Axes],
    resident: Collection[str] = (),
) -> int:
    """Bytes moved with these states of vertices and these layouts of the tensors that have one."""
    factors, total = axes_of(ranks), 0
    for vertex in graph.vertices:
        once = 0 if vertex.name in resident else vertex.nbytes
        if vertex.name in placed:
            if vertex.is_input:
                total += (copies(factors, placed[vertex.name]) - 1) * once
            else:
                made = seen(states[vertex.name], made_names(vertex))
                total += moved_bytes(factors, vertex, made, placed[vertex.name])
        for operand, name in enumerate(vertex.inputs):
            source, wanted = graph[name], seen(states[vertex.name], wanted_names(vertex, operand))
            if name in placed:
                total += moved_bytes(factors, source, placed[name], wanted)
            elif source.is_input:
                total += 0 if name in resident else (copies(factors, wanted) - 1) * source.nbytes
            else:
                made = seen(states[name], made_names(source))
                total += moved_bytes(factors, source, made, wanted)
    return total


# ---- the best plan ----------------------------------------------------------------------------


@cache
def _all_seen(states: tuple[Axes, ...], names: tuple[Symbol, ...]) -> tuple[Axes, ...]:
    return tuple(seen(state, names) for state in states)


@cache
def _words(
    factors: tuple[int, ...],
    extents: tuple[int, ...],
    sources: tuple[Axes, ...],
    targets: tuple[Axes, ...],
) -> np.ndarray:
    return np.array([[moved(factors, extents, s, t) for t in targets] for s in sources], np.int64)


class Oracle:
    """All states of a graph's vertices on some ranks, and what they cost."""

    def __init__(self, graph: EinGraph, ranks: int, resident: Collection[str] = ()) -> None:
        self.graph, self.ranks, self.factors, self.resident = graph, ranks, axes_of(ranks), resident
        self.uses = Counter(name for vertex in graph.computed for name in vertex.inputs)
        self.states = {
            v.name: layouts(ranks, v.einsum.extents and tuple(e for _, e in v.einsum.extents))
            for v in graph.computed
        }

    def placed(self, name: str) -> bool:
        """Whether the tensor has a layout of its own."""
        return self.uses[name] > 1 or name in self.graph.outputs

    def wanted(self, vertex: Vertex, operand: int) -> tuple[Axes, ...]:
        return _all_seen(self.states[vertex.name], wanted_names(vertex, operand))

    def made(self, vertex: Vertex) -> tuple[Axes, ...]:
        return _all_seen(self.states[vertex.name], made_names(vertex))

    def own_layouts(self, name: str) -> tuple[Axes, ...]:
        return layouts(self.ranks, self.graph[name].bound)

    def bytes(self, name: str, sources: tuple[Axes, ...], targets: tuple[Axes, ...]) -> np.ndarray:
        tensor = self.graph[name]
        return (
            _words(self.factors, tensor.bound, sources, targets) * np.dtype(tensor.dtype).itemsize
        )

    def stored_once(self, name: str, targets: tuple[Axes, ...]) -> np.ndarray:
        """An input is stored once: every copy but one moves; a resident one moves nothing."""
        each = 0 if name in self.resident else self.graph[name].nbytes
        return np.array([(copies(self.factors, axes) - 1) * each for axes in targets], np.int64)

    def start(self) -> dict[str, np.ndarray]:
        """For every input with a layout: the cost of each of its layouts."""
        return {
            v.name: self.stored_once(v.name, self.own_layouts(v.name))
            for v in self.graph.inputs
            if self.placed(v.name)
        }

    def step(
        self, vertex: Vertex, chosen: Mapping[str, int], open_: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        """What each state of a vertex adds to the cost, given those of the vertices before it."""
        added = np.zeros(len(self.states[vertex.name]), np.int64)
        for name, after in self.opened(vertex, open_, slice(None)).items():
            added += after.min(axis=1) - (open_[name].min() if name in open_ else 0)
        for operand, name in enumerate(vertex.inputs):
            wanted = self.wanted(vertex, operand)
            if self.placed(name):
                continue
            if self.graph[name].is_input:
                added += self.stored_once(name, wanted)
            else:
                added += self.bytes(name, self.made(self.graph[name]), wanted)[chosen[name]]
        return added

    def opened(
        self, vertex: Vertex, open_: Mapping[str, np.ndarray], state: int | slice
    ) -> dict[str, np.ndarray]:
        """Return the cost of each layout of the tensors that this vertex reads or makes."""
        after: dict[str, np.ndarray] = {}
        for operand, name in enumerate(vertex.inputs):
            if self.placed(name):
                moved = self.bytes(name, self.own_layouts(name), self.wanted(vertex, operand))
                after[name] = after.get(name, open_[name]) + moved.T[state]
        if self.placed(vertex.name):
            after[vertex.name] = self.bytes(
                vertex.name, self.made(vertex), self.own_layouts(vertex.name)
            )[state]
        return after

    def cheaper_than(self, bound: int, most_steps: int) -> int | None:
        """Return the cost of a plan below `bound`, or None. TimeoutError after too many steps."""
        order = self.graph.computed
        later = [0] * (
            len(order) + 1
        )  # what the vertices from here on cost at least, whatever comes before them
        for k in range(len(order) - 1, -1, -1):
            later[k] = later[k + 1] + int(self.alone(order[k]).min())
        steps = itertools.count()

        def visit(
            k: int, total: int, chosen: dict[str, int], open_: dict[str, np.ndarray]
        ) -> int | None:
            if k == len(order):
                return total
            if next(steps) > most_steps:
                raise TimeoutError
            vertex = order[k]
            added = self.step(vertex, chosen, open_)
            for state in np.argsort(added, kind="stable").tolist():
                now = total + int(added[state])
                if now + later[k + 1] >= bound:
                    break
                after = open_ | self.opened(vertex, open_, state)
                found = visit(k + 1, now, {**chosen, vertex.name: state}, after)
                if found is not None:
                    return found
            return None

        return visit(0, sum(int(costs.min()) for costs in self.start().values()), {}, self.start())

    def alone(self, vertex: Vertex) -> np.ndarray:
        """The part of a vertex's cost that no other vertex has a say in."""
        cost = np.zeros(len(self.states[vertex.name]), np.int64)
        for operand, name in enumerate(vertex.inputs):
            if self.graph[name].is_input and not self.placed(name):
                cost += self.stored_once(name, self.wanted(vertex, operand))
        if self.placed(vertex.name):
            cost += self.bytes(vertex.name, self.made(vertex), self.own_layouts(vertex.name)).min(
                axis=1
            )
        return cost


# ---- random graphs ----------------------------------------------------------------------------


def random_graph(
    rng: random.Random,
    vertices: int,
    extents: Sequence[int],
    dtypes: Sequence[str] = ("float32",),
    most_labels: int = 3,
) -> EinGraph:
    """Return a graph of contractions, elementwise functions, reductions and diagonals."""
    sizes = rng.sample(list(extents), min(len(extents), rng.choice((1, 2, 2, 3))))
    labels = {f"{'ijk'[k]}{n}": size for k, size in enumerate(sizes) for n in range(3)}
    made: dict[str, tuple[int, ...]] = {}
    inputs: dict[str, tuple[int, ...]] = {}
    lines: list[str] = []

    def read(known: list[str]) -> tuple[str, list[str]]:
        tensor = _some_tensor(rng, made, inputs, sizes)
        shape = made[tensor] if tensor in made else inputs[tensor]
        index: list[str] = []
        for extent in shape:
            fitting = [x for x in labels if labels[x] == extent]
            usable = [x for x in fitting if x not in index or rng.random() < 0.05]
            preferred = [x for x in usable if x in known]
            index.append(
                rng.choice(preferred if preferred and rng.random() < 0.7 else usable or fitting)
            )
        return f"{tensor}[{','.join(index)}]" if index else tensor, index

    for number in range(vertices):
        first, known = read([])
        used = dict.fromkeys(known)
        body = rng.choice(("{}", "exp({})", "{}")).format(first)
        if rng.random() < 0.75:
            second, other = read(known)
            used |= dict.fromkeys(other)
            body += rng.choice(("*", "*", "+")) + second
        kept = [x for x in used if rng.random() < (0.5 if len(used) > 1 else 0.8)]
        if rng.random() < 0.3:
            kept = list(used)
        kept = kept[:most_labels]
        rng.shuffle(kept)
        gone = [x for x in used if x not in kept]
        name = f"t{number}"
        target = f"{name}[{','.join(kept)}]" if kept else name
        if gone:
            body = f"{rng.choice(('sum', 'sum', 'max'))}[{','.join(gone)}]({body})"
        lines.append(f"{target} = {body}")
        made[name] = tuple(labels[x] for x in kept)
    extra = [name for name in made if rng.random() < 0.1]
    used_by = " ".join(line.split("=", 1)[1] for line in lines)
    outputs = [
        n for n in made if n in extra or not any(f"{n}{end}" in used_by + " " for end in "[ *+)")
    ]
    source = Source("p", "\n".join(lines))
    declared = {name: (shape, rng.choice(dtypes)) for name, shape in inputs.items()}
    if rng.random() < 0.5:
        return build_graphs(source, declared, {}, outputs).rewritten
    return parse_program(source, declared, {}, outputs)


def _some_tensor(
    rng: random.Random,
    made: Mapping[str, object],
    inputs: dict[str, tuple[int, ...]],
    sizes: Sequence[int],
) -> str:
    """An earlier tensor, the latest ones more often, or an input, old or new."""
    chance = rng.random()
    if made and chance < 0.4:
        return list(made)[-1 - min(len(made) - 1, int(rng.expovariate(1)))]
    if made and chance < 0.6:
        return rng.choice(list(made))
    if inputs and chance < 0.7:
        return rng.choice(list(inputs))
    name = f"X{len(inputs)}"
    inputs[name] = tuple(rng.choice(sizes) for _ in range(rng.choice((0, 1, 1, 2, 2, 2, 3))))
    return name


def random_graphs(
    seed: int, count: int, vertices: Sequence[int], extents: Sequence[int]
) -> Iterator[EinGraph]:
    rng = random.Random(seed)
    for _ in range(count):
        yield random_graph(rng, rng.choice(vertices), extents)


def owned_indices(mesh: Mesh, extent: int, axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the indices of a label that a rank owns when some axes cut it.

    Index i is in the fine block ⌊i·m/extent⌋ of the m that the window of an axis makes, and the
    digits of the block are those of its owners.
    """
    owned = set(range(extent))
    digits = mesh.digits(rank)
    for axis in axes:
        window = next(group for group in mesh.windows(extent) if axis in group)
        factors = [mesh.factors[other] for other in window]
        later = prod(factors[window.index(axis) + 1 :])
        owned &= {
            index
            for index in range(extent)
            if index * prod(factors) // extent // later % mesh.factors[axis] == digits[axis]
        }
    return tuple(sorted(owned))
