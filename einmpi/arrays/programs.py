"""Small EinSum programs on DistArrays, compiled once for each kind of operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from einmpi.comm.agreement import together
from einmpi.comm.base import Comm
from einmpi.compiled.dist_array import DistArray
from einmpi.compiled.known import compiled_once
from einmpi.errors import EinmpiError, InputError
from einmpi.job.job import Job
from einmpi.job.program import program_job


def common_comm(where: str, arrays: Sequence[DistArray]) -> Comm:
    """Return the communicator of some DistArrays; refuse those that are on different ones."""
    comm = arrays[0].own_comm
    for array in arrays:
        if array.own_comm is not comm:
            raise InputError(
                where, "the operands are on different communicators", "DistArrays on the same ranks"
            )
    return comm


def evaluate_program(comm: Comm, text: str, arrays: Mapping[str, DistArray]) -> DistArray:
    """Return the tensor `out` of a program. All ranks call it."""
    kinds = tuple((name, array.shape, array.dtype.name) for name, array in arrays.items())

    def make_job() -> Job:
        inputs = {name: (shape, dtype) for name, shape, dtype in kinds}
        return program_job(text, inputs, {}, "float64", ["out"])

    compiled = compiled_once(comm, (text, kinds), make_job)
    result = compiled(arrays)["out"]
    result.origin = None  # the program is not the user's
    return result


def labels(ndim: int) -> list[str]:
    """Return a label for each dimension."""
    return [f"i{dimension}" for dimension in range(ndim)]


def element(name: str, indices: Sequence[str]) -> str:
    """Return the text of an element of a tensor, such as "x[i0,i1]"."""
    if not indices:
        return name
    return f"{name}[{','.join(indices)}]"


def raise_alike(comm: Comm, kind: type[Exception], function: Callable[[], Any]) -> Any:
    """Call a function on every rank; if some raise an error of a kind, all ranks raise one."""
    try:
        return together(comm, function)
    except EinmpiError as error:  # of another rank
        name, _, message = str(error).partition(": ")
        raise kind(message) if name == kind.__name__ else error from None
