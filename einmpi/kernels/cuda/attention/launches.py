"""Launches of softmax attention and of its gradients, for float16 and bfloat16.

Which tiles a kernel has, and what it is given, follows from how arrays are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, prod

import numpy as np

from einmpi.kernels.cuda import driver
from einmpi.kernels.cuda.attention.backward import (
    column_gradients_text,
    gradient_bytes,
    row_gradients_text,
)
from einmpi.kernels.cuda.attention.compiled import AttentionLaunch, compiled_attention
from einmpi.kernels.cuda.attention.forward import BATCH_DIMENSIONS, forward_bytes, forward_text
from einmpi.kernels.cuda.attention.tiles import FRACTION_TYPES, MAX_HEAD, TileSizes
from einmpi.kernels.cuda.driver import DeviceArray

MIN_CAPABILITY = 80  # mma.sync of 16-bit values, and copies to shared memory that run on
WARPGROUP_CAPABILITY = 90  # the only one with wgmma
CHUNK_BYTES = 16  # that one thread copies at a time
CHUNK_VALUES = 8
VALUE_BYTES = 2
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


def gradient_sizes(dtype: str, head: int, warpgroups: bool) -> TileSizes:
    """Return the tiles of both kernels of gradients that were fastest for a head."""
    rows = 128 if warpgroups else 64
    return TileSizes(dtype, head, rows, 64, warpgroups)


# ---- launches -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Problem:
    """What the arguments of all attention kernels are made of."""

    scores: Scores
    batches: tuple[int, int, int]
    rows: int
    columns: int

    def values(self, row_blocks: int, skips: bool) -> list[int | float]:
        _, batches_1, batches_2 = self.batches
        return [
            batches_1,
            batches_2,
            self.rows,
            self.columns,
            row_blocks,
            max(self.scores.lower, -MAX_COUNT),
            min(self.scores.upper, MAX_COUNT),
            int(skips),
            self.scores.scale,
            self.scores.fill,
        ]


def _problem_of(q: Stored, k: Stored, scores: Scores) -> _Problem:
    first, second, third = q.shape[:BATCH_DIMENSIONS]
    return _Problem(scores, (first, second, third), q.shape[-2], k.shape[-2])


def _prepare(
    make_text: Callable[[TileSizes], str],
    sizes: TileSizes,
    shared_bytes: int,
    blocks: int,
    arrays: Sequence[Stored],
    addresses: int,
    values: Sequence[int | float],
) -> AttentionLaunch:
    """Prepare a kernel with the strides of arrays, `addresses` more pointers, and values."""
    device = driver.cupy().cuda.Device().id
    kernel = compiled_attention(make_text(sizes), sizes.warpgroups, shared_bytes, device)
    arguments: list[int | float] = []
    pointers = []
    for array in arrays:
        pointers.append(len(arguments))
        arguments.append(0)
        arguments += [stride // VALUE_BYTES for stride in array.strides[:-1]]
    for _ in range(addresses):
        pointers.append(len(arguments))
        arguments.append(0)
    arguments += values
    return AttentionLaunch(
        kernel, blocks, sizes.threads, shared_bytes, tuple(arguments), tuple(pointers)
    )


def prepare_attention(
    q: Stored,
    k: Stored,
    v: Stored,
    o: Stored,
    scores: Scores,
    sizes: TileSizes | None = None,
) -> AttentionLaunch:
    """Return the launch that takes the addresses of q, k, v, o and of the rows' statistics.

    The statistics are a contiguous float32 array of batches and rows; the address 0 means none.
    """
    if sizes is None:
        is_hopper = capability() == WARPGROUP_CAPABILITY
        sizes = forward_sizes(q.dtype, q.shape[-1], is_hopper)
    problem = _problem_of(q, k, scores)
    row_blocks = -(-problem.rows // sizes.rows)
    blocks = row_blocks * prod(problem.batches)
    values = problem.values(row_blocks, scores.skips)
    return _prepare(forward_text, sizes, forward_bytes(sizes), blocks, (q, k, v, o), 1, values)


@dataclass(frozen=True)
class GradientLaunches:
    """The kernels of dQ and of dK and dV, in this order: the second reads what the first leaves."""

    row_gradients: AttentionLaunch
    column_gradients: AttentionLaunch
    products_shape: tuple[int, ...]  # of the float32 array that both use

    def __call__(self, addresses: Sequence[int], statistics: DeviceArray) -> None:
        """Compute with q, k, v, o, dO, dQ, dK, dV, and the statistics of the forward kernel."""
        q, k, v, o, d_o, d_q, d_k, d_v = addresses
        products = driver.cupy().empty(self.products_shape, np.float32)
        numbers = [statistics.data.ptr, products.data.ptr]
        self.row_gradients([q, k, v, o, d_o, d_q, *numbers])
        self.column_gradients([q, k, v, d_o, d_k, d_v, *numbers])


def prepare_gradients(
    arrays: Sequence[Stored],
    scores: Scores,
    row_sizes: TileSizes | None = None,
    column_sizes: TileSizes | None = None,
) -> GradientLaunches:
    """Return the launches for q, k, v, o, dO, dQ, dK, dV.

    dK and dV have extent 1 along the last batch dimension, whose members share K and V.
    """
    q, k, v, o, d_o, d_q, d_k, d_v = arrays
    sizes = gradient_sizes(q.dtype, q.shape[-1], capability() == WARPGROUP_CAPABILITY)
    row_sizes = row_sizes or sizes
    column_sizes = column_sizes or sizes
    problem = _problem_of(q, k, scores)
    row_blocks = -(-problem.rows // row_sizes.rows)
    rows = _prepare(
        row_gradients_text,
        row_sizes,
        gradient_bytes(row_sizes),
        row_blocks * prod(problem.batches),
        (q, k, v, o, d_o, d_q),
        2,
        problem.values(row_blocks, scores.skips),
    )
    # A row that sees nothing has weights that are not numbers, and every dV gets a share of it.
    skips = scores.skips and scores.every_row_sees(problem.rows, problem.columns)
    column_blocks = -(-problem.columns // column_sizes.rows)
    columns = _prepare(
        column_gradients_text,
        column_sizes,
        gradient_bytes(column_sizes),
        column_blocks * prod(problem.batches[:2]),
        (q, k, v, d_o, d_k, d_v),
        2,
        problem.values(column_blocks, skips),
    )
    return GradientLaunches(rows, columns, (*problem.batches, problem.rows))
