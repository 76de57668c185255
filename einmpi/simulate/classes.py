"""Classes of ranks, which do the same with other partners: one rank of each class is lowered, and
the calls of the others follow from its calls by shifting digits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby, zip_longest
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.caches import bounded_cache
from einmpi.comm.base import Group, spread_over_nodes
from einmpi.comm.mpi import is_gathered_directly
from einmpi.planner.machine import Prices
from einmpi.planner.mesh import Extent, Mesh, length_of, members_along, sides
from einmpi.planner.plan import Plan
from einmpi.runtime.transfer import rounds
from einmpi.schedule.layout import PARTIAL, Cuts, axes_that_cut, ranks_along
from einmpi.schedule.lower import arrival_layout, lower
from einmpi.schedule.moves import middle_layout
from einmpi.schedule.steps import Step
from einmpi.simulate.dry_run import CallComm, Message, TraceComm, agreed_slots, dry_run
from einmpi.units import ATTOSECONDS

Ranks: TypeAlias = npt.NDArray[np.int64]

# ---- shifts --------------------------------------------------------------------------------------
#
# Let all blocks of an axis be equally long, in every label that it cuts. To add a number to its
# digit, modulo its length, permutes the indices of each label, and so the ranks. What rank r sends
# to rank s, the permuted r sends to the permuted s. So ranks that differ on such axes only do the
# same: they are a class. Example: 12 indices on 2·2·2 ranks. The first two axes cut it into blocks
# of 6 and of 3 indices; the third would make blocks of 2 and 1. There are two classes of 4 ranks.
#
# Axes that slice the same digit of a label are shifted together.


@dataclass
class Shifts:
    """Which digits of ranks can be shifted: those of all axes but the uneven ones."""

    mesh: Mesh
    # Axes on whose digits it depends with whom a rank has to do, or only how many bytes there are.
    uneven: set[int] = field(default_factory=set)
    unequal: set[int] = field(default_factory=set)
    links: set[tuple[int, int]] = field(default_factory=set)  # axes that slice the same digit

    def together(self) -> list[tuple[int, ...]]:
        """Return the axes that are shifted together, the first axis of each group first."""
        groups: dict[int, tuple[int, ...]] = {
            axis: (axis,) for axis in range(len(self.mesh.factors))
        }
        for one, other in sorted(self.links):
            if groups[one] != groups[other]:
                joined = tuple(sorted(groups[one] + groups[other]))
                groups.update(dict.fromkeys(joined, joined))
        return sorted(set(groups.values()))

    def cut(self, side: Extent, axes: Sequence[int]) -> set[int]:
        """Take note of axes that cut a label; return those whose blocks are not equally long."""
        places = self.mesh.places(side)
        unequal = {axis for axis in axes if length_of(side) % prod(places[axis])}
        self.unequal |= unequal
        for one, other in combinations(axes, 2):
            fewer, more = sorted([prod(places[one]), prod(places[other])])
            if places[one] == places[other]:
                self.links.add((one, other))
            elif fewer == more or more % fewer:
                self.uneven.update((one, other))
        return unequal


def shifts_of(plan: Plan) -> Shifts:
    """Return which digits of ranks can be shifted."""
    found = Shifts(plan.mesh)
    graph = plan.graph
    if any(
        vertex.has_steps for vertex in graph.computed
    ):  # pairs of ranks are not known as those of one transfer when it is repeated
        found.uneven.update(range(len(plan.mesh.factors)))
    for vertex in graph.vertices:
        _look_at_moves(found, plan, vertex.name)
    for vertex in graph.computed:
        state = plan.states[vertex.name]
        labels = vertex.computed_einsum.labels
        for label, side in zip(labels, plan.sides(vertex.name), strict=True):
            found.cut(side, [axis for axis, cut in enumerate(state) if cut == label])
        for name in vertex.inputs:
            if plan.needed(vertex, name) is not None:
                # A halo comes from the blocks beside a block, not from those with certain digits.
                for cuts in (state, *_cuts_of(plan, name)):
                    found.uneven.update(axis for axis, cut in enumerate(cuts) if cut is not None)
    return found


def _cuts_of(plan: Plan, name: str) -> list[Cuts]:
    """Return what each axis cuts of a tensor: first as it is loaded or computed, then later."""
    graph = plan.graph
    readers = [graph[user] for user in graph.consumers[name]]
    found: list[Cuts] = []
    if name in plan.states:
        partial = graph[name].partial_labels
        cuts = zip(plan.states[name], plan.made(name), strict=True)
        found.append(tuple([PARTIAL if label in partial else cut for label, cut in cuts]))
    elif readers:
        found.append(plan.loaded(name))
    if name in plan.layouts:
        found.append(plan.layouts[name])
    for user in readers:
        for operand, read in enumerate(user.inputs):
            if read == name and plan.needed(user, name) is None:
                found.append(plan.wanted(user.name, operand))
    return list(dict.fromkeys(found))


def _look_at_moves(found: Shifts, plan: Plan, name: str) -> None:
    """Take note of the messages that bring a tensor to its layouts."""
    mesh = plan.mesh
    bound = plan.graph[name].bound or (1,)
    orders = plan.orders_of(name)
    all_cuts = _cuts_of(plan, name)
    layouts = []  # between others, with the cuts before or after them
    if name not in plan.states and all_cuts:
        layouts.append((arrival_layout(plan, name), all_cuts[0]))
    for source in all_cuts:
        for target in all_cuts:
            if source != target and PARTIAL not in target:
                middle = middle_layout(mesh, bound, source, target, orders)
                layouts += [(middle, source), (middle, target)]
    for dimension, side in enumerate(sides(bound, orders)):
        cutting: set[int] = set()
        for cuts in (*all_cuts, *(middle.cuts for middle, _ in layouts)):
            cutting.update(axes_that_cut(cuts, dimension))
        unequal = found.cut(side, sorted(cutting))
        for middle, other in layouts:
            cut_by = axes_that_cut(middle.cuts, dimension)
            left = length_of(side) // ranks_along(mesh, cut_by)
            pieces = 1
            for axis, split in middle.splits:
                if split == dimension:
                    pieces *= mesh.factors[axis]
                    if left % pieces or unequal.intersection(cut_by):
                        found.unequal.add(axis)
                    if not set(axes_that_cut(other, dimension)) <= set(cut_by):
                        found.uneven.add(axis)


def ranks_of_classes(shifts: Shifts, most: int | None) -> tuple[list[Ranks], bool]:
    """Return the ranks of each class, and whether no classes were taken together.

    The first rank of a class has the digit 0 wherever it can be shifted to.
    """
    mesh = shifts.mesh
    groups = shifts.together()
    # Axes whose digits tell classes apart, the most important ones first.
    telling = [axis for group in groups for axis in group[1:]]
    for kind in (shifts.uneven, shifts.unequal):
        telling += [axis for group in groups if kind.intersection(group) for axis in group]
    apart: list[int] = []
    for axis in dict.fromkeys(telling):
        if most is None or ranks_along(mesh, [*apart, axis]) <= most:
            apart.append(axis)
    shifted_together = []
    for group in groups:
        if group[0] not in apart:
            shifted_together.append(group)
        shifted_together += [(axis,) for axis in group[1:] if axis not in apart]
    found = []
    for first in members_along(mesh, tuple(sorted(apart))):
        ranks = np.array([first])
        for axes in shifted_together:
            amounts = range(mesh.factors[axes[0]])
            ranks = np.concatenate([_shifted_ranks(mesh, axes, ranks, by) for by in amounts])
        found.append(ranks)
    return found, len(apart) == len(set(telling))


def _shifted_ranks(mesh: Mesh, axes: Sequence[int], ranks: Ranks, by: int) -> Ranks:
    """Add a number to the digits of ranks on some axes."""
    for axis in axes:
        stride = prod(mesh.factors[axis + 1 :])
        digit = ranks // stride % mesh.factors[axis]
        ranks = ranks + ((digit + by) % mesh.factors[axis] - digit) * stride
    return ranks


# ---- calls ---------------------------------------------------------------------------------------


class Call(NamedTuple):
    """What a rank does next: it computes, or takes part in what a group does together."""

    kind: str  # compute, copy, barrier, gather, sums, exchange or pairs
    group: Group = ()
    sizes: Sequence[int] = ()  # bytes of the piece of each member
    # Bytes of the messages to each member and from each, one after another.
    sent: Sequence[Sequence[int]] = ()
    received: Sequence[Sequence[int]] = ()
    nbytes: int = 0  # to copy
    action: str = ""  # of a trace, for kernels
    order: tuple[int, int] = (0, 0)  # the same for what all ranks do at the same time


_STRIDE = 40_503  # chooses ranks with all kinds of digits: a prime, near to 2**16 / golden ratio
_AFTER_ALL_CALLS = 2**62  # of a transfer, kernels follow


class ClassCalls(CallComm):
    """Notes the calls of a rank, which stand for those of its class."""

    def __init__(self, rank: int, nodes: tuple[int, ...]) -> None:
        super().__init__(rank, nodes)
        self.noted: list[Call] = []
        self.groups: list[Group] = []  # of the last transfer, or of all in steps that are repeated
        self.steps: list[tuple[int, Step]] = []  # with the number of calls before each of them
        self.transfers = 0
        self.in_transfer = 0  # calls of the last transfer
        self.operations = 0

    def begin(self, step: Step) -> None:
        """Take note of the step to which the next calls belong."""
        self.steps.append((len(self.noted), step))
        groups = [inner.group for inner, _ in step.innermost() if inner.transfer is not None]
        if groups:
            self.groups = sorted(groups, key=len)
        if step.transfer is not None:
            self.transfers += 1
            self.in_transfer = 0

    def _note(self, call: Call) -> None:
        self.noted.append(call._replace(order=(self.transfers, self.in_transfer)))
        self.in_transfer += 1

    def add(self, action: str) -> None:
        """Note kernels."""
        order = self.transfers, _AFTER_ALL_CALLS
        self.noted.append(Call("compute", action=action, order=order))

    def exchange(self, group: Group, sent: Sequence[int], received: Sequence[int]) -> None:
        both = [_lists(sizes) for sizes in (sent, received)]
        for lists in both:
            lists[group.index(self.rank)] = _NO_MESSAGE
        self._note(Call("exchange", group, sent=both[0], received=both[1]))

    def gather(self, group: Group, sizes: Sequence[int]) -> None:
        if is_gathered_directly(group, sum(sizes)):
            own = sizes[group.index(self.rank)]
            self.exchange(group, [own] * len(group), sizes)
        else:
            self._note(Call("gather", group, sizes))

    def scatter_sums(self, group: Group, sizes: Sequence[int]) -> None:
        self._note(Call("sums", group, sizes))

    def barrier_among(self, group: Group) -> None:
        self._note(Call("barrier", group))

    def copy_shared(self, nbytes: int) -> None:
        self._note(Call("copy", nbytes=nbytes))

    def send_round(self, received: Message | None, sent: Message | None, ring: Group = ()) -> None:
        """Add the messages to those of the pairs before, whose members are the same."""
        partners = {message[0] for message in (received, sent) if message is not None}
        group = next(group for group in self.groups if partners.issubset(group))
        last = self.noted[-1] if self.noted else None
        is_first = last is None or last.kind != "pairs" or last.order[0] != self.transfers
        if is_first or len(self.groups) > 1:
            nothing: list[list[int]] = [[] for _ in group]
            last = Call("pairs", group, sent=nothing, received=[*map(list, nothing)])
            self._note(last)
        assert last is not None
        for message, lists in ((sent, last.sent), (received, last.received)):
            if message is not None:
                sizes = lists[group.index(message[0])]
                assert isinstance(sizes, list)
                sizes.append(message[1])


_NO_MESSAGE: Sequence[int] = ()


def _lists(sizes: Sequence[int]) -> list[Sequence[int]]:
    return [[size] if size else _NO_MESSAGE for size in sizes]


class KernelTimes:
    """Writes kernels to a trace: in seconds of a measured machine, or in operations."""

    def __init__(self, plan: Plan, prices: Prices | None) -> None:
        self.plan = plan
        self.prices = prices
        self.times: dict[str, int] = {}  # attoseconds of an operation, by vertex

    def add(self, step: Step, comm: ClassCalls) -> int:
        """Add the kernels of a step; return their operations."""
        operations = 0
        attoseconds = 0
        for kernel, times in step.work:
            count = times * kernel.einsum.operations()
            operations += count
            if self.prices is not None:
                attoseconds += count * self._time_of(kernel.tensor)
        if attoseconds:
            comm.add(f"sleep {attoseconds / ATTOSECONDS:.9g}")
        elif operations and self.prices is None:
            comm.add(f"compute {operations}")
        return operations

    def _time_of(self, name: str) -> int:
        assert self.prices is not None
        if name not in self.times:
            self.times[name] = self.prices.operation(self.plan.graph[name])
        return self.times[name]


@dataclass(frozen=True)
class RankClass:
    """Ranks that do the same as the first of them, each with its own partners."""

    ranks: Ranks
    comm: ClassCalls


def classes_of(
    plan: Plan,
    prices: Prices | None,
    shared: bool,
    most: int | None = None,
    apart: bool = False,
) -> Iterator[RankClass]:
    """Lower one rank of each class, one after another.

    Kernels take the time that a measured machine needs, or are written as operations without one.
    `shared` says whether the ranks of a node share memory. With more than `most` classes, several
    are taken for one: some rank of them stands for all. `apart`: each rank is a class of its own.
    """
    mesh = plan.mesh
    nodes = spread_over_nodes(plan.ranks, plan.nodes)
    shifts = shifts_of(plan)
    if apart:
        shifts.uneven.update(range(len(mesh.factors)))
    members, is_exact = ranks_of_classes(shifts, most)
    chosen = []
    for place, ranks in enumerate(members):
        chosen.append(int(ranks[0 if is_exact else place * _STRIDE % len(ranks)]))
    idle = range(mesh.ranks, plan.ranks)
    chosen += idle
    members += [np.array([rank]) for rank in idle]
    kernel_times = KernelTimes(plan, prices)
    waiting = iter(members)
    for _, of_node in groupby(chosen, key=nodes.__getitem__):
        schedules = [lower(plan, rank) for rank in of_node]
        slots_of_ranks = agreed_slots(schedules, nodes, shared)
        for schedule, slots in zip(schedules, slots_of_ranks, strict=True):
            comm = ClassCalls(schedule.rank, nodes)

            def on_step(step: Step, comm: ClassCalls = comm) -> None:
                comm.begin(step)
                comm.operations += kernel_times.add(step, comm)

            dry_run(schedule, slots, comm, on_step)
            yield RankClass(next(waiting), comm)


# ---- the calls of the others ---------------------------------------------------------------------


def traces_of(plan: Plan, ranks: RankClass) -> Iterator[TraceComm]:
    """Yield the trace of each rank of a class."""
    for rank in ranks.ranks.tolist():
        yield _trace(plan.mesh, ranks.comm, TraceComm(rank, ranks.comm.nodes))


def _trace(mesh: Mesh, like: ClassCalls, trace: TraceComm) -> TraceComm:
    """Write the trace of a rank that does the same as another one."""
    trace.received = like.received
    trace.received_shared = like.received_shared
    trace.add("init")
    steps = deque(like.steps)
    for number, call in enumerate(like.noted):
        while steps and steps[0][0] == number:
            trace.steps.append((len(trace.lines), steps.popleft()[1]))
        if call.kind == "compute":
            trace.add(call.action)
            continue
        if call.kind == "copy":
            trace.copy_shared(call.nbytes)
            continue
        axes = axes_of_group(mesh, call.group)
        before = along(mesh, axes, like.rank)
        place = along(mesh, axes, trace.rank)
        distances = members_along(mesh, axes)
        group = tuple([trace.rank - distances[place] + distance for distance in distances])
        # Who is here at some place, is there at the place with the shifted digits.
        there = shifted(mesh, axes, np.arange(len(group)), before, place).tolist()
        if call.kind == "barrier":
            trace.barrier_among(group)
        elif call.kind == "gather":
            trace.gather(group, sizes_there(call.sizes, there))
        elif call.kind == "sums":
            trace.scatter_sums(group, sizes_there(call.sizes, there))
        else:
            sent = {there[other]: call.sent[other] for other in range(len(group))}
            received = {there[other]: call.received[other] for other in range(len(group))}
            if call.kind == "exchange":
                all_sent = [sum(sent[other]) for other in range(len(group))]
                all_received = [sum(received[other]) for other in range(len(group))]
                trace.exchange(group, all_sent, all_received)
            else:
                _send_pairs(trace, group, place, sent, received)
    trace.steps += [(len(trace.lines), step) for _, step in steps]
    trace.add("finalize")
    return trace


def sizes_there(sizes: Sequence[int], there: Sequence[int]) -> list[int]:
    """Return the sizes of pieces by places, given the place to which each piece is shifted."""
    found = [0] * len(there)
    for place, size in zip(there, sizes, strict=True):
        found[place] = size
    return found


def _send_pairs(
    trace: TraceComm,
    group: Group,
    place: int,
    sent: Mapping[int, Sequence[int]],
    received: Mapping[int, Sequence[int]],
) -> None:
    for to, source in rounds(group, place):
        for arriving, leaving in zip_longest(received[source], sent[to]):
            trace.send_round(
                None if arriving is None else (group[source], arriving),
                None if leaving is None else (group[to], leaving),
            )


@bounded_cache(4096)
def axes_of_group(mesh: Mesh, group: Group) -> tuple[int, ...]:
    """Return the axes on which the members of a group differ."""
    pairs = enumerate(zip(mesh.digits(group[0]), mesh.digits(group[-1]), strict=True))
    axes = tuple([axis for axis, (first, last) in pairs if first != last])
    distances = members_along(mesh, axes)
    assert group == tuple([group[0] + distance for distance in distances]), group
    return axes


def along(mesh: Mesh, axes: Sequence[int], ranks: Ranks | int) -> Any:
    """Return the places of ranks in their groups along some axes."""
    place: Any = 0
    for axis in axes:
        factor = mesh.factors[axis]
        place = place * factor + ranks // prod(mesh.factors[axis + 1 :]) % factor
    return place


def shifted(mesh: Mesh, axes: Sequence[int], place: Any, before: Any, after: Any) -> Any:
    """Return where a place of a group is after the shift that turns `before` into `after`."""
    found: Any = 0
    stride = 1
    for axis in reversed(axes):
        factor = mesh.factors[axis]
        digit = place // stride - before // stride + after // stride
        found = found + digit % factor * stride
        stride *= factor
    return found
