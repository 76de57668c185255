"""Write and read one large matrix: einmpi against the other methods.

mpirun -n 2 python -m bench hdf5 [--write] [--read] [--size 1GiB] [--folder DIR] [--fsync]

Reading is in hdf5_read.py. For writing, the ranks hold the matrix in row blocks or column
blocks. The methods alternate, and medians are compared with gathering to rank 0. Every file is new
and is removed at once. Without --fsync the page cache is measured, not the disk.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from mpi4py import MPI

from bench.files.hdf5_read import measure_reading
from bench.lib.results import write_results
from einmpi.arrays.dist_array import DistArray
from einmpi.comm.mpi import comm_of
from einmpi.planner.mesh import Mesh
from einmpi.schedule.layout import Layout
from einmpi.units import parse_bytes, show_bytes

WORLD = MPI.COMM_WORLD
COLUMNS = 8192


@dataclass(frozen=True)
class Task:
    """A matrix on the ranks and a file that it goes to. `place` is this rank's block of it."""

    array: DistArray
    file: Path
    fsync: bool

    @property
    def place(self) -> tuple[slice, ...]:
        assert self.array.region is not None
        return tuple(slice(*runs[0]) for runs in self.array.region)

    def sync(self, file: Path) -> None:
        if self.fsync:
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def offset(self) -> int:
        """Where the matrix begins in a new file, whose space is set aside but not written."""
        offset = None
        if WORLD.rank == 0:
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            with h5py.File(self.file, "w") as handle:
                space, dtype = (
                    h5py.h5s.create_simple(self.array.shape),
                    h5py.h5t.py_create(self.array.dtype),
                )
                offset = h5py.h5d.create(handle.id, b"Z", dtype, space, properties).get_offset()
        return WORLD.bcast(offset)


# ---- writing -------------------------------------------------------------------------------------


def einmpi_way(task: Task) -> None:
    task.array.to_hdf5(task.file, "/Z")


def gather(task: Task) -> None:
    whole = task.array.gather(0)
    if WORLD.rank == 0:
        with h5py.File(task.file, "w") as handle:
            handle["Z"] = whole
        task.sync(task.file)


def turns(task: Task) -> None:
    task.offset()
    for rank in range(WORLD.size):
        WORLD.barrier()
        if rank == WORLD.rank:
            with h5py.File(task.file, "r+") as handle:
                handle["Z"][task.place] = task.array.local
            task.sync(task.file)


def raw_files(task: Task) -> None:
    """One file a rank, which no program could read as a matrix."""
    own = task.file.with_suffix(f".{WORLD.rank}")
    descriptor = os.open(own, os.O_WRONLY | os.O_CREAT)
    write(descriptor, task.array.local, 0)
    os.close(descriptor)
    task.sync(own)


def strided(task: Task) -> None:
    """Every rank its own rows, as they are."""
    offset, local = task.offset(), task.array.local
    descriptor = os.open(task.file, os.O_WRONLY)
    width, itemsize = task.array.shape[1], local.itemsize
    rows, columns = task.place
    if local.shape[1] == width:
        write(descriptor, local, offset + rows.start * width * itemsize)
    else:
        for number, row in enumerate(local, rows.start):
            write(descriptor, row, offset + (number * width + columns.start) * itemsize)
    os.close(descriptor)
    task.sync(task.file)


def write(descriptor: int, array: np.ndarray, offset: int) -> None:
    left = array.reshape(-1).view(np.uint8).data
    while left:
        done = os.pwrite(descriptor, left, offset)
        left, offset = left[done:], offset + done


def mpi_io(task: Task) -> None:
    offset, local = task.offset(), task.array.local
    starts = [part.start for part in task.place]
    kind = MPI.DOUBLE.Create_subarray(task.array.shape, local.shape, starts).Commit()
    file = MPI.File.Open(WORLD, str(task.file), MPI.MODE_WRONLY)
    file.Set_view(offset, MPI.DOUBLE, kind)
    file.Write_all([local, MPI.DOUBLE])
    if task.fsync:
        file.Sync()
    file.Close()
    kind.Free()


def mapped(task: Task) -> None:
    """Fast on one machine; on a network file system two machines would undo each other's pages."""
    offset = task.offset()
    descriptor = os.open(task.file, os.O_RDWR)
    memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    np.frombuffer(memory, np.float64, task.array.size, offset).reshape(task.array.shape)[
        task.place
    ] = task.array.local
    os.close(descriptor)
    task.sync(task.file)


def virtual(task: Task) -> None:
    """A file a rank, and one more that says how they make a matrix."""
    own = task.file.with_suffix(f".{WORLD.rank}")
    with h5py.File(own, "w") as handle:
        handle["Z"] = task.array.local
    task.sync(own)
    blocks = WORLD.gather((own.name, task.array.local.shape, task.place))
    if WORLD.rank == 0:
        layout = h5py.VirtualLayout(task.array.shape, "float64")
        for name, shape, place in blocks or ():
            layout[place] = h5py.VirtualSource(name, "Z", shape)
        with h5py.File(task.file, "w") as handle:
            handle.create_virtual_dataset("Z", layout)
        task.sync(task.file)


