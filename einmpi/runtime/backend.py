"""What the execute loop needs of an array library: the protocol of a backend."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.caches import bounded_cache
from einmpi.comm.base import Comm
from einmpi.kernels.prepared import PreparedCalls
from einmpi.runtime.sharing.inputs import SharedInput
from einmpi.schedule.compute import Compute, Kernel
from einmpi.schedule.passes import Fusions
from einmpi.schedule.regions import Listed, Region, Slot, boxes, indices, packed, shape
from einmpi.schedule.steps import Transfer

# ---- arrays --------------------------------------------------------------------------------------
#
# What a run knows of memory that ranks share: arrays of slots, transfers without messages.


# A transfer in shared memory; its second argument are the Buffers of the run.
SharedTransfer: TypeAlias = Callable[[Transfer, Any, Comm], None]


class SharedArrays:
    """The arrays of a rank's slots in memory that other ranks of the node read; here: none."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}  # by the name of the slot
        self.transfers: dict[int, SharedTransfer] = {}  # by the number of the step
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
Arrays: TypeAlias = Mapping[str, Array]  # of the slots of a step, by name
# What computes a step on arrays that are stored as those it was prepared for. It returns how many
# bytes it took besides; None if it cannot, because of values, and has computed nothing.
ComputeCall: TypeAlias = Callable[[Arrays], int | None]
# Prepares a step for arrays that are stored as these are; None if it cannot compute it.
Implementation: TypeAlias = Callable[[Compute, Arrays], ComputeCall | None]
PLACES = "places"  # among the arrays of scattered values: the row that each of them goes to
HostArray: TypeAlias = npt.NDArray[Any]
# Where an array is: in memory, which may be that of a device, in that of the host, or outside.
Tier: TypeAlias = Literal["memory", "host", "slow"]


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
    arrays whatever the backend. `pack` and `unpack` get both kinds. In one call all arrays are of
    one kind, except that inputs which stay in memory between runs may be packed into the slow
    tier or unpacked from there.
    """

    calls: PreparedCalls  # by the steps that they belong to
    shared: SharedArrays  # of the run that is under way
    resident: dict[Hashable, Array]  # blocks of inputs that stay on a device between runs
    repetition: int  # how often schedules are run, about: compiling kernels is worth it earlier

    @property
    def fusions(self) -> Fusions:
        """What it computes in one go."""

    @property
    def implementations(self) -> Sequence[Implementation]:
        """What it computes steps by, asked in order; where none of them can, tile by tile."""

    @property
    def one_thread_backends(self) -> Sequence[Backend]:
        """One backend for each thread that may compute by itself; at least this backend."""

    def reserve(self, nbytes: int, count_given: Callable[[], int]) -> None:
        """Prepare for a run that takes so much memory.

        `count_given` returns how many of these bytes are inputs which the device has already.
        """

    def release(self) -> None:
        """Give up memory that was kept for further arrays; called after a run or after many."""

    def allocate(self, shape: tuple[int, ...], dtype: str, tier: Tier = "memory") -> Array:
        """Return a new array with any values.

        Raise an EinmpiError where the slow tier has no space left.
        """

    def begin_copy(self, source: Array, target: Array) -> Copy:
        """Begin to copy between memory and the slow tier, or within memory.

        If possible the copy runs in the background, during kernels. Both are arrays or views of
        arrays, of the same shape and dtype, not always contiguous. The source is read after all
        that the backend was asked to do before. Until the copy is joined or waited for, nothing
        changes the source or touches the target. Copies are done in the order they were begun.
        """

    def pack(self, array: Array, region: Region, packed: Array) -> None:
        """Copy a region of an array to `packed`, where its elements are contiguous."""

    def unpack(
        self, packed: Array, array: Array, region: Region, aggregation: str | None = None
    ) -> None:
        """Copy `packed` to a region of an array, or aggregate it into that region."""

    def compute_kernel(self, kernel: Kernel, operands: Sequence[Array], target: Array) -> None:
        """Compute a kernel."""

    def key_of(self, arrays: Arrays) -> Hashable:
        """Return all that a prepared call depends on, for the arrays of a known step."""

    def to_host(self, array: Array) -> HostArray:
        """Return the values in memory of the host: the array itself if it is there."""

    def from_host(self, values: HostArray, array: Array) -> None:
        """Fill an array with values that `to_host` returned."""

    def wait(self) -> None:
        """Return when everything that was started is complete."""


# ---- array parts ---------------------------------------------------------------------------------
#
# Parts of arrays of any library: regions, packed or in place, rows, what a kernel takes.


MANY_BOXES = 256  # of a region: as many are faster copied by lists of indices


def select_operands(
    kernel: Kernel,
    operands: Sequence[Array],
    as_index: Callable[[npt.NDArray[np.intp]], Any] = np.asarray,
) -> list[Array]:
    """Return what a kernel takes of its operands, which may be of any library.

    `as_index` turns indices into what these arrays accept as an index.
    """
    chosen = list(operands)
    for operand, dimension, runs in kernel.select:
        taken = slice(*runs[0]) if len(runs) == 1 else as_index(indices(runs))
        chosen[operand] = chosen[operand][(slice(None),) * dimension + (taken,)]
    return chosen


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
    if number_of_boxes > MANY_BOXES or any(isinstance(runs, Listed) for runs in region):
        return (_only_list(region),)
    return boxes(region, packed(region))


@bounded_cache(4096)
def _cached_shape(region: Region) -> tuple[int, ...]:
    return shape(region)


@bounded_cache(1024)
def _only_list(region: Region) -> tuple[Any, Any]:
    """Return an index that is a list where there are several runs, and a slice elsewhere."""
    place: tuple[Any, ...]
    if sum(len(runs) > 1 for runs in region) > 1:
        place = np.ix_(*map(indices, region))
    else:
        place = tuple(slice(*runs[0]) if len(runs) == 1 else indices(runs) for runs in region)
    return place, (slice(None),) * len(region)


@bounded_cache(4096)
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
        self.fusions = Fusions()
        self.implementations: Sequence[Implementation] = [lambda *_: lambda _: 0]
        self.resident: dict[Hashable, Array] = {}
        self.repetition = 1

    @property
    def one_thread_backends(self) -> Sequence[Backend]:
        return [self]

    def reserve(self, nbytes: int, count_given: Callable[[], int]) -> None: ...

    def release(self) -> None: ...

    def allocate(self, shape: tuple[int, ...], dtype: str, tier: Tier = "memory") -> HostArray:
        # All elements are the same bytes; quicker than numpy.broadcast_to.
        return np.ndarray(shape, dtype, _ANY_ELEMENT, strides=(0,) * len(shape))

    def begin_copy(self, source: Array, target: Array) -> Copy:
        return _CompletedCopy()

    def pack(self, array: Array, region: Region, packed: Array) -> None: ...

    def unpack(
        self, packed: Array, array: Array, region: Region, aggregation: str | None = None
    ) -> None: ...

    def compute_kernel(self, kernel: Kernel, operands: Sequence[Array], target: Array) -> None: ...

    def key_of(self, arrays: Arrays) -> Hashable:
        return None

    def to_host(self, array: Array) -> HostArray:
        return np.asarray(array)

    def from_host(self, values: HostArray, array: Array) -> None: ...

    def wait(self) -> None: ...
