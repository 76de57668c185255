"""Functions that numpy computes on blocks of DistArrays: of single elements, and of whole rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from einmpi.arrays.creation import block_of, layout_for
from einmpi.arrays.dist_array import DistArray, takes_symbols
from einmpi.arrays.moving import (
    broadcast_layout,
    common_comm,
    distributed,
    layout_cutting,
    with_other_dimensions,
)
from einmpi.arrays.shapes import concatenate, expand_dims, filled, roll
from einmpi.comm.agreement import is_checking, require_same_arrays, together
from einmpi.comm.base import Comm
from einmpi.errors import EinmpiError
from einmpi.kernels.cuda.driver import cupy, is_device_array
from einmpi.kernels.reference import as_numpy
from einmpi.schedule.layout import Layout

Number: TypeAlias = bool | int | float | complex | np.generic


@takes_symbols
def on_blocks(
    where: str,
    function: Callable[..., Any],
    operands: Sequence[Any],
    fails_by_value: bool = False,
) -> Any:
    """Apply an elementwise function to the blocks of a common layout; operands are broadcast.

    A function with several results returns them as a tuple. One that `fails_by_value` may raise an
    error on some ranks only: then all ranks raise it.
    """
    tensors = [operand for operand in operands if isinstance(operand, DistArray)]
    comm = common_comm(where, tensors)
    values: list[Any] = []
    shapes: list[tuple[int, ...]] = []
    plain_arrays: dict[str, Any] = {}
    for operand in operands:
        if isinstance(operand, Number):
            values.append(operand)
        elif isinstance(operand, DistArray):
            values.append(operand)
            shapes.append(operand.shape)
        else:
            array = as_numpy(where, "an operand", operand)
            values.append(array)
            shapes.append(array.shape)
            plain_arrays[f"operand {len(plain_arrays)}"] = array
    if comm.size > 1 and is_checking():
        require_same_arrays(comm, where, plain_arrays)

    layout = common_layout(np.broadcast_shapes(*shapes), tensors)
    blocks = [needed_block(value, layout, comm) for value in values]
    if fails_by_value and layout.bound:  # every rank has all of a tensor without dimensions
        computed = raise_alike(comm, ValueError, lambda: function(*in_one_memory(blocks)))
    else:
        computed = function(*in_one_memory(blocks))
    if isinstance(computed, tuple):
        return tuple(_as_dist_array(block, layout, comm) for block in computed)
    return _as_dist_array(computed, layout, comm)


def common_layout(shape: tuple[int, ...], operands: Sequence[DistArray]) -> Layout:
    """Return the layout of a result: that of the largest operand, whose elements stay in place."""
    largest = max(operands, key=lambda operand: operand.size)
    return broadcast_layout(largest.layout, shape)


def _operand_layout(result: Layout, shape: tuple[int, ...]) -> Layout:
    """Return the layout in which an operand has, on each rank, what the result needs there.

    A cut through a dimension along which the operand is broadcast does not cut the operand: it is
    the same on all ranks of that axis.
    """
    new_dimensions = len(result.bound) - len(shape)

    def dimension_of(cut: int) -> int | None:
        dimension = cut - new_dimensions
        is_broadcast = dimension < 0 or shape[dimension] != result.bound[cut]
        return None if is_broadcast else dimension

    return with_other_dimensions(result, shape, dimension_of)


def needed_block(value: Any, result: Layout, comm: Comm) -> Any:
    """Return the part of an operand that this rank's block of the result needs."""
    if isinstance(value, Number):
        return value
    layout = _operand_layout(result, value.shape)
    region = layout.block(comm.rank)
    if isinstance(value, DistArray):
        block = value._in_layout(layout).local
    elif region is not None:
        block = block_of(value, region, value.dtype.name)
    else:
        block = value
    if region is None:
        # This rank is idle, but it computes with no elements to find out the dtype of the result.
        return np.empty(0, block.dtype)
    return block


def in_one_memory(blocks: Sequence[Any]) -> list[Any]:
    """Return the blocks, all of them on the GPU if any of them is."""
    if not any(map(is_device_array, blocks)):
        return list(blocks)
    moved: list[Any] = []
    for block in blocks:
        if isinstance(block, np.ndarray):
            moved.append(cupy().asarray(block))
        else:
            moved.append(block)
    return moved


