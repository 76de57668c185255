"""Rows that a kernel writes into one of its operands on a GPU, such as a cache; the rest stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from einmpi.graph.einsum import EinSum
from einmpi.kernels import row_writes
from einmpi.kernels.cuda import capture, driver
from einmpi.kernels.cuda.device_functions import DEVICE
from einmpi.kernels.cuda.driver import DeviceArray
from einmpi.kernels.cuda.nest import compile_kernel
from einmpi.kernels.index_sets import LabelRuns
from einmpi.kernels.prepared import PreparedCall
from einmpi.kernels.updates import PlacedRows
from einmpi.schedule.compute import Kernel

Compute = Callable[[EinSum, Sequence[DeviceArray], DeviceArray, Any], None]  # a whole kernel

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
    """Return a kernel that is written over one of its operands as a write of some of its rows."""
    capture.prepare_calls()

    def prepare(
        einsum: EinSum, _operands: Sequence[DeviceArray], _out: DeviceArray, runs: LabelRuns
    ) -> PreparedCall:
        return lambda operands, out: compute(einsum, operands, out, runs)

    device = row_writes.RowDevice(driver.cupy().empty, prepare, _prepare_write)
    return row_writes.prepare_row_writes(kernel, operands, target, device)


def _prepare_write(
    rows: PlacedRows,
    einsum: EinSum,
    places: DeviceArray,
    values: DeviceArray,
    target: DeviceArray,
) -> row_writes.Write | None:
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
    kernel = compile_kernel(text, False)
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
