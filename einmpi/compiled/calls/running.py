"""Runs of the schedules of a compiled job on this rank, and what they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import DEBUG
from typing import Any

from einmpi.comm.base import Comm
from einmpi.compiled.backends import Workplace
from einmpi.compiled.inputs import Inputs
from einmpi.compiled.measured import Measured, TimedStorage
from einmpi.job.job import Job
from einmpi.log import LOGGER
from einmpi.planner.plan import Plan
from einmpi.process.first_use import first_use_seconds
from einmpi.runtime.failure import RankFailure
from einmpi.runtime.overlap.background import OnTransfer, SharedBuffers
from einmpi.runtime.program import Checkpointer, Program
from einmpi.runtime.sharing.arrays import NOTHING_SHARED
from einmpi.runtime.sharing.memory import SharedMemory, set_up_shared_memory
from einmpi.schedule.memory import spilled_bytes
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Step


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
