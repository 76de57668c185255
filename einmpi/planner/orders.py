"""The order of the digits of each label and dimension: where halos move, all are cut in few blocks.

docs/planner.md, "Halos"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.index_arithmetic import arithmetic_labels
from einmpi.graph.matrices import COLUMNS, ROWS
from einmpi.planner.mesh import REVERSED, WHOLE, Mesh

# ("vertex" or "tensor", name) → the order of each label or dimension: see `Side`.
Orders = Mapping[tuple[str, str], tuple[int, ...]]
NO_ORDERS: Orders = {}

Fixed = Mapping[int, int]  # dimension → its order
NOTHING_FIXED: Mapping[str, Fixed] = {}
NOTHING_ALIKE: Mapping[str, str] = {}
MOST_FIRST_AXES = 2  # to try: each is a search of its own

BLOCK = 128  # columns of a panel of a large matrix, about
LEAST_BLOCK = 32
TURNS = 8  # of every rank along a dimension of it, if blocks are not too small then

Item = TypeVar("Item")
_Member = tuple[str, str, str | int]  # a label of a vertex, or a dimension of a tensor


def digit_orders(
    graph: EinGraph,
    axes: int,
    same: Mapping[str, str] = NOTHING_ALIKE,
    fixed: Mapping[str, Fixed] = NOTHING_FIXED,
    first_axis: int = 0,
    ranks: int = 1,
    with_sums: bool = False,
) -> Orders:
    """Return the orders of all that is not in the order of the mesh; pure, as all ranks ask.

    Labels and dimensions that go together have one order: those that index each other, by
    arithmetic too, and those of tensors that have the `same` layout. Some dimensions are `fixed`,
    because a tensor lies so already. Of those with arithmetic the first begin with the `first_axis`
    of the mesh, the last with the last one, and those between them with axes in between. So
    each can be cut into contiguous blocks by axes of its own. Ranks have blocks in turns of what a
    grid of ranks cuts. All else keeps the order of the mesh,
    but for sums in blocks if orders are `with_sums`: some of them begin with the last axis.
    """
    has_matrices = any(vertex.computed_einsum.matrix is not None for vertex in graph.computed)
    if axes < 2 and not has_matrices and not any(any(each.values()) for each in fixed.values()):
        return NO_ORDERS
    classes = _Classes(graph, same)
    of_class = classes.fixed(fixed)
    if of_class is None:
        raise ValueError("tensors that go together lie in different orders")
    with_arithmetic = classes.with_arithmetic()
    for number, root in enumerate(with_arithmetic):
        is_last = 0 < number == len(with_arithmetic) - 1
        later = (axes - first_axis) * number // len(with_arithmetic)
        order = REVERSED if is_last else first_axis + later
        of_class.setdefault(root, order if axes > 1 else 0)
    for root, extent in classes.on_grids().items():
        turns = turns_on_grid(extent, ranks)
        of_class.setdefault(root, -turns if turns > 1 else 0)
    of_class.update(dict.fromkeys(classes.whole, WHOLE))
    if with_sums and not classes.has_fixed_order:
        _spread_sums(graph, classes, of_class)
    if not any(of_class.values()):
        return NO_ORDERS
    orders: dict[tuple[str, str], tuple[int, ...]] = {}
    for each in graph.vertices:
        members: list[_Member] = [("tensor", each.name, at) for at in range(len(each.bound))]
        orders["tensor", each.name] = tuple(of_class.get(classes.root(m), 0) for m in members)
        if each.einsum is not None:
            members = [("vertex", each.name, label) for label in each.einsum.labels]
            orders["vertex", each.name] = tuple(of_class.get(classes.root(m), 0) for m in members)
    return {name: found for name, found in orders.items() if any(found)}


def turns_on_grid(extent: int, ranks: int) -> int:
    """Return how often every rank has its turn along a dimension of a large matrix."""
    return round(extent / (ranks * block_on_grid(extent, ranks)))


def block_on_grid(extent: int, ranks: int) -> int:
    """Return about how many columns a panel of a large matrix has."""
    return min(BLOCK, max(LEAST_BLOCK, extent // (TURNS * ranks)))


def _spread_sums(graph: EinGraph, classes: _Classes, of_class: dict[_Member, int]) -> None:
    """Let sums in blocks begin with the first or the last axis.

    Only the axes that come first for a label may cut its sum. Two such labels of a tensor, such as
    a batch and the features of a layer, can then be cut by different axes.
    """
    together: dict[_Member, Counter[_Member]] = {}
    for vertex in graph.computed:
        einsum = vertex.computed_einsum
        roots = [classes.root(("vertex", vertex.name, label)) for label in einsum.labels]
        if einsum.sums_many_blocks:
            together.setdefault(
                classes.root(("vertex", vertex.name, einsum.aggregated[0])), Counter()
            )
        for root in roots:
            if root in together:
                together[root].update(roots)
    for root, others in together.items():
        balance = 0  # of those that begin with the first axis
        for other, count in others.items():
            if other in together and other in of_class:
                balance += count if of_class[other] == 0 else -count
        of_class.setdefault(root, REVERSED if balance > 0 else 0)


def other_first_axes(graph: EinGraph, mesh: Mesh) -> list[int]:
    """Return axes besides the first one with which labels with arithmetic may well begin.

    The axes before them can cut a short label that needs no halo, such as the images of a batch.
    """
    found = set()
    for vertex in graph.computed:
        einsum = vertex.computed_einsum
        in_arithmetic: set[str] = set()
        beside: set[str] = set()
        for operand, index in enumerate(einsum.operands):
            if einsum.has_arithmetic(operand):
                for entry in index:
                    if isinstance(entry, str):
                        beside.add(entry)
                    else:
                        in_arithmetic.update(arithmetic_labels(entry) or ())
        for label in beside.intersection(einsum.output) - in_arithmetic:
            windows = mesh.windows(einsum.extent[label])
            if len(windows) > 1:
                found.add(len(windows[0]))
    return sorted(found)[:MOST_FIRST_AXES]


def orders_agree(graph: EinGraph, same: Mapping[str, str], fixed: Mapping[str, Fixed]) -> bool:
    """Return whether all that goes together can have one order where these are fixed."""
    return _Classes(graph, same).fixed(fixed) is not None


class Classes(Generic[Item]):
    """Classes of items, each known by one of its members."""

    def __init__(self) -> None:
        self.parent: dict[Item, Item] = {}

    def root(self, item: Item) -> Item:
        """Return the item that stands for the class of an item."""
        while item in self.parent:
            item = self.parent[item]
        return item

    def join(self, one: Item, two: Item) -> None:
        """Make one class of those of two items."""
        first, second = self.root(one), self.root(two)
        if first != second:
            self.parent[second] = first


class _Classes(Classes[_Member]):
    """Classes of labels and dimensions."""

    def __init__(self, graph: EinGraph, same: Mapping[str, str]) -> None:
        super().__init__()
        self.arithmetic: list[_Member] = []  # labels with arithmetic, in the order of the graph
        self.has_other_forms = False  # as graphs with scans, gathers and recurrences
        self.grids: list[tuple[_Member, int]] = []  # labels that a grid cuts, and their extents
        self.whole: list[_Member] = []  # labels that no axis may cut
        self.has_fixed_order = any(vertex.known is not None for vertex in graph.inputs)
        for vertex in graph.computed:
            self._join_labels(vertex)
        for name, other in {**same, **graph.carried}.items():
            if name in graph.by_name and other in graph.by_name:
                for dimension in range(len(graph[name].bound)):
                    self.join(("tensor", name, dimension), ("tensor", other, dimension))

    def fixed(self, orders: Mapping[str, Fixed]) -> dict[_Member, int] | None:
        """Return the order of each class of which a dimension is fixed; None if they disagree."""
        found: dict[_Member, int] = {}
        for name, of_dimensions in orders.items():
            for dimension, order in of_dimensions.items():
                if found.setdefault(self.root(("tensor", name, dimension)), order) != order:
                    return None
        return found

    def with_arithmetic(self) -> list[_Member]:
        """Return the classes of labels with arithmetic, once each."""
        if self.has_other_forms:
            return []
        return list(dict.fromkeys(self.root(label) for label in self.arithmetic))

    def on_grids(self) -> dict[_Member, int]:
        """Return the classes of labels that a grid cuts, with their least extents."""
        found: dict[_Member, int] = {}
        for label, extent in self.grids:
            root = self.root(label)
            found[root] = min(extent, found.get(root, extent))
        return found

    def _join_labels(self, vertex: Vertex) -> None:
        """Join the labels of a vertex with what they index."""
        einsum = vertex.computed_einsum
        is_special = einsum.scan is not None or einsum.segments is not None
        whole = einsum.whole_labels
        self.whole += [("vertex", vertex.name, label) for label in whole]
        for label, extent in einsum.extents:
            if label in (ROWS, COLUMNS):
                self.grids.append((("vertex", vertex.name, label), extent))
        self.has_fixed_order |= is_special or vertex.recurrence is not None
        self.has_other_forms |= self.has_fixed_order
        for dimension, label in enumerate(einsum.output):
            if label not in whole:
                self.join(("tensor", vertex.name, dimension), ("vertex", vertex.name, label))
        for name, index in zip(vertex.inputs, einsum.operands, strict=True):
            for dimension, entry in enumerate(index):
                labels = (entry,) if isinstance(entry, str) else arithmetic_labels(entry)
                if labels is None:
                    self.has_other_forms = True
                for label in labels or ():
                    if label in whole:
                        continue
                    self.join(("tensor", name, dimension), ("vertex", vertex.name, label))
                    if not isinstance(entry, str):
                        self.arithmetic.append(("vertex", vertex.name, label))


def fixed_orders(
    layouts: Mapping[str, Sequence[int | None]], orders: Mapping[str, Sequence[int]]
) -> dict[str, Fixed]:
    """Return the order of each dimension that these layouts cut; others can have any order."""
    found: dict[str, Fixed] = {}
    for name, cuts in layouts.items():
        of_tensor = orders.get(name, ())
        cut_dimensions = {cut for cut in cuts if cut is not None}
        found[name] = {each: of_tensor[each] if of_tensor else 0 for each in cut_dimensions}
    return found
