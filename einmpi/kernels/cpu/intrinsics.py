"""Functions of compiled CPU kernels: typed pointers, stack arrays, functions that are vectorised.

This module imports numba, so only kernels import it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from einmpi.graph import random_numbers

_types: Any = types  # parts of it have no annotations

# ---- memory -------------------------------------------------------------------------------------
# Typed pointers instead of arrays: numba emits a plain load or store, without checks of bounds or
# negative indices.


@intrinsic
def at(context: Any, kind: Any, address: Any, *steps: Any) -> Any:
    """Return a pointer to numbers of a type, at an address and some steps from it.

    The steps are pairs of a count and a stride in bytes.
    """

    def code(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = args[1]
        parts = cgutils.unpack_tuple(builder, args[2])  # type: ignore[no-untyped-call]
        for count, stride in zip(parts[::2], parts[1::2], strict=True):
            place = builder.add(place, builder.mul(count, stride))
        return builder.inttoptr(place, target.get_value_type(signature.return_type))

    return _types.CPointer(kind.instance_type)(
        kind, types.int64, _types.UniTuple(types.int64, len(steps))
    ), code


@intrinsic(prefer_literal=True)
def stack(context: Any, kind: Any, count: Any) -> Any:
    """Return `count` numbers on the stack.

    LLVM knows that nothing else points there, so loops that fill them are vectorised.
    """

    def code(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = target.get_data_type(kind.instance_type)
        with builder.goto_entry_block():
            place = builder.alloca(ir.ArrayType(number, count.literal_value))
        place.align = 64
        return builder.bitcast(place, number.as_pointer())

    return _types.CPointer(kind.instance_type)(kind, count), code


@intrinsic
def pick(context: Any, condition: Any, a: Any, b: Any) -> Any:
    """Return a if the condition holds, else b, without a branch."""

    def code(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(*args)

    return a(types.boolean, a, a), code


@intrinsic
def whole(context: Any, kind: Any, number: Any) -> Any:
    """Return a float as an integer of a type, without its fraction.

    Outside of the type's range it is the nearest integer in it, and nan is 0: processors differ.
    """

    def code(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        result = target.get_value_type(signature.return_type)
        width = {"float": 32, "double": 64}[str(args[1].type)]
        conversion = "fptosi" if signature.return_type.signed else "fptoui"
        name = f"llvm.{conversion}.sat.i{result.width}.f{width}"
        insert: Any = cgutils.get_or_insert_function
        function = ir.FunctionType(result, [args[1].type])
        return builder.call(insert(builder.module, function, name), [args[1]])

    return kind.instance_type(kind, number), code


# ---- arithmetic ---------------------------------------------------------------------------------


def _call(builder: Any, name: str, *args: Any, fastmath: tuple[str, ...] = ()) -> Any:
    """Call one of LLVM's own functions, which are vectorised."""
    kind = args[0].type
    width = {"float": 32, "double": 64}[str(kind)]
    signature = ir.FunctionType(kind, [kind] * len(args))
    insert: Any = cgutils.get_or_insert_function
    return builder.call(
        insert(builder.module, signature, f"llvm.{name}.f{width}"), args, fastmath=fastmath
    )


def _intrinsic(emit: Callable[..., Any], arity: int) -> Any:
    """Return a function for numbers of one type, given one that emits its instructions."""

    def describe(kind: Any) -> Any:
        return kind(*[kind] * arity), lambda target, builder, signature, args: emit(builder, *args)

    # numba looks at the names of the arguments, so each arity is written out.
    if arity == 1:
        return intrinsic(lambda context, a: describe(a))
    if arity == 2:
        return intrinsic(lambda context, a, b: describe(a))
    return intrinsic(lambda context, a, b, c: describe(a))


# Python's `min` would be compiled again for every kernel.
least = _intrinsic(lambda builder, a, b: builder.select(builder.icmp_signed("<", a, b), a, b), 2)


def _extreme(name: str, order: str) -> Callable[..., Any]:
    """Emit the maximum or minimum of two numbers; nan on either side gives nan, as in numpy."""

    def emit(builder: Any, a: Any, b: Any) -> Any:
        if llvmlite.binding.llvm_version_info >= (18,):
            # Leaving the sign of zero open saves instructions on x86.
            return _call(builder, name, a, b, fastmath=("nsz",))
        # Older versions cannot compile that everywhere.
        wins = builder.or_(builder.fcmp_ordered(order, a, b), builder.fcmp_unordered("uno", a, a))
        return builder.select(wins, a, b)

    return emit


