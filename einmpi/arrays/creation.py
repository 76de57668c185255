"""Ways to make a DistArray: from arrays, blocks, functions and files, or filled with numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arrays.exchange import intervals_of_block, move_between_intervals, one_interval
from einmpi.arrays.record import ArrayRecord
from einmpi.comm.agreement import (
    abort_on_divergence,
    comm_of_program,
    find_first_failure,
    is_checking,
    require_same_arrays,
    together,
)
from einmpi.comm.base import Comm, even_nodes
from einmpi.errors import EinmpiError, InputError
from einmpi.files.datasets import Dataset
from einmpi.files.reading import Reading, fill_box
from einmpi.files.specs import InputSpec
from einmpi.kernels.reference import as_numpy
from einmpi.planner.mesh import Mesh, place
from einmpi.runtime.gpu.copies import on_host
from einmpi.schedule.layout import Layout, even_layout
from einmpi.schedule.regions import Region, boxes, indices, packed, shape
from einmpi.units import counted

if TYPE_CHECKING:
    from einmpi.arrays.dist_array import DistArray

Array: TypeAlias = npt.NDArray[Any]


class ArrayCreation(ArrayRecord):
    """The part of a DistArray that makes new ones. All ranks make these calls together."""

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
            The ranks cannot be divided into these parts, or the array has more than numbers.

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
            return whole, layout_for(own_comm, whole.shape, parts)

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
        return _made_as(cls, local, layout, own_comm)

    @classmethod
    def from_local(
        cls, block: Any, parts: Layout | Sequence[int] | None = None, comm: Any = None
    ) -> DistArray:
        """Make a tensor of the blocks that the ranks have. All ranks call it.

        Parameters
        ----------
        block : array_like
            This rank's block.
        parts : Layout or sequence of int, optional
            The layout that the blocks are in, or into how many parts each dimension is cut. By
            default the blocks follow one another in the first dimension, rank after rank; they may
            have different lengths there, and are evened out.
        comm : mpi4py communicator, optional
            The ranks; by default all that mpirun started, or this process alone.

        Returns
        -------
        DistArray
            The tensor. It has the block itself, not a copy, where nothing has to move.

        Raises
        ------
        InputError
            A block has another shape than the layout says, or blocks do not fit together.

        Examples
        --------
        >>> einmpi.DistArray.from_local([[1.0, 2.0]]).shape
        (1, 2)
        """
        own_comm = comm_of_program(comm)

        def check_block() -> Array:
            own = as_numpy("from_local", "block", on_host(block))
            if parts is None and not own.ndim:
                raise InputError("from_local", "block is a number", "an array with dimensions")
            return own.astype(own.dtype.newbyteorder("="), copy=False)

        own = together(own_comm, check_block, lambda _: f"from_local {parts}")
        shapes = _shapes_of_blocks(own, own_comm)
        if parts is None:
            local, layout = _evened_out(own, shapes, own_comm)
            return _made_as(cls, local, layout, own_comm)

        def check_shape() -> Layout:
            if isinstance(parts, Layout):
                layout = parts
            else:
                layout = layout_for(own_comm, _whole_shape(shapes, parts), parts)
            region = layout.block(own_comm.rank)
            expected = (0,) * own.ndim if region is None else shape(region)
            if own.shape != expected and (region is not None or own.size):
                problem = f"the block of rank {own_comm.rank} has shape {own.shape}"
                raise InputError("from_local", problem, f"shape {expected}")
            return layout

        layout = together(own_comm, check_shape, lambda found: f"{found.bound} {found}")
        return _made_as(cls, own, layout, own_comm)

    @classmethod
    def from_function(
        cls,
        function: Callable[..., Any],
        shape: int | Sequence[int],
        dtype: Any = "float64",
        comm: Any = None,
        parts: Sequence[int] | None = None,
    ) -> DistArray:
        """Make a tensor whose elements are a function of their indices, as `numpy.fromfunction`.

        Parameters
        ----------
        function : callable
            Takes an array of indices for each dimension. Each rank calls it for its own block.
        shape : int or sequence of int
            The extents of the tensor.
        dtype : dtype, optional
            The dtype of the elements.
        comm, parts : optional
            As for `from_global`.

        Returns
        -------
        DistArray
            The tensor.

        Examples
        --------
        >>> einmpi.DistArray.from_function(lambda i, j: 10 * i + j, (2, 3)).gather()
        array([[ 0.,  1.,  2.],
               [10., 11., 12.]])
        """

        def fill(local: Array, region: Region) -> None:
            vectors = [indices(runs) for runs in region]
            values = function(*np.ix_(*vectors)) if vectors else function()
            try:
                np.broadcast_to(values, local.shape)
            except ValueError:
                what = f"the function returns shape {np.shape(values)}"
                expected = f"shape {local.shape}, that of its indices together"
                raise InputError("from_function", what, expected) from None
            local[...] = values

        return filled_by_blocks(cls, shape, dtype, comm, parts, fill)

    @classmethod
    def full(
        cls,
        shape: int | Sequence[int],
        value: Any,
        dtype: Any = None,
        comm: Any = None,
        parts: Sequence[int] | None = None,
    ) -> DistArray:
        """Make a tensor of equal elements. All ranks call it, with the same arguments.

        Parameters
        ----------
        shape : int or sequence of int
            The extents of the tensor.
        value : number
            The elements.
        dtype : dtype, optional
            The dtype of the elements; by default that of the value.
        comm, parts : optional
            As for `from_global`.

        Returns
        -------
        DistArray
            The tensor.
        """
        wanted = np.asarray(value).dtype if dtype is None else dtype

        def fill(local: Array, _: Region) -> None:
            local[...] = np.full((), value, local.dtype)  # as numpy, with a warning for a nan

        return filled_by_blocks(cls, shape, wanted, comm, parts, fill)

    @classmethod
    def zeros(
        cls,
        shape: int | Sequence[int],
        dtype: Any = "float64",
        comm: Any = None,
        parts: Sequence[int] | None = None,
    ) -> DistArray:
        """Make a tensor of zeros; arguments as for `full`."""
        return filled_by_blocks(cls, shape, dtype, comm, parts, lambda local, _: local.fill(0))

    @classmethod
    def ones(
        cls,
        shape: int | Sequence[int],
        dtype: Any = "float64",
        comm: Any = None,
        parts: Sequence[int] | None = None,
    ) -> DistArray:
        """Make a tensor of ones; arguments as for `full`."""
        return filled_by_blocks(cls, shape, dtype, comm, parts, lambda local, _: local.fill(1))

    @classmethod
    def random(
        cls,
        shape: int | Sequence[int],
        dtype: Any = "float64",
        comm: Any = None,
        parts: Sequence[int] | None = None,
        *,
        distribution: str = "uniform",
        seed: int = 0,
    ) -> DistArray:
        """Make a tensor of random numbers, the same on any number of ranks.

        Parameters
        ----------
        shape : int or sequence of int
            The extents of the tensor.
        dtype : dtype, optional
            The dtype of the elements.
        comm, parts : optional
            As for `from_global`.
        distribution : {"uniform", "normal"}, optional
            Uniform in [0, 1), or normal with mean 0 and variance 1.
        seed : int, optional
            Another seed gives other numbers.

        Returns
        -------
        DistArray
            The tensor.

        Examples
        --------
        >>> x = einmpi.DistArray.random((1000, 10), seed=3)
        >>> bool(abs(x.mean() - 0.5) < 0.01)
        True
        """
        if distribution not in ("uniform", "normal"):
            raise InputError(
                "random", f"unknown distribution {distribution!r}", "uniform or normal"
            )
        bound = _extents(shape)
        spec = InputSpec("", random=distribution, seed=seed)

        def fill(local: Array, region: Region) -> None:
            for there, here in boxes(region, packed(region)):
                fill_box(spec, bound, there, local[here])

        return filled_by_blocks(cls, bound, dtype, comm, parts, fill)

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
            lambda: layout_for(comm, dataset.selected_shape, parts),
            lambda found: f"{found.bound} {found}",
        )
        # A number is read as a vector of one element.
        vector = replace(layout, bound=layout.bound or (1,))
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
        return _made_as(cls, local, layout, comm)


def _made_as(cls: Any, local: Array, layout: Layout, comm: Comm) -> DistArray:
    """Return an array of a class, which is DistArray or derived from it."""
    made: DistArray = cls(local, layout, comm)
    return made


def _extents(given: int | Sequence[int]) -> tuple[int, ...]:
    extents = (given,) if isinstance(given, int | np.integer) else tuple(given)
    for extent in extents:
        if not isinstance(extent, int | np.integer) or extent < 0:
            raise InputError("shape", f"{given!r} is not a shape", "integers from 0 on")
    return tuple(int(extent) for extent in extents)


def filled_by_blocks(
    cls: Any,
    shape_given: int | Sequence[int],
    dtype: Any,
    comm: Any,
    parts: Layout | Sequence[int] | None,
    fill: Callable[[Array, Region], None],
) -> DistArray:
    """Make a tensor each of whose blocks a function fills."""
    own_comm = comm_of_program(comm)

    def make() -> tuple[Array, Layout]:
        layout = layout_for(own_comm, _extents(shape_given), parts)
        block = layout.block(own_comm.rank)
        assert block is not None
        local = np.empty(shape(block), np.dtype(dtype))
        fill(local, block)
        return local, layout

    def fingerprint(found: tuple[Array, Layout]) -> str:
        return f"{found[0].dtype} {found[1].bound} {found[1]}"

    local, layout = together(own_comm, make, fingerprint)
    return _made_as(cls, local, layout, own_comm)


def block_of(array: Array, region: Region, dtype: str) -> Array:
    """Return a block of an array; the array itself, not a copy, if the block is all of it."""
    if array.ndim:
        for dimension, runs in enumerate(region):
            taken: Any = slice(*runs[0]) if len(runs) == 1 else indices(runs)
            array = array[(slice(None),) * dimension + (taken,)]
    return np.asarray(array, dtype, order="C")  # np.ascontiguousarray would add a dimension


# ---- layouts ------------------------------------------------------------------------------------


def layout_for(
    comm: Comm, bound: tuple[int, ...], parts: Layout | Sequence[int] | None = None
) -> Layout:
    """Return a layout over all ranks: with these parts, or the first long dimensions are cut."""
    if isinstance(parts, Layout):
        return parts
    mesh = Mesh(comm.size, even_nodes(comm) or 1)
    if parts is None:
        return even_layout(mesh, bound)
    return _cut_into_parts(mesh, bound, parts)


def _cut_into_parts(mesh: Mesh, bound: tuple[int, ...], given: Sequence[int]) -> Layout:
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


# ---- blocks that the ranks have, as parts of one tensor -----------------------------------------


def _shapes_of_blocks(own: Array, comm: Comm) -> list[tuple[int, ...]]:
    """Return the shapes of all ranks' blocks, which have one dtype and number of dimensions."""
    dtypes: list[str] = []
    shapes: list[tuple[int, ...]] = []
    for text in comm.allgather_text(f"{own.dtype.name} {' '.join(map(str, own.shape))}"):
        dtype, *extents = text.split()
        dtypes.append(dtype)
        shapes.append(tuple(map(int, extents)))
    for rank, block_shape in enumerate(shapes):
        if dtypes[rank] != dtypes[0]:
            what = f"the block of rank {rank} is {dtypes[rank]}"
            raise InputError("from_local", what, f"{dtypes[0]}, as on rank 0")
        if len(block_shape) != len(shapes[0]):
            what = f"the block of rank {rank} has shape {block_shape}"
            expected = f"{counted(len(shapes[0]), 'dimension')}, as on rank 0"
            raise InputError("from_local", what, expected)
    return shapes


