"""Reading an HDF5 dataset on the ranks of mpirun: einmpi.open_dataset against other ways, GB/s over
all ranks.

mpirun -n 2 python -m bench hdf5 --read --size 1GiB

Row blocks, column blocks, and a copy for every rank; a dataset in one piece, and one in chunks of
256 KiB. "raw" is each rank's own reads of the system at the places where its values are, without
any library. The file is in the page cache. All ways take turns; medians are compared, the slowest
rank counts. Every way makes a new array each time.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from time import perf_counter
from typing import Any

import h5py
import numpy as np
from mpi4py import MPI

import einmpi

WORLD = MPI.COMM_WORLD
RANK, RANKS = WORLD.rank, WORLD.size
CHUNK = (64, 512)


def write(file: str, rows: int, columns: int) -> None:
    with h5py.File(file, "w") as handle:
        made = {
            "whole": handle.create_dataset("whole", (rows, columns), "f8"),
            "chunked": handle.create_dataset("chunked", (rows, columns), "f8", chunks=CHUNK),
        }
        for start in range(0, rows, 1024):
            values = np.arange(
                start * columns, min(start + 1024, rows) * columns, dtype="f8"
            ).reshape(-1, columns)
            for dataset in made.values():
                dataset[start : start + len(values)] = values


def block(cut: str, rows: int, columns: int) -> tuple[slice, slice]:
    def part(extent: int) -> slice:
        return slice(extent * RANK // RANKS, extent * (RANK + 1) // RANKS)

    return {
        "rows": (part(rows), slice(0, columns)),
        "columns": (slice(0, rows), part(columns)),
        "copies": (slice(0, rows), slice(0, columns)),
    }[cut]


def empty(box: tuple[slice, slice]) -> np.ndarray:
    return np.empty([side.stop - side.start for side in box])


def ours(file: str, name: str, cut: str, box: tuple[slice, slice]) -> np.ndarray:
    parts = {"rows": (RANKS, 1), "columns": (1, RANKS), "copies": (1, 1)}[cut]
    return einmpi.open_dataset(file, name, WORLD, parts).local


def raw(file: str, name: str, cut: str, box: tuple[slice, slice]) -> np.ndarray:
    with h5py.File(file, "r") as handle:
        dataset = handle[name]
        offset, columns = dataset.id.get_offset(), dataset.shape[1]
        chunks = (
            [dataset.id.get_chunk_info(k) for k in range(dataset.id.get_num_chunks())]
            if offset is None
            else []
        )
    out, descriptor = empty(box), os.open(file, os.O_RDONLY)
    if chunks:
        for chunk in chunks:
            (r, c), (h, w) = chunk.chunk_offset, CHUNK
            if box[0].start <= r < box[0].stop and box[1].start <= c < box[1].stop:
                buffer = np.empty(CHUNK)
                os.preadv(descriptor, [buffer], chunk.byte_offset)
                out[
                    r - box[0].start : r - box[0].start + h, c - box[1].start : c - box[1].start + w
                ] = buffer
    elif out.shape[1] == columns:
        left, at = memoryview(out.reshape(-1)).cast("B"), offset + box[0].start * columns * 8
        while left:
            got = os.preadv(descriptor, [left], at)
            left, at = left[got:], at + got
    else:
        for row in range(len(out)):
            os.preadv(
                descriptor, [out[row]], offset + ((box[0].start + row) * columns + box[1].start) * 8
            )
    os.close(descriptor)
    return out


def hyperslabs(file: str, name: str, cut: str, box: tuple[slice, slice]) -> np.ndarray:
    out = empty(box)
    with h5py.File(file, "r") as handle:
        handle[name].read_direct(out, box)
    return out


def first_rank(file: str, name: str, cut: str, box: tuple[slice, slice]) -> np.ndarray:
    """Rank 0 reads everything, and sends each rank its block."""
    out, boxes = empty(box), WORLD.gather(box)
    if RANK == 0:
        with h5py.File(file, "r") as handle:
            whole = handle[name][()]
        for to, wanted in enumerate(boxes or ()):
            if to:
                part = np.ascontiguousarray(whole[wanted])
                for k in range(0, len(part), 1024):
                    WORLD.Send(part[k : k + 1024], to)
        out[...] = whole[box]
    else:
        for k in range(0, len(out), 1024):
            WORLD.Recv(out[k : k + 1024], 0)
    return out


def mpi_io(file: str, name: str, cut: str, box: tuple[slice, slice]) -> np.ndarray | None:
    with h5py.File(file, "r") as handle:
        offset, shape = handle[name].id.get_offset(), handle[name].shape
    if offset is None:
        return None
    out = empty(box)
    view = MPI.DOUBLE.Create_subarray(shape, out.shape, [side.start for side in box]).Commit()
    handle = MPI.File.Open(WORLD, file)
    handle.Set_view(offset, MPI.DOUBLE, view)
    row = MPI.DOUBLE.Create_contiguous(out.shape[1]).Commit()  # counts have 32 bits
    handle.Read_all([out, len(out), row])
    handle.Close()
    return out


WAYS: dict[str, Callable[..., Any]] = {
    "einmpi": ours,
    "raw": raw,
    "h5py": hyperslabs,
    "rank 0": first_rank,
    "MPI-IO": mpi_io,
}


def measure_reading(size: int, repeats: int, parent: str | None = None) -> list[dict[str, Any]]:
    """Print the rates of all ways, and return a row for each on rank 0."""
    found: list[dict[str, Any]] = []
    columns = 16 * CHUNK[1]
    rows = max(1, size // (8 * columns * CHUNK[0] * RANKS)) * CHUNK[0] * RANKS
    folder = WORLD.bcast(tempfile.mkdtemp(dir=parent) if RANK == 0 else None)
    file = os.path.join(folder, "read.h5")
    if RANK == 0:
        write(file, rows, columns)
    WORLD.Barrier()
    if RANK == 0:
        print(
            f"{rows}×{columns} float64, {rows * columns * 8 / 1e9:.2f} GB, {RANKS} ranks; "
            "GB/s over all ranks"
        )
        print(f"{'':18}" + "".join(f"{way:>9}" for way in WAYS) + f"{'einmpi/raw':>12}")
    for name in ("whole", "chunked"):
        for cut in ("rows", "columns", "copies"):
            box = block(cut, rows, columns)
            seconds: dict[str, list[float]] = {way: [] for way in WAYS}
            for repeat in range(repeats + 1):
                for way, function in WAYS.items():
                    WORLD.Barrier()
                    start = perf_counter()
                    out = function(file, name, cut, box)
                    took = WORLD.allreduce(perf_counter() - start, MPI.MAX)
                    if out is not None and repeat:
                        seconds[way].append(took)
                    elif out is not None:  # the first time is not counted, but looked at
                        corner = box[0].start * columns + box[1].start
                        ok = (
                            out[0, 0] == corner
                            and out[-1, -1] == (box[0].stop - 1) * columns + box[1].stop - 1
                        )
                        assert ok and (np.diff(out[::97], axis=1) == 1).all(), way
                    del out
            if RANK == 0:
                gigabytes = rows * columns * 8 / 1e9 * (RANKS if cut == "copies" else 1)
                rates = {
                    way: gigabytes / statistics.median(times) if times else 0.0
                    for way, times in seconds.items()
                }
                for way, rate in rates.items():
                    if rate:
                        blocks = f"{name}, {cut}"
                        row = {"what": "reading", "blocks": blocks, "way": way, "GB/s": rate}
                        found.append(row)
                cells = "".join(f"{rate:9.2f}" if rate else f"{'–':>9}" for rate in rates.values())
                print(f"{name:8} {cut:9}{cells}{rates['einmpi'] / rates['raw']:12.2f}", flush=True)
    WORLD.Barrier()
    if RANK == 0:
        os.remove(file)
        os.rmdir(folder)
    return found
