"""A schedule that is run again and again on a GPU. From the third run on, kernels that follow one
another are launched together, as a CUDA graph."""

from __future__ import annotations

import threading
import weakref
from bisect import insort
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from einmpi.comm.base import Comm
from einmpi.kernels.cuda import capture
from einmpi.kernels.cuda.capture import workspace_bytes
from einmpi.kernels.cuda.driver import DeviceArray
from einmpi.log import LOGGER
from einmpi.runtime.actions import ACTIONS, RankFailure
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.gpu.backend import CupyBackend
from einmpi.runtime.gpu.stretches import Stretch, find_stretches
from einmpi.runtime.program import GivenBlocks, Program, Run, uses_memory_only
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Load, numbered

# ---- arena ---------------------------------------------------------------------------------------
#
# One block of memory for all that a run allocates: every run has it at the same addresses.
#
# The places in the block are found in a run that is recorded.


MemoryPointer: TypeAlias = Any  # cupy.cuda.MemoryPointer
Allocator: TypeAlias = Callable[[int], MemoryPointer]

ALIGNMENT = 512  # of all memory that CuPy allocates


class LayoutChanged(Exception):
    """A run allocates something else than the run that was recorded."""


class Place(NamedTuple):
    """An allocation, and where it is in the block."""

    nbytes: int
    offset: int


class ArenaLayout:
    """Where allocations go in a block: a place is used again once its memory is released."""

    def __init__(self) -> None:
        self.total = 0  # bytes of the block
        self.in_use = 0
        self.most_in_use = 0
        self.gaps: list[tuple[int, int]] = []  # (offset, bytes), in order, never adjacent

    def take(self, nbytes: int) -> int:
        """Return the offset of a new allocation, in the smallest gap that has room for it."""
        size = aligned(nbytes)
        self.in_use += size
        self.most_in_use = max(self.most_in_use, self.in_use)
        fitting = [(length, offset) for offset, length in self.gaps if length >= size]
        if fitting:
            length, offset = min(fitting)
            self.gaps.remove((offset, length))
            if length > size:
                insort(self.gaps, (offset + size, length - size))
            return offset
        offset = self.total
        if self.gaps and sum(self.gaps[-1]) == self.total:
            offset, _ = self.gaps.pop()  # the last gap grows
        self.total = offset + size
        return offset

    def release(self, place: Place) -> None:
        """Let the place of an allocation be used again."""
        offset = place.offset
        length = aligned(place.nbytes)
        self.in_use -= length
        for other_offset, other_length in list(self.gaps):
            if other_offset + other_length == offset:
                self.gaps.remove((other_offset, other_length))
                offset = other_offset
                length += other_length
            elif offset + length == other_offset:
                self.gaps.remove((other_offset, other_length))
                length += other_length
        insort(self.gaps, (offset, length))


def aligned(nbytes: int) -> int:
    """Return how much memory an allocation takes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class _Recorded:
    """Memory of CuPy's pool, with the place that stands for it; collected with its array."""

    def __init__(self, layout: ArenaLayout, place: Place, memory: MemoryPointer) -> None:
        self.memory = memory
        # At the end of the process nothing is released.
        weakref.finalize(self, layout.release, place).atexit = False


def recording_allocator(
    cuda: Any, device: int, layout: ArenaLayout, places: list[Place]
) -> Allocator:
    """Return an allocator that takes memory as usual, and appends to `places` where it would be."""
    allocate_as_usual = cuda.get_allocator()

    def allocate(nbytes: int) -> MemoryPointer:
        memory = allocate_as_usual(nbytes)
        if nbytes == 0:
            return memory
        place = Place(nbytes, layout.take(nbytes))
        places.append(place)
        owner = _Recorded(layout, place, memory)
        return cuda.MemoryPointer(cuda.UnownedMemory(memory.ptr, nbytes, owner, device), 0)

    return allocate


def placing_allocator(cuda: Any, device: int, address: int, places: list[Place]) -> Allocator:
    """Return an allocator that gives out these places of a block, in their order.

    Whoever uses the allocator keeps the block.
    """
    allocate_as_usual = cuda.get_allocator()
    following = iter(places)

    def allocate(nbytes: int) -> MemoryPointer:
        if nbytes == 0:
            return allocate_as_usual(nbytes)
        place = next(following, None)
        if place is None or place.nbytes != nbytes:
            raise LayoutChanged
        memory = cuda.UnownedMemory(address + place.offset, nbytes, places, device)
        return cuda.MemoryPointer(memory, 0)

    return allocate


# Whoever calls a job keeps results or not, and so outputs have the same few addresses in turn.
MOST_GRAPHS_OF_A_STRETCH = 4
# Addresses that never come again: the host would only capture.
MOST_CAPTURES_WITHOUT_LAUNCH = 12
MOST_RECORDED_RUNS = 4
# Captured calls of cuBLAS share a handle.
_ONE_CAPTURE_AT_A_TIME = threading.Lock()
# A block may be larger than what is in it at once, because of gaps between its arrays.
MOST_BYTES_OF_GAPS = 2**26
MOST_SHARE_OF_GAPS = 0.2

