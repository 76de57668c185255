"""Ways to make a DistArray: from arrays, blocks and functions, or filled with numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.comm.agreement import together
from einmpi.comm.base import Comm
from einmpi.comm.programs import comm_of_program
from einmpi.comm.same_arrays import is_checking, require_same_arrays
from einmpi.compiled.array_layouts import layout_with_parts
from einmpi.compiled.local_blocks import evened_out, shapes_of_blocks, whole_shape
from einmpi.errors import InputError
from einmpi.files.generate import fill_box
from einmpi.files.specs import InputSpec
from einmpi.kernels.given import as_numpy
from einmpi.runtime.gpu.copies import on_host
from einmpi.schedule.layout import Layout
from einmpi.schedule.regions import Region, boxes, indices, packed, shape

if TYPE_CHECKING:
    from einmpi.compiled.dist_array import DistArray

Array: TypeAlias = npt.NDArray[Any]


class ArrayCreation:
    """The part of a DistArray that makes new ones. All ranks make these calls together."""

    if TYPE_CHECKING:

        def __init__(self, local: Array, layout: Layout, comm: Comm) -> None: ...

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
            return whole, layout_with_parts(own_comm, whole.shape, parts)

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
        return made_as(cls, local, layout, own_comm)

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
        shapes = shapes_of_blocks(own, own_comm)
        if parts is None:
            local, layout = evened_out(own, shapes, own_comm)
            return made_as(cls, local, layout, own_comm)

        def check_shape() -> Layout:
            if isinstance(parts, Layout):
                layout = parts
            else:
                layout = layout_with_parts(own_comm, whole_shape(shapes, parts), parts)
            region = layout.block(own_comm.rank)
            expected = (0,) * own.ndim if region is None else shape(region)
            if own.shape != expected and (region is not None or own.size):
                problem = f"the block of rank {own_comm.rank} has shape {own.shape}"
                raise InputError("from_local", problem, f"shape {expected}")
            return layout

        layout = together(own_comm, check_shape, lambda found: f"{found.bound} {found}")
        if layout.block(own_comm.rank) is None:
            own = np.empty((0,) * (len(layout.bound) or 1), own.dtype)
        return made_as(cls, own, layout, own_comm)

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

        return _filled(cls, shape, dtype, comm, parts, fill)

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

        return _filled(cls, shape, wanted, comm, parts, fill)

    @classmethod
    def zeros(
        cls,
        shape: int | Sequence[int],
        dtype: Any = "float64",
        comm: Any = None,
        parts: Sequence[int] | None = None,
    ) -> DistArray:
        """Make a tensor of zeros; arguments as for `full`."""
        return _filled(cls, shape, dtype, comm, parts, lambda local, _: local.fill(0))

    @classmethod
    def ones(
        cls,
        shape: int | Sequence[int],
        dtype: Any = "float64",
        comm: Any = None,
        parts: Sequence[int] | None = None,
    ) -> DistArray:
        """Make a tensor of ones; arguments as for `full`."""
        return _filled(cls, shape, dtype, comm, parts, lambda local, _: local.fill(1))

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

        return _filled(cls, bound, dtype, comm, parts, fill)


def made_as(cls: Any, local: Array, layout: Layout, comm: Comm) -> DistArray:
    """Return an array of a class, which is DistArray or derived from it."""
    made: DistArray = cls(local, layout, comm)
    return made


def _extents(given: int | Sequence[int]) -> tuple[int, ...]:
    extents = (given,) if isinstance(given, int | np.integer) else tuple(given)
    for extent in extents:
        if not isinstance(extent, int | np.integer) or extent < 0:
            raise InputError("shape", f"{given!r} is not a shape", "integers from 0 on")
    return tuple(int(extent) for extent in extents)


def _filled(
    cls: Any,
    shape_given: int | Sequence[int],
    dtype: Any,
    comm: Any,
    parts: Sequence[int] | None,
    fill: Callable[[Array, Region], None],
) -> DistArray:
    """Make a tensor each of whose blocks a function fills."""
    own_comm = comm_of_program(comm)

    def make() -> tuple[Array, Layout]:
        layout = layout_with_parts(own_comm, _extents(shape_given), parts)
        block = layout.block(own_comm.rank)
        assert block is not None
        local = np.empty(shape(block), np.dtype(dtype))
        fill(local, block)
        return local, layout

    def fingerprint(found: tuple[Array, Layout]) -> str:
        return f"{found[0].dtype} {found[1].bound} {found[1]}"

    local, layout = together(own_comm, make, fingerprint)
    return made_as(cls, local, layout, own_comm)
