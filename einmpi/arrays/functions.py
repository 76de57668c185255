"""The functions of numpy that take DistArrays, and what computes each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from inspect import Parameter, signature
from typing import Any

import numpy as np

from einmpi.arrays import (
    by_blocks,
    einsums,
    indexing,
    places,
    products,
    reductions,
    repeats,
    scans,
    shapes,
    sorting,
)
from einmpi.arrays.by_blocks import by_blocks as on_each_block
from einmpi.arrays.combined import joining, statistics
from einmpi.arrays.reshaping import as_numpy_reshapes
from einmpi.arrays.whole_axes import matrices, transforms
from einmpi.compiled.dist_array import DistArray
from einmpi.compiled.views import Link, View, refuse_writing, stored_as_numpy


def apply_function(
    function: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]
) -> Any:
    """Evaluate a function of numpy on DistArrays; refuse one that is not in `FUNCTIONS`.

    Arguments are found by numpy's own signature, so that they may be given by position or by the
    names that numpy has for them.
    """
    implementation = FUNCTIONS.get(function)
    if implementation is None:
        raise TypeError(
            f"{_name_of(function)} does not take a DistArray; gather() returns an array that it "
            "takes, and a program may compute the same on the ranks"
        )
    calling = _calling_of(function)
    if calling is None:
        return implementation(*arguments, **options)
    # numpy has checked the arguments: there are not too many, and none is given twice.
    given = dict(zip(calling.names, arguments, strict=False))
    given.update(options)
    by_position: list[Any] = []
    for parameter in calling.positional_names:
        if parameter in given:
            by_position.append(given.pop(parameter))
    by_name: dict[str, Any] = {}
    for parameter, value in given.items():
        if value is calling.defaults[parameter] or value is np._NoValue:
            continue
        if calling.accepted_names is not None and parameter not in calling.accepted_names:
            raise TypeError(f"{_name_of(function)} of a DistArray does not take {parameter}")
        by_name[parameter] = value
    return implementation(*by_position, **by_name)


def _name_of(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__name__}"


@dataclass(frozen=True)
class _Calling:
    """How arguments of a function of numpy become those of its implementation here."""

    names: tuple[str, ...]  # numpy's parameters
    defaults: dict[str, Any]
    positional_names: tuple[str, ...]  # those that the implementation takes by position
    accepted_names: frozenset[str] | None  # those that it takes by name; None if it takes any


@cache
def _calling_of(function: Callable[..., Any]) -> _Calling | None:
    """Return how a function is called; None if it takes any number of arguments, as einsum."""
    parameters = list(signature(function).parameters.values())
    for parameter in parameters:
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            return None
    own_parameters = list(signature(FUNCTIONS[function]).parameters.values())
    positional_count = 0
    accepted: set[str] | None = set()
    for parameter in own_parameters:
        if parameter.kind is Parameter.POSITIONAL_ONLY:
            positional_count += 1
        elif parameter.kind is Parameter.VAR_KEYWORD:
            accepted = None
        elif accepted is not None:
            accepted.add(parameter.name)
    names = tuple(parameter.name for parameter in parameters)
    return _Calling(
        names,
        {parameter.name: parameter.default for parameter in parameters},
        names[:positional_count],
        None if accepted is None else frozenset(accepted),
    )


def _vstack(arrays: Sequence[Any], /) -> DistArray:
    """Join tensors along the first dimension; a vector is a matrix of one row."""
    parts: list[Any] = []
    for array in arrays:
        if np.ndim(array) > 1:
            parts.append(array)
        else:
            parts.append(np.reshape(array, (1, -1)))
    return shapes.concatenate(parts, 0)


def _hstack(arrays: Sequence[Any], /) -> DistArray:
    """Join tensors along the second dimension, and vectors along their only one."""
    parts: list[Any] = [np.atleast_1d(array) for array in arrays]
    return shapes.concatenate(parts, min(1, parts[0].ndim - 1))


def _ravel(array: DistArray, /, order: str = "C") -> DistArray:
    if order != "C":
        raise TypeError("ravel of a DistArray takes elements in row-major order only")
    is_copy = isinstance(array, View) and not stored_as_numpy(array).flags.c_contiguous
    return as_numpy_reshapes(array, (-1,), is_copy)


def _reshape(array: DistArray, shape: Any, /, order: str = "C", copy: Any = None) -> DistArray:
    if order != "C":
        raise TypeError("reshape of a DistArray takes elements in row-major order only")
    return as_numpy_reshapes(array, shape, copy)


def _broadcast_to(array: DistArray, shape: Any, /) -> DistArray:
    read = partial(shapes.broadcast_to, shape=shape)
    return View(array, Link(read, refuse_writing, partial(np.broadcast_to, shape=shape)))


def _diagonal(array: DistArray, /, offset: int = 0, axis1: int = 0, axis2: int = 1) -> DistArray:
    place = {"offset": offset, "axis1": axis1, "axis2": axis2}
    read = partial(products.diagonal, **place)
    return View(array, Link(read, refuse_writing, partial(np.diagonal, **place)))


def _part(name: str) -> Callable[..., DistArray]:
    """Return numpy's function `real` or `imag`, for a view of the numbers of complex elements."""
    read = on_each_block(getattr(np, name))

    def view(array: DistArray, /) -> DistArray:
        def write(base: DistArray, values: DistArray) -> None:
            changed = base.copy()
            view(changed)[...] = values
            base[...] = changed

        if name == "imag" and array.dtype.kind != "c":  # zeros that are stored nowhere
            return View(array, Link(read, refuse_writing, lambda block: block))
        return View(array, Link(read, write, lambda block: getattr(block, name), shares=True))

    return view


