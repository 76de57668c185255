"""Settings that are given in Python as dicts and lists, read like the tables of a job file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from einmpi.arguments import named_values
from einmpi.language.syntax import Source
from einmpi.language.toml_document import Document, KeyPath, lookup, show


@dataclass(frozen=True)
class PythonValues(Document):
    """Arguments of a call in place of a TOML file. It has no name: paths start where Python runs.

    A place is what Python would write: `inputs["w"]["shape"][0]`.
    """

    def place(self, path: KeyPath) -> str:
        """Return the argument and the keys that lead to a value."""
        argument, *keys = path
        return str(argument) + "".join(_show_key(key) for key in keys)

    def source(self, path: KeyPath) -> Source:
        """Return a string value as a Source that knows which argument it is in."""
        return Source(self.place(path), str(lookup(self, path)))


def python_values(**arguments: Mapping[str, Any] | None) -> PythonValues:
    """Return arguments that are mappings as a document with a table for each."""
    data = {}
    for argument, given in arguments.items():
        data[argument] = _as_toml(argument, named_values(argument, given))
    return PythonValues(name="", text="", data=data, positions={})


def _show_key(key: str | int) -> str:
    return f"[{key}]" if isinstance(key, int) else f'["{key}"]'


def _as_toml(where: str, value: Any) -> Any:
    """Return a value as tomllib would: only dicts, lists, strings, numbers and truth values.

    Entries that are None are left out. A value of another kind stays: who reads it refuses it.
    """
    if isinstance(value, Mapping):
        entries = {}
        for key, entry in named_values(where, value).items():
            if entry is not None:
                entries[key] = _as_toml(f"{where}{_show_key(key)}", entry)
        return entries
    if isinstance(value, list | tuple):
        return [_as_toml(f"{where}[{number}]", entry) for number, entry in enumerate(value)]
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return np.dtype(value).name
    return value if isinstance(value, str) else _Other(value)


class _Other:
    """A value of a kind that no job file has; messages show its type."""

    def __init__(self, value: object) -> None:
        self.type_name = type(value).__name__

    def __str__(self) -> str:
        return show(self.type_name).strip("'")
