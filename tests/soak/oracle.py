"""What a program means, by numpy on whole arrays, and how far another order may be from that.

Every value comes with a bound on its error, which follows from the number of terms and their
magnitudes, and a mark where nothing can be said: where rounding decides a comparison, where a
number may overflow in one order and not in another, or where inf and nan may be rewritten.
No code of the package is used here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import erf

from .random_numbers import CODES, random_numbers
from .recurrences import in_groups, is_recurrence, with_indices_inside
from .tree import (
    CASTS,
    Aggregation,
    Define,
    Expression,
    Extent,
    Label,
    Number,
    Operation,
    Position,
    Program,
    Read,
    all_labels,
    children,
    tensors_read,
    walk,
)

MOST_POINTS = 2**21  # of one array; a program that needs more is not evaluated

# Macros over labels that are evaluated as they are written.
MACROS = ("mean", "var", "std", "norm", "count", "logsumexp", "softmax", "rmsnorm", "layernorm")

# How far a function of the mathematical library may be from the true value, in units of rounding.
LIBRARY_ROUNDINGS = 8


class Invalid(Exception):
    """The program has no value: an index is out of range, or max has nothing to choose from."""


@dataclass(frozen=True)
class Value:
    """An array, or a Python number, whose dtype adapts to its neighbour.

    error: the largest difference that another order of operations may make.
    size: the magnitude that the value would have if nothing cancelled.
    unsure: where nothing is known.
    """

    value: Any
    error: Any = 0.0
    size: Any = 0.0
    unsure: Any = False


def evaluate(
    program: Program, strict: bool = False, given: Mapping[str, Value] | None = None
) -> dict[str, Value]:
    """Return every tensor that a program defines, with other inputs if they are given.

    With `strict`, inf and nan are those of numpy also in aggregations of products.
    """
    tensors = {item.name: exact(item.values) for item in program.inputs}
    tensors.update(given or {})
    defined = {}
    with np.errstate(all="ignore"):
        for group in in_groups(program.statements):
            if is_recurrence(group):
                found = _by_steps(program.sizes, tensors, group, strict)
            else:
                found = _one_by_one(program.sizes, tensors, group, strict)
            tensors.update(found)
            defined.update(found)
    return defined


def _one_by_one(
    sizes: Mapping[str, int],
    tensors: Mapping[str, Value],
    statements: Sequence[Define],
    strict: bool,
) -> dict[str, Value]:
    known = dict(tensors)
    found = {}
    for statement in statements:
        try:
            value = _Statement(sizes, known, statement, strict).result()
        except (TypeError, OverflowError) as error:
            raise Invalid(str(error)) from None
        if value.value.dtype.name not in CASTS:
            raise Invalid(f"{statement.name} would be {value.value.dtype}")
        known[statement.name] = value
        found[statement.name] = value
    return found


# ---- recurrences --------------------------------------------------------------------------------

_MOST_DTYPES = 8  # that are tried one after another


def _by_steps(
    sizes: Mapping[str, int], tensors: Mapping[str, Value], group: Sequence[Define], strict: bool
) -> dict[str, Value]:
    """Return what statements that read each other's results define.

    All values are computed from those of the pass before: after each pass, those of one more step
    have come to stay.
    """
    statements = []
    for statement in group:
        value = with_indices_inside(statement.value, dict(sizes))
        statements.append(replace(statement, value=value))
    found = _narrowest(sizes, tensors, statements, strict)
    longest = max(sizes[label.size] for statement in group for label in statement.labels)
    for _ in range(2 * longest * len(group)):
        found = _one_by_one(sizes, {**tensors, **found}, statements, strict)
    return found


def _narrowest(
    sizes: Mapping[str, int],
    tensors: Mapping[str, Value],
    statements: Sequence[Define],
    strict: bool,
) -> dict[str, Value]:
    """Return zeros of the narrowest dtypes that the statements give if they read these dtypes."""
    firsts = ["bool", "int64"]
    for statement in statements:
        for name in sorted(tensors_read(statement.value)):
            if name in tensors and _dtype(tensors[name].value).kind in "fc":
                firsts.append(_dtype(tensors[name].value).name)
    candidates = []
    for first in dict.fromkeys(firsts):
        dtypes = {statement.name: first for statement in statements}
        for _ in range(_MOST_DTYPES):
            zeros = {}
            for statement in statements:
                shape = tuple(sizes[label.size] for label in statement.labels)
                zeros[statement.name] = exact(np.zeros(shape, dtypes[statement.name]))
            try:
                found = _one_by_one(sizes, {**tensors, **zeros}, statements, strict)
            except Invalid:
                break
            before, dtypes = dtypes, {name: _dtype(x.value).name for name, x in found.items()}
            if before == dtypes:
                candidates.append(zeros)
                break
    if not candidates:
        raise Invalid("the recurrence has no dtype")
    return min(candidates, key=_widths)


def _widths(tensors: Mapping[str, Value]) -> list[tuple[int, int]]:
    dtypes = [_dtype(tensor.value) for tensor in tensors.values()]
    return [("biufc".index(dtype.kind), dtype.itemsize) for dtype in dtypes]


def disagreement(found: np.ndarray, expected: Value) -> str:
    """Return what is wrong with an array, or an empty text."""
    wanted = expected.value
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        shown = f"{found.dtype}{list(found.shape)}"
        return f"is {shown}; expected {wanted.dtype}{list(wanted.shape)}"
    with np.errstate(all="ignore"):
        same = found == wanted
        if wanted.dtype.kind in "fc":
            same |= (found != found) & (wanted != wanted)
            wide = np.complex128 if wanted.dtype.kind == "c" else np.float64
            difference = np.abs(found.astype(wide) - wanted.astype(wide))
            allowed = 1.5 * expected.error + 4 * float(_smallest(wanted.dtype))
            same |= difference <= allowed
    wrong = ~(same | expected.unsure)
    if not wrong.any():
        return ""
    place = tuple(int(index) for index in np.argwhere(wrong)[0])
    text = f"[{','.join(map(str, place))}] is {found[place]!r}; expected {wanted[place]!r}"
    error = np.broadcast_to(expected.error, wanted.shape)[place]
    if error:
        text += f" ± {error:.1e}"
    return f"{text} ({int(wrong.sum())} of {wrong.size} elements differ)"


def sure_elements(expected: Value) -> tuple[int, int]:
    """Return how many elements can be compared, and how many there are."""
    unsure = np.broadcast_to(expected.unsure, expected.value.shape)
    return int(unsure.size - unsure.sum()), unsure.size


# ---- numbers ------------------------------------------------------------------------------------


def exact(array: Any) -> Value:
    return Value(array, 0.0, _magnitude(array), False)


def _is_weak(value: Any) -> bool:
    return type(value) in (bool, int, float, complex)


def _magnitude(value: Any) -> Any:
    kind = np.asarray(value).dtype.kind
    return np.abs(np.asarray(value).astype(np.complex128 if kind == "c" else np.float64))


def _dtype(value: Any) -> np.dtype:
    return np.asarray(value).dtype


def _widened(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which integers and bools are added up."""
    return np.dtype(np.uint64 if dtype.kind == "u" else np.int64)


