"""Copies between host and GPU, on streams of their own, so that kernels run meanwhile.

Kernels run on the current stream. A copy waits for the kernels that were started before it, and
kernels that are started after it wait for the copy. Arrays in ordinary host memory pass through
pinned buffers, piece by piece.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.kernels.cuda import capture, driver
from einmpi.kernels.cuda.driver import DeviceArray
from einmpi.kernels.prepared import address_of

# ---- pinned --------------------------------------------------------------------------------------
#
# Pinned host memory: memory that a GPU copies from and to while the host goes on.
#
# Pinned memory cannot be swapped out and takes long to allocate, so blocks are used again.


HostArray: TypeAlias = npt.NDArray[Any]

# Copies of smaller arrays take so little that they need not be pinned where they are.
MIN_PINNED_IN_PLACE_BYTES = 2**20
PORTABLE = 1  # a flag of CUDA: the memory is pinned for all GPUs


class PinnedMemory:
    """Blocks of pinned memory.

    A block is used again when nothing refers to it any more and all copies that were begun by then
    are done. Otherwise the host would overwrite what a GPU still reads.

    `begun_copies` returns events after which all copies begun so far are done.
    """

    def __init__(self, cuda: Any, begun_copies: Callable[[], list[Any]]) -> None:
        self.cuda = cuda
        self.begun_copies = begun_copies
        # By size: the events to wait for, and the block.
        self.unused: dict[int, list[tuple[list[Any], Any]]] = {}

    def array(self, nbytes: int, limit: int | None = None) -> npt.NDArray[np.uint8] | None:
        """Return an array of bytes in pinned memory.

        Return None if that takes a new block of more than `limit` bytes, or if the system has no
        more pinned memory.
        """
        for number, (events, block) in enumerate(self.unused.get(nbytes, ())):
            if all(event.done for event in events):
                del self.unused[nbytes][number]
                return self._array_on(nbytes, block)
        if limit is not None and nbytes > limit:
            return None
        try:
            block = self.cuda.alloc_pinned_memory(max(nbytes, 1))
        except self.cuda.runtime.CUDARuntimeError:
            return None
        return self._array_on(nbytes, block)

    def _array_on(self, nbytes: int, block: Any) -> npt.NDArray[np.uint8]:
        array = np.frombuffer(block, np.uint8, nbytes)
        # Views keep the array alive, so it is collected after the last of them. At the end of the
        # process nothing is given back, because CUDA may be gone by then.
        weakref.finalize(array, self._give_back, nbytes, block).atexit = False
        return array

    def _give_back(self, nbytes: int, block: Any) -> None:
        self.unused.setdefault(nbytes, []).append((self.begun_copies(), block))


@dataclass
class _GivenArray:
    """An array of the caller that owns its memory."""

    address: int
    nbytes: int
    first_run: object  # in which it was given
    is_pinned: bool | None = None  # None: not tried yet


class PinnedInPlace:
    """The memory of arrays that callers give again and again, pinned where it is.

    Pinning takes longer than one copy, so it is done when an array is given a second time. The
    memory is pinned until the array is collected.
    """

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime
        self.given: dict[int, _GivenArray] = {}  # by the id of the array that owns the memory
        self.nbytes = 0  # pinned now

    def is_pinned(self, array: HostArray, run: object, limit: int) -> bool:
        """Return whether a GPU can copy an array from where it is; pin it if it is given again.

        `run` is the run in which it is given. No more than `limit` bytes are pinned in all.
        """
        owner = _owner_of(array)
        if owner is None or owner.nbytes < MIN_PINNED_IN_PLACE_BYTES:
            return False
        address = address_of(owner)
        known = self.given.get(id(owner))
        if known is None:
            self.given[id(owner)] = _GivenArray(address, owner.nbytes, run)
            # At the end of the process CUDA may be gone before the array.
            weakref.finalize(owner, self._forget, id(owner)).atexit = False
            return False
        has_moved = (known.address, known.nbytes) != (address, owner.nbytes)
        if known.first_run is run or has_moved:
            return False
        if known.is_pinned is None:
            known.is_pinned = self._pin(known, limit)
        return known.is_pinned

    def _pin(self, given: _GivenArray, limit: int) -> bool:
        if self.nbytes + given.nbytes > limit:
            return False
        try:
            self.runtime.hostRegister(given.address, given.nbytes, PORTABLE)
        except self.runtime.CUDARuntimeError:
            return False  # such as memory that is pinned already, or that of a file
        self.nbytes += given.nbytes
        return True

    def _forget(self, identity: int) -> None:
        given = self.given.pop(identity)
        if given.is_pinned:
            self.runtime.hostUnregister(given.address)
            self.nbytes -= given.nbytes


def _owner_of(array: HostArray) -> HostArray | None:
    """Return the array that owns the memory of a view; None if the memory is not numpy's."""
    owner: Any = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return owner if type(owner) is np.ndarray and owner.flags.owndata else None


