"""One EinSum on a GPU: a product of matrices by cuBLAS, everything else by one generated kernel, compiled once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from einmpi.graph.einsum import AGGREGATIONS, EinSum
from einmpi.graph.scalar import Arg, Scalar
from einmpi.kernels.contraction import recognise_contraction
from einmpi.kernels.contraction_split import MAX_TEMPORARY_BYTES, MIN_MATRIX_SIDE
from einmpi.kernels.cuda import driver
from einmpi.kernels.cuda.blas import prepare_product
from einmpi.kernels.cuda.distance import prepare_distance
from einmpi.kernels.cuda.launch import Calls, Launch, compiled, key_of
from einmpi.kernels.cuda.nest import PACK, THREADS, Nest, Plan
from einmpi.kernels.cuda.scalar_source import Fold
from einmpi.kernels.cuda.source import source
from einmpi.kernels.cuda.work_split import make_plan
from einmpi.kernels.loop_nest import IndexedArray
from einmpi.kernels.operands import apply_constant_indices, check_index_range, number_operands
from einmpi.schedule.regions import Runs, indices, length, whole

Prepared: TypeAlias = Callable[[Sequence[Any], Any], None]  # of operands and target
Index: TypeAlias = tuple[
    tuple[str, Runs], ...
]  # the indices that a label's positions stand for, where that matters
CALLS = Calls()


def compute(
    einsum: EinSum,
    operands: Sequence[Any],
    target: Any,
    index: Index = (),
    fast_math: bool = False,
    tf32: bool = False,
) -> None:
    """Fill `target`, which is none of the operands. Extents are those of the arrays. `fast_math` allows what rounds
    more, `tf32` products of float32 with ten bits of fraction."""
    key = (*map(key_of, operands), key_of(target), index, fast_math, tf32)
    CALLS.get(einsum, key, lambda: prepare(einsum, operands, target, index, fast_math, tf32))(
        operands, target
    )


def prepare(
    einsum: EinSum, operands: Sequence[Any], target: Any, index: Index, fast: bool, tf32: bool
) -> Prepared:
    """The same for any arrays that look like these: dtypes, extents, strides, and how far from aligned they are."""
    if 0 in einsum.bound:
        return lambda operands, target: None
    rule, extent = AGGREGATIONS[einsum.aggregation] if einsum.aggregation else None, einsum.extent
    if rule and any(extent[label] == 0 for label in einsum.aggregated):
        if rule.neutral is None:
            raise ValueError(f"{einsum.aggregation} of nothing has no value")
        neutral = rule.neutral
        return lambda operands, target: target.fill(neutral)
    if any(step % array.itemsize for array in operands for step in array.strides):

        def dense(operands: Sequence[Any], target: Any) -> None:
            compute(
                einsum, [driver.contiguous(array) for array in operands], target, index, fast, tf32
            )

        return dense
    distance = prepare_distance(einsum, operands, target, generate) if fast else None
    if distance is not None:
        return distance
    contraction = recognise_contraction(einsum)
    product = contraction and prepare_product(contraction, operands, target, tf32)
    if product:
        label = max(
            (x for x in product.copied if extent[x] >= 2 * MIN_MATRIX_SIDE),
            key=lambda x: extent[x],
            default="",
        )
        if product.bytes > MAX_TEMPORARY_BYTES and label:
            return _halves(einsum, label, fast, tf32)
        return product.with_copies(generate) if product.bytes else product
    return _generated(einsum, operands, target, index, fast)


def _halves(einsum: EinSum, label: str, fast: bool, tf32: bool) -> Prepared:
    """One half of a label after the other, so that copies stay small."""
    size = einsum.extent[label]
    halves = []
    for start, stop in ((0, size // 2), (size // 2, size)):
        extents = tuple((x, stop - start if x == label else n) for x, n in einsum.extents)
        halves.append((slice(start, stop), replace(einsum, extents=extents)))

    def run(operands: Sequence[Any], target: Any) -> None:
        for part, half in halves:
            views = [
                _part(array, entries, label, part)
                for array, entries in zip(
                    (*operands, target), (*einsum.operands, einsum.output), strict=True
                )
            ]
            compute(half, views[:-1], views[-1], (), fast, tf32)

    return run


def _part(array: Any, entries: Sequence[Any], label: str, part: slice) -> Any:
    return array[tuple(part if entry == label else slice(None) for entry in entries)]


def generate(einsum: EinSum, operands: Sequence[Any], target: Any) -> None:
    """Fill `target` by a generated kernel, whatever the EinSum."""
    key = ("generate", *map(key_of, operands), key_of(target))
    CALLS.get(einsum, key, lambda: _generated(einsum, operands, target, (), False))(
        operands, target
    )


def _generated(
    einsum: EinSum, operands: Sequence[Any], target: Any, index: Index, fast: bool
) -> Prepared:
    function, entries, labels = number_operands(einsum)
    views = [
        apply_constant_indices(array, own) for array, own in zip(operands, entries, strict=False)
    ]
    offsets = [
        view.data.ptr - array.data.ptr for (view, _), array in zip(views, operands, strict=True)
    ]
    layouts = [
        IndexedArray(array.dtype.name, array.shape, array.strides, own) for array, own in views
    ]
    cupy = driver.cupy()
    first: dict[int, int] = {}  # of an operand that counts: where it begins
    given: list[Any] = []
    for number, label in enumerate(labels, len(operands)):
        runs = dict(index).get(label, whole(einsum.extent[label]))
        if len(runs) == 1:
            first[number] = runs[0][0]
        given.append(cupy.asarray(indices(() if len(runs) == 1 else runs)))
        layouts.append(IndexedArray("int64", (length(runs),), (8,), (label,)))
    call = _Call(function, tuple(layouts), einsum, tuple(first), fast)
    aligned = all(
        (array.data.ptr + offset) % PACK == 0
        for array, offset in zip(operands, offsets, strict=True)
    )
    run = call.prepare(
        target, first, aligned and target.data.ptr % PACK == 0 and not len(given) > len(first)
    )

    def generated(operands: Sequence[Any], target: Any) -> None:
        pointers = [
            array.data.ptr + offset for array, offset in zip(operands, offsets, strict=True)
        ]
        run([*pointers, *(array.data.ptr for array in given)], target)

    return generated


class _Call:
    """A kernel, or two where the aggregated loops go in parts."""

    def __init__(
        self,
        function: Scalar,
        layouts: tuple[IndexedArray, ...],
        einsum: EinSum,
        counted: tuple[int, ...],
        fast: bool,
    ) -> None:
        self.function, self.layouts, self.counted, self.fast = function, layouts, counted, fast
        self.aggregation, self.output, self.extents = (
            einsum.aggregation,
            einsum.output,
            einsum.extents,
        )

    def plan(self, target: Any, aligned: bool) -> Plan:
        layout = IndexedArray(target.dtype.name, target.shape, target.strides, self.output)
        return make_plan(
            self.function,
            self.layouts,
            layout,
            self.aggregation,
            self.extents,
            self.counted,
            aligned,
        )

    def prepare(
        self, target: Any, first: Mapping[int, int], aligned: bool
    ) -> Callable[[list[int], Any], None]:
        """A function of the operands' pointers and the target."""
        plan = self.plan(target, aligned)
        if plan.parts == 1:
            launch = _launch(plan, first, self.fast)
            return lambda pointers, target: launch([*pointers, target.data.ptr])
        assert self.aggregation is not None
        total = Fold(
            self.aggregation, self.function, tuple(layout.dtype for layout in self.layouts)
        ).total
        cupy = driver.cupy()
        plan = self.plan(cupy.empty(target.shape, total), aligned)
        shape, launch = (plan.parts, *target.shape), _launch(plan, first, self.fast)
        label = "parts, joined"  # no label of a program's looks like this
        extents = (*((x, n) for x, n in self.extents if x in self.output), (label, plan.parts))
        join = EinSum(
            self.output, ((label, *self.output),), Arg(0), self.aggregation, (label,), extents
        )

        def both(pointers: list[int], target: Any) -> None:
            parts = cupy.empty(shape, total)
            launch([*pointers, parts.data.ptr])
            generate(join, [parts], target)

        return both


