"""Large aggregates that only an update needs: computed block by block, and never whole in memory.

W - rate * sum(X[b,i] * D[b,j]), written over W, takes the memory of W and of one block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from einmpi.planner.memory import (
    SparseUpdate,
    find_sparse_update,
    places_filled,
    rows_of_block,
    rows_of_sparse_block,
    scattered_label,
    sparse_update_bytes,
    with_given_places,
)
from einmpi.schedule.regions import Region, Slot, Slots, one_run, operand_role, whole
from einmpi.schedule.step import Free, Kernel, Step
from einmpi.schedule.steps import SavePoint


@dataclass(frozen=True)
class BlockedUpdate(Step):
    """Compute some rows of a kernel, and at once the same rows of an update that needs them."""

    kind = "kernel"

    product: Kernel
    update: Kernel
    replaced: Slot | None = None  # computed for this update alone: the result may take its memory

    @property
    def vertex(self) -> str:
        return self.update.vertex

    @property
    def reads(self) -> Slots:
        others = [slot for slot in self.update.operands if slot != self.product.target]
        return (*self.product.operands, *others)

    @property
    def writes(self) -> Slots:
        return self.update.writes

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return self.product, self.update

    @property
    def rows(self) -> int:
        """The number of rows of a block."""
        slot = self.product.target
        extent = slot.shape[0]
        return min(extent, rows_of_block(slot.nbytes // max(1, extent)))

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The extents of a block of the product."""
        return self.rows, *self.product.target.shape[1:]

    @cached_property
    def blocks(self) -> tuple[tuple[slice, Kernel, Kernel], ...]:
        """The rows of each block, and both kernels for these rows."""
        found = []
        extent = self.product.target.shape[0]
        for start in range(0, extent, self.rows):
            stop = min(start + self.rows, extent)
            runs = one_run(start, stop)
            product = self.product.restricted_to({self.product.einsum.output[0]: runs})
            update = self.update.restricted_to({self.update.einsum.output[0]: runs})
            found.append((slice(start, stop), product, update))
        return tuple(found)

    @property
    def working_bytes(self) -> int:
        slot = self.product.target
        return slot.nbytes // max(1, slot.shape[0]) * self.rows

    def fills(self) -> Iterator[tuple[Slot, Region]]:
        slot = self.update.target
        yield slot, tuple(map(whole, slot.shape))

    def __str__(self) -> str:
        lines = [f"together, {self.rows} rows at a time:"]
        lines += [f"  {kernel}" for kernel in self.kernels]
        return "\n".join(lines)


@dataclass(frozen=True)
class SparseBlockedUpdate(BlockedUpdate):
    """Compute the sums of those rows only that values are scattered to, and update these rows.

    A row is all that has one index of the scattered label.
    """

    @cached_property
    def label(self) -> str:
        """The scattered label, as the product calls it."""
        label = scattered_label(self.product.einsum)
        assert label is not None
        return label

    @cached_property
    def dimension(self) -> int:
        """The dimension of the scattered label in the tensor."""
        return self.product.einsum.output.index(self.label)

    @cached_property
    def form(self) -> SparseUpdate:
        """Which operand of the update is changed, and by what."""
        change = self.update.operands.index(self.product.target)
        form = find_sparse_update(self.update.einsum, change)
        assert form is not None
        return form

    @property
    def most_rows(self) -> int:
        """How many rows of this rank get values at most."""
        return places_filled(self.product.einsum)

    @property
    def row_bytes(self) -> int:
        slot = self.product.target
        return slot.nbytes // max(1, slot.shape[self.dimension])

    @cached_property
    def rows(self) -> int:
        """The number of rows of a block."""
        return rows_of_sparse_block(self.most_rows, self.row_bytes)

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The extents of a block of sums, and of the rows that they are added to."""
        shape = list(self.product.target.shape)
        shape[self.dimension] = self.rows
        return tuple(shape)

    @cached_property
    def block_kernels(self) -> tuple[Kernel, Kernel]:
        """Both kernels for the rows of a block.

        The first has a further operand: which of these rows each value goes to.
        """
        product = self.product
        segments = product.einsum.required_segments
        extent = product.einsum.extent
        shape = tuple(extent[label] for label in segments.index_labels)
        places = Slot(
            product.vertex, shape, "int64", operand_role(product.vertex, len(product.operands))
        )
        sums = replace(product.target, shape=self.block_shape)
        product = replace(
            product,
            target=sums,
            operands=(*product.operands, places),
            einsum=with_given_places(product.einsum, self.rows),
            index=tuple((label, runs) for label, runs in product.index if label != self.label),
        )
        label = self.update.einsum.output[self.dimension]
        update = self.update.restricted_to({label: one_run(0, self.rows)})
        return product, update

    @property
    def working_bytes(self) -> int:
        return sparse_update_bytes(self.most_rows, self.row_bytes)

    def __str__(self) -> str:
        lines = [f"together, only for {self.label} that get values, {self.rows} at a time:"]
        lines += [f"  {kernel}" for kernel in self.kernels]
        return "\n".join(lines)


def with_blocked_updates(steps: Sequence[Step], blocked: Collection[str]) -> list[Step]:
    """Return steps with the kernels of these vertices computed together with the next one.

    What is freed between the two is freed after both. A save point between them is inside.
    """
    found: list[Step] = []
    product: Kernel | None = None
    products: set[Slot] = set()
    later: list[Step] = []  # what comes after both
    users = _users_of_slots(steps)
    for step in steps:
        if isinstance(step, Kernel) and step.vertex in blocked:
            product = step
            products.add(step.target)
        elif product is not None and isinstance(step, Kernel):
            if product.einsum.segments is not None:
                found.append(SparseBlockedUpdate(product, step))
            else:
                found.append(BlockedUpdate(product, step, _replaced_slot(product, step, users)))
            found += later
            product = None
            later = []
        elif product is not None and step.frees:
            later.append(step)
        elif product is not None and isinstance(step, SavePoint):
            later.append(replace(step, inside=True))
        elif set(step.frees) & products:
            pass  # it has never been whole in memory
        else:
            found.append(step)
    assert product is None, f"no update follows {product}"
    return found


def _users_of_slots(steps: Sequence[Step]) -> dict[str, list[Step]]:
    """Return all steps that have to do with each slot, by its name."""
    found: dict[str, list[Step]] = {}
    for step in steps:
        used = {*step.reads, *step.writes, *step.keeps, *step.reuses, *step.frees}
        moved = {*step.places, *step.evicts, *step.drops, *step.fetches}
        for slot in used | moved:
            found.setdefault(slot.name, []).append(step)
    return found


def _replaced_slot(
    product: Kernel, update: Kernel, users: Mapping[str, Sequence[Step]]
) -> Slot | None:
    """Return the operand of an update that was computed for it alone, if the result is like it."""
    target = update.target
    for slot in update.operands:
        is_alike = slot.shape == target.shape and slot.dtype == target.dtype
        if not is_alike or slot == product.target or slot in product.operands:
            continue
        if len(users[slot.name]) == 3:
            writer, reader, last = users[slot.name]
            if isinstance(writer, Kernel) and reader is update and isinstance(last, Free):
                return slot
    return None
