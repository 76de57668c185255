# python docs/make_stubs.py writes this file: change the functions instead.

import builtins
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from einmpi.array_api import fft as fft
from einmpi.array_api import linalg as linalg
from einmpi.array_api.functions import FloatInfo, IntegerInfo, NamespaceInfo
from einmpi.arrays.dist_array import DistArray
from einmpi.arrays.statistics import UniqueAll, UniqueCounts, UniqueInverse

Axis: TypeAlias = int | tuple[int, ...] | None
__array_api_version__: str
bool: np.dtype[Any]
complex128: np.dtype[Any]
complex64: np.dtype[Any]
e: float
float32: np.dtype[Any]
float64: np.dtype[Any]
inf: float
int16: np.dtype[Any]
int32: np.dtype[Any]
int64: np.dtype[Any]
int8: np.dtype[Any]
nan: float
newaxis: None
pi: float
uint16: np.dtype[Any]
uint32: np.dtype[Any]
uint64: np.dtype[Any]
uint8: np.dtype[Any]

def __array_namespace_info__() -> NamespaceInfo:
    """Return what this namespace has: dtypes, devices, abilities."""

def abs(x: DistArray, /) -> DistArray:
    """Compute `numpy.absolute` of each element."""

def acos(x: DistArray, /) -> DistArray:
    """Compute `numpy.arccos` of each element."""

def acosh(x: DistArray, /) -> DistArray:
    """Compute `numpy.arccosh` of each element."""

