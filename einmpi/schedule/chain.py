"""Chains of kernels around tensors that are never whole in memory: attention without its scores.

A chain is computed one block of rows at a time, from the first contraction to the last one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TypeAlias

import numpy as np

from einmpi.graph.scalar import IndexEntries
from einmpi.planner.chains import Member, bytes_of_blocks
from einmpi.planner.memory import FusedChain
from einmpi.schedule.regions import Region, Slot, Slots, names_of, one_run, stretch, whole
from einmpi.schedule.step import Free, Kernel, Step
from einmpi.units import plural

Block: TypeAlias = tuple[tuple[int, int], ...]  # the start and the size of each row
PARTIAL_ROLE = "+"  # role of a slot with what one block adds to a result


@dataclass(frozen=True)
class View:
    """The part of a whole slot that belongs to a block."""

    slot: Slot
    rows: tuple[int | None, ...]  # the row that each dimension is; None where it is taken whole

    @property
    def role(self) -> str:
        """The role of the block's slot: a block may take two parts of one slot."""
        return f"{self.slot.role}{list(self.rows)}"

    @property
    def name(self) -> str:
        return f"{self.slot.tensor}{self.role}"

    def place(self, block: Block) -> tuple[slice, ...]:
        """Return where a block is in the array of the slot."""
        found = []
        for row in self.rows:
            if row is None:
                found.append(slice(None))
            else:
                start, size = block[row]
                found.append(slice(start, start + size))
        return tuple(found)


@dataclass(frozen=True)
class Accumulate(Step):
    """Combine what one block adds to a result with what is there from earlier blocks."""

    aggregation: str
    part: Slot
    total: Slot

    @property
    def vertex(self) -> str:
        return self.total.tensor

    @property
    def reads(self) -> Slots:
        return self.part, self.total

    @property
    def writes(self) -> Slots:
        return (self.total,)

    @property
    def frees(self) -> Slots:
        return (self.part,)


