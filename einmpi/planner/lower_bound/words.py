"""The lower bound on the words that any plan of a graph moves (docs/lower_bound.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.einsum import EinSum
from einmpi.planner.lower_bound.halos import not_charged, readings_of, ways_with_halos
from einmpi.planner.lower_bound.parts import (
    FRACTIONS,
    FREE_WORK,
    MOST_WAYS,
    MOST_WORDS,
    Ints,
    Role,
    Ways,
    Work,
    count_of_ways,
    grids,
    least_ways,
    most_kept,
    part_counts,
    role_of,
    ways_of_grid,
    ways_to_cut,
)
from einmpi.planner.lower_bound.pieces import (
    ALL_CUTS,
    MEMORY_FRACTIONS,
    MOST_VARIABLES,
    PRICES_OF_MEMORY,
    PRICES_OF_OPERATIONS,
    REPEATING_NO_MORE,
    WITHIN_MEMORY,
    Bound,
    Charges,
    KnownPlan,
    bound_by_groups,
    bound_of_graph,
)
from einmpi.planner.repetition import vertices_alike

# ---- linear program ------------------------------------------------------------------------------
#
# Linear programs with many columns, of which few are needed: the simplex method.
#
# Only sums and products of single elements are used, so that results are the same on every
# machine.


Floats = npt.NDArray[np.float64]

TOLERANCE = 1e-9  # costs are about 1
PIVOTS_FOR_EACH_ROW = 30  # a search that takes longer ends before the minimum


class Columns(NamedTuple):
    """Columns of a program and their costs."""

    entries: Floats  # a column for each
    costs: Floats

    def used(self) -> tuple[Ints, Floats]:
        """Return the rows in which columns are not 0, and their entries there.

        After them, a column has other rows, in which it is 0.
        """
        used = self.entries != 0
        longest = int(used.sum(axis=0).max(initial=0))
        rows = np.argsort(~used, axis=0, kind="stable")[:longest]
        return rows, np.take_along_axis(self.entries, rows, axis=0)


class Basis:
    """A solution with one column for each row, and the prices of the rows that follow from it."""

    def __init__(self, inverse: Floats, right_side: Floats, costs: Floats) -> None:
        self.inverse = inverse  # of the matrix of the columns in use
        self.amounts = _times(inverse, right_side)  # of each of these columns
        self.prices = _times(inverse.T, costs)  # of the rows

    def enter(self, rows: Ints, entries: Floats, reduced_cost: float) -> None:
        """Use as much of a column as possible, in place of the one that is used up first."""
        direction = _times(self.inverse[:, rows], entries)
        usable = direction > TOLERANCE
        assert usable.any(), "the costs have a minimum"
        ratios = np.full(len(direction), np.inf)
        ratios[usable] = self.amounts[usable] / direction[usable]
        row = int(ratios.argmin())
        amount = ratios[row]
        self.amounts = np.maximum(0.0, self.amounts - amount * direction)
        self.amounts[row] = amount
        pivot_row = self.inverse[row] / direction[row]
        changed = direction.nonzero()[0]
        self.inverse[changed] -= direction[changed, None] * pivot_row
        self.inverse[row] = pivot_row
        self.prices = self.prices + reduced_cost * pivot_row


def find_prices(basis: Basis, columns: Columns, more: Callable[[Floats], Columns]) -> Floats:
    """Return the prices of the rows when the columns in use cost least.

    `more` returns columns that may be cheaper at the given prices, and none if there are none.
    """
    pivots = PIVOTS_FOR_EACH_ROW * len(basis.amounts)
    while True:
        rows, entries = columns.used()
        while pivots:
            # What one unit of each column costs, less the prices of what it gives.
            reduced = columns.costs - (entries * basis.prices[rows]).sum(axis=0)
            cheapest = int(reduced.argmin())
            if reduced[cheapest] > -TOLERANCE:
                break
            basis.enter(rows[:, cheapest], entries[:, cheapest], float(reduced[cheapest]))
            pivots -= 1
        new = more(basis.prices)
        if not pivots or not len(new.costs):
            return basis.prices
        entries = np.concatenate([columns.entries, new.entries], axis=1)
        columns = Columns(entries, np.concatenate([columns.costs, new.costs]))


def _times(matrix: Floats, vector: Floats) -> Floats:
    product: Floats = (matrix * vector).sum(axis=1)
    return product


# Amounts that could be zero get a little, each a different one: otherwise the search could go round
# in circles.
PERTURBATION = 1e-7


class Part(NamedTuple):
    """A vertex of a graph, or two that are taken as one."""

    charges: tuple[int | None, ...]  # the number of the charge for each operand; None: no charge
    charges_for_result: tuple[int, ...]  # those of the readers of its result
    ways: Ways
    times: int  # that it occurs


class Limit(NamedTuple):
    """The charges for one tensor: together they are at most its elements."""

    charges: tuple[int, ...]
    elements: int


@dataclass(frozen=True)
class Charging:
    """The parts of a graph, and the limits of what they charge."""

    parts: Sequence[Part]
    limits: Sequence[Limit]
    charges: int  # how many there are

    def bound(self, words: Sequence[int], fraction: int) -> int:
        """Return the least that moves, given what each charge is, all in fractions of a word."""
        total = 0
        for part in self.parts:
            total += part.times * int(_moved(part, words, part.ways.words * fraction).min())
        return total

    def best(self, fraction: int) -> list[int]:
        """Return charges, in fractions of a word, with which the bound is highest or nearly so."""
        if not self.charges:
            return []
        program = _Program(self)
        prices = find_prices(program.start(), program.fixed_columns(), program.cheaper_ways)
        wanted = prices[len(self.parts) :] * program.scale * fraction
        return self._within_limits([max(0, round(charge)) for charge in wanted.tolist()], fraction)

    def _within_limits(self, wanted: Sequence[int], fraction: int) -> list[int]:
        """Return charges that keep the limits: rounding may have made them a little too high."""
        words = list(wanted)
        for limit in self.limits:
            for charge, times in Counter(limit.charges).items():
                others = sum(words[other] for other in limit.charges if other != charge)
                most = (limit.elements * fraction - others) // times
                words[charge] = max(0, min(words[charge], most))
        return words


def _moved(part: Part, charged: Sequence[Any] | Floats, words: npt.NDArray[Any]) -> Any:
    """Return what a part moves in each way to cut it: `words`, and what it is charged for copies.

    Copies of the result that ranks have computed themselves are subtracted: readers charge for all
    copies but one.
    """
    moved = words - sum(charged[charge] for charge in part.charges_for_result) * part.ways.spare
    fractions = part.ways.fractions
    for operand, charge in enumerate(part.charges):
        if charge is None:
            continue
        moved = moved + charged[charge] * part.ways.copies[:, operand]
        if fractions is not None:
            moved = moved + _fraction_of(charged[charge], fractions[:, operand])
    return moved


def _fraction_of(charge: Any, fractions: Ints) -> Any:
    """Return these fractions of a charge, rounded down if it is a whole number."""
    if isinstance(charge, float):
        return charge * (fractions / FRACTIONS)
    high, low = divmod(charge, FRACTIONS)  # whose products fit into 64 bits
    return high * fractions + low * fractions // FRACTIONS


class _Program:
    """The linear program in its dual form.

    Each part has a mixture of ways to be cut: one row says that its shares add up. Of each tensor
    an amount moves: for each charge, a row says that this is enough for the copies that the
    reader's mixture needs, less those that the maker's mixture has to spare. The words that move
    are minimised, and the price of a row of the second kind is the charge.
    """

    def __init__(self, charging: Charging) -> None:
        self.charging = charging
        self.parts = len(charging.parts)
        self.rows = self.parts + charging.charges
        self.scale = float(max(1, *(limit.elements for limit in charging.limits)))

    def column(self, number: int, way: int) -> Floats:
        """Return the column of one way to cut a part."""
        part = self.charging.parts[number]
        column = np.zeros(self.rows)
        column[number] = 1
        copies = part.ways.copies[way].astype(np.float64)
        if part.ways.fractions is not None:
            copies += part.ways.fractions[way] / FRACTIONS
        for charge, number_of_copies in zip(part.charges, copies.tolist(), strict=True):
            if charge is not None:
                column[self.parts + charge] -= number_of_copies
        for charge in part.charges_for_result:
            column[self.parts + charge] += part.ways.spare[way]
        return column

    def start(self) -> Basis:
        """Return the solution in which all ranks compute everything, so that only inputs move.

        For the start, each charge has a column of its own for the amount that moves. Its cost is
        the highest charge, so that it changes nothing.
        """
        parts = self.parts
        ways = [int(part.ways.spare.argmax()) for part in self.charging.parts]
        computing = np.column_stack([self.column(number, way) for number, way in enumerate(ways)])
        counts = np.array([part.times for part in self.charging.parts], float)
        little = PERTURBATION * (1 + np.arange(self.charging.charges) / self.charging.charges)
        missing = little - (computing[parts:] * counts).sum(axis=1)
        signs = np.where(missing > 0, 1.0, -1.0)

        inverse = np.eye(self.rows)
        inverse[parts:, :parts] = -signs[:, None] * computing[parts:]
        inverse[parts:, parts:] = np.diag(signs)
        costs = np.zeros(self.rows)
        for number, way in enumerate(ways):
            costs[number] = self.charging.parts[number].ways.words[way] / self.scale
        highest = np.ones(self.charging.charges)  # each charge if it were the only one
        for limit in self.charging.limits:
            for charge in limit.charges:
                highest[charge] = min(highest[charge], limit.elements / self.scale)
        costs[parts:] = np.where(signs > 0, highest, 0.0)
        return Basis(inverse, np.concatenate([counts, little]), costs)

    def fixed_columns(self) -> Columns:
        """Return a column for the amount that moves of each tensor, and one for each surplus."""
        amounts = np.zeros((self.rows, len(self.charging.limits)))
        costs = np.zeros(len(self.charging.limits) + self.charging.charges)
        for number, limit in enumerate(self.charging.limits):
            costs[number] = limit.elements / self.scale
            for charge in limit.charges:
                amounts[self.parts + charge, number] += 1
        surplus = -np.eye(self.rows)[:, self.parts :]
        return Columns(np.concatenate([amounts, surplus], axis=1), costs)

    def cheaper_ways(self, prices: Floats) -> Columns:
        """Return, for each part, the way that costs least at these prices, if that is less."""
        columns = [np.zeros((self.rows, 0))]
        costs = []
        for number, part in enumerate(self.charging.parts):
            moved = _moved(part, prices[self.parts :], part.ways.words / self.scale)
            way = int(moved.argmin())
            if moved[way] < prices[number] - TOLERANCE:
                columns.append(self.column(number, way)[:, None])
                costs.append(part.ways.words[way] / self.scale)
        return Columns(np.concatenate(columns, axis=1), np.array(costs))


# ---- the bound -----------------------------------------------------------------------------------
#
# The lower bound on the words that any plan of a graph moves (docs/lower_bound.md).


# ---- outer products ------------------------------------------------------------------------------
#
# Outer products that one vertex reads: the two are cut together.
#
# An outer product is larger than its operands and takes little work, so ranks best compute what
# they need of it from copies of its operands. Its reader, taken alone, could not charge much
# for a copy of it, because copies can be computed. Taken together, they pay for copies of the
# operands, or for moving the product.


MOST_PAIRS = 1 << 19  # of a way to cut the product and a way to cut its reader


def outer_products(graph: EinGraph, ranks: int) -> dict[str, str]:
    """Return outer products → the vertex that alone reads each of them, once.

    No vertex reads two of those that are returned, and none that is returned reads another one.
    """
    found: dict[str, str] = {}
    for vertex in graph.computed:
        users = graph.consumers[vertex.name]
        if len(users) != 1 or graph.is_output(vertex.name) or vertex.name in found.values():
            continue
        reader = graph[users[0]]
        if reader.name in found.values() or reader.inputs.count(vertex.name) != 1:
            continue
        made, read = vertex.computed_einsum, reader.computed_einsum
        operand = reader.inputs.index(vertex.name)
        index = read.operands[operand]
        are_labels = all(isinstance(entry, str) for entry in index)
        if not are_labels or len(set(index)) < len(index) or not _is_outer_product(made):
            continue
        of_reader = len(made.bound) + len(_other_labels(read, operand))
        if count_of_ways(ranks, of_reader + 1) > MOST_WAYS:
            continue
        making, reading = _grids(made, read, operand, ranks)
        if len(making) * len(reading) <= MOST_PAIRS:
            found[vertex.name] = reader.name
    return found


def _is_outer_product(einsum: EinSum) -> bool:
    """Return whether an EinSum aggregates nothing, and none of its operands has all labels."""
    if einsum.aggregated or not einsum.operands or einsum.labels != einsum.output:
        return False
    for operand in range(len(einsum.operands)):
        if all(einsum.dimension_cut_by(operand, label) is not None for label in einsum.labels):
            return False
    return True


def _other_labels(read: EinSum, operand: int) -> dict[Role, tuple[int, ...]]:
    """Return the labels of the reader that the product does not have: extents by roles."""
    found: dict[Role, tuple[int, ...]] = {}
    for label, extent in read.extents:
        if label not in read.operands[operand]:
            role = role_of(read, label)
            found[role] = (*found.get(role, ()), extent)
    return found


def _grids(made: EinSum, read: EinSum, operand: int, ranks: int) -> tuple[Ints, Ints]:
    """Return the ways to cut an outer product, and its reader, which has it as this operand.

    In every way: the parts of each dimension of the product, then of whatever else is cut.
    """
    dimensions = [part_counts([extent], ranks) for extent in made.bound]
    others = _other_labels(read, operand).values()
    of_others = [part_counts(extents, ranks) for extents in others]
    return grids(ranks, dimensions), grids(ranks, [*dimensions, *of_others])


@lru_cache(maxsize=16)  # layers repeat
def joint_ways(
    made: EinSum,
    read: EinSum,
    operand: int,
    ranks: int,
    work_of_made: Work = FREE_WORK,
    work_of_read: Work = FREE_WORK,
) -> Ways:
    """Return the ways to cut an outer product and its reader, which has it as this operand.

    The operands are those of the product, then the others of the reader. The words of a way are
    those of the reader's partial results and those that move of the product.
    """
    making, reading = _grids(made, read, operand, ranks)
    making, reading = work_of_made.allowed(making), work_of_read.allowed(reading)
    if not len(making) or not len(reading):
        return least_ways(len(made.operands) + len(read.operands) - 1, ranks)
    roles = [role_of(made, label) for label in made.output]
    made_ways = ways_of_grid(making, roles, len(made.operands), 0, work_of_made)
    index = [str(label) for label in read.operands[operand]]
    roles = [*(role_of(read, label) for label in index), *_other_labels(read, operand)]
    read_ways = ways_of_grid(reading, roles, len(read.operands), prod(read.bound), work_of_read)

    copies = 1 + read_ways.copies[:, operand]
    needed = np.column_stack([reading[:, : len(made.bound)], copies])
    kept = most_kept(making, needed, made.bound, ranks)
    words = made_ways.words[:, None] + read_ways.words + prod(made.bound) * copies - kept
    columns = []  # copies of each operand, for every pair of ways
    for column in made_ways.copies.T:
        columns.append(np.broadcast_to(column[:, None], kept.shape).ravel())
    for number, column in enumerate(read_ways.copies.T):
        if number != operand:
            columns.append(np.broadcast_to(column, kept.shape).ravel())
    spare = np.broadcast_to(read_ways.spare, kept.shape).ravel()
    return Ways(np.column_stack(columns), words.ravel(), spare)


MOST_ROWS = 250  # of a linear program; a graph with more is divided
FINEST_FRACTION = 1 << 20  # of a word: charges are whole numbers of such fractions

Read = tuple[str, int]  # a vertex, and the number of its operand


class _Unit(NamedTuple):
    """A vertex, or an outer product and its reader."""

    result: str
    reads: tuple[Read, ...]
    ways: Ways
    free: frozenset[Read]  # those that charge nothing


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
    return max(bound, bound_of_graph(graph, ranks, resident, charges, words))


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
    looked_for = plan.words
    is_large = _cells(graph, ranks) > FEW_CELLS
    if is_large and not is_default:
        looked_for = min(plan.words, alone + alone // SMALL_GAP)
    best = Bound(alone, ALL_CUTS)
    if alone < looked_for:
        together = bound_of_graph(graph, ranks, resident, charges, looked_for, plan.carry)
        best = Bound(max(alone, together), ALL_CUTS)
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
        unit = divisor if repeated and plan.words < FEW_WORDS else 1
        exact = _work(graph, repeated, divisor, plan.words, unit)
        together = bound_by_groups(graph, ranks, resident, charges, plan, exact, unit=unit)
        together = -(-(together - repeated * unit // divisor) // unit)
        found = Bound(max(alone - repeated // divisor, together), REPEATING_NO_MORE)
        best = max(best, found, key=lambda bound: bound.words)
        if plan.memory is not None and len(graph.computed) <= MOST_VARIABLES:
            for price in PRICES_OF_MEMORY:
                if best.words >= plan.words:
                    break
                paid = repeated * MEMORY_FRACTIONS + price * plan.memory * divisor
                paid //= divisor * MEMORY_FRACTIONS
                priced = bound_by_groups(graph, ranks, resident, charges, plan, work, price)
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


EVERY_WORK_FREE: Mapping[str, Work] = {}


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
    for charging, charge_of in _charging(graph, ranks, resident, work, scale.unit):
        charges = charging.best(scale.fraction)
        total += max(0, charging.bound(charges, scale.fraction))
        for read, number in charge_of.items():
            charged[read] = charges[number] * scale.unit / scale.fraction
            name = _tensor(graph, read)
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


# Some units of a graph with what they charge, and the number of the charge for each operand.
_Joined = tuple[Charging, Mapping[Read, int]]


def _tensor(graph: EinGraph, read: Read) -> str:
    reader, operand = read
    return graph[reader].inputs[operand]


def _charging(
    graph: EinGraph,
    ranks: int,
    resident: Collection[str],
    work: Mapping[str, Work] = EVERY_WORK_FREE,
    unit: int = 1,
) -> Iterator[_Joined]:
    """Yield the parts of a graph with what they may charge, all at once or piece by piece.

    In a large graph, vertices that do the same charge the same. If there are still too many, the
    graph is divided: then nothing is charged for a tensor that another piece computes, nor for an
    input that an earlier piece reads.
    """
    units = list(_units(graph, ranks, work, unit))
    free = set(resident)
    made = {unit.result for unit in units}
    free |= {vertex.name for vertex in graph.computed if vertex.name not in made}
    if _rows(units) > MOST_ROWS:
        alike = vertices_alike(graph, dict.fromkeys(free, "free"))
        charging, charge_of = _joined(graph, units, free, alike, unit)
        if len(charging.parts) + charging.charges <= MOST_ROWS:
            yield charging, charge_of
            return
    read_before: set[str] = set()
    for piece in _pieces(units):
        read_here = {_tensor(graph, read) for unit in piece for read in unit.reads}
        made_here = {unit.result for unit in piece}
        not_charged = set(free)
        for name in read_here:
            is_input = graph[name].is_input
            if (is_input and name in read_before) or (not is_input and name not in made_here):
                not_charged.add(name)
        yield _joined(graph, piece, not_charged, {}, unit)
        read_before |= read_here


def _rows(units: Sequence[_Unit]) -> int:
    """Return the rows of the linear program: one for each unit and one for each operand."""
    return sum(1 + len(unit.reads) for unit in units)


def _pieces(units: Sequence[_Unit]) -> Iterator[Sequence[_Unit]]:
    """Yield neighbouring units, as many at a time as make a small linear program."""
    start = 0
    rows = 0
    for end, unit in enumerate(units):
        rows += _rows([unit])
        if rows > MOST_ROWS and end > start:
            yield units[start:end]
            start = end
            rows = _rows([unit])
    yield units[start:]


def _units(graph: EinGraph, ranks: int, work: Mapping[str, Work], unit: int) -> Iterator[_Unit]:
    """Yield the vertices of a graph; outer products together with their readers."""
    vertices: dict[str, Vertex] = {}
    for vertex in graph.computed:
        if 0 not in (extent for _, extent in vertex.computed_einsum.extents):
            vertices[vertex.name] = vertex
    reader_of = {}
    for name, reader in outer_products(graph, ranks).items() if unit == 1 else ():
        if name in vertices and reader in vertices:
            reader_of[name] = reader
    product_of = {reader: vertices[name] for name, reader in reader_of.items()}
    for name, vertex in vertices.items():
        readings = readings_of(graph, vertex)
        free = {(name, operand) for operand in not_charged(vertex, readings)}
        if name in product_of:
            product = product_of[name]
            operand = vertex.inputs.index(product.name)
            others = [read for read in _reads(vertex) if read[1] != operand]
            for each in (product, vertex):  # whose copies are counted as those of blocks
                free |= {(each.name, at) for at in not_charged(each, [None] * len(each.inputs))}
            ways = joint_ways(
                product.computed_einsum,
                vertex.computed_einsum,
                operand,
                ranks,
                work.get(product.name, FREE_WORK),
                work.get(name, FREE_WORK),
            )
            yield _Unit(name, (*_reads(product), *others), ways, frozenset(free))
        elif name not in reader_of:
            einsum = vertex.computed_einsum
            own = work.get(name, FREE_WORK)
            own = own._replace(price=own.price // unit)
            elements = vertex.elements // unit
            if any(reading is not None for reading in readings):
                ways = ways_with_halos(einsum, readings, elements, ranks, own)
            else:
                ways = ways_to_cut(einsum, elements, ranks, own)
            yield _Unit(name, _reads(vertex), ways, frozenset(free))


def _reads(vertex: Vertex) -> tuple[Read, ...]:
    return tuple((vertex.name, operand) for operand in range(len(vertex.inputs)))


def _joined(
    graph: EinGraph,
    units: Sequence[_Unit],
    free: Collection[str],
    alike: Mapping[str, str],
    unit_of_words: int,
) -> _Joined:
    """Return the parts of some units; those of vertices that are alike have the same charges.

    Nothing is charged for the tensors in `free`.
    """
    numbers: dict[Read, int] = {}
    charge_of: dict[Read, int] = {}
    charges_for: dict[str, list[int]] = {}
    charges_of: list[tuple[int | None, ...]] = []
    for unit in units:
        charges: list[int | None] = []
        for reader, operand in unit.reads:
            charge = None
            name = _tensor(graph, (reader, operand))
            if name not in free and (reader, operand) not in unit.free:
                model = alike.get(reader, reader), operand
                charge = numbers.setdefault(model, len(numbers))
                charges_for.setdefault(name, []).append(charge)
                charge_of[reader, operand] = charge
            charges.append(charge)
        charges_of.append(tuple(charges))

    # Equal units are one part. Ways are equal if they are the same object.
    parts: dict[tuple[object, ...], Part] = {}
    for unit, charges_of_unit in zip(units, charges_of, strict=True):
        for_result = tuple(sorted(charges_for.get(unit.result, ())))
        key = (charges_of_unit, for_result, id(unit.ways))
        times = parts[key].times if key in parts else 0
        parts[key] = Part(charges_of_unit, for_result, unit.ways, times + 1)
    limits: dict[Limit, None] = {}
    for name, charged in charges_for.items():
        limits[Limit(tuple(sorted(charged)), graph[name].elements // unit_of_words)] = None
    return Charging(list(parts.values()), list(limits), len(numbers)), charge_of
