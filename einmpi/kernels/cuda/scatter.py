"""Scattered results on a GPU: values are sorted by their places, and each result folds its run.

The sort is stable and no value is added by an atomic operation, so the bits are always the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from einmpi.graph.einsum import EinSum, make_einsum, reopen
from einmpi.graph.scalar import Call, Const, Element, Index, Scalar, rebuild
from einmpi.kernels.cuda import driver
from einmpi.kernels.cuda.driver import DeviceArray
from einmpi.kernels.cuda.nest import WorkSplit
from einmpi.kernels.cuda.problem import Problem
from einmpi.kernels.cuda.work_split import split_runs
from einmpi.kernels.scalar_text import kind_of
from einmpi.schedule.regions import Runs, indices

SORTED_LABEL = "values, sorted"  # no label of a program can look like this
POSITION = "position of "  # of an aggregated label, for each of the sorted values
NUMBER = "number of "  # the index that the position stands for


class SortedScatter:
    """A scattered EinSum as three steps, prepared for all arrays of these dtypes.

    1. `index_einsums` compute where each value goes: an EinSum for each scattered label, with the
       numbers of the operands that it reads.
    2. `fold_operands` sorts the values by their places.
    3. `fold_einsum` aggregates the sorted values, with `split` to share its work. Labels that
       indices depend on and that are aggregated have become a single one.
    """

    def __init__(
        self,
        einsum: EinSum,
        dtypes: Sequence[str],
        index: Mapping[str, Runs],
    ) -> None:
        self.einsum = einsum
        self.segments = segments = einsum.required_segments
        self.index = index
        self.aggregated = [x for x in segments.index_labels if x in einsum.aggregated]
        self.kept = [x for x in segments.index_labels if x not in einsum.aggregated]
        self.extent = einsum.extent
        self.values = prod(self.extent[label] for label in self.aggregated)
        self.places = (*segments.labels, *self.kept)
        self.shape = [self.extent[label] for label in self.places]
        self.index_runs = self._runs_of(segments.index_labels)
        self._prepare_indices(dtypes)
        self._prepare_fold(dtypes)

    def _runs_of(self, labels: Sequence[str]) -> tuple[tuple[str, Runs], ...]:
        return tuple((label, self.index[label]) for label in labels if label in self.index)

    def _elements(self, function: Scalar) -> Scalar:
        """Return an expression with its operands as Elements, whose names are their numbers."""
        names = [str(number) for number in range(len(self.einsum.operands))]
        operands = self.segments.operands
        einsum = EinSum(self.einsum.output, operands, function, None, (), self.einsum.extents)
        return reopen(einsum, names)

    def _prepare_indices(self, dtypes: Sequence[str]) -> None:
        self.index_einsums: list[tuple[EinSum, list[int]]] = []
        for index in self.segments.indices:
            whole: Scalar = Call("int64", (index,))
            if np.dtype(kind_of(index, dtypes)).kind not in "biu":
                # A number with a fraction is no index.
                whole = Call("where", (Call("==", (index, whole)), whole, Const(-1)))
            expression = self._elements(whole)
            labels = self.segments.index_labels
            einsum, names = make_einsum(labels, expression, None, (), self.extent)
            self.index_einsums.append((einsum, [int(name) for name in names]))

    def _prepare_fold(self, dtypes: Sequence[str]) -> None:
        body = self.segments.body
        dtype = np.dtype(kind_of(self.einsum.function, dtypes)).name
        if np.dtype(kind_of(body, dtypes)).name != dtype:
            body = Call(dtype, (body,))
        expression = self._sorted(self._elements(body))
        others = [x for x in self.einsum.aggregated if x not in self.aggregated]
        # A label of extent 1 would be no loop.
        count = prod(self.extent[label] for label in self.segments.index_labels)
        extent = {**self.extent, SORTED_LABEL: max(2, count)}
        einsum, names = make_einsum(
            self.einsum.output,
            expression,
            self.einsum.aggregation,
            (SORTED_LABEL, *others),
            extent,
        )
        self.fold_names = names
        self.runs_operand = len(names) + 1
        operands = (*einsum.operands, (SORTED_LABEL,), self.places, self.places)
        self.fold_einsum = replace(einsum, operands=operands)
        self.fold_runs = self._runs_of([*self.einsum.output, *others])

    def _sorted(self, node: Scalar) -> Scalar:
        """Return an expression that finds the positions of aggregated labels in arrays."""

        def leaf(part: Scalar) -> Scalar:
            if isinstance(part, Index) and part.label in self.aggregated:
                return Element(NUMBER + part.label, (SORTED_LABEL,))
            if not isinstance(part, Element):
                return part
            entries: list[str | Scalar] = []
            for entry in part.index:
                if not isinstance(entry, str):
                    entries.append(self._sorted(entry))
                elif entry in self.aggregated:
                    entries.append(Element(POSITION + entry, (SORTED_LABEL,)))
                else:
                    entries.append(entry)
            return Element(part.tensor, tuple(entries))

        return rebuild(node, leaf)

    def split(self, problem: Problem) -> WorkSplit:
        """Share the work of the fold among threads."""
        return split_runs(problem, self.runs_operand, self.segments.masked, self.values)

    def fold_operands(
        self, operands: Sequence[DeviceArray], wanted: Sequence[DeviceArray]
    ) -> list[DeviceArray]:
        """Return the operands of the fold, given the index to which each value goes."""
        cupy = driver.cupy()
        cells = self._cells(wanted)
        order = cupy.argsort(cells)
        stops = cupy.searchsorted(cells[order], cupy.arange(prod(self.shape) + 1))
        if order.size < 2:
            order = cupy.zeros(2, np.int64)
        arrays: dict[str, DeviceArray] = {}
        step = 1
        for label in reversed(self.segments.index_labels):
            extent = self.extent[label]
            position = order // step % extent
            step *= extent
            arrays[POSITION + label] = position
            number = position
            if label in self.index:
                number = cupy.asarray(indices(self.index[label]))[position]
            arrays[NUMBER + label] = number
        found = []
        for name in self.fold_names:
            found.append(arrays[name] if name in arrays else operands[int(name)])
        return [*found, order, stops[:-1].reshape(self.shape), stops[1:].reshape(self.shape)]

    def _cells(self, wanted: Sequence[DeviceArray]) -> DeviceArray:
        """Return for each value the number of its place, which also tells the kept labels.

        Values that go nowhere have the number after the last place.
        """
        cupy = driver.cupy()
        labels = self.segments.index_labels
        cells: Any = 0
        is_inside: Any = True
        for label, index in zip(self.segments.labels, wanted, strict=True):
            place, is_here = self._local_places(label, index)
            cells = cells * self.extent[label] + place
            is_inside = is_inside & is_here
        for label in self.kept:
            along = [1] * len(labels)
            along[labels.index(label)] = -1
            cells = cells * self.extent[label] + cupy.arange(self.extent[label]).reshape(along)
        return cupy.where(is_inside, cells, prod(self.shape)).reshape(-1)

    def _local_places(self, label: str, index: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
        """Return positions for indices of a label, and which of these are a position's at all."""
        cupy = driver.cupy()
        extent = self.extent[label]
        runs = self.index.get(label, ((0, extent),))
        if len(runs) == 1:
            first = runs[0][0]
            return index - first, (index >= first) & (index < first + extent)
        own = cupy.asarray(indices(runs))
        place = cupy.searchsorted(own, index.reshape(-1)).reshape(index.shape)
        place = cupy.minimum(place, extent - 1)
        return place, own[place] == index
