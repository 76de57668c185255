"""Memory that the ranks of a node share: a file in memory without a name, which one rank creates
and the others map. The system frees it with the last of them, however they end."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from einmpi.comm.base import Array, Comm, Group, SharingError, pieces_of, uncounted

ALIGNMENT = 64  # bytes, as for all arrays of a rank
PROBE_BYTES = mmap.PAGESIZE
_KEPT_NODES = "nodes that share memory"
_KEPT_PROBLEM = "problem with shared memory"


class _File(NamedTuple):
    """An open file as other processes find and recognise it; a process 0 stands for no file."""

    process: int
    descriptor: int
    device: int
    inode: int


def aligned_bytes(nbytes: int) -> Array:
    """Return new bytes of memory, aligned as those of mapped files are."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


def share_unnamed_file(comm: Comm, group: Group, nbytes: int) -> Array:
    """Return memory of a file that the first member of a group creates, mapped by all members."""
    problem = ""
    descriptor = -1
    memory = None
    file = _File(0, 0, 0, 0)
    is_first = comm.rank == group[0]
    if is_first:
        try:
            descriptor = os.memfd_create("einmpi", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, nbytes)
            status = os.fstat(descriptor)
            file = _File(os.getpid(), descriptor, status.st_dev, status.st_ino)
        except (OSError, AttributeError) as error:
            problem = f"no file in memory: {error}"
    file = _File(*_gather_numbers(comm, group, file)[0])
    if file.process == 0:
        problem = problem or f"rank {group[0]} could not create it"
    elif not problem:
        try:
            if not is_first:
                descriptor = _open_file_of(file)
            memory = mmap.mmap(descriptor, nbytes)
        except (OSError, ValueError) as error:
            problem = f"process {file.process}: {error}"
    succeeded = _gather_numbers(comm, group, [int(memory is not None)])
    if descriptor >= 0:
        os.close(descriptor)
    if memory is None or [0] in succeeded:
        raise SharingError(problem or "another rank of the node could not map it")
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _open_file_of(file: _File) -> int:
    """Return a descriptor of another process's file, if it is the one that process means."""
    descriptor = os.open(f"/proc/{file.process}/fd/{file.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino) != (file.device, file.inode):
        # The number means another process here: the ranks are in different containers.
        os.close(descriptor)
        raise OSError("it has another file")
    return descriptor


def _gather_numbers(comm: Comm, group: Group, own: list[int] | _File) -> list[list[int]]:
    """Return the numbers of all members of a group."""
    count = len(own)
    numbers = np.zeros((len(group), count), np.int64)
    numbers[group.index(comm.rank)] = own
    with uncounted(comm):
        comm.allgatherv(group, numbers.reshape(-1), [count] * len(group))
    return numbers.tolist()


# ---- which ranks share memory --------------------------------------------------------------------


def sharing_nodes(comm: Comm) -> tuple[int, ...]:
    """Return the node of each rank; a rank of a node that cannot share memory has one of its own.

    The ranks of every node try it together, once. All ranks call this.
    """
    if _KEPT_NODES not in comm.kept:
        problem = ""
        node = comm.nodes[comm.rank]
        group = tuple(rank for rank in range(comm.size) if comm.nodes[rank] == node)
        if len(group) > 1:
            try:
                comm.share_memory(group, PROBE_BYTES)
            except SharingError as error:
                problem = str(error)
        problems = comm.allgather_text(problem)
        failed = {comm.nodes[rank] for rank, text in enumerate(problems) if text}
        nodes = []
        for rank, node in enumerate(comm.nodes):
            nodes.append(-1 - rank if node in failed else node)
        comm.kept[_KEPT_NODES] = tuple(nodes)
        comm.kept[_KEPT_PROBLEM] = next(filter(None, problems), "")
    found: tuple[int, ...] = comm.kept[_KEPT_NODES]
    return found


def sharing_problem(comm: Comm) -> str:
    """Return why the ranks of a node cannot share memory; "" if they can, or have not tried."""
    problem: str = comm.kept.get(_KEPT_PROBLEM, "")
    return problem


def gather_texts_among(comm: Comm, group: Group, text: str) -> list[str]:
    """Return the texts of all members of a group. All of them call it; nothing is counted."""
    own = np.frombuffer(text.encode(), np.uint8)
    sizes = [size for (size,) in _gather_numbers(comm, group, [own.size])]
    everything = np.zeros(sum(sizes), np.uint8)
    pieces = pieces_of(everything, sizes)
    pieces[group.index(comm.rank)][...] = own
    with uncounted(comm):
        comm.allgatherv(group, everything, sizes)
    return [piece.tobytes().decode() for piece in pieces]


def all_agree(comm: Comm, group: Group, answer: bool) -> bool:
    """Return whether all members of a group answer yes. All of them call it."""
    return [0] not in _gather_numbers(comm, group, [int(answer)])