maximum = _extreme("maximum", ">")
minimum = _extreme("minimum", "<")
fmax = _intrinsic(maximum, 2)
fmin = _intrinsic(minimum, 2)
# Rounded once if the machine has such an instruction, else twice.
muladd = _intrinsic(lambda builder, a, b, c: _call(builder, "fmuladd", a, b, c), 3)
fmod = _intrinsic(lambda builder, a, b: builder.frem(a, b), 2)
floor = _intrinsic(lambda builder, a: _call(builder, "floor", a), 1)
ceil = _intrinsic(lambda builder, a: _call(builder, "ceil", a), 1)
rint = _intrinsic(lambda builder, a: _call(builder, "rint", a), 1)  # halves to even

# The bits of the type and of its fraction; log2 e; ln 2 in two parts; the arguments at which exp
# underflows and overflows; the series of (exp r − 1 − r) / r² for |r| ≤ ln 2 / 2, interpolated at
# Chebyshev points, lowest power first.
_EXP = {
    "double": (
        64,
        52,
        1.4426950408889634,
        6.93147180369123816490e-01,
        1.90821492927058770002e-10,
        -746.0,
        710.0,
        (
            0.5000000000000001,
            0.16666666666666669,
            0.041666666666624136,
            0.008333333333330063,
            0.001388888891720967,
            0.00019841269863050506,
            2.4801521302241082e-05,
            2.7557268464831627e-06,
            2.7620085455018414e-07,
            2.510038319586702e-08,
        ),
    ),
    "float": (
        32,
        23,
        1.4426950216293335,
        0.693359375,
        -2.12194440e-4,
        -105.0,
        89.0,
        (
            0.5,
            0.16666576266288757,
            0.041666556149721146,
            0.008363177999854088,
            0.0013926181709393859,
        ),
    ),
}
# tanh x = x + x³ P(x²)/Q(x²) below 0.625 (Cephes), highest power first
_TANH = {
    "double": (
        (-9.64399179425052238628e-1, -9.92877231001918586564e1, -1.61468768441708447952e3),
        (1.0, 1.12811678491632931402e2, 2.23548839060100448583e3, 4.84406305325125486048e3),
    ),
    "float": (
        (
            -5.70498872745e-3,
            2.06390887954e-2,
            -5.37397155531e-2,
            1.33314422036e-1,
            -3.33332819422e-1,
        ),
        (1.0,),
    ),
}


def _series(builder: Any, x: Any, terms: list[Any]) -> Any:
    """Emit Σ terms[k] xᵏ, in pairs of pairs: a short chain of dependent steps."""
    while len(terms) > 1:
        pairs = [
            _call(builder, "fmuladd", b, x, a)
            for a, b in zip(terms[::2], terms[1::2], strict=False)
        ]
        terms = pairs + terms[len(pairs) * 2 :]
        x = builder.fmul(x, x)
    return terms[0]


def _exp(builder: Any, x: Any) -> Any:
    """Emit exp within one unit in the last place, without a branch or a table.

    With x = k ln 2 + r, exp x = 2ᵏ exp r.
    """
    bits, fraction, log2e, high, low, least, most, terms = _EXP[str(x.type)]
    whole = ir.IntType(bits)
    bias = 2 ** (bits - fraction - 2) - 1

    def number(value: float) -> Any:
        return ir.Constant(x.type, value)

    x = minimum(builder, maximum(builder, x, number(least)), number(most))
    magic = 1.5 * 2.0**fraction
    shifted = _call(builder, "fmuladd", x, number(log2e), number(magic))  # its last bits hold k
    k = builder.fsub(shifted, number(magic))
    r = _call(builder, "fmuladd", k, number(-low), _call(builder, "fmuladd", k, number(-high), x))
    rest = _series(builder, r, [number(term) for term in terms])
    near = builder.fadd(number(1.0), r)
    lost = builder.fadd(builder.fsub(number(1.0), near), r)
    series = builder.fadd(near, _call(builder, "fmuladd", builder.fmul(r, r), rest, lost))
    # Times 2ᵏ in two steps, since 2ᵏ alone may be out of range where the result is not.
    shift = whole(2 * bias - _bits(magic, bits))
    both = builder.add(builder.bitcast(shifted, whole), shift)  # k + 2 bias
    half = builder.lshr(both, whole(1))
    for exponent in (half, builder.sub(both, half)):
        power = builder.bitcast(builder.shl(exponent, whole(fraction)), x.type)
        series = builder.fmul(series, power)
    return series


