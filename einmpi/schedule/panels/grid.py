"""The steps of a function of one matrix on a grid of ranks: panels, which travel along rows and
columns of the grid, and updates of what is left, in place. All ranks have the same steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from einmpi.graph.eingraph import Vertex
from einmpi.graph.einsum import einsum_over
from einmpi.graph.matrices import COLUMNS
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
)
from einmpi.schedule.steps import Step, Transfer
from einmpi.schedule.transfers import Moves, Regions

ROW, COLUMN, ALL = 0, 1, 2  # of the grid: which ranks send each other something
EMPTY: Region = ((), ())


@dataclass(frozen=True)
class Piece:
    """A slot with some elements of a matrix, or of a panel: the indices of its dimensions."""

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
        self.panels = self.grid.panels
        self.is_narrow = self.vertex.computed_einsum.output[:1] == (COLUMNS,)
        rows, columns = self.grid.axes
        # Ranks in a row of the grid differ on the axes that cut columns.
        self.axes = columns, rows, tuple(range(len(self.mesh.factors)))
        self.rows, self.columns = self.runs(ROW, self.rank), self.runs(COLUMN, self.rank)
        self.status = self.piece("status", (one_run(0, 1),), dtype="float64")
        self.compute("begin", self.status)

    def runs(self, dimension: int, rank: int) -> Runs:
        """Return the indices of the rows or columns of the matrix that a rank has."""
        digits = self.mesh.digits(rank)
        cuts = tuple((axis, digits[axis]) for axis in self.grid.axes[dimension])
        return share(self.mesh, self.grid.sides[dimension], cuts)

    def number(self, among: int, rank: int) -> int:
        """Return the number of a rank among those in its row, or column, of the grid."""
        return group_of(self.mesh, self.axes[among], rank)[1]

    def is_in(self, panel: Panel, among: int) -> bool:
        """Return whether the rank is in the row, or column, of the grid with a panel's diagonal."""
        row, column = self.number(COLUMN, self.rank), self.number(ROW, self.rank)
        return row == panel.row if among == ROW else column == panel.column

    # ---- steps ----------------------------------------------------------------------------------

    def piece(self, role: str, region: Region, rows: int | None = None, dtype: str = "") -> Piece:
        """Return a new slot for some elements, with room for so many rows, if that is given."""
        first, *others = map(length, region)
        extents = (first if rows is None else rows, *others)
        role = f"|{role} {len(self.steps)}"
        return Piece(Slot(self.vertex.name, extents, dtype or self.vertex.dtype, role), region)

    def copy(self, given: Piece) -> Piece:
        """Return a copy in a slot of its own."""
        found = self.piece("copy", given.region)
        self.compute("copy", found, None, given)
        return found

    def compute(
        self,
        part: str,
        target: Piece,
        written: Region | None = None,
        *operands: Piece | tuple[Piece, Region],
        inner: int = 1,
        index: Sequence[Runs] = (),
    ) -> None:
        """Add a kernel that changes a region of a slot; `inner` is the length of its sums.

        `index` are indices that the kernel has to know.
        """
        written = target.region if written is None else written
        read = [each if isinstance(each, tuple) else (each, each.region) for each in operands]
        boxes = [piece.box(region) for piece, region in read]
        rows, columns = (*map(length, written), 1)[:2]
        einsum = einsum_over(
            ("i", "j"),
            (("i", "k"), ("k", "j")),
            Call("*", (Arg(0), Arg(1))),
            "sum",
            ("k",),
            {"i": rows, "j": columns, "k": inner},
        )
        kernel = Kernel(
            self.vertex.name,
            target.slot,
            tuple(piece.slot for piece, _ in read),
            einsum,
            tuple((str(number), runs) for number, runs in enumerate(index)),
            (),
            self.vertex.located_name,
            part,
            (*boxes, target.box(written)),
        )
        self.steps.append(Compute((kernel,)))

    def send(
        self,
        among: int,
        source: Piece,
        target: Piece,
        held: Callable[[int], Region | None],
        wanted: Region | None,
        counts: Slot | None = None,
    ) -> None:
        """Add a transfer among ranks that all want the same; None: the rank is not among them.

        `held` returns what a rank has of it. If there are `counts`, the values say how many rows
        each rank has in fact; all of them together are as many.
        """
        members, me = group_of(self.mesh, self.axes[among] if wanted else (), self.rank)
        sends: list[Region | None] = [None] * members.count
        receives: list[Region | None] = [None] * members.count
        if wanted is not None:
            mine = _common(held(self.rank), wanted)
            sends = [mine and source.box(mine)] * members.count
            for number, rank in enumerate(members):
                theirs = _common(held(rank), wanted)
                receives[number] = theirs and target.box(theirs)
        listed = Regions.listed(sends), Regions.listed(receives)
        most = 0 if wanted is None else elements(wanted)
        moves = moves_of(members, me, *listed, same_to_all=True, max_elements=most)
        self._transfer(source, target, moves, counts=counts)

    def reduce(self, among: int, owner: int, piece: Piece, is_in: bool, by: str = "sum") -> None:
        """Add a transfer by which one of some ranks gets what all have, aggregated."""
        members, me = group_of(self.mesh, self.axes[among] if is_in else (), self.rank)
        pieces: list[Region | None] = [None] * members.count
        if is_in:
            pieces[owner] = piece.box(piece.region)
        received = Regions.same(members.count, pieces[me])
        most = elements(piece.region)
        moves = moves_of(members, me, Regions.listed(pieces), received, False, most)
        self._transfer(piece, piece, moves, aggregation=by)

    def _transfer(self, source: Piece, target: Piece, moves: Moves, **options: Any) -> None:
        name, stage = self.vertex.name, self.plan.stage
        self.steps.append(Transfer(name, source.slot, target.slot, moves, stage, **options))

    def held_by(self, among: int, owner: int, region: Region, rank: int) -> Region | None:
        """Return a region for the rank with this number among others."""
        return region if self.number(among, rank) == owner else None

    def spread(
        self, among: int, owner: int, source: Piece, role: str, region: Region, rows: int
    ) -> Piece:
        """Send what one rank of a row, or column, of the grid has to all of it.

        Return where it is then: where it was, if no other rank is there; else in a slot with so
        many rows.
        """
        if group_of(self.mesh, self.axes[among], self.rank)[0].count == 1:
            return source
        target = self.piece(role, region, rows)
        self.send(among, source, target, partial(self.held_by, among, owner, region), region)
        return target

    def diagonal(self, among: int, panel: Panel, source: Piece) -> tuple[Piece, Region]:
        """Send the diagonal block of a panel to the ranks in its row, or column, of the grid.

        Return where it is there, and what of it: nothing on other ranks.
        """
        block = one_run(panel.start, panel.stop)
        target = self.piece("diagonal", (block, block))
        is_in = self.is_in(panel, among)
        owner = panel.row if among == COLUMN else panel.column
        held = partial(self.held_by, among, owner, target.region)
        self.send(among, source, target, held, target.region if is_in else None)
        return target, target.region if is_in else EMPTY

    # ---- errors ---------------------------------------------------------------------------------

    def note(self, part: str, panel: Panel, diagonal: tuple[Piece, Region]) -> None:
        """Note the first place at which the diagonal block of a panel is wrong."""
        index = [one_run(panel.start, panel.stop)]
        self.compute(part, self.status, None, diagonal, index=index)

    def check(self, part: str) -> None:
        """Tell all ranks what has been noted, and raise an error on all if there is anything."""
        self.reduce(ALL, 0, self.status, True, by="min")
        region = self.status.region
        self.send(ALL, self.status, self.status, partial(self.held_by, ALL, 0, region), region)
        self.compute(part, self.status)


def _common(held: Region | None, wanted: Region) -> Region | None:
    both = () if held is None else tuple(map(intersect, held, wanted))
    return both if both and elements(both) else None


def below(runs: Runs, start: int) -> Runs:
    """Return the indices from `start` on."""
    return intersect(runs, one_run(start, runs[-1][1] if runs else 0))


def above(runs: Runs, stop: int) -> Runs:
    """Return the indices before `stop`."""
    return intersect(runs, one_run(0, stop))
