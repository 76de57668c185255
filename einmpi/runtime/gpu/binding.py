"""Which GPU a rank works on, who shares it, and how messages go between GPUs."""

from __future__ import annotations

import os
import platform
from collections import Counter
from dataclasses import dataclass

from einmpi.comm.base import Comm, together
from einmpi.errors import InputError, one_of
from einmpi.kernels.cuda.driver import cupy, nccl
from einmpi.units import show_bytes

WAYS = (
    "mpi",
    "nccl",
    "host",
)  # the MPI library takes device memory; NCCL; through pinned host memory
VARIABLE = "EINMPI_GPU_MESSAGES"  # one of WAYS, where the user knows better


@dataclass(frozen=True)
class Gpu:
    """The GPU of a rank."""

    number: int  # among those that the process sees
    name: str
    memory: int  # bytes
    ranks: int  # that work on it
    way: str  # of messages: one of WAYS

    def __str__(self) -> str:
        shared = f", shared by {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.name}{shared}"


def devices(place: str = "GPU") -> int:
    """How many GPUs this process sees; an error where there are none."""
    runtime = cupy(place).cuda.runtime
    try:
        count = int(runtime.getDeviceCount())
        reason = "CUDA sees none; CUDA_VISIBLE_DEVICES may hide them"
    except runtime.CUDARuntimeError as error:
        count, reason = 0, " ".join(str(error).split())
    if not count:
        raise InputError(
            place,
            f"backend cupy needs a GPU: {reason:.200}",
            "an NVIDIA GPU with its driver, or backend numpy",
        )
    return count


def number_of(rank_on_node: int, count: int) -> int:
    """Ranks of a node take its GPUs in turn. One that a batch system shows a single GPU takes that."""
    return rank_on_node % count


def bind(comm: Comm, place: str) -> Gpu:
    """Choose this rank's GPU and make it the current one. All ranks call it."""
    number, name, memory, identity = together(comm, lambda: _own(comm, place))
    wish = together(comm, _wish, lambda wish: wish or "none")
    texts = comm.allgather_text(f"{identity} {int(comm.cuda_aware)} {int(nccl() is not None)}")
    found = [text.split() for text in texts]
    ranks = Counter(each[0] for each in found)
    distinct = max(ranks.values()) == 1 < comm.size  # one rank alone has nobody to meet
    way = together(
        comm,
        lambda: choose(
            wish,
            distinct,
            all(each[1] == "1" for each in found),
            all(each[2] == "1" for each in found),
        ),
    )
    return Gpu(number, name, memory, ranks[identity], way)


def choose(wish: str, distinct: bool, aware: bool, has_nccl: bool) -> str:
    """How messages go between GPUs. An MPI library that does not say that it takes device memory crashes on it, and
    NCCL refuses two ranks on one GPU."""
    if wish == "nccl" and not (distinct and has_nccl):
        reason = "each rank needs a GPU of its own" if has_nccl else "CuPy finds no NCCL library"
        raise InputError(VARIABLE, f"nccl does not work here: {reason}", one_of(WAYS))
    if wish:
        return wish
    return "mpi" if aware else "nccl" if distinct and has_nccl else "host"


def check_memory(place: str, gpu: Gpu, needed: int) -> None:
    """Refuse a plan whose ranks do not fit on their GPU together."""
    if needed * gpu.ranks > gpu.memory:
        ranks = f" for {gpu.ranks} ranks" if gpu.ranks > 1 else ""
        raise InputError(
            place,
            f"this needs {show_bytes(needed * gpu.ranks)}{ranks} on one GPU",
            f'at most the {show_bytes(gpu.memory)} of the {gpu.name}; [plan] memory = "…", or more '
            "GPUs",
        )


def _own(comm: Comm, place: str) -> tuple[int, str, int, str]:
    """(number, name, bytes, an identity that no other GPU anywhere has)."""
    runtime = cupy(place).cuda.runtime
    number = number_of(comm.rank_on_node, devices(place))
    runtime.setDevice(number)
    found = runtime.getDeviceProperties(number)
    # A part of a GPU (MIG) has an identifier of its own, but its bus is that of the whole.
    unique = (
        bytes(found.get("uuid", b"")).hex()
        or f"{platform.node()}/{runtime.deviceGetPCIBusId(number)}"
    )
    return number, found["name"].decode(), int(found["totalGlobalMem"]), unique.replace(" ", "_")


def _wish() -> str:
    wish = os.environ.get(VARIABLE, "")
    if wish and wish not in WAYS:
        raise InputError(VARIABLE, f"unknown way {wish!r}", one_of(WAYS, wish))
    return wish
