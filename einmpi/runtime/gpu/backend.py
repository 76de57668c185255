"""CuPy's way of what the execute loop needs: slots on one GPU, kernels on the current stream."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from einmpi.comm.base import Comm
from einmpi.graph.einsum import AGGREGATIONS
from einmpi.kernels.cuda import dispatch, driver, group
from einmpi.kernels.cuda.launch import PreparedCalls
from einmpi.kernels.cuda.nest import PACK_BYTES
from einmpi.kernels.grouping import group_kernels
from einmpi.runtime.backend import NumpyBackend, pieces, selected, shaped
from einmpi.runtime.gpu.binding import Gpu, bind
from einmpi.runtime.gpu.comm import COMMS
from einmpi.runtime.gpu.copies import DeviceCopies, DeviceCopy
from einmpi.schedule.regions import Region, indices
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Group, Kernel


class Station:
    """What the jobs of a rank share: its GPU, the streams for copies, the way to the other ranks' GPUs."""

    def __init__(self, comm: Comm, place: str) -> None:
        self.gpu: Gpu = bind(comm, place)
        self.copies = DeviceCopies()
        self.comm: Comm = COMMS[self.gpu.way](comm, self.copies)


_stations: dict[
    int, Station
] = {}  # by communicator; each keeps its own alive, so that no other gets its number


def station_of(comm: Comm, place: str) -> Station:
    """One for each communicator: to meet in NCCL takes long. All ranks call it."""
    if id(comm) not in _stations:
        _stations[id(comm)] = Station(comm, place)
    return _stations[id(comm)]


class CupyBackend:
    def __init__(
        self,
        station: Station,
        fast_math: bool = False,
        tf32: bool = False,
        scratch: str | None = None,
    ) -> None:
        self.station, self.copies = station, station.copies
        self.host = NumpyBackend(scratch=scratch)
        self.fast_math, self.tf32 = fast_math, tf32
        self.cupy = driver.cupy()
        self.calls = PreparedCalls()
        self.reserved = 0
        self.resident: dict[Any, Any] = {}  # blocks of inputs that stay between calls

    def reserve(self, nbytes: int) -> None:
        """Let the pool take this much from the driver at once; slots are then parts of it."""
        if nbytes > self.reserved:
            self.reserved = nbytes
            missing = nbytes - self.cupy.get_default_memory_pool().free_bytes()
            if missing > 0:
                self.cupy.empty(missing, np.uint8)  # goes back to the pool, not to the driver

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self.cupy.empty(shape, dtype)

    # ---- the slow tier: pinned memory of the host, then scratch files -----------------------------------------------

    def allocate_slow(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        # Half of what is free, shared among the ranks of the node: pinned memory cannot be swapped out.
        most = _available() // (2 * self.station.comm.ranks_on_node)
        pinned = self.copies.memory.array(prod(shape) * np.dtype(dtype).itemsize, most)
        return (
            self.host.allocate_slow(shape, dtype)
            if pinned is None
            else pinned.view(dtype).reshape(shape)
        )

    def allocate_message(self, count: int, dtype: str, slow: bool) -> Any:
        return (
            self.host.allocate_message(count, dtype, slow)
            if slow
            else self.allocate((count,), dtype)
        )

    def begin_copy(self, source: Any, target: Any) -> DeviceCopy:
        return self.copies.begin(source, target)

    # ---- messages; arrays in the slow tier are the host's ------------------------------------------------------------

    def pack(self, array: Any, region: Region, packed: Any) -> None:
        if isinstance(array, np.ndarray):
            self.host.pack(array, region, packed)
            return
        for there, here in pieces(region):
            shaped(packed, region)[self._place(here)] = _vector(array)[self._place(there)]

    def unpack(self, packed: Any, array: Any, region: Region) -> None:
        if isinstance(array, np.ndarray):
            self.host.unpack(packed, array, region)
            return
        for there, here in pieces(region):
            _vector(array)[self._place(there)] = shaped(packed, region)[self._place(here)]

    def combine(self, aggregation: str, array: Any, region: Region, packed: Any) -> None:
        if isinstance(array, np.ndarray):
            self.host.combine(aggregation, array, region, packed)
            return
        ufunc, target = getattr(self.cupy, AGGREGATIONS[aggregation].ufunc), _vector(array)
        for there, here in pieces(region):
            place, values = self._place(there), shaped(packed, region)[self._place(here)]
            if array.dtype.name == "bfloat16":  # CuPy has not all of its functions for it
                values = ufunc(target[place].astype(np.float32), values.astype(np.float32))
                target[place] = values.astype(array.dtype)
            else:
                target[place] = ufunc(target[place], values)

    def region_of(self, array: Any, region: Region, extents: tuple[int, ...]) -> Any:
        """Contiguous, of these extents; the array itself where it is that."""
        if not isinstance(array, self.cupy.ndarray):  # but of another library
            array = self.cupy.asarray(array)
        if array.shape == extents:
            return driver.contiguous(array)
        for dimension, runs in enumerate(region if array.ndim else ()):
            taken = slice(*runs[0]) if len(runs) == 1 else self.cupy.asarray(indices(runs))
            array = array[(slice(None),) * dimension + (taken,)]
        return driver.contiguous(array)

    def _place(self, place: tuple[Any, ...]) -> tuple[Any, ...]:
        """Lists of indices have to lie on the GPU too."""
        return tuple(side if isinstance(side, slice) else self.cupy.asarray(side) for side in place)

    # ---- kernels ----------------------------------------------------------------------------------------------------

    def compute(self, step: Kernel, operands: Sequence[Any], target: Any) -> None:
        # What a step's arrays look like never changes; where they lie does.
        places = tuple([array.data.ptr % PACK_BYTES for array in (*operands, target)])
        self.calls.get(step, places, lambda: self._prepared(step, operands, target))(
            operands, target
        )

    def _prepared(
        self, step: Kernel, operands: Sequence[Any], target: Any
    ) -> dispatch.PreparedCall:
        if not step.select:
            return dispatch.prepare_einsum(
                step.einsum, operands, target, step.index, self.fast_math, self.tf32
            )

        def run(operands: Sequence[Any], target: Any) -> None:
            chosen = selected(step, operands, self.cupy.asarray)
            dispatch.compute_einsum(
                step.einsum, chosen, target, step.index, self.fast_math, self.tf32
            )

        return run

    def arrange(self, schedule: Schedule) -> Schedule:
        return group_kernels(schedule, group.RULE)

    def compute_group(self, step: Group, arrays: Mapping[str, Any]) -> bool:
        return group.compute_group(
            step, {slot.name: arrays[slot.name] for slot in step.outer}, self.fast_math
        )

    # ---- host -------------------------------------------------------------------------------------------------------

    def to_host(self, array: Any) -> np.ndarray:
        return array if isinstance(array, np.ndarray) else self.copies.download(array)

    def from_host(self, values: np.ndarray, array: Any) -> None:
        if values is not array:
            self.copies.upload(np.ascontiguousarray(values), array)

    def wait(self) -> None:
        self.copies.down.synchronize()
        self.copies.up.synchronize()
        self.cupy.cuda.get_current_stream().synchronize()


def _available() -> int:
    """Bytes of memory that the system could give, what it keeps of files included."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(
                int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable")
            )
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _vector(array: Any) -> Any:
    """A number as a vector of one element."""
    return array.reshape(array.shape or (1,))
