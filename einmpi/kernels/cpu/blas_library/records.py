"""The BLAS libraries that einmpi can use beside numpy's own: one record each, with where it is
installed, which machines it is meant for, and what its functions are called."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import site
import sys
from collections.abc import Callable
from ctypes import CDLL, RTLD_GLOBAL, c_char_p, c_int, c_int64, create_string_buffer
from dataclasses import dataclass
from functools import cache
from glob import glob
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from einmpi.kernels.prepared import address_of

# MKL's threading layers.
_INTEL = 0
_SEQUENTIAL = 1
_GNU = 3
_BITWISE_AUTO = 2  # MKL repeats its results, by the fastest kernels
_SPIN_MILLISECONDS = 1  # of idle threads of Intel's OpenMP; by default they keep cores for 200 ms


@dataclass(frozen=True)
class BlasLibrary:
    """A BLAS library: how it is found, prepared, and told how many threads to use.

    `files` are patterns of file names, the best one first. They are looked for in the folders of
    the Python environment, in `packages` inside of site-packages, and in `lib` of the folders that
    the environment variables in `roots` name. Without `files`, `frameworks` are loaded by path.
    """

    name: str
    documentation: str
    files: tuple[str, ...]
    suits: Callable[[], bool]  # whether `auto` takes it on this machine
    set_threads: tuple[str, ...]  # functions of a number, of which the library has one
    version: Callable[[CDLL], str]
    packages: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()
    frameworks: tuple[str, ...] = ()
    prepare: Callable[[CDLL, str], None] | None = None  # given the library and its path
    hint: str = ""  # how to install it


@dataclass(frozen=True)
class FoundFile:
    """The file of a library, and the environment variable that named its folder, if one did."""

    path: str
    variable: str = ""


def find_file(library: BlasLibrary) -> FoundFile | None:
    """Return the first file of a library that is installed; None if there is none."""
    for path in library.frameworks:
        if sys.platform == "darwin":
            return FoundFile(path)
    folders = [(folder, "") for folder in _environment_folders(library.packages)]
    for variable in library.roots:
        root = os.environ.get(variable, "")
        if root:
            folders.append((os.path.join(root, "lib"), variable))
            folders.append((os.path.join(root, "lib", "intel64"), variable))
    for pattern in library.files:
        for folder, variable in folders:
            found = sorted(glob(os.path.join(folder, pattern)))
            if found:
                return FoundFile(found[-1], variable)
    return None


def _environment_folders(packages: tuple[str, ...]) -> list[str]:
    """Return the folders of the Python environment in which a library may be."""
    folders = [os.path.join(sys.prefix, "lib"), os.path.join(site.getuserbase(), "lib")]
    packages_folders = [entry for entry in sys.path if entry.endswith("-packages")]
    for folder in packages_folders:
        folders += [os.path.join(folder, package) for package in packages]
    return folders


# ---- machines -----------------------------------------------------------------------------------


@cache
def _cpu_text() -> str:
    """Return what Linux says about the first core."""
    try:
        with open("/proc/cpuinfo") as file:
            return file.read().partition("\n\n")[0]
    except OSError:
        return ""


def _is_intel() -> bool:
    return "GenuineIntel" in _cpu_text()


def _is_amd() -> bool:
    return "AuthenticAMD" in _cpu_text()


def _is_grace() -> bool:
    """Return whether this is NVIDIA's Grace, whose cores are Neoverse V2."""
    return "0xd4f" in _cpu_text()


def _is_mac() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"


def _on_request() -> bool:
    return False


# ---- what each library needs before its first call, and its version -----------------------------


def _prepare_mkl(library: CDLL, path: str) -> None:
    """Choose MKL's layers: 32-bit integers, and a thread library that clashes with no other.

    Two copies of Intel's OpenMP in a process end it, so MKL uses the one that is loaded, if any.
    """
    library.MKL_Set_Interface_Layer(0)
    if "MKL_THREADING_LAYER" not in os.environ:
        library.MKL_Set_Threading_Layer(_mkl_threading_layer(os.path.dirname(path)))
    library.MKL_Set_Dynamic(0)  # as many threads as it is told to use
    library.MKL_CBWR_Set(_BITWISE_AUTO)


