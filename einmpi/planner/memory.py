"""Bytes of blocks of tensors, of pieces of vertices and of message buffers, given the cuts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from einmpi.caches import bounded_cache
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Call, Const, Index, IndexEntries, Scalar, walk
from einmpi.graph.segments import used_labels
from einmpi.planner.factor import Block
from einmpi.planner.mesh import Extent, Mesh, length_of, sides
from einmpi.planner.moving.halo import Needed, is_inside, needed_of
from einmpi.planner.orders import Orders
from einmpi.planner.states import numbered

# ---- sparse updates ------------------------------------------------------------------------------
#
# Updates that change a tensor only where a scattered sum has values, as W − rate × sum(…) does.


@dataclass(frozen=True)
class SparseUpdate:
    """An EinSum that adds a multiple of one operand to another, element by element.

    Attributes
    ----------
    old, change
        The operand that is changed, and the one that is multiplied.
    operation
        "+" or "-".
    multiple
        What is added or subtracted: `change` times numbers, over Args.
    """

    old: int
    change: int
    operation: str
    multiple: Scalar


@bounded_cache(1024)
def find_sparse_update(einsum: EinSum, change: int) -> SparseUpdate | None:
    """Return what an EinSum adds a multiple of an operand to; None if it is of another form."""
    function = einsum.function
    if not einsum.is_elementwise or not isinstance(function, Call):
        return None
    if function.op not in ("+", "-"):
        return None
    left, right = function.args
    if function.op == "+" and _is_multiple(einsum, left, change):
        left, right = right, left
    if not isinstance(left, Arg) or not _is_multiple(einsum, right, change):
        return None
    for position in (left.position, change):
        labels = einsum.operands[position]
        if labels != einsum.output or len(set(labels)) < len(labels):
            return None
    return SparseUpdate(left.position, change, function.op, right)


def _is_multiple(einsum: EinSum, node: Scalar, change: int) -> bool:
    """Return whether an expression is an operand times numbers."""
    match node:
        case Arg(position):
            return position == change
        case Call("neg", (inner,)):
            return _is_multiple(einsum, inner, change)
        case Call(op, (inner,)) if op in DTYPES and DTYPES[op].kind in "fc":
            return _is_multiple(einsum, inner, change)
        case Call("*", (left, right)):
            if _is_multiple(einsum, left, change):
                return einsum.is_one_number(right)
            return einsum.is_one_number(left) and _is_multiple(einsum, right, change)
        case Call("/", (left, right)):
            return _is_multiple(einsum, left, change) and einsum.is_one_number(right)
    return False


def scattered_label(einsum: EinSum) -> str | None:
    """Return the label along which sums are scattered to some indices only; None for all else.

    The values that are added up must not depend on the place where they go.
    """
    segments = einsum.segments
    if segments is None or einsum.aggregation != "sum" or len(segments.labels) != 1:
        return None
    (label,) = segments.labels
    if label in used_labels(segments.body, segments.operands):
        return None
    return label


def places_filled(einsum: EinSum) -> int:
    """Return how many indices of the scattered label get values at most."""
    extent = einsum.extent
    return prod(extent[label] for label in einsum.required_segments.index_labels)


def with_given_places(einsum: EinSum, places: int) -> EinSum:
    """Return a scattered EinSum for fewer places, with a further operand that says where to go.

    The operand has an index for each combination of the labels that the old index depends on.
    """
    segments = einsum.required_segments
    (label,) = segments.labels
    index = Arg(len(einsum.operands))
    condition = Call("==", (index, Index(label)))
    extents = []
    for other, extent in einsum.extents:
        extents.append((other, places if other == label else extent))
    return replace(
        einsum,
        operands=(*segments.operands, segments.index_labels),
        function=Call("where", (condition, segments.body, Const(segments.masked))),
        extents=tuple(extents),
    )


# ---- record --------------------------------------------------------------------------------------
#
# The record of a fused chain in a plan.


@dataclass(frozen=True)
class FusedChain:
    """Vertices that are computed together, one block of rows at a time.

    They follow one another in the order of the plan's graph.
    """

    vertices: tuple[str, ...]  # in the order in which they are computed
    inner: tuple[str, ...]  # those of which only one block exists at a time
    rows: tuple[tuple[str, ...], ...]  # for each row, the label that it is in each vertex
    block: tuple[int, ...]  # how many indices of each row at a time
    nbytes: int  # of all blocks that a rank has at once, at most
    saved: int  # bytes of a rank that the inner tensors would take if they were whole

    @property
    def outer(self) -> tuple[str, ...]:
        """The vertices whose results are whole in the end."""
        return tuple(name for name in self.vertices if name not in self.inner)


MESSAGE_BUFFER_BYTES = 16 * 2**20  # the most that one buffer for messages takes
LEAST_MESSAGE_BUFFER_BYTES = 256
MESSAGE_BUFFER_SHARE = 8  # a message buffer takes at most this fraction of the memory: an eighth
ROUNDING_BYTES = 16  # that the share of each rank in a message buffer may be rounded up by

PRODUCT_BLOCK_BYTES = 2**25  # of a product that is added to a carried tensor block by block
LEAST_BLOCK_ROWS = 64  # with fewer, a product would take longer
SPARSE_BLOCK_BYTES = 2**23  # of the rows of a carried tensor that are changed at a time
INDEX_BYTES = 8

Labels = Mapping[str, tuple[str | None, ...]]  # vertex → the label that each axis cuts
Layouts = Mapping[str, tuple[int | None, ...]]  # tensor → the dimension that each axis cuts


def stage_of(limit: int | None) -> int:
    """Return the size of a message buffer, in bytes, given the memory limit of a rank."""
    if limit is None:
        return MESSAGE_BUFFER_BYTES
    share = max(LEAST_MESSAGE_BUFFER_BYTES, limit // MESSAGE_BUFFER_SHARE)
    return min(MESSAGE_BUFFER_BYTES, share)


def staging(nbytes: int, ranks: int, stage: int = MESSAGE_BUFFER_BYTES) -> int:
    """Return the bytes of message buffers while a block of this size moves.

    There is one buffer for sending and one for receiving.
    """
    if ranks == 1:
        return 0
    return 2 * min(nbytes, stage) + ROUNDING_BYTES * ranks


def rows_of_block(row_bytes: int) -> int:
    """Return how many rows a block has, of a product that is computed block by block."""
    return max(1, PRODUCT_BLOCK_BYTES // max(1, row_bytes))


def is_worth_blocks(nbytes: int, row_bytes: int) -> bool:
    """Return whether to compute a product of this size block by block."""
    return nbytes > 2 * PRODUCT_BLOCK_BYTES and rows_of_block(row_bytes) >= LEAST_BLOCK_ROWS


def rows_of_sparse_block(places: int, row_bytes: int) -> int:
    """Return how many rows are changed at a time, if at most `places` rows are to be changed."""
    return max(1, min(places, SPARSE_BLOCK_BYTES // max(1, row_bytes)))


def sparse_update_bytes(places: int, row_bytes: int) -> int:
    """Return the bytes that an update of at most `places` rows needs beside the tensor.

    These are a block of sums, the rows that they are added to, and where each value goes: as its
    index, as the number of its row among those that change, and both again for one block.
    """
    return 2 * rows_of_sparse_block(places, row_bytes) * row_bytes + 4 * places * INDEX_BYTES


def block_bytes(
    vertex: Vertex, mesh: Mesh, cuts: Sequence[int | None], orders: Sequence[int] = ()
) -> int:
    """Return the size of the largest block of a tensor.

    `cuts` has for each axis the dimension that it cuts, or None.
    """
    return (
        _block_elements(mesh, sides(vertex.bound, orders), tuple(cuts))
        * np.dtype(vertex.dtype).itemsize
    )


@bounded_cache(4096)  # layers repeat, and several orders of a graph are compared
def _block_elements(mesh: Mesh, bound: tuple[Extent, ...], cuts: tuple[int | None, ...]) -> int:
    return prod(longest_shares(mesh, bound, cuts, range(len(bound))))


def longest_shares(
    mesh: Mesh, extents: Iterable[Extent], cuts: Sequence[Hashable], symbols: Iterable[Hashable]
) -> tuple[int, ...]:
    """Return the most indices that a rank can own of each of some labels or dimensions.

    `cuts` has for each axis the symbol that it cuts, and `symbols` those of the extents.
    """
    shares = []
    for symbol, extent in zip(symbols, extents, strict=True):
        axes = [axis for axis, cut in enumerate(cuts) if cut == symbol]
        shares.append(longest_share(mesh, extent, axes))
    return tuple(shares)


def on_a_rank(einsum: EinSum, mesh: Mesh, state: Sequence[str | None]) -> EinSum:
    """Return an EinSum as the rank with the most indices has it."""
    extents = [extent for _, extent in einsum.extents]
    shares = longest_shares(mesh, extents, state, einsum.labels)
    return replace(einsum, extents=tuple(zip(einsum.labels, shares, strict=True)))


def bytes_of_blocks(mesh: Mesh, blocks: Sequence[Block], state: Sequence[int]) -> int:
    """Return the bytes that a rank has of some blocks of a variable in this state."""
    return sum(nbytes // prod(mesh.parts(state, symbols)) for nbytes, symbols in blocks)


def longest_share(mesh: Mesh, side: Extent, axes: Sequence[int]) -> int:
    """Return the most indices that a rank can own of a label cut by these axes.

    Exact for the first axes of a window, else an upper bound.
    """
    extent = length_of(side)
    if not axes:
        return extent
    window = next(group for group in mesh.windows(side) if axes[0] in group)
    if all(axis in window for axis in axes):
        digits = mesh.places(side)
        lengths = list(digits[window[-1]])
        places = [len(digits[axis]) - 1 for axis in axes]
    else:
        # Several windows cut the label, along different digits of the same numbers. A block on its
        # way may also be cut twice along one digit, or along digits of other numbers.
        sliced = {mesh.places(side)[axis] for axis in axes}
        finest = max(sliced, key=lambda digit: (len(digit), digit))
        lengths = list(finest)
        places = [len(digit) - 1 for digit in sliced if list(digit) == lengths[: len(digit)]]
    parts = prod(lengths[place] for place in places)
    if sorted(places) == list(range(len(places))):
        return -(-extent // parts)
    fine_blocks = prod(lengths)
    longest_block = -(-extent // fine_blocks)
    return min(extent, fine_blocks // parts * longest_block)


def bytes_of_blocked_update(vertex: Vertex, mesh: Mesh, cuts: Sequence[int | None]) -> int:
    """Return the memory for a vertex that is computed block by block, for an update."""
    einsum = vertex.computed_einsum
    label = scattered_label(einsum)
    if label is None:
        return PRODUCT_BLOCK_BYTES
    dimension = einsum.output.index(label)
    return sparse_update_bytes(places_filled(einsum), row_bytes(vertex, mesh, cuts, dimension))


def row_bytes(vertex: Vertex, mesh: Mesh, cuts: Sequence[int | None], dimension: int) -> int:
    """Return the bytes that a rank has of a tensor for one index of a dimension."""
    bound = list(vertex.bound)
    bound[dimension] = 1
    other_cuts = [None if cut == dimension else cut for cut in cuts]
    return block_bytes(replace(vertex, bound=tuple(bound)), mesh, other_cuts)


class NumberedList(NamedTuple):
    """A list of indices that counts what a rank has of a dimension of a tensor, not all of it."""

    operand: int  # of the vertex
    tensor: str
    dimension: int

    def replaces(self, vertex: Vertex) -> bool:
        """Return whether the vertex reads the list for nothing else."""
        einsum = vertex.computed_einsum
        arg = Arg(self.operand)
        uses = [einsum.function]
        for name, index in zip(vertex.inputs, einsum.operands, strict=True):
            for dimension, entry in enumerate(index):
                is_this = (name, dimension, entry) == (self.tensor, self.dimension, arg)
                if not isinstance(entry, str) and not is_this:
                    uses.append(entry)
        return all(node != arg for use in uses for node in walk(use))


@dataclass(frozen=True)
class Cuts:
    """A graph in an order, cut over a mesh, and what follows from that for a rank."""

    graph: EinGraph
    mesh: Mesh
    states: Labels
    layouts: Layouts
    chains: tuple[FusedChain, ...] = ()  # vertices computed together, with tensors never whole
    orders: Orders = field(default_factory=dict)  # of the digits of labels and dimensions

    @property
    def in_chains(self) -> frozenset[str]:
        """The vertices of all chains."""
        return frozenset(name for chain in self.chains for name in chain.vertices)

    @property
    def inner(self) -> frozenset[str]:
        """The tensors of which only a block is in memory at a time."""
        return frozenset(name for chain in self.chains for name in chain.inner)

    def made(self, name: str) -> tuple[int | None, ...]:
        """Return the dimension that each axis cuts of a result as it is computed."""
        dimensions = self.graph[name].dimension_made
        state = self.states[name]
        return tuple([None if label is None else dimensions.get(label) for label in state])

    def wanted(self, user: str, operand: int) -> tuple[int | None, ...]:
        """Return the dimension that each axis cuts of an operand as a vertex reads it."""
        einsum = self.graph[user].computed_einsum
        cuts: list[int | None] = []
        for label in self.states[user]:
            cuts.append(None if label is None else einsum.dimension_cut_by(operand, label))
        return tuple(cuts)

    def loaded(self, name: str) -> tuple[int | None, ...]:
        """Return the dimension that each axis cuts of an input as it is loaded.

        That is its layout, or what its only reader needs.
        """
        if name in self.layouts:
            return self.layouts[name]
        user = self.graph.consumers[name][0]
        return self.wanted(user, self.graph[user].inputs.index(name))

    def symbols(self, kind: str, name: str) -> tuple[int, ...]:
        """Return what each axis cuts of a vertex or tensor as numbers; R is past the last one."""
        if kind == "tensor":
            return numbered(self.layouts[name], range(len(self.graph[name].bound)))
        return numbered(self.states[name], self.graph[name].computed_einsum.labels)

    def block_bytes(self, name: str, cuts: Sequence[int | None]) -> int:
        """Return the size of the largest block of a tensor with these cuts."""
        return block_bytes(self.graph[name], self.mesh, cuts, self.orders_of(name))

    def orders_of(self, name: str) -> tuple[int, ...]:
        """Return the order of the digits of each dimension of a tensor."""
        return self.orders.get(("tensor", name), ())

    def sides(self, name: str) -> tuple[Extent, ...]:
        """Return the labels of a vertex with the orders of their digits."""
        extents = [extent for _, extent in self.graph[name].computed_einsum.extents]
        return sides(extents, self.orders.get(("vertex", name), ()))

    def needed(self, vertex: Vertex, name: str) -> Needed | None:
        """Return what a vertex needs of a tensor that it reads with index arithmetic."""
        return needed_of(self.graph, vertex, name, self.orders)

    def numbered_lists(self, vertex: Vertex) -> Iterator[NumberedList]:
        """Yield the lists by which a vertex reads tensors of which ranks have what these name."""
        einsum = vertex.computed_einsum
        for name in dict.fromkeys(vertex.inputs) if einsum.is_gathering else ():
            needed = self.needed(vertex, name)
            if needed is None or not needed.lists:
                continue
            if is_inside(self.mesh, needed, self.layouts[name], self.states[vertex.name]):
                continue
            for dimension in filter(needed.is_listed, range(len(needed.bound))):
                for entry in dict.fromkeys(index[dimension] for index in needed.indices):
                    if isinstance(entry, Arg):
                        yield NumberedList(entry.position, name, dimension)

    def is_loaded(self, name: str) -> bool:
        """Return whether an input is read as it is, not only as lists that are numbered anew."""
        if self.graph[name].known is None:
            return True
        for user in self.graph.consumers[name]:
            vertex = self.graph[user]
            anew = {each.operand for each in self.numbered_lists(vertex) if each.replaces(vertex)}
            for operand, read in enumerate(vertex.inputs):
                if read == name and operand not in anew:
                    return True
        return False

    def is_partial(self, name: str) -> bool:
        """Return whether a tensor is computed as partial results: an aggregated label is cut."""
        vertex = self.graph[name]
        if vertex.is_input:
            return False
        return any(label in vertex.partial_labels for label in self.states[name])

    def is_there(self, user: str, operand: int) -> bool:
        """Return whether a vertex reads an operand as it is stored, or as it is computed.

        An input without a layout of its own is there for its only reader.
        """
        name = self.graph[user].inputs[operand]
        if name in self.layouts:
            return self.layouts[name] == self.wanted(user, operand)
        if self.graph[name].is_input:
            return True
        return self.made(name) == self.wanted(user, operand) and not self.is_partial(name)

    def moves(self, name: str) -> bool:
        """Return whether a result moves to its layout when it is computed."""
        if name not in self.layouts:
            return False
        return self.layouts[name] != self.made(name) or self.is_partial(name)


# ---- pieces --------------------------------------------------------------------------------------
#
# The pieces in which a vertex is computed where it does not fit into memory whole.


# A row for each way to cut, a column for each label: how many of its indices a piece has.
Sizes = npt.NDArray[np.int64]
# A number for each way to cut. Whole numbers, exact as far as memory reaches.
Amounts = npt.NDArray[np.float64]

MOST_PASSES = 4096  # of a vertex: smaller pieces would take more time than they are worth
MOST_LABELS_CUT = 6  # labels for which all numbers of parts are tried: the longest
# 1, 2, 3, 4, 6, 8, 12, 16, … 4096
PART_COUNTS = [1, *(part for k in range(1, 13) for part in (2**k, 3 * 2 ** (k - 1)))][:-1]


@dataclass(frozen=True)
class Pieces:
    """A vertex on a rank that may be computed in pieces, and the memory that they take."""

    einsum: EinSum
    shapes: tuple[tuple[int, ...], ...]  # of the operands, then of the result
    itemsizes: tuple[int, ...]
    inside: tuple[int, ...] = ()  # operands that are in memory anyway

    @cached_property
    def columns(self) -> dict[str, int]:
        """The column of each label in sizes."""
        return {label: number for number, label in enumerate(self.einsum.labels)}

    @property
    def copied(self) -> list[tuple[IndexEntries, tuple[int, ...], int]]:
        """The index, the shape and the bytes of an element of each operand that is not inside."""
        found = []
        for operand, entries in enumerate(self.einsum.operands):
            if operand not in self.inside:
                found.append((entries, self.shapes[operand], self.itemsizes[operand]))
        return found

    def sizes(self) -> Sizes:
        """Return the sizes of pieces, for all ways to cut that make at most MOST_PASSES passes.

        Long labels are cut into 1, 2, 3, 4, 6, 8, 12, … parts in all combinations; of the other
        labels the first few are cut into single indices. Ways that cut the first labels come first:
        their pieces lie in fewer runs of memory.
        """
        extent = {label: max(1, n) for label, n in self.einsum.extents}
        if self.einsum.sums_blocks:  # these stay whole
            extent.update(dict.fromkeys(self.einsum.aggregated, 1))
        longest = sorted(extent, key=lambda label: -extent[label])[:MOST_LABELS_CUT]
        long_labels = [label for label in reversed(self.einsum.labels) if label in longest]
        short_labels = [label for label in self.einsum.labels if label not in longest]
        step = 1 if len(long_labels) < 5 else 2
        ways = _ways_to_cut([extent[label] for label in long_labels], step)
        if self.einsum.matches is not None:
            ways = ways[:1]  # not at all
        columns = dict(zip(long_labels, ways.T, strict=True))
        found = []
        for single in range(len(short_labels) + 1):  # how many short labels are cut
            for position, label in enumerate(short_labels):
                size = 1 if position < single else extent[label]
                columns[label] = np.full(len(ways), size)
            table = np.array([columns[label] for label in self.einsum.labels], np.int64)
            found.append(table.reshape(-1, len(ways)))
        sizes = np.concatenate(found, axis=1).T
        for label, whole in self.einsum.extents:
            if extent[label] < whole:
                sizes[:, self.columns[label]] = whole
        few_passes: Sizes = sizes[self.parts(sizes).prod(axis=1) <= MOST_PASSES]
        return few_passes

    def parts(self, sizes: Sizes) -> Sizes:
        """Return the number of parts of each label."""
        extents = np.array([max(extent, 1) for _, extent in self.einsum.extents], np.int64)
        return -(-extents // sizes)

    def nbytes(self, sizes: Sizes, ahead: bool) -> Amounts:
        """Return the bytes of the pieces that are in memory at once, for each way to cut.

        With `ahead` there are two of each piece that changes, one in use and one on its way. Where
        an aggregated label is cut, memory holds both the result so far and the next summand.
        """
        is_cut = self.parts(sizes) > 1
        columns = self.columns
        total = np.zeros(len(sizes))
        for entries, shape, itemsize in self.copied:
            own_columns = [columns[entry] for entry in entries if isinstance(entry, str)]
            twice = is_cut[:, own_columns].any(axis=1) & ahead
            total += self._elements(entries, shape, sizes) * itemsize * (1 + twice)
        result = self._elements(self.einsum.output, self.shapes[-1], sizes) * self.itemsizes[-1]
        outputs = len(self.einsum.output)
        result_twice = is_cut[:, :outputs].any(axis=1) & ahead
        aggregation_is_cut = is_cut[:, outputs:].any(axis=1)
        return total + result * (1 + result_twice) + result * aggregation_is_cut

    def _elements(self, entries: IndexEntries, shape: Sequence[int], sizes: Sizes) -> Amounts:
        """Return the elements of a tensor's piece; a gathered dimension is needed whole."""
        total = np.ones(len(sizes))
        for entry, extent in zip(entries, shape, strict=True):
            total *= sizes[:, self.columns[entry]] if isinstance(entry, str) else extent
        return total


def _ways_to_cut(extents: Sequence[int], step: int) -> Sizes:
    """Return the sizes of pieces for all combinations of every `step`-th number of parts.

    There are at most 20,475 ways for four labels, or 18,564 for six. A way for one extent makes as
    many passes with a smaller one, which matters because shares on ranks differ by one.
    """
    sizes = np.empty((1, 0), np.int64)
    passes = np.ones(1, np.int64)
    for extent in extents:
        parts = list(dict.fromkeys(min(extent, part) for part in PART_COUNTS[::step]))
        size = np.array([-(-extent // part) for part in parts], np.int64)
        # Every way so far with every number of parts of this label.
        passes = np.outer(passes, parts).reshape(-1)
        sizes = np.column_stack([np.repeat(sizes, len(parts), axis=0), np.tile(size, len(sizes))])
        few = passes <= MOST_PASSES
        sizes = sizes[few]
        passes = passes[few]
    return sizes


@bounded_cache(1024)  # layers repeat
def least_bytes_of_pieces(pieces: Pieces) -> int:
    """Return the bytes of the smallest pieces of a vertex."""
    return int(pieces.nbytes(pieces.sizes(), ahead=False).min())
