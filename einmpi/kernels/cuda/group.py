"""A group of vertices that share rows as one CUDA kernel: softmax reads once and writes once.

A team of threads has a row. What lies between the vertices stays in its registers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from einmpi.graph.scalar import Arg, Scalar, rebuild
from einmpi.kernels.contraction import recognise_contraction
from einmpi.kernels.cuda.group_source import GroupNest, Made, group_source
from einmpi.kernels.cuda.launch import Calls, Launch, compiled, key_of
from einmpi.kernels.cuda.nest import PACK, WARP, divider
from einmpi.kernels.grouping import GroupingRule
from einmpi.kernels.loop_nest import Access
from einmpi.kernels.operands import number_operands
from einmpi.schedule.steps import Group, Kernel

EACH = 32  # values of a row that a thread keeps, at the most
MOST = 512  # threads of a team
FEW = 2**10  # rows: with fewer, a kernel for each vertex has more to share


# ---- which ----------------------------------------------------------------------------------------------------------


def _suits(kernel: Kernel) -> bool:
    product = recognise_contraction(kernel.einsum)
    is_matrix = (
        product is not None
        and len(product.positions) > 1
        and product.indices[0] != product.indices[1]
    )
    plain = all(isinstance(entry, str) for index in kernel.einsum.operands for entry in index)
    counts = all(len(runs) == 1 for _, runs in kernel.index)
    return (
        plain
        and counts
        and not is_matrix
        and not kernel.select
        and 0 not in dict(kernel.einsum.extents).values()
    )


def _block(kernels: Sequence[Kernel], rows: Sequence[Sequence[str]]) -> tuple[int, ...] | None:
    """One row at a time, where there are enough rows and they fit into the registers of a team."""
    shape = _shape(kernels, rows)
    count = prod(kernels[0].einsum.extent[labels[0]] for labels in rows)
    if shape is None or count < FEW or prod(extent for _, extent in shape) > EACH * MOST:
        return None
    return (1,) * len(rows)


RULE = GroupingRule(_suits, _block)


def _shape(
    kernels: Sequence[Kernel], rows: Sequence[Sequence[str]]
) -> tuple[tuple[tuple[str, ...], int], ...] | None:
    """Each dimension inside a row: its label in every kernel ("" where it has none), its extent. None where kernels do
    not go over the same places: a thread would need what another one keeps."""
    makers: dict[str, int] = {}
    inside: list[tuple[str, ...]] = []
    extents: tuple[int, ...] | None = None
    for number, kernel in enumerate(kernels):
        einsum = kernel.einsum
        own = {labels[number] for labels in rows}
        found = tuple(label for label in einsum.labels if label not in own)
        if einsum.aggregated and any(label in einsum.output for label in found):
            return None
        inputs = zip(kernel.operands, einsum.operands, strict=True)
        made = [
            tuple(e for e in index if isinstance(e, str) and e not in own)
            for slot, index in inputs
            if slot.name in makers
        ]
        orders = [order for order in made if order]
        order = orders[0] if orders else found
        if any(other != order for other in orders) or sorted(order) != sorted(found):
            return None
        sizes = tuple(einsum.extent[label] for label in order)
        if order and extents not in (None, sizes):
            return None
        extents = sizes if order else extents
        inside.append(order)
        makers[kernel.target.name] = number
    if not extents:
        return None
    return tuple(
        (tuple(order[k] if order else "" for order in inside), extent)
        for k, extent in enumerate(extents)
    )


# ---- how ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    nest: GroupNest
    slots: tuple[str, ...]  # of the arrays, in the order of the kernel's pointers
    extents: tuple[int, ...]  # rows, then what is inside
    strides: tuple[tuple[int, ...], ...]  # of reads and outputs along these, in elements
    first: tuple[int, ...]  # of each read: the first value of what counts

    def value(self, letter: str, x: int, y: int) -> int:
        """An argument that is no pointer."""
        if letter == "n":
            return self.extents[x]
        if letter in "mz":
            return divider(self.extents[x], self.nest.wide)[letter == "z"]
        return self.first[x] if letter == "b" else self.strides[x][y]


def _plan(step: Group, steps: Mapping[str, tuple[int, ...]], aligned: bool) -> _Plan | None:
    """`steps`: strides of the slots that there are; `aligned`: all of them begin where a pack may lie."""
    kernels, rows, inner = step.kernels, step.rows, {slot.name for slot in step.inner}
    shape = _shape(kernels, rows)
    if shape is None:
        return None
    extents = (
        *(kernels[0].einsum.extent[labels[0]] for labels in rows),
        *(extent for _, extent in shape),
    )

    def along(
        number: int, index: Sequence[Any], strides: Sequence[int], size: int
    ) -> tuple[int, ...]:
        """How far a step along each row and inside dimension goes in an array that a kernel uses."""
        names = [*(labels[number] for labels in rows), *(labels[number] for labels, _ in shape)]
        return tuple(
            sum(s for s, e in zip(strides, index, strict=True) if e == name) // size
            for name in names
        )

    makers: dict[str, int] = {}
    reads: dict[
        tuple[str, str, int, tuple[int, ...]], int
    ] = {}  # slot ("" for what counts), dtype, first, strides
    stages, outputs = [], []
    for number, kernel in enumerate(kernels):
        function, indices, labels = number_operands(kernel.einsum)
        args = []
        for slot, index in zip(kernel.operands, indices, strict=False):
            if slot.name in makers:
                args.append(Arg(makers[slot.name]))
                continue
            places = along(number, index, steps[slot.name], np.dtype(slot.dtype).itemsize)
            args.append(
                Arg(len(kernels) + reads.setdefault((slot.name, slot.dtype, 0, places), len(reads)))
            )
        for label in labels:
            runs = dict(kernel.index).get(label)
            counts = ("", "int64", runs[0][0] if runs else 0, along(number, (label,), (1,), 1))
            args.append(Arg(len(kernels) + reads.setdefault(counts, len(reads))))
        target, einsum = kernel.target, kernel.einsum
        if target.name not in inner:
            outputs.append(
                (
                    number,
                    along(
                        number, einsum.output, steps[target.name], np.dtype(target.dtype).itemsize
                    ),
                )
            )
        own = {labels[number] for labels in rows}
        makers[target.name] = number
        inside = any(label not in own for label in einsum.output)
        aggregation = einsum.aggregation if einsum.aggregated else None
        stages.append(Made(_renumbered(function, args), aggregation, target.dtype, inside))
    strides = (*(places for *_, places in reads), *(places for _, places in outputs))
    counted = tuple(r for r, key in enumerate(reads) if not key[0])
    dtypes = [*(key[1] for key in reads), *(stages[number].dtype for number, _ in outputs)]
    pack = _pack(strides, dtypes, counted, extents, len(rows)) if aligned else 1
    extents = (*extents[:-1], extents[-1] // pack)
    strides = tuple(
        places if r in counted else (*places[:-1], places[-1] * pack)
        for r, places in enumerate(strides)
    )
    accesses = [
        Access(dtype, tuple(k for k, s in enumerate(places) if s), False)
        for _, dtype, _, places in reads
    ]
    size = prod(extents[len(rows) :])
    team = WARP
    while size * pack > team * EACH:
        team *= 2
    each = -(-size // team) * pack
    reach = max(sum(abs(s) * n for s, n in zip(places, extents, strict=True)) for places in strides)
    nest = GroupNest(
        tuple(stages),
        tuple(accesses),
        counted,
        tuple(number for number, _ in outputs),
        len(rows),
        len(extents),
        team,
        each,
        pack,
        max(reach, prod(extents)) >= 2**30,
    )
    slots = (*(slot for slot, *_ in reads), *(kernels[number].target.name for number, _ in outputs))
    return _Plan(nest, slots, extents, strides, tuple(first for _, _, first, _ in reads))


def _renumbered(function: Scalar, args: Sequence[Arg]) -> Scalar:
    return rebuild(function, lambda leaf: args[leaf.position] if isinstance(leaf, Arg) else leaf)


def _pack(
    strides: Sequence[Sequence[int]],
    dtypes: Sequence[str],
    counted: Sequence[int],
    extents: Sequence[int],
    rows: int,
) -> int:
    """How many neighbours a thread takes at once: 16 bytes, if every array has them."""
    used = [m for m in range(len(strides)) if m not in counted and any(strides[m][rows:])]
    if len(extents) != rows + 1 or any(strides[m][-1] != 1 for m in used):
        return 1
    pack = min(8, PACK // max(np.dtype(dtypes[m]).itemsize for m in used))
    while pack > 1 and (
        extents[-1] % pack or any(step % pack for m in used for step in strides[m][:-1])
    ):
        pack //= 2
    return pack


CALLS = Calls()


def compute(step: Group, arrays: Mapping[str, Any], fast_math: bool = False) -> bool:
    """Do a group on its slots' arrays, but for the inner ones; False if it must go kernel by kernel."""
    names = sorted(arrays)
    key = (*names, *(key_of(arrays[name]) for name in names), fast_math)
    found = CALLS.get(step, key, lambda: (_prepare(step, arrays, fast_math),))[0]
    if found is None:
        return False
    launch, slots = found
    launch([arrays[slot].data.ptr if slot else 0 for slot in slots])
    return True


def _prepare(
    step: Group, arrays: Mapping[str, Any], fast: bool
) -> tuple[Launch, tuple[str, ...]] | None:
    if any(stride % array.itemsize for array in arrays.values() for stride in array.strides):
        return None
    strides = {name: tuple(array.strides) for name, array in arrays.items()}
    plan = _plan(step, strides, not any(array.data.ptr % PACK for array in arrays.values()))
    if plan is None:
        return None
    nest, names = plan.nest, list(plan.nest.parameters())
    values = [0 if letter == "p" else plan.value(letter, x, y) for letter, x, y in names]
    places = [(place, x) for place, (letter, x, _) in enumerate(names) if letter == "p"]
    shape = (-(-prod(plan.extents[: nest.rows]) // nest.teams), 1), (nest.team * nest.teams,)
    return Launch(group_kernel(nest, fast), shape, tuple(values), tuple(places)), plan.slots


@lru_cache(maxsize=1024)
def group_kernel(nest: GroupNest, fast: bool) -> Any:
    return compiled(group_source(nest), fast)
