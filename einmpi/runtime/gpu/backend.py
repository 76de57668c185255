"""The CuPy backend of the execute loop: slots on one GPU, kernels on CuPy's current stream.

Its slow tier, for what does not fit on the GPU, is pinned host memory, then scratch files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from einmpi.comm.base import Comm
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.einsum import EinSum
from einmpi.kernels.cuda import dispatch, driver, group
from einmpi.kernels.cuda.capture import watch
from einmpi.kernels.cuda.capture.blas import CapturedBlas, load_blas
from einmpi.kernels.cuda.chains import whole_chain
from einmpi.kernels.cuda.driver import DeviceArray
from einmpi.kernels.cuda.launch import LabelRuns, Options, PreparedCall, is_in_place, key_of
from einmpi.kernels.cuda.nest import PACK_BYTES
from einmpi.kernels.cuda.updates.row_writes import prepare_row_writes
from einmpi.kernels.grouping import group_kernels
from einmpi.kernels.prepared import PreparedCalls
from einmpi.kernels.updates.placed_rows import find_placed_rows
from einmpi.kernels.views import view_operands
from einmpi.runtime.array_parts import as_region, first_rows, region_indices, select_operands
from einmpi.runtime.cpu.backend import NumpyBackend
from einmpi.runtime.gpu.binding import Gpu, bind
from einmpi.runtime.gpu.comm import COMMS_BY_TRANSPORT
from einmpi.runtime.gpu.copies import DeviceCopies, DeviceCopy, HostArray
from einmpi.runtime.sharing.arrays import NOTHING_SHARED
from einmpi.schedule.blocked_updates import BlockedUpdate, SparseBlockedUpdate
from einmpi.schedule.fused.chain import Chain
from einmpi.schedule.halo import Sweep
from einmpi.schedule.regions import Region, indices
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Group, Kernel


class GpuContext:
    """What all jobs of a rank share: its GPU, copies, and messages to other ranks' GPUs."""

    def __init__(self, comm: Comm, place: str) -> None:
        self.gpu: Gpu = bind(comm, place)
        self.copies = DeviceCopies(comm.cores)
        self.comm: Comm = COMMS_BY_TRANSPORT[self.gpu.transport](comm, self.copies)
        self.blas: CapturedBlas | None = None

    def captured_blas(self) -> CapturedBlas | None:
        """Return what captures matrix products; None as long as there were no products."""
        if self.blas is None:
            self.blas = load_blas()
        return self.blas


# By the id of a communicator. A context keeps its communicator alive, so no other gets the id.
_contexts: dict[int, GpuContext] = {}


def gpu_context(comm: Comm, place: str) -> GpuContext:
    """Return the context of a communicator: setting up NCCL takes long. All ranks call this."""
    if id(comm) not in _contexts:
        _contexts[id(comm)] = GpuContext(comm, place)
    return _contexts[id(comm)]


