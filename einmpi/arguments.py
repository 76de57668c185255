"""Arguments of the Python interface: those of a wrong kind are refused in one line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from einmpi.errors import InputError, one_of


def path_name(where: str, given: str | os.PathLike[str]) -> str:
    """Return the name of a file that a caller gave."""
    name = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(name, str):
        raise InputError(where, f"{type(given).__name__} is not a path", "the name of a file")
    return name


def as_int(given: Any) -> Any:
    """Return an integer of another library, such as np.int64, as an int; all else as it is."""
    if isinstance(given, Integral) and not isinstance(given, bool):
        return int(given)
    return given


def integer_from(where: str, given: Any, least: int) -> int:
    """Return an integer that a caller gave, if it is not below another."""
    if not isinstance(given, Integral) or isinstance(given, bool) or given < least:
        raise InputError(where, f"{given!r:.60} requested", f"an integer from {least} on")
    return int(given)


def known_name(where: str, given: Any, known: Iterable[str], noun: str = "") -> str:
    """Return a name that a caller gave, if it is one of those that are known.

    `noun` is what such names are called, if not as the place where it was given.
    """
    names = [*known]
    if not isinstance(given, str) or given not in names:
        wrong = given if isinstance(given, str) else ""
        raise InputError(where, f"unknown {noun or where} {given!r:.60}", one_of(names, wrong))
    return given


def optional_text(where: str, name: str, given: str | None, example: str) -> str | None:
    """Return a text that a caller gave, or None."""
    if given is not None and not isinstance(given, str):
        raise InputError(where, f"{name} is {type(given).__name__}", f"a text such as {example!r}")
    return given


def optional_names(where: str, name: str, given: Sequence[str] | None) -> Sequence[str] | None:
    """Return a list of names that a caller gave, or None."""
    if given is None:
        return None
    is_list = isinstance(given, list | tuple)
    if not is_list or not all(isinstance(item, str) for item in given):
        shown = repr(given) if isinstance(given, str) else type(given).__name__
        raise InputError(where, f"{name} is {shown}", 'a list of names such as ["Z"]')
    return given


def named_values(where: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a mapping from names that a caller gave; none is an empty one."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InputError(where, f"{type(given).__name__} is not a mapping", 'a dict: {"X": …}')
    for name in given:
        if not isinstance(name, str):
            raise InputError(where, f"{name!r} is not a name", 'names as keys: {"X": …}')
    return dict(given)


def named_inputs(inputs: Mapping[str, Any] | None, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a mapping and of keywords, each of which is given once."""
    given = named_values("inputs", inputs)
    for name, array in tensors.items():
        if name in given:
            raise InputError("inputs", f"{name} is given twice", "each input once")
        given[name] = array
    return given
