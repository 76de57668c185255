"""Small EinSum programs on DistArrays, compiled once: products, einsums, and what others need."""

from __future__ import annotations

import json
import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from inspect import signature
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from einmpi.arrays.dist_array import DistArray, takes_symbols
from einmpi.arrays.moving import common_comm
from einmpi.comm.agreement import describe_error, on_first_rank, together
from einmpi.comm.base import ALONE, Comm
from einmpi.errors import InputError
from einmpi.graph.arithmetic import result_type
from einmpi.graph.dtypes import DTYPES, Type, is_bfloat16
from einmpi.job.job import Job, options_of, program_job, with_settings
from einmpi.kernels.cpu.blas import numpy_einsum
from einmpi.kernels.reference import as_numpy
from einmpi.language.numpy_einsum import (
    CASTINGS,
    ORDERS,
    EinsumTypeError,
    Path,
    check_choice,
    label_extents,
    numbered_terms,
    parse_subscripts,
    path_of,
    program_text,
    split_arguments,
)
from einmpi.late import late

# A compiled job, which takes arrays by name and returns its outputs by name.
Program: TypeAlias = Callable[[Mapping[str, Any]], dict[str, DistArray]]
MOST_PROGRAMS = 256
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_Operand = TypeVar("_Operand")
# Those of arrays in C order, by what identifies them.
_known_einsums: dict[Hashable, Program] = {}


def compiled_once(comm: Comm, key: Hashable, make_job: Callable[[], Job]) -> Program:
    """Return the compiled job that a key stands for; `make_job` makes it for the first call.

    All ranks ask for the same in the same order, so all have compiled the same.
    """
    known: OrderedDict[Hashable, Program] = comm.kept.setdefault("programs", OrderedDict())
    compiled: Program | None = known.pop(key, None)
    if compiled is None:
        job = make_job()
        compiled = late("Compiled")(job, comm, options_of(job))
    known[key] = compiled
    if len(known) > MOST_PROGRAMS:
        known.popitem(last=False)
    return compiled


def evaluate_program(comm: Comm, text: str, arrays: Mapping[str, DistArray]) -> DistArray:
    """Return the tensor `out` of a program. All ranks call it."""
    return evaluate_programs(comm, [text], arrays)[0]


@takes_symbols
def evaluate_programs(
    comm: Comm, texts: Sequence[str], arrays: Mapping[str, DistArray]
) -> list[DistArray]:
    """Return the tensor `out` of each of some statements, which are planned together.

    All ranks call it.
    """
    kinds = tuple((name, array.shape, array.dtype.name) for name, array in arrays.items())
    names = ["out"] if len(texts) == 1 else [f"out{number}" for number in range(len(texts))]
    named = [text.replace("out", name, 1) for text, name in zip(texts, names, strict=True)]
    text = "\n".join(named)

    def make_job() -> Job:
        inputs = {name: (shape, dtype) for name, shape, dtype in kinds}
        return program_job(text, inputs, {}, "float64", names)

    found = compiled_once(comm, (text, kinds), make_job)(dict(arrays))
    for result in found.values():
        result.origin = None  # the program is not the user's
    return [found[name] for name in names]


# ---- einsums ------------------------------------------------------------------------------------


def compile_einsum(
    subscripts: str,
    arrays: Sequence[Any],
    comm: Comm,
    settings: Mapping[str, Any] | None = None,
    path: Path = (),
) -> Program:
    """Return the compiled program of an einsum: its operands are x0, x1, …, its result is out."""
    key = tuple([(array.shape, array.dtype) for array in arrays])

    def make_job() -> Job:
        kinds = tuple((tuple(array.shape), array.dtype.name) for array in arrays)
        common_dtype = ""
        if arrays:
            common_dtype = _common_dtype([array.dtype for array in arrays])
        text = program_text(subscripts, kinds, common_dtype, path)
        job = program_job(text, _by_name(kinds), {}, common_dtype, None)
        return with_settings(job, settings or {})

    shown = repr(settings) if settings else ""
    return compiled_once(comm, ("einsum", subscripts, key, path, shown), make_job)


