"""Run a job: on the ranks of a communicator, or with the reference evaluator."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from einmpi.api.planning import options_of, truth_value
from einmpi.comm.agreement import together
from einmpi.files.load import load_array
from einmpi.job.job import Job, with_strict
from einmpi.kernels.masked import check_not_masked
from einmpi.kernels.reference import evaluate, memory_needed
from einmpi.runtime.gpu.copies import on_host

if TYPE_CHECKING:
    from einmpi.compiled.dist_array import DistArray
    from einmpi.compiled.program import Compiled
    from einmpi.planner.plan import Options


def compile(
    job: Job,
    comm: Any = None,
    *,
    strategy: str | None = None,
    memory: int | str | None = None,
    pin: Mapping[str, Sequence[int]] | None = None,
    machine: str | os.PathLike[str] | None = None,
    fast_math: bool | None = None,
    strict: bool | None = None,
) -> Compiled:
    """Make a job ready for the ranks of a communicator, to be called many times.

    Parameters
    ----------
    job : Job
        What to compute.
    comm : mpi4py communicator, optional
        The ranks; by default all that mpirun started, or this process alone.
    strategy, memory, pin, machine, strict : optional
        As for `plan`.
    fast_math : bool, optional
        Whether to allow faster arithmetic that rounds more; by default as the job says.

    Returns
    -------
    Compiled
        A function of the inputs that returns a dict of DistArrays. It plans once for each kind of
        inputs. Its outputs may be inputs of the next call.

    Raises
    ------
    InputError
        An argument is wrong.

    Examples
    --------
    >>> step = einmpi.compile(einmpi.program("Y[i] = X[i] / 2", X=(3,)))
    >>> half = step({"X": np.array([4.0, 8.0, 16.0])})["Y"]
    >>> step({"X": half})["Y"].gather()
    array([1., 2., 4.])
    """
    from einmpi.comm.programs import comm_of_program
    from einmpi.compiled.program import Compiled

    def check_options() -> tuple[Job, Options]:
        changed = job
        if fast_math is not None:
            changed = replace(changed, fast_math=truth_value("fast_math", fast_math))
        if strict is not None:
            changed = with_strict(changed, truth_value("strict", strict))
        return changed, options_of(changed, strategy, memory, pin, machine)

    own_comm = comm_of_program(comm)
    # The plans are compared later, but ranks with different backends set them up differently.
    checked, options = together(own_comm, check_options, lambda found: found[0].backend)
    return Compiled(checked, own_comm, options)


def run(
    job: Job, inputs: Mapping[str, Any] | None = None, comm: Any = None, **options: Any
) -> dict[str, DistArray]:
    """Compute the outputs of a job on all ranks of a communicator. No file is written.

    Parameters
    ----------
    job : Job
        What to compute.
    inputs : mapping of str to array, DistArray or h5py dataset, optional
        The inputs by name. An array is the same on every rank. Inputs that are missing are
        generated or read as the job says.
    comm : mpi4py communicator, optional
        The ranks; by default all that mpirun started, or this process alone.
    **options
        As for `compile`.

    Returns
    -------
    dict of str to DistArray
        The outputs by name. They stay distributed.

    Raises
    ------
    InputError
        An argument is wrong; the same error on all ranks.

    Examples
    --------
    >>> job = einmpi.program("far[i] = max(abs(X[i,j] - Y[j]))", X=(2, 3), Y=(3,))
    >>> X = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    >>> einmpi.run(job, {"X": X, "Y": [1.0, 1.0, 1.0]})["far"].gather()
    array([2., 5.])
    """
    return compile(job, comm, **options)(inputs)


def reference(job: Job, inputs: Mapping[str, Any] | None = None) -> dict[str, npt.NDArray[Any]]:
    """Compute the outputs of a job in this process with the reference evaluator.

    It evaluates the program as written, before any rewrite. It is slow on purpose: it is simple
    enough to be trusted.

    Parameters
    ----------
    job : Job
        What to compute.
    inputs : mapping of str to array, optional
        The inputs by name. Those that are missing are generated or read as the job says.

    Returns
    -------
    dict of str to array
        The outputs by name.

    Raises
    ------
    InputError
        An input is wrong, or the job needs more memory than the machine has.

    Examples
    --------
    >>> job = einmpi.program("n = sum(X[i]**2)", X=(2,))
    >>> float(einmpi.reference(job, {"X": [3.0, 4.0]})["n"])
    25.0
    """
    from einmpi.compiled.backends import check_memory
    from einmpi.compiled.program import check_inputs

    given = {}
    for name, array in (inputs or {}).items():
        check_not_masked("inputs", name, array)
        given[name] = np.asarray(on_host(array))
    check_memory(job.source.name, memory_needed(job.written))
    check_inputs(job, given)
    specs = {spec.name: spec for spec in job.inputs}
    arrays = {}
    for vertex in job.written.inputs:
        if vertex.name in given:
            arrays[vertex.name] = given[vertex.name]
        else:
            arrays[vertex.name] = load_array(specs[vertex.name], vertex.bound, vertex.dtype)
    return evaluate(job.written, arrays)
