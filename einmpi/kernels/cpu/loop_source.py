"""The source text of a kernel: ⊕ over ⊗ as one nest of loops, tiled and unrolled (paper, section 3)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from einmpi.graph.aggregations import AGGREGATIONS, aggregate_type
from einmpi.graph.arithmetic import compute_types
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.scalar import Call, Const, Scalar
from einmpi.kernels.cpu.scalar_source import Lanes, convert, number, operation
from einmpi.kernels.loop_nest import Nest

BLOCK_STEPS = 128  # steps of an aggregated loop before what they give is added to the total
TILE_ROWS = 64  # rows that share a tile of lanes
TRANSPOSE_EDGE = 32  # rows and lanes of a square in which a transposed array is read
HEAD = """\
import math
from numba import complex64, complex128, float32, float64, int32, int64, uint8
from einmpi.kernels.cpu.intrinsics import at, exp, fmax, fmin, fmod, least, muladd, pick, stack, tanh


def kernel(address):
    p = at(int64, address)
"""


@dataclass
class _Text:
    lines: list[str] = field(default_factory=list)
    depth: int = 1

    def add(self, *lines: str) -> None:
        self.lines += ["    " * self.depth + line for line in lines]

    def open(self, line: str) -> None:
        self.add(line)
        self.depth += 1

    def lanes(self, count: str | int, *lines: str) -> None:
        """A loop over lanes; in its lines {v} is the lane. numba is quickest with names that are used once."""
        name = f"v{len(self.lines)}"
        self.open(f"for {name} in range({count}):")
        self.add(*(line.replace("{v}", name) for line in lines))
        self.depth -= 1


def source(nest: Nest) -> str:
    """A Python function `kernel` of the address of its parameters."""
    names = [f"{letter}{x}_{y}" for letter, x, y in nest.parameters()]
    text = _Text()
    text.add(*(f"{name} = p[{k}]" for k, name in enumerate(names)))
    (_map if nest.aggregation is None else _reduce)(nest, text)
    text.depth = 1
    text.add(*(f"p[{k}] = {name}" for k, name in enumerate(names) if name[0] in "LH"))
    return HEAD + "\n".join(text.lines) + "\n"


def _outer(nest: Nest, text: _Text) -> None:
    for loop in range(nest.outputs):
        if loop not in (nest.row, nest.lane):
            text.open(f"for i{loop} in range(a{loop}_0, b{loop}_0):")


def _map(nest: Nest, text: _Text) -> None:
    """⊗ alone. With rows, in small squares: an array that lies dense along the rows is read line by line too."""
    lane, row = nest.lane, nest.row
    _outer(nest, text)
    if row is None:
        text.add(f"c = a{lane}_0", f"n = b{lane}_0 - c")
    else:
        text.open(f"for c in range(a{lane}_0, b{lane}_0, {TRANSPOSE_EDGE}):")
        text.add(f"n = least({TRANSPOSE_EDGE}, b{lane}_0 - c)")
        text.open(f"for rb in range(a{row}_0, b{row}_0, {TRANSPOSE_EDGE}):")
        text.open(f"for tr0 in range(rb, least(rb + {TRANSPOSE_EDGE}, b{row}_0)):")
    lanes = Lanes(nest, "t")
    value = lanes.value(nest.function, nest.out.dtype)
    target, place = lanes.pointer(len(nest.reads))
    text.add(*lanes.before)
    text.lanes("n", *lanes.inside, f"{target}[{place}] = {_stored(value, nest.out.dtype)}")


def _reduce(nest: Nest, text: _Text) -> None:
    """⊕ of ⊗ into totals on the stack, one a row and lane. Floating sums go through the partial sums of a block."""
    lane, row, step, width, fold = nest.lane, nest.row, nest.step, nest.width, _Fold(nest)
    rows = nest.unrolled[0]
    text.add(
        f"total = stack({_word(fold.total)}, {(TILE_ROWS + rows - 1 if nest.tiled else 1) * width})"
    )
    if fold.in_parts:
        text.add(f"part = stack({_word(fold.dtype)}, {rows * width})")
    _outer(nest, text)
    if not nest.folds:
        text.open(f"for c in range(a{lane}_0, b{lane}_0, {width}):")
        text.add(f"n = least({width}, b{lane}_0 - c)")
    if nest.tiled:
        text.open(f"for rb in range(a{row}_0, b{row}_0, {TILE_ROWS}):")
        text.add(f"re = least(rb + {TILE_ROWS}, b{row}_0)")
    outside = text.depth
    count = f"(re - rb + {rows - 1}) * {width}" if nest.tiled else width if nest.folds else "n"
    text.lanes(count, f"total[{{v}}] = {fold.start(fold.total)}")
    for loop in range(nest.outputs, nest.loops - 1):
        text.open(f"for i{loop} in range(a{loop}_0, b{loop}_0):")
    block = BLOCK_STEPS * (width if nest.folds else 1)
    text.open(f"for jb in range(a{step}_0, b{step}_0, {block}):")
    text.add(f"je = least(jb + {block}, b{step}_0)")
    if nest.tiled:
        text.open(f"for r in range(rb, re, {rows}):")
        text.add(f"base = (r - rb) * {width}")
    count = "n" if not nest.tiled and not nest.folds else rows * width
    if fold.in_parts:
        text.lanes(count, f"part[{{v}}] = {fold.start(fold.dtype)}")
    _steps(nest, fold, text)
    if fold.in_parts:
        slot = fold.slot("total", 0)
        lanes = Lanes(nest, "x")
        part = convert("part[{v}]", fold.dtype, fold.total)
        joined = fold.join(lanes, [slot, part])
        text.lanes(count, *lanes.inside, f"{slot} = {joined}")
    text.depth = outside
    _store(nest, fold, text)


def _steps(nest: Nest, fold: _Fold, text: _Text) -> None:
    """The aggregated loop next to the lanes: several steps at a time, then those that are left."""
    width, (rows, steps) = nest.width, nest.unrolled
    pace = width if nest.folds else 1
    assert nest.aggregation is not None
    # A value may be taken twice.
    repeats = not nest.folds and AGGREGATIONS[nest.aggregation].is_idempotent
    parts = [("t", "jb", "je", steps)]
    if steps > 1 and not repeats:
        text.add(f"jm = je - (je - jb) % {steps * pace}")
        parts = [("t", "jb", "jm", steps), ("u", "jm", "je", 1)]
    if nest.tiled:
        # With an odd number of rows the last one is computed twice, and kept once.
        text.add(
            *(f"{part[0]}r{u} = least(r + {u}, re - 1)" for part in parts for u in range(rows))
        )
    for prefix, start, stop, count in parts:
        text.open(f"for {prefix}j0 in range({start}, {stop}, {count * pace}):")
        last = ", je - 1)" if repeats else ")"
        text.add(
            *(
                f"{prefix}j{d} = {'least' * repeats}({prefix}j0 + {d * pace}{last}"
                for d in range(1, count)
            )
        )
        lanes = Lanes(nest, prefix)
        for u in range(rows):
            fold.take(lanes, u, count)
        text.add(*lanes.before)
        full = width if count > 1 else f"least({width}, je - {prefix}j0)"
        text.lanes(full if nest.folds else "n", *lanes.inside)
        text.depth -= 1


def _store(nest: Nest, fold: _Fold, text: _Text) -> None:
    if nest.folds:
        text.add(f"h = {nest.width // 2}")
        text.open("while h > 0:")
        lanes = Lanes(nest, "y")
        joined = fold.join(lanes, ["total[{v}]", "total[{v} + h]"])
        text.lanes("h", *lanes.inside, f"total[{{v}}] = {joined}")
        text.add("h //= 2")
        text.depth -= 1
    if nest.tiled:
        text.open("for wr0 in range(rb, re):")
    lanes = Lanes(nest, "w")
    target, place = lanes.pointer(len(nest.reads))
    text.add(*lanes.before)
    slot = f"total[(wr0 - rb) * {nest.width} + {{v}}]" if nest.tiled else "total[{v}]"
    value = convert(_loaded(slot, fold.total), fold.total, nest.out.dtype)
    text.lanes(1 if nest.folds else "n", f"{target}[{place}] = {_stored(value, nest.out.dtype)}")


@dataclass(frozen=True)
class _Fold:
    """The text of ⊕ in a nest."""

    nest: Nest

    @property
    def dtype(self) -> str:
        return aggregate_type(
            self.nest.aggregation, Lanes(self.nest, "").kind(self.nest.function)
        ).name

    @property
    def in_parts(self) -> bool:
        assert self.nest.aggregation is not None
        return AGGREGATIONS[self.nest.aggregation].is_rounded and np.dtype(self.dtype).kind in "fc"

    @property
    def total(self) -> str:
        return DTYPES[self.dtype].accumulator if self.in_parts else self.dtype

    def start(self, dtype: str) -> str:
        assert self.nest.aggregation is not None
        neutral = AGGREGATIONS[self.nest.aggregation].neutral(np.dtype(dtype))
        return number(neutral, _word(dtype))

    def slot(self, name: str, row: int) -> str:
        """Where a row's lane {v} is kept."""
        terms = ["base"] * (name == "total" and self.nest.tiled) + [str(row * self.nest.width)] * (
            row > 0
        )
        return f"{name}[{' + '.join([*terms, '{v}'])}]"

    def join(self, lanes: Lanes, values: list[str]) -> str:
        """⊕ of totals."""
        loaded = [_loaded(value, self.total) for value in values]
        return _stored(self._tree(lanes, loaded, self.total), self.total)

    def _tree(self, lanes: Lanes, values: list[str], dtype: str) -> str:
        if len(values) == 1:
            return values[0]
        half = len(values) // 2
        sides = [
            self._tree(lanes, values[:half], dtype),
            self._tree(lanes, values[half:], dtype),
        ]
        assert self.nest.aggregation is not None
        joined = Call(AGGREGATIONS[self.nest.aggregation].operation, ())
        text = operation(joined, dtype, sides)
        # An operation of several statements needs names for its values.
        return lanes.keep(text, True) if "; " in text else f"({text})"

    def take(self, lanes: Lanes, row: int, steps: int) -> None:
        """⊕ of what is there and of ⊗ for some steps."""
        function, dtype = self.nest.function, self.dtype
        slot = self.slot("part" if self.in_parts else "total", row)
        factors = self._factors(lanes)
        if factors:
            # The last product and the sum are one rounding: fewer instructions, and a digit more.
            name = slot
            for step in range(steps):
                pair = [lanes.value(factor, dtype, row, step) for factor in factors]
                name = lanes.keep(f"muladd({pair[0]}, {pair[1]}, {name})", True)
            lanes.inside.append(f"{slot} = {name}")
            return
        values = [lanes.value(function, dtype, row, step) for step in range(steps)]
        there = _loaded(slot, dtype)
        total = self._tree(lanes, [there, self._tree(lanes, values, dtype)], dtype)
        lanes.inside.append(f"{slot} = {_stored(total, dtype)}")

    def _factors(self, lanes: Lanes) -> tuple[Scalar, ...]:
        """The two factors of ⊗, where it is a real product under a sum."""
        node = self.nest.function
        if (
            not isinstance(node, Call)
            or self.nest.aggregation != "sum"
            or np.dtype(self.dtype).kind != "f"
        ):
            return ()
        if set(compute_types(node.op, [lanes.kind(arg) for arg in node.args])) != {self.dtype}:
            return ()
        if node.op == "**" and isinstance(node.args[1], Const) and node.args[1].value == 2:
            return node.args[0], node.args[0]
        return node.args if node.op == "*" else ()


def _word(dtype: str) -> str:
    """The dtype of numbers in memory."""
    return DTYPES[dtype].numba_stored


def _loaded(text: str, dtype: str) -> str:
    return f"({text} != 0)" if dtype == "bool" else text


def _stored(text: str, dtype: str) -> str:
    return f"uint8({text})" if dtype == "bool" else text
