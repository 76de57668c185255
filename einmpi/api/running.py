"""Plan, compile and run a job: on the ranks of a communicator, or with the reference evaluator."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy.typing as npt

from einmpi.api.jobs import check_job, job_of_program
from einmpi.api.loops import LoopArguments, run_loops
from einmpi.arguments import as_int, named_inputs, named_values
from einmpi.caches import bounded_cache
from einmpi.comm.agreement import comm_of_program, together
from einmpi.comm.base import ALONE
from einmpi.errors import InputError
from einmpi.files.datasets import identity_at
from einmpi.files.reading import load_array
from einmpi.files.specs import InputSpec
from einmpi.graph.dtypes import dtype_name
from einmpi.job.job import Job, options_of, with_settings
from einmpi.job.job_file import parameter
from einmpi.job.settings import (
    only_settings,
    split_settings,
    takes_settings,
    truth_value,
)
from einmpi.kernels.reference import as_numpy, evaluate, memory_needed
from einmpi.runtime.gpu.copies import on_host

if TYPE_CHECKING:
    from einmpi.arrays.dist_array import DistArray
    from einmpi.comm.base import Comm
    from einmpi.compiled.known import KnownJobs
    from einmpi.compiled.prepared_runs import KnownCall
    from einmpi.compiled.program import Compiled
    from einmpi.planner.plan import Options, Plan

MOST_REFERENCE_ELEMENTS = 10**8  # of a sparse tensor that the reference makes dense
# The name, shape and dtype of each input; the name and value of each size; the name and Python type
# of each parameter.
_InputKinds: TypeAlias = tuple[tuple[str, tuple[int, ...], str], ...]
_Sizes: TypeAlias = tuple[tuple[str, int], ...]
_ParameterTypes: TypeAlias = tuple[tuple[str, type], ...]


@takes_settings
def plan(
    job: Job,
    ranks: int,
    inputs: Mapping[str, Any] | None = None,
    *,
    nodes: int = 1,
    **settings: Any,
) -> Plan:
    """Plan how a job is cut over ranks. No MPI is started and no data is read.

    ``print(plan)`` shows what the command ``einmpi plan`` prints.

    Parameters
    ----------
    job : Job
        What to compute.
    ranks : int
        The number of ranks.
    inputs : mapping of str to array or SparseArray, optional
        Sparse tensors that the plan is for. Of others that the job was made with, or finds in
        files, it is known how many elements they store; they are assumed to be at random places.
    nodes : int, optional
        The number of nodes. Each has the same number of ranks.
    {settings}

    Returns
    -------
    Plan
        The plan.

    Raises
    ------
    InputError
        An argument is wrong, or no plan stays within the memory limit.

    Examples
    --------
    >>> job = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=(400, 300), B=(300, 400))
    >>> einmpi.plan(job, ranks=4).parts("Z")
    {'i': 2, 'k': 2, 'j': 1}
    >>> einmpi.plan(job, ranks=4, pin={"A": (4, 1), "Z": (4, 1)}).words_predicted
    320000
    """
    from einmpi.compiled.sparse_inputs import job_over_expected

    job = with_settings(check_job("plan", job), only_settings("plan", settings))
    ranks = as_int(ranks)
    job = job_over_expected(job, ranks, named_values("inputs", inputs))
    found = _plan(job, ranks, as_int(nodes))
    if not job.reproducible:
        return found
    freely = _plan(with_settings(job, {"reproducible": False}), ranks, as_int(nodes))
    return replace(found, freely=freely.cost_in_all)


def _plan(job: Job, ranks: int, nodes: int) -> Plan:
    from einmpi.planner.make_plan import make_plan

    def options(of_job: Job) -> Options:
        return options_of(of_job, nodes)

    if job.loop is not None:
        from einmpi.loops.arrival import plan_loops  # it imports much that others do not need

        return plan_loops(job, ranks, options)
    of_job = options(job)
    if of_job.stored:
        from einmpi.compiled.stored_inputs import plan_with_files

        return plan_with_files(job.graph, ranks, of_job)
    return make_plan(job.graph, ranks, of_job)


@takes_settings
def compile(
    job: Job,
    comm: Any = None,
    *,
    carry: Mapping[str, str] | None = None,
    donate: bool = False,
    share: Compiled | None = None,
    **settings: Any,
) -> Compiled:
    """Make a job ready for the ranks of a communicator, to be called many times.

    Parameters
    ----------
    job : Job
        What to compute.
    comm : mpi4py communicator, optional
        The ranks; by default all that mpirun started, or this process alone.
    carry : mapping of str to str, optional
        For inputs, the output of a call that they become in the next call. Both have one layout,
        which is the best for calls that follow one another, and need not be moved in between.
    donate : bool, optional
        Whether DistArrays that are given for carried inputs are given away: their memory is used
        for the next values wherever that is possible, and they cannot be used any more. Arrays of
        numpy are never written over.
    share : Compiled, optional
        A compiled job on the same ranks, whose resident inputs this one uses too: those that are
        resident in both, by the same name. They are loaded once, in the layouts that suit the job
        that is planned first, and freed with the last of the jobs that share them. The plan says
        what that costs, and the peak memory of each job counts them.
    {settings} : optional
        As for `plan`.

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
    from einmpi.kernels.cpu.dispatch import IN_SPARSE_STEPS

    found = _compiled(job, comm, only_settings("compile", settings), carry, donate, share)
    found.sparse_repetition = IN_SPARSE_STEPS
    return found


