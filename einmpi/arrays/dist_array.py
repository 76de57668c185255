"""DistArray: a tensor in blocks on the ranks of a communicator, which follows numpy's arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, wraps
from math import prod
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.lib.stride_tricks import as_strided

from einmpi.arrays.creation import ArrayCreation
from einmpi.arrays.methods import ArrayMethods
from einmpi.arrays.record import Origin, block_extents
from einmpi.comm.agreement import abort_on_divergence, call_alike, comm_of_program, together
from einmpi.comm.base import Comm
from einmpi.errors import InputError
from einmpi.late import late
from einmpi.planner.mesh import Mesh
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.cpu.backend import NumpyBackend
from einmpi.runtime.gpu.copies import on_host
from einmpi.runtime.transfer import transfer
from einmpi.schedule.layout import Layout
from einmpi.schedule.moves import redistribution
from einmpi.schedule.regions import Slot, show_region
from einmpi.schedule.steps import Transfer
from einmpi.units import counted, parse_bytes, show_bytes

Array: TypeAlias = npt.NDArray[Any]
Axis: TypeAlias = int | tuple[int, ...] | None
_DISTRIBUTED = "a DistArray is distributed over the ranks; gather() returns an array"
# How many bytes `np.asarray` gathers on several ranks.
_most_gathered: ContextVar[int] = ContextVar("most_gathered", default=0)


@cache
def _functions() -> Any:
    """Return the module that computes numpy's functions; it imports this one."""
    from einmpi.arrays import functions

    return functions


def is_sparse_array(given: Any) -> bool:
    """Return whether this is a sparse array: of this package, scipy or pydata/sparse."""
    kind = type(given)
    if issubclass(kind, ArrayMethods):
        return not issubclass(kind, DistArray)
    package = kind.__module__.partition(".")[0]
    return package in ("scipy", "sparse") and (hasattr(given, "tocoo") or hasattr(given, "coords"))


def some_are_sparse(values: Sequence[Any]) -> bool:
    return any(map(is_sparse_array, values))


