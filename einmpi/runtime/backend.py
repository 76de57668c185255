"""What the execute loop needs of an array library; NumPy, and a backend without values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from math import prod
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.kernels.cpu.compiled_group import PreparedGroup
from einmpi.kernels.cpu.dispatch import IN_COMPILED_STEPS, IN_LOOPS
from einmpi.kernels.cpu.grouping_rule import cpu_grouping
from einmpi.kernels.cpu.map_and_folds import is_fold, is_map
from einmpi.kernels.cpu.sweeps import with_folds, with_halos_beside
from einmpi.kernels.cpu.updates.product_updates import prepare_product_update, with_product_updates
from einmpi.kernels.cpu.updates.row_writes import prepare_row_writes
from einmpi.kernels.grouping import group_kernels
from einmpi.kernels.prepared import PreparedCall, PreparedCalls, stored_as
from einmpi.kernels.updates.placed_rows import find_placed_rows
from einmpi.runtime.cpu_kernels import KernelOptions, prepare_kernel, prepare_scattered_update
from einmpi.runtime.host_memory import RecycledMemory
from einmpi.runtime.scratch import Scratch
from einmpi.runtime.sharing.arrays import NOTHING_SHARED, SharedArrays
from einmpi.runtime.sweeps import prepare_sweep
from einmpi.schedule.blocked_updates import BlockedUpdate, SparseBlockedUpdate
from einmpi.schedule.fused.chain import Chain
from einmpi.schedule.halo import Sweep
from einmpi.schedule.regions import Region, boxes, indices, packed, shape
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Group, Kernel

Array: TypeAlias = Any  # of any library
HostArray: TypeAlias = npt.NDArray[Any]

MANY_BOXES = 256  # of a region: as many are faster copied by lists of indices


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


class NumpyBackend:
    """NumPy arrays; the slow tier is files in the folder `scratch`."""

    def __init__(
        self,
        threads: int = 1,
        fast_math: bool = False,
        scratch: str | None = None,
        strict: bool = False,
    ) -> None:
        self.threads = threads
        self.fast_math = fast_math
        self.options = KernelOptions(threads, fast_math, strict)
        self.calls = PreparedCalls()
        self.memory = RecycledMemory()
        self.scratch = Scratch(scratch)
        self.shared = NOTHING_SHARED

    @cached_property
    def one_thread_backends(self) -> Sequence[NumpyBackend]:
        if self.threads == 1:
            return [self]
        found = []
        for _ in range(self.threads):
            worker = NumpyBackend(1, self.fast_math, strict=self.options.strict)
            worker.options = replace(self.options, threads=1)
            worker.memory = self.memory
            found.append(worker)
        return found

    def expect_many_runs(self, is_called_step: bool = False) -> None:
        repetition = IN_COMPILED_STEPS if is_called_step else IN_LOOPS
        for backend in (self, *self.one_thread_backends):
            backend.options = replace(backend.options, repetition=repetition)

    def reserve(self, nbytes: int, count_given: Callable[[], int]) -> None: ...

    def release(self) -> None:
        self.memory.release()

    def allocate(self, shape: tuple[int, ...], dtype: str) -> HostArray:
        return self.memory.array(shape, dtype)

    def allocate_slow(self, shape: tuple[int, ...], dtype: str) -> HostArray:
        return self.scratch.array(shape, dtype)

    def allocate_message(self, count: int, dtype: str, slow: bool) -> HostArray:
        return self.allocate((count,), dtype)

    def begin_copy(self, source: HostArray, target: HostArray) -> Copy:
        return self.scratch.begin_copy(source, target)

    def pack(self, array: HostArray, region: Region, packed: HostArray) -> None:
        source = np.atleast_1d(array)
        target = as_region(packed, region)
        for there, here in region_indices(region):
            target[here] = source[there]

    def unpack(self, packed: HostArray, array: HostArray, region: Region) -> None:
        source = as_region(packed, region)
        target = np.atleast_1d(array)
        for there, here in region_indices(region):
            target[there] = source[here]

    def combine(
        self, aggregation: str, array: HostArray, region: Region, packed: HostArray
    ) -> None:
        ufunc = AGGREGATIONS[aggregation].combine
        source = as_region(packed, region)
        target = np.atleast_1d(array)
        with np.errstate(all="ignore"):
            for there, here in region_indices(region):
                part = target[there]
                ufunc(part, source[here], out=part)  # no temporary array, which may be large
                is_view = isinstance(there[0], slice)
                if not is_view:
                    target[there] = part

    def take_rows(
        self, array: HostArray, dimension: int, rows: HostArray, taken: HostArray
    ) -> None:
        # Without a mode other than "raise", numpy makes a copy first.
        np.take(array, rows, dimension, first_rows(taken, dimension, len(rows)), mode="clip")

    def put_rows(self, taken: HostArray, array: HostArray, dimension: int, rows: HostArray) -> None:
        place: tuple[Any, ...] = (*(slice(None),) * dimension, rows)
        array[place] = first_rows(taken, dimension, len(rows))

    def compute_kernel(
        self,
        step: Kernel,
        operands: Sequence[HostArray],
        target: HostArray,
        prepared: PreparedCall | None = None,
    ) -> None:
        """Compute a kernel. `prepared` is its `prepared_kernel`, if the caller has it already."""
        if prepared is None:
            prepared = self.prepared_kernel(step, operands, target)
        prepared(operands, target)

    def prepared_kernel(
        self, step: Kernel, operands: Sequence[HostArray], target: HostArray
    ) -> PreparedCall:
        """Return a kernel as a function of arrays that are stored as these are."""
        stored = stored_as((*operands, target))
        prepare = partial(prepare_kernel, step, operands, target, self.options)
        return self.calls.get(step, stored, prepare)

    def group_kernels(self, schedule: Schedule) -> Schedule:
        strict = self.options.strict
        rule = cpu_grouping(self.fast_math, strict)
        updated = with_product_updates(schedule, strict)
        grouped = group_kernels(with_halos_beside(updated), rule)
        return with_folds(grouped, is_map, lambda fold, of: is_fold(fold, of, strict))

    def compute_group(self, step: Group | Sweep, arrays: Mapping[str, HostArray]) -> bool:
        if isinstance(step, Group):
            outer = [arrays[slot.name] for slot in step.outer]
            make = partial(PreparedGroup, step, arrays, self.threads, self.options.strict)
            return self.calls.get(step, stored_as(outer), make).compute(arrays)
        used = [arrays[slot.name] for slot in (*step.reads, *step.writes)]
        prepare = partial(prepare_sweep, step, arrays, self.options)
        self.calls.get(step, stored_as(used), prepare)(arrays)
        return True

    def group_block(self, schedule: Schedule) -> Schedule:
        rule = cpu_grouping(self.fast_math, self.options.strict, min_blocks=1)
        return group_kernels(schedule, rule)

    def compute_chain(self, step: Chain, arrays: Mapping[str, HostArray]) -> int | None:
        return None

    def compute_update(
        self, step: BlockedUpdate, arrays: Mapping[str, HostArray], target: HostArray
    ) -> bool:
        prepare = partial(prepare_product_update, step, arrays, target, self.options.strict)
        update = self.calls.get(step, stored_as((*arrays.values(), target)), prepare)
        return update is not None and update(arrays, target)

    def write_rows(self, step: Kernel, operands: Sequence[HostArray], target: HostArray) -> bool:
        write = self.prepared_row_writes(step, operands, target)
        if write is not None:
            write(operands, target)
        return write is not None

    def prepared_row_writes(
        self, step: Kernel, operands: Sequence[HostArray], target: HostArray
    ) -> PreparedCall | None:
        """Return `write_rows` for arrays that are stored as these are; None if it returns False."""
        rows = find_placed_rows(step.einsum)
        if rows is None or operands[rows.operand] is not target:
            return None
        options = self.options
        prepare = partial(
            prepare_row_writes, step, operands, target, options.strict, options.repetition
        )
        return self.calls.get(step, ("rows", stored_as((*operands, target))), prepare)

    def compute_scattered_update(
        self,
        step: SparseBlockedUpdate,
        arrays: Mapping[str, HostArray],
        places: HostArray,
        target: HostArray,
    ) -> bool:
        used = (*arrays.values(), target)
        prepare = partial(prepare_scattered_update, step, arrays, places, target, self.options)
        update = self.calls.get(step, stored_as(used), prepare)
        return update is not None and update(arrays, places, target)

    def to_host(self, array: HostArray) -> HostArray:
        return array

    def from_host(self, values: HostArray, array: HostArray) -> None:
        if values is not array:
            array[...] = values

    def forget_inputs(self) -> None: ...

    def share_inputs(self, other: Any) -> None: ...

    def wait(self) -> None: ...


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
