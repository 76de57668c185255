"""The functions of the array API standard that are calls of numpy's functions, as a table."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from einmpi.array_api.functions import on_cpu
from einmpi.arrays.dist_array import DistArray, call
from einmpi.arrays.elementwise import expm1, floor_divide, tanh
from einmpi.arrays.methods import Row

_UNARY = "(x: DistArray, /) -> DistArray"
_BINARY = "(x1: Any, x2: Any, /) -> DistArray"
_PAIR = "(x1: DistArray, x2: DistArray, /) -> DistArray"
_OVER_AXES = "(x: DistArray, /, *, axis: Axis = None, keepdims: bool = False) -> DistArray"
_TOTAL = (
    "(x: DistArray, /, *, axis: Axis = None, dtype: Any = None, keepdims: bool = False)"
    " -> DistArray"
)
_DEVIATION = (
    "(x: DistArray, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False,"
    " ddof: float = 0) -> DistArray"
)
_RUNNING_TOTAL = (
    "(x: DistArray, /, *, axis: int | None = None, dtype: Any = None,"
    " include_initial: bool = False) -> DistArray"
)
_TRANSFORM = (
    "(x: DistArray, /, *, n: int | None = None, axis: int = -1, norm: Any = 'backward')"
    " -> DistArray"
)
_TRANSFORM_OF_AXES = (
    "(x: DistArray, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None,"
    " norm: Any = 'backward') -> DistArray"
)
_SHIFT = "(x: DistArray, /, *, axes: int | Sequence[int] | None = None) -> DistArray"

_NEW = "(shape: int | Sequence[int], *, dtype: Any = None, device: Any = None) -> DistArray"
_LIKE = "(x: DistArray, /, *, dtype: Any = None, device: Any = None) -> DistArray"
_PLACE = "(x: DistArray, /, *, axis: int | None = None, keepdims: bool = False) -> DistArray"

_UNARY_NAMES = (
    "abs acos acosh asin asinh atan atanh bitwise_invert ceil conj cos cosh exp expm1 floor imag "
    "isfinite isinf isnan log log10 log1p log2 logical_not negative positive real reciprocal round "
    "sign signbit sin sinh sqrt square tan tanh trunc"
)
_BINARY_NAMES = (
    "add atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor copysign "
    "divide equal floor_divide greater greater_equal hypot less less_equal logaddexp logical_and "
    "logical_or logical_xor maximum minimum multiply nextafter not_equal pow remainder subtract"
)


def _deviation(numpy_function: Any) -> Any:
    """Return a function that takes numpy's name of the correction too, as xarray calls it."""

    def function(x: DistArray, /, *, correction: float, ddof: float, **options: Any) -> DistArray:
        return call(numpy_function, x, correction=correction + ddof, **options)

    return function


def _elementwise(names: str, signature: str, elements: str) -> dict[str, Row]:
    """Return the rows of functions of single elements, by the names that numpy has for them too."""
    special = {each.__name__: each for each in (floor_divide, expm1, tanh)}
    rows: dict[str, Row] = {}
    for name in names.split():
        numpy_function = special.get(name, getattr(np, name))
        documentation = f"Compute `numpy.{numpy_function.__name__}` of each {elements}."
        rows[name] = (numpy_function, signature, documentation)
    return rows


def _transforms(names: str, signature: str, dimensions: str) -> dict[str, Row]:
    """Return the rows of Fourier transforms."""
    rows: dict[str, Row] = {}
    for name in names.split():
        documentation = f"Compute `numpy.fft.{name}` along {dimensions}."
        rows[name] = (getattr(np.fft, name), signature, documentation)
    return rows


# Products of tensors, which are EinSum programs: of the extension `linalg`, and of the namespace.
PRODUCTS: dict[str, Row] = {
    "matmul": (np.matmul, _PAIR, "Return the matrix product."),
    "matrix_transpose": (
        np.matrix_transpose,
        _UNARY,
        "Return the tensor with its last two dimensions swapped.",
    ),
    "tensordot": (
        np.tensordot,
        "(x1: DistArray, x2: DistArray, /, *,"
        " axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> DistArray",
        "Return the sum of products over pairs of dimensions.",
    ),
    "vecdot": (
        np.vecdot,
        "(x1: DistArray, x2: DistArray, /, *, axis: int = -1) -> DistArray",
        "Return the sum of products over one dimension; elements of `x1` are conjugated.",
    ),
}