class CupyBackend:
    """A Backend whose arrays are CuPy's. Arrays in the slow tier are numpy's."""

    def __init__(
        self,
        context: GpuContext,
        fast_math: bool = False,
        tf32: bool = False,
        scratch: str | None = None,
        strict: bool = False,
    ) -> None:
        self.context = context
        self.copies = context.copies
        self.host = NumpyBackend(scratch=scratch)
        self.fast_math = fast_math
        self.tf32 = tf32
        self.strict = strict
        self.cupy = driver.cupy()
        self.calls = PreparedCalls()
        self.shared = NOTHING_SHARED
        self.reserved_bytes = 0
        self.resident: dict[Hashable, DeviceArray] = {}  # blocks of inputs that stay between calls

    @property
    def one_thread_backends(self) -> Sequence[CupyBackend]:
        return [self]

    def expect_many_runs(self, is_called_step: bool = False) -> None: ...

    def reserve(self, nbytes: int, count_given: Callable[[], int]) -> None:
        """Let CuPy's pool take this much from the driver at once; slots are then parts of it."""
        if nbytes > self.reserved_bytes:
            self.reserved_bytes = nbytes
            resident_bytes = sum(block.nbytes for block in self.resident.values())
            free_bytes = self.cupy.get_default_memory_pool().free_bytes()
            missing = nbytes - count_given() - resident_bytes - free_bytes
            if missing > 0:
                self.cupy.empty(missing, np.uint8)  # goes back to the pool, not to the driver

    def release(self) -> None:
        self.host.release()  # CuPy has a pool of its own

    def allocate(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        return self.cupy.empty(shape, dtype)

    # ---- the slow tier --------------------------------------------------------------------------

    def allocate_slow(self, shape: tuple[int, ...], dtype: str) -> HostArray:
        # Pinned memory cannot be swapped out: take at most half of what is free, shared among the
        # ranks of the node.
        limit = _available_bytes() // (2 * self.context.comm.ranks_on_node)
        pinned = self.copies.memory.array(prod(shape) * np.dtype(dtype).itemsize, limit)
        if pinned is None:
            return self.host.allocate_slow(shape, dtype)
        return pinned.view(dtype).reshape(shape)

    def is_pinned(self, array: HostArray, run: object) -> bool:
        """Return whether the GPU can copy a caller's array from where it is.

        An array that is given in a second run is pinned, if that leaves half of the host's memory.
        """
        limit = _physical_bytes() // (2 * self.context.comm.ranks_on_node)
        return self.copies.in_place.is_pinned(array, run, limit)

    def allocate_message(self, count: int, dtype: str, slow: bool) -> Any:
        if slow:
            return self.host.allocate_message(count, dtype, slow)
        return self.allocate((count,), dtype)

    def begin_copy(self, source: Any, target: Any) -> DeviceCopy:
        return self.copies.begin(source, target)

    # ---- messages -------------------------------------------------------------------------------

    # One of the two is in host memory, and the other on the GPU, where an exchange of slots copies
    # between the tiers. The values then pass through a packed copy on the side of the array.

    def pack(self, array: Any, region: Region, packed: Any) -> None:
        on_host = isinstance(array, np.ndarray)
        if on_host != isinstance(packed, np.ndarray):
            staged = (np if on_host else self.cupy).empty(packed.shape, packed.dtype)
            self.pack(array, region, staged)
            self.copies.copy(staged, packed)
        elif on_host:
            self.host.pack(array, region, packed)
        else:
            source = _at_least_1d(array)
            target = as_region(packed, region)
            for there, here in self._places(region):
                target[here] = source[there]

    def unpack(self, packed: Any, array: Any, region: Region) -> None:
        on_host = isinstance(array, np.ndarray)
        if on_host != isinstance(packed, np.ndarray):
            staged = (np if on_host else self.cupy).empty(packed.shape, packed.dtype)
            self.copies.copy(packed, staged)
            packed = staged
        if on_host:
            self.host.unpack(packed, array, region)
            return
        source = as_region(packed, region)
        target = _at_least_1d(array)
        for there, here in self._places(region):
            target[there] = source[here]

    def combine(self, aggregation: str, array: Any, region: Region, packed: Any) -> None:
        if isinstance(array, np.ndarray):
            self.host.combine(aggregation, array, region, packed)
            return
        ufunc = getattr(self.cupy, AGGREGATIONS[aggregation].combine.__name__)
        source = as_region(packed, region)
        target = _at_least_1d(array)
        for there, here in self._places(region):
            values = source[here]
            if array.dtype.name == "bfloat16":  # CuPy lacks some functions for it
                combined = ufunc(target[there].astype(np.float32), values.astype(np.float32))
                target[there] = combined.astype(array.dtype)
            else:
                target[there] = ufunc(target[there], values)

    def region_of(self, array: Any, region: Region, extents: tuple[int, ...]) -> DeviceArray:
        """Return a region as a contiguous array: the array itself if it is that already."""
        if not isinstance(array, self.cupy.ndarray):  # another library's array
            array = self.cupy.asarray(array)
        if array.shape == extents:
            return driver.contiguous(array)
        if array.ndim:
            for dimension, runs in enumerate(region):
                taken = slice(*runs[0]) if len(runs) == 1 else self.cupy.asarray(indices(runs))
                array = array[(slice(None),) * dimension + (taken,)]
        return driver.contiguous(array)

    def _places(self, region: Region) -> Iterator[list[tuple[Any, ...]]]:
        """Yield places in an array, and in what is packed; lists of positions are on the GPU."""
        for both in region_indices(region):
            places = []
            for place in both:
                if not all(isinstance(side, slice) for side in place):
                    watch.need_host()
                    place = tuple(
                        side if isinstance(side, slice) else self.cupy.asarray(side)
                        for side in place
                    )
                places.append(place)
            yield places

    # ---- kernels --------------------------------------------------------------------------------

    def take_rows(
        self, array: DeviceArray, dimension: int, rows: HostArray, taken: DeviceArray
    ) -> None:
        watch.need_host()
        every = (slice(None),) * dimension
        values = array[(*every, self.cupy.asarray(rows))]
        first_rows(taken, dimension, len(rows))[...] = values

    def put_rows(
        self, taken: DeviceArray, array: DeviceArray, dimension: int, rows: HostArray
    ) -> None:
        watch.need_host()
        every = (slice(None),) * dimension
        array[(*every, self.cupy.asarray(rows))] = first_rows(taken, dimension, len(rows))

    def compute_kernel(
        self, step: Kernel, operands: Sequence[DeviceArray], target: DeviceArray
    ) -> None:
        # The arrays of a step always have the same shapes and strides, but not the same addresses.
        alignments = tuple([array.data.ptr % PACK_BYTES for array in (*operands, target)])
        key = alignments, is_in_place(operands, target)
        self.calls.get(step, key, lambda: self._prepare(step, operands, target))(operands, target)

    def _prepare(
        self, step: Kernel, operands: Sequence[DeviceArray], target: DeviceArray
    ) -> PreparedCall:
        options = self._options(step.index)
        has_arithmetic = any(map(step.einsum.has_arithmetic, range(len(operands))))
        if not step.select and not has_arithmetic:
            return dispatch.prepare_einsum(step.einsum, operands, target, options)

        same_einsum: list[EinSum] = []  # calls are prepared for an EinSum that is always the same

        def call(operands: Sequence[DeviceArray], target: DeviceArray) -> None:
            if step.select:
                watch.need_host()
            chosen = select_operands(step, operands, self.cupy.asarray)
            as_strided = self.cupy.lib.stride_tricks.as_strided
            einsum, arrays = view_operands(step.einsum, chosen, step.index, as_strided)
            if not same_einsum:
                same_einsum.append(einsum)
            dispatch.compute_einsum(same_einsum[0], arrays, target, *options)

        return call

    def _options(self, index: LabelRuns) -> Options:
        return Options(index, self.fast_math, self.tf32, self.strict)

    def group_kernels(self, schedule: Schedule) -> Schedule:
        return group_kernels(schedule, group.RULE)

    def compute_group(self, step: Group | Sweep, arrays: Mapping[str, DeviceArray]) -> bool:
        assert isinstance(step, Group), "sweeps are made for CPUs"
        outer = {slot.name: arrays[slot.name] for slot in step.outer}
        return group.compute_group(step, outer, self.fast_math)

    def group_block(self, schedule: Schedule) -> Schedule:
        return self.group_kernels(schedule)

    def compute_chain(self, step: Chain, arrays: Mapping[str, DeviceArray]) -> int | None:
        if self.strict:
            return None  # kernels of whole chains leave out what a mask hides, inf and nan included
        return whole_chain.compute_chain(step, arrays, self.calls)

    def compute_update(
        self, step: BlockedUpdate, arrays: Mapping[str, DeviceArray], target: DeviceArray
    ) -> bool:
        return False

    def write_rows(
        self, step: Kernel, operands: Sequence[DeviceArray], target: DeviceArray
    ) -> bool:
        rows = find_placed_rows(step.einsum)
        if rows is None or operands[rows.operand] is not target:
            return False
        key = ("rows", *map(key_of, operands))
        write = self.calls.get(
            step, key, lambda: prepare_row_writes(step, operands, target, self._compute_part)
        )
        if write is not None:
            write(operands, target)
        return write is not None

    def _compute_part(
        self, einsum: EinSum, operands: Sequence[DeviceArray], target: DeviceArray, index: LabelRuns
    ) -> None:
        """Compute what a kernel needs first."""
        dispatch.compute_einsum(einsum, operands, target, *self._options(index))

    def compute_scattered_update(
        self,
        step: SparseBlockedUpdate,
        arrays: Mapping[str, DeviceArray],
        places: HostArray,
        target: DeviceArray,
    ) -> bool:
        return False

    # ---- the host -------------------------------------------------------------------------------

    def to_host(self, array: Any) -> HostArray:
        return array if isinstance(array, np.ndarray) else self.copies.download(array)

    def from_host(self, values: HostArray, array: Any) -> None:
        if values is not array:
            self.copies.upload(np.ascontiguousarray(values), array)

    def forget_inputs(self) -> None:
        self.resident.clear()

    def share_inputs(self, other: Any) -> None:
        self.resident = other.resident

    def wait(self) -> None:
        self.copies.to_host.synchronize()
        self.copies.to_device.synchronize()
        self.cupy.cuda.get_current_stream().synchronize()


def _available_bytes() -> int:
    """Return how much memory the system could give, including its file cache."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _at_least_1d(array: DeviceArray) -> DeviceArray:
    """Return an array without dimensions as a vector of one element, others as they are."""
    return array.reshape(array.shape or (1,))
