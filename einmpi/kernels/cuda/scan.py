"""Scans on a GPU, with work in proportion to the values, and with the same bits every time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Number
from einmpi.kernels.cuda import driver
from einmpi.kernels.cuda.driver import DeviceArray
from einmpi.kernels.cuda.launch import PreparedCall, compile_kernel
from einmpi.kernels.cuda.nest import BLOCK_THREADS
from einmpi.kernels.cuda.scalar_source import HALVES, plain
from einmpi.kernels.cuda.scan_source import (
    CHUNK_VALUES,
    ScanText,
    parameter_names,
    scan_kernel_source,
)
from einmpi.schedule.regions import Runs, indices, whole

MOST_BLOCKS = 2**31 - 1  # of one launch
# With so many lines, threads that scan a line each keep a GPU busy.
LINES_FOR_ALL_THREADS = 2**13
SHORT_LINE_VALUES = 512  # for which a block of threads would be too much

Ints = npt.NDArray[np.int64]


class _Segment(NamedTuple):
    """Values of a line that follow one another, and where their results go."""

    first_value: int
    first_result: int
    length: int
    offset: int  # the index of what the segment begins with; −1 for nothing


@dataclass(frozen=True)
class _Problem:
    """A scan: its lines, and the segments of a line."""

    lines: tuple[str, ...]
    segments: tuple[_Segment, ...]
    values: int  # operands
    offsets: int
    values_dimension: int
    offsets_dimension: int
    result_dimension: int
    masked: Number
    first_results: Ints | None  # of each value; None where results are in the places of values


def prepare_scan(
    einsum: EinSum,
    operands: Sequence[DeviceArray],
    target: DeviceArray,
    index: Sequence[tuple[str, Runs]],
) -> PreparedCall | None:
    """Return the call that computes a scan; None if the EinSum is none, or has too many lines."""
    problem = _plain_scan(einsum, dict(index)) or _scan_in_blocks(einsum, dict(index))
    if problem is None or einsum.aggregation is None:
        return None
    record = AGGREGATIONS[einsum.aggregation]
    result = target.dtype.name
    total = result
    if record.is_rounded:
        total = DTYPES[result].accumulator
    elif result in HALVES:
        total = "float32"
    neutral = record.neutral(np.dtype(plain(total)))
    is_neutral = problem.masked in (record.empty, neutral)
    if einsum.blocked_scan is not None and not is_neutral:
        return None
    text = ScanText(
        einsum.aggregation,
        operands[problem.values].dtype.name,
        operands[problem.offsets].dtype.name,
        total,
        result,
        neutral,
        None if is_neutral else problem.masked,
        len(problem.lines),
        problem.first_results is not None,
    )
    return _prepare_launches(einsum, problem, text, operands, target)


def _plain_scan(einsum: EinSum, runs: dict[str, Runs]) -> _Problem | None:
    """Return a scan of whole lines, or of what a rank has of them."""
    scan = einsum.scan
    if scan is None:
        return None
    taken = runs.get(scan.scanned, whole(einsum.extent[scan.scanned]))
    wanted = runs.get(scan.along, whole(einsum.extent[scan.along]))
    first_results = None
    if taken != wanted:
        counts = np.searchsorted(indices(taken), indices(wanted), side="right")
        first_results = np.searchsorted(counts, np.arange(1, len(indices(taken)) + 2))
    lines = tuple(label for label in einsum.output if label != scan.along)
    return _Problem(
        lines,
        (_Segment(0, 0, einsum.extent[scan.scanned], -1),),
        values=0,
        offsets=0,
        values_dimension=einsum.operands[0].index(scan.scanned),
        offsets_dimension=0,
        result_dimension=einsum.output.index(scan.along),
        masked=scan.masked,
        first_results=first_results,
    )


def _scan_in_blocks(einsum: EinSum, runs: dict[str, Runs]) -> _Problem | None:
    """Return the second pass of a scan in two passes; None where it does not have whole blocks."""
    form = einsum.blocked_scan
    if form is None or form.inside in runs:
        return None
    if einsum.extent[form.inside] != form.blocks.longest:
        return None
    wanted = indices(runs.get(form.along, whole(einsum.extent[form.along])))
    block_of = wanted * form.blocks.count // form.blocks.extent
    starts = np.flatnonzero(np.diff(block_of, prepend=-1)).tolist()
    segments = []
    for start, stop in zip(starts, [*starts[1:], len(wanted)], strict=True):
        block = int(block_of[start])
        first = form.blocks.first(block)
        length = stop - start
        if int(wanted[start]) != first or int(wanted[stop - 1]) != first + length - 1:
            return None
        offset = block - 1 - form.offset_start if block else -1
        segments.append(_Segment(first - form.start, start, length, offset))
    lines = tuple(label for label in einsum.output if label != form.along)
    return _Problem(
        lines,
        tuple(segments),
        values=1,
        offsets=0,
        values_dimension=form.dimension,
        offsets_dimension=form.offset_dimension,
        result_dimension=einsum.output.index(form.along),
        masked=form.masked,
        first_results=None,
    )


def _prepare_launches(
    einsum: EinSum,
    problem: _Problem,
    text: ScanText,
    operands: Sequence[DeviceArray],
    target: DeviceArray,
) -> PreparedCall | None:
    """Return the call that launches the kernels; None if there are too many blocks."""
    values = operands[problem.values]
    pieces, segments = _tables(problem.segments)
    chunks = len(pieces)
    line_count = prod(einsum.extent[label] for label in problem.lines)
    if line_count * max(chunks, len(segments)) > MOST_BLOCKS:
        return None
    numbers = _arguments(einsum, problem, operands, target)
    numbers |= {"chunks": chunks, "segments_per_line": len(segments), "lines": line_count}
    arguments = [numbers[name] for name in parameter_names(text)]
    cupy = driver.cupy()
    tables = [cupy.asarray(pieces.reshape(-1)), cupy.asarray(segments.reshape(-1))]
    if problem.first_results is not None:
        tables.append(cupy.asarray(problem.first_results))
    longest = max(segment.length for segment in problem.segments)
    suits_threads = longest < SHORT_LINE_VALUES or _lines_are_neighbours(einsum, problem, values)
    if suits_threads and line_count >= LINES_FOR_ALL_THREADS:
        total_count = 0
        launches = [("lines", -(-line_count // BLOCK_THREADS))]
    else:
        total_count = line_count * chunks
        launches = [
            ("totals", line_count * chunks),
            ("offsets", line_count * len(segments)),
            ("chunks", line_count * chunks),
        ]
    kernels = []
    for scheme, blocks in launches:
        kernels.append((compile_kernel(scan_kernel_source(text, scheme), fast=False), blocks))

    def call(operands: Sequence[DeviceArray], target: DeviceArray) -> None:
        totals = cupy.empty(total_count, text.total)
        arrays = [operands[problem.values], operands[problem.offsets], totals, target, *tables]
        addresses = [array.data.ptr for array in arrays]
        if problem.first_results is None:
            addresses.append(0)
        for kernel, blocks in kernels:
            kernel((blocks, 1), (BLOCK_THREADS,), (*addresses, *arguments))

    return call


def _tables(segments: Sequence[_Segment]) -> tuple[Ints, Ints]:
    """Return the numbers of all chunks, and those of all segments, as the kernels read them."""
    chunk_rows: list[tuple[int, int, int, int]] = []
    segment_rows = []
    for segment in segments:
        first_chunk = len(chunk_rows)
        for start in range(0, segment.length, CHUNK_VALUES):
            length = min(CHUNK_VALUES, segment.length - start)
            first_value = segment.first_value + start
            chunk_rows.append((first_value, segment.first_result + start, length, start))
        segment_rows.append((*segment, first_chunk, len(chunk_rows) - first_chunk))
    return np.array(chunk_rows, np.int64), np.array(segment_rows, np.int64)


def _arguments(
    einsum: EinSum,
    problem: _Problem,
    operands: Sequence[DeviceArray],
    target: DeviceArray,
) -> dict[str, int]:
    """Return extents and strides, in elements, by the names of the kernels' arguments."""
    found = {f"extent{d}": einsum.extent[label] for d, label in enumerate(problem.lines)}
    arrays = {
        "values": (operands[problem.values], problem.values, problem.values_dimension),
        "offsets": (operands[problem.offsets], problem.offsets, problem.offsets_dimension),
        "result": (target, len(operands), problem.result_dimension),
    }
    indices = (*einsum.operands, einsum.output)
    for name, (array, number, dimension) in arrays.items():
        strides = [stride // array.itemsize for stride in array.strides]
        if name == "offsets" and problem.offsets == problem.values:
            strides = [0] * len(strides)  # there are none
        found[f"{name}_step"] = strides[dimension]
        for line, label in enumerate(problem.lines):
            found[f"{name}_stride{line}"] = strides[indices[number].index(label)]
    return found


def _lines_are_neighbours(einsum: EinSum, problem: _Problem, values: DeviceArray) -> bool:
    """Return whether the values of neighbouring lines are nearer than those of one line."""
    along = abs(values.strides[problem.values_dimension])
    for label in problem.lines:
        place = einsum.operands[problem.values].index(label)
        if einsum.extent[label] > 1 and abs(values.strides[place]) < along:
            return True
    return False
