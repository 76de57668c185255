"""The record of an operation, and the table of all records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from einmpi.graph.derivatives.operations import Derivative
from einmpi.graph.dtypes import DTYPES, DtypeRule


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """One operation: an operator, a function or a cast.

    Attributes
    ----------
    name : str
        The name in expression trees. A function is called by it.
    arity : int
        The number of arguments.
    takes_more : bool
        Whether there may be more arguments, all like the last one.
    documentation : str
        One line for the language reference.
    parameters : str
        The names of a function's arguments in the reference and in messages, "" for x and y.
    function : callable
        The operation on numpy arrays. It defines the meaning: the reference evaluator calls it.
    dtypes : callable
        The rule for dtypes: as_ufunc(u) for the rule of a numpy ufunc.
    takes_complex : bool
        Whether complex arguments are accepted.
    symbol : str
        How an operator is printed, "" for a function.
    precedence : int
        How tightly an operator binds, 0 for a function.
    is_comparison : bool
        Whether the operation compares: a chain of comparisons is joined by &.
    cpu : mapping
        The text in compiled CPU kernels by kind of number (b, i, u, f, c; "" for all others). Kind
        u has the text of i if it has none of its own.
        {0}, {1}, {2} are the arguments, {t} is their dtype, {r} the dtype of their real part,
        {n} a new name, {more} the last one of `arity` and those after it. Assignments may precede
        the last expression, each ended by "; ". A kind without text is computed by numpy.
    cpu_is_long : bool
        Whether the CPU text becomes many instructions: loops with it are unrolled less.
    cpu_is_chain : bool
        Whether these are integer operations that need one another's results, one after another.
    cuda : str
        The C++ expression in CUDA kernels, with {0}, {1}, {2} and {more} for the arguments, which
        have the types bool, signed char, short, int, Long, their unsigned forms, float, double or
        Complex<…>.
    cuda_source : str
        C++ functions that `cuda` calls in addition to those of device_functions, "" for none.
    derivative : callable or None
        What the adjoint of the result sends to the arguments. None if that is not known.
    is_flat : bool
        Whether nothing is sent to the arguments: the operation is constant between jumps, or not
        a function of real numbers.
    is_reproducible : bool
        Whether every kernel rounds the result in the same way. Results of other operations may
        differ in the last bit from kernel to kernel, and are not compared with each other.
    """

    name: str
    arity: int
    documentation: str
    function: Callable[..., Any]
    dtypes: DtypeRule
    takes_more: bool = False
    takes_complex: bool = True
    parameters: str = ""
    symbol: str = ""
    precedence: int = 0
    is_comparison: bool = False
    cpu: Mapping[str, str] = field(default_factory=dict)
    cpu_is_long: bool = False
    cpu_is_chain: bool = False
    cuda: str = ""
    cuda_source: str = ""
    derivative: Derivative | None = None
    is_flat: bool = False
    is_reproducible: bool = False

    @property
    def is_function(self) -> bool:
        return self.precedence == 0

    @property
    def is_cast(self) -> bool:
        return self.name in DTYPES

    def accepts(self, count: int) -> bool:
        """Return whether it can have this number of arguments."""
        return count == self.arity or (self.takes_more and count > self.arity)

    def with_arguments(self, text: str, args: Sequence[str]) -> str:
        """Return the text of a kernel with the arguments in their places."""
        for k, arg in enumerate(args):
            text = text.replace(f"{{{k}}}", arg)
        return text.replace("{more}", ", ".join(args[self.arity - 1 :]))

    def call_text(self) -> str:
        """Return how a function is called, such as "maximum(x, y)"."""
        parameters = self.parameters or ", ".join("xy"[: self.arity])
        return f"{self.name}({parameters})"


OPERATIONS: dict[str, Operation] = {}


def register_operation(operation: Operation) -> None:
    """Add an operation to the language. The parser, dtypes, the reference and kernels see it."""
    if operation.name in OPERATIONS:
        raise ValueError(f"there is an operation {operation.name} already")
    if operation.is_function and not operation.name.isidentifier():
        raise ValueError(f"{operation.name!r} cannot be called: it is not a name")
    OPERATIONS[operation.name] = operation


def unregister_operation(name: str) -> None:
    """Remove an operation that register_operation has added."""
    del OPERATIONS[name]


def functions() -> tuple[str, ...]:
    """Return the names of the operations that are written as functions, casts included."""
    return tuple(name for name, operation in OPERATIONS.items() if operation.is_function)
