"""Launches of softmax attention and of its gradients, for float16 and bfloat16.

Which tiles a kernel has, and what it is given, follows from how arrays are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod

from einmpi.kernels.cuda import driver
from einmpi.kernels.cuda.attention.backward import (
    column_gradients_text,
    gradient_bytes,
    row_gradients_text,
    row_numbers_text,
)
from einmpi.kernels.cuda.attention.compiled import AttentionLaunch, compiled_attention
from einmpi.kernels.cuda.attention.forward import BATCH_DIMENSIONS, forward_bytes, forward_text
from einmpi.kernels.cuda.attention.tiles import FRACTION_TYPES, MAX_HEAD, TileSizes

MIN_CAPABILITY = 80  # mma.sync of 16-bit values, and copies to shared memory that run on
WARPGROUP_CAPABILITY = 90  # the only one with wgmma
CHUNK_BYTES = 16  # that one thread copies at a time
CHUNK_VALUES = 8
VALUE_BYTES = 2
ROW_NUMBERS_THREADS = 256
CACHED_BYTES = 2**24  # of K and V, which a GPU's second-level cache certainly keeps
MOST_TOGETHER = 1024  # batches
MAX_COUNT = 2**30  # of rows and columns, whose numbers and differences are 32-bit integers


@dataclass(frozen=True)
class Stored:
    """How an array of rows is stored: three dimensions of batches, then rows, then the head.

    K and V may have a stride of 0 along the last batch dimension: its members share them.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    address: int


@dataclass(frozen=True)
class Scores:
    """How scores follow from products: softmax(scale · Q·Kᵀ), with a mask.

    A score is seen where lower ≤ column − row ≤ upper. Others are `fill` before scaling.
    """

    scale: float
    lower: int = -MAX_COUNT
    upper: int = MAX_COUNT
    fill: float = -inf
    skip: bool = True  # leave out tiles without a seen score: an inf in V is then not read there

    @property
    def skips(self) -> bool:
        return self.skip and self.fill == -inf

    def every_row_sees(self, rows: int, columns: int) -> bool:
        """Tell whether every row sees at least one column."""
        reaches_first = self.upper >= 0
        reaches_last = self.lower <= columns - rows
        return reaches_first and reaches_last and self.lower <= self.upper


# ---- what can be computed -----------------------------------------------------------------------


def capability() -> int:
    """Return the compute capability of the current GPU, such as 90; 0 if it is not known."""
    device = getattr(driver.cupy().cuda, "Device", None)
    return 0 if device is None else int(device().compute_capability)


def has_warpgroups() -> bool:
    """Tell whether the current GPU has wgmma."""
    return capability() == WARPGROUP_CAPABILITY


def supports(arrays: Sequence[Stored], scores: Scores) -> bool:
    """Tell whether the kernels can compute with these arrays on the current GPU."""
    if arrays[0].dtype not in FRACTION_TYPES or capability() < MIN_CAPABILITY:
        return False
    if not scores.scale > 0 or not scores.fill < inf:
        return False
    if max(scores.lower, -scores.upper) > MAX_COUNT:
        return False
    return all(_is_readable(array, arrays[0]) for array in arrays)


def _is_readable(array: Stored, first: Stored) -> bool:
    """Tell whether threads can copy 16 bytes at a time from each row of an array."""
    head = array.shape[-1]
    if array.dtype != first.dtype or head != first.shape[-1]:
        return False
    if head % CHUNK_VALUES or not 0 < head <= MAX_HEAD:
        return False
    if 0 in array.shape or max(array.shape) > MAX_COUNT:
        return False
    if array.strides[-1] != VALUE_BYTES or array.address % CHUNK_BYTES:
        return False
    return not any(stride % CHUNK_BYTES for stride in array.strides[:-1])


# ---- tiles --------------------------------------------------------------------------------------