def _whole_shape(shapes: Sequence[tuple[int, ...]], parts: Sequence[int]) -> tuple[int, ...]:
    """Return the extents of a tensor, given those of all blocks.

    In each dimension, every part is on the same number of ranks.
    """
    ndim = len(shapes[0])
    if not isinstance(parts, Sequence) or len(parts) != ndim:
        raise InputError("from_local", f"parts are {parts!r}", f"{ndim} positive integers")
    extents = []
    for dimension in range(ndim):
        total = sum(block[dimension] for block in shapes)
        extents.append(total * int(parts[dimension]) // len(shapes))
    return tuple(extents)


def _evened_out(own: Array, shapes: Sequence[tuple[int, ...]], comm: Comm) -> tuple[Array, Layout]:
    """Even out blocks that follow one another in the first dimension.

    Return this rank's new block, and the layout of the tensor.
    """
    lengths = np.array([block[0] for block in shapes])
    inner = shapes[int(lengths.argmax())][1:]

    def check_blocks() -> Layout:
        if own.size and own.shape[1:] != inner:
            problem = f"the block of rank {comm.rank} has shape {own.shape}"
            expected = f"shape ({', '.join(['n', *map(str, inner)])})"
            raise InputError("from_local", problem, expected)
        return layout_for(comm, (int(lengths.sum()), *inner))

    layout = together(comm, check_blocks)
    block = layout.block(comm.rank)
    assert block is not None
    starts = np.concatenate(([0], np.cumsum(lengths))).tolist()
    whole_inside = tuple(((0, extent),) for extent in inner)
    if shape(block) == own.shape and all(
        layout.block(rank) == (((starts[rank], starts[rank + 1]),), *whole_inside)
        for rank in range(comm.size)
    ):
        return own, layout
    width = prod(inner)
    even = np.empty(shape(block), own.dtype)
    move_between_intervals(
        comm,
        np.ascontiguousarray(own).reshape(-1),
        even.reshape(-1),
        lambda rank: one_interval(starts[rank] * width, starts[rank + 1] * width),
        lambda rank: intervals_of_block(layout, rank),
        # Ranks of an axis that cuts nothing have the same block, and all get it.
        lambda _sender, _receiver: True,
    )
    return even, layout
