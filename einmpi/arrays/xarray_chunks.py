"""DistArrays as the chunked arrays of xarray, which finds this module by an entry point.

Where xarray asks for chunks, they are the pieces that the ranks have. Nothing is computed later:
every call computes at once, on all ranks, which make the same calls. Options that are not named
here are for Dask.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
from xarray.namedarray.parallelcompat import ChunkManagerEntrypoint

from einmpi.arrays.creation import block_of, filled_by_blocks, layout_for
from einmpi.arrays.dist_array import DistArray
from einmpi.arrays.moving import common_comm
from einmpi.comm.agreement import comm_of_program, together
from einmpi.comm.base import Comm
from einmpi.errors import InputError
from einmpi.graph.dtypes import DTYPES, dtype_name
from einmpi.schedule.layout import Layout
from einmpi.schedule.regions import boxes, packed

Labels: TypeAlias = tuple[Hashable, ...]  # the names of dimensions
Operand: TypeAlias = tuple[Any, Labels]
_WHOLE = -1  # as a chunk: the dimension is not cut


class DistArrayManager(ChunkManagerEntrypoint):  # type: ignore[misc]
    """What xarray does with chunked arrays, for DistArrays."""

    def __init__(self) -> None:
        self.array_cls = DistArray

    # ---- making them ----------------------------------------------------------------------------

    def chunks(self, data: DistArray) -> Any:
        """Return the lengths of the pieces of each dimension."""
        return data.chunks

    def normalize_chunks(self, chunks: Any, shape: Sequence[int], **options: Any) -> Any:
        """Return the lengths of all chunks of each dimension, as they are asked for."""
        found = []
        for extent, chunk in zip(shape, _chunk_of_each(chunks, shape), strict=True):
            if isinstance(chunk, tuple):
                lengths = chunk
            elif isinstance(chunk, int) and 0 < chunk < extent:
                starts = range(0, extent, chunk)
                lengths = tuple(min(chunk, extent - start) for start in starts)
            else:  # "auto", None, all of it
                lengths = (extent,)
            found.append(lengths)
        return tuple(found)

    def from_array(self, data: Any, chunks: Any, comm: Any = None, **options: Any) -> Any:
        """Distribute an array, of which each rank reads or computes its own block.

        Elements that are no numbers, such as dates, stay in an array of numpy.
        """
        dtype = np.dtype(data.dtype).newbyteorder("=")
        if dtype_name(dtype) not in DTYPES:
            return np.asarray(data)

        def fill(local: Any, region: Any) -> None:
            for there, here in boxes(region, packed(region)):
                local[here] = data[there]

        layout = self._layout(comm_of_program(comm), data.shape, chunks)
        return filled_by_blocks(DistArray, data.shape, dtype, comm, layout, fill)

    def rechunk(self, data: DistArray, chunks: Any, **options: Any) -> DistArray:
        """Move a tensor to the layout that the chunks ask for."""
        return data._in_layout(self._layout(data.own_comm, data.shape, chunks))

    def _layout(self, comm: Comm, bound: tuple[int, ...], chunks: Any) -> Layout:
        """Return a layout that cuts the dimensions that are to have several chunks.

        How many pieces they have is a matter of the ranks, unless there are as many chunks as
        ranks. If there is no such dimension, others are cut, but none that has to stay whole.
        """
        counts = [len(lengths) for lengths in self.normalize_chunks(chunks, bound)]
        if prod(counts) == comm.size > 1:
            try:
                return layout_for(comm, bound, counts)
            except InputError:  # there are no pieces of these numbers
                pass
        may_be_cut = [count > 1 for count in counts]
        if not any(may_be_cut):
            may_be_cut = [chunk != _WHOLE for chunk in _chunk_of_each(chunks, bound)]
        return _cut_some(comm, bound, may_be_cut)

    @property
    def array_api(self) -> Any:
        """The namespace from which xarray takes functions that make arrays."""

        def full(shape: Any, value: Any, dtype: Any, chunks: Any, **options: Any) -> Any:
            whole = np.broadcast_to(np.asarray(value, dtype), shape)
            return self.from_array(whole, chunks, **options)

        return SimpleNamespace(full=full)

    # ---- their elements -------------------------------------------------------------------------

    def compute(self, *data: DistArray, **options: Any) -> Any:
        """Return arrays of numpy; `gather_up_to` has to allow it for tensors that are cut."""
        return [np.array(each.host if each.is_on_all_ranks() else each) for each in data]

    def persist(self, *data: Any, **options: Any) -> Any:
        """Return the tensors, which are in memory already."""
        return data

    def store(self, *data: Any, **options: Any) -> None:
        """Refuse to write: the ranks would all create the same file."""
        raise NotImplementedError("one rank writes what compute() returns, or DistArray.to_zarr()")

    # ---- functions of blocks --------------------------------------------------------------------

    def apply_gufunc(
        self,
        func: Callable[..., Any],
        signature: str,
        *args: Any,
        output_dtypes: Any = None,
        vectorize: bool = False,
        **options: Any,
    ) -> Any:
        """Apply a function to blocks in which the dimensions of its signature are whole."""
        inputs, outputs = map(_parsed, signature.split("->"))
        if vectorize:
            func = np.vectorize(func, output_dtypes, signature=signature)
        counts = [np.ndim(arg) - len(core) for arg, core in zip(args, inputs, strict=True)]
        loops = [tuple(range(-count, 0)) for count in counts]  # of broadcast dimensions
        operands = [(args[place], loops[place] + core) for place, core in enumerate(inputs)]
        results = [max(loops, key=len) + core for core in outputs]
        found = _on_blocks(func, operands, results, set().union(*inputs))
        for place, dtype in enumerate(output_dtypes or ()):
            found[place] = found[place]._in_dtype(dtype or found[place].dtype)
        return tuple(found) if len(outputs) > 1 else found[0]

    def map_blocks(
        self, func: Callable[..., Any], *args: Any, dtype: Any = None, **options: Any
    ) -> Any:
        """Apply a function of elements to blocks of the same indices."""
        signature = ",".join(["()"] * len(args)) + "->()"
        return self.apply_gufunc(partial(func, **options), signature, *args, output_dtypes=[dtype])

    def reduction(
        self,
        arr: DistArray,
        func: Callable[..., Any],
        aggregate_func: Callable[..., Any],
        axis: int,
        **options: Any,
    ) -> DistArray:
        """Reduce a dimension by a function of chunks and another one of its results."""

        def reduce(block: Any) -> Any:
            return aggregate_func(func(block, axis=axis, keepdims=True), axis=axis, keepdims=False)

        places = tuple(range(arr.ndim))
        kept = places[:axis] + places[axis + 1 :]
        return _on_blocks(reduce, [(arr, places)], [kept], [axis])[0]

    def unify_chunks(self, *args: Any, **options: Any) -> Any:
        """Return tensors that are cut alike in the dimensions that they share."""
        operands = list(zip(args[::2], args[1::2], strict=True))
        alignment = _Alignment(operands, ())
        return {}, [alignment.moved(*operand) for operand in operands]


# ---- blocks of tensors with named dimensions ----------------------------------------------------


def _chunk_of_each(chunks: Any, shape: Sequence[int]) -> list[Any]:
    """Return what is asked for in each dimension; None where nothing is."""
    if isinstance(chunks, Mapping):
        return [chunks.get(dimension) for dimension in range(len(shape))]
    return list(chunks) if isinstance(chunks, tuple | list) else [chunks] * len(shape)


def _cut_some(comm: Comm, bound: Sequence[int], may_be_cut: Sequence[bool]) -> Layout:
    """Return a layout that cuts only some dimensions."""
    lengths = [extent if may else 1 for extent, may in zip(bound, may_be_cut, strict=True)]
    layout = layout_for(comm, tuple(lengths))
    return Layout(layout.mesh, tuple(bound), layout.cuts)


class _Alignment:
    """Tensors with named dimensions that are cut alike, over all ranks, but not in `whole` ones.

    The largest tensor stays where it is, if it can. Dimensions of extent 1 are broadcast.
    """

    def __init__(self, operands: Sequence[Operand], whole: Collection[Hashable]) -> None:
        tensors = [operand for operand in operands if isinstance(operand[0], DistArray)]
        self.comm = common_comm("xarray", [array for array, _ in tensors])
        self.extents: dict[Hashable, int] = {}
        for array, labels in operands:
            for label, extent in zip(labels, np.shape(array), strict=True):
                if self.extents.get(label, 1) == 1:
                    self.extents[label] = extent
        largest, names = max(tensors, key=lambda operand: operand[0].size)
        layout = largest.layout
        if layout.mesh.ranks < self.comm.size or any(
            cut is not None and names[cut] in whole for cut in layout.cuts
        ):
            names = tuple(self.extents)
            may_be_cut = [name not in whole for name in names]
            layout = _cut_some(self.comm, tuple(self.extents.values()), may_be_cut)
        self.mesh = layout.mesh
        # For each axis of the mesh, the dimension that it cuts.
        self.cut = [None if cut is None else names[cut] for cut in layout.cuts]

    def layout(self, labels: Labels, shape: Sequence[int]) -> Layout:
        """Return the layout of a tensor; dimensions that are broadcast are not cut."""
        places: dict[Hashable, int] = {}
        for place, label in enumerate(labels):
            if shape[place] == self.extents.get(label):
                places[label] = place
        return Layout(self.mesh, tuple(shape), tuple(places.get(label) for label in self.cut))

    def moved(self, array: DistArray, labels: Labels) -> DistArray:
        """Return a tensor that is cut like the others."""
        return array._in_layout(self.layout(labels, array.shape))

    def block(self, array: Any, labels: Labels) -> Any:
        """Return this rank's part of an operand."""
        if isinstance(array, DistArray):
            return self.moved(array, labels).host
        region = self.layout(labels, np.shape(array)).block(self.comm.rank)
        return block_of(array, region or (), array.dtype) if labels else array

    def joined(self, block: Any, labels: Labels) -> DistArray:
        """Return a result of which this rank has a block."""
        shape = list(block.shape)
        for place, label in enumerate(labels):
            if label in self.cut:
                shape[place] = self.extents[label]
        return DistArray(block, self.layout(labels, shape), self.comm)


def _on_blocks(
    function: Callable[..., Any],
    operands: Sequence[Operand],
    results: Sequence[Labels],
    whole: Collection[Hashable],
) -> list[DistArray]:
    """Apply a function to blocks of the same indices, which are not cut in some dimensions."""
    alignment = _Alignment(operands, whole)
    blocks = [alignment.block(*operand) for operand in operands]

    def compute() -> list[Any]:
        found = function(*blocks)
        return list(map(np.asarray, found if len(results) > 1 else [found]))

    def fingerprint(found: Sequence[Any]) -> str:
        return " ".join(f"{each.dtype} {each.ndim}" for each in found)

    found = together(alignment.comm, compute, fingerprint)
    return [alignment.joined(*pair) for pair in zip(found, results, strict=True)]


def _parsed(signature: str) -> list[Labels]:
    """Return the dimensions in each pair of brackets of a signature such as (i,j),(j)."""
    return [tuple(re.findall(r"\w+", group)) for group in re.findall(r"\(.*?\)", signature)]