def _common_dtype(dtypes: Sequence[np.dtype[Any]]) -> str:
    """Return the dtype of a product of operands; numpy does not know it for bfloat16."""
    if not any(map(is_bfloat16, dtypes)):
        return np.result_type(*dtypes).name
    common: Type = dtypes[0]
    for dtype in dtypes[1:]:
        common = result_type("*", (common, dtype))
    return np.dtype(common).name


def _by_name(operands: Sequence[_Operand]) -> dict[str, _Operand]:
    """Return operands of an einsum by the names that its program gives them."""
    return {f"x{number}": operand for number, operand in enumerate(operands)}


def _key_of_arrays(arguments: Sequence[Any]) -> Hashable:
    """Return what identifies an einsum of arrays in C order, None for all others.

    Its result has the order in which it was computed.
    """
    if not arguments or type(arguments[0]) is not str:
        return None
    key: list[Hashable] = [arguments[0]]
    for array in arguments[1:]:
        if type(array) is not np.ndarray or not array.flags.c_contiguous:
            return None
        key.append((array.shape, array.dtype))
    return tuple(key)


@takes_symbols
def einsum_of_arrays(
    *arguments: Any,
    out: npt.NDArray[Any] | None = None,
    dtype: Any = None,
    order: str = "K",
    casting: str = "safe",
    optimize: Any = False,
    settings: Mapping[str, Any] | None = None,
) -> Any:
    """Evaluate the arguments of `einmpi.einsum`. All ranks call it if there is a DistArray."""
    key = None
    is_plain = out is None and dtype is None and optimize is False and not settings
    if is_plain and isinstance(order, str) and isinstance(casting, str):
        key = _key_of_arrays(arguments) if order == "K" and casting == "safe" else None
    known = _known_einsums.get(key)
    if known is not None:
        return known(_by_name(arguments[1:]))["out"].local
    distributed = [argument for argument in arguments if isinstance(argument, DistArray)]
    comm: Comm = ALONE
    if distributed:
        comm = distributed[0].own_comm
    if callable(optimize):
        optimize = _agreed_path(comm, arguments, optimize)

    def check_and_compile() -> tuple[Program | None, str, list[Any]]:
        subscripts, operands = split_arguments(arguments)
        path = path_of(optimize, len(operands))
        checked_casting = check_choice("casting", casting, CASTINGS)
        if check_choice("order", order, ORDERS) == "F" and distributed:
            raise InputError("einsum", "order F is given with a DistArray", "arrays only")
        _check_out(out, distributed)
        arrays = _converted(operands, dtype, checked_casting)
        if out is None and _is_view(subscripts, arrays):
            return None, subscripts, arrays
        return compile_einsum(subscripts, arrays, comm, settings, path), subscripts, arrays

    compiled, subscripts, arrays = together(comm, check_and_compile)
    numpy_order: Any = order.upper()
    if compiled is None:
        (labels,), output = parse_subscripts(subscripts, [arrays[0].shape])
        view: Any = _view(arrays[0], labels, output)
        return np.asarray(view, order=numpy_order)
    result = compiled(_by_name(arrays))["out"]
    if distributed:
        return result
    are_used = all(map(operator.is_, arrays, arguments[1:]))
    if key is not None and are_used:
        if len(_known_einsums) >= MOST_PROGRAMS:
            _known_einsums.clear()
        _known_einsums[key] = compiled
    if out is None:
        return _in_order(numpy_order, subscripts, arrays, result.local)
    # As in numpy, a product in several steps is assigned to `out` whatever its dtype.
    _assign(out, result.local, "unsafe" if optimize else casting)
    return out


