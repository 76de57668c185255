"""Runs of the schedules of a compiled job on this rank, and what they take."""

from __future__ import annotations

import os
import pkgutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from logging import DEBUG
from typing import Any

from einmpi.arrays.dist_array import DistArray
from einmpi.comm.base import Comm
from einmpi.compiled.inputs import Inputs, PrepareTaking, taking_on_host
from einmpi.errors import InputError
from einmpi.job.job import Job
from einmpi.job.settings import BACKENDS
from einmpi.kernels.cpu.blas_library.choice import use_blas
from einmpi.log import LOGGER
from einmpi.planner.plan import Plan
from einmpi.process.environment import graphs_are_on
from einmpi.process.startup import first_use_seconds
from einmpi.runtime.actions import InputSource, RankFailure
from einmpi.runtime.backend import NOTHING_SHARED, Backend
from einmpi.runtime.background import OnTransfer, SharedBuffers
from einmpi.runtime.cpu.backend import NumpyBackend
from einmpi.runtime.program import Checkpointer, Program
from einmpi.runtime.sharing.memory import SharedMemory, set_up_shared_memory
from einmpi.runtime.threads import threads_of
from einmpi.schedule.memory import spilled_bytes
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Load, Step

# ---- measured ------------------------------------------------------------------------------------
#
# What a run of a rank took: times and amounts.


@dataclass(slots=True)  # frozen ones take longer to make, and every step of a loop makes two
class Measured:
    """Times, in seconds, and amounts, in bytes, of one run of a rank."""

    seconds: float  # without loading and without checkpoints
    seconds_loading: float
    received: int
    peak: int
    shuffled: int = 0  # received while loading, besides what the plan moves
    between: int = 0  # the part of `received` that came from other nodes
    spilled: int = 0  # written to the slow tier
    spilled_planned: int = 0
    fetched: int = 0  # copied from the slow tier
    seconds_hidden: float = 0.0  # of transfers, in which the rank did something else
    shared: int = 0  # the part of `received` that was read in memory that ranks share
    shared_planned: int = 0

    def plus(self, later: Measured) -> Measured:
        """Return the times and amounts of this run and a later one together."""
        return Measured(
            seconds=self.seconds + later.seconds,
            seconds_loading=self.seconds_loading + later.seconds_loading,
            received=self.received + later.received,
            peak=max(self.peak, later.peak),
            shuffled=self.shuffled + later.shuffled,
            between=self.between + later.between,
            spilled=self.spilled + later.spilled,
            spilled_planned=self.spilled_planned + later.spilled_planned,
            fetched=self.fetched + later.fetched,
            seconds_hidden=self.seconds_hidden + later.seconds_hidden,
            shared=self.shared + later.shared,
            shared_planned=self.shared_planned + later.shared_planned,
        )


class TimedStorage:
    """A storage that counts the seconds in which a run waits for it, without first uses.

    Given arrays of the storage's own type are used where they are, which takes no time worth
    counting.
    """

    def __init__(self, storage: InputSource, given: Mapping[str, Any]) -> None:
        self.storage = storage
        self.given = given
        self.array_type = storage.array_type
        self.seconds = 0.0
        self.begin = storage.begin
        self.close = storage.close
        self.takes_messages = storage.takes_messages

    def fill(self, step: Load, target: Any, comm: Comm) -> None:
        start = time.perf_counter() - first_use_seconds()
        self.storage.fill(step, target, comm)
        self.seconds += time.perf_counter() - first_use_seconds() - start

    def block(self, step: Load, comm: Comm) -> Any:
        kind = type(self.given.get(step.tensor))
        if (kind is self.array_type or kind is DistArray) and not step.overwritten:
            return self.storage.block(step, comm)
        start = time.perf_counter() - first_use_seconds()
        block = self.storage.block(step, comm)
        self.seconds += time.perf_counter() - first_use_seconds() - start
        return block


# ---- backends ------------------------------------------------------------------------------------
#
# Set up a job's backend: where slots are, how they are filled, how messages travel.


@dataclass(frozen=True)
class Workplace:
    """Where and with what a rank computes.

    `comm` carries messages between slots. `prepare_taking` returns what takes the blocks of inputs
    that look like one that was given. `check_memory` takes the place that an error names and the
    bytes that a rank needs. `text` describes what the rank computes with.
    """

    backend: Backend
    comm: Comm
    storage: Callable[[Inputs], InputSource]
    prepare_taking: PrepareTaking
    check_memory: Callable[[str, int], None]
    text: str
    program: Callable[[Schedule], Program]


def workplace_of(job: Job, comm: Comm) -> Workplace:
    """Set up the backend that a job asks for."""
    record = BACKENDS[job.backend]
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
    return Workplace(
        backend, comm, lambda inputs: inputs, taking_on_host, check_node, text, program
    )


