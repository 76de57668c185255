"""The doctor looks at the machine: cores, memory, limits, folders."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile

from einmpi.cli.doctor.finding import Finding
from einmpi.process.environment import available_cores
from einmpi.units import show_bytes

_SOCKET_PATH = 60  # characters of TMPDIR; a socket's whole path may have 107, and MPI adds to it
_LITTLE = {
    "/dev/shm": 2**28,
    "TMPDIR": 2**28,
    "stack": 2**23,
    "open files": 1024,
    "locked memory": 2**30,
}


def machine() -> Finding:
    pages = {
        name: os.sysconf(f"SC_{name}") * os.sysconf("SC_PAGE_SIZE")
        for name in ("PHYS_PAGES", "AVPHYS_PAGES")
    }
    memory = f"{show_bytes(pages['PHYS_PAGES'])} of memory, {show_bytes(pages['AVPHYS_PAGES'])} of it unused"
    return Finding(
        "machine",
        "ok",
        f"{len(available_cores())} of {os.cpu_count()} cores; {memory}{_allowance()}",
    )


def _allowance() -> str:
    """What a container or a batch system leaves of the memory."""
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="utf-8") as file:
            return f"; this group of processes may use {show_bytes(int(file.read()))}"
    except (OSError, ValueError):  # no limit is "max"
        return ""


def limits() -> Finding:
    soft = {name: resource.getrlimit(number)[0] for name, number in _LIMITS.items()}
    low = [
        name
        for name, limit in soft.items()
        if limit != resource.RLIM_INFINITY and limit < _LITTLE[name]
    ]
    if not _has_infiniband():
        low = [name for name in low if name != "locked memory"]  # only such networks want it
    text = ", ".join(f"{name} {_limit(name, limit)}" for name, limit in soft.items())
    if low:
        return Finding(
            "limits",
            "note",
            f"{text}; little: {', '.join(low)}",
            "; ".join(_RAISE[name] for name in low),
        )
    return Finding("limits", "ok", text)


_LIMITS = {
    "locked memory": resource.RLIMIT_MEMLOCK,
    "open files": resource.RLIMIT_NOFILE,
    "stack": resource.RLIMIT_STACK,
}
_RAISE = {
    "locked memory": "ulimit -l unlimited",
    "open files": "ulimit -n 4096",
    "stack": "ulimit -s 8192",
}


def _limit(name: str, limit: int) -> str:
    if limit == resource.RLIM_INFINITY:
        return "unlimited"
    return str(limit) if name == "open files" else show_bytes(limit)


def _has_infiniband() -> bool:
    try:
        return bool(os.listdir("/sys/class/infiniband"))
    except OSError:
        return False


def shared_memory() -> Finding:
    """MPI passes messages between the ranks of a machine through it."""
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        return Finding("/dev/shm", "note", "not here: messages on one machine may be slow")
    if size < _LITTLE["/dev/shm"]:
        return Finding(
            "/dev/shm",
            "note",
            f"{show_bytes(size)} is little for the messages of many ranks",
            "mount -o remount,size=2G /dev/shm, or docker run --shm-size=2g",
        )
    return Finding("/dev/shm", "ok", show_bytes(size))


def temporary() -> Finding:
    try:
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding(
            "TMPDIR", "problem", str(error.strerror or error), "export TMPDIR=FOLDER, one with room"
        )
    text = f"{folder}, {show_bytes(free)} free"
    if len(folder) > _SOCKET_PATH:
        return Finding(
            "TMPDIR",
            "note",
            f"{text}; too long for the sockets of some MPI libraries",
            "export TMPDIR=/tmp",
        )
    if free < _LITTLE["TMPDIR"]:
        return Finding("TMPDIR", "note", f"{text}: little", "export TMPDIR=FOLDER, one with room")
    return Finding("TMPDIR", "ok", text)