def _agreed_path(comm: Comm, arguments: Sequence[Any], find_path: Callable[..., Any]) -> Any:
    """Return on all ranks the path that a path optimizer finds on rank 0: it may be random."""

    def take_terms() -> tuple[list[frozenset[int]], frozenset[int], dict[int, int]]:
        subscripts, operands = split_arguments(arguments)
        return numbered_terms(subscripts, [np.shape(operand) for operand in operands])

    def path_text() -> str:
        given: tuple[Any, ...] = (*terms, None)  # no limit of memory
        try:
            try:
                signature(find_path).bind(*given)
            except TypeError:
                given = terms  # some optimizers of cotengra do not take a limit
            path = find_path(*given)
            return json.dumps([list(map(operator.index, step)) for step in path])
        except Exception as error:
            what = f"optimize finds no path: {describe_error(error):.200}"
            expected = "a function of inputs, output, sizes and a limit of memory"
            raise InputError("einsum", what, expected) from error

    terms = together(comm, take_terms, lambda found: f"path optimizer for {found}")
    if len(terms[0]) <= 2:
        return True  # there is nothing to find
    return json.loads(on_first_rank(comm, path_text))


def _check_out(out: Any, distributed: Sequence[DistArray]) -> None:
    """Refuse an `out` that cannot take the result, and DistArrays on different ranks."""
    if distributed:
        common_comm("einsum", distributed)
        if out is not None:
            raise InputError("einsum", "out is given with a DistArray", "arrays only")
    elif out is not None and not isinstance(out, np.ndarray):
        raise EinsumTypeError("einsum", f"out is {type(out).__name__}", "an array")


def _assign(out: npt.NDArray[Any], result: npt.NDArray[Any], casting: Any) -> None:
    """Copy a result into the array that the caller has given for it."""
    if out.shape != result.shape:
        what = f"out is an array of shape {out.shape}"
        raise InputError("einsum", what, f"an array of shape {result.shape}")
    if not np.can_cast(result.dtype, out.dtype, casting):
        what = f"out is {out.dtype.name}, which does not hold {result.dtype.name}"
        raise EinsumTypeError("einsum", what, "another dtype", 'or use casting="unsafe"')
    np.copyto(out, result, casting="unsafe")


def _converted(operands: Sequence[Any], dtype: Any, casting: str) -> list[Any]:
    """Return operands as arrays or DistArrays, in the dtype that is asked for, if any."""
    wanted = None
    if dtype is not None:
        wanted = _dtype_of(dtype)
    arrays: list[Any] = []
    for number, operand in enumerate(operands):
        array: Any = operand
        if not isinstance(operand, DistArray):
            array = as_numpy("einsum", f"operand {number}", operand)
        arrays.append(_cast(number, array, wanted, casting))
    return arrays


def _is_view(subscripts: str, arrays: Sequence[Any]) -> bool:
    """Return whether the result is a view of the only operand, as in numpy: nothing is summed."""
    if len(arrays) != 1 or not isinstance(arrays[0], np.ndarray):
        return False
    shapes = [arrays[0].shape]
    terms, output = parse_subscripts(subscripts, shapes)
    label_extents(terms, shapes)  # refuses a label with two extents
    return set(terms[0]) == set(output) and arrays[0].dtype.name in DTYPES


def _dtype_of(given: Any) -> np.dtype[Any]:
    try:
        dtype: np.dtype[Any] = np.dtype(given)
    except TypeError:
        raise EinsumTypeError("einsum", f"{given!r:.60} is not a dtype", "a dtype") from None
    return dtype


def _cast(number: int, array: Any, dtype: np.dtype[Any] | None, casting: Any) -> Any:
    """Return an operand in the dtype in which the einsum is computed, if one is given."""
    if dtype is None or array.dtype == dtype:
        return array
    if not np.can_cast(array.dtype, dtype, casting):
        what = f"operand {number} is {array.dtype.name}, which is not cast to {dtype.name}"
        raise EinsumTypeError("einsum", what, "another dtype", 'or use casting="unsafe"')
    return array.astype(dtype)


def _view(
    array: npt.NDArray[Any], labels: Sequence[str], output: Sequence[str]
) -> npt.NDArray[Any]:
    """Return a view of an array with its dimensions permuted, or its diagonals."""
    axes = [output.index(label) for label in labels]
    view: npt.NDArray[Any] = numpy_einsum(array, axes, list(range(len(output))))
    return view


