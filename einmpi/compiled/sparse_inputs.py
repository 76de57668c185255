"""Sparse inputs that a job reads from files or generates, and what its files get of the results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import prod
from typing import Any

import numpy as np

from einmpi.comm.agreement import together
from einmpi.comm.base import ALONE, Comm
from einmpi.compiled.outputs import check_targets
from einmpi.compiled.sparse import StoredJob, has_sparse, stored_job, with_coordinates
from einmpi.errors import InputError
from einmpi.files.sparse.reading import generate_sparse, read_sparse_input
from einmpi.files.specs import InputSpec
from einmpi.graph.sparse.coordinates import Coordinates
from einmpi.job.job import Job

MOST_CHECKED = 10**6  # stored elements for which keys are made up to check a job: a second
MOST_ASSUMED = 10**8  # keys that are made up to plan for a tensor: a minute for 2·10⁷ of them


def sparse_specs(job: Job, given: Mapping[str, Any]) -> list[InputSpec]:
    """Return the sparse inputs of a job that are not given: in files, or generated."""
    read = {name for each in job.one_after_another() for name in each.written.by_name}
    found = []
    for spec in job.inputs:
        if spec.key_dimensions and spec.name in read and spec.name not in given:
            found.append(spec)
    return found


def validated_specs(job: Job) -> list[list[InputSpec]]:
    """Return the sparse inputs of the validation of each loop."""
    found = []
    for each in job.one_after_another():
        validation = None if each.loop is None else each.loop.validation
        specs = () if validation is None else validation.inputs
        found.append([spec for spec in specs if spec.key_dimensions])
    return found


def validated_inputs(
    comm: Comm, job: Job, given: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return the inputs of the validation of each loop: given ones, and sparse ones that are read.

    All ranks call it.
    """
    found = []
    for specs in validated_specs(job):
        own = dict(given or {})
        for spec in specs:
            if spec.name not in own:
                own[spec.name] = read_sparse_input(spec, comm)
        found.append(own)
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
    digests: Mapping[str, str] = field(default_factory=dict)  # of what sparse inputs store

    def results(self, outputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the results of the user's job."""
        return outputs if self.stored is None else self.stored.results(outputs)

    def identity(self, ranks: int) -> dict[str, str]:
        """Return what else must be equal to go on from a checkpoint of a run on so many ranks.

        Ranks share stored elements in blocks, so one that has some needs as many ranks.
        """
        assert self.stored is not None
        parts = {f"the sparse input {name}": text for name, text in self.digests.items()}
        saved: list[str] = []
        for each in self.job.one_after_another():
            if each.loop is not None:
                saved += each.loop.carry
                saved += (each.loop.results or ()) if self.job.loops else ()
        if self.job.loop is None or not self.stored.formats.keys().isdisjoint(saved):
            parts["the number of ranks, which share sparse tensors,"] = str(ranks)
        return parts


def read_job_over_stored(comm: Comm, job: Job) -> ReadJob:
    """Return a job over what is stored of its sparse inputs, which are read. All ranks call it.

    Its output files are checked: which results are sparse is known from now on.
    """
    if not sparse_specs(job, {}) and not any(validated_specs(job)):
        return ReadJob(job, {})

    inputs = with_sparse_inputs(comm, job, {})
    validated = validated_inputs(comm, job)
    stored = stored_job(comm, job, inputs, validated=validated)
    together(comm, lambda: check_targets(job, _sparse_results(job, stored)))
    digests = {name: _digest(tensor) for name, tensor in inputs.items()}
    for number, each in enumerate(validated, 1):
        for name, tensor in each.items():
            digests[f"{name} of the validation of loop {number}"] = _digest(tensor)
    return ReadJob(stored.job, stored.inputs(inputs), stored, digests)


def _digest(tensor: Coordinates) -> str:
    """Return a text that is different for tensors that differ in any way."""
    values = blake2b(np.ascontiguousarray(tensor.values).view(np.uint8).data, digest_size=16)
    kind = f"{tensor.dtype.name}{list(tensor.shape)}, others {tensor.implicit!r}"
    return f"{kind}, keys {tensor.digest}, values {values.hexdigest()}"


def _sparse_results(job: Job, stored: StoredJob) -> dict[str, Coordinates]:
    """Return what is known of the sparse results that a job writes to files."""
    names = [spec.name for spec in job.outputs if spec.name in stored.formats]
    return {name: stored.outline(name) for name in names}


def job_over_expected(job: Job, ranks: int, given: Mapping[str, Any]) -> Job:
    """Return a job over what the given sparse tensors store, and what others are assumed to store.

    The number of stored elements of a file is in its header, that of a tensor that the job was made
    with in the job. As long as nobody looks at the keys, they are anywhere.
    """
    found = with_coordinates(ALONE, job, given)
    assumed = set()

    def expected(spec: InputSpec) -> Coordinates:
        if spec.file is not None or spec in job.expected:
            assumed.add(spec.name)
        return _expected(spec)

    made_with = [spec for spec in job.expected if spec.name in job.written.by_name]
    for spec in (*sparse_specs(job, found), *made_with):
        if spec.name not in found:
            found[spec.name] = expected(spec)
    validated = [{spec.name: expected(spec) for spec in each} for each in validated_specs(job)]
    if not any(map(has_sparse, (found, *validated))):
        return job
    return stored_job(ALONE, job, found, ranks, validated, assumed).job


def check_over_expected(job: Job) -> None:
    """Refuse what a run would refuse when it has read its sparse inputs, unless these are large."""
    specs = sparse_specs(job, {})
    if not specs or any(spec.stored is None or spec.stored > MOST_CHECKED for spec in specs):
        check_targets(job)
        return
    stored = stored_job(ALONE, job, {spec.name: _expected(spec) for spec in specs})
    check_targets(job, _sparse_results(job, stored))


def _expected(spec: InputSpec) -> Coordinates:
    """Return a tensor that stores as much as one that nobody has looked at yet."""
    if spec.stored is None:
        what = f"{spec.name} has no header that says how many elements it stores"
        raise InputError(spec.place, what, "a file without a shape in the job, which is read")
    stored = min(spec.stored, prod((spec.shape or ())[: spec.key_dimensions]))
    if stored > MOST_ASSUMED:
        what = f"{spec.name} stores {stored:,} elements, for which a plan would make up keys"
        raise InputError(spec.place, what, f"at most {MOST_ASSUMED:,}")
    return generate_sparse(replace(spec, stored=stored))
