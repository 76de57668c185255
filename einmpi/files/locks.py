"""Locks of files that are written: a hidden file beside each, locked while a run may write it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from dataclasses import dataclass

from einmpi.files.atomic import FileRefused, hidden_path

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
