"""What the execute loop needs of an array library: NumPy's way, and one that knows shapes only (for dry runs)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Protocol

import numpy as np

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.kernels.cpu import compiled_group
from einmpi.kernels.cpu.dispatch import compute_einsum
from einmpi.kernels.cpu.grouping_rule import CPU_GROUPING
from einmpi.kernels.grouping import group_kernels
from einmpi.runtime.scratch import Scratch
from einmpi.schedule.regions import Region, indices, shape
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Group, Kernel

ALIGNMENT = 64  # bytes: equal alignment on all ranks, so that equal work gives equal bits
MANY_RUNS = 256


class Copy(Protocol):
    """A copy that has begun."""

    def join(self) -> None:
        """What the backend is asked to do from here on comes after it: to compute with the target, to use the memory of
        the source for something else, to copy further."""

    def wait(self) -> None:
        """Return when it is done: the host may read the target."""


class Backend(Protocol):
    """Arrays are in memory, which may be that of a device, or in the slow tier: there they are numpy's, whatever the
    backend. `pack`, `unpack` and `combine` get both kinds, but in one call all arrays are of one kind; only what stays
    in memory between runs may be unpacked into the slow tier, or packed there."""

    def reserve(self, nbytes: int) -> None:
        """A run is about to begin that takes so much memory."""

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Any: ...
    def allocate_slow(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """An array in the slow tier; OSError where there is no space left."""

    def allocate_message(self, count: int, dtype: str, slow: bool) -> Any:
        """A buffer for a message of an array in memory, or of one in the slow tier."""

    def begin_copy(self, source: Any, target: Any) -> Copy:
        """Copy between memory and the slow tier, or within memory; in the background if possible, beside kernels.

        Both are arrays or views of them, of the same shape and dtype, not always contiguous. The source is read after
        all that the backend was asked to do before. Until the copy is joined or waited for nobody changes the source
        nor touches the target. Copies are done in the order in which they were begun.
        """

    def pack(self, array: Any, region: Region, packed: Any) -> None:
        """Copy a region of an array into `packed`, which has its elements one after another."""

    def unpack(self, packed: Any, array: Any, region: Region) -> None: ...
    def combine(self, aggregation: str, array: Any, region: Region, packed: Any) -> None:
        """Aggregate `packed` into a region of an array."""

    def compute(self, step: Kernel, operands: Sequence[Any], target: Any) -> None: ...
    def arrange(self, schedule: Schedule) -> Schedule:
        """The schedule with those kernels in groups that this backend does together."""

    def compute_group(self, step: Group, arrays: Mapping[str, Any]) -> bool:
        """Do a group on its slots' arrays, but for the inner ones; False if it must go kernel by kernel."""

    def to_host(self, array: Any) -> np.ndarray:
        """Its values in memory that files can be written from: the array itself where it is that."""

    def from_host(self, values: np.ndarray, array: Any) -> None:
        """Fill an array with values that `to_host` gave."""

    def wait(self) -> None:
        """Return when all that was started is done."""


