"""The record of an option of the command line, and the groups in which --help shows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# The groups of options in --help, in this order.
GROUPS = ("job", "ranks", "plan", "run", "output")


@dataclass(frozen=True)
class Option:
    """A flag or a positional argument of some commands."""

    names: tuple[str, ...]  # such as RANKS_FLAGS; a positional argument has one without "-"
    group: str
    commands: tuple[str, ...]
    help: str
    metavar: str | None = None
    type: Callable[[str], Any] = str
    default: Any = None
    is_required: bool = False
    is_switch: bool = False  # no value follows
    is_list: bool = False  # may be given several times
    is_optional: bool = False  # a positional argument that may be left out
    nargs: str = ""  # values that follow the flag, if not one: "+" at least one, "*" any number
    value_if_bare: str | None = None  # the value is optional, and this one if left out
    excludes: str = ""  # options with the same word here exclude each other
    choices: tuple[str, ...] = ()  # all possible values, checked by the parser
    suggestions: tuple[str, ...] = ()  # values to complete, checked later

    @property
    def is_positional(self) -> bool:
        return not self.names[0].startswith("-")
