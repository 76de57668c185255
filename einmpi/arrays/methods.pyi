# python docs/make_stubs.py writes this file: change the functions instead.

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from einmpi.arrays.dist_array import DistArray

Axis: TypeAlias = int | tuple[int, ...] | None
Row: TypeAlias = tuple[Callable[..., Any], str, str]

METHODS: dict[str, Row]

def make_functions(rows: Mapping[str, Row], module: str) -> dict[str, Callable[..., Any]]:
    """Return the functions of a table by name. numpy calls the DistArrays back by its protocols."""

class ArrayMethods:
    """The methods of DistArrays that are calls of numpy's functions."""

    def ravel(self) -> DistArray:
        """Return the elements as a vector, in row-major order: a view, where numpy has one."""

    def swapaxes(self, axis1: int, axis2: int) -> DistArray:
        """Return the tensor with two dimensions exchanged. Nothing moves."""

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> DistArray:
        """Return the elements whose two indices are equal, or differ by `offset`."""

    def take(self, indices: Any, axis: int | None = None) -> DistArray:
        """Return the elements at some indices of a dimension; without one, in row-major order."""

    def repeat(self, repeats: Any, axis: int | None = None) -> DistArray:
        """Return each element repeated along a dimension; without one, in row-major order."""

    def nonzero(self) -> tuple[DistArray, ...]:
        """Return the indices of the elements that are not zero, in row-major order."""

    def argsort(self, axis: int | None = -1) -> DistArray:
        """Return the indices that sort the elements; equal elements keep their order."""

    def searchsorted(self, v: Any, side: str = "left") -> DistArray:
        """Return where elements would be inserted to keep this vector sorted."""

    def squeeze(self, axis: Axis = None) -> DistArray:
        """Return the tensor without dimensions of extent 1. Nothing moves."""

    def copy(self) -> DistArray:
        """Return a copy whose elements can be changed without changing this tensor."""

    def conj(self) -> DistArray:
        """Return the complex conjugates."""

    def round(self, decimals: int = 0) -> DistArray:
        """Return the elements rounded to this many decimals."""

    def clip(self, min: Any = None, max: Any = None) -> DistArray:
        """Return the elements limited to the range from `min` to `max`."""

    def sum(
        self,
        axis: Axis = None,
        dtype: Any = None,
        keepdims: bool = False,
        *,
        initial: Any = None,
        where: Any = True,
    ) -> DistArray:
        """Return the sum over some dimensions, by default over all."""

    def prod(
        self,
        axis: Axis = None,
        dtype: Any = None,
        keepdims: bool = False,
        *,
        initial: Any = None,
        where: Any = True,
    ) -> DistArray:
        """Return the product over some dimensions, by default over all."""

    def max(
        self, axis: Axis = None, keepdims: bool = False, *, initial: Any = None, where: Any = True
    ) -> DistArray:
        """Return the greatest element along some dimensions, by default of all."""

    def min(
        self, axis: Axis = None, keepdims: bool = False, *, initial: Any = None, where: Any = True
    ) -> DistArray:
        """Return the least element along some dimensions, by default of all."""

    def any(self, axis: Axis = None, keepdims: bool = False, *, where: Any = True) -> DistArray:
        """Return whether any element along some dimensions is not zero, by default of all."""

    def all(self, axis: Axis = None, keepdims: bool = False, *, where: Any = True) -> DistArray:
        """Return whether all elements along some dimensions are not zero, by default of all."""

    def mean(
        self, axis: Axis = None, keepdims: bool = False, *, dtype: Any = None, where: Any = True
    ) -> DistArray:
        """Return the mean along some dimensions, by default of all elements."""

    def var(
        self, axis: Axis = None, ddof: float = 0, keepdims: bool = False, *, where: Any = True
    ) -> DistArray:
        """Return the variance along some dimensions, by default of all elements."""

    def std(
        self, axis: Axis = None, ddof: float = 0, keepdims: bool = False, *, where: Any = True
    ) -> DistArray:
        """Return the standard deviation along some dimensions, by default of all elements."""

    def argmax(self, axis: int | None = None, keepdims: bool = False) -> DistArray:
        """Return the index of the first greatest element; in row-major order without `axis`."""

    def argmin(self, axis: int | None = None, keepdims: bool = False) -> DistArray:
        """Return the index of the first least element; in row-major order without `axis`."""

    def cumsum(self, axis: int | None = None, dtype: Any = None) -> DistArray:
        """Return the sums of all elements up to each one; without `axis`, in row-major order."""

    def cumprod(self, axis: int | None = None, dtype: Any = None) -> DistArray:
        """Return the products of all elements up to each; without `axis`, in row-major order."""

    def trace(self, offset: int = 0) -> DistArray:
        """Return the sum of the diagonal."""

    def norm(self, axis: Axis = None, keepdims: bool = False) -> DistArray:
        """Return the square root of the sum of squares along some dimensions, by default of all."""
