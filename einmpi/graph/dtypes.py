"""The dtypes of tensors, one record each: how numpy, MPI, CPU kernels, CUDA and files know them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import ml_dtypes  # noqa: F401  # makes numpy know bfloat16
import numpy as np

from einmpi.errors import OperationError

# A weak type is the Python type of a constant: it adapts to the other operand, as in numpy.
Type: TypeAlias = np.dtype[Any] | type


@dataclass(frozen=True, kw_only=True, eq=False)
class DType:
    """One dtype.

    Attributes
    ----------
    name : str
        The name in programs and job files, which is numpy's.
    kind : str
        numpy's letter: b (bool), i (integer), u (unsigned integer), f (float) or c (complex).
    itemsize : int
        Bytes of one number in memory.
    documentation : str
        What it holds, for the table of dtypes.
    cuda_type : str
        The C++ type in which CUDA kernels compute.
    cuda_stored : str
        The C++ type in which CUDA kernels read and write memory.
    numba_stored : str
        The numba type of numbers in memory in compiled CPU kernels, "" if numba has none.
    accumulator : str
        The dtype in which rounded totals are kept, so that long sums keep their digits.
    real : str
        The dtype of the real part.
    mpi : str
        The name of the MPI datatype with which MPI can sum, "" if it cannot.
    file_dtype : str
        The dtype in which files hold it.
    in_numpy : bool
        Whether numpy itself has the dtype. Another package adds the others.
    """

    name: str
    kind: str
    itemsize: int
    documentation: str
    cuda_type: str
    cuda_stored: str
    numba_stored: str
    accumulator: str
    real: str
    mpi: str
    file_dtype: str
    in_numpy: bool = True

    @property
    def is_half(self) -> bool:
        """Whether kernels compute it in float32 and round when they store it."""
        return self.kind == "f" and self.itemsize == 2


DTYPES: dict[str, DType] = {}


def _add(dtype: DType) -> None:
    DTYPES[dtype.name] = dtype


_add(
    DType(
        name="float16",
        kind="f",
        itemsize=2,
        documentation="half precision: 11 bits of precision, up to 65504",
        cuda_type="float",
        cuda_stored="Half",
        numba_stored="",
        accumulator="float64",
        real="float16",
        mpi="",
        file_dtype="float16",
    )
)
_add(
    DType(
        name="float32",
        kind="f",
        itemsize=4,
        documentation="single precision: 24 bits of precision",
        cuda_type="float",
        cuda_stored="float",
        numba_stored="float32",
        accumulator="float64",
        real="float32",
        mpi="FLOAT",
        file_dtype="float32",
    )
)
_add(
    DType(
        name="float64",
        kind="f",
        itemsize=8,
        documentation="double precision: 53 bits of precision",
        cuda_type="double",
        cuda_stored="double",
        numba_stored="float64",
        accumulator="float64",
        real="float64",
        mpi="DOUBLE",
        file_dtype="float64",
    )
)
_add(
    DType(
        name="complex64",
        kind="c",
        itemsize=8,
        documentation="complex, with float32 parts",
        cuda_type="Complex<float>",
        cuda_stored="Complex<float>",
        numba_stored="complex64",
        accumulator="complex128",
        real="float32",
        mpi="C_FLOAT_COMPLEX",
        file_dtype="complex64",
    )
)
_add(
    DType(
        name="complex128",
        kind="c",
        itemsize=16,
        documentation="complex, with float64 parts",
        cuda_type="Complex<double>",
        cuda_stored="Complex<double>",
        numba_stored="complex128",
        accumulator="complex128",
        real="float64",
        mpi="C_DOUBLE_COMPLEX",
        file_dtype="complex128",
    )
)
# Integers: name, the C++ type of CUDA kernels, range.
_INTEGERS = (
    ("int8", "signed char", "−128 to 127"),
    ("int16", "short", "−32768 to 32767"),
    ("int32", "int", "−2³¹ to 2³¹ − 1"),
    ("int64", "Long", "−2⁶³ to 2⁶³ − 1"),
    ("uint8", "unsigned char", "0 to 255"),
    ("uint16", "unsigned short", "0 to 65535"),
    ("uint32", "unsigned", "0 to 2³² − 1"),
    ("uint64", "ULong", "0 to 2⁶⁴ − 1"),
)
for _name, _cuda_type, _range in _INTEGERS:
    _add(
        DType(
            name=_name,
            kind=np.dtype(_name).kind,
            itemsize=np.dtype(_name).itemsize,
            documentation=f"integer from {_range}",
            cuda_type=_cuda_type,
            cuda_stored=_cuda_type,
            numba_stored=_name,
            accumulator=_name,
            real=_name,
            mpi=f"{_name.upper()}_T",
            file_dtype=_name,
        )
    )
_add(
    DType(
        name="bool",
        kind="b",
        itemsize=1,
        documentation="True or False",
        cuda_type="bool",
        cuda_stored="Truth",
        numba_stored="uint8",
        accumulator="bool",
        real="bool",
        mpi="",  # a sum of bools is "or" in numpy only
        file_dtype="bool",
    )
)
_add(
    DType(
        name="bfloat16",
        kind="f",
        itemsize=2,
        documentation="8 bits of precision and the range of float32",
        cuda_type="float",
        cuda_stored="Brain",
        numba_stored="",
        accumulator="float64",
        real="bfloat16",
        mpi="",
        file_dtype="float32",
        in_numpy=False,
    )
)


HALF_BYTES = 2  # of a number in half precision


@cache  # numpy assembles a name each time; short calls would wait for it
def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype, which is assembled only once."""
    return str(np.dtype(dtype).name)


