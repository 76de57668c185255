"""Sums whose bits follow from the program alone: see graph/forms/summed_blocks.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Call, Const, Index, unique, unlike
from einmpi.kernels.contraction import Contraction, SummedBlocks, exact_contraction
from einmpi.kernels.cpu.broadcast import prepare_by_broadcasting
from einmpi.kernels.cpu.compiled import prepare_by_compiled_loops, supports_compiled_loops
from einmpi.kernels.cpu.prepared_products import prepare_by_blas
from einmpi.kernels.cpu.reproducible.products import is_like_tiles
from einmpi.kernels.cpu.scatter import Scatter, compute_scatter
from einmpi.kernels.operands import Array, Box, boxes, halve_step, part_of_array
from einmpi.kernels.prepared import NumpyCall, PreparedCall, bare_call

MOST_VALUES = 2**20  # that are computed before they are added
UNIT = 64  # rows and columns of a tile
SMALL_UNIT = 16  # where the whole program has few of them
MANY = 128


class BlockedSum:
    """A rounded sum on arrays, and the blocks that these have of its first aggregated label.

    The parameters are those of `prepare_einsum`.
    """

    def __init__(
        self,
        einsum: EinSum,
        operands: Sequence[Array],
        out: Array,
        index: Mapping[str, Array],
        threads: int,
    ) -> None:
        record = einsum.reproducible
        assert record is not None
        self.einsum = einsum
        self.operands = operands
        self.out = out
        self.index = index
        self.threads = threads
        self.extent = dict(record.extents)  # in the whole program
        self.count = record.blocks
        self.label = einsum.aggregated[0]
        own = index.get(self.label, np.arange(einsum.extent[self.label]))
        numbers = own * self.count // self.extent[self.label]
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        self.numbers = numbers[starts]
        self.starts: list[int] = starts.tolist()
        self.ends = (*self.starts[1:], len(numbers))
        self.combine = AGGREGATIONS[einsum.required_aggregation].combine

    def prepared(self, min_compiled: int, strict: bool) -> PreparedCall:
        """Return a product of matrices, or else compiled loops, or numpy's for few values.

        The whole program decides.
        """
        is_compiled = self.einsum.calls_in_program >= min_compiled
        if self.einsum.segments is not None:
            return self.scattered(is_compiled)
        dtypes = [array.dtype.name for array in self.operands]
        is_compiled = is_compiled and supports_compiled_loops(self.einsum, dtypes)
        contraction = exact_contraction(self.einsum, dtypes, strict)
        if contraction is not None:
            contraction = self.in_blocks(contraction, is_compiled)
        if contraction is not None:
            return prepare_by_blas(contraction, self.operands, self.out)
        return self.by_loops() if is_compiled else self.by_numpy()

    def in_blocks(self, contraction: Contraction, is_compiled: bool) -> Contraction | None:
        """Return a product of matrices with its blocks; None if it is computed otherwise.

        Compiled loops take less time for a product with a vector.
        """
        summed = self.einsum.aggregated
        left, right = set(contraction.indices[0]), set(contraction.indices[-2])
        lines = [prod(self.extent[label] for label in own) for own in (left - right, right - left)]
        is_vector = min(lines) == 1 and (is_compiled or max(lines) == 1)
        if is_vector or not left & right >= set(summed):
            return None
        rows, columns = (UNIT if count >= MANY else SMALL_UNIT for count in lines)
        length = -(-self.extent[self.label] // self.count)
        depth = length * prod(self.extent[label] for label in summed[1:])
        dtype = "float32" if DTYPES[self.out.dtype.name].is_half else self.out.dtype.name
        units = rows, columns
        for moved in (1, 0), (0, 1):
            if not is_like_tiles(dtype, units, depth, "CC", units, moved):
                return None
        blocks = SummedBlocks(summed, self.ends, length, units, self.threads)
        return replace(contraction, blocks=blocks)

    def part(self, box: Box) -> tuple[EinSum, list[Array], dict[str, Array]]:
        """Return the EinSum for some positions of labels, with its operands and their indices."""
        extent = self.einsum.extent
        index = dict(self.index)
        for label, own in box.items():
            index[label] = index.get(label, np.arange(extent[label]))[own]
            extent[label] = len(index[label])
        einsum = replace(self.einsum, extents=tuple(extent.items()))
        return einsum, self.views(self.operands, box), index

    def views(self, operands: Sequence[Array], box: Box) -> list[Array]:
        pairs = zip(operands, self.einsum.operands, strict=True)
        return [part_of_array(array, entries, box) for array, entries in pairs]

    def by_loops(self) -> PreparedCall:
        """Prepare compiled loops for each block."""
        target = np.empty(self.out.shape, self.out.dtype)
        calls = []
        for own in map(slice, self.starts, self.ends):
            box = {self.label: own}
            einsum, operands, index = self.part(box)
            call = prepare_by_compiled_loops(einsum, operands, target, index, self.threads)
            calls.append((box, bare_call(call)))

        def compute(operands: Sequence[Array], out: Array) -> None:
            branches: list[Array] = []  # complete ones
            for number, (box, call) in enumerate(calls):
                branch = np.empty(out.shape, out.dtype)
                call(self.views(operands, box), branch)
                while number & 1:
                    branch = self.combine(branches.pop(), branch)
                    number >>= 1
                branches.append(branch)
            out[...] = branches[0]

        return NumpyCall(compute)

    def by_numpy(self) -> PreparedCall:
        """Prepare to compute the values of some results, and to add them as numpy adds a line."""
        dtype = DTYPES[self.out.dtype.name].accumulator
        extent = self.einsum.extent
        length = prod(extent[label] for label in self.einsum.aggregated)
        starts = np.array(self.starts) * (length // extent[self.label])
        steps = {label: extent[label] for label in self.einsum.output}
        for label in self.einsum.output:
            halve_step(steps, label, MOST_VALUES // length)
        calls = []
        for box in boxes(extent, steps):
            einsum, operands, index = self.part(box)
            values_of = replace(einsum, output=einsum.labels, aggregation=None, aggregated=())
            values = np.empty(values_of.bound, dtype)
            call = prepare_by_broadcasting(values_of, operands, values, index)
            calls.append((box, values.shape, bare_call(call)))

        def compute(operands: Sequence[Array], out: Array) -> None:
            for box, shape, call in calls:
                values = np.empty(shape, dtype)
                call(self.views(operands, box), values)
                totals = self.combine.reduceat(values.reshape(-1, length), starts, axis=1)
                target = part_of_array(out, self.einsum.output, box)
                added = self.added(totals.T.astype(out.dtype, copy=False))
                target[...] = added.reshape(target.shape)

        return NumpyCall(compute)

    def added(self, branches: Any) -> Any:
        """Return the branches of a tree, as many as a power of two, added in pairs."""
        while len(branches) > 1:
            branches = self.combine(branches[::2], branches[1::2])
        return branches[0]

    def scattered(self, is_compiled: bool) -> PreparedCall:
        """Prepare to scatter each value to the total of its place and its block.

        Where ranks have the values of their own places, blocks may be no branch of the tree: those
        that are missing are zeros.
        """
        bits = int(self.numbers[0] ^ self.numbers[-1]).bit_length()
        numbers = (self.numbers[0] >> bits << bits) + np.arange(2**bits)
        block = unlike("block", self.einsum.labels)
        number = Call("*", (Index(self.label), Const(self.count)))
        known = self.einsum.required_segments
        segments = replace(
            known,
            labels=(block, *known.labels),
            indices=(Call("//", (number, Const(self.extent[self.label]))), *known.indices),
            index_labels=unique(known.index_labels, (self.label,)),
        )
        einsum = replace(
            self.einsum,
            output=(block, *self.einsum.output),
            extents=((block, len(numbers)), *self.einsum.extents),
        )
        index = {**self.index, block: numbers}
        least = 0 if is_compiled else einsum.calls() + 1

        def scatter(operands: Sequence[Array], out: Array) -> None:
            totals = np.empty((len(numbers), *out.shape), out.dtype)
            scattering = Scatter(einsum, segments, tuple(operands), index)
            compute_scatter(scattering, totals, self.threads, least)
            with np.errstate(all="ignore"):
                out[...] = self.added(totals)

        return scatter
