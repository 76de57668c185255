"""Inputs for slots on a GPU: read or generated in host memory, then copied to the GPU.

While one piece is copied, the next one is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from einmpi.arrays.creation import block_of
from einmpi.arrays.dist_array import DistArray
from einmpi.comm.base import Comm
from einmpi.compiled.inputs import Inputs, OnDevice, TakeBlock, resident_key
from einmpi.files.reading import Reading
from einmpi.kernels.cuda.driver import DeviceArray, contiguous, is_device_array
from einmpi.runtime.gpu.backend import CupyBackend
from einmpi.runtime.gpu.copies import (
    PINNED_BUFFER_BYTES,
    DeviceCopy,
    Event,
    HostArray,
    on_host,
)
from einmpi.schedule.regions import Region, boxes, chunks, elements, flat_range, packed, shape
from einmpi.schedule.steps import Load

READER_THREADS = 4  # that fill pinned memory from files
MAX_SMALL_BYTES = 2**20  # of given arrays that are copied to pinned memory at once

# Fills an array with a part of a region; the second region is the part's place in the whole.
ReadPart = Callable[[Region, Region, HostArray], None]


def taking_on_device(backend: CupyBackend, step: Load, given: Any) -> TakeBlock | None:
    """Return what takes a block of an input that is on the GPU, or copies it there."""
    if isinstance(given, DistArray):
        is_usable = is_device_array(given.local) and given.local.flags.c_contiguous
        return attrgetter("local") if is_usable else None
    if is_device_array(given):
        return partial(backend.region_of, region=step.region, extents=step.slot.shape)
    if type(given) is not np.ndarray:
        return None

    def upload(array: HostArray) -> DeviceArray:
        values = block_of(array, step.region, step.slot.dtype).reshape(step.slot.shape)
        if values.nbytes <= MAX_SMALL_BYTES:
            return backend.cupy.asarray(values)  # ordered with kernels: nothing waits for it
        target = backend.allocate(step.slot.shape, step.slot.dtype)
        backend.copies.upload(np.ascontiguousarray(values), target)
        return target

    return upload


class DeviceInputs:
    """The storage of the execute loop for a GPU.

    `inputs` and `comm` know only host memory.
    """

    def __init__(self, inputs: Inputs, backend: CupyBackend, comm: Comm) -> None:
        self.inputs = inputs
        self.backend = backend
        self.copies = backend.copies
        self.comm = comm
        self.inputs.reader_threads = READER_THREADS
        self.array_type = backend.cupy.ndarray
        self.run = object()  # stands for this run
        # Blocks that are read in the background, by tensor, and for each the event after which the
        # memory of its slot is free.
        self.begun: dict[str, tuple[HostArray, Event]] = {}
        # Given arrays that are being copied to their slots, by tensor.
        self.copying: dict[str, list[DeviceCopy]] = {}
        self.last_copy: DeviceCopy | None = None  # from the caller's own memory

    def begin(self, step: Load, make: Callable[[], Any], comm: Comm, outside: bool) -> None:
        """Begin to read into host memory: the slot itself if it is there, else a block.

        The slot is made in any case, so that the copy to it need not wait for later kernels.
        """
        if outside:
            self.inputs.begin(step, make, self.comm)
            return
        given = self.inputs.given.get(step.tensor)
        if isinstance(given, np.ndarray):
            self._begin_copies(step, given, make)
            return

        def make_block() -> HostArray:
            make()
            block = self._allocate_block(step)
            self.begun[step.tensor] = block, self.copies.event_after_kernels()
            return block

        self.inputs.begin(replace(step, place=_place_in_block(step)), make_block, self.comm)

    def fill(self, step: Load, target: Any, comm: Comm) -> None:
        given = self.inputs.given.get(step.tensor)
        if is_device_array(given):
            self._fill_from_device(step, given, target)
            return
        if step.tensor in self.copying:
            for copy in self.copying.pop(step.tensor):
                copy.join()
            return
        in_slow_tier = isinstance(target, np.ndarray)
        if in_slow_tier and step.tensor not in self.begun:
            self.inputs.fill(step, target, self.comm)
        elif isinstance(given, np.ndarray):
            self._fill_from_given(step, given, target)
        elif self._can_read_parts(step):

            def read(part: Region, _: Region, values: HostArray) -> None:
                self.inputs.read(replace(step, region=part), values, packed(part), self.comm)

            self._fill_by_parts(step, target, read)
        else:
            self._fill_from_block(step, target)

    def takes_messages(self, step: Load) -> bool:
        return self.inputs.takes_messages(step)

    def block(self, step: Load, comm: Comm) -> DeviceArray:
        given = self.inputs.given.get(step.tensor) if step.numbers is None else None
        if is_device_array(given):
            block = self.backend.region_of(given, step.region, step.slot.shape)
            return block.copy() if step.overwritten else block
        if isinstance(given, DistArray) and is_device_array(given.local):
            block = contiguous(given.local)
            if step.overwritten and step.tensor not in self.inputs.overwritable:
                return block.copy()
            return block
        key = resident_key(self.inputs.job, step)
        is_unchanged = step.tensor not in self.inputs.changing
        stays = given is None and is_unchanged
        if stays and key in self.backend.resident:
            return self.backend.resident[key]
        given_stays = is_unchanged and self.inputs.given_stay and not step.overwritten
        if given is not None and given_stays:
            known = self.inputs.on_device.get(key)
            if known is not None and known.given is given:
                return known.block
        values = self.inputs.block(replace(step, overwritten=False), self.comm)
        self.inputs.resident.pop(key, None)  # it stays on the GPU instead
        array = self.backend.allocate(values.shape, values.dtype.name)
        self.copies.upload(np.ascontiguousarray(values), array)
        if stays:
            self.backend.resident[key] = array
        elif given_stays:
            self.inputs.on_device[key] = OnDevice(given, array)
        return array

    def close(self) -> None:
        """Wait until the caller may change the given arrays, and end what runs in background."""
        if self.last_copy is not None:
            self.last_copy.wait()
        self.inputs.close()

    # ---- arrays in host memory ------------------------------------------------------------------

    def _begin_copies(self, step: Load, given: HostArray, make: Callable[[], Any]) -> None:
        """Begin to copy a given array to its slot, if the array need not be copied on the host."""
        is_stored_alike = given.flags.c_contiguous and given.dtype == np.dtype(step.slot.dtype)
        if not is_stored_alike or not elements(step.region):
            return
        if given.nbytes <= MAX_SMALL_BYTES:
            pinned = self.copies.memory.array(given.nbytes)
            if pinned is not None:
                source = pinned.view(given.dtype).reshape(given.shape)
                source[...] = given
                self.copying[step.tensor] = self._copy_boxes(step, source, make())
        elif self.backend.is_pinned(given, self.run):
            self.copying[step.tensor] = self._copy_boxes(step, given, make())
            self.last_copy = self.copying[step.tensor][-1]

    def _copy_boxes(self, step: Load, source: HostArray, target: Any) -> list[DeviceCopy]:
        """Begin to copy a region of an array to its place in a slot."""
        values = source.reshape(source.shape or (1,))
        slot = target.reshape(target.shape or (1,))
        copies = []
        for there, here in boxes(step.region, step.place):
            copies.append(self.copies.begin(values[there], slot[here]))
        return copies

    def _fill_from_given(self, step: Load, given: HostArray, target: DeviceArray) -> None:
        """Copy a given array to its slot."""
        self._begin_copies(step, given, lambda: target)
        if step.tensor in self.copying:
            for copy in self.copying.pop(step.tensor):
                copy.join()
            return
        is_whole = given.shape == step.slot.shape and step.place == step.region
        is_stored_alike = given.flags.c_contiguous and given.dtype == target.dtype
        if is_whole and is_stored_alike:
            self.copies.upload(given, target)
            return

        def read(part: Region, _: Region, values: HostArray) -> None:
            self.inputs.read(replace(step, region=part), values, packed(part), self.comm)

        self._fill_by_parts(step, target, read)

    # ---- how slots are filled -------------------------------------------------------------------

    def _allocate_block(self, step: Load) -> HostArray:
        """Return host memory for what is loaded.

        A tensor without dimensions takes one element, even on a rank that loads nothing.
        """
        extents = shape(step.region) if step.slot.shape else (1,)
        array: HostArray = self.backend.allocate(extents, step.slot.dtype, "slow")
        return array

    def _can_read_parts(self, step: Load) -> bool:
        """Tell whether this rank can read any part at any time.

        It can if it generates the tensor, or if no other rank takes part and the dataset is not
        stored in chunks.
        """
        if self.inputs.keep or step.tensor in self.begun:
            return False
        dataset = self.inputs.dataset(step.tensor)
        if dataset is None:
            return True
        if not dataset.selected_shape or dataset.chunks is not None:
            return False
        nothing = np.empty((0,) * len(step.region), step.slot.dtype)
        return Reading(dataset, step.layout, self.comm.rank, nothing, step.region, step.place).alone

    def _fill_by_parts(self, step: Load, target: DeviceArray, read: ReadPart) -> None:
        """Read a part into a pinned buffer while the part before it is copied to the GPU."""
        self.copies.wait_for_kernels()
        dtype = step.slot.dtype
        itemsize = np.dtype(dtype).itemsize
        extents = step.slot.shape or (1,)
        count = max(1, PINNED_BUFFER_BYTES // itemsize)
        parts = chunks(step.region, count)
        parts_of_block = chunks(packed(step.region), count)
        places = chunks(step.place, count)
        for turn, (part, within, place) in enumerate(
            zip(parts, parts_of_block, places, strict=True)
        ):
            buffer = self.copies.pinned_buffer("up", turn, elements(part) * itemsize)
            read(part, within, buffer.view(dtype).reshape(shape(part)))
            run = flat_range(place, extents)
            if run is not None:
                copied = self.copies.start(buffer, target.reshape(-1)[slice(*run)])
            else:
                staged = self.backend.allocate((elements(part),), dtype)
                self.copies.wait_for_kernels()  # they may have used this memory before
                copied = self.copies.start(buffer, staged)
                self.copies.delay_kernels_until(copied)
                self.backend.unpack(staged, target, place)
            self.copies.in_use_until["up", turn % 2] = copied
        self.copies.delay_kernels_until(self.copies.record_event(self.copies.to_device))

    def _fill_from_block(self, step: Load, target: Any) -> None:
        """Fill a slot from a block in host memory.

        All ranks read the block together, or it was begun before.
        """
        memory_is_free = None
        if step.tensor in self.begun:
            values, memory_is_free = self.begun.pop(step.tensor)
        else:
            values = self._allocate_block(step)
        self.inputs.fill(replace(step, place=_place_in_block(step)), values, self.comm)
        if not elements(step.region):
            return
        if isinstance(target, np.ndarray):
            self.backend.unpack(values, target, step.place)
            return
        run = flat_range(step.place, step.slot.shape or (1,))
        if run is not None:
            flat_target = target.reshape(-1)[slice(*run)]
            self.copies.begin(values.reshape(-1), flat_target, memory_is_free).join()
            return

        def read(_: Region, within: Region, piece: HostArray) -> None:
            piece[...] = values[tuple(slice(*runs[0]) for runs in within)]

        self._fill_by_parts(step, target, read)

    def _fill_from_device(self, step: Load, given: Any, target: Any) -> None:
        """Fill a slot from an array that every rank has on its GPU."""
        extents = shape(step.region) if step.slot.shape else ()
        values = self.backend.region_of(given, step.region, extents)
        if isinstance(target, np.ndarray):
            values = on_host(values)
        self.backend.unpack(values, target, step.place)


def _place_in_block(step: Load) -> Region:
    """Return where what is loaded goes in a block of its own."""
    return packed(step.region) if step.slot.shape else step.place
