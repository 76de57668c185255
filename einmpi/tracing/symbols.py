"""Symbols: DistArrays without elements, which note what is computed of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arrays.dist_array import (
    TRACES,
    DistArray,
    Link,
    check_writable,
    is_sparse_array,
    some_are_sparse,
    write_into_base,
)
from einmpi.arrays.elementwise import Number, copied
from einmpi.comm.base import Comm
from einmpi.errors import InputError
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.einsum import element_text
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Names
from einmpi.kernels.reference import as_numpy
from einmpi.late import late
from einmpi.schedule.layout import Layout
from einmpi.tracing.statements import Node, computed, header_of, labels_of

Leaves: TypeAlias = list[Any]
MOST_STATEMENTS = 1000  # of a traced function, unless it asks for more
_LIBRARIES = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(np.__file__)) + os.sep,
)


class TracingError(InputError):
    """What a function does cannot be written as statements."""


class TracingTypeError(TracingError, TypeError):
    """An argument has the wrong type; numpy raises TypeError there."""


def refuse(what: str, expected: str, hint: str = "") -> NoReturn:
    """Raise an error that names the user's line."""
    raise TracingError(users_line(), what, expected, hint)


def users_line() -> str:
    """Return the file and line of the innermost call outside of einmpi and numpy."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is None:
        return "jit"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


@dataclass(eq=False)
class Trace:
    """A function that is being written as a program."""

    comm: Comm
    most_statements: int = MOST_STATEMENTS
    names: Names = field(default_factory=lambda: Names(()))  # of inputs, and of all tensors later
    # Arrays that the function has from elsewhere, by the names of the inputs that they become.
    constants: dict[str, Any] = field(default_factory=dict)
    known: list[tuple[Any, Node]] = field(default_factory=list)  # such arrays, and what they are
    count: int = 0  # of nodes so far

    def add(self, text: str, operands: Mapping[str, Node], is_gradient: bool = False) -> Node:
        """Return the tensor `out` of a statement over operands."""
        self.note_statement()
        node = computed(text, operands, is_gradient)
        node.line = users_line()
        return node

    def symbol(self, text: str, operands: Mapping[str, Node]) -> Symbol:
        """Return the tensor `out` of a statement over operands as a symbol."""
        return Symbol(self, self.add(text, operands))

    def note_statement(self) -> None:
        self.count += 1
        # A statement takes several nodes, views among them.
        if self.count > 20 * self.most_statements:
            what = f"the function becomes a program of more than {self.most_statements} statements"
            refuse(what, "fewer", "einmpi.fori repeats a step without writing it out")

    def constant(self, array: Any) -> Node:
        """Return an array that is no argument as an input of the program.

        An array of numpy is taken as it is now; a DistArray is read in each call.
        """
        for known, node in self.known:
            is_same = known is array
            if isinstance(array, np.ndarray) and isinstance(known, np.ndarray):
                is_same = known.dtype == array.dtype and np.array_equal(known, array)
            if is_same:
                return node
        if isinstance(array, np.ndarray):
            array = array.copy()
        name = self.names.take_new("constant")
        node = Node(tuple(array.shape), np.dtype(array.dtype.name), name)
        self.constants[name] = array
        self.known.append((array, node))
        return node


class Symbol(DistArray):
    """A tensor that a traced function computes. It has a shape and a dtype, but no elements.

    A slice is a view: it is read from its tensor when it is used, and written into it.
    """

    is_symbol = True

    def __init__(self, trace: Trace, node: Node, argument: str = "", is_weak: bool = False) -> None:
        self.own_trace = trace
        self.own_comm = trace.comm
        self.argument = argument  # its name, if it is one of the function
        self.is_weak = is_weak  # a number of Python, which does not decide about dtypes
        self.base = self  # or the tensor that it is a view of
        self.key: Any = None  # that selects a view, if one does
        self._node = node
        self._read_from = node
        self._dtype = node.dtype

    def _view(self, link: Link, key: Any = None) -> Symbol:
        values: Any = link.read(self)
        found = Symbol(self.own_trace, values.node)
        found.base = self.base
        found.links = (*self.links, link)
        found.key = key
        found._read_from = self.base.node
        return found

    @property
    def node(self) -> Node:
        """The tensor as it is now."""
        if self.links and self.base.node is not self._read_from:
            self._read_from = self.base.node
            values: Any = self.base
            for link in self.links:
                values = link.read(values)
            self._node = values.node
        return self._node

    def replace(self, node: Node) -> None:
        """Have other elements from now on."""
        if self.base.argument:
            what = f"writes into {self.base.argument}, which the function is given"
            refuse(what, "a copy", "write x = x + 1 for x += 1, or take x.copy() first")
        if self.links:
            check_writable(self)
            write_into_base(self, Symbol(self.own_trace, node))
        else:
            self._node = node

    # ---- what is known ----

    @property
    def shape(self) -> tuple[int, ...]:
        return self._node.shape

    def __repr__(self) -> str:
        return f"Symbol(shape={self.shape}, dtype={self.dtype})"

    # ---- what is not known ----

    def _needs_values(self, what: str) -> NoReturn:
        refuse(f"{what} needs values, which a traced function does not have", "tensors", _HINT)

    @property
    def local(self) -> Any:
        self._needs_values("this function")

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        self._needs_values("this function")

    def is_alone(self) -> bool:
        return False

    def gather(self, root: int | None = None) -> Any:
        self._needs_values("gather()")

    def item(self, *index: int) -> Any:
        self._needs_values("item(), or a number of Python,")

    __reduce__ = tolist = item

    def __bool__(self) -> bool:
        what = "the branch depends on the values of a tensor, which a traced function does not have"
        refuse(what, "np.where(condition, x, y)", "or a branch on shapes and numbers of Python")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        what = "a function of numpy needs values, which a traced function does not have"
        hint = (
            "x is an array for np.asarray(x), and x.copy() for np.array(x); an array that is "
            "indexed can be an argument, or a DistArray; np.zeros_like(x) makes one to write into"
        )
        refuse(what, "tensors, or a function of numpy that takes DistArrays", hint)

    def __deepcopy__(self, _: Any) -> DistArray:
        return Symbol(self.own_trace, self.node)

    # ---- what is computed ----

    def __array_function__(
        self, function: Any, types: Any, arguments: Sequence[Any], options: dict[str, Any]
    ) -> Any:
        from einmpi.tracing.functions import apply_function

        if some_are_sparse(arguments):
            return late("call_with_sparse")(function, arguments, options)
        return self._call_alike("", (), apply_function, function, arguments, options)

    def _call_alike(
        self, name: str, shown: Sequence[Any], function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Call a function; an error that is not about a line of the user is one of this line."""
        try:
            return function(*arguments)
        except TracingError:
            raise
        except InputError as error:
            raise TracingError(users_line(), error.what, error.expected, error.hint) from error
        except TypeError as error:
            raise TracingTypeError(users_line(), str(error)) from error


