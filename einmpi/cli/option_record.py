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
    needs: tuple[str, ...] = ()  # options one of which must be there, or this one does nothing
    without: tuple[str, ...] = ()  # options beside which this one, or they, would do nothing
    choices: tuple[str, ...] = ()  # all possible values, checked by the parser
    suggestions: tuple[str, ...] = ()  # values to complete, checked later

    @property
    def name(self) -> str:
        """The name of its value among the parsed options."""
        return self.names[-1].lstrip("-").replace("-", "_")

    @property
    def value_if_missing(self) -> Any:
        if self.is_switch:
            return False
        return [] if self.is_list else self.default

    @property
    def words(self) -> str:
        """What to type for it: "--trace FILE.json"."""
        return f"{self.names[0]} {self.metavar or ''}".strip()

    @property
    def is_positional(self) -> bool:
        return not self.names[0].startswith("-")
