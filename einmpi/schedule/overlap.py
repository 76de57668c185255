"""Transfers in the background: they begin when their source is there, and a step waits for them
when it needs the result. Kernels between them are done in parts where that lets them begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TypeAlias

from einmpi.planner.chains import shared_rows
from einmpi.schedule.compute import Compute, Kernel, fused, members_of
from einmpi.schedule.cuts import label_of_part
from einmpi.schedule.memory import bytes_needed
from einmpi.schedule.regions import Region, Slot, intersect, names_of
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Await, Free, Step, Transfer, numbered
from einmpi.schedule.transfers import Part

# The schedule of a rank for Z[i,k] = sum(A[i,j] * B[j,k]) where half of B comes from another node:
#
#     exchange  B → B at [:, 0:64]        in the background, and so is the next one
#     exchange  B → B at [:, 64:128]
#     await     B at [:, 0:64]
#     kernel    Z ← … for k = 0:64        while the second part of B travels
#     await     B at [:, 64:128]
#     kernel    Z ← … for k = 64:128
#
# Transfers are done in the order of the schedule, one after another, and this order is the same on
# all ranks. What a rank computes meanwhile may differ: where its memory is short, it waits.

Route: TypeAlias = list[Transfer]  # the transfers of one tensor that have the same parts


def with_overlap(schedule: Schedule, limit: int) -> Schedule:
    """Return the schedule with its transfers in parts, in the background where memory allows it.

    `limit` is the memory of a rank, in bytes, as it was planned.
    """
    if not any(step.cut for _, step in numbered(schedule.steps, Transfer)):
        return schedule
    waiting: set[int] = set()  # the numbers of routes that are not done in the background
    while True:
        arranged = _Arrangement(schedule, waiting)
        arranged.arrange()
        excessive = _routes_beyond(arranged, limit)
        if not excessive:
            return replace(schedule, steps=tuple(arranged.steps))
        waiting |= excessive


def _routes_beyond(arranged: _Arrangement, limit: int) -> set[int]:
    """Return the routes that are under way, or whose slots are kept, where memory is exceeded."""
    found: set[int] = set()
    needed = bytes_needed(arranged.steps)
    for nbytes, routes in zip(needed, arranged.routes_at, strict=True):
        if nbytes > limit:
            found |= routes
    return found


@dataclass(frozen=True)
class _UnderWay:
    """A transfer in the background."""

    step: Transfer
    route: int


class _Arrangement:
    """The steps of a schedule in a new order, with transfers in the background."""

    def __init__(self, schedule: Schedule, waiting: set[int]) -> None:
        self.schedule = schedule
        self.waiting = waiting
        self.steps: list[Step] = []
        self.routes_at: list[frozenset[int]] = []  # for each step, the routes that it is early for
        self.under_way: list[_UnderWay] = []
        # Frees that wait for a transfer which still uses the slot.
        self.postponed: list[tuple[Step, Transfer, int]] = []
        self.routes = 0  # so far
        self.reused: set[str] = set()  # slots that take the memory of an input
        for step in schedule.steps:
            self.reused.update(names_of(step.reuses))

    def arrange(self) -> None:
        """Go through the steps once."""
        steps = self.schedule.steps
        routes = _find_routes(steps)
        computes = dict(numbered(steps, Compute))
        number = 0
        while number < len(steps):
            step = steps[number]
            for load, route in routes.before_kernel.get(number, []):
                self.add(load)
                self.add_route(route)
            if number in routes.in_place:
                self.add_route(routes.in_place[number])
            elif number in computes:
                frees = _frees_after(steps, number)
                self.add_kernel(computes[number], routes.after_kernel.get(number, []), frees)
                number += len(frees)
            elif number not in routes.moved:
                self.add(step)
            number += 1
        if self.under_way:
            self.wait_for(self.under_way[-1].step)

    # ---- steps ----------------------------------------------------------------------------------

    def add(self, step: Step) -> None:
        """Add a step that is not in the background, after what it has to wait for."""
        last = None
        for each in self.under_way:
            if _is_in_conflict(step, each.step):
                last = each
        if last is not None and _only_frees(step):
            self.postponed.append((step, last.step, last.route))
            return
        if last is not None:
            self.wait_for(last.step)
        self._append(step)

    def add_transfer(self, step: Transfer, route: int) -> None:
        """Add a transfer, in the background unless its route waits."""
        in_background = route not in self.waiting and step.moves.members.count > 1
        if in_background and (step.part is not None or self.under_way):
            own = replace(step, background=True)
            self.under_way.append(_UnderWay(own, route))
            self._append(own)
            return
        if self.under_way:  # transfers stay in order
            self.wait_for(self.under_way[-1].step)
        self._append(step)

    def wait_for(self, transfer: Transfer) -> None:
        """Add a step that waits for a transfer; then free what nothing uses any more."""
        done = [self.under_way.pop(0).step]
        while done[-1] is not transfer:
            done.append(self.under_way.pop(0).step)
        self._append(Await(transfer))
        later = []
        for free, awaited, route in self.postponed:
            if any(awaited is each for each in done):
                self._append(free)
            else:
                later.append((free, awaited, route))
        self.postponed = later

    def _append(self, step: Step) -> None:
        self.steps.append(step)
        routes = {each.route for each in self.under_way}
        routes.update(route for _, _, route in self.postponed)
        self.routes_at.append(frozenset(routes))

    # ---- routes and kernels ---------------------------------------------------------------------

    def add_route(self, route: Route) -> None:
        """Add transfers part by part."""
        number = self.routes
        self.routes += 1
        for part in _by_parts(route):
            for step in part:
                self.add_transfer(step, number)

    def add_kernel(self, step: Compute, routes: Sequence[Route], frees: Sequence[Step]) -> None:
        """Add a step that computes, what is freed after it, and the transfers that follow it.

        The first of these routes begins when a part of the result is there.
        """
        early: list[Route] = []  # the parts of the first route that are still to be sent
        if routes and self.routes not in self.waiting:
            early = _by_parts(routes[0])
        parts: list[Compute] = []
        if not any(slot.name in self.reused for slot in step.writes):
            parts = in_parts(step, *self._parts_of(step, early))
        if not parts:
            self.add(step)
        for part in parts:
            self.add(part)
            while early and _is_computed(early[0][0], part):
                for transfer in early.pop(0):
                    self.add_transfer(transfer, self.routes)
        if parts:
            frees = [*map(Free, step.frees), *frees]
        for free in frees:
            self.add(free)
        for transfers in early:
            for transfer in transfers:
                self.add_transfer(transfer, self.routes)
        if routes and self.routes not in self.waiting:
            self.routes += 1
            routes = routes[1:]
        for route in routes:
            self.add_route(route)

    def _parts_of(self, step: Compute, sent: Sequence[Route]) -> tuple[str, list[Part]]:
        """Return a label of the first kernel's output and its parts; none if it stays whole.

        The parts are those of the operand that arrives last, or of the result that is sent.
        """
        kernel = step.kernels[0]
        for each in reversed(self.under_way):
            part = each.step.part
            slot = each.step.target
            if part is None or slot not in kernel.operands:
                continue
            label = label_of_part(kernel, slot, part.dimension)
            if label is None:
                break
            parts = self._parts_arriving(slot, each.route)
            if parts[0].start == 0:
                return label, parts
            break
        parts_sent: list[Part] = []
        for transfers in sent:
            part = transfers[0].part
            if part is not None:
                parts_sent.append(part)
        if not parts_sent:
            return "", []
        last = step.kernels[-1]
        for label in kernel.einsum.output:
            labels = _row_along(step, label)
            if labels is not None and last.einsum.output[parts_sent[0].dimension] == labels[-1]:
                return label, parts_sent
        return "", []

    def _parts_arriving(self, slot: Slot, route: int) -> list[Part]:
        """Return the parts of a slot that transfers of a route still bring, without repetition."""
        found: list[Part] = []
        for each in self.under_way:
            if each.route != route or slot not in each.step.writes:
                continue
            part = each.step.part
            if part is not None and part not in found:
                found.append(part)
        return found


def in_parts(step: Compute, label: str, parts: Sequence[Part]) -> list[Compute]:
    """Divide kernels along a label of the first one's output, if all of them have this label."""
    labels = _row_along(step, label) if parts else None
    if labels is None or any(part.extent != _extent(step, label) for part in parts):
        return []
    rows, block = step.tiles.rows, step.tiles.block
    if labels not in rows:
        if step.tiles.kind == "cache":
            return []  # it is computed along its own rows
        rows, block = (*rows, labels), (*block, 0)
    along = rows.index(labels)
    everything = [(0, _extent(step, row[0])) for row in rows]
    found = []
    for part in parts:
        bounds = (*everything[:along], (part.start, part.stop), *everything[along + 1 :])
        sizes = (*block[:along], block[along] or part.stop - part.start, *block[along + 1 :])
        if step.tiles.kind == "memory":
            found.append(fused(step.kernels, step.inner, rows, sizes, bounds))
        else:
            tiles = replace(step.tiles, rows=rows, block=sizes, bounds=bounds)
            found.append(Compute(step.kernels, tiles, step.inner))
    return found


