"""Updates such as W − rate · Σ(X · D), written over W: one matrix product that BLAS adds to W."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from einmpi.caches import bounded_cache
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Call, Const, Scalar
from einmpi.kernels.contraction import Contraction, exact_contraction
from einmpi.kernels.cpu.blas_library.choice import BlasCall, blas_in_use, call_for
from einmpi.kernels.cpu.blas_library.records import (
    UNKNOWN_LIBRARY,
    LoadedBlas,
    UnusableLibraryError,
    load_blas,
)
from einmpi.kernels.cpu.prepared_products import product_of_views
from einmpi.kernels.operands import Array
from einmpi.kernels.prepared import ViewMaker, address_of, apply, view_maker
from einmpi.process.environment import loaded_blas
from einmpi.schedule.compute import Compute, Kernel

# ---- added products ------------------------------------------------------------------------------
#
# Matrix products that are added to an array, out ← α · left · right + β · out, by BLAS.


REAL_DTYPES = ("float32", "float64")


def can_add_product(left: Array, right: Array, out: Array) -> bool:
    """Return whether `add_product` can be called with arrays that are stored like these."""
    return _call(left, right, out) is not None


def add_product(left: Array, right: Array, out: Array, alpha: float, beta: float) -> None:
    """Replace `out` by α · left · right + β · out, in place.

    The arrays are matrices of one dtype for which `can_add_product` holds. BLAS may leave out the
    product if α is 0, so that inf and nan in it are lost.
    """
    call = _call(left, right, out)
    assert call is not None
    call.multiply(left, right, out, alpha, beta)


def subtract_product(left: Array, right: Array, out: Array) -> None:
    """Subtract a product of matrices from a matrix, in place."""
    call = _call(left, right, out, out.dtype.name)
    if call is None:
        out -= left @ right
        return
    minus = np.array([-1], out.dtype)
    one: Any = call.functions.one
    call.multiply(left, right, out, -1.0 if out.dtype.kind == "f" else address_of(minus), one)


def _call(left: Array, right: Array, out: Array, *dtypes: str) -> BlasCall | None:
    """Return the call for matrices that are stored like these; None if there is none."""
    library = blas_in_use().library or _numpy_blas()
    if library is None or out.ndim != 2 or out.dtype.name not in (dtypes or REAL_DTYPES):
        return None
    return call_for(library, left, right, out)


@cache
def _numpy_blas() -> LoadedBlas | None:
    """Return numpy's own BLAS; None if its functions are not found, or not right."""
    found = loaded_blas()
    if found is None:
        return None
    try:
        return load_blas(UNKNOWN_LIBRARY, found["filepath"])
    except UnusableLibraryError:
        return None


# An update, given the arrays of slots by name. None: compute it in another way.
UpdateCall: TypeAlias = Callable[[Mapping[str, Array]], int | None]

ONE = Const(1)
# Of a product, in scalar multiplications. Smaller ones take less time than the call of BLAS.
MIN_MULTIPLICATIONS = 2**18


@dataclass(frozen=True)
class LinearUpdate:
    """An EinSum that adds multiples of two operands, element by element.

    Attributes
    ----------
    old
        The operand beside the product: the tensor that is updated.
    old_factor, product_factor
        The numbers that multiply both, as expressions of operands without dimensions.
    """

    old: int
    old_factor: Scalar
    product_factor: Scalar


@bounded_cache(1024)
def find_linear_update(einsum: EinSum, product: int) -> LinearUpdate | None:
    """Return what an EinSum adds to a multiple of an operand; None if it is of another form."""
    function = einsum.function
    if not einsum.is_elementwise or not isinstance(function, Call):
        return None
    factors = _factors(einsum, function)
    if factors is None or len(factors) != 2 or product not in factors:
        return None
    (old,) = set(factors) - {product}
    for position in (old, product):
        labels = einsum.operands[position]
        if labels != einsum.output or len(set(labels)) < len(labels):
            return None
    return LinearUpdate(old, factors[old], factors[product])


def _factors(einsum: EinSum, node: Scalar) -> dict[int, Scalar] | None:
    """Return an expression as a sum of operands, each times a number; None if it is not one."""
    match node:
        case Arg(position):
            return {position: ONE}
        case Call("neg", (inner,)):
            return _multiplied(_factors(einsum, inner), _negative)
        case Call("+" | "-", (left, right)):
            first = _factors(einsum, left)
            second = _factors(einsum, right)
            if node.op == "-":
                second = _multiplied(second, _negative)
            if first is None or second is None or set(first) & set(second):
                return None
            return {**first, **second}
        case Call("*", (left, right)) if einsum.is_one_number(left):
            return _multiplied(_factors(einsum, right), lambda factor: Call("*", (left, factor)))
        case Call("*", (left, right)) if einsum.is_one_number(right):
            return _multiplied(_factors(einsum, left), lambda factor: Call("*", (right, factor)))
        case Call("/", (left, right)) if einsum.is_one_number(right):
            return _multiplied(_factors(einsum, left), lambda factor: Call("/", (factor, right)))
    return None


