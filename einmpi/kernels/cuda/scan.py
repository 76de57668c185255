"""Scans on a GPU, with work in proportion to the values, and with the same bits every time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from einmpi.caches import bounded_cache
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Number
from einmpi.kernels.cuda import driver
from einmpi.kernels.cuda.device_functions import device_source
from einmpi.kernels.cuda.driver import DeviceArray
from einmpi.kernels.cuda.nest import BLOCK_THREADS, compile_kernel
from einmpi.kernels.cuda.scalar_source import (
    COMPUTED,
    STORED,
    convert,
    number,
    operation,
    stored,
)
from einmpi.kernels.cuda.source_parts import KernelText
from einmpi.kernels.prepared import PreparedCall
from einmpi.kernels.scalar_text import computed, plain
from einmpi.kernels.scans import Ints, LineScan, Segment, find_scan, scanned_dimension
from einmpi.schedule.regions import Runs, indices

# ---- scan source ---------------------------------------------------------------------------------
#
# The texts of the CUDA kernels of scans: totals of chunks, a scan of the totals, then the
# chunks.
#
# Where lines are neighbours in memory, each thread scans a line instead.


VALUES_PER_THREAD = 8
CHUNK_VALUES = BLOCK_THREADS * VALUES_PER_THREAD  # that a block of threads scans
# Of a chunk: first value, first result, number of values, position in its segment.
PIECE_NUMBERS = 4
# Of a segment: first value, first result, number of values, offset, first chunk, number of chunks.
SEGMENT_NUMBERS = 6


@dataclass(frozen=True)
class ScanText:
    """All that the texts of the kernels of a scan depend on."""

    aggregation: str
    values: str  # dtypes
    offsets: str
    total: str
    result: str
    neutral: Number
    masked: Number | None  # takes the place of values after an index; None if that is neutral
    line_dimensions: int
    is_selected: bool  # whether the array `first_results` says which results each value gives

    @property
    def total_type(self) -> str:
        return COMPUTED[self.total]

    def join(self, one: str, two: str) -> str:
        return operation(AGGREGATIONS[self.aggregation].operation, (one, two))

    def value(self, place: str) -> str:
        """Return the text of a value of the line, as a total."""
        return convert(f"load(values[({place}) * values_step])", self.values, self.total)

    def offset(self, place: str) -> str:
        return convert(f"load(offsets[({place}) * offsets_step])", self.offsets, self.total)

    def start(self) -> str:
        return number(self.neutral, self.total)


@bounded_cache(1024)
def scan_kernel_source(text: ScanText, scheme: str) -> str:
    """Return the whole text of one of the kernels, whose entry point is the function `kernel`."""
    body = KernelText(depth=1)
    SCHEMES[scheme](text, body)
    return device_source() + "\n".join([_head(text), *body.lines, "}", ""])


def parameter_names(text: ScanText) -> list[str]:
    """Return the names of the arguments that are numbers, in the order of the arguments."""
    names = ["segments_per_line", "chunks", "lines", "values_step", "offsets_step", "result_step"]
    for dimension in range(text.line_dimensions):
        for role in ("extent", "values_stride", "offsets_stride", "result_stride"):
            names.append(f"{role}{dimension}")
    return names


def _head(text: ScanText) -> str:
    numbers = ",\n    ".join(f"Long {name}" for name in parameter_names(text))
    return f"""\