def _in_order(
    order: Any, subscripts: str, arrays: Sequence[npt.NDArray[Any]], result: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Return the result in a memory order of numpy."""
    if order == "A":
        order = "F" if all(array.flags.f_contiguous for array in arrays) else "C"
    if order in ("C", "F"):
        ordered: npt.NDArray[Any] = np.asarray(result, order=order)
        return ordered
    if result.ndim < 2 or all(array.flags.c_contiguous for array in arrays):
        return result
    ordered = _like_operands(subscripts, arrays, result)
    ordered[...] = result
    return ordered


def _like_operands(
    subscripts: str, arrays: Sequence[npt.NDArray[Any]], result: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Return an empty array whose dimensions lie in memory as those of the operands do.

    numpy's iterator decides about it, for operands that are broadcast as in the einsum.
    """
    terms, output = parse_subscripts(subscripts, [array.shape for array in arrays])
    labels = list(output)
    for term in terms:
        labels += [label for label in term if label not in labels]
    axes: list[list[int]] = []
    diagonals = []
    for array, term in zip(arrays, terms, strict=True):
        own_labels = list(dict.fromkeys(term))
        diagonals.append(_view(array, term, own_labels))
        own_axes = dict.fromkeys(labels, -1)
        own_axes.update({label: axis for axis, label in enumerate(own_labels)})
        axes.append(list(own_axes.values()))
    axes.append([*range(len(output)), *[-1] * (len(labels) - len(output))])
    operand_flags: list[Any] = [["readonly"]] * len(arrays)
    try:
        iterator = np.nditer(
            [*diagonals, None],
            flags=["reduce_ok", "external_loop", "zerosize_ok"],
            op_flags=[*operand_flags, ["readwrite", "allocate"]],
            op_dtypes=[*[array.dtype for array in arrays], result.dtype],
            op_axes=axes,
            order="K",
        )
    except ValueError:  # there are too many elements or dimensions for an iterator
        return np.empty_like(result)
    found: npt.NDArray[Any] = iterator.operands[-1]
    return found


@takes_symbols
def product(where: str, subscripts: str, *operands: Any) -> DistArray:
    """Return an einsum of operands, at least one of which is a DistArray."""
    arrays: list[Any] = []
    distributed: list[DistArray] = []
    for operand in operands:
        if isinstance(operand, DistArray):
            arrays.append(operand)
            distributed.append(operand)
        else:
            arrays.append(as_numpy(where, "an operand", operand))
    comm = common_comm(where, distributed)
    compiled = compile_einsum(subscripts, arrays, comm)
    return compiled(_by_name(arrays))["out"]


# ---- products, each as an einsum ----------------------------------------------------------------


def matmul(left: Any, right: Any) -> Any:
    """Return the matrix product, as `numpy.matmul`."""
    left_ndim = np.ndim(left)
    right_ndim = np.ndim(right)
    if min(left_ndim, right_ndim) == 0:
        raise ValueError("matmul: a number is not a matrix; use * instead")
    _check_extents("matmul", np.shape(left)[-1], np.shape(right)[-min(2, right_ndim)])
    if left_ndim == 1 and right_ndim == 1:
        subscripts = "a,a->"
    elif left_ndim == 1:
        subscripts = "a,...ac->...c"
    elif right_ndim == 1:
        subscripts = "...ba,a->...b"
    else:
        subscripts = "...ba,...ac->...bc"
    return product("matmul", subscripts, left, right)


def _check_extents(where: str, left_extent: int, right_extent: int) -> None:
    """Refuse dimensions of different extents in a sum of products, where 1 is not repeated."""
    if left_extent != right_extent:
        raise ValueError(f"{where}: extents {left_extent} and {right_extent} differ")


def dot(left: Any, right: Any, /) -> Any:
    """Return the sum of products over the last dimension of `left`, as `numpy.dot`.

    Its counterpart is the last dimension but one of `right`, or the only one of a vector.
    """
    right_ndim = np.ndim(right)
    if np.ndim(left) == 0 or right_ndim == 0:
        return np.multiply(left, right)
    right_axis = -min(2, right_ndim)
    return tensordot(left, right, axes=([-1], [right_axis]))


def inner(left: Any, right: Any, /) -> Any:
    """Return the sum of products over the last dimensions of both."""
    if np.ndim(left) == 0 or np.ndim(right) == 0:
        return np.multiply(left, right)
    return tensordot(left, right, axes=([-1], [-1]))


def tensordot(left: Any, right: Any, /, axes: Any = 2) -> Any:
    """Return the sum of products over pairs of dimensions, as `numpy.tensordot`.

    An integer `axes` pairs that many of the last dimensions of `left` with the first of `right`.
    """
    left_shape = np.shape(left)
    right_shape = np.shape(right)
    left_ndim = len(left_shape)
    right_ndim = len(right_shape)
    if isinstance(axes, int):
        left_axes = list(range(left_ndim - axes, left_ndim))
        right_axes = list(range(axes))
    else:
        left_axes = list(np.atleast_1d(axes[0]))
        right_axes = list(np.atleast_1d(axes[1]))
    if len(left_axes) != len(right_axes):
        raise ValueError("tensordot: the number of axes differs between the two tensors")

    # Every dimension has its own label, except that those of a pair share the one of the left.
    left_labels = list(_LETTERS[:left_ndim])
    right_labels = list(_LETTERS[left_ndim : left_ndim + right_ndim])
    for left_axis, right_axis in zip(left_axes, right_axes, strict=True):
        _check_extents("tensordot", left_shape[left_axis], right_shape[right_axis])
        right_labels[right_axis] = left_labels[left_axis]
    summed = set(left_labels) & set(right_labels)
    result_labels = [label for label in left_labels + right_labels if label not in summed]

    operand_subscripts = f"{''.join(left_labels)},{''.join(right_labels)}"
    subscripts = f"{operand_subscripts}->{''.join(result_labels)}"
    return product("tensordot", subscripts, left, right)


def outer(left: Any, right: Any, /) -> Any:
    """Return the products of all pairs of elements."""
    return product("outer", "a,b->ab", np.ravel(left), np.ravel(right))


def vdot(left: Any, right: Any, /) -> Any:
    """Return the sum of the products of the conjugate elements of `left` and those of `right`."""
    _check_extents("vdot", np.size(left), np.size(right))
    return product("vdot", "a,a->", _conjugates(np.ravel(left)), np.ravel(right))


def _conjugates(array: Any) -> Any:
    """Return the conjugates of complex numbers; numpy would make int8 of bools."""
    return np.conjugate(array) if np.iscomplexobj(array) else array


def vecdot(left: Any, right: Any, /, axis: int = -1) -> Any:
    """Return the sum of products over one dimension; elements of `left` are conjugated."""
    left_last = np.moveaxis(left, axis, -1)
    right_last = np.moveaxis(right, axis, -1)
    _check_extents("vecdot", left_last.shape[-1], right_last.shape[-1])
    return product("vecdot", "...a,...a->...", _conjugates(left_last), right_last)


def trace(array: Any, /, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None) -> Any:
    """Return the sum of a diagonal of a matrix, or of two dimensions."""
    return np.sum(diagonal(array, offset, axis1, axis2), axis=-1, dtype=dtype)


def diagonal(array: Any, /, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    """Return a diagonal of a matrix, or of two dimensions."""
    matrices = np.moveaxis(array, (axis1, axis2), (0, 1))
    first_row = max(-offset, 0)
    first_column = max(offset, 0)
    extent = min(matrices.shape[0] - first_row, matrices.shape[1] - first_column)
    extent = max(extent, 0)
    rows = slice(first_row, first_row + extent)
    columns = slice(first_column, first_column + extent)
    return product("diagonal", "aa...->...a", matrices[rows, columns])
