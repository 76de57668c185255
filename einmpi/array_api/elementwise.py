"""Functions of single elements, by the names of the array API standard."""

from __future__ import annotations

from typing import Any

import numpy as np

from einmpi.array_api.calls import binary, call, unary
from einmpi.compiled.dist_array import DistArray

abs = unary(np.abs)
acos = unary(np.acos)
acosh = unary(np.acosh)
asin = unary(np.asin)
asinh = unary(np.asinh)
atan = unary(np.atan)
atanh = unary(np.atanh)
bitwise_invert = unary(np.bitwise_invert)
ceil = unary(np.ceil)
conj = unary(np.conj)
cos = unary(np.cos)
cosh = unary(np.cosh)
exp = unary(np.exp)
expm1 = unary(np.expm1)
floor = unary(np.floor)
isfinite = unary(np.isfinite)
isinf = unary(np.isinf)
isnan = unary(np.isnan)
log = unary(np.log)
log1p = unary(np.log1p)
log2 = unary(np.log2)
log10 = unary(np.log10)
logical_not = unary(np.logical_not)
negative = unary(np.negative)
positive = unary(np.positive)
reciprocal = unary(np.reciprocal)
round = unary(np.round)
sign = unary(np.sign)
signbit = unary(np.signbit)
sin = unary(np.sin)
sinh = unary(np.sinh)
square = unary(np.square)
sqrt = unary(np.sqrt)
tan = unary(np.tan)
tanh = unary(np.tanh)
trunc = unary(np.trunc)
imag = unary(np.imag)
real = unary(np.real)

add = binary(np.add)
atan2 = binary(np.atan2)
bitwise_and = binary(np.bitwise_and)
bitwise_left_shift = binary(np.bitwise_left_shift)
bitwise_or = binary(np.bitwise_or)
bitwise_right_shift = binary(np.bitwise_right_shift)
bitwise_xor = binary(np.bitwise_xor)
copysign = binary(np.copysign)
divide = binary(np.divide)
equal = binary(np.equal)
floor_divide = binary(np.floor_divide)
greater = binary(np.greater)
greater_equal = binary(np.greater_equal)
hypot = binary(np.hypot)
less = binary(np.less)
less_equal = binary(np.less_equal)
logaddexp = binary(np.logaddexp)
logical_and = binary(np.logical_and)
logical_or = binary(np.logical_or)
logical_xor = binary(np.logical_xor)
maximum = binary(np.maximum)
minimum = binary(np.minimum)
multiply = binary(np.multiply)
nextafter = binary(np.nextafter)
not_equal = binary(np.not_equal)
pow = binary(np.pow)
remainder = binary(np.remainder)
subtract = binary(np.subtract)


def clip(x: DistArray, /, min: Any = None, max: Any = None) -> DistArray:
    """Limit the elements to the range from `min` to `max`; the dtype stays."""
    clipped = call(np.clip, x, min, max)
    return clipped.astype(x.dtype)


def where(condition: DistArray, x1: Any, x2: Any, /) -> DistArray:
    """Return elements of `x1` where the condition is True, and of `x2` elsewhere."""
    return call(np.where, condition, x1, x2)
