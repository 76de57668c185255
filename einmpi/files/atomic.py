"""Files that are replaced whole or not touched, with a draft next to the target and a lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.comm.agreement import on_first_rank
from einmpi.comm.base import Comm
from einmpi.errors import EinmpiError
from einmpi.files import hdf5
from einmpi.process.abort import on_abort

_COPY_BYTES = 2**24  # copied at a time where the system has no call for copying files
# What a full disk, h5py, and a machine without free memory raise.
FAILURES = (OSError, RuntimeError, ValueError, MemoryError)


# ---- locks --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Lock:
    """An open lock file. `supported` is False on a file system without locks."""

    path: str
    descriptor: int
    supported: bool


@contextlib.contextmanager
def claimed(
    files: Mapping[str, str], comm: Comm, check: Callable[[], None] | None = None
) -> Iterator[None]:
    """Reserve files for this run to write. All ranks call it; rank 0 holds the locks.

    `files` has the place that names each. `check` may refuse the files before they are locked.

    The system releases a lock when its process ends, however that happens. So drafts found while
    the lock is free were left by a run that was killed, and are removed.
    """
    targets = {file: os.path.realpath(file) for file in files}
    locks: list[_Lock] = []

    def acquire() -> None:
        if check is not None:
            check()
        for file, place in files.items():
            try:
                lock = _acquire_lock(targets[file])
            except BlockingIOError as error:
                raise _cannot_write(place, file, "another run is writing it") from error
            except OSError as error:
                raise _cannot_write(place, file, reason_of(error)) from error
            locks.append(lock)
            if lock.supported:
                _remove_drafts(targets[file])

    def abandon() -> None:
        """Remove drafts and locks: rank 0, which has the locks, may no longer be able to."""
        for target in targets.values():
            _remove_drafts(target)
            with contextlib.suppress(FileNotFoundError):
                os.remove(_lock_path(target))

    try:
        on_first_rank(comm, acquire)
        try:
            with on_abort(abandon):
                yield
        except BaseException as error:
            if not getattr(error, "everywhere", False):
                abandon()
            raise
        # No rank may call `abandon` after this: the files may then belong to another run.
        comm.barrier()
    finally:
        for lock in locks:
            with contextlib.suppress(OSError):
                os.remove(lock.path)  # before it is released, while no other process can take it
            os.close(lock.descriptor)


def _cannot_write(place: str, file: str, reason: str) -> EinmpiError:
    return EinmpiError(f"{place or file}: {file} cannot be written: {reason}")


def _acquire_lock(target: str) -> _Lock:
    """Lock a file at once; raise BlockingIOError if another run has the lock."""
    path = _lock_path(target)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError:
            return _Lock(path, descriptor, supported=False)
        if _is_at(descriptor, path):
            return _Lock(path, descriptor, supported=True)
        os.close(descriptor)  # the run that had the lock has removed it in the meantime


def _is_at(descriptor: int, path: str) -> bool:
    """Return whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _remove_drafts(target: str) -> None:
    """Remove all drafts of a file, which are recognized by their names."""
    folder, name = os.path.split(target)
    pattern = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{16}}\.part")
    for found in os.listdir(folder):
        if pattern.fullmatch(found):
            with contextlib.suppress(OSError):
                os.remove(os.path.join(folder, found))


def _lock_path(target: str) -> str:
    return _hidden_path(target, "lock")


def _hidden_path(target: str, ending: str) -> str:
    """Return the path of a hidden file in the folder of the target."""
    folder, name = os.path.split(target)
    return os.path.join(folder, f".{name}.{ending}")


# ---- drafts -------------------------------------------------------------------------------------


def new_draft(target: str) -> str:
    """Return a path for a draft that no other process uses."""
    return _hidden_path(target, f"{secrets.token_hex(8)}.part")


def make_draft(draft: str, target: str, skipped: Iterable[tuple[int, int]] | None) -> None:
    """Make a draft: a copy of the target, or an empty file if `skipped` is None.

    The ranges of bytes in `skipped` are not copied, because they will be written.
    """
    with open(draft, "xb") as file:  # with the user's default permissions
        if not os.path.exists(target):
            return
        shutil.copymode(target, draft)
        if skipped is None:
            return
        with open(target, "rb") as source:
            size = os.fstat(source.fileno()).st_size
            start = 0
            for first, last in sorted(skipped):
                _copy(source.fileno(), file.fileno(), start, first)
                start = last
            _copy(source.fileno(), file.fileno(), start, size)
            os.ftruncate(file.fileno(), size)


def _copy(source: int, target: int, start: int, stop: int) -> None:
    """Copy a range of bytes to the same place in another file."""
    while start < stop:
        try:  # some file systems copy without moving a byte
            copied = os.copy_file_range(source, target, stop - start, start, start)
        except (AttributeError, OSError):
            block = os.pread(source, min(stop - start, _COPY_BYTES), start)
            copied = os.pwrite(target, block, start)
        if not copied:
            raise OSError("the file has become shorter")
        start += copied


def write_at(descriptor: int, array: npt.NDArray[Any], offset: int) -> None:
    """Write all bytes of an array to a place in a file."""
    remaining = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    while remaining:
        written = os.pwrite(descriptor, remaining, offset)
        remaining = remaining[written:]
        offset += written


def publish(draft: str, target: str) -> None:
    """Put the draft in the target's place."""
    os.replace(draft, target)
    # The rename should survive a power cut too. Where the folder cannot be flushed, the old file
    # may come back after one, complete as well.
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        folder = os.open(os.path.dirname(target), os.O_RDONLY)
        stack.callback(os.close, folder)
        os.fsync(folder)


# ---- failures -----------------------------------------------------------------------------------


class FirstFailure:
    """Calls functions until one fails, then none: other ranks still wait for this one's messages.

    `error` is what the first failure raised.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function and return its result; None if this or an earlier call has failed."""
        if self.error is not None:
            return None
        return self.call_anyway(function, *arguments)

    def call_anyway(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function even after a failure, to close what is open."""
        try:
            return function(*arguments)
        except FAILURES as error:
            if self.error is None:
                self.error = error
        return None


def reason_of(error: BaseException) -> str:
    """Return what the system says, or HDF5, which quotes the system among other things."""
    number = getattr(error, "errno", None)
    if not number:
        quoted = re.findall(r"errno = (\d+), error message = ", str(error))
        if quoted:
            number = int(quoted[-1])
    if number:
        return os.strerror(number)
    return hdf5.reason(error) or type(error).__name__
