"""DistArrays as the chunked arrays of xarray, which finds this module by an entry point.

Where xarray asks for chunks, they are the pieces that the ranks have. Nothing is computed later:
every call computes at once, on all ranks, which make the same calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import Any, TypeAlias

import numpy as np
from xarray.namedarray.parallelcompat import ChunkManagerEntrypoint

from einmpi.arrays.creation import block_of, filled_by_blocks, layout_for
from einmpi.arrays.dist_array import DistArray
from einmpi.arrays.elementwise import common_comm
from einmpi.comm.agreement import comm_of_program, together
from einmpi.comm.base import Comm
from einmpi.errors import InputError
from einmpi.graph.dtypes import DTYPES, dtype_name
from einmpi.schedule.layout import Layout
from einmpi.schedule.regions import boxes, packed

Chunks: TypeAlias = tuple[tuple[int, ...], ...]
Labels: TypeAlias = tuple[Hashable, ...]  # the names of dimensions
_WHOLE = -1  # as a chunk: the dimension is not cut


class DistArrayManager(ChunkManagerEntrypoint):  # the one named "einmpi"
    """What xarray does with chunked arrays, for DistArrays."""

    def __init__(self) -> None:
        self.array_cls = DistArray

    # ---- making them ----------------------------------------------------------------------------

    def chunks(self, data: DistArray) -> Chunks:
        """Return the lengths of the pieces of each dimension."""
        return data.chunks

    def normalize_chunks(
        self,
        chunks: Any,
        shape: Sequence[int] = (),
        limit: Any = None,
        dtype: Any = None,
        previous_chunks: Any = None,
    ) -> Chunks:
        """Return the lengths of all chunks of each dimension, as they are asked for."""
        found = []
        for extent, chunk in zip(shape, _chunk_of_each(chunks, shape), strict=True):
            if isinstance(chunk, Sequence) and not isinstance(chunk, str):
                lengths = tuple(chunk)
            elif isinstance(chunk, int | np.integer) and 0 < chunk < extent:
                rest = extent % chunk
                lengths = (int(chunk),) * (extent // chunk) + ((rest,) if rest else ())
            else:  # "auto", None, all of it
                lengths = (extent,)
            found.append(lengths)
        return tuple(found)

    def from_array(self, data: Any, chunks: Any, comm: Any = None, **options: Any) -> Any:
        """Distribute an array, of which each rank reads or computes its own block.

        Elements that are no numbers, such as dates, stay in an array of numpy. Options of Dask are
        left out.
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

    def _layout(self, comm: Comm, shape: Sequence[int], chunks: Any) -> Layout:
        """Return a layout that cuts the dimensions that are to have several chunks.

        How many pieces they have is a matter of the ranks, unless there are as many chunks as
        ranks. If there is no such dimension, others are cut, but none that has to stay whole.
        """
        bound = tuple(shape)
        counts = [len(lengths) for lengths in self.normalize_chunks(chunks, bound)]
        if prod(counts) == comm.size:
            try:
                return layout_for(comm, bound, counts)
            except InputError:  # pieces of these numbers are not possible
                pass
        if prod(counts) > 1:
            may_be_cut = [count > 1 for count in counts]
        else:
            may_be_cut = [chunk != _WHOLE for chunk in _chunk_of_each(chunks, bound)]
        return _cut_some(comm, bound, may_be_cut)

    @property
    def array_api(self) -> Any:
        """The namespace from which xarray takes functions."""
        return _Namespace()

    # ---- their elements -------------------------------------------------------------------------

    def compute(self, *data: Any, **options: Any) -> tuple[Any, ...]:
        """Return arrays of numpy; `gather_up_to` has to allow it for tensors that are cut."""
        found = []
        for each in data:
            if isinstance(each, DistArray):
                each = np.array(each.host if each.is_on_all_ranks() else each)
            found.append(each)
        return tuple(found)

    def persist(self, *data: Any, **options: Any) -> tuple[Any, ...]:
        """Return the tensors, which are in memory already."""
        return data

    def store(self, sources: Any, targets: Any, regions: Any = None, **options: Any) -> None:
        """Write tensors into arrays that exist, one rank after the other.

        Ranks that write at the same time could write into the same chunk of a file.
        """
        for number, source in enumerate(sources):
            region = regions[number] if regions else None
            write = partial(_write, source, targets[number], region)
            for rank in range(source.own_comm.size):
                is_next = rank == source.own_comm.rank and source.layout.owns(rank)
                together(source.own_comm, write if is_next else str)

    # ---- functions of blocks --------------------------------------------------------------------

    def apply_gufunc(
        self,
        func: Callable[..., Any],
        signature: str,
        *args: Any,
        output_dtypes: Sequence[Any] | None = None,
        vectorize: bool = False,
        output_sizes: Any = None,
        allow_rechunk: Any = None,
        meta: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Apply a function to blocks in which the dimensions of its signature are whole."""
        inputs, outputs = (_parsed(side) for side in signature.split("->"))
        if vectorize:
            func = np.vectorize(func, otypes=output_dtypes, signature=signature)
        operands = []
        most_loops = 0
        for arg, core in zip(args, inputs, strict=True):
            loops = np.ndim(arg) - len(core)
            most_loops = max(most_loops, loops)
            operands.append((arg, (*range(-loops, 0), *core)))
        results = [(*range(-most_loops, 0), *core) for core in outputs]
        found = _on_blocks(lambda *blocks: func(*blocks, **kwargs), operands, results)
        if output_dtypes is not None:
            pairs = zip(found, output_dtypes, strict=True)
            found = [array if dtype is None else array._in_dtype(dtype) for array, dtype in pairs]
        return tuple(found) if len(outputs) > 1 else found[0]

    def map_blocks(
        self, func: Callable[..., Any], *args: Any, dtype: Any = None, **kwargs: Any
    ) -> Any:
        """Apply a function to blocks of the same indices, which it does not change in shape."""
        signature = ",".join(["()"] * len(args)) + "->()"
        return self.apply_gufunc(func, signature, *args, output_dtypes=[dtype], **kwargs)

    def reduction(
        self,
        arr: DistArray,
        func: Callable[..., Any],
        combine_func: Any = None,
        aggregate_func: Any = None,
        axis: Any = None,
        dtype: Any = None,
        keepdims: bool = False,
    ) -> DistArray:
        """Reduce dimensions, which are whole on every rank then."""
        places = tuple(range(arr.ndim))
        axes = places if axis is None else tuple(np.atleast_1d(axis) % arr.ndim)
        kept: list[Hashable] = []
        for place in places:
            if place not in axes:
                kept.append(place)
            elif keepdims:
                kept.append("reduced")

        def reduce(block: Any) -> Any:
            reduced = func(block, axis=axis, keepdims=True)
            return (aggregate_func or func)(reduced, axis=axis, keepdims=keepdims)

        return _on_blocks(reduce, [(arr, places)], [tuple(kept)])[0]

    def unify_chunks(self, *args: Any, **kwargs: Any) -> tuple[dict[Any, Any], list[Any]]:
        """Return tensors that are cut alike in the dimensions that they share."""
        operands = list(zip(args[::2], map(tuple, args[1::2]), strict=True))
        alignment = _Alignment(operands)
        arrays = []
        chunks: dict[Any, Any] = {}
        for array, labels in operands:
            arrays.append(alignment.moved(array, labels))
            chunks |= zip(labels, arrays[-1].chunks, strict=True)
        return chunks, arrays

    def shuffle(self, x: DistArray, indexer: Any, axis: int, chunks: Any) -> DistArray:
        """Return the elements in the order of lists of indices along a dimension."""
        return np.take(x, list(chain.from_iterable(indexer)), axis=axis)


class _Namespace:
    """The functions of numpy, which take DistArrays, and those that make new ones."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def full(
        self, shape: Any, fill_value: Any, dtype: Any = None, chunks: Any = None, comm: Any = None
    ) -> Any:
        """Make a tensor of equal elements."""
        whole = np.broadcast_to(np.asarray(fill_value, dtype), shape)
        return DistArrayManager().from_array(whole, chunks, comm)