Addresses: TypeAlias = tuple[int, ...]


def graphs_suit(schedule: Schedule) -> bool:
    """Return whether to launch the kernels of a schedule as graphs.

    If inputs come from the host while kernels run, the bus takes longer than the launches.
    """
    return not any(step.begins for step in schedule.steps)


@dataclass(frozen=True)
class _CapturedStretch:
    """A graph, and how the slots change when it is launched."""

    graph: Any  # cupy.cuda.Graph
    made: dict[str, DeviceArray]  # slots in the block that are left
    aliases: dict[str, str]  # slots that take the memory of other slots
    removed: tuple[str, ...]
    most_bytes: int  # in use during the stretch, more than before it
    bytes_left: int  # in use after the stretch, more than before it


class _Graphs:
    """The graphs of a stretch, by the addresses of the arrays that are not its own."""

    def __init__(self) -> None:
        self.by_addresses: dict[Addresses, _CapturedStretch] = {}
        self.captures = 0  # since a graph was last used again
        self.places: list[Place] = []  # of what the stretch allocates

    def find(self, addresses: Addresses) -> _CapturedStretch | None:
        found = self.by_addresses.pop(addresses, None)
        if found is not None:
            self.by_addresses[addresses] = found  # it is now the one that was used last
            self.captures = 0
        return found

    def add(self, addresses: Addresses, captured: _CapturedStretch) -> None:
        self.captures += 1
        if len(self.by_addresses) >= MOST_GRAPHS_OF_A_STRETCH:
            del self.by_addresses[next(iter(self.by_addresses))]
        self.by_addresses[addresses] = captured


