"""A DistArray is read from a file, and written to one, by all ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, cast

import numpy as np

from einmpi.arguments import path_name
from einmpi.comm.agreement import find_first_failure, together
from einmpi.comm.base import Comm
from einmpi.comm.programs import abort_on_divergence
from einmpi.compiled.array_creation import made_as
from einmpi.compiled.array_layouts import layout_with_parts
from einmpi.compiled.origin import Origin, attributes_of
from einmpi.errors import EinmpiError
from einmpi.files.datasets import Dataset
from einmpi.files.formats import HDF5, ZARR, FileFormat
from einmpi.files.reading import Reading
from einmpi.schedule.layout import Layout
from einmpi.schedule.regions import packed, shape

if TYPE_CHECKING:
    from einmpi.compiled.dist_array import DistArray


class ArrayFiles:
    """The part of a DistArray that reads and writes files. All ranks make these calls together."""

    if TYPE_CHECKING:
        own_comm: Comm
        origin: Origin | None
        tensor: str

        @property
        def labels(self) -> tuple[str, ...] | None: ...
        def _update(self) -> None: ...

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
            lambda: layout_with_parts(comm, dataset.selected_shape, parts),
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
        return made_as(cls, local, layout, comm)

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
        self._save("to_hdf5", HDF5, file, dataset, chunks, compression)

    def to_zarr(
        self,
        file: str | os.PathLike[str],
        dataset: str = "/",
        chunks: Sequence[int] | None = None,
        compression: str | None = None,
    ) -> None:
        """Write the tensor to an array of a zarr store, in version 3. All ranks call and write.

        The other arrays of the store stay. The store is replaced whole or not at all.

        Parameters
        ----------
        file : path
            The folder of the store, such as ``"out.zarr"``. The folder that it is in must exist.
        dataset : str, optional
            The path of the array, such as ``"/group/Z"``; by default the store is the array.
        chunks : sequence of int, optional
            The shape of a chunk; by default one of at most 8 MiB.
        compression : {"gzip", "zstd", "blosc"}, optional
            How chunks are compressed; the last two need ``einmpi[zarr]``.

        Raises
        ------
        InputError
            An argument is wrong, or the store cannot be written.
        EinmpiError
            Writing has failed; the store is unchanged.

        Examples
        --------
        >>> einmpi.DistArray.from_global(np.arange(3.0)).to_zarr("steps.zarr", "/x")
        >>> einmpi.open_dataset("steps.zarr", "/x").gather()
        array([0., 1., 2.])
        """
        self._save("to_zarr", ZARR, file, dataset, chunks, compression)

    def _save(
        self,
        where: str,
        file_format: FileFormat,
        file: str | os.PathLike[str],
        dataset: str,
        chunks: Sequence[int] | None,
        compression: str | None,
    ) -> None:
        from einmpi.files.writing import save

        def check() -> str:
            cast("DistArray", self)._check_is_here()
            return path_name(where, file)

        path = together(self.own_comm, check)
        self._update()
        with abort_on_divergence(self.own_comm):
            save(
                cast("DistArray", self),
                where,
                file_format,
                path,
                dataset,
                chunks,
                compression,
                lambda: attributes_of(self.origin, self.own_comm.size),
                self.labels,
                self.tensor,
            )
