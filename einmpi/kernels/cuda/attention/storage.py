"""How the tensors of attention lie in memory, with at most three dimensions of batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from einmpi.graph.scalar import Element
from einmpi.kernels.attention.pattern import Labels
from einmpi.kernels.cuda.attention.forward import BATCH_DIMENSIONS
from einmpi.kernels.cuda.attention.launches import Stored
from einmpi.kernels.cuda.driver import DeviceArray

# An extent, and for each tensor, by its name in the kernels, a stride in bytes.
Dimension: TypeAlias = tuple[int, dict[str, int]]
NO_DIMENSION: Dimension = (1, {})


class Storage:
    """The arrays of some elements, which are named as kernels name them: q, k, v, …"""

    def __init__(
        self, elements: Mapping[str, Element], arrays: Mapping[str, DeviceArray], labels: Labels
    ) -> None:
        self.elements = elements
        self.arrays = {name: arrays[element.tensor] for name, element in elements.items()}
        self.labels = labels
        self.extent = dict(labels.extents)

    def stride(self, name: str, label: str | None) -> int:
        """Return the stride of a label in an array: 0 where the array does not have it."""
        index = self.elements[name].index
        if label is None or label not in index or self.extent[label] == 1:
            return 0
        return int(self.arrays[name].strides[index.index(label)])

    def batches(self, most_own: int) -> list[Dimension] | None:
        """Return three dimensions of batches; those whose members share K and V are the last.

        Return None if batches do not lie in so few dimensions, with at most `most_own` others.
        """
        own = self._merged(self.labels.own_batches)
        shared = self._merged(self.labels.shared_batches)
        if not shared and len(own) < BATCH_DIMENSIONS:
            shared = [NO_DIMENSION]
        missing = BATCH_DIMENSIONS - len(own) - len(shared)
        if missing < 0 or len(own) > most_own:
            return None
        return [NO_DIMENSION] * missing + own + shared

    def _merged(self, labels: Sequence[str]) -> list[Dimension]:
        """Return the dimensions of labels; labels that lie like one are one."""
        found: list[Dimension] = []
        for label in labels:
            size = self.extent[label]
            if size == 1:
                continue
            strides = {name: self.stride(name, label) for name in self.elements}
            whole = {name: stride * size for name, stride in strides.items()}
            if found and found[-1][1] == whole:
                found[-1] = found[-1][0] * size, strides
            else:
                found.append((size, strides))
        return found

    def stored(self, name: str, batches: Sequence[Dimension], row: str | None, head: str) -> Stored:
        """Return an array as three dimensions of batches, rows and a head, given by labels."""
        array = self.arrays[name]
        rows = 1 if row is None else self.extent[row]
        shape = [size for size, _ in batches]
        head_stride = array.strides[self.elements[name].index.index(head)]
        return Stored(
            array.dtype.name,
            (*shape, rows, self.extent[head]),
            (*self.number_strides(name, batches, row), head_stride),
            array.data.ptr,
        )

    def number_strides(
        self, name: str, batches: Sequence[Dimension], row: str | None
    ) -> tuple[int, ...]:
        """Return the strides of an array along batches and rows."""
        strides = [each.get(name, 0) for _, each in batches]
        return (*strides, self.stride(name, row))