def _rounding(dtype: np.dtype) -> float:
    """Return the error of one operation, relative to its result."""
    factor = 4.0 if dtype.kind == "c" else 1.0
    return factor * float(np.finfo(dtype).eps)


def _smallest(dtype: np.dtype) -> float:
    return float(np.finfo(dtype).smallest_subnormal)


def _largest(dtype: np.dtype) -> float:
    return float(np.finfo(dtype).max)


def _any_unsure(values: Sequence[Value]) -> Any:
    unsure: Any = False
    for value in values:
        unsure = unsure | value.unsure
    return unsure


def _any_error(values: Sequence[Value]) -> Any:
    has_error: Any = False
    for value in values:
        has_error = has_error | (np.asarray(value.error) > 0)
    return has_error


def _rounded(
    value: Any,
    error: Any,
    size: Any,
    arguments: Sequence[Value],
    roundings: float = 1.0,
    absorbs: bool = False,
) -> Value:
    """Return the result of a floating-point operation with the error of its own rounding.

    `absorbs`: an infinite argument makes the result infinite, whatever the other one is.
    """
    unsure = _any_unsure(arguments)
    dtype = _dtype(value)
    if dtype.kind not in "fc":
        return Value(value, 0.0, _magnitude(value), unsure)
    finite = np.isfinite(value)
    rounding = _rounding(dtype)
    total = error + roundings * (rounding * size + _smallest(dtype))
    doubtful = _any_error(arguments)
    near_overflow = finite & doubtful & (np.asarray(size) > _largest(dtype) / 8)
    lost = finite & ~np.isfinite(total)
    overflowed = ~finite & doubtful
    if absorbs:
        odd_argument: Any = False
        for argument in arguments:
            odd_argument = odd_argument | ~np.isfinite(argument.value)
        overflowed = overflowed & ~odd_argument
    if dtype.kind == "c":
        overflowed = ~finite
    unsure = unsure | near_overflow | lost | overflowed
    usable = finite & np.isfinite(total)
    return Value(value, np.where(usable, total, 0.0), np.where(finite, size, 0.0), unsure)


# ---- operations ---------------------------------------------------------------------------------


def _call(function: Callable[..., Any], arguments: Sequence[Value]) -> Any:
    """Return numpy's result; of constants alone a constant."""
    result = function(*(argument.value for argument in arguments))
    if all(_is_weak(argument.value) for argument in arguments):
        return np.asarray(result).item()
    return result


def _add(name: str, x: Value, y: Value) -> Value:
    function = np.add if name == "+" else np.subtract
    value = _call(function, (x, y))
    return _rounded(value, x.error + y.error, x.size + y.size, (x, y), absorbs=True)


def _multiply(x: Value, y: Value) -> Value:
    value = _call(np.multiply, (x, y))
    x_size = _magnitude(x.value)
    y_size = _magnitude(y.value)
    error = _times(x_size, y.error) + _times(y_size, x.error) + _times(x.error, y.error)
    return _rounded(value, error, _times(x.size, y.size), (x, y))