MAIN: dict[str, Row] = {
    # new tensors
    "empty": (
        on_cpu(DistArray.zeros),
        _NEW,
        "Return a tensor of zeros: no element is left to chance.",
    ),
    "zeros": (on_cpu(DistArray.zeros), _NEW, "Return a tensor of zeros."),
    "ones": (on_cpu(DistArray.ones), _NEW, "Return a tensor of ones."),
    "empty_like": (
        on_cpu(np.zeros_like),
        _LIKE,
        "Return a tensor of zeros of the shape, and in the layout, of another one.",
    ),
    "zeros_like": (
        on_cpu(np.zeros_like),
        _LIKE,
        "Return a tensor of zeros of the shape, and in the layout, of another one.",
    ),
    "ones_like": (
        on_cpu(np.ones_like),
        _LIKE,
        "Return a tensor of ones of the shape, and in the layout, of another one.",
    ),
    "full_like": (
        on_cpu(np.full_like),
        "(x: DistArray, /, fill_value: Any, *, dtype: Any = None, device: Any = None) -> DistArray",
        "Return a tensor of equal elements of the shape, and in the layout, of another one.",
    ),
    "astype": (
        on_cpu(np.astype),
        "(x: DistArray, dtype: Any, /, *, copy: bool = True, device: Any = None) -> DistArray",
        "Return the elements converted to another dtype.",
    ),
    # functions of elements
    **_elementwise(_UNARY_NAMES, _UNARY, "element"),
    **_elementwise(_BINARY_NAMES, _BINARY, "pair of elements"),
    "where": (
        np.where,
        # scikit-learn asks for indices, as in numpy, by where(condition).
        "(condition: DistArray, x1: Any = None, x2: Any = None, /) -> Any",
        "Return elements of `x1` where the condition is True, and of `x2` elsewhere.",
    ),
    # aggregations and running totals
    "all": (
        np.all,
        _OVER_AXES,
        "Return whether all elements along some dimensions are not zero.",
    ),
    "any": (
        np.any,
        _OVER_AXES,
        "Return whether any element along some dimensions is not zero.",
    ),
    "max": (np.max, _OVER_AXES, "Return the greatest element along some dimensions."),
    "min": (np.min, _OVER_AXES, "Return the least element along some dimensions."),
    "mean": (np.mean, _OVER_AXES, "Return the mean along some dimensions."),
    "count_nonzero": (
        np.count_nonzero,
        _OVER_AXES,
        "Return how many elements are not zero, along some dimensions.",
    ),
    "argmax": (
        np.argmax,
        _PLACE,
        "Return the index of the first greatest element; in row-major order without `axis`.",
    ),
    "argmin": (
        np.argmin,
        _PLACE,
        "Return the index of the first least element; in row-major order without `axis`.",
    ),
    "diff": (
        np.diff,
        # numpy's order: scikit-learn calls diff(x, 2), which the standard does not allow.
        "(x: DistArray, /, n: int = 1, axis: int = -1, prepend: DistArray | None = None,"
        " append: DistArray | None = None) -> DistArray",
        "Return the differences of neighbouring elements along a dimension, `n` times.",
    ),
    "sum": (np.sum, _TOTAL, "Return the sum along some dimensions."),
    "prod": (np.prod, _TOTAL, "Return the product along some dimensions."),
    "var": (
        _deviation(np.var),
        _DEVIATION,
        "Return the variance along some dimensions: squares by the number less `correction`.",
    ),
    "std": (_deviation(np.std), _DEVIATION, "Return the standard deviation along some dimensions."),
    "cumulative_sum": (
        np.cumulative_sum,
        _RUNNING_TOTAL,
        "Return the sums of all elements up to each one, with a zero before them if wanted.",
    ),
    "cumulative_prod": (
        np.cumulative_prod,
        _RUNNING_TOTAL,
        "Return the products of all elements up to each one, with a one before them if wanted.",
    ),
    # shapes, joins and selections
    "broadcast_shapes": (
        np.broadcast_shapes,
        "(*shapes: tuple[int, ...]) -> tuple[int, ...]",
        "Return the shape that tensors of some shapes are broadcast to.",
    ),
    "broadcast_to": (
        np.broadcast_to,
        "(x: DistArray, /, shape: tuple[int, ...]) -> DistArray",
        "Return the tensor with its elements repeated along dimensions of extent 1.",
    ),
    "concat": (
        np.concatenate,
        "(arrays: Sequence[DistArray], /, *, axis: int | None = 0) -> DistArray",
        "Join tensors along a dimension; without one, their elements as vectors.",
    ),
    "expand_dims": (
        np.expand_dims,
        "(x: DistArray, /, axis: int | tuple[int, ...] = 0) -> DistArray",
        "Return the tensor with a new dimension of extent 1.",
    ),
    "flip": (
        np.flip,
        "(x: DistArray, /, *, axis: Axis = None) -> DistArray",
        "Return the tensor with the order of elements reversed along some dimensions.",
    ),
    "moveaxis": (
        np.moveaxis,
        "(x: DistArray, source: int | tuple[int, ...], destination: int | tuple[int, ...], /)"
        " -> DistArray",
        "Return the tensor with some dimensions at other positions.",
    ),
    "permute_dims": (
        np.permute_dims,
        "(x: DistArray, /, axes: tuple[int, ...]) -> DistArray",
        "Return the tensor with its dimensions in another order.",
    ),
    "repeat": (
        np.repeat,
        "(x: DistArray, repeats: int | DistArray, /, *, axis: int | None = None) -> DistArray",
        "Return each element repeated along a dimension; without one, in row-major order.",
    ),
    "reshape": (
        np.reshape,
        "(x: DistArray, /, shape: tuple[int, ...], *, copy: bool | None = None) -> DistArray",
        "Return the elements, in row-major order, in another shape.",
    ),
    "roll": (
        np.roll,
        "(x: DistArray, /, shift: int | tuple[int, ...], *, axis: Axis = None) -> DistArray",
        "Return the tensor with elements shifted along dimensions; the last become the first.",
    ),
    "squeeze": (
        np.squeeze,
        "(x: DistArray, /, axis: int | tuple[int, ...]) -> DistArray",
        "Return the tensor without some dimensions of extent 1.",
    ),
    "stack": (
        np.stack,
        "(arrays: Sequence[DistArray], /, *, axis: int = 0) -> DistArray",
        "Join tensors of the same shape along a new dimension.",
    ),
    "take": (
        np.take,
        "(x: DistArray, indices: DistArray, /, *, axis: int | None = None) -> DistArray",
        "Return the elements at some indices along a dimension.",
    ),
    "take_along_axis": (
        np.take_along_axis,
        "(x: DistArray, indices: DistArray, /, *, axis: int = -1) -> DistArray",
        "Return elements by indices along one dimension, different ones for each row.",
    ),
    "tile": (
        np.tile,
        "(x: DistArray, repetitions: tuple[int, ...], /) -> DistArray",
        "Return the whole tensor repeated along its dimensions.",
    ),
    "tril": (
        np.tril,
        "(x: DistArray, /, *, k: int = 0) -> DistArray",
        "Return the tensor with zeros above the k-th diagonal of its last two dimensions.",
    ),
    "triu": (
        np.triu,
        "(x: DistArray, /, *, k: int = 0) -> DistArray",
        "Return the tensor with zeros below the k-th diagonal of its last two dimensions.",
    ),
    "unstack": (
        np.unstack,
        "(x: DistArray, /, *, axis: int = 0) -> tuple[DistArray, ...]",
        "Return the parts of a tensor along a dimension, without that dimension.",
    ),
    # searches and sets
    "nonzero": (
        np.nonzero,
        "(x: DistArray, /) -> tuple[DistArray, ...]",
        "Return the indices of the elements that are not zero, in row-major order.",
    ),
    "searchsorted": (
        np.searchsorted,
        "(x1: DistArray, x2: Any, /, *, side: str = 'left', sorter: DistArray | None = None)"
        " -> DistArray",
        "Return where elements would have to be inserted in a sorted vector to keep it sorted.",
    ),
    "unique_all": (
        np.unique_all,
        "(x: DistArray, /) -> UniqueAll",
        "Return the different elements, where each occurs first, the inverse and the counts.",
    ),
    "unique_counts": (
        np.unique_counts,
        "(x: DistArray, /) -> UniqueCounts",
        "Return the different elements and how often each occurs.",
    ),
    "unique_inverse": (
        np.unique_inverse,
        "(x: DistArray, /) -> UniqueInverse",
        "Return the different elements, and for each element of the tensor its place among them.",
    ),
    "unique_values": (
        np.unique_values,
        _UNARY,
        "Return the different elements, in ascending order.",
    ),
}