_HINT = "call it outside, or write what is computed with numpy's functions"


# ---- arguments and results: arrays in lists, tuples and dicts ------------------------------------


def flatten(value: Any, name: str = "") -> tuple[list[tuple[str, Any]], Callable[[Leaves], Any]]:
    """Return what is in nested containers, each with a name, and what puts other values there."""
    if is_sparse_array(value):  # one of scipy may be a dict
        return [(name, value)], lambda leaves: leaves.pop(0)
    if isinstance(value, dict):
        items = [(f"{name}_{key}" if name else str(key), each) for key, each in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"{name}{number}", each) for number, each in enumerate(value)]
    else:
        return [(name, value)], lambda leaves: leaves.pop(0)
    found: list[tuple[str, Any]] = []
    rebuilds = []
    for own_name, each in items:
        leaves, rebuild = flatten(each, own_name)
        found += leaves
        rebuilds.append(rebuild)

    def rebuild_all(leaves: Leaves) -> Any:
        parts = [rebuild(leaves) for rebuild in rebuilds]
        if isinstance(value, dict):
            return dict(zip(value, parts, strict=True))
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)

    return found, rebuild_all


# ---- operands ------------------------------------------------------------------------------------


def trace_of(values: Sequence[Any]) -> Trace:
    """Return the innermost trace that symbols among some values belong to."""
    found = -1
    for value in values:
        if isinstance(value, Symbol):
            if value.own_trace not in TRACES.stack:
                refuse(
                    "a symbol of another call is used",
                    "tensors of this call",
                    "a traced function must not keep its tensors for later",
                )
            found = max(found, TRACES.stack.index(value.own_trace))
    innermost: Trace = TRACES.stack[found]
    return innermost


def symbol_of(trace: Trace, value: Any) -> Symbol:
    """Return a symbol as it is, and an array or a number as an input of the program."""
    if isinstance(value, Symbol) and value.own_trace is trace:
        return value
    # A DistArray may be a symbol of a trace around this one.
    if isinstance(value, DistArray) or is_sparse_array(value):
        return Symbol(trace, trace.constant(value))
    array = as_numpy(users_line(), "an operand", value)
    text = _as_expression(array)
    if text is None:
        return Symbol(trace, trace.constant(array))
    return trace.symbol(text, {})


def _as_expression(array: npt.NDArray[Any]) -> str | None:
    """Return the statement of an array of equal numbers, or of integers that follow from labels.

    Such are made by np.zeros, np.full and np.arange, and by np.roll, np.tile and np.repeat for
    indices. None for all other arrays.
    """
    if not array.size or array.dtype.name not in DTYPES or array.dtype.kind == "c":
        return None
    first = array.flat[0]
    expected: list[tuple[str, Any]] = [(f"{array.dtype.name}({_text(first)})", first)]
    if array.dtype == np.int64:
        period = max(int(array.max()) + 1, 1)
        repeats = max(np.count_nonzero(array == 0), 1)
        shift = f" + {first}" if first else ""
        for axis, size in enumerate(array.shape):
            label = f"i{axis}"
            count = np.arange(size).reshape([-1] + [1] * (array.ndim - 1 - axis))
            step = int(np.take(array, min(1, size - 1), axis).flat[0]) - int(first)
            scaled = label if step == 1 else f"{step} * {label}"
            expected += [
                (f"{scaled}{shift}", step * count + first),
                (f"({label}{shift}) % {period}", (count + first) % period),
                (f"{label} // {repeats}", count // repeats),
            ]
    for text, values in expected:
        if np.array_equal(array, np.broadcast_to(values, array.shape)):
            is_signed = array.dtype.kind == "f" and not first and np.signbit(array).any()
            return None if is_signed else f"{header_of(array.shape)} = {text}"
    return None


def is_number(value: Any) -> bool:
    """Return whether a value is written into the program, not read by it."""
    is_array = isinstance(value, np.ndarray) and not value.ndim
    return isinstance(value, Number) or is_array


def number_text(value: Any) -> str:
    """Return a number as the language writes it. Those of numpy decide about dtypes."""
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype.name}({_text(value.item())})"
    return _text(value)


