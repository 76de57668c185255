"""Arrays in scratch files, for what does not fit into memory, and copies in the background."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.errors import EinmpiError, InputError
from einmpi.process.trust import why_open_to_others
from einmpi.process.variables import SCRATCH_VARIABLE

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
