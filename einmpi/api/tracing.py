"""Functions written with numpy, planned as a whole: `jit`, `trace`, `fori`, and their gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import update_wrapper
from inspect import Parameter
from types import MethodType
from typing import Any

import numpy as np

from einmpi.api.loops import loop
from einmpi.api.running import run
from einmpi.arrays.dist_array import TRACES, DistArray, call
from einmpi.caches import bounded_cache
from einmpi.comm.agreement import comm_of_program
from einmpi.comm.base import ALONE, Comm
from einmpi.errors import InputError
from einmpi.graph.einsum import element_text
from einmpi.job.job import Job
from einmpi.job.settings import only_settings, takes_settings
from einmpi.sparse_array import SparseArray, is_sparse
from einmpi.tracing.functions import call_between
from einmpi.tracing.statements import Node, copied, in_order, labels_of
from einmpi.tracing.symbols import (
    MOST_STATEMENTS,
    Symbol,
    Trace,
    TracingError,
    flatten,
    refuse,
    symbol_of,
    trace_of,
)
from einmpi.tracing.traced import Traced, is_tensor, is_weak_number, kind_of, trace_together
from einmpi.units import counted

MOST_TRACES = 256  # of a function, for arguments of different kinds
_ANY_NUMBER = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


class Jitted:
    """A function whose calls are planned programs, one for each kind of arguments."""

    def __init__(
        self,
        function: Callable[..., Any],
        comm: Any,
        most_statements: int,
        settings: Mapping[str, Any],
    ) -> None:
        self.function = function
        self.comm = comm
        self.most_statements = most_statements
        self.settings = settings
        self.traces: dict[Any, Traced] = {}
        self.latest: Traced | None = None
        parameters = inspect.signature(function).parameters.values()
        self.parameters = [each.name for each in parameters if each.kind not in _ANY_NUMBER]
        update_wrapper(self, function)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if TRACES.stack:  # it is part of the function that is traced
            return self.function(*arguments, **named)
        traced, leaves = self._traced(arguments, named)
        return traced.run(leaves)

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else MethodType(self, instance)

    def trace(self, *arguments: Any, **named: Any) -> Traced:
        """Return what a call computes, without computing it."""
        return self._traced(arguments, named)[0]

    def _traced(
        self, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[Traced, list[Any]]:
        leaves: list[Any] = list(arguments)
        structure: Any = len(arguments)
        if named or any(isinstance(each, list | tuple | dict) for each in arguments):
            found, _ = flatten((tuple(arguments), dict(named)))
            leaves = [value for _, value in found]
            structure = _structure((arguments, named))
        comm = _comm_of(leaves, self.comm)
        try:
            key = (comm, structure, tuple(map(kind_of, leaves)))
            known = self.traces.get(key)
        except TypeError as error:
            raise InputError(
                "jit", f"{error}", "arrays, numbers, and constants with a hash"
            ) from None
        if known is None:
            known = self._new_trace(arguments, named, comm)
            if len(self.traces) >= MOST_TRACES:
                self.traces = {}  # not cleared: another thread may be about to write to it
            self.traces[key] = known
        self.latest = known
        return known, leaves

    def _new_trace(self, arguments: Sequence[Any], named: Mapping[str, Any], comm: Comm) -> Traced:
        names = [*self.parameters, *(f"x{number}" for number in range(len(arguments)))]
        leaves, rebuild = flatten(dict(zip(names, arguments, strict=False)))
        named_leaves, rebuild_named = flatten(dict(named))

        def call_with(values: list[Any]) -> Any:
            positional = rebuild(values).values()
            return self.function(*positional, **rebuild_named(values))

        given_to_trace = (leaves + named_leaves, comm, self.settings, self.most_statements)
        return trace_together(comm, lambda: Traced(call_with, *given_to_trace))

    # ---- what was traced last ----

    def _latest(self) -> Traced:
        if self.latest is None:
            raise InputError("jit", "the function has not been called", "a call, or trace(...)")
        return self.latest

    @property
    def program(self) -> str:
        """The text of the program of the latest call."""
        return self._latest().program

    @property
    def job(self) -> Job:
        """The program of the latest call as a job."""
        return self._latest().job


def _comm_of(values: Sequence[Any], comm: Any) -> Comm:
    """Return the ranks of DistArrays among some values, or else those of an argument `comm`."""
    for value in values:
        if isinstance(value, DistArray | SparseArray):
            return value.own_comm
    return comm_of_program(comm)


def _structure(value: Any) -> Any:
    """Return how containers are nested, as something with a hash."""
    if isinstance(value, dict) and not is_sparse(value):
        return dict, tuple((key, _structure(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_structure, value))
    return None


@takes_settings
def jit(
    function: Callable[..., Any] | None = None,
    *,
    comm: Any = None,
    most_statements: int = MOST_STATEMENTS,
    **settings: Any,
) -> Any:
    """Plan a function that is written with numpy as a whole.

    The function runs once for each kind of arguments, with symbols in place of arrays: what it
    computes becomes a program, which is planned, compiled, and called. Loops of Python are written
    out. Numbers with a fraction may differ from call to call; integers, texts and other arguments
    are constants of the program.

    Parameters
    ----------
    function : callable
        A function of DistArrays, arrays and numbers, also in lists, tuples and dicts.
    comm : mpi4py communicator, optional
        The ranks if no argument is a DistArray; by default all that mpirun started.
    most_statements : int, optional
        The longest program that the function may become.
    {settings} : optional
        As for `plan`.

    Returns
    -------
    callable
        A function of the same arguments, whose results are DistArrays. `program` is the text of
        the program of its latest call, `job` the job, and `trace(...)` traces without computing.

    Raises
    ------
    InputError
        The function needs values of its arguments: the message names its line.

    Examples
    --------
    >>> @einmpi.jit
    ... def distances(X, Y):
    ...     return np.sqrt(((X[:, None, :] - Y[None, :, :]) ** 2).sum(-1))
    >>> distances(np.zeros((4, 3)), np.ones((5, 3))).shape
    (4, 5)
    >>> print(distances.program)
    out[i, j] = sqrt(sum[k]((X[i, k] - Y[j, k]) ** 2))
    """
    chosen = only_settings("jit", settings)
    if function is None:
        return lambda given: Jitted(given, comm, most_statements, chosen)
    return Jitted(function, comm, most_statements, chosen)


@bounded_cache(MOST_TRACES)
def _jitted(function: Callable[..., Any], numbers: tuple[tuple[int, Any, str], ...]) -> Jitted:
    """Return a function of numpy that is planned, with some of its arguments."""

    def call_function(*operands: Any, **options: Any) -> Any:
        arguments = list(operands)
        for place, number, _ in numbers:
            arguments.insert(place, number)
        return function(*arguments, **options)

    return Jitted(call_function, None, MOST_STATEMENTS, {})


def call_with_sparse(
    function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Call a function of numpy some of whose arguments are sparse."""
    if not TRACES.stack:
        # Factors may differ from call to call. On other numbers the implicit value depends.
        is_scaled = function is np.multiply or (
            function is np.true_divide and not is_weak_number(arguments[0])
        )
        numbers: list[tuple[int, Any, str]] = []  # their texts tell 0.0 and -0.0 apart
        operands = []
        for place, value in enumerate(arguments):
            if is_weak_number(value) and not is_scaled:
                numbers.append((place, value, repr(value)))
            else:
                operands.append(value)
        return _jitted(function, tuple(numbers))(*operands, **options)

    # They are not arguments of the function that is traced.
    leaves, rebuild = flatten((tuple(arguments), dict(options)))
    values = [value for _, value in leaves]
    trace = trace_of(values)
    given, named = rebuild(
        [symbol_of(trace, value) if is_sparse(value) else value for value in values]
    )
    return function(*given, **named)