typedef {text.total_type} T;
extern "C" __global__ void __launch_bounds__({BLOCK_THREADS}) kernel(
    const {STORED[text.values]}* values,
    const {STORED[text.offsets]}* offsets,
    {text.total_type}* totals,
    {STORED[text.result]}* results,
    const Long* pieces,
    const Long* segments,
    const Long* first_results,
    {numbers}) {{"""


def _add_line(text: ScanText, body: KernelText) -> None:
    """Move the pointers to the beginning of the line with the number `line`."""
    body.add("Long rest = line;")
    for d in reversed(range(text.line_dimensions)):
        body.add(f"""
            const Long i{d} = rest % extent{d}; rest /= extent{d};
            values += i{d} * values_stride{d};
            offsets += i{d} * offsets_stride{d};
            results += i{d} * result_stride{d};
        """)


def _add_result(text: ScanText, body: KernelText, total: str, position: str, place: str) -> None:
    """Store the results of one value.

    `position` is that of the value in its segment, `place` that of its result in the line.
    """
    if text.masked is not None:
        masked = text.join("total", number(text.masked, text.total))
        body.add(f"T total = {total};", f"if ({position} + 1 < segment[2]) total = {masked};")
    else:
        body.add(f"const T total = {total};")
    result = stored("total", text.total, text.result)
    if not text.is_selected:
        body.add(f"results[({place}) * result_step] = {result};")
        return
    body.add(f"""
        const Long last = first_results[{position} + 1];
        for (Long r = first_results[{position}]; r < last; ++r) {{
          results[r * result_step] = {result};
        }}
    """)


def _masked_result(text: ScanText) -> str:
    masked = text.neutral if text.masked is None else text.masked
    return stored(number(masked, text.total), text.total, text.result)


def _add_scan_of_threads(text: ScanText, body: KernelText) -> None:
    """Scan one total of each thread, in shared memory; in the end `joined` has the results."""
    body.add(f"""
        joined[threadIdx.x] = own;
        for (int distance = 1; distance < {BLOCK_THREADS}; distance *= 2) {{
          __syncthreads();
          const bool takes = threadIdx.x >= distance;
          const T before = takes ? joined[threadIdx.x - distance] : own;
          __syncthreads();
          if (takes) joined[threadIdx.x] = {text.join("before", "joined[threadIdx.x]")};
        }}
        __syncthreads();
    """)


def _add_totals(text: ScanText, body: KernelText) -> None:
    """Let each block of threads aggregate a chunk of a line."""
    body.add(f"""
        __shared__ T joined[{BLOCK_THREADS}];
        const Long line = (Long)blockIdx.x / chunks, chunk = (Long)blockIdx.x % chunks;
    """)
    _add_line(text, body)
    pair = text.join("joined[threadIdx.x]", "joined[threadIdx.x + half]")
    body.add(f"""
        const Long* piece = pieces + chunk * {PIECE_NUMBERS};
        T own = {text.start()};
        for (Long k = threadIdx.x; k < piece[2]; k += {BLOCK_THREADS}) {{
          own = {text.join("own", text.value("piece[0] + k"))};
        }}
        joined[threadIdx.x] = own;
        for (int half = {BLOCK_THREADS // 2}; half; half /= 2) {{
          __syncthreads();
          if (threadIdx.x < half) joined[threadIdx.x] = {pair};
        }}
        if (threadIdx.x == 0) totals[(Long)blockIdx.x] = joined[0];
    """)


def _add_offsets(text: ScanText, body: KernelText) -> None:
    """Turn the totals of the chunks of a segment into the totals of all chunks before each."""
    body.add(f"""
        __shared__ T joined[{BLOCK_THREADS}];
        const Long line = (Long)blockIdx.x / segments_per_line;
        const Long number = (Long)blockIdx.x % segments_per_line;
    """)
    _add_line(text, body)
    body.add(f"""
        const Long* segment = segments + number * {SEGMENT_NUMBERS};
        T* own_totals = totals + line * chunks + segment[4];
        T carried = {text.start()};
        if (segment[3] >= 0) carried = {text.offset("segment[3]")};
    """)
    before = text.join("carried", "joined[threadIdx.x - 1]")
    with body.block(f"for (Long from = 0; from < segment[5]; from += {BLOCK_THREADS})"):
        body.add(f"""
            const Long k = from + threadIdx.x;
            const T own = k < segment[5] ? own_totals[k] : {text.start()};
        """)
        _add_scan_of_threads(text, body)
        body.add(f"""
            T before = carried;
            if (threadIdx.x > 0) before = {before};
            if (k < segment[5]) own_totals[k] = before;
            carried = {text.join("carried", f"joined[{BLOCK_THREADS - 1}]")};
            __syncthreads();
        """)


def _add_chunks(text: ScanText, body: KernelText) -> None:
    """Let each block of threads scan a chunk, after the total of all that comes before it."""
    body.add(f"""
        __shared__ T chunk_values[{CHUNK_VALUES}];
        __shared__ T joined[{BLOCK_THREADS}];
        const Long line = (Long)blockIdx.x / chunks, chunk = (Long)blockIdx.x % chunks;
    """)
    _add_line(text, body)
    body.add(f"""
        const Long* piece = pieces + chunk * {PIECE_NUMBERS};
        const Long* segment = segments;
        for (Long k = threadIdx.x; k < {CHUNK_VALUES}; k += {BLOCK_THREADS}) {{
          if (k < piece[2]) chunk_values[k] = {text.value("piece[0] + k")};
          else chunk_values[k] = {text.start()};
        }}
        __syncthreads();
        T* own_values = chunk_values + threadIdx.x * {VALUES_PER_THREAD};
        T own = own_values[0];
        for (int k = 1; k < {VALUES_PER_THREAD}; ++k) {{
          own = {text.join("own", "own_values[k]")};
          own_values[k] = own;
        }}
    """)
    _add_scan_of_threads(text, body)
    before = text.join("before", "joined[threadIdx.x - 1]")
    body.add(f"""
        T before = totals[(Long)blockIdx.x];
        if (threadIdx.x > 0) before = {before};
        for (int k = 0; k < {VALUES_PER_THREAD}; ++k) {{
          own_values[k] = {text.join("before", "own_values[k]")};
        }}
        __syncthreads();
    """)
    if text.is_selected:
        body.add(f"""
            if (chunk == 0) {{
              for (Long r = threadIdx.x; r < first_results[0]; r += {BLOCK_THREADS}) {{
                results[r * result_step] = {_masked_result(text)};
              }}
            }}
        """)
    with body.block(f"for (Long k = threadIdx.x; k < piece[2]; k += {BLOCK_THREADS})"):
        _add_result(text, body, "chunk_values[k]", "(piece[3] + k)", "piece[1] + k")


def _add_lines(text: ScanText, body: KernelText) -> None:
    """Let each thread scan a line; the values of neighbouring lines are neighbours in memory."""
    body.add(f"""
        const Long line = (Long)blockIdx.x * {BLOCK_THREADS} + threadIdx.x;
        if (line >= lines) return;
    """)
    _add_line(text, body)
    if text.is_selected:
        body.add(f"""
            for (Long r = 0; r < first_results[0]; ++r) {{
              results[r * result_step] = {_masked_result(text)};
            }}
        """)
    with body.block("for (Long number = 0; number < segments_per_line; ++number)"):
        body.add(f"""
            const Long* segment = segments + number * {SEGMENT_NUMBERS};
            T carried = {text.start()};
            if (segment[3] >= 0) carried = {text.offset("segment[3]")};
        """)
        with body.block("for (Long k = 0; k < segment[2]; ++k)"):
            body.add(f"carried = {text.join('carried', text.value('segment[0] + k'))};")
            _add_result(text, body, "carried", "k", "segment[1] + k")


SCHEMES: dict[str, Callable[[ScanText, KernelText], None]] = {
    "totals": _add_totals,
    "offsets": _add_offsets,
    "chunks": _add_chunks,
    "lines": _add_lines,
}


MOST_BLOCKS = 2**31 - 1  # of one launch
# With so many lines, threads that scan a line each keep a GPU busy.
LINES_FOR_ALL_THREADS = 2**13
SHORT_LINE_VALUES = 512  # for which a block of threads would be too much


def prepare_scan(
    einsum: EinSum,
    operands: Sequence[DeviceArray],
    target: DeviceArray,
    index: Sequence[tuple[str, Runs]],
) -> PreparedCall | None:
    """Return the call that computes a scan; None if the EinSum is none, or has too many lines."""
    if einsum.aggregation is None:
        return None
    record = AGGREGATIONS[einsum.aggregation]
    result = target.dtype.name
    total = computed(result)
    if record.is_rounded:
        total = DTYPES[result].accumulator
    scan = find_scan(einsum, {label: indices(runs) for label, runs in index}, plain(total))
    if scan is None:
        return None
    is_plain = einsum.scan is not None
    if not is_plain and any(segment.counts is not None for segment in scan.segments):
        return None
    neutral = record.neutral(np.dtype(plain(total)))
    is_neutral = scan.masked in (record.empty, neutral)
    text = ScanText(
        einsum.aggregation,
        operands[scan.values].dtype.name,
        operands[scan.offsets].dtype.name,
        total,
        result,
        neutral,
        None if is_neutral else scan.masked,
        len(scan.lines),
        scan.segments[0].counts is not None,
    )
    return _prepare_launches(einsum, scan, text, operands, target)


def _prepare_launches(
    einsum: EinSum,
    scan: LineScan,
    text: ScanText,
    operands: Sequence[DeviceArray],
    target: DeviceArray,
) -> PreparedCall | None:
    """Return the call that launches the kernels; None if there are too many blocks."""
    values = operands[scan.values]
    pieces, segments = _tables(scan.segments)
    chunks = len(pieces)
    line_count = prod(einsum.extent[label] for label in scan.lines)
    if line_count * max(chunks, len(segments)) > MOST_BLOCKS:
        return None
    numbers = _arguments(einsum, scan, operands, target)
    numbers |= {"chunks": chunks, "segments_per_line": len(segments), "lines": line_count}
    arguments = [numbers[name] for name in parameter_names(text)]
    cupy = driver.cupy()
    tables = [cupy.asarray(pieces.reshape(-1)), cupy.asarray(segments.reshape(-1))]
    counts = scan.segments[0].counts
    if counts is not None:  # the first result of each value
        numbers_of_values = np.arange(1, scan.segments[0].length + 2)
        tables.append(cupy.asarray(np.searchsorted(counts, numbers_of_values)))
    longest = max(segment.length for segment in scan.segments)
    suits_threads = longest < SHORT_LINE_VALUES or _lines_are_neighbours(einsum, scan, values)
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
        kernels.append((compile_kernel(scan_kernel_source(text, scheme), False), blocks))

    def call(operands: Sequence[DeviceArray], target: DeviceArray) -> None:
        totals = cupy.empty(total_count, text.total)
        arrays = [operands[scan.values], operands[scan.offsets], totals, target, *tables]
        addresses = [array.data.ptr for array in arrays]
        if counts is None:
            addresses.append(0)
        for kernel, blocks in kernels:
            kernel((blocks, 1), (BLOCK_THREADS,), (*addresses, *arguments))

    return call


def _tables(segments: Sequence[Segment]) -> tuple[Ints, Ints]:
    """Return the numbers of all chunks, and those of all segments, as the kernels read them."""
    chunk_rows: list[tuple[int, int, int, int]] = []
    segment_rows = []
    for segment in segments:
        first_chunk = len(chunk_rows)
        for start in range(0, segment.length, CHUNK_VALUES):
            length = min(CHUNK_VALUES, segment.length - start)
            first_value = segment.first_value + start
            chunk_rows.append((first_value, segment.first_result + start, length, start))
        chunks = first_chunk, len(chunk_rows) - first_chunk
        segment_rows.append((*segment[:3], segment.offset, *chunks))
    return np.array(chunk_rows, np.int64), np.array(segment_rows, np.int64)


def _arguments(
    einsum: EinSum,
    scan: LineScan,
    operands: Sequence[DeviceArray],
    target: DeviceArray,
) -> dict[str, int]:
    """Return extents and strides, in elements, by the names of the kernels' arguments."""
    found = {f"extent{d}": einsum.extent[label] for d, label in enumerate(scan.lines)}
    arrays = {
        "values": (operands[scan.values], einsum.operands[scan.values]),
        "offsets": (operands[scan.offsets], einsum.operands[scan.offsets]),
        "result": (target, einsum.output),
    }
    for name, (array, entries) in arrays.items():
        strides = [stride // array.itemsize for stride in array.strides]
        if name == "offsets" and scan.offsets == scan.values:
            strides = [0] * len(strides)  # there are none
        found[f"{name}_step"] = strides[scanned_dimension(entries, scan.lines)]
        for line, label in enumerate(scan.lines):
            found[f"{name}_stride{line}"] = strides[entries.index(label)]
    return found


def _lines_are_neighbours(einsum: EinSum, scan: LineScan, values: DeviceArray) -> bool:
    """Return whether the values of neighbouring lines are nearer than those of one line."""
    entries = einsum.operands[scan.values]
    along = abs(values.strides[scanned_dimension(entries, scan.lines)])
    for label in scan.lines:
        if einsum.extent[label] > 1 and abs(values.strides[entries.index(label)]) < along:
            return True
    return False
