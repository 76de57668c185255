"""A plan: the state of every vertex and the layout of every shared tensor, what that moves and how good it is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import prod
from typing import NoReturn

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.graph.eingraph import EinGraph
from einmpi.graph.job_file import STRATEGIES
from einmpi.plan.bounds import lower_bound_words
from einmpi.plan.costs import Cost, graph_cost
from einmpi.plan.factor import Edge, factor, repeated_layers
from einmpi.plan.memory import STAGE, least_bytes, peak_bytes, stage_of
from einmpi.plan.mesh import Mesh, prime_factors
from einmpi.plan.solve import EXACT_AXES, search
from einmpi.plan.strategies import PARTITIONERS, place
from einmpi.plan.tables import FLOPS_PER_BYTE, Solution, Solver, States, Unreachable
from einmpi.plan.volume import moved_between

MAX_RANKS = 4096
DEFAULT = STRATEGIES[0]
LARGE_PRIME = 7


@dataclass(frozen=True)
class Plan:
    """How a graph is cut over `ranks` ranks; `einmpi.plan` makes it, print(plan) shows it.

    For each axis of the mesh: the label a vertex cuts or None (`states`), the dimension a tensor cuts (`layouts`).
    The mesh may have fewer ranks than there are: the last ones are idle.
    """

    graph: EinGraph
    mesh: Mesh
    ranks: int
    strategy: str
    states: Mapping[str, tuple[str | None, ...]]
    layouts: Mapping[str, tuple[int | None, ...]]
    words: Mapping[str, Cost]  # moved for each vertex
    bytes: Mapping[str, int]
    peak: int  # bytes of tensors and message buffers on the fullest rank
    kind: str  # "exact" or "gap"
    lower_bound: int
    paper_cost: int
    notes: Mapping[str, str]
    resident: tuple[str, ...] = ()  # inputs that lie where they are wanted
    memory: int | None = None  # bytes a rank, as asked for
    spilled: int = 0  # bytes by which the peak would be higher if nothing of it were kept outside of memory at times
    seconds: float = field(default=0.0, compare=False)

    @property
    def digest(self) -> str:
        """Equal for equal plans, on every rank and every machine."""
        parts = [str(self.graph), str(self.ranks), str(self.mesh.ranks), self.strategy]
        parts += [f"{name}:{state}" for name, state in self.states.items()]
        parts += [f"{name}:{layout}" for name, layout in self.layouts.items()]
        parts += [f"{name}: resident" for name in self.resident]
        parts += [f"messages: {self.stage}"] if self.stage != STAGE else []
        parts += [f"memory: {self.memory}"] if self.spilled else []
        return sha256("\n".join(parts).encode()).hexdigest()[:16]

    @property
    def stage(self) -> int:
        """Bytes of a buffer for messages."""
        return stage_of(self.memory)

    @property
    def words_predicted(self) -> int:
        """Elements that move between ranks, in all."""
        return sum(cost.total for cost in self.words.values())

    @property
    def bytes_predicted(self) -> int:
        """The same in bytes."""
        return sum(self.bytes.values())

    def __str__(self) -> str:
        from einmpi.plan.explain import explain  # which describes a Plan

        return explain(self)

    def parts(self, name: str) -> dict[str, int]:
        """Into how many parts each label of a vertex is cut."""
        einsum = self.graph[name].einsum
        assert einsum is not None
        return dict(zip(einsum.labels, self.mesh.parts(self.states[name], einsum.labels), strict=True))


@dataclass(frozen=True)
class Options:
    """What a plan is asked to respect."""

    strategy: str = DEFAULT
    memory: int | None = None  # bytes a rank
    resident: tuple[str, ...] = ()
    pins: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # tensor → parts of each dimension
    roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mesh_ranks: int | None = None  # the mesh of `given`, where there is one
    given: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)  # layouts that inputs have already


def make_plan(graph: EinGraph, ranks: int, options: Options | None = None) -> Plan:
    """The plan of a graph on `ranks` ranks: pure and deterministic."""
    options = options or Options()
    if type(ranks) is not int or not 1 <= ranks <= MAX_RANKS:
        raise InputError("ranks", f"{ranks} ranks", f"1 to {MAX_RANKS}")
    if options.strategy not in STRATEGIES:
        raise InputError("strategy", f"unknown strategy {options.strategy!r}", one_of(STRATEGIES, options.strategy))
    _check_pins(graph, options.pins)
    start = time.perf_counter()
    best: Plan | None = None
    refused: InputError | None = None
    for used in [options.mesh_ranks] if options.mesh_ranks else _rank_counts(ranks, options.strategy):
        try:
            plan = _Planning(graph, Mesh(used), ranks, options).plan()
        except InputError as error:
            refused = refused or error
            continue
        if best is None or _is_better(plan, best):
            best = plan
    if best is None:
        assert refused is not None
        raise refused
    return replace(best, seconds=time.perf_counter() - start)


def _rank_counts(ranks: int, strategy: str) -> list[int]:
    """`ranks`; where it has a large prime factor, also the next count below it that can be cut in many ways."""
    if strategy != DEFAULT or max(prime_factors(ranks), default=1) <= LARGE_PRIME:
        return [ranks]
    return [ranks, next(used for used in range(ranks, 0, -1) if max(prime_factors(used), default=1) <= LARGE_PRIME)]


def _is_better(plan: Plan, other: Plan) -> bool:
    """What fits into memory is quicker than what does not."""
    return plan.spilled < other.spilled or (plan.spilled == other.spilled and _takes_less_time(plan, other))


def _takes_less_time(plan: Plan, other: Plan) -> bool:
    """(operations + FLOPS_PER_BYTE · bytes) / ranks used, compared without a division."""
    ours, theirs = (p.graph.operations() + FLOPS_PER_BYTE * p.bytes_predicted for p in (plan, other))
    return ours * other.mesh.ranks < theirs * plan.mesh.ranks


def _check_pins(graph: EinGraph, pins: Mapping[str, tuple[int, ...]]) -> None:
    ends = [vertex.name for vertex in graph.inputs] + list(graph.outputs)
    for name, parts in pins.items():
        if name not in ends:
            what = "is computed on the way" if name in graph.by_name else "is not in the graph"
            raise InputError("pin", f"{name} {what}", one_of(ends, name))
        if len(parts) != len(graph[name].bound) or not all(type(part) is int and part > 0 for part in parts):
            raise InputError("pin", f"{name} cannot be cut {'×'.join(map(str, parts))}", "a number for each dimension")


@dataclass
class _Planning:
    """One graph on one mesh: the problem is set up once, and solved once for each price of memory."""

    graph: EinGraph
    mesh: Mesh
    ranks: int
    options: Options

    def __post_init__(self) -> None:
        tied = len(self.mesh.factors) > EXACT_AXES and self.options.strategy == DEFAULT
        tie = repeated_layers(self.graph) if tied else {}
        given = [name for name in self.options.given if name not in self.options.resident]
        self.resident = (*self.options.resident, *given)
        self.pinned = {**self.options.pins, **self.options.given}
        self.problem = factor(self.graph, self.resident, self.pinned, tie)
        self.fixed: dict[int, tuple[int, ...]] = {}
        self.notes: dict[str, str] = {}
        self.start: States | None = None
        self.wanted: dict[int, tuple[int, ...]] = {}
        self.partitionings: Mapping[str, tuple[int, ...]] | None = None  # as the strategy wants them
        self.prescribe()

    # ---- prescribed cuts --------------------------------------------------------------------------------------------

    def prescribe(self) -> None:
        """The parts that pins and the strategy ask for, and axes that make them."""
        for name, parts in self.options.pins.items():
            self.wanted[self.problem.number["tensor", name]] = parts
        for name, cuts in self.options.given.items():
            number, ndim = self.problem.number["tensor", name], len(self.graph[name].bound)
            self.fixed[number] = tuple(ndim if cut is None else cut for cut in cuts)
            self.wanted[number] = self.mesh.parts(cuts, range(ndim))
        if self.options.strategy != DEFAULT:
            choice = PARTITIONERS[self.options.strategy](self.graph, self.mesh.ranks, self.options.roles)
            self.notes, self.partitionings = dict(choice.notes), choice.partitionings
            for name, parts in choice.partitionings.items():
                self.prescribe_vertex(name, parts)
        if self.wanted:
            self.start = [
                place(self.mesh, variable.extents, self.wanted.get(k, (1,) * len(variable.extents)))
                for k, variable in enumerate(self.problem.variables)
            ]
            for number, state in self.fixed.items():
                self.start[number] = state

    def prescribe_vertex(self, name: str, parts: tuple[int, ...]) -> None:
        einsum = self.graph[name].einsum
        assert einsum is not None
        extents = [extent for _, extent in einsum.extents]
        fitting = self.mesh.parts(place(self.mesh, extents, parts), range(len(extents)))
        self.wanted[self.problem.number["vertex", name]] = fitting
        if fitting != tuple(parts):
            cut = " ".join(f"{x}:{d}" for x, d in zip(einsum.labels, fitting, strict=True) if d > 1)
            note = f"{prod(parts)} parts do not fit {self.mesh.ranks} ranks: cut {cut or 'nothing'}"
            self.notes[name] = f"{self.notes[name]}; {note}" if name in self.notes else note

    # ---- solving ----------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """The first plan that fits into memory when a byte of it gets dearer and dearer."""
        limit, before = self.options.memory, None
        least: tuple[int, States] | None = None
        for price in _prices():
            found = self.solve(price)
            peak = self.peak(found.states)
            if limit is None or peak <= limit:
                return self.describe(found.states, peak, found.exact and not price and not self.wanted)
            least = (peak, found.states) if least is None or peak < least[0] else least
            if price > 1 << 20 and found.states == before:
                break  # memory is all that counts by now
            before = found.states
        assert limit is not None and least is not None
        return self.spilling(limit, *least)

    def spilling(self, limit: int, peak: int, states: States) -> Plan:
        """The plan that takes the least memory, for which some of it has to lie outside at times."""
        needed = least_bytes(self.graph, self.mesh, *self.named(states), self.resident)
        if needed > limit:
            raise InputError("memory", f"no plan on {self.mesh.ranks} ranks was found below {limit} bytes a rank",
                             f"at least {needed} bytes, or more ranks")  # fmt: skip
        return replace(self.describe(states, limit, exact=False), spilled=peak - limit)

    def solve(self, price: int) -> Solution:
        """The fewest bytes; but not at the price of computing much of the graph again and again on many ranks."""
        free = self.options.strategy == DEFAULT
        # Where the search is not exact in any case, work is weighed from the start.
        weigh_work = free and len(self.mesh.factors) > EXACT_AXES
        try:
            found = search(Solver(self.problem, self.mesh, self.wanted, self.fixed, price, weigh_work), self.start)
        except Unreachable as error:
            self.refuse_pin(error.args[0])
        if free and not weigh_work and self.repeats_work(found.states):
            found = search(Solver(self.problem, self.mesh, self.wanted, self.fixed, price, weigh_work=True), self.start)
            weigh_work = True
        return replace(found, exact=found.exact and not weigh_work)

    def repeats_work(self, found: States) -> bool:
        """Whether ranks do more than a tenth of all operations again."""
        needed = sum(self.problem.operations)
        done = 0
        for variable, state, operations in zip(self.problem.variables, found, self.problem.operations, strict=True):
            done += operations * self.mesh.parts(state, [len(variable.extents)])[0]
        return 10 * done > 11 * needed

    def refuse_pin(self, variable: int) -> NoReturn:
        name, parts = self.problem.variables[variable].name, self.wanted[variable]
        raise InputError("pin", f"{name} cannot be cut {'×'.join(map(str, parts))} over {self.mesh.ranks} ranks",
                         f"products of the prime factors of {self.mesh.ranks}, none above its extent")  # fmt: skip

    def peak(self, found: States) -> int:
        return peak_bytes(self.graph, self.mesh, *self.named(found), self.resident, stage_of(self.options.memory))

    def named(self, found: States) -> tuple[dict[str, tuple[str | None, ...]], dict[str, tuple[int | None, ...]]]:
        """(states with labels, layouts with dimensions) of all vertices and tensors, repeated layers included."""
        states: dict[str, tuple[str | None, ...]] = {}
        layouts: dict[str, tuple[int | None, ...]] = {}
        for (kind, name), number in self.problem.number.items():
            if kind == "tensor":
                layouts[name] = tuple(s if s < len(self.graph[name].bound) else None for s in found[number])
            elif (einsum := self.graph[name].einsum) is not None:
                states[name] = tuple(einsum.labels[s] if s < len(einsum.labels) else None for s in found[number])
        return states, layouts

    # ---- what it moves ----------------------------------------------------------------------------------------------

    def describe(self, found: States, peak: int, exact: bool) -> Plan:
        states, layouts = self.named(found)
        words, moved_bytes = self.moved(found)
        total = sum(cost.total for cost in words.values())
        bound = total if exact else lower_bound_words(self.graph, self.mesh.ranks, self.resident)
        exact = total == bound  # whoever found it
        partitionings = self.partitionings or {
            name: self.mesh.parts(state, einsum.labels)
            for name, state in states.items()
            if (einsum := self.graph[name].einsum) is not None
        }
        return Plan(self.graph, self.mesh, self.ranks, self.options.strategy, states, layouts, words, moved_bytes, peak,
                    "exact" if exact else "gap", bound, graph_cost(self.graph, partitionings), self.notes,
                    self.resident, self.options.memory)  # fmt: skip

    def moved(self, found: States) -> tuple[dict[str, Cost], dict[str, int]]:
        """(words, bytes) each vertex costs. Copies and new cuts are paid by who needs them, partial results by who made
        them."""
        whole = factor(self.graph, self.resident, self.pinned)  # every layer by itself
        words = {vertex.name: [0, 0, 0] for vertex in self.graph.computed}
        moved_bytes = dict.fromkeys(words, 0)
        for edge in whole.edges:
            target = whole.variables[edge.target]
            ends = [target] if edge.source is None else [whole.variables[edge.source], target]
            cuts = [found[self.problem.number[end.kind, end.name]] for end in ends]
            tensor = self.graph[edge.tensor]
            user = target.name if target.kind == "vertex" or tensor.is_input else edge.tensor
            user = user if user in words else self.graph.consumers[user][0]
            for column, amount in enumerate(edge_words(self.mesh, edge, tensor.elements, cuts)):
                payer = edge.tensor if column == 1 else user
                if amount:
                    words[payer][column] += edge.weight * amount
                    moved_bytes[payer] += edge.weight * amount * np.dtype(tensor.dtype).itemsize
        return {name: Cost(*amounts) for name, amounts in words.items()}, moved_bytes


def _prices() -> Iterator[int]:
    yield 0
    for exponent in range(0, 40, 3):
        yield 1 << exponent


def edge_words(mesh: Mesh, edge: Edge, elements: int, cuts: list[tuple[int, ...]]) -> tuple[int, int, int]:
    """Words an edge moves: (copies for a join, partial results, changes of cut)."""
    targets = [edge.target_symbols[symbol] for symbol in cuts[-1]]
    if edge.source is None:
        copies = prod(f for f, t in zip(mesh.factors, targets, strict=True) if t == edge.ndim)
        return (copies - 1) * elements, 0, 0
    sources = [edge.source_symbols[symbol] for symbol in cuts[0]]
    axes = tuple(zip(mesh.factors, sources, targets, strict=True))
    total = moved_between(axes, edge.ndim, mesh.ranks) * elements // mesh.ranks
    partials = prod(f for f, s, _ in axes if s == edge.ndim + 1)
    aggregate = min(total, (partials - 1) * elements)
    turned = any(s < edge.ndim and t < edge.ndim and s != t for _, s, t in axes)
    return (0, aggregate, total - aggregate) if turned else (total - aggregate, aggregate, 0)
