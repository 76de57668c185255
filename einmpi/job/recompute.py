"""Which tensors a job asks to drop and compute again."""

from __future__ import annotations

from collections.abc import Iterable

from einmpi.errors import InputError, nearest_of
from einmpi.graph.eingraph import EinGraph
from einmpi.planner.saving_memory.recompute import AUTO, NONE

_EXPECTED = f'"{AUTO}", "{NONE}", or a list of names such as ["H"]'


def checked_recompute(where: str, given: object, written: EinGraph) -> str | tuple[str, ...]:
    """Return what `recompute` says; refuse what is not an intermediate result of the program."""
    if isinstance(given, str):
        if given not in (AUTO, NONE):
            raise InputError(where, f"recompute is {given!r}", _EXPECTED)
        return given
    if not isinstance(given, Iterable):
        raise InputError(where, f"recompute is {given!r}", _EXPECTED)
    names = tuple(given)
    known = [vertex.name for vertex in written.computed if not written.is_output(vertex.name)]
    for name in names:
        if not isinstance(name, str):
            raise InputError(where, f"recompute has {name!r}", "names of tensors")
        if name not in known:
            what = f"there is no tensor {name}"
            if written.is_output(name):
                what = f"{name} is a result, which stays in memory"
            elif name in written.by_name:
                what = f"{name} is an input"
            expected = nearest_of(known, name) if known else "a program with intermediate results"
            raise InputError(where, what, expected)
    return names