def _as_dist_array(block: Any, layout: Layout, comm: Comm) -> DistArray:
    """Return the tensor of which a function has computed this rank's block."""
    if not is_device_array(block):
        block = np.asarray(block)
    return DistArray(block, layout, comm)


def raise_alike(comm: Comm, kind: type[Exception], function: Callable[[], Any]) -> Any:
    """Call a function on every rank; if some raise an error of a kind, all ranks raise one."""
    try:
        return together(comm, function)
    except EinmpiError as error:  # of another rank
        name, _, message = str(error).partition(": ")
        raise kind(message) if name == kind.__name__ else error from None


# ---- functions of numpy that are no ufuncs ------------------------------------------------------


def by_blocks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that applies another one to every block of a DistArray.

    All arguments but the first are the same for every block.
    """

    def apply_to_array(array: DistArray, /, **options: Any) -> Any:
        return on_blocks(function.__name__, partial(function, **options), (array,))

    return apply_to_array


def copied(block: Any) -> Any:
    """Return a copy of a block in row-major order."""
    return block.copy()


@takes_symbols
def converted(array: DistArray, dtype: Any) -> DistArray:
    """Return the elements in another dtype."""
    return array._with_block(array.local.astype(dtype))


def clip(array: Any, /, a_min: Any = None, a_max: Any = None, **options: Any) -> Any:
    """Limit the elements to a range; numpy calls its ends a_min and a_max, or min and max."""
    lowest = options.pop("min", a_min)
    highest = options.pop("max", a_max)
    if options:
        raise TypeError(f"clip of a DistArray does not take {', '.join(options)}")
    return clipped(array, lowest, highest)


@takes_symbols
def clipped(array: Any, lowest: Any, highest: Any) -> Any:
    """Limit the elements to a range, either end of which may be None."""
    limits = [limit for limit in (lowest, highest) if limit is not None]

    def clip_block(block: Any, *own_limits: Any) -> Any:
        # numpy's clip takes numbers that the dtype does not hold; its maximum refuses them.
        least = None if lowest is None else own_limits[0]
        greatest = None if highest is None else own_limits[-1]
        return np.clip(block, least, greatest)

    return on_blocks("clip", clip_block, (array, *limits))


def full_like(array: DistArray, value: Any, /, dtype: Any = None, device: Any = None) -> DistArray:
    """Return a tensor of equal elements, in the layout of another one."""
    return filled_like(value, array, dtype)


def filled_like(
    value: Any, array: DistArray, /, dtype: Any = None, device: Any = None
) -> DistArray:
    """Return a tensor of equal elements, in the layout of another one."""
    if dtype is None:
        dtype = array.dtype
    return filled(array, array.shape, np.full((), value, dtype))  # an array is refused


def isclose(a: Any, b: Any, /, rtol: Any = 1e-5, atol: Any = 1e-8, equal_nan: bool = False) -> Any:
    """Return, for each element, whether two tensors are close to each other."""
    a, b = np.multiply(a, 1.0), np.multiply(b, 1.0)  # differences of integers would wrap around
    with np.errstate(invalid="ignore"):  # of inf - inf
        is_near = abs(a - b) <= atol + rtol * abs(b)
    is_close = (is_near & np.isfinite(b)) | np.equal(a, b)
    return is_close | (np.isnan(a) & np.isnan(b)) if equal_nan else is_close


def array_equal(a1: Any, a2: Any, /, equal_nan: bool = False) -> bool:
    """Return whether two tensors have the same shape and elements."""
    if np.shape(a1) != np.shape(a2):
        return False
    is_equal = np.equal(a1, a2)
    if equal_nan:
        # Only a nan differs from itself.
        are_both_nan = np.not_equal(a1, a1) & np.not_equal(a2, a2)
        is_equal = is_equal | are_both_nan
    return bool(np.all(is_equal))


# ---- values that the array API standard gives to special cases, and numpy does not ---------------


class SpecialCases:
    """A function of elements that departs from numpy's in some cases, and is called as a ufunc is.

    Of DistArrays it is computed by blocks; of blocks, and of symbols, by the functions of numpy.

    Parameters
    ----------
    usual : callable
        The function of numpy.
    kind : str
        The kind of the dtypes of results that have special cases.
    is_special : callable
        Returns for each element whether it is a special case.
    value : callable
        Returns the values of the special cases, and anything elsewhere.
    """

    signature = None

    def __init__(
        self,
        usual: Callable[..., Any],
        kind: str,
        is_special: Callable[..., Any],
        value: Callable[..., Any],
    ) -> None:
        self.usual = usual
        self.kind = kind
        self.is_special = is_special
        self.value = value
        self.__name__ = usual.__name__

    def __call__(self, *operands: Any) -> Any:
        for operand in operands:
            if isinstance(operand, DistArray) and not operand.is_symbol:
                return operand.__array_ufunc__(self, "__call__", *operands)  # type: ignore[arg-type]
        usual = self.usual(*operands)
        if usual.dtype.kind != self.kind:
            return usual
        is_special = self.is_special(*operands)
        if not isinstance(usual, DistArray) and not np.any(is_special):
            return usual
        with np.errstate(all="ignore"):
            return np.where(is_special, self.value(*operands), usual)


floor_divide = SpecialCases(
    np.floor_divide,
    "f",
    lambda x1, x2: (abs(x1) == np.inf) | (abs(x2) == np.inf),
    lambda x1, x2: np.floor(np.divide(x1, x2)),
)
# numpy's exp has the special cases of C99, which are those of expm1 too; and -0 becomes +0.
expm1 = SpecialCases(np.expm1, "c", lambda x: ~np.isfinite(x) | (x == 0), lambda x: np.exp(x) - 1)
# At an infinite real part the imaginary part is a zero. Its sign is that of the imaginary part b of
# x; numpy's is that of sin(2b), which is the same where b is 1 or -1.
tanh = SpecialCases(
    np.tanh,
    "c",
    lambda x: (abs(x.real) == np.inf) & (abs(x.imag) > 0),
    lambda x: np.tanh(x.real + 1j * np.sign(x.imag)),
)


# ---- functions of whole rows: matrices and transforms; other dimensions are cut ------------------


def with_whole_axes(array: DistArray, axes: Collection[int]) -> DistArray:
    """Return the tensor in a layout that does not cut these dimensions.

    Ranks that cut them cut others instead. If no other is long enough, they hold copies.
    """
    layout = array.layout
    comm = array.own_comm
    if layout.mesh.ranks != comm.size:
        layout = layout_for(comm, array.shape)
    other_dimensions = [dimension for dimension in range(array.ndim) if dimension not in axes]
    return array._in_layout(layout_cutting(layout, array.shape, other_dimensions))


def along_axes(function: Callable[[Any], Any], array: DistArray, axes: int | Sequence[int]) -> Any:
    """Apply a function to blocks in which some dimensions are whole.

    The function may change their extents, or leave out those that are last. It returns an array, or
    a named tuple of such.
    """
    whole_axes = normalize_axis_tuple(axes, array.ndim)
    source = with_whole_axes(array, whole_axes)

    def as_tensor(block: Any) -> DistArray:
        local = np.array(block, order="C")
        bound = [
            local.shape[axis] if axis in whole_axes else array.shape[axis]
            for axis in range(local.ndim)
        ]
        return array._with_block(local, replace(source.layout, bound=tuple(bound)))

    # A matrix of one rank may be singular: then all ranks raise an error.
    found = raise_alike(array.own_comm, np.linalg.LinAlgError, lambda: function(source.host))
    return each_part(found, as_tensor)


def of_matrices(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of `numpy.linalg` that takes a stack of matrices as a DistArray."""

    def apply_to_stack(array: DistArray, /, **options: Any) -> Any:
        return _along_matrices(lambda block: function(block, **options), array)

    return apply_to_stack


