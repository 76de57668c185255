"""The outputs of a job: checked before it runs, claimed while it runs, all stored or none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace

from einmpi.arrays.dist_array import DistArray
from einmpi.arrays.record import Origin, attributes_of
from einmpi.comm.base import Comm
from einmpi.errors import InputError
from einmpi.files.claims import Claim, claimed
from einmpi.files.datasets import Dataset
from einmpi.files.formats import known_format
from einmpi.files.hdf5.opening import check_table
from einmpi.files.specs import OutputSpec
from einmpi.files.writing import OutputFile, check_folder_of, check_target, tensor_of, write
from einmpi.job.job import Job
from einmpi.job.outputs import HistorySpec


def check_targets(job: Job) -> None:
    """Refuse output files that could not be written, before anything is computed."""
    for specs in _by_file(job.outputs).values():
        names = {spec.inside: spec.place for spec in specs}
        if len(names) < len(specs):
            outputs = " and ".join(spec.name for spec in specs)
            raise InputError(
                specs[-1].place,
                f"different paths of outputs {outputs} lead to the same file",
                "one path for each file",
            )
        file = specs[0].file
        check_target(file, names, known_format(specs[0].place, file, writable=True))
    for history in job.histories:
        _check_history(history)


def _check_history(history: HistorySpec) -> None:
    """Refuse a history that could not be written, before anything is computed."""
    check_folder_of(history.file, history.place)
    if os.path.isdir(history.file):
        raise InputError(history.place, f"{history.file} is a folder", "a file to write")
    if os.path.exists(history.file) and not os.path.isfile(history.file):
        what = f"{history.file} is not a regular file"
        raise InputError(history.place, what, "a file to replace")
    if history.inside and os.path.exists(history.file):
        check_table(history.file, history.inside, history.place)


def claim_outputs(job: Job, comm: Comm) -> contextlib.AbstractContextManager[Claim]:
    """Keep other runs from writing the job's files in a with block. All ranks call it.

    The files are those of its outputs, and the histories of its loops.
    """
    places = {specs[0].file: specs[0].place for specs in _by_file(job.outputs).values()}
    claimed_targets = {os.path.realpath(file) for file in places}
    for history in job.histories:
        target = os.path.realpath(history.file)
        if target not in claimed_targets:
            places[history.file] = history.place
            claimed_targets.add(target)
    return claimed(places, comm)


def store(
    job: Job,
    digest: str,
    results: Mapping[str, DistArray],
    claim: Claim,
    input_files: Mapping[str, Dataset] | None = None,
) -> None:
    """Write every output of the job, all or none, within `claim_outputs`. All ranks call it.

    `digest` is that of the plan. `input_files` says where inputs were found, if that is known.
    """
    origin = Origin(job, lambda: digest, files=input_files or {})
    files = []
    for specs in _by_file(job.outputs).values():
        tensors = []
        for spec in specs:
            array = results[spec.name]
            tensors.append(
                tensor_of(
                    array,
                    spec.inside,
                    spec.dtype,
                    spec.chunks,
                    spec.compression,
                    replace(origin, job=_maker_of(job, spec)).labels_of(spec.name),
                    spec.name,
                    origin.files.values(),
                )
            )
        file = specs[0].file
        place = specs[0].place
        files.append(OutputFile(file, place, known_format(place, file, writable=True), tensors))
    write(files, lambda: attributes_of(origin, claim.comm.size), claim)


def _maker_of(job: Job, spec: OutputSpec) -> Job:
    """Return the job, or the one of its loops, that computes an output."""
    for loop in job.loops:
        if spec in loop.outputs:
            return loop
    return job


def _by_file(outputs: tuple[OutputSpec, ...]) -> dict[str, list[OutputSpec]]:
    files: dict[str, list[OutputSpec]] = {}
    for spec in outputs:
        files.setdefault(os.path.realpath(spec.file), []).append(spec)
    return files
