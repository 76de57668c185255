"""Large aggregates that only an update needs: computed block by block, and never whole in memory.

W - rate * sum(X[b,i] * D[b,j]), written over W, takes the memory of W and of one block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
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
from einmpi.schedule.compute import Compute, Kernel, Tiles, fused
from einmpi.schedule.regions import Slot, names_of, one_run, operand_role
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Step


def fused_update(product: Kernel, update: Kernel, replaced: Slot | None = None) -> Compute:
    """Return the step for some rows of a product, and at once the same rows of its update."""
    slot = product.target
    extent = slot.shape[0]
    rows = max(1, min(extent, rows_of_block(slot.nbytes // max(1, extent))))
    labels = product.einsum.output[0], update.einsum.output[0]
    step = fused((product, update), frozenset((slot,)), (labels,), (rows,))
    return replace(step, replaced=replaced)


def scattered_update(product: Kernel, update: Kernel) -> Compute:
    """Return the step for the rows of a scattered sum that get values, and their update."""
    rows = ScatteredRows(product, update)
    labels = rows.label, update.einsum.output[rows.dimension]
    nbytes = sparse_update_bytes(rows.most_rows, rows.row_bytes)
    tiles = Tiles("scattered", (labels,), (rows.rows,), nbytes=nbytes)
    return Compute((product, update), tiles, frozenset((product.target,)))


@dataclass(frozen=True)
class ScatteredRows:
    """Compute the sums of those rows only that values are scattered to, and update these rows.

    A row is all that has one index of the scattered label.
    """

    product: Kernel
    update: Kernel

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
        kernel = step.only_kernel
        if kernel is not None and kernel.vertex in blocked:
            product = kernel
            products.add(kernel.target)
        elif product is not None and kernel is not None:
            if product.einsum.segments is not None:
                found.append(scattered_update(product, kernel))
            else:
                replaced = _replaced_slot(product, kernel, users)
                found.append(fused_update(product, kernel, replaced))
            found += later
            product = None
            later = []
        elif product is not None and (step.frees or step.when_fused == "after"):
            later.append(step.inside_group())
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
        used.update(step.spills("place", "evict", "drop", "fetch"))
        for slot in used:
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
            if writer.only_kernel and reader.only_kernel is update and slot in last.frees:
                return slot
    return None


def with_product_updates(
    schedule: Schedule, is_product_update: Callable[[Kernel, Kernel], bool]
) -> Schedule:
    """Return the schedule with products computed together with the updates that need them.

    `is_product_update` tells whether a product and what updates a tensor by it are one call.
    """
    evicted: set[str] = set()  # slots whose values leave memory
    computed: Counter[str] = Counter()  # how many kernels compute each vertex
    users: dict[str, list[Step]] = {}
    overwritten: dict[Slot, Slot] = {}  # what is written over the memory of a slot, and that slot
    for step in schedule.steps:
        for reuse in step.reuse_steps:
            overwritten[reuse.slot] = reuse.source
        evicted.update(names_of(step.spills("evict")))
        if step.only_kernel is not None:
            computed[step.vertex] += 1
        for slot in {*step.reads, *step.keeps}:
            users.setdefault(slot.name, []).append(step)
    updating_products = set()
    product: Kernel | None = None  # the kernel before, if nothing but memory was managed since
    for step in schedule.steps:
        kernel = step.only_kernel
        if kernel is None:
            if step.when_fused not in ("between", "after") or step.begins:
                product = None
            continue
        if product is not None and computed[product.vertex] == 1:
            name = product.target.name
            is_inner = users.get(name) == [step] and name not in evicted
            is_overwritten = overwritten.get(kernel.target) in product.operands
            if is_inner and not is_overwritten and is_product_update(product, kernel):
                updating_products.add(product.vertex)
        product = kernel
    if not updating_products:
        return schedule
    steps = with_blocked_updates(schedule.steps, updating_products)
    return replace(schedule, steps=tuple(steps))
