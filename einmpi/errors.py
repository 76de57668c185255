"""The errors einmpi raises on purpose, each one line: "where: what is wrong; what is allowed"."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EinmpiError(Exception):
    """A failed run. str(error) is one line; the command line prints it and ends with `status`.

    `everywhere`: all ranks raise it, not one alone.
    """

    status = 1
    everywhere = False


class InputError(EinmpiError):
    """The user's input is wrong. str(error) is "where: what is wrong; what is allowed".

    >>> try:
    ...     einmpi.load("none.toml")
    ... except einmpi.InputError as error:
    ...     print(error)
    none.toml: there is no such file; a job file in TOML
    """

    status = 2

    def __init__(self, where: str, what: str, allowed: str = "") -> None:
        self.where, self.what, self.allowed = where, what, allowed
        parts = (
            [_short(f"{where}: {what}"), _short(allowed)]
            if allowed
            else [_short(f"{where}: {what}")]
        )
        super().__init__(" ".join("; ".join(parts).split()))


class Stopped(EinmpiError):
    """A signal asked all ranks to stop, and there is a checkpoint. By convention 75 means: try again later."""

    status = 75
    everywhere = True


def failure(status: int, text: str, everywhere: bool = False) -> EinmpiError:
    """The error with this status and text, as another rank raised it."""
    where, _, what = text.partition(": ")
    error = InputError(where, what) if status == InputError.status else EinmpiError(text)
    error.everywhere = everywhere
    return error


def _short(text: str, most: int = 450) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def one_of(names: Iterable[str], wrong: str = "", most: int | None = None) -> str:
    """The `allowed` part of a message: the nearest name first, then all of them, or the first `most`."""
    known = list(names)
    near = difflib.get_close_matches(wrong[:100], known, n=1)
    shown = known if most is None or len(known) <= most else [*known[:most], "…"]
    listed = "allowed: " + ", ".join(shown) if known else "none is allowed here"
    return f"did you mean {near[0]}? {listed}" if near else listed
