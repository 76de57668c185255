"""The NumPy backend of the execute loop: slots in memory of the host, kernels on its cores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.kernels.cpu.compiled_group import PreparedGroup
from einmpi.kernels.cpu.dispatch import IN_COMPILED_STEPS, IN_LOOPS
from einmpi.kernels.cpu.map_and_folds import cpu_grouping, is_fold, is_map
from einmpi.kernels.cpu.product_updates import prepare_product_update, with_product_updates
from einmpi.kernels.cpu.row_updates import prepare_row_writes
from einmpi.kernels.cpu.sweeps import with_folds, with_halos_beside
from einmpi.kernels.grouping import group_kernels
from einmpi.kernels.prepared import PreparedCall, PreparedCalls, stored_as
from einmpi.kernels.updates import find_placed_rows
from einmpi.runtime.backend import (
    NOTHING_SHARED,
    Copy,
    HostArray,
    as_region,
    first_rows,
    region_indices,
)
from einmpi.runtime.cpu.kernels import (
    KernelOptions,
    prepare_kernel,
    prepare_scattered_update,
    prepare_sweep,
)
from einmpi.runtime.host_memory import RecycledMemory, Scratch
from einmpi.schedule.blocked_updates import BlockedUpdate, SparseBlockedUpdate
from einmpi.schedule.chain import Chain
from einmpi.schedule.halo import Sweep
from einmpi.schedule.regions import Region
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Group, Kernel


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
