"""Packages that not every machine has: what a benchmark lacks is said when it is used first."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

HOW_TO_INSTALL = "pip install 'einmpi[peers]' brings most peers"


class Missing:
    """A package that is not installed; `--help` and what does without it still work."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        raise SystemExit(
            f"this benchmark needs {self.name}, which is not installed; {HOW_TO_INSTALL}"
        )


def has_package(peer: str, name: str) -> bool:
    """Return whether the package of a peer is installed; say that the peer is left out if not."""
    if find_spec(name) is None:
        print(f"{peer} is left out: {name} is not installed; {HOW_TO_INSTALL}", flush=True)
        return False
    return True


def package(name: str) -> Any:
    """Return a package or module, or what says that it is missing as soon as it is used."""
    try:
        return import_module(name)
    except ImportError:
        return Missing(name)
