"""Where a run's inputs come from: arrays, DistArrays and datasets that are given, files, generators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np

from einmpi.comm.base import Comm
from einmpi.compiled.dist_array import DistArray
from einmpi.files.datasets import Dataset
from einmpi.files.generate import fill_box
from einmpi.files.reading import Reading
from einmpi.job.job import Job
from einmpi.schedule.regions import Region, boxes, packed, shape
from einmpi.schedule.steps import Load

Blocks: TypeAlias = dict[tuple[str, Region], np.ndarray]


class Inputs:
    """The inputs of the runs of one rank; `files` says how those of the job lie in their files."""

    def __init__(
        self,
        job: Job,
        given: Mapping[str, Any],
        files: Mapping[str, Dataset],
        resident: Blocks | None = None,
        keep: bool = False,
    ) -> None:
        self.job, self.given, self.files = job, given, files
        self.resident = {} if resident is None else resident
        self.keep = keep  # what was loaded, for the next run
        self.shuffled = self.shuffled_between = (
            0  # bytes that came from other ranks, nodes, which read them
        )
        self.begun: dict[str, Reading] = {}
        self.background: ThreadPoolExecutor | None = None

    # ---- what the execute loop asks for -----------------------------------------------------------------------------

    def begin(
        self, step: Load, make: Callable[[], np.ndarray], comm: Comm, outside: bool = False
    ) -> None:
        """Start to read a file in the background, into the array that `make` gives."""
        dataset = self.dataset(step.tensor)
        if dataset is not None and not self.keep:
            reading = Reading(dataset, step.layout, comm.rank, make(), step.region, step.place)
            reading.begin(self.pool())
            self.begun[step.tensor] = reading

    def fill(self, step: Load, target: np.ndarray, comm: Comm) -> None:
        """Put a region of an input at a place in an array. All ranks of the layout call it."""
        if self.keep and step.tensor not in self.given:
            kept = self.kept(step, comm)
            if kept.size:
                pairs = zip(
                    boxes(step.region, step.place),
                    boxes(step.region, packed(step.region)),
                    strict=True,
                )
                for (_, here), (_, there) in pairs:
                    _vector(target)[here] = _vector(kept)[there]
        else:
            self.read(step, target, step.place, comm)

    def block(self, step: Load, comm: Comm) -> np.ndarray:
        """A region of an input that stays on the rank, to be read only. All ranks of the layout call it."""
        given = self.given.get(step.tensor)
        if isinstance(given, DistArray):
            return np.asarray(given.local, order="C")
        if isinstance(given, np.ndarray):
            return _block_of(given, step.region, step.slot.dtype).reshape(step.slot.shape)
        return self.kept(step, comm)

    def close(self) -> None:
        """End what goes on in the background."""
        for reading in self.begun.values():
            reading.close()
        self.begun.clear()
        if self.background is not None:
            self.background.shutdown()
            self.background = None

    # ---- inside -----------------------------------------------------------------------------------------------------

    def dataset(self, tensor: str) -> Dataset | None:
        given = self.given.get(tensor)
        return (
            self.files.get(tensor)
            if given is None
            else given
            if isinstance(given, Dataset)
            else None
        )

    def pool(self) -> ThreadPoolExecutor:
        if self.background is None:
            self.background = ThreadPoolExecutor(1, "reading")
        return self.background

    def kept(self, step: Load, comm: Comm) -> np.ndarray:
        """A block that was loaded before, or is now."""
        # A dataset that is given may be another one the next time.
        known = {} if step.tensor in self.given else self.resident
        key = step.tensor, step.region
        if key not in known:
            array = np.empty(step.slot.shape and shape(step.region), step.slot.dtype)
            self.read(step, array, packed(step.region), comm)
            known[key] = array
        return known[key]

    def read(self, step: Load, target: np.ndarray, place: Region, comm: Comm) -> None:
        """From a file, a generator, or an array that every rank has."""
        dataset = self.dataset(step.tensor)
        if dataset is not None:
            before = comm.received, comm.received_between
            reading = self.begun.pop(step.tensor, None)
            if reading is None:
                reading = Reading(dataset, step.layout, comm.rank, target, step.region, place)
            reading.finish(comm, self.pool())
            self.shuffled += comm.received - before[0]
            self.shuffled_between += comm.received_between - before[1]
            return
        bound, given = self.job.graph[step.tensor].bound, self.given.get(step.tensor)
        spec = next((spec for spec in self.job.inputs if spec.name == step.tensor), None)
        for box, here in boxes(step.region, place):
            there = box if bound else ()
            part: np.ndarray = _vector(target)[here]
            if given is not None:
                part[...] = given[there]
            else:
                assert spec is not None
                fill_box(spec, bound, there, part if bound else part.reshape(()))


def _vector(array: np.ndarray) -> np.ndarray:
    """A number as a vector of one element."""
    return np.atleast_1d(array)


def _block_of(array: np.ndarray, region: Region, dtype: str) -> np.ndarray:
    """A block of an array, the array itself where it is that."""
    for dimension, runs in enumerate(region if array.ndim else ()):
        taken: Any = slice(*runs[0]) if len(runs) == 1 else [k for run in runs for k in range(*run)]
        array = array[(slice(None),) * dimension + (taken,)]
    return np.asarray(array, dtype, order="C")  # a number stays one
