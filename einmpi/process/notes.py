"""What each rank is doing now, in a file that a launcher on the same machine provides and reads.

The file has one record per rank: the process id in 8 bytes, then a text. A socket next to it tells
the launcher which ranks are alive, and the ranks whether the launcher is."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import resource
import socket
import zlib
from collections.abc import Callable
from typing import NamedTuple

from einmpi.process.variables import NOTES_VARIABLE

# Machines may share a folder but never a socket, so the folder is named after the machine. Both
# names are short because the path of a socket must be.
FOLDER_PREFIX = f"einmpi-{zlib.crc32(os.uname().nodename.encode()):08x}-"
SOCKET_SUFFIX = ".s"
RECORD_BYTES = 256
_PID_BYTES = 8


class RankNote(NamedTuple):
    """The record of one rank; (0, "") if the rank has not written anything."""

    pid: int
    text: str


class _Activity:
    """What this process is doing now."""

    def __init__(self) -> None:
        self.text = ""

    def set(self, text: str) -> None:
        self.text = text


_activity = _Activity()


def activity_writer(rank: int) -> Callable[[str], None]:
    """Return a function that records what this rank is doing, for a launcher if there is one.

    The function is called for every step of a run: it writes to memory and makes no system call.
    """
    memory = _map_notes(rank)
    if memory is None:
        return _activity.set
    start = rank * RECORD_BYTES
    text_start = start + _PID_BYTES
    most_bytes = RECORD_BYTES - _PID_BYTES - 1
    memory[start:text_start] = os.getpid().to_bytes(_PID_BYTES, "little")

    def write(text: str) -> None:
        _activity.text = text
        data = text.encode(errors="replace")[:most_bytes] + b"\0"
        memory[text_start : text_start + len(data)] = data

    return write


def current_activity() -> str:
    """Return what this rank recorded last."""
    return _activity.text


def read_notes(path: str | os.PathLike[str]) -> list[RankNote]:
    """Return the records of all ranks."""
    with open(path, "rb") as file:
        data = file.read()
    notes = []
    for start in range(0, len(data), RECORD_BYTES):
        record = data[start : start + RECORD_BYTES]
        pid = int.from_bytes(record[:_PID_BYTES], "little")
        text = record[_PID_BYTES:].split(b"\0")[0].decode(errors="ignore")
        notes.append(RankNote(pid, text))
    return notes


def connect_to_launcher(rank: int) -> int | None:
    """Tell a launcher on this machine that this rank is alive.

    Return a descriptor that reaches its end when the launcher does, or None without a launcher.
    """
    path = os.environ.get(NOTES_VARIABLE, "")
    if FOLDER_PREFIX not in path:
        return None
    with socket.socket(socket.AF_UNIX) as link, contextlib.suppress(OSError):
        # If the launcher is gone already, the descriptor is at its end from the beginning.
        with contextlib.suppress(ConnectionError):
            link.connect(path + SOCKET_SUFFIX)
            link.sendall(rank.to_bytes(4, "little"))
        # When a process ends, Linux closes the highest descriptor first. So the launcher learns of
        # it before mpirun does, which kills the other ranks and does not always say who was first.
        most_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        high = max(64, min(most_descriptors, 1024) - 24)
        return fcntl.fcntl(link, fcntl.F_DUPFD_CLOEXEC, high)
    return None


def _map_notes(rank: int) -> mmap.mmap | None:
    try:
        with open(os.environ.get(NOTES_VARIABLE, ""), "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError):  # no launcher, or one on another machine
        return None
    if len(memory) < (rank + 1) * RECORD_BYTES:
        return None
    return memory
