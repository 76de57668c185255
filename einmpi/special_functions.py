"""Functions of scipy.special, without the time that importing all of it takes."""

from __future__ import annotations

import importlib
import sys
import threading
from functools import cache
from types import ModuleType
from typing import Any

_PACKAGE = "scipy.special"
_loading = threading.Lock()


@cache
def special_function(name: str) -> Any:
    """Return a function of scipy.special that works on arrays of numpy."""
    with _loading:
        module = None if _PACKAGE in sys.modules else _compiled_functions()
    if not hasattr(module, name):
        module = importlib.import_module(_PACKAGE)
    return getattr(module, name)


def _compiled_functions() -> ModuleType | None:
    """Import the compiled part of the package; None if this version of scipy has it elsewhere.

    The package itself takes eight times as long, because it also serves other kinds of arrays.
    """
    scipy = importlib.import_module("scipy")
    sys.modules[_PACKAGE] = _EmptyPackage([f"{folder}/special" for folder in scipy.__path__])
    try:
        return importlib.import_module(f"{_PACKAGE}._ufuncs")
    except ImportError:
        return None
    finally:
        del sys.modules[_PACKAGE]


class _EmptyPackage(ModuleType):
    """Stands for the package while one thread imports the compiled part.

    Other threads may import from the package at that time. They wait, and get the real one.
    """

    def __init__(self, folders: list[str]) -> None:
        super().__init__(_PACKAGE)
        self.__path__ = folders
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if self._thread == threading.get_ident():
            raise AttributeError(name)
        with _loading:
            package = importlib.import_module(_PACKAGE)
        return getattr(package, name)
