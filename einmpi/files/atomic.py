"""Files that are replaced whole or not touched: a draft next to the target takes its place."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.errors import EinmpiError
from einmpi.files.hdf5.opening import hdf5_reason

_COPY_BYTES = 2**24  # copied at a time where the system has no call for copying files
# What the system says where folders cannot be flushed, or not by this user.
_CANNOT_FLUSH_FOLDERS = (
    errno.EACCES,
    errno.EBADF,
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EPERM,
)
# Constants of the system call renameat2.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# What a full disk, h5py, and a machine without free memory raise.
FAILURES = (OSError, RuntimeError, ValueError, MemoryError)


class FileRefused(OSError):
    """A file that the system would open and this package does not; `str(error)` is the reason."""


class NotPublished(OSError):
    """Drafts have not taken the places of their targets, all or some of them.

    `str(error)` is the reason. `target` is the file that it concerns, "" if all, and `state` says
    what is at the places of the targets now.
    """

    def __init__(self, reason: str, target: str = "", state: str = "nothing was written") -> None:
        super().__init__(reason)
        self.target = target
        self.state = state


# ---- names and permissions ----------------------------------------------------------------------


def hidden_path(target: str, ending: str) -> str:
    """Return the path of a hidden file in the folder of the target."""
    folder, name = os.path.split(target)
    return os.path.join(folder, f".{name}.{ending}")


def is_of_another_user(target: str) -> bool:
    """Return whether only another user may replace this file.

    In a folder with the sticky bit, such as /tmp, everybody can make files, but only the owner of
    a file or of the folder can rename or remove one.
    """
    try:
        folder = os.stat(os.path.dirname(target))
        file = os.lstat(target)
    except OSError:
        return False
    if not folder.st_mode & stat.S_ISVTX:
        return False
    return os.geteuid() not in (0, folder.st_uid, file.st_uid)


# ---- drafts -------------------------------------------------------------------------------------


def new_token() -> str:
    """Return a text for the names of hidden files that no other run uses."""
    return secrets.token_hex(8)


def draft_path(target: str, token: str) -> str:
    """Return the path of the draft of a file by the run with this token."""
    return hidden_path(target, f"{token}.part")


def taken_path(target: str, token: str) -> str:
    """Return the path of the file that gives a rank the right to change the files of its run."""
    return hidden_path(target, f"{token}.taken")


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


# ---- folders that take the places of others -----------------------------------------------------


def remove_path(path: str) -> None:
    """Remove a file, or a folder with all that is in it."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.remove(path)


def exchange_names(one: str, other: str) -> bool:
    """Give each of two folders the name of the other at once; False if the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    status = rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return bool(status == 0)


def put_in_place(draft: str, target: str, backup: str) -> None:
    """Put a draft in the target's place; a folder that was there gets the name `backup`."""
    if not os.path.isdir(draft) or not os.path.lexists(target):
        os.replace(draft, target)
    elif exchange_names(draft, target):
        os.rename(draft, backup)
    else:
        os.rename(target, backup)
        os.rename(draft, target)


# ---- publishing ---------------------------------------------------------------------------------


def publish(draft: str, target: str) -> None:
    """Put the draft in the target's place."""
    os.replace(draft, target)
    flush_folder(os.path.dirname(target))


def flush_folder(folder: str) -> None:
    """Make renames in a folder survive a power cut, where the file system can do that.

    Elsewhere the old files may come back after one, complete as well. Raise OSError if the disk
    fails: then the renames may be lost already.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_FLUSH_FOLDERS:
            raise


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


def cannot_write(place: str, file: str, reason: str) -> EinmpiError:
    """Return the error for a file, with its place in the job file if it has one."""
    return EinmpiError(f"{place or file}: {file} cannot be written: {reason}")


def reason_of(error: BaseException) -> str:
    """Return what the system says, or HDF5, which quotes the system among other things."""
    if isinstance(error, (FileRefused, NotPublished)):
        return str(error)
    number = getattr(error, "errno", None)
    if not number:
        quoted = re.findall(r"errno = (\d+), error message = ", str(error))
        if quoted:
            number = int(quoted[-1])
    if number:
        return os.strerror(number)
    return hdf5_reason(error) or type(error).__name__