@dataclass(frozen=True)
class Chain(Step):
    """Kernels that share rows, computed one block of rows at a time.

    Every row is a label of each kernel. A kernel whose output has all rows writes its results for
    a block. One that aggregates a row has results which are complete after the last block: those
    of each block are combined with what is there, in the order of the blocks.
    """

    kind = "kernel"

    parts: tuple[Kernel, ...]
    inner: frozenset[Slot]  # what passes between the kernels: only a block of it exists at a time
    rows: tuple[tuple[str, ...], ...]  # for each row, the label that it is in each kernel
    block: tuple[int, ...]  # how many indices of each row at a time

    @property
    def vertex(self) -> str:
        return self.parts[-1].vertex

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return self.parts

    @cached_property
    def reads(self) -> Slots:
        made = {kernel.target for kernel in self.parts}
        read: dict[Slot, None] = {}
        for kernel in self.parts:
            read.update(dict.fromkeys(kernel.operands))
        return tuple(slot for slot in read if slot not in made)

    @cached_property
    def writes(self) -> Slots:
        return tuple(kernel.target for kernel in self.parts if kernel.target not in self.inner)

    @cached_property
    def working_bytes(self) -> int:
        members = []
        for kernel in self.parts:
            itemsize = np.dtype(kernel.target.dtype).itemsize
            inputs = tuple(names_of(kernel.operands))
            members.append(Member(kernel.target.name, inputs, kernel.einsum, itemsize))
        inner = names_of(self.inner)
        return bytes_of_blocks(members, inner, self.rows, self.block)

    def fills(self) -> Iterator[tuple[Slot, Region]]:
        for slot in self.writes:
            yield slot, tuple(map(whole, slot.shape))

    def blocks(self) -> Iterator[Block]:
        """Yield all blocks, in the order in which they are computed."""
        cuts = []
        for labels, size in zip(self.rows, self.block, strict=True):
            extent = self.parts[0].einsum.extent[labels[0]]
            starts = range(0, max(1, extent), size)  # without rows, one block without rows
            cuts.append([(start, min(size, extent - start)) for start in starts])
        yield from itertools.product(*cuts)

    def kind_of(self, block: Block) -> tuple[tuple[int | None, int], ...]:
        """Return what the steps of a block depend on.

        That is its shape, where each row starts that is used as a number, and which kernels have
        results of earlier blocks to combine theirs with.
        """
        found: list[tuple[int | None, int]] = []
        for (start, size), depends in zip(block, self._starts_matter, strict=True):
            found.append((start if depends else None, size))
        for number in range(len(self.parts)):
            found.append((None, int(self.is_first(number, block))))
        return tuple(found)

    @cached_property
    def _starts_matter(self) -> tuple[bool, ...]:
        """For each row, whether a kernel uses its label as a number."""
        found = []
        for labels in self.rows:
            used = False
            for label, kernel in zip(labels, self.parts, strict=True):
                used = used or label in kernel.einsum.labels_as_numbers
            found.append(used)
        return tuple(found)

    def steps_of(self, block: Block) -> list[Step]:
        """Return the kernels of a block, with what is combined and freed between them."""
        parts = [self._restricted(number, block) for number in range(len(self.parts))]
        inner = set(names_of(self.inner))
        last_use: dict[str, int] = {}
        for number, part in enumerate(parts):
            for slot in (*part.operands, part.target):
                last_use[slot.name] = number
        found: list[Step] = []
        for number, part in enumerate(parts):
            if self.is_first(number, block):
                found.append(part)
            else:
                added = replace(part.target, role=PARTIAL_ROLE)
                found.append(replace(part, target=added))
                found.append(Accumulate(part.einsum.required_aggregation, added, part.target))
            for slot in dict.fromkeys((*part.operands, part.target)):
                if slot.name in inner and last_use[slot.name] == number:
                    found.append(Free(slot))
        return found

    def is_first(self, number: int, block: Block) -> bool:
        """Return whether no earlier block has results for the same place of a kernel's target."""
        einsum = self.parts[number].einsum
        for labels, (start, _) in zip(self.rows, block, strict=True):
            if labels[number] in einsum.aggregated and start:
                return False
        return True

    @cached_property
    def rows_of_all_results(self) -> tuple[int, ...]:
        """The rows that no kernel aggregates."""
        found = []
        for row, labels in enumerate(self.rows):
            is_aggregated = False
            for label, kernel in zip(labels, self.parts, strict=True):
                is_aggregated = is_aggregated or label in kernel.einsum.aggregated
            if not is_aggregated:
                found.append(row)
        return tuple(found)

    @cached_property
    def combines_blocks(self) -> bool:
        """Whether a result is complete only after several blocks."""
        extent = self.parts[0].einsum.extent
        for row, (labels, size) in enumerate(zip(self.rows, self.block, strict=True)):
            if row not in self.rows_of_all_results and size < extent[labels[0]]:
                return True
        return False

    @cached_property
    def views(self) -> dict[str, View]:
        """What a block takes of the arrays of whole slots, by the name of the block's slot."""
        found = {}
        for number, kernel in enumerate(self.parts):
            slots = (*kernel.operands, kernel.target)
            entries = (*kernel.einsum.operands, kernel.einsum.output)
            for slot, index in zip(slots, entries, strict=True):
                if slot not in self.inner:
                    view = View(slot, self._rows_in(number, index))
                    found[view.name] = view
        return found

    def _rows_in(self, number: int, entries: IndexEntries) -> tuple[int | None, ...]:
        """Return the row that each dimension of an operand or a target is, or None."""
        row_of_label: dict[object, int] = {}
        for row, labels in enumerate(self.rows):
            row_of_label[labels[number]] = row
        return tuple(row_of_label.get(entry) for entry in entries)

    def _restricted(self, number: int, block: Block) -> Kernel:
        """Return a kernel for the rows of a block, with the slots of the block."""
        kernel = self.parts[number]
        known = dict(kernel.index)
        runs = {}
        for labels, (start, size) in zip(self.rows, block, strict=True):
            label = labels[number]
            indices = known.get(label, one_run(0, kernel.einsum.extent[label]))
            runs[label] = stretch(indices, start, start + size)
        operands = []
        for slot, entries in zip(kernel.operands, kernel.einsum.operands, strict=True):
            operands.append(self._slot_of_block(slot, self._rows_in(number, entries), block))
        rows_of_target = self._rows_in(number, kernel.einsum.output)
        target = self._slot_of_block(kernel.target, rows_of_target, block)
        part = kernel.restricted_to(runs)
        return replace(part, operands=tuple(operands), target=target)

    def _slot_of_block(self, slot: Slot, rows: tuple[int | None, ...], block: Block) -> Slot:
        """Return a slot with as many indices of each row as a block has."""
        shape = list(slot.shape)
        for dimension, row in enumerate(rows):
            if row is not None:
                shape[dimension] = block[row][1]
        role = slot.role if slot in self.inner else View(slot, rows).role
        return replace(slot, shape=tuple(shape), role=role)

    def __str__(self) -> str:
        size = "×".join(map(str, self.block))
        lines = [f"fused, {size} {plural(prod(self.block), 'row')} at a time:"]
        lines += [f"  {kernel}" for kernel in self.parts]
        return "\n".join(lines)


def make_chain(kernels: Sequence[Kernel], chain: FusedChain) -> Chain:
    """Return the kernels of a fused chain as one step."""
    inner = frozenset(kernel.target for kernel in kernels if kernel.vertex in chain.inner)
    return Chain(tuple(kernels), inner, chain.rows, chain.block)
