"""The outputs of a job: checked before it runs, claimed while it runs, all stored or none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace

from einmpi.arrays.dist_array import DistArray
from einmpi.arrays.record import Origin, attributes_of
from einmpi.arrays.sparse_files import (
    SparseOutline,
    check_sparse_output,
    paths_in_group,
    sparse_tensors,
)
from einmpi.comm.base import Comm
from einmpi.errors import InputError
from einmpi.files.claims import Claim, claimed
from einmpi.files.datasets import Dataset
from einmpi.files.formats import FileFormat, known_format
from einmpi.files.hdf5.opening import check_table
from einmpi.files.specs import OutputSpec
from einmpi.files.writing import (
    OutputFile,
    Tensor,
    check_folder_of,
    check_target,
    tensor_of,
    write,
)
from einmpi.job.job import Job
from einmpi.job.outputs import HistorySpec
from einmpi.sparse_array import SparseArray


def check_targets(job: Job, sparse: Mapping[str, SparseOutline] | None = None) -> None:
    """Refuse output files that could not be written, before anything is computed.

    `sparse` are the results that are. If inputs are sparse, this is known only when these have been
    read, and before that only the folders of files are looked at.
    """
    is_known = sparse is not None or not any(spec.key_dimensions for spec in job.inputs)
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
        if not is_known:
            check_folder_of(file, specs[0].place)
            continue
        file_format = known_format(specs[0].place, file, writable=True)
        names = {}
        for spec in specs:
            parts = _parts_in_file(spec, file_format, (sparse or {}).get(spec.name))
            names.update(dict.fromkeys(parts, spec.place))
        check_target(file, names, file_format)
    for history in job.histories:
        _check_history(history)


def _parts_in_file(
    spec: OutputSpec, file_format: FileFormat, sparse: SparseOutline | None
) -> list[str]:
    """Return the names that an output has in its file; refuse what the file cannot hold."""
    if sparse is None:
        if file_format.write is not None and file_format.write.sparse == "only":
            what = f"{spec.name} is dense, and {spec.file} holds a sparse tensor"
            raise InputError(spec.place, what, "an .h5 or .npy file")
        return [spec.inside]
    check_sparse_output(file_format, spec.place, spec.name, sparse)
    for key in ("chunks", "dtype", "parts"):
        if getattr(spec, key) is not None:
            what = f"{spec.name} is sparse, and has {key}"
            raise InputError(spec.place, what, "a dense tensor, or no such key")
    return paths_in_group(spec.inside, sparse) if file_format.key else [spec.inside]


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
    results: Mapping[str, DistArray | SparseArray],
    claim: Claim,
    input_files: Mapping[str, Dataset] | None = None,
) -> None:
    """Write every output of the job, all or none, within `claim_outputs`. All ranks call it.

    `digest` is that of the plan. `input_files` says where inputs were found, if that is known.
    """
    origin = Origin(job, lambda: digest, files=input_files or {})
    files = []
    for specs in _by_file(job.outputs).values():
        file = specs[0].file
        place = specs[0].place
        file_format = known_format(place, file, writable=True)
        tensors: list[Tensor] = []
        for spec in specs:
            array = results[spec.name]
            if isinstance(array, SparseArray):
                tensors += sparse_tensors(
                    file_format, spec.inside, array, spec.compression, spec.name
                )
                continue
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
        files.append(OutputFile(file, place, file_format, tensors))
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
