"""SparseArray: a sparse tensor whose stored values are distributed; those of other libraries."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from math import prod
from typing import Any

import numpy as np

from einmpi.arrays.dist_array import DistArray
from einmpi.arrays.sparse_files import save_sparse
from einmpi.comm.agreement import comm_of_program, together
from einmpi.files.sparse.reading import gather_rows
from einmpi.graph.scalar import Number
from einmpi.graph.sparse.coordinates import Coordinates, Keys, digest_of


class SparseArray:
    """A sparse tensor on the ranks of a communicator.

    Results of programs are SparseArrays where they are sparse, and they may be inputs.

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
    """

    def __init__(
        self, pattern: Keys, values: DistArray, shape: tuple[int, ...], implicit: Number
    ) -> None:
        self.pattern = pattern
        self.values = values
        self.shape = shape
        self.implicit = implicit

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
        given = Coordinates.of(keys, values, shape, implicit, "from_keys")
        stored = DistArray.from_global(given.values, comm)
        return cls(given.keys, stored, given.shape, given.implicit)

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
        return cls.from_keys(columns, gather_rows(own.values, own_comm), shape, implicit, own_comm)

    def __repr__(self) -> str:
        extents = ", ".join(map(str, self.shape))
        return (
            f"<SparseArray {self.dtype.name}[{extents}], {self.values.shape[0]} stored, "
            f"others {self.implicit}>"
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def nnz(self) -> int:
        """The number of stored elements, or tiles."""
        return len(self.pattern[0])

    def astype(self, dtype: Any) -> SparseArray:
        """Return the same tensor with its values in another dtype."""
        implicit = np.asarray(self.implicit).astype(dtype).item()
        return SparseArray(self.pattern, self.values.astype(dtype), self.shape, implicit)

    @cached_property
    def digest(self) -> str:
        """A text that tensors with the same keys have."""
        return digest_of(self.pattern)

    def outline(self) -> Coordinates:
        """Return the tensor without its values."""
        none = np.broadcast_to(np.zeros((), self.dtype), self.values.shape)
        return Coordinates(self.pattern, none, self.shape, self.implicit)

    def coordinates(self) -> Coordinates:
        """Return the whole tensor as keys and values on every rank. All ranks call it."""
        return Coordinates(self.pattern, self.values.gather(), self.shape, self.implicit)

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

            return coo_array((whole.values, whole.keys), shape=whole.shape)
        count = prod(whole.tile)
        places = np.indices(whole.tile).reshape(len(whole.tile), count)
        keys = [np.repeat(column, count) for column in whole.keys]
        tiles = [np.tile(column, whole.stored) for column in places]
        values = whole.values.reshape(-1)
        coo = import_module("sparse").COO
        return coo(np.stack(keys + tiles), values, shape=whole.shape, fill_value=whole.implicit)


def is_sparse(given: Any) -> bool:
    """Return whether this is a sparse tensor: of this package, of scipy or of pydata/sparse."""
    if isinstance(given, SparseArray | Coordinates):
        return True
    package = type(given).__module__.partition(".")[0]
    return package in ("scipy", "sparse") and (hasattr(given, "tocoo") or hasattr(given, "coords"))


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
