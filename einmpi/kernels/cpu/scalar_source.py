"""⊗ as text of a compiled CPU kernel, each operation in the dtype in which numpy computes it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from einmpi.graph.arithmetic import compute_types, infer_over
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.index_arithmetic import MIRRORED_COMPARISONS
from einmpi.graph.operations import OPERATIONS, Operation
from einmpi.graph.scalar import Arg, Call, Number, Scalar, walk
from einmpi.kernels.loop_nest import COUNTER_STEP, Nest
from einmpi.kernels.scalar_text import Dialect, ScalarText, whole_power

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


def operation(name: str, args: Sequence[str], dtypes: Sequence[str]) -> str:
    """Return the text of an operation on arguments of these dtypes.

    It may be several statements, divided by "; ", of which the last one is the value.
    """
    record = OPERATIONS[name]
    if record.is_comparison and tuple(dtypes) == ("int64", "uint64"):
        return _exact_comparison(name, args[0], args[1])
    if record.is_comparison and tuple(dtypes) == ("uint64", "int64"):
        return _exact_comparison(MIRRORED_COMPARISONS[name], args[1], args[0])
    dtype = dtypes[-1]
    if name == "**" and args[1] == number(0.5, dtype):
        root = f"math.sqrt({args[0]} + {dtype}(0))"
        return f"pick({args[0]} == -math.inf, {dtype}(math.inf), {root})"
    written = _text_of(record, DTYPES[dtype].kind)
    assert written is not None
    text = written.replace("{t}", dtype).replace("{r}", DTYPES[dtype].real)
    text = record.with_arguments(text, args)
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
class Lanes(ScalarText):
    """The lines before the loop over the lanes and those inside it.

    A value is computed before the loop if it does not depend on the lane. `prefix` begins the
    names of values. With `walks`, arrays that are read along the steps have addresses that go from
    one step to the next: less work than a product for each step. `walked` notes these arrays.
    """

    dialect = Dialect(number, convert, convert, operation)
    nest: Nest
    prefix: str
    before: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)
    known: dict[Hashable, str] = field(default_factory=dict)
    walks: bool = False
    walked: dict[int, str] = field(default_factory=dict)  # the stride of each array

    def __post_init__(self) -> None:
        self.types = [read.dtype for read in self.nest.reads]

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

    def key(self, node: Scalar, row: int, step: int) -> Hashable:
        uses = self.uses(node)
        return node, row if self.nest.row in uses else 0, step if self.nest.step in uses else 0

    def assign(self, node: Scalar, text: str, dtype: str) -> str:
        return self.keep(text, self.nest.lane in self.uses(node))

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

    def load(self, array: int, row: int, step: int) -> str:
        """Return the text that reads an element of an array; {v} in it is the lane."""
        if self.nest.reads[array].counts:
            return self.counted_value(array, row, step)
        pointer, lane = self.pointer(array, row, step)
        element = f"{pointer}[{lane}]"
        return f"{element} != 0" if self.nest.reads[array].dtype == "bool" else element

    def counted_value(self, array: int, row: int, step: int) -> str:
        """Return the text that computes a value of a Counter; {v} in it is the lane."""
        index_of = self.loop_indices(row, step)
        terms = [f"array{array}"]
        loops = self.nest.reads[array].loops
        for loop in loops:
            terms.append(f"{index_of[loop]} * stride{array}_{loop}")
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
        first = f"array{array}"
        loops = list(access.loops)
        if self.walks and nest.step in loops:
            first = f"walk{array}"
            loops.remove(nest.step)
            self.walked[array] = f"stride{array}_{nest.step}"
        steps = [f"{index_of[loop]}, stride{array}_{loop}" for loop in loops]
        lane_terms = []
        if nest.lane in access.loops:
            apart = "" if access.dense else f" * (stride{array}_{nest.lane} // {itemsize})"
            lane_terms.append("{v}" + apart)
        for k, gather in enumerate(access.gathers):
            depends_on_lane = nest.lane in self.uses(gather)
            index = self.gathered_index(array, k, gather, depends_on_lane, row, step)
            if depends_on_lane:
                lane_terms.append(f"{index} * (gather_stride{array}_{k} // {itemsize})")
            else:
                steps.append(f"{index}, gather_stride{array}_{k}")
        arguments = [DTYPES[access.dtype].numba_stored, first, *steps]
        pointer = self.keep(f"at({', '.join(arguments)})", False)
        return pointer, " + ".join(lane_terms) or "0"

    def gathered_index(
        self, array: int, k: int, gather: Scalar, depends_on_lane: bool, row: int, step: int
    ) -> str:
        """Return the index of gather number `k`, and note the least and the greatest one."""
        index = self.value(gather, "int64", row, step)
        if self.nest.place is not None and gather == Arg(self.nest.place):
            return index  # the kernel computes nothing for other places
        if not (*self.nest.reads, self.nest.out)[array].is_checked:
            return index
        lines = self.inside if depends_on_lane else self.before
        least = f"lowest{array}_{k}"
        greatest = f"highest{array}_{k}"
        lines.append(f"{least} = pick({index} < {least}, {index}, {least})")
        lines.append(f"{greatest} = pick({index} > {greatest}, {index}, {greatest})")
        # Nothing is read out of bounds, whatever the index; a negative one becomes a huge number.
        in_range = f"uint64({index}) < uint64(gather_extent{array}_{k})"
        return self.keep(f"pick({in_range}, {index}, 0)", depends_on_lane)
