"""The aggregations ⊕, one record each. A new one is one call of register_aggregation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from einmpi.errors import OperationError
from einmpi.graph.derivatives import aggregations as derivatives
from einmpi.graph.derivatives.aggregations import AggregateDerivative
from einmpi.graph.derivatives.simple import (
    ScanDerivative,
    of_running_extreme,
    of_running_product,
    of_running_sum,
)
from einmpi.graph.dtypes import Type, kind_of
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Number


@dataclass(frozen=True, kw_only=True, eq=False)
class Aggregation:
    """One associative and commutative ⊕.

    Attributes
    ----------
    name : str
        The name in programs.
    symbol : str
        How it is printed.
    documentation : str
        What ⊕ does to two values, for the language reference.
    operation : str
        The name of the operation that is ⊕ of two values. Its texts are those that compiled CPU
        and CUDA kernels use.
    combine : numpy.ufunc
        ⊕ on arrays. It reduces blocks and combines partial results of kernels and ranks.
    neutral : callable
        From a dtype of results: the value that ⊕ leaves unchanged.
    empty : number or None
        The aggregate of no values, None if there is none.
    result_dtype : callable
        From the dtype of the values: the dtype of the aggregate.
    result_text : str
        The rule of result_dtype in words, for the language reference.
    takes_complex : bool
        Whether complex values are accepted.
    distributes_over : frozenset of str
        The operations ⊗ with a ⊗ (b ⊕ c) = (a ⊗ b) ⊕ (a ⊗ c) up to rounding: their products may be
        split and reordered.
    exact_over : frozenset of str
        Those of them for which this holds exactly for all values, inf and nan included, and which
        never wrap around.
    modular_over : frozenset of str
        Those of them for which this holds for integers that wrap around, as long as all are of
        the dtype of the aggregate.
    is_rounded : bool
        Whether ⊕ rounds: totals are then kept in the accumulator of the dtype.
    is_idempotent : bool
        Whether a ⊕ a = a: a value may then be taken twice.
    mpi : str
        The MPI reduction that is ⊕, "" if there is none.
    derivative : callable or None
        What the adjoint of an aggregate sends to its values. None if that is not known.
    scan_derivative : callable or None
        What the adjoints of running aggregates send to the values. None if nothing better is known
        than to take each of them for an aggregate of its own.
    is_flat : bool
        Whether nothing is sent to the values, because aggregates are true or false.
    """

    name: str
    symbol: str
    documentation: str
    operation: str
    combine: np.ufunc
    neutral: Callable[[np.dtype[Any]], Number]
    empty: Number | None
    result_dtype: Callable[[np.dtype[Any]], np.dtype[Any]]
    result_text: str
    takes_complex: bool = True
    distributes_over: frozenset[str] = frozenset()
    exact_over: frozenset[str] = frozenset()
    modular_over: frozenset[str] = frozenset()
    is_rounded: bool = False
    is_idempotent: bool = False
    mpi: str = ""
    derivative: AggregateDerivative | None = None
    scan_derivative: ScanDerivative | None = None
    is_flat: bool = False


AGGREGATIONS: dict[str, Aggregation] = {}


def register_aggregation(aggregation: Aggregation) -> None:
    """Add an aggregation to the language. The operation that it repeats must exist."""
    for name in {aggregation.name, aggregation.symbol}:
        if name in AGGREGATIONS or name in symbols():
            raise ValueError(f"there is an aggregation {name} already")
    if aggregation.name in OPERATIONS:
        raise ValueError(f"{aggregation.name} is an operation already")
    if not aggregation.name.isidentifier():
        raise ValueError(f"{aggregation.name!r} cannot be called: it is not a name")
    if aggregation.operation not in OPERATIONS:
        raise ValueError(f"there is no operation {aggregation.operation}; register it first")
    AGGREGATIONS[aggregation.name] = aggregation


def unregister_aggregation(name: str) -> None:
    """Remove an aggregation that register_aggregation has added."""
    del AGGREGATIONS[name]


def symbols() -> dict[str, str]:
    """Return the name of each aggregation by its symbol."""
    return {aggregation.symbol: name for name, aggregation in AGGREGATIONS.items()}


def aggregate_type(aggregation: str | None, kind: Type) -> np.dtype[Any]:
    """Return the dtype of an aggregate of values of this type; TypeError if there is none."""
    dtype = np.dtype(kind)
    if aggregation is None:
        return dtype
    record = AGGREGATIONS[aggregation]
    if dtype.kind == "c" and not record.takes_complex:
        raise OperationError(f"{aggregation} does not take complex numbers", "a real argument")
    return record.result_dtype(dtype)


def with_empty_value() -> Sequence[str]:
    """Return the names of the aggregations that have a value for no values at all."""
    return [name for name, record in AGGREGATIONS.items() if record.empty is not None]


# ---- dtypes -------------------------------------------------------------------------------------


def _same(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype


def _widened(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.kind in "bi":
        return np.dtype(np.int64)
    return np.dtype(np.uint64) if dtype.kind == "u" else dtype


def _truth(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(bool)


_SAME_TEXT = "that of the argument"
_WIDENED_TEXT = "that of the argument; int64 for bool and integers, uint64 for unsigned integers"

# ---- neutral elements ---------------------------------------------------------------------------


def _zero(dtype: np.dtype[Any]) -> Number:
    """−0 rather than 0 in floats, because 0 + −0 is 0."""
    if kind_of(dtype) == "f":
        return -0.0
    if dtype.kind == "c":
        return complex(-0.0, -0.0)
    return 0


def _one(dtype: np.dtype[Any]) -> Number:
    return 1


def _least(dtype: np.dtype[Any]) -> Number:
    if dtype.kind == "b":
        return False
    if kind_of(dtype) == "f":
        return -np.inf
    return int(np.iinfo(dtype).min)


def _greatest(dtype: np.dtype[Any]) -> Number:
    if dtype.kind == "b":
        return True
    if kind_of(dtype) == "f":
        return np.inf
    return int(np.iinfo(dtype).max)


def _false(dtype: np.dtype[Any]) -> Number:
    return False


def _true(dtype: np.dtype[Any]) -> Number:
    return True


# ---- the aggregations ---------------------------------------------------------------------------

register_aggregation(
    Aggregation(
        name="sum",
        symbol="Σ",
        documentation="+",
        operation="+",
        combine=np.add,
        neutral=_zero,
        empty=0,
        result_dtype=_widened,
        result_text=_WIDENED_TEXT,
        distributes_over=frozenset({"*"}),
        modular_over=frozenset({"*"}),
        is_rounded=True,
        mpi="SUM",
        derivative=derivatives.of_sum,
        scan_derivative=of_running_sum,
    )
)
register_aggregation(
    Aggregation(
        name="prod",
        symbol="Π",
        documentation="×",
        operation="*",
        combine=np.multiply,
        neutral=_one,
        empty=1,
        result_dtype=_widened,
        result_text=_WIDENED_TEXT,
        is_rounded=True,
        mpi="PROD",
        derivative=derivatives.of_product,
        scan_derivative=of_running_product,
    )
)
register_aggregation(
    Aggregation(
        name="max",
        symbol="max",
        documentation="greater of two",
        operation="maximum",
        combine=np.maximum,
        neutral=_least,
        empty=None,
        result_dtype=_same,
        result_text=_SAME_TEXT,
        takes_complex=False,
        distributes_over=frozenset({"+", "minimum"}),
        exact_over=frozenset({"minimum"}),
        is_idempotent=True,
        derivative=derivatives.of_extreme,
        scan_derivative=of_running_extreme,
    )
)
register_aggregation(
    Aggregation(
        name="min",
        symbol="min",
        documentation="lesser of two",
        operation="minimum",
        combine=np.minimum,
        neutral=_greatest,
        empty=None,
        result_dtype=_same,
        result_text=_SAME_TEXT,
        takes_complex=False,
        distributes_over=frozenset({"+", "maximum"}),
        exact_over=frozenset({"maximum"}),
        is_idempotent=True,
        derivative=derivatives.of_extreme,
        scan_derivative=of_running_extreme,
    )
)
register_aggregation(
    Aggregation(
        name="any",
        symbol="any",
        documentation="or",
        operation="|",
        combine=np.logical_or,
        neutral=_false,
        empty=False,
        result_dtype=_truth,
        result_text="bool",
        distributes_over=frozenset({"&"}),
        exact_over=frozenset({"&"}),
        is_idempotent=True,
        mpi="LOR",
        is_flat=True,
    )
)
register_aggregation(
    Aggregation(
        name="all",
        symbol="all",
        documentation="and",
        operation="&",
        combine=np.logical_and,
        neutral=_true,
        empty=True,
        result_dtype=_truth,
        result_text="bool",
        distributes_over=frozenset({"|"}),
        exact_over=frozenset({"|"}),
        is_idempotent=True,
        mpi="LAND",
        is_flat=True,
    )
)
