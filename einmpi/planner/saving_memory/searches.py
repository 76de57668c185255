"""What is searched for one graph on one mesh whatever the memory limit, and kept if asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property

from einmpi.graph.eingraph import EinGraph
from einmpi.planner.cut_search import CutSearch
from einmpi.planner.mesh import Mesh
from einmpi.planner.plan import Options
from einmpi.planner.saving_memory.mixtures import Mixtures
from einmpi.planner.saving_memory.trade_offs import TradeOffs
from einmpi.planner.solving.shared_tables import SharedTables
from einmpi.planner.solving.solver import Solution


@dataclass
class Searches:
    """The best cuts of one graph on one mesh, without a price of memory and at several."""

    search: CutSearch

    @cached_property
    def without_price(self) -> Solution:
        """The best cuts if memory costs nothing."""
        return self.search.solve(0)

    @cached_property
    def trade_offs(self) -> TradeOffs:
        """The cuts that need less memory and move more."""
        return TradeOffs(self.search, self.without_price)

    @cached_property
    def mixtures(self) -> Mixtures:
        """Cuts between those that two prices of memory lead to."""
        return Mixtures(self.trade_offs)


# The searches to use again, while they are kept.
_kept: ContextVar[list[Searches] | None] = ContextVar("kept searches", default=None)


@contextmanager
def searches_kept() -> Iterator[None]:
    """Keep searches as long as the context lasts, for plans under several memory limits."""
    token = _kept.set([])
    try:
        yield
    finally:
        _kept.reset(token)


def searches_of(graph: EinGraph, mesh: Mesh, options: Options, tables: SharedTables) -> Searches:
    """Return the searches of a graph on a mesh: those that were kept, or new ones."""
    without_limit = replace(options, memory=None)
    kept = _kept.get()
    for known in kept or ():
        search = known.search
        if (search.graph, search.mesh, search.options) == (graph, mesh, without_limit):
            return known
    searches = Searches(CutSearch(graph, mesh, without_limit, tables))
    if kept is not None:
        kept.append(searches)
    return searches