class DistArray(ArrayMethods, ArrayCreation, NDArrayOperatorsMixin):
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

    # Of a view: the tensor that it was made of, the key that selects it there, if one does, and
    # whether its elements are in the memory of that tensor.
    base: Any
    key: Any
    shares = False

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

    def __repr__(self) -> str:
        if self._is_given_away:
            return f"DistArray(given away, shape={self.shape}, dtype={self.dtype})"
        if self._bring is not None:
            return f"DistArray(in pairs of blocks, shape={self.shape}, dtype={self.dtype})"
        if self.is_view and not self._is_current and not self.is_alone():
            # No rank waits for others here: programs often print on one rank only.
            return f"DistArray(changed since it was read, shape={self.shape}, dtype={self.dtype})"
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

    def _share_origin(self, array: DistArray) -> DistArray:
        """Return another array with the same values, which come from the same run."""
        array.origin = self.origin
        array.tensor = self.tensor
        return array

    # ---- copies and pickles ---------------------------------------------------------------------

    def __copy__(self) -> DistArray:
        return self.__deepcopy__(None)

    def __deepcopy__(self, _: Any) -> DistArray:
        return self._share_origin(self._with_block(self.local.copy()))

    def __reduce__(self) -> Any:
        """Pickle this rank's block. No messages are sent but to bring a result to its layout."""
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

    # ---- views ----------------------------------------------------------------------------------
    #
    # On several ranks the elements of a view may be on other ranks than in its base, the tensor
    # that it is made of, so a view usually has a copy of them. What is written into it goes to the
    # base. The base counts such changes, on all ranks alike, and a view that has missed one reads
    # the base again when it is used next.

    @property
    def is_view(self) -> bool:
        """Whether it has elements of another tensor and follows its changes."""
        return bool(self.links) and not self.is_symbol

    def _view(self, link: Link, key: Any = "no key") -> DistArray:
        """Return elements of this tensor that follow its changes; `key` selects them, if one does.

        The base of a view of a view is that of the first.
        """
        values = link.read(self)
        found = DistArray._of_run(values.local, values.layout, values.own_comm, None, "")
        found.base = self
        found.key = key
        found.links = (*self.links, link)
        if self.links:
            found.base = self.base
            found.key = "no key of the base"
        found.shares = all(each.shares for each in found.links)
        found._hold(values)
        return found

    @property
    def _is_current(self) -> bool:
        return bool(self._changes == self.base._changes)

    def _update(self) -> None:
        if self._bring is not None:
            self._brought()
        if not self.links or self._is_given_away or self._is_current:
            return
        values = self.base
        for link in self.links:
            values = link.read(values)
        self._hold(values)

    def _hold(self, values: DistArray) -> None:
        """Have these elements, which are those of the base now."""
        self._local = values.local
        self._changes = self.base._changes
        if not self.shares and isinstance(self._local, np.ndarray):
            self._local.flags.writeable = False  # what is written there would be lost

    def _write(self, values: DistArray) -> None:
        """Replace all elements of a view, in the base."""
        write_into_base(self, values)
        self.base._count_change()
        self._hold(values)

    # ---- messages -------------------------------------------------------------------------------

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

    @staticmethod
    @contextmanager
    def gather_up_to(size: str | int) -> Iterator[None]:
        """Let `np.asarray` gather tensors in the `with` block, for libraries that call it.

        All ranks make these calls, and get the whole tensor. Outside of such a block `np.asarray`
        refuses a tensor on several ranks, so that no line of a program moves data unnoticed.

        Parameters
        ----------
        size : str or int
            The size of the largest tensor that may be gathered, such as "1 GiB", or in bytes.

        Examples
        --------
        >>> x = einmpi.DistArray.ones(3)
        >>> with einmpi.DistArray.gather_up_to("1 MiB"):
        ...     np.asarray(x)
        array([1., 1., 1.])
        """
        token = _most_gathered.set(parse_bytes(str(size), "gather_up_to"))
        try:
            yield
        finally:
            _most_gathered.reset(token)

    def _with_block(self, local: Array, layout: Layout | None = None) -> DistArray:
        """Return another tensor on the same ranks, by default in the same layout."""
        return DistArray(local, self.layout if layout is None else layout, self.own_comm)

    def _in_layout(self, layout: Layout) -> DistArray:
        """Return the tensor in a layout, as it is if this is its own. All ranks call it."""
        return self if layout == self.layout else self.redistribute(layout)

    def _in_dtype(self, dtype: Any) -> DistArray:
        """Return the tensor in a dtype, as it is if this is its own."""
        return self if self.dtype == dtype else self.astype(dtype)

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
        source = Slot("before", self.local.shape, self.dtype.name)
        target = Slot("after", block_extents(layout, self.own_comm.rank), self.dtype.name)
        buffers = Buffers(NumpyBackend())
        buffers.put(source, np.ascontiguousarray(self.host))
        before = replace(self.layout, bound=self.shape or (1,))
        after = replace(layout, bound=layout.bound or (1,))
        moves = redistribution(before, after, self.own_comm.size, self.own_comm.rank)
        transfer(Transfer("", source, target, moves), buffers, self.own_comm)
        return self._share_origin(self._with_block(buffers[target], layout))

    # ---- numpy's protocols ----------------------------------------------------------------------

    __pandas_priority__ = 5000  # above that of pandas' own classes, so that they leave + to us

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if some_are_sparse(inputs):
            of_ufunc = ufunc if method == "__call__" else getattr(ufunc, method)
            return late("call_with_sparse")(of_ufunc, inputs, options)
        function = _functions().apply_ufunc
        has_dimensions = self.ndim or any(getattr(each, "ndim", 0) for each in inputs)
        if not has_dimensions and not self.is_symbol:
            # Every rank has these numbers, and one rank alone may compute with them to print them.
            return function(ufunc, method, inputs, options)
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        shown = (*inputs, options) if options else inputs
        return self._call_alike(name, shown, function, ufunc, method, inputs, options)

    # The array API standard has values of its own for // of infinities, numpy.floor_divide has not.

    def __floordiv__(self, other: Any) -> Any:
        return _functions().elementwise.floor_divide(self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _functions().elementwise.floor_divide(other, self)

    def __ifloordiv__(self, other: Any) -> Any:
        return call(np.positive, self // other, out=(self,))  # it checks that they fit

    def __array_function__(
        self, function: Any, types: Any, arguments: Sequence[Any], options: dict[str, Any]
    ) -> Any:
        if some_are_sparse(arguments):
            return late("call_with_sparse")(function, arguments, options)
        shown = (*arguments, options) if options else arguments
        apply = _functions().apply_function
        return self._call_alike(function.__name__, shown, apply, function, arguments, options)

    def _call_alike(
        self, name: str, shown: Sequence[Any], function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Call a function that all ranks call with the same arguments, and note that."""
        return call_alike(self.own_comm, name, shown, function, *arguments)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if self.is_alone():
            return np.array(on_host(self.local), dtype, copy=copy)
        if not self.ndim and self.is_on_all_ranks():  # a number: nothing is gathered
            return np.array(self.item(), self.dtype if dtype is None else dtype)
        limit = _most_gathered.get()
        if copy is False or not limit:
            raise TypeError(f"{_DISTRIBUTED}, and DistArray.gather_up_to(size) lets numpy call it")
        if self.nbytes > limit:
            problem = f"a DistArray of {show_bytes(self.nbytes)} is not gathered"
            raise TypeError(f"{problem}; gather_up_to allows {show_bytes(limit)}")
        return np.asarray(self.gather(), dtype)

    def __array_namespace__(self, /, *, api_version: str | None = None) -> Any:
        return late("array_namespace")(api_version)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[Any, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if not self.is_alone():
            raise BufferError(_DISTRIBUTED)
        return self.local.__dlpack__(
            stream=stream, max_version=max_version, dl_device=dl_device, copy=copy
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.local.__dlpack_device__()
        return device

    @property
    def device(self) -> Any:
        """Where the blocks are: "cpu", or the GPU of this rank as CuPy names it."""
        if isinstance(self.local, np.ndarray):
            return "cpu"
        return self.local.device

    def to_device(self, device: Any, /, *, stream: Any = None) -> DistArray:
        """Return the tensor, which already is on its only device, the memory of the ranks."""
        if device != self.device:
            raise ValueError(f"a DistArray on {self.device!r} does not move to {device!r}")
        return self.copy()

    # ---- elements -------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> DistArray:
        shown = (self, key)
        selected: DistArray = self._call_alike(
            "getitem", shown, _functions().indexing.select, *shown
        )
        return selected

    def __setitem__(self, key: Any, value: Any) -> None:
        shown = (self, key, value)
        self._call_alike("setitem", shown, _functions().indexing.assign, *shown)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator[DistArray]:
        for index in range(len(self)):
            yield self[index]

    def item(self, *index: int) -> Any:
        """Return an element as a Python number.

        If every rank has the whole tensor, as results without dimensions, a rank may call it alone.
        Otherwise all ranks call it. The same holds for `float`, `int`, `bool` and `complex`.

        Parameters
        ----------
        *index : int
            The indices of the element, or its place in row-major order; none if the tensor has a
            single one.

        Returns
        -------
        number
            The element.

        Examples
        --------
        >>> einmpi.DistArray.ones((2, 3)).item(1, 2)
        1.0
        """
        chosen: Any = on_host(self.local) if self.is_on_all_ranks() else self
        if len(index) == 1 and self.ndim != 1:
            place = range(self.size)[index[0]]
            chosen = chosen[tuple(map(int, np.unravel_index(place, self.shape)))]
        elif index:
            chosen = chosen[index]
        if chosen.size != 1:
            raise ValueError("can only convert a tensor with one element to a Python number")
        if isinstance(chosen, DistArray):
            chosen = chosen.gather()
        return chosen.item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __index__(self) -> int:
        if self.ndim or self.dtype.kind not in "iu":
            raise TypeError("only a tensor without dimensions of integers is an index")
        return int(self.item())

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError(
                "the truth value of a tensor with several elements is ambiguous; use any() or all()"
            )
        return bool(self.item())

    def __format__(self, spec: str) -> str:
        # No rank waits for others here: programs often print on one rank only.
        if not spec or self.ndim or self.region is None:
            return format(str(self), spec)
        return format(on_host(self.local).item(), spec)

    def tolist(self) -> Any:
        """Return the whole tensor as nested lists, on every rank."""
        return self.gather().tolist()

    # ---- shapes and dtypes ----------------------------------------------------------------------

    @property
    def T(self) -> DistArray:
        """The tensor with its dimensions in reverse order. Nothing moves."""
        return self.transpose()

    @property
    def mT(self) -> DistArray:
        """The tensor with its last two dimensions swapped. Nothing moves."""
        return call(np.swapaxes, self, -1, -2)

    @property
    def real(self) -> DistArray:
        """The real parts."""
        return self._part(np.real)

    @property
    def imag(self) -> DistArray:
        """The imaginary parts."""
        return self._part(np.imag)

    def _part(self, function: Any) -> DistArray:
        """Return the real or imaginary parts, which needs no messages.

        Ranks do not compare it: a check whether an array follows a Protocol of `typing` reads all
        attributes, in an order that differs between processes.
        """
        calls = self.own_comm.calls
        was_inside, calls.is_inside = calls.is_inside, True
        try:
            return call(function, self)
        finally:
            calls.is_inside = was_inside

    def transpose(self, *axes: Any) -> DistArray:
        """Return the tensor with its dimensions in another order. Nothing moves."""
        order: Any = axes
        if not axes:
            order = None  # reversed
        elif len(axes) == 1 and not isinstance(axes[0], int):
            order = axes[0]
        return call(np.transpose, self, order)

    def reshape(self, *shape: Any) -> DistArray:
        """Return the elements in another shape, in row-major order: a view, where numpy has one."""
        extents = shape[0] if len(shape) == 1 else shape
        return call(np.reshape, self, extents)

    def flatten(self) -> DistArray:
        """Return a copy of the elements as a vector, in row-major order."""
        return self.ravel().copy()

    def fill(self, value: Any) -> None:
        """Set all elements to a value."""
        self[...] = value

    def sort(self, axis: int = -1) -> None:
        """Sort the elements along a dimension, in place."""
        self[...] = call(np.sort, self, axis)

    def astype(self, dtype: Any) -> DistArray:
        """Return the elements converted to another dtype. Nothing moves."""
        return call(np.astype, self, np.dtype(dtype).newbyteorder("="))

    # ---- aggregations ---------------------------------------------------------------------------

    def dot(self, other: Any) -> DistArray:
        """Return the product with another tensor, as `numpy.dot`."""
        return call(np.dot, self, other)


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


class Traces(threading.local):
    """The functions that this thread traces now, the innermost last: else there are no symbols."""

    def __init__(self) -> None:
        self.stack: list[Any] = []


TRACES = Traces()
Function = TypeVar("Function", bound=Callable[..., Any])


def takes_symbols(function: Function) -> Function:
    """Let `tracing` write statements instead, where an argument is a symbol."""
    name = function.__name__

    @wraps(function)
    def apply(*arguments: Any, **options: Any) -> Any:
        if TRACES.stack and any(map(_has_symbol, arguments)):
            return late("stand_in")(name, arguments, options)
        return function(*arguments, **options)

    return apply  # type: ignore[return-value]  # the same signature


def _has_symbol(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_symbol, value))
    if isinstance(value, dict):
        return any(map(_has_symbol, value.values()))
    return getattr(value, "is_symbol", False)


def call(function: Any, *arguments: Any, **options: Any) -> DistArray:
    """Call a function of numpy that returns a DistArray: it comes back through the protocols."""
    found: DistArray = function(*arguments, **options)
    return found


# ---- views, as numpy has them: elements of another tensor that follow its changes ----------------


class Link(NamedTuple):
    """How a view depends on the tensor that it was made of, which may be a view too."""

    read: Callable[[DistArray], DistArray]  # returns the elements; all ranks call it
    write: Callable[[DistArray, DistArray], None]  # replaces them in the tensor
    stored: Callable[[Array], Array]  # returns a view of an array that is stored as the tensor
    shares: bool = False  # whether the elements that are read are in the memory of the tensor


def write_into_base(view: Any, values: DistArray) -> None:
    """Replace the elements of a view in its base, and in the views between the two."""
    *links, last_link = view.links
    parts = [view.base]
    for link in links:
        parts.append(link.read(parts[-1]))
    changed = parts.pop()
    last_link.write(changed, values)
    for link in reversed(links):
        part = parts.pop()
        if not link.shares or view.is_symbol:
            link.write(part, changed)
        changed = part


@contextmanager
def writing(array: DistArray) -> Iterator[DistArray]:
    """Yield a tensor whose block takes new elements of another one: itself, or a copy of a view.

    All ranks call it.
    """
    if array.is_view and not array.shares:
        check_writable(array)
        changed = array.copy()
        yield changed
        array._write(changed)
        return
    try:
        yield array
    finally:
        base = array.base if array.is_view else array
        base._count_change()


def refuse_writing(array: DistArray, values: DistArray) -> None:
    """Raise the error of numpy. It is the way to write into a view that is read-only."""
    raise ValueError("assignment destination is read-only")


def check_writable(view: Any) -> None:
    """Refuse a view that is read-only."""
    for link in view.links:
        if link.write is refuse_writing:
            refuse_writing(view, view)


def stored_as_numpy(view: Any) -> Array:
    """Return an array with the strides that numpy's view would have, but without its elements."""
    base = view.base
    strides = [prod(base.shape[axis + 1 :]) * base.itemsize for axis in range(base.ndim)]
    stored = as_strided(np.empty((), base.dtype), base.shape, strides)
    for link in view.links:
        stored = link.stored(stored)
    return stored