def _mkl_threading_layer(folder: str) -> int:
    loaded = _loaded_libraries()
    if "libomp.so" not in loaded:
        # By its name alone, a copy that is loaded already is found, wherever it is from.
        name = "libiomp5.so"
        intel = _load(name if name in loaded else os.path.join(folder, name))
        if intel is not None:
            if "KMP_BLOCKTIME" not in os.environ:
                intel.kmp_set_blocktime(_SPIN_MILLISECONDS)
            return _INTEL
    has_gnu_layer = bool(glob(os.path.join(folder, "libmkl_gnu_thread.so*")))
    if has_gnu_layer and _load("libgomp.so.1") is not None:
        return _GNU
    return _SEQUENTIAL


def _load(path: str) -> CDLL | None:
    """Load a library so that others find its functions; return None if that is not possible."""
    try:
        return CDLL(path, RTLD_GLOBAL)
    except OSError:
        return None


def _loaded_libraries() -> set[str]:
    """Return the file names of the libraries that this process has loaded."""
    try:
        with open("/proc/self/maps") as file:
            return {os.path.basename(line.rstrip()) for line in file}
    except OSError:
        return set()


def _mkl_version(library: CDLL) -> str:
    text = create_string_buffer(200)
    library.MKL_Get_Version_String(text, 200)
    return _first_version(text.value)


def _openblas_version(library: CDLL) -> str:
    for prefix in ("scipy_", ""):
        for suffix in ("64_", ""):
            config = getattr(library, f"{prefix}openblas_get_config{suffix}", None)
            if config is not None:
                config.restype = c_char_p
                return _first_version(config())
    return ""


def _blis_version(library: CDLL) -> str:
    function = getattr(library, "bli_info_get_version_str", None)
    if function is None:
        return ""
    function.restype = c_char_p
    return _first_version(function())


def _nvpl_version(library: CDLL) -> str:
    number = int(library.nvpl_blas_get_version())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _first_version(text: bytes) -> str:
    found = re.search(rb"\d+(\.\d+)+", text)
    return found.group().decode() if found else ""


# The order is the one in which `auto` tries them.
BLAS_LIBRARIES = (
    BlasLibrary(
        name="mkl",
        documentation="Intel's oneMKL, as `pip install mkl` or conda installs it, or in `MKLROOT`; "
        "`auto` takes it on processors of Intel",
        files=("libmkl_rt.so.*", "libmkl_rt.so", "libmkl_rt*.dylib"),
        suits=_is_intel,
        set_threads=("MKL_Set_Num_Threads",),
        version=_mkl_version,
        roots=("MKLROOT",),
        prepare=_prepare_mkl,
        hint="pip install mkl",
    ),
    BlasLibrary(
        name="aocl",
        documentation="AMD's BLIS, in `AOCL_ROOT`; `auto` takes it on processors of AMD",
        files=("libblis-mt.so*", "libblis.so*"),
        suits=_is_amd,
        set_threads=("bli_thread_set_num_threads",),
        version=_blis_version,
        roots=("AOCL_ROOT",),
        hint="install AOCL and set AOCL_ROOT",
    ),
    BlasLibrary(
        name="nvpl",
        documentation="NVIDIA's NVPL, as `pip install nvpl-blas` installs it, or in `NVPL_ROOT`; "
        "`auto` takes it on Grace",
        files=("libnvpl_blas_lp64_gomp.so*", "libnvpl_blas_lp64_seq.so*"),
        suits=_is_grace,
        set_threads=("nvpl_blas_set_num_threads",),
        version=_nvpl_version,
        packages=(os.path.join("nvpl", "lib"),),
        roots=("NVPL_ROOT",),
        hint="pip install nvpl-blas",
    ),
    BlasLibrary(
        name="accelerate",
        documentation="Apple's Accelerate; `auto` takes it on Macs with processors of Apple",
        files=(),
        suits=_is_mac,
        set_threads=(),
        version=lambda _: "",
        frameworks=("/System/Library/Frameworks/Accelerate.framework/Accelerate",),
        hint="it is part of macOS",
    ),
    BlasLibrary(
        name="blis",
        documentation="BLIS, as conda installs it, or in `BLIS_ROOT`",
        files=("libblis.so*", "libblis*.dylib"),
        suits=_on_request,
        set_threads=("bli_thread_set_num_threads",),
        version=_blis_version,
        roots=("BLIS_ROOT",),
        hint="conda install blis",
    ),
    BlasLibrary(
        name="openblas",
        documentation="another OpenBLAS than numpy's: that of the package scipy-openblas32, of "
        "conda, in `OPENBLAS_ROOT`, or the one that scipy brings",
        files=("libscipy_openblas*.so", "libopenblas*.so*", "libopenblas*.dylib"),
        suits=_on_request,
        set_threads=(
            "scipy_openblas_set_num_threads64_",
            "scipy_openblas_set_num_threads",
            "openblas_set_num_threads64_",
            "openblas_set_num_threads",
        ),
        version=_openblas_version,
        packages=(os.path.join("scipy_openblas32", "lib"), "scipy.libs"),
        roots=("OPENBLAS_ROOT",),
        hint="pip install scipy-openblas32",
    ),
)