# ---- blocks of tensors with named dimensions ----------------------------------------------------


def _chunk_of_each(chunks: Any, shape: Sequence[int]) -> list[Any]:
    """Return what is asked for in each dimension; None where nothing is."""
    if isinstance(chunks, Mapping):
        return [chunks.get(dimension) for dimension in range(len(shape))]
    if isinstance(chunks, Sequence) and not isinstance(chunks, str):
        return list(chunks)
    return [chunks] * len(shape)


def _cut_some(comm: Comm, bound: Sequence[int], may_be_cut: Sequence[bool]) -> Layout:
    """Return a layout that cuts only some dimensions."""
    lengths = [extent if may else 1 for extent, may in zip(bound, may_be_cut, strict=True)]
    layout = layout_for(comm, tuple(lengths))
    return Layout(layout.mesh, tuple(bound), layout.cuts)


class _Alignment:
    """Tensors with named dimensions that are cut alike, over all ranks, but not in `whole` ones.

    The largest tensor stays where it is, if it can. Dimensions of extent 1 are broadcast.
    """

    def __init__(
        self, operands: Sequence[tuple[Any, Labels]], whole: Collection[Hashable] = ()
    ) -> None:
        tensors = [pair for pair in operands if isinstance(pair[0], DistArray)]
        self.comm = common_comm("xarray", [array for array, _ in tensors])
        self.extents: dict[Hashable, int] = {}
        for array, labels in operands:
            for label, extent in zip(labels, np.shape(array), strict=True):
                if self.extents.get(label, 1) == 1:
                    self.extents[label] = extent
        self.names = tuple(self.extents)
        largest, labels = max(tensors, key=lambda pair: pair[0].size)
        self.cut = [None if cut is None else labels[cut] for cut in largest.layout.cuts]
        self.mesh = largest.layout.mesh
        if self.mesh.ranks < self.comm.size or not {*self.cut}.isdisjoint(whole):
            may_be_cut = [name not in whole for name in self.extents]
            layout = _cut_some(self.comm, tuple(self.extents.values()), may_be_cut)
            self.mesh = layout.mesh
            self.cut = [None if cut is None else self.names[cut] for cut in layout.cuts]

    def layout(self, labels: Labels, shape: Sequence[int]) -> Layout:
        """Return the layout of a tensor; dimensions that are broadcast are not cut."""
        places: dict[Any, int] = {}
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
        if not labels:
            return array
        region = self.layout(labels, array.shape).block(self.comm.rank)
        return block_of(array, region, array.dtype)

    def joined(self, block: Any, labels: Labels) -> DistArray:
        """Return a result of which this rank has a block."""
        extents = []
        for label, extent in zip(labels, block.shape, strict=True):
            extents.append(self.extents[label] if label in self.cut else extent)
        return DistArray(block, self.layout(labels, extents), self.comm)


