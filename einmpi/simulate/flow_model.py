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
from einmpi.simulate.cluster import NO_LINK, Floats, Ints, Network, Routes, routes_between
from einmpi.simulate.dry_run import (
    BYTES_OF_A_SIGNAL,
    barrier_distances,
    rounds_of_gather,
    rounds_of_sums,
)

# ---- sharing of links ----------------------------------------------------------------------------
#
# How long messages take: flows that share the links of a network, as in SimGrid, which cannot do it
# for as many. A flow waits for the latencies of its links, then gets its share of them.


HEADER = 16  # bytes of a message besides its elements, as in SMPI
_WINDOW = 4_194_304  # bytes of a flow that may be under way: SimGrid's network/TCP-gamma
# Rates are shared out anew when a flow begins or ends. Of many flows, what happens within this part
# of the time that they take is taken together.
_MANY_FLOWS = 1000
_TOGETHER = 0.05
_ROUNDING = 1e-9  # the same for few flows
_MOST_PASSES = 16  # of the search for full links; after it, flows get what is left


class SharedLinks:
    """Flows that are under way, or wait to begin; they share the links of a network."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.now = -np.inf
        self.capacity = np.empty(0)  # of each link
        # With an entry for each flow.
        self.links = np.empty((0, 0), np.int64)
        self.waits = np.empty(0)  # the latencies of its links
        self.since = np.empty(0)  # until when it has got its bytes; at first, when it begins
        self.left = np.empty(0)  # bytes
        self.tags = np.empty((0, 2), np.int64)

    def send(self, starts: Floats, nbytes: Ints, routes: Routes, tags: Ints) -> None:
        """Add flows that are sent at these times. Tags tell them apart."""
        waits = (routes.links != NO_LINK).sum(axis=1) * self.network.latency
        more = max(int(routes.links.max()) + 1 - len(self.capacity), 0)
        self.capacity = np.append(self.capacity, np.full(more, np.inf))
        self.capacity[routes.links] = routes.capacity
        width = max(self.links.shape[1], routes.links.shape[1])
        both = [_widened(each, width) for each in (self.links, routes.links)]
        self.links = np.concatenate(both)
        self.waits = np.concatenate([self.waits, waits])
        self.since = np.concatenate([self.since, starts + waits])
        self.left = np.concatenate([self.left, nbytes + float(HEADER)])
        self.tags = np.concatenate([self.tags, tags])

    def end_next(self) -> tuple[Ints, Floats]:
        """Return the tags of the flows that end next, and when they do; none if there are none."""
        is_done = np.zeros(len(self.left), bool)
        while len(is_done) and not is_done.any():
            self.now = max(self.now, self.since.min())
            active = np.flatnonzero(self.since <= self.now)
            waits = self.waits[active]
            rates = _shares(self.links[active], 1 / waits, self.capacity)
            rates = np.minimum(rates, _WINDOW / (2 * waits))
            needs = self.left[active] / rates
            until = self.since[active] + needs
            begins = self.since[self.since > self.now]
            following = min(until.min(), begins.min(initial=np.inf))
            together = _TOGETHER if len(is_done) > _MANY_FLOWS else _ROUNDING
            self.now = max(self.now, following) + together * float((waits + needs).mean())
            going_on = active[until > self.now]
            self.left[going_on] -= (rates * (self.now - self.since[active]))[until > self.now]
            self.since[going_on] = self.now
            is_done[active] = until <= self.now
            self.since[active[until <= self.now]] = until[until <= self.now]
        found = self.tags[is_done], self.since[is_done]
        for name in ("links", "waits", "since", "left", "tags"):
            setattr(self, name, getattr(self, name)[~is_done])
        return found


def _widened(links: Ints, width: int) -> Ints:
    """Return the links of flows with columns added."""
    if links.shape[1] == width:
        return links
    return np.pad(links, ((0, 0), (0, width - links.shape[1])), constant_values=NO_LINK)


def _shares(links: Ints, weights: Floats, capacity: Floats) -> Floats:
    """Return the rates of flows: on a full link, in proportion to their weights.

    No flow could get more without one getting less that has no more for its weight: a link is full
    if none of its flows gets less elsewhere, and what its flows get is taken from other links.
    """
    rates = np.zeros(len(links))
    count = len(capacity)
    free = capacity.copy()
    open_flows = np.arange(len(links))
    for number in range(_MOST_PASSES):
        routes = links[open_flows]
        weight = np.repeat(weights[open_flows], routes.shape[1])
        total = np.bincount(routes.ravel(), weight, count)
        share = np.full(count, np.inf)
        np.divide(free, total, out=share, where=total > 0)
        share[NO_LINK] = np.inf
        least = share[routes].min(axis=1)
        narrower = least[:, None] < share[routes] * (1 - 1e-9)
        others = np.bincount(routes.ravel(), narrower.ravel(), count)
        full = others == 0
        full[NO_LINK] = False
        fixed = full[routes].any(axis=1)
        if number == _MOST_PASSES - 1:
            fixed[:] = True
        chosen = open_flows[fixed]
        rates[chosen] = least[fixed] * weights[chosen]
        taken = np.repeat(rates[chosen], routes.shape[1])
        free = np.maximum(free - np.bincount(routes[fixed].ravel(), taken, count), 0.0)
        free[NO_LINK] = np.inf
        open_flows = open_flows[~fixed]
        if not len(open_flows):
            break
    return rates


# ---- a run ---------------------------------------------------------------------------------------
#
# Each rank has a clock, and goes through its calls, and through the rounds of each call. A message
# begins when both ranks are there; it shares links with all messages that are under way then.

AT_ONCE = 0  # in place of a round: begun with the call, and ended before its end


class Flows(NamedTuple):
    """Messages of a call: arrays with one entry for each, or numbers for all."""

    rounds: Any  # from 1 on, or AT_ONCE
    sources: Ranks
    targets: Ranks
    nbytes: Any


def run_classes(plan: Plan, classes: Sequence[RankClass], network: Network) -> tuple[float, int]:
    """Return the seconds of a run, and the messages of elements.

    The nodes of the plan are the first ones of the network.
    """
    run = _Run(plan, classes, network)
    run.begin_call(0, np.arange(plan.ranks), np.zeros(plan.ranks))
    while run.end_messages():
        pass
    return run.seconds, run.messages


class _Run:
    """All ranks on their way through the calls."""

    def __init__(self, plan: Plan, classes: Sequence[RankClass], network: Network) -> None:
        self.plan = plan
        self.network = network
        self.cores = plan.ranks // plan.nodes
        calls = [(call, each) for each in classes for call in each.comm.noted]
        calls.sort(key=lambda pair: pair[0].order)
        at_the_same_time = groupby(calls, key=lambda pair: pair[0].order)
        self.calls = [list(together) for _, together in at_the_same_time]
        self.begun: dict[int, _CallOfRanks] = {}  # the calls where some ranks are
        self.links = SharedLinks(network)
        self.seconds = 0.0
        self.messages = 0  # of elements

    def begin_call(self, number: int, ranks: Ranks, times: Floats) -> None:
        """Let ranks begin a call at these times, and those after it as soon as they can."""
        while len(ranks) and number < len(self.calls):
            if number not in self.begun:
                self.begun[number] = self._call_of_ranks(number)
            call = self.begun[number]
            passed = self._come(number, call.begins[ranks], times + call.kernels[ranks])
            ranks, times = self._go_on(number, passed)
            number += 1
        self.seconds = float(times.max(initial=self.seconds))

    def end_messages(self) -> bool:
        """Let the ranks go on whose messages end next; return whether there were messages."""
        tags, ends = self.links.end_next()
        for number in np.unique(tags[:, 0]).tolist():
            chosen = tags[:, 0] == number
            passed = self.begun[number].end(tags[chosen, 1], ends[chosen])
            self.begin_call(number + 1, *self._go_on(number, passed))
        return len(tags) > 0

    def _go_on(self, number: int, passed: Ints) -> tuple[Ranks, Floats]:
        """Let ranks go on from places of a call; return those that leave it, and when."""
        call = self.begun[number]
        left = [passed[:0]]
        while len(passed):
            is_last = call.is_last[passed]
            left.append(passed[is_last])
            passed = passed[~is_last]
            passed = self._come(number, passed + 1, call.times[passed])
        gone = np.concatenate(left)
        call.ranks -= len(gone)
        if not call.ranks:
            del self.begun[number]
        return call.rank_at[gone], call.times[gone]

    def _come(self, number: int, places: Ints, times: Floats) -> Ints:
        """Let ranks come to places of a call at these times, and send the messages that can begin.

        Return the places that ranks can leave now. Messages inside a node disturb no others, so it
        is known when they end.
        """
        call = self.begun[number]
        messages = call.come(places, times)
        at_once = places[call.awaited[places] == 0]
        sources = call.flows.sources[messages] // self.cores
        targets = call.flows.targets[messages] // self.cores
        nbytes, starts = call.flows.nbytes[messages], call.starts[messages]
        away = sources != targets
        if away.any():
            routes = routes_between(self.network, sources[away], targets[away])
            tags = np.stack([np.full(away.sum(), number), messages[away]], axis=1)
            self.links.send(starts[away], nbytes[away], routes, tags)
        ends = starts + self.network.latency_inside
        ends += (nbytes + HEADER) / self.network.bandwidth_inside
        return np.concatenate([at_once, call.end(messages[~away], ends[~away])])

    def _call_of_ranks(self, number: int) -> _CallOfRanks:
        kernels = np.zeros(self.plan.ranks)
        nothing = np.empty(0, np.int64)
        found = [Flows(nothing, nothing, nothing, nothing)]
        calls = self.calls[number]
        if calls[0][0].kind == "compute":
            for call, each in calls:
                kernels[each.ranks] += _seconds_of(call.action, self.network)
            calls = []
        for kind, flows in _flows_of(self.plan.mesh, calls, self.cores):
            is_sent = np.broadcast_to(flows.nbytes, flows.targets.shape) > 0
            columns = [np.broadcast_to(column, is_sent.shape)[is_sent] for column in flows]
            found.append(Flows(*columns))
            if kind not in ("barrier", "copy"):
                self.messages += len(found[-1].nbytes)
        return _CallOfRanks(Flows(*map(np.concatenate, zip(*found, strict=True))), kernels)


class _CallOfRanks:
    """A call, and how far the ranks are with it.

    A rank goes from place to place: the begin of the call, each round in which it has messages, and
    the end. The places of all ranks are numbered one after another.
    """

    def __init__(self, flows: Flows, kernels: Floats) -> None:
        self.flows = flows
        self.kernels = kernels  # seconds of each rank before the call
        self.ranks = len(kernels)  # those that have not left it
        # The rounds that there are, numbered one after another.
        numbers = np.unique(flows.rounds[flows.rounds != AT_ONCE])
        end = len(numbers) + 1
        is_at_once = flows.rounds == AT_ONCE
        first_round = np.where(is_at_once, 0, np.searchsorted(numbers, flows.rounds) + 1)
        last_round = np.where(is_at_once, end, first_round)
        members = np.stack([flows.sources, flows.targets]) * (end + 1)
        begins = np.arange(self.ranks) * (end + 1)
        is_place = np.zeros(self.ranks * (end + 1), bool)
        for keys in (begins, members + first_round, members + last_round):
            is_place[keys] = True
        place_of = np.cumsum(is_place) - 1
        self.begins = place_of[begins]
        self.rank_at = np.flatnonzero(is_place) // (end + 1)
        places = len(self.rank_at)
        self.is_last = np.append(np.diff(self.rank_at) > 0, True)
        self.is_reached = np.zeros(places, bool)
        self.times = np.full(places, -np.inf)  # when the rank came, or the last message ended
        # Messages by the places where they begin, and the places where they end.
        begun_at = place_of[members + first_round].ravel()
        self.begun = np.argsort(begun_at, kind="stable") % max(len(flows.nbytes), 1)
        self.borders = np.append(0, np.cumsum(np.bincount(begun_at, minlength=places)))
        self.ended_at = place_of[members + last_round]
        self.awaited = np.bincount(self.ended_at.ravel(), minlength=places)
        self.starts = np.full(len(flows.nbytes), -np.inf)
        self.missing = np.full(len(flows.nbytes), 2)  # partners who have not come yet

    def come(self, places: Ints, times: Floats) -> Ints:
        """Let ranks come to places at these times; return the messages that can begin."""
        self.is_reached[places] = True
        self.times[places] = np.maximum(self.times[places], times)
        first, counts = self.borders[places], self.borders[places + 1] - self.borders[places]
        inside = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        messages = self.begun[np.repeat(first, counts) + inside]
        np.maximum.at(self.starts, messages, np.repeat(times, counts))
        np.subtract.at(self.missing, messages, 1)
        return _distinct(messages[self.missing[messages] == 0])

    def end(self, messages: Ints, ends: Floats) -> Ints:
        """Let messages end; return the places where ranks have waited for the last of them."""
        places = self.ended_at[:, messages].ravel()
        np.maximum.at(self.times, places, np.tile(ends, 2))
        np.subtract.at(self.awaited, places, 1)
        return _distinct(places[self.is_reached[places] & (self.awaited[places] == 0)])


def _distinct(numbers: Ints) -> Ints:
    """Return the different ones of many numbers, in order: several times as fast as np.unique."""
    numbers = np.sort(numbers)
    return numbers[np.diff(numbers, prepend=-1) > 0]


def _seconds_of(action: str, network: Network) -> float:
    name, amount = action.split()
    return float(amount) if name == "sleep" else float(amount) / network.speed


def _flows_of(
    mesh: Mesh, calls: Sequence[tuple[Call, RankClass]], cores: int
) -> Iterator[tuple[str, Flows]]:
    """Yield what ranks send in calls at the same time, and its kind; many classes at once."""
    in_rounds: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[Ranks]] = {}
    in_pairs: dict[tuple[str, tuple[int, ...], int], list[tuple[Call, RankClass]]] = {}
    for call, each in calls:
        if call.kind == "copy":
            yield call.kind, Flows(AT_ONCE, each.ranks, each.ranks, call.nbytes)
            continue
        axes = axes_of_group(mesh, call.group)
        if call.kind in ("exchange", "pairs"):
            alike = in_pairs.setdefault((call.kind, axes, len(each.ranks)), [])
            alike.append((call, each))
            continue
        for sizes, ranks in _with_sizes(mesh, axes, call, each):
            in_rounds.setdefault((call.kind, axes, sizes), []).append(ranks)
    for (kind, axes, sizes), several in in_rounds.items():
        for flows in _rounds_of(mesh, kind, axes, sizes, np.concatenate(several)):
            yield kind, flows
    for (kind, axes, _), alike in in_pairs.items():
        yield kind, _pairs_of(mesh, kind, axes, alike, cores)


def _with_sizes(
    mesh: Mesh, axes: Sequence[int], call: Call, each: RankClass
) -> Iterator[tuple[tuple[int, ...], Ranks]]:
    """Yield the sizes of the members of groups, and the ranks whose groups have them."""
    if len(set(call.sizes)) <= 1:
        yield tuple(call.sizes), each.ranks
        return
    members = np.arange(len(call.sizes))
    before = along(mesh, axes, each.comm.rank)
    place = along(mesh, axes, each.ranks)
    for one in np.unique(place):
        there = shifted(mesh, axes, members, before, one)
        yield tuple(sizes_there(call.sizes, there)), each.ranks[place == one]


def _rounds_of(
    mesh: Mesh, kind: str, axes: tuple[int, ...], sizes: tuple[int, ...], ranks: Ranks
) -> Iterator[Flows]:
    """Yield the messages of a barrier, a gather or a sum."""
    distances = np.array(members_along(mesh, axes))
    place = along(mesh, axes, ranks)
    first = ranks - distances[place]
    if kind == "barrier":
        for number, distance in enumerate(barrier_distances(len(distances))):
            target = (place + distance) % len(distances)
            yield Flows(number + 1, ranks, first + distances[target], BYTES_OF_A_SIGNAL)
        return
    rounds = rounds_of_gather if kind == "gather" else rounds_of_sums
    for number, one in enumerate(rounds(place, np.array(sizes))):
        yield Flows(number + 1, ranks, first + distances[one.target], one.sent)


def _pairs_of(
    mesh: Mesh,
    kind: str,
    axes: tuple[int, ...],
    calls: Sequence[tuple[Call, RankClass]],
    cores: int,
) -> Flows:
    """Return messages between pairs: of as many ranks of each class."""
    messages = [
        (number, other, part, nbytes)
        for number, (call, _) in enumerate(calls)
        for other, sizes in enumerate(call.sent)
        for part, nbytes in enumerate(sizes)
    ]
    of_class, others, parts, nbytes = np.array(messages, np.int64).reshape(-1, 4).T
    others, parts, nbytes = (column[:, np.newaxis] for column in (others, parts, nbytes))
    distances = np.array(members_along(mesh, axes))
    like = np.array([[each.comm.rank] for _, each in calls])
    before = along(mesh, axes, like)
    ranks = np.stack([each.ranks for _, each in calls])[of_class]
    place = along(mesh, axes, ranks)
    target = shifted(mesh, axes, others, before[of_class], place)
    targets = ranks - distances[place] + distances[target]
    if kind == "pairs":
        most = parts.max(initial=0) + 1
        return Flows((target - place) % len(distances) * most + parts, ranks, targets, nbytes)
    # Messages inside of a node go in rounds.
    members = like - distances[before] + distances
    on_node = (members // cores == like // cores).sum(axis=1, keepdims=True)[of_class]
    is_near = ranks // cores == targets // cores
    rounds = np.where(is_near, (target - place) % on_node, AT_ONCE)
    return Flows(rounds, ranks, targets, nbytes)