def _bits(value: float, bits: int) -> int:
    """Return the bits of a floating-point number as an integer."""
    return int.from_bytes(struct.pack("<d" if bits == 64 else "<f", value), "little")


def _tanh(builder: Any, x: Any) -> Any:
    """Emit tanh: a rational function for small x, else 1 − 2 / (exp 2|x| + 1), signed as x."""
    numerator, denominator = _TANH[str(x.type)]
    upper = [ir.Constant(x.type, coefficient) for coefficient in reversed(numerator)]
    lower = [ir.Constant(x.type, coefficient) for coefficient in reversed(denominator)]
    square = builder.fmul(x, x)
    one = ir.Constant(x.type, 1.0)
    ratio = builder.fdiv(_series(builder, square, upper), _series(builder, square, lower))
    small = _call(builder, "fmuladd", builder.fmul(x, square), ratio, x)
    size = _call(builder, "fabs", x)
    two = ir.Constant(x.type, 2.0)
    exponential = _exp(builder, builder.fadd(size, size))
    large = builder.fsub(one, builder.fdiv(two, builder.fadd(exponential, one)))
    signed = _call(builder, "copysign", large, x)
    is_small = builder.fcmp_ordered("<", size, ir.Constant(x.type, 0.625))
    return builder.select(is_small, small, signed)


exp = _intrinsic(_exp, 1)
tanh = _intrinsic(_tanh, 1)

# ---- random numbers -----------------------------------------------------------------------------


class Emitted:
    """A number in a kernel, with the operators of numpy's arrays: formulas emit instructions.

    A float as the other operand makes an integer a float.
    """

    def __init__(self, builder: Any, value: Any, is_signed: bool = False) -> None:
        self.builder = builder
        self.value = value
        self.is_signed = is_signed

    def view(self, dtype: type) -> Emitted:
        kind = ir.DoubleType() if dtype is np.float64 else ir.IntType(64)
        return Emitted(self.builder, self.builder.bitcast(self.value, kind), dtype is np.int64)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *args: Any) -> Emitted:
        return Emitted(self.builder, _call(self.builder, ufunc.__name__, self.value))

    def _emit(self, of_integers: str, of_floats: str, other: Any) -> Emitted:
        value = self.value
        if isinstance(other, float) and isinstance(value.type, ir.IntType):
            convert = self.builder.sitofp if self.is_signed else self.builder.uitofp
            value = convert(value, ir.DoubleType())
        number = other.value if isinstance(other, Emitted) else ir.Constant(value.type, other)
        name = of_integers if isinstance(value.type, ir.IntType) else of_floats
        result = getattr(self.builder, name)(value, number)
        return Emitted(self.builder, result, self.is_signed)

    def __add__(self, other: Any) -> Emitted:
        return self._emit("add", "fadd", other)

    def __sub__(self, other: Any) -> Emitted:
        return self._emit("sub", "fsub", other)

    def __mul__(self, other: Any) -> Emitted:
        return self._emit("mul", "fmul", other)

    def __truediv__(self, other: Any) -> Emitted:
        return self._emit("", "fdiv", other)

    def __and__(self, other: Any) -> Emitted:
        return self._emit("and_", "", other)

    def __or__(self, other: Any) -> Emitted:
        return self._emit("or_", "", other)

    def __xor__(self, other: Any) -> Emitted:
        return self._emit("xor", "", other)

    __rxor__ = __xor__

    def __rshift__(self, other: int) -> Emitted:
        return self._emit("ashr" if self.is_signed else "lshr", "", other)

    def __lshift__(self, other: int) -> Emitted:
        return self._emit("shl", "", other)


def _random(formula: Callable[..., Any], kind: Any) -> Any:
    """Return a function of a purpose, a seed and index values, given the formula that it emits."""

    def describe(context: Any, purpose: Any, *integers: Any) -> Any:
        def code(target: Any, builder: Any, signature: Any, args: Any) -> Any:
            parts = cgutils.unpack_tuple(builder, args[1])  # type: ignore[no-untyped-call]
            numbers = [Emitted(builder, part) for part in parts]
            value = formula(purpose.literal_value, *numbers).value
            return value if kind == types.float64 else builder.fptrunc(value, ir.FloatType())

        return kind(purpose, _types.UniTuple(types.int64, len(integers))), code

    return intrinsic(prefer_literal=True)(describe)


random_uniform = _random(random_numbers.uniform, types.float64)
random_uniform32 = _random(random_numbers.uniform32, types.float32)
random_normal = _random(random_numbers.normal, types.float64)
