"""The ufuncs and functions of numpy that take DistArrays, and what computes each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from inspect import Parameter, signature
from typing import Any, NamedTuple

import numpy as np

from einmpi.arrays import (
    composed,
    elementwise,
    indexing,
    linalg,
    products,
    reductions,
    shapes,
    statistics,
)
from einmpi.arrays.dist_array import DistArray, Link, refuse_writing, stored_as_numpy, writing
from einmpi.arrays.elementwise import Number, on_blocks
from einmpi.kernels.reference import is_of_other_library


def apply_ufunc(
    ufunc: np.ufunc, method: str, inputs: Sequence[Any], options: dict[str, Any]
) -> Any:
    """Apply a numpy ufunc to DistArrays, arrays and numbers.

    A call that DistArrays do not support is left to the other operands, if they have ufuncs of
    their own; else it raises a TypeError.
    """
    targets = options.pop("out", ())
    if method == "at":
        return composed.update_at(ufunc, *inputs)
    if targets and (method != "__call__" or ufunc.signature is not None):
        return _into(ufunc.__name__, targets[0], apply_ufunc(ufunc, method, inputs, options))
    if ufunc is np.matmul and method == "__call__" and not options:
        return products.matmul(*inputs)
    if ufunc is np.vecdot and method == "__call__" and set(options) <= {"axis"}:
        return products.vecdot(*inputs, **options)
    method_of_ufunc = reductions.METHODS_OF_UFUNCS.get((ufunc, method))
    if method_of_ufunc is not None:
        # It aggregates over the first dimension by default.
        options = {"axis": 0, **options}
        return method_of_ufunc(inputs[0], **options)
    if method == "outer" and len(inputs) == 2:
        left, right = inputs
        left_extents = np.shape(left) + (1,) * np.ndim(right)
        return ufunc(np.reshape(left, left_extents), right, **options)

    is_elementwise = method == "__call__" and ufunc.signature is None
    has_known_options = set(options) <= {"dtype", "casting"}
    name = ufunc.__name__
    if not is_elementwise:
        return _refused(f"{name}.{method} does not take a DistArray", inputs)
    if not has_known_options:
        return _refused(f"{name} of a DistArray does not take {', '.join(options)}", inputs)
    for target in targets:
        if not isinstance(target, DistArray | None):
            what = f"{name} of a DistArray cannot be stored in {type(target).__name__}"
            return _refused(what, [*inputs, *targets])
    for operand in inputs:
        is_known = isinstance(operand, DistArray | np.ndarray | list | tuple | Number)
        if not is_known and not is_of_other_library(operand):
            return _refused(f"{name} of a DistArray and {type(operand).__name__}", inputs)

    fails_by_value = ufunc is np.power and _may_be_negative_power(*inputs)
    compute = partial(ufunc, **options)
    if any(isinstance(operand, DistArray) for operand in inputs):
        computed = on_blocks(name, compute, inputs, fails_by_value)
    else:  # only the results are DistArrays
        computed = compute(*inputs)
    if not targets:
        return computed
    results = computed if isinstance(computed, tuple) else (computed,)
    found: list[DistArray] = []
    for target, result in zip(targets, results, strict=True):
        if target is not None:
            store(target, result, options.get("casting", "same_kind"))
        found.append(result if target is None else target)
    return found[0] if len(found) == 1 else tuple(found)


def _may_be_negative_power(base: Any, exponent: Any) -> bool:
    """Return whether this may be a power of integers that numpy refuses, on ranks that have it."""
    for each in (base, exponent):
        if (getattr(each, "dtype", None) or np.asarray(each).dtype).kind not in "iu":
            return False
    return not isinstance(exponent, Number) or bool(np.less(exponent, 0))


def _refused(what: str, operands: Sequence[Any]) -> Any:
    """Raise a TypeError, unless an operand of another kind may know what to do: NotImplemented."""
    for operand in operands:
        has_own_ufuncs = hasattr(type(operand), "__array_ufunc__")
        if has_own_ufuncs and not isinstance(operand, DistArray | np.ndarray | np.generic):
            return NotImplemented
    raise TypeError(f"{what}; expected DistArrays, arrays and numbers")


def store(target: DistArray, result: Any, casting: Any = "same_kind") -> None:
    """Write a result into an existing tensor, as `x += y` does."""
    if target.shape != result.shape:
        if np.broadcast_shapes(target.shape, result.shape) != target.shape:
            raise ValueError(
                f"a result of shape {result.shape} does not fit an array of shape {target.shape}"
            )
        result = np.broadcast_to(result, target.shape)
    if not np.can_cast(result.dtype, target.dtype, casting):
        raise TypeError(f"Cannot cast a result of {result.dtype} to {target.dtype}")
    if target.is_symbol or not isinstance(result, DistArray):
        target[...] = result
        return
    block = result._in_layout(target.layout).local
    with writing(target) as changed:
        np.copyto(changed.local, block, casting=casting)


def _into(name: str, target: Any, result: Any) -> Any:
    """Return the target of `out=`, with the result in it."""
    if not isinstance(target, DistArray):
        raise TypeError(f"{name} of a DistArray cannot be stored in {type(target).__name__}")
    store(target, result)
    return target


def apply_function(
    function: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]
) -> Any:
    """Evaluate a function of numpy on DistArrays; refuse one that is not among `FUNCTIONS`.

    Arguments are found by numpy's own signature, so that they may be given by position or by the
    names that numpy has for them.
    """
    implementation = FUNCTIONS.get(function)
    if implementation is None:
        raise TypeError(
            f"{_name_of(function)} does not take a DistArray; gather() returns an array that it "
            "takes, and a program may compute the same on the ranks"
        )
    calling = _calling_of(function, implementation)
    if calling is None:
        target = options.pop("out", None)
        result = implementation(*arguments, **options)
        return result if target is None else _into(function.__name__, target, result)
    # numpy has checked the arguments: there are not too many, and none is given twice.
    given = {**dict(zip(calling.defaults, arguments, strict=False)), **options}
    target = given.pop("out", None)
    by_position = [given.pop(name) for name in calling.positional_names if name in given]
    by_name: dict[str, Any] = {}
    for name, value in given.items():
        if value is calling.defaults[name] or value is np._NoValue:
            continue
        if calling.accepted_names is not None and name not in calling.accepted_names:
            raise TypeError(f"{_name_of(function)} of a DistArray does not take {name}")
        by_name[name] = value
    result = implementation(*by_position, **by_name)
    if target is None or target is np._NoValue:
        return result
    return _into(function.__name__, target, result)


def _name_of(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__name__}"


class _Calling(NamedTuple):
    """How arguments of a function of numpy become those of its implementation here."""

    defaults: dict[str, Any]  # of numpy's parameters, in their order
    positional_names: list[str]  # those that the implementation takes by position
    accepted_names: set[str] | None  # those that it takes by name; None if it takes any


@cache
def _calling_of(
    function: Callable[..., Any], implementation: Callable[..., Any]
) -> _Calling | None:
    """Return how a function is called; None if it takes any number of arguments, as einsum."""
    parameters = signature(function).parameters
    own_parameters = signature(implementation).parameters.values()
    for parameter in parameters.values():
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            return None
    kinds = [parameter.kind for parameter in own_parameters]
    accepted = {parameter.name for parameter in own_parameters}
    return _Calling(
        {name: parameter.default for name, parameter in parameters.items()},
        list(parameters)[: kinds.count(Parameter.POSITIONAL_ONLY)],
        None if Parameter.VAR_KEYWORD in kinds else accepted,
    )


def _ravel(array: DistArray, /, order: str = "C") -> DistArray:
    if order != "C":
        raise TypeError("ravel of a DistArray takes elements in row-major order only")
    is_copy = bool(array.links) and not stored_as_numpy(array).flags.c_contiguous
    return shapes.as_numpy_reshapes(array, (-1,), is_copy)


def _reshape(array: DistArray, shape: Any, /, order: str = "C", copy: Any = None) -> DistArray:
    if order != "C":
        raise TypeError("reshape of a DistArray takes elements in row-major order only")
    return shapes.as_numpy_reshapes(array, shape, copy)


def _broadcast_to(array: DistArray, shape: Any, /) -> DistArray:
    read = partial(shapes.broadcast_to, shape=shape)
    return array._view(Link(read, refuse_writing, partial(np.broadcast_to, shape=shape)))


def _diagonal(array: DistArray, /, offset: int = 0, axis1: int = 0, axis2: int = 1) -> DistArray:
    place = {"offset": offset, "axis1": axis1, "axis2": axis2}
    read = partial(products.diagonal, **place)
    return array._view(Link(read, refuse_writing, partial(np.diagonal, **place)))


def _same(block: Any) -> Any:
    return block


def _part(name: str) -> Callable[..., DistArray]:
    """Return numpy's function `real` or `imag`, for a view of the numbers of complex elements."""
    read = elementwise.by_blocks(getattr(np, name))

    def view(array: DistArray, /) -> DistArray:
        def write(base: DistArray, values: DistArray) -> None:
            changed = base.copy()
            view(changed)[...] = values
            base[...] = changed

        if array.dtype.kind != "c":
            # A real part is the tensor itself; imaginary parts are zeros that are stored nowhere.
            return array[...] if name == "real" else array._view(Link(read, refuse_writing, _same))
        own_write = refuse_writing if array.is_symbol else write
        return array._view(Link(read, own_write, lambda block: getattr(block, name), shares=True))

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
    return elementwise.converted(array, dtype)