class NumpyBackend:
    """Its slow tier are files in the folder `scratch`."""

    def __init__(
        self, threads: int = 1, fast_math: bool = False, scratch: str | None = None
    ) -> None:
        self.threads, self.fast_math, self.scratch = threads, fast_math, Scratch(scratch)

    def reserve(self, nbytes: int) -> None: ...
    def allocate(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        nbytes = prod(shape) * np.dtype(dtype).itemsize
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + nbytes].view(dtype).reshape(shape)

    def allocate_slow(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return self.scratch.array(shape, dtype)

    def allocate_message(self, count: int, dtype: str, slow: bool) -> np.ndarray:
        return self.allocate((count,), dtype)

    def begin_copy(self, source: np.ndarray, target: np.ndarray) -> Copy:
        return self.scratch.begin_copy(source, target)

    def pack(self, array: np.ndarray, region: Region, packed: np.ndarray) -> None:
        for there, here in pieces(region):
            shaped(packed, region)[here] = np.atleast_1d(array)[there]

    def unpack(self, packed: np.ndarray, array: np.ndarray, region: Region) -> None:
        for there, here in pieces(region):
            np.atleast_1d(array)[there] = shaped(packed, region)[here]

    def combine(
        self, aggregation: str, array: np.ndarray, region: Region, packed: np.ndarray
    ) -> None:
        ufunc = AGGREGATIONS[aggregation].combine
        with np.errstate(all="ignore"):
            for there, here in pieces(region):
                part = np.atleast_1d(array)[there]
                ufunc(
                    part, shaped(packed, region)[here], out=part
                )  # no temporary array, which may be large
                if not isinstance(there[0], slice):  # then it is a copy
                    np.atleast_1d(array)[there] = part

    def compute(self, step: Kernel, operands: Sequence[np.ndarray], target: np.ndarray) -> None:
        index = {label: indices(runs) for label, runs in step.index}
        compute_einsum(
            step.einsum, selected(step, operands), target, index, self.threads, self.fast_math
        )

    def arrange(self, schedule: Schedule) -> Schedule:
        return group_kernels(schedule, CPU_GROUPING)

    def compute_group(self, step: Group, arrays: Mapping[str, np.ndarray]) -> bool:
        return compiled_group.compute_group(step, arrays, self.threads)

    def to_host(self, array: np.ndarray) -> np.ndarray:
        return array

    def from_host(self, values: np.ndarray, array: np.ndarray) -> None:
        if values is not array:
            array[...] = values

    def wait(self) -> None: ...


def selected(
    step: Kernel, operands: Sequence[Any], as_index: Callable[[np.ndarray], Any] = np.asarray
) -> list[Any]:
    """What a kernel takes of its operands; `as_index` makes of indices what these arrays understand."""
    chosen = list(operands)
    for operand, dimension, runs in step.select:
        taken = slice(*runs[0]) if len(runs) == 1 else as_index(indices(runs))
        chosen[operand] = chosen[operand][(slice(None),) * dimension + (taken,)]
    return chosen


def shaped(packed: Any, region: Region) -> Any:
    return packed.reshape(shape(region))


def pieces(region: Region) -> Iterator[tuple[Any, Any]]:
    """(where in the array, where in the packed region), run by run; or all at once where there are very many."""
    if prod(map(len, region)) > MANY_RUNS:
        yield np.ix_(*map(indices, region)), (slice(None),) * len(region)
        return
    sides = []
    for runs in region:
        before, pairs = 0, []
        for start, stop in runs:
            pairs.append((slice(start, stop), slice(before, before + stop - start)))
            before += stop - start
        sides.append(pairs)
    for combination in itertools.product(*sides):
        yield tuple(pair[0] for pair in combination), tuple(pair[1] for pair in combination)


class _Copied:
    def join(self) -> None: ...
    def wait(self) -> None: ...


class ShapeBackend:
    """Arrays without values: as large as one likes, in no memory."""

    def reserve(self, nbytes: int) -> None: ...
    def allocate(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), shape)

    def allocate_slow(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return self.allocate(shape, dtype)

    def allocate_message(self, count: int, dtype: str, slow: bool) -> np.ndarray:
        return self.allocate((count,), dtype)

    def begin_copy(self, source: Any, target: Any) -> Copy:
        return _Copied()

    def pack(self, array: Any, region: Region, packed: Any) -> None: ...
    def unpack(self, packed: Any, array: Any, region: Region) -> None: ...
    def combine(self, aggregation: str, array: Any, region: Region, packed: Any) -> None: ...
    def compute(self, step: Kernel, operands: Sequence[Any], target: Any) -> None: ...
    def arrange(self, schedule: Schedule) -> Schedule:
        return schedule

    def compute_group(self, step: Group, arrays: Mapping[str, Any]) -> bool:
        return True

    def to_host(self, array: Any) -> np.ndarray:
        return np.asarray(array)

    def from_host(self, values: np.ndarray, array: Any) -> None: ...
    def wait(self) -> None: ...
