"""What operations do to dtypes and to constants: numpy's promotion rules, and folding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from einmpi.graph.bfloat16 import as_float16, bfloat16, is_bfloat16
from einmpi.graph.scalar import (
    BFLOAT16,
    CASTS,
    COMPARISONS,
    DTYPES,
    OPS,
    Call,
    Const,
    Index,
    Number,
    Scalar,
    Type,
)

# ---- dtypes ---------------------------------------------------------------------------------------------------------


@cache
def result_type(op: str, types: tuple[Type, ...]) -> Type:
    """numpy's rule for the dtype of `op`; TypeError with the reason where numpy has none."""
    if op not in CASTS and any(map(is_bfloat16, types)):
        found = result_type(op, as_float16(types))
        return bfloat16() if found == np.float16 else found
    rule, shown = OPS[op], "-" if op == "neg" else op
    if not rule.takes_complex and any(np.dtype(t).kind == "c" for t in types):
        raise TypeError(f"{shown} does not take complex numbers")
    if op in CASTS:
        if np.dtype(types[0]).kind == "c" and not op.startswith("complex"):
            raise TypeError(f"{op} does not take complex numbers: use real or imag first")
        return bfloat16() if op == BFLOAT16 else np.dtype(op)
    if op == "where":
        return _strong(np.result_type(*(_sample(t) for t in types[1:])))
    if op in ("real", "imag"):
        dtype = np.dtype(types[0])
        return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
    try:
        resolved = getattr(np, rule.ufunc).resolve_dtypes((*(_weak(t) for t in types), None))[-1]
    except TypeError:
        names = " and ".join(np.dtype(t).name for t in types)
        raise TypeError(f"{shown} does not take {names}") from None
    return _strong(resolved)


def _weak(kind: Type) -> Type:
    return np.dtype(bool) if kind is bool else kind


def _sample(kind: Type) -> Any:
    return kind(0) if isinstance(kind, type) and kind is not bool else np.dtype(kind)


def _strong(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.name not in DTYPES:
        raise TypeError(f"the result would be {dtype.name}, which is not supported")
    return dtype


def infer(node: Scalar, leaf: Callable[[Scalar], Type]) -> Type:
    """The dtype of an expression; `leaf` gives the dtype of an Arg or an Element."""
    if isinstance(node, Const):
        return type(node.value)
    if isinstance(node, Index):
        return np.dtype(np.int64)
    if not isinstance(node, Call):
        return leaf(node)
    return call_type(node.op, node.args, [infer(arg, leaf) for arg in node.args])


def call_type(op: str, args: Sequence[Scalar], types: Sequence[Type]) -> Type:
    """result_type, with constants that an integer result cannot take refused."""
    result = result_type(op, tuple(types))
    if np.dtype(result).kind != "i" or op in COMPARISONS or op in CASTS:
        return result
    limits = np.iinfo(np.dtype(result))
    for arg in args:
        if isinstance(arg, Const) and not limits.min <= arg.value.real <= limits.max:
            raise TypeError(f"{arg.value} does not fit into {np.dtype(result).name}")
    if op == "**" and isinstance(args[1], Const) and args[1].value.real < 0:
        raise TypeError(
            f"an integer to the power {args[1].value}: write {float(args[1].value.real)}"
        )
    return result


# ---- constants ------------------------------------------------------------------------------------------------------


def call(op: str, *args: Scalar) -> Scalar:
    """Call, with an operation on constants alone computed here; ValueError where it has no value."""
    # A cast stays: a constant takes the dtype of the tensor beside it, a cast constant keeps its own.
    if op in CASTS or not all(isinstance(arg, Const) for arg in args):
        return Call(op, args)
    values = [arg.value for arg in args if isinstance(arg, Const)]
    result_type(op, tuple(type(value) for value in values))  # the same rules as for tensors
    value = fold(op, values)
    # A complex zero has no sign here: its text could not say it.
    return Const(value + 0.0 if isinstance(value, complex) else value)


def fold(op: str, values: Sequence[Number]) -> Number:
    whole = all(type(value) is int for value in values)
    if whole and op == "**" and values[1].real < 0:
        values = (float(values[0].real), float(values[1].real))
    elif whole and op in ("+", "-", "*", "**", "neg"):
        return _whole(op, [int(value.real) for value in values])
    with np.errstate(all="ignore"):
        if op == "erf":
            return math.erf(values[0].real)
        if op == "rsqrt":
            return fold("/", (1.0, fold("sqrt", values)))
        if op in ("real", "imag", "where"):
            return np.asarray(getattr(np, op)(*values)).item()  # type: ignore[no-any-return]
        try:
            return getattr(np, OPS[op].ufunc)(*values).item()  # type: ignore[no-any-return]
        except TypeError:
            raise ValueError(f"{op} has no value for {', '.join(map(str, values))}") from None


def _whole(op: str, values: Sequence[int]) -> int:
    if op == "**" and abs(values[0]) > 1 and values[1] * (abs(values[0]).bit_length() - 1) > 63:
        raise ValueError(f"{values[0]}**{values[1]} is larger than 2**63")
    a, b = values[0], values[-1]
    result: int = {"+": a + b, "-": a - b, "*": a * b, "neg": -a}[op] if op != "**" else a**b
    if not -(2**63) <= result < 2**63:
        raise ValueError("an integer here is larger than 2**63")
    return result
