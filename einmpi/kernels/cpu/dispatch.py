"""One EinSum on the arrays of a rank, by the first kernel that supports it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from einmpi.graph.arithmetic import result_type
from einmpi.graph.einsum import EinSum
from einmpi.kernels.contraction import Contraction, exact_contraction, required_contraction
from einmpi.kernels.cpu import broadcast, compiled, distance
from einmpi.kernels.cpu.distance import row_blocks, rows_of, spread
from einmpi.kernels.cpu.known_indices import prepare_known_gathers
from einmpi.kernels.cpu.prepared_products import prepare_by_blas
from einmpi.kernels.cpu.reproducible.sums import BlockedSum
from einmpi.kernels.cpu.scan import prepare_scan
from einmpi.kernels.cpu.scatter import Scatter, compute_scatter
from einmpi.kernels.cpu.segment_loops import prepare_matches, prepare_segments
from einmpi.kernels.cpu.symmetric import prepare_own_product, prepare_symmetric
from einmpi.kernels.distances import (
    DISTANCE_DTYPES,
    WeightedDifference,
    as_gather,
    picking,
    recognise_distance,
    recognise_weighted_difference,
)
from einmpi.kernels.operands import Array, check_index_range, read_at_numbers
from einmpi.kernels.prepared import PreparedCall

# ---- weighted difference -------------------------------------------------------------------------
#
# Weighted sums of differences by BLAS, as x·Σw − w·y: many times faster than to sum
# differences, and less exact where x and y are close to each other.


def prepare_weighted_difference(
    difference: WeightedDifference, operands: Sequence[Array], out: Array
) -> PreparedCall | None:
    """Return a function that fills the output; None if it does not support these dtypes."""
    if out.dtype.name not in DISTANCE_DTYPES:
        return None
    if any(array.dtype != out.dtype for array in operands):
        return None
    contraction = required_contraction(difference.product)
    multiply = prepare_by_blas(
        contraction, [operands[difference.weights], operands[difference.summed]], out
    )

    def call(operands: Sequence[Array], out: Array) -> None:
        with np.errstate(all="ignore"):
            multiply([operands[difference.weights], operands[difference.summed]], out)
            _add_kept(difference, operands, out)

    return call


def _add_kept(difference: WeightedDifference, operands: Sequence[Array], out: Array) -> None:
    """Combine the products w·y in the output with x·Σw."""
    output = difference.scaled.output
    kept = spread(operands[difference.kept], difference.scaled.operands[0], output)
    (index,) = difference.sums.operands
    axes = tuple(index.index(label) for label in difference.sums.aggregated)
    remaining = [label for label in index if label in output]
    sums = spread(operands[difference.weights].sum(axis=axes), remaining, output)
    for part in row_blocks(out):
        block = out[part]
        scaled = rows_of(kept, part) * rows_of(sums, part)
        if difference.is_positive:
            block -= scaled
        else:
            np.subtract(scaled, block, out=block)


_WHOLE = slice(None)

# Applications of ⊗ that numpy completes before a compiler has even started. Only the extents
# decide, so that a run gives the same bits whether or not a kernel was compiled before.
WORTH_COMPILING = 2**18
# Kernels that are computed again and again are compiled with so many times fewer of them: those in
# every step of a loop; those over stored elements of a step that is compiled, because numpy takes
# ten times as long as compiled loops to add at places; and those of a step that is compiled to be
# called with its own results, where the calls of numpy's functions would take longer than the work.
ONCE = 1
IN_LOOPS = 8
IN_SPARSE_STEPS = 32
IN_COMPILED_STEPS = 512


def worth_compiling(repetition: int) -> int:
    """Return from how many applications of ⊗ on an EinSum is compiled."""
    return WORTH_COMPILING // repetition


def compute_einsum(
    einsum: EinSum,
    operands: Sequence[Array],
    out: Array,
    index: Mapping[str, Array],
    threads: int = 1,
    fast: bool = False,
    strict: bool = False,
) -> None:
    """Compute an EinSum into `out`.

    Parameters
    ----------
    einsum
        What to compute; its extents are those of the arrays.
    operands, out
        The arrays. Operands are never written to.
    index
        The global indices of a label's positions, for labels that do not start at 0.
    threads
        How many threads a compiled kernel may use.
    fast
        Allow kernels that are faster but round more.
    strict
        Allow only kernels that give inf and nan where the program as written does.
    """
    prepare_einsum(einsum, operands, out, index, threads, fast, strict)(operands, out)


def prepare_einsum(
    einsum: EinSum,
    operands: Sequence[Array],
    out: Array,
    index: Mapping[str, Array],
    threads: int = 1,
    fast: bool = False,
    strict: bool = False,
    repetition: int = ONCE,
) -> PreparedCall:
    """Choose the kernel of an EinSum, and prepare it for arrays that are stored as these are.

    The parameters are those of `compute_einsum`. With a `repetition` above 1, smaller kernels are
    compiled as well. The values of the arrays are not looked at.
    """
    min_compiled = worth_compiling(repetition)
    if einsum.matches is not None:
        return prepare_matches(einsum, operands, out, threads)
    fast = fast and einsum.reproducible is None
    squared_distance = recognise_distance(einsum) if fast else None
    if squared_distance is not None and distance.supports_distance(squared_distance, operands, out):
        return lambda operands, out: distance.compute_distance(
            squared_distance, operands, out, threads, WORTH_COMPILING
        )
    weighted_difference = recognise_weighted_difference(einsum) if fast else None
    if weighted_difference is not None:
        by_product = prepare_weighted_difference(weighted_difference, operands, out)
        if by_product is not None:
            return by_product
    by_scan = prepare_scan(einsum, index, out.dtype.name)
    if by_scan is not None:
        return by_scan
    segments = einsum.segments
    if segments is not None and not einsum.sums_blocks:

        def scatter(operands: Sequence[Array], out: Array) -> None:
            prepared = Scatter(einsum, segments, tuple(operands), index)
            compute_scatter(prepared, out, threads, min_compiled)

        return prepare_segments(einsum, operands, out, index, threads, min_compiled, scatter)
    by_pick = _prepare_pick(einsum, operands, out, index, threads, repetition)
    if by_pick is not None:
        return by_pick
    at_numbers = _prepare_at_numbers(einsum, operands, out, index, threads, strict, repetition)
    if at_numbers is not None:
        return at_numbers
    if einsum.sums_blocks and einsum.calls() > 0:
        return BlockedSum(einsum, operands, out, index, threads).prepared(min_compiled, strict)
    names = (array.dtype.name for array in operands)
    contraction = exact_contraction(einsum, names, strict)
    if contraction is None:
        return _prepare_loops(einsum, operands, out, index, threads, min_compiled, strict)
    by_blas = prepare_by_blas(contraction, operands, out)
    by_blas = prepare_own_product(contraction, operands, out, by_blas)
    if _factor_dtype(contraction, operands).kind not in "iu":
        return by_blas
    by_loops = _prepare_loops(einsum, operands, out, index, threads, min_compiled)

    def by_values(operands: Sequence[Array], out: Array) -> None:
        chosen = by_loops if _may_wrap(contraction, operands) else by_blas
        chosen(operands, out)

    return by_values


def _prepare_loops(
    einsum: EinSum,
    operands: Sequence[Array],
    out: Array,
    index: Mapping[str, Array],
    threads: int,
    min_compiled: int,
    strict: bool = False,
) -> PreparedCall:
    """Prepare an EinSum as loops: compiled ones where that pays, those of numpy otherwise."""
    dtypes = [array.dtype for array in operands]
    is_compiled = einsum.calls_in_program >= min_compiled
    if not is_compiled or not compiled.supports_compiled_loops(einsum, dtypes):
        return prepare_symmetric(einsum, operands, out, index, broadcast.prepare_by_broadcasting)
    prepare = partial(compiled.prepare_by_compiled_loops, threads=threads, strict=strict)
    call = prepare_symmetric(einsum, operands, out, index, prepare)
    return prepare_known_gathers(einsum, operands, out, index, threads, call)


def _factor_dtype(contraction: Contraction, operands: Sequence[Array]) -> np.dtype[Any]:
    """Return the dtype of a product of the factors, of which there are one or two."""
    dtypes = [operands[position].dtype for position in contraction.positions]
    return np.dtype(result_type("*", (dtypes[0], dtypes[-1])))


def _prepare_pick(
    einsum: EinSum,
    operands: Sequence[Array],
    out: Array,
    index: Mapping[str, Array],
    threads: int,
    repetition: int,
) -> PreparedCall | None:
    """Prepare to read only what an index picks; return None if it cannot be done so."""
    if einsum.pick is None:
        return None
    label = einsum.pick.label
    first = 0
    if label in index and len(index[label]) > 0:
        first = int(index[label][0])
        if int(index[label][-1]) - first + 1 != len(index[label]):
            return None  # the label's indices have gaps here
    gather = as_gather(einsum, first, tuple([array.dtype for array in operands]))
    if gather is None:
        return None
    gathering, numbers = gather
    chosen = [operands[number] for number in numbers]
    compute = prepare_einsum(gathering, chosen, out, index, threads, repetition=repetition)
    return picking(einsum, compute, numbers)


def _prepare_at_numbers(
    einsum: EinSum,
    operands: Sequence[Array],
    out: Array,
    index: Mapping[str, Array],
    threads: int,
    strict: bool,
    repetition: int,
) -> PreparedCall | None:
    """Prepare an EinSum that reads operands at indices that are numbers, as x[t,k] for one t.

    What it reads are then views of the operands. Return None if there is no such index.
    """
    at_numbers = read_at_numbers(einsum)
    if at_numbers is None or 0 in (array.size for array in operands):
        return None

    def views_at(operands: Sequence[Array], is_first: bool = False) -> list[Array]:
        views = []
        for position, entries in at_numbers.views:
            array = operands[position]
            places: list[int | slice] = []
            for dimension, number in enumerate(entries):
                if number is None:
                    places.append(_WHOLE)
                    continue
                place = 0 if is_first else number(operands)
                check_index_range(place, place, array.shape[dimension])
                places.append(place)
            views.append(array[(*places, ...)])
        return views

    views = views_at(operands, is_first=True)  # values are not looked at here
    compute = prepare_einsum(
        at_numbers.einsum, views, out, index, threads, strict=strict, repetition=repetition
    )
    return lambda operands, out: compute(views_at(operands), out)


def _may_wrap(contraction: Contraction, operands: Sequence[Array]) -> bool:
    """Return whether products of integers may wrap around before they are summed.

    BLAS would compute the exact product, and so differ from the definition of the operation. An
    operand that is squared counts twice.
    """
    factors = [operands[position] for position in contraction.positions]
    product = _factor_dtype(contraction, operands)
    if product.kind not in "iu" or product.itemsize == 8:
        return False  # sums have 64 bits too, so that both wrap around alike
    if not all(array.size for array in factors):
        return False
    if product.kind == "u" and contraction.scale.real < 0:
        return True
    largest = [max(abs(int(array.min())), abs(int(array.max()))) for array in factors]
    return prod(largest) * abs(contraction.scale) > np.iinfo(product).max