def add(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.add` of each pair of elements."""

def all(x: DistArray, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> DistArray:
    """Return whether all elements along some dimensions are not zero."""

def any(x: DistArray, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> DistArray:
    """Return whether any element along some dimensions is not zero."""

def arange(
    start: float,
    /,
    stop: float | None = None,
    step: float = 1,
    *,
    dtype: Any = None,
    device: Any = None,
) -> DistArray:
    """Return numbers from `start` up to `stop`, which is not among them."""

def argmax(
    x: DistArray, /, *, axis: int | None = None, keepdims: builtins.bool = False
) -> DistArray:
    """Return the index of the first greatest element; in row-major order without `axis`."""

def argmin(
    x: DistArray, /, *, axis: int | None = None, keepdims: builtins.bool = False
) -> DistArray:
    """Return the index of the first least element; in row-major order without `axis`."""

def argsort(
    x: DistArray,
    /,
    *,
    axis: int = -1,
    descending: builtins.bool = False,
    stable: builtins.bool = True,
) -> DistArray:
    """Return the indices that sort the elements; equal elements keep their order."""

def asarray(
    obj: Any, /, *, dtype: Any = None, device: Any = None, copy: builtins.bool | None = None
) -> DistArray:
    """Return a tensor of numbers, nested lists of numbers or an array that every rank has."""

def asin(x: DistArray, /) -> DistArray:
    """Compute `numpy.arcsin` of each element."""

def asinh(x: DistArray, /) -> DistArray:
    """Compute `numpy.arcsinh` of each element."""

def astype(
    x: DistArray, dtype: Any, /, *, copy: builtins.bool = True, device: Any = None
) -> DistArray:
    """Return the elements converted to another dtype."""

def atan(x: DistArray, /) -> DistArray:
    """Compute `numpy.arctan` of each element."""

def atan2(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.arctan2` of each pair of elements."""

def atanh(x: DistArray, /) -> DistArray:
    """Compute `numpy.arctanh` of each element."""

def bitwise_and(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.bitwise_and` of each pair of elements."""

def bitwise_invert(x: DistArray, /) -> DistArray:
    """Compute `numpy.invert` of each element."""

def bitwise_left_shift(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.left_shift` of each pair of elements."""

def bitwise_or(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.bitwise_or` of each pair of elements."""

def bitwise_right_shift(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.right_shift` of each pair of elements."""

def bitwise_xor(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.bitwise_xor` of each pair of elements."""

def broadcast_arrays(*arrays: DistArray) -> tuple[DistArray, ...]:
    """Return tensors with their elements repeated so that all have the same shape."""

def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that tensors of some shapes are broadcast to."""

def broadcast_to(x: DistArray, /, shape: tuple[int, ...]) -> DistArray:
    """Return the tensor with its elements repeated along dimensions of extent 1."""

def can_cast(from_: Any, to: Any, /) -> builtins.bool:
    """Return whether a dtype is converted to another one by the rules of promotion."""

def ceil(x: DistArray, /) -> DistArray:
    """Compute `numpy.ceil` of each element."""

def clip(x: DistArray, /, min: Any = None, max: Any = None) -> DistArray:
    """Limit the elements to the range from `min` to `max`; the dtype stays."""

def concat(arrays: Sequence[DistArray], /, *, axis: int | None = 0) -> DistArray:
    """Join tensors along a dimension; without one, their elements as vectors."""

def conj(x: DistArray, /) -> DistArray:
    """Compute `numpy.conjugate` of each element."""

def copysign(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.copysign` of each pair of elements."""

def cos(x: DistArray, /) -> DistArray:
    """Compute `numpy.cos` of each element."""

def cosh(x: DistArray, /) -> DistArray:
    """Compute `numpy.cosh` of each element."""

def count_nonzero(
    x: DistArray, /, *, axis: Axis = None, keepdims: builtins.bool = False
) -> DistArray:
    """Return how many elements are not zero, along some dimensions."""

def cumulative_prod(
    x: DistArray,
    /,
    *,
    axis: int | None = None,
    dtype: Any = None,
    include_initial: builtins.bool = False,
) -> DistArray:
    """Return the products of all elements up to each one, with a one before them if wanted."""

def cumulative_sum(
    x: DistArray,
    /,
    *,
    axis: int | None = None,
    dtype: Any = None,
    include_initial: builtins.bool = False,
) -> DistArray:
    """Return the sums of all elements up to each one, with a zero before them if wanted."""

def diff(
    x: DistArray,
    /,
    n: int = 1,
    axis: int = -1,
    prepend: DistArray | None = None,
    append: DistArray | None = None,
) -> DistArray:
    """Return the differences of neighbouring elements along a dimension, `n` times."""

def divide(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.divide` of each pair of elements."""

def empty(shape: int | Sequence[int], *, dtype: Any = None, device: Any = None) -> DistArray:
    """Return a tensor of zeros: no element is left to chance."""

def empty_like(x: DistArray, /, *, dtype: Any = None, device: Any = None) -> DistArray:
    """Return a tensor of zeros of the shape, and in the layout, of another one."""

def equal(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.equal` of each pair of elements."""

def exp(x: DistArray, /) -> DistArray:
    """Compute `numpy.exp` of each element."""

def expand_dims(x: DistArray, /, axis: int | tuple[int, ...] = 0) -> DistArray:
    """Return the tensor with a new dimension of extent 1."""

def expm1(x: DistArray, /) -> DistArray:
    """Compute `numpy.expm1` of each element."""

def eye(
    n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: Any = None, device: Any = None
) -> DistArray:
    """Return a matrix with ones on its k-th diagonal and zeros elsewhere."""

def finfo(type: Any, /) -> FloatInfo:
    """Return the limits of a floating-point dtype, or of the parts of a complex one."""

def flip(x: DistArray, /, *, axis: Axis = None) -> DistArray:
    """Return the tensor with the order of elements reversed along some dimensions."""

def floor(x: DistArray, /) -> DistArray:
    """Compute `numpy.floor` of each element."""

def floor_divide(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.floor_divide` of each pair of elements."""

def from_dlpack(x: Any, /, *, device: Any = None, copy: builtins.bool | None = None) -> DistArray:
    """Return the tensor of an object of another library, which every rank has."""

def full(
    shape: int | Sequence[int], fill_value: Any, *, dtype: Any = None, device: Any = None
) -> DistArray:
    """Return a tensor of equal elements."""

def full_like(
    x: DistArray, /, fill_value: Any, *, dtype: Any = None, device: Any = None
) -> DistArray:
    """Return a tensor of equal elements of the shape, and in the layout, of another one."""

def greater(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.greater` of each pair of elements."""

def greater_equal(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.greater_equal` of each pair of elements."""

def hypot(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.hypot` of each pair of elements."""

def iinfo(type: Any, /) -> IntegerInfo:
    """Return the limits of an integer dtype."""

def imag(x: DistArray, /) -> DistArray:
    """Compute `numpy.imag` of each element."""

def isdtype(dtype: Any, kind: Any) -> builtins.bool:
    """Return whether a dtype is of a kind: a dtype, the name of a kind, or a tuple of these."""

def isfinite(x: DistArray, /) -> DistArray:
    """Compute `numpy.isfinite` of each element."""

def isin(x1: Any, x2: Any, /, *, invert: builtins.bool = False) -> DistArray:
    """Return whether each element of `x1` is one of `x2`."""

def isinf(x: DistArray, /) -> DistArray:
    """Compute `numpy.isinf` of each element."""

def isnan(x: DistArray, /) -> DistArray:
    """Compute `numpy.isnan` of each element."""

def less(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.less` of each pair of elements."""

def less_equal(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.less_equal` of each pair of elements."""

def linspace(
    start: complex,
    stop: complex,
    /,
    num: int,
    *,
    dtype: Any = None,
    device: Any = None,
    endpoint: builtins.bool = True,
) -> DistArray:
    """Return evenly spaced numbers from `start` to `stop`."""

def log(x: DistArray, /) -> DistArray:
    """Compute `numpy.log` of each element."""

def log10(x: DistArray, /) -> DistArray:
    """Compute `numpy.log10` of each element."""

def log1p(x: DistArray, /) -> DistArray:
    """Compute `numpy.log1p` of each element."""

def log2(x: DistArray, /) -> DistArray:
    """Compute `numpy.log2` of each element."""

def logaddexp(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.logaddexp` of each pair of elements."""

def logical_and(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.logical_and` of each pair of elements."""

def logical_not(x: DistArray, /) -> DistArray:
    """Compute `numpy.logical_not` of each element."""

def logical_or(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.logical_or` of each pair of elements."""

def logical_xor(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.logical_xor` of each pair of elements."""

def matmul(x1: DistArray, x2: DistArray, /) -> DistArray:
    """Return the matrix product."""

def matrix_transpose(x: DistArray, /) -> DistArray:
    """Return the tensor with its last two dimensions swapped."""

def max(x: DistArray, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> DistArray:
    """Return the greatest element along some dimensions."""

def maximum(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.maximum` of each pair of elements."""

def mean(x: DistArray, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> DistArray:
    """Return the mean along some dimensions."""

def meshgrid(*arrays: DistArray, indexing: Literal["xy", "ij"] = "xy") -> tuple[DistArray, ...]:
    """Return, for each vector of coordinates, its values at all points of the grid."""

def min(x: DistArray, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> DistArray:
    """Return the least element along some dimensions."""

def minimum(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.minimum` of each pair of elements."""

def moveaxis(
    x: DistArray, source: int | tuple[int, ...], destination: int | tuple[int, ...], /
) -> DistArray:
    """Return the tensor with some dimensions at other positions."""

def multiply(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.multiply` of each pair of elements."""

def negative(x: DistArray, /) -> DistArray:
    """Compute `numpy.negative` of each element."""

def nextafter(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.nextafter` of each pair of elements."""

def nonzero(x: DistArray, /) -> tuple[DistArray, ...]:
    """Return the indices of the elements that are not zero, in row-major order."""

def not_equal(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.not_equal` of each pair of elements."""

def ones(shape: int | Sequence[int], *, dtype: Any = None, device: Any = None) -> DistArray:
    """Return a tensor of ones."""

def ones_like(x: DistArray, /, *, dtype: Any = None, device: Any = None) -> DistArray:
    """Return a tensor of ones of the shape, and in the layout, of another one."""

def permute_dims(x: DistArray, /, axes: tuple[int, ...]) -> DistArray:
    """Return the tensor with its dimensions in another order."""

def positive(x: DistArray, /) -> DistArray:
    """Compute `numpy.positive` of each element."""

def pow(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.power` of each pair of elements."""

def prod(
    x: DistArray, /, *, axis: Axis = None, dtype: Any = None, keepdims: builtins.bool = False
) -> DistArray:
    """Return the product along some dimensions."""

def real(x: DistArray, /) -> DistArray:
    """Compute `numpy.real` of each element."""

def reciprocal(x: DistArray, /) -> DistArray:
    """Compute `numpy.reciprocal` of each element."""

def remainder(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.remainder` of each pair of elements."""

def repeat(x: DistArray, repeats: int | DistArray, /, *, axis: int | None = None) -> DistArray:
    """Return each element repeated along a dimension; without one, in row-major order."""

def reshape(
    x: DistArray, /, shape: tuple[int, ...], *, copy: builtins.bool | None = None
) -> DistArray:
    """Return the elements, in row-major order, in another shape."""

def result_type(*arrays_and_dtypes: Any) -> np.dtype[Any]:
    """Return the dtype of a result of tensors, dtypes and Python numbers."""

def roll(x: DistArray, /, shift: int | tuple[int, ...], *, axis: Axis = None) -> DistArray:
    """Return the tensor with elements shifted along dimensions; the last become the first."""

def round(x: DistArray, /) -> DistArray:
    """Compute `numpy.round` of each element."""

def searchsorted(
    x1: DistArray, x2: Any, /, *, side: str = "left", sorter: DistArray | None = None
) -> DistArray:
    """Return where elements would have to be inserted in a sorted vector to keep it sorted."""

def sign(x: DistArray, /) -> DistArray:
    """Compute `numpy.sign` of each element."""

def signbit(x: DistArray, /) -> DistArray:
    """Compute `numpy.signbit` of each element."""

def sin(x: DistArray, /) -> DistArray:
    """Compute `numpy.sin` of each element."""

def sinh(x: DistArray, /) -> DistArray:
    """Compute `numpy.sinh` of each element."""

def sort(
    x: DistArray,
    /,
    *,
    axis: int = -1,
    descending: builtins.bool = False,
    stable: builtins.bool = True,
) -> DistArray:
    """Return the elements in order along a dimension."""

def sqrt(x: DistArray, /) -> DistArray:
    """Compute `numpy.sqrt` of each element."""

def square(x: DistArray, /) -> DistArray:
    """Compute `numpy.square` of each element."""

def squeeze(x: DistArray, /, axis: int | tuple[int, ...]) -> DistArray:
    """Return the tensor without some dimensions of extent 1."""

def stack(arrays: Sequence[DistArray], /, *, axis: int = 0) -> DistArray:
    """Join tensors of the same shape along a new dimension."""

def std(
    x: DistArray,
    /,
    *,
    axis: Axis = None,
    correction: float = 0.0,
    keepdims: builtins.bool = False,
    ddof: float = 0,
) -> DistArray:
    """Return the standard deviation along some dimensions."""

def subtract(x1: Any, x2: Any, /) -> DistArray:
    """Compute `numpy.subtract` of each pair of elements."""

def sum(
    x: DistArray, /, *, axis: Axis = None, dtype: Any = None, keepdims: builtins.bool = False
) -> DistArray:
    """Return the sum along some dimensions."""

def take(x: DistArray, indices: DistArray, /, *, axis: int | None = None) -> DistArray:
    """Return the elements at some indices along a dimension."""

def take_along_axis(x: DistArray, indices: DistArray, /, *, axis: int = -1) -> DistArray:
    """Return elements by indices along one dimension, different ones for each row."""

def tan(x: DistArray, /) -> DistArray:
    """Compute `numpy.tan` of each element."""

def tanh(x: DistArray, /) -> DistArray:
    """Compute `numpy.tanh` of each element."""

def tensordot(
    x1: DistArray, x2: DistArray, /, *, axes: int | tuple[Sequence[int], Sequence[int]] = 2
) -> DistArray:
    """Return the sum of products over pairs of dimensions."""

def tile(x: DistArray, repetitions: tuple[int, ...], /) -> DistArray:
    """Return the whole tensor repeated along its dimensions."""

def tril(x: DistArray, /, *, k: int = 0) -> DistArray:
    """Return the tensor with zeros above the k-th diagonal of its last two dimensions."""

def triu(x: DistArray, /, *, k: int = 0) -> DistArray:
    """Return the tensor with zeros below the k-th diagonal of its last two dimensions."""

def trunc(x: DistArray, /) -> DistArray:
    """Compute `numpy.trunc` of each element."""

def unique_all(x: DistArray, /) -> UniqueAll:
    """Return the different elements, where each occurs first, the inverse and the counts."""

def unique_counts(x: DistArray, /) -> UniqueCounts:
    """Return the different elements and how often each occurs."""

def unique_inverse(x: DistArray, /) -> UniqueInverse:
    """Return the different elements, and for each element of the tensor its place among them."""

def unique_values(x: DistArray, /) -> DistArray:
    """Return the different elements, in ascending order."""

def unstack(x: DistArray, /, *, axis: int = 0) -> tuple[DistArray, ...]:
    """Return the parts of a tensor along a dimension, without that dimension."""

def var(
    x: DistArray,
    /,
    *,
    axis: Axis = None,
    correction: float = 0.0,
    keepdims: builtins.bool = False,
    ddof: float = 0,
) -> DistArray:
    """Return the variance along some dimensions: squares by the number less `correction`."""

def vecdot(x1: DistArray, x2: DistArray, /, *, axis: int = -1) -> DistArray:
    """Return the sum of products over one dimension; elements of `x1` are conjugated."""

def where(condition: DistArray, x1: Any = None, x2: Any = None, /) -> Any:
    """Return elements of `x1` where the condition is True, and of `x2` elsewhere."""

def zeros(shape: int | Sequence[int], *, dtype: Any = None, device: Any = None) -> DistArray:
    """Return a tensor of zeros."""

def zeros_like(x: DistArray, /, *, dtype: Any = None, device: Any = None) -> DistArray:
    """Return a tensor of zeros of the shape, and in the layout, of another one."""