def _times(magnitude: Any, error: Any) -> Any:
    """Return a product in which no error stays none, also beside an infinite magnitude."""
    return np.where((np.asarray(error) == 0) | (np.asarray(magnitude) == 0), 0.0, magnitude * error)


def _divide(x: Value, y: Value) -> Value:
    value = _call(np.true_divide, (x, y))
    y_size = _magnitude(y.value)
    room = y_size - y.error
    slope = np.where(room > 0, 1.0 / room, np.inf)
    error = _times(slope, x.error + _times(_magnitude(value), y.error))
    size = np.maximum(_magnitude(value), _times(slope, x.size))
    return _rounded(value, error, size, (x, y), roundings=2)


def _remainder(x: Value, y: Value) -> Value:
    value = _call(np.remainder, (x, y))
    size = np.maximum(_magnitude(x.value), _magnitude(y.value))
    result = _rounded(value, 0.0, np.where(np.isfinite(size), size, 0.0), (x, y))
    unsure = result.unsure | _any_error((x, y))
    return Value(value, result.error, _magnitude(value), unsure)


def _floor_divide(x: Value, y: Value) -> Value:
    """Every step of it is rounded alike everywhere, so exact arguments give exact quotients."""
    value = _call(np.floor_divide, (x, y))
    return Value(value, 0.0, _magnitude(value), _any_unsure((x, y)) | _any_error((x, y)))


def _round(name: str, x: Value) -> Value:
    functions: dict[str, Any] = {"floor": np.floor, "ceil": np.ceil, "round": np.rint}
    if _dtype(x.value).kind in "biu":
        return x
    value = _call(functions[name], (x,))
    shift = 0.5 if name == "round" else 0.0
    step = np.asarray(x.value) - shift
    has_error = np.asarray(x.error) > 0
    near = has_error & (_magnitude(step - np.rint(step)) <= x.error)
    if _dtype(x.value).kind == "c":
        near = has_error
    return Value(value, 0.0, _magnitude(value), x.unsure | near)


def _arctan2(y: Value, x: Value) -> Value:
    value = _call(np.arctan2, (y, x))
    error = np.asarray(x.error) + y.error
    radius = np.hypot(_magnitude(x.value), _magnitude(y.value))
    room = np.where(radius > 2 * error, radius - error, np.inf)
    own = _rounded(value, error / room, 4.0, (y, x), roundings=LIBRARY_ROUNDINGS)
    # Near the origin and on the negative axis, rounding decides.
    jumps = (np.asarray(x.value) <= x.error) & (_magnitude(y.value) <= y.error)
    doubtful = (error > 0) & ((radius <= 2 * error) | jumps)
    return Value(value, own.error, own.size, own.unsure | doubtful)


def _power(x: Value, y: Value) -> Value:
    value = _call(np.power, (x, y))
    if _dtype(value).kind not in "fc":
        return Value(value, 0.0, _magnitude(value), _any_unsure((x, y)))
    exponent = _magnitude(y.value)
    reach = _magnitude(x.value) + x.error
    low = np.maximum(_magnitude(x.value) - x.error, 0.0)
    steepest = np.maximum(reach ** (np.real(y.value) - 1.0), low ** (np.real(y.value) - 1.0))
    error = _times(exponent * steepest, x.error)
    size = np.maximum(_magnitude(value), x.size ** np.maximum(np.real(y.value), 0.0))
    with_logarithm = 1.0 + exponent * np.abs(np.log(np.maximum(_magnitude(x.value), 1e-300)))
    roundings = LIBRARY_ROUNDINGS * (
        1.0 + exponent + np.where(np.isfinite(with_logarithm), with_logarithm, 0.0)
    )
    result = _rounded(value, error, size, (x, y), roundings=1.0)
    own = roundings * _rounding(_dtype(value)) * np.where(np.isfinite(size), size, 0.0)
    unsure = result.unsure | (np.asarray(y.error) > 0)
    return Value(value, np.where(np.isfinite(value), result.error + own, 0.0), result.size, unsure)


def _compare(name: str, x: Value, y: Value) -> Value:
    functions = {
        "<": np.less,
        "<=": np.less_equal,
        ">": np.greater,
        ">=": np.greater_equal,
        "==": np.equal,
        "!=": np.not_equal,
    }
    value = _call(functions[name], (x, y))
    error = x.error + y.error
    both = (np.asarray(x.value).astype(np.complex128), np.asarray(y.value).astype(np.complex128))
    gap = np.abs(both[0] - both[1])
    close = (np.asarray(error) > 0) & (gap <= error)
    return Value(value, 0.0, 1.0, _any_unsure((x, y)) | close)


def _where(condition: Value, x: Value, y: Value) -> Value:
    if all(_is_weak(item.value) for item in (condition, x, y)):
        return x if condition.value else y  # what is made of numbers alone is a number
    dtype = _check_numbers_fit((x, y))
    chosen = np.asarray(condition.value).astype(bool)
    value = np.where(chosen, np.asarray(x.value).astype(dtype), np.asarray(y.value).astype(dtype))
    close = (np.asarray(condition.error) > 0) & (_magnitude(condition.value) <= condition.error)
    unsure = condition.unsure | close | np.where(chosen, x.unsure, y.unsure)
    error = np.where(chosen, x.error, y.error)
    size = np.where(chosen, x.size, y.size)
    if dtype.kind in "fc":  # a number that was rounded when it was converted
        error = error + np.where(error > 0, _rounding(dtype) * size, 0.0)
    return Value(value, error, size, unsure)


