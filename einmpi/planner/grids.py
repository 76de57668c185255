"""One large matrix on a grid of ranks: which functions of matrices are computed so, in which blocks
of columns, and how many words that moves.

The axes of the mesh that cut the rows of the matrix make the grid's rows, those that cut columns
its columns. Ranks have blocks in turns, in cycles (`Side` in planner/mesh.py), so that all of them
have a share of what is left when the first blocks are done. A panel is a block of columns whose
rows and columns at the diagonal have one owner each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.einsum import EinSum
from einmpi.graph.matrices import COLUMNS, ROWS
from einmpi.planner.mesh import Extent, Mesh
from einmpi.planner.moving.halo import stretches_by_digits
from einmpi.planner.orders import BLOCK

if TYPE_CHECKING:
    from einmpi.planner.memory import Cuts

STATUS_BYTES = 8  # of a place at which a panel cannot be computed
MIN_BYTES = 2**20  # of a matrix: a smaller one is whole on all ranks
FEW_COLUMNS = 4  # on the right of a system: fewer than its rows over this number


def with_grids(graph: EinGraph, mesh: Mesh) -> EinGraph:
    """Return a graph in which functions of large matrices have labels that a grid cuts."""
    vertices = tuple(_on_grid(graph, vertex, mesh) for vertex in graph.vertices)
    return graph if vertices == graph.vertices else replace(graph, vertices=vertices)


def _on_grid(graph: EinGraph, vertex: Vertex, mesh: Mesh) -> Vertex:
    einsum = vertex.einsum
    if einsum is None or einsum.matrix is None or not einsum.matrix.record.on_grid:
        return vertex
    is_one = len(einsum.operands[0]) == 2 and vertex.recurrence is None and mesh.ranks > 1
    if not is_one or graph[vertex.inputs[0]].nbytes < MIN_BYTES:
        return vertex
    return replace(vertex, einsum=_with_grid_labels(einsum))


def _with_grid_labels(einsum: EinSum) -> EinSum:
    """Return a function of one matrix with the labels of a grid in place of rows and columns.

    Where it has few columns on the right, they are whole, and so are those of the matrix.
    """
    labels = einsum.matrix_labels
    extent = einsum.extent
    rows, columns = labels["i"], labels["j"]
    names = {rows: ROWS, columns: COLUMNS}
    if len(einsum.operands) > 1:
        right = labels.get("k", "")
        if FEW_COLUMNS * extent.get(right, 0) < extent[rows]:
            del names[columns]
        else:
            names[right] = COLUMNS
    extents: dict[str, int] = {}
    for label in (*einsum.output, *einsum.aggregated):
        name = names.get(label, label)
        extents[name] = min(extent[label], extents.get(name, extent[label]))
    output = (ROWS, *(names.get(label, label) for label in einsum.output[1:]))
    if einsum.output[1:] == (rows,):
        output = ROWS, COLUMNS
    gone = tuple(label for label in extents if label not in output)
    return replace(
        einsum,
        output=output,
        operands=tuple(
            tuple(names.get(str(entry), str(entry)) for entry in index) for index in einsum.operands
        ),
        aggregated=gone,
        extents=tuple((label, extents[label]) for label in (*output, *gone)),
    )


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


@lru_cache(maxsize=256)
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
    sides = dict(zip(vertex.computed_einsum.labels, cut.sides(vertex.name), strict=True))
    axes = [tuple(k for k, label in enumerate(state) if label == name) for name in (ROWS, COLUMNS)]
    rows = sides[ROWS]
    return Grid(cut.mesh, (rows, sides.get(COLUMNS, rows)), (axes[0], axes[1]))


# ---- words ---------------------------------------------------------------------------------------
#
# What ranks send each other while they compute, besides the edges that lead to the vertex.


class Far(NamedTuple):
    """How many other ranks get what one has: of a column of the grid, of a row, and of all.

    Numbers, or arrays of them.
    """

    column: Any
    row: Any


class PanelWords(NamedTuple):
    """What a function moves, given the rows of its matrix and the columns on the right.

    `about` has no lower terms: grids that differ in these alone are taken as equal, and of equal
    ones the search takes that with more rows, of which more ranks compute each panel.
    """

    of_panel: Callable[[Panel, int, int, Far], Any]
    about: Callable[[int, int, Far], Any]


def _of_cholesky(panel: Panel, extent: int, _: int, far: Far) -> Any:
    below = extent - panel.stop
    return panel.width * (below * (far.row + far.column) + panel.width * far.column)


def _of_lower_solve(panel: Panel, extent: int, right: int, far: Far) -> Any:
    return panel.width * ((extent - panel.start) * far.row + right * far.column)


def _of_upper_solve(panel: Panel, _: int, right: int, far: Far) -> Any:
    return panel.width * (panel.stop * far.row + right * far.column)


def _about_solve(extent: int, right: int, far: Far) -> Any:
    return extent * (extent // 2 * far.row + right * far.column)


WORDS: Mapping[str, PanelWords] = {
    "cholesky": PanelWords(_of_cholesky, lambda n, _, far: n**2 // 2 * (far.row + far.column)),
    "solve_lower": PanelWords(_of_lower_solve, _about_solve),
    "solve_upper": PanelWords(_of_upper_solve, _about_solve),
}


@dataclass(frozen=True)
class InnerWords:
    """The words that a function of one matrix moves inside of a grid of ranks.

    `symbols` are those of its rows and columns among the labels of the vertex.
    """

    function: str
    extent: int
    right: int  # columns
    itemsize: int
    symbols: tuple[int, int]

    def of_panels(self, panels: Iterable[Panel], far: Far) -> Any:
        """Return the words for some panels."""
        words = WORDS[self.function].of_panel
        return sum(words(panel, self.extent, self.right, far) for panel in panels)

    def most(self, ranks: int) -> int:
        """Return a number of bytes that no choice exceeds."""
        columns = self.extent + self.right
        return 4 * ranks * self.extent * columns * self.itemsize

    def about(self, parts: Any) -> Any:
        """Return about the bytes, given the parts of each symbol as arrays; R comes last."""
        counts = [parts[:, symbol] if symbol >= 0 else np.int64(1) for symbol in self.symbols]
        far = Far(counts[0] - 1, counts[1] - 1)
        words = WORDS[self.function].about(self.extent, self.right, far)
        return words * parts[:, -1] * self.itemsize


def inner_words(graph: EinGraph, vertex: Vertex) -> InnerWords | None:
    """Return what a vertex moves inside of a grid; None if it is not computed on one."""
    einsum = vertex.einsum
    if einsum is None or ROWS not in einsum.labels:
        return None
    symbols = [
        einsum.labels.index(name) if name in einsum.labels else -1 for name in (ROWS, COLUMNS)
    ]
    bound = graph[vertex.inputs[-1]].bound
    right = bound[1] if len(bound) > 1 else 1
    return InnerWords(
        einsum.required_matrix.record.name,
        graph[vertex.inputs[0]].bound[0],
        right,
        np.dtype(vertex.dtype).itemsize,
        (symbols[0], symbols[1]),
    )


def words_of_plan(cut: Cuts, vertex: Vertex) -> Iterator[tuple[int, int, int]]:
    """Yield the words that a vertex of a plan moves inside of its grid, and between nodes.

    With them come the bytes of a word: ranks also tell each other whether all is well.
    """
    inner = inner_words(cut.graph, vertex)
    if inner is None:
        return
    grid = grid_of(cut, vertex)
    replicas = cut.mesh.ranks // prod(grid.ranks)
    panels = grid.panels
    found = []
    for first_inside in (len(cut.mesh.factors), cut.mesh.node_axes):
        counts = []
        for axes, ranks in zip(grid.axes, grid.ranks, strict=True):
            inside = prod(cut.mesh.factors[axis] for axis in axes if axis >= first_inside)
            counts.append(ranks - inside)
        found.append((replicas * inner.of_panels(panels, Far(*counts)), counts[1]))
    (total, others), (between, others_between) = found
    if cut.mesh.nodes == 1:
        between = others_between = 0
    yield total, between, inner.itemsize
    yield cut.mesh.ranks * others, cut.mesh.ranks * others_between, STATUS_BYTES
