"""What a job's backend brings along: where slots lie, how they are filled, how messages go. One table by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from einmpi.comm.base import Comm
from einmpi.compiled.inputs import Inputs
from einmpi.errors import InputError
from einmpi.graph.dtypes import DTYPES
from einmpi.job.job import Job
from einmpi.runtime.backend import Backend, NumpyBackend
from einmpi.runtime.execute import Storage
from einmpi.runtime.threads import threads_of


@dataclass(frozen=True)
class Workplace:
    """Where a rank computes."""

    backend: Backend
    comm: Comm  # between slots
    storage: Callable[[Inputs], Storage]
    check_memory: Callable[[str, int], None]  # (where an error is, bytes a rank)
    text: str  # what a rank computes with


def on_host(job: Job, comm: Comm) -> Workplace:
    narrow = next(
        (vertex.name for vertex in job.graph.vertices if DTYPES[vertex.dtype].gpu_only), None
    )
    if narrow is not None:
        raise InputError(
            job.path or job.source.name,
            f"{narrow} is {job.graph[narrow].dtype}, which needs a GPU",
            "backend cupy, or another dtype",
        )
    threads = threads_of(comm)
    backend = NumpyBackend(threads.count, job.fast_math, job.scratch)
    return Workplace(
        backend,
        comm,
        lambda inputs: inputs,
        lambda place, needed: check_memory(place, needed * comm.ranks_on_node),
        str(threads),
    )


def on_gpu(job: Job, comm: Comm) -> Workplace:
    from einmpi.compiled.gpu_inputs import DeviceInputs
    from einmpi.runtime.gpu.backend import CupyBackend, gpu_context
    from einmpi.runtime.gpu.binding import check_memory as check_gpu_memory

    context = gpu_context(comm, job.path or job.source.name)
    # TF32 is faster and rounds more, which is what fast_math allows.
    backend = CupyBackend(context, job.fast_math, tf32=job.fast_math, scratch=job.scratch)
    messages = f", messages by {context.gpu.transport}" if comm.size > 1 else ""
    return Workplace(
        backend,
        context.comm,
        lambda inputs: DeviceInputs(inputs, backend, comm),
        lambda place, needed: check_gpu_memory(place, context.gpu, needed),
        f"{context.gpu}{messages}",
    )


WORKPLACES: dict[str, Callable[[Job, Comm], Workplace]] = {"numpy": on_host, "cupy": on_gpu}


def check_memory(place: str, needed: int) -> None:
    """Refuse what this machine cannot hold, before it tries."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        allowed = f"at most the {available / 2**30:.1f} GiB it has; use smaller sizes, more machines, or a memory limit"
        raise InputError(place, f"this needs {needed / 2**30:.1f} GiB on this machine", allowed)
