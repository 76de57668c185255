"""One large matrix on a grid of ranks: which functions of matrices are computed so, in which blocks
of columns, and how many words that moves.

The axes of the mesh that cut the rows of the matrix make the grid's rows, those that cut columns
its columns. Ranks have blocks in turns, in cycles (`Side` in planner/mesh.py), so that all of them
have a share of what is left when the first blocks are done. A panel is a block of columns whose
rows and columns at the diagonal have one owner each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from einmpi.caches import bounded_cache
from einmpi.graph import matrices
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.einsum import EinSum, einsum_over
from einmpi.graph.matrices import COLUMNS, ROWS
from einmpi.planner.mesh import Extent, Mesh, sides
from einmpi.planner.moving.halo import stretches_by_digits
from einmpi.planner.orders import BLOCK, block_on_grid

if TYPE_CHECKING:
    from einmpi.planner.memory import Cuts

STATUS_BYTES = 8  # of a place at which a panel cannot be computed
SMALL_BYTES = 24  # of numbers of rows and of ranks
NUMBERS = 2  # with a row that may have the next pivot: its own, and that of its rank
ALIKE = 8  # grids that differ by less than this share of the elements of the matrix move as much
FEW_COLUMNS = 4  # on the right of a system: fewer than its rows over this number


def with_grids(graph: EinGraph, mesh: Mesh) -> EinGraph:
    """Return a graph in which functions of large matrices have labels that a grid cuts.

    Results of one function are computed together, as the first of them.
    """
    first: dict[object, str] = {}
    vertices = []
    for vertex in graph.vertices:
        if vertex.einsum is not None and vertex.einsum.matrix is not None:
            record = vertex.einsum.matrix.record
            key = record.name, vertex.inputs, vertex.einsum.operands[0][:-2], vertex.recurrence
            name = first.setdefault(key, vertex.name)
            vertex = replace(
                _on_grid(graph, vertex, mesh), computed_with="" if name == vertex.name else name
            )
        vertices.append(vertex)
    return replace(graph, vertices=_together(vertices)) if first else graph


def _together(vertices: Sequence[Vertex]) -> tuple[Vertex, ...]:
    """Return vertices in an order in which those that are computed together come together."""
    found = []
    for vertex in vertices:
        if not vertex.computed_with:
            found += [vertex, *(each for each in vertices if each.computed_with == vertex.name)]
    return tuple(found)


def _on_grid(graph: EinGraph, vertex: Vertex, mesh: Mesh) -> Vertex:
    einsum = vertex.einsum
    if einsum is None or einsum.matrix is None or not einsum.matrix.record.on_grid:
        return vertex
    is_one = len(einsum.operands[0]) == 2 and vertex.recurrence is None and mesh.ranks > 1
    rows, columns = graph[vertex.inputs[0]].bound[-2:]
    is_solved = einsum.matrix.record.name != "lstsq" or rows >= columns
    if not is_one or not is_solved or graph[vertex.inputs[0]].nbytes < matrices.LARGE_BYTES:
        return vertex
    return replace(vertex, einsum=_with_grid_labels(einsum))


def _with_grid_labels(einsum: EinSum) -> EinSum:
    """Return a function of one matrix with the labels of a grid in place of rows and columns.

    Few columns on the right of a system are whole, and the unknowns are where the columns of the
    matrix are. So the matrix need not move.
    """
    labels = einsum.matrix_labels
    extent = einsum.extent
    names = {labels["i"]: ROWS, labels["j"]: COLUMNS}
    output = einsum.output
    if len(einsum.operands) > 1:
        right = labels.get("k", "")
        is_narrow = FEW_COLUMNS * extent.get(right, 0) < extent[labels["i"]]
        if is_narrow or not einsum.required_matrix.record.is_square:
            output = (COLUMNS, *output[1:])
        else:
            names[right] = COLUMNS
    if len(output) > 1 and output[0] != COLUMNS:
        has_all_rows = extent[output[0]] == extent[labels["i"]]
        output = ROWS if has_all_rows else output[0], COLUMNS
    pairs = [*zip(output, einsum.output, strict=True)]
    pairs += [(names.get(label, label), label) for label in labels.values()]
    extents: dict[str, int] = {}
    for name, label in pairs:
        extents[name] = min(extent[label], extents.get(name, extent[label]))
    gone = tuple(label for label in extents if label not in output)
    operands = [
        tuple(names.get(str(each), str(each)) for each in index) for index in einsum.operands
    ]
    return einsum_over(output, operands, einsum.function, None, gone, extents)


# ---- panels --------------------------------------------------------------------------------------


class Panel(NamedTuple):
    """A block of columns, and the numbers of the grid's row and column that have its diagonal."""

    start: int
    stop: int
    row: int
    column: int

    @property
    def width(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Grid:
    """How a matrix lies on the ranks: its dimensions, and the axes that cut each of them."""

    mesh: Mesh
    sides: tuple[Extent, Extent]
    axes: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def ranks(self) -> tuple[int, int]:
        """Return how many ranks share a row, and a column, of the matrix."""
        counts = [prod(self.mesh.factors[axis] for axis in axes) for axes in self.axes]
        return counts[0], counts[1]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """The panels, in order."""
        return _panels(self)

    @property
    def widest(self) -> int:
        """The columns of the widest panel."""
        return max(panel.width for panel in self.panels)


@bounded_cache(256)
def _panels(grid: Grid) -> tuple[Panel, ...]:
    stretches = []
    borders = set()
    for side, axes in zip(grid.sides, grid.axes, strict=True):
        starts, owners = stretches_by_digits(grid.mesh, side, axes)
        stretches.append((starts, owners))
        borders.update(starts.tolist())
    found = []
    end = min(int(starts[-1]) for starts, _ in stretches)
    for first, last in pairwise(sorted(border for border in borders if border <= end)):
        count = max(1, round((last - first) / BLOCK))
        for number in range(count):
            start, stop = (first + (last - first) * k // count for k in (number, number + 1))
            row, column = (
                int(owners[np.searchsorted(starts, start, side="right") - 1])
                for starts, owners in stretches
            )
            found.append(Panel(start, stop, row, column))
    return tuple(found)


def grid_of(cut: Cuts, vertex: Vertex) -> Grid:
    """Return the grid on which a vertex of a plan is computed."""
    state = cut.states[vertex.name]
    matrix = vertex.inputs[0]
    rows, columns = sides(cut.graph[matrix].bound, cut.orders_of(matrix))
    axes = [tuple(k for k, label in enumerate(state) if label == name) for name in (ROWS, COLUMNS)]
    return Grid(cut.mesh, (rows, columns), (axes[0], axes[1]))


# ---- words ---------------------------------------------------------------------------------------
#
# What ranks send each other while they compute, besides the edges that lead to the vertex.


class Far(NamedTuple):
    """How many other ranks get what one has: of a column of the grid, and of a row.

    Then how many ranks there are in both. All are numbers, or arrays of them.
    """

    column: Any
    row: Any
    of_column: Any
    of_row: Any


@dataclass(frozen=True)
class InnerWords:
    """The words that a function of one matrix moves inside of a grid of ranks.

    `symbols` are those of its rows and columns among the labels of the vertex.
    """

    function: str
    results: tuple[str, ...]
    extent: int  # rows
    columns: int
    right: int  # columns on the right of a system
    is_narrow: bool  # those are on all ranks in a row of the grid
    itemsize: int
    symbols: tuple[int, int]

    def of_panels(self, panels: Iterable[Panel], far: Far) -> Any:
        """Return the words for some panels."""
        return sum(WORDS[self.function](self, panel, far) for panel in panels)

    def most(self, ranks: int) -> int:
        """Return a number of bytes that no choice exceeds."""
        columns = self.columns + self.right
        return 8 * ranks**2 * (self.extent + columns) * columns * self.itemsize

    def about(self, parts: Any) -> Any:
        """Return about the bytes, given the parts of each symbol as arrays; R comes last.

        Grids that hardly differ are taken as equal. Of equal ones the search takes that with more
        rows, of which more ranks compute each panel.
        """
        extent = min(self.extent, self.columns)
        count = -(-extent // block_on_grid(extent, int(parts[0].prod())))
        borders = [extent * k // count for k in range(count + 1)]
        panels = [Panel(start, stop, 0, 0) for start, stop in pairwise(borders)]
        column, row = (parts[:, symbol] for symbol in self.symbols)
        words = self.of_panels(panels, Far(column - 1, row - 1, column, row))
        alike = -(-(extent**2) // ALIKE)
        return words // alike * alike * parts[:, -1] * self.itemsize


def inner_words(graph: EinGraph, vertex: Vertex) -> InnerWords | None:
    """Return what a vertex moves inside of a grid; None if it is not computed on one."""
    einsum = vertex.einsum
    if einsum is None or ROWS not in einsum.labels or vertex.computed_with:
        return None
    function = einsum.required_matrix.record.name
    rows, columns = graph[vertex.inputs[0]].bound
    right = rows if function == "inv" else 0
    if len(vertex.inputs) > 1:
        right = prod(graph[vertex.inputs[1]].bound[1:])
    results = [each.computed_einsum.required_matrix.name for each in graph.computed_at(vertex)]
    return InnerWords(
        function,
        tuple(results),
        rows,
        columns,
        right,
        einsum.output[:1] == (COLUMNS,),
        np.dtype(vertex.dtype).itemsize,
        (einsum.labels.index(ROWS), einsum.labels.index(COLUMNS)),
    )


def _cholesky(inner: InnerWords, panel: Panel, far: Far) -> Any:
    below = inner.extent - panel.stop
    return panel.width * (below * (far.row + far.column) + panel.width * far.column)


def _triangular(is_lower: bool, inner: InnerWords, panel: Panel, far: Far) -> Any:
    rows = inner.extent - panel.start if is_lower else panel.stop
    if inner.is_narrow:
        return panel.width * inner.right * (far.row + far.column)
    return panel.width * (rows * far.row + inner.right * far.column)


def _elimination(inner: InnerWords, panel: Panel, far: Far) -> Any:
    proposed = far.of_column * (far.column + far.row) * (panel.width + NUMBERS)
    right = inner.right * (far.of_row if inner.is_narrow else 1)
    below = inner.extent - panel.stop
    return panel.width * (proposed + below * (far.row + far.column) + right * far.column)


def _solve(inner: InnerWords, panel: Panel, far: Far) -> Any:
    return _elimination(inner, panel, far) + _triangular(False, inner, panel, far)


def _qr(inner: InnerWords, panel: Panel, far: Far) -> Any:
    left = inner.extent - panel.start
    triangles = panel.width * far.column * (far.of_column + 1)

    def reflected(columns: int) -> Any:
        return left * far.row + 2 * far.column * (panel.width * far.of_row + columns)

    words = triangles + reflected(inner.columns - panel.stop + inner.right * far.of_row)
    if "q" in inner.results:
        words += reflected(min(inner.extent, inner.columns))
    if "r" in inner.results and inner.extent > inner.columns:
        words += far.column * (inner.columns - panel.start)
    if inner.function == "lstsq":
        words += inner.right * (far.row + far.column)
    return panel.width * words


# Copies of the matrix, and of what is right of a system, that are there besides.
COPIES = {
    "inv": (2, 1),
    "lstsq": (1, 1),
    "lu_diagonal": (1, 0),
    "qr": (1, 0),
    "solve": (2, 2),
}
NEVER_FAIL = ("lu_diagonal", "qr")
WORDS: Mapping[str, Callable[[InnerWords, Panel, Far], Any]] = {
    "inv": _solve,
    "lstsq": _qr,
    "lu_diagonal": _elimination,
    "qr": _qr,
    "solve": _solve,
    "cholesky": _cholesky,
    "solve_lower": partial(_triangular, True),
    "solve_upper": partial(_triangular, False),
}


def words_of_plan(cut: Cuts, vertex: Vertex) -> Iterator[tuple[int, int, int]]:
    """Yield the words that a vertex of a plan moves inside of its grid, and between nodes.

    With them come the bytes of a word: ranks also tell each other whether all is well.
    """
    inner = inner_words(cut.graph, vertex)
    if inner is None:
        return
    grid, mesh = grid_of(cut, vertex), cut.mesh
    moved, told = [], []
    for first_inside in (len(mesh.factors), mesh.node_axes):
        far = []
        for axes in (*grid.axes, range(len(mesh.factors))):
            near = prod(mesh.factors[axis] for axis in axes if axis >= first_inside)
            far.append(prod(mesh.factors[axis] for axis in axes) - near)
        words = inner.of_panels(grid.panels, Far(far[0], far[1], *grid.ranks))
        moved.append(mesh.ranks // prod(grid.ranks) * words)
        told.append(2 * far[2])  # to one rank, and back to all
    found = [(moved, inner.itemsize)]
    if inner.function not in NEVER_FAIL:
        found.append((told, STATUS_BYTES))
    for (words, between), itemsize in found:
        yield words, between if mesh.nodes > 1 else 0, itemsize


def working_bytes(inner: InnerWords, grid: Grid, shares: Sequence[int]) -> int:
    """Return the bytes of panels, and of copies, that a rank has with so much of a matrix."""
    rows, columns = shares
    right = inner.right if inner.is_narrow else -(-inner.right * columns // inner.extent) + BLOCK
    whole, halves = COPIES.get(inner.function, (0, 0))
    copies = rows * (whole * columns + halves * right)
    proposed = (3 + 2 * grid.ranks[0]) * (grid.widest + NUMBERS)
    panels = grid.widest * (2 * rows + columns + right + proposed)
    return (copies + panels) * inner.itemsize + SMALL_BYTES * (inner.extent + grid.mesh.ranks)