def _text(value: Any) -> str:
    if isinstance(value, np.ndarray | np.generic):
        value = value.item()
    if isinstance(value, complex):
        return f"({_text(value.real)} + {_text(value.imag)} * 1j)"
    return f"({value!r})"


def elementwise(trace: Trace, template: str, values: Sequence[Any], dtype: Any = None) -> Symbol:
    """Return a function of elements, written with {0}, {1}, …; operands are broadcast.

    `dtype` is the one that numpy gives the result.
    """
    symbols = [None if is_number(value) else symbol_of(trace, value) for value in values]
    shape = np.broadcast_shapes(*(symbol.shape for symbol in symbols if symbol is not None))
    labels = labels_of(shape)
    converted = _dtype_of_weak(symbols, dtype)
    texts = []
    operands: dict[str, Node] = {}
    for value, symbol in zip(values, symbols, strict=True):
        if symbol is None:
            dtype_of_number = getattr(value, "dtype", None)  # one of Python has none
            is_decisive = all(each is None or each.dtype != dtype_of_number for each in symbols)
            texts.append(number_text(value) if is_decisive else _text(value))
            continue
        name = f"x{len(operands)}"
        operands[name] = symbol.node
        index = broadcast_index(symbol.shape, labels, shape)
        text = element_text(name, index)
        is_converted = symbol.is_weak and converted is not None and symbol.dtype != converted
        texts.append(f"{converted}({text})" if is_converted else text)
    body = template.format(*texts)
    found = trace.symbol(f"{header_of(shape)} = {body}", operands)
    if dtype is None or found.dtype == np.dtype(dtype):
        return found
    return trace.symbol(f"{header_of(shape)} = {np.dtype(dtype).name}({body})", operands)


def _dtype_of_weak(symbols: Sequence[Symbol | None], dtype: Any) -> Any:
    """Return the dtype that numbers of Python get: that of the result, unless it is a truth."""
    if dtype is None or np.dtype(dtype).kind != "b":
        return dtype
    kinds: list[Any] = []
    for symbol in symbols:
        if symbol is not None:
            weak = 1j if symbol.dtype.kind == "c" else 1.0
            kinds.append(weak if symbol.is_weak else symbol.dtype)
    return np.result_type(*kinds)


def broadcast_index(own: Sequence[int], labels: Sequence[str], shape: Sequence[int]) -> list[str]:
    """Return the index of an operand that is broadcast to a shape."""
    added = len(shape) - len(own)
    index = []
    for dimension, size in enumerate(own):
        is_repeated = size == 1 and shape[added + dimension] != 1
        index.append("0" if is_repeated else labels[added + dimension])
    return index


def _texts() -> dict[Any, str]:
    found: dict[Any, str] = {}
    for operation in OPERATIONS.values():
        if isinstance(operation.function, np.ufunc):
            if operation.is_function:
                places = ", ".join(f"{{{place}}}" for place in range(operation.arity))
                found[operation.function] = f"{operation.name}({places})"
            elif operation.arity == 2:
                found[operation.function] = f"({{0}} {operation.name} {{1}})"
            else:
                found[operation.function] = "(" + operation.name.replace("neg", "-") + "{0})"
    return found


_NOT_OPERATIONS = """
where        where({0}, {1}, {2})
round        round({0})
real         real({0})
imag         imag({0})
power        ({0} ** {1})
float_power  (float64({0}) ** float64({1}))
square       ({0} ** 2)
reciprocal   (1 / {0})
positive     {0}
fabs         abs({0})
floor        floor({0})
ceil         ceil({0})
rint         round({0})
trunc        where({0} < 0, ceil({0}), floor({0}))
arctan       arctan2({0}, 1)
exp2         (2.0 ** {0})
logical_and  (({0} != 0) & ({1} != 0))
logical_or   (({0} != 0) | ({1} != 0))
logical_xor  (({0} != 0) != ({1} != 0))
logical_not  ({0} == 0)
isinf        (abs({0}) == inf)
"""
# How the language writes functions of numpy.
TEXTS: dict[Any, str] = {**_texts(), copied: "{0}"}
for _row in _NOT_OPERATIONS.strip().splitlines():
    _name, _written = _row.split(maxsplit=1)
    TEXTS[getattr(np, _name)] = _written