def _named(module: Any, names: str) -> list[Any]:
    return [getattr(module, name) for name in names.split()]


# Functions that have the same name here and in numpy.
_BY_NAME = (
    (np, reductions, "mean var std diff count_nonzero ptp"),
    (np.linalg, reductions, "norm vector_norm"),
    (
        np,
        statistics,
        "average median quantile percentile cov corrcoef bincount histogram digitize sort argsort "
        "searchsorted isin unique unique_all unique_counts unique_inverse unique_values",
    ),
    (np, indexing, "argwhere nonzero take take_along_axis where"),
    (np, products, "dot inner outer tensordot trace vdot"),
    (np.fft, elementwise, "fftshift ifftshift"),
    (
        np,
        shapes,
        "append broadcast_arrays column_stack concatenate expand_dims meshgrid pad repeat roll "
        "rot90 stack tile",
    ),
    (np, elementwise, "array_equal clip full_like isclose"),
    (
        np,
        composed,
        "argpartition compress convolve copyto correlate cross delete diag diagflat fill_diagonal "
        "gradient histogram2d insert interp intersect1d kron lexsort nanmedian nanpercentile "
        "nanquantile partition piecewise put save select setdiff1d trapezoid",
    ),
    (np.linalg, composed, "cross"),
    (np.lib.stride_tricks, composed, "sliding_window_view"),
)
# Functions that numpy writes with others of its own, which come back to us.
_WRITTEN_BY_NUMPY = (
    "allclose array_split dstack extract fix flatnonzero flip hsplit hstack isneginf "
    "isposinf isreal put_along_axis resize rollaxis setxor1d split union1d unstack vsplit vstack"
)
_OF_DIMENSIONS = "matrix_transpose moveaxis permute_dims squeeze swapaxes transpose"
_OF_STACKS = "eigvalsh matrix_norm matrix_power matrix_rank pinv svdvals"
_TRANSFORMS = "fft ifft rfft irfft hfft ihfft fftn ifftn rfftn irfftn fft2 ifft2 rfft2 irfft2"
FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    **{function: function.__wrapped__ for function in _named(np, _WRITTEN_BY_NUMPY)},
    # aggregations
    **{getattr(np, name): partial(reductions.aggregate_some, name) for name in reductions.JOINED},
    np.argmax: partial(reductions.argument_of, "max"),
    np.argmin: partial(reductions.argument_of, "min"),
    np.cumsum: partial(reductions.scan, "cumsum"),
    np.cumprod: partial(reductions.scan, "cumprod"),
    np.cumulative_sum: partial(reductions.cumulative, "cumsum"),
    np.cumulative_prod: partial(reductions.cumulative, "cumprod"),
    # statistics
    np.nansum: partial(statistics.of_numbers, partial(reductions.aggregate_some, "sum")),
    np.nanprod: partial(statistics.of_numbers, partial(reductions.aggregate_some, "prod")),
    np.nanmean: partial(statistics.of_numbers, reductions.mean),
    np.nanvar: partial(statistics.of_numbers, reductions.var),
    np.nanstd: partial(statistics.of_numbers, reductions.std),
    np.nanmax: partial(statistics.nan_extreme, "max", -np.inf),
    np.nanmin: partial(statistics.nan_extreme, "min", np.inf),
    np.nanargmax: partial(composed.nan_argument, "max", -np.inf),
    np.nanargmin: partial(composed.nan_argument, "min", np.inf),
    np.nancumsum: partial(composed.nan_scan, "cumsum", 0),
    np.nancumprod: partial(composed.nan_scan, "cumprod", 1),
    np.diagonal: _diagonal,
    np.einsum: products.einsum_of_arrays,
    # matrices and transforms of dimensions that are whole on a rank
    **{each: elementwise.of_matrices(each) for each in _named(np.linalg, _OF_STACKS)},
    **linalg.FUNCTIONS,
    **{each: elementwise.eigenvalues_by(each) for each in _named(np.linalg, "eig eigvals")},
    **{each: elementwise.transform_of(each) for each in _named(np.fft, _TRANSFORMS)},
    **{
        each: composed.on_every_rank(each)
        for each in (*_named(np.linalg, "cond tensorinv tensorsolve"), np.polyfit)
    },
    # shapes
    **{each: shapes.by_dimensions(each) for each in _named(np, _OF_DIMENSIONS)},
    np.broadcast_to: _broadcast_to,
    np.fliplr: lambda array, /: np.flip(array, 1),
    np.flipud: lambda array, /: np.flip(array, 0),
    np.ediff1d: lambda array, /: np.diff(np.ravel(array)),
    np.reshape: _reshape,
    np.ravel: _ravel,
    np.atleast_1d: shapes.at_least(1, np.atleast_1d),
    np.atleast_2d: shapes.at_least(2, np.atleast_2d),
    np.atleast_3d: shapes.at_least(3, np.atleast_3d),
    np.shape: lambda array, /: array.shape,
    np.ndim: lambda array, /: array.ndim,
    np.size: lambda array, /, axis=None: array.size if axis is None else array.shape[axis],
    # elements
    np.round: elementwise.by_blocks(np.round),
    np.around: elementwise.by_blocks(np.round),
    np.real: _part("real"),
    np.imag: _part("imag"),
    np.unravel_index: lambda places, shape, /: elementwise.on_blocks(
        "unravel_index", lambda block: np.unravel_index(block, shape), (places,)
    ),
    np.sinc: elementwise.by_blocks(np.sinc),
    np.angle: elementwise.by_blocks(np.angle),
    np.nan_to_num: elementwise.by_blocks(np.nan_to_num),
    np.tril: partial(reductions.triangle, "<="),
    np.triu: partial(reductions.triangle, ">="),
    np.iscomplexobj: lambda array, /: array.dtype.kind == "c",
    np.isrealobj: lambda array, /: array.dtype.kind != "c",
    np.result_type: _result_type,
    np.copy: elementwise.by_blocks(elementwise.copied),
    np.astype: _astype,
    np.zeros_like: partial(elementwise.filled_like, 0),
    np.empty_like: partial(elementwise.filled_like, 0),
    np.ones_like: partial(elementwise.filled_like, 1),
}
for _numpy_module, _module, _names in _BY_NAME:
    FUNCTIONS.update(zip(_named(_numpy_module, _names), _named(_module, _names), strict=True))
