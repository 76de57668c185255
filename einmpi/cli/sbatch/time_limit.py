"""Time limits as Slurm writes them (90, 2:30:00, 1-00:00:00) or as einmpi does (90min, 2h)."""

from __future__ import annotations

import re

from einmpi.errors import InputError
from einmpi.units import counted, parse_seconds

MAX_SECONDS = 366 * 86400
_NUMBERS = r"[0-9]{1,6}(?::[0-9]{1,6}){0,2}"
# Seconds per unit of the numbers in 90 (minutes), 90:00 and 1:30:00, by how many there are.
_UNITS = {1: (60,), 2: (60, 1), 3: (3600, 60, 1)}
_UNITS_AFTER_DAYS = (3600, 60, 1)  # of 1-2, 1-2:30 and 1-2:30:00


def parse_limit(text: str) -> int:
    """Return the seconds of a time limit."""
    days = re.fullmatch(rf"([0-9]{{1,6}})-({_NUMBERS})", text)
    if days is not None:
        numbers = _split(days[2])
        seconds = 86400 * int(days[1]) + _total(numbers, _UNITS_AFTER_DAYS[: len(numbers)])
    elif re.fullmatch(_NUMBERS, text):
        numbers = _split(text)
        seconds = _total(numbers, _UNITS[len(numbers)])
    else:
        try:
            seconds = int(parse_seconds(text, "--time"))
        except InputError:
            problem = f"{text!r} is not a time"
            expected = "a time such as 90, 2:30:00, 1-00:00:00, 90min or 2h"
            raise InputError("--time", problem, expected) from None
    if not 60 <= seconds <= MAX_SECONDS:
        raise InputError("--time", counted(seconds, "second"), "a time from 1 minute to 1 year")
    return seconds


def _split(text: str) -> list[int]:
    return [int(number) for number in text.split(":")]


def _total(numbers: list[int], units: tuple[int, ...]) -> int:
    return sum(number * unit for number, unit in zip(numbers, units, strict=True))