def _check_numbers_fit(items: Sequence[Value]) -> np.dtype[Any]:
    """Return the dtype of a result; OverflowError if an integer of the program does not fit it."""
    dtype = np.result_type(*(_for_result_type(item.value) for item in items))
    if dtype.kind in "iu":
        for item in items:
            if type(item.value) is int:
                np.dtype(dtype).type(item.value)
    return dtype


def _for_result_type(value: Any) -> Any:
    return value if _is_weak(value) else np.asarray(value).dtype


def _cast(name: str, x: Value) -> Value:
    source = _dtype(x.value)
    target = np.dtype(name)
    value = np.asarray(x.value).astype(target)
    if target.kind in "iu" and source.kind == "f":
        limits = np.iinfo(target)
        numbers = np.asarray(x.value).astype(np.float64)
        inside = (numbers >= limits.min / 2) & (numbers < limits.max / 2)
        nearest = np.abs(x.value - np.round(x.value)) <= x.error
        near = (np.asarray(x.error) > 0) & nearest
        return Value(value, 0.0, _magnitude(value), x.unsure | ~inside | near)
    if target.kind == "b":
        near = (np.asarray(x.error) > 0) & (_magnitude(x.value) <= x.error)
        return Value(value, 0.0, 1.0, x.unsure | near)
    if target.kind in "iu":
        return Value(value, 0.0, _magnitude(value), x.unsure)
    # The conversion itself is deterministic: it adds an error only where there was one.
    rounding = np.where(np.asarray(x.error) > 0, _rounding(target) * x.size, 0.0)
    doubtful = (np.asarray(x.error) > 0) & (np.asarray(x.size) > _largest(target) / 8)
    finite = np.isfinite(value)
    error = np.where(finite, x.error + rounding, 0.0)
    return Value(value, error, np.where(finite, x.size, 0.0), x.unsure | doubtful)


def _bitwise(name: str, arguments: Sequence[Value]) -> Value:
    functions = {"&": np.bitwise_and, "|": np.bitwise_or, "^": np.bitwise_xor, "~": np.invert}
    functions |= {"<<": np.left_shift, ">>": np.right_shift}
    value = _call(functions[name], arguments)
    return Value(value, 0.0, _magnitude(value), _any_unsure(arguments))


def _extreme_of_two(name: str, x: Value, y: Value) -> Value:
    value = _call(np.maximum if name == "maximum" else np.minimum, (x, y))
    error = np.maximum(x.error, y.error)
    size = np.maximum(x.size, y.size)
    if _dtype(value).kind in "fc":
        error = np.where(np.isfinite(value), error, 0.0)
    return Value(value, error, size, _any_unsure((x, y)))


def _sign(x: Value) -> Value:
    value = _call(np.sign, (x,))
    near = (np.asarray(x.error) > 0) & (_magnitude(x.value) <= x.error)
    return Value(value, 0.0, 1.0, x.unsure | near)


def _part(name: str, x: Value) -> Value:
    functions: dict[str, Any] = {
        "neg": np.negative,
        "abs": np.absolute,
        "conj": np.conjugate,
        "real": lambda array: np.real(np.asarray(array)),
        "imag": lambda array: np.imag(np.asarray(array)),
    }
    value = _call(functions[name], (x,))
    error = x.error
    if name == "abs" and _dtype(x.value).kind == "c":
        return _rounded(value, error, _magnitude(value), (x,), roundings=4)
    return Value(value, error, x.size, x.unsure)


def _smooth(name: str, x: Value) -> Value:
    """Functions of the mathematical library, whose slopes are known."""
    functions: dict[str, Any] = {
        "exp": np.exp,
        "log": np.log,
        "log1p": np.log1p,
        "expm1": np.expm1,
        "sqrt": np.sqrt,
        "tanh": np.tanh,
        "sin": np.sin,
        "cos": np.cos,
        "erf": erf,
        "log2": np.log2,
        "log10": np.log10,
        "sinh": np.sinh,
        "cosh": np.cosh,
        "tan": np.tan,
        "sigmoid": _sigmoid,
    }
    value = _call(functions[name], (x,))
    size = _magnitude(value)
    error = np.asarray(x.error)
    distance = _magnitude(x.value)
    if name == "exp":
        error = _times(size, np.expm1(np.minimum(error, 700.0)))
    elif name == "expm1":
        error = _times(size + 1.0, np.expm1(np.minimum(error, 700.0)))
    elif name in ("sinh", "cosh"):
        error = _times(np.cosh(np.minimum(distance + error, 700.0)), error)
    elif name == "tan":
        error = _times(
            2.0 * (1.0 + size * size), np.where(error * (1.0 + size) < 0.1, error, np.inf)
        )
    elif name in ("log", "log1p", "sqrt", "log2", "log10"):
        if name == "log1p":
            distance = _magnitude(np.asarray(x.value) + np.float64(1.0))
        room = np.where(distance > error, distance - error, 0.0)
        slope = 1.5 / (np.sqrt(room) if name == "sqrt" else room)
        error = _times(slope, error)
    elif name == "erf":
        error = 2.0 * error
    if name in ("log", "log1p", "log2", "log10", "sin", "cos"):
        size = size + 1.0
    finite_size = np.where(np.isfinite(value), size, 0.0)
    return _rounded(value, error, finite_size, (x,), roundings=LIBRARY_ROUNDINGS)


