"""Steps that call functions of numpy which are written with others (einmpi/arrays/composed.py)."""

from __future__ import annotations

import math
from typing import Any

from .arrays_case import Step
from .arrays_operands import product_slack, spread
from .arrays_steps import StepMaker

NUMBERS = "iuf"
# What stays as it is, and what is not in place: an expression for each, of a matrix `m` or more
# dimensions, a vector `v`, another one `w` of the same length, an axis `x` and a small integer `k`.
_PLAIN = {
    "compress": "np.compress({mask}, {v})",
    "delete": "np.delete({m}, {key}, axis=0)",
    "diag": "np.diag({v}, {k})",
    "diagflat": "np.diagflat({v}[:4], {k})",
    "ediff1d": "np.ediff1d({v})",
    "extract": "np.extract({v} != 0, {v})",
    "fix": "np.fix({v})",
    "flatnonzero": "np.flatnonzero({m})",
    "fliplr": "np.fliplr({m}).copy()",
    "flipud": "np.flipud({m}).copy()",
    "insert": "np.insert({m}, {key}, {v}[:1], axis=0)",
    "intersect1d": "np.intersect1d({v}, {w})",
    "isneginf": "np.isneginf({n})",
    "isposinf": "np.isposinf({n})",
    "isreal": "np.isreal({m})",
    "lexsort": "np.lexsort(({n}, {n} != 0))",
    "argpartition": "np.take_along_axis({n}, np.argpartition({n}, 0, axis=-1), -1)[..., :1]",
    "partition": "np.partition({n}, 0, axis=-1)[..., :1]",
    "piecewise": "np.piecewise({n}, [{n} < 0, {n} > 2], [0, lambda x: x, 1])",
    "resize": "np.resize({m}, (3, 5))",
    "rollaxis": "np.rollaxis({m}, 1).copy()",
    "select": "np.select([{n} < 0, {n} > 2], [{n}, {n} + 1], 3)",
    "setdiff1d": "np.setdiff1d({v}, {w})",
    "setxor1d": "np.setxor1d({v}, {w})",
    "lib.stride_tricks.sliding_window_view": (
        "np.lib.stride_tricks.sliding_window_view({v}, {size}).copy()"
    ),
    "union1d": "np.union1d({v}, {w})",
    "unravel_index": "np.unravel_index(np.argsort({v}, kind='stable'), (5, 100))[1]",
}
# What rounds, or sums in another order: a multiple of the slack of a sum of products.
_ROUNDED = {
    "convolve": "np.convolve({v}, {w}, {mode!r})",
    "correlate": "np.correlate({v}, {w}, {mode!r})",
    "cross": "np.cross({three}, {three})",
    "linalg.cross": "np.linalg.cross({three}, {three})",
    "gradient": "np.gradient({n}, axis=0)",
    "kron": "np.kron({v}, {m})",
    "sinc": "np.sinc({small})",
    "trapezoid": "np.trapezoid({n}, axis={x})",
    "interp": "np.interp({small}, [0.0, 1.0, 2.5], [3.0, -1.0, 2.0])",
    "histogram2d": "np.histogram2d({small}, {small}, bins=[[-2, 0, 1], [0, 1, 3]])[0]",
}
# What changes an array: the array, and afterwards.
_IN_PLACE = {
    "copyto": "np.copyto({m}, {k}, where={m} != 0)",
    "fill_diagonal": "np.fill_diagonal({m}, {k})",
    "put": "np.put({m}, [0], [1])",
    "put_along_axis": "np.put_along_axis({m}, np.argsort({m}, axis=0)[:1], 1, axis=0)",
}
_OF_NANS = {
    "nanargmax": "np.nanargmax({f}, axis={x})",
    "nanargmin": "np.nanargmin({f}, axis={x})",
    "nancumsum": "np.nancumsum({f}, axis={x})",
    "nancumprod": "np.nancumprod({f}, axis={x})",
    "nanmedian": "np.nanmedian({f}, axis={x})",
    "nanpercentile": "np.nanpercentile({f}, 50, axis={x})",
    "nanquantile": "np.nanquantile({f}, [0.0, 1.0], axis={x})",
}
_OF_MATRICES = {
    "linalg.cond": "np.linalg.cond({square})",
    "linalg.eig": "np.linalg.eig({square})[0]",
    "linalg.eigvals": "np.linalg.eigvals({square})",
    "linalg.lstsq": "np.linalg.lstsq({square}, {square}[0])[0]",
    "linalg.tensorinv": "np.linalg.tensorinv({square}, ind=1)",
    "linalg.tensorsolve": "np.linalg.tensorsolve({square}, {square}[0])",
    "polyfit": "np.polyfit(np.arange(4.0), {square}[0], 2)",
    "fft.fft2": "np.fft.fft2({square})",
    "fft.ifft2": "np.fft.ifft2({square})",
    "fft.rfft2": "np.fft.rfft2({square})",
    "fft.irfft2": "np.fft.irfft2({square})",
}
NAMES = " ".join([*_PLAIN, *_ROUNDED, *_IN_PLACE, *_OF_NANS, *_OF_MATRICES])


def composed(maker: StepMaker, name: str) -> Step:
    """Return a call of one of these functions."""
    draw = maker.draw
    vector = maker.array(least=1, most=1, kinds=NUMBERS)
    length = len(vector.value)
    if not length:
        raise ValueError("of no elements, several of these are errors in numpy")
    matrix = maker.array(least=2, most=3)
    numbers = maker.array(least=1, most=3, kinds=NUMBERS)
    floats = maker.array(least=1, most=2, kinds="f")
    other = maker.partner((length,), NUMBERS)
    small = "np.linspace(-2.0, 3.0, 9)"
    square = "(np.arange(16.0).reshape(4, 4) % 7 + 9 * np.eye(4))"
    given: dict[str, Any] = {
        "v": vector.text,
        "w": other.text,
        "m": matrix.text,
        "n": numbers.text,
        "f": floats.text,
        "x": maker.axis(floats.value.ndim, several=False) if name in _OF_NANS else "0",
        "k": draw.between(0, 2),
        "size": draw.between(1, length),
        "mask": [draw.chance(0.5) for _ in range(length)],
        "key": draw.one(("0", "[0]", "slice(0, 1)", "-1")),
        "mode": draw.one(("full", "same", "valid")),
        "three": f"D(np.arange(12.0).reshape(4, 3) - {draw.between(0, 9)})",
        "small": f"D({small})",
        "square": f"D({square} + {draw.between(0, 3)})",
    }
    if name in _PLAIN:
        return maker.bind(_PLAIN[name].format(**given), "composed")
    if name in _IN_PLACE:
        text = _IN_PLACE[name].format(**given)
        return maker.bind(f"({text}, {matrix.text}.copy())[1]", "composed")
    if name in _OF_NANS:
        sizes = spread(floats.value)
        slack = math.inf if name == "nancumprod" else 16 * sizes.sum_slack
        return maker.bind(_OF_NANS[name].format(**given), "composed", slack, 16.0)
    if name in _OF_MATRICES:
        return maker.bind(_OF_MATRICES[name].format(**given), "composed", 1e5, 1e5)
    slack = 64 * product_slack((vector.value, other.value, numbers.value, matrix.value))
    return maker.bind(_ROUNDED[name].format(**given), "composed", slack, 64.0)
