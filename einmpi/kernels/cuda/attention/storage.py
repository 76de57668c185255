"""How the tensors of attention lie in memory, with at most three dimensions of batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from einmpi.graph.scalar import Element
from einmpi.kernels.attention.pattern import Attention
from einmpi.kernels.attention.softmax import COLUMN_LABEL, CONTRACTED_LABEL
from einmpi.kernels.cuda.attention.forward import BATCH_DIMENSIONS
from einmpi.kernels.cuda.attention.launches import Stored
from einmpi.kernels.cuda.driver import DeviceArray


class Storage:
    """The arrays of some elements, by the strides of their labels."""

    def __init__(self, elements: Sequence[Element], arrays: Mapping[str, DeviceArray]) -> None:
        self.elements = list(elements)
        self.arrays = [arrays[element.tensor] for element in elements]

    def strides(self, label: str | None) -> tuple[int, ...]:
        """Return the stride of a label in each array: 0 where an array does not have it."""
        found = []
        for element, array in zip(self.elements, self.arrays, strict=True):
            has_label = label in element.index
            found.append(array.strides[element.index.index(label)] if has_label else 0)
        return tuple(found)

    def merged(
        self, labels: Sequence[str], extent: Mapping[str, int]
    ) -> list[tuple[int, tuple[int, ...]]]:
        """Return dimensions, as extents and strides: labels that lie like one are one."""
        found: list[tuple[int, tuple[int, ...]]] = []
        for label in labels:
            size = extent[label]
            strides = self.strides(label)
            if size == 1:
                continue
            if found and found[-1][1] == tuple([stride * size for stride in strides]):
                found[-1] = found[-1][0] * size, strides
            else:
                found.append((size, strides))
        return found

    def stored(
        self,
        number: int,
        batches: Sequence[tuple[int, tuple[int, ...]]],
        row: tuple[int, str | None],
        head: tuple[int, str],
    ) -> Stored:
        """Return an array as three dimensions of batches, a row and a head, given as labels."""
        array = self.arrays[number]
        row_extent, row_label = row
        head_extent, head_label = head
        shape = [size for size, _ in batches]
        strides = [each[number] for _, each in batches]
        row_stride = self.strides(row_label)[number] if row_extent > 1 else 0
        head_stride = self.strides(head_label)[number]
        return Stored(
            array.dtype.name,
            (*shape, row_extent, head_extent),
            (*strides, row_stride, head_stride),
            array.data.ptr,
        )


def batch_dimensions(
    storage: Storage, attention: Attention
) -> list[tuple[int, tuple[int, ...]]] | None:
    """Return three dimensions of batches, of which those that share K and V are the last.

    Return None if batches do not lie in three dimensions.
    """
    extent = dict(attention.extents)
    of_k_or_v = {*attention.k.index, *attention.v.index}
    own = [label for label in attention.batches if label in of_k_or_v]
    shared = [label for label in attention.batches if label not in of_k_or_v]
    found = storage.merged(own, extent)
    members = storage.merged(shared, extent)
    none = (1, (0,) * len(storage.arrays))
    if not members and len(found) < BATCH_DIMENSIONS:
        members = [none]
    missing = BATCH_DIMENSIONS - len(found) - len(members)
    if missing < 0:
        return None
    return [none] * missing + found + members


def store_attention(attention: Attention, arrays: Mapping[str, DeviceArray]) -> list[Stored] | None:
    """Return how Q, K, V and O are stored; None if batches do not lie in three dimensions."""
    storage = Storage((attention.q, attention.k, attention.v, attention.o), arrays)
    batches = batch_dimensions(storage, attention)
    if batches is None:
        return None
    extent = dict(attention.extents)
    rows = 1 if attention.row is None else extent[attention.row]
    row = rows, attention.row
    column = extent[COLUMN_LABEL], COLUMN_LABEL
    contracted = extent[CONTRACTED_LABEL], CONTRACTED_LABEL
    value = extent[attention.value], attention.value
    return [
        storage.stored(0, batches, row, contracted),
        storage.stored(1, batches, column, contracted),
        storage.stored(2, batches, column, value),
        storage.stored(3, batches, row, value),
    ]
