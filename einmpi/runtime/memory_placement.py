"""Places in one block of memory for arrays that are needed at different times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from einmpi.runtime.host_memory import ALIGNMENT


@dataclass(frozen=True)
class ArrayUse:
    """An array that is needed from one step to another: a slot, or a message of a single step."""

    shape: tuple[int, ...]
    dtype: str
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    def overlaps(self, other: ArrayUse) -> bool:
        """Return whether both are needed in some step."""
        return self.first <= other.last and other.first <= self.last


def place_arrays(uses: Sequence[ArrayUse]) -> tuple[list[int], int]:
    """Return an offset for each array, and the bytes in all.

    Arrays that are needed at the same time do not overlap. The largest are placed first, each at
    the lowest offset that is free.
    """
    offsets = [0] * len(uses)
    placed: list[int] = []
    total = 0
    for number in sorted(range(len(uses)), key=lambda number: -uses[number].nbytes):
        use = uses[number]
        offset = 0
        for other in sorted(placed, key=offsets.__getitem__):
            other_end = offsets[other] + _aligned(uses[other].nbytes)
            is_free_before = offset + _aligned(use.nbytes) <= offsets[other]
            if use.overlaps(uses[other]) and not is_free_before:
                offset = max(offset, other_end)
        offsets[number] = offset
        placed.append(number)
        total = max(total, offset + _aligned(use.nbytes))
    return offsets, total


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
