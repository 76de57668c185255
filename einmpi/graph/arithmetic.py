"""What operations do to dtypes and to constants: numpy's promotion rules, and constant folding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from einmpi.errors import OperationError, one_of
from einmpi.graph.dtypes import (
    DTYPES,
    Type,
    bfloat16_as_float16,
    is_bfloat16,
    numpy_dtypes,
)
from einmpi.graph.operations import OPERATIONS, Operation
from einmpi.graph.scalar import Arg, Call, Const, Index, Number, Scalar

_LARGEST_INTEGER = "an integer from -2**63 to 2**63 - 1"

# ---- dtypes -------------------------------------------------------------------------------------


def result_type(op: str, types: tuple[Type, ...]) -> Type:
    """Return the dtype of `op` by numpy's rules; OperationError if there is none."""
    return _result_type(OPERATIONS[op], types)


@cache
def _result_type(operation: Operation, types: tuple[Type, ...]) -> Type:
    """Return the dtype of a result; OperationError for arguments that the operation rejects."""
    has_bfloat16 = any(is_bfloat16(kind) for kind in types)
    if has_bfloat16 and not operation.is_cast:
        result = _result_type(operation, bfloat16_as_float16(types))
        return np.dtype("bfloat16") if result == np.float16 else result
    shown = operation.symbol or operation.name
    has_complex = any(np.dtype(kind).kind == "c" for kind in types)
    if has_complex and not operation.takes_complex:
        raise OperationError(f"{shown} does not take complex numbers", "real arguments")
    try:
        result = operation.dtypes(types)[-1]
    except OperationError:
        raise
    except TypeError as error:
        names = " and ".join(np.dtype(kind).name for kind in types)
        raise OperationError(f"{shown} does not take {names}", _accepted(operation)) from error
    if result.name not in DTYPES:
        what = f"the result of {shown} would be {result.name}, which is not supported"
        raise OperationError(what, one_of(numpy_dtypes()))
    return result


def _accepted(operation: Operation) -> str:
    """Return which dtypes an operation takes, for a message.

    All arguments are tried in the same dtype.
    """
    accepted = []
    for name in numpy_dtypes():
        kind = np.dtype(name)
        if kind.kind == "c" and not operation.takes_complex:
            continue
        try:
            operation.dtypes((kind,) * operation.arity)
        except TypeError:
            continue
        accepted.append(name)
    return one_of(accepted)


def compute_types(op: str, types: Sequence[Type]) -> tuple[str, ...]:
    """Return the names of the dtypes to which numpy converts the arguments of `op`."""
    kinds = tuple(types)
    has_bfloat16 = any(is_bfloat16(kind) for kind in kinds)
    if not has_bfloat16 or OPERATIONS[op].is_cast:
        return tuple(dtype.name for dtype in OPERATIONS[op].dtypes(kinds)[:-1])
    names = []
    for dtype in OPERATIONS[op].dtypes(bfloat16_as_float16(kinds))[:-1]:
        names.append("bfloat16" if dtype == np.float16 else dtype.name)
    return tuple(names)


def infer(node: Scalar, leaf: Callable[[Scalar], Type]) -> Type:
    """Return the dtype of an expression; `leaf` gives the dtype of an Arg or an Element."""
    if isinstance(node, Const):
        return type(node.value)
    if isinstance(node, Index):
        return np.dtype(np.int64)
    if not isinstance(node, Call):
        return leaf(node)
    return call_type(node.op, node.args, [infer(arg, leaf) for arg in node.args])


def infer_over(node: Scalar, dtypes: Sequence[str]) -> Type:
    """Return the dtype of an expression over operands of these dtypes."""

    def leaf(part: Scalar) -> Type:
        assert isinstance(part, Arg)
        return np.dtype(dtypes[part.position])

    return infer(node, leaf)


def call_type(op: str, args: Sequence[Scalar], types: Sequence[Type]) -> Type:
    """Return the dtype of a call; OperationError for a constant that it cannot hold.

    A constant adapts to the other operand: int32 + 1 is int32, and int32 + 2**40 is an error.
    """
    operation = OPERATIONS[op]
    result = _result_type(operation, tuple(types))
    dtype = np.dtype(result)
    if dtype.kind not in "iu" or operation.is_comparison or operation.is_cast:
        return result
    limits = np.iinfo(dtype)
    for arg in args:
        if isinstance(arg, Const) and not limits.min <= arg.value.real <= limits.max:
            what = f"{arg.value} does not fit into {dtype.name}"
            raise OperationError(what, f"a number from {limits.min} to {limits.max}")
    if op == "**" and isinstance(args[1], Const) and args[1].value.real < 0:
        raise OperationError(
            f"an integer to the power {args[1].value}",
            "an exponent of at least 0",
            f"write {float(args[1].value.real)} for a result in floating point",
        )
    return result


# ---- constants ----------------------------------------------------------------------------------


def call(op: str, *args: Scalar) -> Scalar:
    """Return a Call, or its value if all arguments are constants.

    OperationError if the operation has no value or no dtype for these constants.
    """
    if op == "bernoulli" and isinstance(args[0], Const) and not 0 <= args[0].value.real <= 1:
        raise OperationError(f"a probability of {args[0].value}", "a number from 0 to 1")
    values = [arg.value for arg in args if isinstance(arg, Const)]
    # A constant takes the dtype of the other operand, but a cast constant keeps its own.
    if len(values) < len(args) or OPERATIONS[op].is_cast:
        return Call(op, args)
    result_type(op, tuple(type(value) for value in values))  # the same rules as for tensors
    value = fold(op, values)
    if isinstance(value, complex):
        value += 0.0  # the text of a constant cannot show the sign of a complex zero
    return Const(value)


def fold(op: str, values: Sequence[Number]) -> Number:
    """Return the value of an operation on constants.

    Integers do not wrap around here, and 2**-1 is 0.5; else the value is numpy's.
    """
    if all(type(value) is int for value in values):
        integers = [int(value.real) for value in values]
        if op == "**" and integers[1] < 0:
            values = [float(value) for value in integers]
        elif op in ("+", "-", "*", "**", "neg"):
            return _fold_integers(op, integers)
    with np.errstate(all="ignore"):
        try:
            result: Any = OPERATIONS[op].function(*values)
        except TypeError:
            shown = ", ".join(map(str, values))
            raise OperationError(f"{op} has no value for {shown}") from None
    number: Number = np.asarray(result).item()
    return number


def _fold_integers(op: str, values: Sequence[int]) -> int:
    """Compute in Python's integers, which do not wrap around."""
    first = values[0]
    last = values[-1]
    if op == "+":
        result = first + last
    elif op == "-":
        result = first - last
    elif op == "*":
        result = first * last
    elif op == "neg":
        result = -first
    else:
        bits = last * (abs(first).bit_length() - 1)
        if abs(first) > 1 and bits > 63:
            raise OperationError(f"{first}**{last} is too large", _LARGEST_INTEGER)
        result = first**last
    if not -(2**63) <= result < 2**63:
        raise OperationError("the value of this integer constant is too large", _LARGEST_INTEGER)
    return result
