"""A backend without values: the execute loop then counts what it would do, in a dry run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from einmpi.kernels.prepared import PreparedCalls
from einmpi.runtime.backend import Array, Backend, Copy, HostArray
from einmpi.runtime.sharing.arrays import NOTHING_SHARED
from einmpi.schedule.blocked_updates import BlockedUpdate, SparseBlockedUpdate
from einmpi.schedule.fused.chain import Chain
from einmpi.schedule.halo import Sweep
from einmpi.schedule.regions import Region
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Group, Kernel


class _CompletedCopy:
    def join(self) -> None: ...

    def wait(self) -> None: ...


_ANY_ELEMENT = np.zeros(2)  # as large as the largest element
_ANY_ELEMENT.setflags(write=False)


class ShapeBackend:
    """Arrays without values, of any size, which take no memory: for dry runs."""

    def __init__(self) -> None:
        self.calls = PreparedCalls()
        self.shared = NOTHING_SHARED

    @property
    def one_thread_backends(self) -> Sequence[Backend]:
        return [self]

    def expect_many_runs(self, is_called_step: bool = False) -> None: ...

    def reserve(self, nbytes: int, count_given: Callable[[], int]) -> None: ...

    def release(self) -> None: ...

    def allocate(self, shape: tuple[int, ...], dtype: str) -> HostArray:
        # All elements are the same bytes; quicker than numpy.broadcast_to.
        return np.ndarray(shape, dtype, _ANY_ELEMENT, strides=(0,) * len(shape))

    def allocate_slow(self, shape: tuple[int, ...], dtype: str) -> HostArray:
        return self.allocate(shape, dtype)

    def allocate_message(self, count: int, dtype: str, slow: bool) -> HostArray:
        return self.allocate((count,), dtype)

    def begin_copy(self, source: Array, target: Array) -> Copy:
        return _CompletedCopy()

    def pack(self, array: Array, region: Region, packed: Array) -> None: ...

    def unpack(self, packed: Array, array: Array, region: Region) -> None: ...

    def combine(self, aggregation: str, array: Array, region: Region, packed: Array) -> None: ...

    def take_rows(self, array: Array, dimension: int, rows: HostArray, taken: Array) -> None: ...

    def put_rows(self, taken: Array, array: Array, dimension: int, rows: HostArray) -> None: ...

    def compute_kernel(self, step: Kernel, operands: Sequence[Array], target: Array) -> None: ...

    def group_kernels(self, schedule: Schedule) -> Schedule:
        return schedule

    def compute_group(self, step: Group | Sweep, arrays: Mapping[str, Array]) -> bool:
        return True

    def group_block(self, schedule: Schedule) -> Schedule:
        return schedule

    def compute_chain(self, step: Chain, arrays: Mapping[str, Array]) -> int | None:
        return step.working_bytes

    def write_rows(self, step: Kernel, operands: Sequence[Array], target: Array) -> bool:
        return True

    def compute_update(
        self, step: BlockedUpdate, arrays: Mapping[str, Array], target: Array
    ) -> bool:
        return True

    def compute_scattered_update(
        self,
        step: SparseBlockedUpdate,
        arrays: Mapping[str, Array],
        places: HostArray,
        target: Array,
    ) -> bool:
        return True

    def to_host(self, array: Array) -> HostArray:
        return np.asarray(array)

    def from_host(self, values: HostArray, array: Array) -> None: ...

    def forget_inputs(self) -> None: ...

    def share_inputs(self, other: Any) -> None: ...

    def wait(self) -> None: ...