def trace(function: Callable[..., Any], *arguments: Any, **named: Any) -> Traced:
    """Write a function as a program, without computing it.

    Parameters
    ----------
    function : callable
        A function that is written with numpy, or one that `jit` returns.
    *arguments, **named
        Its arguments: arrays, or shapes of float64 tensors as tuples of integers.

    Returns
    -------
    Traced
        `program` is the text, `job` the job, for `plan` and others.

    Examples
    --------
    >>> traced = einmpi.trace(lambda A, B: A @ B, (40, 30), (30, 20))
    >>> print(traced.program)
    out[i, j] = sum[k](A[i, k] * B[k, j])
    >>> einmpi.plan(traced.job, ranks=4).bytes_predicted
    11200
    """
    jitted = (
        function if isinstance(function, Jitted) else Jitted(function, ALONE, MOST_STATEMENTS, {})
    )

    def tensor(value: Any) -> Any:
        is_shape = isinstance(value, tuple) and all(isinstance(each, int) for each in value)
        return np.broadcast_to(np.float64(0), value) if is_shape else value

    given = [tensor(each) for each in arguments]
    return jitted.trace(*given, **{name: tensor(each) for name, each in named.items()})


# ---- gradients -----------------------------------------------------------------------------------


def differentiated(
    where: str, function: Callable[..., Any], wrt: int | Sequence[int], with_value: bool
) -> Jitted:
    """Return the function of the gradients of another one, by some of its arguments."""
    numbers = [wrt] if isinstance(wrt, int) else list(wrt)

    def gradients(*arguments: Any, **named: Any) -> Any:
        trace = TRACES.stack[-1]
        given = list(arguments)
        rebuilds = {}
        copies: list[list[Symbol]] = []
        for number in numbers:
            if not -len(given) <= number < len(given):
                refuse(f"{where} by argument {number}", f"one of {len(given)}, counted from 0")
            leaves, rebuilds[number] = flatten(arguments[number])
            copies.append([_copy_to_differentiate(where, trace, leaf) for _, leaf in leaves])
            given[number] = rebuilds[number](list(copies[-1]))
        loss = function(*given, **named)
        if not isinstance(loss, Symbol) or loss.shape or loss.dtype.kind != "f":
            kind = f"{loss.dtype} of shape {loss.shape}" if isinstance(loss, Symbol) else repr(loss)
            refuse(
                f"the function returns {kind}", "a real number without dimensions that it computes"
            )
        found = []
        for number, own in zip(numbers, copies, strict=True):
            found.append(rebuilds[number]([_gradient(name, loss, leaf) for leaf in own]))
        gradient = found[0] if isinstance(wrt, int) else tuple(found)
        return (loss, gradient) if with_value else gradient

    own = function if isinstance(function, Jitted) else Jitted(function, None, MOST_STATEMENTS, {})
    name = getattr(own.function, "__name__", "the function")
    update_wrapper(gradients, own.function)
    return Jitted(gradients, own.comm, own.most_statements, own.settings)


