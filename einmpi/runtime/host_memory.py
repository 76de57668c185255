"""Arrays in memory of the host. That of large ones is used again, since new memory costs a page
fault for every few kilobytes, which can take longer than to compute what is written there."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import sys
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.errors import EinmpiError, InputError
from einmpi.process.environment import SCRATCH_VARIABLE, why_open_to_others

HostArray: TypeAlias = npt.NDArray[Any]
Memory: TypeAlias = npt.NDArray[np.uint8]

ALIGNMENT = 64  # bytes: equal alignment on all ranks, so that equal work gives equal bits
MOST_BYTES_OF_SMALL_ARRAY = 2**12
ARRAYS_ALLOCATED_TOGETHER = 4
MIN_RECYCLED_BYTES = 2**16  # of an array: the allocator may return larger ones to the system


def aligned_empty(shape: tuple[int, ...], dtype: str | np.dtype[Any]) -> HostArray:
    """Return a new array with any values, aligned like those of all ranks."""
    kind = np.dtype(dtype)
    return _array_in(np.empty(prod(shape) * kind.itemsize + ALIGNMENT, np.uint8), shape, kind)


def _array_in(memory: Memory, shape: tuple[int, ...], dtype: np.dtype[Any]) -> HostArray:
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory.data))  # faster than `address_of`
    return np.ndarray(shape, dtype, memory, -address % ALIGNMENT)


class SmallArrays:
    """New small arrays of one shape, for one caller at a time. Several are allocated together.

    An array keeps the memory of those that were allocated with it.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape = (ARRAYS_ALLOCATED_TOGETHER, *shape)
        self.dtype = dtype
        nbytes = max(1, prod(shape) * dtype.itemsize)
        self.distance = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.strides = (self.distance, *np.empty(shape, dtype).strides)
        self.ready: list[HostArray] = []

    def take(self) -> HostArray:
        """Return an array with any values, as `aligned_empty` does."""
        if not self.ready:
            self._allocate()
        return self.ready.pop()

    def _allocate(self) -> None:
        memory = aligned_empty((ARRAYS_ALLOCATED_TOGETHER * self.distance,), np.dtype(np.uint8))
        arrays = np.ndarray(self.shape, self.dtype, memory, 0, self.strides)
        for number in range(ARRAYS_ALLOCATED_TOGETHER):
            self.ready.append(arrays[number, ...])  # an array, even without dimensions


class RecycledMemory:
    """The memory of large arrays. It is in use as long as there is an array in it, or a view.

    What is not in use any more is used for the next array of the same size. There is never more
    memory than was in use at once.
    """

    def __init__(self) -> None:
        self.blocks: list[Memory] = []  # the one that was made or used last comes last
        self.most_in_use = 0  # bytes
        self.idle_references = _references_of_idle_block()
        self.lock = threading.Lock()

    def array(self, shape: tuple[int, ...], dtype: str) -> HostArray:
        """Return an array like `aligned_empty`, in memory that was used before if there is any."""
        kind = np.dtype(dtype)
        nbytes = prod(shape) * kind.itemsize
        if nbytes < MIN_RECYCLED_BYTES:
            return aligned_empty(shape, dtype)
        return _array_in(self.take(nbytes + ALIGNMENT), shape, kind)

    def take(self, nbytes: int) -> Memory:
        """Return idle memory of this size, or new memory where there is none."""
        with self.lock:  # transfers in the background take memory too
            if self.blocks:
                return self._take(nbytes)
            self.most_in_use = max(self.most_in_use, nbytes)
            self.blocks.append(np.empty(nbytes, np.uint8))
            return self.blocks[-1]

    def _take(self, nbytes: int) -> Memory:
        idle = []
        in_use = nbytes
        for position in range(len(self.blocks)):
            if sys.getrefcount(self.blocks[position]) == self.idle_references:
                idle.append(position)
            else:
                in_use += self.blocks[position].nbytes
        self.most_in_use = max(self.most_in_use, in_use)
        for position in idle:
            if self.blocks[position].nbytes == nbytes:
                self.blocks.append(self.blocks.pop(position))
                return self.blocks[-1]
        self._release_idle(idle, self.most_in_use - in_use)
        self.blocks.append(np.empty(nbytes, np.uint8))
        return self.blocks[-1]

    def _release_idle(self, idle: list[int], most: int) -> None:
        """Give up idle blocks, those used long ago first, until they have at most `most` bytes."""
        total = sum(self.blocks[position].nbytes for position in idle)
        released = []
        for position in idle:
            if total > most:
                total -= self.blocks[position].nbytes
                released.append(position)
        for position in reversed(released):
            del self.blocks[position]

    def release(self) -> None:
        """Give up all memory; what is in use stays with its arrays."""
        with self.lock:  # another run of the same job may be looking for idle blocks
            self.blocks.clear()
            self.most_in_use = 0


