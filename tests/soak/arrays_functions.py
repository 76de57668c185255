"""Steps of scripts over DistArrays that call a function: every one that DistArrays take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from .arrays_case import Step, array_text, list_text
from .arrays_composed import NAMES as COMPOSED
from .arrays_composed import composed
from .arrays_operands import (
    ANY_KIND,
    REAL,
    Operand,
    cast_slack,
    product_rounding,
    product_slack,
    spread,
)
from .arrays_steps import StepMaker
from .generate import make_values

CUMULATIVE = ("cumulative_sum", "cumulative_prod")
REAL_REDUCTIONS = ("ptp",)
REDUCE_METHODS = {
    "sum": "add",
    "prod": "multiply",
    "max": "maximum",
    "min": "minimum",
    "any": "logical_or",
    "all": "logical_and",
    "cumsum": "add",
    "cumprod": "multiply",
}
METHODS = {
    *("sum", "prod", "max", "min", "any", "all", "mean", "var", "std", "argmax", "argmin"),
    *("cumsum", "cumprod", "trace", "diagonal", "take", "repeat"),
}
PYTHON_RESULTS = ("shape", "ndim", "size", "iscomplexobj", "isrealobj", "result_type")


class FunctionMaker(StepMaker):
    """Makes calls of functions, each with arguments that suit it in most cases."""

    # ---- reductions -----------------------------------------------------------------------------

    def called(self, name: str, array: str, options: Sequence[str]) -> str:
        """Return a call of a function, or of the method of the same name."""
        if name in METHODS and self.draw.chance(0.35):
            return f"{array}.{name}({', '.join(options)})"
        return f"np.{name}({', '.join([array, *options])})"

    def reduction(self, name: str) -> Step:
        draw = self.draw
        least = 1 if name in CUMULATIVE else 0
        array = self.array(least, kinds=REAL if name in REAL_REDUCTIONS else ANY_KIND)
        value = array.value
        several = name not in ("argmax", "argmin", "cumsum", "cumprod", *CUMULATIVE)
        options = []
        if draw.chance(0.85) or name in CUMULATIVE:
            none = name not in CUMULATIVE or value.ndim <= 1
            options.append(f"axis={self.axis(value.ndim, several, none)}")
        if several and draw.chance(0.25):
            options.append(f"keepdims={draw.chance(0.7)}")
        slack, ulps = self.reduction_rounding(name, value)
        base = name.removeprefix("nan").removeprefix("cum")
        if base in ("sum", "prod", "mean") and draw.chance(0.15):
            dtype = self.dtype()
            options.append(f"dtype={dtype!r}")
            slack, ulps = self.reduction_rounding(name, value.astype(dtype))
            slack = max(slack, cast_slack(value, np.dtype(dtype)))
            if np.dtype(dtype).kind in "biu" and base == "mean":
                slack = math.inf
        if base in ("var", "std") and draw.chance(0.3):
            options.append(f"ddof={draw.one((0, 1, 1, 2, 0.5))}")
        if name in CUMULATIVE and draw.chance(0.4):
            options.append("include_initial=True")
        ufunc = REDUCE_METHODS.get(name)
        if ufunc is not None and value.ndim and draw.chance(0.12):
            method = "accumulate" if name.startswith("cum") else "reduce"
            axis = self.axis(value.ndim, several, several)
            options = [f"axis={axis}"] if draw.chance(0.8) else []
            text = f"np.{ufunc}.{method}({', '.join([array.text, *options])})"
            return self.bind(text, "reduction", slack, ulps)
        return self.bind(self.called(name, array.text, options), "reduction", slack, ulps)

    def reduction_rounding(self, name: str, value: np.ndarray) -> tuple[float, float]:
        """Return the slack and ulps of a reduction: sums may be added in any order."""
        base = name.removeprefix("nan").removeprefix("cumulative_").removeprefix("cum")
        sizes = spread(value)
        if base == "prod":
            return product_rounding(value)
        if base in ("sum", "mean"):
            return sizes.sum_slack, 4.0
        if base == "var":
            return sizes.square_slack, 4.0
        if base == "std":
            # Both compute the mean first, so that a deviation of 0 is off by that rounding only.
            return (math.inf if sizes.is_wild else sizes.count**2 * sizes.most), 8.0
        return 0.0, 0.0

    def norm(self, name: str) -> Step:
        draw = self.draw
        array = self.array()
        sizes = spread(array.value)
        slack = sizes.sum_slack
        limit = np.finfo(array.value.dtype).max if array.value.dtype.kind in "fc" else 1e300
        if float(limit) < 4 * sizes.square_slack:
            slack = math.inf
        options = []
        if draw.chance(0.5):
            options.append(f"ord={draw.one(('None', '1', '2', 'inf', 'np.inf', '-inf', '0', '3'))}")
        if draw.chance(0.6):
            options.append(f"axis={self.axis(array.value.ndim)}")
        if draw.chance(0.2):
            options.append("keepdims=True")
        text = f"np.{name}({', '.join([array.text, *options])})"
        return self.bind(text, "reduction", slack, 8.0)

    def diff(self, _: str) -> Step:
        array = self.array(least=1)
        options = [f"axis={self.axis(array.value.ndim, several=False, none=False)}"]
        if self.draw.chance(0.4):
            options.append(f"n={self.draw.between(1, 3)}")
        return self.bind(f"np.diff({', '.join([array.text, *options])})", "reduction")

    # ---- statistics -----------------------------------------------------------------------------

    def average(self, _: str) -> Step:
        draw = self.draw
        array = self.array()
        value = array.value
        axis = self.axis(value.ndim, several=draw.chance(0.1))
        options = [f"axis={axis}"]
        if draw.chance(0.7):
            shape = value.shape
            if axis.lstrip("-").isdigit() and draw.chance(0.6):
                shape = (value.shape[int(axis)],)
            weights = abs(make_values(draw, "plain", self.dtype("iuf"), shape)) + 1
            options.append(f"weights={draw.one(('', 'D'))}({array_text(weights)})")
        if draw.chance(0.2):
            options.append("keepdims=True")
        slack = 16 * spread(value).sum_slack
        return self.bind(f"np.average({', '.join([array.text, *options])})", "statistics", slack, 8)

    def quantile(self, name: str) -> Step:
        draw = self.draw
        array = self.array(kinds=REAL if draw.chance(0.95) else "c")
        if not array.value.size and name != "median":
            raise ValueError("numpy raises an IndexError that says nothing about it")
        options = []
        if name != "median":
            fractions = [draw.one((0, 1, 0.5, 0.25, 0.1, 0.9, 1 / 3)) for _ in range(3)]
            if name == "percentile":
                fractions = [100 * fraction for fraction in fractions]
            options.append(draw.one((str(fractions[0]), list_text(fractions[: draw.below(4)]))))
        options.append(f"axis={self.axis(array.value.ndim, several=draw.chance(0.05))}")
        if draw.chance(0.25):
            options.append("keepdims=True")
        slack = 16 * spread(array.value).most
        if array.value.dtype.kind == "f" and slack > float(np.finfo(array.value.dtype).max) / 64:
            slack = math.inf
        if array.value.dtype.kind in "iu" and array.value.size:
            # numpy subtracts integers, which may wrap around.
            width = int(array.value.max()) - int(array.value.min())
            if width > np.iinfo(array.value.dtype).max:
                slack = math.inf
        given = ", ".join([array.text, *options])
        return self.bind(f"np.{name}({given})", "statistics", slack, 8.0)

    def covariance(self, name: str) -> Step:
        draw = self.draw
        array = self.array(least=1, most=2)
        value = array.value
        if not value.size:
            raise ValueError("of no elements, numpy's dtypes follow no rule")
        options = []
        if draw.chance(0.3):
            options.append(self.array(shape=value.shape).text)
        if draw.chance(0.3):
            options.append(f"rowvar={draw.chance(0.5)}")
        if name == "cov" and draw.chance(0.3):
            options.append(draw.one(("bias=True", "ddof=0", "ddof=1")))
        text = f"np.{name}({', '.join([array.text, *options])})"
        slack = 4 * spread(value).square_slack
        if name == "corrcoef":
            # A variance near 0 divides rounding errors.
            variances = np.abs(np.diagonal(np.atleast_2d(self.value_of(text.replace(name, "cov")))))
            most = spread(value).most
            is_safe = np.isfinite(variances).all() and (variances > 1e-3 * most**2).all()
            slack = 1e5 * value.size if is_safe else math.inf
        return self.bind(text, "statistics", slack, 8.0)

    def counts(self, name: str) -> Step:
        draw = self.draw
        if name == "bincount":
            array = self.array(most=2, kinds="biu")
            text = f"(abs({array.text}) % 5)"
            if array.value.ndim != 1:
                text += ".ravel()"
            options = []
            if draw.chance(0.3):
                options.append(f"minlength={draw.between(0, 9)}")
            slack = 0.0
            if draw.chance(0.3):
                weights = self.array(kinds=REAL, shape=(array.value.size,))
                options.append(f"weights={weights.text}")
                slack = spread(weights.value).sum_slack
            return self.bind(f"np.bincount({', '.join([text, *options])})", "statistics", slack, 4)
        array = self.array(kinds=REAL)
        edges = list_text(sorted({draw.between(-9, 9) / 2 for _ in range(draw.between(2, 5))}))
        if name == "digitize":
            if draw.chance(0.3):
                edges = f"{edges}[::-1]"
            right = draw.one(("", ", right=True"))
            return self.bind(f"np.digitize({array.text}, {edges}{right})", "statistics")
        options = [draw.one((edges, "3", "5", f"D(np.array({edges}))"))]
        if draw.chance(0.3):
            options.append("range=(-3, 3)")
        slack = 0.0
        if draw.chance(0.25):
            weights = self.partner(array.value.shape, REAL)
            options.append(f"weights={weights.text}")
            slack = spread(weights.value).sum_slack
        if draw.chance(0.15):
            options.append("density=True")
            slack = math.inf if slack else 8.0
        slack += 16 * spread(array.value).most
        given = ", ".join([array.text, *options])
        return self.bind(f"np.histogram({given})", "statistics", slack, 8.0)

    # ---- order ----------------------------------------------------------------------------------

    def sorting(self, name: str) -> Step:
        array = self.array(least=1)
        options = []
        if self.draw.chance(0.8):
            options.append(f"axis={self.axis(array.value.ndim, several=False)}")
        if name == "argsort":
            options.append("kind='stable'")
            return self.bind(f"np.argsort({', '.join([array.text, *options])})", "order")
        return self.bind(f"np.sort({', '.join([array.text, *options])})", "order")

    def searchsorted(self, _: str) -> Step:
        draw = self.draw
        array = self.array(least=1, most=1, kinds=REAL)
        values = self.operand(self.shape(), REAL)
        side = draw.one(("", ", side='right'"))
        ordered = f"np.sort({array.text})"
        if draw.chance(0.3):
            return self.bind(f"{ordered}.searchsorted({values.text}{side})", "order")
        return self.bind(f"np.searchsorted({ordered}, {values.text}{side})", "order")

    def unique(self, name: str) -> Step:
        draw = self.draw
        array = self.array()
        if name == "unique_values":  # in any order
            return self.bind(f"np.sort(np.unique_values({array.text}))", "order")
        options = []
        if name == "unique":
            for option in ("return_index", "return_inverse", "return_counts"):
                if draw.chance(0.3):
                    options.append(f"{option}=True")
            if draw.chance(0.1):
                options.append("equal_nan=False")
        # Which nan comes first is not defined, where each of them is an element of its own.
        slack = math.inf if np.isnan(array.value).any() else 0.0
        return self.bind(f"np.{name}({', '.join([array.text, *options])})", "order", slack)

    def isin(self, _: str) -> Step:
        array = self.array()
        test = self.array() if self.draw.chance(0.5) else self.operand(self.shape())
        invert = self.draw.one(("", ", invert=True"))
        return self.bind(f"np.isin({array.text}, {test.text}{invert})", "order")

    def places(self, name: str) -> Step:
        array = self.array(least=1)
        if name == "nonzero" and self.draw.chance(0.3):
            return self.bind(f"{array.text}.nonzero()", "order")
        return self.bind(f"np.{name}({array.text})", "order")

    # ---- products -------------------------------------------------------------------------------

    def product(self, name: str) -> Step | None:
        """Return a product of two arrays whose contracted extents are equal, in most cases."""
        draw = self.draw
        left = self.array(least=0 if draw.chance(0.05) else 1, most=3)
        shape = left.value.shape
        extent = shape[-1] if shape else 1
        text = ""
        if name == "vdot":
            right = self.partner(shape if draw.chance(0.7) else (left.value.size,))
        elif name == "outer":
            right = self.array(most=2)
        elif name == "inner":
            right = self.partner((*self.shape(0, 1), extent))
        elif name == "vecdot":
            right = self.partner((*self.shape_within(shape[:-1]), extent))
        elif name == "tensordot":
            return self.tensordot(left)
        else:
            contracted = (extent,) if draw.chance(0.4) else (extent, draw.one(self.extents))
            stack: tuple[int, ...] = ()
            if len(contracted) > 1 and draw.chance(0.3):
                stack = shape[:-2] if name == "matmul" else (draw.between(1, 3),)
            right = self.partner((*stack, *contracted))
        slack = product_slack((left.value, right.value))
        if name == "matmul" and draw.chance(0.6):
            text = f"{left.text} @ {right.text}"
        elif name == "dot" and draw.chance(0.3):
            text = f"{left.text}.dot({right.text})"
        return self.bind(text or f"np.{name}({left.text}, {right.text})", "product", slack, 4.0)

    def tensordot(self, left: Operand) -> Step:
        draw = self.draw
        shape = left.value.shape
        count = draw.below(len(shape) + 1)
        others = self.shape(0, 2)[: max(0, 3 - count)]
        if draw.chance(0.5):
            right = self.partner((*shape[len(shape) - count :], *others))
            axes = str(count)
        else:
            chosen = draw.shuffled(range(len(shape)))[:count]
            right = self.partner((*(shape[axis] for axis in chosen), *others))
            axes = f"({chosen}, {list(range(count))})"
        slack = product_slack((left.value, right.value))
        text = f"np.tensordot({left.text}, {right.text}, {axes})"
        return self.bind(text, "product", slack, 4.0)

    def diagonals(self, name: str) -> Step:
        draw = self.draw
        array = self.array(least=2)
        options = []
        if draw.chance(0.4):
            options.append(f"offset={draw.between(-3, 3)}")
        if array.value.ndim > 2 and draw.chance(0.5) and name == "diagonal":
            first, second = draw.shuffled(range(array.value.ndim))[:2]
            options.append(f"axis1={first}, axis2={second}")
        slack = spread(array.value).sum_slack if name == "trace" else 0.0
        return self.bind(self.called(name, array.text, options), "product", slack, 4.0)

    def einsum(self, _: str) -> Step:
        draw = self.draw
        operands = [self.array(most=3) for _ in range(draw.weighted({1: 3.0, 2: 6.0, 3: 2.0}))]
        extents: dict[str, int] = {}
        texts = []
        for operand in operands:
            labels = ""
            for extent in operand.value.shape:
                known = [label for label, other in extents.items() if other == extent]
                if known and draw.chance(0.65):
                    labels += draw.one(known)
                else:
                    label = "ijklmnopq"[len(extents)]
                    extents[label] = extent
                    labels += label
            texts.append(labels)
        subscripts = ",".join(texts)
        if draw.chance(0.8):
            kept = [label for label in draw.shuffled(list(extents)) if draw.chance(0.5)]
            subscripts += f"->{''.join(kept)}"
        if math.prod(extents.values()) > 20_000:
            raise ValueError("too many products")
        slack = product_slack([operand.value for operand in operands])
        slack *= max(1, math.prod(extents.values()))
        given = ", ".join(operand.text for operand in operands)
        # Of one operand, numpy's result may be a view.
        copied = ".copy()" if len(operands) == 1 else ""
        return self.bind(f"np.einsum({subscripts!r}, {given}){copied}", "product", slack, 4.0)

    # ---- matrices and transforms ----------------------------------------------------------------

    def matrices(self, name: str) -> Step:
        """Return a function of matrices that rounding cannot make singular, or of any."""
        draw = self.draw
        if draw.chance(0.2):
            array = self.array(least=2, most=3, kinds="iuf")
            extent = min(array.value.shape[-2:])
            array = Operand(f"{array.text}[..., :{extent}, :{extent}]", None)
            slack = math.inf
        else:
            extent = draw.between(1, 4)
            stack = (draw.between(1, 4),) if draw.chance(0.5) else ()
            dtype = draw.one(("float64", "float32", "complex128", "complex64"))
            values = make_values(draw, "plain", dtype, (*stack, extent, extent)) / 8
            values = values + values.conj().mT + 4 * np.eye(extent)
            array = Operand(f"D({array_text(values.astype(dtype))})", values)
            slack = 1e4
        given = array.text
        if name == "linalg.matrix_power":
            # numpy returns the matrix itself for 1, so that writes into the power change it.
            given += f", {draw.one((0, 2, 3))}"
        if name == "linalg.qr" and draw.chance(0.3):
            given += f", {draw.one(('reduced', 'complete', 'r'))!r}"
        if name == "linalg.svd" and draw.chance(0.5):
            given += ", full_matrices=False"
        if name == "linalg.solve":
            columns = () if draw.chance(0.3) else (draw.between(1, 3),)
            right = self.partner((extent, *columns), "f")
            given += f", {right.text}"
            slack *= spread(right.value).most + 1
        return self.bind(f"np.{name}({given})", "matrices", slack, 1e4)

    def transform(self, name: str) -> Step:
        draw = self.draw
        array = self.array(least=1, most=3)
        options = []
        if draw.chance(0.6):
            axis = self.axis(array.value.ndim, several=False, none=False)
            options.append(f"axes=({axis},)" if name.endswith("n") else f"axis={axis}")
        if name.endswith("shift"):
            options = [option.replace("axis", "axes") for option in options]
        elif draw.chance(0.3):
            options.append(f"norm={draw.one(('ortho', 'forward', 'backward'))!r}")
        text = f"np.{name}({', '.join([array.text, *options])})"
        slack = 0.0 if name.endswith("shift") else 8 * spread(array.value).sum_slack
        if not np.isfinite(array.value).all():
            slack = math.inf
        return self.bind(text, "transforms", slack, 8.0)

    # ---- shapes ---------------------------------------------------------------------------------

    def shaped(self, name: str) -> Step:
        """Return the array with its dimensions in another order, or with more or fewer of them."""
        draw = self.draw
        array = self.array()
        text, ndim = array.text, array.value.ndim
        order = draw.shuffled(range(ndim))
        given = {
            "transpose": draw.one(("", str(tuple(order)), str([each - ndim for each in order]))),
            "permute_dims": str(tuple(order)),
            "swapaxes": f"{draw.between(-1, ndim - 1)}, {draw.between(-1, ndim - 1)}",
            "moveaxis": draw.one(("0, -1", "-1, 0", f"{list(range(ndim))}, {order}")),
            "expand_dims": draw.one(("0", "-1", str(ndim), "(0, 2)", "(1, 0)")),
            "squeeze": draw.one(("", self.axis(ndim))),
            "reshape": self.other_shape(array.value),
            "flip": draw.one(("", self.axis(ndim))),
            "rot90": draw.one(("", "2", "3", "0", "-1", "1, (1, 0)")),
        }.get(name, "")
        call = f"np.{name}({text}, {given})" if given else f"np.{name}({text})"
        return self.bind(self.settled(call, array.value), "shape")

    def broadcast(self, name: str) -> Step:
        draw = self.draw
        array = self.array(most=3)
        shape = array.value.shape
        if name == "broadcast_to":
            wide = tuple(draw.between(0, 3) if extent == 1 else extent for extent in shape)
            if draw.chance(0.5):
                wide = (draw.between(0, 3), *wide)
            return self.bind(f"np.broadcast_to({array.text}, {wide})", "shape")
        if name == "broadcast_arrays":
            other = self.partner(self.shape_within(shape))
            # numpy returns views that warn when they are written to.
            text = f"[each.copy() for each in np.broadcast_arrays({array.text}, {other.text})]"
            return self.bind(text, "shape")
        vectors = [self.array(least=1, most=1) for _ in range(draw.between(1, 3))]
        indexing = draw.one(("", ", indexing='ij'"))
        given = ", ".join(f"{vector.text}[:4]" for vector in vectors)
        return self.bind(f"np.meshgrid({given}{indexing})", "shape")

    def joined(self, name: str) -> Step:
        """Return arrays that are joined along a dimension."""
        draw = self.draw
        first = self.array(least=0 if name == "stack" else 1, most=3)
        shape = first.value.shape
        axes = {"vstack": 0, "hstack": 1, "dstack": 2, "column_stack": 1}
        axis = axes.get(name, draw.below(max(1, len(shape))))
        parts = [first.text]
        for _ in range(draw.between(0, 2)):
            other = list(shape)
            if name != "stack" and axis < len(shape) and len(shape) > 1:
                other[axis] = draw.one(self.extents)
            elif name in ("concatenate", "hstack"):
                other[-1] = draw.one(self.extents)
            parts.append(self.partner(other).text)
        if name == "append":
            given = f"{first.text}, {parts[-1]}"
            options = f", axis={axis}" if draw.chance(0.6) else ""
            return self.bind(f"np.append({given}{options})", "shape")
        parts = draw.shuffled(parts)
        text = f"np.{name}([{', '.join(parts)}]"
        if name == "concatenate" and draw.chance(0.2):
            text += f", dtype={self.dtype()!r}, casting={draw.one(('same_kind', 'unsafe'))!r}"
            return self.bind(f"{text}, axis={axis})", "shape", math.inf)
        if name in ("concatenate", "stack") and draw.chance(0.7):
            text += f", axis={draw.one((axis, axis - len(shape), 'None'))}"
        return self.bind(f"{text})", "shape")

    def divided(self, name: str) -> Step:
        """Return the parts of an array, which are views."""
        draw = self.draw
        array = self.array(least=1)
        shape = array.value.shape
        axis = {"vsplit": 0, "hsplit": min(1, len(shape) - 1)}.get(name, draw.below(len(shape)))
        if name == "unstack":
            return self.bind(f"np.unstack({array.text}, axis={axis})", "shape")
        extent = shape[axis]
        divisors = [number for number in range(1, max(2, extent + 1)) if extent % number == 0]
        sections = str(draw.one(divisors))
        if name == "array_split" or draw.chance(0.05):
            sections = str(draw.between(1, 5))
        if draw.chance(0.4):
            sections = list_text(sorted(draw.between(0, extent) for _ in range(draw.between(1, 3))))
        text = f"np.{name}({array.text}, {sections}"
        if name in ("split", "array_split"):
            text += f", axis={axis}"
        return self.bind(f"{text})", "shape")

    def moved(self, name: str) -> Step:
        """Return the elements of an array at other places, repeated, or with others around them."""
        draw = self.draw
        array = self.array(most=3)
        text, shape = array.text, array.value.shape
        axis = self.axis(len(shape), several=False)
        extent = shape[int(axis)] if axis != "None" and -len(shape) <= int(axis) < len(shape) else 0
        if name == "roll":
            several = self.axis(len(shape))
            shift = draw.one(("1", "-2", "3", "100", "(1, 2)"))
            return self.bind(f"np.roll({text}, {shift}, axis={several})", "shape")
        if name == "repeat":
            counts = list_text([draw.below(3) for _ in range(extent)])
            times = draw.one(("2", "1", "0", "3", counts))
            return self.bind(self.called("repeat", text, [times, f"axis={axis}"]), "shape")
        if name == "tile":
            times = draw.one(("2", "(2, 1)", "(1, 2, 2)", "0", "(1,)", "[2, 2]"))
            return self.bind(f"np.tile({text}, {times})", "shape")
        if name == "take":
            extent = extent if axis != "None" else array.value.size
            table = self.table(extent, draw.one(((), (3,), (2, 2), (0,), (1,))))
            return self.bind(self.called("take", text, [table, f"axis={axis}"]), "shape")
        if name == "take_along_axis":
            places = f"np.argsort({text}, axis={axis}, kind='stable')"
            if draw.chance(0.5) and axis != "None":
                other = [1 if draw.chance(0.2) else each for each in shape]
                other[int(axis)] = draw.between(0, 3)
                places = self.table(extent, tuple(other))
            return self.bind(f"np.take_along_axis({text}, {places}, axis={axis})", "shape")
        widths = [(draw.between(0, 2), draw.between(0, 3)) for _ in shape]
        width = draw.one(("1", "(1, 2)", str(widths), "2", "0"))
        mode = draw.one(("constant", "constant", "edge", "reflect", "symmetric", "wrap"))
        options = f", mode={mode!r}"
        if mode == "constant" and draw.chance(0.6):
            options = f", constant_values={draw.between(0, 5)}"
        return self.bind(f"np.pad({text}, {width}{options})", "shape")

    # ---- elements -------------------------------------------------------------------------------

    def elementwise(self, name: str) -> Step:
        draw = self.draw
        array = self.array(least=1 if name.startswith("tri") else 0)
        text, value = array.text, array.value
        if name == "where":
            condition = text if draw.chance(0.5) else f"{text} != 0"
            given = f"{self.operand(value.shape).text}, {self.operand(value.shape).text}"
            if draw.chance(0.1):
                return self.bind(f"np.where({condition})", "elements")
            return self.bind(f"np.where({condition}, {given})", "elements")
        if name == "clip":
            low, high = (self.operand(value.shape, REAL).text for _ in range(2))
            given = draw.one((f"{low}, {high}", f"None, {high}", f"{low}, None", f"min={low}"))
            if draw.chance(0.3):
                return self.bind(f"{text}.clip({given})", "elements")
            return self.bind(f"np.clip({text}, {given})", "elements")
        if name in ("round", "around"):
            decimals = draw.one(("", ", 1", ", 2", ", -1", ", decimals=3"))
            return self.bind(f"np.{name}({text}{decimals})", "elements", 0.0, 16.0)
        if name == "nan_to_num":
            options = draw.one(("", ", nan=2.5", ", posinf=7, neginf=-7", ", copy=True"))
            return self.bind(f"np.nan_to_num({text}{options})", "elements")
        if name in ("tril", "triu"):
            return self.bind(f"np.{name}({text}, {draw.between(-2, 2)})", "elements")
        if name == "angle":
            return self.bind(f"np.angle({text})", "elements", 0.0, 16.0)
        return self.bind(f"np.{name}({text})", "elements")

    def converted(self, name: str) -> Step:
        """Return an array of another dtype, or of the same shape."""
        draw = self.draw
        array = self.array()
        dtype = self.dtype()
        slack = cast_slack(array.value, np.dtype(dtype))
        if name == "astype":
            text = f"{array.text}.astype({dtype!r})"
            if draw.chance(0.4):
                copied = draw.one(("", ", copy=False"))
                text = f"np.astype({array.text}, np.dtype({dtype!r}){copied})"
            return self.bind(text, "elements", slack)
        option = f", dtype={dtype!r}" if draw.chance(0.4) else ""
        if name == "empty_like":  # its elements may be anything
            return self.bind(f"np.zeros_like(np.empty_like({array.text}{option}))", "elements")
        given = array.text
        if name == "full_like":
            number = self.number()
            given += f", {number.text}"
            slack = cast_slack(number.value, np.dtype(dtype) if option else array.value.dtype)
        return self.bind(f"np.{name}({given}{option})", "elements", slack)

    def compared(self, name: str) -> Step:
        array = self.array()
        other = self.operand(array.value.shape)
        if self.draw.chance(0.3):
            other = Operand(f"{array.text} + 0", array.value)
        nan = self.draw.one(("", ", equal_nan=True"))
        text = f"np.{name}({array.text}, {other.text}{nan})"
        return self.bind(text if name == "isclose" else f"({text},)", "elements")

    def python_function(self, name: str) -> Step:
        array = self.array()
        other = self.operand(array.value.shape)
        given = array.text if name in PYTHON_RESULTS[:5] else f"{array.text}, {other.text}"
        return self.bind(f"(np.{name}({given}),)", "number")


# ---- the table ----------------------------------------------------------------------------------

# What makes a call of each function: all that DistArrays take, by their names in numpy. A weight
# is shared by the functions of a row.
_ROWS: tuple[tuple[Callable[..., Step | None], float, str], ...] = (
    (FunctionMaker.reduction, 14, "sum prod max min any all mean var std argmax argmin ptp"),
    (FunctionMaker.reduction, 4, "count_nonzero cumsum cumprod cumulative_sum cumulative_prod"),
    (FunctionMaker.reduction, 5, "nansum nanprod nanmax nanmin nanmean nanvar nanstd"),
    (FunctionMaker.norm, 2.5, "linalg.norm linalg.vector_norm"),
    (FunctionMaker.diff, 1, "diff"),
    (FunctionMaker.average, 1.5, "average"),
    (FunctionMaker.quantile, 3, "median quantile percentile"),
    (FunctionMaker.covariance, 1.5, "cov corrcoef"),
    (FunctionMaker.counts, 2.5, "bincount histogram digitize"),
    (FunctionMaker.sorting, 4, "sort argsort"),
    (FunctionMaker.searchsorted, 1.5, "searchsorted"),
    (FunctionMaker.unique, 3, "unique unique_all unique_counts unique_inverse unique_values"),
    (FunctionMaker.isin, 1, "isin"),
    (FunctionMaker.places, 2, "nonzero argwhere"),
    (FunctionMaker.product, 9, "matmul dot vdot inner outer tensordot vecdot"),
    (FunctionMaker.diagonals, 2, "trace diagonal"),
    (FunctionMaker.einsum, 3, "einsum"),
    (
        FunctionMaker.matrices,
        1,
        "linalg.cholesky linalg.det linalg.eigh linalg.eigvalsh",
    ),
    (FunctionMaker.matrices, 1, "linalg.matrix_norm linalg.matrix_power linalg.matrix_rank"),
    (FunctionMaker.matrices, 1, "linalg.pinv linalg.qr linalg.slogdet linalg.svd linalg.svdvals"),
    (FunctionMaker.matrices, 1, "linalg.solve linalg.inv"),
    (FunctionMaker.transform, 1.5, "fft.fft fft.ifft fft.rfft fft.irfft fft.hfft fft.ihfft"),
    (FunctionMaker.transform, 1.5, "fft.fftn fft.ifftn fft.rfftn fft.irfftn"),
    (FunctionMaker.transform, 0.5, "fft.fftshift fft.ifftshift"),
    (FunctionMaker.shaped, 4, "transpose permute_dims matrix_transpose swapaxes moveaxis reshape"),
    (
        FunctionMaker.shaped,
        5,
        "expand_dims squeeze ravel flip rot90 atleast_1d atleast_2d atleast_3d",
    ),
    (FunctionMaker.broadcast, 2, "broadcast_to broadcast_arrays meshgrid"),
    (FunctionMaker.joined, 6, "concatenate stack vstack hstack column_stack dstack append"),
    (FunctionMaker.divided, 4, "split array_split hsplit vsplit unstack"),
    (FunctionMaker.moved, 6, "roll repeat tile take take_along_axis pad"),
    (FunctionMaker.elementwise, 7, "where clip round around real imag angle nan_to_num tril triu"),
    (FunctionMaker.elementwise, 1, "copy"),
    (FunctionMaker.converted, 4, "astype zeros_like ones_like full_like empty_like"),
    (FunctionMaker.compared, 2, "isclose allclose array_equal"),
    (composed, 9, COMPOSED),
    (FunctionMaker.python_function, 1, " ".join(PYTHON_RESULTS)),
)
FUNCTIONS: dict[str, Callable[..., Step | None]] = {}
FUNCTION_WEIGHTS: dict[str, float] = {}
for _maker, _weight, _names in _ROWS:
    for _name in _names.split():
        FUNCTIONS[_name] = _maker
        FUNCTION_WEIGHTS[_name] = _weight / len(_names.split())
