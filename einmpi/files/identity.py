"""The identity of a file: it changes when the file is written to or another one takes its name."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class FileIdentity:
    """What the system says about a file. Times are in nanoseconds.

    `changed_ns` is set by the system alone, so it differs even if someone writes to the file and
    restores its size and time of modification, or replaces it and puts it back.
    """

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


@dataclass(frozen=True)
class SourceFile:
    """A file that is read, and its identity before it was opened."""

    path: str
    identity: FileIdentity


def identity_from(status: os.stat_result) -> FileIdentity:
    """Return the identity of the file that os.stat or os.fstat has looked at."""
    return FileIdentity(
        device=status.st_dev,
        inode=status.st_ino,
        size=status.st_size,
        modified_ns=status.st_mtime_ns,
        changed_ns=status.st_ctime_ns,
    )


def identity_at(path: str) -> FileIdentity | None:
    """Return the identity of the file at a path; None if there is none that can be looked at."""
    try:
        return identity_from(os.stat(path))
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return None