def _compiled(
    job: Job,
    comm: Any,
    settings: Mapping[str, Any],
    carry: Mapping[str, str] | None = None,
    donate: bool = False,
    share: Compiled | None = None,
) -> Compiled:
    """Return a job that is ready for the ranks, as `compile` does."""
    from einmpi.compiled.program import Compiled
    from einmpi.kernels.cpu.dispatch import IN_COMPILED_STEPS
    from einmpi.loops.stages import with_carried_outputs

    def check_options() -> tuple[Job, Options]:
        changed = with_settings(check_job("compile", job), settings)
        if changed.loop is not None:
            hint = "einmpi.loop and einmpi.run repeat its steps"
            raise InputError("compile", "the job has a loop", "a job without one", hint)
        if carry:
            changed = with_carried_outputs(changed, carry)
        gives_away = truth_value("donate", donate)
        if gives_away and not carry:
            raise InputError("compile", "donate is given without carry", "both")
        if share is not None:
            _check_share(changed, own_comm, share)
        options = options_of(changed)
        return changed, replace(options, carry=dict(carry or {}), donate=gives_away)

    own_comm = comm_of_program(comm)
    if comm is None and isinstance(share, Compiled):
        own_comm = share.comm
    # The plans are compared later, but ranks with different backends set them up differently.
    checked, options = together(own_comm, check_options, lambda found: found[0].backend)
    compiled = Compiled(checked, own_comm, options, share)
    if options.carry:
        compiled.backend.repetition = IN_COMPILED_STEPS
    return compiled


def _check_share(job: Job, comm: Comm, share: Compiled) -> None:
    """Refuse to share inputs with a job that is not compiled or on other ranks."""
    from einmpi.compiled.program import Compiled

    if not isinstance(share, Compiled):
        what = f"share is {type(share).__name__}"
        raise InputError("compile", what, "a job that einmpi.compile has made ready")
    if share.comm is not comm:
        what = "the job to share with is on another communicator"
        raise InputError("compile", what, "the same communicator")
    if share.job.backend != job.backend:
        what = f"the job runs on {job.backend}, the one to share with on {share.job.backend}"
        raise InputError("compile", what, "the same backend")
    share.residents.check_sources(job)


@takes_settings
def run(
    job: Job | str,
    inputs: Mapping[str, Any] | None = None,
    comm: Any = None,
    **tensors: Any,
) -> dict[str, DistArray]:
    """Compute the outputs of a job on all ranks of a communicator. No file is written.

    A job that was run before, with inputs of the same kind, is not planned again.

    Parameters
    ----------
    job : Job or str
        What to compute; or the text of a program, whose inputs are all given.
    inputs : mapping of str to array, DistArray, SparseArray or h5py dataset, optional
        The inputs by name. An array, or a sparse one of scipy or pydata/sparse, is the same on
        every rank. Inputs that are missing are generated or read as the job says.
    comm : mpi4py communicator, optional
        The ranks; by default all that mpirun started, or this process alone.
    {settings} : optional
        As for `plan`.
    **tensors : array, DistArray, h5py dataset or number
        More inputs by name. For a program as text, an int is a size and another number a parameter.

    Returns
    -------
    dict of str to DistArray
        The outputs by name. They stay distributed. One that is sparse is a SparseArray.

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
    >>> einmpi.run("n = sum(X[i,j])", X=X)["n"].gather()
    array(21.)
    """
    from einmpi.compiled.known import known_jobs
    from einmpi.compiled.prepared_runs import all_know

    def check_call() -> tuple[Hashable, Job, dict[str, Any]]:
        return _checked_call(job, named_inputs(inputs, arrays), settings)

    settings, arrays = split_settings(tensors)
    own_comm = comm_of_program(comm)
    jobs = known_jobs(own_comm)
    found = _find_known_run(jobs, check_call)
    if own_comm.size > 1 and not all_know(own_comm, None if found is None else found[1]):
        found = None
    if found is not None:
        compiled, call, given = found
        return compiled.call_as_known(call, given)
    key, checked, given = together(own_comm, check_call)
    if checked.loop is not None:
        return run_loops(checked, given, own_comm, LoopArguments(), settings).outputs
    compiled = jobs.find(own_comm, key, checked, lambda: _compiled(checked, own_comm, settings))
    try:
        return compiled(given)
    finally:
        compiled.forget_inputs()  # a file may change, and the next run may never come