# Decompositions are of stacks of matrices: the stack is cut over the ranks, and each matrix is
# whole on a rank.
LINALG: dict[str, Row] = {
    **PRODUCTS,
    "outer": (np.outer, _PAIR, "Return the products of all pairs of elements of two vectors."),
    "diagonal": (
        partial(np.diagonal, axis1=-2, axis2=-1),
        "(x: DistArray, /, *, offset: int = 0) -> DistArray",
        "Return a diagonal of each matrix of a stack.",
    ),
    "trace": (
        partial(np.trace, axis1=-2, axis2=-1),
        "(x: DistArray, /, *, offset: int = 0, dtype: Any = None) -> DistArray",
        "Return the sum of a diagonal of each matrix of a stack.",
    ),
    "vector_norm": (
        np.linalg.vector_norm,
        "(x: DistArray, /, *, axis: Axis = None, keepdims: bool = False, ord: Any = 2)"
        " -> DistArray",
        "Return the norms of vectors along some dimensions, by default of all elements as one.",
    ),
    "matrix_norm": (
        np.linalg.matrix_norm,
        "(x: DistArray, /, *, keepdims: bool = False, ord: Any = 'fro') -> DistArray",
        "Return the norm of each matrix of a stack.",
    ),
    "cholesky": (
        np.linalg.cholesky,
        "(x: DistArray, /, *, upper: bool = False) -> DistArray",
        "Return the Cholesky factor of each matrix of a stack.",
    ),
    "det": (np.linalg.det, _UNARY, "Return the determinant of each matrix of a stack."),
    "slogdet": (
        np.linalg.slogdet,
        "(x: DistArray, /) -> Any",
        "Return the sign and the logarithm of the determinant of each matrix of a stack.",
    ),
    "eigh": (
        np.linalg.eigh,
        "(x: DistArray, /) -> Any",
        "Return the eigenvalues and eigenvectors of each Hermitian matrix of a stack.",
    ),
    "eigvalsh": (
        np.linalg.eigvalsh,
        _UNARY,
        "Return the eigenvalues of each Hermitian matrix of a stack.",
    ),
    "inv": (np.linalg.inv, _UNARY, "Return the inverse of each matrix of a stack."),
    "matrix_power": (
        np.linalg.matrix_power,
        "(x: DistArray, n: int, /) -> DistArray",
        "Return an integer power of each matrix of a stack.",
    ),
    "qr": (
        np.linalg.qr,
        "(x: DistArray, /, *, mode: str = 'reduced') -> Any",
        "Return the QR decomposition of each matrix of a stack.",
    ),
    "svd": (
        np.linalg.svd,
        "(x: DistArray, /, *, full_matrices: bool = True) -> Any",
        "Return the singular value decomposition of each matrix of a stack.",
    ),
    "svdvals": (
        np.linalg.svdvals,
        _UNARY,
        "Return the singular values of each matrix of a stack.",
    ),
    "solve": (
        np.linalg.solve,
        _PAIR,
        """Return the solutions of systems of linear equations, a stack of matrices `x1` each.

    A vector `x2` is the right-hand side of all systems.
    """,
    ),
}

# The transformed dimensions are whole on a rank; others are cut.
FFT: dict[str, Row] = {
    **_transforms("fft ifft rfft irfft hfft ihfft", _TRANSFORM, "one dimension"),
    **_transforms("fftn ifftn rfftn irfftn", _TRANSFORM_OF_AXES, "several dimensions"),
    "fftshift": (
        np.fft.fftshift,
        _SHIFT,
        "Return the tensor with frequency zero in the middle of its dimensions.",
    ),
    "ifftshift": (
        np.fft.ifftshift,
        _SHIFT,
        "Return the tensor with frequency zero at the start of its dimensions.",
    ),
}
