"""Kernels: a source text becomes machine code with numba, once on a machine, however many processes start at once.

numba is imported here, so this module is imported only when a kernel is needed.
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

import llvmlite.binding  # type: ignore[import-untyped]
import numba
from numba import types

from einmpi.kernels.cpu import intrinsics as kernel_words
from einmpi.version import __version__

WAIT = 60.0  # seconds for another process to compile a kernel; then this one compiles it for itself
SIGNATURE = types.void(types.int64)
OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "no_cfunc_wrapper": True,
    "no_rewrites": True,
}


def build(text: str) -> tuple[Callable[[int], None], bool]:
    """The function `kernel` of a source text; whether its machine code was on disk already."""
    # A name of its own: numba makes the symbol in the machine code from it.
    name = f"k{hashlib.sha256(text.encode() + _words_text()).hexdigest()[:24]}"
    text = text.replace("def kernel(", f"def {name}(")
    folder = cache_folder()
    if folder is None:
        return _compile(text, name), False
    path = folder / f"{name}.py"
    try:
        if not _is_sealed(path):
            with _lock(path.with_suffix(".lock")):
                if not _is_sealed(path):
                    return _compile_to(path, text), False
        return _compile(text, name, path), True
    except Exception:  # whatever is wrong with the files, the kernel itself can be compiled
        with contextlib.suppress(OSError):
            path.with_suffix(".sum").unlink()
        return _compile(text, name), False


def _compile(text: str, name: str, path: Path | None = None) -> Any:
    """`text` is written by einmpi.kernels.cpu.loop_source from a checked tree: it holds no name and no text of a user's."""
    scope: dict[str, Any] = {"__name__": __name__}
    exec(compile(text, str(path or "<kernel>"), "exec"), scope)
    function = numba.njit(cache=path is not None, **OPTIONS)(scope[name])
    function.compile(SIGNATURE)
    function.disable_compile()
    return function


def _compile_to(path: Path, text: str) -> Any:
    """Compile, let numba keep the machine code beside `path`, and write down what the files must contain."""
    for old in _files(path):
        old.unlink(missing_ok=True)
    _replace(path, text)
    function = _compile(text, path.stem, path)
    sums = {
        str(file): _digest(file) for file in sorted(_files(path, Path(function.stats.cache_path)))
    }
    _replace(path.with_suffix(".sum"), json.dumps(sums))
    return function


def _is_sealed(path: Path) -> bool:
    """Whether a kernel's files are all there and as they were written: numba would load a damaged one."""
    try:
        sums = json.loads(path.with_suffix(".sum").read_text())
        return bool(sums) and all(_digest(Path(name)) == known for name, known in sums.items())
    except (OSError, ValueError, AttributeError):
        return False


def _files(path: Path, folder: Path | None = None) -> list[Path]:
    return list((folder or path.parent / "__pycache__").glob(f"{path.stem}.*.nb[ic]"))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _replace(path: Path, text: str) -> None:
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(text)
    part.replace(path)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a file's lock, which the system frees if the process dies; TimeoutError after WAIT seconds."""
    with path.open("w") as file:
        end = time.monotonic() + WAIT
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError from None
                time.sleep(0.02)
            except (
                OSError
            ):  # no locks on this file system: two may compile the same, and either's file is good
                break
        yield


@cache
def _words_text() -> bytes:
    return Path(kernel_words.__file__).read_bytes()


def cache_folder() -> Path | None:
    """Where machine code for this processor and these versions is kept; None where nothing can be written."""
    given = os.environ.get("EINMPI_CACHE_DIR")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    root = Path(given) if given else Path(home) / "einmpi" / "kernels"
    features = llvmlite.binding.get_host_cpu_features().flatten()
    cpu = f"{llvmlite.binding.get_host_cpu_name()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
    python = f"py{sys.version_info[0]}{sys.version_info[1]}"
    folder = root / f"{__version__}-numba{numba.__version__}-{python}-{cpu}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = folder.stat().st_uid == os.getuid()  # machine code of somebody else's is not run
        return folder if own and os.access(folder, os.W_OK) else None
    except OSError:
        return None
