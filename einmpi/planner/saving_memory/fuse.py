"""Whether chains are fused, and whether tensors inside of them are computed again for gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from einmpi.graph.eingraph import EinGraph
from einmpi.planner.chains.order import with_chains_together
from einmpi.planner.chains.record import FusedChain
from einmpi.planner.plan import Options
from einmpi.planner.saving_memory.cut_memory import CutMemory
from einmpi.planner.saving_memory.order import orders_that_free_early
from einmpi.planner.saving_memory.recompute import AUTO, CutGraph, with_copies

# Operations that are taken to cost as much time as reading or writing one byte of memory.
OPERATIONS_OF_A_BYTE = 8


def with_fused_chains(cut: CutGraph, memory: CutMemory, options: Options) -> CutGraph:
    """Return the graph with its chains fused, as far as that needs no more memory than before.

    Where a chain and a later one, of a gradient, need the same large tensor, that is computed
    again in the later one if this costs less than to write and read it, or if memory is short.
    """
    search = memory.chain_search(cut)
    if not search.seeds:
        return cut
    best = _fused(cut, search.chains(), memory)
    if options.recompute != AUTO:
        return best
    again = _computed_again(cut, memory)
    if again is None or again.peak >= best.peak:
        return best
    is_short = options.memory is not None and best.peak > options.memory
    if is_short or _costs_less(again, best):
        return replace(again, peak_before=best.peak)
    return best


def _fused(cut: CutGraph, chains: Sequence[FusedChain], memory: CutMemory) -> CutGraph:
    """Return the graph with these chains, in the order that needs least memory.

    Return it as it was if it would need more memory.
    """
    best = cut
    if not chains:
        return cut
    fused = replace(cut, chains=tuple(chains))
    orders = [cut.graph, *orders_that_free_early(cut.graph, memory.constraints(fused))]
    for graph in orders:
        together = with_chains_together(graph, chains)
        if together is None:
            return cut
        other = replace(fused, graph=together)
        other = replace(other, peak=memory.peak(other))
        if other.peak < best.peak or (best is cut and other.peak == cut.peak):
            best = other
    return best


def _computed_again(cut: CutGraph, memory: CutMemory) -> CutGraph | None:
    """Return the graph in which gradients have chains of their own, which compute scores again.

    None if that makes no chains.
    """
    splits = memory.chain_search(cut).splits()
    nbytes = memory.constraints(cut).nbytes
    while splits:
        again = with_copies(cut, splits, nbytes)
        again = replace(again, peak=memory.peak(again))
        fused = _fused(again, memory.chain_search(again).chains(), memory)
        inner = fused.inner
        copy_of = {name: copy for copy, name in again.copies.items()}
        useless = [name for name in splits if not inner.issuperset((name, copy_of[name]))]
        if not useless:
            return fused
        splits = {name: number for name, number in splits.items() if name not in useless}
    return None


def _costs_less(again: CutGraph, best: CutGraph) -> bool:
    """Return whether computing tensors again takes less time than the memory traffic it saves."""
    new_copies = again.copies.keys() - best.copies.keys()
    operations = sum(again.graph[name].operations() for name in new_copies)
    saved = _bytes_read_and_written(best) - _bytes_read_and_written(again)
    return operations <= OPERATIONS_OF_A_BYTE * saved


def _bytes_read_and_written(cut: CutGraph) -> int:
    """Return the bytes of all computed tensors that are whole in memory, for each time of use."""
    inner = cut.inner
    total = 0
    for vertex in cut.graph.computed:
        if vertex.name not in inner:
            total += vertex.nbytes * (1 + _reads(cut.graph, vertex.name))
    return total


def _reads(graph: EinGraph, name: str) -> int:
    """Return how many vertices read a tensor."""
    return len(graph.consumers[name])
