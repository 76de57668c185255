"""Which GPU a rank uses, which ranks share it, and how messages travel between GPUs."""

from __future__ import annotations

import os
import platform
from collections import Counter
from dataclasses import dataclass, replace

from einmpi.comm.agreement import together
from einmpi.comm.base import Comm
from einmpi.errors import InputError, one_of
from einmpi.kernels.cuda.driver import cupy, nccl
from einmpi.process.variables import TRANSPORT_VARIABLE
from einmpi.units import show_bytes

# How messages travel: the MPI library takes device memory; NCCL; through pinned host memory.
TRANSPORTS = ("mpi", "nccl", "host")


@dataclass(frozen=True)
class Gpu:
    """The GPU of a rank."""

    number: int  # among those that the process sees
    name: str
    memory: int  # bytes
    identity: str  # unique among all GPUs of all nodes
    # What a rank does not know without asking the others.
    ranks: int = 1  # that share it
    transport: str = ""  # of messages: one of TRANSPORTS

    def __str__(self) -> str:
        shared = f", shared by {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.name}{shared}"


def count_gpus(place: str = "GPU") -> int:
    """Return how many GPUs this process sees. Raise an InputError at `place` if there are none."""
    runtime = cupy(place).cuda.runtime
    try:
        count = int(runtime.getDeviceCount())
        reason = "CUDA sees none; CUDA_VISIBLE_DEVICES may hide them"
    except runtime.CUDARuntimeError as error:
        count = 0
        reason = " ".join(str(error).split())
    if not count:
        raise InputError(
            place,
            f"backend cupy needs a GPU: {reason:.200}",
            "an NVIDIA GPU with its driver, or backend numpy",
        )
    return count


def bind(comm: Comm, place: str) -> Gpu:
    """Choose this rank's GPU and make it the current one. All ranks call this together."""
    own = together(comm, lambda: _select_gpu(comm, place))
    wish = together(comm, _wished_transport, lambda wish: wish or "none")
    has_nccl = nccl() is not None
    texts = comm.allgather_text(f"{own.identity} {int(comm.cuda_aware)} {int(has_nccl)}")
    facts = [text.split() for text in texts]
    ranks_on_gpu = Counter(identity for identity, _, _ in facts)
    # NCCL needs at least two ranks, and a GPU for each of them.
    own_gpus = comm.size > 1 and max(ranks_on_gpu.values()) == 1
    all_aware = all(aware == "1" for _, aware, _ in facts)
    all_nccl = all(available == "1" for _, _, available in facts)
    transport = together(comm, lambda: choose_transport(wish, own_gpus, all_aware, all_nccl))
    return replace(own, ranks=ranks_on_gpu[own.identity], transport=transport)


def choose_transport(wish: str, own_gpus: bool, cuda_aware: bool, has_nccl: bool) -> str:
    """Return how messages travel between GPUs.

    `own_gpus` says that no two ranks share a GPU, which NCCL refuses. An MPI library that does not
    report to be CUDA-aware would crash on device memory, so it never gets any.
    """
    nccl_works = own_gpus and has_nccl
    if wish == "nccl" and not nccl_works:
        reason = "each rank needs a GPU of its own" if has_nccl else "CuPy finds no NCCL library"
        raise InputError(
            TRANSPORT_VARIABLE, f"nccl does not work here: {reason}", one_of(TRANSPORTS)
        )
    if wish:
        return wish
    if cuda_aware:
        return "mpi"
    return "nccl" if nccl_works else "host"


def check_gpu_memory(place: str, gpu: Gpu, needed: int) -> None:
    """Raise an InputError if the ranks that share a GPU need more memory than it has."""
    total = needed * gpu.ranks
    if total > gpu.memory:
        ranks = f" for {gpu.ranks} ranks" if gpu.ranks > 1 else ""
        raise InputError(
            place,
            f"this needs {show_bytes(total)}{ranks} on one GPU",
            f"at most the {show_bytes(gpu.memory)} of the {gpu.name}",
            'use more GPUs, or limit the memory with [plan] memory = "…"',
        )


def _select_gpu(comm: Comm, place: str) -> Gpu:
    """Make a GPU the current one: the ranks of a node take its GPUs in turn."""
    runtime = cupy(place).cuda.runtime
    # If the batch system shows each rank a single GPU, every rank takes number 0.
    number = comm.rank_on_node % count_gpus(place)
    runtime.setDevice(number)
    properties = runtime.getDeviceProperties(number)
    # A slice of a GPU (MIG) has a UUID of its own, but the bus id of the whole GPU.
    identity = bytes(properties.get("uuid", b"")).hex()
    if not identity:
        identity = f"{platform.node()}/{runtime.deviceGetPCIBusId(number)}"
    name = properties["name"].decode()
    memory = int(properties["totalGlobalMem"])
    return Gpu(number, name, memory, identity.replace(" ", "_"))


def _wished_transport() -> str:
    """Return the transport that the user asks for, or ""."""
    wish = os.environ.get(TRANSPORT_VARIABLE, "")
    if wish and wish not in TRANSPORTS:
        raise InputError(
            TRANSPORT_VARIABLE, f"there is no transport {wish!r}", one_of(TRANSPORTS, wish)
        )
    return wish