def _launch(plan: Plan, first: Mapping[int, int], fast: bool) -> Callable[[list[int]], None]:
    nest = plan.nest
    gathers, names = nest.gathers, list(nest.parameters())
    if any(plan.jumps[m][g][1] == 0 for m, g in gathers):
        raise IndexError("an index is out of range; 0 to -1")
    values = [
        first[x] if letter == "b" else 0 if letter in "ptr" else plan.value(letter, x, y)
        for letter, x, y in names
    ]
    places = [(place, x) for place, (letter, x, _) in enumerate(names) if letter == "p"]
    launch = Launch(
        kernel_of(nest, fast), ((plan.blocks, plan.parts), (THREADS,)), tuple(values), tuple(places)
    )
    if not gathers:
        return launch
    cupy = driver.cupy()
    told_at, report_at = names.index(("t", 0, 0)), names.index(("r", 0, 0))

    def checked(pointers: list[int]) -> None:
        told = cupy.zeros(1 + 2 * len(gathers), np.int64)
        values = list(launch.values)
        for place, array in (*launch.places, (told_at, len(pointers))):
            values[place] = [*pointers, told.data.ptr][array]
        launch.kernel(*launch.shape, tuple(values))
        if not int(told[0]):
            return
        # Once more, to see how far out of range they are.
        told[1::2], told[2::2], values[report_at] = 2**63 - 1, -(2**63), 1
        launch.kernel(*launch.shape, tuple(values))
        for (m, g), (low, high) in zip(
            gathers, told[1:].get().reshape(-1, 2).tolist(), strict=True
        ):
            check_index_range(low, high, plan.jumps[m][g][1])

    return checked


@lru_cache(maxsize=4096)
def kernel_of(nest: Nest, fast: bool) -> Any:
    return compiled(source(nest), fast)
