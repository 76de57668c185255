"""A new job file for the tensors of a file: all are inputs, and the program adds up a few."""

from __future__ import annotations

import keyword
import os
import re

from einmpi.cli.new.job_text import NewJob, tensor_in_file
from einmpi.errors import InputError, on_one_line
from einmpi.files.formats import find, known_format
from einmpi.files.specs import InputSpec
from einmpi.language.vocabulary import is_reserved
from einmpi.units import counted, show_shape

MOST_TENSORS = 1000  # inputs of a new job file
MOST_STATEMENTS = 5  # of its program
_LABELS = ("i", "j", "k", "l", "m")


def job_of_file(job_file: str, data_file: str, title: str) -> tuple[NewJob, list[str]]:
    """Return the new job, and a line for each tensor that cannot be an input."""
    place = f"--from {data_file}"
    file_format = known_format(place, data_file)
    names = file_format.list_names(data_file, place, MOST_TENSORS + 1)
    if len(names) > MOST_TENSORS:
        problem = f"it has more than {counted(MOST_TENSORS, 'tensor')}"
        raise InputError(place, problem, "a file with fewer of them")
    folder = os.path.dirname(os.path.abspath(job_file))
    path_in_job = os.path.relpath(os.path.abspath(data_file), folder)
    job = NewJob(title, [])
    statements: list[tuple[str, int]] = []
    skipped = []
    for name in names:
        try:
            found = find(InputSpec("", file=data_file, inside=name, place=place))
        except InputError as error:
            skipped.append(on_one_line(f"skipped: {error}"))
            continue
        tensor = _tensor_name(name or os.path.splitext(os.path.basename(data_file))[0], job.inputs)
        job.inputs[tensor] = tensor_in_file(path_in_job, name)
        job.notes[tensor] = f"{found.dtype.name} {show_shape(found.shape)}"
        if len(statements) < MOST_STATEMENTS:
            statements.append((tensor, len(found.shape)))
    if not statements:
        raise InputError(place, "it has no tensor that can be an input", "a file with tensors")
    job.program = [_sum_of(tensor, rank, job.inputs) for tensor, rank in statements]
    return job, skipped


def _tensor_name(path: str, taken: dict[str, str]) -> str:
    """Return a name for the tensor at this path that the language has no other use for."""
    parts = [re.sub(r"[^A-Za-z0-9_]+", "_", part) for part in re.split(r"[/.]", path) if part]
    last = parts[-1] if parts else "X"
    for candidate in (last, "_".join(parts) or last):
        name = candidate if not candidate[0].isdigit() else f"X{candidate}"
        if is_reserved(name) or keyword.iskeyword(name):
            name += "_"
        if name not in taken:
            return name
    number = 2
    while f"{name}_{number}" in taken:
        number += 1
    return f"{name}_{number}"


def _sum_of(tensor: str, dimensions: int, tensors: dict[str, str]) -> str:
    """Return a statement that adds up all elements, for the user to replace."""
    total = f"sum_of_{tensor}"
    while total in tensors:
        total += "_"
    if not dimensions:
        return f"{total} = {tensor}"
    labels = []
    for number in range(dimensions):
        label = _LABELS[number] if dimensions <= len(_LABELS) else f"i{number}"
        while label in tensors:
            label += "_"
        labels.append(label)
    return f"{total} = sum({tensor}[{','.join(labels)}])"
