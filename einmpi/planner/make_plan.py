"""`make_plan`: the plan of a graph on some ranks. Here it is checked what was asked for, and which mesh is best."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from einmpi.errors import InputError, one_of
from einmpi.graph.eingraph import EinGraph
from einmpi.planner.mesh import Mesh, prime_factors
from einmpi.planner.plan import Options, Plan
from einmpi.planner.planning import Planning
from einmpi.planner.prices import BYTES, FLOPS_PER_BYTE
from einmpi.planner.strategies import DEFAULT_STRATEGY, STRATEGIES

__all__ = ["MAX_RANKS", "Options", "Plan", "make_plan"]

MAX_RANKS = 4096
LARGE_PRIME = 7


def make_plan(graph: EinGraph, ranks: int, options: Options | None = None) -> Plan:
    """The plan of a graph on `ranks` ranks: pure and deterministic."""
    options = options or Options()
    if type(ranks) is not int or not 1 <= ranks <= MAX_RANKS:
        raise InputError("ranks", f"{ranks} ranks", f"1 to {MAX_RANKS}")
    if options.strategy not in STRATEGIES:
        raise InputError(
            "strategy",
            f"unknown strategy {options.strategy!r}",
            one_of(STRATEGIES, options.strategy),
        )
    _check_nodes(ranks, options)
    _check_pins(graph, options.pins)
    start = time.perf_counter()
    best: Plan | None = None
    refused: InputError | None = None
    for mesh in [options.mesh] if options.mesh is not None else _meshes(ranks, options):
        try:
            plan = Planning(graph, mesh, ranks, options).plan()
        except InputError as error:
            refused = refused or error
            continue
        if best is None or _is_better(plan, best):
            best = plan
    if best is None:
        assert refused is not None
        raise refused
    return replace(best, seconds=time.perf_counter() - start)


def _meshes(ranks: int, options: Options) -> list[Mesh]:
    """All ranks; where their number has a large prime factor, also the next one below it that can be cut in many ways.

    On several nodes whole nodes are idle: a mesh has equally many ranks on each. Of uneven nodes it knows nothing.
    """
    nodes = 1 if options.uneven else options.nodes
    counted = nodes if nodes > 1 else ranks
    found = [counted]
    if (
        options.strategy == DEFAULT_STRATEGY
        and max(prime_factors(counted), default=1) > LARGE_PRIME
    ):
        found.append(
            next(
                n for n in range(counted, 0, -1) if max(prime_factors(n), default=1) <= LARGE_PRIME
            )
        )
    return [Mesh(ranks // nodes * used, used) if nodes > 1 else Mesh(used) for used in found]


def _is_better(plan: Plan, other: Plan) -> bool:
    """What fits into memory is quicker than what does not."""
    return plan.spilled < other.spilled or (
        plan.spilled == other.spilled and _takes_less_time(plan, other)
    )


def _takes_less_time(plan: Plan, other: Plan) -> bool:
    """By the machine that was measured; else (operations + FLOPS_PER_BYTE · bytes) / ranks used. In whole numbers."""

    def time_of_all(plan: Plan) -> int:
        bills = plan.bills.values()
        if plan.machine is not None:
            return sum(bill.time for bill in bills)
        moved = sum(BYTES.bytes(bill.nbytes, bill.between) for bill in bills)
        return int(plan.graph.operations() + FLOPS_PER_BYTE * moved)

    return time_of_all(plan) * other.mesh.ranks < time_of_all(other) * plan.mesh.ranks


def _check_nodes(ranks: int, options: Options) -> None:
    nodes = options.nodes
    if type(nodes) is not int or not 1 <= nodes <= ranks or (ranks % nodes and not options.uneven):
        allowed = [n for n in range(1, ranks + 1) if ranks % n == 0]
        shown = ", ".join(map(str, allowed[:12])) + (", …" if len(allowed) > 12 else "")
        raise InputError(
            "nodes", f"{ranks} ranks on {nodes} nodes", f"a divisor of the ranks: {shown}"
        )
    if options.machine is not None:
        options.machine.check(ranks, nodes)


def _check_pins(graph: EinGraph, pins: Mapping[str, tuple[int, ...]]) -> None:
    ends = [vertex.name for vertex in graph.inputs] + list(graph.outputs)
    for name, parts in pins.items():
        if name not in ends:
            what = "is computed on the way" if name in graph.by_name else "is not in the graph"
            raise InputError("pin", f"{name} {what}", one_of(ends, name))
        if len(parts) != len(graph[name].bound) or not all(
            type(part) is int and part > 0 for part in parts
        ):
            raise InputError(
                "pin",
                f"{name} cannot be cut {'×'.join(map(str, parts))}",
                "a number for each dimension",
            )
