"""Evaluate expressions in the grammar of numpy.einsum, on arrays and DistArrays."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt


def einsum(
    *arguments: Any, dtype: Any = None, out: npt.NDArray[Any] | None = None, optimize: Any = True
) -> Any:
    """Evaluate an expression in the grammar of `numpy.einsum`.

    Ellipsis, implicit output and repeated labels are supported.

    Parameters
    ----------
    *arguments
        ``"ij,jk->ik", a, b`` or ``a, [0, 1], b, [1, 2], [0, 2]``. If one of the operands is a
        DistArray, all ranks call it.
    dtype : dtype, optional
        The dtype to which operands are converted first; not for DistArrays.
    out : array, optional
        Takes the result; not for DistArrays.
    optimize : optional
        Accepted and ignored: the order of a product is always chosen.

    Returns
    -------
    array or DistArray
        A DistArray if one of the operands is.

    Raises
    ------
    InputError
        The subscripts or operands are wrong.

    Examples
    --------
    >>> a, b = np.ones((2, 3)), np.ones((3, 2))
    >>> einmpi.einsum("ij,jk->ik", einmpi.DistArray.from_global(a), b).gather()
    array([[3., 3.],
           [3., 3.]])
    """
    from einmpi.arrays.products import evaluate_einsum

    return evaluate_einsum(*arguments, dtype=dtype, out=out)
