"""Inputs for slots on a GPU: read or made in host memory, copied piece by piece while the next piece is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from einmpi.comm.base import Comm
from einmpi.compiled.dist_array import DistArray
from einmpi.compiled.inputs import Inputs
from einmpi.files.reading import Reading
from einmpi.kernels.cuda.driver import contiguous, is_device_array
from einmpi.runtime.gpu.backend import CupyBackend
from einmpi.runtime.gpu.copies import PIECE, on_host
from einmpi.schedule.regions import Region, chunks, elements, flat_range, packed, shape
from einmpi.schedule.steps import Load


class DeviceInputs:
    """What the execute loop asks for, from `inputs`, which knows only host memory, and `comm`, which does too."""

    def __init__(self, inputs: Inputs, backend: CupyBackend, comm: Comm) -> None:
        self.inputs, self.backend, self.copies, self.comm = inputs, backend, backend.copies, comm
        # Blocks that are read in the background; the event after which their slots' memory is used for nothing else.
        self.begun: dict[str, tuple[np.ndarray, Any]] = {}

    def begin(self, step: Load, make: Callable[[], Any], comm: Comm, outside: bool) -> None:
        """Into host memory: where the slot is, or for this alone. The slot is made here in any case, so that the copy
        to it waits for no kernel that begins later."""
        if outside:
            self.inputs.begin(step, make, self.comm)
            return

        def make_block() -> np.ndarray:
            make()
            block = self._block(step)
            self.begun[step.tensor] = block, self.copies.so_far()
            return block

        self.inputs.begin(replace(step, place=_place(step)), make_block, self.comm)

    def fill(self, step: Load, target: Any, comm: Comm) -> None:
        given = self.inputs.given.get(step.tensor)
        if is_device_array(given):
            self._fill_from_device(step, given, target)
        elif step.tensor not in self.begun and isinstance(
            target, np.ndarray
        ):  # a slot in the slow tier
            self.inputs.fill(step, target, self.comm)
        elif self._in_pieces(step):
            self._fill_in_pieces(
                step,
                target,
                lambda there, _, values: self.inputs.read(
                    replace(step, region=there), values, packed(there), self.comm
                ),
            )
        else:
            self._fill_from_host(step, target)

    def block(self, step: Load, comm: Comm) -> Any:
        given = self.inputs.given.get(step.tensor)
        if is_device_array(given):
            return self.backend.region_of(given, step.region, step.slot.shape)
        if isinstance(given, DistArray) and is_device_array(given.local):
            return contiguous(given.local)
        key = step.tensor, step.region
        if given is None and key in self.backend.resident:
            return self.backend.resident[key]
        values = self.inputs.block(step, self.comm)
        self.inputs.resident.pop(key, None)  # it stays on the GPU instead
        array = self.backend.allocate(values.shape, values.dtype.name)
        self.copies.upload(np.ascontiguousarray(values), array)
        if given is None:
            self.backend.resident[key] = array
        return array

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _block(self, step: Load) -> np.ndarray:
        """Host memory for what is loaded. A number has room for one, also where none comes."""
        return self.backend.allocate_slow(
            shape(step.region) if step.slot.shape else (1,), step.slot.dtype
        )

    def _in_pieces(self, step: Load) -> bool:
        """Whether this rank can take any part when it likes: made here, or read by nobody else and not in chunks."""
        if self.inputs.keep or step.tensor in self.begun:
            return False
        dataset = self.inputs.dataset(step.tensor)
        if dataset is None:
            return True
        if not dataset.shape or dataset.chunks is not None:
            return False
        nothing = np.empty((0,) * len(step.region), step.slot.dtype)
        return Reading(dataset, step.layout, self.comm.rank, nothing, step.region, step.place).alone

    def _fill_in_pieces(
        self, step: Load, target: Any, read: Callable[[Region, Region, np.ndarray], None]
    ) -> None:
        """`read` fills an array with a part of the region, which lies at a place in a block of its own."""
        self.copies.after_kernels()
        itemsize, extents = np.dtype(step.slot.dtype).itemsize, step.slot.shape or (1,)
        regions = (
            chunks(region, max(1, PIECE // itemsize))
            for region in (step.region, packed(step.region), step.place)
        )
        for number, (there, within, here) in enumerate(zip(*regions, strict=True)):
            buffer = self.copies.pinned("up", number, elements(there) * itemsize)
            read(there, within, buffer.view(step.slot.dtype).reshape(shape(there)))
            run = flat_range(here, extents)
            if run is not None:
                copied = self.copies.start_up(buffer, target.reshape(-1)[slice(*run)])
            else:
                staged = self.backend.allocate((elements(there),), step.slot.dtype)
                self.copies.after_kernels()  # kernels may have used this memory
                copied = self.copies.start_up(buffer, staged)
                self.copies.before_kernels(copied)
                self.backend.unpack(staged, target, here)
            self.copies.busy["up", number % 2] = copied
        self.copies.before_kernels(self.copies.event(self.copies.up))

    def _fill_from_host(self, step: Load, target: Any) -> None:
        """By way of a block in host memory: all ranks read it together, or it was begun before."""
        values, free = (
            self.begun.pop(step.tensor) if step.tensor in self.begun else (self._block(step), None)
        )
        self.inputs.fill(replace(step, place=_place(step)), values, self.comm)
        if not elements(step.region):
            return
        if isinstance(target, np.ndarray):
            self.backend.unpack(values, target, step.place)
            return
        run = flat_range(step.place, step.slot.shape or (1,))
        if run is not None:
            self.copies.begin(values.reshape(-1), target.reshape(-1)[slice(*run)], free).join()
            return

        def read(_: Region, within: Region, piece: np.ndarray) -> None:
            piece[...] = values[tuple(slice(*runs[0]) for runs in within)]

        self._fill_in_pieces(step, target, read)

    def _fill_from_device(self, step: Load, given: Any, target: Any) -> None:
        """From an array that every rank has on its GPU."""
        values = self.backend.region_of(
            given, step.region, shape(step.region) if step.slot.shape else ()
        )
        self.backend.unpack(
            on_host(values) if isinstance(target, np.ndarray) else values, target, step.place
        )


def _place(step: Load) -> Region:
    """Of what is loaded, in host memory for that alone."""
    return packed(step.region) if step.slot.shape else step.place
