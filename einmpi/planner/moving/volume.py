"""What a plan moves along every edge, and what every vertex costs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from einmpi.caches import bounded_cache
from einmpi.planner.factor import Edge, Variable, factor
from einmpi.planner.grids import words_of_plan
from einmpi.planner.machine import ATTOSECONDS_OF_A_PICOSECOND, Prices
from einmpi.planner.memory import Cuts
from einmpi.planner.mesh import Extent, Mesh, sides
from einmpi.planner.moving.halo import Needed, indices_by_digits
from einmpi.planner.moving.halo_words import HALO_NEIGHBOURS, halo_words_of_plan
from einmpi.planner.paper import Cost

# ---- volume --------------------------------------------------------------------------------------
#
# The exact number of words that an edge moves, for all pairs of layouts at once.
#
# Whole numbers only. docs/planner.md, "What an edge costs", has the table of factors.


Ints = npt.NDArray[np.int64]
Number = TypeVar("Number", int, Ints)  # of one pair of layouts, or of all pairs at once
Turn = tuple[int, int, int]  # an axis, the dimension that it cuts before and afterwards
AxisPair = tuple[int, int, int]  # length of an axis, its symbol in the source and in the target


class Factors(NamedTuple, Generic[Number]):
    """The columns of the table in docs/planner.md, multiplied over some axes.

    The table has fractions. To stay with whole numbers, BD and BS are multiplied by the product f
    of the axes, and OV by f². Arrays are [source layout, target layout].
    """

    target: Number  # f·BD: the block that a rank has afterwards
    partials: Number  # G: ranks whose partial results make one element
    overlap: Number  # f²·OV: the part of both blocks that is the same
    replicas: Number  # 1/SG: ranks that have the same before and want the same afterwards
    peers: Number  # ranks that exchange something

    @property
    def reduced(self) -> Any:
        """f·(1 − 1/G)·BS, where f·BS, the block that a rank has before, is partials · replicas."""
        return (self.partials - 1) * self.replicas


@cache
def axis_factors(length: int, ndim: int) -> Factors[Ints]:
    """Return the table for one axis, as arrays [source symbol, target symbol].

    Source symbols are the dimensions 0 … ndim − 1, then R, then P; target symbols are the
    dimensions, then R.
    """
    replicated = ndim
    partial = ndim + 1
    shape = (ndim + 2, ndim + 1)

    target = np.ones(shape, np.int64)
    target[:, replicated] = length

    partials = np.ones(shape, np.int64)
    partials[partial, :] = length

    overlap = np.full(shape, length, np.int64)
    overlap[:ndim, :ndim] = 1  # d → d'
    overlap[range(ndim), range(ndim)] = length  # d → d
    overlap[replicated, replicated] = length * length

    replicas = np.ones(shape, np.int64)
    replicas[replicated, replicated] = length

    peers = np.full(shape, length, np.int64)
    peers[range(ndim), range(ndim)] = 1
    peers[replicated, :] = 1
    return Factors(target, partials, overlap, replicas, peers)


NO_AXES = Factors(1, 1, 1, 1, 1)


def layout_factors(
    lengths: Sequence[int],
    ndim: int,
    sources: Ints,
    targets: Ints,
    others: Factors[int] = NO_AXES,
) -> Factors[Ints]:
    """Return the products for all pairs of layouts, multiplied by those over other axes.

    `sources` and `targets` have a row for each layout and a column for each axis: its symbol.
    """
    shape = (len(sources), len(targets))
    products = Factors(*(np.full(shape, product, np.int64) for product in others))
    for axis, length in enumerate(lengths):
        pairs = sources[:, axis][:, None], targets[:, axis]
        for product, table in zip(products, axis_factors(length, ndim), strict=True):
            product *= table[pairs]
    return products


@cache
def axes_factors(axes: tuple[AxisPair, ...], ndim: int) -> Factors[int]:
    """Return the products for one pair of layouts, given the symbols of each axis."""
    products = list(NO_AXES)
    for length, source, target in axes:
        for column, table in enumerate(axis_factors(length, ndim)):
            products[column] *= int(table[source, target])
    return Factors(*products)


# ---- words received -----------------------------------------------------------------------------


def received(products: Factors[Any], amount: int, overlap: Any, sharing: Any = None) -> Any:
    """Return what all ranks together receive of a tensor of this amount (words or bytes).

    This is p·|T|·(BD + Δ) with Δ = (1 − 1/G)·BS − OV, and Δ·SG in place of a positive Δ.
    `overlap` is p·|T|·OV: see `overlap_share` and `kept_elements`. `sharing` are the replicas that
    share a reduction, if not all do.
    """
    delta = products.reduced * amount - overlap
    replicas = products.replicas if sharing is None else sharing
    shared_delta = np.maximum(delta, 0) // replicas + np.minimum(delta, 0)
    return products.target * amount + shared_delta


def overlap_share(products: Factors[Any], ranks: int, amount: int) -> Any:
    """Return what stays on its rank, of all ranks together: overlap · amount / ranks.

    The division comes first, so that the numbers stay small. Where an axis turns from one
    dimension to another and the extents do not divide, `kept_elements` has the exact number.
    """
    quotient, remainder = divmod(amount, ranks)
    return products.overlap * quotient + products.overlap * remainder // ranks


def replicas_share(products: Factors[int], ranks: int) -> bool:
    """Return whether Δ > 0: aggregating moves more than it saves, and idle replicas share it."""
    shares: bool = ranks * products.reduced > products.overlap
    return shares


def sharing_on_nodes(products: Factors[Any], between: Factors[Any]) -> Any:
    """Return the replicas that share a reduction, given the products over axes between nodes.

    Replicas on other nodes share it only if it goes from node to node anyway.
    """
    return products.replicas // np.where(between.partials > 1, 1, between.replicas)


class Flow(NamedTuple):
    """What moves along an edge, in words or bytes, and the ranks that exchange something.

    Of one pair of layouts, or of all pairs at once.
    """

    total: Any  # that all ranks together receive
    between: Any  # of it: from other nodes
    peers: Any  # ranks in an exchange
    nodes: Any  # on which they lie


def input_flow(every: Factors[Any], between: Factors[Any], amount: int) -> Flow:
    """Return what moves of an input, which is stored once: every copy but the first."""
    copies, nodes = every.target, between.target
    return Flow((copies - 1) * amount, (nodes - 1) * amount, copies, nodes)


def computed_flow(
    every: Factors[Any], between: Factors[Any], amount: int, kept: Any, kept_on_nodes: Any
) -> Flow:
    """Return what moves of a computed tensor, given what stays on its rank and on its node."""
    if between is NO_AXES:  # as in searches on one node
        return Flow(received(every, amount, kept), 0, every.peers, 1)
    total = received(every, amount, kept, sharing_on_nodes(every, between))
    return Flow(total, received(between, amount, kept_on_nodes), every.peers, between.peers)


def halo_flow(mesh: Mesh, needed: Needed, total: Any, between: Any) -> Flow:
    """Return the flow of words that ranks receive, of which some come from other nodes.

    A halo comes from neighbours; what lists name may come from all ranks.
    """
    ranks = nodes = HALO_NEIGHBOURS
    if needed.lists:
        ranks, nodes = mesh.ranks // mesh.nodes, mesh.nodes
    inside = np.where(total > 0, ranks, 1)
    across = np.where(between > 0, nodes, 1)
    return Flow(total, between, inside * across, across)


# ---- extents that do not divide -----------------------------------------------------------------


@bounded_cache(65536)
def kept_elements(mesh: Mesh, bound: tuple[Extent, ...], turns: tuple[Turn, ...]) -> int:
    """Return the elements that stay on their rank when axes turn.

    A turn is (axis, the dimension it cuts before, the dimension it cuts after). An element stays
    if its indices in both dimensions have the same digit on the axis. Axes that do not turn make
    no difference: what their ranks keep adds up to what one rank would keep.
    """
    # One array axis for each turn: the digit. An element counts where all its digits agree.
    kept = np.ones([mesh.factors[axis] for axis, _, _ in turns], np.int64)
    for dimension, extent in enumerate(bound):
        cutting = tuple(axis for axis, *pair in turns if dimension in pair)
        shape = [mesh.factors[axis] if axis in cutting else 1 for axis, _, _ in turns]
        kept = kept * indices_by_digits(mesh, extent, cutting).reshape(shape)
    return int(kept.sum())


def kept_elements_table(
    mesh: Mesh, bound: tuple[Extent, ...], axes: int, sources: Ints, targets: Ints
) -> Ints:
    """Return `kept_elements` for all pairs of layouts, by the first `axes` axes alone."""
    ndim = len(bound)
    # The direction of a turn makes no difference, so few pairs of layouts differ. Give each pair a
    # code with one digit per axis, low · ndim + high where the axis turns and 0 where it does not.
    codes = np.zeros((len(sources), len(targets)), np.int64)
    for axis in range(axes):
        source = sources[:, axis][:, None]
        target = targets[:, axis]
        low = np.minimum(source, target)
        high = np.maximum(source, target)
        turns_here = (low < high) & (high < ndim)
        codes = codes * ndim**2 + np.where(turns_here, low * ndim + high, 0)
    different, which = np.unique(codes, return_inverse=True)
    kept = []
    for code in different.tolist():
        turns = []
        for axis in reversed(range(axes)):
            code, digit = divmod(code, ndim**2)
            if digit:
                low, high = divmod(digit, ndim)
                turns.append((axis, low, high))
        kept.append(kept_elements(mesh, bound, tuple(reversed(turns))))
    return np.array(kept, np.int64)[which.reshape(codes.shape)]


@dataclass(frozen=True)
class Traffic:
    """What moves along an edge of a plan: words over all ranks."""

    words: Cost  # copies for a join, partial results, and what is cut along other dimensions
    between: tuple[int, int]  # words between nodes: of the combined ones, of the others
    peers: tuple[int, int]  # ranks in an exchange: inside a node, between nodes

    def times(self, steps: int) -> Traffic:
        """Return what moves in all steps of a recurrence."""
        if steps == 1:
            return self
        combined, others = self.between
        return replace(
            self, words=self.words.times(steps), between=(steps * combined, steps * others)
        )


def edge_traffic(mesh: Mesh, edge: Edge, cuts: Sequence[Sequence[int]]) -> Traffic:
    """Return what an edge moves, given the symbols of each axis at its ends, the source first."""
    targets = tuple([edge.target_symbols[symbol] for symbol in cuts[-1]])
    if edge.source is None:
        return traffic(mesh, edge.bound, None, targets)
    sources = tuple([edge.source_symbols[symbol] for symbol in cuts[0]])
    if edge.needed is None:
        return traffic(mesh, edge.bound, sources, targets, None, edge.orders)
    return traffic(mesh, edge.bound, sources, tuple(cuts[-1]), edge.needed)


@bounded_cache(4096)  # layers repeat
def traffic(
    mesh: Mesh,
    bound: tuple[int, ...],
    sources: tuple[int, ...] | None,
    targets: tuple[int, ...],
    needed: Needed | None = None,
    orders: tuple[int, ...] = (),
) -> Traffic:
    """Return what a tensor moves, given the symbols of each axis before, if any, and after."""
    combined = crossing_combined = 0
    turns: list[Turn] = []
    if needed is not None:
        assert sources is not None, "what is read with index arithmetic has a layout"
        flow = halo_flow(mesh, needed, *halo_words_of_plan(mesh, needed, sources, targets))
    else:
        elements = prod(bound)
        axes = tuple(zip(mesh.factors, sources or targets, targets, strict=True))
        every = axes_factors(axes, len(bound))
        between = axes_factors(axes[: mesh.node_axes], len(bound))
        if sources is None:
            flow = input_flow(every, between, elements)
        else:
            turns = _turns(bound, sources, targets)
            on_nodes = [turn for turn in turns if turn[0] < mesh.node_axes]
            kept = every.replicas * kept_elements(mesh, sides(bound, orders), tuple(turns))
            kept_on_nodes = between.replicas * kept_elements(
                mesh, sides(bound, orders), tuple(on_nodes)
            )
            flow = computed_flow(every, between, elements, kept, kept_on_nodes)
            combined = min(int(flow.total), (every.partials - 1) * elements)
            crossing_combined = min(int(flow.between), (between.partials - 1) * elements)
    rest = int(flow.total) - combined
    nodes = int(flow.nodes)
    return Traffic(
        Cost(0 if turns else rest, combined, rest if turns else 0),
        between=(crossing_combined, int(flow.between) - crossing_combined),
        peers=(int(flow.peers) // nodes, nodes),
    )


def _turns(bound: tuple[int, ...], sources: Sequence[int], targets: Sequence[int]) -> list[Turn]:
    """Return the axes that go from one dimension to another."""
    found = []
    for axis, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if source != target and max(source, target) < len(bound):
            found.append((axis, source, target))
    return found


NOTHING = Cost(0, 0, 0)


@dataclass
class Bill:
    """What a vertex moves, and how long it takes where a machine was measured.

    Times are picoseconds of all ranks together.
    """

    words: Cost = NOTHING
    nbytes: int = 0
    between: int = 0  # bytes between nodes
    computing: int = 0
    moving_inside: int = 0
    moving_between: int = 0

    @property
    def time(self) -> int:
        return self.computing + self.moving_inside + self.moving_between

    def add(self, words: Cost, words_between: int, itemsize: int, prices: Prices) -> None:
        """Add words that move, some of them between nodes."""
        if words.total == 0 and words_between == 0:
            return
        nbytes = words.total * itemsize
        nbytes_between = words_between * itemsize
        self.words += words
        self.nbytes += nbytes
        self.between += nbytes_between
        if prices.machine is not None:
            self.moving_inside += (nbytes - nbytes_between) * prices.inside
            self.moving_between += nbytes_between * prices.between


def total_bill(bills: Collection[Bill]) -> Bill:
    """Return what several vertices move, and how long they take."""
    words = sum((bill.words for bill in bills), NOTHING)
    names = [field.name for field in fields(Bill)[1:]]
    return Bill(words, *(sum(getattr(bill, name) for bill in bills) for name in names))


EdgeOfPlan = tuple[Edge, Variable, list[tuple[int, ...]], Traffic]


def edges_of_plan(cut: Cuts, resident: Collection[str]) -> Iterator[EdgeOfPlan]:
    """Yield each edge of a graph with its target, the symbols of its ends, and what it moves.

    The symbols of the source come first, if there is a source.
    """
    problem = factor(cut.graph, resident, cut.layouts, orders=cut.orders)
    for edge in problem.edges:
        target = problem.variables[edge.target]
        cuts = [cut.symbols(target.kind, target.name)]
        if edge.source is not None:
            source = problem.variables[edge.source]
            cuts.insert(0, cut.symbols(source.kind, source.name))
        yield edge, target, cuts, edge_traffic(cut.mesh, edge, cuts).times(edge.weight)


def bills(cut: Cuts, resident: Collection[str], prices: Prices) -> dict[str, Bill]:
    """Return what each vertex costs. Repeated layers are counted one by one.

    Copies and new cuts are paid by the vertex that needs them, partial results by the vertex that
    made them.
    """
    graph, mesh = cut.graph, cut.mesh
    found = {vertex.name: Bill() for vertex in graph.computed}
    for edge, target, _, traffic in edges_of_plan(cut, resident):
        tensor = graph[edge.tensor]
        itemsize = np.dtype(tensor.dtype).itemsize
        user = edge.tensor
        if target.kind == "vertex" or tensor.is_input:
            user = target.name
        if user not in found:  # an input in a layout of its own: its first reader pays
            user = graph.consumers[user][0]
        between_combined, between_rest = traffic.between
        found[user].add(replace(traffic.words, aggregate=0), between_rest, itemsize, prices)
        payer = found[user]
        combined = traffic.words.aggregate
        if combined:
            payer = found[edge.tensor]
            payer.add(Cost(0, combined, 0), between_combined, itemsize, prices)
        inside, across = traffic.peers
        payer.moving_inside += edge.weight * mesh.ranks * prices.messages(inside, 1)
        payer.moving_between += edge.weight * mesh.ranks * prices.messages(1, across)

    for vertex in graph.computed:
        for words, words_between, itemsize in words_of_plan(cut, vertex):
            found[vertex.name].add(Cost(words, 0, 0), words_between, itemsize, prices)
    if prices.machine is not None:
        for vertex in graph.computed:
            replicas = mesh.parts(cut.states[vertex.name], [None])[0]
            attoseconds = vertex.operations() * prices.operation(vertex)
            found[vertex.name].computing = attoseconds // ATTOSECONDS_OF_A_PICOSECOND * replicas
    return found
