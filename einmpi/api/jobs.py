"""Make a job: from a job file, or from the text of a program."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from einmpi.arguments import optional_names, optional_text, path_name
from einmpi.errors import InputError
from einmpi.files.load import describe
from einmpi.files.specs import InputSpec, Number
from einmpi.graph.labels import MAX_EXTENT
from einmpi.job.job import Job
from einmpi.job.job_file import read_job
from einmpi.job.parameters import parameter
from einmpi.job.program import program_job
from einmpi.language.statements import Inputs


def load(path: str | os.PathLike[str], /, *, dtype: str | None = None, **settings: Number) -> Job:
    """Read a job file.

    The shapes of inputs are looked up in their files; none of their elements is read.

    Parameters
    ----------
    path : path
        The job file.
    dtype : str, optional
        Replaces the dtype of generated inputs.
    **settings : int, float, complex or bool
        Replace sizes and parameters of the file.

    Returns
    -------
    Job
        The checked job.

    Raises
    ------
    InputError
        The job file, or a file that it names, is wrong. The message has the line and column.

    Examples
    --------
    >>> job = einmpi.load("jobs/chain.toml", s=100)
    >>> job.title, job.sizes["s"], job.graph.outputs
    ('Matrix chain', 100, ('Z',))
    """
    name = path_name("load", path)
    return read_job(name, describe, settings, optional_text("load", "dtype", dtype, "float32"))


def program(
    text: str, /, *, dtype: str = "float64", outputs: Sequence[str] | None = None, **tensors: Any
) -> Job:
    """Make a job from the text of a program.

    Parameters
    ----------
    text : str
        The statements of the program.
    dtype : str, optional
        The dtype of inputs that are given by a shape.
    outputs : sequence of str, optional
        The tensors to compute; by default those that no statement uses.
    **tensors : shape, array, int, float, complex or bool
        An input by its shape, or by an array, whose shape and dtype it has; a size, if it is an
        int; or a parameter, which has this value unless a call gives another.

    Returns
    -------
    Job
        The checked job.

    Raises
    ------
    InputError
        The program or an argument is wrong.

    Examples
    --------
    >>> text = "Z[i,k] = scale * sum(A[i,j] * B[j,k])"
    >>> job = einmpi.program(text, A=(40, 4), B=np.ones((4, 30)), scale=2)
    >>> print(job.graph["Z"].bound, job.graph["Z"].dtype)
    (40, 30) float64
    """
    if dtype is None:
        dtype = "float64"
    inputs: dict[str, tuple[Sequence[int], str]] = {}
    sizes: dict[str, int] = {}
    parameters: list[InputSpec] = []
    for name, given in tensors.items():
        if hasattr(given, "shape") and hasattr(given, "dtype"):
            inputs[name] = tuple(given.shape), np.dtype(given.dtype).name
        elif isinstance(given, int) and not isinstance(given, bool):
            sizes[name] = given
        elif isinstance(given, bool | float | complex):
            parameters.append(parameter(name, given, "program"))
        elif isinstance(given, (tuple, list)) and all(isinstance(extent, int) for extent in given):
            inputs[name] = given, dtype
        else:
            raise InputError(
                "program", f"{name} is {type(given).__name__}", "a shape, an array, or a number"
            )
    return job_of_program("program", text, inputs, sizes, dtype, outputs, parameters)


def job_of_program(
    where: str,
    text: str,
    inputs: Inputs,
    sizes: Mapping[str, int],
    dtype: str,
    outputs: Sequence[str] | None,
    parameters: Sequence[InputSpec] = (),
) -> Job:
    """Return the job of a program; refuse arguments of a wrong kind."""
    if not isinstance(text, str):
        raise InputError(where, f"the program is {type(text).__name__}", "its text")
    optional_text(where, "dtype", dtype, "float32")
    optional_names(where, "outputs", outputs)
    for name, size in sizes.items():
        if not 1 <= size <= MAX_EXTENT:
            expected = f"an integer from 1 to 2**39 = {MAX_EXTENT}"
            raise InputError(where, f"size {name} is out of range", expected)
    return program_job(text, inputs, sizes, dtype, outputs, parameters)