def _extent(step: Compute, label: str) -> int:
    """Return the extent of a label of the first kernel."""
    return step.kernels[0].einsum.extent[label]


def _row_along(step: Compute, label: str) -> tuple[str, ...] | None:
    """Return what a label of the first kernel's output is in each kernel.

    None if a kernel does not have it in its output, or cannot be computed for some of its indices.
    """
    if step.tiles.kind in ("scattered", "slow") or step.halos or step.begins:
        return None
    for labels in shared_rows(members_of(step.kernels)):
        if labels[0] == label and all(map(_can_be_cut, step.kernels, labels)):
            return labels
    return None


def _can_be_cut(kernel: Kernel, label: str) -> bool:
    """Return whether a kernel can be computed for some indices of a label of its output only."""
    output = kernel.einsum.output
    if label not in output:
        return False
    return label_of_part(kernel, kernel.target, output.index(label)) is not None


def _is_computed(transfer: Transfer, computed: Compute) -> bool:
    """Return whether a transfer's part is complete after a part of what computes it."""
    part = transfer.part
    if part is None:
        return False
    label = computed.kernels[-1].einsum.output[part.dimension]
    for labels, (_, stop) in zip(computed.tiles.rows, computed.tiles.bounds, strict=True):
        if labels[-1] == label:
            return part.stop <= stop
    return False