def _find_known_run(
    jobs: KnownJobs, check_call: Callable[[], tuple[Hashable, Job, dict[str, Any]]]
) -> tuple[Compiled, KnownCall, dict[str, Any]] | None:
    """Return the earlier run that a run is like, if this rank knows one, and the inputs.

    Nothing is sent.
    """
    try:
        key, job, inputs = check_call()
    except Exception:  # all ranks check it together, and raise it
        return None
    compiled = jobs.known(key, job)
    if compiled is None or compiled.reads_files:
        return None
    call = compiled.known_calls.find_own(inputs)
    return None if call is None else (compiled, call, inputs)


def _checked_call(
    job: Job | str, given: dict[str, Any], settings: dict[str, Any]
) -> tuple[Hashable, Job, dict[str, Any]]:
    """Return a key that identifies the job and its settings, the job itself, and its inputs."""
    if isinstance(job, str):
        job_key, checked, inputs = _job_and_inputs_of_text(job, given)
    else:
        job_key = id(job)
        checked = check_job("run", job)
        inputs = given
    machine = settings.get("machine", checked.machine)
    if not settings and machine is None:
        return (job_key, ""), checked, inputs
    # A machine file may change between two runs.
    machine_identity = None if machine is None else identity_at(str(machine))
    return (job_key, repr((settings, machine_identity))), checked, inputs


def _job_and_inputs_of_text(
    text: str, given: dict[str, Any]
) -> tuple[Hashable, Job, dict[str, Any]]:
    """Return a key that identifies the job of a program, the job itself, and its inputs.

    Integers are sizes and other numbers are parameters. The key has the values of the sizes, but
    only the types of the parameters and the kinds of the arrays.
    """
    from einmpi.compiled.given_inputs import as_array
    from einmpi.sparse_array import is_sparse

    inputs: dict[str, Any] = {}
    sizes: list[tuple[str, int]] = []
    parameter_types: list[tuple[str, type]] = []
    kinds: list[tuple[str, tuple[int, ...], str]] = []
    for name, value in given.items():
        if type(value) is int:
            sizes.append((name, value))
            continue
        array = value if is_sparse(value) else as_array(name, value)
        inputs[name] = array
        if type(value) in (bool, float, complex):
            parameter_types.append((name, type(value)))
        else:
            kinds.append((name, array.shape, dtype_name(array.dtype)))
    key = (text, tuple(kinds), tuple(sizes), tuple(parameter_types))
    return key, _job_of_text(*key), inputs


@bounded_cache(256)
def _job_of_text(
    text: str, kinds: _InputKinds, sizes: _Sizes, parameter_types: _ParameterTypes
) -> Job:
    """Return the job of a program; the same object for the same arguments."""
    shapes = {name: (shape, dtype) for name, shape, dtype in kinds}
    parameters: list[InputSpec] = []
    for name, python_type in parameter_types:
        zero = python_type()  # a call gives the value
        parameters.append(parameter(name, zero, "run"))
    return job_of_program("run", text, shapes, dict(sizes), "float64", None, parameters)


