"""Plans that know how inputs are stored: what one rank reads for another, and how to avoid it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from einmpi.errors import InputError
from einmpi.graph.eingraph import EinGraph, StoredForm
from einmpi.planner.machine import BETWEEN
from einmpi.planner.make_plan import MOST_VERTICES_TO_TRY, SHARE_WORTH_A_SEARCH, make_plan
from einmpi.planner.mesh import Mesh, divisors, place
from einmpi.planner.plan import Options, Plan
from einmpi.planner.planning import price_of
from einmpi.planner.strategies import DEFAULT_STRATEGY
from einmpi.schedule.layout import Layout
from einmpi.schedule.lower import arrival_layout
from einmpi.schedule.shared_reads import bytes_passed_on, shared_read
from einmpi.units import show_bytes

MOST_CUTS_TO_TRY = 4  # of an input, each by a search
MOST_CUTS_LOOKED_AT = 64


def plan_with_files(graph: EinGraph, ranks: int, options: Options) -> Plan:
    """Return the plan that moves least, what ranks read for each other included.

    First the search places all inputs freely. Then inputs of which much is passed on are cut as
    their files are, one after another, wherever the whole then moves less. Times on a measured
    machine are those of the computation alone: for these the search has the last word.
    """
    free = _with_bytes_passed_on(make_plan(graph, ranks, options), options)
    if options.strategy != DEFAULT_STRATEGY or options.machine is not None:
        return free
    if len(graph.computed) > MOST_VERTICES_TO_TRY:
        return free
    best = free
    seconds = free.seconds
    for name in sorted(free.passed_on, key=lambda name: (-free.passed_on[name], name)):
        is_worth_it = best.passed_on.get(name, 0) * SHARE_WORTH_A_SEARCH > _bytes_in_all(best)
        if name in options.pins or not is_worth_it:
            continue
        cuts = _cuts_like_the_file(graph[name].bound, options.stored[name], best.mesh)
        for parts in cuts[:MOST_CUTS_TO_TRY]:
            pinned = replace(options, pins={**options.pins, name: parts})
            try:
                other = _with_bytes_passed_on(make_plan(graph, ranks, pinned), pinned)
            except InputError:  # a limit of memory
                continue
            seconds += other.seconds
            if (other.spilled, _bytes_in_all(other)) < (best.spilled, _bytes_in_all(best)):
                best = other
                options = pinned
    return replace(_with_notes(best, free), seconds=seconds)


def _with_bytes_passed_on(plan: Plan, options: Options) -> Plan:
    passed_on = {}
    for name, stored in options.stored.items():
        if plan.graph.consumers.get(name) and name not in plan.resident:
            nbytes = bytes_passed_on(arrival_layout(plan, name), stored)
            if nbytes:
                passed_on[name] = nbytes
    return replace(plan, passed_on=passed_on)


def _with_notes(plan: Plan, free: Plan) -> Plan:
    """Return a plan with what it avoids, and how far its words are from those of a free search."""
    if plan is free:
        return plan
    notes = dict(plan.notes)
    for name, nbytes in free.passed_on.items():
        if name not in plan.passed_on:
            avoided = f"{show_bytes(nbytes)} would be read by one rank for another"
            notes[name] = f"cut as its file is stored, otherwise {avoided}"
    is_exact = free.kind == "exact" and plan.words_predicted == free.words_predicted
    kind = "exact" if is_exact else "gap"
    return replace(plan, notes=notes, kind=kind, lower_bound=free.lower_bound, among=free.among)


def _bytes_in_all(plan: Plan) -> int:
    """Return what a plan is compared by: bytes, those between nodes at their price."""
    weight = BETWEEN if plan.mesh.nodes > 1 else 1
    return price_of(plan) + weight * sum(plan.passed_on.values())


def _cuts_like_the_file(
    bound: tuple[int, ...], stored: StoredForm, mesh: Mesh
) -> list[tuple[int, ...]]:
    """Return some numbers of parts with which every rank can read its own block.

    Those come first that cut the dimensions which vary slowest in the file.
    """
    found = []
    for factors in islice(_factorisations(mesh.ranks, len(bound)), MOST_CUTS_LOOKED_AT):
        parts = factors[::-1] if stored.is_reversed else factors
        cuts = place(mesh, bound, parts)  # len(bound) for axes that can cut nothing
        is_cut_so = len(bound) not in cuts
        if is_cut_so and shared_read(Layout(mesh, bound, cuts), stored) is None:
            found.append(parts)
    return found[:MOST_CUTS_TO_TRY]


def _factorisations(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write a number as a product, those with large first factors first."""
    if factors == 0:
        if number == 1:
            yield ()
        return
    for first in reversed(divisors(number)):
        for others in _factorisations(number // first, factors - 1):
            yield (first, *others)
