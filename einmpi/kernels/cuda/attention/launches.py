"""Launches of softmax attention and of its gradients, for float16 and bfloat16.

Which tiles a kernel has, and what it is given, follows from how arrays are stored.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain
from math import inf, prod
from pathlib import Path
from typing import Any, TypeAlias

from einmpi.caches import bounded_cache
from einmpi.kernels.cuda import driver
from einmpi.kernels.cuda.attention.backward import (
    column_gradients_text,
    gradient_bytes,
    row_gradients_text,
    row_numbers_text,
)
from einmpi.kernels.cuda.attention.forward import BATCH_DIMENSIONS, forward_bytes, forward_text
from einmpi.kernels.cuda.attention.tiles import FRACTION_TYPES, MAX_HEAD, TileSizes
from einmpi.process.startup import COMPILING, first_use

# ---- compiled ------------------------------------------------------------------------------------
#
# Attention kernels compiled for the GPU at hand, and what a launch of one needs.


COMPILE_OPTIONS = ("-std=c++17",)
WARPGROUP_ARCHITECTURE = "sm_90a"  # wgmma is in this one alone, not in sm_90


@dataclass(frozen=True)
class AttentionLaunch:
    """A kernel with all of its arguments; names stand for the addresses of arrays."""

    kernel: Any
    blocks: int
    threads: int
    shared_bytes: int
    arguments: Sequence[int | float | str]

    def __call__(self, addresses: Mapping[str, int]) -> None:
        """Launch the kernel; arrays without an address are left out."""
        values = [addresses.get(x, 0) if isinstance(x, str) else x for x in self.arguments]
        self.kernel((self.blocks,), (self.threads,), tuple(values), shared_mem=self.shared_bytes)


@bounded_cache(256)
def compiled_attention(text: str, warpgroups: bool, shared_bytes: int, device: int) -> Any:
    """Compile the function `kernel` of a text for the current GPU, whose number is `device`."""
    cupy = driver.cupy()
    with first_use(COMPILING):
        if warpgroups:
            module = cupy.RawModule(path=str(_warpgroup_binary(text)))
        else:
            module = cupy.RawModule(code=text, options=COMPILE_OPTIONS)
        kernel = module.get_function("kernel")
    kernel.max_dynamic_shared_size_bytes = shared_bytes
    return kernel


def _warpgroup_binary(text: str) -> Path:
    """Return the file of a text that is compiled for sm_90a, which CuPy itself never asks for.

    Files are in the folder of CuPy's own compiled kernels. Several processes may write one.
    """
    cupy = driver.cupy()
    compiler = cupy.cuda.nvrtc
    kind = f"{WARPGROUP_ARCHITECTURE} {COMPILE_OPTIONS} {compiler.getVersion()}"
    name = sha256(f"{kind}\n{text}".encode()).hexdigest()
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache").expanduser()
    path = folder / f"einmpi_{name}.cubin"
    if path.exists():
        return path
    program = compiler.createProgram(text, "attention.cu", (), ())
    try:
        compiler.compileProgram(program, (f"-arch={WARPGROUP_ARCHITECTURE}", *COMPILE_OPTIONS))
        binary = compiler.getCUBIN(program)
    except compiler.NVRTCError as error:
        raise RuntimeError(compiler.getProgramLog(program)) from error
    finally:
        compiler.destroyProgram(program)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        file.write(binary)
    os.replace(file.name, path)
    return path


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

    @property
    def skips(self) -> bool:
        """Whether to leave out tiles without a seen score: an inf in V is then not read there."""
        return self.fill == -inf

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


Arguments: TypeAlias = list[int | float | str]  # a name stands for the address of an array


def _tensors(problem: Problem, names: str) -> Arguments:
    """Return the address and the strides of each tensor."""
    found: Arguments = []
    for name in names.split():
        # A kernel may have parameters of a tensor that is not used.
        stored = problem.tensors.get(name, problem.tensors["q"])
        found += [name, *(stride // VALUE_BYTES for stride in stored.strides[:-1])]
    return found


def _numbers(problem: Problem, names: str) -> Arguments:
    """Return the address and the strides of each array of numbers, and whether they are float32."""
    is_wide = problem.number_dtype == "float32"
    itemsize = 4 if is_wide else VALUE_BYTES
    found: Arguments = []
    for name in names.split():
        strides = problem.number_strides.get(name, (0,) * (BATCH_DIMENSIONS + 1))
        found += [name, *(stride // itemsize for stride in strides)]
    return [*found, int(is_wide)]


def _launch(
    text: str, sizes: TileSizes, shared: int, blocks: int, *arguments: Arguments
) -> AttentionLaunch:
    device = driver.cupy().cuda.Device().id
    kernel = compiled_attention(text, sizes.warpgroups, shared, device)
    return AttentionLaunch(kernel, blocks, sizes.threads, shared, list(chain(*arguments)))


def _sizes_and_scores(problem: Problem, row_blocks: int, skips: bool) -> Arguments:
    scores = problem.scores
    return [
        *problem.batches[1:],
        problem.rows,
        problem.columns,
        row_blocks,
        problem.batches_together,
        max(scores.lower, -MAX_COUNT),
        min(scores.upper, MAX_COUNT),
        int(skips),
        scores.scale,
        scores.fill,
    ]


def prepare_attention(problem: Problem) -> AttentionLaunch:
    """Return the launch that takes q, k, v and gives o, and maxima, totals and statistics of rows.

    The latter are optional. `statistics` is a contiguous float32 array: base-2 logarithms of sums.
    """
    sizes = forward_sizes(problem.dtype, problem.head, has_warpgroups())
    row_blocks = -(-problem.rows // sizes.rows)
    return _launch(
        forward_text(sizes),
        sizes,
        forward_bytes(sizes),
        row_blocks * prod(problem.batches),
        _tensors(problem, "q k v o"),
        _numbers(problem, "maxima totals"),
        [int(problem.divides), "statistics"],
        _sizes_and_scores(problem, row_blocks, problem.scores.skips),
    )


def prepare_row_numbers(problem: Problem) -> AttentionLaunch:
    """Return the launch that reads maxima, totals and given, and gives statistics and products."""
    sizes = TileSizes(problem.dtype, problem.head, ROW_NUMBERS_THREADS // 2, 64, False)
    count = prod(problem.row_numbers_shape)
    return _launch(
        row_numbers_text(sizes),
        sizes,
        0,
        -(-count // sizes.threads),
        _numbers(problem, "maxima totals given"),
        ["statistics", "products", *problem.batches[1:], problem.rows, count],
    )


def prepare_row_gradients(problem: Problem, products: str, slope_scale: float) -> AttentionLaunch:
    """Return the launch that takes q, k, v, d_o and statistics, and gives d_q and products.

    `products` says where these come from: the argument of row_gradients_text. `slope_scale` is a
    factor of d_q.
    """
    sizes = row_gradient_sizes(problem.dtype, problem.head, has_warpgroups())
    row_blocks = -(-problem.rows // sizes.rows)
    return _launch(
        row_gradients_text(sizes, products),
        sizes,
        gradient_bytes(sizes),
        row_blocks * prod(problem.batches),
        _tensors(problem, "q k v o d_o d_q"),
        ["statistics", "products"],
        _sizes_and_scores(problem, row_blocks, problem.scores.skips),
        [slope_scale],
    )


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
    return _launch(
        column_gradients_text(sizes),
        sizes,
        gradient_bytes(sizes),
        column_blocks * prod(problem.batches[:2]),
        _tensors(problem, "q k v d_o d_k d_v"),
        ["statistics", "products"],
        _sizes_and_scores(problem, column_blocks, skips),
        [slope_scale],
    )
