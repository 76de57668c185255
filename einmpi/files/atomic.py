"""Files that are replaced whole or not touched: a draft next to the target takes its place."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from einmpi.errors import EinmpiError, InputError
from einmpi.files.datasets import Array
from einmpi.files.hdf5.opening import hdf5_reason
from einmpi.process.signals import on_abort

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


def check_room(draft: str, nbytes: int) -> None:
    """Raise an OSError if the disk has no room for so many bytes more of a draft."""
    disk = os.statvfs(draft)
    if nbytes > disk.f_bavail * disk.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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


def write_at(descriptor: int, array: Array, offset: int) -> None:
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
        flush_path(folder)
    except OSError as error:
        if error.errno not in _CANNOT_FLUSH_FOLDERS:
            raise


def flush_path(path: str) -> None:
    """Flush what is at a path to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


# ---- replace -------------------------------------------------------------------------------------
#
# Replace a single file that the user names, by one process: whole or not at all.


def check_replaceable(file: str, place: str) -> None:
    """Refuse a file that could not be written, before hours of work rather than after them."""
    target = os.path.realpath(file)
    folder = os.path.dirname(target)
    exists = os.path.exists(file)
    number = 0
    if os.path.isdir(target) or file.endswith(os.sep):
        number = errno.EISDIR
    elif os.path.islink(target):  # realpath follows all links but those in a circle
        number = errno.ELOOP
    elif not exists and not os.path.exists(folder):
        number = errno.ENOENT
    elif not exists and not os.path.isdir(folder):
        number = errno.ENOTDIR
    elif not os.access(file if exists else folder, os.W_OK):
        number = errno.EACCES
    if number:
        raise _cannot_write(place, OSError(number, os.strerror(number)))


def replace_file(file: str | os.PathLike[str], pieces: Iterable[bytes]) -> None:
    """Put these bytes, piece after piece, in the file's place.

    Some files are written in place instead: a pipe or a device, where a rename would put a file in
    its place; a file in a folder where no draft can be made or take its place; a file to which this
    process prints.
    """
    path = os.fspath(file)
    check_replaceable(path, path)
    target = os.path.realpath(path)
    regular = os.path.isfile(path) or not os.path.exists(path)
    replaceable = os.access(os.path.dirname(target), os.W_OK) and not is_of_another_user(target)
    stream = _printed_to(path)
    try:
        if regular and replaceable and stream is None:
            _replace(target, pieces)
        else:
            where: int | str = path if stream is None else stream
            with open(where, "wb", closefd=stream is None) as opened:
                opened.writelines(pieces)
    except OSError as error:
        raise _cannot_write(path, error) from None


def _replace(target: str, pieces: Iterable[bytes]) -> None:
    draft = draft_path(target, new_token())

    def remove_draft() -> None:
        with contextlib.suppress(FileNotFoundError):
            os.remove(draft)

    try:
        with on_abort(remove_draft):
            make_draft(draft, target, None)
            with open(draft, "wb") as opened:
                opened.writelines(pieces)
                opened.flush()
                os.fsync(opened.fileno())
            publish(draft, target)
    finally:
        remove_draft()


def _printed_to(file: str) -> int | None:
    """Return the descriptor of standard output or error if it goes to this file.

    The file is then /dev/stdout, or a shell has opened it under its name.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        with contextlib.suppress(OSError, ValueError):
            descriptor: int = stream.fileno()
            if os.path.samestat(os.stat(file), os.fstat(descriptor)):
                stream.flush()
                return descriptor
    return None


def _cannot_write(place: str, error: OSError) -> InputError:
    return InputError(place, error.strerror or str(error), "a file that can be written")


# ---- locks ---------------------------------------------------------------------------------------
#
# Locks of files that are written: a hidden file beside each, locked while a run may write it.


# What may be in the place of a lock file, as a person would call it.
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclass(frozen=True)
class Lock:
    """An open lock file. `supported` is False on a file system without locks."""

    path: str
    descriptor: int
    supported: bool

    def is_in_place(self) -> bool:
        """Return whether the lock file is still at its path, where other runs look for it."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.stat(self.path))
        except OSError:
            return False

    def release(self) -> None:
        """Release the lock without removing its file."""
        os.close(self.descriptor)

    def remove(self) -> None:
        """Remove the file, then release the lock: in between no other process can take it."""
        with contextlib.suppress(OSError):
            if self.is_in_place():
                os.remove(self.path)
        os.close(self.descriptor)


def lock_path(target: str) -> str:
    """Return the path of the lock file of a file."""
    return hidden_path(target, "lock")


def acquire_lock(target: str) -> Lock:
    """Lock a file at once; raise BlockingIOError if another run has the lock.

    The system releases the lock when its process ends, however that happens.
    """
    path = lock_path(target)
    while True:
        descriptor = _open_lock_file(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError:
            return Lock(path, descriptor, supported=False)
        lock = Lock(path, descriptor, supported=True)
        if lock.is_in_place():
            return lock
        lock.release()  # the run that had the lock has removed the file in the meantime


def _open_lock_file(path: str) -> int:
    """Open a lock file, which is made if there is none.

    One that a killed run of another user has left can be locked too, if it can be read. Raise
    FileRefused if something else has its name: it is not opened, as that alone may have effects.
    """
    with contextlib.suppress(FileNotFoundError):
        _require_regular_file(path, os.lstat(path))
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError as error:
        try:
            descriptor = os.open(path, flags | os.O_RDONLY)
        except OSError:
            raise error from None
    try:
        _require_regular_file(path, os.fstat(descriptor))
    except FileRefused:
        os.close(descriptor)
        raise
    return descriptor


def _require_regular_file(path: str, status: os.stat_result) -> None:
    """Raise FileRefused if a path is not that of a regular file."""
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "not a regular file")
        what = f"its lock file {path} is {kind}"
        raise FileRefused(f"{what}; expected a regular file; remove it")
