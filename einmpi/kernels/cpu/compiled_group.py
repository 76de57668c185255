"""A group of kernels, block of rows by block. A kernel's parameters are made once; a block only moves addresses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from einmpi.errors import EinmpiError
from einmpi.kernels.cpu.compiled import address_of, check_gathers, kernel_of, pool, prepare
from einmpi.kernels.loop_nest import BoundNest
from einmpi.kernels.operands import number_operands
from einmpi.schedule.regions import indices
from einmpi.schedule.steps import Group, Kernel

Box = tuple[tuple[int, int], ...]  # from where, and how many, of each row


def compute_group(group: Group, arrays: Mapping[str, np.ndarray], threads: int) -> bool:
    """Do a group, its slots' arrays being given but for the inner ones; False if it must go kernel by kernel."""
    extents = [group.kernels[0].einsum.extent[labels[0]] for labels in group.rows]
    cuts = [
        [(k, min(size, n - k)) for k in range(0, n, size)]
        for n, size in zip(extents, group.block, strict=True)
    ]
    boxes = list(itertools.product(*cuts))
    workers = [_Worker(group, arrays) for _ in range(min(threads, len(boxes)))]
    if not all(stage.movable for stage in workers[0].stages(group.block)):
        return False
    bounds = [len(boxes) * k // len(workers) for k in range(len(workers) + 1)]
    shares = [boxes[start:stop] for start, stop in itertools.pairwise(bounds)]
    if len(workers) == 1:
        workers[0].do(shares[0])
    else:
        list(pool(threads).map(_Worker.do, workers, shares))
    for worker in workers:
        for stages in worker.ready.values():
            for stage in stages:
                stage.check()
    return True


@dataclass
class _Stage:
    """A kernel for blocks of one shape."""

    vertex: str
    plan: BoundNest
    run: Callable[[int], None]
    values: np.ndarray  # its parameters
    address: int  # of these
    places: np.ndarray  # of the addresses among them
    first: np.ndarray  # the addresses for the block at 0
    strides: np.ndarray  # bytes from a row to the next, of each row and array; 0 for what is inner
    kept: list[np.ndarray]  # as long as the addresses are used
    movable: bool

    def do(self, start: np.ndarray) -> None:
        self.values[self.places] = self.first + start @ self.strides
        self.run(self.address)

    def check(self) -> None:
        try:
            check_gathers(self.plan, [self.values])
        except IndexError as error:
            raise EinmpiError(f"{self.vertex}: {error}") from error


class _Worker:
    """One thread, with inner slots of its own."""

    def __init__(self, group: Group, arrays: Mapping[str, np.ndarray]) -> None:
        self.group, self.arrays = group, arrays
        inner = {slot.name for slot in group.inner}
        self.inner = {}
        for number, kernel in enumerate(group.kernels):
            if kernel.target.name in inner:
                size = dict(
                    zip((labels[number] for labels in group.rows), group.block, strict=True)
                )
                bound = [
                    size.get(label, kernel.einsum.extent[label]) for label in kernel.einsum.output
                ]
                self.inner[kernel.target.name] = np.empty(bound, kernel.target.dtype)
        self.ready: dict[tuple[int, ...], list[_Stage]] = {}

    def do(self, boxes: Sequence[Box]) -> None:
        for box in boxes:
            start = np.array([first for first, _ in box])
            for stage in self.stages(tuple(size for _, size in box)):
                stage.do(start)

    def stages(self, shape: tuple[int, ...]) -> list[_Stage]:
        if shape not in self.ready:
            self.ready[shape] = [self.stage(*pair, shape) for pair in enumerate(self.group.kernels)]
        return self.ready[shape]

    def stage(self, number: int, kernel: Kernel, shape: tuple[int, ...]) -> _Stage:
        rows = [labels[number] for labels in self.group.rows]
        size = dict(zip(rows, shape, strict=True))
        extents = tuple((label, size.get(label, extent)) for label, extent in kernel.einsum.extents)
        einsum = replace(kernel.einsum, extents=extents)

        def cut(slot: str, entries: Sequence[Any]) -> np.ndarray:
            array = self.inner[slot] if slot in self.inner else self.arrays[slot]
            box: Any = tuple(
                slice(0, size.get(entry) if isinstance(entry, str) else None) for entry in entries
            )
            return array[(*box, ...)]

        operands = [
            cut(slot.name, index)
            for slot, index in zip(kernel.operands, einsum.operands, strict=True)
        ]
        out = cut(kernel.target.name, einsum.output)
        known = {label: indices(runs) for label, runs in kernel.index}
        given = {
            x: np.asarray(known.get(x, np.arange(kernel.einsum.extent[x])), np.int64)
            for x in number_operands(einsum)[2]
        }
        plan, views = prepare(
            einsum, operands, out, {x: given[x][: einsum.extent[x]] for x in given}
        )
        used = [*views, (out, einsum.output)]
        slots = [*(slot.name for slot in kernel.operands), *given, kernel.target.name]
        strides = [
            [
                0
                if slot in self.inner
                else sum(s for s, e in zip(array.strides, entries, strict=True) if e == row)
                for slot, (array, entries) in zip(slots, used, strict=True)
            ]
            for row in rows
        ]
        first = np.array([address_of(array) for array, _ in used], np.int64)
        places = np.array([plan.position["A", m, 0] for m in range(len(used))])
        # A copy, of what is packed or has no plain strides, would be of the first block only.
        own = all(
            array.base is not None or array is operand
            for (array, _), operand in zip(views, operands, strict=False)
        )
        values = plan.values.copy()
        return _Stage(
            kernel.vertex,
            plan,
            kernel_of(plan.nest),
            values,
            address_of(values),
            places,
            first,
            np.array(strides, np.int64),
            [array for array, _ in used],
            own and not plan.packed,
        )
