"""Sums of products of one or two operands as (batched) matrix products at BLAS speed, with the fewest copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from math import prod
from typing import Any, TypeAlias

import numpy as np

from einmpi.kernels.contraction import Contraction, Labels, dense_strides, size_of
from einmpi.kernels.contraction_split import Part, Summands, bytes_needed, split_to_fit_memory
from einmpi.kernels.lowering import Lowering

EXACT = 2**53  # float64 holds every integer up to here

Labelled: TypeAlias = tuple[
    np.ndarray, Labels
]  # a label for each axis, every label once and none of extent 1


def compute_by_blas(
    contraction: Contraction, operands: Sequence[np.ndarray], out: np.ndarray
) -> None:
    """The contraction of the operands, written into `out`, whose dtype is that of the EinSum."""
    if 0 in (extent for _, extent in contraction.extents):
        out[...] = 0
        return
    arrays = [*(operands[k] for k in contraction.positions), out]
    names, strides = tuple(map(_name, arrays)), tuple(array.strides for array in arrays)
    dtype = _product_dtype(contraction, out.dtype, arrays[:-1])
    with np.errstate(all="ignore"):
        for summands in split_to_fit_memory(contraction, names, strides, dtype, {}):
            _add_up(contraction, summands, arrays, dtype)


def _add_up(
    contraction: Contraction, summands: Summands, arrays: Sequence[np.ndarray], dtype: str
) -> None:
    """A part of the output. A sum of several pieces stays in the dtype of the products until the end."""

    def views(part: Part) -> list[Labelled]:
        return [
            _view(array, index, part)
            for array, index in zip(arrays, contraction.indices, strict=True)
        ]

    (plan, part), *others = summands
    *factors, target = views(part)
    if not others:
        _run(plan, [*factors, target], contraction.scale)
        return
    total, term = np.empty(target[0].shape, dtype), np.empty(target[0].shape, dtype)
    _run(plan, [*factors, (total, target[1])], contraction.scale)
    for plan, part in others:
        _run(plan, [*views(part)[:-1], (term, target[1])], contraction.scale)
        total += term
    _fill(target, (total, target[1]))


def _name(array: np.ndarray) -> str:
    """Its dtype, with a mark where BLAS cannot take the array as it lies."""
    return array.dtype.name + ("" if array.flags.aligned and array.dtype.isnative else ", unusable")


def workspace_bytes(contraction: Contraction, dtypes: Sequence[str], dtype: str) -> int:
    """Bytes of temporaries that `contract` makes at once for C-contiguous arrays; for integers the most it may make."""
    extent, names = dict(contraction.extents), (*(dtypes[k] for k in contraction.positions), dtype)
    if 0 in extent.values():
        return 0
    pairs = zip(names, contraction.indices, strict=True)
    strides = tuple(dense_strides(index, extent, name) for name, index in pairs)
    inner = _product_dtype(contraction, np.dtype(dtype), ())
    return max(map(bytes_needed, split_to_fit_memory(contraction, names, strides, inner, {})))


def _product_dtype(
    contraction: Contraction, dtype: np.dtype[Any], factors: Iterable[np.ndarray]
) -> str:
    """float16 is summed in float32; integers are multiplied by BLAS as float64, if that holds any sum of them."""
    if dtype.kind != "i" or len(contraction.positions) == 1:
        return "float32" if dtype == np.float16 else dtype.name
    terms = prod(
        extent for label, extent in contraction.extents if label not in contraction.indices[-1]
    )
    limit = (
        terms
        * abs(contraction.scale)
        * prod(max(1, -int(array.min()), int(array.max())) for array in factors)
    )
    return "float64" if terms > 1 and limit <= EXACT else dtype.name


def _run(plan: Lowering, views: list[Labelled], scale: Any) -> None:
    """Copy the factors, multiply, copy to the output; conjugate and scale what the plan says."""
    parts = list(views)
    for k, order in enumerate(plan.copies):
        if order is not None:
            shape = dict(zip(views[k][1], views[k][0].shape, strict=True))
            parts[k] = np.empty([shape[label] for label in order], plan.dtype), order
    for k, (array, _) in enumerate(parts):
        if k == len(parts) - 1:
            _apply(plan, parts)
        elif parts[k] is not views[k]:
            _fill(parts[k], views[k])
        if plan.conj[k]:
            np.conjugate(array, out=array)
        if plan.scaled == k and scale != 1:  # an integer may wrap around
            whole = array.dtype.kind in "bi"
            np.multiply(
                array,
                np.array(scale % 2**64, "u8").astype(array.dtype) if whole else scale,
                out=array,
            )
    if parts[-1] is not views[-1]:
        _fill(views[-1], parts[-1])


def _apply(plan: Lowering, parts: list[Labelled]) -> None:
    """The kernel on the factors, into the last of the parts."""
    loops, (rows, inner, columns), (out, labels) = plan.loops, plan.matrix, parts[-1]
    if plan.kernel == "reduce":
        _fill(parts[1], parts[0])
    elif (
        plan.kernel == "multiply"
    ):  # numpy is faster if the innermost loop goes along the first factor
        a, b = (
            _stack(part, labels)
            for part in sorted(parts[:2], key=lambda part: not {*labels[-1:]} <= {*part[1]})
        )
        np.multiply(a, b, out=out, dtype=plan.dtype, casting="unsafe")
    elif plan.kernel == "einsum":
        names = list(dict.fromkeys(parts[0][1] + parts[1][1]))
        x, y, z = ([names.index(label) for label in index] for _, index in parts)
        np.einsum(
            parts[0][0], x, parts[1][0], y, z, out=out, dtype=np.dtype(plan.dtype), casting="unsafe"
        )
    else:
        a, b = _stack(parts[0], loops, rows, inner), _stack(parts[1], loops, inner, columns)
        np.matmul(a, b, out=_stack(parts[2], loops, rows, columns))


def _view(array: np.ndarray, index: Labels, part: Part) -> Labelled:
    region: Any = tuple(slice(*part.get(label, (None,))) for label in index)
    array, labels = array[(..., *region)], tuple(dict.fromkeys(index))
    if len(labels) < len(index):
        array = np.einsum(
            array, [labels.index(label) for label in index], list(range(len(labels)))
        )  # the diagonal
    kept = [axis for axis, extent in enumerate(array.shape) if extent != 1]
    return array.reshape([array.shape[axis] for axis in kept]), tuple(labels[axis] for axis in kept)


def _stack(part: Labelled, loops: Labels, *groups: Labels) -> np.ndarray:
    """A view: an axis for each label of `loops`, of extent 1 for one it lacks, then one for each group of labels."""
    array, labels = part
    extent = dict(zip(labels, array.shape, strict=True))
    shape = [
        *(extent.get(label, 1) for label in loops),
        *(size_of(group, extent) for group in groups),
    ]
    return array.transpose([labels.index(x) for x in chain(loops, *groups) if x in extent]).reshape(
        shape
    )


def _fill(target: Labelled, source: Labelled) -> None:
    """Every copy is made here: permuted, cast, summed over labels that only the source has, repeated along the rest."""
    summed = tuple(label for label in source[1] if label not in target[1])
    array, axes = _stack(source, target[1] + summed), tuple(range(-len(summed), 0))
    if summed:
        np.add.reduce(array, axis=axes, dtype=target[0].dtype, out=target[0])
    else:
        np.copyto(target[0], array, casting="unsafe")
