"""Compile the source of a kernel with numba, once per machine however many processes need it.

This module imports numba, so it is imported only when a kernel is needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
from numba import types

from einmpi.kernels.cpu import intrinsics
from einmpi.version import __version__

LOCK_SECONDS = 60.0  # to wait for another process to compile; then this one compiles as well
SIGNATURE = types.void(types.int64)
OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "no_cfunc_wrapper": True,
    "no_rewrites": True,
}


def build_kernel(text: str) -> tuple[Callable[[int], None], bool]:
    """Return the function `kernel` of a source, and whether its machine code was on disk.

    Whatever goes wrong with the files, the kernel is compiled without them.
    """
    # The name is unique, since numba makes the symbol in the machine code from it.
    name = f"k{hashlib.sha256(text.encode() + _intrinsics_source()).hexdigest()[:24]}"
    text = text.replace("def kernel(", f"def {name}(")
    folder = cache_folder()
    if folder is None:
        return _compile(text, name), False
    path = folder / f"{name}.py"
    try:
        if not _is_intact(path):
            with _lock(path.with_suffix(".lock")):
                if not _is_intact(path):
                    return _compile_to(path, text), False
        return _compile(text, name, path), True
    except Exception:
        with contextlib.suppress(OSError):
            path.with_suffix(".sum").unlink()
        return _compile(text, name), False


def _compile(text: str, name: str, path: Path | None = None) -> Any:
    """Compile a source; with a path, load the machine code from there or save it there.

    The source comes from loop_source, which writes it from a checked expression tree: it contains
    no name and no text of a user.
    """
    scope: dict[str, Any] = {"__name__": __name__}
    exec(compile(text, str(path or "<kernel>"), "exec"), scope)
    function = numba.njit(cache=path is not None, **OPTIONS)(scope[name])
    function.compile(SIGNATURE)
    function.disable_compile()
    return function


def _compile_to(path: Path, text: str) -> Any:
    """Compile a source, let numba save the machine code, and save the digests of its files."""
    for old in _files(path):
        old.unlink(missing_ok=True)
    _replace(path, text)
    function = _compile(text, path.stem, path)
    files = sorted(_files(path, Path(function.stats.cache_path)))
    digests = {str(file): _digest(file) for file in files}
    _replace(path.with_suffix(".sum"), json.dumps(digests))
    return function


def _is_intact(path: Path) -> bool:
    """Return whether all files of a kernel are as they were written.

    numba would load a damaged file without noticing.
    """
    try:
        digests = json.loads(path.with_suffix(".sum").read_text())
        return bool(digests) and all(
            _digest(Path(name)) == digest for name, digest in digests.items()
        )
    except (OSError, ValueError, AttributeError):
        return False


def _files(path: Path, folder: Path | None = None) -> list[Path]:
    """Return the files of numba's with the machine code of a source."""
    return list((folder or path.parent / "__pycache__").glob(f"{path.stem}.*.nb[ic]"))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _replace(path: Path, text: str) -> None:
    """Write a file so that other processes see all of it or nothing."""
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which the system releases if the process dies.

    Raise TimeoutError after LOCK_SECONDS. On a file system without locks two processes may compile
    the same kernel; the files of either are good.
    """
    with path.open("w") as file:
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
    return Path(intrinsics.__file__).read_bytes()


def cache_folder() -> Path | None:
    """Return the folder for machine code of this processor and these versions.

    Return None if nothing can be written there, or if it belongs to another user: machine code of
    other users is never run.
    """
    given = os.environ.get("EINMPI_CACHE_DIR")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    root = Path(given) if given else Path(home) / "einmpi" / "kernels"
    features = llvmlite.binding.get_host_cpu_features().flatten()
    digest = hashlib.sha256(features.encode()).hexdigest()
    cpu = f"{llvmlite.binding.get_host_cpu_name()}-{digest[:8]}"
    python = f"py{sys.version_info[0]}{sys.version_info[1]}"
    folder = root / f"{__version__}-numba{numba.__version__}-{python}-{cpu}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_own = folder.stat().st_uid == os.getuid()
        return folder if is_own and os.access(folder, os.W_OK) else None
    except OSError:
        return None
