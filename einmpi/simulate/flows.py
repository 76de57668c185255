"""How long messages take on a network: flows that share its links, as in SimGrid, which cannot do
it for as many. A flow waits for the latencies of its links, then gets its share of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import prod
from typing import NamedTuple, TypeAlias
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt

from einmpi.simulate.cluster import CONFIG

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

HEADER = 16  # bytes of a message besides its elements, as in SMPI
_WINDOW = 4_194_304  # bytes of a flow that may be under way: SimGrid's network/TCP-gamma
NO_LINK = 0  # its place in routes that are shorter than others; it is never full
# Rates are shared out anew when a flow begins or ends. Of many flows, what happens within this part
# of the time that they take is taken together.
_MANY_FLOWS = 1000
_TOGETHER = 0.05
_ROUNDING = 1e-9  # the same for few flows
_MOST_PASSES = 16  # of the search for full links; after it, flows get what is left

# ---- platform ------------------------------------------------------------------------------------


class Network(NamedTuple):
    """A platform that is one cluster, as numbers."""

    topology: str
    parameters: tuple[tuple[int, ...], ...]
    nodes: int
    # All of these are more than 0.
    speed: float  # operations per second of a core
    bandwidth: float  # bytes per second of a link
    latency: float  # of a link
    bandwidth_inside: float
    latency_inside: float


_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "ps": 1e-12}


def read_network(text: str) -> Network | None:
    """Return the network of a platform file; None if it is no cluster whose routes are known."""
    root = ElementTree.fromstring(text)
    settings = {each.get("id"): each.get("value") for each in root.iterfind("config/prop")}
    clusters = list(root.iter("cluster"))
    if len(clusters) != 1 or next(root.iter("host"), None) is not None or settings != CONFIG:
        return None
    given = clusters[0].attrib
    parameters = []
    for part in filter(None, given.get("topo_parameters", "").split(";")):
        parameters.append(tuple(map(int, part.split(","))))
    found = Network(
        given.get("topology", "FLAT"),
        tuple(parameters),
        _nodes(given.get("radical", "")),
        _quantity(given.get("speed", ""), _UNITS, "f"),
        _quantity(given.get("bw", ""), _UNITS, "Bps"),
        _quantity(given.get("lat", ""), _SECONDS, ""),
        _quantity(given.get("loopback_bw", ""), _UNITS, "Bps"),
        _quantity(given.get("loopback_lat", ""), _SECONDS, ""),
    )
    is_known = found.topology in _ROUTES and given.get("sharing_policy") in (None, "SPLITDUPLEX")
    if found.topology == "FAT_TREE":
        is_known = is_known and len(parameters) == 4 and parameters[0] == (2,)
        is_known = is_known and parameters[2][0] == 1 == prod(parameters[-1])
    return found if is_known and min(found[3:]) > 0 else None


def _nodes(radical: str) -> int:
    count = 0
    for part in radical.split(","):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return count


def _quantity(text: str, units: Mapping[str, float], end: str) -> float:
    """Return a number with a unit; 0 if it is something else."""
    found = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?)([a-zA-Z]*)", text.strip())
    if found is None:
        return 0.0
    return float(found[1]) * units.get(found[2].removesuffix(end), 0.0)


# ---- routes --------------------------------------------------------------------------------------
#
# The links from nodes to others, as SimGrid chooses them. A link of each direction has a number.

Column: TypeAlias = tuple[Ints, int]  # a link of each flow, or -1; how many in parallel it is


class Routes(NamedTuple):
    """The links that flows pass: arrays [flow, link]."""

    links: Ints  # NO_LINK where a flow has fewer than others
    capacity: Floats  # in bytes per second


def routes_between(network: Network, sources: Ints, targets: Ints) -> Routes:
    """Return the links from nodes to others."""
    columns = _ROUTES[network.topology](network, sources, targets)
    links = np.stack([column for column, _ in columns], axis=1) + 1
    parallel = np.array([parallel for _, parallel in columns])
    return Routes(links, np.where(links == NO_LINK, np.inf, network.bandwidth * parallel))


def _flat(network: Network, sources: Ints, targets: Ints) -> list[Column]:
    return [(sources, 1), (network.nodes + targets, 1)]


def _fat_tree(network: Network, sources: Ints, targets: Ints) -> list[Column]:
    """Up to the root that the target chooses, if the nodes are at different switches."""
    (_, (down, switches), (_, roots), _) = network.parameters
    nodes = down * switches
    source_switch, target_switch = sources // down, targets // down
    root = targets % roots
    is_far = source_switch != target_switch
    up = np.where(is_far, 2 * nodes + source_switch * roots + root, -1)
    below = 2 * nodes + switches * roots
    last = np.where(is_far, below + target_switch * roots + root, -1)
    return [(sources, 1), (up, 1), (last, 1), (nodes + targets, 1)]


def _torus(network: Network, sources: Ints, targets: Ints) -> list[Column]:
    """One ring after the other, the shorter way round."""
    (lengths,) = network.parameters
    columns = []
    here = sources.copy()
    stride = 1
    for dimension, length in enumerate(lengths):
        start = sources // stride % length
        end = targets // stride % length
        rises = ((end > start) & (end <= start + length // 2)) | (
            (start > length // 2) & ((start + length // 2) % length >= end)
        )
        for _ in range(length):
            place = here // stride % length
            moves = place != end
            if not moves.any():
                break
            following = np.where(rises, (place + 1) % length, (place - 1) % length)
            there = here + np.where(moves, following - place, 0) * stride
            owner = np.where(rises, here, there)  # a link belongs to the node before it
            number = (owner * len(lengths) + dimension) * 2 + rises
            columns.append((np.where(moves, number, -1), 1))
            here = there
        stride *= length
    return columns


def _dragonfly(network: Network, sources: Ints, targets: Ints) -> list[Column]:
    """To the switch with the link to the target's group, over it, and to the target's switch."""
    (groups, global_links), (chassis, of_chassis), (blades, of_blades), (at_switch,) = (
        network.parameters
    )
    of_group = chassis * blades
    here, last = sources // at_switch, targets // at_switch  # switches
    columns = [(sources, 1)]

    def hop(is_taken: npt.NDArray[np.bool_], there: Ints, parallel: int) -> None:
        nonlocal here
        number = 2 * network.nodes + here * of_group + there % of_group
        columns.append((np.where(is_taken, number, -1), parallel))
        here = np.where(is_taken, there, here)

    group, last_group = here // of_group, last // of_group
    leaves = group != last_group
    hop(leaves & (here % blades != last_group), here // blades * blades + last_group, of_blades)
    hop(leaves & (here % of_group >= blades), group * of_group + here % blades, of_chassis)
    between = 2 * network.nodes + groups * of_group**2 + group * groups + last_group
    columns.append((np.where(leaves, between, -1), global_links))
    here = np.where(leaves, last_group * of_group + group, here)
    hop(here % blades != last % blades, here // blades * blades + last % blades, of_blades)
    hop(here != last, last, of_chassis)
    return [*columns, (network.nodes + targets, 1)]


_ROUTES: dict[str, Callable[[Network, Ints, Ints], list[Column]]] = {
    "FLAT": _flat,
    "FAT_TREE": _fat_tree,
    "TORUS": _torus,
    "DRAGONFLY": _dragonfly,
}

# ---- sharing of links ----------------------------------------------------------------------------


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