def _on_blocks(
    function: Callable[..., Any],
    operands: Sequence[tuple[Any, Labels]],
    results: Sequence[Labels],
) -> list[DistArray]:
    """Apply a function to blocks of the same indices. Dimensions that a result lacks are whole."""
    names = {label for _, labels in operands for label in labels}
    missing = {name for name in names for labels in results if name not in labels}
    alignment = _Alignment(operands, missing)
    blocks = [alignment.block(*operand) for operand in operands]

    def compute() -> list[Any]:
        found = function(*blocks)
        return [np.asarray(each) for each in (found if len(results) > 1 else [found])]

    def fingerprint(found: list[Any]) -> str:
        return " ".join(f"{each.dtype}{each.ndim}" for each in found)

    found = together(alignment.comm, compute, fingerprint)
    return [alignment.joined(*pair) for pair in zip(found, results, strict=True)]


def _parsed(signature: str) -> list[Labels]:
    """Return the dimensions in each pair of brackets of a signature such as (i,j),(j)."""
    groups = re.findall(r"\(([^)]*)\)", signature)
    return [tuple(name.strip() for name in group.split(",") if name.strip()) for group in groups]


def _write(source: DistArray, target: Any, region: Sequence[slice] | None) -> None:
    """Write this rank's block into an array, or into a region of it."""
    own = source.region
    assert own is not None
    starts = [part.start or 0 for part in region or [slice(0)] * source.ndim]
    for there, here in boxes(own, packed(own)):
        moved = []
        for start, part in zip(starts, there, strict=True):
            moved.append(slice(start + part.start, start + part.stop))
        target[tuple(moved)] = source.host[here]
