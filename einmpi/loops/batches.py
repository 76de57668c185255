"""The batches of a running loop: where their rows come from, and where each step finds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arrays.dist_array import DistArray
from einmpi.comm.agreement import together
from einmpi.comm.base import Comm
from einmpi.compiled.running import Measured
from einmpi.errors import InputError
from einmpi.files.datasets import Dataset, files_as_read
from einmpi.files.reading import find_planned
from einmpi.job.job import Job
from einmpi.job.loop import Batches, Loop
from einmpi.loops.read_ahead import (
    ArrayRows,
    BatchedInput,
    DatasetRows,
    GeneratedRows,
    ReadAhead,
    RowSource,
    bytes_ahead,
    rows_in_order,
    rows_read_together,
)
from einmpi.planner.plan import Plan
from einmpi.planner.plan_data import BatchPlan
from einmpi.runtime.gpu.copies import on_host
from einmpi.runtime.host_memory import aligned_empty
from einmpi.schedule.layout import Layout
from einmpi.schedule.lower import arrival_layout

Array: TypeAlias = npt.NDArray[Any]


class LoopBatches:
    """The batches of a loop on one rank.

    `given` are the arrays of the caller, with all their rows. All ranks make it together.
    """

    def __init__(self, job: Job, batches: Batches, comm: Comm, given: Mapping[str, Any]) -> None:
        self.batches = batches
        self.comm = comm
        self.specs = {spec.name: spec for spec in job.inputs if spec.name in batches.names}
        self.files: dict[str, Dataset] = {}
        self.sources: dict[str, RowSource] = together(
            comm, lambda: self._find_sources(given), lambda _: files_as_read(self.files)
        )
        self.layouts: dict[str, Layout] = {}
        # What this rank uses besides the memory of a step.
        self.bytes_ahead = 0
        self.bytes_arriving = 0
        self.is_counted = reads_into_memory_of_plan(job)
        self.reading: ReadAhead | None = None

    def _find_sources(self, given: Mapping[str, Any]) -> dict[str, RowSource]:
        sources: dict[str, RowSource] = {}
        for name, spec in self.specs.items():
            array = given.get(name)
            if isinstance(array, DistArray):
                what = f"{name} comes in batches, and is a DistArray"
                raise InputError("inputs", what, "an array, or a dataset in a file")
            if array is None and spec.file is not None:
                array = find_planned(spec, spec.whole_shape or (), spec.dtype or "")
            if isinstance(array, Dataset):
                self.files[name] = array
                sources[name] = DatasetRows(array)
            elif array is not None:
                sources[name] = ArrayRows(on_host(array))
            else:
                sources[name] = GeneratedRows(spec)
        return sources

    def arrive_in(self, plan: Plan, job: Job, loop: Loop) -> BatchPlan:
        """Take note of the layouts in which a step needs the rows; return how they arrive."""
        for name in self.sources:
            if name in plan.graph.by_name:
                self.layouts[name] = arrival_layout(plan, name)
        found = plan_batches(job, loop, plan)
        assert found is not None
        self.bytes_ahead = found.bytes_ahead
        self.bytes_arriving = found.bytes_arriving
        return found

    def start(self, steps: int) -> None:
        """Get ready to read the batches of at most so many steps."""
        inputs = []
        for name, layout in self.layouts.items():
            dtype = self.specs[name].dtype or ""
            block = rows_read_together(self.batches, self.specs[name].chunk_rows)
            inputs.append(BatchedInput(name, dtype, layout, self.sources[name], block))
        self.reading = ReadAhead(
            self.batches, inputs, self.comm.rank, aligned_empty, self.bytes_ahead > 0, steps
        )

    def place(self, step: int, values: dict[str, Any]) -> None:
        """Put this rank's part of the batch of a step among the values that the step reads.

        If it cannot be read, an error is raised on this rank alone.
        """
        assert self.reading is not None
        for name in self.layouts:  # the batch of the step before is not needed any more
            values.pop(name, None)
        for name, block in self.reading.take(step).items():
            values[name] = DistArray(block, self.layouts[name], self.comm)

    def with_reading(self, measured: Measured) -> Measured:
        """Return what was measured in a step with the memory and the time of reading its batch."""
        assert self.reading is not None
        seconds = measured.seconds_loading + self.reading.seconds_waiting
        self.reading.seconds_waiting = 0.0
        peak = measured.peak
        if self.is_counted:
            peak += self.bytes_arriving + self.reading.bytes_used
        return replace(measured, seconds_loading=seconds, peak=peak)

    def close(self) -> None:
        """End the thread that reads, and close the files."""
        if self.reading is not None:
            self.reading.close()
            self.reading = None


@contextmanager
def reading_batches(batches: LoopBatches | None, steps: int) -> Iterator[None]:
    """Read batches during a with block, at the end of which no thread reads any more."""
    if batches is None:
        yield
        return
    batches.start(steps)
    try:
        yield
    finally:
        batches.close()


def reads_into_memory_of_plan(job: Job) -> bool:
    """Return whether what is read ahead takes memory that the plan counts.

    On a GPU the plan counts that of the device, and batches are read into that of the host.
    """
    return job.backend == "numpy"


def plan_batches(job: Job, loop: Loop, plan: Plan) -> BatchPlan | None:
    """Return how batches arrive in the layouts of a plan.

    They are read ahead if the memory limit leaves room for it.
    """
    batches = loop.batches
    if batches is None:
        return None
    ahead = 0
    arriving = 0
    nbytes = 0
    for spec in job.inputs:
        if spec.name not in batches.names or spec.name not in plan.graph.by_name:
            continue
        vertex = plan.graph[spec.name]
        layout = arrival_layout(plan, spec.name)
        itemsize = np.dtype(vertex.dtype).itemsize
        nbytes += vertex.nbytes
        arriving += layout.max_elements() * itemsize
        block = rows_read_together(batches, spec.chunk_rows)
        ahead += bytes_ahead(batches, layout, itemsize, block)
    limit = plan.memory if reads_into_memory_of_plan(job) else None
    if limit is not None and plan.peak + arriving + ahead > limit:
        ahead = 0
    seed = None
    block = 1
    if batches.shuffle is not None:
        seed = batches.shuffle.seed
        block = batches.shuffle.block
    return BatchPlan(
        names=batches.names,
        rows=batches.rows,
        batch=batches.batch,
        steps_an_epoch=batches.steps_an_epoch,
        last="pad" if batches.pads_last else "drop",
        seed=seed,
        block=block,
        nbytes=nbytes,
        bytes_arriving=arriving,
        bytes_ahead=ahead,
    )


def batch_of_whole_array(batches: Batches, array: Array, step: int) -> Array:
    """Return the batch of a step, given all rows: for the reference."""
    order = rows_in_order(batches.rows, batches.shuffle, batches.epoch_of(step))
    first = batches.first_of(step)
    found = array[order[first : first + batches.batch]]
    missing = batches.batch - len(found)
    return np.concatenate([found, np.zeros((missing, *array.shape[1:]), array.dtype)])
