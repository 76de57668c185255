"""Copies between host and GPU through pinned memory, on streams of their own: kernels go on meanwhile.

Kernels are on the current stream. A copy waits for those that were started before it, and those after it for the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from einmpi.kernels.cuda import driver
from einmpi.runtime.gpu.pinned import PinnedMemory

PIECE = 2**24  # bytes in one pinned buffer; copies below a few MiB do not reach the bus's speed


class DeviceCopies:
    """The streams and pinned buffers of a rank, two of each kind: one is copied while the host works on the other."""

    def __init__(self) -> None:
        self.cuda = driver.cupy().cuda
        self.down = self.cuda.Stream(non_blocking=True)  # device → host
        self.up = self.cuda.Stream(non_blocking=True)  # host → device
        self.memory = PinnedMemory(self.cuda, lambda: [self.event(self.down), self.event(self.up)])
        self.buffers: dict[tuple[str, int], np.ndarray] = {}
        self.busy: dict[tuple[str, int], Any] = {}  # the event after which a buffer is free

    # ---- any two arrays ---------------------------------------------------------------------------------------------

    def begin(self, source: Any, target: Any, after: Any = None) -> DeviceCopy:
        """Copy between host and device, or on the device: after an event, or the kernels so far, beside all others."""
        if not isinstance(source, np.ndarray) and not isinstance(target, np.ndarray):
            target[...] = source
            return DeviceCopy(self, self.so_far())
        runtime, up = self.cuda.runtime, isinstance(source, np.ndarray)
        kind, stream = (
            (runtime.memcpyHostToDevice, self.up) if up else (runtime.memcpyDeviceToHost, self.down)
        )
        stream.wait_event(self.so_far() if after is None else after)
        width, rows = _rows(source, target)
        for there, here, count, pitch, other in rows:
            # In pinned memory both run in the background; in other memory CUDA makes a copy of its own first.
            runtime.memcpy2DAsync(
                address(target) + here,
                other,
                address(source) + there,
                pitch,
                width,
                count,
                kind,
                stream.ptr,
            )
        return DeviceCopy(self, self.event(stream))

    # ---- one copy, not waited for -----------------------------------------------------------------------------------

    def start_down(self, source: Any, target: np.ndarray) -> Any:
        """From the device to pinned memory; the event after which it is there. Both are contiguous."""
        self._copy(target, source, self.cuda.runtime.memcpyDeviceToHost, self.down)
        return self.event(self.down)

    def start_up(self, source: np.ndarray, target: Any) -> Any:
        self._copy(target, source, self.cuda.runtime.memcpyHostToDevice, self.up)
        return self.event(self.up)

    def _copy(self, target: Any, source: Any, kind: int, stream: Any) -> None:
        if source.nbytes:
            self.cuda.runtime.memcpyAsync(
                address(target), address(source), source.nbytes, kind, stream.ptr
            )

    def event(self, stream: Any) -> Any:
        found = self.cuda.Event(disable_timing=True)
        found.record(stream)
        return found

    def so_far(self) -> Any:
        """The event after which the kernels that were started are done."""
        return self.event(self.cuda.get_current_stream())

    def after_kernels(self) -> None:
        """What is copied from here on waits for the kernels so far: they make it, or still use the memory."""
        kernels = self.so_far()
        self.down.wait_event(kernels)
        self.up.wait_event(kernels)

    def before_kernels(self, copied: Any) -> None:
        """Kernels from here on wait for a copy."""
        self.cuda.get_current_stream().wait_event(copied)

    def pinned(self, kind: str, number: int, nbytes: int) -> np.ndarray:
        """A buffer for one of the two turns, free to be used again."""
        key = kind, number % 2
        if key in self.busy:
            self.busy.pop(key).synchronize()
        if key not in self.buffers or self.buffers[key].size < nbytes:
            buffer = self.memory.array(max(nbytes, PIECE))
            if buffer is None:
                raise MemoryError(f"no {nbytes} bytes of pinned memory on the host")
            self.buffers[key] = buffer
        return self.buffers[key][:nbytes]

    # ---- whole arrays -----------------------------------------------------------------------------------------------

    def upload(self, values: np.ndarray, target: Any) -> None:
        """Contiguous values of any memory; they may change as soon as this returns."""
        self.after_kernels()
        source, flat = values.reshape(-1).view(np.uint8), as_bytes(target)
        for number, start in enumerate(range(0, source.size, PIECE)):
            part = source[start : start + PIECE]
            buffer = self.pinned("up", number, part.size)
            np.copyto(buffer, part)
            self.busy["up", number % 2] = self.start_up(buffer, flat[start : start + part.size])
        self.before_kernels(self.event(self.up))

    def download(self, source: Any, values: np.ndarray | None = None) -> np.ndarray:
        """The values of a contiguous array, in `values` if they are given. Done when this returns."""
        if values is None:
            values = np.empty(source.shape, source.dtype)
        self.after_kernels()
        flat, target = as_bytes(source), values.reshape(-1).view(np.uint8)
        starts = range(0, target.size, PIECE)
        coming: list[Any] = []
        for number in range(len(starts) + 1):
            if number < len(starts):
                part = flat[starts[number] : starts[number] + PIECE]
                buffer = self.pinned("down", number, part.size)
                coming.append((self.start_down(part, buffer), buffer, starts[number]))
            if number:
                event, buffer, start = coming[number - 1]
                event.synchronize()
                np.copyto(target[start : start + buffer.size], buffer)
        return values


@dataclass(frozen=True)
class DeviceCopy:
    """A copy that has begun."""

    copies: DeviceCopies
    event: Any

    def join(self) -> None:
        self.copies.before_kernels(self.event)

    def wait(self) -> None:
        self.event.synchronize()


def address(array: Any) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def _rows(source: Any, target: Any) -> tuple[int, list[tuple[int, int, int, int, int]]]:
    """Two arrays of the same shape as rows of so many bytes that lie in one piece in both: (bytes, [(where the first
    row is in the source, and in the target, how many rows, bytes from one to the next in the source, and in the
    target)])."""
    extents, inner, width = target.shape, target.ndim, target.dtype.itemsize
    if 0 in extents:
        return 0, []
    while inner and (
        extents[inner - 1] == 1 or source.strides[inner - 1] == target.strides[inner - 1] == width
    ):
        inner -= 1
        width *= extents[inner]
    if inner == 0:
        return width, [(0, 0, 1, width, width)]
    count, pitch, other = extents[inner - 1], source.strides[inner - 1], target.strides[inner - 1]
    found = []
    for position in np.ndindex(extents[: inner - 1]):
        there, here = (
            sum(k * stride for k, stride in zip(position, array.strides, strict=False))
            for array in (source, target)
        )
        found.append((there, here, count, pitch, other))
    return width, found


def as_bytes(array: Any) -> Any:
    """A contiguous array, on host or device, as bytes one after another. Nothing is copied."""
    return array.reshape(-1).view(np.uint8)


def cut(array: Any, nbytes: int) -> Sequence[Any]:
    """Its bytes in pieces of so many; both ends of a message cut alike."""
    flat = as_bytes(array)
    return [flat[start : start + nbytes] for start in range(0, flat.size, nbytes)]


def on_host(array: Any) -> Any:
    """The array, or a copy in the host's memory of one that lies on a GPU."""
    if not driver.is_device_array(array):
        return array
    cupy = driver.cupy()
    found = driver.contiguous(cupy.asarray(array))  # it may be of another library
    # A small one is there long before there are pinned buffers to copy it through.
    return cupy.asnumpy(found) if found.nbytes <= PIECE else DeviceCopies().download(found)
