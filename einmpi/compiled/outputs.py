"""The outputs of a job: checked before it runs, claimed while it runs, all of them stored or none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from einmpi.comm.base import Comm
from einmpi.compiled.dist_array import DistArray
from einmpi.errors import InputError
from einmpi.files.atomic import claimed
from einmpi.files.specs import OutputSpec
from einmpi.files.writing import check_target, drafted, format_of, tensor_of
from einmpi.job.job import Job
from einmpi.version import __version__

_LONGEST_ATTRIBUTE = 60_000  # bytes; HDF5 has room for 64 KiB


def check_targets(job: Job) -> None:
    """Refuse output files that could not be written, before anything is computed."""
    for specs in _by_file(job.outputs).values():
        names = {spec.dataset: spec.place for spec in specs}
        if len(names) < len(specs):
            shown = " and ".join(spec.name for spec in specs)
            raise InputError(
                specs[-1].place,
                f"outputs {shown} go to one file, by different paths",
                "one path a file",
            )
        check_target(specs[0].file, names, format_of(specs[0].file))


def claim(job: Job, comm: Comm) -> contextlib.AbstractContextManager[None]:
    """While this lasts, no other run writes to the job's output files. All ranks call it."""
    return claimed(
        {specs[0].file: specs[0].place for specs in _by_file(job.outputs).values()}, comm
    )


def store(job: Job, digest: str, results: Mapping[str, DistArray]) -> None:
    """Write every output of the job, all or none of them, within `claim`. All ranks call it."""
    program = job.source.text.encode()[:_LONGEST_ATTRIBUTE].decode(errors="ignore")
    attributes = {
        "einmpi_version": __version__,
        "einmpi_program": program,
        "einmpi_plan": digest,
        "einmpi_dtype": job.dtype,
    }
    with contextlib.ExitStack() as drafts:
        ready = []
        for specs in _by_file(job.outputs).values():
            tensors = [
                tensor_of(
                    results[spec.name], spec.dataset, spec.dtype, spec.chunks, spec.compression
                )
                for spec in specs
            ]
            file = specs[0].file
            ready.append(
                drafts.enter_context(
                    drafted(file, tensors, attributes, format_of(file), specs[0].place)
                )
            )
        for publish_file in ready:  # not before all are ready
            publish_file()


def _by_file(outputs: tuple[OutputSpec, ...]) -> dict[str, list[OutputSpec]]:
    files: dict[str, list[OutputSpec]] = {}
    for spec in outputs:
        files.setdefault(os.path.realpath(spec.file), []).append(spec)
    return files
