"""The plan that is fastest on a measured machine, by the times of its schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from einmpi.errors import InputError
from einmpi.late import late
from einmpi.planner.machine import Machine
from einmpi.planner.plan import Plan
from einmpi.planner.prices import PER_MILLE, Weights
from einmpi.planner.strategies import DEFAULT_STRATEGY, STRATEGIES

# Larger graphs are searched once: each search takes seconds, and their layers compute for long.
MOST_VERTICES_TO_TRY = 200
FEW_VERTICES = 16  # of a graph for which other strategies are tried, too
OTHER_STRATEGIES = tuple(name for name in STRATEGIES if name != DEFAULT_STRATEGY)
# Less than this share of the time, a fiftieth, is not worth another search.
SHARE_WORTH_A_SEARCH = 50
HIGHEST_WEIGHT = 100 * PER_MILLE
SMALL_ERROR = PER_MILLE // 10
ALMOST_NOTHING = 1  # a weight: of plans that are equal otherwise, the one that moves less is found


class Search(Protocol):
    """Makes a plan, untimed."""

    def __call__(self, weights: Weights, strategy: str = ...) -> Plan: ...


def fastest_plan(search: Search, machine: Machine) -> Plan:
    """Return the fastest of the plans that searches with several weights find.

    Each is timed by a dry run of its schedule. The cuts of other strategies are compared too where
    the graph is small. Where nothing else is worth a search, it is the first plan, timed.
    """
    searched = search(Weights())
    best = _timed(searched, machine)
    if not _is_worth_a_search(best):
        return best
    known = {best.digest}
    choices = [(weights, best.strategy) for weights in _other_weights(searched, best, machine)]
    if len(best.graph.computed) <= FEW_VERTICES:
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
