"""Calls that are prepared once and then repeated: all that depends on shapes and strides alone is
worked out the first time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from operator import itemgetter, methodcaller
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.arithmetic import compute_types
from einmpi.graph.dtypes import DTYPES, Type, computed_dtype
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Arg, Const, Element, Index, Scalar

Array: TypeAlias = npt.NDArray[Any]
# An EinSum on arrays of the shapes, strides and dtypes that it was prepared for: the operands, and
# the target. It keeps nothing from call to call, so that several threads may use it.
PreparedCall: TypeAlias = Callable[[Sequence[Array], Array], None]
ViewMaker: TypeAlias = Callable[[Array], Array]

MAX_PREPARED_CALLS = 4096

T = TypeVar("T")


class NumpyCall:
    """A prepared call of numpy's functions, in which floating-point errors are ignored.

    `bare` is the same call for those who ignore these errors for many calls at once, which takes
    less time. `bind` returns it for operands and a target that stay the same arrays.
    """

    def __init__(
        self,
        bare: PreparedCall,
        bind: Callable[[Sequence[Array], Array], Callable[[], Any]] | None = None,
    ) -> None:
        self.bare = bare
        self.bind = bind or (lambda operands, out: partial(bare, operands, out))

    def __call__(self, operands: Sequence[Array], out: Array) -> None:
        with np.errstate(all="ignore"):
            self.bare(operands, out)


def bare_call(call: PreparedCall) -> PreparedCall:
    """Return a prepared call for a caller who ignores floating-point errors."""
    return call.bare if isinstance(call, NumpyCall) else call


def bound_call(call: PreparedCall, operands: Sequence[Array], out: Array) -> PreparedCall:
    """Return a prepared call that computes with these arrays, whatever it is called with.

    The caller ignores floating-point errors.
    """
    if not isinstance(call, NumpyCall):
        return call
    compute = call.bind(operands, out)
    return lambda _operands, _out: compute()


class PreparedCalls:
    """Prepared calls by the object they belong to and a key.

    Objects are compared by identity: hashing an EinSum takes longer than a small kernel.
    """

    def __init__(self) -> None:
        self.entries: dict[tuple[int, Hashable], tuple[Any, Any]] = {}

    def get(self, owner: Any, key: Hashable, prepare: Callable[[], T]) -> T:
        """Return the call of an owner and a key; prepare it if there is none yet."""
        entry = self.entries.get((id(owner), key))
        if entry is None:
            call = prepare()
            if len(self.entries) >= MAX_PREPARED_CALLS:
                self.entries.clear()
            # Keep a reference to the owner, so that no other object gets the same id.
            entry = self.entries[id(owner), key] = owner, call
        found: T = entry[1]
        return found


def stored_as(arrays: Sequence[Array]) -> Hashable:
    """Return all that a prepared call depends on, for the arrays of a known step."""
    return tuple([(array.dtype, array.strides, array.flags.aligned) for array in arrays])


def view_maker(array: Array, view: Array) -> ViewMaker | None:
    """Return what makes the same view of other arrays, with the shape and strides of this one.

    Return None if there is no such function: the view is a copy, the array has gaps, or numpy has
    no buffer of its dtype.
    """
    if view is array or _is_same_view(array, view):
        return unchanged
    if not _has_buffer(array) or view.size == 0 or view.dtype != array.dtype:
        return None
    if not np.may_share_memory(array, view):
        return None
    shape = view.shape
    dtype = view.dtype
    strides = view.strides
    offset = address_of(view) - address_of(array)
    if view.size == array.size and array.reshape(shape).strides == strides:
        return methodcaller("reshape", shape)  # takes less time
    return lambda other: np.ndarray(shape, dtype, other, offset, strides)


def _has_buffer(array: Array) -> bool:
    """Return whether numpy can make other arrays in the memory of this one."""
    is_user_defined = array.dtype.isbuiltin == 2  # bfloat16, which numpy has no buffer of
    return not is_user_defined and array.flags.c_contiguous


def _is_same_view(array: Array, view: Array) -> bool:
    """Return whether two arrays have the same elements in the same places."""
    is_alike = view.shape == array.shape and view.strides == array.strides
    return is_alike and view.dtype == array.dtype and address_of(view) == address_of(array)


def address_of(array: Any) -> int:
    """Return the address of the first element of an array, or of what stands for one."""
    return int(array.__array_interface__["data"][0])


def unchanged(array: Array) -> Array:
    """Return an array as it is: the view of it that needs nothing to be made."""
    return array


# ---- ufuncs --------------------------------------------------------------------------------------
#
# Expressions and aggregations on whole arrays, by the numpy functions of their records.


# An expression as a function of the values of its operands and labels.
Evaluate: TypeAlias = Callable[[Sequence[Any]], Any]


def reduce_block(
    aggregation: str, values: npt.NDArray[Any], axes: tuple[int, ...], dtype: str
) -> Any:
    """Aggregate some axes of an array on the way to a tensor of this dtype.

    Rounded totals are kept in the accumulator of the dtype: a reference may not lose digits.
    """
    record = AGGREGATIONS[aggregation]
    if record.is_rounded:
        return record.combine.reduce(values, axis=axes, dtype=DTYPES[dtype].accumulator)
    return record.combine.reduce(values, axis=axes)


def apply(
    node: Scalar, values: Sequence[Any], positions: Mapping[str, npt.NDArray[np.int64]]
) -> Any:
    """Return the value of an expression, given the values of its operands and labels.

    Half precision is computed in float32; only a cast to it rounds. The caller rounds the result
    to the dtype of the tensor.
    """
    if isinstance(node, Const):
        return node.value
    if isinstance(node, Index):
        return positions[node.label]
    if isinstance(node, Arg):
        return in_float32(values[node.position])
    assert not isinstance(node, Element), "a vertex's function reads operands, not names"
    arguments = [apply(arg, values, positions) for arg in node.args]
    operation = OPERATIONS[node.op]
    if not operation.is_cast and _gives_float16(node.op, arguments):
        arguments = [np.asarray(argument).astype(np.float32) for argument in arguments]
    return in_float32(operation.function(*arguments))


def prepare_expression(
    node: Scalar, dtypes: Sequence[np.dtype[Any]], labels: Sequence[str]
) -> Evaluate | None:
    """Return a function that computes what `apply` does for operands of these dtypes.

    It takes the values of the operands, then those of the labels. Return None if half precision
    occurs on the way, which `apply` computes in float32.
    """
    # Arrays without elements tell which dtype numpy gives to each value on the way.
    samples = [np.empty(0, dtype) for dtype in dtypes]
    samples += [np.empty(0, np.int64) for _ in labels]
    with np.errstate(all="ignore"):
        prepared = _prepare(node, len(dtypes), list(labels), samples)
    return None if prepared is None else prepared[0]


def _prepare(
    node: Scalar, operands: int, labels: list[str], samples: Sequence[Any]
) -> tuple[Evaluate, Any] | None:
    """Return a function for an expression, and what it gives for the samples."""
    if isinstance(node, Const):
        constant = node.value
        return lambda values: constant, constant
    if isinstance(node, Arg | Index):
        number = node.position if isinstance(node, Arg) else operands + labels.index(node.label)
        sample = samples[number]
        if in_float32(sample) is not sample:
            return None
        return itemgetter(number), sample
    assert not isinstance(node, Element), "a vertex's function reads operands, not names"
    arguments = []
    for argument in node.args:
        prepared = _prepare(argument, operands, labels, samples)
        if prepared is None:
            return None
        arguments.append(prepared)
    own_samples = [sample for _, sample in arguments]
    operation = OPERATIONS[node.op]
    if not operation.is_cast and _gives_float16(node.op, own_samples):
        return None
    result = operation.function(*own_samples)
    if in_float32(result) is not result:
        return None
    return _call(operation.function, [evaluate for evaluate, _ in arguments]), result


def _call(function: Callable[..., Any], arguments: Sequence[Evaluate]) -> Evaluate:
    """Return a function that calls another one with the values of expressions."""
    if len(arguments) == 1:
        only = arguments[0]
        return lambda values: function(only(values))
    if len(arguments) == 2:
        first, second = arguments
        return lambda values: function(first(values), second(values))
    return lambda values: function(*[argument(values) for argument in arguments])


def in_float32(values: Any) -> Any:
    """Return numbers in half precision as float32, all others unchanged."""
    dtype = getattr(values, "dtype", None)
    if dtype is None or computed_dtype(dtype) is dtype:
        return values
    return values.astype(np.float32)


def _gives_float16(op: str, arguments: Sequence[Any]) -> bool:
    """Return whether numpy would compute small integers or bools in float16, as sqrt does."""
    types: list[Type] = []
    for argument in arguments:
        if not isinstance(argument, np.ndarray | np.generic):
            types.append(type(argument))
            continue
        if argument.dtype.itemsize > 1:
            return False
        types.append(argument.dtype)
    return "float16" in compute_types(op, types)
