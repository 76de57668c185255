"""Transfers in the background: they begin when their source is there, and a step waits for them
when it needs the result. Kernels between them are done in parts where that lets them begin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from einmpi.schedule.blocked_updates import BlockedUpdate
from einmpi.schedule.cuts import label_of_part
from einmpi.schedule.memory import bytes_needed
from einmpi.schedule.passes import Piece, piece_in_box
from einmpi.schedule.regions import Region, Slot, Slots, intersect, names_of, shape
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.step import Kernel, Step
from einmpi.schedule.steps import Exchange, Free, Load, Reduce, Reuse, Store
from einmpi.schedule.transfers import Part

# ---- steps ---------------------------------------------------------------------------------------
#
# The steps of transfers that go on while kernels run: parts of a kernel, and waiting.


@dataclass(frozen=True)
class KernelPart(Step):
    """A kernel for some of the indices of one label of its output.

    It needs only a part of what is on its way, and what it has computed can be sent at once.
    """

    kind = "kernel"

    kernel: Kernel  # the whole one
    piece: Piece
    label: str
    start: int
    stop: int

    @property
    def vertex(self) -> str:
        return self.kernel.vertex

    @property
    def reads(self) -> Slots:
        return self.kernel.operands

    @property
    def writes(self) -> Slots:
        return self.kernel.writes

    @property
    def output(self) -> tuple[str, ...]:
        return self.kernel.einsum.output

    def region_read(self, slot: Slot) -> Region:
        found = super().region_read(slot)
        for operand, region in zip(self.kernel.operands, self.piece.operands, strict=True):
            # An operand that is read twice, by different indices, is read as a whole.
            if operand == slot and self.kernel.operands.count(slot) == 1 and slot.shape:
                found = region
        return found

    def region_written(self, slot: Slot) -> Region:
        return self.piece.target if slot.shape else super().region_written(slot)

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        return (self.piece.kernel,)

    def fills(self) -> Iterator[tuple[Slot, Region]]:
        yield self.kernel.target, self.piece.target

    def __str__(self) -> str:
        return f"{self.kernel} for {self.label} = {self.start}:{self.stop}"


@dataclass(frozen=True)
class UpdatePart(Step):
    """An update and the product that it adds, for some of the indices of one label."""

    kind = "kernel"

    update: BlockedUpdate  # the whole one
    of_product: Piece
    of_update: Piece
    label: str  # of the update
    start: int
    stop: int

    @property
    def vertex(self) -> str:
        return self.update.vertex

    @property
    def reads(self) -> Slots:
        return self.update.reads

    @property
    def writes(self) -> Slots:
        return self.update.writes

    @property
    def output(self) -> tuple[str, ...]:
        return self.update.update.einsum.output

    @cached_property
    def regions(self) -> dict[Slot, Region]:
        """The part of each slot; none is read twice."""
        found: dict[Slot, Region] = {}
        own = self.update
        pairs = [*zip(own.product.operands, self.of_product.operands, strict=True)]
        pairs += zip(own.update.operands, self.of_update.operands, strict=True)
        for slot, region in pairs:
            found[slot] = region if slot.shape else super().region_read(slot)
        found[own.update.target] = self.of_update.target
        return found

    @cached_property
    def part(self) -> BlockedUpdate:
        """The same on slots that have the extents of the part."""
        product = self._with_slots(self.update.product, self.of_product)
        return BlockedUpdate(product, self._with_slots(self.update.update, self.of_update))

    def _with_slots(self, kernel: Kernel, piece: Piece) -> Kernel:
        target = replace(kernel.target, shape=shape(piece.target))
        operands = []
        for slot, region in zip(kernel.operands, piece.operands, strict=True):
            operands.append(replace(slot, shape=shape(region)) if slot.shape else slot)
        return replace(piece.kernel, target=target, operands=tuple(operands))

    def region_read(self, slot: Slot) -> Region:
        return self.regions[slot]

    def region_written(self, slot: Slot) -> Region:
        return self.regions[slot]

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return self.part.kernels

    @property
    def working_bytes(self) -> int:
        return self.part.working_bytes

    def fills(self) -> Iterator[tuple[Slot, Region]]:
        yield self.update.update.target, self.of_update.target

    def __str__(self) -> str:
        return f"{self.update} for {self.label} = {self.start}:{self.stop}"


@dataclass(frozen=True)
class Await(Step):
    """Wait for a transfer in the background, and for all that began before it."""

    kind = "wait"
    manages_memory = True

    moving: Exchange | Reduce

    @property
    def vertex(self) -> str:
        return self.moving.vertex

    @property
    def awaited(self) -> Step:
        return self.moving

    def __str__(self) -> str:
        (slot,) = self.moving.writes
        place = "" if self.moving.part is None else f" at {self.moving.part}"
        return f"await     {slot}{place}"


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

Transfer: TypeAlias = Exchange | Reduce
Route: TypeAlias = list[Transfer]  # the transfers of one tensor that have the same parts


def with_overlap(schedule: Schedule, limit: int) -> Schedule:
    """Return the schedule with its transfers in parts, in the background where memory allows it.

    `limit` is the memory of a rank, in bytes, as it was planned.
    """
    if not any(isinstance(step, Exchange | Reduce) and step.cut for step in schedule.steps):
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
        self.postponed: list[tuple[Free, Transfer, int]] = []
        self.routes = 0  # so far
        self.reused: set[str] = set()  # slots that take the memory of an input
        for step in schedule.steps:
            self.reused.update(names_of(step.reuses))

    def arrange(self) -> None:
        """Go through the steps once."""
        steps = self.schedule.steps
        routes = _find_routes(steps)
        number = 0
        while number < len(steps):
            step = steps[number]
            for load, route in routes.before_kernel.get(number, []):
                self.add(load)
                self.add_route(route)
            if isinstance(step, Exchange | Reduce):
                if number in routes.in_place:
                    self.add_route(routes.in_place[number])
            elif number in routes.after_kernel or isinstance(step, Kernel | BlockedUpdate):
                frees = _frees_after(steps, number)
                self.add_kernel(step, routes.after_kernel.get(number, []), frees)
                number += len(frees)
            elif number not in routes.moved_loads:
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
        if last is not None and isinstance(step, Free):
            self.postponed.append((step, last.step, last.route))
            return
        if last is not None:
            self.wait_for(last.step)
        self._append(step)

    def add_transfer(self, step: Transfer, route: int) -> None:
        """Add a transfer, in the background unless its route waits."""
        in_background = route not in self.waiting and len(step.group) > 1
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

    def add_kernel(self, step: Step, routes: Sequence[Route], frees: Sequence[Free]) -> None:
        """Add a step that computes, what is freed after it, and the transfers that follow it.

        The first of these routes begins when a part of the result is there.
        """
        early: list[Route] = []  # the parts of the first route that are still to be sent
        if routes and self.routes not in self.waiting:
            early = _by_parts(routes[0])
        kernel_parts: Sequence[KernelPart | UpdatePart] = []
        is_in_place = any(slot.name in self.reused for slot in step.writes)
        if isinstance(step, Kernel) and not is_in_place:
            label, parts = self._parts_of(step, step, early)
            kernel_parts = kernel_in_parts(step, label, parts)
        elif type(step) is BlockedUpdate and not is_in_place:
            label, parts = self._parts_of(step.product, step.update, early)
            kernel_parts = update_in_parts(step, label, parts)
        if not kernel_parts:
            self.add(step)
        for kernel_part in kernel_parts:
            self.add(kernel_part)
            while early and _is_computed(early[0][0], kernel_part):
                for transfer in early.pop(0):
                    self.add_transfer(transfer, self.routes)
        for free in frees:
            self.add(free)
        for part in early:
            for transfer in part:
                self.add_transfer(transfer, self.routes)
        if routes and self.routes not in self.waiting:
            self.routes += 1
            routes = routes[1:]
        for route in routes:
            self.add_route(route)

    def _parts_of(
        self, kernel: Kernel, last: Kernel, sent: Sequence[Route]
    ) -> tuple[str, list[Part]]:
        """Return a label of a kernel's output and its parts; none if it is computed as a whole.

        The parts are those of the operand that arrives last, or of the result that is sent. `last`
        is the kernel that writes that result.
        """
        for each in reversed(self.under_way):
            part = each.step.part
            (slot,) = each.step.writes
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
        dimension = parts_sent[0].dimension
        own_label = label_of_part(kernel, kernel.target, dimension)
        last_label = label_of_part(last, last.target, dimension)
        if own_label is None or last_label is None:
            return "", []
        return own_label, parts_sent

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


def kernel_in_parts(kernel: Kernel, label: str, parts: Sequence[Part]) -> list[KernelPart]:
    """Divide a kernel along a label of its output."""
    found = []
    for part in parts:
        if kernel.einsum.extent[label] != part.extent:
            return []
        piece = _piece_of(kernel, label, part)
        found.append(KernelPart(kernel, piece, label, part.start, part.stop))
    return found


def update_in_parts(step: BlockedUpdate, label: str, parts: Sequence[Part]) -> list[UpdatePart]:
    """Divide an update along a label of the product that it adds, if both have this label."""
    if not parts or len(set(step.reads)) < len(step.reads):
        return []  # a slot that is read twice may have to be read in two ways
    product = step.product
    own_label = label_of_part(step.update, product.target, product.einsum.output.index(label))
    is_whole = product.einsum.extent[label] == parts[0].extent
    if own_label is None or not is_whole:
        return []
    found = []
    for part in parts:
        of_product = _piece_of(product, label, part)
        of_update = _piece_of(step.update, own_label, part)
        found.append(UpdatePart(step, of_product, of_update, own_label, part.start, part.stop))
    return found


def _piece_of(kernel: Kernel, label: str, part: Part) -> Piece:
    box = {each: (0, extent) for each, extent in kernel.einsum.extents}
    box[label] = part.start, part.stop
    return piece_in_box(kernel, box)


def _is_computed(transfer: Transfer, kernel_part: KernelPart | UpdatePart) -> bool:
    """Return whether a transfer's part is complete after a part of its kernel."""
    part = transfer.part
    if part is None:
        return False
    is_same_label = kernel_part.output[part.dimension] == kernel_part.label
    return is_same_label and part.stop <= kernel_part.stop


