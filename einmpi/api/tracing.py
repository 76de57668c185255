"""Functions written with numpy, planned as a whole: `jit`, `trace`, `fori`, and their gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import update_wrapper
from types import MethodType
from typing import Any

import numpy as np

from einmpi.api.loops import loop
from einmpi.api.running import run
from einmpi.arrays.dist_array import TRACES, DistArray
from einmpi.comm.agreement import comm_of_program
from einmpi.comm.base import ALONE, Comm
from einmpi.errors import InputError
from einmpi.graph.einsum import element_text
from einmpi.job.job import Job
from einmpi.job.settings import only_settings, takes_settings
from einmpi.tracing.functions import call_between
from einmpi.tracing.statements import Node, copied, in_order
from einmpi.tracing.symbols import (
    MOST_STATEMENTS,
    Symbol,
    Trace,
    refuse,
    symbol_of,
    trace_of,
)
from einmpi.tracing.traced import Traced, flatten, is_tensor, kind_of, trace_together
from einmpi.units import counted

MOST_TRACES = 256  # of a function, for arguments of different kinds


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
        self.parameters = list(inspect.signature(function).parameters)
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
        comm = self._comm(leaves)
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
                self.traces.clear()
            self.traces[key] = known
        self.latest = known
        return known, leaves

    def _comm(self, leaves: Sequence[Any]) -> Comm:
        for leaf in leaves:
            if isinstance(leaf, DistArray):
                return leaf.own_comm
        return comm_of_program(self.comm)

    def _new_trace(self, arguments: Sequence[Any], named: Mapping[str, Any], comm: Comm) -> Traced:
        names = [*self.parameters, *(f"x{number}" for number in range(len(arguments)))]
        given = [(name, each) for name, each in zip(names, arguments, strict=False)]
        given += named.items()
        leaves: list[tuple[str, Any]] = []
        rebuilds = []
        for name, each in given:
            found, rebuild = flatten(each, name)
            leaves += found
            rebuilds.append(rebuild)

        def rebuild_all(values: list[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
            parts = [rebuild(values) for rebuild in rebuilds]
            count = len(arguments)
            return parts[:count], dict(zip(named, parts[count:], strict=True))

        given_to_trace = (leaves, rebuild_all, comm, self.settings, self.most_statements)
        return trace_together(comm, lambda: Traced(self.function, *given_to_trace))

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


def _structure(value: Any) -> Any:
    """Return how containers are nested, as something with a hash."""
    if isinstance(value, dict):
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
            found.append(rebuilds[number]([_gradient(loss, leaf) for leaf in own]))
        gradient = found[0] if isinstance(wrt, int) else tuple(found)
        return (loss, gradient) if with_value else gradient

    inner = function.function if isinstance(function, Jitted) else function
    update_wrapper(gradients, inner)
    settings = function.settings if isinstance(function, Jitted) else {}
    comm = function.comm if isinstance(function, Jitted) else None
    return Jitted(gradients, comm, MOST_STATEMENTS, settings)


def _copy_to_differentiate(where: str, trace: Trace, leaf: Any) -> Symbol:
    """Return a tensor that stands for an argument, which may also be used in other ways."""
    is_number = isinstance(leaf, int | float | complex)
    symbol = symbol_of(trace, leaf) if is_tensor(leaf) or is_number else None
    if symbol is None or symbol.dtype.kind not in "fc":
        refuse(f"{where} by {leaf!r:.60}", "a tensor of real or complex numbers")
    return Symbol(trace, copied(symbol.node), symbol.argument or "an argument", symbol.is_weak)


def _gradient(loss: Symbol, leaf: Symbol) -> Symbol:
    """Return the gradient of a loss by an argument."""
    trace = trace_of([loss, leaf])
    copy = leaf.node
    if copy not in in_order([loss.node]):
        return np.zeros_like(leaf)
    if loss.node.level != copy.level:
        refuse("there is no gradient through a call between two programs", "statements")
    # What the loss reads of the tensor by other ways is not differentiated.
    source = copy.operands["x"]
    copy.is_separate = source in in_order([loss.node], without=copy)
    differentiated_by = copy if copy.is_separate else source
    index = [f"i{number}" for number in range(leaf.ndim)]
    text = f"{element_text('out', index)} = grad(loss, {element_text('x', index)})"
    operands = {"loss": loss.node, "x": differentiated_by}
    return Symbol(trace, trace.add(text, operands, is_gradient=True))


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
    *state : array, DistArray or symbol
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
    is_traced = any(isinstance(each, Symbol) for each in state)
    own_comm = trace_of(state).comm if is_traced else comm_of_program(comm)
    for each in state:
        if isinstance(each, DistArray) and not is_traced:
            own_comm = each.own_comm
    names = [f"state{number or ''}" for number in range(len(state))]

    def flat_body(*symbols: Any) -> Any:
        number = Symbol(TRACES.stack[-1], Node((), np.dtype(np.int64), "step"), "step")
        found = body(number, *symbols)
        return tuple(map(_computed, found if isinstance(found, tuple) else (found,)))

    def rebuild(values: list[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        return values, {}

    tensors = [each if is_tensor(each) else np.asarray(each) for each in state]
    leaves = list(zip(names, tensors, strict=True))
    given_to_trace = (leaves, rebuild, own_comm, chosen, MOST_STATEMENTS)
    traced = trace_together(own_comm, lambda: Traced(flat_body, *given_to_trace))
    job, made, constants = _loop_of(traced, tensors)
    read = [vertex.name for vertex in job.graph.inputs]
    carry = {name: after for name, after in made.items() if name in read}

    def run_loop(*values: Any) -> Any:
        given = dict(zip([*names, *constants], values, strict=True))
        own = {name: value for name, value in given.items() if name in read}
        if carry:
            outputs = loop(job, own, own_comm, carry=carry, steps=steps).outputs
        else:  # steps do not depend on each other: only the last one counts
            number = {"step": np.int64(steps - 1)} if "step" in read else {}
            outputs = run(job, {**own, **number}, own_comm)
        found = tuple(outputs[name if name in carry else made[name]] for name in names)
        return found if len(found) > 1 else found[0]

    values = [*tensors, *constants.values()]
    if not is_traced and not any(isinstance(each, Symbol) for each in values):
        return run_loop(*values)
    run_loop.__name__ = "fori"
    trace = trace_of(values)
    symbols = tuple(symbol_of(trace, each) for each in values)
    return call_between(run_loop, symbols, {}, [(each.shape, each.dtype) for each in tensors])


def _computed(value: Any) -> Any:
    """Return a tensor of the state as one that a step computes."""
    if not isinstance(value, Symbol):
        return symbol_of(TRACES.stack[-1], value) if is_tensor(value) else value
    return value if value.node.is_computed else Symbol(value.own_trace, copied(value.node))


def _loop_of(traced: Traced, state: Sequence[Any]) -> tuple[Job, dict[str, str], dict[str, Any]]:
    """Return the job of a step, what it carries, and the tensors that it has from outside."""
    if len(traced.stages) > 1:
        refuse("the step of a loop makes a call between two programs", "statements")
    names = [str(name) for name in traced.argument_names]
    if len(traced.results) != len(state):
        what = f"a step returns {len(traced.results)} tensors for {len(state)}"
        refuse(what, "as many as the state has")
    carry = {}
    for name, before, after in zip(names, state, traced.results, strict=True):
        if (
            not isinstance(after, Symbol)
            or after.shape != before.shape
            or after.dtype != before.dtype
        ):
            what = f"a step makes {after!r:.80} of a tensor of shape {before.shape}, {before.dtype}"
            refuse(what, "the same shape and dtype")
        carry[name] = traced.node_names[after.node]
    assert traced.stages[0].job is not None
    return traced.stages[0].job, carry, dict(traced.trace.constants)
