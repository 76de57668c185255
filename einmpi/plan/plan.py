"""A plan: the state of every vertex and the layout of every shared tensor, what that moves and how good it is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from math import prod

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.graph.eingraph import EinGraph
from einmpi.graph.job_file import STRATEGIES
from einmpi.plan.bounds import lower_bound_words
from einmpi.plan.costs import graph_cost
from einmpi.plan.factor import Edge, Factored, factor, repeated_layers
from einmpi.plan.memory import peak_bytes
from einmpi.plan.mesh import Mesh, prime_factors
from einmpi.plan.solve import EXACT_AXES, search
from einmpi.plan.strategies import PARTITIONERS, fit
from einmpi.plan.tables import Solver, States, Unreachable
from einmpi.plan.volume import moved_between

MAX_RANKS = 4096
DEFAULT = "eindecomp"
LARGE_PRIME = 7
# How many operations cost as much time as a byte, where no machine was measured: weighs idle ranks against traffic.
FLOPS_PER_BYTE = 16


@dataclass(frozen=True)
class Moved:
    """Words (elements) that one vertex costs: copies of operands, partial results, and changes of cut."""

    join: int = 0
    aggregate: int = 0
    repartition: int = 0

    @property
    def total(self) -> int:
        return self.join + self.aggregate + self.repartition


@dataclass(frozen=True)
class Plan:
    """For each axis of the mesh: the label a vertex cuts or None (`states`), the dimension a tensor cuts (`layouts`).

    The mesh may have fewer ranks than there are: the last ones are idle. str(plan) is the EXPLAIN text.
    """

    graph: EinGraph
    mesh: Mesh
    ranks: int
    strategy: str
    states: Mapping[str, tuple[str | None, ...]]
    layouts: Mapping[str, tuple[int | None, ...]]
    words: Mapping[str, Moved]
    bytes: Mapping[str, int]  # moved for each vertex
    peak: int  # bytes of tensors on the fullest rank
    kind: str  # "exact" or "gap"
    lower_bound: int
    paper_cost: int
    notes: Mapping[str, str]
    seconds: float

    @property
    def digest(self) -> str:
        """Equal for equal plans, on every rank and every machine."""
        parts = [str(self.graph), str(self.ranks), str(self.mesh.ranks), self.strategy]
        parts += [f"{name}:{state}" for name, state in self.states.items()]
        parts += [f"{name}:{layout}" for name, layout in self.layouts.items()]
        return sha256("\n".join(parts).encode()).hexdigest()[:16]

    @property
    def words_predicted(self) -> int:
        return sum(moved.total for moved in self.words.values())

    @property
    def bytes_predicted(self) -> int:
        return sum(self.bytes.values())

    def __str__(self) -> str:
        from einmpi.plan.explain import explain  # which describes a Plan

        return explain(self)

    def parts(self, name: str) -> dict[str, int]:
        """Into how many parts each label of a vertex is cut."""
        einsum = self.graph[name].einsum
        assert einsum is not None
        state = self.states[name]
        return {x: prod(f for f, s in zip(self.mesh.factors, state, strict=True) if s == x) for x in einsum.labels}


@dataclass(frozen=True)
class Options:
    """What a plan is asked to respect."""

    strategy: str = DEFAULT
    memory: int | None = None  # bytes a rank
    resident: tuple[str, ...] = ()
    pins: Mapping[str, tuple[int, ...]] | None = None  # tensor → parts of each dimension
    roles: Mapping[str, tuple[str, ...]] | None = None


def make_plan(graph: EinGraph, ranks: int, options: Options | None = None) -> Plan:
    """The plan of a graph on `ranks` ranks: pure and deterministic."""
    options = options or Options()
    if not isinstance(ranks, int) or not 1 <= ranks <= MAX_RANKS:
        raise InputError("ranks", f"{ranks} ranks", f"1 to {MAX_RANKS}")
    if options.strategy not in STRATEGIES:
        raise InputError("strategy", f"unknown strategy {options.strategy!r}", one_of(STRATEGIES, options.strategy))
    start = time.perf_counter()
    plans = [_within_memory(graph, ranks, used, options) for used in _rank_counts(ranks, options.strategy)]
    work = graph.operations()
    # Cross-multiplied: (work + FLOPS_PER_BYTE · bytes) / used, without a division.
    best = plans[0]
    for plan in plans[1:]:
        ours, theirs = (work + FLOPS_PER_BYTE * p.bytes_predicted for p in (plan, best))
        best = plan if ours * best.mesh.ranks < theirs * plan.mesh.ranks else best
    return replace(best, seconds=time.perf_counter() - start)


def _rank_counts(ranks: int, strategy: str) -> list[int]:
    """`ranks`; where it has a large prime factor, also the next count below it that can be cut in many ways."""
    if strategy != DEFAULT or max(prime_factors(ranks), default=1) <= LARGE_PRIME:
        return [ranks]
    return [ranks, next(used for used in range(ranks, 0, -1) if max(prime_factors(used), default=1) <= LARGE_PRIME)]


def _within_memory(graph: EinGraph, ranks: int, used: int, options: Options) -> Plan:
    """The first plan that fits when a byte of memory gets dearer and dearer; InputError where none does."""
    plan = _planned(graph, ranks, used, options)
    if options.memory is None:
        return plan
    least = plan.peak
    for exponent in range(0, 40, 2):
        if plan.peak <= options.memory:
            return plan
        plan = _planned(graph, ranks, used, options, price=1 << exponent)
        least = min(least, plan.peak)
    raise InputError("memory", f"no plan on {used} ranks was found below {options.memory} bytes a rank",
                     f"at least {least} bytes, or more ranks")  # fmt: skip


def _planned(graph: EinGraph, ranks: int, used: int, options: Options, price: int = 0) -> Plan:
    mesh = Mesh(used)
    tie = repeated_layers(graph) if len(mesh.factors) > EXACT_AXES and options.strategy == DEFAULT else {}
    pins = options.pins or {}
    problem = factor(graph, options.resident, pins, tie)
    wanted, notes, paper = _prescribed(graph, mesh, problem, options)
    solver = Solver(problem, mesh, wanted, price)
    try:
        found = search(solver, _start(problem, mesh, wanted) if wanted else None)
    except Unreachable as error:
        variable = problem.variables[error.args[0]]
        shown = "×".join(map(str, wanted[error.args[0]]))
        raise InputError(variable.name, f"cannot be cut {shown} over {used} ranks",
                         f"products of the prime factors of {used}, none above its extent") from None  # fmt: skip
    exact = found.exact and not price and not wanted
    return _describe(graph, mesh, ranks, options, problem, found.states, exact, notes, paper)


# ---- prescribed cuts ------------------------------------------------------------------------------------------------


def _prescribed(graph: EinGraph, mesh: Mesh, problem: Factored, options: Options) -> tuple[
    dict[int, tuple[int, ...]], dict[str, str], dict[str, tuple[int, ...]] | None]:  # fmt: skip
    """(parts wanted of each variable, notes of a vertex, the strategy's partitionings as the paper counts them)."""
    wanted: dict[int, tuple[int, ...]] = {}
    for name, parts in (options.pins or {}).items():
        if name in graph.by_name and not graph[name].is_input and name not in graph.outputs:
            ends = [vertex.name for vertex in graph.inputs] + list(graph.outputs)
            raise InputError("pin", f"{name} is computed on the way", f"inputs and outputs: {', '.join(ends)}")
        if name not in graph.by_name or len(parts) != len(graph[name].bound):
            raise InputError("pin", f"{name} cannot be cut {'×'.join(map(str, parts))}", "one number a dimension")
        wanted[problem.number["tensor", name]] = tuple(parts)
    if options.strategy == DEFAULT:
        return wanted, {}, None
    choice = PARTITIONERS[options.strategy](graph, mesh.ranks, options.roles or {})
    notes = dict(choice.notes)
    for name, parts in choice.partitionings.items():
        einsum = graph[name].einsum
        assert einsum is not None
        variable = problem.number["vertex", name]
        placed = place(mesh, [extent for _, extent in einsum.extents], fit(einsum, parts, mesh.ranks))
        wanted[variable] = _parts_of(mesh, placed, len(einsum.labels))
        if wanted[variable] != tuple(parts):
            cut = " ".join(f"{x}:{d}" for x, d in zip(einsum.labels, wanted[variable], strict=True) if d > 1)
            notes[name] = f"{notes[name]}; " if name in notes else ""
            notes[name] += f"{prod(parts)} parts do not fit {mesh.ranks} ranks: cut {cut or 'nothing'}"
    return wanted, notes, dict(choice.partitionings)


def place(mesh: Mesh, extents: list[int], parts: tuple[int, ...]) -> tuple[int, ...]:
    """Axes for these parts, the first that fit; a prime factor that finds no axis is left out."""
    symbols = [len(extents)] * len(mesh.factors)
    for symbol, count in enumerate(parts):
        windows = [list(window) for window in mesh.windows(extents[symbol])]
        best: list[int] = []
        for window in windows:
            free = [axis for axis in window if symbols[axis] == len(extents)]
            taken: list[int] = []
            for prime in prime_factors(count) if count > 1 else ():
                axis = next((a for a in free if mesh.factors[a] == prime and a not in taken), None)
                if axis is not None:
                    taken.append(axis)
            if prod(mesh.factors[a] for a in taken) > prod(mesh.factors[a] for a in best):
                best = taken
        for axis in best:
            symbols[axis] = symbol
    return tuple(symbols)


def _parts_of(mesh: Mesh, symbols: tuple[int, ...], count: int) -> tuple[int, ...]:
    return tuple(prod(f for f, s in zip(mesh.factors, symbols, strict=True) if s == k) for k in range(count))


def _start(problem: Factored, mesh: Mesh, wanted: Mapping[int, tuple[int, ...]]) -> States:
    """States with the prescribed parts, the rest uncut."""
    return [
        place(mesh, list(variable.extents), wanted.get(k, (1,) * len(variable.extents)))
        for k, variable in enumerate(problem.variables)
    ]


# ---- what it moves --------------------------------------------------------------------------------------------------


def _describe(graph: EinGraph, mesh: Mesh, ranks: int, options: Options, problem: Factored, found: States,
              exact: bool, notes: Mapping[str, str], paper: dict[str, tuple[int, ...]] | None) -> Plan:  # fmt: skip
    symbols = {name: found[number] for name, number in problem.number.items()}
    whole = factor(graph, options.resident, options.pins or {})  # every layer by itself
    words = {vertex.name: [0, 0, 0] for vertex in graph.computed}
    moved_bytes = {vertex.name: 0 for vertex in graph.computed}
    for edge in whole.edges:
        target = whole.variables[edge.target]
        source = whole.variables[edge.source] if edge.source is not None else None
        cuts = [symbols[end.kind, end.name] for end in (source, target) if end is not None]
        amounts = edge_words(mesh, edge, graph[edge.tensor].elements, cuts)
        payer = target.name if target.kind == "vertex" or source is None else source.name
        payer = payer if payer in words else graph.consumers[payer][0]
        maker = edge.tensor if edge.tensor in words else payer
        itemsize = np.dtype(graph[edge.tensor].dtype).itemsize
        for column, amount in enumerate(amounts):
            words[maker if column == 1 else payer][column] += amount
            moved_bytes[maker if column == 1 else payer] += amount * itemsize
    states = {
        v.name: tuple(v.einsum.labels[s] if s < len(v.einsum.labels) else None for s in symbols["vertex", v.name])
        for v in graph.computed
        if v.einsum is not None
    }
    layouts = {
        name: tuple(s if s < len(graph[name].bound) else None for s in cut)
        for (kind, name), cut in symbols.items()
        if kind == "tensor"
    }
    moved = {name: Moved(*amounts) for name, amounts in words.items()}
    total = sum(amount.total for amount in moved.values())
    bound = total if exact else lower_bound_words(graph, mesh.ranks, options.resident)
    peak = peak_bytes(graph, mesh, states, layouts, options.resident)
    plan = Plan(graph, mesh, ranks, options.strategy, states, layouts, moved, moved_bytes, peak,
                "exact" if exact else "gap", bound, 0, notes, 0.0)  # fmt: skip
    partitionings = paper or {name: tuple(plan.parts(name).values()) for name in states}
    return replace(plan, paper_cost=graph_cost(graph, partitionings))


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