def _negative(factor: Scalar) -> Scalar:
    return Call("neg", (factor,))


def _multiplied(
    factors: dict[int, Scalar] | None, multiply: Callable[[Scalar], Scalar]
) -> dict[int, Scalar] | None:
    """Return all factors multiplied by a number."""
    if factors is None:
        return None
    return {position: multiply(factor) for position, factor in factors.items()}


def is_product_update(product: Kernel, update: Kernel, strict: bool) -> bool:
    """Return whether BLAS may add a product to the tensor that is updated."""
    if product.select or update.select or update.operands.count(product.target) != 1:
        return False
    form = find_linear_update(update.einsum, update.operands.index(product.target))
    if form is None:
        return False
    old = update.operands[form.old]
    if old in product.operands or update.target in product.operands:
        return False
    dtype = update.target.dtype
    used_dtypes = {product.target.dtype, old.dtype, *product.operand_dtypes}
    if dtype not in REAL_DTYPES or used_dtypes != {dtype}:
        return False
    einsum = product.einsum
    if einsum.calls() < MIN_MULTIPLICATIONS or einsum.aggregation != "sum":
        return False
    if einsum.has_special_form or einsum.sums_blocks:
        return False
    if einsum.reads_diagonals or not einsum.is_indexed_by_labels:
        return False
    contraction = exact_contraction(einsum, product.operand_dtypes, strict)
    if contraction is None or len(contraction.positions) != 2:
        return False
    return not _is_matrix_times_vector(contraction)


def _is_matrix_times_vector(contraction: Contraction) -> bool:
    """Return whether a factor has no label of extent above 1 that the other one lacks.

    BLAS has a function of its own for that, which takes less time than a product of matrices, and
    the result is so small that adding it takes none.
    """
    extent = dict(contraction.extents)
    left, right, output = contraction.indices
    for own, other in ((left, right), (right, left)):
        if all(extent[label] == 1 or label in other or label not in output for label in own):
            return True
    return False


# ---- at run time ---------------------------------------------------------------------------------


def prepare_product_update(
    step: Compute, arrays: Mapping[str, Array], strict: bool
) -> UpdateCall | None:
    """Return an update as one product that is added in place; None if BLAS cannot compute it."""
    product_kernel, update_kernel = step.kernels
    if not is_product_update(product_kernel, update_kernel, strict):
        return None
    target = arrays[update_kernel.target.name]
    position = update_kernel.operands.index(product_kernel.target)
    form = find_linear_update(update_kernel.einsum, position)
    operands = [arrays[slot.name] for slot in product_kernel.operands]
    contraction = exact_contraction(
        product_kernel.einsum, [array.dtype.name for array in operands], strict
    )
    assert form is not None and contraction is not None
    scale = contraction.scale
    product = product_of_views(replace(contraction, scale=1), operands, target)
    if product is None or not product.is_matrix_product or isinstance(scale, complex):
        return None
    left, right = product.views
    if not can_add_product(left, right, product.target):
        return None
    makers: list[tuple[str, ViewMaker]] = []
    for position, view in zip(product.positions, product.views, strict=True):
        make_view = view_maker(operands[position], view)
        if make_view is None:
            return None
        makers.append((product_kernel.operands[position].name, make_view))
    make_target = view_maker(target, product.target)
    if make_target is None:
        return None
    (left_name, make_left), (right_name, make_right) = makers
    old_name = update_kernel.operands[form.old].name
    target_name = update_kernel.target.name
    limits = np.finfo(target.dtype)

    def update(arrays: Mapping[str, Array]) -> int | None:
        target = arrays[target_name]
        numbers = number_operands(update_kernel, arrays)
        alpha = scale * float(apply(form.product_factor, numbers, {}))
        beta = float(apply(form.old_factor, numbers, {}))
        for number in (alpha, beta):
            if not limits.tiny <= abs(number) <= limits.max:
                return None  # BLAS would lose inf and nan, or make them
        old = arrays[old_name]
        if address_of(old) != address_of(target):
            target[...] = old
        left = make_left(arrays[left_name])
        right = make_right(arrays[right_name])
        add_product(left, right, make_target(target), alpha, beta)
        return 0

    return update


def number_operands(update: Kernel, arrays: Mapping[str, Array]) -> Sequence[Any]:
    """Return the arrays of operands without dimensions; None in place of all others."""
    found: list[Any] = [None] * len(update.operands)
    for position, slot in enumerate(update.operands):
        if slot.shape == ():
            found[position] = arrays[slot.name]
    return found
