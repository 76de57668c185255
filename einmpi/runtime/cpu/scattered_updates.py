"""Updates of the rows that a scattered sum has values for, as one compiled pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TypeAlias

from einmpi.kernels.cpu.dispatch import worth_compiling
from einmpi.kernels.cpu.updates.product_updates import number_operands
from einmpi.kernels.cpu.updates.scattered_updates import (
    ScatteredUpdate,
    can_change,
    changed_rows,
    find_row_update,
    prepare_factor,
)
from einmpi.runtime.backend import HostArray
from einmpi.runtime.cpu.kernels import KernelOptions
from einmpi.schedule.blocked_updates import SparseBlockedUpdate
from einmpi.schedule.regions import indices
from einmpi.schedule.slots import names_of

# An update of rows of a target, given the arrays of slots, and the row that each value goes to.
ScatteredUpdateCall: TypeAlias = Callable[[Mapping[str, HostArray], HostArray, HostArray], bool]


def prepare_scattered_update(
    step: SparseBlockedUpdate,
    arrays: Mapping[str, HostArray],
    places: HostArray,
    target: HostArray,
    options: KernelOptions,
) -> ScatteredUpdateCall | None:
    """Return an update of the rows that get values as one compiled pass; None if there is none."""
    product = step.product
    form = step.form
    dtype = step.update.target.dtype
    dtypes = {dtype, product.target.dtype, step.update.operands[form.old].dtype}
    einsum = product.einsum
    if dtypes not in ({"float32"}, {"float64"}) or step.dimension != 0 or product.select:
        return None
    values = places.size * prod(product.target.shape[1:])
    if values < worth_compiling(options.repetition) or not can_change(target, target.shape[-1]):
        return None
    update = find_row_update(form.operation, form.multiple, form.change, step.update.einsum)
    if update is None:
        return None
    operands = [arrays[slot.name] for slot in product.operands]
    index = {label: indices(runs) for label, runs in product.index if label != step.label}
    prepared = ScatteredUpdate(einsum, operands, index, places, update, dtype, options.threads)
    if not prepared.is_possible:
        return None
    factor_of = prepare_factor(update, dtype)
    names = names_of(product.operands)
    extent = product.target.shape[0]

    def compute(arrays: Mapping[str, HostArray], places: HostArray, target: HostArray) -> bool:
        factor = factor_of(number_operands(step.update, arrays))
        if factor is None:
            return False
        operands = [arrays[name] for name in names]
        prepared.compute(operands, changed_rows(places, extent), target, factor)
        return True

    return compute
