"""One EinSum on a GPU: a product of matrices by cuBLAS, everything else by one generated kernel, compiled once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from einmpi.graph.einsum import AGGREGATIONS, EinSum
from einmpi.graph.scalar import Arg, Scalar
from einmpi.runtime.contract import recognise
from einmpi.runtime.cuda_contract import contract
from einmpi.runtime.cuda_launch import compiled, cupy
from einmpi.runtime.cuda_nest import PACK, THREADS, Nest, Plan
from einmpi.runtime.cuda_plan import make_plan
from einmpi.runtime.cuda_source import source
from einmpi.runtime.cuda_text import Fold
from einmpi.runtime.fused import check_range, numbered, without_constants
from einmpi.runtime.loop_plan import Layout


def compute(einsum: EinSum, operands: Sequence[Any], target: Any, index: Mapping[str, np.ndarray],
            fast_math: bool = False, tf32: bool = False) -> None:  # fmt: skip
    """Fill `target`. Extents are those of the arrays; `index` has the indices that a label's positions stand for.
    `fast_math` allows what rounds more, `tf32` products of float32 with ten bits of fraction."""
    extent = einsum.extent
    if 0 in einsum.bound:
        return
    rule = AGGREGATIONS[einsum.aggregation] if einsum.aggregation else None
    if rule and any(extent[label] == 0 for label in einsum.aggregated):
        if rule.neutral is None:
            raise ValueError(f"{einsum.aggregation} of nothing has no value")
        target[...] = rule.neutral
        return
    contraction = recognise(einsum)
    if contraction is None or not contract(contraction, operands, target, tf32, generate):
        generate(einsum, operands, target, index, fast_math)


def generate(einsum: EinSum, operands: Sequence[Any], target: Any, index: Mapping[str, np.ndarray],
             fast_math: bool = False) -> None:  # fmt: skip
    """Fill `target` by a generated kernel."""
    function, indices, labels = numbered(einsum)
    views = [without_constants(_aligned(array), entries) for array, entries in zip(operands, indices, strict=False)]
    counted, first = [], {}
    for number, label in enumerate(labels, len(operands)):
        given = np.asarray(index.get(label, np.arange(einsum.extent[label])), np.int64)
        if len(given) == 0 or np.array_equal(given, np.arange(given[0], given[0] + len(given))):
            counted.append(number)
            first[number] = int(given[0]) if len(given) else 0
        else:
            given = cupy().asarray(given)
        views.append((given, (label,)))
    layouts = tuple(Layout(array.dtype.name, array.shape, array.strides, entries) for array, entries in views)
    _run(function, einsum.aggregation, einsum.extents, layouts, [array for array, _ in views], einsum.output, target,
         tuple(counted), first, fast_math)  # fmt: skip


def _run(function: Scalar, aggregation: str | None, extents: tuple[tuple[str, int], ...], layouts: tuple[Layout, ...],
         arrays: Sequence[Any], output: tuple[str, ...], target: Any, counted: tuple[int, ...],
         first: Mapping[int, int], fast: bool) -> None:  # fmt: skip
    pointers = [target.data.ptr, *(array.data.ptr for m, array in enumerate(arrays) if m not in counted)]
    aligned = not any(pointer % PACK for pointer in pointers)

    def planned(out: Any) -> Plan:
        layout = Layout(out.dtype.name, out.shape, out.strides, output)
        return make_plan(function, layouts, layout, aggregation, extents, counted, aligned)

    plan = planned(target)
    if plan.parts == 1:
        _launch(plan, arrays, target, first, fast)
        return
    assert aggregation is not None
    total = Fold(aggregation, function, tuple(layout.dtype for layout in layouts)).total
    plan = planned(cupy().ndarray(target.shape, total))
    parts = cupy().empty((plan.parts, *target.shape), total)
    _launch(plan, arrays, parts, first, fast)
    label = "part"  # it need only differ from the others
    while label in output:
        label += "'"
    joined = (*((x, n) for x, n in extents if x in output), (label, plan.parts))
    layout = Layout(total, parts.shape, parts.strides, (label, *output))
    _run(Arg(0), aggregation, joined, (layout,), [parts], output, target, (), {}, fast)


def _aligned(array: Any) -> Any:
    return cupy().ascontiguousarray(array) if any(s % array.itemsize for s in array.strides) else array


def _launch(plan: Plan, arrays: Sequence[Any], target: Any, first: Mapping[int, int], fast: bool) -> None:
    nest = plan.nest
    gathers = nest.gathers
    if any(plan.jumps[m][g][1] == 0 for m, g in gathers):
        raise IndexError("an index is out of range; 0 to -1")
    told = cupy().zeros(1 + 2 * len(gathers), np.int64) if gathers else None
    pointers = [*(getattr(array, "data", None) for array in arrays), target.data]

    def values(report: int) -> list[Any]:
        given = {"p": lambda m: pointers[m].ptr, "t": lambda m: told.data.ptr, "r": lambda m: report,
                 "b": lambda m: first[m]}  # fmt: skip
        return [given[letter](x) if letter in given else plan.value(letter, x, y) for letter, x, y in nest.parameters()]

    kernel = kernel_of(nest, fast)
    shape = (plan.blocks, plan.parts), (THREADS,)
    kernel(*shape, tuple(values(0)))
    if told is None or not int(told[0]):
        return
    # Once more, to see how far out of range they are.
    told[1::2], told[2::2] = 2**63 - 1, -(2**63)
    kernel(*shape, tuple(values(1)))
    for (m, g), (low, high) in zip(gathers, told[1:].get().reshape(-1, 2).tolist(), strict=True):
        check_range(low, high, plan.jumps[m][g][1])


@lru_cache(maxsize=4096)
def kernel_of(nest: Nest, fast: bool) -> Any:
    return compiled(source(nest), fast)
