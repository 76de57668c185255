"""⊗ as text of a kernel: each operation in the dtype in which numpy computes it, and what a kernel reads for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from einmpi.graph.arithmetic import compute_types, infer
from einmpi.graph.dtypes import DTYPES, Type
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Arg, Call, Const, Scalar, walk
from einmpi.kernels.loop_nest import Nest
from einmpi.kernels.powers import whole_power

MAX_NODES = 256  # of a function: a larger one takes too long to compile


def is_supported(function: Scalar, leaf: Callable[[Scalar], Type]) -> bool:
    """Whether every operation of a function has a text; `leaf` gives the dtype of an Arg or an Index."""
    nodes = walk(function)
    if len(nodes) > MAX_NODES:
        return False
    for node in nodes:
        if not DTYPES[np.dtype(infer(node, leaf)).name].numba_stored:
            return False  # numba has no such numbers
        if not isinstance(node, Call) or OPERATIONS[node.op].is_cast:
            continue
        dtype = compute_types(node.op, [infer(arg, leaf) for arg in node.args])[-1]
        kind = np.dtype(dtype).kind
        if node.op == "**" and kind in "ic":
            if whole_power(node.args[1], kind) is None:
                return False
        elif dtype == "float16" or not OPERATIONS[node.op].cpu.keys() & {kind, ""}:
            return False
    return True


def operation(node: Call, dtype: str, args: Sequence[str]) -> str:
    """The text of an operation, its arguments being of this dtype."""
    kind = np.dtype(dtype).kind
    if node.op == "**" and (power := whole_power(node.args[1], kind)) is not None:
        return _power(args[0], power, dtype)
    if node.op == "**" and args[1] == number(0.5, dtype):
        return f"pick({args[0]} == -math.inf, {dtype}(math.inf), math.sqrt({args[0]} + {dtype}(0)))"
    record = OPERATIONS[node.op]
    text = record.cpu[kind] if kind in record.cpu else record.cpu[""]
    text = text.replace("{t}", dtype).replace("{r}", DTYPES[dtype].real)
    for k, arg in enumerate(args):
        text = text.replace(f"{{{k}}}", arg)
    if kind != "i" or record.is_comparison:
        return text
    *first, last = text.split("; ")  # numba would go on in int64
    return "; ".join([*first, f"{dtype}({last})"])


def _power(base: str, power: int, dtype: str) -> str:
    """Products by repeated squaring, in the order of numpy."""
    if power == 0:
        return number(1, dtype)
    steps: list[str] = []
    result = ""
    while True:
        if power & 1:
            result = f"{dtype}({result} * {base})" if result else base
        power >>= 1
        if not power:
            return "; ".join([*steps, result])
        square = "{n}" + "q" * (len(steps) + 1)
        steps.append(f"{square} = {dtype}({base} * {base})")
        base = square


def number(value: Any, dtype: str) -> str:
    """A constant in a dtype, with every bit of it."""
    kind = np.dtype(dtype).kind
    exact = np.dtype(dtype).type(value).item()
    if kind == "c":
        part = "float32" if dtype == "complex64" else "float64"
        return f"complex({number(exact.real, part)}, {number(exact.imag, part)})"
    if kind == "f" and not math.isfinite(exact):
        exact = "math.nan" if math.isnan(exact) else f"math.copysign(math.inf, {exact > 0:d} - 0.5)"
        return f"{dtype}({exact})"
    return repr(exact) if kind == "b" else f"{dtype}({exact!r})"


def convert(text: str, found: str, wanted: str) -> str:
    """A value of one dtype in another one."""
    if found == wanted:
        return text
    if wanted == "bool":
        return f"({text} != 0)"
    if wanted.startswith("complex") and not found.startswith("complex"):
        part = "float32" if wanted == "complex64" else "float64"
        return f"complex({part}({text}), {part}(0))"
    return f"{wanted}({text})"


# ---- lanes ----------------------------------------------------------------------------------------------------------


@dataclass
class Lanes:
    """The lines before the loop over the lanes and those inside it. A value is computed once, outside if it can be."""

    nest: Nest
    prefix: str  # of new names
    before: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)
    known: dict[tuple[Scalar, int, int], str] = field(default_factory=dict)

    def kind(self, node: Scalar) -> Type:
        return infer(node, lambda leaf: np.dtype(self.nest.reads[leaf.position].dtype))  # type: ignore[union-attr]

    def uses(self, node: Scalar) -> set[int]:
        """The loops that a value depends on."""
        found: set[int] = set()
        for part in walk(node):
            if isinstance(part, Arg):
                access = self.nest.reads[part.position]
                found.update(access.loops, *(self.uses(gather) for gather in access.gathers))
        return found

    def value(self, node: Scalar, dtype: str, row: int = 0, step: int = 0) -> str:
        """The value of an expression in a dtype, for one of the rows and steps that are unrolled."""
        if isinstance(node, Const):
            return number(node.value, dtype)
        uses = self.uses(node)
        key = (node, row if self.nest.row in uses else 0, step if self.nest.step in uses else 0)
        if key not in self.known:
            text = (
                self.read(node.position, row, step)
                if isinstance(node, Arg)
                else self.apply(node, row, step)
            )
            self.known[key] = self.keep(text, self.nest.lane in uses)
        return convert(self.known[key], np.dtype(self.kind(node)).name, dtype)

    def keep(self, text: str, inside: bool) -> str:
        """A new name for the last of some expressions; those before it are assignments."""
        name = f"{self.prefix}{len(self.before) + len(self.inside)}"
        *first, last = text.replace("{n}", name).split("; ")
        (self.inside if inside else self.before).extend([*first, f"{name} = {last}"])
        return name

    def apply(self, node: Scalar, row: int, step: int) -> str:
        assert isinstance(node, Call)
        dtypes = compute_types(node.op, [self.kind(arg) for arg in node.args])
        args = [
            self.value(arg, dtype, row, step) for arg, dtype in zip(node.args, dtypes, strict=True)
        ]
        return (
            convert(args[0], dtypes[0], node.op)
            if OPERATIONS[node.op].is_cast
            else operation(node, dtypes[-1], args)
        )

    def read(self, array: int, row: int, step: int) -> str:
        pointer, lane = self.pointer(array, row, step)
        return f"{pointer}[{lane}]" + " != 0" * (self.nest.reads[array].dtype == "bool")

    def pointer(self, array: int, row: int = 0, step: int = 0) -> tuple[str, str]:
        """A pointer to an array's element at the first lane, and how many elements from it a lane is."""
        nest, access = self.nest, (*self.nest.reads, self.nest.out)[array]
        place = {nest.step: f"{self.prefix}j{step}", nest.row: f"{self.prefix}r{row}"}
        place.setdefault(nest.lane, "c")
        steps = [f"{place.get(loop, f'i{loop}')}, S{array}_{loop}" for loop in access.loops]
        itemsize = np.dtype(access.dtype).itemsize
        apart = "" if access.dense else f" * (S{array}_{nest.lane} // {itemsize})"
        lane = [f"{{v}}{apart}"] * (nest.lane in access.loops)
        for k, gather in enumerate(access.gathers):
            inside, index = nest.lane in self.uses(gather), self.value(gather, "int64", row, step)
            for name, order in ((f"L{array}_{k}", "<"), (f"H{array}_{k}", ">")):
                line = f"{name} = pick({index} {order} {name}, {index}, {name})"
                (self.inside if inside else self.before).append(line)
            # Nothing is read out of bounds, whatever the index.
            safe = self.keep(f"pick((0 <= {index}) & ({index} < N{array}_{k}), {index}, 0)", inside)
            if inside:
                lane.append(f"{safe} * (J{array}_{k} // {itemsize})")
            else:
                steps.append(f"{safe}, J{array}_{k}")
        kind = "uint8" if access.dtype == "bool" else access.dtype
        return self.keep(f"at({', '.join([kind, f'A{array}_0', *steps])})", False), " + ".join(
            lane
        ) or "0"