def _sigmoid(values: Any) -> Any:
    """Return the logistic function, rounded once."""
    dtype = np.exp.resolve_dtypes((_dtype(values), None))[-1]
    exact = 1 / (1 + np.exp(-np.asarray(values).astype(np.longdouble)))
    return exact.astype(dtype)


def _numbers_beside_halves(name: str, arguments: Sequence[Value]) -> Sequence[Value]:
    """Return the arguments; numbers that half precision rounds have an error.

    numpy rounds them before it computes. A statement is computed in float32, where they are not.
    """
    operands = arguments[1:] if name == "where" else arguments
    arrays = [item for item in operands if not _is_weak(item.value)]
    if not arrays or any(_dtype(item.value) != np.float16 for item in arrays):
        return arguments
    changed = []
    for item in arguments:
        if type(item.value) is float and math.isfinite(item.value):
            item = replace(item, error=abs(item.value - float(np.float16(item.value))))
        changed.append(item)
    return changed


def _widened_bfloat16(arguments: Sequence[Value]) -> Sequence[Value]:
    """Return arguments without bfloat16, of which numpy knows no arithmetic.

    bfloat16 follows the rules of float16. Beside what makes float32 or more of float16, float32
    gives the same dtype as bfloat16 does; else the result would be bfloat16.
    """
    if not any(_dtype(item.value).name == "bfloat16" for item in arguments):
        return arguments
    widened = []
    for item in arguments:
        if _dtype(item.value).name == "bfloat16":
            item = replace(item, value=np.asarray(item.value).astype(np.float32))
        widened.append(item)
    others = [item.value for item in arguments if _dtype(item.value).name != "bfloat16"]
    if not others or np.result_type(np.float16, *map(_for_result_type, others)) == np.float16:
        raise Invalid("it is computed in bfloat16")
    return widened


def apply(name: str, arguments: Sequence[Value]) -> Value:
    """Return the result of an operation, a function, a cast or a macro without labels."""
    arguments = _numbers_beside_halves(name, arguments)
    if name not in CASTS:
        arguments = _widened_bfloat16(arguments)
    if name in ("+", "-"):
        return _add(name, *arguments)
    if name == "*":
        return _multiply(*arguments)
    if name == "/":
        return _divide(*arguments)
    if name == "%":
        return _remainder(*arguments)
    if name == "//":
        return _floor_divide(*arguments)
    if name in ("floor", "ceil", "round"):
        return _round(name, *arguments)
    if name in ("isnan", "isfinite"):
        value = _call(np.isnan if name == "isnan" else np.isfinite, arguments)
        return Value(value, 0.0, 1.0, _any_unsure(arguments))
    if name == "clip":
        _check_numbers_fit(arguments)
        x, low, high = arguments
        return _extreme_of_two("minimum", _extreme_of_two("maximum", x, low), high)
    if name == "arctan2":
        return _arctan2(*arguments)
    if name in CODES:
        value = random_numbers(name, *(item.value for item in arguments))
        # Rounding decides nothing of the others: they are exact.
        error = 1e-14 * np.abs(value) if name == "normal" else 0.0
        return Value(value, error, _magnitude(value), _any_unsure(arguments))
    if name == "**":
        return _power(*arguments)
    if name in ("<", "<=", ">", ">=", "==", "!="):
        return _compare(name, *arguments)
    if name in ("&", "|", "^", "~", "<<", ">>"):
        return _bitwise(name, arguments)
    if name == "where":
        return _where(*arguments)
    if name in ("maximum", "minimum"):
        return _extreme_of_two(name, *arguments)
    if name == "sign":
        return _sign(*arguments)
    if name in ("neg", "abs", "conj", "real", "imag"):
        return _part(name, *arguments)
    if name in CASTS:
        return _cast(name, *arguments)
    (x,) = arguments
    one = _exact_number(1)
    if name == "relu":
        return _extreme_of_two("maximum", x, _exact_number(0))
    if name == "rsqrt":
        return _divide(one, _smooth("sqrt", x))
    if name == "silu":
        x = _as_float(x)
        return _divide(x, _add("+", one, _smooth("exp", _part("neg", x))))
    return _smooth(name, x)


def _as_float(x: Value) -> Value:
    """Return integers and bools in float64, in which macros compute."""
    if _is_weak(x.value) or _dtype(x.value).kind not in "iub":
        return x
    return _cast("float64", x)


def _exact_number(value: Any) -> Value:
    return Value(value, 0.0, abs(value), False)


# ---- statements ---------------------------------------------------------------------------------


