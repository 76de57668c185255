"""The errors that einmpi raises on purpose, each with a message of one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EinmpiError(Exception):
    """A run failed.

    `str(error)` is one line. The command line prints it and exits with `status`.

    Attributes
    ----------
    status : int
        The exit status of the command line for this error.
    everywhere : bool
        True if all ranks raise this error, False if one rank raises it alone.
    """

    status = 1
    everywhere = False


class InputError(EinmpiError, ValueError):
    """The user's input is wrong.

    Parameters
    ----------
    where : str
        The file, position, flag or argument that is wrong.
    what : str
        What is wrong with it.
    expected : str, optional
        What would be accepted. It follows the word "expected" in the message.
    hint : str, optional
        Advice on what to do.

    Examples
    --------
    >>> try:
    ...     einmpi.load("none.toml")
    ... except einmpi.InputError as error:
    ...     print(error)
    none.toml: there is no such file; expected a job file in TOML
    """

    status = 2

    def __init__(self, where: str, what: str, expected: str = "", hint: str = "") -> None:
        self.where = where
        self.what = what
        self.expected = expected
        self.hint = hint
        parts = [_shortened(f"{where}: {what}")]
        if expected:
            parts.append(_shortened(f"expected {expected}"))
        if hint:
            parts.append(_shortened(hint))
        super().__init__(on_one_line("; ".join(parts)))


class OperationError(TypeError):
    """An operation has no result for its operands.

    It has the parts of an InputError but no place: whoever knows the place raises the InputError.
    """

    def __init__(self, what: str, expected: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.expected = expected
        self.hint = hint

    def at(self, where: str) -> InputError:
        """Return the InputError for this place."""
        return InputError(where, self.what, self.expected, self.hint)


class Stopped(EinmpiError):
    """A signal asked all ranks to stop, and they have saved a checkpoint.

    The exit status is 75: by convention, a temporary failure that is worth another try.
    """

    status = 75
    everywhere = True


def is_everywhere(error: BaseException) -> bool:
    """Return whether all ranks raise an error, whatever its type; then none of them waits."""
    return bool(getattr(error, "everywhere", False))


def failure(status: int, text: str, everywhere: bool = False) -> EinmpiError:
    """Return the error with this status and message, as another rank raised it."""
    error: EinmpiError
    if status == InputError.status:
        where, _, what = text.partition(": ")
        error = InputError(where, what)
        # Its parts were shortened one by one; shortened as a whole, it would lose the last ones.
        error.args = (text,)
    else:
        error = EinmpiError(text)
    error.everywhere = everywhere
    return error


def one_of(names: Iterable[str], wrong: str = "", most: int | None = None) -> str:
    """Return the `expected` part of a message: "one of a, b, c (did you mean b?)".

    At most `most` names are listed. `wrong` is what the user wrote: the name closest to it is
    suggested if there is one.
    """
    known = list(names)
    if not known:
        return "no entry here"
    shown = known
    if most is not None and len(known) > most:
        shown = [*known[:most], "…"]
    listed = ", ".join(shown)
    expected = f"one of {listed}" if len(known) > 1 else listed
    closest = difflib.get_close_matches(wrong[:100], known, n=1)
    if closest:
        expected += f" (did you mean {closest[0]}?)"
    return expected


def on_one_line(text: str) -> str:
    """Return a text in one line, without what would control a terminal.

    Names of files and keys may contain anything; escape codes in them are shown, not obeyed.
    """
    return printable(" ".join(text.split()))


def printable(text: str) -> str:
    """Return a text with its control characters and invisible characters written as escapes."""
    shown = []
    for character in text:
        if character.isprintable():
            shown.append(character)
        else:
            shown.append(character.encode("unicode_escape").decode())
    return "".join(shown)


def _shortened(text: str, most: int = 450) -> str:
    if len(text) <= most:
        return text
    return text[: most - 1] + "…"