def _is_in_conflict(step: Step, transfer: Transfer) -> bool:
    """Return whether a step has to wait until a transfer in the background is done."""
    if step.kind == "store":
        return False  # it only says where the output is
    if step.transfer is not None:
        return True  # transfers stay in order
    moving = {*transfer.reads, *transfer.writes}
    given_up = [*step.frees, *step.reuses]
    for reuse in step.reuse_steps:
        given_up += [reuse.source, *reuse.nan_checked]
    if moving.intersection(given_up):
        return True
    touched = [slot for slot in step.reads if slot in transfer.writes]
    touched += [slot for slot in step.writes if slot in moving]
    return any(_have_common(step.region_of(slot), transfer.region_of(slot)) for slot in touched)


def _have_common(one: Region, two: Region) -> bool:
    """Return whether two regions of a slot have elements in common."""
    return all(intersect(runs, others) for runs, others in zip(one, two, strict=True))


# ---- routes of transfers ------------------------------------------------------------------------


@dataclass
class _Routes:
    """All routes of a schedule, by the number of the step at which each is added."""

    in_place: dict[int, Route] = field(default_factory=dict)  # by their first step
    after_kernel: dict[int, list[Route]] = field(default_factory=dict)  # that has made the source
    # By the last step that computes before them; each with the Load of its source.
    before_kernel: dict[int, list[tuple[Step, Route]]] = field(default_factory=dict)
    moved: set[int] = field(default_factory=set)  # the numbers of all these transfers and loads


def _find_routes(steps: Sequence[Step]) -> _Routes:
    found = _Routes()
    writers: dict[str, int] = {}  # of each slot, the number of the last step that computes it
    loads: dict[str, int] = {}  # of each slot, since something was computed
    latest: int | None = None  # the last step that computes
    route: Route = []
    for number, step in enumerate(steps):
        if isinstance(step, Transfer):
            found.moved.add(number)
            if route and _continues(step, route[-1]):
                route.append(step)
                continue
            route = [step]
            source = step.source.name
            cut = step.cut
            if cut is not None and cut.after_kernel and source in writers:
                found.after_kernel.setdefault(writers[source], []).append(route)
            elif cut is not None and cut.before_kernel and latest is not None and source in loads:
                load = steps[loads[source]]
                found.before_kernel.setdefault(latest, []).append((load, route))
                found.moved.add(loads[source])
            else:
                found.in_place[number] = route
        elif step.kind == "load":
            for slot in step.writes:
                loads[slot.name] = number
        elif step.kernels:
            latest = number
            loads.clear()
            for slot in step.writes:
                writers[slot.name] = number
        elif step.computes:  # again and again: no transfer begins inside of it
            latest = None
            loads.clear()
            for slot in step.writes:
                writers.pop(slot.name, None)
        if step.transfer is None and not step.manages_memory:
            route = []
    return found


def _continues(step: Transfer, previous: Transfer) -> bool:
    """Return whether a transfer has the parts of the one before it, and moves its result on."""
    has_same_parts = step.cut is not None and step.cut is previous.cut
    return has_same_parts and step.reads == previous.writes


def _by_parts(route: Route) -> list[Route]:
    """Return the transfers of each part; all of them as one part if they are not cut."""
    parts_of_steps = [step.in_parts() for step in route]
    found: list[Route] = []
    for transfers_of_part in zip(*parts_of_steps, strict=True):
        found.append(list(transfers_of_part))
    return found


def _only_frees(step: Step) -> bool:
    return step.manages_memory and bool(step.frees)


def _frees_after(steps: Sequence[Step], number: int) -> list[Step]:
    """Return the steps directly after another one that free slots."""
    return list(takewhile(_only_frees, steps[number + 1 :]))