class _Statement:
    """Evaluates one statement. Every label has an axis of its own in all arrays."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        tensors: Mapping[str, Value],
        statement: Define,
        strict: bool,
    ) -> None:
        self.sizes = sizes
        self.tensors = tensors
        self.statement = statement
        self.strict = strict
        self.axes = {label: axis for axis, label in enumerate(all_labels(statement))}
        self.values: dict[int, Value] = {}  # by the identity of a node of the tree

    def result(self) -> Value:
        found = self.value(self.statement.value)
        shape = tuple(self.sizes[label.size] for label in self.statement.labels)
        value = self._without_inner_axes(found.value, shape)
        error = self._without_inner_axes(found.error, shape)
        unsure = self._without_inner_axes(found.unsure, shape)
        if value.dtype.kind in "fc":
            return Value(value, error, _magnitude(value), unsure)
        return Value(value, 0.0, _magnitude(value), unsure)

    def _without_inner_axes(self, array: Any, shape: tuple[int, ...]) -> np.ndarray:
        array = np.asarray(array)
        if array.ndim:
            array = array.reshape(array.shape[: len(shape)])
        return np.broadcast_to(array, shape)

    def value(self, node: Expression) -> Value:
        found = self._value(node)
        self.values[id(node)] = found
        return found

    def _value(self, node: Expression) -> Value:
        if isinstance(node, Number):
            return _exact_number(node.value)
        if isinstance(node, Extent):
            return _exact_number(self.sizes[node.size] + node.plus)
        if isinstance(node, Position):
            return exact(self._positions(node.label))
        if isinstance(node, Read):
            return self._read(node)
        if isinstance(node, Operation):
            return apply(node.name, [self.value(argument) for argument in node.arguments])
        return self._aggregate(node)

    def _positions(self, label: Label) -> np.ndarray:
        shape = [1] * len(self.axes)
        shape[self.axes[label]] = self.sizes[label.size]
        return np.arange(self.sizes[label.size], dtype=np.int64).reshape(shape)

    def _read(self, node: Read) -> Value:
        tensor = self.tensors[node.tensor]
        places = []
        unsure: Any = False
        for entry, extent in zip(node.index, tensor.value.shape, strict=True):
            if isinstance(entry, Label):
                place = self._positions(entry)
            else:
                index = self.value(entry)
                place = np.asarray(index.value)
                unsure = unsure | index.unsure
            if place.size and (place.min() < 0 or place.max() >= extent):
                if not np.any(unsure):
                    raise Invalid(f"an index of {node.tensor} is out of range")
                raise Invalid(f"an index of {node.tensor} is not certain")
            places.append(place)
        if math.prod(np.broadcast_shapes(*(place.shape for place in places))) > MOST_POINTS:
            raise Invalid("the program is too large")
        index = tuple(places)
        shape = (1,) * len(self.axes) if not places else None

        def taken(array: Any) -> Any:
            whole = np.broadcast_to(array, tensor.value.shape)
            return whole.reshape(shape) if shape is not None else whole[index]

        return Value(
            taken(tensor.value),
            taken(tensor.error),
            taken(tensor.size),
            taken(tensor.unsure) | unsure,
        )

    # ---- aggregations ---------------------------------------------------------------------------

    def _aggregate(self, node: Aggregation) -> Value:
        body = self.value(node.body)
        count = math.prod(self.sizes[label.size] for label in node.labels)
        if node.name in ("argmin", "argmax"):
            return self._first_extreme(node, body)
        if node.name in ("cumsum", "cummax", "cummin"):
            return self._scan(node, body)
        if node.name in MACROS:
            return self._macro(node, body, count)
        return self._reduce(node, node.name, body)

    def _macro(self, node: Aggregation, x: Value, count: int) -> Value:
        number = _exact_number(count)
        if count == 0:
            raise Invalid(f"{node.name} of nothing")
        if node.name != "count":
            x = _as_float(x)

        def total(of: Value) -> Value:
            return self._reduce(node, "sum", of)

        if node.name == "mean":
            return _divide(total(x), number)
        if node.name in ("var", "std"):
            distance = _part("abs", _add("-", x, _divide(total(x), number)))
            variance = _divide(total(_multiply(distance, distance)), number)
            return variance if node.name == "var" else _smooth("sqrt", variance)
        if node.name == "norm":
            magnitude = _part("abs", x)
            return _smooth("sqrt", total(_multiply(magnitude, magnitude)))
        if node.name == "count":
            return total(_compare("!=", x, _exact_number(0)))
        if node.name == "softmax":
            powers = _smooth("exp", _add("-", x, self._reduce(node, "max", x)))
            return _multiply(powers, _divide(_exact_number(1), total(powers)))
        if node.name == "logsumexp":
            largest = self._reduce(node, "max", x)
            infinite = _compare("==", _part("abs", largest), _exact_number(math.inf))
            centre = _where(infinite, _exact_number(0), largest)
            inner = total(_smooth("exp", _add("-", x, centre)))
            return _add("+", centre, _smooth("log", inner))
        if node.name == "rmsnorm":
            mean = _divide(total(_multiply(x, x)), number)
            return _multiply(x, apply("rsqrt", [_add("+", mean, _exact_number(1e-6))]))
        distance = _add("-", x, _divide(total(x), number))
        mean = _divide(total(_multiply(distance, distance)), number)
        return _multiply(distance, apply("rsqrt", [_add("+", mean, _exact_number(1e-5))]))

    def _first_extreme(self, node: Aggregation, body: Value) -> Value:
        """Return the number of the first extreme value, counted in the order of the labels."""
        if math.prod(self.sizes[label.size] for label in node.labels) == 0:
            raise Invalid(f"{node.name} of nothing")
        terms = self._terms(node, body)
        axes = [self.axes[label] for label in node.labels]
        last = list(range(-len(axes), 0))

        def lines(array: Any) -> np.ndarray:
            moved = np.moveaxis(array, axes, last)
            outer = moved.shape[: -len(axes)]
            return moved.reshape(*outer, math.prod(moved.shape[-len(axes) :]))

        values = lines(terms.value)
        errors = lines(terms.error)
        chosen = np.argmin(values, axis=-1) if node.name == "argmin" else np.argmax(values, axis=-1)
        place = chosen[..., None]
        best = np.take_along_axis(values, place, -1).astype(np.float64)
        reach = errors + np.take_along_axis(errors, place, -1)
        close = (np.abs(values.astype(np.float64) - best) <= reach) & (reach > 0)
        np.put_along_axis(close, place, False, -1)
        unsure = np.any(close | lines(terms.unsure), axis=-1)
        shape = [1 if axis in axes else size for axis, size in enumerate(terms.value.shape)]
        value = chosen.astype(np.int64).reshape(shape)
        return Value(value, 0.0, _magnitude(value), unsure.reshape(shape))

    def _scan(self, node: Aggregation, body: Value) -> Value:
        terms = self._terms(node, body)
        axis = self.axes[node.labels[0]]
        unsure = np.logical_or.accumulate(terms.unsure, axis=axis)
        if node.name != "cumsum":
            function = np.maximum if node.name == "cummax" else np.minimum
            value = function.accumulate(terms.value, axis=axis)
            error = np.maximum.accumulate(terms.error, axis=axis)
            size = np.maximum.accumulate(terms.size, axis=axis)
            if value.dtype.kind == "f":
                error = np.where(np.isfinite(value), error, 0.0)
            return Value(value, error, size, unsure)
        dtype = terms.value.dtype
        if dtype.kind in "biu":
            value = np.cumsum(terms.value, axis=axis, dtype=_widened(dtype))
            return Value(value, 0.0, _magnitude(value), unsure)
        wide = np.complex128 if dtype.kind == "c" else np.float64
        value = np.cumsum(terms.value.astype(wide), axis=axis).astype(dtype)
        size = np.cumsum(terms.size, axis=axis)
        count = terms.value.shape[axis]
        own = (count + 1) * (_rounding(dtype) * size + _smallest(dtype))
        error = np.cumsum(terms.error, axis=axis) + own
        finite = np.isfinite(value)
        odd_terms = np.logical_or.accumulate(~np.isfinite(terms.value), axis=axis)
        unsure = unsure | (~odd_terms & (size > _largest(dtype) / 8))
        if dtype.kind == "c":
            unsure = unsure | ~finite
        return Value(value, np.where(finite, error, 0.0), np.where(finite, size, 0.0), unsure)

    def _terms(self, node: Aggregation, body: Value) -> Value:
        """Return the values that are aggregated, one for each combination of labels."""
        shape = [1] * len(self.axes)
        for label in node.labels:
            shape[self.axes[label]] = self.sizes[label.size]
        value = np.asarray(body.value)
        if value.ndim == 0:
            value = value.reshape((1,) * len(self.axes))
        full = np.broadcast_shapes(value.shape, tuple(shape))
        if math.prod(full) > MOST_POINTS:
            raise Invalid("the program is too large")
        return Value(
            np.broadcast_to(value, full),
            np.broadcast_to(body.error, full),
            np.broadcast_to(body.size, full),
            np.broadcast_to(body.unsure, full),
        )

    def _reduce(self, node: Aggregation, name: str, body: Value) -> Value:
        axes = tuple(self.axes[label] for label in node.labels)
        terms = self._terms(node, body)
        unsure = np.any(terms.unsure, axis=axes, keepdims=True)
        if name in ("sum", "prod"):
            result = _sum(terms, axes) if name == "sum" else _prod(terms, axes)
        elif name in ("max", "min"):
            result = _extreme(name, terms, axes)
        else:
            result = _truth(name, terms, axes)
        return Value(
            result.value,
            result.error,
            result.size,
            unsure | result.unsure | self._may_be_rewritten(node, name, terms, axes, body),
        )

    def _may_be_rewritten(
        self, node: Aggregation, name: str, terms: Value, axes: tuple[int, ...], body: Value
    ) -> Any:
        """Return where a rewritten aggregation may give another inf or nan, or may overflow.

        A sum of products becomes products of sums, and a maximum of sums a sum of maxima, also
        where a macro such as mean contains it.
        """
        if terms.value.dtype.kind not in "fc" or name not in ("sum", "max", "min"):
            return False
        operations = [part.name for part in walk(node.body) if isinstance(part, Operation)]
        if not operations:
            return False
        if name == "sum" and self._spread(node) > math.log2(_largest(terms.value.dtype)) - 3:
            return True
        if self.strict:
            return False
        if self._has_odd_operands(node.body):
            return True
        return np.any(~np.isfinite(terms.value), axis=axes, keepdims=True)

    def _has_odd_operands(self, node: Expression) -> bool:
        for part in walk(node):
            value = self.values[id(part)].value
            if _dtype(value).kind in "fc" and not np.isfinite(value).all():
                return True
        return False

    def _spread(self, node: Aggregation) -> float:
        """Return a bound on the exponent, base 2, of any product that a rewrite may form."""
        extents = [self.sizes[label.size] for label in node.labels]
        total = math.log2(max(1, math.prod(extents)))
        pending = [node.body]
        while pending:
            part = pending.pop()
            value = self.values[id(part)].value
            if isinstance(part, Operation):
                pending.extend(children(part))
                repeated = part.name == "**"
                if not repeated:
                    continue
            magnitude = _magnitude(value)
            magnitude = magnitude[np.isfinite(magnitude) & (magnitude > 0)]
            if magnitude.size:
                exponents = np.abs(np.log2([magnitude.min(), magnitude.max()]))
                total += float(exponents.max())
        return total


def _sum(terms: Value, axes: tuple[int, ...]) -> Value:
    dtype = terms.value.dtype
    count = math.prod(terms.value.shape[axis] for axis in axes)
    if dtype.kind in "biu":
        value = np.sum(terms.value, axis=axes, keepdims=True, dtype=_widened(dtype))
        return Value(value, 0.0, _magnitude(value), False)
    wide = np.complex128 if dtype.kind == "c" else np.float64
    value = np.sum(terms.value.astype(wide), axis=axes, keepdims=True).astype(dtype)
    size = np.sum(terms.size, axis=axes, keepdims=True)
    error = np.sum(terms.error, axis=axes, keepdims=True)
    own = (count + 1) * (_rounding(dtype) * size + _smallest(dtype))
    odd_terms = np.any(~np.isfinite(terms.value), axis=axes, keepdims=True)
    finite = np.isfinite(value)
    unsure = ~odd_terms & (size > _largest(dtype) / 8)
    if dtype.kind == "c":
        unsure = unsure | ~finite
    return Value(value, np.where(finite, error + own, 0.0), np.where(finite, size, 0.0), unsure)


def _prod(terms: Value, axes: tuple[int, ...]) -> Value:
    dtype = terms.value.dtype
    count = math.prod(terms.value.shape[axis] for axis in axes)
    if dtype.kind in "biu":
        value = np.prod(terms.value, axis=axes, keepdims=True, dtype=_widened(dtype))
        return Value(value, 0.0, _magnitude(value), False)
    wide = np.complex128 if dtype.kind == "c" else np.float64
    value = np.prod(terms.value.astype(wide), axis=axes, keepdims=True).astype(dtype)
    magnitude = _magnitude(terms.value)
    reach = magnitude + terms.error
    ordinary = np.isfinite(magnitude) & (magnitude > 0)
    above = np.where(ordinary, np.maximum(np.maximum(reach, terms.size), 1.0), 1.0)
    below = np.where(ordinary, np.minimum(magnitude, 1.0), 1.0)
    most = np.prod(above, axis=axes, keepdims=True)
    least = np.prod(below, axis=axes, keepdims=True)
    unsure = (most > _largest(dtype) / 8) | (least < float(np.finfo(dtype).tiny) * 8)
    size = np.prod(np.maximum(terms.size, magnitude), axis=axes, keepdims=True)
    error = np.prod(reach, axis=axes, keepdims=True) - np.prod(magnitude, axis=axes, keepdims=True)
    own = (count + 1) * (_rounding(dtype) * size + _smallest(dtype))
    finite = np.isfinite(value)
    doubtful = np.any(terms.error > 0, axis=axes, keepdims=True)
    unsure = unsure | (~finite & doubtful) | (finite & ~np.isfinite(error + own))
    if dtype.kind == "c":
        unsure = unsure | ~finite
    error = np.where(finite, np.maximum(error, 0.0) * 1.01 + own, 0.0)
    return Value(value, error, np.where(finite, size, 0.0), unsure)


def _extreme(name: str, terms: Value, axes: tuple[int, ...]) -> Value:
    if math.prod(terms.value.shape[axis] for axis in axes) == 0:
        raise Invalid(f"{name} of nothing")
    function = np.max if name == "max" else np.min
    value = function(terms.value, axis=axes, keepdims=True)
    error = np.max(terms.error, axis=axes, keepdims=True)
    size = np.max(terms.size, axis=axes, keepdims=True)
    if terms.value.dtype.kind == "f":
        error = np.where(np.isfinite(value), error, 0.0)
    return Value(value, error, size, False)


def _truth(name: str, terms: Value, axes: tuple[int, ...]) -> Value:
    truths = terms.value.astype(bool)
    function = np.any if name == "any" else np.all
    near = (terms.error > 0) & (_magnitude(terms.value) <= terms.error)
    unsure = np.any(near, axis=axes, keepdims=True)
    return Value(function(truths, axis=axes, keepdims=True), 0.0, 1.0, unsure)