class GraphProgram(Program):
    """A program on a GPU without a slow tier.

    The first run finds out which steps need the host, the second one where in a block of memory
    everything goes, the third one captures graphs, and further ones launch them.
    """

    def __init__(self, schedule: Schedule, backend: CupyBackend, comm: Comm) -> None:
        super().__init__(schedule, backend, comm)
        self.can_repeat = uses_memory_only(schedule)  # until graphs turn out not to be worth it
        self.has_run = True  # the first run is watched, too
        self.gpu = backend
        self.cuda = backend.cupy.cuda
        self.device = backend.context.gpu.number
        self.workspace_bytes = workspace_bytes(self.cuda.Device(self.device).compute_capability)
        self.with_host: set[int] = set()  # steps that need the host
        self.stretches: list[Stretch] | None = None  # None before the first run
        self.graphs: dict[int, _Graphs] = {}  # by the number of the first step
        self.block_bytes = 0  # 0 before the second run
        self.recorded_runs = 0

    def _run_again(self, run: Run) -> None:
        if self.stretches is None:
            self._watch(run)
        elif not self.block_bytes:
            self._record(run)
        else:
            self._launch(run)

    # ---- the first two runs ---------------------------------------------------------------------

    def _watch(self, run: Run) -> None:
        """Carry out all steps, and find out which of them need the host."""
        self._carry_out_watched(run, 0, len(self.schedule.steps))
        if not run.has_failed:
            self._cut()

    def _carry_out_watched(self, run: Run, first: int, stop: int) -> None:
        capture.take_host_was_needed()
        for number in range(first, stop):
            self.carry_out(run, number, number + 1)
            if capture.take_host_was_needed():
                self.with_host.add(number)

    def _cut(self) -> None:
        """Cut the schedule into stretches."""
        self.stretches = find_stretches(self.schedule.steps, self.with_host)
        self.graphs = {stretch.first: _Graphs() for stretch in self.stretches}
        self.block_bytes = 0
        self.can_repeat = any(stretch.is_captured for stretch in self.stretches)

    def _record(self, run: Run) -> None:
        """Carry out all steps, and find a place in one block for all that they allocate."""
        assert self.stretches is not None
        layout = ArenaLayout()
        capture.take_calls_were_prepared()
        with_host_before = len(self.with_host)
        for stretch in self.stretches:
            if not stretch.is_captured:
                self.carry_out(run, stretch.first, stretch.stop)
                continue
            for slot in stretch.made_before:
                run.buffers.make(slot)
            places = self.graphs[stretch.first].places
            places.clear()
            allocator = recording_allocator(self.cuda, self.device, layout, places)
            with self.cuda.using_allocator(allocator):
                self._carry_out_watched(run, stretch.first, stretch.stop)
        self.recorded_runs += 1
        self.can_repeat = self.recorded_runs <= MOST_RECORDED_RUNS
        if run.has_failed or capture.take_calls_were_prepared():
            return
        if len(self.with_host) > with_host_before:
            self._cut()
            return
        gaps = layout.total - layout.most_in_use
        if gaps > MOST_BYTES_OF_GAPS and gaps > MOST_SHARE_OF_GAPS * layout.most_in_use:
            self.can_repeat = False
        self.block_bytes = max(layout.total, 1)

    # ---- further runs ---------------------------------------------------------------------------

    def _launch(self, run: Run) -> None:
        """Launch the graphs of all stretches; capture those that are not there yet."""
        assert self.stretches is not None
        block_bytes = aligned(self.block_bytes) + self.workspace_bytes
        try:
            block = self.gpu.cupy.empty(block_bytes, np.uint8)
        except MemoryError:
            self._give_up()
            self.carry_out(run, 0, len(self.schedule.steps))
            return
        for stretch in self.stretches:
            if not stretch.is_captured or run.has_failed or not self.can_repeat:
                self.carry_out(run, stretch.first, stretch.stop)
                continue
            for slot in stretch.made_before:
                run.buffers.make(slot)
            arrays = run.buffers.arrays
            outer = [arrays[name].data.ptr for name in stretch.outer]
            addresses = (block.data.ptr, *outer)
            graphs = self.graphs[stretch.first]
            captured = graphs.find(addresses)
            if captured is None:
                captured = self._capture(run, stretch, block.data.ptr)
                if captured is None:
                    self.carry_out(run, stretch.first, stretch.stop)
                    continue
                graphs.add(addresses, captured)
                if graphs.captures > MOST_CAPTURES_WITHOUT_LAUNCH:
                    self._give_up()
            captured.graph.launch(self.cuda.get_current_stream())
            _change_slots(run.buffers, captured)

    # ---- runs on blocks that the caller has taken from its inputs -------------------------------

    @property
    def is_bound(self) -> bool:
        return self.can_repeat and self.block_bytes > 0

    def accepts(self, blocks: Mapping[str, DeviceArray]) -> bool:
        all_are_kept = all(load.kept for _, load in numbered(self.schedule.steps, Load))
        return self.is_bound and all_are_kept and not self.schedule.overlaps

    def run_on_blocks(
        self, take_blocks: Callable[[], Mapping[str, DeviceArray]], failure: RankFailure | None
    ) -> dict[str, DeviceArray] | None:
        if not self.is_bound or not self.lock.acquire(blocking=False):
            return None
        try:
            blocks = take_blocks()
            buffers = Buffers(self.backend)
            buffers.arrays.update(blocks)
            buffers.grow(sum(block.nbytes for block in blocks.values()))
            self._launch(Run(GivenBlocks(blocks), buffers, failure))
            self.peak = buffers.peak
        finally:
            self.lock.release()
        return {name: buffers[slot] for name, slot in self.outputs.items()}

    def _give_up(self) -> None:
        """Launch kernels one by one from here on."""
        self.can_repeat = False
        self.graphs.clear()

    def _capture(self, run: Run, stretch: Stretch, address: int) -> _CapturedStretch | None:
        """Capture the steps of a stretch, with the block at an address; None if that fails.

        The slots do not change.
        """
        trial = copy(run.buffers)
        trial.arrays = dict(trial.arrays)
        trial.peak = bytes_before = trial.bytes_in_use
        allocator = placing_allocator(
            self.cuda, self.device, address, self.graphs[stretch.first].places
        )
        stream = self.cuda.Stream(non_blocking=True)
        try:
            with _ONE_CAPTURE_AT_A_TIME, stream, self.cuda.using_allocator(allocator):
                blas = self.gpu.context.captured_blas()
                if blas is not None:
                    workspace = address + aligned(self.block_bytes)
                    blas.use(stream.ptr, workspace, self.workspace_bytes)
                with capture.capturing(blas):
                    stream.begin_capture()
                    try:
                        for step in self.schedule.steps[stretch.first : stretch.stop]:
                            ACTIONS[type(step)](step, self.comm, run.storage, trial)
                    finally:
                        graph = stream.end_capture()
            return _captured(graph, run.buffers.arrays, trial, bytes_before)
        except Exception as error:  # whatever it is, kernels can still be launched one by one
            LOGGER.debug("kernels are launched one by one: %r", error)
            self._give_up()
            return None


def _captured(
    graph: Any, before: Mapping[str, DeviceArray], after: Buffers, bytes_before: int
) -> _CapturedStretch:
    """Return a graph with what its steps change in the slots, and the bytes that they take.

    Meanwhile a thread may have taken and released memory for messages, which is not theirs.
    """
    names_by_array = {id(array): name for name, array in before.items()}
    made = {}
    aliases = {}
    for name, array in after.arrays.items():
        if name in before:
            continue
        if id(array) in names_by_array:
            aliases[name] = names_by_array[id(array)]
        else:
            made[name] = array
    return _CapturedStretch(
        graph,
        made,
        aliases,
        tuple(before.keys() - after.arrays.keys()),
        after.peak - bytes_before,
        after.bytes_in_use - bytes_before,
    )


def _change_slots(buffers: Buffers, captured: _CapturedStretch) -> None:
    """Leave the slots as the steps of a stretch would."""
    arrays = buffers.arrays
    for name, source in captured.aliases.items():
        arrays[name] = arrays[source]
    for name in captured.removed:
        del arrays[name]
    arrays.update(captured.made)
    buffers.grow(captured.most_bytes)
    buffers.shrink(captured.most_bytes - captured.bytes_left)
