"""What a CUDA kernel for whole chains answers when it is asked to prepare one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from einmpi.kernels.cuda.driver import DeviceArray
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
