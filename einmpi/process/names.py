"""Names that one rank of a run can own on a machine, so that ranks see each other without MPI.

A name is an abstract Unix socket: the system releases it when its process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import zlib

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
