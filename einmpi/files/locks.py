"""Locks of files that are written: a hidden file beside each, locked while a run may write it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from dataclasses import dataclass

from einmpi.files.atomic import hidden_path


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

    One that a killed run of another user has left can be locked too, if it can be read.
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError as error:
        try:
            descriptor = os.open(path, flags | os.O_RDONLY)
        except OSError:
            raise error from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EEXIST, f"{path} is not a regular file")
    return descriptor