def eigenvalues_by(function: Callable[[Any], Any]) -> Callable[[DistArray], Any]:
    """Return `numpy.linalg.eig` or `eigvals` for a DistArray.

    Results are real where numpy's are: if all eigenvalues are, on other ranks too.
    """

    def compute(block: Any) -> Any:
        return each_part(function(block), as_complex)

    def apply_to_stack(array: DistArray, /) -> Any:
        found = _along_matrices(compute, array)
        values = found[0] if isinstance(found, tuple) else found
        is_always_complex = function(np.eye(1, dtype=array.dtype))[0].dtype.kind == "c"
        if is_always_complex or np.any(values.imag):  # the former for newer versions of numpy
            return found
        return each_part(found, lambda part: part.real.copy())

    return apply_to_stack


def each_part(found: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to an array, or to each one of a named tuple."""
    return type(found)(*map(function, found)) if isinstance(found, tuple) else function(found)


def as_complex(array: Any) -> Any:
    """Return an array as a complex one of the same precision."""
    return array.astype(np.result_type(array.dtype, np.complex64))


def _along_matrices(function: Callable[[Any], Any], array: DistArray) -> Any:
    if array.ndim < 2:
        raise ValueError(f"a tensor of {array.ndim} dimensions is not a stack of matrices")
    return along_axes(function, array, (-2, -1))


def solve(matrices: Any, sides: Any, /) -> DistArray:
    """Return the solutions of systems of linear equations, as `numpy.linalg.solve`.

    A vector is the right-hand side of all systems.
    """
    if np.ndim(sides) == 1:
        columns = expand_dims(distributed(sides, matrices.own_comm), -1)
        return solve(matrices, columns).squeeze(-1)
    stack_shape = np.broadcast_shapes(matrices.shape[:-2], sides.shape[:-2])
    all_matrices = np.broadcast_to(matrices, (*stack_shape, *matrices.shape[-2:]))
    all_sides = np.broadcast_to(sides, (*stack_shape, *sides.shape[-2:]))
    # Both in one tensor, so that a rank has the matrices and their right-hand sides.
    single = [np.ones((1, 1), array.dtype) for array in (matrices, sides)]
    dtype = np.linalg.solve(single[0], single[1]).dtype
    systems = concatenate([all_matrices, all_sides], -1, dtype)
    size = matrices.shape[-1]

    def solve_block(block: Any) -> Any:
        return np.linalg.solve(block[..., :size], block[..., size:])

    solutions: DistArray = _along_matrices(solve_block, systems)
    return solutions


def transform_of(function: Callable[..., Any]) -> Callable[..., DistArray]:
    """Return a transform of `numpy.fft` along one dimension of a DistArray, or along several."""

    def transform(
        array: DistArray,
        /,
        n: int | None = None,
        axis: int = -1,
        s: Sequence[int] | None = None,
        axes: Sequence[int] | None = None,
        norm: Any = None,
    ) -> DistArray:
        options: dict[str, Any] = {"n": n, "axis": axis}
        whole_axes: Any = axis
        if function.__name__[-1] in "n2":
            count = array.ndim if function.__name__.endswith("n") else 2
            first = array.ndim - (count if s is None else len(s))
            whole_axes = tuple(range(first, array.ndim) if axes is None else axes)
            options = {"s": s, "axes": whole_axes}
        transformed: DistArray = along_axes(
            lambda block: function(block, norm=norm, **options), array, whole_axes
        )
        return transformed

    return transform


def fftshift(array: DistArray, /, axes: int | Sequence[int] | None = None) -> DistArray:
    """Return the tensor with frequency zero in the middle of its dimensions."""
    return _shifted(array, axes, 1)


def ifftshift(array: DistArray, /, axes: int | Sequence[int] | None = None) -> DistArray:
    """Return the tensor with frequency zero at the start of its dimensions."""
    return _shifted(array, axes, -1)


def _shifted(array: DistArray, axes: int | Sequence[int] | None, direction: int) -> DistArray:
    """Shift dimensions by half of their extents, up (1) or down (-1)."""
    shifted_axes = range(array.ndim) if axes is None else np.atleast_1d(axes).tolist()
    shifts = [direction * (array.shape[axis] // 2) for axis in shifted_axes]
    return roll(array, shifts, shifted_axes)
