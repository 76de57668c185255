"""⊗ as text of a compiled CPU kernel, each operation in the dtype in which numpy computes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from einmpi.graph.arithmetic import compute_types, infer_over
from einmpi.graph.dtypes import DTYPES, Type
from einmpi.graph.index_arithmetic import MIRRORED_COMPARISONS
from einmpi.graph.operations import OPERATIONS, Operation
from einmpi.graph.scalar import Arg, Call, Const, Number, Scalar, walk
from einmpi.kernels.loop_nest import COUNTER_STEP, Nest
from einmpi.kernels.prepared import whole_power

MAX_NODES = 256


def is_supported(function: Scalar, dtypes: Sequence[str]) -> bool:
    """Return whether every operation of a function over operands of these dtypes has a text."""
    nodes = walk(function)
    if len(nodes) > MAX_NODES:
        return False
    for node in nodes:
        if not _is_in_numba(np.dtype(infer_over(node, dtypes)).name):
            return False
        if isinstance(node, Call) and not _has_text(node, dtypes):
            return False
    return True


def _has_text(node: Call, dtypes: Sequence[str]) -> bool:
    record = OPERATIONS[node.op]
    if record.is_cast:
        return True
    dtype = compute_types(node.op, [infer_over(arg, dtypes) for arg in node.args])[-1]
    if not _is_in_numba(dtype):
        return False
    kind = DTYPES[dtype].kind
    if node.op == "**" and kind in "iuc":
        return whole_power(node.args[1], kind) is not None
    return _text_of(record, kind) is not None


def _text_of(record: Operation, kind: str) -> str | None:
    """Return the text of an operation on numbers of a kind, None if it has none."""
    if kind in record.cpu:
        return record.cpu[kind]
    if kind == "u" and "i" in record.cpu:
        return record.cpu["i"]
    return record.cpu.get("")


def _is_in_numba(dtype: str) -> bool:
    return DTYPES[dtype].numba_stored != ""


def operation(node: Call, dtype: str, args: Sequence[str]) -> str:
    """Return the text of an operation on arguments of this dtype.

    It may be several statements, divided by "; ", of which the last one is the value.
    """
    kind = DTYPES[dtype].kind
    if node.op == "**":
        power = whole_power(node.args[1], kind)
        if power is not None:
            return _power(args[0], power, dtype)
        if args[1] == number(0.5, dtype):
            base = args[0]
            root = f"math.sqrt({base} + {dtype}(0))"
            return f"pick({base} == -math.inf, {dtype}(math.inf), {root})"
    record = OPERATIONS[node.op]
    written = _text_of(record, kind)
    assert written is not None
    text = written.replace("{t}", dtype).replace("{r}", DTYPES[dtype].real)
    for k, arg in enumerate(args):
        text = text.replace(f"{{{k}}}", arg)
    result = record.dtypes((np.dtype(dtype),) * record.arity)[-1]
    if result.kind not in "iu":
        return text
    *assignments, value = text.split("; ")
    return "; ".join([*assignments, f"{dtype}({value})"])  # numba would go on in int64


def _exact_comparison(op: str, signed: str, unsigned: str) -> str:
    """Return the text of a comparison of an int64 with a uint64; numba's own is that of floats."""
    is_negative = f"({signed} < 0)"
    if op in ("<", "<=", "!="):  # these hold for every negative number
        return f"{is_negative} | (uint64({signed}) {op} {unsigned})"
    return f"(not {is_negative}) & (uint64({signed}) {op} {unsigned})"


def _power(base: str, power: int, dtype: str) -> str:
    """Return products by repeated squaring, in the order of numpy."""
    if power == 0:
        return number(1, dtype)
    assignments: list[str] = []
    result = ""
    while True:
        if power & 1:
            result = f"{dtype}({result} * {base})" if result else base
        power >>= 1
        if not power:
            return "; ".join([*assignments, result])
        square = "{n}" + "q" * (len(assignments) + 1)
        assignments.append(f"{square} = {dtype}({base} * {base})")
        base = square


