"""The text of a CUDA kernel that computes a group of vertices, row by row.

A team of threads owns a row. Each thread keeps its share of every tensor of the group in registers,
and the team joins its totals where a vertex aggregates the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from einmpi.caches import bounded_cache
from einmpi.graph.scalar import Arg, Scalar, walk
from einmpi.kernels.cuda.nest import Nest
from einmpi.kernels.cuda.scalar_source import COMPUTED, HALVES, STORED, Fold, Steps, convert, stored
from einmpi.kernels.cuda.source_parts import (
    KernelText,
    add_loop_indices,
    add_team_total,
    counter_text,
    extent_product,
    offset_text,
    whole_text,
)

GROUP_BLOCK_THREADS = 256  # threads of a block, unless one team has more
MAX_VALUES_PER_THREAD = 32  # values of a row that a thread keeps in registers
PACKS_AT_ONCE = 4  # of a longer row: read before the first one is needed


@dataclass(frozen=True)
class Stage:
    """A vertex of a group. Its Args are first the results of all stages, then the reads."""

    function: Scalar
    aggregation: str | None
    dtype: str
    inside: bool  # it has a value for every position inside a row, rather than one for the row


@dataclass(frozen=True, kw_only=True)
class GroupNest(Nest):
    """All that the text of a group's kernel depends on.

    The loops are those over rows, then those over the positions inside a row.
    """

    stages: tuple[Stage, ...]
    outputs: tuple[int, ...]  # stages whose results are stored
    row_loops: int
    team: int  # threads that share a row
    values_per_thread: int  # positions of a row that a thread owns
    pack: int  # neighbouring positions that a thread owns; the inside loop counts packs

    @property
    def teams(self) -> int:
        return max(1, GROUP_BLOCK_THREADS // self.team)

    @property
    def types(self) -> tuple[str, ...]:
        """The dtypes of the Args of every stage."""
        return (*(stage.dtype for stage in self.stages), *(read.dtype for read in self.reads))

    def is_inside(self, read: int) -> bool:
        """Tell whether a read has a value for every position inside a row."""
        return any(loop >= self.row_loops for loop in self.reads[read].loops)

    def is_kept(self, read: int) -> bool:
        """Tell whether several stages use a read, so that it stays in registers."""
        if self.values_per_thread > MAX_VALUES_PER_THREAD:
            return False
        arg = Arg(len(self.stages) + read)
        users = [stage for stage in self.stages if arg in walk(stage.function)]
        return len(users) > 1


@bounded_cache(1024)
def group_source(nest: GroupNest) -> str:
    """Return the whole text, whose entry point is the function `kernel`."""
    text = KernelText()
    rows = range(nest.row_loops)
    text.add(f"""
        // A team of {nest.team} threads computes a row; a block has {nest.teams} teams.
        const int lane = threadIdx.x % {nest.team}, slot = threadIdx.x / {nest.team};
        const I rows = {extent_product(rows)};
        const I own = (I)blockIdx.x * {nest.teams} + slot;
        I flat = least(own, rows - 1);
        const I positions = {extent_product(range(nest.row_loops, nest.loops))};
    """)
    add_loop_indices(text, "flat", rows)
    unread: set[int] = set()  # reads to be kept in registers that no stage has read yet
    for read in range(len(nest.reads)):
        if not nest.reads[read].counts and nest.is_inside(read) and nest.is_kept(read):
            unread.add(read)
            text.add(f"{COMPUTED[nest.reads[read].dtype]} kept{read}[{nest.values_per_thread}];")
    for number in range(len(nest.stages)):
        _StageWriter(nest, number, text, unread).write()
        unread -= _reads_of(nest, number)
    return whole_text(nest, text, nest.team * nest.teams)


def _reads_of(nest: GroupNest, number: int) -> set[int]:
    """Return the reads of a stage."""
    reads = set()
    for node in walk(nest.stages[number].function):
        if isinstance(node, Arg) and node.position >= len(nest.stages):
            reads.add(node.position - len(nest.stages))
    return reads


@dataclass
class _StageWriter:
    """What writes the text of one stage: for every position of the row, or folded over them."""

    nest: GroupNest
    number: int
    text: KernelText
    unread: set[int]  # kept reads that this stage, if it uses them, is the first to read

    def __post_init__(self) -> None:
        self.stage = self.nest.stages[self.number]
        self.result = f"stage{self.number}"
        self.is_stored = self.number in self.nest.outputs

    def write(self) -> None:
        if self.stage.aggregation is not None:
            self.text.add(f"// Stage {self.number}: {self.stage.aggregation} over the row")
            fold = Fold(self.stage.aggregation, self.stage.function, self.nest.types)
            self.write_fold(fold)
        elif self.stage.inside:
            self.text.add(f"// Stage {self.number}: a value for every position of the row")
            self.write_positions()
        else:
            self.text.add(f"// Stage {self.number}: a value for the row")
            steps = self.steps(0)
            value = _rounded(steps.value(self.stage.function, self.stage.dtype), self.stage.dtype)
            kind = COMPUTED[self.stage.dtype]
            self.text.add(*steps.lines, f"const {kind} {self.result} = {value};")
        if self.is_stored and not self.stage.inside:
            value = stored(self.result, self.stage.dtype, self.stage.dtype)
            array = self.output_array()
            target = f"array{array}[{offset_text(self.nest, array)}]"
            self.text.add(f"if (own < rows && lane == 0) {target} = {value};")

    def write_fold(self, fold: Fold) -> None:
        """Fold the values of a row: each thread its own, then the whole team."""
        total = f"total{self.number}"
        kind = COMPUTED[fold.dtype]
        self.text.add(f"{kind} {total} = {fold.start(fold.dtype)};")
        self.text.add(self.unrolling())
        with self.text.block(self.position_loop()):
            self.write_position_start()
            for part in range(self.nest.pack):
                steps = self.steps(part)
                taken = fold.take(steps, total)
                self.text.add(*steps.lines, f"if (position < positions) {total} = {taken};")
                self.keep_reads(part)
        add_team_total(self.text, total, kind, fold, self.nest.team, self.nest.teams)
        dtype = self.stage.dtype
        value = _rounded(convert(total, fold.dtype, dtype), dtype)
        self.text.add(f"const {COMPUTED[dtype]} {self.result} = {value};")

    def write_positions(self) -> None:
        """Compute a value for every position of the row."""
        dtype = self.stage.dtype
        kind = f"Pack<{STORED[dtype]}, {self.nest.pack}>"
        self.text.add(f"{COMPUTED[dtype]} {self.result}[{self.nest.values_per_thread}];")
        self.text.add(self.unrolling())
        with self.text.block(self.position_loop()):
            self.write_position_start()
            if self.is_stored:
                self.text.add(f"{kind} result;")
            for part in range(self.nest.pack):
                steps = self.steps(part)
                value = _rounded(steps.value(self.stage.function, dtype), dtype)
                own_value = f"{self.result}[{_register_text(self.nest, part)}]"
                self.text.add(*steps.lines, f"{own_value} = {value};")
                self.keep_reads(part)
                if self.is_stored:
                    self.text.add(f"result.at[{part}] = {stored(own_value, dtype, dtype)};")
            if self.is_stored:
                array = self.output_array()
                address = f"array{array} + {offset_text(self.nest, array)}"
                self.text.add(
                    f"if (own < rows && position < positions) "
                    f"*reinterpret_cast<{kind}*>({address}) = result;"
                )

    def unrolling(self) -> str:
        """Return how to unroll the loop over positions; numbers of registers must be constant."""
        is_long = self.nest.values_per_thread > MAX_VALUES_PER_THREAD
        return f"#pragma unroll {PACKS_AT_ONCE}" if is_long else "#pragma unroll"

    def position_loop(self) -> str:
        return f"for (int u = 0; u < {self.nest.values_per_thread // self.nest.pack}; ++u)"

    def write_position_start(self) -> None:
        """Compute the loop indices of a position, and read what no stage has read before."""
        nest = self.nest
        self.text.add(
            f"const I position = lane + u * {nest.team};",
            "I deep = least(position, positions - 1);",
        )
        add_loop_indices(self.text, "deep", range(nest.row_loops, nest.loops))
        for read in sorted(_reads_of(nest, self.number)):
            if nest.reads[read].counts or not nest.is_inside(read):
                continue
            if nest.is_kept(read) and read not in self.unread:
                continue  # an earlier stage has kept it
            kind = f"Pack<{STORED[nest.reads[read].dtype]}, {nest.pack}>"
            self.text.add(
                f"const {kind} pack{read} = *reinterpret_cast<const {kind}*>"
                f"(array{read} + {offset_text(nest, read)});"
            )

    def keep_reads(self, part: int) -> None:
        """Keep in registers what this stage is the first to read."""
        for read in sorted(self.unread & _reads_of(self.nest, self.number)):
            register = f"kept{read}[{_register_text(self.nest, part)}]"
            self.text.add(f"{register} = load(pack{read}.at[{part}]);")

    def steps(self, part: int) -> Steps:
        """Return an empty list of statements for a position of a pack."""
        read_text = partial(_read_text, self.nest, self.unread, part)
        return Steps(self.nest.types, read_text, f"w{self.number}_{part}_")

    def output_array(self) -> int:
        return len(self.nest.reads) + self.nest.outputs.index(self.number)


def _rounded(text: str, dtype: str) -> str:
    """Return a value as it would be after storing it: half precision is computed in single."""
    return f"load(Cell<{STORED[dtype]}>::of({text}))" if dtype in HALVES else text


def _register_text(nest: GroupNest, part: int) -> str:
    """Return which of a thread's values belongs to a position of the current pack."""
    return f"u * {nest.pack} + {part}"


def _read_text(nest: GroupNest, unread: set[int], part: int, position: int) -> str:
    """Return the value of an Arg: the result of a stage, or a read."""
    register = _register_text(nest, part)
    if position < len(nest.stages):
        if nest.stages[position].inside:
            return f"stage{position}[{register}]"
        return f"stage{position}"
    read = position - len(nest.stages)
    if nest.reads[read].counts:
        return counter_text(read, nest.reads[read].loops, nest.loops - 1, nest.pack, str(part))
    if not nest.is_inside(read):
        return f"load(array{read}[{offset_text(nest, read)}])"
    if nest.is_kept(read) and read not in unread:
        return f"kept{read}[{register}]"
    return f"load(pack{read}.at[{part}])"