def _is_in_conflict(step: Step, transfer: Transfer) -> bool:
    """Return whether a step has to wait until a transfer in the background is done."""
    if isinstance(step, Store):
        return False  # it only says where the output is
    if step.transfer is not None or step.group:
        return True  # transfers stay in order
    moving = {*transfer.reads, *transfer.writes}
    given_up = [*step.frees, *step.reuses]
    if isinstance(step, Reuse):
        given_up += [step.source, *step.nan_checked]
    if moving.intersection(given_up):
        return True
    for slot in step.reads:
        if slot not in transfer.writes:
            continue
        arriving = transfer.region_written(slot)
        if _have_common(step.region_read(slot), arriving):
            return True
    for slot in step.writes:
        if slot not in moving:
            continue
        sent = transfer.region_read(slot)
        if _have_common(step.region_written(slot), sent):
            return True
    return False


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
    before_kernel: dict[int, list[tuple[Load, Route]]] = field(default_factory=dict)
    moved_loads: set[int] = field(default_factory=set)  # the numbers of these Loads


def _find_routes(steps: Sequence[Step]) -> _Routes:
    found = _Routes()
    writers: dict[str, int] = {}  # of each slot, the number of the last step that computes it
    loads: dict[str, int] = {}  # of each slot, since something was computed
    latest: int | None = None  # the last step that computes
    route: Route = []
    for number, step in enumerate(steps):
        if isinstance(step, Exchange | Reduce):
            if route and _continues(step, route[-1]):
                route.append(step)
                continue
            route = [step]
            source = step.reads[0].name
            cut = step.cut
            if cut is not None and cut.after_kernel and source in writers:
                found.after_kernel.setdefault(writers[source], []).append(route)
            elif cut is not None and cut.before_kernel and latest is not None and source in loads:
                load = steps[loads[source]]
                assert isinstance(load, Load)
                found.before_kernel.setdefault(latest, []).append((load, route))
                found.moved_loads.add(loads[source])
            else:
                found.in_place[number] = route
        elif isinstance(step, Load):
            loads[step.slot.name] = number
        elif step.kernels:
            latest = number
            loads.clear()
            for slot in step.writes:
                writers[slot.name] = number
        if not isinstance(step, Exchange | Reduce) and not step.manages_memory:
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


def _frees_after(steps: Sequence[Step], number: int) -> list[Free]:
    """Return what is freed directly after a step."""
    found: list[Free] = []
    for step in steps[number + 1 :]:
        if not isinstance(step, Free):
            break
        found.append(step)
    return found
