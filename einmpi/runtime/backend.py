"""What the execute loop needs of an array library: the protocol of a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.comm.base import Comm
from einmpi.kernels.prepared import PreparedCalls
from einmpi.runtime.sharing.inputs import SharedInput
from einmpi.schedule.blocked_updates import BlockedUpdate, SparseBlockedUpdate
from einmpi.schedule.chain import Chain
from einmpi.schedule.halo import Sweep
from einmpi.schedule.regions import Region, boxes, indices, packed, shape
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Group, Kernel, Slot

# ---- arrays --------------------------------------------------------------------------------------
#
# What a run knows of memory that ranks share: arrays of slots, transfers without messages.


# An exchange or a reduction in shared memory; its first argument are the Buffers of the run.
SharedTransfer: TypeAlias = Callable[[Any, Comm], None]
# An exchange that receives elements in slots of their own, one for each other member.
TransferBeside: TypeAlias = Callable[[Sequence[Slot | None], Any, Comm], None]


class SharedArrays:
    """The arrays of a rank's slots in memory that other ranks of the node read; here: none."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}  # by the name of the slot
        self.transfers: dict[int, SharedTransfer] = {}  # by the identity of the step
        self.transfers_beside: dict[int, TransferBeside] = {}
        self.inputs: dict[str, SharedInput] = {}  # by the name of the slot
        # How many ranks share the memory of an input that stays between runs, in this run.
        self.ranks_sharing: dict[str, int] = {}
        self.bytes_per_rank = 0  # of the memory of all these arrays

    def is_free(self, slot: Slot) -> bool:
        """Return whether other ranks have finished with the memory of a slot."""
        return True

    def postpone(self, slot: Slot, action: Callable[[], None]) -> None:
        """Call an action as soon as the memory of a slot is free."""
        action()


NOTHING_SHARED = SharedArrays()


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


# ---- array parts ---------------------------------------------------------------------------------
#
# Parts of arrays of any library: regions, packed or in place, rows, what a kernel takes.


MANY_BOXES = 256  # of a region: as many are faster copied by lists of indices


def select_operands(
    step: Kernel,
    operands: Sequence[Array],
    as_index: Callable[[npt.NDArray[np.intp]], Any] = np.asarray,
) -> list[Array]:
    """Return what a kernel takes of its operands, which may be of any library.

    `as_index` turns indices into what these arrays accept as an index.
    """
    chosen = list(operands)
    for operand, dimension, runs in step.select:
        taken = slice(*runs[0]) if len(runs) == 1 else as_index(indices(runs))
        chosen[operand] = chosen[operand][(slice(None),) * dimension + (taken,)]
    return chosen


def first_rows(array: Array, dimension: int, count: int) -> Array:
    """Return a view of the first indices of a dimension."""
    return array[(slice(None),) * dimension + (slice(0, count),)]


def as_region(packed: Array, region: Region) -> Array:
    """Return a packed region in its shape."""
    return packed.reshape(_cached_shape(region))


def region_indices(region: Region) -> Iterable[tuple[Any, Any]]:
    """Return pairs of indices, into an array and into the packed region of it.

    One pair for each box of the region, or, where there are many, one pair for all of it.
    """
    number_of_boxes = prod(map(len, region))
    if number_of_boxes == 1:
        return (_only_box(region),)
    if number_of_boxes > MANY_BOXES:
        return ((np.ix_(*map(indices, region)), (slice(None),) * len(region)),)
    return boxes(region, packed(region))


@lru_cache(maxsize=4096)
def _cached_shape(region: Region) -> tuple[int, ...]:
    return shape(region)


@lru_cache(maxsize=4096)
def _only_box(region: Region) -> tuple[Any, Any]:
    (box,) = boxes(region, packed(region))
    return box


# ---- shape backend -------------------------------------------------------------------------------
#
# A backend without values: the execute loop then counts what it would do, in a dry run.


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
