"""The steps of a function of one matrix on a grid of ranks: panels, which travel along rows and
columns of the grid, and updates of what is left, in place. All ranks have the same steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from einmpi.graph.eingraph import Vertex
from einmpi.graph.einsum import einsum_over
from einmpi.graph.scalar import Arg, Call
from einmpi.planner.grids import Panel, grid_of
from einmpi.planner.plan import Plan
from einmpi.schedule.compute import Compute, Kernel
from einmpi.schedule.moves import group_of, moves_of
from einmpi.schedule.regions import (
    Region,
    Runs,
    Slot,
    elements,
    intersect,
    length,
    locate,
    one_run,
    share,
    whole,
)
from einmpi.schedule.steps import Step, Transfer
from einmpi.schedule.transfers import Regions

ROW, COLUMN = 0, 1  # dimensions of a matrix, and of the grid


@dataclass(frozen=True)
class Piece:
    """A slot with some elements of a matrix, or of a panel: the indices of both dimensions."""

    slot: Slot
    region: Region

    def box(self, region: Region) -> Region:
        """Return the places of some elements in the slot."""
        return tuple(map(locate, region, self.region))


@dataclass
class GridSteps:
    """Collects the steps of one rank for a vertex."""

    plan: Plan
    vertex: Vertex
    rank: int
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mesh = self.plan.mesh
        self.grid = grid_of(self.plan, self.vertex)
        self.place = [group_of(self.mesh, axes, self.rank)[1] for axes in self.grid.axes]
        self.panels = self.grid.panels
        self.runs = [self.runs_of(dimension, self.rank) for dimension in (ROW, COLUMN)]

    def runs_of(self, dimension: int, rank: int) -> Runs:
        """Return the indices of the rows or columns of the matrix that a rank has."""
        digits = self.mesh.digits(rank)
        cuts = tuple((axis, digits[axis]) for axis in self.grid.axes[dimension])
        return share(self.mesh, self.grid.sides[dimension], cuts)

    def has(self, panel: Panel, dimension: int) -> bool:
        """Return whether a panel's diagonal is in the row, or column, of the grid of the rank."""
        return self.place[dimension] == (panel.column if dimension else panel.row)

    # ---- steps ----------------------------------------------------------------------------------

    def piece(self, role: str, region: Region, most: Sequence[int], dtype: str = "") -> Piece:
        """Return a new slot with room for some elements, and more: memory is used again."""
        role = f"|{role} {len(self.steps)}"
        slot = Slot(self.vertex.name, tuple(most), dtype or self.vertex.dtype, role)
        return Piece(slot, region)

    def compute(
        self,
        part: str,
        target: Piece,
        written: Region,
        *operands: tuple[Piece, Region],
        inner: int = 1,
        index: tuple[tuple[str, Runs], ...] = (),
    ) -> None:
        """Add a kernel that changes a region of a slot; `inner` is the length of its sums."""
        boxes = [piece.box(region) for piece, region in operands]
        boxes.append(target.box(written))
        rows, columns = (*map(length, written), 1)[:2]
        einsum = einsum_over(
            ("i", "j"),
            (("i", "k"), ("k", "j")),
            Call("*", (Arg(0), Arg(1))),
            "sum",
            ("k",),
            {"i": rows, "j": columns, "k": inner},
        )
        slots = tuple(piece.slot for piece, _ in operands)
        kernel = Kernel(
            self.vertex.name,
            target.slot,
            slots,
            einsum,
            index,
            (),
            self.vertex.located_name,
            part,
            tuple(boxes),
        )
        self.steps.append(Compute((kernel,)))

    def send(
        self,
        dimension: int,
        source: Piece,
        target: Piece,
        held: Callable[[int], Region | None],
        wanted: Region | None,
    ) -> None:
        """Add a transfer among the ranks of a row, or column, of the grid, who all want the same.

        `held` returns what a rank has of it.
        """
        axes = self.grid.axes[1 - dimension] if wanted is not None else ()
        members, me = group_of(self.mesh, axes, self.rank)
        sends: list[Region | None] = [None] * members.count
        receives: list[Region | None] = [None] * members.count
        if wanted is not None:
            mine = _common(held(self.rank), wanted)
            sends = [mine and source.box(mine)] * members.count
            for number, rank in enumerate(members):
                theirs = _common(held(rank), wanted)
                receives[number] = theirs and target.box(theirs)
        count = 0 if wanted is None else elements(wanted)
        listed = Regions.listed(sends), Regions.listed(receives)
        moves = moves_of(members, me, *listed, same_to_all=True, max_elements=count)
        self.steps.append(
            Transfer(self.vertex.name, source.slot, target.slot, moves, self.plan.stage)
        )

    def held_by(self, dimension: int, number: int, region: Region, rank: int) -> Region | None:
        """Return a region for the rank in a row, or column, of the grid with this number."""
        axes = self.grid.axes[1 - dimension]
        return region if group_of(self.mesh, axes, rank)[1] == number else None

    def below(self, panel: Panel, rank: int) -> Region:
        """Return what a rank has of a panel, in its rows below the diagonal."""
        return below(self.runs_of(ROW, rank), panel.stop), one_run(panel.start, panel.stop)

    def diagonal(self, dimension: int, panel: Panel, source: Piece) -> tuple[Piece, Region]:
        """Send the diagonal block of a panel to the ranks in its row, or column, of the grid.

        Return where it is there, and what of it: nothing on other ranks.
        """
        block = one_run(panel.start, panel.stop)
        target = self.piece("diagonal", (block, block), (panel.width, panel.width))
        is_there = self.has(panel, dimension)
        owner = panel.row if dimension else panel.column
        held = partial(self.held_by, dimension, owner, target.region)
        self.send(dimension, source, target, held, target.region if is_there else None)
        return target, target.region if is_there else EMPTY

    def spread(
        self, dimension: int, owner: int, source: Piece, role: str, region: Region, rows: int
    ) -> Piece:
        """Send what one rank of a row, or column, of the grid has to all of it.

        Return where it is then: where it was, if no other rank is there; else in a slot with so
        many rows.
        """
        if self.grid.ranks[1 - dimension] == 1:
            return source
        target = self.piece(role, region, (rows, *map(length, region[1:])))
        held = partial(self.held_by, dimension, owner, region)
        self.send(dimension, source, target, held, region)
        return target

    def status(self) -> Piece:
        """Return a slot for the first place at which a panel cannot be computed."""
        ranks = self.grid.ranks[1]
        piece = Piece(Slot(self.vertex.name, (ranks,), "float64", "|status"), (whole(ranks),))
        self.compute("begin", piece, piece.region)
        return piece

    def note(self, part: str, status: Piece, panel: Panel, diagonal: tuple[Piece, Region]) -> None:
        """Note the first place at which the diagonal block of a panel is wrong."""
        index = (("i", one_run(panel.start, panel.stop)),)
        self.compute(part, status, self.own_status(self.rank), diagonal, index=index)

    def own_status(self, rank: int) -> Region:
        """Return where a rank notes what is wrong."""
        place = group_of(self.mesh, self.grid.axes[COLUMN], rank)[1]
        return (one_run(place, place + 1),)

    def check(self, part: str, status: Piece) -> None:
        """Tell all ranks in a row of the grid what has been noted; raise an error if any has."""
        self.send(ROW, status, status, self.own_status, status.region)
        self.compute(part, status, status.region)


EMPTY: Region = ((), ())


def _common(held: Region | None, wanted: Region) -> Region | None:
    if held is None:
        return None
    both = tuple(map(intersect, held, wanted))
    return both if elements(both) else None


def below(runs: Runs, start: int) -> Runs:
    """Return the indices from `start` on."""
    return intersect(runs, one_run(start, runs[-1][1] if runs else 0))
