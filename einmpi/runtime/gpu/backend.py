"""The CuPy backend of the execute loop: slots on one GPU, kernels on CuPy's current stream.

Its slow tier, for what does not fit on the GPU, is pinned host memory, then scratch files.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from einmpi.comm.agreement import together
from einmpi.comm.base import Comm
from einmpi.errors import InputError, one_of
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.einsum import EinSum
from einmpi.kernels.cuda import capture, dispatch, driver, group
from einmpi.kernels.cuda.attention.chain import prepare_chain
from einmpi.kernels.cuda.capture import CapturedBlas, load_blas
from einmpi.kernels.cuda.driver import DeviceArray, cupy, nccl
from einmpi.kernels.cuda.nest import (
    PACK_BYTES,
    Options,
    is_in_place,
    key_of,
)
from einmpi.kernels.cuda.row_writes import prepare_row_writes
from einmpi.kernels.halo_parts import view_operands
from einmpi.kernels.index_sets import LabelRuns
from einmpi.kernels.prepared import PreparedCall, PreparedCalls
from einmpi.kernels.updates import find_placed_rows
from einmpi.process.environment import TRANSPORT_VARIABLE
from einmpi.runtime.backend import (
    NOTHING_SHARED,
    Arrays,
    ComputeCall,
    Tier,
    as_region,
    region_indices,
    select_operands,
)
from einmpi.runtime.cpu.backend import NumpyBackend
from einmpi.runtime.gpu.comm import COMMS_BY_TRANSPORT
from einmpi.runtime.gpu.copies import DeviceCopies, DeviceCopy, HostArray
from einmpi.schedule.compute import Compute, Kernel
from einmpi.schedule.passes import Fusions
from einmpi.schedule.regions import Region, indices, names_of
from einmpi.units import show_bytes

# ---- binding -------------------------------------------------------------------------------------
#
# Which GPU a rank uses, which ranks share it, and how messages travel between GPUs.


# How messages travel: the MPI library takes device memory; NCCL; through pinned host memory.
TRANSPORTS = ("mpi", "nccl", "host")


@dataclass(frozen=True)
class Gpu:
    """The GPU of a rank."""

    number: int  # among those that the process sees
    name: str
    memory: int  # bytes
    identity: str  # unique among all GPUs of all nodes
    # What a rank does not know without asking the others.
    ranks: int = 1  # that share it
    transport: str = ""  # of messages: one of TRANSPORTS

    def __str__(self) -> str:
        shared = f", shared by {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.name}{shared}"


def count_gpus(place: str = "GPU") -> int:
    """Return how many GPUs this process sees. Raise an InputError at `place` if there are none."""
    runtime = cupy(place).cuda.runtime
    try:
        count = int(runtime.getDeviceCount())
        reason = "CUDA sees none; CUDA_VISIBLE_DEVICES may hide them"
    except runtime.CUDARuntimeError as error:
        count = 0
        reason = " ".join(str(error).split())
    if not count:
        raise InputError(
            place,
            f"backend cupy needs a GPU: {reason:.200}",
            "an NVIDIA GPU with its driver, or backend numpy",
        )
    return count


def bind(comm: Comm, place: str) -> Gpu:
    """Choose this rank's GPU and make it the current one. All ranks call this together."""
    own = together(comm, lambda: _select_gpu(comm, place))
    wish = together(comm, _wished_transport, lambda wish: wish or "none")
    has_nccl = nccl() is not None
    texts = comm.allgather_text(f"{own.identity} {int(comm.cuda_aware)} {int(has_nccl)}")
    facts = [text.split() for text in texts]
    ranks_on_gpu = Counter(identity for identity, _, _ in facts)
    # NCCL needs at least two ranks, and a GPU for each of them.
    own_gpus = comm.size > 1 and max(ranks_on_gpu.values()) == 1
    all_aware = all(aware == "1" for _, aware, _ in facts)
    all_nccl = all(available == "1" for _, _, available in facts)
    transport = together(comm, lambda: choose_transport(wish, own_gpus, all_aware, all_nccl))
    return replace(own, ranks=ranks_on_gpu[own.identity], transport=transport)


