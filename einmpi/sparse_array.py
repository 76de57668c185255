"""SparseArray: a sparse tensor whose stored values are distributed; those of other libraries."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from math import prod
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

from einmpi.arrays.dist_array import DistArray, is_sparse_array
from einmpi.arrays.indexing import take
from einmpi.arrays.methods import ArrayMethods
from einmpi.arrays.sparse_files import save_sparse
from einmpi.comm.agreement import comm_of_program, together
from einmpi.comm.base import Comm
from einmpi.errors import InputError
from einmpi.files.sparse.reading import gather_rows
from einmpi.files.specs import InputSpec
from einmpi.graph.dtypes import dtype_name
from einmpi.graph.scalar import Number
from einmpi.graph.sparse.coordinates import Blocks, Coordinates, blocks_by, digest_of
from einmpi.graph.sparse.sorting import Keys
from einmpi.late import late


class SparseArray(ArrayMethods, NDArrayOperatorsMixin):
    """A sparse tensor on the ranks of a communicator.

    Results of programs are SparseArrays where they are sparse, and they may be inputs. Operators
    and functions of numpy become programs, as in `jit`.

    Attributes
    ----------
    pattern : tuple of array
        For each key dimension the index of each stored element or tile, sorted. All ranks have it.
    values : DistArray
        The stored elements or tiles, in the order of the keys.
    shape : tuple of int
        The shape of the whole tensor.
    implicit : number
        The value of all elements that are not stored.

    Examples
    --------
    >>> A = einmpi.SparseArray.from_keys(([0, 2], [1, 1]), [5.0, 7.0], (3, 3))
    >>> einmpi.run("y[i] = sum(A[i,j] * x[j])", A=A, x=np.ones(3))["y"].gather()
    array([5., 0., 7.])
    >>> (A @ np.ones(3)).gather(), (2 * A).nnz
    (array([5., 0., 7.]), 2)
    """

    def __init__(
        self,
        keys: Keys,
        placed: DistArray,
        shape: tuple[int, ...],
        implicit: Number,
        blocks: Blocks,
    ) -> None:
        self._keys = keys
        self._placed = placed  # the values, where they are in blocks
        self.shape = shape
        self.implicit = implicit
        self._blocks = blocks
        # No cached property: ranks that are threads would wait for each other.
        self._in_order = placed if blocks.places is None else None

    @classmethod
    def from_keys(
        cls,
        keys: Sequence[Any],
        values: Any,
        shape: Sequence[int],
        implicit: Any = 0,
        comm: Any = None,
    ) -> SparseArray:
        """Make a sparse tensor of keys and values that all ranks have. All ranks call it.

        Parameters
        ----------
        keys : sequence of array
            For each key dimension an array of integers: the places of the values, in any order.
            What is given twice is added up.
        values : array
            The stored elements; or dense tiles, if the tensor has more dimensions than keys.
        shape : sequence of int
            The shape of the whole tensor.
        implicit : number, optional
            The value of all elements that are not stored.
        comm : mpi4py communicator, optional
            The ranks; by default all that mpirun started, or this process alone.

        Returns
        -------
        SparseArray
            The tensor.

        Raises
        ------
        InputError
            Keys, values, shape and implicit value do not fit.

        Examples
        --------
        >>> einmpi.SparseArray.from_keys(([0, 2], [1, 1]), [5.0, 7.0], (3, 3))
        <SparseArray float64[3, 3], 2 stored, others 0.0>
        """
        return cls._of(Coordinates.of(keys, values, shape, implicit, "from_keys"), comm)

    @classmethod
    def from_sparse(cls, array: Any, comm: Any = None) -> SparseArray:
        """Make a sparse tensor of one of another library that all ranks have. All ranks call it.

        Parameters
        ----------
        array : scipy.sparse array or matrix, or array of pydata/sparse
            The tensor; `fill_value` of pydata/sparse is the implicit value.
        comm : mpi4py communicator, optional
            As for `from_keys`.

        Returns
        -------
        SparseArray
            The tensor.

        Raises
        ------
        InputError
            It is none of these.

        Examples
        --------
        >>> import scipy.sparse
        >>> einmpi.SparseArray.from_sparse(scipy.sparse.eye_array(3))
        <SparseArray float64[3, 3], 3 stored, others 0.0>
        """
        if not is_sparse(array):
            what = f"array is a {type(array).__name__}"
            raise InputError("from_sparse", what, "a sparse array of scipy or pydata/sparse")
        return cls._of(as_coordinates("array", array), comm)

    @classmethod
    def _of(cls, given: Coordinates, comm: Any) -> SparseArray:
        """Return what all ranks have with its values distributed. All ranks call it."""
        blocks = blocks_by(given.keys[0], given.shape[0], comm_of_program(comm).size)
        placed = DistArray.from_global(given.in_blocks(blocks), comm)
        return cls(given.keys, placed, given.shape, given.implicit, blocks)

    @classmethod
    def from_local(
        cls,
        keys: Sequence[Any],
        values: Any,
        shape: Sequence[int],
        implicit: Any = 0,
        comm: Any = None,
    ) -> SparseArray:
        """Make a sparse tensor of which each rank gives some elements. All ranks call it.

        Parameters
        ----------
        keys, values : as for `from_keys`
            Those that this rank has. What several ranks give for one place is added up.
        shape, implicit, comm : as for `from_keys`
            The same on all ranks.

        Returns
        -------
        SparseArray
            The tensor.

        Raises
        ------
        InputError
            As for `from_keys`; or ranks have values of different dtypes.

        Examples
        --------
        >>> einmpi.SparseArray.from_local(([0, 2], [1, 1]), [5.0, 7.0], (3, 3)).nnz
        2
        """
        own_comm = comm_of_program(comm)

        def check() -> Coordinates:
            return Coordinates.of(keys, values, shape, implicit, "from_local")

        own = together(
            own_comm, check, lambda found: repr((found.shape, found.implicit, found.dtype.name))
        )
        columns = [gather_rows(column, own_comm) for column in own.keys]
        stored = gather_rows(own.values, own_comm)
        del own  # as large as what is given
        whole = Coordinates.of(columns, stored, shape, implicit, "from_local", copy=False)
        return cls._of(whole, own_comm)

    def __repr__(self) -> str:
        extents = ", ".join(map(str, self.shape))
        return (
            f"<SparseArray {self.dtype.name}[{extents}], {self.nnz} stored, others {self.implicit}>"
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self._placed.dtype

    @property
    def values(self) -> DistArray:
        """The stored elements or tiles, in the order of the keys. All ranks ask for it."""
        if self._in_order is None:
            self._in_order = take(self._placed, self._blocks.places, axis=0)
        return self._in_order

    @property
    def own_comm(self) -> Comm:
        """The ranks that have it."""
        return self._placed.own_comm

    @property
    def origin(self) -> Any:
        """The run that computed it; None if it was given."""
        return self._placed.origin

    def in_blocks(self, blocks: Blocks) -> DistArray:
        """Return the values at their places in blocks. All ranks call it."""
        if blocks == self._blocks:
            return self._placed
        return DistArray.from_global(self.coordinates().in_blocks(blocks), self.own_comm)

    @property
    def nnz(self) -> int:
        """The number of stored elements, or tiles."""
        return len(self._keys[0])

    @property
    def pattern(self) -> tuple[npt.NDArray[np.int64], ...]:
        """For each key dimension the index of each stored element or tile."""
        return tuple(column.astype(np.int64) for column in self._keys)

    @property
    def ndim(self) -> int:
        """The number of dimensions: keys, and those of tiles."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements, stored or not."""
        return prod(self.shape)

    @property
    def T(self) -> Any:
        """The tensor with its dimensions in reverse order. All ranks ask for it."""
        return np.transpose(self)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if options.get("out") is not None:
            what = f"{ufunc.__name__} cannot write into a SparseArray"
            raise TypeError(f"{what}; expected a new one, such as S = S + T for S += T")
        function = ufunc if method == "__call__" else getattr(ufunc, method)
        return late("call_with_sparse")(function, inputs, options)

    def __array_function__(
        self, function: Any, types: Any, arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> Any:
        return late("call_with_sparse")(function, arguments, options)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        raise TypeError(
            "a SparseArray is no array of all elements; gather() returns one of scipy or "
            "pydata/sparse"
        )

    def __bool__(self) -> bool:
        raise ValueError(
            "the truth value of a sparse tensor is ambiguous; use any() or all(), or nnz > 0"
        )

    def astype(self, dtype: Any) -> SparseArray:
        """Return the same tensor with its values in another dtype."""
        implicit = np.asarray(self.implicit).astype(dtype).item()
        placed = self._placed.astype(dtype)
        return SparseArray(self._keys, placed, self.shape, implicit, self._blocks)

    @cached_property
    def digest(self) -> str:
        """A text that tensors with the same keys have."""
        return digest_of(self._keys)

    def outline(self) -> Coordinates:
        """Return the tensor without its values."""
        shape = (self.nnz, *self._placed.shape[1:])
        none = np.broadcast_to(np.zeros((), self.dtype), shape)
        found = Coordinates(self._keys, none, self.shape, self.implicit)
        vars(found)["digest"] = self.digest  # which takes time
        return found

    def coordinates(self) -> Coordinates:
        """Return the whole tensor as keys and values on every rank. All ranks call it."""
        values = self._placed.gather()
        if self._blocks.places is not None:
            values = values[self._blocks.places]
        return Coordinates(self._keys, values, self.shape, self.implicit)

    def to_hdf5(
        self, file: str | os.PathLike[str], group: str, compression: str | None = None
    ) -> None:
        """Write the tensor to a group of an HDF5 file. All ranks call it, and all write.

        A matrix is stored as AnnData does it, as CSR. Any other tensor becomes a dataset of values
        and one for each key dimension. The file is replaced whole or not at all, and what else is
        in it stays.

        Parameters
        ----------
        file : path
            The file. Its folder must exist.
        group : str
            The path of the group, such as ``"/A"``.
        compression : {"gzip", "lzf"}, optional
            How the datasets are compressed.

        Raises
        ------
        InputError
            An argument is wrong, or the file cannot be written.
        EinmpiError
            Writing has failed; the file is unchanged.
        """
        save_sparse(self, "to_hdf5", file, group, compression)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the tensor to a file whose suffix says the format. All ranks call it.

        Parameters
        ----------
        file : path
            A name that ends in .npz, .mtx or .tns; or a group such as ``"graph.h5:/A"``.

        Raises
        ------
        InputError
            The format cannot have this tensor, or the file cannot be written.
        EinmpiError
            Writing has failed; the file is unchanged.

        Examples
        --------
        >>> einmpi.SparseArray.from_keys(([0, 2], [1, 1]), [5.0, 7.0], (3, 3)).save("A.mtx")
        >>> job = einmpi.program("n = sum(A[i,j])", inputs={"A": {"file": "A.mtx"}})
        >>> einmpi.run(job)["n"].gather()
        array(12.)
        """
        save_sparse(self, "save", file, None)

    def gather(self) -> Any:
        """Return the whole tensor on every rank. All ranks call it.

        Returns
        -------
        scipy.sparse.coo_array or sparse.COO
            Of scipy if it has two dimensions, both keys, and the implicit value is 0; else of the
            package sparse.

        Examples
        --------
        >>> A = einmpi.SparseArray.from_keys(([0, 2], [1, 1]), [5.0, 7.0], (3, 3))
        >>> A.gather().toarray()
        array([[0., 5., 0.],
               [0., 0., 0.],
               [0., 7., 0.]])
        """
        whole = self.coordinates()
        if len(whole.shape) == len(whole.keys) == 2 and whole.implicit == 0:
            from scipy.sparse import coo_array  # slow to import, and few programs need it

            return coo_array((whole.values, self.pattern), shape=whole.shape)
        count = prod(whole.tile)
        places = np.indices(whole.tile).reshape(len(whole.tile), count)
        keys = [np.repeat(column, count) for column in self.pattern]
        tiles = [np.tile(column, whole.stored) for column in places]
        values = whole.values.reshape(-1)
        coo = import_module("sparse").COO
        return coo(np.stack(keys + tiles), values, shape=whole.shape, fill_value=whole.implicit)


def is_sparse(given: Any) -> bool:
    """Return whether this is a sparse tensor: of this package, of scipy or of pydata/sparse."""
    return isinstance(given, Coordinates) or is_sparse_array(given)


def outline_spec(name: str, given: Any) -> InputSpec:
    """Return how much a sparse tensor stores, without a look at its keys."""
    if isinstance(given, SparseArray):
        given = given.outline()
    shape = tuple(given.shape)
    dtype = dtype_name(given.dtype)
    if isinstance(given, Coordinates):
        facts = len(given.keys), given.stored, given.implicit
    else:
        facts = len(shape), given.nnz, getattr(given, "fill_value", 0)
    key_dimensions, stored, implicit = facts
    return InputSpec(
        name,
        shape,
        dtype,
        place="program",
        key_dimensions=key_dimensions,
        stored=stored,
        implicit=implicit,
    )


def as_coordinates(name: str, given: Any) -> Coordinates:
    """Return a sparse tensor as keys and values on every rank. All ranks call it."""
    if isinstance(given, Coordinates):
        return given
    if isinstance(given, SparseArray):
        return given.coordinates()
    where = f"inputs: {name}"
    if type(given).__module__.startswith("scipy"):
        found = given.tocoo()
        keys = getattr(found, "coords", None) or (found.row, found.col)
        return Coordinates.of(keys, found.data, given.shape, 0, where)
    found = given.asformat("coo")
    return Coordinates.of(tuple(found.coords), found.data, given.shape, given.fill_value, where)
