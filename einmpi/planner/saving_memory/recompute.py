"""Tensors that are computed again so that a plan needs less memory, and chains that are fused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.planner.machine import FLOPS_PER_BYTE
from einmpi.planner.memory import Cuts, FusedChain
from einmpi.planner.plan import AUTO, Options
from einmpi.planner.saving_memory.cut_memory import CutMemory
from einmpi.planner.saving_memory.order import other_orders, with_chains_together

MOST_ROUNDS = 24  # in which tensors are chosen
# An operand of at most this share of a tensor is kept for computing the tensor again: an eighth.
SMALL_SHARE = 8
MOST_COPIES_OF_ONE = 64  # vertices to compute for one tensor that is computed again
BITS_OF_RATIO = 6  # fractions of a price for each byte that are still told apart


@dataclass(frozen=True)
class CutGraph(Cuts):
    """A graph with its cuts, and the memory that it needs."""

    peak: int = 0  # bytes of a rank
    dropped: tuple[str, ...] = ()  # tensors that are computed again
    copies: Mapping[str, str] = field(default_factory=dict)  # vertex → what it computes again
    peak_before: int = 0  # bytes of a rank, if nothing were dropped
    least: int = 0  # bytes of a rank if all that can be is kept outside of memory, where known


# ---- the graph ----------------------------------------------------------------------------------


def with_copies(cut: CutGraph, splits: Mapping[str, int], nbytes: Mapping[str, int]) -> CutGraph:
    """Return the graph in which late readers of some tensors read a copy, computed just before.

    `splits` has, for each tensor that is dropped, the number of a computed vertex: readers after it
    are late. A copy that needs an operand that is not in memory any more needs a copy of that, too,
    unless the operand is small: then it is kept. `nbytes` has the memory of each tensor. What a
    chain computes is not computed again.
    """
    again = _Again(cut, nbytes, splits)
    copy_of: dict[str, str] = {}
    vertices: list[Vertex] = []
    for number, vertex in enumerate(cut.graph.computed):
        late = [name for name in vertex.inputs if number > splits.get(name, number)]
        for late_name in late:
            for name in again.needed(late_name, number, copy_of):
                if name not in copy_of:
                    computed = _with_inputs(cut.graph[name], copy_of)
                    copy_of[name] = _unused_name(cut.graph, name)
                    vertices.append(replace(computed, name=copy_of[name], is_auxiliary=True))
        vertices.append(_with_inputs(vertex, {name: copy_of[name] for name in late}))
    graph = replace(cut.graph, vertices=(*cut.graph.inputs, *vertices))
    states = dict(cut.states)
    layouts = dict(cut.layouts)
    copies = dict(cut.copies)
    orders = dict(cut.orders)
    for name, own_name in copy_of.items():
        copies[own_name] = name
        for kind in ("vertex", "tensor"):
            if (kind, name) in orders:
                orders[kind, own_name] = orders[kind, name]
        states[own_name] = states[name]
        if name in layouts:
            layouts[own_name] = layouts[name]
    dropped = (*cut.dropped, *splits)
    cut = replace(
        cut,
        graph=graph,
        states=states,
        layouts=layouts,
        orders=orders,
        dropped=dropped,
        copies=copies,
    )
    # Tensors that had one reader have two now: a vertex and its copy, which need the same layout.
    for copy in copies:
        for operand, name in enumerate(graph[copy].inputs):
            if name not in layouts and len(graph.consumers[name]) > 1:
                layouts[name] = cut.wanted(copy, operand)
    if not cut.chains:
        return cut
    together = with_chains_together(graph, cut.chains)
    assert together is not None, "chains read copies of what they have read before"
    return replace(cut, graph=together)


def _with_inputs(vertex: Vertex, other_names: Mapping[str, str]) -> Vertex:
    """Return a vertex that reads other tensors in place of some."""
    inputs = tuple(other_names.get(name, name) for name in vertex.inputs)
    return replace(vertex, inputs=inputs)


def _unused_name(graph: EinGraph, name: str) -> str:
    """Return a name for a copy of a tensor."""
    found = f"{name}_again"
    while found in graph.by_name:
        found += "_"
    return found


class _Again:
    """What has to be computed again with a tensor: operands that are not in memory any more."""

    def __init__(self, cut: CutGraph, nbytes: Mapping[str, int], splits: Mapping[str, int]) -> None:
        self.graph = cut.graph
        self.nbytes = nbytes
        self.splits = splits
        self.reads = reads_of(cut.graph)
        self.in_chains = cut.in_chains

    def needed(
        self, name: str, number: int, there: Collection[str] = (), most: int | None = None
    ) -> list[str]:
        """Return a tensor that is computed again before a vertex, after what it needs for that.

        Tensors that are `there` are not needed. Nothing is returned if there are more than `most`.
        """
        found: dict[str, None] = {}
        seen = {name}
        waiting = [name]
        while waiting:
            current = waiting[-1]
            missing = []
            for operand in dict.fromkeys(self.graph[current].inputs):
                is_known = operand in found or operand in there
                if not is_known and self.is_gone(operand, current, number):
                    missing.append(operand)
            seen.update(missing)
            if most is not None and len(seen) > most:
                return []
            if any(self.graph[each].has_steps for each in missing):
                return []
            if missing:
                waiting += reversed(missing)
            else:
                found[waiting.pop()] = None
        return list(found)

    def is_gone(self, name: str, reader: str, number: int) -> bool:
        """Return whether a tensor is not in memory any more when a vertex is computed again."""
        if self.graph[name].is_input or self.graph.is_output(name) or name in self.in_chains:
            return False
        if name in self.splits:
            return number > self.splits[name]
        is_dead = max(self.reads[name], default=-1) < number
        return is_dead and SMALL_SHARE * self.nbytes[name] > self.nbytes[reader]


def reads_of(graph: EinGraph) -> dict[str, list[int]]:
    """Return the numbers of the computed vertices that read each tensor, rising."""
    reads: dict[str, list[int]] = {vertex.name: [] for vertex in graph.vertices}
    for number, vertex in enumerate(graph.computed):
        for name in dict.fromkeys(vertex.inputs):
            reads[name].append(number)
    return reads


def without_copies(graph: EinGraph, copies: Mapping[str, str]) -> EinGraph:
    """Return the graph in which nothing is computed twice, in the same order."""
    vertices = []
    for vertex in graph.vertices:
        if vertex.name not in copies:
            vertices.append(_with_inputs(vertex, copies))
    return replace(graph, vertices=tuple(vertices))


# ---- the choice ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Candidate:
    """A tensor that can be dropped between two of its readers."""

    name: str
    made: int  # the number of the vertex that computes it
    reads: tuple[int, ...]  # those of its readers, rising
    nbytes: int

    def gap_around(self, number: int) -> bool:
        """Return whether it has been read before a vertex, and will be read only after it."""
        is_used_then = number in self.reads
        return self.reads[0] < number < self.reads[-1] and not is_used_then

    def longest_gap(self) -> int:
        """Return the number of the reader after which it is not read for longest."""
        gaps = []
        for before, after in zip(self.reads, self.reads[1:], strict=False):
            gaps.append((after - before, -before))
        return -max(gaps)[1]


def _candidates(graph: EinGraph, nbytes: Mapping[str, int]) -> dict[str, _Candidate]:
    """Return the tensors that take memory between two of their readers."""
    reads = reads_of(graph)
    found = {}
    for number, vertex in enumerate(graph.computed):
        name = vertex.name
        if graph.is_output(name) or not nbytes[name] or len(reads[name]) < 2:
            continue
        readers = [graph.computed[read] for read in reads[name]]
        if any(each.has_steps for each in (vertex, *readers)):
            continue  # all steps read it
        found[name] = _Candidate(name, number, tuple(reads[name]), nbytes[name])
    return found


def named_splits(
    graph: EinGraph, nbytes: Mapping[str, int], names: Sequence[str]
) -> dict[str, int]:
    """Return where to drop the named tensors: where they are not read for longest."""
    candidates = _candidates(graph, nbytes)
    return {name: candidates[name].longest_gap() for name in names if name in candidates}


def recomputed_to_fit(
    cut: CutGraph,
    limit: int,
    nbytes: Mapping[str, int],
    price: Mapping[str, int],
    memory_of: Callable[[CutGraph], list[int]],
    highest_price: int | None = None,
) -> CutGraph:
    """Return the graph with tensors computed again, so that a rank needs no more than the limit.

    Where the memory is highest, those tensors are dropped that wait there and cost least for each
    byte; then again, where it is highest now. If the limit is not reached, return what needs least.
    `price` has what each vertex costs. `memory_of` gives the memory before and at each vertex.
    Tensors that cost more than `highest_price` for each byte are not dropped.
    """
    candidates = _candidates(cut.graph, nbytes)
    for name in cut.in_chains:
        candidates.pop(name, None)
    ranking = _ranking(cut, candidates, nbytes, price, highest_price)
    splits: dict[str, int] = {}
    best = cut
    current = cut
    for _ in range(MOST_ROUNDS):
        memory = memory_of(current)
        peak = max(memory)
        if current is not cut and peak < best.peak:
            best = replace(current, peak=peak)
        if peak <= limit:
            break
        copies = current.copies.keys() - cut.copies.keys()
        number = _number_without_copies(current.graph, copies, memory.index(peak))
        excess = peak - limit
        chosen = 0
        for name in ranking:
            candidate = candidates[name]
            if name not in splits and candidate.gap_around(number):
                splits[name] = number
                chosen += candidate.nbytes
                if chosen >= excess:
                    break
        if not chosen:
            break
        current = with_copies(cut, splits, nbytes)
    return best


def _number_without_copies(graph: EinGraph, copies: Collection[str], place: int) -> int:
    """Return the number of a computed vertex of the graph without copies.

    `place` counts from 1 in the graph with copies. A copy has the number of the vertex that it is
    computed for.
    """
    computed = graph.computed
    before = [vertex for vertex in computed[: max(0, place - 1)] if vertex.name not in copies]
    return len(before)


def _ranking(
    cut: CutGraph,
    candidates: Mapping[str, _Candidate],
    nbytes: Mapping[str, int],
    price: Mapping[str, int],
    highest_price: int | None,
) -> list[str]:
    """Return the candidates, those first that cost least for each byte.

    Prices for a byte count as equal up to a factor of 2. Among equal ones, every second comes
    first, then every second of the rest: those that stay are evenly spaced, so that little has to
    be computed again at a time.
    """
    again = _Again(cut, nbytes, {})
    by_class: dict[int, list[str]] = {}
    for name, candidate in candidates.items():
        gap = candidate.longest_gap()
        number = next(read for read in candidate.reads if read > gap)
        needed = again.needed(name, number, most=MOST_COPIES_OF_ONE)
        if not needed:
            continue
        total = sum(price[each] for each in needed)
        if highest_price is not None and total > highest_price * candidate.nbytes:
            continue
        ratio = (total << BITS_OF_RATIO) // candidate.nbytes
        by_class.setdefault(ratio.bit_length(), []).append(name)
    ranking = []
    for _, names in sorted(by_class.items()):
        keys = []
        for number, name in enumerate(names, 1):
            trailing_zeros = (number & -number).bit_length()
            keys.append((trailing_zeros, number, name))
        ranking += [name for _, _, name in sorted(keys)]
    return ranking


# ---- chains --------------------------------------------------------------------------------------
#
# Whether chains are fused, and whether tensors inside of them are computed again for gradients.


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
