"""The text of a CUDA kernel that does several vertices, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from einmpi.graph.scalar import Arg, Scalar, walk
from einmpi.kernels.cuda.device_functions import COMMON, DEVICE
from einmpi.kernels.cuda.scalar_source import COMPUTED, HALVES, STORED, Fold, Steps, convert, stored
from einmpi.kernels.cuda.source_parts import Text, count_of, join_team, product, signature, unravel
from einmpi.kernels.loop_nest import Access

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
    pack: int  # of them that lie behind one another: the inside loop counts packs
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
    text.add(
        f"const int lane = threadIdx.x % {nest.team}, slot = threadIdx.x / {nest.team};",
        f"const I count = {product(range(nest.rows))};",
        f"const I own = (I)blockIdx.x * {nest.teams} + slot;",
        "I flat = least(own, count - 1);",
        f"const I places = {product(inner)};",
    )
    unravel(text, "flat", range(nest.rows))
    again = {
        m
        for m in range(len(nest.reads))
        if m not in nest.counted and nest.is_inside(m) and _is_kept(nest, m)
    }
    for m in sorted(again):
        text.add(f"{COMPUTED[nest.reads[m].dtype]} kept{m}[{nest.each}];")
    for number in range(len(nest.made)):
        _stage(nest, number, text, again)
        again -= _args(nest, number)
    types = [STORED[nest.types[len(nest.made) + m]] for m in range(len(nest.reads))]
    types += [STORED[nest.made[number].dtype] for number in nest.outputs]
    start = signature(
        list(nest.parameters()), types, len(nest.reads), nest.wide, nest.team * nest.teams
    )
    return DEVICE + COMMON + "\n".join([*start, *("  " + line for line in text.lines), "}", ""])


def _args(nest: GroupNest, number: int) -> set[int]:
    """The reads of a vertex."""
    positions = {
        node.position for node in walk(nest.made[number].function) if isinstance(node, Arg)
    }
    return {position - len(nest.made) for position in positions if position >= len(nest.made)}


def _stage(nest: GroupNest, number: int, text: Text, again: set[int]) -> None:
    """A vertex: for every place of the row, or folded over it. `again`: what is read now and kept for later."""
    made = nest.made[number]
    fold = Fold(made.aggregation, made.function, nest.types) if made.aggregation else None
    kind, is_stored = COMPUTED[made.dtype], number in nest.outputs
    m = len(nest.reads) + nest.outputs.index(number) if is_stored else 0
    if fold:
        text.add(f"{COMPUTED[fold.dtype]} total{number} = {fold.start(fold.dtype)};")
    if made.inside:
        text.add(f"{kind} made{number}[{nest.each}];")
    if fold or made.inside:
        text.add("#pragma unroll")
        text.open(f"for (int u = 0; u < {nest.each // nest.pack}; ++u)")
        text.add(f"const I place = lane + u * {nest.team};", "I deep = least(place, places - 1);")
        unravel(text, "deep", range(nest.rows, nest.loops))
        for read in sorted(_args(nest, number)):
            if (
                nest.is_inside(read)
                and read not in nest.counted
                and (read in again or not _is_kept(nest, read))
            ):
                kind_read = f"Pack<{STORED[nest.reads[read].dtype]}, {nest.pack}>"
                text.add(
                    f"const {kind_read} pack{read} = *reinterpret_cast<const {kind_read}*>"
                    f"(p{read} + {_place(nest, read)});"
                )
        if made.inside and is_stored:
            text.add(f"Pack<{STORED[made.dtype]}, {nest.pack}> result;")
    for part in range(nest.pack if fold or made.inside else 1):
        where = f"[u * {nest.pack} + {part}]"
        steps = Steps(nest.types, partial(_read, nest, again, part), f"w{number}_{part}_")
        if fold:
            taken = fold.take(steps, f"total{number}")
            text.add(*steps.lines, f"if (place < places) total{number} = {taken};")
        else:
            value = _rounded(steps.value(made.function, made.dtype), made.dtype)
            name = f"made{number}{where}" if made.inside else f"const {kind} made{number}"
            text.add(*steps.lines, f"{name} = {value};")
        for read in sorted(again & _args(nest, number)):
            text.add(f"kept{read}{where} = load(pack{read}.at[{part}]);")
        if made.inside and is_stored:
            text.add(
                f"result.at[{part}] = {stored(f'made{number}{where}', made.dtype, made.dtype)};"
            )
    if made.inside and is_stored:
        text.add(
            f"if (own < count && place < places) *reinterpret_cast<Pack<{STORED[made.dtype]}, {nest.pack}>*>"
            f"(p{m} + {_place(nest, m)}) = result;"
        )
    if fold or made.inside:
        text.close()
    if fold:
        join_team(text, f"total{number}", COMPUTED[fold.dtype], fold, nest.team, nest.teams)
        value = _rounded(convert(f"total{number}", fold.dtype, made.dtype), made.dtype)
        text.add(f"const {kind} made{number} = {value};")
    if not made.inside and is_stored:
        result = stored(f"made{number}", made.dtype, made.dtype)
        text.add(f"if (own < count && lane == 0) p{m}[{_place(nest, m)}] = {result};")


def _rounded(text: str, dtype: str) -> str:
    """A value as it would be after it was stored."""
    return f"load(Cell<{STORED[dtype]}>::of({text}))" if dtype in HALVES else text


def _is_kept(nest: GroupNest, m: int) -> bool:
    """Whether what is read is used by several vertices, so that it stays in registers."""
    return sum(Arg(len(nest.made) + m) in walk(made.function) for made in nest.made) > 1


def _read(nest: GroupNest, again: set[int], part: int, position: int) -> str:
    where = f"[u * {nest.pack} + {part}]"
    if position < len(nest.made):
        return f"made{position}" + where * nest.made[position].inside
    m = position - len(nest.made)
    if m in nest.counted:
        return count_of(m, nest.reads[m].loops, nest.loops - 1, nest.pack, str(part))
    if not nest.is_inside(m):
        return f"load(p{m}[{_place(nest, m)}])"
    return (
        f"kept{m}{where}" if _is_kept(nest, m) and m not in again else f"load(pack{m}.at[{part}])"
    )


def _place(nest: GroupNest, m: int) -> str:
    return " + ".join(f"i{k} * s{m}_{k}" for k in nest.along(m)) or "0"
