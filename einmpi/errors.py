"""The errors that einmpi raises on purpose, each with a message of one line."""

from __future__ import annotations

import copyreg
import difflib
from collections.abc import Iterable, Sequence
from typing import Any

MOST_NAMES_LISTED = 5  # of those that a message about an unknown name could list
_SHORTEST_ABBREVIATION = 3  # letters: shorter ones are too many names' beginning
_MOST_SEQUENCES_COMPARED = 200  # names
_LONGEST_COMPARED = 100  # letters of a name that are compared with others


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

    def __reduce__(self) -> tuple[Any, ...]:
        # Python would call the class with the message alone when it unpickles or copies an error.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


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


def failure(text: str, status: int = EinmpiError.status) -> EinmpiError:
    """Return the error with this message and status that all ranks raise."""
    error: EinmpiError
    if status == InputError.status:
        where, _, what = text.partition(": ")
        error = InputError(where, what)
        # Its parts were shortened one by one; shortened as a whole, it would lose the last ones.
        error.args = (text,)
    else:
        error = EinmpiError(text)
    error.everywhere = True
    return error


def one_of(names: Iterable[str], wrong: str = "") -> str:
    """Return the `expected` part of a message: "one of a, b, c (did you mean b?)".

    `wrong` is what the user wrote: a name that it is probably a misspelling of is suggested.
    """
    known = list(names)
    if not known:
        return "no entry here"
    expected = ", ".join(known)
    if len(known) > 1:
        expected = f"one of {expected}"
    return expected + _suggestion(known, wrong)


def nearest_of(names: Iterable[str], wrong: str) -> str:
    """Return the `expected` part of a message about a name that does not exist.

    It is that of `one_of`, but of many names only those most similar to `wrong` are listed.
    """
    known = list(names)
    if len(known) <= MOST_NAMES_LISTED:
        return one_of(known, wrong)
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2(wrong[:_LONGEST_COMPARED].lower())

    def letters_apart(name: str) -> float:
        matcher.set_seq1(name[:_LONGEST_COMPARED].lower())
        return -matcher.quick_ratio()

    def sequences_apart(name: str) -> float:
        matcher.set_seq1(name[:_LONGEST_COMPARED].lower())
        return -matcher.ratio()

    # Comparing sequences is slow, and there may be thousands of names.
    similar = sorted(known, key=letters_apart)[:_MOST_SEQUENCES_COMPARED]
    nearest = sorted(similar, key=sequences_apart)[:MOST_NAMES_LISTED]
    return f"one of {', '.join(nearest)}, …" + _suggestion(nearest, wrong)


def _suggestion(known: Sequence[str], wrong: str) -> str:
    """Return " (did you mean NAME?)" if `wrong` is probably a misspelling of a name, else "".

    A third of the letters may be wrong, or the end may be missing: "mem" is one of "memory", but
    "argmin" is not one of "min".
    """
    written = wrong[:_LONGEST_COMPARED].lower()
    best = ""
    fewest_edits = _LONGEST_COMPARED
    for name in known:
        length = max(len(name), len(written))
        allowed_edits = (length + 1) // 3 if length > 2 else 0
        allowed_edits = min(allowed_edits, fewest_edits - 1)
        if not written or abs(len(name) - len(written)) > allowed_edits:
            continue
        edits = _edits(name.lower(), written)
        if edits <= allowed_edits:
            best = name
            fewest_edits = edits
    if not best and len(written) >= _SHORTEST_ABBREVIATION:
        longer = [name for name in known if name.lower().startswith(written)]
        best = longer[0] if longer else ""
    return f" (did you mean {best}?)" if best else ""


def _edits(name: str, written: str) -> int:
    """Return how many letters must be inserted, removed, replaced or swapped with the next one."""
    before: list[int] = []
    above = list(range(len(written) + 1))
    for row, letter in enumerate(name, 1):
        current = [row]
        for column, other in enumerate(written, 1):
            edits = min(above[column] + 1, current[-1] + 1, above[column - 1] + (letter != other))
            is_swapped = row > 1 and column > 1 and letter == written[column - 2]
            if is_swapped and name[row - 2] == other:
                edits = min(edits, before[column - 2] + 1)
            current.append(edits)
        before = above
        above = current
    return above[-1]


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
