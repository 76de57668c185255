"""Memory for the copies that a kernel makes for itself. A thread uses it again and again, since new
memory costs a page fault for every few kilobytes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from einmpi.kernels.operands import Array
from einmpi.kernels.prepared import address_of

MOST_KEPT_BYTES = 2**22  # of a thread, between two kernels
ALIGNMENT = 64  # bytes: equal alignment on all ranks, so that equal work gives equal bits


class _Kept(threading.local):
    """What a thread has kept of the last kernel."""

    def __init__(self) -> None:
        self.memory: Array = np.empty(0, np.uint8)


_kept = _Kept()


def temporary_arrays(shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> list[Array]:
    """Return arrays with any values, for this thread and until it calls this again."""
    offsets = []
    total = 0
    for shape in shapes:
        offsets.append(total)
        total += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    memory = _kept.memory
    if memory.nbytes < total:
        memory = np.empty(total + ALIGNMENT, np.uint8)
        start = -address_of(memory) % ALIGNMENT
        memory = memory[start : start + total]
        if total <= MOST_KEPT_BYTES:
            _kept.memory = memory
    found = []
    for shape, offset in zip(shapes, offsets, strict=True):
        found.append(np.ndarray(shape, dtype, memory, offset))
    return found