def forward_sizes(dtype: str, head: int, warpgroups: bool) -> TileSizes:
    """Return the tiles of the forward kernel that were fastest for a head."""
    if warpgroups and head > 64:
        return TileSizes(dtype, head, 128, 128, True)
    if warpgroups:
        return TileSizes(dtype, head, 128, 64, True, blocks=2)
    return TileSizes(dtype, head, 128, 64, False)


def row_gradient_sizes(dtype: str, head: int, warpgroups: bool) -> TileSizes:
    """Return the tiles of the kernel of dQ that were fastest for a head."""
    if not warpgroups:
        return TileSizes(dtype, head, 64, 64, False)
    if head > 64:
        return TileSizes(dtype, head, 128, 64, True)
    return TileSizes(dtype, head, 64, 64, True, blocks=2)


def column_gradient_sizes(dtype: str, head: int, warpgroups: bool) -> TileSizes:
    """Return the tiles of the kernel of dK and dV that were fastest for a head."""
    if not warpgroups:
        return TileSizes(dtype, head, 64, 64, False)
    return TileSizes(dtype, head, 128, 64 if head > 64 else 128, True)


# ---- launches -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """What all kernels of one attention are given: its tensors and the numbers of its rows.

    Tensors are named q, k, v, o, d_o, d_q, d_k and d_v. Numbers are `maxima` and `totals`, the
    statistics that a program keeps of its softmax, and `given`, the sums of weight · slope.
    """

    tensors: Mapping[str, Stored]
    scores: Scores
    # In bytes: of three dimensions of batches, and of rows.
    number_strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    number_dtype: str = "float32"
    divides: bool = True  # whether results are divided by the totals

    @property
    def batches(self) -> tuple[int, ...]:
        return self.tensors["q"].shape[:BATCH_DIMENSIONS]

    @property
    def batches_together(self) -> int:
        """How many batches are computed at the same time: K and V of all of them stay in a cache.

        It divides their number. Blocks of threads have work to share out evenly among more batches.
        """
        count = prod(self.batches)
        bytes_of_batch = 2 * self.columns * self.head * VALUE_BYTES
        most = min(max(1, CACHED_BYTES // bytes_of_batch), MOST_TOGETHER, count)
        return next(number for number in range(most, 0, -1) if count % number == 0)

    @property
    def rows(self) -> int:
        return self.tensors["q"].shape[-2]

    @property
    def columns(self) -> int:
        return self.tensors["k"].shape[-2]

    @property
    def row_numbers_shape(self) -> tuple[int, ...]:
        """The shape of `statistics` and `products`, float32 arrays that kernels share."""
        return (*self.batches, self.rows)

    @property
    def head(self) -> int:
        return self.tensors["q"].shape[-1]

    @property
    def dtype(self) -> str:
        return self.tensors["q"].dtype


class _Arguments:
    """The arguments of a kernel, in their order, and which of them are addresses."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.values: list[int | float] = []
        self.pointers: list[tuple[int, str]] = []

    def add_address(self, name: str) -> None:
        self.pointers.append((len(self.values), name))
        self.values.append(0)

    def add_tensors(self, names: str) -> None:
        for name in names.split():
            self.add_address(name)
            # A kernel may have parameters of a tensor that is not used.
            stored = self.problem.tensors.get(name, self.problem.tensors["q"])
            self.values += [stride // VALUE_BYTES for stride in stored.strides[:-1]]

    def add_numbers(self, names: str) -> None:
        itemsize = 4 if self.problem.number_dtype == "float32" else VALUE_BYTES
        for name in names.split():
            self.add_address(name)
            strides = self.problem.number_strides.get(name, (0,) * (BATCH_DIMENSIONS + 1))
            self.values += [stride // itemsize for stride in strides]
        self.values.append(int(self.problem.number_dtype == "float32"))

    def add_problem(self, row_blocks: int, skips: bool) -> None:
        scores = self.problem.scores
        self.values += [*self.problem.batches[1:], self.problem.rows, self.problem.columns]
        self.values += [row_blocks, self.problem.batches_together]
        self.values += [max(scores.lower, -MAX_COUNT), min(scores.upper, MAX_COUNT)]
        self.values += [int(skips), scores.scale, scores.fill]

    def launch(self, text: str, sizes: TileSizes, shared: int, blocks: int) -> AttentionLaunch:
        device = driver.cupy().cuda.Device().id
        kernel = compiled_attention(text, sizes.warpgroups, shared, device)
        values = tuple(self.values)
        return AttentionLaunch(kernel, blocks, sizes.threads, shared, values, tuple(self.pointers))


def prepare_attention(problem: Problem) -> AttentionLaunch:
    """Return the launch that takes q, k, v and gives o, and maxima, totals and statistics of rows.

    The latter are optional. `statistics` is a contiguous float32 array: base-2 logarithms of sums.
    """
    sizes = forward_sizes(problem.dtype, problem.head, has_warpgroups())
    row_blocks = -(-problem.rows // sizes.rows)
    arguments = _Arguments(problem)
    arguments.add_tensors("q k v o")
    arguments.add_numbers("maxima totals")
    arguments.values.append(int(problem.divides))
    arguments.add_address("statistics")
    arguments.add_problem(row_blocks, problem.scores.skips)
    blocks = row_blocks * prod(problem.batches)
    return arguments.launch(forward_text(sizes), sizes, forward_bytes(sizes), blocks)


def prepare_row_numbers(problem: Problem) -> AttentionLaunch:
    """Return the launch that reads maxima, totals and given, and gives statistics and products."""
    sizes = TileSizes(problem.dtype, problem.head, ROW_NUMBERS_THREADS // 2, 64, False)
    count = prod(problem.row_numbers_shape)
    arguments = _Arguments(problem)
    arguments.add_numbers("maxima totals given")
    arguments.add_address("statistics")
    arguments.add_address("products")
    arguments.values += [*problem.batches[1:], problem.rows, count]
    blocks = -(-count // sizes.threads)
    return arguments.launch(row_numbers_text(sizes), sizes, 0, blocks)


def prepare_row_gradients(problem: Problem, products: str, slope_scale: float) -> AttentionLaunch:
    """Return the launch that takes q, k, v, d_o and statistics, and gives d_q and products.

    `products` says where these come from: the argument of row_gradients_text. `slope_scale` is a
    factor of d_q.
    """
    sizes = row_gradient_sizes(problem.dtype, problem.head, has_warpgroups())
    row_blocks = -(-problem.rows // sizes.rows)
    arguments = _Arguments(problem)
    arguments.add_tensors("q k v o d_o d_q")
    arguments.add_address("statistics")
    arguments.add_address("products")
    arguments.add_problem(row_blocks, problem.scores.skips)
    arguments.values.append(slope_scale)
    text = row_gradients_text(sizes, products)
    blocks = row_blocks * prod(problem.batches)
    return arguments.launch(text, sizes, gradient_bytes(sizes), blocks)


def prepare_column_gradients(problem: Problem, slope_scale: float) -> AttentionLaunch:
    """Return the launch that takes q, k, v, d_o, statistics and products, and gives d_k and d_v.

    These are summed over the last batch dimension, whose members share k and v. `slope_scale` is
    a factor of d_k. One of them may be left out.
    """
    sizes = column_gradient_sizes(problem.dtype, problem.head, has_warpgroups())
    scores = problem.scores
    # A row that sees nothing has weights that are not numbers, and every dV gets a share of it.
    skips = scores.skips and scores.every_row_sees(problem.rows, problem.columns)
    column_blocks = -(-problem.columns // sizes.rows)
    arguments = _Arguments(problem)
    arguments.add_tensors("q k v d_o d_k d_v")
    arguments.add_address("statistics")
    arguments.add_address("products")
    arguments.add_problem(column_blocks, skips)
    arguments.values.append(slope_scale)
    blocks = column_blocks * prod(problem.batches[:2])
    return arguments.launch(column_gradients_text(sizes), sizes, gradient_bytes(sizes), blocks)
