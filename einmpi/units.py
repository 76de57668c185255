"""Amounts as people write them: bytes and times with their units, numbers with separators."""

from __future__ import annotations

import re
from decimal import Decimal

from einmpi.errors import one_of

_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20,
          "GiB": 2**30, "TiB": 2**40}  # fmt: skip
_SECONDS = {"s": 1, "min": 60, "h": 3600}


def parse_bytes(text: str) -> int:
    """Bytes of "4 GiB", "512MB", "1.5 GB" or "4096"; ValueError says what is wrong and what is allowed."""
    found = re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]{0,20})?)\s*([A-Za-z]*)\s*", text)
    if found is None:
        raise ValueError(f'{text!r} is not an amount of memory; a number and a unit, such as "4 GiB"')
    number, unit = found.groups()
    if unit and unit not in _UNITS:
        raise ValueError(f"unknown unit {unit!r} of memory; {one_of(_UNITS, unit)}")
    if not unit and "." in number:
        raise ValueError(f'{text!r} has no unit; a whole number of bytes, or a unit such as in "4 GiB"')
    return check_bytes(int(Decimal(number) * _UNITS[unit or "B"]))


def check_bytes(size: int) -> int:
    if not 1 <= size < 2**63:
        shown = size if size < 10**30 else "far too many"  # printing a huge number takes long
        raise ValueError(f"memory of {shown} bytes; from 1 byte to 2**63 - 1 bytes")
    return size


def parse_seconds(text: str) -> float:
    """Seconds of "30s", "10 min", "1.5h" or "0"; ValueError says what is wrong and what is allowed."""
    found = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{0,9})?)\s*([A-Za-z]*)\s*", text)
    if found is None or (not found[2] and float(found[1])):
        raise ValueError(f"{text!r} is not a time; a number and a unit, such as 30s, 10min or 1h, or 0")
    if found[2] and found[2] not in _SECONDS:
        raise ValueError(f"unknown unit {found[2]!r} of time; {one_of(_SECONDS, found[2])}")
    return float(found[1]) * _SECONDS[found[2] or "s"]


def show_bytes(count: int) -> str:
    """1536 as 1.5 KiB."""
    value, unit = float(count), 0
    while value >= 1024 and unit < 5:
        value, unit = value / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.1f} {('KiB', 'MiB', 'GiB', 'TiB', 'PiB')[unit - 1]}"


def show_count(count: int) -> str:
    """1234567 as 1,234,567."""
    return f"{count:,}"