def on_gpu(job: Job, comm: Comm) -> Workplace:
    """Set up the backend cupy."""
    for vertex in job.graph.computed:
        if vertex.computed_einsum.matrix is not None:
            what = f"{vertex.name} is a function of matrices, which GPUs do not compute"
            raise InputError(job.path or job.source.name, what, 'backend = "numpy"')
    from einmpi.compiled.gpu_inputs import DeviceInputs, taking_on_device
    from einmpi.runtime.gpu.backend import CupyBackend, check_gpu_memory, gpu_context
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
        partial(taking_on_device, backend),
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


class Runner:
    """Runs schedules, with memory and calls that are kept from run to run.

    `on_step` and `on_transfer` are told what a run does. They may be set between runs.
    """

    def __init__(self, job: Job, comm: Comm, work: Workplace, may_share: bool) -> None:
        self.job = job
        self.comm = comm
        self.work = work
        self.backend = work.backend
        self.may_share = may_share  # memory, with other ranks of the node
        # By the id of a schedule, which is kept too, so that no other object gets the same id.
        self.programs: dict[int, tuple[Schedule, Program]] = {}
        self.shared: dict[int, tuple[Schedule, SharedMemory | None]] = {}
        self.on_step: Callable[[Step], None] | None = None
        self.on_transfer: OnTransfer | None = None
        self.keeps_memory = False  # that a run does not use any more, for the next one

    def run(
        self,
        plan: Plan,
        schedule: Schedule,
        sources: Inputs,
        checkpoints: Checkpointer | None = None,
        wait: bool = True,
        failure: RankFailure | None = None,
    ) -> tuple[dict[str, Any], Measured]:
        """Execute the schedule, and return this rank's blocks of the outputs and what was measured.

        Without `wait`, kernels on a GPU may still run on return; uses of the outputs follow them.
        With `failure`, a rank notes its first error there and goes on without computing.
        """
        self.backend.reserve(plan.peak, lambda: sources.bytes_on_device(schedule))
        shared = self.shared_memory(schedule)
        received = self.comm.received
        received_shared = self.comm.received_shared
        received_between = self.comm.received_between
        start = time.perf_counter()
        first_uses_before = first_use_seconds()
        loader = self.work.storage(sources)
        storage = TimedStorage(loader, sources.given)
        sources.shuffled = 0
        sources.shuffled_between = 0
        try:
            if shared is not None:
                shared.begin_run()
                self.backend.shared = shared
                sources.sharing = shared
            blocks, buffers = self.program(schedule).run(
                storage, failure, self.on_step, checkpoints, self.on_transfer
            )
            if wait:
                self.backend.wait()
        finally:
            loader.close()
            self.backend.shared = NOTHING_SHARED
            if shared is not None:
                shared.end_run(keep=self.keeps_memory)
            if not self.keeps_memory:
                self.backend.release()
        seconds = time.perf_counter() - start - storage.seconds
        seconds -= first_use_seconds() - first_uses_before
        if checkpoints is not None:
            seconds -= checkpoints.seconds
        measured = Measured(
            seconds=seconds,
            seconds_loading=storage.seconds,
            received=self.comm.received - received - sources.shuffled,
            peak=buffers.peak,
            shuffled=sources.shuffled,
            between=self.comm.received_between - received_between - sources.shuffled_between,
            spilled=buffers.spilled,
            spilled_planned=spilled_bytes(schedule) if plan.spilled else 0,
            fetched=buffers.fetched,
            shared=self.comm.received_shared - received_shared,
            shared_planned=0 if shared is None else shared.found.bytes_received,
        )
        if isinstance(buffers, SharedBuffers):
            measured.seconds_hidden = buffers.background.seconds_hidden
        self.log(measured)
        return blocks, measured

    def log(self, measured: Measured) -> None:
        """Write what a run took to the log."""
        if LOGGER.isEnabledFor(DEBUG):
            LOGGER.debug(
                "computed %s in %.6f s, received %d bytes",
                ", ".join(self.job.graph.outputs),
                measured.seconds,
                measured.received,
            )

    @contextmanager
    def keeping_memory(self) -> Iterator[None]:
        """Use memory again from run to run, as long as a `with` block lasts."""
        self.keeps_memory = True
        try:
            yield
        finally:
            self.keeps_memory = False
            self.backend.release()
            for _, shared in self.shared.values():
                if shared is not None:
                    shared.end_run(keep=False)

    def program(self, schedule: Schedule) -> Program:
        """Return the program of a schedule, the same one for all its runs."""
        known = self.programs.get(id(schedule))
        if known is None:
            known = self.programs[id(schedule)] = schedule, self.work.program(schedule)
        return known[1]

    def shared_memory(self, schedule: Schedule) -> SharedMemory | None:
        """Return the slots of a schedule that ranks share; None if there are none.

        All ranks call it. They find out together, before the first run of the schedule.
        """
        known = self.shared.get(id(schedule))
        if known is None:
            found = None
            if self.may_share:
                found = set_up_shared_memory(schedule, self.comm)
            known = self.shared[id(schedule)] = schedule, found
        return known[1]
