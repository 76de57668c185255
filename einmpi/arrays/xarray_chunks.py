"""DistArrays as the chunked arrays of xarray, which finds this module by an entry point.

Where xarray asks for chunks, they are the pieces that the ranks have. Nothing is computed later:
every call computes at once, on all ranks, which make the same calls. Options that are not named
here are for Dask.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
from xarray.namedarray.parallelcompat import ChunkManagerEntrypoint

from einmpi.arrays.creation import filled_by_blocks, layout_for
from einmpi.arrays.dist_array import DistArray, call
from einmpi.arrays.elementwise import needed_block
from einmpi.arrays.moving import common_comm, with_other_dimensions
from einmpi.comm.agreement import comm_of_program, together
from einmpi.comm.base import Comm
from einmpi.errors import InputError
from einmpi.graph.dtypes import DTYPES, dtype_name
from einmpi.runtime.gpu.copies import on_host
from einmpi.schedule.layout import Layout
from einmpi.schedule.regions import boxes, packed

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
        lengths = [extent if may else 1 for extent, may in zip(bound, may_be_cut, strict=True)]
        layout = layout_for(comm, tuple(lengths))
        return replace(layout, bound=bound)

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
        return list(map(np.array, data))

    def persist(self, *data: Any, **options: Any) -> Any:
        """Return the tensors, which are in memory already."""
        return data

    def store(self, *data: Any, **options: Any) -> None:
        """Refuse to write: the ranks would all create the same file."""
        allowed = "one rank that writes what compute() returns, or DistArray.to_zarr()"
        raise InputError("xarray", "all ranks would create the same file", allowed)

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
        """Apply a function to blocks, which are whole in the dimensions of its signature.

        These are the last ones. All other dimensions are broadcast, and may be cut.
        """
        inputs, outputs = map(_counts_of_dimensions, signature.split("->"))
        if vectorize:
            func = np.vectorize(func, output_dtypes, signature=signature)
        layout, comm = _layout_of_loops(args, inputs)
        blocks = [_block(*pair, layout, comm) for pair in zip(args, inputs, strict=True)]

        def compute() -> list[Any]:
            found = func(*blocks)
            return list(map(np.asarray, found if len(outputs) > 1 else [found]))

        results = []
        for place, block in enumerate(together(comm, compute)):
            if output_dtypes and output_dtypes[place] is not None:
                block = block.astype(output_dtypes[place])
            bound = layout.bound + block.shape[len(layout.bound) :]
            results.append(DistArray(block, replace(layout, bound=bound), comm))
        return tuple(results) if len(outputs) > 1 else results[0]

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
    ) -> Any:
        """Reduce a dimension by a function of chunks and another one of its results."""

        def reduce(block: Any) -> Any:
            return aggregate_func(func(block, axis=-1, keepdims=True), axis=-1, keepdims=False)

        return self.apply_gufunc(reduce, "(i)->()", call(np.moveaxis, arr, axis, -1))


# ---- layouts and blocks -------------------------------------------------------------------------


def _chunk_of_each(chunks: Any, shape: Sequence[int]) -> list[Any]:
    """Return what is asked for in each dimension; None where nothing is."""
    if isinstance(chunks, Mapping):
        return [chunks.get(dimension) for dimension in range(len(shape))]
    return list(chunks) if isinstance(chunks, tuple | list) else [chunks] * len(shape)


def _layout_of_loops(args: Sequence[Any], core: Sequence[int]) -> tuple[Layout, Comm]:
    """Return a layout for all but the last dimensions of some operands, and their ranks.

    The largest tensor stays where it is, if that cuts no other dimensions.
    """
    pairs = list(zip(args, core, strict=True))
    bound = np.broadcast_shapes(*[np.shape(arg)[: np.ndim(arg) - count] for arg, count in pairs])
    tensors = [pair for pair in pairs if isinstance(pair[0], DistArray)]
    comm = common_comm("xarray", [array for array, _ in tensors])
    largest, count = max(tensors, key=lambda pair: pair[0].size)
    loops = largest.ndim - count
    layout = largest.layout
    cuts_others = any(cut is not None and cut >= loops for cut in layout.cuts)
    if cuts_others or layout.mesh.ranks < comm.size:
        return layout_for(comm, bound), comm
    return with_other_dimensions(layout, bound, lambda cut: cut + len(bound) - loops), comm


def _block(arg: Any, core: int, loops: Layout, comm: Comm) -> Any:
    """Return what an operand has in this rank's block of a layout of its first dimensions."""
    last = range(-core, 0)
    in_front = np.moveaxis(arg, last, range(core))  # so that the others are broadcast
    return np.moveaxis(on_host(needed_block(in_front, loops, comm)), range(core), last)


def _counts_of_dimensions(signature: str) -> list[int]:
    """Return how many names are in each pair of brackets of a signature such as (i,j),(j)."""
    return [len(re.findall(r"\w+", group)) for group in re.findall(r"\(.*?\)", signature)]
