"""The text of a CUDA kernel that does several vertices, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from einmpi.graph.scalar import Arg, Scalar, walk
from einmpi.runtime.cuda_source import Text, join_team, signature, unravel
from einmpi.runtime.cuda_text import COMPUTED, HALVES, STORED, Fold, Steps, convert, stored
from einmpi.runtime.cuda_words import COMMON, DEVICE
from einmpi.runtime.loop_plan import Access

BLOCK = 256  # threads, where a team is no larger


@dataclass(frozen=True)
class Made:
    """A vertex: over Args, of which the first ones are what the vertices make, and the others are read."""

    function: Scalar
    aggregation: str | None
    dtype: str
    inside: bool  # it has a value for every place inside a row, not one a row


@dataclass(frozen=True)
class GroupNest:
    """All that the text of a kernel depends on. Loops: the rows, then what is inside one."""

    made: tuple[Made, ...]
    reads: tuple[Access, ...]
    counted: tuple[int, ...]  # reads that are no arrays, but count a loop
    outputs: tuple[int, ...]  # those made that are stored
    rows: int
    loops: int
    team: int  # threads that share a row
    each: int  # places of a row that a thread has
    wide: bool  # places need 64 bits

    @property
    def teams(self) -> int:
        return max(1, BLOCK // self.team)

    @property
    def types(self) -> tuple[str, ...]:
        return (*(made.dtype for made in self.made), *(read.dtype for read in self.reads))

    def parameters(self) -> Iterator[tuple[str, int, int]]:
        """The names of a kernel's arguments, as Nest has them; arrays are the reads, then the outputs."""
        arrays = range(len(self.reads) + len(self.outputs))
        yield from (("p", m, 0) for m in arrays if m not in self.counted)
        for k in range(self.loops):
            yield from ((letter, k, 0) for letter in "nmz")
        for m in arrays:
            if m in self.counted:
                yield "b", m, 0
            else:
                yield from (("s", m, k) for k in self.along(m))

    def along(self, m: int) -> tuple[int, ...]:
        """The loops along which an array has a stride."""
        if m < len(self.reads):
            return self.reads[m].loops
        inside = self.made[self.outputs[m - len(self.reads)]].inside
        return tuple(range(self.loops if inside else self.rows))

    def is_inside(self, m: int) -> bool:
        return any(loop >= self.rows for loop in self.reads[m].loops)


def group_source(nest: GroupNest) -> str:
    text, inner = Text(), range(nest.rows, nest.loops)
    text.add(f"const int lane = threadIdx.x % {nest.team}, slot = threadIdx.x / {nest.team};",
             f"const I count = {' * '.join(f'n{k}_0' for k in range(nest.rows)) or '1'};",
             f"const I own = (I)blockIdx.x * {nest.teams} + slot;", "I flat = least(own, count - 1);",
             f"const I places = {' * '.join(f'n{k}_0' for k in inner)};")  # fmt: skip
    unravel(text, "flat", range(nest.rows))
    again = {m for m in range(len(nest.reads)) if m not in nest.counted and nest.is_inside(m)
             and sum(Arg(len(nest.made) + m) in walk(made.function) for made in nest.made) > 1}  # fmt: skip
    for m in sorted(again):
        text.add(f"{COMPUTED[nest.reads[m].dtype]} kept{m}[{nest.each}];")
    for number in range(len(nest.made)):
        _stage(nest, number, text, again)
        again -= _args(nest, number)
    types = [STORED[nest.types[len(nest.made) + m]] for m in range(len(nest.reads))]
    types += [STORED[nest.made[number].dtype] for number in nest.outputs]
    start = signature(list(nest.parameters()), types, len(nest.reads), nest.wide, nest.team * nest.teams)
    return DEVICE + COMMON + "\n".join([*start, *("  " + line for line in text.lines), "}", ""])


def _args(nest: GroupNest, number: int) -> set[int]:
    """The reads of a vertex."""
    positions = {node.position for node in walk(nest.made[number].function) if isinstance(node, Arg)}
    return {position - len(nest.made) for position in positions if position >= len(nest.made)}


def _stage(nest: GroupNest, number: int, text: Text, again: set[int]) -> None:
    """A vertex: for every place of the row, or folded over it. `again`: what is read now and kept for later."""
    made = nest.made[number]
    fold = Fold(made.aggregation, made.function, nest.types) if made.aggregation else None
    kind = COMPUTED[made.dtype]
    loops = fold is not None or made.inside
    if fold:
        text.add(f"{COMPUTED[fold.dtype]} total{number} = {fold.start(fold.dtype)};")
    if made.inside:
        text.add(f"{kind} made{number}[{nest.each}];")
    if loops:
        text.add("#pragma unroll")
        text.open(f"for (int u = 0; u < {nest.each}; ++u)")
        text.add(f"const I place = lane + u * {nest.team};", "I deep = least(place, places - 1);")
        unravel(text, "deep", range(nest.rows, nest.loops))
    steps = Steps(nest.types, lambda position: _read(nest, position), f"w{number}_")
    now = again & _args(nest, number)
    for m in sorted(now):
        text.add(f"kept{m}[u] = load(p{m}[{_place(nest, m)}]);")
    if fold:
        taken = fold.take(steps, f"total{number}")
        text.add(*steps.lines, f"if (place < places) total{number} = {taken};")
        text.close()
        join_team(text, f"total{number}", COMPUTED[fold.dtype], fold, nest.team, nest.teams)
        value = convert(f"total{number}", fold.dtype, made.dtype)
    else:
        value = steps.value(made.function, made.dtype)
        text.add(*steps.lines)
    if made.dtype in HALVES:  # rounded, as it would be in memory
        value = f"load(Cell<{STORED[made.dtype]}>::of({value}))"
    text.add(f"made{number}[u] = {value};" if made.inside else f"const {kind} made{number} = {value};")
    if number in nest.outputs:
        m = len(nest.reads) + nest.outputs.index(number)
        condition = "own < count && place < places" if made.inside else "own < count && lane == 0"
        result = stored(f"made{number}" + "[u]" * made.inside, made.dtype, made.dtype)
        text.add(f"if ({condition}) p{m}[{_place(nest, m)}] = {result};")
    if made.inside and not fold:
        text.close()


def _read(nest: GroupNest, position: int) -> str:
    if position < len(nest.made):
        return f"made{position}" + "[u]" * nest.made[position].inside
    m = position - len(nest.made)
    if m in nest.counted:
        return f"(b{m}_0 + {''.join(f'i{k}' for k in nest.reads[m].loops) or '0'})"
    return f"load(p{m}[{_place(nest, m)}])"


def _place(nest: GroupNest, m: int) -> str:
    return " + ".join(f"i{k} * s{m}_{k}" for k in nest.along(m)) or "0"
