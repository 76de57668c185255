"""Whether chains are fused, and whether tensors inside of them are computed again for gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from einmpi.planner.machine import FLOPS_PER_BYTE
from einmpi.planner.memory import FusedChain
from einmpi.planner.plan import Options
from einmpi.planner.saving_memory.cut_memory import CutMemory
from einmpi.planner.saving_memory.order import other_orders, with_chains_together
from einmpi.planner.saving_memory.recompute import AUTO, CutGraph, with_copies


def with_fused_chains(
    cut: CutGraph,
    memory: CutMemory,
    options: Options,
    bytes_moved_for: Callable[[CutGraph, Collection[str]], int],
) -> CutGraph:
    """Return the graph with its chains fused, as far as that needs no more memory than before.

    Where a chain and a later one, of a gradient, need the same large tensor, that is computed
    again in the later one if this costs less than to write and read it, or if memory is short.
    `bytes_moved_for` tells how much is moved between ranks for some vertices of a graph.
    """
    search = memory.chain_search(cut)
    if not search.seeds:
        return cut
    limit = options.memory
    best = cut
    fused = _with_chains(cut, search.chains())
    if fused is not None:
        fused = in_best_order(fused, memory, limit)
        if fused.peak <= cut.peak:
            best = fused
    if options.recompute != AUTO:
        return best
    again = _computed_again(cut, memory)
    if again is None:
        return best
    is_worthwhile = limit is not None and best.peak > limit
    if not is_worthwhile:
        copies = again.copies.keys() - best.copies.keys()
        added = sum(again.graph[name].operations() for name in copies)
        saved = _bytes_read_and_written(best) - _bytes_read_and_written(again)
        most = options.operations_of_a_byte * saved
        # What copies move need not be known where they compute too much anyway.
        if added <= most:
            added += FLOPS_PER_BYTE * bytes_moved_for(again, copies)
            is_worthwhile = added <= most
    if is_worthwhile:
        again = in_best_order(again, memory, limit)
        if again.peak < best.peak:
            return replace(again, peak_before=best.peak)
    return best


def _with_chains(cut: CutGraph, chains: Sequence[FusedChain]) -> CutGraph | None:
    """Return the graph with these chains, each in one place; None if there is no such order."""
    graph = with_chains_together(cut.graph, chains)
    if graph is None or not chains:
        return None
    return replace(cut, graph=graph, chains=tuple(chains))


def in_best_order(cut: CutGraph, memory: CutMemory, limit: int | None) -> CutGraph:
    """Return a graph with its peak; where that is above the limit, in the order with the least."""
    best = replace(cut, peak=memory.peak(cut))
    if limit is None or best.peak <= limit:
        return best
    for graph in other_orders(cut.graph, memory.constraints(cut)):
        together = with_chains_together(graph, cut.chains) if cut.chains else graph
        if together is None:
            continue
        other = replace(cut, graph=together)
        peak = memory.peak(other)
        if peak < best.peak:
            best = replace(other, peak=peak)
    return best


def _computed_again(cut: CutGraph, memory: CutMemory) -> CutGraph | None:
    """Return the graph in which gradients have chains of their own, which compute scores again.

    None if that makes no chains.
    """
    splits = memory.chain_search(cut).splits()
    nbytes = memory.constraints(cut).nbytes
    while splits:
        again = with_copies(cut, splits, nbytes)
        fused = _with_chains(again, memory.chain_search(again).chains())
        if fused is None:
            return None
        inner = fused.inner
        copy_of = {name: copy for copy, name in again.copies.items()}
        useless = [name for name in splits if not inner.issuperset((name, copy_of[name]))]
        if not useless:
            return fused
        splits = {name: number for name, number in splits.items() if name not in useless}
    return None


def _bytes_read_and_written(cut: CutGraph) -> int:
    """Return the bytes of all computed tensors that are whole in memory, for each time of use."""
    inner = cut.inner
    total = 0
    for vertex in cut.graph.computed:
        if vertex.name not in inner:
            readers = len(cut.graph.consumers[vertex.name])
            total += vertex.nbytes * (1 + readers)
    return total