def parallel_hdf5(task: Task) -> None:
    with h5py.File(task.file, "w", driver="mpio", comm=WORLD) as handle:
        made = handle.create_dataset("Z", task.array.shape, "float64")
        with made.collective:
            made[task.place] = task.array.local
    task.sync(task.file)


WRITERS: dict[str, Callable[[Task], None]] = {
    "gather to rank 0": gather,
    "einmpi": einmpi_way,
    "taking turns": turns,
    "MPI-IO, collective": mpi_io,
    "strided pwrite": strided,
    "memory-mapped": mapped,
    "virtual dataset": virtual,
    "raw files": raw_files,
} | ({"HDF5 with MPI": parallel_hdf5} if h5py.get_config().mpi else {})


def measure_writing(
    arrays: dict[str, DistArray], folder: Path, repeats: int, fsync: bool
) -> list[dict[str, Any]]:
    """Print the times of all ways, and return a row for each on rank 0."""
    rows: list[dict[str, Any]] = []
    for kind, array in arrays.items():
        times: dict[str, list[float]] = {name: [] for name in WRITERS}
        for turn in range(repeats + 1):
            names = list(WRITERS)[turn % len(WRITERS) :] + list(WRITERS)[: turn % len(WRITERS)]
            for name in names[:: 1 - turn % 2 * 2]:  # none is always the one after a certain other
                task = Task(array, folder / "bench.h5", fsync)
                WORLD.barrier()
                start = time.perf_counter()
                WRITERS[name](task)
                WORLD.barrier()
                if turn:  # the first one warms up
                    times[name].append(time.perf_counter() - start)
                check(task, name)
                if WORLD.rank == 0:
                    for file in folder.glob("bench.*"):
                        file.unlink()
        if WORLD.rank == 0:
            waiting = "with" if fsync else "without"
            nbytes = array.size * array.dtype.itemsize
            print(
                f"writing {show_bytes(nbytes)} in {kind}, {WORLD.size} ranks, {waiting} fsync; "
                f"medians of {repeats}"
            )
            show(times, nbytes, "gather to rank 0")
            for name, seconds in times.items():
                rate = nbytes / statistics.median(seconds) / 1e9
                rows.append({"what": "writing", "blocks": kind, "way": name, "GB/s": rate})
    return rows


def check(task: Task, name: str) -> None:
    """Some elements of what was written, against what they must be."""
    if WORLD.rank == 0 and name != "raw files":
        with h5py.File(task.file) as handle:
            rows = np.linspace(0, task.array.shape[0] - 1, 7).astype(int)
            assert (handle["Z"][rows] == values(rows, np.arange(task.array.shape[1]))).all(), name
    WORLD.barrier()


# ---- all -----------------------------------------------------------------------------------------


def values(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    return rows[:, None] * 1e5 + columns


def matrix(nbytes: int, dimension: int) -> DistArray:
    comm, mesh = comm_of(WORLD), Mesh(WORLD.size)
    layout = Layout(mesh, (nbytes // 8 // COLUMNS, COLUMNS), (dimension,) * len(mesh.factors))
    block = layout.block(comm.rank)
    assert block is not None
    return DistArray(values(*(np.arange(*runs[0]) for runs in block)), layout, comm)


def show(times: dict[str, list[float]], nbytes: int, base: str) -> None:
    for name, seconds in times.items():
        median = statistics.median(seconds)
        ratio = statistics.median(times[base]) / median
        print(
            f"  {name:20} {median:7.3f} s  {nbytes / median / 1e9:6.2f} GB/s  "
            f"{ratio:5.2f} × {base}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="measure writing only")
    parser.add_argument("--read", action="store_true", help="measure reading only")
    parser.add_argument("--size", default="1GiB")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="a temporary one by default")
    parser.add_argument("--fsync", action="store_true", help="everybody waits for the disk")
    parser.add_argument("--only", nargs="*", help="of the ways")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    for name in set(WRITERS) - {"gather to rank 0", *(options.only or WRITERS)}:
        del WRITERS[name]
    if not options.fsync:
        os.fsync = lambda descriptor: None
    size = parse_bytes(options.size, "--size")
    rows = []
    if not options.write:
        rows += measure_reading(size, options.repeats, options.folder)
    if not options.read:
        arrays = {
            kind: matrix(size, dimension)
            for dimension, kind in enumerate(("row blocks", "column blocks"))
        }
        with tempfile.TemporaryDirectory(dir=options.folder) as made:
            folder = Path(WORLD.bcast(made))
            rows += measure_writing(arrays, folder, options.repeats, options.fsync)
            WORLD.barrier()
    if options.json and WORLD.rank == 0:
        write_results(options.json, rows)


if __name__ == "__main__":
    main()
