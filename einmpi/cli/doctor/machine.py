"""What the doctor says about the machine: cores, memory, limits, folders."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from typing import NamedTuple

from einmpi.cli.doctor.finding import Finding
from einmpi.process.environment import available_cores
from einmpi.process.segments import stale_segments
from einmpi.units import counted, show_bytes

# The path of a socket may have 107 characters, and MPI adds to TMPDIR.
_LONGEST_TMPDIR = 60
_SMALLEST_SHARED_MEMORY = 2**28  # bytes
_SMALLEST_FREE_SPACE = 2**28  # bytes in TMPDIR


class _Limit(NamedTuple):
    """A limit of the system on processes: its number, what is enough, how to raise it."""

    number: int
    enough: int
    advice: str


_LOCKED_MEMORY = "locked memory"
_OPEN_FILES = "open files"
_LIMITS = {
    _LOCKED_MEMORY: _Limit(resource.RLIMIT_MEMLOCK, 2**30, "ulimit -l unlimited"),
    _OPEN_FILES: _Limit(resource.RLIMIT_NOFILE, 1024, "ulimit -n 4096"),
    "stack": _Limit(resource.RLIMIT_STACK, 2**23, "ulimit -s 8192"),
}


def examine_machine() -> Finding:
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    memory = show_bytes(os.sysconf("SC_PHYS_PAGES") * page_bytes)
    unused = show_bytes(os.sysconf("SC_AVPHYS_PAGES") * page_bytes)
    cores = f"{len(available_cores())} of {counted(os.cpu_count() or 1, 'core')}"
    text = f"{cores}; {memory} of memory, {unused} of it unused{_memory_allowance()}"
    return Finding("machine", "ok", text)


def _memory_allowance() -> str:
    """Say how much of the memory a container or a batch system allows."""
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="utf-8") as file:
            return f"; this group of processes may use {show_bytes(int(file.read()))}"
    except (OSError, ValueError):  # without a limit it says "max"
        return ""


def examine_limits() -> Finding:
    shown = []
    low = []
    for name, limit in _LIMITS.items():
        value = resource.getrlimit(limit.number)[0]
        shown.append(f"{name} {_show_limit(name, value)}")
        # Only InfiniBand and its like need locked memory.
        matters = name != _LOCKED_MEMORY or _has_infiniband()
        if matters and value != resource.RLIM_INFINITY and value < limit.enough:
            low.append(name)
    text = ", ".join(shown)
    if not low:
        return Finding("limits", "ok", text)
    advice = "; ".join(_LIMITS[name].advice for name in low)
    return Finding("limits", "note", f"{text}; too low: {', '.join(low)}", advice)


def _show_limit(name: str, value: int) -> str:
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    return str(value) if name == _OPEN_FILES else show_bytes(value)


def _has_infiniband() -> bool:
    try:
        return bool(os.listdir("/sys/class/infiniband"))
    except OSError:
        return False


def examine_shared_memory() -> Finding:
    """Examine /dev/shm, through which MPI passes messages between the ranks of a machine."""
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        return Finding("/dev/shm", "note", "missing: messages on one machine may be slow")
    text = show_bytes(size)
    advice = []
    if size < _SMALLEST_SHARED_MEMORY:
        text += " may be too small for messages between many ranks"
        advice.append("mount -o remount,size=2G /dev/shm, or docker run --shm-size=2g")
    stale = stale_segments()
    if stale:
        stale_bytes = show_bytes(sum(segment.nbytes for segment in stale))
        text += f"; failed runs have left {counted(len(stale), 'file')} with {stale_bytes}"
        advice.append("einmpi removes them when it starts ranks: einmpi run JOB.toml -n 2")
    return Finding("/dev/shm", "note" if advice else "ok", text, "; ".join(advice))


def examine_temporary_folder() -> Finding:
    use_another = "export TMPDIR=FOLDER, with a folder that has free space"
    try:
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding("TMPDIR", "problem", str(error.strerror or error), use_another)
    text = f"{folder}, {show_bytes(free)} free"
    if len(folder) > _LONGEST_TMPDIR:
        problem = f"{text}; the path is too long for the sockets of some MPI libraries"
        return Finding("TMPDIR", "note", problem, "export TMPDIR=/tmp")
    if free < _SMALLEST_FREE_SPACE:
        return Finding("TMPDIR", "note", f"{text}, which is little", use_another)
    return Finding("TMPDIR", "ok", text)
