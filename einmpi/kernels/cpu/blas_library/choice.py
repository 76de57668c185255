"""Which BLAS multiplies matrices in this process: numpy's own, or a library that is chosen once."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from typing import Any

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.kernels.cpu.blas_library.loading import LoadedBlas, UnusableLibraryError, load_blas
from einmpi.kernels.cpu.blas_library.products import Multiply, prepare_product
from einmpi.kernels.cpu.blas_library.records import (
    AUTO_BLAS,
    BLAS_LIBRARIES,
    BLAS_NAMES,
    NUMPY_BLAS,
    UNKNOWN_LIBRARY,
    BlasLibrary,
    FoundFile,
    find_file,
)
from einmpi.kernels.operands import Array
from einmpi.process.software import blas_name, loaded_blas
from einmpi.process.trust import why_not_trusted
from einmpi.process.variables import BLAS_VARIABLE


@dataclass(frozen=True)
class BlasChoice:
    """The BLAS of this process: a loaded library, or None for numpy's own, and why it is that."""

    library: LoadedBlas | None
    reason: str
    problem: str = ""  # why a library that is installed is not used

    def __str__(self) -> str:
        if self.library is None:
            return "numpy's own"
        return str(self.library)


class _Choice:
    """What was chosen, if anything was, and the threads that the library has."""

    def __init__(self) -> None:
        self.made: BlasChoice | None = None
        self.threads = 0  # not set yet
        self.lock = threading.Lock()  # ranks may be threads


_choice = _Choice()


def use_blas(wanted: str = AUTO_BLAS, place: str = "") -> BlasChoice:
    """Choose the BLAS of this process, unless it has one already.

    The environment variable EINMPI_BLAS takes precedence over `wanted`, which `place` says. A
    process has one BLAS: it would not repeat its results if some were computed by another one.
    """
    variable = os.environ.get(BLAS_VARIABLE, "")
    if variable:
        wanted = variable
        place = BLAS_VARIABLE
    with _choice.lock:
        if _choice.made is None:
            _choice.made = _choose(wanted, place)
        made = _choice.made
    name = NUMPY_BLAS if made.library is None else made.library.name
    if os.sep in wanted:
        is_made = made.library is not None and _is_same_file(wanted, made.library.path)
        if made.library is not None:
            name = made.library.path
    else:
        is_made = wanted in (AUTO_BLAS, name)
    if not is_made:
        raise InputError(
            place,
            f"blas is {wanted!r}, but this process multiplies with {name} already",
            f"{name!r} or {AUTO_BLAS!r}",
            f"a process has one BLAS; {BLAS_VARIABLE} chooses it",
        )
    return made


def _is_same_file(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def blas_in_use() -> BlasChoice:
    """Return the BLAS of this process; numpy's own as long as none was chosen."""
    return _choice.made or BlasChoice(None, "nothing was computed yet")


def describe_blas_in_use() -> str:
    """Return the name and the version of the BLAS in use; an empty text if they are unknown."""
    library = blas_in_use().library
    return _name_of_numpy_blas() if library is None else str(library)


@cache
def _name_of_numpy_blas() -> str:
    return blas_name(loaded_blas())


def matrix_product(left: Array, right: Array, out: Array) -> Multiply:
    """Return what multiplies matrices that are stored as these are."""
    made = _choice.made
    if made is None or made.library is None:
        return np.matmul
    return prepare_product(made.library, left, right, out)


def set_blas_threads(count: int) -> None:
    """Set the threads of the library in use. Those of numpy's own BLAS are not changed."""
    library = blas_in_use().library
    if library is not None:
        library.set_threads(count)
        _choice.threads = count


class _OneThread:
    """The limit of one thread for each call of BLAS, which several threads may set at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.limits = ExitStack()

    def begin(self) -> None:
        with self.lock:
            if self.users == 0:
                self.limits.enter_context(_threadpools().limit(limits=1))
                library = blas_in_use().library
                if library is not None and _choice.threads != 1:
                    library.set_threads(1)
                    self.limits.callback(library.set_threads, max(1, _choice.threads))
            self.users += 1  # last, so that a limit that cannot be set has no user

    def end(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                self.limits.close()


_one_thread = _OneThread()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let each call of BLAS use one thread, as long as a `with` block lasts.

    Several threads may be in such blocks: the limit ends with the last of them.
    """
    _one_thread.begin()
    try:
        yield
    finally:
        _one_thread.end()


@cache
def _threadpools() -> Any:
    """Return what sets the threads of numpy's BLAS."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


# ---- the choice ---------------------------------------------------------------------------------


def _choose(wanted: str, place: str) -> BlasChoice:
    if wanted == NUMPY_BLAS:
        return BlasChoice(None, f"{place} says so")
    if wanted == AUTO_BLAS:
        return _choose_automatically()
    if os.sep in wanted:
        return _load_path(wanted, place)
    by_name = {library.name: library for library in BLAS_LIBRARIES}
    if wanted not in by_name:
        raise InputError(place, f"there is no BLAS {wanted!r}", one_of(BLAS_NAMES, wanted))
    library = by_name[wanted]
    file = find_file(library)
    if file is None:
        what = f"the BLAS {wanted} is not installed"
        raise InputError(place, what, "an installed library", library.hint)
    problem = _why_not_trusted(file)
    if problem:
        raise InputError(place, problem, "a library that only you and root can change")
    return _load(library, file.path, place)


def _choose_automatically() -> BlasChoice:
    """Return the first library that is installed and made for this machine, else numpy's own.

    Where numpy has such a library, it stays with numpy.
    """
    for library in BLAS_LIBRARIES:
        file = find_file(library) if library.suits() else None
        if file is None:
            continue
        own = loaded_blas()
        if own is not None and own["internal_api"] in (library.name, "mkl"):
            return BlasChoice(None, f"numpy has {blas_name(own)}")
        problem = _why_not_trusted(file)
        if problem:
            return BlasChoice(None, f"{library.name} is not used", problem)
        try:
            return BlasChoice(load_blas(library, file.path), f"found {file.path}")
        except UnusableLibraryError as error:
            return BlasChoice(None, f"{library.name} is not used", f"{file.path}: {error}")
    return BlasChoice(None, "no other library for this machine was found")


def _load_path(path: str, place: str) -> BlasChoice:
    """Load the library at a path, which only the environment can name: it is a program."""
    if place != BLAS_VARIABLE:
        what = f"{path!r} is a path"
        hint = f"the environment variable {BLAS_VARIABLE} takes paths"
        raise InputError(place, what, one_of(BLAS_NAMES, path), hint)
    resolved = os.path.realpath(path)
    if not os.path.isfile(resolved):
        raise InputError(place, f"there is no file {path!r}", "the path of a BLAS library")
    problem = why_not_trusted(resolved)
    if problem:
        raise InputError(place, problem, "a library that only you and root can change")
    for library in BLAS_LIBRARIES:
        if any(fnmatch(os.path.basename(resolved), pattern) for pattern in library.files):
            return _load(library, resolved, place)
    return _load(UNKNOWN_LIBRARY, resolved, place)


def _load(library: BlasLibrary, path: str, place: str) -> BlasChoice:
    try:
        return BlasChoice(load_blas(library, path), f"{place} says so")
    except UnusableLibraryError as error:
        what = f"{path} cannot be used: {error}"
        raise InputError(place, what, "a BLAS library with the functions of CBLAS") from error


def _why_not_trusted(file: FoundFile) -> str:
    """Return how others could change a library; those beside Python's own packages are trusted."""
    return why_not_trusted(file.path) if file.variable else ""