def _references_of_idle_block() -> int:
    """Return how many references `sys.getrefcount` counts for a block that only a list has."""
    blocks = [np.empty(0, np.uint8)]
    return sys.getrefcount(blocks[0])


# ---- scratch -------------------------------------------------------------------------------------
#
# Arrays in scratch files, for what does not fit into memory, and copies in the background.


SMALL_COPY_BYTES = 2**16  # copied in less time than it takes to wake another thread
MANY_FILES = 2**16  # about as many as a process can map


def scratch_folder(requested: str | None) -> str:
    """Return the folder for scratch files.

    It is the one that the environment names, else the job's, else the one for temporary files.
    """
    return os.environ.get(SCRATCH_VARIABLE) or requested or tempfile.gettempdir()


def check_folder(requested: str | None, place: str) -> None:
    """Raise an InputError if no file can be created in the folder, or if it is open to others.

    Folders that everyone uses, such as /tmp, have the sticky bit. They may belong to anyone, since
    scratch files have no names.
    """
    folder = scratch_folder(requested)
    where = SCRATCH_VARIABLE if os.environ.get(SCRATCH_VARIABLE) else place
    problem = ""
    try:
        problem = why_open_to_others(os.stat(folder), sticky_is_safe=True)
        if not problem:
            os.close(_open_unnamed(folder))
    except OSError as error:
        what = f"{folder}: {error.strerror or error}"
        raise InputError(where, what, "a folder to write to") from None
    except ValueError as error:  # a null character in the name
        raise InputError(where, f"{folder!r}: {error}", "a folder to write to") from None
    if problem:
        expected = "a folder that only you can write to, or one with the sticky bit like /tmp"
        raise InputError(where, f"{folder}: {problem}", expected)


class Scratch:
    """The scratch files of a rank.

    They have no names, so nothing is left behind, however the process ends.
    """

    def __init__(self, requested: str | None) -> None:
        self.requested = requested
        self.background: ThreadPoolExecutor | None = None
        self.last_copy: Future[None] | None = None

    def array(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        """Return an array in a file of its own, which lasts as long as the array."""
        nbytes = prod(shape) * np.dtype(dtype).itemsize
        if nbytes == 0:
            return np.empty(shape, dtype)
        folder = scratch_folder(self.requested)
        _allow_many_files()
        try:
            descriptor = _open_unnamed(folder)
            try:
                # Reserve the space now: writing to a mapped file on a full disk would end the
                # process.
                os.posix_fallocate(descriptor, 0, nbytes)
                mapped = mmap.mmap(descriptor, nbytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise EinmpiError(f"scratch file in {folder}: {error.strerror or error}") from error
        return np.frombuffer(mapped, np.uint8).view(dtype).reshape(shape)

    def begin_copy(self, source: npt.NDArray[Any], target: npt.NDArray[Any]) -> FileCopy:
        """Begin to copy in the background; a small array at once, if no other copy runs."""
        idle = self.last_copy is None or self.last_copy.done()
        if idle and target.nbytes <= SMALL_COPY_BYTES:
            np.copyto(target, source)
            return FileCopy(None)
        if self.background is None:
            # One thread, so that copies are done in order.
            self.background = ThreadPoolExecutor(1, "scratch")
        self.last_copy = self.background.submit(np.copyto, target, source)
        return FileCopy(self.last_copy)


class FileCopy:
    """A copy in the background, or one that is complete."""

    def __init__(self, future: Future[None] | None) -> None:
        self.future = future

    def wait(self) -> None:
        if self.future is not None:
            self.future.result()

    join = wait


@cache
def _allow_many_files() -> None:
    """Raise the limit on open files: mapped files count, and many systems allow only 1024."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    requested = MANY_FILES
    if most != resource.RLIM_INFINITY:
        requested = min(most, MANY_FILES)
    if allowed != resource.RLIM_INFINITY and allowed < requested:
        resource.setrlimit(resource.RLIMIT_NOFILE, (requested, most))


def _open_unnamed(folder: str) -> int:
    """Create a file without a name in a folder and return its descriptor.

    Where the file system needs a name, it is one that nobody can guess, for a moment.
    """
    with contextlib.suppress(OSError, AttributeError):
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | os.O_EXCL, 0o600)
    descriptor, path = tempfile.mkstemp(prefix=".einmpi-", suffix=".scratch", dir=folder)
    os.unlink(path)
    return descriptor