def choose_transport(wish: str, own_gpus: bool, cuda_aware: bool, has_nccl: bool) -> str:
    """Return how messages travel between GPUs.

    `own_gpus` says that no two ranks share a GPU, which NCCL refuses. An MPI library that does not
    report to be CUDA-aware would crash on device memory, so it never gets any.
    """
    nccl_works = own_gpus and has_nccl
    if wish == "nccl" and not nccl_works:
        reason = "each rank needs a GPU of its own" if has_nccl else "CuPy finds no NCCL library"
        raise InputError(
            TRANSPORT_VARIABLE, f"nccl does not work here: {reason}", one_of(TRANSPORTS)
        )
    if wish:
        return wish
    if cuda_aware:
        return "mpi"
    return "nccl" if nccl_works else "host"


def check_gpu_memory(place: str, gpu: Gpu, needed: int) -> None:
    """Raise an InputError if the ranks that share a GPU need more memory than it has."""
    total = needed * gpu.ranks
    if total > gpu.memory:
        ranks = f" for {gpu.ranks} ranks" if gpu.ranks > 1 else ""
        raise InputError(
            place,
            f"this needs {show_bytes(total)}{ranks} on one GPU",
            f"at most the {show_bytes(gpu.memory)} of the {gpu.name}",
            'use more GPUs, or limit the memory with [plan] memory = "…"',
        )


def _select_gpu(comm: Comm, place: str) -> Gpu:
    """Make a GPU the current one: the ranks of a node take its GPUs in turn."""
    runtime = cupy(place).cuda.runtime
    # If the batch system shows each rank a single GPU, every rank takes number 0.
    number = comm.rank_on_node % count_gpus(place)
    runtime.setDevice(number)
    properties = runtime.getDeviceProperties(number)
    # A slice of a GPU (MIG) has a UUID of its own, but the bus id of the whole GPU.
    identity = bytes(properties.get("uuid", b"")).hex()
    if not identity:
        identity = f"{platform.node()}/{runtime.deviceGetPCIBusId(number)}"
    name = properties["name"].decode()
    memory = int(properties["totalGlobalMem"])
    return Gpu(number, name, memory, identity.replace(" ", "_"))


def _wished_transport() -> str:
    """Return the transport that the user asks for, or ""."""
    wish = os.environ.get(TRANSPORT_VARIABLE, "")
    if wish and wish not in TRANSPORTS:
        raise InputError(
            TRANSPORT_VARIABLE, f"there is no transport {wish!r}", one_of(TRANSPORTS, wish)
        )
    return wish


