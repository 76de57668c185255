"""Parts of the text of CUDA kernels: how they begin, coordinates, what is read, how a team of threads joins totals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from einmpi.kernels.cuda.nest import WARP, Nest
from einmpi.kernels.cuda.scalar_source import Fold, Steps


@dataclass
class Text:
    lines: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    depth: int = 0

    def add(self, *lines: str) -> None:
        self.lines += ["  " * self.depth + line for line in lines]

    def open(self, line: str) -> None:
        self.add(line + " {")
        self.depth += 1

    def close(self, count: int = 1) -> None:
        for _ in range(count):
            self.depth -= 1
            self.add("}")


def signature(
    names: Sequence[tuple[str, int, int]],
    types: Sequence[str],
    reads: int,
    wide: bool,
    threads: int,
) -> list[str]:
    """How a kernel begins: its arguments, all of 64 bits, then these as what they are."""
    given = ", ".join(
        f"{'const ' * (m < reads)}{types[m]}* __restrict__ p{m}"
        if letter == "p"
        else "Long* told"
        if letter == "t"
        else f"Long {letter}{m}_{y}_"
        for letter, m, y in names
    )
    lines = [
        f"typedef {'Long' if wide else 'int'} I;",
        f'extern "C" __global__ void __launch_bounds__({threads}) kernel({given}) {{',
    ]
    for letter, m, y in names:
        if letter not in "pt":
            kind = "Long" if letter in "mzbre" else "I"  # those are no places
            lines.append(f"  const {kind} {letter}{m}_{y} = ({kind}){letter}{m}_{y}_;")
    return lines


def unravel(text: Text, flat: str, loops: Sequence[int]) -> None:
    """The coordinates i0, i1, … of a flat index, the last loop the fastest. `flat` is a name that may be changed."""
    for k in reversed(loops[1:]):
        text.add(
            f"const I q{k} = quotient({flat}, m{k}_0, z{k}_0);",
            f"const I i{k} = {flat} - q{k} * n{k}_0;",
            f"{flat} = q{k};",
        )
    if loops:
        text.add(f"const I i{loops[0]} = {flat};")


def product(loops: Sequence[int]) -> str:
    return " * ".join(f"n{k}_0" for k in loops) or "(I)1"


def steps_of(
    nest: Nest,
    prefix: str = "v",
    part: str = "",
    given: Callable[[int], str | None] = lambda m: None,
) -> Steps:
    """Statements at the coordinates i0, i1, …, for this part of a pack; `given` has the text of what is in shared
    memory."""
    lane = nest.loops - 1 if nest.along else nest.outputs - 1

    def read(m: int) -> str:
        known = given(m)
        if known is not None:
            return known
        if m in nest.counted:
            return count_of(m, nest.reads[m].loops, lane, nest.pack, part)
        if m in nest.packed:
            return f"load(pack{m}.at[{part}])"
        return f"load(p{m}[{place_of(nest, m, steps)}])"

    steps = Steps([access.dtype for access in nest.reads], read, prefix)
    return steps


def count_of(m: int, loops: Sequence[int], lane: int, pack: int, part: str) -> str:
    """The value of a read that counts a loop, if any; along the lane a loop counts packs."""
    times = f" * {pack} + {part}" if lane in loops and pack > 1 else ""
    return f"(b{m}_0 + {f'i{loops[0]}{times}' if loops else '0'})"


def place_of(nest: Nest, m: int, steps: Steps | None = None) -> str:
    """Where the element of an array lies. Nothing is read out of bounds, whatever the index of a gather."""
    access = (*nest.reads, nest.out)[m]
    terms = [f"i{k} * s{m}_{k}" for k in access.loops]
    for g, gather in enumerate(access.gathers):
        assert steps is not None
        index = steps.value(gather, "int64")
        fits = steps.keep(f"0 <= {index} && {index} < e{m}_{g}", "bool")
        number = 1 + 2 * nest.gathers.index((m, g))
        steps.lines += [
            f"if (!{fits}) told[0] = 1;",
            f"if (r0_0) atomicMin(told + {number}, {index});",
            f"if (r0_0) atomicMax(told + {number + 1}, {index});",
        ]
        terms.append(f"(I)({fits} ? {index} : 0) * j{m}_{g}")
    return " + ".join(terms) or "0"


def part_place(nest: Nest) -> str:
    return f"{place_of(nest, len(nest.reads))} + (I)blockIdx.y * o0_0"


def fold_of(nest: Nest, types: Sequence[str]) -> Fold:
    assert nest.aggregation is not None
    return Fold(nest.aggregation, nest.function, tuple(types))


def join_team(text: Text, name: str, kind: str, fold: Fold, team: int, teams: int) -> None:
    """⊕ over a team of neighbouring threads, so that each of them has it: in warps, then from warp to warp."""
    text.add("#pragma unroll")
    text.open(f"for (int half = {min(team, WARP) // 2}; half; half /= 2)")
    text.add(f"{name} = {fold.join(name, f'from_lane({name}, half)')};")
    text.close()
    warps = team // WARP
    if warps < 2:
        return
    text.open("")
    text.add(
        f"__shared__ {kind} warps[{warps * teams}];",
        f"if (threadIdx.x % {WARP} == 0) warps[threadIdx.x / {WARP}] = {name};",
        "__syncthreads();",
        f"{name} = warps[threadIdx.x / {team} * {warps}];",
        "#pragma unroll",
    )
    text.open(f"for (int w = 1; w < {warps}; ++w)")
    text.add(f"{name} = {fold.join(name, f'warps[threadIdx.x / {team} * {warps} + w]')};")
    text.close(2)