AUTO_BLAS = "auto"  # the best one that is installed
NUMPY_BLAS = "numpy"  # the one that numpy has
BLAS_NAMES = (AUTO_BLAS, NUMPY_BLAS, *(library.name for library in BLAS_LIBRARIES))

# A library at a path: whatever functions it has.
UNKNOWN_LIBRARY = BlasLibrary(
    name="",
    documentation="",
    files=(),
    suits=_on_request,
    set_threads=tuple(name for library in BLAS_LIBRARIES for name in library.set_threads),
    version=lambda _: "",
)


class Naming(NamedTuple):
    """What precedes and follows the names of a library's functions, and the integers they take."""

    prefix: str
    suffix: str
    integer: type[c_int] | type[c_int64]


NAMINGS = (
    Naming("", "_64", c_int64),
    Naming("", "$NEWLAPACK$ILP64", c_int64),
    Naming("scipy_", "64_", c_int64),
    Naming("", "64_", c_int64),
    Naming("scipy_", "", c_int),
    Naming("", "", c_int),
)


# ---- loading -------------------------------------------------------------------------------------
#
# A BLAS library that is loaded into this process: its matrix products and its threads.


_LETTERS = {"float32": "s", "float64": "d", "complex64": "c", "complex128": "z"}
_REAL = {"float32": ctypes.c_float, "float64": ctypes.c_double}
ROW_MAJOR = 101
COLUMN_MAJOR = 102
AS_STORED = 111
TRANSPOSED = 112
CONJUGATE_TRANSPOSED = 113
LOWER = 122


class UnusableLibraryError(Exception):
    """A library that cannot be loaded, or that has no matrix products as they should be."""


@dataclass(frozen=True)
class MatrixFunctions:
    """The products of one dtype: of two matrices, and of many that have equal distances.

    Complex ones are also those of a matrix and its conjugate transpose, of which the lower triangle
    is computed. `one` and `zero` are what the library takes as these numbers, and `kept` is their
    memory.
    """

    multiply: Callable[..., None]
    multiply_many: Callable[..., None] | None
    one: Any
    zero: Any
    kept: npt.NDArray[Any]
    multiply_by_own: Callable[..., None] | None = None


@dataclass(frozen=True)
class LoadedBlas:
    """A BLAS library in this process."""

    name: str
    version: str
    path: str
    largest_extent: int  # that its integers can hold
    functions: dict[str, MatrixFunctions]  # by dtype
    set_threads: Callable[[int], None]

    def __str__(self) -> str:
        return " ".join(word for word in (self.name, self.version) if word)


def load_blas(library: BlasLibrary, path: str) -> LoadedBlas:
    """Load a library; raise UnusableLibraryError if its products are missing or wrong."""
    try:
        loaded = ctypes.CDLL(path)
    except OSError as error:
        raise UnusableLibraryError(" ".join(str(error).split())) from error
    naming = _naming_in(loaded)
    try:
        if library.prepare is not None:
            library.prepare(loaded, path)
        version = library.version(loaded)
        functions = {}
        for dtype, letter in _LETTERS.items():
            functions[dtype] = _matrix_functions(loaded, f"cblas_{letter}", naming, dtype)
    except AttributeError as error:
        raise UnusableLibraryError(f"a function is missing: {error}") from error
    found = LoadedBlas(
        name=library.name or path,
        version=version,
        path=path,
        largest_extent=2 ** (8 * ctypes.sizeof(naming.integer) - 1) - 1,
        functions=functions,
        set_threads=_thread_setter(loaded, library.set_threads),
    )
    _check_products(found)
    return found