class GpuContext:
    """What all jobs of a rank share: its GPU, copies, and messages to other ranks' GPUs."""

    def __init__(self, comm: Comm, place: str) -> None:
        self.gpu: Gpu = bind(comm, place)
        self.copies = DeviceCopies(comm.cores)
        # Messages have buffers and streams of their own: a thread may send them.
        self.comm: Comm = COMMS_BY_TRANSPORT[self.gpu.transport](comm, DeviceCopies())
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
        self.fusions = Fusions(groups=group.RULE, groups_in_tiles=group.RULE)
        self.implementations = [self._by_row_writes, self._by_group, self._by_attention]
        self.reserved_bytes = 0
        self.resident: dict[Hashable, DeviceArray] = {}  # blocks of inputs that stay between calls
        self.repetition = 1  # all kernels are compiled

    @property
    def one_thread_backends(self) -> Sequence[CupyBackend]:
        return [self]

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

    # ---- memory and the slow tier ---------------------------------------------------------------

    def allocate(self, shape: tuple[int, ...], dtype: str, tier: Tier = "memory") -> Any:
        if tier == "memory":
            return self.cupy.empty(shape, dtype)
        if tier == "host":
            return self.host.allocate(shape, dtype)
        # Pinned memory cannot be swapped out: take at most half of what is free, shared among the
        # ranks of the node.
        limit = _available_bytes() // (2 * self.context.comm.ranks_on_node)
        pinned = self.copies.memory.array(prod(shape) * np.dtype(dtype).itemsize, limit)
        if pinned is None:
            return self.host.allocate(shape, dtype, tier)
        return pinned.view(dtype).reshape(shape)

    def is_pinned(self, array: HostArray, run: object) -> bool:
        """Return whether the GPU can copy a caller's array from where it is.

        An array that is given in a second run is pinned, if that leaves half of the host's memory.
        """
        limit = _physical_bytes() // (2 * self.context.comm.ranks_on_node)
        return self.copies.in_place.is_pinned(array, run, limit)

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

    def unpack(
        self, packed: Any, array: Any, region: Region, aggregation: str | None = None
    ) -> None:
        on_host = isinstance(array, np.ndarray)
        if on_host != isinstance(packed, np.ndarray):
            staged = (np if on_host else self.cupy).empty(packed.shape, packed.dtype)
            self.copies.copy(packed, staged)
            packed = staged
        if on_host:
            self.host.unpack(packed, array, region, aggregation)
            return
        source = as_region(packed, region)
        target = _at_least_1d(array)
        for there, here in self._places(region):
            values = source[here]
            if aggregation is not None:
                values = self._combined(aggregation, target[there], values)
            target[there] = values

    def _combined(self, aggregation: str, one: DeviceArray, two: DeviceArray) -> DeviceArray:
        ufunc = getattr(self.cupy, AGGREGATIONS[aggregation].combine.__name__)
        if one.dtype.name == "bfloat16":  # CuPy lacks some functions for it
            return ufunc(one.astype(np.float32), two.astype(np.float32)).astype(one.dtype)
        return ufunc(one, two)

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
                    capture.need_host()
                    place = tuple(map(self._side_on_device, place))
                places.append(place)
            yield places

    def _side_on_device(self, side: Any) -> Any:
        """Return a slice, or a list of positions on the GPU; what is listed for a step stays."""
        if isinstance(side, slice):
            return side
        return self.calls.get(side, "on the GPU", lambda: self.cupy.asarray(side))

    # ---- kernels --------------------------------------------------------------------------------

    def compute_kernel(
        self, kernel: Kernel, operands: Sequence[DeviceArray], target: DeviceArray
    ) -> None:
        # The arrays of a step always have the same shapes and strides, but not the same addresses.
        alignments = tuple([array.data.ptr % PACK_BYTES for array in (*operands, target)])
        key = alignments, is_in_place(operands, target)
        prepare = partial(self._prepare, kernel, operands, target)
        self.calls.get(kernel, key, prepare)(operands, target)

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
                capture.need_host()
            chosen = select_operands(step, operands, self.cupy.asarray)
            as_strided = self.cupy.lib.stride_tricks.as_strided
            einsum, arrays = view_operands(step.einsum, chosen, step.index, as_strided)
            if not same_einsum:
                same_einsum.append(einsum)
            dispatch.compute_einsum(same_einsum[0], arrays, target, *options)

        return call

    def _options(self, index: LabelRuns) -> Options:
        return Options(index, self.fast_math, self.tf32, self.strict)

    def key_of(self, arrays: Arrays) -> Hashable:
        used = [array for array in arrays.values() if not isinstance(array, np.ndarray)]
        addresses = [array.data.ptr for array in used]
        same = [addresses.index(address) for address in addresses]  # what is written over what
        return tuple(map(key_of, used)), tuple(same)

    # ---- implementations ------------------------------------------------------------------------

    def _by_group(self, step: Compute, arrays: Arrays) -> ComputeCall | None:
        """Kernels that share rows, as one launch: what passes between them stays in registers."""
        if step.tiles.kind != "cache":
            return None
        return group.prepare_group(step, arrays, self.fast_math)

    def _by_attention(self, step: Compute, arrays: Arrays) -> ComputeCall | None:
        """Attention and its gradients, by tensor cores."""
        # They leave out what a mask hides, inf and nan included.
        if step.tiles.kind != "memory" or self.strict:
            return None
        return prepare_chain(step, arrays)

    def _by_row_writes(self, step: Compute, arrays: Arrays) -> ComputeCall | None:
        """A kernel that writes over one of its operands, but only some rows of it."""
        if not step.is_plain:
            return None
        (kernel,) = step.kernels
        names = names_of(kernel.operands)
        operands = [arrays[name] for name in names]
        target = arrays[kernel.target.name]
        rows = find_placed_rows(kernel.einsum)
        if rows is None or operands[rows.operand] is not target:
            return None
        write = prepare_row_writes(kernel, operands, target, self._compute_part)
        if write is None:
            return None

        def compute(arrays: Arrays) -> int:
            write([arrays[name] for name in names], arrays[kernel.target.name])
            return 0

        return compute

    def _compute_part(
        self, einsum: EinSum, operands: Sequence[DeviceArray], target: DeviceArray, index: LabelRuns
    ) -> None:
        """Compute what a kernel needs first."""
        dispatch.compute_einsum(einsum, operands, target, *self._options(index))

    # ---- the host -------------------------------------------------------------------------------

    def to_host(self, array: Any) -> HostArray:
        return array if isinstance(array, np.ndarray) else self.copies.download(array)

    def from_host(self, values: HostArray, array: Any) -> None:
        if values is not array:
            self.copies.upload(np.ascontiguousarray(values), array)

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