# Bytes of a pinned buffer. Copies of less than a few MiB do not reach the speed of the bus.
PINNED_BUFFER_BYTES = 2**24
# One thread copies to pinned memory at a fraction of the speed of the bus.
MAX_COPYING_THREADS = 8
MIN_BYTES_PER_THREAD = 2**20


Event: TypeAlias = Any  # cupy.cuda.Event
Stream: TypeAlias = Any  # cupy.cuda.Stream


class DeviceCopies:
    """The streams and pinned buffers of a rank.

    There are two buffers for each purpose: the GPU copies one while the host works on the other.
    """

    def __init__(self, threads: int = 1) -> None:
        self.threads = min(threads, MAX_COPYING_THREADS)  # that copy to pinned buffers
        self.background: ThreadPoolExecutor | None = None
        self.cuda = driver.cupy().cuda
        self.to_host: Stream = self.cuda.Stream(non_blocking=True)
        self.to_device: Stream = self.cuda.Stream(non_blocking=True)
        self.memory = PinnedMemory(self.cuda, self._events_after_copies)
        self.in_place = PinnedInPlace(self.cuda.runtime)
        self.buffers: dict[tuple[str, int], npt.NDArray[np.uint8]] = {}
        # The event after which a buffer may be overwritten.
        self.in_use_until: dict[tuple[str, int], Event] = {}

    # ---- any two arrays -------------------------------------------------------------------------

    def begin(self, source: Any, target: Any, after: Event = None) -> DeviceCopy:
        """Begin a copy between host and device, or on the device.

        It starts after an event, by default after the kernels that were started so far.
        """
        capture.need_host()
        from_host = isinstance(source, np.ndarray)
        if not from_host and not isinstance(target, np.ndarray):
            target[...] = source
            return DeviceCopy(self, self.event_after_kernels())
        kind, stream = self._direction(from_host)
        stream.wait_event(self.event_after_kernels() if after is None else after)
        for rows in _blocks_of_rows(source, target):
            # From and to pinned memory this runs in the background. For other memory CUDA first
            # makes a copy of its own.
            self.cuda.runtime.memcpy2DAsync(*rows, kind, stream.ptr)
        return DeviceCopy(self, self.record_event(stream))

    # ---- one copy that is not waited for --------------------------------------------------------

    def start(self, source: Any, target: Any) -> Event:
        """Start a copy from or to pinned memory; return the event after which it is done.

        Both arrays are contiguous, and one of them is on the device.
        """
        kind, stream = self._direction(isinstance(source, np.ndarray))
        if source.nbytes:
            self.cuda.runtime.memcpyAsync(
                address(target), address(source), source.nbytes, kind, stream.ptr
            )
        return self.record_event(stream)

    def _direction(self, from_host: bool) -> tuple[int, Stream]:
        """Return CUDA's number for copies in one direction, and their stream."""
        runtime = self.cuda.runtime
        if from_host:
            return runtime.memcpyHostToDevice, self.to_device
        return runtime.memcpyDeviceToHost, self.to_host

    # ---- who waits for whom ---------------------------------------------------------------------

    def record_event(self, stream: Stream) -> Event:
        """Return an event after which all work is done that a stream has so far."""
        event = self.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def event_after_kernels(self) -> Event:
        """Return an event after which the kernels that were started so far are done."""
        return self.record_event(self.cuda.get_current_stream())

    def _events_after_copies(self) -> list[Event]:
        return [self.record_event(self.to_host), self.record_event(self.to_device)]

    def wait_for_kernels(self) -> None:
        """Let copies from here on wait for the kernels so far, which still use the memory."""
        kernels = self.event_after_kernels()
        self.to_host.wait_event(kernels)
        self.to_device.wait_event(kernels)

    def delay_kernels_until(self, copied: Event) -> None:
        """Let kernels from here on wait for a copy."""
        self.cuda.get_current_stream().wait_event(copied)

    def pinned_buffer(self, purpose: str, turn: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return one of the two buffers for a purpose, once it may be overwritten."""
        key = purpose, turn % 2
        if key in self.in_use_until:
            self.in_use_until.pop(key).synchronize()
        if key not in self.buffers or self.buffers[key].size < nbytes:
            buffer = self.memory.array(max(nbytes, PINNED_BUFFER_BYTES))
            if buffer is None:
                raise MemoryError(f"no {nbytes} bytes of pinned memory on the host")
            self.buffers[key] = buffer
        return self.buffers[key][:nbytes]

    # ---- whole arrays ---------------------------------------------------------------------------

    def upload(self, values: HostArray, target: DeviceArray) -> None:
        """Copy contiguous values in any host memory; they may change as soon as this returns."""
        capture.need_host()
        self.wait_for_kernels()
        source = values.reshape(-1).view(np.uint8)
        target_bytes = as_bytes(target)
        for turn, start in enumerate(range(0, source.size, PINNED_BUFFER_BYTES)):
            piece = source[start : start + PINNED_BUFFER_BYTES]
            buffer = self.pinned_buffer("up", turn, piece.size)
            self._copy_to_buffer(piece, buffer)
            copied = self.start(buffer, target_bytes[start : start + piece.size])
            self.in_use_until["up", turn % 2] = copied
        self.delay_kernels_until(self.record_event(self.to_device))

    def copy(self, source: Any, target: Any) -> None:
        """Copy a contiguous array from host to device, or the other way."""
        if isinstance(source, np.ndarray):
            self.upload(source, target)
        else:
            self.download(source, target)

    def _copy_to_buffer(self, piece: HostArray, buffer: HostArray) -> None:
        """Copy a piece of a host array to a pinned buffer, by several threads if it is large."""
        threads = min(self.threads, piece.size // MIN_BYTES_PER_THREAD)
        if threads <= 1:
            np.copyto(buffer, piece)
            return
        if self.background is None:
            self.background = ThreadPoolExecutor(self.threads, "copying")
        share = -(-piece.size // threads)
        shares = [slice(start, start + share) for start in range(0, piece.size, share)]
        copies = [self.background.submit(np.copyto, buffer[part], piece[part]) for part in shares]
        for copy in copies:
            copy.result()

    def download(self, source: DeviceArray, values: HostArray | None = None) -> HostArray:
        """Return the values of a contiguous array, in `values` if that is given.

        While the host copies a piece out of one pinned buffer, the GPU fills the other.
        """
        capture.need_host()
        if values is None:
            values = np.empty(source.shape, source.dtype)
        self.wait_for_kernels()
        source_bytes = as_bytes(source)
        target = values.reshape(-1).view(np.uint8)
        under_way: list[tuple[Event, HostArray, int]] = []
        for turn, start in enumerate(range(0, target.size, PINNED_BUFFER_BYTES)):
            piece = source_bytes[start : start + PINNED_BUFFER_BYTES]
            buffer = self.pinned_buffer("down", turn, piece.size)
            under_way.append((self.start(piece, buffer), buffer, start))
            is_last = start + piece.size == target.size
            while len(under_way) > (0 if is_last else 1):
                copied, filled, place = under_way.pop(0)
                copied.synchronize()
                np.copyto(target[place : place + filled.size], filled)
        return values


@dataclass(frozen=True)
class DeviceCopy:
    """A copy that has begun."""

    copies: DeviceCopies
    event: Event

    def join(self) -> None:
        self.copies.delay_kernels_until(self.event)

    def wait(self) -> None:
        self.event.synchronize()


def address(array: Any) -> int:
    """Return where an array begins, in host or device memory."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def _blocks_of_rows(source: Any, target: Any) -> Iterator[tuple[int, ...]]:
    """Describe two arrays of one shape as blocks of rows that are contiguous in both.

    Yield for each block what CUDA takes: the address and the stride of rows in the target, then in
    the source, the bytes of a row, and the number of rows.
    """
    extents = target.shape
    row_bytes = target.dtype.itemsize
    outer = target.ndim  # the dimensions that are not part of a row
    if 0 in extents:
        return
    while outer:
        strides = {source.strides[outer - 1], target.strides[outer - 1]}
        if extents[outer - 1] != 1 and strides != {row_bytes}:
            break
        outer -= 1
        row_bytes *= extents[outer]
    if outer == 0:
        yield address(target), row_bytes, address(source), row_bytes, row_bytes, 1
        return
    for position in np.ndindex(extents[: outer - 1]):
        places: list[int] = []
        for array in (target, source):
            places.append(address(array) + _offset(position, array.strides))
            places.append(array.strides[outer - 1])
        yield *places, row_bytes, extents[outer - 1]


def _offset(position: Sequence[int], strides: Sequence[int]) -> int:
    """Return the offset in bytes of a position in the first dimensions of an array."""
    return sum(index * stride for index, stride in zip(position, strides, strict=False))


def as_bytes(array: Any) -> Any:
    """Return a contiguous array, on host or device, as a vector of bytes, without a copy."""
    return array.reshape(-1).view(np.uint8)


def pieces_of_bytes(array: Any, nbytes: int) -> list[Any]:
    """Return the bytes of an array in pieces of a given size; both ends of a message cut alike."""
    flat = as_bytes(array)
    return [flat[start : start + nbytes] for start in range(0, flat.size, nbytes)]


def on_host(array: Any) -> Any:
    """Return the array itself if it is in host memory, and a copy in host memory otherwise."""
    if not driver.is_device_array(array):
        return array
    cupy = driver.cupy()
    values = driver.contiguous(cupy.asarray(array))  # it may be another library's array
    if values.nbytes <= PINNED_BUFFER_BYTES:
        # A small array is copied faster than pinned buffers are allocated.
        return cupy.asnumpy(values)
    return DeviceCopies().download(values)