def _naming_in(loaded: ctypes.CDLL) -> Naming:
    """Return what a library calls its functions."""
    for naming in NAMINGS:
        if hasattr(loaded, f"{naming.prefix}cblas_dgemm{naming.suffix}"):
            return naming
    raise UnusableLibraryError("it has no function cblas_dgemm")


def _matrix_functions(
    loaded: ctypes.CDLL, name: str, naming: Naming, dtype: str
) -> MatrixFunctions:
    """Return the products of a dtype, with the types of their arguments."""
    prefix, suffix, integer = naming
    number: Any = _REAL.get(dtype, ctypes.c_void_p)  # complex ones are passed by address
    pointer = ctypes.c_void_p
    multiply = getattr(loaded, f"{prefix}{name}gemm{suffix}")
    multiply.restype = None
    multiply.argtypes = [
        *[ctypes.c_int] * 3,
        *[integer] * 3,
        number,
        *(pointer, integer),
        *(pointer, integer),
        number,
        *(pointer, integer),
    ]
    multiply_many = getattr(loaded, f"{prefix}{name}gemm_batch_strided{suffix}", None)
    if multiply_many is not None:
        multiply_many.restype = None
        multiply_many.argtypes = [
            *[ctypes.c_int] * 3,
            *[integer] * 3,
            number,
            *(pointer, integer, integer),
            *(pointer, integer, integer),
            number,
            *(pointer, integer, integer),
            integer,
        ]
    kept = np.array([1, 0], dtype)
    if dtype in _REAL:
        return MatrixFunctions(multiply, multiply_many, 1.0, 0.0, kept)
    multiply_by_own = getattr(loaded, f"{prefix}{name}herk{suffix}", None)
    if multiply_by_own is not None:
        real = _REAL[kept.real.dtype.name]
        multiply_by_own.restype = None
        multiply_by_own.argtypes = [*[ctypes.c_int] * 3, *[integer] * 2]
        multiply_by_own.argtypes += [real, *(pointer, integer), real, *(pointer, integer)]
    address = address_of(kept)
    zero = address + kept.itemsize
    return MatrixFunctions(multiply, multiply_many, address, zero, kept, multiply_by_own)


def _thread_setter(loaded: ctypes.CDLL, names: tuple[str, ...]) -> Callable[[int], None]:
    """Return what sets the number of threads; a library without such a function keeps its own."""
    for name in names:
        function = getattr(loaded, name, None)
        if function is not None:
            function.restype = None
            function.argtypes = [ctypes.c_int64]  # an int is passed in the same register
            return lambda count: function(count)
    return lambda count: None


def _check_products(found: LoadedBlas) -> None:
    """Compare a small product of each dtype with numpy's."""
    for dtype, functions in found.functions.items():
        left = np.arange(1, 7).reshape(2, 3).astype(dtype)
        right = np.arange(2, 14).reshape(3, 4).astype(dtype)
        out = np.full((2, 4), 7, dtype)
        functions.multiply(
            *(ROW_MAJOR, AS_STORED, AS_STORED, 2, 4, 3),
            functions.one,
            *(address_of(left), 3, address_of(right), 4),
            functions.zero,
            *(address_of(out), 4),
        )
        is_right = np.array_equal(out, left @ right)
        if functions.multiply_by_own is not None:
            left = left + 1j * left[::-1]
            square = np.zeros((2, 2), dtype)
            functions.multiply_by_own(
                *(ROW_MAJOR, LOWER, AS_STORED, 2, 3, 1.0, address_of(left), 3),
                *(0.0, address_of(square), 2),
            )
            is_right &= np.array_equal(square, np.tril(left @ left.conj().T))
        if not is_right:
            raise UnusableLibraryError(f"its product of {dtype} matrices is wrong")
