"""The macros, written in the language itself: one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Macro:
    """In `body`, x is the argument, L stands for the labels in brackets, n for the number of values they take.

    Lines before the last name values that are used twice. A macro that reduces binds its labels as an aggregation
    does; one that `needs_labels` keeps them, so they must be written.
    """

    body: str
    documentation: str
    reduces: bool = False
    needs_labels: bool = False
    options: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


MACROS: dict[str, Macro] = {
    "relu": Macro("maximum(x, 0)", "x, or 0 where x is negative"),
    "sigmoid": Macro("1 / (1 + exp(-x))", "logistic function"),
    "silu": Macro("x / (1 + exp(-x))", "x times its sigmoid"),
    "gelu": Macro("0.5 * x * (1 + erf(x / sqrt(2)))", "x times the normal distribution function"),
    "mean": Macro("sum[L](x) / n", "mean", reduces=True),
    "var": Macro("d = abs(x - sum[L](x) / n)\nsum[L](d * d) / n", "variance", reduces=True),
    # A maximum of ±inf must not be subtracted from itself.
    "logsumexp": Macro(
        "m = max[L](x)\nc = where(abs(m) == inf, 0, m)\nc + log(sum[L](exp(x - c)))",
        "log of the sum of exp(x)",
        reduces=True,
    ),
    # One division a row: the sum is 1 at least, so nothing overflows.
    "softmax": Macro(
        "e = exp(x - max[L](x))\ne * (1 / sum[L](e))",
        "exp(x), scaled to the sum 1",
        needs_labels=True,
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
