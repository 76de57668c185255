"""Random numbers as functions of a seed and of index values: Philox4x32-10, and what is made of it.

A number depends on nothing but the values of the arguments, so it is the same on any rank, for any
cut, and on every processor. The formulas below are written once, for arrays of numpy and for the
numbers of compiled CPU kernels; CUDA kernels have them in C++. All of them use exact operations on
integers and operations on floats that are rounded once, in the same order: the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from einmpi.errors import OperationError
from einmpi.graph.dtypes import DtypeRule, Type
from einmpi.graph.operation_records import Operation, register_operation

# What numbers are drawn for: the same arguments give each function numbers of its own.
UNIFORM = 0
NORMAL = 1
BERNOULLI = 2

# Philox4x32-10 (Salmon and others, "Parallel random numbers: as easy as 1, 2, 3", 2011).
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 2**32 - 1
# A step in 64 bits, and how splitmix64 mixes the bits of a number.
GOLDEN = 0x9E3779B97F4A7C15
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
MIX_LAST = 31

# −2 log x = −2 k log 2 − 2 log m, with √½ < m < √2, and with s = (m − 1) / (m + 1)
# −2 log m = s (−4 + Σ aⱼ s²ʲ): the bits of √½, and these coefficients from j = 1 on, interpolated
# at Chebyshev points.
ROOT_HALF_BITS = 0x3FE6A09E00000000
FRACTION_BITS = 2**52 - 1
# Makes the exponent of m · 2⁵³⁺ᵏ as a float, with √½ < m < √2, the number k.
LOG_SHIFT = (0x3FF0000000000000 - ROOT_HALF_BITS - ((1023 + 53) << 52)) % 2**64
MINUS_TWO_LOG_2 = -1.3862943611198906
LOG_SERIES = (
    -2 * 0.6666666666666206,
    -2 * 0.4000000001126354,
    -2 * 0.2857142412022083,
    -2 * 0.22222864249374918,
    -2 * 0.18140107756610346,
    -2 * 0.16623116584283473,
)
# The coefficients of 1, t², t⁴, … in sin(πt) / t for |t| ≤ ½, in the same way.
SINE_SERIES = (
    3.1415926535897927,
    -5.1677127800497855,
    2.5501640398618677,
    -0.599264528825224,
    0.08214587881631043,
    -0.0073703643265304155,
    0.0004659870158043378,
    -2.113362735205297e-05,
)

SCALED_SINE_SERIES = tuple(
    coefficient * 2.0 ** (-53 * (2 * k + 1)) for k, coefficient in enumerate(SINE_SERIES)
)

# ---- formulas -----------------------------------------------------------------------------------
#
# Their arguments are uint64 numbers, which wrap around: arrays, or numbers of compiled kernels.


def philox(counter: tuple[Any, Any], key: Any) -> tuple[Any, Any]:
    """Return 128 random bits for a counter of 128 bits and a key of 64, as two numbers.

    Each number has one word of 32 bits in its lower half and the next one in its upper half.
    """
    first, second = counter
    words = [first & _LOW, first >> 32, second & _LOW, second >> 32]
    keys = [key & _LOW, key >> 32]
    for _ in range(ROUNDS):
        products = [words[0] * MULTIPLIERS[0], words[2] * MULTIPLIERS[1]]
        words = [
            (products[1] >> 32) ^ (words[1] ^ keys[0]),
            products[1] & _LOW,
            (products[0] >> 32) ^ (words[3] ^ keys[1]),
            products[0] & _LOW,
        ]
        keys = [(keys[0] + KEY_STEPS[0]) & _LOW, (keys[1] + KEY_STEPS[1]) & _LOW]
    return words[0] | (words[1] << 32), words[2] | (words[3] << 32)


def random_bits(purpose: int, seed: Any, *values: Any) -> tuple[Any, Any]:
    """Return 128 random bits for a seed and index values, as two numbers.

    The last two values are the counter. All others are mixed into the key one after another, and
    before them what the bits are for and how many values there are.
    """
    code = purpose + 4 * len(values)
    key = _mixed(seed + code * GOLDEN % 2**64)
    for value in values[:-2]:
        key = _mixed(value * GOLDEN + key)
    first, second = (*values[-2:], 0, 0)[:2]
    return philox((first, second), key)


def _mixed(bits: Any) -> Any:
    """Return the bits of a number mixed; different numbers stay different."""
    for shift, multiplier in MIX:
        bits = (bits ^ (bits >> shift)) * multiplier
    return bits ^ (bits >> MIX_LAST)


def uniform(purpose: int, *arguments: Any) -> Any:
    """Return numbers that are uniform in [0, 1), all multiples of 2⁻⁵³."""
    return (random_bits(purpose, *arguments)[0] >> 11) * 2.0**-53


def uniform32(purpose: int, *arguments: Any) -> Any:
    """Return numbers that are uniform in [0, 1), all multiples of 2⁻²⁴."""
    return (random_bits(purpose, *arguments)[0] >> 40) * 2.0**-24


def normal(purpose: int, *arguments: Any) -> Any:
    """Return numbers of the standard normal distribution, by the method of Box and Muller.

    sin πt for t uniform in [−½, ½) is distributed as the cosine of a random angle.
    """
    first, second = random_bits(purpose, *arguments)
    # Scaled by powers of two, which changes no bit of the result.
    radius = np.sqrt(_minus_two_logs((first >> 11) + 1))
    t = (second.view(np.int64) >> 11) * 1.0
    return radius * (_series(t * t, SCALED_SINE_SERIES) * t)


def _minus_two_logs(count: Any) -> Any:
    """Return −2 log(count · 2⁻⁵³) for integers from 1 to 2⁵³, right up to a few roundings."""
    bits = (count * 1.0).view(np.uint64) + LOG_SHIFT
    k = bits.view(np.int64) >> 52
    f = ((bits & FRACTION_BITS) + ROOT_HALF_BITS).view(np.float64) - 1.0
    s = f / (f + 2.0)
    square = s * s
    return (_series(square, LOG_SERIES) * square - 4.0) * s + k * MINUS_TWO_LOG_2


def _series(x: Any, coefficients: tuple[float, ...]) -> Any:
    """Return Σ aₖ xᵏ, in pairs of pairs: a short chain of dependent steps."""
    terms: list[Any] = list(coefficients)
    while len(terms) > 1:
        pairs = [x * b + a for a, b in zip(terms[::2], terms[1::2], strict=False)]
        terms = pairs + terms[len(pairs) * 2 :]
        x = x * x
    return terms[0]


# ---- records ------------------------------------------------------------------------------------


def _as_random(result: str, real_arguments: int = 0) -> DtypeRule:
    """The rule of functions of integers, after some real arguments."""

    def rule(types: tuple[Type, ...]) -> tuple[np.dtype[Any], ...]:
        for kind in types[real_arguments:]:
            dtype = np.dtype(kind)
            if dtype.kind not in "biu":
                what = f"random numbers are functions of integers, and this is {dtype.name}"
                raise OperationError(what, "an integer seed and integer index values")
        reals = (np.dtype(np.float64),) * real_arguments
        integers = (np.dtype(np.int64),) * (len(types) - real_arguments)
        return (*reals, *integers, np.dtype(result))

    return rule


def _on_arrays(formula: Callable[..., Any], purpose: int, *arguments: Any) -> Any:
    """Return what a formula gives for arrays of integers, or numbers of Python."""
    integers = [np.asarray(argument).astype(np.int64).view(np.uint64) for argument in arguments]
    with np.errstate(over="ignore"):  # numpy warns of single numbers that wrap around
        return formula(purpose, *integers)


def _uniform32(*arguments: Any) -> Any:
    return _on_arrays(uniform32, UNIFORM, *arguments).astype(np.float32)


def _bernoulli(p: Any, *arguments: Any) -> Any:
    return _on_arrays(uniform, BERNOULLI, *arguments) < p


def _register(
    name: str,
    function: Callable[..., Any],
    documentation: str,
    result: str,
    text: str,
    parameters: str = "",
) -> None:
    """Register a function of a seed and index values, after other arguments if it has any.

    Kernels for CPUs and GPUs call functions with the same names.
    """
    others = parameters.count(",")
    register_operation(
        Operation(
            name=name,
            arity=1 + others,
            takes_more=True,
            documentation=documentation,
            parameters=f"{parameters}seed, i, …",
            function=function,
            dtypes=_as_random(result, others),
            takes_complex=False,
            cpu={"": text},
            cpu_is_long=True,
            cpu_is_chain=True,
            cuda=text,
            is_flat=True,
            is_reproducible=True,
        )
    )


_register(
    "uniform",
    partial(_on_arrays, uniform, UNIFORM),
    "a random number, uniform in [0, 1)",
    "float64",
    f"random_uniform({UNIFORM}, {{more}})",
)
_register(
    "uniform32",
    _uniform32,
    "the same as a float32, rounded down",
    "float32",
    f"random_uniform32({UNIFORM}, {{more}})",
)
_register(
    "normal",
    partial(_on_arrays, normal, NORMAL),
    "a random number of the standard normal distribution",
    "float64",
    f"random_normal({NORMAL}, {{more}})",
)
_register(
    "bernoulli",
    _bernoulli,
    "True with probability p",
    "bool",
    f"random_uniform({BERNOULLI}, {{more}}) < {{0}}",
    "p, ",
)
