"""Values of a JSON file by checked kinds: an error is one line that names the file and the key."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from einmpi.errors import InputError, one_of

# A value of a JSON document.
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MOST = 2**40  # of any number: what is more is not the size or the factor of a model


@dataclass(frozen=True)
class Values:
    """The values of a JSON object, by checked kinds. A null counts as missing."""

    file: str
    values: Mapping[str, Json]
    parent: str = ""  # the key of the object that holds them, with a dot

    def has(self, key: str) -> bool:
        """Return whether there is a value."""
        return self.values.get(key) is not None

    def wrong(self, key: str, expected: str) -> None:
        """Raise InputError for a value that is missing or wrong."""
        value = json.dumps(self.values[key]) if self.has(key) else "missing"
        raise InputError(self.file, f"{self.parent}{key} is {value}", expected)

    def checked(
        self,
        key: str,
        kinds: tuple[type, ...],
        expected: str,
        is_right: Callable[[Any], bool] = lambda value: True,
    ) -> Any:
        """Return a value of one of these types after a check."""
        value = self.values.get(key)
        if type(value) not in kinds or not is_right(value):
            self.wrong(key, expected)
        return value

    def name(
        self, key: str, known: Mapping[str, object] | tuple[str, ...], default: str = ""
    ) -> str:
        """Return a value that is one of some names."""
        if default and not self.has(key):
            return default
        # Programs write these names, so that mixtral is no misspelling of mistral.
        return str(self.checked(key, (str,), one_of(known), lambda value: value in known))

    def count(self, key: str) -> int:
        """Return a value that is zero or a positive integer."""
        return int(self.checked(key, (int,), "an integer from 0 on", lambda value: value >= 0))

    def positive(self, key: str, most: int = MOST) -> int:
        """Return a value that is a positive integer, and at most `most`."""
        value = int(self.checked(key, (int,), "a positive integer", lambda value: value >= 1))
        if value > most:
            self.wrong(key, f"an integer from 1 to {most}")
        return value

    def divisor(self, key: str, multiple: int, default: int | None = None) -> int:
        """Return a positive integer that divides another."""
        if default is not None and not self.has(key):
            return default
        value = self.positive(key)
        if multiple % value:
            self.wrong(key, f"a divisor of {multiple}")
        return value

    def even(self, key: str, default: int) -> int:
        """Return an even positive integer."""
        value = self.positive(key) if self.has(key) else default
        if value % 2:
            raise InputError(self.file, f"heads have {value} numbers", "an even head_dim")
        return value

    def number(self, key: str, default: float | None = None, zero: bool = False) -> float:
        """Return a value that is a positive number; or zero, if that is allowed."""
        if default is not None and not self.has(key):
            return default
        expected = "a number from 0 on" if zero else "a positive number"
        given = self.values.get(key)
        if isinstance(given, int | float) and given > MOST:
            expected += f" up to {MOST}"

        def is_right(value: float) -> bool:
            return 0 < value <= MOST or (zero and value == 0)

        return float(self.checked(key, (int, float), expected, is_right))

    def truth(self, key: str, default: bool) -> bool:
        """Return a value that is true or false."""
        if not self.has(key):
            return default
        return bool(self.checked(key, (bool,), "true or false"))

    def tokens(self, key: str) -> tuple[int, ...]:
        """Return a token or a list of tokens; none if there is no value."""
        if not self.has(key):
            return ()
        given: Any = self.values[key]
        listed = given if isinstance(given, list) else [given]
        for token in listed:
            if type(token) is not int or not 0 <= token <= MOST:
                self.wrong(key, "a token's number, or a list of them")
        return tuple(listed)

    def names(self, key: str, length: int, known: tuple[str, ...]) -> list[str]:
        """Return a list of names with a known length."""

        def is_right(value: list[str]) -> bool:
            return len(value) == length and all(name in known for name in value)

        expected = f"a list of {length} names, each of them {' or '.join(known)}"
        return list(self.checked(key, (list,), expected, is_right))

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """Return a list of positive numbers with a known length."""

        def is_right(value: list[float]) -> bool:
            kinds = all(type(number) in (int, float) for number in value)
            return len(value) == length and kinds and all(0 < number <= MOST for number in value)

        expected = f"a list of {length} positive numbers"
        return tuple(map(float, self.checked(key, (list,), expected, is_right)))

    def inner(self, key: str) -> Values:
        """Return the values of an object inside of this one."""
        return Values(self.file, self.checked(key, (dict,), "an object"), f"{key}.")


def read_values(path: str) -> Values:
    """Return the values of a JSON file, which must hold an object."""
    expected = f"{os.path.basename(path)} of a model that transformers saved"
    try:
        with open(path, encoding="utf-8") as file:
            document: Json = json.load(file)
    except FileNotFoundError:
        raise InputError(path, "there is no such file", expected) from None
    except OSError as error:
        raise InputError(path, error.strerror or str(error), expected) from None
    except (ValueError, RecursionError) as error:
        raise InputError(path, f"it is not JSON: {error}", expected) from None
    if not isinstance(document, dict):
        raise InputError(path, "it holds no JSON object", expected)
    return Values(path, document)
