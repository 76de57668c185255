"""Tensors in blocks on the ranks of a communicator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.comm.agreement import together
from einmpi.comm.base import Comm
from einmpi.comm.programs import abort_on_divergence, comm_of_program
from einmpi.compiled.array_creation import ArrayCreation
from einmpi.compiled.array_files import ArrayFiles
from einmpi.compiled.array_methods import ArrayMethods
from einmpi.compiled.origin import Origin
from einmpi.errors import InputError, one_of
from einmpi.graph.dtypes import DTYPES, dtype_name
from einmpi.late import late
from einmpi.planner.mesh import Mesh
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.cpu.backend import NumpyBackend
from einmpi.runtime.gpu.copies import on_host
from einmpi.runtime.transfer import transfer
from einmpi.schedule.layout import Layout
from einmpi.schedule.moves import redistribution
from einmpi.schedule.regions import Region, shape, show_region
from einmpi.schedule.steps import Exchange, Slot
from einmpi.units import counted

Array: TypeAlias = npt.NDArray[Any]


class DistArray(ArrayFiles, ArrayMethods, ArrayCreation):
    """A tensor in blocks on the ranks of a communicator.

    Runs, `from_global` and `open_dataset` make it. Slices, reshapes and transposes of it are views,
    as in numpy: a change of either is seen in the other. Indices by lists and masks, `copy` and
    `flatten` make copies.

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

    # The run that has computed it, and its name in the program; unknown for any other array.
    origin: Origin | None = None
    tensor: str = ""
    # How often its elements were changed, which its views compare with what they have read.
    _changes = 0

    def __init__(self, local: Array, layout: Layout, comm: Comm) -> None:
        self._local: Array | None = local
        self._dtype: np.dtype[Any] = local.dtype
        if dtype_name(local.dtype) not in DTYPES:  # elements are moved as bytes; objects cannot be
            raise InputError("DistArray", f"its dtype would be {local.dtype}", one_of(DTYPES))
        self.layout = layout
        self.own_comm = comm
        if local.size:
            assert local.shape == layout.block_shape(comm.rank), (local.shape, str(layout))

    @classmethod
    def _of_run(
        cls, local: Array, layout: Layout, comm: Comm, origin: Origin | None, tensor: str
    ) -> DistArray:
        """Return an output of a run, whose block is known to have the shape of the layout."""
        found = cls.__new__(cls)
        found._local = local
        found._dtype = local.dtype
        found.layout = layout
        found.own_comm = comm
        found.origin = origin
        found.tensor = tensor
        return found

    # ---- properties -----------------------------------------------------------------------------

    @property
    def local(self) -> Array:
        """This rank's block: an array of numpy, or of CuPy on a GPU.

        On several ranks, most views have copies of elements, and their blocks are read-only. All
        ranks read the block of a view together after its tensor has changed. Views do not see what
        is written into the block of their tensor; they see `x[...] = ...`.
        """
        if self._local is None:
            raise _given_away_error()
        return self._local

    def _check_is_here(self) -> None:
        """Raise an error if someone else uses its memory."""
        if self._is_given_away:
            raise _given_away_error()

    def _give_away(self) -> None:
        """Forget this rank's block: someone else uses its memory from now on."""
        self._local = None
        self._count_change()

    def _count_change(self) -> None:
        self._changes += 1
        self.origin = None  # these are no longer the values of a run

    def _update(self) -> None:
        """Make the block of a view up to date. All ranks call it."""

    def _replace_block(self, local: Array) -> None:
        """Make another array this rank's block, of the same shape and dtype."""
        self._local = local

    @property
    def _is_given_away(self) -> bool:
        """Whether someone else uses its memory."""
        return self._local is None

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
        return self._dtype

    @property
    def size(self) -> int:
        """The number of elements of the whole tensor."""
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor, each element counted once."""
        return self.size * self.itemsize

    @property
    def comm(self) -> Any:
        """The ranks: the communicator of mpi4py that they are on.

        A process that is alone has no MPI; then it is an object with `rank` and `size`.
        """
        return getattr(self.own_comm, "communicator", self.own_comm)

    @property
    def region(self) -> Region | None:
        """The indices of this rank's block: runs (start, stop) for each dimension.

        None on a rank that holds no block.
        """
        return self.layout.block(self.own_comm.rank)

    @property
    def host(self) -> Array:
        """This rank's block in host memory: `local` itself, or a copy of it."""
        block: Array = on_host(self.local)
        return block

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The labels of its dimensions in the program that has computed it, None without one."""
        return None if self.origin is None else self.origin.labels_of(self.tensor)

    def __repr__(self) -> str:
        if self._local is None:
            return f"DistArray(given away, shape={self.shape}, dtype={self.dtype})"
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
            f"rank {self.own_comm.rank} of {self.own_comm.size} holds {own})"
        )

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        text: str = late("array_html")(self)
        return text

    def is_alone(self) -> bool:
        """Return whether this rank is the only one, so that its block is the whole tensor."""
        return self.own_comm.size == 1

    def is_on_all_ranks(self) -> bool:
        """Return whether every rank has the whole tensor, so that it can read all of it alone."""
        layout = self.layout
        return layout.mesh.ranks == self.own_comm.size and not layout.cutting_axes()

    def _share_origin(self, array: DistArray) -> DistArray:
        """Return another array with the same values, which come from the same run."""
        array.origin = self.origin
        array.tensor = self.tensor
        return array

    # ---- copies and pickles ---------------------------------------------------------------------

    def __copy__(self) -> DistArray:
        return self.__deepcopy__(None)

    def __deepcopy__(self, _: Any) -> DistArray:
        return self._share_origin(DistArray(self.local.copy(), self.layout, self.own_comm))

    def __reduce__(self) -> Any:
        """Pickle this rank's block. No messages are sent."""
        rank = self.own_comm.rank
        return _unpickled, (self.host, self.layout, rank, self.own_comm.size)

    @staticmethod
    @contextmanager
    def unpickle_on(comm: Any) -> Iterator[None]:
        """Unpickle DistArrays in the `with` block on another communicator than the world.

        A pickle has the block of one rank. It is loaded by the same rank of a communicator with
        equally many ranks; each rank loads its own pickle.

        Parameters
        ----------
        comm : mpi4py communicator
            The ranks.

        Examples
        --------
        >>> import pickle
        >>> x = einmpi.DistArray.ones(3)
        >>> with einmpi.DistArray.unpickle_on(x.comm):
        ...     y = pickle.loads(pickle.dumps(x))
        >>> y.gather()
        array([1., 1., 1.])
        """
        token = _pickle_comm.set(comm)
        try:
            yield
        finally:
            _pickle_comm.reset(token)

    # ---- messages -----------------------------------------------------------------------

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
        rank = self.own_comm.rank

        def check_root() -> int | None:
            self._check_is_here()
            is_integer = isinstance(root, int | np.integer)
            if root is not None and not (is_integer and 0 <= root < self.own_comm.size):
                expected = f"a rank from 0 to {self.own_comm.size - 1}"
                raise InputError("gather", f"there is no rank {root!r}", expected)
            return root

        together(self.own_comm, check_root, lambda checked: f"gather {checked} {self.layout}")
        mesh = Mesh(self.own_comm.size if root is None else 1)
        uncut = Layout(mesh, self.shape, (None,) * len(mesh.factors))
        with abort_on_divergence(self.own_comm):
            whole = self._moved_to(uncut).local
            if root is None:
                return whole
            # A mesh of one rank is rank 0, which sends the tensor on.
            if root != 0 and rank == 0:
                self.own_comm.sendrecv(root, whole.reshape(-1), None, None)
            elif root != 0 and rank == root:
                whole = np.empty(self.shape, self.dtype)
                self.own_comm.sendrecv(None, None, 0, whole.reshape(-1))
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
            self._check_is_here()
            if not isinstance(layout, Layout):
                problem = f"{type(layout).__name__} is not a layout"
                raise InputError("redistribute", problem, "the layout of a DistArray")
            if layout.bound != self.shape or layout.mesh.ranks > self.own_comm.size:
                raise InputError(
                    "redistribute",
                    f"the layout {layout} is for a tensor of shape {layout.bound}",
                    f"shape {self.shape} on at most {counted(self.own_comm.size, 'rank')}",
                )

        together(self.own_comm, check_layout, lambda _: f"redistribute {self.layout} {layout!r}")
        with abort_on_divergence(self.own_comm):
            return self._moved_to(layout)

    def _moved_to(self, layout: Layout) -> DistArray:
        block = layout.block(self.own_comm.rank)
        extents = (0,) * (self.ndim or 1) if block is None else shape(block)
        source = Slot("before", self.local.shape, self.dtype.name)
        target = Slot("after", extents, self.dtype.name)
        buffers = Buffers(NumpyBackend())
        buffers.put(source, np.ascontiguousarray(self.host))
        before = Layout(self.layout.mesh, self.shape or (1,), self.layout.cuts)
        after = Layout(layout.mesh, layout.bound or (1,), layout.cuts)
        moves = redistribution(before, after, self.own_comm.size, self.own_comm.rank)
        transfer(Exchange("", source, target, moves), buffers, self.own_comm)
        return self._share_origin(DistArray(buffers[target], layout, self.own_comm))


def _given_away_error() -> InputError:
    what = "it was given away to a compiled call, which has written over it"
    hint = "use the result of the call"
    return InputError("DistArray", what, "one that was not given away", hint)


# The communicator on which pickles are loaded; None for the world.
_pickle_comm: ContextVar[Any] = ContextVar("pickle_comm", default=None)


def _unpickled(local: Array, layout: Layout, rank: int, ranks: int) -> DistArray:
    comm = comm_of_program(_pickle_comm.get())
    if (comm.rank, comm.size) != (rank, ranks):
        raise InputError(
            "pickle",
            f"the block of rank {rank} of {ranks} is loaded by rank {comm.rank} of {comm.size}",
            "the same rank of equally many",
            "with DistArray.unpickle_on(comm) names another communicator than the world",
        )
    return DistArray(local, layout, comm)