def number(value: Number, dtype: str) -> str:
    """Return a constant in a dtype, with every bit of it."""
    kind = np.dtype(dtype).kind
    exact = np.dtype(dtype).type(value).item()
    if kind == "c":
        part = DTYPES[dtype].real
        return f"complex({number(exact.real, part)}, {number(exact.imag, part)})"
    if kind == "b":
        return repr(exact)
    if kind == "f" and math.isnan(exact):
        return f"{dtype}(math.nan)"
    if kind == "f" and math.isinf(exact):
        sign = 1.0 if exact > 0 else -1.0
        return f"{dtype}(math.copysign(math.inf, {sign}))"
    return f"{dtype}({exact!r})"


def convert(text: str, found: str, wanted: str) -> str:
    """Return the text of a value of one dtype in another one."""
    if found == wanted:
        return text
    if wanted == "bool":
        return f"({text} != 0)"
    if DTYPES[wanted].kind == "c" and DTYPES[found].kind != "c":
        part = DTYPES[wanted].real
        return f"complex({part}({text}), {part}(0))"
    if DTYPES[wanted].kind in "iu" and DTYPES[found].kind == "f":
        return f"whole({wanted}, {text})"
    return f"{wanted}({text})"


# ---- lanes --------------------------------------------------------------------------------------


