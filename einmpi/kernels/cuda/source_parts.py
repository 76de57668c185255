"""Building blocks of generated CUDA kernels: signature, loop indices, reads, totals of a team.

In the text, `i0`, `i1`, … are the indices of the loops, `array0`, `array1`, … the arrays; the
other arguments are named after their role, such as `extent2` or `stride0_2` (see Nest.parameters).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from textwrap import dedent

from einmpi.kernels.cuda.device_functions import device_source
from einmpi.kernels.cuda.nest import WARP_THREADS, CudaNest, Nest
from einmpi.kernels.cuda.scalar_source import STORED, Fold, Steps

# Arguments that are not offsets into an array keep 64 bits.
LONG_ROLES = ("multiplier", "shift", "first", "wants_range", "gather_extent")


@dataclass
class KernelText:
    """The text of a kernel while it is written, line by line."""

    lines: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)  # lines in front of the kernel
    depth: int = 0

    def add(self, *texts: str) -> None:
        """Add lines; those of a text are indented relative to its first line."""
        for text in texts:
            lines = dedent(text).strip("\n").splitlines()
            self.lines += ["  " * self.depth + line for line in lines]

    @contextmanager
    def block(self, head: str, end: str = "}") -> Iterator[None]:
        """Write `head {`, then what the caller adds, indented, then `end`."""
        self.lines.append("  " * self.depth + head + " {")
        self.depth += 1
        yield
        self.depth -= 1
        self.add(end)


def whole_text(nest: Nest, text: KernelText, threads: int) -> str:
    """Return the text of a kernel: device functions, the type of indices, arguments, statements.

    Every number arrives in 64 bits, whatever it is used for, and is converted first of all.
    """
    arguments = []
    conversions = []
    for name in nest.parameters():
        role = name.rstrip("0123456789_")
        if role == "array":
            array = int(name.removeprefix(role))
            const = "const " if array < len(nest.reads) else ""
            kind = STORED[nest.arrays[array].dtype]
            arguments.append(f"{const}{kind}* __restrict__ {name}")
        elif role == "report":
            arguments.append(f"Long* {name}")
        else:
            kind = "Long" if role in LONG_ROLES else "I"
            arguments.append(f"Long given_{name}")
            conversions.append(f"  const {kind} {name} = ({kind})given_{name};")
    index_type = "Long" if nest.wide else "int"
    lines = [
        *text.functions,
        f"typedef {index_type} I;  // of indices and offsets",
        f'extern "C" __global__ void __launch_bounds__({threads}) kernel(',
        "    " + ",\n    ".join(arguments) + ") {",
        *conversions,
        *("  " + line for line in text.lines),
        "}",
        "",
    ]
    return device_source() + "\n".join(lines)


def add_loop_indices(text: KernelText, flat: str, loops: Sequence[int]) -> None:
    """Split a flat index into the indices i0, i1, … of loops, of which the last is the fastest.

    `flat` is the name of a variable, which is used up.
    """
    for loop in reversed(loops[1:]):
        text.add(f"""
            const I quotient{loop} = quotient({flat}, multiplier{loop}, shift{loop});
            const I i{loop} = {flat} - quotient{loop} * extent{loop};
            {flat} = quotient{loop};
        """)
    if loops:
        text.add(f"const I i{loops[0]} = {flat};")


def extent_product(loops: Sequence[int]) -> str:
    """Return the product of the extents of loops, as text."""
    return " * ".join(f"extent{loop}" for loop in loops) or "(I)1"


def add_part_bounds(nest: CudaNest, text: KernelText) -> None:
    """Say which of the aggregated values belong to the part of this block."""
    text.add(f"""
        const I begin = (I)blockIdx.y * part_length;
        const I end = least(begin + part_length, {extent_product(nest.aggregated_loops)});
    """)


def steps_of(
    nest: CudaNest,
    prefix: str = "v",
    part: str = "",
    from_shared_memory: Callable[[int], str | None] = lambda read: None,
) -> Steps:
    """Return an empty list of statements that read operands at the indices i0, i1, …

    `part` is the position in a pack. `from_shared_memory` gives the text of reads that are in
    shared memory already, and None for the others.
    """
    lane = nest.loops - 1 if nest.lane_is_aggregated else nest.output_loops - 1

    def read_text(read: int) -> str:
        shared = from_shared_memory(read)
        if shared is not None:
            return shared
        if read in nest.counters:
            return counter_text(read, nest.reads[read].loops, lane, nest.pack, part)
        if read in nest.packed:
            return f"load(pack{read}.at[{part}])"
        return f"load(array{read}[{offset_text(nest, read, steps)}])"

    steps = Steps([access.dtype for access in nest.reads], read_text, prefix)
    return steps


def counter_text(read: int, loops: Sequence[int], lane: int, pack: int, part: str) -> str:
    """Return the value of a read that counts a loop; the lane counts packs, not elements."""
    if not loops:
        return f"(first{read} + 0)"
    if lane in loops and pack > 1:
        return f"(first{read} + i{loops[0]} * {pack} + {part})"
    return f"(first{read} + i{loops[0]})"


def offset_text(nest: Nest, array: int, steps: Steps | None = None) -> str:
    """Return the offset of an array's element. An index out of range reads element 0 instead.

    Gathers need `steps`, to which the statements that compute and check the indices are added.
    """
    access = nest.arrays[array]
    terms = [f"i{loop} * stride{array}_{loop}" for loop in access.loops]
    for number, gather in enumerate(access.gathers):
        assert steps is not None, "only operands are gathered"
        index = steps.value(gather, "int64")
        if (array, number) not in nest.checked:
            terms.append(f"(I){index} * gather_stride{array}_{number}")
            continue
        in_range = steps.keep(f"0 <= {index} && {index} < gather_extent{array}_{number}", "bool")
        lowest = 1 + 2 * nest.checked.index((array, number))
        steps.lines += [
            f"if (!{in_range}) report[0] = 1;",
            f"if (wants_range) atomicMin(report + {lowest}, {index});",
            f"if (wants_range) atomicMax(report + {lowest + 1}, {index});",
        ]
        terms.append(f"(I)({in_range} ? {index} : 0) * gather_stride{array}_{number}")
    return " + ".join(terms) or "0"


def output_offset_text(nest: CudaNest) -> str:
    """Return the offset of a result in the output of this block's part."""
    return f"{offset_text(nest, len(nest.reads))} + (I)blockIdx.y * part_stride"


def fold_of(nest: CudaNest, types: Sequence[str]) -> Fold:
    assert nest.aggregation is not None
    return Fold(nest.aggregation, nest.function, tuple(types))


def add_team_total(
    text: KernelText, total: str, kind: str, fold: Fold, team: int, teams: int
) -> None:
    """Join the totals of a team of neighbouring threads, so that each thread has the result.

    Threads of a warp exchange their totals directly, warps through shared memory.
    """
    text.add(f"""
        // Join the totals of a team.
        #pragma unroll
        for (int half = {min(team, WARP_THREADS) // 2}; half; half /= 2) {{
          {total} = {fold.join(total, f"from_lane({total}, half)")};
        }}
    """)
    warps = team // WARP_THREADS
    if warps < 2:
        return
    first = f"threadIdx.x / {team} * {warps}"
    with text.block(""):
        text.add(f"""
            __shared__ {kind} warps[{warps * teams}];
            if (threadIdx.x % {WARP_THREADS} == 0) warps[threadIdx.x / {WARP_THREADS}] = {total};
            __syncthreads();
            {total} = warps[{first}];
            #pragma unroll
            for (int w = 1; w < {warps}; ++w) {{
              {total} = {fold.join(total, f"warps[{first} + w]")};
            }}
        """)
