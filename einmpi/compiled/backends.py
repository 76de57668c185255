"""Set up a job's backend: where slots are, how they are filled, how messages travel."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from einmpi.comm.base import Comm
from einmpi.compiled.inputs import Inputs
from einmpi.errors import InputError
from einmpi.job.job import Job
from einmpi.job.settings import backend_record
from einmpi.kernels.cpu.blas_library.choice import use_blas
from einmpi.process.variables import graphs_are_on
from einmpi.runtime.actions import InputSource
from einmpi.runtime.backend import Backend
from einmpi.runtime.cpu.backend import NumpyBackend
from einmpi.runtime.program import Program
from einmpi.runtime.threads import threads_of
from einmpi.schedule.schedule import Schedule


@dataclass(frozen=True)
class Workplace:
    """Where and with what a rank computes.

    `comm` carries messages between slots. `check_memory` takes the place that an error names and
    the bytes that a rank needs. `text` describes what the rank computes with.
    """

    backend: Backend
    comm: Comm
    storage: Callable[[Inputs], InputSource]
    check_memory: Callable[[str, int], None]
    text: str
    program: Callable[[Schedule], Program]


def workplace_of(job: Job, comm: Comm) -> Workplace:
    """Set up the backend that a job asks for."""
    record = backend_record(job.backend)
    set_up: Callable[[Job, Comm], Workplace] = pkgutil.resolve_name(record.workplace)
    return set_up(job, comm)


def on_host(job: Job, comm: Comm) -> Workplace:
    """Set up the backend numpy."""
    blas = use_blas(job.blas, job.blas_place or job.path or job.source.name)
    threads = threads_of(comm)
    backend = NumpyBackend(threads.count, job.fast_math, job.scratch, job.strict)

    def check_node(place: str, bytes_per_rank: int) -> None:
        check_memory(place, bytes_per_rank * comm.ranks_on_node)

    def program(schedule: Schedule) -> Program:
        return Program(schedule, backend, comm)

    text = str(threads) if blas.library is None else f"{threads}, BLAS {blas}"
    return Workplace(backend, comm, lambda inputs: inputs, check_node, text, program)


def on_gpu(job: Job, comm: Comm) -> Workplace:
    """Set up the backend cupy."""
    from einmpi.compiled.gpu_inputs import DeviceInputs
    from einmpi.runtime.gpu.backend import CupyBackend, gpu_context
    from einmpi.runtime.gpu.binding import check_gpu_memory
    from einmpi.runtime.gpu.graphs import GraphProgram, graphs_suit

    context = gpu_context(comm, job.path or job.source.name)
    # TF32 is faster and rounds more, which fast_math allows.
    backend = CupyBackend(
        context, job.fast_math, tf32=job.fast_math, scratch=job.scratch, strict=job.strict
    )
    has_graphs = graphs_are_on()

    def program(schedule: Schedule) -> Program:
        kind = GraphProgram if has_graphs and graphs_suit(schedule) else Program
        return kind(schedule, backend, context.comm)

    messages = f", messages by {context.gpu.transport}" if comm.size > 1 else ""
    return Workplace(
        backend,
        context.comm,
        lambda inputs: DeviceInputs(inputs, backend, comm),
        lambda place, needed: check_gpu_memory(place, context.gpu, needed),
        f"{context.gpu}{messages}" if has_graphs else f"{context.gpu}{messages}, no CUDA graphs",
        program,
    )


def check_memory(place: str, needed: int) -> None:
    """Refuse a job that needs more memory than this machine has, before it runs."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise InputError(
            place,
            f"this needs {needed / 2**30:.1f} GiB on this machine",
            f"at most the {available / 2**30:.1f} GiB it has",
            "use smaller sizes, more machines, or a memory limit",
        )