def numpy_dtypes() -> tuple[str, ...]:
    """Return the names of the dtypes that numpy itself has: files and most libraries know them."""
    return tuple(name for name, dtype in DTYPES.items() if dtype.in_numpy)


def kind_of(dtype: np.dtype[Any]) -> str:
    """Return the kind of a dtype's numbers, which numpy does not know of bfloat16."""
    kind = dtype.kind
    # The name of a dtype takes numpy some time, and most dtypes are of kinds that it knows.
    return "f" if kind == "V" and dtype.name == "bfloat16" else kind


def computed_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which numbers of a dtype are computed: float32 for half precision."""
    if dtype.itemsize != HALF_BYTES:  # the name of a dtype takes numpy some time
        return dtype
    is_half = dtype.name in DTYPES and DTYPES[dtype.name].is_half
    return np.dtype(np.float32) if is_half else dtype


# ---- promotion ----------------------------------------------------------------------------------


def is_bfloat16(kind: Type) -> bool:
    return isinstance(kind, np.dtype) and kind.name == "bfloat16"


def bfloat16_as_float16(kinds: tuple[Type, ...]) -> tuple[Type, ...]:
    """Replace bfloat16 by the dtype that stands for it in numpy's promotion rules.

    That is float16, or float32 if the other is float16, because only float32 holds both.
    """
    stand_in: np.dtype[Any] = np.dtype(np.float16)
    if stand_in in kinds:
        stand_in = np.dtype(np.float32)
    return tuple(stand_in if is_bfloat16(kind) else kind for kind in kinds)


# ---- promotion -----------------------------------------------------------------------------------
#
# Dtype rules of operations: the dtypes in which numpy computes, and the dtype of the result.


# From the types of the arguments: the dtype to which each argument is converted, then the dtype
# of the result. Raises TypeError if there is none.
DtypeRule: TypeAlias = Callable[[tuple[Type, ...]], tuple[np.dtype[Any], ...]]


def as_ufunc(ufunc: np.ufunc) -> DtypeRule:
    """The rule of a numpy ufunc."""

    def rule(types: tuple[Type, ...]) -> tuple[np.dtype[Any], ...]:
        # numpy takes int, float and complex as weak types, but not bool.
        given = [np.dtype(bool) if kind is bool else kind for kind in types]
        return ufunc.resolve_dtypes((*given, None))

    return rule


def as_comparison(ufunc: np.ufunc) -> DtypeRule:
    """The rule of a comparison: integers that int64 holds are compared as int64.

    So a constant that does not fit into the other dtype can still be compared with it. numpy
    compares uint64 with int64 as the numbers that they are.
    """
    resolve = as_ufunc(ufunc)
    int64 = np.dtype(np.int64)

    def rule(types: tuple[Type, ...]) -> tuple[np.dtype[Any], ...]:
        if types == (int, int):  # numpy would compare two numbers of Python as objects
            return int64, int64, np.dtype(bool)
        first, second, result = resolve(types)
        if first.kind in "biu" and (first.name != "uint64" or types[0] is int):
            first = int64
        if second.kind in "biu" and (second.name != "uint64" or types[1] is int):
            second = int64
        return first, second, result

    return rule


def as_where(types: tuple[Type, ...]) -> tuple[np.dtype[Any], ...]:
    """The rule of where(condition, x, y)."""
    result = as_common_type(types[1:])[-1]
    return np.dtype(bool), result, result, result


def as_common_type(types: tuple[Type, ...]) -> tuple[np.dtype[Any], ...]:
    """The rule of functions whose arguments and result have one dtype, which holds them all."""
    samples: list[Any] = []
    for kind in types:
        if isinstance(kind, type) and kind is not bool:
            samples.append(kind(0))  # a Python number is weak
        else:
            samples.append(np.dtype(kind))
    result = np.result_type(*samples)
    return (result,) * (len(types) + 1)


def as_rounding(ufunc: np.ufunc) -> DtypeRule:
    """The rule of functions that round: integers and bools stay what they are."""
    resolve = as_ufunc(ufunc)

    def rule(types: tuple[Type, ...]) -> tuple[np.dtype[Any], ...]:
        dtype = np.dtype(types[0])
        return (dtype, dtype) if dtype.kind in "biu" else resolve(types)

    return rule


def as_argument(types: tuple[Type, ...]) -> tuple[np.dtype[Any], ...]:
    """The rule of a function that returns its argument."""
    dtype = np.dtype(types[0])
    return dtype, dtype


def as_real_part(types: tuple[Type, ...]) -> tuple[np.dtype[Any], ...]:
    """The rule of real(x) and imag(x)."""
    dtype = np.dtype(types[0])
    return dtype, np.dtype(DTYPES[dtype.name].real)


def as_cast(target: DType) -> DtypeRule:
    """The rule of a cast to a dtype."""

    def rule(types: tuple[Type, ...]) -> tuple[np.dtype[Any], ...]:
        source = np.dtype(types[0])
        if source.kind == "c" and target.kind != "c":
            raise OperationError(
                f"{target.name} does not take complex numbers",
                "a real argument",
                "use real or imag first",
            )
        return source, np.dtype(target.name)

    return rule
