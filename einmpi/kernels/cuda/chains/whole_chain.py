"""CUDA kernels that compute a whole chain at once, such as attention.

Each is asked whether it can; chains that none of them computes go block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from einmpi.kernels.cuda.capture import watch
from einmpi.kernels.cuda.driver import DeviceArray
from einmpi.kernels.cuda.launch import key_of
from einmpi.kernels.prepared import PreparedCalls
from einmpi.schedule.fused.chain import Chain

# The arrays of all slots that a chain reads and writes, by the name of the slot.
Arrays: TypeAlias = Mapping[str, DeviceArray]


@dataclass(frozen=True)
class PreparedChain:
    """A chain prepared for arrays that are stored as some are."""

    compute: Callable[[Arrays], None]  # on arrays with the same shapes, strides and dtypes
    workspace: int = 0  # bytes of memory that it takes besides


# Returns None if the kernel does not support the chain, or arrays that are stored in this way.
PrepareChain: TypeAlias = Callable[[Chain, Arrays], PreparedChain | None]

CHAIN_KERNELS: list[PrepareChain] = []  # asked in this order


def compute_chain(step: Chain, arrays: Arrays, calls: PreparedCalls) -> int | None:
    """Compute a chain by the first kernel that can; return the bytes it took, None if none can."""
    key = ("chain", *(key_of(array) for array in arrays.values()))
    prepared = calls.get(step, key, lambda: _prepare(step, arrays))
    if prepared is None:
        return None
    prepared.compute(arrays)
    return prepared.workspace


def _prepare(step: Chain, arrays: Arrays) -> PreparedChain | None:
    watch.prepare_calls()
    for prepare in CHAIN_KERNELS:
        prepared = prepare(step, arrays)
        if prepared is not None:
            return prepared
    return None
