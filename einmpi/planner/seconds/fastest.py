"""The plan that is fastest on a measured machine, by the times of its schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from einmpi.errors import InputError
from einmpi.late import late
from einmpi.planner.machine import Machine
from einmpi.planner.plan import Plan
from einmpi.planner.prices import PER_MILLE, Weights

# Larger graphs are searched once: each search takes seconds, and their layers compute for long.
MOST_VERTICES_TO_TRY = 200
# Less than this share of the time, a fiftieth, is not worth another search.
SHARE_WORTH_A_SEARCH = 50
HIGHEST_WEIGHT = 100 * PER_MILLE


def fastest_plan(plan_with: Callable[[Weights], Plan], machine: Machine, may_try: bool) -> Plan:
    """Return the fastest of the plans that searches with several weights find.

    Each is timed by a dry run of its schedule. Unless others may be tried, that is the first one.
    """
    searched = plan_with(Weights())
    best = _timed(searched, machine)
    known = {best.digest}
    if not may_try or best.spilled:
        return best
    for weights in _other_weights(searched, best):
        try:
            other = plan_with(weights)
        except InputError:  # it finds no plan within the limit of memory
            continue
        if other.digest not in known and not other.spilled:
            known.add(other.digest)
            other = _timed(other, machine)
            if _time(other) < _time(best):
                best = other
    return best


def _other_weights(searched: Plan, timed: Plan) -> Iterator[Weights]:
    """Yield the weights with which a faster plan may be found than the first one.

    First those by which the search would have found the times of that plan. Then latencies count
    once for each exchange, or not at all.
    """
    moving = sum(bill.moving_inside + bill.moving_between for bill in timed.bills.values())
    if moving * SHARE_WORTH_A_SEARCH < _time(timed):
        return
    inside = _weight(
        sum(bill.moving_inside for bill in timed.bills.values()),
        sum(bill.moving_inside for bill in searched.bills.values()),
    )
    between = _weight(
        sum(bill.moving_between for bill in timed.bills.values()),
        sum(bill.moving_between for bill in searched.bills.values()),
    )
    yield Weights(inside, between)
    yield Weights(inside, between, "exchange")
    yield Weights(inside, between, "none")
    yield Weights(latency="none")


def _weight(timed: int, searched: int) -> int:
    """Return by how much a search has to multiply its times, in thousandths."""
    if searched == 0:
        return PER_MILLE
    return min(HIGHEST_WEIGHT, max(1, timed * PER_MILLE // searched))


def _timed(plan: Plan, machine: Machine) -> Plan:
    timed: Plan = late("with_predicted_times")(plan, machine)
    return timed


def _time(plan: Plan) -> int:
    """Return the picoseconds of a rank."""
    return sum(bill.time for bill in plan.bills.values()) // plan.mesh.ranks
