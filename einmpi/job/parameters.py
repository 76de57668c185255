"""Parameters: named numbers of a job that are given when it runs, and on which no plan depends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeAlias

from einmpi.errors import InputError
from einmpi.files.specs import InputSpec, Number
from einmpi.job.inputs import check_name
from einmpi.language.toml_document import Document, lookup, show, table

# The kinds of parameters: (type in Python, what messages call it, dtype that stores it).
KINDS: tuple[tuple[type, str, str], ...] = (
    (bool, "true or false", "bool"),
    (int, "an integer", "int64"),
    (float, "a real number", "float64"),
    (complex, "a complex number", "complex128"),
)
Numbers: TypeAlias = Mapping[str, Number]

_INTEGER = r"[+-]?[0-9]{1,20}"
_REAL = r"[+-]?(?:[0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,4})?|[+-]?(?:inf|nan)"


def read_parameters(
    document: Document, sizes: Mapping[str, int], settings: Numbers
) -> tuple[InputSpec, ...]:
    """Return the [parameters] of a job file as inputs without dimensions.

    `settings` replace values; the kind of a parameter stays, because the plan depends on it.
    """
    found = []
    for name in table(document, ("parameters",)):
        path = ("parameters", name)
        place = document.place(path)
        check_name(place, name, "a parameter", sizes)
        written = lookup(document, path)
        value = parse_number(written) if isinstance(written, str) else written
        if not isinstance(value, bool | int | float | complex):
            what = f"parameter {name} is {show(written)}"
            raise InputError(place, what, 'a number, true, false, or a string such as "1+2j"')
        if name in settings:
            value = _as_kind_of(place, name, value, settings[name])
        found.append(parameter(name, value, place))
    return tuple(found)


def parameter(name: str, value: Number, place: str) -> InputSpec:
    """Return a parameter as an input."""
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise InputError(place, f"parameter {name} is too large", "an integer less than 2**63")
    for kind, _, dtype in KINDS:
        if type(value) is kind:
            # Every rank knows the value, so it need not be sent.
            return InputSpec(name, shape=(), dtype=dtype, resident=True, place=place, value=value)
    raise AssertionError(f"{name} is {value!r}")


def parse_number(text: str) -> Number | None:
    """Return the number that a text writes, None if it writes none."""
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(_INTEGER, text):
        return int(text)
    if re.fullmatch(_REAL, text):
        return float(text)
    if re.fullmatch(r"[0-9eE.+-]{1,80}j", text):
        try:
            return complex(text)
        except ValueError:
            return None
    return None


def _as_kind_of(place: str, name: str, declared: Number, given: Number) -> Number:
    """Return a value as the kind that the job file declares; InputError if it is none."""
    kinds = [kind for kind, _, _ in KINDS]
    declared_kind = kinds.index(type(declared))
    is_number = type(given) in kinds
    given_kind = kinds.index(type(given)) if is_number else -1
    is_bool = bool in (type(given), type(declared))
    is_possible = given_kind == declared_kind if is_bool else given_kind <= declared_kind
    if not is_number or not is_possible:
        what = f"parameter {name} is set to {show(given)}"
        raise InputError(place, what, KINDS[declared_kind][1])
    return kinds[declared_kind](given)  # type: ignore[no-any-return]  # one of four types