@dataclass
class Lanes:
    """The lines before the loop over the lanes and those inside it.

    A value is computed once, before the loop if it does not depend on the lane. `prefix` begins
    the names of values; `known` has the name of each value by row and step of the unrolled loops.
    """

    nest: Nest
    prefix: str
    before: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)
    known: dict[tuple[Scalar, int, int], str] = field(default_factory=dict)

    def kind(self, node: Scalar) -> Type:
        """Return the type of an expression."""
        return infer_over(node, [read.dtype for read in self.nest.reads])

    def uses(self, node: Scalar) -> set[int]:
        """Return the loops that a value depends on."""
        found: set[int] = set()
        for part in walk(node):
            if isinstance(part, Arg):
                access = self.nest.reads[part.position]
                found.update(access.loops)
                for gather in access.gathers:
                    found.update(self.uses(gather))
        return found

    def value(self, node: Scalar, dtype: str, row: int = 0, step: int = 0) -> str:
        """Return the value of an expression in a dtype, for one of the unrolled rows and steps."""
        if isinstance(node, Const):
            return number(node.value, dtype)
        uses = self.uses(node)
        key_row = row if self.nest.row in uses else 0
        key_step = step if self.nest.step in uses else 0
        key = (node, key_row, key_step)
        if key not in self.known:
            if isinstance(node, Arg):
                text = self.read(node.position, row, step)
            else:
                text = self.apply(node, row, step)
            self.known[key] = self.keep(text, self.nest.lane in uses)
        return convert(self.known[key], np.dtype(self.kind(node)).name, dtype)

    def keep(self, text: str, inside: bool) -> str:
        """Assign the last of some statements to a new name and return the name.

        Those before it are assignments already; {n} in them begins with the new name.
        """
        name = f"{self.prefix}{len(self.before) + len(self.inside)}"
        *assignments, value = text.replace("{n}", name).split("; ")
        lines = self.inside if inside else self.before
        lines.extend(assignments)
        lines.append(f"{name} = {value}")
        return name

    def apply(self, node: Scalar, row: int, step: int) -> str:
        """Return the text of an operation on the values of its arguments."""
        assert isinstance(node, Call)
        dtypes = compute_types(node.op, [self.kind(arg) for arg in node.args])
        args = []
        for arg, dtype in zip(node.args, dtypes, strict=True):
            args.append(self.value(arg, dtype, row, step))
        if OPERATIONS[node.op].is_cast:
            return convert(args[0], dtypes[0], node.op)
        if OPERATIONS[node.op].is_comparison and dtypes == ("int64", "uint64"):
            return _exact_comparison(node.op, args[0], args[1])
        if OPERATIONS[node.op].is_comparison and dtypes == ("uint64", "int64"):
            return _exact_comparison(MIRRORED_COMPARISONS[node.op], args[1], args[0])
        return operation(node, dtypes[-1], args)

    def read(self, array: int, row: int, step: int) -> str:
        """Return the text that reads an element of an array; {v} in it is the lane."""
        if self.nest.reads[array].counts:
            return self.counted_value(array, row, step)
        pointer, lane = self.pointer(array, row, step)
        element = f"{pointer}[{lane}]"
        return f"{element} != 0" if self.nest.reads[array].dtype == "bool" else element

    def counted_value(self, array: int, row: int, step: int) -> str:
        """Return the text that computes a value of a Counter; {v} in it is the lane."""
        index_of = self.loop_indices(row, step)
        terms = [f"A{array}_0"]
        loops = self.nest.reads[array].loops
        for loop in loops:
            terms.append(f"{index_of[loop]} * S{array}_{loop}")
        first = self.keep(f"({' + '.join(terms)}) // {COUNTER_STEP}", False)
        return f"{first} + {{v}}" if self.nest.lane in loops else first

    def loop_indices(self, row: int, step: int) -> dict[int | None, str]:
        """Return the name of each loop's index, for one of the unrolled rows and steps."""
        nest = self.nest
        index_of: dict[int | None, str] = {loop: f"i{loop}" for loop in range(nest.loops)}
        index_of[nest.lane] = "c"
        index_of[nest.row] = f"{self.prefix}r{row}"
        index_of[nest.step] = f"{self.prefix}j{step}"
        return index_of

    def pointer(self, array: int, row: int = 0, step: int = 0) -> tuple[str, str]:
        """Return a pointer to an array's element at the first lane, and the lane's distance.

        The distance is in elements. The array after the last one read is the output.
        """
        nest = self.nest
        access = (*nest.reads, nest.out)[array]
        itemsize = np.dtype(access.dtype).itemsize
        index_of = self.loop_indices(row, step)
        steps = [f"{index_of[loop]}, S{array}_{loop}" for loop in access.loops]
        lane_terms = []
        if nest.lane in access.loops:
            apart = "" if access.dense else f" * (S{array}_{nest.lane} // {itemsize})"
            lane_terms.append("{v}" + apart)
        for k, gather in enumerate(access.gathers):
            depends_on_lane = nest.lane in self.uses(gather)
            index = self.gathered_index(array, k, gather, depends_on_lane, row, step)
            if depends_on_lane:
                lane_terms.append(f"{index} * (J{array}_{k} // {itemsize})")
            else:
                steps.append(f"{index}, J{array}_{k}")
        arguments = [DTYPES[access.dtype].numba_stored, f"A{array}_0", *steps]
        pointer = self.keep(f"at({', '.join(arguments)})", False)
        return pointer, " + ".join(lane_terms) or "0"

    def gathered_index(
        self, array: int, k: int, gather: Scalar, depends_on_lane: bool, row: int, step: int
    ) -> str:
        """Return the index of gather number `k`, and note the least and the greatest one."""
        index = self.value(gather, "int64", row, step)
        if self.nest.place is not None and gather == Arg(self.nest.place):
            return index  # the kernel computes nothing for other places
        lines = self.inside if depends_on_lane else self.before
        least = f"L{array}_{k}"
        greatest = f"H{array}_{k}"
        lines.append(f"{least} = pick({index} < {least}, {index}, {least})")
        lines.append(f"{greatest} = pick({index} > {greatest}, {index}, {greatest})")
        # Nothing is read out of bounds, whatever the index; a negative one becomes a huge number.
        in_range = f"uint64({index}) < uint64(N{array}_{k})"
        return self.keep(f"pick({in_range}, {index}, 0)", depends_on_lane)
