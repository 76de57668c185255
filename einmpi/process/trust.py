"""Whether other users of the machine can change a folder or a file of this user's.

Root is trusted: it can change everything anyway. Access control lists show in the mode's group
bits, so the mode is enough."""

from __future__ import annotations

import os
import stat

OWN_FOLDER_MODE = 0o755  # others may look into it at most, whatever the user's umask is
_OWN_FILE_MODE = 0o644
_OTHERS_CAN_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UntrustedFileError(Exception):
    """A file that other users could have written."""


def why_not_trusted(path: str | os.PathLike[str]) -> str:
    """Return how other users could change what is at a path, or "" if they cannot.

    The path and every folder above it, up to the home folder or else the root, must belong to this
    user or to root and be writable by nobody else, as ssh demands it of its keys. A folder above
    may have the sticky bit instead, as /tmp has: others cannot rename there what is not theirs.
    Parts of the path that do not exist yet are skipped. Symbolic links are resolved first, so the
    caller must go on with the resolved path.
    """
    home = os.path.realpath(os.path.expanduser("~"))
    target = os.path.realpath(path)
    here = target
    while True:
        if os.path.lexists(here):
            problem = why_not_own(os.stat(here), sticky_is_safe=here != target)
            if problem:
                return f"{here}: {problem}"
        if here in (home, os.path.dirname(here)):
            return ""
        here = os.path.dirname(here)


def why_not_own(status: os.stat_result, sticky_is_safe: bool = False) -> str:
    """Return how other users could change a file or folder with this status, or ""."""
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to another user (uid {status.st_uid})"
    return why_open_to_others(status, sticky_is_safe)


def why_open_to_others(status: os.stat_result, sticky_is_safe: bool) -> str:
    """Return that other users than the owner can write to a file or folder, or ""."""
    if not status.st_mode & _OTHERS_CAN_WRITE:
        return ""
    if sticky_is_safe and stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
        return ""
    return f"other users can write to it (mode {stat.S_IMODE(status.st_mode):o})"


def open_own_file(path: str) -> int:
    """Open a regular file for reading; raise UntrustedFileError if others could have written it.

    The open file is checked, not its name: nobody can exchange it between the check and the use.
    """
    # A named pipe would wait for a writer without O_NONBLOCK. Regular files ignore it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "it is not a regular file")
        problem = why_not_own(status)
        if problem:
            raise UntrustedFileError(problem)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_for_own_writing(path: str, flags: int) -> int:
    """Open a file that only this user can write, whatever the umask is: an `opener` for `open`."""
    return os.open(path, flags, _OWN_FILE_MODE)


def make_private_folders(path: str) -> None:
    """Create a folder and the missing ones above it, for this user only whatever the umask is."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    if parent != path:
        make_private_folders(parent)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:  # another process was faster, or it is a file
        if not os.path.isdir(path):
            raise
