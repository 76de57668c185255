"""Tensors in blocks on the ranks of a communicator."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arguments import path_name
from einmpi.comm.agreement import find_first_failure, together
from einmpi.comm.base import Comm, even_nodes
from einmpi.comm.programs import abort_on_divergence, comm_of_program
from einmpi.comm.same_arrays import is_checking, require_same_arrays
from einmpi.errors import EinmpiError, InputError
from einmpi.files.datasets import Dataset
from einmpi.files.reading import Reading
from einmpi.kernels.given import as_numpy
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

Array: TypeAlias = npt.NDArray[Any]


class DistArray:
    """A tensor in blocks on the ranks of a communicator.

    Runs, `from_global` and `open_dataset` make it.

    Parameters
    ----------
    local : array
        This rank's block: a numpy array, or a CuPy array if a GPU has computed it. It has no
        elements on a rank that holds no block.
    layout : Layout
        Which elements of the whole tensor each rank has.
    comm : Comm
        The ranks.

    Examples
    --------
    >>> X = einmpi.DistArray.from_global(np.arange(6.0).reshape(2, 3))
    >>> X.shape, X.local.shape, str(X.layout)
    ((2, 3), (2, 3), '[1,1] on 1 rank')
    """

    def __init__(self, local: Array, layout: Layout, comm: Comm) -> None:
        self.local = local
        self.layout = layout
        self.comm = comm
        if local.size:
            block = layout.block(comm.rank)
            assert block is not None and local.shape == shape(block), (local.shape, str(layout))

    # ---- properties -----------------------------------------------------------------------------

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
        return prod(self.shape)

    @property
    def region(self) -> Region | None:
        """The indices of this rank's block: runs (start, stop) for each dimension.

        None on a rank that holds no block.
        """
        return self.layout.block(self.comm.rank)

    @property
    def host(self) -> Array:
        """This rank's block in host memory: `local` itself, or a copy of it."""
        block: Array = on_host(self.local)
        return block

    def __repr__(self) -> str:
        if self.region is None:
            own = "nothing"
        elif self.ndim:
            own = show_region(self.region)
        else:
            own = "it"
        values = np.array2string(
            self.host, separator=", ", prefix="DistArray(", threshold=100, edgeitems=2
        )
        return (
            f"DistArray({values}, shape={self.shape}, dtype={self.dtype}, layout={self.layout}; "
            f"rank {self.comm.rank} of {self.comm.size} holds {own})"
        )

    def __array__(self, *_: Any, **__: Any) -> Array:
        raise TypeError("a DistArray is distributed over the ranks; gather() returns an array")

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without dimensions")
        return self.shape[0]

    # ---- input and output -----------------------------------------------------------------------

    @classmethod
    def from_global(
        cls, array: Any, comm: Any = None, parts: Sequence[int] | None = None
    ) -> DistArray:
        """Distribute an array that every rank has. All ranks call it.

        With EINMPI_CHECK=1 in the environment the ranks compare it, else nothing checks that it is
        the same on all of them.

        Parameters
        ----------
        array : array_like
            The whole tensor.
        comm : mpi4py communicator, optional
            The ranks; by default all that mpirun started, or this process alone.
        parts : sequence of int, optional
            Into how many parts to cut each dimension. By default the first dimensions that are
            long enough are cut over all ranks.

        Returns
        -------
        DistArray
            The distributed tensor.

        Raises
        ------
        InputError
            The ranks cannot be divided into these parts, or the array has a mask.

        Examples
        --------
        >>> X = einmpi.DistArray.from_global([[1.0, 2.0], [3.0, 4.0]])
        >>> X.local
        array([[1., 2.],
               [3., 4.]])
        """
        own_comm = comm_of_program(comm)

        def lay_out() -> tuple[Array, Layout]:
            whole = as_numpy("from_global", "array", on_host(array))
            return whole, _layout(own_comm, whole.shape, parts)

        def fingerprint(found: tuple[Array, Layout]) -> str:
            whole, layout = found
            return f"{whole.dtype} {whole.shape} {layout} {checking}"

        checking = own_comm.size > 1 and is_checking()
        whole, layout = together(own_comm, lay_out, fingerprint)
        if checking:
            require_same_arrays(own_comm, "from_global", {"array": whole})
        block = layout.block(own_comm.rank)
        assert block is not None
        local = np.empty(shape(block), whole.dtype.newbyteorder("="))
        for there, here in boxes(block, packed(block)):
            local[here] = whole[there]
        return cls(local, layout, own_comm)

    @classmethod
    def from_dataset(
        cls, dataset: Dataset, comm: Comm, parts: Sequence[int] | None = None
    ) -> DistArray:
        """Read a dataset that was found in a file; `einmpi.open_dataset` finds and reads.

        Parameters
        ----------
        dataset : Dataset
            Where the tensor is in a file.
        comm : Comm
            The ranks. All of them call it.
        parts : sequence of int, optional
            As for `from_global`.

        Returns
        -------
        DistArray
            The distributed tensor.

        Raises
        ------
        InputError
            The file cannot be read, or the ranks cannot be divided into these parts.
        """
        layout = together(
            comm,
            lambda: _layout(comm, dataset.selected_shape, parts),
            lambda found: f"{found.bound} {found}",
        )
        # A number is read as a vector of one element.
        vector = Layout(layout.mesh, layout.bound or (1,), layout.cuts)
        block = vector.block(comm.rank)
        assert block is not None
        local = np.empty(shape(block) if layout.bound else (), dataset.dtype)
        failure: Exception | None = None
        with abort_on_divergence(comm), ThreadPoolExecutor(1) as background:
            reading = Reading(dataset, vector, comm.rank, local, block, packed(block))
            try:
                reading.finish(comm, background)
            except (EinmpiError, OSError) as error:  # after all messages
                failure = error
            failure = find_first_failure(comm, failure, 0)
        if failure is not None:
            raise failure
        return cls(local, layout, comm)

    def gather(self, root: int | None = None) -> Any:
        """Collect the whole tensor. All ranks call it.

        Parameters
        ----------
        root : int, optional
            The only rank to get it; by default every rank does.

        Returns
        -------
        array or None
            The whole tensor; None on ranks other than `root`.

        Raises
        ------
        InputError
            There is no such rank.

        Examples
        --------
        >>> einmpi.DistArray.from_global([1.0, 2.0]).gather()
        array([1., 2.])
        """
        rank = self.comm.rank

        def check_root() -> int | None:
            is_integer = isinstance(root, int | np.integer)
            if root is not None and not (is_integer and 0 <= root < self.comm.size):
                expected = f"a rank from 0 to {self.comm.size - 1}"
                raise InputError("gather", f"there is no rank {root!r}", expected)
            return root

        together(self.comm, check_root, lambda checked: f"gather {checked} {self.layout}")
        mesh = Mesh(self.comm.size if root is None else 1)
        uncut = Layout(mesh, self.shape, (None,) * len(mesh.factors))
        with abort_on_divergence(self.comm):
            whole = self._moved_to(uncut).local
            if root is None:
                return whole
            # A mesh of one rank is rank 0, which sends the tensor on.
            if root != 0 and rank == 0:
                self.comm.sendrecv(root, whole.reshape(-1), None, None)
            elif root != 0 and rank == root:
                whole = np.empty(self.shape, self.dtype)
                self.comm.sendrecv(None, None, 0, whole.reshape(-1))
        return whole if rank == root else None

    def redistribute(self, layout: Layout) -> DistArray:
        """Move the tensor to another layout. All ranks call it.

        Parameters
        ----------
        layout : Layout
            The new layout, such as that of another DistArray of the same shape.

        Returns
        -------
        DistArray
            The same tensor in this layout.

        Raises
        ------
        InputError
            The layout is for another shape or for more ranks.
        """

        def check_layout() -> None:
            if not isinstance(layout, Layout):
                problem = f"{type(layout).__name__} is not a layout"
                raise InputError("redistribute", problem, "the layout of a DistArray")
            if layout.bound != self.shape or layout.mesh.ranks > self.comm.size:
                raise InputError(
                    "redistribute",
                    f"the layout {layout} is for a tensor of shape {layout.bound}",
                    f"shape {self.shape} on at most {self.comm.size} ranks",
                )

        together(self.comm, check_layout, lambda _: f"redistribute {self.layout} {layout!r}")
        with abort_on_divergence(self.comm):
            return self._moved_to(layout)

    def _moved_to(self, layout: Layout) -> DistArray:
        block = layout.block(self.comm.rank)
        extents = (0,) * (self.ndim or 1) if block is None else shape(block)
        source = Slot("before", self.local.shape, self.dtype.name)
        target = Slot("after", extents, self.dtype.name)
        buffers = Buffers(NumpyBackend())
        buffers.put(source, np.ascontiguousarray(self.host))
        before = Layout(self.layout.mesh, self.shape or (1,), self.layout.cuts)
        after = Layout(layout.mesh, layout.bound or (1,), layout.cuts)
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
        """Write the tensor to a dataset of an HDF5 file. All ranks call it, and all write.

        The other datasets of the file stay. The file is replaced whole or not at all.

        Parameters
        ----------
        file : path
            The file. Its folder must exist.
        dataset : str
            The path of the dataset, such as ``"/group/Z"``.
        chunks : sequence of int, optional
            The shape of a chunk; by default the dataset is contiguous.
        compression : {"gzip", "lzf"}, optional
            How chunks are compressed.

        Raises
        ------
        InputError
            An argument is wrong, or the file cannot be written.
        EinmpiError
            Writing has failed; the file is unchanged.
        """
        from einmpi.files.writing import save_hdf5

        path = together(self.comm, lambda: path_name("to_hdf5", file))
        with abort_on_divergence(self.comm):
            save_hdf5(self, path, dataset, chunks, compression)


def _layout(comm: Comm, bound: tuple[int, ...], parts: Sequence[int] | None) -> Layout:
    mesh = Mesh(comm.size, even_nodes(comm) or 1)
    if parts is None:
        return even_layout(mesh, bound)
    return _layout_with_parts(mesh, bound, parts)


def _layout_with_parts(mesh: Mesh, bound: tuple[int, ...], given: Sequence[int]) -> Layout:
    """Return a layout with this many parts of each dimension; other ranks hold copies."""
    parts = tuple(given) if isinstance(given, Sequence) else (given,)
    are_positive = all(type(part) is int and part > 0 for part in parts)
    if len(parts) == len(bound) and are_positive:
        cuts = place(mesh, bound, parts)
        if mesh.parts(cuts, range(len(bound))) == parts:
            return Layout(mesh, bound, tuple(None if cut == len(bound) else cut for cut in cuts))
    extents = "×".join(map(str, bound))
    shown = "×".join(map(str, parts))
    raise InputError(
        "parts",
        f"{extents} cannot be cut {shown} over {counted(mesh.ranks, 'rank')}",
        mesh.possible_parts(bound),
    )