@takes_settings
def einsum(
    *arguments: Any,
    out: npt.NDArray[Any] | None = None,
    dtype: Any = None,
    order: str = "K",
    casting: str = "safe",
    optimize: Any = False,
    **settings: Any,
) -> Any:
    """Evaluate an expression in the grammar of `numpy.einsum`.

    Ellipsis, implicit output, repeated labels and operands of extent 1 that are repeated are
    supported. As in numpy, the result of one array of which nothing is summed is a view of it; of a
    DistArray it is a copy.

    Parameters
    ----------
    *arguments
        ``"ij,jk->ik", a, b`` or ``a, [0, 1], b, [1, 2], [0, 2]``. If one of the operands is a
        DistArray or a SparseArray, all ranks call it. Those of scipy and pydata/sparse are like
        arrays.
    out : array, optional
        Takes the result; not for DistArrays.
    dtype : dtype, optional
        The dtype to which operands are converted first.
    order : {"K", "A", "C", "F"}, optional
        The memory order of the result; not for DistArrays. "K" is that of the operands as closely
        as possible, and C if all of them are C-contiguous.
    casting : {"safe", "same_kind", "unsafe", "equiv", "no"}, optional
        Which conversions to `dtype`, and of the result to `out`, are allowed.
    optimize : optional
        The order of a product: a path of numpy or opt_einsum such as ``[(0, 1), (0, 1)]``, or an
        optimizer of opt_einsum or cotengra, which rank 0 asks for a path in each call. Without
        them, as with True, False and names such as "greedy", the order is chosen here. If it is
        given, `out` takes the result whatever its dtype.
    {settings} : optional
        As for `plan`.

    Returns
    -------
    array, DistArray or SparseArray
        A DistArray or a SparseArray if one of the operands is.

    Raises
    ------
    InputError
        The subscripts or operands are wrong. Where numpy raises TypeError, as for a conversion
        that `casting` does not allow, the error is a TypeError too.

    Examples
    --------
    >>> a, b = np.ones((2, 3)), np.ones((3, 2))
    >>> einmpi.einsum("ij,jk->ik", einmpi.DistArray.from_global(a), b).gather()
    array([[3., 3.],
           [3., 3.]])
    """
    from einmpi.arrays.products import einsum_of_arrays
    from einmpi.compiled.sparse import einsum_of_sparse
    from einmpi.sparse_array import is_sparse

    if any(map(is_sparse, arguments)):
        if out is not None or dtype is not None:
            what = "out or dtype is given with a sparse operand"
            raise InputError("einsum", what, "neither of them")
        return einsum_of_sparse(arguments, only_settings("einsum", settings))
    return einsum_of_arrays(
        *arguments,
        out=out,
        dtype=dtype,
        order=order,
        casting=casting,
        optimize=optimize,
        settings=only_settings("einsum", settings),
    )


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
    return reference_of_changed(job, inputs)


def reference_of_changed(
    job: Job,
    inputs: Mapping[str, Any] | None = None,
    change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]] | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """Compute the outputs of a job as `reference` does, of inputs that are changed first."""
    from einmpi.compiled.given_inputs import as_input, check_inputs
    from einmpi.compiled.running import check_memory
    from einmpi.compiled.sparse import as_dense_arrays, places_of_gradients
    from einmpi.compiled.sparse_inputs import with_sparse_inputs
    from einmpi.files.sparse.reading import read_sparse_input
    from einmpi.loops.stages import evaluate_loops

    check_job("reference", job)
    given = with_sparse_inputs(ALONE, job, named_values("inputs", inputs))
    inputs = as_dense_arrays(given, MOST_REFERENCE_ELEMENTS)
    kept = places_of_gradients(job, given)

    def arrays_of(part: Job, values: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
        """Return the inputs of a job, or of one of its loops, given some of them."""
        given = {}
        for name, value in values.items():
            array = as_numpy("inputs", name, on_host(value))
            given[name] = as_input(part, name, value, array)
        check_memory(part.source.name, memory_needed(part.as_computed))
        check_inputs(part, given)
        specs = {spec.name: spec for spec in part.inputs}
        arrays = {}
        for vertex in part.written.inputs:
            if vertex.name in given:
                arrays[vertex.name] = given[vertex.name]
            else:
                spec = specs[vertex.name]
                bound = vertex.bound if spec.rows is None else (spec.rows, *vertex.bound[1:])
                if spec.key_dimensions:
                    stored = {vertex.name: read_sparse_input(spec, ALONE)}
                    arrays |= as_dense_arrays(stored, MOST_REFERENCE_ELEMENTS)
                else:
                    arrays[vertex.name] = load_array(spec, bound, vertex.dtype)
        if change is not None:
            arrays = {name: change(array) for name, array in arrays.items()}
        return arrays

    if job.loop is not None:
        return evaluate_loops(job, inputs, arrays_of, kept)
    return evaluate(job.as_computed, arrays_of(job, inputs), kept)
