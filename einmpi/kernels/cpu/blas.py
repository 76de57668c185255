"""Contractions as numpy computes them, or as matrix products of BLAS, with few copies.

Which copies are made, and of which parts, is decided in lowering and contraction_split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import numpy as np

from einmpi.graph.dtypes import DTYPES
from einmpi.graph.scalar import Number, unique
from einmpi.kernels.contraction import (
    Contraction,
    Labels,
    dense_strides,
    drop_labels,
    keep_labels,
    size_of,
)
from einmpi.kernels.cpu.blas_library.choice import matrix_product
from einmpi.kernels.cpu.reproducible.products import multiply_blocks
from einmpi.kernels.lowering import (
    Lowering,
    Part,
    StoredArray,
    Summands,
    bytes_needed,
    split_to_fit_memory,
)
from einmpi.kernels.operands import Array, part_of_array

numpy_einsum = np.einsum  # whatever a caller puts in its place, such as einmpi.einsum
MAX_EXACT_INTEGER = 2**53  # float64 holds every integer up to here


class LabelledArray(NamedTuple):
    """An array with a label for each axis: every label once, and none of extent 1."""

    array: Array
    labels: Labels


def compute_by_blas(contraction: Contraction, operands: Sequence[Array], out: Array) -> None:
    """Contract the operands into `out`.

    Parameters
    ----------
    contraction
        What to compute; its extents are those of the arrays.
    operands
        All operands of the EinSum; `contraction.positions` tells which of them are factors.
    out
        The output, of the dtype of the EinSum.
    """
    if 0 in (extent for _, extent in contraction.extents):
        out[...] = 0
        return
    arrays = [*(operands[k] for k in contraction.positions), out]
    stored = tuple(map(stored_array, arrays))
    dtype = product_dtype_of(contraction, out.dtype, arrays[:-1])
    with np.errstate(all="ignore"):
        for summands in split_to_fit_memory(contraction, stored, dtype, {}):
            _compute_part(contraction, summands, arrays, dtype)


def workspace_bytes(contraction: Contraction, dtypes: Sequence[str], dtype: str) -> int:
    """Return the bytes of temporaries that `compute_by_blas` needs for C-contiguous arrays.

    For integers it is an upper bound, since their values decide how they are multiplied.
    """
    extent = dict(contraction.extents)
    if 0 in extent.values():
        return 0
    names = [*(dtypes[k] for k in contraction.positions), dtype]
    stored = []
    for name, index in zip(names, contraction.indices, strict=True):
        strides = dense_strides(index, extent, np.dtype(name).itemsize)
        stored.append(StoredArray(name, strides))
    product_dtype = product_dtype_of(contraction, np.dtype(dtype), ())
    parts = split_to_fit_memory(contraction, tuple(stored), product_dtype, {})
    return max(map(bytes_needed, parts))


def stored_array(array: Array) -> StoredArray:
    is_usable = array.flags.aligned and array.dtype.isnative
    return StoredArray(array.dtype.name, array.strides, is_usable)


def product_dtype_of(
    contraction: Contraction, dtype: np.dtype[Any], factors: Iterable[Array]
) -> str:
    """Return the dtype in which products are computed and summed.

    Half precision is summed in float32. BLAS multiplies integers as float64, provided that no sum
    of them can exceed the integers that float64 holds exactly.
    """
    if dtype.name in DTYPES and DTYPES[dtype.name].is_half:
        return "float32"
    if dtype.kind not in "iu" or len(contraction.positions) == 1:
        return dtype.name
    if dtype.kind == "u" and contraction.scale.real < 0:
        return dtype.name  # wraps around
    extent = dict(contraction.extents)
    terms = size_of(drop_labels(extent, contraction.indices[-1]), extent)
    largest_product = prod(max(1, -int(array.min()), int(array.max())) for array in factors)
    largest_sum = terms * abs(contraction.scale) * largest_product
    if terms > 1 and largest_sum <= MAX_EXACT_INTEGER:
        return "float64"
    return dtype.name


def _compute_part(
    contraction: Contraction, summands: Summands, arrays: Sequence[Array], dtype: str
) -> None:
    """Compute one part of the output as a sum of products.

    A sum of several products stays in their dtype until it is complete.
    """

    def views_of(part: Part) -> list[LabelledArray]:
        pairs = zip(arrays, contraction.indices, strict=True)
        return [view_without_ones(array, index, part) for array, index in pairs]

    first, *others = summands
    *factors, target = views_of(first.part)
    if not others:
        _execute(first.lowering, [*factors, target], contraction.scale)
        return
    total = LabelledArray(np.empty(target.array.shape, dtype), target.labels)
    term = LabelledArray(np.empty(target.array.shape, dtype), target.labels)
    _execute(first.lowering, [*factors, total], contraction.scale)
    for lowering, part in others:
        factors = views_of(part)[:-1]
        _execute(lowering, [*factors, term], contraction.scale)
        np.add(total.array, term.array, out=total.array)
    _call_copy(target, total, (0, 1)).run()


def _execute(lowering: Lowering, views: list[LabelledArray], scale: Number) -> None:
    """Copy the factors, multiply, and copy the product to the output."""
    copies = [np.empty(shape, lowering.dtype) for shape in copy_shapes(lowering, views)]
    for call in calls_of(lowering, views, copies, scale):
        call.run()


def copy_shapes(lowering: Lowering, views: Sequence[LabelledArray]) -> list[tuple[int, ...]]:
    """Return the shapes of the copies that a lowering makes."""
    shapes = []
    for view, order in zip(views, lowering.copies, strict=True):
        if order is not None:
            extent = dict(zip(view.labels, view.array.shape, strict=True))
            shapes.append(tuple(extent[label] for label in order))
    return shapes


class Call(NamedTuple):
    """A function of views of arrays, the one that is written last.

    `owners` tells of which array each is a view: a factor, the output, or one of the copies, which
    are numbered after these.
    """

    function: Callable[..., Any]
    arrays: tuple[Array, ...]
    owners: tuple[int, ...]

    def run(self) -> None:
        self.function(*self.arrays)


def calls_of(
    lowering: Lowering,
    views: Sequence[LabelledArray],
    copies: Sequence[Array],
    scale: Number,
) -> list[Call]:
    """Return the calls that contract factors into an output, one after another.

    On the way the arrays that the lowering names are conjugated and scaled.

    Parameters
    ----------
    lowering
        The way to contract.
    views
        The factors and the output.
    copies
        Memory for those of them that the lowering copies, of the shapes in `copy_shapes`.
    scale
        The constant in the sum.
    """
    parts = list(views)
    owners = list(range(len(views)))
    copied = [k for k, order in enumerate(lowering.copies) if order is not None]
    for number, (k, copy) in enumerate(zip(copied, copies, strict=True)):
        parts[k] = LabelledArray(copy, lowering.copies[k] or ())
        owners[k] = len(views) + number
    output = len(views) - 1
    calls = []
    for k, part in enumerate(parts):
        if k == output:
            calls.append(_call_product(lowering, parts, owners))
        elif owners[k] != k:
            calls.append(_call_copy(part, views[k], (k, owners[k])))
        if lowering.conjugated[k]:
            calls.append(Call(_conjugate, (part.array,), (owners[k],)))
        if lowering.scaled == k and scale != 1:
            constant = _constant(scale, part.array.dtype)
            calls.append(Call(partial(_multiply, constant), (part.array,), (owners[k],)))
    if owners[output] != output:
        calls.append(_call_copy(views[output], parts[output], (owners[output], output)))
    return calls


def _conjugate(array: Array) -> None:
    np.conjugate(array, out=array)


def _multiply(constant: Any, array: Array) -> None:
    np.multiply(array, constant, out=array)


def _constant(scale: Any, dtype: np.dtype[Any]) -> Any:
    """Return the constant for an array of this dtype; an integer wraps around like its products."""
    if dtype.kind in "biu":
        return np.array(scale % 2**64, "u8").astype(dtype)
    return scale


def _call_product(lowering: Lowering, parts: list[LabelledArray], owners: list[int]) -> Call:
    """Return the product of the first parts into the last one, as the lowering says."""
    if lowering.kernel == "reduce":
        return _call_copy(parts[1], parts[0], (owners[0], owners[1]))
    function: Callable[..., Any]
    first, second = 0, 1
    target, labels = parts[2]
    if lowering.kernel == "multiply":
        # numpy is faster if its innermost loop walks along the first factor.
        if labels and labels[-1] not in parts[0].labels:
            first, second = 1, 0
        left = stack(parts[first], labels)
        right = stack(parts[second], labels)
        function = partial(np.multiply, dtype=np.dtype(lowering.dtype), casting="unsafe")
    elif lowering.kernel == "einsum":
        names = unique(parts[0].labels, parts[1].labels)
        axes = [list(map(names.index, part.labels)) for part in parts]
        left = parts[0].array
        right = parts[1].array
        function = partial(_sum_products, axes, np.dtype(lowering.dtype))
    else:
        rows, contracted, columns = lowering.matrix
        left = stack(parts[0], lowering.loops, rows, contracted)
        right = stack(parts[1], lowering.loops, contracted, columns)
        target = stack(parts[2], lowering.loops, rows, columns)
        if lowering.blocks is None:
            function = matrix_product(left, right, target)
        else:
            function = partial(multiply_blocks, lowering.blocks)
    return Call(function, (left, right, target), (owners[first], owners[second], owners[2]))


def _sum_products(
    axes: list[list[int]], dtype: np.dtype[Any], left: Array, right: Array, out: Array
) -> None:
    """Multiply two arrays and sum along the axes that the output does not have."""
    numpy_einsum(left, axes[0], right, axes[1], axes[2], out=out, dtype=dtype, casting="unsafe")


def view_without_ones(array: Array, index: Labels, part: Part) -> LabelledArray:
    """Return a view of a part of an array, as a labelled array.

    A label that occurs twice stands for the diagonal, which becomes a single axis. Axes of extent
    1 are left out.
    """
    labels = index
    if part:
        array = part_of_array(array, index, {label: slice(*ends) for label, ends in part.items()})
    if len(set(index)) < len(index):
        labels = unique(index)
        axes = [labels.index(label) for label in index]
        array = numpy_einsum(array, axes, list(range(len(labels))))
    if 1 in array.shape:
        labels = tuple(x for x, extent in zip(labels, array.shape, strict=True) if extent != 1)
        array = array.reshape([extent for extent in array.shape if extent != 1])
    return LabelledArray(array, labels)


def stack(part: LabelledArray, loops: Labels, *groups: Labels) -> Array:
    """Return a view with an axis for each label of `loops`, then one for each group of labels.

    A label of `loops` that the array lacks becomes an axis of extent 1.
    """
    array, labels = part
    extent = dict(zip(labels, array.shape, strict=True))
    order = keep_labels(chain(loops, *groups), extent)
    shape = [extent.get(label, 1) for label in loops]
    shape += [size_of(group, extent) for group in groups]
    return array.transpose([labels.index(label) for label in order]).reshape(shape)


def _call_copy(target: LabelledArray, source: LabelledArray, owners: tuple[int, int]) -> Call:
    """Return a copy into another array, whatever the order of their labels and their dtypes.

    Labels that only the source has are summed; along those that only the target has, it repeats.
    `owners` are those of the source and of the target.
    """
    summed = drop_labels(source.labels, target.labels)
    array = stack(source, target.labels + summed)
    function: Callable[..., Any] = _convert
    if summed:
        function = partial(_sum_axes, tuple(range(-len(summed), 0)), target.array.dtype)
    return Call(function, (array, target.array), owners)


def _sum_axes(axes: tuple[int, ...], dtype: np.dtype[Any], source: Array, target: Array) -> None:
    np.add.reduce(source, axes, dtype, out=target)


def _convert(source: Array, target: Array) -> None:
    np.copyto(target, source, casting="unsafe")
