"""What is searched for one graph on one mesh whatever the memory limit, and kept if asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from einmpi.graph.eingraph import EinGraph
from einmpi.planner.cut_search import CutSearch
from einmpi.planner.mesh import Mesh
from einmpi.planner.plan import Options
from einmpi.planner.saving_memory.mixtures import Mixtures
from einmpi.planner.solving.shared_tables import SharedTables

# The searches to use again, while they are kept.
_kept: ContextVar[list[Mixtures] | None] = ContextVar("kept searches", default=None)


@contextmanager
def searches_kept() -> Iterator[None]:
    """Keep searches as long as the context lasts, for plans under several memory limits."""
    token = _kept.set([])
    try:
        yield
    finally:
        _kept.reset(token)


def searches_of(graph: EinGraph, mesh: Mesh, options: Options, tables: SharedTables) -> Mixtures:
    """Return the searches of a graph on a mesh: those that were kept, or new ones."""
    without_limit = replace(options, memory=None)
    kept = _kept.get()
    for known in kept or ():
        search = known.search
        if (search.graph, search.mesh, search.options) == (graph, mesh, without_limit):
            return known
    searches = Mixtures(CutSearch(graph, mesh, without_limit, tables))
    if kept is not None:
        kept.append(searches)
    return searches
