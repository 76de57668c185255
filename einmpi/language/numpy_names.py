"""Names of functions of numpy that the language lacks, and what is written instead of each."""

from __future__ import annotations

from typing import Final

_PRODUCT: Final = "Z[i,k] = sum(A[i,j] * B[j,k])"
_JOINED: Final = "Z[i:n+m] = where(i < n, x[i], y[i-n])"
_WINDOWS: Final = "Z[i] = sum(x[i+d] * y[d])"
_RESHAPED: Final = "Z[i:n,j:m] = v[i*m+j]"

# Statements and expressions of the language, with x, y, v for any tensors or expressions, k for
# one of integers, r for random numbers, and n and m for extents.
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
    "dropout": "where(r[i] < 0.9, x[i] / 0.9, 0) # r: an input of random numbers",
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
_RANDOM: Final = 'an input of random numbers, such as r = { shape = [8], random = "uniform" }'
_SIZE: Final = "a size, such as n in [sizes] or einmpi.program(..., n=8)"
MADE_ELSEWHERE: Final[dict[str, str]] = {
    "bernoulli": _RANDOM,
    "len": _SIZE,
    "normal": _RANDOM,
    "rand": _RANDOM,
    "randn": _RANDOM,
    "random": _RANDOM,
    "shape": _SIZE,
    "size": _SIZE,
    "uniform": _RANDOM,
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
