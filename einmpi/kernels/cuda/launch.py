"""Compiled kernels, and calls that are prepared once and then repeated.

A repeated call only fills in addresses: everything else about it was worked out the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from einmpi.kernels.cuda import driver
from einmpi.kernels.cuda.driver import DeviceArray
from einmpi.kernels.cuda.nest import PACK_BYTES
from einmpi.process.first_use import COMPILING, first_use
from einmpi.schedule.regions import Runs

# numpy rounds after every operation. A product fused with a sum would round once, and a·b − a·b
# would not be 0. Kernels ask for a fused operation where they want one.
EXACT_OPTIONS = ("-std=c++17", "--fmad=false")
FAST_OPTIONS = ("-std=c++17", "--use_fast_math")

Grid = tuple[tuple[int, int], tuple[int]]  # blocks in both directions, threads of a block
PreparedCall: TypeAlias = Callable[[Sequence[DeviceArray], DeviceArray], None]
# For labels whose values are used: the indices that positions along the label stand for.
LabelRuns: TypeAlias = tuple[tuple[str, Runs], ...]


class Options(NamedTuple):
    """What an EinSum means here besides its arrays, and what its method may do."""

    runs: LabelRuns = ()
    fast_math: bool = False  # methods that round more
    tf32: bool = False  # float32 products with a fraction of ten bits
    strict: bool = False  # only methods that give inf and nan where the program as written does


@lru_cache(maxsize=1024)
def compile_kernel(text: str, fast: bool, in_place: bool = False) -> Any:
    """Compile the function `kernel` of a CUDA text.

    With `in_place`, the kernel may write over an array that it reads, element by element.
    CuPy caches compiled kernels on disk, and several processes may compile at the same time.
    """
    options = FAST_OPTIONS if fast else EXACT_OPTIONS
    if in_place:
        text = f"#define __restrict__\n{text}"
    with first_use(COMPILING):
        return driver.cupy().RawModule(code=text, options=options).get_function("kernel")


@dataclass(frozen=True)
class Launch:
    """A kernel with all of its arguments except the addresses of arrays."""

    kernel: Any
    grid: Grid
    names: Sequence[str]  # of the arguments
    values: tuple[int, ...]
    pointers: tuple[tuple[int, int], ...]  # (position of an argument, the array it points to)

    def __call__(self, addresses: Sequence[int], **changed: int) -> None:
        """Launch the kernel; some arguments may be others than usual."""
        values = list(self.values)
        for position, array in self.pointers:
            values[position] = addresses[array]
        for name, value in changed.items():
            values[self.names.index(name)] = value
        self.kernel(*self.grid, tuple(values))


def prepare_launch(
    kernel: Any, grid: Grid, names: Sequence[str], arguments: Mapping[str, int]
) -> Launch:
    """Return a launch; `names` are those of all arguments, of which array0, … are addresses."""
    values = []
    pointers = []
    for position, name in enumerate(names):
        if name.startswith("array"):
            pointers.append((position, int(name.removeprefix("array"))))
            values.append(0)
        else:
            values.append(arguments[name])
    return Launch(kernel, grid, names, tuple(values), tuple(pointers))


def is_in_place(operands: Iterable[DeviceArray], target: DeviceArray) -> bool:
    """Return whether a target is one of the operands."""
    return target.data.ptr in [array.data.ptr for array in operands]


def key_of(array: DeviceArray) -> Hashable:
    """Return everything about an array that a prepared call depends on.

    The alignment is part of it: a view into an array may be aligned although the array is not.
    """
    return array.dtype, array.shape, array.strides, array.data.ptr % PACK_BYTES
