"""Names that one rank of a run can own on a machine, so that ranks see each other without MPI.

A name is an abstract Unix socket: the system releases it when its process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import stat
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from einmpi.process.environment import launcher_rank, launcher_size


class MachineNames:
    """The names that this process owns among the ranks of its run on this machine."""

    def __init__(self) -> None:
        self._sockets: dict[str, socket.socket] = {}

    def claim(self, name: str) -> bool:
        """Try to become the owner of a name; return False if another process owns it."""
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            bound.bind(_address(name))
        except OSError as error:
            bound.close()
            # A system without abstract sockets refuses with another error: all may have the name.
            return error.errno != errno.EADDRINUSE
        self._sockets[name] = bound
        return True

    def has_word(self) -> bool:
        """Return whether a rank, which may have ended since, has called `leave_word`.

        This rank must have claimed its number as a name before that.
        """
        own = self._sockets.get(str(launcher_rank()))
        if own is None:
            return False
        try:
            own.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def release_all(self) -> None:
        """Give up all names of this process."""
        while self._sockets:
            self._sockets.popitem()[1].close()


NAMES = MachineNames()


def is_claimed(name: str) -> bool:
    """Return whether a living rank of this machine owns the name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_address(name))
        except OSError:
            return False
    return True


def leave_word() -> None:
    """Send all ranks of this machine a message, which stays there when this process ends."""
    prefix = _address("")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for rank in range(launcher_size()):
            with contextlib.suppress(OSError):  # this rank is on another machine, or has ended
                sender.sendto(b"1", socket.MSG_DONTWAIT, f"{prefix}{rank}")


def ranks_present() -> list[int]:
    """Return the ranks of this machine that have claimed their number as a name."""
    return [rank for rank in range(launcher_size()) if is_claimed(str(rank))]


def _address(name: str) -> str:
    """Return the socket address of a name, which differs between runs.

    The ranks of a run share the launcher: the parent of their process group, because scripts may
    stand between the launcher and a rank. One launcher may have several runs.
    """
    launcher = os.getppid()
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{os.getpgrp()}/stat") as file:
        fields_after_command = file.read().rpartition(")")[2].split()
        launcher = int(fields_after_command[1])
    run = zlib.crc32(os.environ.get("PMIX_NAMESPACE", "").encode())
    return f"\0einmpi-{launcher}-{run:08x}-{name}"


# ---- segments ------------------------------------------------------------------------------------
#
# The files in /dev/shm through which MPI passes messages between the ranks of a machine.
#
# MPICH removes its file only when a run ends well, so einmpi sees to the rest.


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


def stale_segments(remove: bool = False) -> list[Segment]:
    """Return this user's segments that no process uses: a run that failed has left them.

    `remove` says whether to remove them.
    """
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(os.listdir(_FOLDER))
    found = []
    for name in names:
        if name.startswith(_PREFIXES):
            with _unused_file(f"{_FOLDER}/{name}") as segment, contextlib.suppress(OSError):
                if segment is not None:
                    found.append(segment)
                    if remove:
                        os.unlink(segment.path)
    return found


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
