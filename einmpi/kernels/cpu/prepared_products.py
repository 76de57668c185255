"""Contractions that are repeated on arrays stored in the same way: what is copied and which views
BLAS multiplies is found out once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from einmpi.kernels.contraction import Contraction
from einmpi.kernels.contraction_split import LoweredPart, split_to_fit_memory
from einmpi.kernels.cpu.blas import (
    LabelledArray,
    calls_of,
    compute_by_blas,
    copy_shape,
    product_dtype_of,
    product_of_parts,
    stored_array,
    view_without_ones,
)
from einmpi.kernels.cpu.temporaries import temporary_arrays
from einmpi.kernels.operands import Array
from einmpi.kernels.prepared import NumpyCall, PreparedCall, ViewMaker, unchanged, view_maker


class _PreparedCall(NamedTuple):
    """A function, and its arguments: the number of an array and what makes a view of it."""

    function: Callable[..., Any]
    arguments: tuple[tuple[int, ViewMaker], ...]


def prepare_by_blas(
    contraction: Contraction, operands: Sequence[Array], out: Array
) -> PreparedCall:
    """Return `compute_by_blas` for arrays that are stored as these are.

    The views and calls are prepared, unless the work is so large that it is split. The values of
    integers decide how they are multiplied, so nothing is prepared for them.
    """
    product = product_of_views(contraction, operands, out)
    prepared = None
    if product is not None:
        prepared = _prepare_views(product, operands, out)
    elif (single := _single_part(contraction, operands, out)) is not None:
        prepared = _prepare_copies(contraction, single, operands, out)
    if prepared is not None:
        return prepared

    def compute(operands: Sequence[Array], out: Array) -> None:
        compute_by_blas(contraction, operands, out)

    return compute


def _prepare_views(
    product: ProductOfViews, operands: Sequence[Array], out: Array
) -> PreparedCall | None:
    """Prepare one call on views of the arrays; return None if the views cannot be made again."""
    makers = []
    for position, view in zip(product.positions, product.views, strict=True):
        make_view = view_maker(operands[position], view)
        if make_view is None:
            return None
        makers.append((position, make_view))
    make_target = view_maker(out, product.target)
    if make_target is None:
        return None
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


def _prepare_copies(
    contraction: Contraction, single: LoweredPart, operands: Sequence[Array], out: Array
) -> PreparedCall | None:
    """Prepare a product of copies of some arrays; return None if views cannot be made again."""
    lowering, part = single
    positions = contraction.positions
    arrays = [*(operands[k] for k in positions), out]
    views = []
    for array, index in zip(arrays, contraction.indices, strict=True):
        views.append(view_without_ones(array, index, part))
    orders = lowering.copies
    copied = [k for k, order in enumerate(orders) if order is not None]
    shapes = [copy_shape(views[k], order) for k, order in enumerate(orders) if order is not None]
    dtype = np.dtype(lowering.dtype)
    memory_of: dict[int, Array] = dict(zip(copied, temporary_arrays(shapes, dtype), strict=True))
    copies: list[LabelledArray | None] = []
    for k, order in enumerate(orders):
        copies.append(None if order is None else LabelledArray(memory_of[k], order))
    owners = dict(enumerate(arrays))
    owners |= {k + len(arrays): memory for k, memory in memory_of.items()}
    prepared = []
    for call in calls_of(lowering, views, copies, contraction.scale):
        arguments = []
        for view, owner in zip(call.arrays, call.owners, strict=True):
            make_view = view_maker(owners[owner], view)
            if make_view is None:
                return None
            # In a call the copies follow the other arrays without gaps.
            number = owner
            if owner >= len(arrays):
                number = len(arrays) + copied.index(owner - len(arrays))
            arguments.append((number, make_view))
        prepared.append(_PreparedCall(call.function, tuple(arguments)))

    def compute(operands: Sequence[Array], out: Array) -> None:
        arrays = [operands[k] for k in positions]
        arrays.append(out)
        arrays += temporary_arrays(shapes, dtype)
        for function, arguments in prepared:
            function(*[make_view(arrays[number]) for number, make_view in arguments])

    def bind(operands: Sequence[Array], out: Array) -> Callable[[], Any]:
        return partial(compute, operands, out)

    return NumpyCall(compute, bind)


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
    single = _single_part(contraction, operands, out)
    if single is None:
        return None
    lowering, part = single
    is_copied = any(order is not None for order in lowering.copies)
    if is_copied or any(lowering.conjugated) or contraction.scale != 1:
        return None
    arrays = [*(operands[k] for k in contraction.positions), out]
    labelled = []
    for array, index in zip(arrays, contraction.indices, strict=True):
        labelled.append(view_without_ones(array, index, part))
    product = product_of_parts(lowering, labelled)
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


def _single_part(
    contraction: Contraction, operands: Sequence[Array], out: Array
) -> LoweredPart | None:
    """Return how a contraction is computed if it is not split; None also if values decide."""
    if out.dtype.kind in "iu" or 0 in (extent for _, extent in contraction.extents):
        return None
    arrays = [*(operands[k] for k in contraction.positions), out]
    dtype = product_dtype_of(contraction, out.dtype, arrays[:-1])
    parts = list(split_to_fit_memory(contraction, tuple(map(stored_array, arrays)), dtype, {}))
    if len(parts) > 1 or len(parts[0]) > 1:
        return None
    return parts[0][0]
