"""What CuPy makes of a kernel's text, and calls that are prepared once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from einmpi.kernels.cuda import driver
from einmpi.kernels.cuda.nest import PACK

# numpy rounds after every operation: a product that is fused with a sum would give a·b − a·b ≠ 0. Where one rounding is
# wanted, a kernel says so.
OPTIONS = ("-std=c++17", "--fmad=false")
FAST = ("-std=c++17", "--use_fast_math")
MOST = 4096  # prepared calls


def compiled(text: str, fast: bool) -> Any:
    """A kernel from its text. CuPy keeps compiled ones on disk; several processes may start at once."""
    return (
        driver.cupy().RawModule(code=text, options=FAST if fast else OPTIONS).get_function("kernel")
    )


@dataclass(frozen=True)
class Launch:
    """A kernel with all of its arguments but the pointers."""

    kernel: Any
    shape: tuple[tuple[int, int], tuple[int]]  # blocks, threads
    values: tuple[int, ...]
    places: tuple[tuple[int, int], ...]  # which argument is the pointer to which array

    def __call__(self, pointers: Sequence[int]) -> None:
        values = list(self.values)
        for place, array in self.places:
            values[place] = pointers[array]
        self.kernel(*self.shape, tuple(values))


class Calls:
    """What was prepared for an object and a key. By identity: to hash a tree takes longer than a small kernel."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, Hashable], tuple[Any, Any]] = {}

    def get(self, owner: Any, key: Hashable, make: Callable[[], Any]) -> Any:
        entry = self.found.get((id(owner), key))
        if entry is None:
            made = make()
            if len(self.found) >= MOST:
                self.found.clear()
            # The owner is kept too, so that no other object gets its identity.
            entry = self.found[id(owner), key] = owner, made
        return entry[1]


def key_of(array: Any) -> Hashable:
    """All of an array that a prepared call depends on. Parts of it may be aligned where it is not itself."""
    return array.dtype, array.shape, array.strides, array.data.ptr % PACK
