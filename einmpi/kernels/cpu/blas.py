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
from einmpi.graph.labels import unique
from einmpi.graph.scalar import Number
from einmpi.kernels.contraction import (
    Contraction,
    Labels,
    dense_strides,
    drop_labels,
    keep_labels,
    size_of,
)
from einmpi.kernels.contraction_split import Part, Summands, bytes_needed, split_to_fit_memory
from einmpi.kernels.cpu.blas_library.choice import matrix_product
from einmpi.kernels.lowering import Lowering, StoredArray
from einmpi.kernels.operands import Array
from einmpi.kernels.prepared import NumpyCall, PreparedCall, unchanged, view_maker

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
    stored = tuple(map(_stored, arrays))
    dtype = _product_dtype(contraction, out.dtype, arrays[:-1])
    with np.errstate(all="ignore"):
        for summands in split_to_fit_memory(contraction, stored, dtype, {}):
            _compute_part(contraction, summands, arrays, dtype)


def prepare_by_blas(
    contraction: Contraction, operands: Sequence[Array], out: Array
) -> PreparedCall:
    """Return `compute_by_blas` for arrays that are stored as these are.

    Where numpy multiplies views of the arrays, without copies, the views and the call are
    prepared. The values of integers decide how they are multiplied, so nothing is.
    """

    def compute(operands: Sequence[Array], out: Array) -> None:
        compute_by_blas(contraction, operands, out)

    product = product_of_views(contraction, operands, out)
    if product is None:
        return compute
    makers = []
    for position, view in zip(product.positions, product.views, strict=True):
        make_view = view_maker(operands[position], view)
        if make_view is None:
            return compute
        makers.append((position, make_view))
    make_target = view_maker(out, product.target)
    if make_target is None:
        return compute
    function = product.function

    def multiply(operands: Sequence[Array], out: Array) -> None:
        views = [make_view(operands[position]) for position, make_view in makers]
        function(*views, make_target(out))

    def bind(operands: Sequence[Array], out: Array) -> Callable[[], Any]:
        views = [make_view(operands[position]) for position, make_view in makers]
        return partial(function, *views, make_target(out))

    all_makers = [make_target, *(make_view for _, make_view in makers)]
    if len(makers) == 2 and all(make_view is unchanged for make_view in all_makers):
        first, second = product.positions
        return NumpyCall(
            lambda operands, out: function(operands[first], operands[second], out), bind
        )
    return NumpyCall(multiply, bind)


class ProductOfViews(NamedTuple):
    """A numpy function of views of operands, and of one of the output."""

    function: Callable[..., Any]
    positions: tuple[int, ...]  # of the operands
    views: tuple[Array, ...]
    target: Array
    is_matrix_product: bool  # of views with two dimensions, or of stacks of them


def product_of_views(
    contraction: Contraction, operands: Sequence[Array], out: Array
) -> ProductOfViews | None:
    """Return a contraction as one call on views of the arrays; None if it needs more than that."""
    if out.dtype.kind in "iu" or 0 in (extent for _, extent in contraction.extents):
        return None
    arrays = [*(operands[k] for k in contraction.positions), out]
    dtype = _product_dtype(contraction, out.dtype, arrays[:-1])
    parts = list(split_to_fit_memory(contraction, tuple(map(_stored, arrays)), dtype, {}))
    if len(parts) > 1 or len(parts[0]) > 1:
        return None
    lowering, part = parts[0][0]
    is_copied = any(order is not None for order in lowering.copies)
    if is_copied or any(lowering.conjugated) or contraction.scale != 1:
        return None
    labelled = []
    for array, index in zip(arrays, contraction.indices, strict=True):
        labelled.append(_view(array, index, part))
    product = _product(lowering, labelled)
    *factors, output = product.parts
    assert output == len(arrays) - 1, "the output comes last"
    positions = tuple(contraction.positions[number] for number in factors)
    return ProductOfViews(
        product.function,
        positions,
        product.views[:-1],
        product.views[-1],
        is_matrix_product=lowering.kernel == "matmul",
    )


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
    product_dtype = _product_dtype(contraction, np.dtype(dtype), ())
    parts = split_to_fit_memory(contraction, tuple(stored), product_dtype, {})
    return max(map(bytes_needed, parts))


def _stored(array: Array) -> StoredArray:
    is_usable = array.flags.aligned and array.dtype.isnative
    return StoredArray(array.dtype.name, array.strides, is_usable)


def _product_dtype(contraction: Contraction, dtype: np.dtype[Any], factors: Iterable[Array]) -> str:
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
        return [_view(array, index, part) for array, index in pairs]

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
    _copy_into(target, total)


def _execute(lowering: Lowering, views: list[LabelledArray], scale: Number) -> None:
    """Copy the factors, multiply, and copy the product to the output.

    On the way the arrays that the lowering names are conjugated and scaled.
    """
    parts = list(views)
    for k, order in enumerate(lowering.copies):
        if order is not None:
            extent = dict(zip(views[k].labels, views[k].array.shape, strict=True))
            shape = [extent[label] for label in order]
            parts[k] = LabelledArray(np.empty(shape, lowering.dtype), order)
    output = len(parts) - 1
    for k, (array, _) in enumerate(parts):
        if k == output:
            _product(lowering, parts).compute()
        elif parts[k] is not views[k]:
            _copy_into(parts[k], views[k])
        if lowering.conjugated[k]:
            np.conjugate(array, out=array)
        if lowering.scaled == k and scale != 1:
            np.multiply(array, _constant(scale, array.dtype), out=array)
    if parts[output] is not views[output]:
        _copy_into(views[output], parts[output])


