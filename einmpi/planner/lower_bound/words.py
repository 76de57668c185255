"""The lower bound on the words that any plan of a graph moves (docs/lower_bound.md)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from einmpi.graph.eingraph import EinGraph
from einmpi.planner.lower_bound.pieces import (
    ALL_CUTS,
    MEMORY_FRACTIONS,
    MOST_VARIABLES,
    NO_CARRY,
    PRICES_OF_MEMORY,
    PRICES_OF_OPERATIONS,
    REPEATING_NO_MORE,
    WITHIN_MEMORY,
    Bound,
    Charges,
    KnownPlan,
    PartsProblem,
    factored_with_carry,
)
from einmpi.planner.lower_bound.units import EVERY_WORK_FREE, Read, charging_of, tensor_read
from einmpi.planner.lower_bound.ways import MOST_WORDS, Work, count_of_ways

FINEST_FRACTION = 1 << 20  # of a word: charges are whole numbers of such fractions


def lower_bound_words(
    graph: EinGraph, ranks: int, resident: Collection[str] = (), words: int | None = None
) -> int:
    """Return the words that every plan on a mesh of so many ranks moves, or less.

    Inputs are stored once, except for those that are `resident`: these are where they are needed.
    `words` are those that a known plan moves. If a bound that takes each vertex alone is lower,
    what the vertices move together is looked at, too.
    """
    if ranks == 1:
        return 0
    bound, charges = _charged(graph, ranks, resident)
    if words is None or bound >= words:
        return bound
    factored = factored_with_carry(graph, resident, NO_CARRY)
    return max(bound, PartsProblem(graph, ranks, factored, charges).bound_of_all(words))


FEW_CELLS = 1 << 19  # of tables of all operands: they take little time
SMALL_GAP = 100  # one part in so many
FEW_WORDS = 1 << 32  # where prices of operations are counted in fractions of a word


def best_lower_bound(
    graph: EinGraph, ranks: int, resident: Collection[str], plan: KnownPlan, is_default: bool
) -> Bound:
    """Return the highest lower bound that is known for a plan.

    If it is below what the plan moves, plans that repeat more operations than this one are left
    out, and so are those that do not fit into the memory that this one may have.

    Where tables are large, this takes long. Then nothing more is looked for where all plans move so
    much that the gap is small; nor, for other strategies than the default, much above what single
    vertices move.
    """
    if ranks == 1:
        return Bound(0, ALL_CUTS)
    alone, charges = _charged(graph, ranks, resident)
    best = Bound(alone, ALL_CUTS)
    if alone >= plan.words:
        return best
    factored = factored_with_carry(graph, resident, plan.carry)
    problem = PartsProblem(graph, ranks, factored, charges)
    looked_for = plan.words
    is_large = _cells(graph, ranks) > FEW_CELLS
    if is_large and not is_default:
        looked_for = min(plan.words, alone + alone // SMALL_GAP)
    if alone < looked_for:
        best = Bound(max(alone, problem.bound_of_all(looked_for)), ALL_CUTS)
    has_small_gap = (plan.words - best.words) * SMALL_GAP <= plan.words
    if is_large and (has_small_gap or not is_default):
        return best
    repeated = plan.repeated_operations(graph)
    divisors: tuple[int, ...] = PRICES_OF_OPERATIONS
    if not repeated or len(graph.computed) > MOST_VARIABLES:
        divisors = divisors[:1]
    for divisor in divisors:
        if best.words >= plan.words:
            break
        work = _work(graph, repeated, divisor, plan.words)
        alone, charges = _charged(graph, ranks, resident, work)
        problem = replace(problem, charges=charges)
        unit = divisor if repeated and plan.words < FEW_WORDS else 1
        exact = _work(graph, repeated, divisor, plan.words, unit)
        together = problem.bound_by_groups(plan, exact, unit=unit)
        together = -(-(together - repeated * unit // divisor) // unit)
        found = Bound(max(alone - repeated // divisor, together), REPEATING_NO_MORE)
        best = max(best, found, key=lambda bound: bound.words)
        if plan.memory is not None and len(graph.computed) <= MOST_VARIABLES:
            for price in PRICES_OF_MEMORY:
                if best.words >= plan.words:
                    break
                paid = repeated * MEMORY_FRACTIONS + price * plan.memory * divisor
                paid //= divisor * MEMORY_FRACTIONS
                priced = problem.bound_by_groups(plan, work, price)
                found = Bound(min(plan.words, priced - paid), WITHIN_MEMORY)
                best = max(best, found, key=lambda bound: bound.words)
    return best


def _cells(graph: EinGraph, ranks: int) -> int:
    """Return how many cells the tables of all operands have, if both ends are cut in all ways."""
    cells = 0
    for vertex in graph.computed:
        ways = count_of_ways(ranks, len(vertex.computed_einsum.labels) + 1)
        cells += len(vertex.inputs) * ways**2
    return cells


def _work(
    graph: EinGraph, repeated: int, divisor: int, words: int, unit: int = 1
) -> dict[str, Work]:
    """Return how much of its work each vertex may repeat, if all may repeat so many operations.

    A repeated operation costs 1 / `divisor` words, and nothing if none may be repeated. Prices are
    in units, of which a word has so many. They are no higher than what a plan with so many words
    moves and pays.
    """
    work = {}
    most = (words + repeated // divisor + 1) * unit
    for vertex in graph.computed:
        operations = vertex.operations()
        if operations:
            price = min(operations * unit // divisor, most) if repeated else 0
            work[vertex.name] = Work(repeated // operations, price)
    return work


def _charged(
    graph: EinGraph,
    ranks: int,
    resident: Collection[str],
    work: Mapping[str, Work] = EVERY_WORK_FREE,
) -> tuple[int, Charges]:
    """Return the bound that takes each vertex alone, and what readers charge."""
    scale = _scale_of(graph, ranks, work)
    total = 0
    charged: dict[Read, float] = {}
    of_tensors: dict[str, float] = {}
    for charging, charge_of in charging_of(graph, ranks, resident, work, scale.unit):
        charges = charging.best(scale.fraction)
        total += max(0, charging.bound(charges, scale.fraction))
        for read, number in charge_of.items():
            charged[read] = charges[number] * scale.unit / scale.fraction
            name = tensor_read(graph, read)
            of_tensors[name] = of_tensors.get(name, 0.0) + charged[read]
    words = -(-total * scale.unit // scale.fraction)  # words are whole numbers
    return words, Charges(charged, of_tensors)


class _Scale(NamedTuple):
    """How words are counted so that sums fit into 64 bits: in units, each with some fractions."""

    unit: int  # words; amounts are rounded down
    fraction: int


def _scale_of(graph: EinGraph, ranks: int, work: Mapping[str, Work]) -> _Scale:
    """Return the finest scale in which all sums fit into 64 bits."""
    largest = ranks * max(vertex.elements for vertex in graph.vertices)
    for own in work.values():
        largest = max(largest, own.price * min(own.most, ranks - 1))
    most_operands = max((len(vertex.inputs) for vertex in graph.computed), default=0)
    # Of two vertices taken as one: all operands, what moves between them, the result, its partial
    # results, and the price of both.
    terms = 2 * most_operands + 5
    fractions = MOST_WORDS // max(1, largest * terms)
    if fractions:
        return _Scale(1, min(FINEST_FRACTION, fractions))
    return _Scale(1 << (largest * terms // MOST_WORDS).bit_length(), 1)