def _copy_to_differentiate(where: str, trace: Trace, leaf: Any) -> Symbol:
    """Return a tensor that stands for an argument, which may also be used in other ways."""
    is_number = isinstance(leaf, int | float | complex)
    symbol = symbol_of(trace, leaf) if is_tensor(leaf) or is_number else None
    if symbol is None or symbol.dtype.kind not in "fc":
        refuse(f"{where} by {leaf!r:.60}", "a tensor of real or complex numbers")
    return Symbol(trace, copied(symbol.node), symbol.argument or "an argument", symbol.is_weak)


def _gradient(name: str, loss: Symbol, leaf: Symbol) -> DistArray:
    """Return the gradient of a loss, the result of a function of this name, by an argument."""
    trace = trace_of([loss, leaf])
    copy = leaf.node
    if copy not in in_order([loss.node]):
        return call(np.zeros_like, leaf)
    for node in in_order([loss.node]):
        if node.call is not None and copy in in_order([node]):
            what = f"there is no gradient of {name} through {node.call.name}"
            hint = "it is a call between two programs"
            raise TracingError(node.line, what, "functions that are statements", hint)
    # What the loss reads of the tensor by other ways is not differentiated.
    source = copy.operands["x"]
    copy.is_separate = source in in_order([loss.node], without=copy)
    differentiated_by = copy if copy.is_separate else source
    index = labels_of(leaf.shape)
    text = f"{element_text('out', index)} = grad(loss, {element_text('x', index)})"
    operands = {"loss": loss.node, "x": differentiated_by}
    node = trace.add(text, operands, is_gradient=True)
    node.line = f"{node.line}, gradient of {name}"
    return Symbol(trace, node)


# ---- loops ---------------------------------------------------------------------------------------


