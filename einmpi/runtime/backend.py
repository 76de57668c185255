"""What the execute loop needs of an array library: the protocol of a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy.typing as npt

from einmpi.kernels.prepared import PreparedCalls
from einmpi.runtime.sharing.arrays import SharedArrays
from einmpi.schedule.blocked_updates import BlockedUpdate, SparseBlockedUpdate
from einmpi.schedule.fused.chain import Chain
from einmpi.schedule.halo import Sweep
from einmpi.schedule.regions import Region
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Group, Kernel

Array: TypeAlias = Any  # of any library
HostArray: TypeAlias = npt.NDArray[Any]


class Copy(Protocol):
    """A copy that has begun."""

    def join(self) -> None:
        """Order everything that the backend does from here on after the copy.

        The target may then be used in kernels, the memory of the source be used for something
        else, and the target be copied on.
        """

    def wait(self) -> None:
        """Return when the copy is complete, and the host may read the target."""


class Backend(Protocol):
    """What the execute loop needs of an array library.

    Arrays are in memory, which may be that of a device, or in the slow tier, where they are NumPy
    arrays whatever the backend. `pack`, `unpack` and `combine` get both kinds. In one call all
    arrays are of one kind, except that inputs which stay in memory between runs may be packed
    into the slow tier or unpacked from there.
    """

    calls: PreparedCalls  # by the steps that they belong to
    shared: SharedArrays  # of the run that is under way

    @property
    def one_thread_backends(self) -> Sequence[Backend]:
        """One backend for each thread that may compute by itself; at least this backend."""

    def expect_many_runs(self, is_called_step: bool = False) -> None:
        """Prepare for schedules that are run again and again, as the steps of a loop are."""

    def reserve(self, nbytes: int, count_given: Callable[[], int]) -> None:
        """Prepare for a run that takes so much memory.

        `count_given` returns how many of these bytes are inputs which the device has already.
        """

    def release(self) -> None:
        """Give up memory that was kept for further arrays; called after a run or after many."""

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Return a new array in memory, with any values."""

    def allocate_slow(self, shape: tuple[int, ...], dtype: str) -> HostArray:
        """Return a new array in the slow tier; raise an EinmpiError where no space is left."""

    def allocate_message(self, count: int, dtype: str, slow: bool) -> Array:
        """Return a buffer for a message of an array in memory, or of one in the slow tier."""

    def begin_copy(self, source: Array, target: Array) -> Copy:
        """Begin to copy between memory and the slow tier, or within memory.

        If possible the copy runs in the background, during kernels. Both are arrays or views of
        arrays, of the same shape and dtype, not always contiguous. The source is read after all
        that the backend was asked to do before. Until the copy is joined or waited for, nothing
        changes the source or touches the target. Copies are done in the order they were begun.
        """

    def pack(self, array: Array, region: Region, packed: Array) -> None:
        """Copy a region of an array to `packed`, where its elements are contiguous."""

    def unpack(self, packed: Array, array: Array, region: Region) -> None:
        """Copy `packed` to a region of an array."""

    def combine(self, aggregation: str, array: Array, region: Region, packed: Array) -> None:
        """Aggregate `packed` into a region of an array."""

    def take_rows(self, array: Array, dimension: int, rows: HostArray, taken: Array) -> None:
        """Copy what an array has at some indices of a dimension to the first indices of `taken`."""

    def put_rows(self, taken: Array, array: Array, dimension: int, rows: HostArray) -> None:
        """Copy the first indices of `taken` to these indices of a dimension of an array."""

    def compute_kernel(self, step: Kernel, operands: Sequence[Array], target: Array) -> None:
        """Compute a kernel."""

    def group_kernels(self, schedule: Schedule) -> Schedule:
        """Return the schedule with the groups of kernels that this backend computes together."""

    def compute_group(self, step: Group | Sweep, arrays: Mapping[str, Array]) -> bool:
        """Compute a group or a sweep on the arrays of its outer slots.

        Return False if it must be computed kernel by kernel.
        """

    def group_block(self, schedule: Schedule) -> Schedule:
        """Return the steps of one block of a chain, with groups as `group_kernels` makes them."""

    def compute_chain(self, step: Chain, arrays: Mapping[str, Array]) -> int | None:
        """Compute a chain by one kernel, on the arrays of the slots that it reads and writes.

        Return the bytes of memory that this took besides, or None if there is no such kernel:
        then nothing is computed.
        """

    def compute_update(
        self, step: BlockedUpdate, arrays: Mapping[str, Array], target: Array
    ) -> bool:
        """Compute a product and the update that needs it at once, on the arrays that they read.

        Return False if they must be computed block by block.
        """

    def write_rows(self, step: Kernel, operands: Sequence[Array], target: Array) -> bool:
        """Compute a kernel whose target is one of its operands, if it only writes rows there.

        Return False, with nothing computed, if it may change more than that.
        """

    def compute_scattered_update(
        self,
        step: SparseBlockedUpdate,
        arrays: Mapping[str, Array],
        places: HostArray,
        target: Array,
    ) -> bool:
        """Add up the values of each row of `places`, and update these rows of the target at once.

        Return False if they must be computed block by block.
        """

    def to_host(self, array: Array) -> HostArray:
        """Return the values in memory of the host: the array itself if it is there."""

    def from_host(self, values: HostArray, array: Array) -> None:
        """Fill an array with values that `to_host` returned."""

    def forget_inputs(self) -> None:
        """Give up blocks of inputs that stay between runs: a run that failed may have left them."""

    def share_inputs(self, other: Any) -> None:
        """Use the blocks that stay between runs of another backend of this kind."""

    def wait(self) -> None:
        """Return when everything that was started is complete."""
