"""`make_plan`: check the options, try the meshes, and return the better plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from einmpi.errors import InputError, nearest_of, one_of
from einmpi.garbage import without_garbage_search
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.scalar import MAX_COUNT
from einmpi.graph.split_gathers import picked_gathers, with_picked_gathers
from einmpi.graph.two_pass_scans import can_be_blocked, with_scans_in_blocks
from einmpi.late import late
from einmpi.planner.machine import PER_MILLE, Machine, Weights
from einmpi.planner.mesh import Mesh, divisors, prime_factors
from einmpi.planner.orders import other_first_axes
from einmpi.planner.pairs import Pairing, can_be_paired, in_pairs, pairings, to_rows
from einmpi.planner.plan import FittedInputs, Options, Plan, SharedInputs
from einmpi.planner.planning import Planning, TooLittleMemory, bytes_besides, cost_of, price_of
from einmpi.planner.saving_memory.cut_memory import inputs_that_fit
from einmpi.planner.saving_memory.recompute import without_copies
from einmpi.planner.solving.solver import SharedTables
from einmpi.planner.strategies import DEFAULT_STRATEGY, STRATEGIES
from einmpi.units import counted, show_bytes

# ---- fastest -------------------------------------------------------------------------------------
#
# The plan that is fastest on a measured machine, by the times of its schedule.


# Larger graphs are searched once: each search takes seconds, and their layers compute for long.
MOST_VERTICES_TO_TRY = 200
FEW_VERTICES = 16  # of a graph for which other strategies are tried, too
OTHER_STRATEGIES = tuple(name for name in STRATEGIES if name != DEFAULT_STRATEGY)
# Less than this share of the time, a fiftieth, is not worth another search.
SHARE_WORTH_A_SEARCH = 50
HIGHEST_WEIGHT = 100 * PER_MILLE
SMALL_ERROR = PER_MILLE // 10
ALMOST_NOTHING = 1  # a weight: of plans that are equal otherwise, the one that moves less is found


def _fastest_plan(graph: EinGraph, ranks: int, options: Options, machine: Machine) -> Plan:
    """Return the fastest of the plans that searches with several weights find.

    Each is timed by a dry run of its schedule. The cuts of other strategies are compared too where
    the graph is small. Where nothing else is worth a search, it is the first plan, timed.
    """

    def search(weights: Weights, strategy: str) -> Plan:
        return _plan(graph, ranks, replace(options, weights=weights, strategy=strategy))

    searched = search(Weights(), options.strategy)
    best = _timed(searched, machine)
    if not _is_worth_a_search(best):
        return best
    known = {best.digest}
    choices = [(weights, best.strategy) for weights in _other_weights(searched, best, machine)]
    if len(best.graph.computed) <= FEW_VERTICES and not options.reproducible:
        choices += [(Weights(), strategy) for strategy in OTHER_STRATEGIES]
    for weights, strategy in choices:
        try:
            other = search(weights, strategy)
        except InputError:  # a limit of memory, or roles of labels that are not given
            continue
        if strategy != best.strategy:  # its notes say how it follows its own rule
            other = replace(other, strategy=best.strategy, notes={})
        if other.digest not in known and not other.spilled:
            known.add(other.digest)
            other = _timed(other, machine)
            if _time(other) < _time(best):
                best = other
    return best


def _is_worth_a_search(timed: Plan) -> bool:
    """Return whether a faster plan is looked for: moving takes enough of the time."""
    if timed.strategy != DEFAULT_STRATEGY or timed.spilled:
        return False
    if len(timed.graph.computed) > MOST_VERTICES_TO_TRY:
        return False
    moving = timed.total.moving_inside + timed.total.moving_between
    return moving * SHARE_WORTH_A_SEARCH >= timed.total.time


def _other_weights(searched: Plan, timed: Plan, machine: Machine) -> Iterator[Weights]:
    """Yield the weights with which a faster plan may be found than the first one.

    First those by which the search would have found the times of that plan. Where ranks share
    memory, what is gathered inside a node costs nothing. Then latencies count once for each
    exchange.
    """
    inside = _weight(timed.total.moving_inside, searched.total.moving_inside)
    between = _weight(timed.total.moving_between, searched.total.moving_between)
    if max(abs(inside - PER_MILLE), abs(between - PER_MILLE)) > SMALL_ERROR:
        yield Weights(inside, between)
    if machine.shared:
        yield Weights(ALMOST_NOTHING, between)
    yield Weights(inside, between, "exchange")


def _weight(timed: int, searched: int) -> int:
    """Return by how much a search has to multiply its times, in thousandths."""
    if searched == 0:
        return PER_MILLE
    return min(HIGHEST_WEIGHT, max(ALMOST_NOTHING, timed * PER_MILLE // searched))


def _timed(plan: Plan, machine: Machine) -> Plan:
    timed: Plan = late("with_predicted_times")(plan, machine)
    return timed


def _time(plan: Plan) -> int:
    """Return the picoseconds of a rank."""
    return plan.total.time // plan.mesh.ranks


MOST_IN_PAIRS = 4  # symmetric results, those that move most, are planned in pairs of blocks
MOST_PAIRINGS = 3  # of each of them are planned
MAX_RANKS = 2**20
LARGEST_GOOD_PRIME = 7  # a number of ranks with a larger prime factor can be cut in few ways
MOST_DIVISORS_LISTED = 12


@without_garbage_search
def make_plan(graph: EinGraph, ranks: int, options: Options | None = None) -> Plan:
    """Return the plan of a graph on `ranks` ranks. Pure and deterministic."""
    options = options or Options()
    _check_options(graph, ranks, options)
    # What all ranks know before they plan is on all of them.
    known = {vertex.name for vertex in graph.inputs if vertex.known is not None}
    others = (name for name in options.resident if name not in known)
    options = replace(options, resident=(*others, *sorted(known)))
    start = time.perf_counter()
    if options.machine is None or options.uneven:
        plan = _plan(graph, ranks, options)
    else:
        plan = _fastest_plan(graph, ranks, options, options.machine)
    return replace(plan, seconds=time.perf_counter() - start)


def _plan(graph: EinGraph, ranks: int, options: Options) -> Plan:
    """Return the plan that moves least, or takes least time with the weights of the options."""
    if options.fitting:
        return _plan_that_fits(graph, ranks, options)
    limit = options.memory
    besides = bytes_besides(graph, ranks, options)
    if limit is not None:
        options = replace(options, memory=limit - besides)
    best: Plan | None = None
    errors: list[InputError] = []
    for mesh in _meshes(ranks, options):
        try:
            plan = _plan_on_mesh(graph, mesh, ranks, options)
        except InputError as error:
            errors.append(error)
            continue
        if best is None or _is_better(plan, best):
            best = plan
    if best is None:
        raise _nearest_to_a_plan(errors)
    _check_values_per_rank(best)
    if options.shared:
        best = replace(best, shared=_shared_inputs(graph, best, options))
    return replace(best, memory=limit, besides=besides)


def _plan_that_fits(graph: EinGraph, ranks: int, options: Options) -> Plan:
    """Return a plan with as many of the inputs `fitting` resident as the limit allows.

    If not all are, it follows from a plan that loads them in each call which of them fit. A plan
    that would spill tensors for their sake is not taken.
    """
    names = tuple(name for name in options.fitting if graph.consumers.get(name))
    others = replace(options, fitting=())

    def plan_with(kept: tuple[str, ...]) -> Plan:
        plan = _plan(graph, ranks, replace(others, resident=(*options.resident, *kept)))
        loaded = tuple(name for name in names if name not in kept)
        return replace(plan, fitted=FittedInputs(kept, loaded))

    if options.memory is None:
        return plan_with(names)
    kept = names
    without: Plan | None = None
    while kept:
        try:
            plan = plan_with(kept)
            if not plan.spilled:
                return plan
        except InputError:  # it needs more than the limit
            pass
        if without is None:
            without = plan_with(())
            found = () if without.spilled else inputs_that_fit(without, others, names)
            kept = tuple(name for name in names if name in found)
        else:  # other cuts were found, which need more memory
            kept = kept[: len(kept) // 2]
    return plan_with(()) if without is None else without


def _shared_inputs(graph: EinGraph, plan: Plan, options: Options) -> SharedInputs:
    """Return which inputs lie as another program has chosen, and what that costs a plan."""
    words_more = 0
    if plan.words_predicted > 0:
        layouts = {}
        for name, layout in options.given.items():
            if name not in options.shared:
                layouts[name] = layout
        free = replace(
            options,
            given=layouts,
            shared=(),
            resident=(*options.resident, *options.shared),
            mesh=options.mesh if layouts or options.placed else None,
        )
        try:
            words_free = _plan(graph, plan.ranks, free).words_predicted
        except InputError:  # no other layouts fit into memory
            words_free = plan.words_predicted
        words_more = max(0, plan.words_predicted - words_free)
    return SharedInputs(options.shared, words_more)


def _nearest_to_a_plan(errors: Sequence[InputError]) -> InputError:
    """Return the error that names the lowest memory limit; else the first one."""
    of_memory = [error for error in errors if isinstance(error, TooLittleMemory)]
    if of_memory:
        return min(of_memory, key=lambda error: error.least)
    return errors[0]


def _plan_on_mesh(graph: EinGraph, mesh: Mesh, ranks: int, options: Options) -> Plan:
    """Return the plan on one mesh, in whichever of several forms of the graph moves least.

    Scans may have two passes, and gathers from cut dimensions may be done by picking.
    """
    tables = SharedTables()
    is_default = options.strategy == DEFAULT_STRATEGY

    def plan_of(form: EinGraph) -> Plan:
        return _with_best_orders(form, mesh, ranks, options, tables)

    if options.reproducible:  # other forms round otherwise
        return plan_of(graph)

    def with_scans(names: Sequence[str]) -> _Form:
        return with_scans_in_blocks(graph, names, mesh.ranks), {name: [name] for name in names}

    scans = []
    if is_default:
        for vertex in graph.computed:
            if vertex.recurrence is None and can_be_blocked(vertex, mesh.ranks):
                scans.append(vertex.name)
    try:
        plan = plan_of(graph)
        if _may_move_less(plan):
            plan = _in_better_form(plan, scans, with_scans, plan_of)
    except InputError as error:
        if not scans:
            raise
        try:
            plan = _in_better_form(None, scans, with_scans, plan_of)
        except InputError as other_error:
            raise _nearest_to_a_plan([error, other_error]) from None
    if not is_default or not _may_move_less(plan):
        return plan
    written = plan.graph
    if plan.recomputed is not None:
        written = without_copies(written, plan.recomputed.copies)
    gathers = [vertex.name for vertex in written.computed if _moves_for_gathers(plan, vertex)]
    plan = _in_better_form(plan, gathers, partial(with_picked_gathers, written), plan_of)
    return _with_pairs(plan, options, tables)


def _with_best_orders(
    graph: EinGraph, mesh: Mesh, ranks: int, options: Options, tables: SharedTables
) -> Plan:
    """Return the plan of a graph; where it has stencils, with the best first axis of their digits.

    Others than the first axis of the mesh are tried where a plan may be better than that one.
    """
    best = Planning(graph, mesh, ranks, options, tables).plan()
    may_be_better = best.kind == "gap" and _may_move_less(best)
    if options.strategy != DEFAULT_STRATEGY or not best.orders or not may_be_better:
        return best
    for first_axis in other_first_axes(graph, mesh):
        with_other_orders = replace(options, first_axis=first_axis)
        try:
            other = Planning(graph, mesh, ranks, with_other_orders, tables).plan()
        except InputError:  # it needs more memory
            continue
        if _costs_less(other, best):
            best = other
    return best


def _with_pairs(plan: Plan, options: Options, tables: SharedTables) -> Plan:
    """Return the plan with symmetric results in pairs of blocks where that costs less.

    The bound is that of the graph as it was: it holds for pairs of blocks, too.
    """
    if plan.recomputed is not None or plan.spilled:
        return plan
    bills = {}
    for vertex in plan.graph.computed:
        if can_be_paired(plan.graph, vertex, plan.mesh.ranks):
            bills[vertex.name] = _words_around(plan, vertex)
    for name in sorted(bills, key=lambda name: -bills[name])[:MOST_IN_PAIRS]:
        may_stay = [output for output in plan.graph.outputs if _may_stay(plan, output, options)]
        found = pairings(plan.graph, plan.graph[name], plan.mesh, may_stay)
        for pairing in found[:MOST_PAIRINGS]:
            if pairing.words >= bills[name]:
                break
            try:
                other = _in_pairs(plan, pairing, options, tables)
            except InputError:  # it needs more memory
                continue
            if any(each.spilled for each in other.unread.values()):
                continue
            if _costs_less(other, plan):
                plan = other
                break
    return plan


def _words_around(plan: Plan, vertex: Vertex) -> int:
    """Return the words that move for a vertex, its readers, and others that read its operands."""
    names = {vertex.name, *plan.graph.consumers[vertex.name]}
    for name in vertex.inputs:
        names.update(plan.graph.consumers[name])
    return sum(plan.bills[name].words.total for name in sorted(names))


def _may_stay(plan: Plan, name: str, options: Options) -> bool:
    """Return whether an output need not be in a layout: nothing says how it lies."""
    if not options.unread or options.carry or not isinstance(options.recompute, str):
        return False
    return name not in options.pins and name not in options.placed


def _in_pairs(plan: Plan, pairing: Pairing, options: Options, tables: SharedTables) -> Plan:
    """Return the plan with a symmetric result in pairs of blocks; InputError if none fits."""
    form, start = in_pairs(plan.graph, plan, pairing)
    planning = Planning(form.graph, plan.mesh, plan.ranks, replace(options, start=start), tables)
    other = planning.plan()
    unread = dict(plan.unread)
    notes = {name: pairing.note_on(name) for name in pairing.family}
    for output, graph in form.rests.items():
        names = [vertex.name for vertex in graph.inputs]
        of_rest = Options(
            memory=options.memory,
            given={name: other.layouts[name] for name in names},
            orders={name: other.orders_of(name) for name in names},
            mesh=plan.mesh,
            start=to_rows(form, plan.mesh, pairing, output),
            nodes=options.nodes,
            uneven=options.uneven,
            overlap=False,
        )
        rest = Planning(graph, plan.mesh, plan.ranks, of_rest).plan()
        unread[output] = rest
        moved = f"{rest.words_predicted:,} words, in {show_bytes(rest.peak)}"
        notes[output] += f". It stays in these: to read it moves {moved}"
    return replace(
        other,
        notes={**plan.notes, **other.notes, **notes},
        lower_bound=min(plan.lower_bound, other.words_predicted),
        among=plan.among,
        kind="gap",
        unread=unread,
    )


def _costs_less(plan: Plan, other: Plan) -> bool:
    """Return whether a plan spills less, or as much and moves less or takes less time."""
    return (plan.spilled, price_of(plan)) < (other.spilled, price_of(other))


def _may_move_less(plan: Plan) -> bool:
    """Return whether a plan moves or spills anything."""
    return plan.spilled > 0 or plan.bytes_predicted > 0


# A graph in another form, and the vertices in it that are for each of those rewritten.
_Form = tuple[EinGraph, Mapping[str, Sequence[str]]]


def _in_better_form(
    plan: Plan | None,
    names: Sequence[str],
    with_other_form: Callable[[Sequence[str]], _Form],
    plan_of: Callable[[EinGraph], Plan],
) -> Plan:
    """Return the plan with some vertices in another form, if that costs less than the given plan.

    A vertex has the other form only if a dimension is cut that could not be cut before.
    """
    while names:
        form, vertices = with_other_form(names)
        try:
            other = plan_of(form)
        except InputError:
            if plan is None:
                raise
            return plan
        cut_names = []
        for name in names:
            if any(_is_cut_by_form(other, vertex) for vertex in vertices[name]):
                cut_names.append(name)
        if plan is None or cut_names == names:
            notes = {} if plan is None else dict(plan.notes)
            notes.update(other.notes)
            for vertex in chain(*(vertices[name] for name in names)):
                notes[vertex] = _note_on_form(other, vertex)
            other = replace(other, notes=notes)
            return other if plan is None or _costs_less(other, plan) else plan
        names = cut_names
    assert plan is not None
    return plan


def _is_cut_by_form(plan: Plan, name: str) -> bool:
    """Return whether the dimension is cut that a vertex picks from, or scans in two passes."""
    einsum = plan.graph[name].computed_einsum
    scan = einsum.blocked_scan
    label = einsum.aggregated[0] if scan is None else scan.along
    return plan.parts(name)[label] > 1


def _note_on_form(plan: Plan, name: str) -> str:
    scan = plan.graph[name].computed_einsum.blocked_scan
    if scan is None:
        return "each rank picks what it has, and the parts are summed"
    return f"scan in two passes: {scan.blocks.count} blocks along {scan.along}, totals move"


def _moves_for_gathers(plan: Plan, vertex: Vertex) -> bool:
    """Return whether something moves for a vertex with gathers, or for what it gathers from."""
    if vertex.recurrence is not None:
        return False  # the number of a step is the same on all ranks
    for gather in picked_gathers(vertex, plan.graph.by_name):
        for name in (vertex.name, gather.element.tensor):
            if name in plan.bills and plan.bills[name].nbytes > 0:
                return True
    return False


def _meshes(ranks: int, options: Options) -> list[Mesh]:
    """Return the meshes to try: the given one, or one of all ranks and perhaps a smaller one.

    The smaller one is tried where the number of ranks has a large prime factor: it has the next
    smaller number without one, and the other ranks stay idle. On several nodes whole nodes stay
    idle, because a mesh has equally many ranks on each. Uneven nodes are ignored.
    """
    if options.mesh is not None:
        return [options.mesh]
    nodes = 1 if options.uneven else options.nodes
    each = ranks // nodes
    counts = _counts_to_try(nodes if nodes > 1 else ranks, options)
    if nodes == 1:
        return [Mesh(used, twos_first=options.reproducible) for used in counts]
    return [Mesh(each * used, used, twos_first=options.reproducible) for used in counts]


def _counts_to_try(count: int, options: Options) -> list[int]:
    """Return the numbers of ranks, or of nodes, to plan with.

    Sums in blocks are cut by powers of two, so that the next smaller one is tried for them.
    """
    counts = {count: None}
    if options.strategy == DEFAULT_STRATEGY:
        smaller = count
        while not _has_good_primes(smaller):
            smaller -= 1
        counts[smaller] = None
        if options.reproducible:
            counts[2 ** (count.bit_length() - 1)] = None
    return list(counts)


def _has_good_primes(count: int) -> bool:
    """Return whether a number has no large prime factor, and so can be cut in many ways."""
    return max(prime_factors(count), default=1) <= LARGEST_GOOD_PRIME


def _is_better(plan: Plan, other: Plan) -> bool:
    """Return whether a plan has to spill less, or as much and takes less time."""
    if plan.spilled != other.spilled:
        return plan.spilled < other.spilled
    # The time of one rank is that of all ranks, divided by their number.
    time = cost_of(replace(plan, spilled=0)) * other.mesh.ranks
    return time < cost_of(replace(other, spilled=0)) * plan.mesh.ranks


# ---- checks -------------------------------------------------------------------------------------


def _check_values_per_rank(plan: Plan) -> None:
    """Raise InputError if a rank would compute more values than 64 bits can count."""
    for vertex in plan.graph.computed:
        parts = plan.parts(vertex.name)
        values = 1
        for label, extent in vertex.computed_einsum.extents:
            values *= -(-extent // parts[label])
        if vertex.computed_einsum.matches is None and values >= MAX_COUNT:
            raise InputError(
                "plan",
                f"{vertex.name} is computed from {values} combinations of label values on a rank",
                "less than 2**63",
                "use smaller extents or more ranks",
            )


def _check_options(graph: EinGraph, ranks: int, options: Options) -> None:
    """Raise InputError if the options cannot be met on any mesh."""
    if type(ranks) is not int or not 1 <= ranks <= MAX_RANKS:
        raise InputError("ranks", f"{ranks} ranks requested", f"an integer from 1 to {MAX_RANKS}")
    if options.strategy not in STRATEGIES:
        raise InputError(
            "strategy",
            f"unknown strategy {options.strategy!r}",
            one_of(STRATEGIES, options.strategy),
        )
    if options.reproducible and options.strategy != DEFAULT_STRATEGY:
        raise InputError(
            "strategy",
            f"with {options.strategy}, bits depend on the number of ranks; reproducible is true",
            f"strategy {DEFAULT_STRATEGY}",
        )
    for vertex in graph.computed if options.reproducible else ():
        if vertex.computed_einsum.matrix is not None:
            raise InputError(
                "reproducible",
                f"bits of {vertex.name}, a function of matrices, depend on the number of ranks",
                "reproducible = false",
            )
    _check_nodes(ranks, options)
    if options.machine is not None:
        options.machine.check(ranks, options.nodes)
    _check_pins(graph, options)


def _check_nodes(ranks: int, options: Options) -> None:
    """Raise InputError unless the nodes divide the ranks evenly, or are known to be uneven."""
    nodes = options.nodes
    is_possible = type(nodes) is int and 1 <= nodes <= ranks
    if is_possible and (options.uneven or ranks % nodes == 0):
        return
    listed = ", ".join(map(str, divisors(ranks)[:MOST_DIVISORS_LISTED]))
    if len(divisors(ranks)) > MOST_DIVISORS_LISTED:
        listed += ", …"
    # `nodes` may be anything that a program passes, so its noun stays in the plural.
    what = f"{counted(ranks, 'rank')} on {nodes} nodes"
    raise InputError("nodes", what, f"a divisor of the ranks: {listed}")


def _check_pins(graph: EinGraph, options: Options) -> None:
    """Raise InputError unless each pin is an input or output with parts for each dimension."""
    ends = [vertex.name for vertex in graph.inputs] + list(graph.outputs)
    for name, parts in options.pins.items():
        place = options.pin_place(name)
        if name not in ends:
            what = "is an intermediate result" if name in graph.by_name else "is not in the graph"
            raise InputError(place, f"{name} {what}", nearest_of(ends, name))
        are_counts = all(type(part) is int and part > 0 for part in parts)
        if len(parts) != len(graph[name].bound) or not are_counts:
            shown = "×".join(map(str, parts))
            raise InputError(
                place,
                f"{name} cannot be cut {shown}",
                "a positive integer for each dimension",
            )
