"""Loops over the keys of stored elements, which numba compiles where there is much to do.

The loops are functions of this module. With few elements Python runs them as they are, on lists:
that takes less time than importing numba.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.kernels.cpu.compiled import built_kernel
from einmpi.kernels.fixed_lists import fact

MIN_COMPILED = 2**16  # elements; Python takes about a microsecond for each

Column: TypeAlias = npt.NDArray[np.integer[Any]]


def key_dtype(extent: int) -> type[np.integer[Any]]:
    """Return the dtype of indices of a dimension, and of its extent.

    Most take half the bytes of int64; and kernels need not ask whether they are negative.
    """
    return np.uint32 if extent < 2**32 else np.int64


def run_loop(
    loop: Callable[..., None], given: Sequence[Column], out: Sequence[Column], elements: int
) -> None:
    """Call a loop of this module with arrays that it reads, and then those that it writes.

    It goes through about so many `elements`.
    """
    if elements >= MIN_COMPILED:
        arrays = [np.require(array, requirements=["C", "W"]) for array in given]
        dtypes = tuple(array.dtype.name for array in (*arrays, *out))
        kernel: Any = built_kernel((loop.__name__, dtypes), lambda: _source(loop), dtypes)
        kernel(*arrays, *out)
        return
    lists = [array.tolist() for array in out]
    loop(*[array.tolist() for array in given], *lists)
    for array, found in zip(out, lists, strict=True):
        array[:] = found


def _source(loop: Callable[..., None]) -> str:
    text = inspect.getsource(loop).replace(f"def {loop.__name__}(", "def kernel(")
    return "import numpy as np\n" + text.replace(": Any", "")


def taken(values: npt.NDArray[Any], order: Column) -> npt.NDArray[Any]:
    """Return the values at some places. numpy would make int64 of the places first."""
    bits = 8 * values.itemsize
    if len(order) < MIN_COMPILED or order.dtype == np.int64 or values.ndim > 1 or bits > 64:
        return values[order]
    found: npt.NDArray[Any] = np.empty(len(order), values.dtype)
    given: Any = values.view(f"u{bits // 8}")
    out: Any = found.view(given.dtype)
    run_loop(_take, (given, order), (out,), len(order))
    return found


def _take(values: Any, order: Any, out: Any) -> None:
    for x in range(len(order)):
        out[x] = values[order[x]]


def starts_of(numbers: Column, first: int, count: int) -> Column:
    """Return where in a sorted list the numbers from the first on begin, so many of them.

    The list has no other numbers.
    """
    if len(numbers) + count < MIN_COMPILED or numbers.dtype not in (np.uint32, np.int64):
        return np.searchsorted(numbers, np.arange(first, first + count))
    found: Column = np.empty(count, key_dtype(len(numbers)))
    run_loop(_find_starts, (numbers, np.array([first])), (found,), len(numbers) + count)
    return found


def _find_starts(numbers: Any, first: Any, out: Any) -> None:
    # Without a branch for each number: processors would often guess wrong.
    lowest = first[0]
    for x in range(len(out)):
        out[x] = len(numbers)
    for place in range(len(numbers) - 1, -1, -1):
        out[numbers[place] - lowest] = place
    for x in range(len(out) - 2, -1, -1):
        out[x] = min(out[x], out[x + 1])


def starts_in(numbers: Column, count: int, known: Column | None = None) -> Column:
    """Return where the numbers from 0 on begin in a sorted list that never changes, and its end.

    The list has numbers below `count`. What is returned may be `known` already.
    """

    def find() -> Column:
        if known is not None:
            return known
        return starts_of(numbers, 0, count + 1).astype(key_dtype(len(numbers)), copy=False)

    return fact(numbers, ("starts", count), find)


def order_by(numbers: Column, count: int) -> tuple[Column, Column]:
    """Return where each of so many numbers starts in an order that sorts them, and the order.

    Equal ones stay as they are given.
    """
    dtype = key_dtype(len(numbers))
    starts: Column = np.zeros(count + 1, dtype)
    order: Column = np.empty(len(numbers), dtype)
    run_loop(_find_order, (numbers,), (starts, order), len(numbers) + count)
    return starts, order


def _find_order(numbers: Any, starts: Any, order: Any) -> None:
    for x in range(len(numbers)):
        starts[numbers[x] + 1] += 1
    for n in range(1, len(starts)):
        starts[n] += starts[n - 1]
    for x in range(len(numbers)):
        n = numbers[x]
        order[starts[n]] = x
        starts[n] += 1
    for n in range(len(starts) - 1, 0, -1):
        starts[n] = starts[n - 1]
    starts[0] = 0


def count_pairs(group: Any, of_left: Any, of_right: Any, count: Any, begin: Any) -> None:
    """Find where the pairs of each group begin, in a list of all of them.

    Parameters
    ----------
    group
        The group of each left element.
    of_left, of_right
        The numbers of left and right elements: those with the same one are pairs.
    count, begin
        Zeros, as many as there are numbers, and one more than there are groups. They are written
        over.
    """
    for y in range(len(of_right)):
        count[of_right[y]] += 1
    for x in range(len(group)):
        begin[group[x] + 1] += count[of_left[x]]
    for g in range(1, len(begin)):
        begin[g] += begin[g - 1]


def list_pairs(
    starts: Any,
    left_order: Any,
    group: Any,
    right_order: Any,
    of_right: Any,
    key: Any,
    place: Any,
    left: Any,
    right: Any,
    result: Any,
    begin: Any,
) -> None:
    """List pairs of left and right elements with the same number, in the order of their results.

    A result is a group of left elements, and a key of right elements. Right elements are taken in
    the order of their keys, so that those of each group come in that order, too: nothing is
    sorted. Pairs with the same result are in the order of the right elements, then of left ones.

    Parameters
    ----------
    starts, left_order, group
        Where left elements with each number start in an order that sorts these, and in this order
        the elements and their groups.
    right_order
        The right elements in the order of their keys.
    of_right, key
        The number and the key of each right element.
    place
        Where the pairs of each group begin. It is written over.
    left, right, result
        The pairs: both elements, and the number of the result.
    begin
        The first pair of each result.
    """
    for z in range(len(right_order)):
        y = right_order[z]
        n = of_right[y]
        for x in range(starts[n], starts[n + 1]):
            g = group[x]
            pair = place[g]
            place[g] = pair + 1
            left[pair] = left_order[x]
            right[pair] = y
    results = 0
    first = 0
    for g in range(len(place)):
        end = place[g]
        last = -1
        for pair in range(first, end):
            # Without a branch: what is written too early is written over.
            k = key[right[pair]]
            begin[results] = pair
            results += k != last
            last = k
            result[pair] = results - 1
        first = end


def list_keys(
    rows: Any,
    right_row: Any,
    first: Any,
    keys: Any,
    longest: Any,
    mark: Any,
    begin: Any,
    row_of: Any,
    found: Any,
) -> None:
    """List the keys that each row of a product of matrices has, in order if there are few.

    Parameters
    ----------
    rows
        Where the left elements of each row begin, and their end.
    right_row
        For each left element the row of the right matrix that it is multiplied by.
    first, keys
        Where right rows begin, and the keys of their elements.
    longest
        How many keys a row has at most that is sorted.
    mark
        A zero for each possible key. They are written over.
    begin
        Where the keys of each row begin, and their end. The first one is 0.
    row_of, found
        The row and the key of each element of the result; there has to be room for as many as there
        are pairs.
    """
    # Unsigned numbers: numba does not ask whether they are negative indices.
    one: Any = np.uint64(1)
    count: Any = np.uint64(0)
    for row in range(len(begin) - 1):
        start = count
        for x in range(rows[row], rows[row + 1]):
            n = right_row[x]
            for y in range(first[n], first[n + 1]):
                k = keys[y]
                if mark[k] != row + 1:
                    mark[k] = row + 1
                    row_of[count] = row
                    found[count] = k
                    count += one
        begin[row + 1] = count
        if count - start <= longest[0]:
            for p in range(start + one, count):
                k = found[p]
                place: Any = p
                while place > start and found[place - one] > k:
                    found[place] = found[place - one]
                    place -= one
                found[place] = k
