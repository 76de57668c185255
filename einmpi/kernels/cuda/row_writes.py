"""Rows that a kernel writes into one of its operands on a GPU, such as a cache; the rest stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Call, Scalar, rebuild
from einmpi.kernels import updates
from einmpi.kernels.cuda import capture, driver
from einmpi.kernels.cuda.device_functions import DEVICE
from einmpi.kernels.cuda.driver import DeviceArray
from einmpi.kernels.cuda.nest import PreparedCall, compile_kernel
from einmpi.kernels.cuda.scalar_source import kind_of
from einmpi.kernels.updates import PlacedRows, find_placed_rows
from einmpi.schedule.compute import Kernel
from einmpi.schedule.regions import one_run

Compute = Callable[[EinSum, Sequence[DeviceArray], DeviceArray, Any], None]  # a whole kernel
ArrayOf = Callable[[Sequence[DeviceArray]], DeviceArray]  # an array, given the operands

_BLOCK_THREADS = 256
_MOST_BLOCKS = 4096
# Elements are copied as they are: only their size counts.
_ELEMENTS = {
    1: "typedef unsigned char Element;",
    2: "typedef unsigned short Element;",
    4: "typedef unsigned int Element;",
    8: "typedef unsigned long long Element;",
    16: "struct Element { unsigned long long low, high; };",
}


def prepare_row_writes(
    kernel: Kernel, operands: Sequence[DeviceArray], target: DeviceArray, compute: Compute
) -> PreparedCall | None:
    """Return a kernel that is written over one of its operands as a write of some of its rows.

    It is for arrays that are stored as these are. None if it may change more than that.
    """
    capture.prepare_calls()
    rows = find_placed_rows(kernel.einsum)
    if rows is None or kernel.select or 0 in kernel.einsum.bound:
        return None
    runs = dict(kernel.index).get(rows.label, one_run(0, kernel.einsum.extent[rows.label]))
    if len(runs) != 1:
        return None
    places_of = _prepare_places(rows, kernel, operands, compute)
    if places_of is None:
        return None
    values_of = _prepare_values(rows, kernel, operands, target, compute)
    if values_of is None:
        return None
    launch = _prepare_write(rows, kernel.einsum, places_of(operands), values_of(operands), target)
    if launch is None:
        return None
    start, stop = runs[0]

    def write(operands: Sequence[DeviceArray], target: DeviceArray) -> None:
        launch(places_of(operands), values_of(operands), target, start, stop)

    return write


def _prepare_places(
    rows: PlacedRows, kernel: Kernel, operands: Sequence[DeviceArray], compute: Compute
) -> ArrayOf | None:
    """Return what gives the index of each row as int64; None if it may be no whole number."""
    dtypes = [array.dtype.name for array in operands]
    if np.dtype(kind_of(rows.place, dtypes)).kind not in "biu":
        return None
    entries = kernel.einsum.operands
    if isinstance(rows.place, Arg):
        number = rows.place.position
        if entries[number] == rows.place_labels and operands[number].dtype == np.int64:
            return lambda operands: operands[number]

    def renumber(node: Scalar) -> Scalar:
        return Arg(rows.place_operands.index(node.position)) if isinstance(node, Arg) else node

    extent = kernel.einsum.extent
    einsum = EinSum(
        rows.place_labels,
        tuple(entries[position] for position in rows.place_operands),
        Call("int64", (rebuild(rows.place, renumber),)),
        None,
        (),
        tuple((label, extent[label]) for label in rows.place_labels),
    )
    return _computed(einsum, rows.place_operands, np.dtype(np.int64), (), compute)


def _prepare_values(
    rows: PlacedRows,
    kernel: Kernel,
    operands: Sequence[DeviceArray],
    target: DeviceArray,
    compute: Compute,
) -> ArrayOf | None:
    """Return what gives the values of all rows, given the operands of the kernel.

    None if they have to be computed and take too much memory.
    """
    einsum = rows.value
    # What reads the array that is written to has to be computed before.
    if einsum.function == Arg(0) and rows.operand not in rows.value_operands:
        (number,) = rows.value_operands
        is_stored = einsum.operands == (einsum.output,) and operands[number].dtype == target.dtype
        if is_stored:
            return lambda operands: operands[number]
    if prod(einsum.bound) * target.itemsize > updates.MOST_VALUE_BYTES:
        return None
    numbers = einsum.labels_as_numbers
    index = tuple((label, runs) for label, runs in kernel.index if label in numbers)
    return _computed(einsum, rows.value_operands, target.dtype, index, compute)


def _computed(
    einsum: EinSum, positions: Sequence[int], dtype: np.dtype[Any], index: Any, compute: Compute
) -> ArrayOf:
    """Return what computes an EinSum of some of the operands."""
    cupy = driver.cupy()

    def computed(operands: Sequence[DeviceArray]) -> DeviceArray:
        found = cupy.empty(einsum.bound, dtype)
        compute(einsum, [operands[position] for position in positions], found, index)
        return found

    return computed


# ---- the kernel ----------------------------------------------------------------------------------


def _prepare_write(
    rows: PlacedRows,
    einsum: EinSum,
    places: DeviceArray,
    values: DeviceArray,
    target: DeviceArray,
) -> Callable[..., None] | None:
    """Return what writes the rows from a start to a stop, which are those of the target.

    The elements of all rows are nested loops, with a step of each loop in every array. Return None
    if there is no kernel for arrays that are stored as these.
    """
    if values.dtype != target.dtype or target.itemsize not in _ELEMENTS:
        return None
    steps: list[dict[str, int]] = []  # of labels, in elements
    labels_of_arrays = (rows.place_labels, rows.value.output, einsum.output)
    for array, labels in zip((places, values, target), labels_of_arrays, strict=True):
        if any(stride % array.itemsize for stride in array.strides):
            return None
        in_elements = [stride // array.itemsize for stride in array.strides]
        steps.append(dict(zip(labels, in_elements, strict=True)))
    row_step = steps[2][rows.label]  # from one row of the target to the next
    loops: list[int] = []
    for label in rows.value.output:
        loops += [einsum.extent[label], *(own.get(label, 0) for own in steps)]
    text = row_writes_source(target.itemsize, len(rows.value.output))
    kernel = compile_kernel(text, fast=False)
    count = prod(rows.value.bound)
    blocks = min(-(-count // _BLOCK_THREADS), _MOST_BLOCKS)

    def launch(
        places: DeviceArray, values: DeviceArray, target: DeviceArray, start: int, stop: int
    ) -> None:
        addresses = (places.data.ptr, values.data.ptr, target.data.ptr)
        numbers = (count, blocks * _BLOCK_THREADS, start, stop, row_step, *loops)
        kernel((blocks, 1), (_BLOCK_THREADS,), (*addresses, *numbers))

    return launch


def row_writes_source(itemsize: int, loops: int) -> str:
    """Return the text of a kernel in which each thread writes elements of rows, one by one."""
    parameters = ["long long row_step"]
    for loop in range(loops):
        for name in ("extent", "place_step", "value_step", "target_step"):
            parameters.append(f"long long {name}{loop}")
    lines = ""
    for loop in reversed(range(loops)):
        lines += f"""
        index = rest % extent{loop};
        rest /= extent{loop};
        place += index * place_step{loop};
        value += index * value_step{loop};
        element += index * target_step{loop};"""
    return f"""{DEVICE}{_ELEMENTS[itemsize]}
extern "C" __global__ void kernel(
    const long long* places, const Element* values, Element* target,
    long long count, long long threads, long long start, long long stop,
    {", ".join(parameters)}) {{
    long long number = blockIdx.x * {_BLOCK_THREADS}ll + threadIdx.x;
    for (; number < count; number += threads) {{
        long long rest = number, place = 0, value = 0, element = 0, index;{lines}
        long long row = places[place];
        if (start <= row && row < stop)
            target[element + (row - start) * row_step] = values[value];
    }}
}}
"""
