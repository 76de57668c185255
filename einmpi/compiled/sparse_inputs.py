"""Sparse inputs that a job reads from files or generates, and what its files get of the results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from einmpi.comm.agreement import together
from einmpi.comm.base import ALONE, Comm
from einmpi.compiled.outputs import check_targets
from einmpi.compiled.sparse import StoredJob, stored_job
from einmpi.errors import InputError
from einmpi.files.sparse.reading import generate_sparse, read_sparse_input
from einmpi.files.specs import InputSpec
from einmpi.graph.scalar import Number
from einmpi.graph.sparse.coordinates import Keys
from einmpi.job.job import Job


def sparse_specs(job: Job, given: Mapping[str, Any]) -> list[InputSpec]:
    """Return the sparse inputs of a job that are not given: in files, or generated."""
    found = []
    for spec in job.inputs:
        if spec.key_dimensions and spec.name in job.written.by_name and spec.name not in given:
            found.append(spec)
    return found


def with_sparse_inputs(comm: Comm, job: Job, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs with the sparse ones that a job reads or generates. All ranks call it."""
    found = dict(given)
    for spec in sparse_specs(job, given):
        found[spec.name] = read_sparse_input(spec, comm)
    return found


@dataclass(frozen=True)
class ReadJob:
    """A job as it is run, and its inputs; `stored` is None if none of them is sparse."""

    job: Job
    inputs: Mapping[str, Any]
    stored: StoredJob | None = None

    def results(self, outputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the results of the user's job."""
        return outputs if self.stored is None else self.stored.results(outputs)


def read_job_over_stored(comm: Comm, job: Job, checkpoint: str | None) -> ReadJob:
    """Return a job over what is stored of its sparse inputs, which are read. All ranks call it.

    Its output files are checked: which results are sparse is known from now on.
    """
    if not sparse_specs(job, {}):
        return ReadJob(job, {})

    def refuse() -> None:
        what = "an input is sparse, and checkpoints are wanted"
        raise InputError(f"--checkpoint {checkpoint}", what, "a run without them")

    if checkpoint is not None:
        together(comm, refuse)
    inputs = with_sparse_inputs(comm, job, {})
    stored = stored_job(comm, job, inputs)
    together(comm, lambda: check_targets(job, _sparse_results(job, stored)))
    return ReadJob(stored.job, stored.inputs(inputs), stored)


@dataclass(frozen=True)
class _Outline:
    """A sparse result before it is computed."""

    pattern: Keys
    shape: tuple[int, ...]
    implicit: Number
    dtype: np.dtype[Any]


def _sparse_results(job: Job, stored: StoredJob) -> dict[str, _Outline]:
    """Return what is known of the sparse results of a job."""
    found = {}
    for name, pattern in stored.desugared.patterns.items():
        vertex = job.written.by_name.get(name)
        if vertex is not None and name in stored.desugared.formats:
            implicit = stored.desugared.implicit(name)
            found[name] = _Outline(pattern.keys, vertex.bound, implicit, np.dtype(vertex.dtype))
    return found


def job_over_expected(job: Job) -> Job:
    """Return a job over what its sparse inputs will store, by what headers say of them.

    As long as they are not read, their keys are anywhere.
    """
    specs = sparse_specs(job, {})
    if not specs:
        return job
    inputs = {}
    for spec in specs:
        if spec.stored is None:
            what = f"{spec.name} has no header that says how many elements it stores"
            raise InputError(spec.place, what, "a file without a shape in the job, which is read")
        stored = min(spec.stored, prod((spec.shape or ())[: spec.key_dimensions]))
        inputs[spec.name] = generate_sparse(replace(spec, stored=stored))
    return stored_job(ALONE, job, inputs).job