def _constant(scale: Any, dtype: np.dtype[Any]) -> Any:
    """Return the constant for an array of this dtype; an integer wraps around like its products."""
    if dtype.kind in "biu":
        return np.array(scale % 2**64, "u8").astype(dtype)
    return scale


class _Product(NamedTuple):
    """A numpy function of views of the parts, the output's last, and which part each view is of."""

    function: Callable[..., Any]
    views: tuple[Array, ...]
    parts: tuple[int, ...]

    def compute(self) -> None:
        self.function(*self.views)


def _product(lowering: Lowering, parts: list[LabelledArray]) -> _Product:
    """Return the product of the first parts into the last one, as the lowering says."""
    out, labels = parts[-1]
    if lowering.kernel == "reduce":
        copy = _copy(parts[1], parts[0])
        return _Product(copy.function, copy.views, (0, 1))
    if lowering.kernel == "multiply":
        # numpy is faster if its innermost loop walks along the first factor.
        first, second = 0, 1
        if labels and labels[-1] not in parts[0].labels:
            first, second = 1, 0
        left = _stack(parts[first], labels)
        right = _stack(parts[second], labels)
        multiply = partial(np.multiply, dtype=np.dtype(lowering.dtype), casting="unsafe")
        return _Product(multiply, (left, right, out), (first, second, 2))
    if lowering.kernel == "einsum":
        names = unique(parts[0].labels, parts[1].labels)
        axes = [list(map(names.index, part.labels)) for part in parts]
        contract = partial(_sum_products, axes, np.dtype(lowering.dtype))
        return _Product(contract, (parts[0].array, parts[1].array, out), (0, 1, 2))
    rows, contracted, columns = lowering.matrix
    left = _stack(parts[0], lowering.loops, rows, contracted)
    right = _stack(parts[1], lowering.loops, contracted, columns)
    target = _stack(parts[2], lowering.loops, rows, columns)
    multiply_matrices = matrix_product(left, right, target)
    return _Product(multiply_matrices, (left, right, target), (0, 1, 2))


def _sum_products(
    axes: list[list[int]], dtype: np.dtype[Any], left: Array, right: Array, out: Array
) -> None:
    """Multiply two arrays and sum along the axes that the output does not have."""
    numpy_einsum(left, axes[0], right, axes[1], axes[2], out=out, dtype=dtype, casting="unsafe")


def _view(array: Array, index: Labels, part: Part) -> LabelledArray:
    """Return a view of a part of an array, as a labelled array.

    A label that occurs twice stands for the diagonal, which becomes a single axis. Axes of extent
    1 are left out.
    """
    labels = index
    if part:
        region: Any = tuple(slice(*part.get(label, (None,))) for label in index)
        array = array[(..., *region)]
    if len(set(index)) < len(index):
        labels = unique(index)
        axes = [labels.index(label) for label in index]
        array = numpy_einsum(array, axes, list(range(len(labels))))
    if 1 in array.shape:
        labels = tuple(x for x, extent in zip(labels, array.shape, strict=True) if extent != 1)
        array = array.reshape([extent for extent in array.shape if extent != 1])
    return LabelledArray(array, labels)


def _stack(part: LabelledArray, loops: Labels, *groups: Labels) -> Array:
    """Return a view with an axis for each label of `loops`, then one for each group of labels.

    A label of `loops` that the array lacks becomes an axis of extent 1.
    """
    array, labels = part
    extent = dict(zip(labels, array.shape, strict=True))
    order = keep_labels(chain(loops, *groups), extent)
    shape = [extent.get(label, 1) for label in loops]
    shape += [size_of(group, extent) for group in groups]
    return array.transpose([labels.index(label) for label in order]).reshape(shape)


class _Copy(NamedTuple):
    """A numpy function of a view of an array and of the array that it is copied to."""

    function: Callable[..., Any]
    views: tuple[Array, Array]


def _copy(target: LabelledArray, source: LabelledArray) -> _Copy:
    """Return a copy into another array, whatever the order of their labels and their dtypes.

    Labels that only the source has are summed; along those that only the target has, it repeats.
    """
    summed = drop_labels(source.labels, target.labels)
    array = _stack(source, target.labels + summed)
    if summed:
        axes = tuple(range(-len(summed), 0))
        dtype = target.array.dtype
        return _Copy(partial(_sum_axes, axes, dtype), (array, target.array))
    return _Copy(_convert, (array, target.array))


def _sum_axes(axes: tuple[int, ...], dtype: np.dtype[Any], source: Array, target: Array) -> None:
    np.add.reduce(source, axes, dtype, out=target)


def _convert(source: Array, target: Array) -> None:
    np.copyto(target, source, casting="unsafe")


def _copy_into(target: LabelledArray, source: LabelledArray) -> None:
    """Copy an array into another one, whatever the order of their labels and their dtypes."""
    copy = _copy(target, source)
    copy.function(*copy.views)
