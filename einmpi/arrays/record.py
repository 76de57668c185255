"""The record of a distributed tensor: this rank's block, its layout, its ranks, and its origin."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arguments import path_name
from einmpi.comm.agreement import abort_on_divergence, agree, together
from einmpi.comm.base import Comm
from einmpi.errors import InputError, one_of
from einmpi.files.datasets import Dataset
from einmpi.files.formats import HDF5, ZARR, FileFormat, find, known_format
from einmpi.files.specs import InputSpec, Number, SliceEntry
from einmpi.graph.dtypes import DTYPES, dtype_name
from einmpi.graph.eingraph import Vertex
from einmpi.job.job import Job
from einmpi.process.environment import current_date, software_versions
from einmpi.runtime.gpu.copies import on_host
from einmpi.schedule.layout import Layout, digits_along
from einmpi.schedule.regions import Region
from einmpi.version import __version__

Array: TypeAlias = npt.NDArray[Any]


_MOST_PROGRAM_BYTES = 60_000


@dataclass(frozen=True, eq=False)
class Origin:
    """The run that has computed some tensors.

    `plan_digest` returns that of the plan. `given` are the inputs of the caller, with the values of
    those that are parameters. `files` says where inputs are in files; those that are missing in it
    are found by the job.
    """

    job: Job
    plan_digest: Callable[[], str]
    given: Mapping[str, Number | None] = field(default_factory=dict)
    files: Mapping[str, Dataset] = field(default_factory=dict)

    def labels_of(self, tensor: str) -> tuple[str, ...] | None:
        """Return the labels of a tensor as the program writes them, None if it has none there."""
        vertex = self.job.written.by_name.get(tensor)
        if vertex is None or vertex.einsum is None:
            return None
        return vertex.einsum.output


def block_extents(layout: Layout, rank: int) -> tuple[int, ...]:
    """Return the shape of a rank's block, which has no elements if the rank is not in the mesh.

    A tensor without dimensions has one element, so there the block needs a dimension.
    """
    extents = layout.block_shape(rank)
    return (0,) * max(len(layout.bound), 1) if extents is None else extents


class ArrayRecord:
    """What a DistArray is, without what it can do as numpy's arrays do."""

    # The run that has computed it, and its name in the program; unknown for any other array.
    origin: Origin | None = None
    tensor: str = ""
    # How often its elements were changed, which its views compare with what they have read.
    _changes = 0
    # Whether it stands for a tensor of a program that is being written (`tracing`).
    is_symbol = False
    # Of a result that is not in its layout yet: returns this rank's block. All ranks call it.
    _bring: Callable[[], Array] | None = None
    links: tuple[Any, ...] = ()  # of a view: how it depends on another tensor, its base

    def __init__(self, local: Array, layout: Layout, comm: Comm) -> None:
        block_shape = layout.block_shape(comm.rank)
        if block_shape is None:
            local = np.empty(block_extents(layout, comm.rank), local.dtype)
        self._local: Array | None = local
        self._dtype: np.dtype[Any] = local.dtype
        if dtype_name(local.dtype) not in DTYPES:  # elements are moved as bytes; objects cannot be
            raise InputError("DistArray", f"its dtype would be {local.dtype}", one_of(DTYPES))
        self.layout = layout
        self.own_comm = comm
        if local.size:
            assert local.shape == block_shape, (local.shape, str(layout))

    # ---- properties -----------------------------------------------------------------------------

    @property
    def local(self) -> Array:
        """This rank's block: an array of numpy, or of CuPy on a GPU.

        On several ranks, most views have copies of elements, and their blocks are read-only. All
        ranks read the block of a view together after its tensor has changed. Views do not see what
        is written into the block of their tensor; they see `x[...] = ...`. Large symmetric results
        are in pairs of blocks until they are read, which all ranks do together, too.
        """
        if self.links:
            self._update()
        if self._local is None:
            return self._brought()
        return self._local

    def _brought(self) -> Array:
        """Bring a result to its layout, and return this rank's block."""
        if self._bring is None:
            raise _given_away_error()
        # A rank that reads alone is told so, in place of waiting for the others.
        agree(self.own_comm, f"first read of {self.dtype}{list(self.shape)} in pairs of blocks")
        with abort_on_divergence(self.own_comm):
            self._local = self._bring()
        self._bring = None
        return self._local

    def _check_is_here(self) -> None:
        """Raise an error if someone else uses its memory."""
        if self._is_given_away:
            raise _given_away_error()

    def _give_away(self) -> None:
        """Forget this rank's block: someone else uses its memory from now on."""
        self._local = None
        self._bring = None
        self._count_change()

    def _count_change(self) -> None:
        self._changes += 1
        self.origin = None  # these are no longer the values of a run

    def _update(self) -> None:
        """Make the block up to date, of a view or of a result. All ranks call it."""

    def _leave_unread(self, bring: Callable[[], Array]) -> None:
        """Have no block until it is read: `bring` returns it then, on all ranks."""
        self._local = None
        self._bring = bring

    def _replace_block(self, local: Array) -> None:
        """Make another array this rank's block, of the same shape and dtype."""
        self._local = local

    @property
    def _is_given_away(self) -> bool:
        """Whether someone else uses its memory."""
        return self._local is None and self._bring is None

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
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """The lengths of the pieces that each dimension is cut into, as Dask's arrays have them."""
        mesh = self.layout.mesh
        found = []
        for dimension in range(self.ndim):
            runs: set[tuple[int, int]] = set()
            axes = self.layout.axes_of(dimension)
            for digits in digits_along(mesh, axes, mesh.digits(0)):
                runs |= set(self.layout.runs(dimension, digits))
            lengths = [stop - start for start, stop in sorted(runs)]
            found.append(tuple(lengths) or (0,))
        return tuple(found)

    @property
    def host(self) -> Array:
        """This rank's block in host memory: `local` itself, or a copy of it."""
        block: Array = on_host(self.local)
        return block

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The labels of its dimensions in the program that has computed it, None without one."""
        return None if self.origin is None else self.origin.labels_of(self.tensor)

    def is_alone(self) -> bool:
        """Return whether this rank is the only one, so that its block is the whole tensor."""
        return self.own_comm.size == 1

    def is_on_all_ranks(self) -> bool:
        """Return whether every rank has the whole tensor, so that it can read all of it alone."""
        layout = self.layout
        return layout.mesh.ranks == self.own_comm.size and not layout.cutting_axes()

    # ---- files ----------------------------------------------------------------------------------

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
            self._check_is_here()
            return path_name(where, file)

        path = together(self.own_comm, check)
        self._update()
        with abort_on_divergence(self.own_comm):
            save(
                self,
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


def _given_away_error() -> InputError:
    what = "it was given away to a compiled call, which has written over it"
    hint = "use the result of the call"
    return InputError("DistArray", what, "one that was not given away", hint)


# ---- where a stored tensor comes from -----------------------------------------------------------


def attributes_of(origin: Origin | None, ranks: int) -> dict[str, str]:
    """Return the attributes of a stored tensor, each as text; without an origin only some.

    Those with several values are JSON.
    """
    attributes = {
        "einmpi_version": __version__,
        "einmpi_software": _as_json(software_versions()),
        "einmpi_ranks": str(ranks),
        "einmpi_date": current_date(),
    }
    if origin is None:
        return attributes
    job = origin.job
    loops = job.one_after_another()
    text = "\n\n".join(each.source.text for each in loops)
    program = text.encode()[:_MOST_PROGRAM_BYTES].decode(errors="ignore")
    attributes["einmpi_program"] = program
    attributes["einmpi_plan"] = origin.plan_digest()
    attributes["einmpi_dtype"] = job.dtype
    if job.path:
        attributes["einmpi_job"] = os.path.abspath(job.path)
    attributes["einmpi_sizes"] = _as_json(dict(job.sizes))
    parameters: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    specs = {spec.name: spec for spec in job.inputs}
    vertices = [vertex for each in loops for vertex in each.graph.inputs]
    for vertex in vertices:
        if job.loops and vertex.name not in specs:
            continue  # the result of another loop
        spec = specs.get(vertex.name)
        if spec is not None and spec.value is not None:
            given_value = origin.given.get(vertex.name)
            parameters[vertex.name] = _number(spec.value if given_value is None else given_value)
        else:
            inputs[vertex.name] = _input_facts(origin, vertex, spec)
    attributes["einmpi_parameters"] = _as_json(parameters)
    attributes["einmpi_inputs"] = _as_json(inputs)
    return attributes


def _as_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


def _number(value: Number) -> bool | int | float | str:
    """Return a number as JSON can hold it; a complex one as a job file writes it."""
    if isinstance(value, complex):
        return str(value).strip("()")
    return value


def _input_facts(origin: Origin, vertex: Vertex, spec: InputSpec | None) -> dict[str, Any]:
    """Return what is known of an input: how it was generated, or where it lies in a file."""
    facts: dict[str, Any] = {"shape": list(vertex.bound), "dtype": vertex.dtype}
    if spec is not None and spec.rows is not None:
        facts["rows"] = spec.rows  # of which each step takes a batch, with the shape above
    dataset = origin.files.get(vertex.name)
    if dataset is None and (vertex.name in origin.given or spec is None):
        return {"given": True, **facts}
    if dataset is None and spec is not None and spec.file is None:
        generated: dict[str, Any] = {"random": spec.random, "seed": spec.seed}
        if spec.random == "uniform":
            generated |= {"low": spec.low, "high": spec.high}
        return {**generated, **facts}
    if dataset is None and spec is not None:
        try:
            dataset = find(spec)
        except InputError:  # a result is not lost because an input that was read is gone
            return {"file": os.path.abspath(spec.file or ""), **facts}
    assert dataset is not None
    return {**_file_facts(dataset, spec), **facts}


def _file_facts(dataset: Dataset, spec: InputSpec | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"file": os.path.abspath(dataset.file)}
    if dataset.name:
        key = "dataset" if spec is None else known_format(dataset.where, dataset.file).key
        facts[key] = dataset.name
    if spec is not None and spec.slices:
        facts["slice"] = ", ".join(_slice_text(entry) for entry in spec.slices)
    facts["header_sha256"] = dataset.header
    if dataset.sources:
        identity = dataset.sources[0].identity
        modified = datetime.fromtimestamp(identity.modified_ns // 10**9, UTC)
        facts["bytes"] = identity.size
        facts["modified"] = modified.isoformat(timespec="seconds")
    return facts


def _slice_text(entry: SliceEntry) -> str:
    """Return what is selected along a dimension, as a job file writes it."""
    if isinstance(entry, int):
        return str(entry)
    start, stop, step = entry
    text = f"{'' if start is None else start}:{'' if stop is None else stop}"
    return text if step == 1 else f"{text}:{step}"
