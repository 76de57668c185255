"""Compile the source of a kernel with numba, once per machine however many processes need it.

This module imports numba, so it is imported only when a kernel is needed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite.binding
import numba
from numba import types

from einmpi.graph import random_numbers
from einmpi.kernels.cpu import intrinsics
from einmpi.process.environment import (
    CACHE_VARIABLE,
    UntrustedFileError,
    make_private_folders,
    open_own_file,
    print_notice,
    why_not_trusted,
)
from einmpi.process.names import NAMES
from einmpi.version import __version__

LOCK_SECONDS = 60.0  # to wait for another process to compile; then this one compiles as well
SIGNATURE = types.void(types.int64)
OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "no_cfunc_wrapper": True,
    "no_rewrites": True,
}
_REPORTED: list[str] = []  # why no kernel is cached, once that has been reported


def build_kernel(
    text: str, dtypes: tuple[str, ...] | None = None
) -> tuple[Callable[..., None], bool]:
    """Return the function `kernel` of a source, and whether its machine code was on disk.

    It takes the address of its parameters, or if there are `dtypes` arrays of these. Whatever goes
    wrong with the files, the kernel is compiled without them.
    """
    signature = SIGNATURE
    if dtypes is not None:
        signature = types.void(*[types.Array(getattr(types, name), 1, "C") for name in dtypes])
    # The name is unique, since numba makes the symbol in the machine code from it.
    unique = f"{text}{signature}".encode() + _intrinsics_source()
    name = f"k{hashlib.sha256(unique).hexdigest()[:24]}"
    text = text.replace("def kernel(", f"def {name}(")
    found = cache_folder()
    if found.untrusted:
        _report_untrusted(found.problem)
    if found.folder is None:
        return _compile(text, name, signature), False
    path = found.folder / f"{name}.py"
    try:
        if not _is_intact(path):
            with _lock(path.with_suffix(".lock")):
                if not _is_intact(path):
                    return _compile_to(path, text, signature), False
        return _compile(text, name, signature, path), True
    except UntrustedFileError as error:
        _report_untrusted(str(error))
        return _compile(text, name, signature), False
    except Exception:
        with contextlib.suppress(OSError):
            path.with_suffix(".sum").unlink()
        return _compile(text, name, signature), False


def _compile(text: str, name: str, signature: Any, path: Path | None = None) -> Any:
    """Compile a source; with a path, load the machine code from there or save it there.

    numba unpickles the files that it loads, so nothing may be in its folder that other users have
    written. The folder is next to the path unless NUMBA_CACHE_DIR names another one.

    The source comes from loop_source, which writes it from a checked expression tree, or from
    key_loops: it contains no name and no text of a user.
    """
    scope: dict[str, Any] = {"__name__": __name__}
    exec(compile(text, str(path or "<kernel>"), "exec"), scope)
    function = numba.njit(cache=path is not None, **OPTIONS)(scope[name])
    if path is not None:
        problem = why_not_trusted(function.stats.cache_path)
        if problem:
            raise UntrustedFileError(problem)
    function.compile(signature)
    function.disable_compile()
    return function


def _compile_to(path: Path, text: str, signature: Any) -> Any:
    """Compile a source, let numba save the machine code, and save the digests of its files."""
    for old in _files(path):
        old.unlink(missing_ok=True)
    _replace(path, text)
    make_private_folders(str(path.parent / "__pycache__"))
    function = _compile(text, path.stem, signature, path)
    files = sorted(_files(path, Path(function.stats.cache_path)))
    for file in files:
        file.chmod(0o600)  # the user's umask may let a group write
    digests = {str(file): _digest(file) for file in files}
    _replace(path.with_suffix(".sum"), json.dumps(digests))
    return function


def _is_intact(path: Path) -> bool:
    """Return whether all files of a kernel are as this user wrote them.

    numba would load a damaged file without noticing. Files of other users may be left from a time
    when they could write to the folder.
    """
    try:
        digests = json.loads(_read_own(path.with_suffix(".sum")))
        if not digests:
            return False
        folder = Path(next(iter(digests))).parent
        if {str(file) for file in _files(path, folder)} != set(digests):
            return False
        return all(_digest(Path(name)) == digest for name, digest in digests.items())
    except (OSError, ValueError, TypeError, AttributeError, UntrustedFileError):
        return False


def _files(path: Path, folder: Path | None = None) -> list[Path]:
    """Return the files of numba's with the machine code of a source."""
    return list((folder or path.parent / "__pycache__").glob(f"{path.stem}.*.nb[ic]"))


def _read_own(path: Path) -> bytes:
    """Return the content of a file; raise UntrustedFileError if others could have written it."""
    with open(open_own_file(str(path)), "rb") as file:
        return file.read()


def _digest(path: Path) -> str:
    return hashlib.sha256(_read_own(path)).hexdigest()


def _replace(path: Path, text: str) -> None:
    """Write a file so that other processes see all of it or nothing."""
    draft = path.with_suffix(f".{os.getpid()}")
    draft.unlink(missing_ok=True)  # left by a killed process with the same number
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    draft.replace(path)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which the system releases if the process dies.

    Raise TimeoutError after LOCK_SECONDS. On a file system without locks two processes may compile
    the same kernel; the files of either are good.
    """
    # A named pipe in its place would wait for a reader without O_NONBLOCK.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666)
    with open(descriptor, "wb") as file:
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError from None
                time.sleep(0.02)
            except OSError:
                break
        yield


@cache
def _intrinsics_source() -> bytes:
    files = (intrinsics.__file__, random_numbers.__file__)
    return b"".join(Path(file).read_bytes() for file in files)


class CacheFolder(NamedTuple):
    """The folder for machine code, or None and the reason why there is none."""

    folder: Path | None
    problem: str = ""
    untrusted: bool = False  # other users can write there


def cache_folder() -> CacheFolder:
    """Return the folder for machine code of this processor and these versions.

    There is none if nothing can be written there, or if another user can change what is there:
    machine code of other users is never run.
    """
    given = os.environ.get(CACHE_VARIABLE)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    root = Path(given) if given else Path(home) / "einmpi" / "kernels"
    features = llvmlite.binding.get_host_cpu_features().flatten()
    digest = hashlib.sha256(features.encode()).hexdigest()
    cpu = f"{llvmlite.binding.get_host_cpu_name()}-{digest[:8]}"
    python = f"py{sys.version_info[0]}{sys.version_info[1]}"
    # What is checked must be what is used, so links in the path are resolved only once.
    root = Path(os.path.realpath(root))
    folder = root / f"{__version__}-numba{numba.__version__}-{python}-{cpu}"
    try:
        # Before anything is created there, and again when all folders exist and cannot change.
        problem = why_not_trusted(folder)
        if not problem:
            make_private_folders(str(folder))
            problem = why_not_trusted(folder)
    except OSError as error:
        return CacheFolder(None, f"{folder}: {error.strerror or error}")
    if problem:
        return CacheFolder(None, problem, untrusted=True)
    if not os.access(folder, os.W_OK):
        return CacheFolder(None, f"{folder}: {os.strerror(errno.EACCES)}")
    return CacheFolder(folder)


def _report_untrusted(problem: str) -> None:
    """Say that kernels are not cached: once, by one of the ranks of a machine."""
    if not _REPORTED and NAMES.claim("untrusted kernel cache"):
        print_notice(
            f"einmpi: {problem}; kernels are compiled without a cache; "
            f"chmod go-w, or {CACHE_VARIABLE}=FOLDER with a folder of your own"
        )
    _REPORTED.append(problem)
