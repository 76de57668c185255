"""A file is replaced whole or not touched: it is written as a draft beside it, under a lock, and renamed at the end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from einmpi.comm.base import Comm, on_first_rank
from einmpi.errors import EinmpiError
from einmpi.files import hdf5
from einmpi.process.abort import on_abort

_BLOCK = 2**24
FAILURES = (
    OSError,
    RuntimeError,
    ValueError,
    MemoryError,
)  # what a full disk, h5py and a machine without room raise


# ---- one run a file -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def claimed(
    files: Mapping[str, str], comm: Comm, check: Callable[[], None] | None = None
) -> Iterator[None]:
    """These files, with the place that names each, are this run's to write. All ranks call it; rank 0 has the locks.
    It checks first whether the files can be written at all.

    The system gives a lock back when its process ends, however that happens. So what lies about while nobody has the
    lock was left by a run that was killed: it is removed.
    """
    targets = {file: os.path.realpath(file) for file in files}
    locks: list[tuple[str, int]] = []

    def lock() -> None:
        if check is not None:
            check()
        for file, place in files.items():
            try:
                path, descriptor, sure = _lock(targets[file])
            except OSError as error:
                reason = (
                    "another run writes it now"
                    if isinstance(error, BlockingIOError)
                    else reason_of(error)
                )
                raise EinmpiError(f"{place or file}: {file} cannot be written: {reason}") from error
            locks.append((path, descriptor))
            if sure:
                _remove_leftovers(targets[file])

    def give_up() -> None:
        """A rank is about to end all: rank 0, which has the locks, may not come to it any more."""
        for target in targets.values():
            _remove_leftovers(target)
            with contextlib.suppress(FileNotFoundError):
                os.remove(_beside(target, "lock"))

    try:
        on_first_rank(comm, lock)
        try:
            with on_abort(give_up):
                yield
        except BaseException as error:
            if not getattr(error, "everywhere", False):
                give_up()
            raise
        comm.barrier()  # as long as the files are claimed no rank gives up; afterwards they may be another run's
    finally:
        for path, descriptor in locks:
            with contextlib.suppress(OSError):
                os.remove(path)  # before it is given back: nobody else has it now
            os.close(descriptor)


def _lock(target: str) -> tuple[str, int, bool]:
    """(path, descriptor, whether this file system has locks); BlockingIOError where another run has the lock."""
    path = _beside(target, "lock")
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return path, descriptor, True
            os.close(descriptor)  # the run that had it has removed it in the meantime
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError:
            return path, descriptor, False


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _remove_leftovers(target: str) -> None:
    """Drafts of a file, known by their names."""
    folder, name = os.path.split(target)
    pattern = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{16}}\.part")
    for found in filter(pattern.fullmatch, os.listdir(folder)):
        with contextlib.suppress(OSError):
            os.remove(os.path.join(folder, found))


def _beside(target: str, ending: str) -> str:
    return os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.{ending}")


# ---- the draft ------------------------------------------------------------------------------------------------------


def new_draft(target: str) -> str:
    """A path that nobody else has."""
    return _beside(target, f"{secrets.token_hex(8)}.part")


def begin(draft: str, target: str, skipped: Iterable[tuple[int, int]] | None) -> None:
    """Make the draft: a copy of the target but for some ranges of bytes, which will be written; empty for None."""
    with open(draft, "xb") as file:  # with the user's own permissions
        if not os.path.exists(target):
            return
        shutil.copymode(target, draft)
        if skipped is None:
            return
        with open(target, "rb") as source:
            size, start = os.fstat(source.fileno()).st_size, 0
            for first, last in [*sorted(skipped), (size, size)]:
                _copy(source.fileno(), file.fileno(), start, first)
                start = last
            os.ftruncate(file.fileno(), size)


def _copy(source: int, target: int, start: int, stop: int) -> None:
    while start < stop:
        try:  # some file systems copy without moving a byte
            done = os.copy_file_range(source, target, stop - start, start, start)
        except (AttributeError, OSError):
            done = os.pwrite(target, os.pread(source, min(stop - start, _BLOCK), start), start)
        if not done:
            raise OSError("the file has become shorter")
        start += done


def write_at(descriptor: int, array: np.ndarray, offset: int) -> None:
    left = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    while left:
        done = os.pwrite(descriptor, left, offset)
        left, offset = left[done:], offset + done


def publish(draft: str, target: str) -> None:
    """From now on the target is the draft."""
    os.replace(draft, target)
    # Also after a power cut, if this can be done. If not, the old file may come back then, whole as well.
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        folder = os.open(os.path.dirname(target), os.O_RDONLY)
        stack.callback(os.close, folder)
        os.fsync(folder)


# ---- failures -------------------------------------------------------------------------------------------------------


class FirstFailure:
    """Does things until one fails, then nothing more: other ranks still wait for this one's messages."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns; None where this or anything before has failed."""
        return None if self.error is not None else self.anyway(function, *arguments)

    def anyway(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """To close what is open, whatever has failed."""
        try:
            return function(*arguments)
        except FAILURES as error:
            self.error = self.error or error
        return None


def reason_of(error: BaseException) -> str:
    """What the system says, or HDF5, which quotes the system among names, times and addresses."""
    quoted = re.findall(r"errno = (\d+), error message = ", str(error))
    number = getattr(error, "errno", None) or (quoted and int(quoted[-1]))
    return os.strerror(number) if number else hdf5.reason(error) or type(error).__name__
