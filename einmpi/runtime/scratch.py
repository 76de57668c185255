"""Arrays in scratch files, for what does not fit into memory; and copies in the background, while kernels run."""

from __future__ import annotations

import mmap
import os
import resource
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from math import prod

import numpy as np

from einmpi.errors import EinmpiError, InputError

VARIABLE = "EINMPI_SCRATCH"
SMALL = 2**16  # bytes that are copied in less time than another thread takes to hear of it
MANY_FILES = 2**16  # about as many as a process can map


def scratch_folder(wanted: str | None) -> str:
    """Where scratch files go: what the environment says, what the job says, where temporary files go."""
    return os.environ.get(VARIABLE) or wanted or tempfile.gettempdir()


def check_folder(wanted: str | None, place: str) -> None:
    """An error where no file can be made."""
    folder = scratch_folder(wanted)
    where = VARIABLE if os.environ.get(VARIABLE) else place
    try:
        os.close(_open(folder))
    except (OSError, ValueError) as error:  # no file name has a zero in it
        why = getattr(error, "strerror", None) or error
        raise InputError(
            where,
            f"{folder!r}: {why}" if "\0" in folder else f"{folder}: {why}",
            "a folder to write to",
        ) from None


class Scratch:
    """The scratch files of a rank. They have no names, so that nothing is left behind, however the process ends."""

    def __init__(self, wanted: str | None) -> None:
        self.wanted = wanted
        self.background: ThreadPoolExecutor | None = None
        self.last: Future[None] | None = None

    def array(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """An array in a file of its own, which goes when nobody refers to the array any more."""
        nbytes = prod(shape) * np.dtype(dtype).itemsize
        if nbytes == 0:
            return np.empty(shape, dtype)
        folder = scratch_folder(self.wanted)
        _allow_many_files()
        try:
            descriptor = _open(folder)
            try:
                # The space is set aside now: a map of a file on a full disk would end the process.
                os.posix_fallocate(descriptor, 0, nbytes)
                mapped = mmap.mmap(descriptor, nbytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise EinmpiError(f"scratch file in {folder}: {error.strerror or error}") from error
        return np.frombuffer(mapped, np.uint8).view(dtype).reshape(shape)

    def begin_copy(self, source: np.ndarray, target: np.ndarray) -> FileCopy:
        if target.nbytes <= SMALL and (self.last is None or self.last.done()):
            np.copyto(target, source)
            return FileCopy(None)
        if self.background is None:
            self.background = ThreadPoolExecutor(1, "scratch")  # one: copies are done in order
        self.last = self.background.submit(np.copyto, target, source)
        return FileCopy(self.last)


class FileCopy:
    """A copy in the background; None where it is done."""

    def __init__(self, future: Future[None] | None) -> None:
        self.future = future

    def wait(self) -> None:
        if self.future is not None:
            self.future.result()

    join = wait


@cache
def _allow_many_files() -> None:
    """A mapped file counts as an open one, of which many systems allow 1024 unless they are asked for more."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_FILES if most == resource.RLIM_INFINITY else min(most, MANY_FILES)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _open(folder: str) -> int:
    descriptor, path = tempfile.mkstemp(prefix=".einmpi-", suffix=".scratch", dir=folder)
    os.unlink(path)
    return descriptor
