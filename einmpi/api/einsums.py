"""Evaluate expressions in the grammar of numpy.einsum, on arrays and DistArrays."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt


def einsum(
    *arguments: Any,
    out: npt.NDArray[Any] | None = None,
    dtype: Any = None,
    order: str = "K",
    casting: str = "safe",
    optimize: Any = False,
) -> Any:
    """Evaluate an expression in the grammar of `numpy.einsum`.

    Ellipsis, implicit output, repeated labels and operands of extent 1 that are repeated are
    supported. As in numpy, the result of one array of which nothing is summed is a view of it; of a
    DistArray it is a copy.

    Parameters
    ----------
    *arguments
        ``"ij,jk->ik", a, b`` or ``a, [0, 1], b, [1, 2], [0, 2]``. If one of the operands is a
        DistArray, all ranks call it.
    out : array, optional
        Takes the result; not for DistArrays.
    dtype : dtype, optional
        The dtype to which operands are converted first.
    order : {"K", "A", "C", "F"}, optional
        The memory order of the result; not for DistArrays. "K" is that of the operands as closely
        as possible, and C if all of them are C-contiguous.
    casting : {"safe", "same_kind", "unsafe", "equiv", "no"}, optional
        Which conversions to `dtype`, and of the result to `out`, are allowed.
    optimize : optional
        Accepted and checked, as in numpy, but the order of a product is always chosen. If it is
        given, `out` takes the result whatever its dtype.

    Returns
    -------
    array or DistArray
        A DistArray if one of the operands is.

    Raises
    ------
    InputError
        The subscripts or operands are wrong. Where numpy raises TypeError, as for a conversion
        that `casting` does not allow, the error is a TypeError too.

    Examples
    --------
    >>> a, b = np.ones((2, 3)), np.ones((3, 2))
    >>> einmpi.einsum("ij,jk->ik", einmpi.DistArray.from_global(a), b).gather()
    array([[3., 3.],
           [3., 3.]])
    """
    from einmpi.arrays.products import einsum_of_arrays

    return einsum_of_arrays(
        *arguments, out=out, dtype=dtype, order=order, casting=casting, optimize=optimize
    )
