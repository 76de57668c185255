"""Tables and eliminations that the searches on one mesh share."""

from __future__ import annotations

from dataclasses import dataclass, field

from einmpi.planner.elimination.eliminate import Memo
from einmpi.planner.moving.volume import Ints
from einmpi.planner.solving.solver import Solver


@dataclass
class SharedTables:
    """What several searches on one mesh share, which have the same prices but for that of memory.

    Forms of a graph and prices of memory differ in few tables. Costs are counted in units, and
    each unit has its own tables.
    """

    costs: dict[int, dict[object, Ints]] = field(default_factory=dict)
    # Without a price of memory: there is one search for each other price.
    memos: dict[int, Memo] = field(default_factory=dict)

    def use_for(self, solver: Solver) -> None:
        """Give a solver what is known in its unit, and keep what it finds."""
        solver.cache = self.costs.setdefault(solver.unit, solver.cache)
        if not solver.price:
            solver.memo = self.memos.setdefault(solver.unit, solver.memo)
            solver.memo.cells = 0