def _result_type(*arrays_and_dtypes: Any) -> np.dtype[Any]:
    """Return the dtype of a result of tensors, dtypes and Python numbers."""
    operands: list[Any] = []
    for operand in arrays_and_dtypes:
        operands.append(operand.dtype if isinstance(operand, DistArray) else operand)
    return np.result_type(*operands)


def _astype(array: DistArray, dtype: Any, /, copy: bool = True, device: Any = None) -> DistArray:
    if not copy and array.dtype == dtype:
        return array
    return DistArray(array.local.astype(dtype), array.layout, array.own_comm)


FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    # aggregations
    np.sum: partial(reductions.aggregate, "sum"),
    np.prod: partial(reductions.aggregate, "prod"),
    np.any: partial(reductions.aggregate, "any"),
    np.all: partial(reductions.aggregate, "all"),
    np.max: partial(reductions.aggregate, "max"),
    np.min: partial(reductions.aggregate, "min"),
    np.mean: reductions.mean,
    np.var: reductions.var,
    np.std: reductions.std,
    np.argmax: partial(reductions.argument_of, "max"),
    np.argmin: partial(reductions.argument_of, "min"),
    np.cumsum: scans.cumsum,
    np.cumprod: scans.cumprod,
    np.cumulative_sum: scans.cumulative_sum,
    np.cumulative_prod: scans.cumulative_prod,
    np.diff: scans.diff,
    np.count_nonzero: reductions.count_nonzero,
    np.ptp: reductions.peak_to_peak,
    np.linalg.norm: reductions.norm,
    np.linalg.vector_norm: reductions.vector_norm,
    # statistics
    np.nansum: statistics.nansum,
    np.nanprod: statistics.nanprod,
    np.nanmax: statistics.nanmax,
    np.nanmin: statistics.nanmin,
    np.nanmean: statistics.nanmean,
    np.nanvar: statistics.nanvar,
    np.nanstd: statistics.nanstd,
    np.average: statistics.average,
    np.median: statistics.median,
    np.quantile: statistics.quantile,
    np.percentile: statistics.percentile,
    np.cov: statistics.cov,
    np.corrcoef: statistics.corrcoef,
    np.bincount: statistics.bincount,
    np.histogram: statistics.histogram,
    np.digitize: statistics.digitize,
    # order
    np.sort: sorting.sort,
    np.argsort: sorting.argsort,
    np.searchsorted: sorting.searchsorted,
    np.nonzero: places.nonzero,
    np.unique_all: sorting.unique_all,
    np.unique_counts: sorting.unique_counts,
    np.unique_inverse: sorting.unique_inverse,
    np.unique_values: sorting.unique_values,
    np.unique: joining.unique,
    np.isin: joining.isin,
    np.argwhere: joining.argwhere,
    # products
    np.dot: products.dot,
    np.vdot: products.vdot,
    np.inner: products.inner,
    np.outer: products.outer,
    np.tensordot: products.tensordot,
    np.trace: products.trace,
    np.diagonal: _diagonal,
    np.einsum: einsums.einsum_of_arrays,
    # matrices, whole on a rank
    np.linalg.cholesky: matrices.of_matrices(np.linalg.cholesky),
    np.linalg.det: matrices.of_matrices(np.linalg.det),
    np.linalg.eigh: matrices.of_matrices(np.linalg.eigh),
    np.linalg.eigvalsh: matrices.of_matrices(np.linalg.eigvalsh),
    np.linalg.inv: matrices.of_matrices(np.linalg.inv),
    np.linalg.matrix_norm: matrices.of_matrices(np.linalg.matrix_norm),
    np.linalg.matrix_power: matrices.of_matrices(np.linalg.matrix_power),
    np.linalg.matrix_rank: matrices.of_matrices(np.linalg.matrix_rank),
    np.linalg.pinv: matrices.of_matrices(np.linalg.pinv),
    np.linalg.qr: matrices.of_matrices(np.linalg.qr),
    np.linalg.slogdet: matrices.of_matrices(np.linalg.slogdet),
    np.linalg.svd: matrices.of_matrices(np.linalg.svd),
    np.linalg.svdvals: matrices.of_matrices(np.linalg.svdvals),
    np.linalg.solve: matrices.solve,
    # transforms of dimensions that are whole on a rank
    np.fft.fft: transforms.of_one_dimension(np.fft.fft),
    np.fft.ifft: transforms.of_one_dimension(np.fft.ifft),
    np.fft.rfft: transforms.of_one_dimension(np.fft.rfft),
    np.fft.irfft: transforms.of_one_dimension(np.fft.irfft),
    np.fft.hfft: transforms.of_one_dimension(np.fft.hfft),
    np.fft.ihfft: transforms.of_one_dimension(np.fft.ihfft),
    np.fft.fftn: transforms.of_several_dimensions(np.fft.fftn),
    np.fft.ifftn: transforms.of_several_dimensions(np.fft.ifftn),
    np.fft.rfftn: transforms.of_several_dimensions(np.fft.rfftn),
    np.fft.irfftn: transforms.of_several_dimensions(np.fft.irfftn),
    np.fft.fftshift: transforms.fftshift,
    np.fft.ifftshift: transforms.ifftshift,
    # shapes
    np.transpose: shapes.transpose,
    np.permute_dims: shapes.transpose,
    np.matrix_transpose: lambda array, /: shapes.swapaxes(array, -1, -2),
    np.swapaxes: shapes.swapaxes,
    np.moveaxis: shapes.moveaxis,
    np.expand_dims: shapes.expand_dims,
    np.squeeze: shapes.squeeze,
    np.broadcast_to: _broadcast_to,
    np.reshape: _reshape,
    np.ravel: _ravel,
    np.concatenate: shapes.concatenate,
    np.stack: shapes.stack,
    np.vstack: _vstack,
    np.hstack: _hstack,
    np.column_stack: joining.column_stack,
    np.dstack: joining.dstack,
    np.append: joining.append,
    np.atleast_1d: joining.at_least(1),
    np.atleast_2d: joining.at_least(2),
    np.atleast_3d: joining.at_least(3),
    np.split: joining.split,
    np.array_split: joining.array_split,
    np.hsplit: joining.hsplit,
    np.vsplit: joining.vsplit,
    np.pad: joining.pad,
    np.rot90: joining.rot90,
    np.flip: shapes.flip,
    np.roll: shapes.roll,
    np.repeat: repeats.repeat,
    np.tile: repeats.tile,
    np.unstack: repeats.unstack,
    np.broadcast_arrays: repeats.broadcast_arrays,
    np.meshgrid: repeats.meshgrid,
    np.take: indexing.take,
    np.take_along_axis: places.take_along_axis,
    np.shape: lambda array, /: array.shape,
    np.ndim: lambda array, /: array.ndim,
    np.size: by_blocks.size,
    # elements
    np.where: by_blocks.where,
    np.clip: by_blocks.clip,
    np.round: on_each_block(np.round),
    np.around: on_each_block(np.round),
    np.real: _part("real"),
    np.imag: _part("imag"),
    np.angle: on_each_block(np.angle),
    np.nan_to_num: on_each_block(np.nan_to_num),
    np.tril: by_blocks.tril,
    np.triu: by_blocks.triu,
    np.iscomplexobj: lambda array, /: array.dtype.kind == "c",
    np.isrealobj: lambda array, /: array.dtype.kind != "c",
    np.result_type: _result_type,
    np.copy: on_each_block(lambda block: block.copy()),
    np.astype: _astype,
    np.isclose: by_blocks.is_close,
    np.allclose: by_blocks.all_close,
    np.array_equal: by_blocks.array_equal,
    np.zeros_like: by_blocks.zeros_like,
    np.empty_like: by_blocks.zeros_like,
    np.ones_like: by_blocks.ones_like,
    np.full_like: by_blocks.full_like,
}
