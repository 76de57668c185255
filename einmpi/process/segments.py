"""The files in /dev/shm through which MPI passes messages between the ranks of a machine.

MPICH removes its file only when a run ends well, so einmpi sees to the rest.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
from collections.abc import Iterator
from typing import NamedTuple

_FOLDER = "/dev/shm"
_MPICH_PREFIX = "mpich_shm_"
# The files of MPICH, of UCX beneath it, and of Open MPI 5 and 4.
_PREFIXES = (_MPICH_PREFIX, "ucx_shm_posix_", "sm_segment.", "vader_segment.")


class Segment(NamedTuple):
    """A file of MPI in /dev/shm, and the bytes of memory that it takes."""

    path: str
    nbytes: int


def unlink_mpich_segment() -> None:
    """Remove the name of the segment that this rank shares with the others of its machine.

    Call it when all of them have attached to it: they keep the memory, which the system frees with
    the last of them, however they end. MPICH does not mind that the file is gone when it ends.
    """
    prefix = f"{_FOLDER}/{_MPICH_PREFIX}"
    paths = set()
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8") as file:
        for line in file:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(prefix):
                paths.add(fields[5])
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def stale_segments() -> list[Segment]:
    """Return this user's segments that no process uses."""
    found = []
    for path in _segment_paths():
        with _unused_file(path) as segment:
            if segment is not None:
                found.append(segment)
    return found


def remove_stale_segments() -> None:
    """Remove this user's segments that no process uses: a run that failed has left them."""
    for path in _segment_paths():
        with _unused_file(path) as segment, contextlib.suppress(OSError):
            if segment is not None:
                os.unlink(path)


def _segment_paths() -> list[str]:
    try:
        names = os.listdir(_FOLDER)
    except OSError:
        return []
    return [f"{_FOLDER}/{name}" for name in sorted(names) if name.startswith(_PREFIXES)]


@contextlib.contextmanager
def _unused_file(path: str) -> Iterator[Segment | None]:
    """Yield a segment that nobody else has open or mapped, else None.

    The system grants a lease only on such a file. It counts all processes, also those of other
    containers, which /proc does not show. Without leases every file counts as used.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield None
        return
    try:
        status = os.fstat(descriptor)
        segment = None
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            with contextlib.suppress(OSError, AttributeError):
                # If another process opens the file now, the system sends this signal. SIGURG is
                # ignored by default; SIGIO, which it would send otherwise, ends a process.
                fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
                fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
                segment = Segment(path, status.st_blocks * 512)
        yield segment
    finally:
        os.close(descriptor)  # ends the lease
