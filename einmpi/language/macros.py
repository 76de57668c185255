"""The macros, one record each, written in the language itself."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, nan, pi
from types import MappingProxyType
from typing import Final

from einmpi.graph.aggregations import AGGREGATIONS, symbols
from einmpi.graph.operations import OPERATIONS, functions


@dataclass(frozen=True)
class Macro:
    """One macro.

    Attributes
    ----------
    body : str
        The definition. x is the argument, L stands for the labels in brackets, n for the number
        of values that are aggregated, p for the number of the value at hand, counted from 0 to
        end - 1 with the last label running fastest. Lines before the last one name values that are
        used twice.
    differentiable : str
        The definition in programs with `grad`, "" if it is the same: equal values, but with
        derivatives that are precise and short.
    documentation : str
        One line for the language reference.
    reduces : bool
        Whether the macro binds its labels as an aggregation does.
    needs_labels : bool
        Whether the macro keeps its labels, so that they must be written in brackets.
    options : mapping
        Names of numbers in the body that a call may set, with their defaults.
    takes_integers : bool
        Whether integers and bools stay what they are. Else they become float64 first, so that
        sums, squares and differences do not wrap around.
    """

    body: str
    documentation: str
    reduces: bool = False
    needs_labels: bool = False
    options: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    differentiable: str = ""
    takes_integers: bool = False


# Aggregates of all values up to an index, by the name of the scan.
SCANS = {"cumsum": "sum", "cumprod": "prod", "cummax": "max", "cummin": "min"}

MACROS: dict[str, Macro] = {
    # The derivative of relu is 0 at 0; that of maximum is a half there. A nan stays one.
    "relu": Macro(
        "maximum(x, 0)",
        "x, or 0 where x is negative",
        differentiable="where(x <= 0, 0, x)",
        takes_integers=True,
    ),
    "silu": Macro("x / (1 + exp(-x))", "x times its sigmoid", differentiable="x * sigmoid(x)"),
    "gelu": Macro("0.5 * x * (1 + erf(x / sqrt(2)))", "x times the normal distribution function"),
    "gelu_tanh": Macro(
        "0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x * x * x)))",
        "an approximation of gelu, as some models have it",
    ),
    "mean": Macro("sum[L](x) / n", "mean", reduces=True),
    # The mean is subtracted first: a difference of two large sums would lose all digits.
    "var": Macro(
        "d = abs(x - sum[L](x) / n)\nsum[L](d * d) / maximum(n - ddof, 0)",
        "variance",
        reduces=True,
        options=MappingProxyType({"ddof": 0}),
    ),
    "std": Macro(
        "d = abs(x - sum[L](x) / n)\nsqrt(sum[L](d * d) / maximum(n - ddof, 0))",
        "standard deviation",
        reduces=True,
        options=MappingProxyType({"ddof": 0}),
    ),
    "norm": Macro("sqrt(sum[L](abs(x) ** 2))", "Euclidean norm", reduces=True),
    "count": Macro(
        "sum[L](x != 0)",
        "number of values that are true, or not 0",
        reduces=True,
        takes_integers=True,
    ),
    # Where x is nan, so is the least one, and x != x finds the first nan.
    "argmin": Macro(
        "m = min[L](x)\nmin[L](where((x == m) | (x != x), p, end))",
        "number of the first least value; of the first nan if there is one",
        reduces=True,
        takes_integers=True,
    ),
    "argmax": Macro(
        "m = max[L](x)\nmin[L](where((x == m) | (x != x), p, end))",
        "number of the first greatest value; of the first nan if there is one",
        reduces=True,
        takes_integers=True,
    ),
    # A maximum of ±inf must not be subtracted from itself.
    "logsumexp": Macro(
        "m = max[L](x)\nc = where(abs(m) == inf, 0, m)\nc + log(sum[L](exp(x - c)))",
        "log of the sum of exp(x)",
        reduces=True,
        # The value does not depend on what is subtracted, so the derivative need not either.
        differentiable=(
            "m = max[L](x)\nc = stop(where(abs(m) == inf, 0, m))\nc + log(sum[L](exp(x - c)))"
        ),
    ),
    # One division for each row. The sum is at least 1, so nothing overflows.
    "softmax": Macro(
        "e = exp(x - max[L](x))\ne * (1 / sum[L](e))",
        "exp(x), scaled to the sum 1",
        needs_labels=True,
        differentiable="e = exp(x - stop(max[L](x)))\ne * (1 / sum[L](e))",
    ),
    "rmsnorm": Macro(
        "x * rsqrt(sum[L](x * x) / n + eps)",
        "x over its root mean square",
        needs_labels=True,
        options=MappingProxyType({"eps": 1e-6}),
    ),
    "layernorm": Macro(
        "d = x - sum[L](x) / n\nd * rsqrt(sum[L](d * d) / n + eps)",
        "x, shifted to mean 0 and scaled to variance 1",
        needs_labels=True,
        options=MappingProxyType({"eps": 1e-5}),
    ),
}


# ---- vocabulary ----------------------------------------------------------------------------------
#
# The words of the language as they are now: records may be registered at run time.


CONSTANTS = {"inf": inf, "nan": nan, "pi": pi}
GRADIENT = "grad"  # can be called, and may still name a tensor


def callables() -> tuple[str, ...]:
    """Return the names that can be called: aggregations, scans, macros, functions and grad."""
    return (*AGGREGATIONS, *SCANS, *MACROS, *functions(), GRADIENT)


def is_callable(name: str) -> bool:
    """Return whether a name can be called: an aggregation, a scan, a macro or a function."""
    if name in AGGREGATIONS or name in SCANS or name in MACROS:
        return True
    return name in OPERATIONS and OPERATIONS[name].is_function


def is_reserved(name: str) -> bool:
    """Return whether a name is a word of the language, which cannot name a tensor or a size."""
    return is_callable(name) or name in CONSTANTS or name in symbols()


def aggregation_named(name: str) -> str | None:
    """Return the aggregation with this name or symbol, None if there is none."""
    if name in AGGREGATIONS:
        return name
    return symbols().get(name)


def binds_labels(name: str) -> bool:
    """Return whether a call of this name binds labels: an aggregation or a macro that reduces."""
    if name in MACROS:
        return MACROS[name].reduces
    return aggregation_named(name) is not None


def called_name(node: ast.AST) -> tuple[str, ast.expr | None] | None:
    """Return (name, labels in brackets) of name(...) or name[labels](...), else None."""
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name, None
        case ast.Call(func=ast.Subscript(value=ast.Name(id=name), slice=labels)):
            return name, labels
    return None


def call_form(name: str) -> str:
    """Return how a function, an aggregation, a scan or a macro is called, for messages."""
    if name == GRADIENT:
        return "grad(loss, W[labels])"
    if name in SCANS:
        return f"{name}[label](expression)"
    if name in OPERATIONS:
        return OPERATIONS[name].call_text()
    needs_labels = name in MACROS and MACROS[name].needs_labels
    return f"{name}[labels](expression)" if needs_labels else f"{name}(expression)"


# ---- numpy names ---------------------------------------------------------------------------------
#
# Names of functions of numpy that the language lacks, and what is written instead of each.


_PRODUCT: Final = "Z[i,k] = sum(A[i,j] * B[j,k])"
_JOINED: Final = "Z[i:n+m] = where(i < n, x[i], y[i-n])"
_WINDOWS: Final = "Z[i] = sum(x[i+d] * y[d])"
_RESHAPED: Final = "Z[i:n,j:m] = v[i*m+j]"

# Statements and expressions of the language, with x, y, v for any tensors or expressions, k for
# one of integers, and n and m for extents.
WRITTEN_INSTEAD: Final[dict[str, str]] = {
    "absolute": "abs(x[i])",
    "arange": "Z[i:n] = i",
    "arctan": "arctan2(x[i], 1)",
    "average": "sum(w[i] * x[i]) / sum(w[i])",
    "bincount": "Z[k[i]:n] = sum(1)",
    "bmm": "Z[b,i,k] = sum(P[b,i,j] * Q[b,j,k])",
    "cat": _JOINED,
    "concat": _JOINED,
    "concatenate": _JOINED,
    "conv1d": _WINDOWS,
    "conv2d": "Z[i,j] = sum(D[i+a,j+b] * K[a,b])",
    "convolve": _WINDOWS,
    "correlate": _WINDOWS,
    "diff": "Z[i:n-1] = x[i+1] - x[i]",
    "dot": _PRODUCT,
    "dropout": "where(bernoulli(0.9, 1, i), x[i] / 0.9, 0) # 1 is the seed",
    "einsum": _PRODUCT,
    "eye": "Z[i:n,j:n] = where(i == j, 1.0, 0.0)",
    "fabs": "abs(x[i])",
    "flip": "Z[i] = x[n-1-i]",
    "float": "float64(x[i])",
    "full": "Z[i:n] = 2.0",
    "histogram": "Z[int64((x[i] - low) / width):n] = sum(1)",
    "hypot": "sqrt(x[i]**2 + w[i]**2)",
    "identity": "Z[i:n,j:n] = where(i == j, 1.0, 0.0)",
    "int": "int64(x[i])",
    "isinf": "abs(x[i]) == inf",
    "logical_and": "(x[i] > 0) & (w[i] > 0)",
    "logical_not": "~(x[i] > 0)",
    "logical_or": "(x[i] > 0) | (w[i] > 0)",
    "matmul": _PRODUCT,
    "max_pool2d": "Z[i,j] = max[a:2,b:2](D[2*i+a,2*j+b])",
    "mm": _PRODUCT,
    "mod": "x[i] % w[i]",
    "nanmax": "max(where(isnan(x[i]), -inf, x[i]))",
    "nanmean": "sum(where(isnan(x[i]), 0, x[i])) / count(~isnan(x[i]))",
    "nanmin": "min(where(isnan(x[i]), inf, x[i]))",
    "nansum": "sum(where(isnan(x[i]), 0, x[i]))",
    "one_hot": "Z[i,c:n] = where(k[i] == c, 1.0, 0.0)",
    "ones": "Z[i:n] = 1.0",
    "outer": "Z[i,j] = x[i] * y[j]",
    "pad": "Z[i:n+2] = where((i > 0) & (i <= n), x[i-1], 0)",
    "pow": "x[i]**2",
    "power": "x[i]**2",
    "ptp": "max(x[i]) - min(x[i])",
    "rand": "Z[i:n] = uniform(1, i) # 1 is the seed",
    "randn": "Z[i:n] = normal(1, i) # 1 is the seed",
    "random": "Z[i:n] = uniform(1, i) # 1 is the seed",
    "remainder": "x[i] % w[i]",
    "reshape": _RESHAPED,
    "roll": "Z[i:n] = x[(i+n-1) % n]",
    "square": "x[i]**2",
    "trace": "Z = sum(D[i,i])",
    "transpose": "Z[j,i] = A[i,j]",
    "tril": "Z[i,j] = where(j <= i, A[i,j], 0)",
    "triu": "Z[i,j] = where(i <= j, A[i,j], 0)",
    "zeros": "Z[i:n] = 0.0",
}

# What is said of other functions.
_SIZE: Final = "a size, such as n in [sizes] or einmpi.program(..., n=8)"
MADE_ELSEWHERE: Final[dict[str, str]] = {
    "len": _SIZE,
    "shape": _SIZE,
    "size": _SIZE,
}

# What is not an EinSum, but a function of numpy that takes a DistArray.
FUNCTIONS_OF_RESULTS: Final = frozenset(
    {
        "argsort",
        "inv",
        "median",
        "nonzero",
        "percentile",
        "quantile",
        "solve",
        "sort",
        "svd",
        "unique",
    }
)
