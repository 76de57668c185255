"""A tensor that lies in blocks on the ranks of a communicator."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from einmpi.comm.base import Comm, even_nodes
from einmpi.comm.mpi import comm_of
from einmpi.errors import InputError
from einmpi.files.datasets import Dataset
from einmpi.files.reading import Reading
from einmpi.planner.mesh import Mesh
from einmpi.planner.placement import place
from einmpi.runtime.backend import NumpyBackend
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.gpu.copies import on_host
from einmpi.runtime.transfer import exchange
from einmpi.schedule.layout import Layout, even_layout
from einmpi.schedule.moves import redistribution
from einmpi.schedule.regions import Region, boxes, packed, shape, show_region
from einmpi.schedule.steps import Exchange, Slot
from einmpi.units import counted


class DistArray:
    """A tensor that lies in blocks on the ranks. Made by runs, `from_global` and `open_dataset`.

    `local` is this rank's block, a numpy array, or one of CuPy where a GPU has computed it; `layout` says which
    elements of the whole each rank has. On a rank that holds nothing `local` has no elements.

    >>> X = einmpi.DistArray.from_global(np.arange(6.0).reshape(2, 3))
    >>> X.shape, X.local.shape, str(X.layout)
    ((2, 3), (2, 3), '[1,1] on 1 rank')
    """

    def __init__(self, local: np.ndarray, layout: Layout, comm: Comm) -> None:
        self.local, self.layout, self.comm = local, layout, comm
        block = layout.block(comm.rank)
        assert local.size == 0 or (block is not None and local.shape == shape(block)), (
            local.shape,
            str(layout),
        )

    # ---- what it is -------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents of the whole tensor."""
        return self.layout.bound

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements."""
        return self.local.dtype

    @property
    def size(self) -> int:
        """The number of elements of the whole tensor."""
        return int(np.prod(self.shape, dtype=object))

    @property
    def region(self) -> Region | None:
        """The indices of this rank's block, runs (start, stop) of each dimension; None on a rank that holds nothing."""
        return self.layout.block(self.comm.rank)

    @property
    def host(self) -> np.ndarray:
        """This rank's block in the host's memory: `local` itself, or a copy of it."""
        found: np.ndarray = on_host(self.local)
        return found

    def __repr__(self) -> str:
        held = "nothing" if self.region is None else show_region(self.region) if self.ndim else "it"
        values = np.array2string(
            self.host, separator=", ", prefix="DistArray(", threshold=100, edgeitems=2
        )
        return (
            f"DistArray({values}, shape={self.shape}, dtype={self.dtype}, layout={self.layout}; "
            f"rank {self.comm.rank} of {self.comm.size} holds {held})"
        )

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("a DistArray is spread over the ranks; its gather() gives an array")

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without dimensions")
        return self.shape[0]

    # ---- in and out -------------------------------------------------------------------------------------------------

    @classmethod
    def from_global(
        cls, array: Any, comm: Any = None, parts: Sequence[int] | None = None
    ) -> DistArray:
        """Cut an array that every rank has. `parts` says into how many parts each dimension is cut.

        Without `parts` the first dimensions that are long enough are cut over all ranks. Nobody checks that the array
        is the same on all ranks.
        """
        ours, whole_array = comm_of(comm), np.asarray(on_host(array))
        mesh = Mesh(ours.size, even_nodes(ours) or 1)
        layout = _layout(mesh, whole_array.shape, parts)
        block = layout.block(ours.rank)
        assert block is not None
        local = np.empty(shape(block), whole_array.dtype.newbyteorder("="))
        for there, here in boxes(block, packed(block)):
            local[here] = whole_array[there]
        return cls(local, layout, ours)

    @classmethod
    def from_dataset(
        cls, dataset: Dataset, comm: Comm, parts: Sequence[int] | None = None
    ) -> DistArray:
        """Read a dataset that was found in a file; cut as by `from_global`. `einmpi.open_dataset` finds and reads."""
        layout = _layout(Mesh(comm.size, even_nodes(comm) or 1), dataset.selected_shape, parts)
        vector = Layout(layout.mesh, layout.bound or (1,), layout.cuts)  # a number is read as one
        block = vector.block(comm.rank)
        assert block is not None
        local = np.empty(shape(block) if layout.bound else (), dataset.dtype)
        with ThreadPoolExecutor(1) as background:
            Reading(dataset, vector, comm.rank, local, block, packed(block)).finish(
                comm, background
            )
        return cls(local, layout, comm)

    def gather(self, root: int | None = None) -> Any:
        """The whole array, on every rank; or on rank `root` alone, None on the others. All ranks call it."""
        if root is not None and not 0 <= root < self.comm.size:
            raise InputError("gather", f"there is no rank {root}", f"0 to {self.comm.size - 1}")
        mesh = Mesh(self.comm.size if root is None else 1)
        found = self.redistribute(Layout(mesh, self.shape, (None,) * len(mesh.factors))).local
        if root is None or root == self.comm.rank == 0:
            return found
        if root != 0 and self.comm.rank == 0:
            self.comm.sendrecv(root, found.reshape(-1), None, None)
        elif root == self.comm.rank:
            found = np.empty(self.shape, self.dtype)
            self.comm.sendrecv(None, None, 0, found.reshape(-1))
            return found
        return None

    def redistribute(self, layout: Layout) -> DistArray:
        """The same tensor in another layout, such as that of another DistArray. All ranks call it."""
        if layout.bound != self.shape or layout.mesh.ranks > self.comm.size:
            raise InputError(
                "redistribute",
                f"the layout {layout} is for a tensor of shape {layout.bound}",
                f"shape {self.shape}, at most {self.comm.size} ranks",
            )
        before, after = (Layout(x.mesh, x.bound or (1,), x.cuts) for x in (self.layout, layout))
        block = layout.block(self.comm.rank)
        source = Slot("before", self.local.shape, self.dtype.name)
        target = Slot(
            "after", (0,) * (self.ndim or 1) if block is None else shape(block), self.dtype.name
        )
        buffers = Buffers(NumpyBackend())
        buffers.put(source, np.ascontiguousarray(self.host))
        moves = redistribution(before, after, self.comm.size, self.comm.rank)
        exchange(Exchange("", source, target, moves), buffers, self.comm)
        return DistArray(buffers[target], layout, self.comm)

    def to_hdf5(
        self,
        file: str | os.PathLike[str],
        dataset: str,
        chunks: Sequence[int] | None = None,
        compression: str | None = None,
    ) -> None:
        """Write it to a dataset of a file, whose other datasets stay. All ranks call it, and all write.

        `chunks` is the shape of a chunk, `compression` is "gzip" or "lzf".
        """
        from einmpi.files.writing import save_hdf5

        save_hdf5(self, os.fspath(file), dataset, chunks, compression)


def _layout(mesh: Mesh, bound: tuple[int, ...], parts: Sequence[int] | None) -> Layout:
    return even_layout(mesh, bound) if parts is None else _cut(mesh, bound, parts)


def _cut(mesh: Mesh, bound: tuple[int, ...], wanted: Sequence[int]) -> Layout:
    """A layout with this many parts of each dimension; the rest of the ranks hold copies."""
    parts = tuple(wanted) if isinstance(wanted, Sequence) else (wanted,)
    fitting = len(parts) == len(bound) and all(type(part) is int and part > 0 for part in parts)
    cuts = place(mesh, bound, parts) if fitting else ()
    if not fitting or mesh.parts(cuts, range(len(bound))) != parts:
        extents, cut = ("×".join(map(str, numbers)) for numbers in (bound, parts))
        raise InputError(
            "parts",
            f"{extents} cannot be cut {cut} over {counted(mesh.ranks, 'rank')}",
            f"products of the prime factors of {mesh.ranks}, none above its extent",
        )
    return Layout(mesh, bound, tuple(None if cut == len(bound) else cut for cut in cuts))
