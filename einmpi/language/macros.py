"""The macros, one record each, written in the language itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


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
