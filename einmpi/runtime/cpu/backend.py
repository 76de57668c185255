"""The NumPy backend of the execute loop: slots in memory of the host, kernels on its cores."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property

import numpy as np

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.kernels.cpu.compiled_group import PreparedGroup
from einmpi.kernels.cpu.dispatch import ONCE
from einmpi.kernels.cpu.map_and_folds import MapAndFolds, cpu_grouping, is_fold, is_map
from einmpi.kernels.cpu.product_updates import is_product_update, prepare_product_update
from einmpi.kernels.cpu.row_updates import prepare_row_writes
from einmpi.kernels.halo_parts import split_at_halos
from einmpi.kernels.prepared import PreparedCall, PreparedCalls, stored_as
from einmpi.kernels.updates import find_placed_rows
from einmpi.runtime.backend import (
    NOTHING_SHARED,
    Arrays,
    ComputeCall,
    Copy,
    HostArray,
    Tier,
    as_region,
    region_indices,
)
from einmpi.runtime.cpu.kernels import (
    KernelOptions,
    chunked_fold,
    compute_matrices,
    prepare_kernel,
    prepare_scattered_update,
    prepare_stencil,
)
from einmpi.runtime.host_memory import RecycledMemory, Scratch
from einmpi.schedule.compute import Compute, Kernel
from einmpi.schedule.passes import Fusions
from einmpi.schedule.regions import Region, names_of


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
        self.strict = strict
        self.repetition = ONCE
        self.calls = PreparedCalls()
        self.memory = RecycledMemory()
        self.scratch = Scratch(scratch)
        self.shared = NOTHING_SHARED
        self.resident: dict[Hashable, HostArray] = {}  # inputs are in memory of the host anyway
        self.implementations = [
            self._by_matrices,
            self._by_row_writes,
            self._by_group,
            self._by_folds,
            self._by_stencil,
            self._by_product_update,
            self._by_scattered_update,
        ]

    @property
    def options(self) -> KernelOptions:
        """How kernels may compute."""
        return KernelOptions(self.threads, self.fast_math, self.strict, self.repetition)

    @cached_property
    def fusions(self) -> Fusions:
        strict = self.strict
        return Fusions(
            groups=cpu_grouping(self.fast_math, strict),
            groups_in_tiles=cpu_grouping(self.fast_math, strict, min_blocks=1),
            is_product_update=lambda product, update: is_product_update(product, update, strict),
            reads_halos=lambda step: split_at_halos(step) is not None,
            is_map=is_map,
            is_fold=lambda fold, of: is_fold(fold, of, strict),
        )

    @cached_property
    def one_thread_backends(self) -> Sequence[NumpyBackend]:
        if self.threads == 1:
            return [self]
        found = []
        for _ in range(self.threads):
            worker = NumpyBackend(1, self.fast_math, strict=self.strict)
            worker.repetition = self.repetition
            worker.memory = self.memory
            found.append(worker)
        return found

    def reserve(self, nbytes: int, count_given: Callable[[], int]) -> None: ...

    def release(self) -> None:
        self.memory.release()

    def allocate(self, shape: tuple[int, ...], dtype: str, tier: Tier = "memory") -> HostArray:
        return (self.scratch if tier == "slow" else self.memory).array(shape, dtype)

    def begin_copy(self, source: HostArray, target: HostArray) -> Copy:
        return self.scratch.begin_copy(source, target)

    def pack(self, array: HostArray, region: Region, packed: HostArray) -> None:
        source = np.atleast_1d(array)
        target = as_region(packed, region)
        for there, here in region_indices(region):
            target[here] = source[there]

    def unpack(
        self, packed: HostArray, array: HostArray, region: Region, aggregation: str | None = None
    ) -> None:
        source = as_region(packed, region)
        target = np.atleast_1d(array)
        if aggregation is None:
            for there, here in region_indices(region):
                target[there] = source[here]
            return
        ufunc = AGGREGATIONS[aggregation].combine
        with np.errstate(all="ignore"):
            for there, here in region_indices(region):
                part = target[there]
                ufunc(part, source[here], out=part)  # no temporary array, which may be large
                is_view = isinstance(there[0], slice)
                if not is_view:
                    target[there] = part

    def compute_kernel(
        self,
        kernel: Kernel,
        operands: Sequence[HostArray],
        target: HostArray,
        prepared: PreparedCall | None = None,
    ) -> None:
        """Compute a kernel. `prepared` is its `prepared_kernel`, if the caller has it already."""
        if prepared is None:
            prepared = self.prepared_kernel(kernel, operands, target)
        prepared(operands, target)

    def prepared_kernel(
        self, kernel: Kernel, operands: Sequence[HostArray], target: HostArray
    ) -> PreparedCall:
        """Return a kernel as a function of arrays that are stored as these are."""
        stored = stored_as((*operands, target))

        def prepare() -> PreparedCall:
            return prepare_kernel(kernel, operands, target, self.options)

        return self.calls.get(kernel, stored, prepare)

    # ---- implementations ------------------------------------------------------------------------

    def _by_row_writes(self, step: Compute, arrays: Arrays) -> ComputeCall | None:
        """A kernel that writes over one of its operands, but only some rows of it."""
        if not step.is_plain:
            return None
        (kernel,) = step.kernels
        names = names_of(kernel.operands)
        target = arrays[kernel.target.name]
        write = self.prepared_row_writes(kernel, [arrays[name] for name in names], target)
        if write is None:
            return None

        def compute(arrays: Arrays) -> int:
            write([arrays[name] for name in names], arrays[kernel.target.name])
            return 0

        return compute

    def prepared_row_writes(
        self, kernel: Kernel, operands: Sequence[HostArray], target: HostArray
    ) -> PreparedCall | None:
        """Return a kernel that writes rows of an operand; None if it may change more than that."""
        rows = find_placed_rows(kernel.einsum)
        if rows is None or operands[rows.operand] is not target:
            return None
        return prepare_row_writes(kernel, operands, target, self.strict, self.repetition)

    def _by_matrices(self, step: Compute, arrays: Arrays) -> ComputeCall | None:
        """Several results of one function of matrices."""
        einsums = [kernel.einsum for kernel in step.kernels]
        if len(einsums) == 1 or einsums[0].matrix is None:
            return None
        operands = names_of(step.kernels[0].operands)

        def compute(arrays: Arrays) -> int:
            targets = [arrays[kernel.target.name] for kernel in step.kernels]
            compute_matrices(einsums, [arrays[name] for name in operands], *targets)
            return 0

        return compute

    def _by_group(self, step: Compute, arrays: Arrays) -> ComputeCall | None:
        """Kernels that share rows, compiled, one block of rows at a time."""
        if step.tiles.kind != "cache":
            return None
        group = PreparedGroup(step, arrays, self.threads, self.strict)
        return group.compute if group.is_possible else None

    def _by_folds(self, step: Compute, arrays: Arrays) -> ComputeCall | None:
        """Aggregates of one tensor, which is read once: a chunk for each of them in turn."""
        if step.is_plain or step.tiles.kind or step.kernels[0].einsum.aggregation is None:
            return None
        shared = set.intersection(*[set(kernel.operands) for kernel in step.kernels])
        folds = []
        for kernel in step.kernels:
            folds.append(chunked_fold(kernel, arrays, shared))
        if self.threads > 1 or not all(fold.is_possible for fold in folds):
            return None
        together = MapAndFolds([], folds)

        def compute(arrays: Arrays) -> int:
            together.compute(arrays)
            return 0

        return compute

    def _by_stencil(self, step: Compute, arrays: Arrays) -> ComputeCall | None:
        """An elementwise kernel that reads halos where they are, and aggregates of its result."""
        if step.is_plain or step.tiles.kind or not step.kernels[0].einsum.is_elementwise:
            return None
        return prepare_stencil(step, arrays, self.options)

    def _by_product_update(self, step: Compute, arrays: Arrays) -> ComputeCall | None:
        """A product that BLAS adds to the tensor that it updates."""
        if step.tiles.kind != "memory" or len(step.kernels) != 2:
            return None
        return prepare_product_update(step, arrays, self.strict)

    def _by_scattered_update(self, step: Compute, arrays: Arrays) -> ComputeCall | None:
        """The rows that values are scattered to, added up and updated in one compiled pass."""
        if step.tiles.kind != "scattered":
            return None
        return prepare_scattered_update(step, arrays, self.options)

    def key_of(self, arrays: Arrays) -> Hashable:
        return stored_as(list(arrays.values()))

    def to_host(self, array: HostArray) -> HostArray:
        return array

    def from_host(self, values: HostArray, array: HostArray) -> None:
        if values is not array:
            array[...] = values

    def wait(self) -> None: ...
