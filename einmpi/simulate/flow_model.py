"""A simulated run of classes of ranks: what all ranks do at the same time shares the network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from einmpi.planner.mesh import Mesh, members_along
from einmpi.planner.plan import Plan
from einmpi.simulate.classes import (
    Call,
    RankClass,
    Ranks,
    along,
    axes_of_group,
    shifted,
    sizes_there,
)
from einmpi.simulate.dry_run import BYTES_OF_A_SIGNAL
from einmpi.simulate.flows import HEADER, Floats, Network, ends_of_flows, routes_between
from einmpi.simulate.message_rounds import barrier_distances, rounds_of_gather, rounds_of_sums

# Each rank has a clock. All ranks make the same calls in the same order, so the messages of one
# round of a call are looked at together: a message begins when both ranks are there, and shares the
# links with the others of the round. Ranks that are early wait for their partners only.

AT_ONCE = -1  # in place of a round: all these messages are sent when a call begins


class Flows(NamedTuple):
    """Messages of a call: arrays with one entry for each, or numbers for all."""

    rounds: Any
    sources: Ranks
    targets: Ranks
    nbytes: Any


def run_classes(plan: Plan, classes: Sequence[RankClass], network: Network) -> tuple[float, int]:
    """Return the seconds of a run, and the messages of elements.

    The nodes of the plan are the first ones of the network.
    """
    cores = plan.ranks // plan.nodes
    clock = np.zeros(plan.ranks)
    messages = 0
    calls = [(call, each) for each in classes for call in each.comm.noted]
    calls.sort(key=lambda pair: pair[0].order)
    for _, at_the_same_time in groupby(calls, key=lambda pair: pair[0].order):
        found = []
        for call, each in at_the_same_time:
            if call.kind == "compute":
                clock[each.ranks] += _seconds_of(call.action, network)
                continue
            for flows in _flows_of(plan.mesh, call, each, cores):
                found.append(_arrays(flows))
                if call.kind not in ("barrier", "copy"):
                    messages += int((found[-1].nbytes > 0).sum())
        if found:
            clock = _after(
                clock, Flows(*map(np.concatenate, zip(*found, strict=True))), network, cores
            )
    return float(clock.max()), messages


def _seconds_of(action: str, network: Network) -> float:
    name, amount = action.split()
    return float(amount) if name == "sleep" else float(amount) / network.speed


def _arrays(flows: Flows) -> Flows:
    return Flows(*np.broadcast_arrays(*flows))


def _flows_of(mesh: Mesh, call: Call, each: RankClass, cores: int) -> Iterator[Flows]:
    """Yield what the ranks of a class send in a call."""
    ranks = each.ranks
    if call.kind == "copy":
        yield Flows(0, ranks, ranks, call.nbytes)
        return
    axes = axes_of_group(mesh, call.group)
    distances = np.array(members_along(mesh, axes))
    size = len(distances)
    place = along(mesh, axes, ranks)
    first = ranks - distances[place]
    if call.kind == "barrier":
        for number, distance in enumerate(barrier_distances(size)):
            target = (place + distance) % size
            yield Flows(number, ranks, first + distances[target], BYTES_OF_A_SIGNAL)
    elif call.kind in ("gather", "sums"):
        rounds = rounds_of_gather if call.kind == "gather" else rounds_of_sums
        for chosen, sizes in _with_sizes(
            mesh, axes, call, along(mesh, axes, each.comm.rank), place
        ):
            for number, one in enumerate(rounds(place[chosen], sizes)):
                targets = first[chosen] + distances[one.target]
                yield Flows(number, ranks[chosen], targets, one.sent)
    else:
        like = each.comm.rank
        of_node = sum(other // cores == like // cores for other in call.group)
        most = max(map(len, call.sent))
        before = along(mesh, axes, like)
        for other, messages in enumerate(call.sent):
            target = shifted(mesh, axes, other, before, place)
            targets = first + distances[target]
            for number, nbytes in enumerate(messages):
                if call.kind == "pairs":
                    round_number = (target - place) % size * most + number
                else:
                    # Messages inside of a node go in rounds.
                    is_near = ranks // cores == targets // cores
                    round_number = np.where(is_near, (target - place) % of_node, AT_ONCE)
                yield Flows(round_number, ranks, targets, nbytes)


def _with_sizes(
    mesh: Mesh, axes: Sequence[int], call: Call, before: int, place: Ranks
) -> Iterator[tuple[Ranks, Ranks]]:
    """Yield ranks for which the members of their groups have the same sizes, and these sizes."""
    found: dict[tuple[int, ...], list[Ranks]] = {}
    members = np.arange(len(call.sizes))
    if len(set(call.sizes)) == 1:
        yield np.arange(len(place)), np.array(call.sizes)
        return
    for one in np.unique(place):
        there = shifted(mesh, axes, members, before, one)
        sizes = tuple(sizes_there(call.sizes, there))
        found.setdefault(sizes, []).append(np.flatnonzero(place == one))
    for sizes, places in found.items():
        yield np.concatenate(places), np.array(sizes)


def _after(clock: Floats, flows: Flows, network: Network, cores: int) -> Floats:
    """Return the clocks after the messages of a call."""
    flows = Flows(*(each[flows.nbytes > 0] for each in flows))
    order = np.argsort(flows.rounds, kind="stable")
    borders = np.flatnonzero(np.diff(flows.rounds[order])) + 1
    begin = now = clock
    ends = clock
    for chosen in np.split(order, borders):
        if not len(chosen):
            continue
        one = Flows(*(each[chosen] for each in flows))
        if one.rounds[0] == AT_ONCE:
            ends = _after_round(begin, one, network, cores)
        else:
            now = _after_round(now, one, network, cores)
    return np.maximum(now, ends)


def _after_round(clock: Floats, flows: Flows, network: Network, cores: int) -> Floats:
    """Return the clocks after messages that are sent as soon as both ranks are there."""
    starts = np.maximum(clock[flows.sources], clock[flows.targets])
    sources, targets = flows.sources // cores, flows.targets // cores
    ends = starts + network.latency_inside
    ends += (flows.nbytes + HEADER) / network.bandwidth_inside
    away = sources != targets
    if away.any():
        routes = routes_between(network, sources[away], targets[away])
        ends[away] = ends_of_flows(network, starts[away], flows.nbytes[away], routes)
    found = clock.copy()
    np.maximum.at(found, flows.sources, ends)
    np.maximum.at(found, flows.targets, ends)
    return found
