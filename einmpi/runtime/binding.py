"""Calls that are bound to the steps of a schedule in host memory: all that is the same in every run
is worked out once. Small slots and messages keep their memory. Callers ignore floating-point
errors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from einmpi.comm.base import Comm
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.kernels.prepared import bare_call, bound_call, stored_as
from einmpi.kernels.updates import changes_a_part, find_placed_rows
from einmpi.runtime.actions import ACTIONS, InputSource
from einmpi.runtime.backend import HostArray
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.compute import prepared_calls
from einmpi.runtime.cpu.backend import NumpyBackend
from einmpi.runtime.host_memory import (
    MIN_RECYCLED_BYTES,
    MOST_BYTES_OF_SMALL_ARRAY,
    SmallArrays,
    aligned_empty,
)
from einmpi.runtime.kept_memory import KeptMemory, keep_memory
from einmpi.runtime.transfer import (
    AtOnce,
    Gather,
    GatherInPlace,
    Piece,
    is_box,
    messages_of,
    messages_of_reduce,
    transfer,
)
from einmpi.schedule.compute import Compute, Kernel
from einmpi.schedule.regions import Region, Slot, names_of, shape
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import (
    Free,
    Load,
    Repeat,
    Reuse,
    SavePoint,
    Step,
    Store,
    Transfer,
    numbered,
)

BoundCall: TypeAlias = Callable[[Buffers], None]
SlotView: TypeAlias = Callable[[Buffers], HostArray]  # a part of a slot in this run


class StoredOtherwise(Exception):
    """An input is stored in another way than the one that kernels were prepared for."""


class BoundSteps:
    """The calls that are bound to the steps of a schedule, and the memory that they keep."""

    def __init__(
        self,
        schedule: Schedule,
        backend: NumpyBackend,
        comm: Comm,
        repeat: Callable[[int, Buffers], None],
        outer: Sequence[Slot] = (),
    ) -> None:
        self.schedule = schedule
        self.backend = backend
        self.comm = comm
        self.repeat = repeat  # what a step does that repeats others, given its number
        self.kept = keep_memory(schedule, backend.shared.arrays, outer)
        self.calls: list[tuple[int, BoundCall]] = []  # with the number of the step
        self.calls_after_loading: list[tuple[int, BoundCall]] = []  # all but those that take inputs
        self.expected: dict[str, Hashable] = {}  # how blocks of inputs are stored, by slot
        self.reused: set[str] = set()  # slots that may have the memory of an input
        self.spilled: set[str] = set()  # slots that may be in the slow tier, or on their way
        for step in schedule.steps:
            self.reused.update(names_of(step.reuses))
            self.spilled.update(names_of(step.spills("place", "evict", "drop", "fetch")))
        self.storage: InputSource  # of the run that is under way

    def begin(self, storage: InputSource, buffers: Buffers) -> None:
        """Begin a run: the slots that keep their memory have it."""
        self.storage = storage
        buffers.arrays.update(self.kept.slots)
        buffers.grow(self.kept.nbytes)

    def end(self, buffers: Buffers) -> None:
        """End a run after which others use the buffers: these slots have no memory any more."""
        for name in self.kept.slots:
            buffers.arrays.pop(name, None)
        buffers.shrink(self.kept.nbytes)
        self.forget_storage()

    def forget_storage(self) -> None:
        """Keep nothing of the inputs of a run that is done."""
        vars(self).pop("storage", None)

    def accepts(self, blocks: Mapping[str, HostArray]) -> bool:
        """Return whether calls were bound to blocks of all inputs that are stored as these are."""
        if not self.calls or self.expected.keys() != blocks.keys():
            return False
        for name, block in blocks.items():
            if stored_as((block,)) != self.expected[name]:
                return False
        return all(load.kept for _, load in numbered(self.schedule.steps, Load))

    def bind_and_yield(self, buffers: Buffers) -> Iterator[tuple[int, BoundCall]]:
        """Yield each call when the calls before it are done: it is bound to what is there then."""
        self.expected.clear()
        found = []
        after_loading = []
        for number, step in enumerate(self.schedule.steps):
            try:
                calls = self._bind(number, step, self.kept, buffers)
            except Exception as error:  # it is this step's, not one of the step before
                calls = [partial(_raise, error)]
            for call in calls:
                found.append((number, call))
                if step.kind != "load":
                    after_loading.append((number, call))
                yield number, call
        self.calls = found
        self.calls_after_loading = after_loading

    def _bind(self, number: int, step: Step, kept: KeptMemory, buffers: Buffers) -> list[BoundCall]:
        """Return the calls that carry out a step, given the slots that exist before it."""
        action = ACTIONS[type(step)]
        as_ever: list[BoundCall] = [lambda buffers: action(step, self.comm, self.storage, buffers)]
        used = names_of((*step.reads, *step.writes, *step.frees, *step.reuses))
        match step:
            case Repeat():
                return [partial(self.repeat, number)]
            case _ if step.background or not self.spilled.isdisjoint(used):
                return as_ever
            case Free(slot):
                if slot.name in buffers.shared.arrays:
                    return as_ever
                return [] if slot.name in kept.slots else [_bind_free(slot.name)]
            case Store() | SavePoint():
                return []
            case Transfer() if step.number in buffers.shared.transfers:
                return as_ever
            case Transfer() if step.arriving and number not in kept.received:
                return as_ever
            case Transfer(aggregation=None):
                return bind_exchange(step, number, kept, self.comm)
            case Transfer():
                return bind_reduce(step, number, kept, self.comm)
            case Load(kept=True) if not self.schedule.overlaps:
                return [self._bind_load(step)]
            case Reuse(nan_checked=()):
                return [_bind_reuse(step)]
            case Compute(kernels=(kernel,)) if step.is_plain:
                if not self._may_be_partial(kernel):
                    return [self._bind_kernel(kernel, kept, buffers)]
                write = self._bind_row_writes(step, kernel, buffers)
                return as_ever if write is None else [write]
            case Compute(between=(), replaced=None) if (
                not step.tiles.kind and not step.tiles.bounds
            ):
                return [self._bind_pass(step, buffers) or as_ever[0]]
        return as_ever

    def _may_be_partial(self, kernel: Kernel) -> bool:
        """Return whether a kernel may write over an operand, and then only where it changes."""
        is_over_operand = kernel.target.name in self.reused or kernel.target in kernel.operands
        return is_over_operand and changes_a_part(kernel)

    def _bind_load(self, step: Load) -> BoundCall:
        """Return the call that takes a block of an input that is on the rank."""
        name = step.slot.name

        def load(buffers: Buffers) -> None:
            block = self.storage.block(step, self.comm)
            buffers.put(step.slot, block)
            stored = stored_as((block,))
            if stored != self.expected.setdefault(name, stored):
                raise StoredOtherwise

        return load

    def _bind_kernel(self, kernel: Kernel, kept: KeptMemory, buffers: Buffers) -> BoundCall:
        """Return the call that computes a kernel. The caller ignores floating-point errors."""
        names = names_of(kernel.operands)
        make_target = _bind_making(kernel.target, self.backend)
        operands = [buffers.arrays[name] for name in names]
        target = make_target(buffers)
        backend = self.backend
        prepared = backend.prepared_kernel(kernel, operands, target)
        if all(name in kept.slots for name in (*names, kernel.target.name)):
            bound = bound_call(prepared, operands, target)
            return lambda _: backend.compute_kernel(kernel, operands, target, bound)
        bare = bare_call(prepared)

        def compute_kernel(buffers: Buffers) -> None:
            arrays = buffers.arrays
            operands = [arrays[name] for name in names]
            backend.compute_kernel(kernel, operands, make_target(buffers), bare)

        return compute_kernel

    def _bind_pass(self, step: Compute, buffers: Buffers) -> BoundCall | None:
        """Return the call of a fused stencil; None if the backend computes it in another way."""
        makers = [(slot.name, _bind_making(slot, self.backend)) for slot in step.writes]
        names = names_of(step.reads)

        def arrays_of(buffers: Buffers) -> dict[str, HostArray]:
            found = {name: make(buffers) for name, make in makers}
            for name in names:
                found[name] = buffers.arrays[name]
            return found

        call = next(iter(prepared_calls(step, arrays_of(buffers), self.backend)), None)
        if call is None:
            return None

        def compute_pass(buffers: Buffers) -> None:
            call(arrays_of(buffers))

        return compute_pass

    def _bind_row_writes(self, step: Compute, kernel: Kernel, buffers: Buffers) -> BoundCall | None:
        """Return the call that writes rows over an input; None if the kernel is none that does."""
        names = names_of(kernel.operands)
        target_name = kernel.target.name
        write = None
        if target_name in buffers.arrays:
            operands = [buffers.arrays[name] for name in names]
            target = buffers.arrays[target_name]
            write = self.backend.prepared_row_writes(kernel, operands, target)
        rows = find_placed_rows(kernel.einsum)
        if write is None or rows is None:
            return None
        action = ACTIONS[Compute]
        old_name = names[rows.operand]

        def write_rows(buffers: Buffers) -> None:
            arrays = buffers.arrays
            target = arrays.get(target_name)
            if target is None or target is not arrays[old_name]:  # the input must stay as it is
                action(step, self.comm, self.storage, buffers)
                return
            write([arrays[name] for name in names], target)

        return write_rows


def _raise(error: Exception, _: Buffers) -> None:
    raise error


def _bind_reuse(step: Reuse) -> BoundCall:
    """Return what gives a slot the array of another one."""
    name = step.slot.name
    source = step.source.name

    def reuse(buffers: Buffers) -> None:
        buffers.arrays[name] = buffers.arrays[source]

    return reuse


def _bind_free(name: str) -> BoundCall:
    """Return what gives up the array of a slot."""

    def free(buffers: Buffers) -> None:
        array = buffers.arrays.pop(name, None)
        if array is not None:
            buffers.shrink(array.nbytes)

    return free


def _bind_making(slot: Slot, backend: NumpyBackend) -> Callable[[Buffers], HostArray]:
    """Return what gives the array of a slot, and creates it if there is none."""
    name = slot.name
    if name in backend.shared.arrays:
        return lambda buffers: buffers.make(slot)
    nbytes = slot.nbytes
    create: Callable[[], HostArray] = partial(backend.allocate, slot.shape, slot.dtype)
    if nbytes <= MOST_BYTES_OF_SMALL_ARRAY:
        create = SmallArrays(slot.shape, np.dtype(slot.dtype)).take
    elif nbytes < MIN_RECYCLED_BYTES:
        create = partial(aligned_empty, slot.shape, np.dtype(slot.dtype))

    def make(buffers: Buffers) -> HostArray:
        arrays = buffers.arrays
        if name not in arrays:
            arrays[name] = create()
            buffers.grow(nbytes)
        array: HostArray = arrays[name]
        return array

    return make


# ---- transfers ----------------------------------------------------------------------------------


def bind_exchange(step: Transfer, number: int, kept: KeptMemory, comm: Comm) -> list[BoundCall]:
    """Return the calls that do an exchange, given the number of the step in its schedule."""
    messages = messages_of(step)
    own = step.moves.own
    is_bound = own is None or (is_box(own[0]) and is_box(own[1]))
    is_kept = isinstance(messages, GatherInPlace) and step.target.name in kept.slots
    if len(step.group) > 1 and not is_kept:
        is_bound = is_bound and number in kept.received
    if not is_bound:
        return [lambda buffers: transfer(step, buffers, comm)]
    if step.arriving:
        assert isinstance(messages, AtOnce), "a halo is not the same for all ranks"
        return _bind_messages(messages, step.source, step.group, number, kept, comm)
    calls: list[BoundCall] = []
    if step.target.name not in kept.slots:
        calls.append(lambda buffers: buffers.make(step.target))
    if own is not None:
        source_view = _slot_view(step.source, own[0], kept)
        target_view = _slot_view(step.target, own[1], kept)
        calls.append(_bind_copy(target_view, source_view))
    if isinstance(messages, GatherInPlace):
        calls += _bind_gather_in_place(step, messages, number, kept, comm)
    elif isinstance(messages, Gather):
        everything = kept.received[number]
        gather = comm.prepare_allgatherv(step.group, everything, messages.counts)
        calls += _bind_packing(messages.own, step.target, everything, kept)
        calls.append(lambda _: gather())
        calls += _bind_unpacking(messages.others, step.target, everything, kept)
    elif isinstance(messages, AtOnce):
        calls += _bind_messages(messages, step.source, step.group, number, kept, comm)
        received = kept.received[number]
        calls += _bind_unpacking(messages.received, step.target, received, kept)
    return _counted(calls, kept.beside_the_plan.get(number, 0))


def _bind_gather_in_place(
    step: Transfer, messages: GatherInPlace, number: int, kept: KeptMemory, comm: Comm
) -> list[BoundCall]:
    """Return the calls that gather pieces of a slot; one without kept memory gets a copy."""
    name = step.target.name
    place = messages.place
    slot = kept.slots.get(name)
    everything = kept.received[number] if slot is None else slot.reshape(-1)[place]
    gather = comm.prepare_allgatherv(step.group, everything, messages.counts)
    if slot is not None:
        return [lambda _: gather()]

    def gather_and_copy(buffers: Buffers) -> None:
        target = buffers.arrays[name].reshape(-1)[place]
        everything[...] = target
        gather()
        target[...] = everything

    return [gather_and_copy]


def bind_reduce(step: Transfer, number: int, kept: KeptMemory, comm: Comm) -> list[BoundCall]:
    """Return the calls that do a reduction, given the number of the step in its schedule."""
    if len(step.group) == 1:
        return []
    messages = messages_of_reduce(step)
    if messages is None or number not in kept.received:
        return [lambda buffers: transfer(step, buffers, comm)]
    calls = _bind_messages(messages, step.target, step.group, number, kept, comm)
    combine = AGGREGATIONS[step.required_aggregation].combine
    for view, message in _views(messages.received, step.target, kept.received[number], kept):
        calls.append(_bind_combining(combine, view, message))
    return _counted(calls, kept.beside_the_plan.get(number, 0))


def _counted(calls: list[BoundCall], nbytes: int) -> list[BoundCall]:
    """Return the calls of a step whose messages are counted as long as it lasts."""
    if nbytes == 0:
        return calls

    def begin(buffers: Buffers) -> None:
        buffers.grow(nbytes)

    def end(buffers: Buffers) -> None:
        buffers.shrink(nbytes)

    return [begin, *calls, end]


def _bind_messages(
    messages: AtOnce,
    source: Slot,
    group: tuple[int, ...],
    number: int,
    kept: KeptMemory,
    comm: Comm,
) -> list[BoundCall]:
    """Return the calls that pack all messages of a step, send and receive them."""
    send = kept.sent[number]
    send_and_receive = comm.prepare_alltoallv(
        group, send, messages.send_counts, kept.received[number], messages.receive_counts
    )
    calls = _bind_packing(messages.sent, source, send, kept)
    calls.append(lambda _: send_and_receive())
    return calls


def _bind_packing(
    pieces: Sequence[Piece], slot: Slot, buffer: HostArray, kept: KeptMemory
) -> list[BoundCall]:
    """Return the calls that copy pieces of a slot to their places in a message buffer."""
    calls = []
    for view, message in _views(pieces, slot, buffer, kept):
        calls.append(_bind_copy(_always(message), view))
    return calls


def _bind_unpacking(
    pieces: Sequence[Piece], slot: Slot, buffer: HostArray, kept: KeptMemory
) -> list[BoundCall]:
    """Return the calls that copy pieces from a message buffer to their places in a slot."""
    calls = []
    for view, message in _views(pieces, slot, buffer, kept):
        calls.append(_bind_copy(view, _always(message)))
    return calls


def _bind_copy(target: SlotView, source: SlotView) -> BoundCall:
    def copy(buffers: Buffers) -> None:
        target(buffers)[...] = source(buffers)

    return copy


def _bind_combining(combine: np.ufunc, view: SlotView, message: HostArray) -> BoundCall:
    def combine_with_message(buffers: Buffers) -> None:
        part = view(buffers)
        combine(part, message, out=part)  # by its name: numpy deprecates a third one

    return combine_with_message


# ---- views ---------------------------------------------------------------------------------------


def _views(
    pieces: Sequence[Piece], slot: Slot, buffer: HostArray, kept: KeptMemory
) -> list[tuple[SlotView, HostArray]]:
    """Return pieces as parts of the slot and of the message buffer, in the same shape."""
    found = []
    for piece in pieces:
        view = _slot_view(slot, piece.region, kept)
        extents = shape(piece.region) if slot.shape else ()
        found.append((view, buffer[piece.place].reshape(extents)))
    return found


def _slot_view(slot: Slot, box: Region, kept: KeptMemory) -> SlotView:
    """Return what gives a box of a slot: always the same view if the slot keeps its memory."""
    index: Any = ...  # a view, even of a slot without dimensions
    if slot.shape:
        index = tuple(slice(*runs[0]) for runs in box)
    if slot.name in kept.slots:
        return _always(kept.slots[slot.name][index])
    name = slot.name
    return lambda buffers: buffers.arrays[name][index]


def _always(view: HostArray) -> SlotView:
    return lambda _: view