@takes_settings
def fori(
    steps: int, body: Callable[..., Any], *state: Any, comm: Any = None, **settings: Any
) -> Any:
    """Repeat a step, which is traced once: a loop whose tensors stay on the ranks.

    Parameters
    ----------
    steps : int
        How often.
    body : callable
        ``body(step, *state)`` returns the state after a step: as many tensors of the same shapes
        and dtypes. `step` is a tensor without dimensions, from 0 on.
    *state : array, DistArray, or list, tuple or dict of such
        The state before the first step.
    comm : mpi4py communicator, optional
        The ranks if no tensor is a DistArray; by default all that mpirun started.
    {settings} : optional
        As for `plan`.

    Returns
    -------
    DistArray or tuple
        The state after the last step.

    Examples
    --------
    >>> def newton(step, x):
    ...     return (x + 2 / x) / 2
    >>> round(float(einmpi.fori(6, newton, np.array(1.0))), 6)
    1.414214
    """
    chosen = only_settings("fori", settings)
    if not isinstance(steps, int | np.integer) or steps < 1 or not state:
        what = f"{steps!r:.40} steps of {counted(len(state), 'tensor')}"
        raise InputError("fori", what, "a positive number of Python, and at least one tensor")
    leaves, rebuild = flatten({f"state{number or ''}": each for number, each in enumerate(state)})
    leaves = [(name, each if is_tensor(each) else np.asarray(each)) for name, each in leaves]
    tensors = [tensor for _, tensor in leaves]
    own_comm = _comm_of(tensors, comm)

    def step(values: list[Any]) -> Any:
        number = Symbol(TRACES.stack[-1], Node((), np.dtype(np.int64), "step"), "step")
        found = body(number, *rebuild(values).values())
        found = _ordered_like(found, state[0] if len(state) == 1 else state)
        if _structure(found) == _structure(state[0]) and len(state) == 1:
            found = (found,)
        if _structure(found) != _structure(state):
            what = f"a step returns {found!r:.80} for a state of {counted(len(leaves), 'tensor')}"
            refuse(what, "as many tensors, in the same containers")
        return tuple(_computed(leaf) for _, leaf in flatten(found)[0])

    given_to_trace = (leaves, own_comm, chosen, MOST_STATEMENTS)
    traced = trace_together(own_comm, lambda: Traced(step, *given_to_trace))
    repeat = _repetition(traced, tensors, int(steps))
    values = [*tensors, *traced.trace.constants.values()]
    if any(isinstance(each, Symbol) for each in values):
        trace = trace_of(values)
        symbols = tuple(symbol_of(trace, each) for each in values)
        kinds = [np.broadcast_to(np.empty((), each.dtype), each.shape) for each in tensors]
        found = call_between(repeat, symbols, {}, kinds)
    else:
        found = repeat(*values)
    after = tuple(rebuild(found).values())
    return after if len(state) > 1 else after[0]


def _ordered_like(found: Any, state: Any) -> Any:
    """Return what a step has found, its dicts in the order of those in the state."""
    if isinstance(found, dict) and isinstance(state, dict) and found.keys() == state.keys():
        return {key: _ordered_like(found[key], state[key]) for key in state}
    if (
        type(found) in (list, tuple)
        and isinstance(state, list | tuple)
        and len(found) == len(state)
    ):
        return type(found)(map(_ordered_like, found, state))
    return found


def _computed(value: Any) -> Any:
    """Return a tensor of the state as one that a step computes."""
    if not isinstance(value, Symbol):
        return symbol_of(TRACES.stack[-1], value) if is_tensor(value) else value
    return value if value.node.is_computed else Symbol(value.own_trace, copied(value.node))


def _repetition(traced: Traced, state: Sequence[Any], steps: int) -> Callable[..., Any]:
    """Return what repeats a step: a function of the state, and of what the step has from outside.

    It returns the state after the last step.
    """
    if len(traced.stages) > 1:
        refuse("the step of a loop makes a call between two programs", "statements")
    names = [str(name) for name in traced.argument_names]
    made: dict[str, str] = {}  # what a tensor of the state becomes
    for name, before, after in zip(names, state, traced.results, strict=True):
        is_same = isinstance(after, Symbol) and after.shape == before.shape
        if not is_same or after.dtype != before.dtype:
            what = f"a step makes {after!r:.80} of a tensor of shape {before.shape}, {before.dtype}"
            refuse(what, "the same shape and dtype")
        made[name] = traced.node_names[after.node]
    job = traced.stages[0].job
    assert job is not None
    read = [vertex.name for vertex in job.graph.inputs]
    carry = {name: after for name, after in made.items() if name in read}

    def fori(*values: Any) -> list[Any]:
        given = dict(zip([*names, *traced.trace.constants], values, strict=True))
        given = {name: value for name, value in given.items() if name in read}
        if carry:
            outputs = loop(job, given, traced.comm, carry=carry, steps=steps).outputs
        else:  # steps do not depend on each other: only the last one counts
            number = {"step": np.int64(steps - 1)} if "step" in read else {}
            outputs = run(job, {**given, **number}, traced.comm)
        return [outputs[name if name in carry else made[name]] for name in names]

    return fori
