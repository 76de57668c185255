"""Amounts as people write them: bytes, times and rates with their units, numbers with separators.

`where` is the place of a text, for the error if it is no such amount."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction

from einmpi.errors import InputError, one_of

_UNITS = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SECONDS = {"s": 1, "min": 60, "h": 3600}
# Of a machine. Rates become times, because the planner adds up times; in whole numbers, which are the same everywhere.
_LATENCY = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9}
_BANDWIDTH = {"B/s": 1, "kB/s": 10**3, "MB/s": 10**6, "GB/s": 10**9, "TB/s": 10**12}
_PREFIXES = ("", "k", "M", "G", "T", "P")
_OPERATIONS = {
    f"{prefix}{word}/s": 1000**k for word in ("flop", "op") for k, prefix in enumerate(_PREFIXES)
}


def _number_and_unit(text: str) -> tuple[str, str] | None:
    """What "1.5 GB" or "25us" is made of; None where it is no number with at most a unit."""
    # Two letters look like a micro sign; keyboards have either.
    found = re.fullmatch(
        r"\s*([0-9]{1,20}(?:\.[0-9]{0,20})?)\s*([A-Za-zµ/]*)\s*", text.replace("\u03bc", "µ")
    )
    return (found[1], found[2]) if found else None


def parse_bytes(text: str, where: str) -> int:
    """Bytes of "4 GiB", "512MB", "1.5 GB" or "4096", which stands `where`."""
    found = _number_and_unit(text)
    if found is None:
        raise InputError(
            where, f"{text!r} is not an amount of memory", 'a number and a unit, such as "4 GiB"'
        )
    number, unit = found
    if unit and unit not in _UNITS:
        raise InputError(where, f"unknown unit {unit!r} of memory", one_of(_UNITS, unit))
    if not unit and "." in number:
        raise InputError(
            where, f"{text!r} has no unit", 'a whole number of bytes, or a unit such as in "4 GiB"'
        )
    return check_bytes(int(Fraction(number) * _UNITS[unit or "B"]), where)


def check_bytes(size: int, where: str) -> int:
    if not 1 <= size < 2**63:
        shown = size if size < 10**30 else "far too many"  # printing a huge number takes long
        raise InputError(where, f"memory of {shown} bytes", "from 1 byte to 2**63 - 1 bytes")
    return size


def parse_seconds(text: str, where: str) -> float:
    """Seconds of "30s", "10 min", "1.5h" or "0"."""
    found = _number_and_unit(text)
    if found is None or (not found[1] and float(found[0])):
        raise InputError(
            where, f"{text!r} is not a time", "a number and a unit, such as 30s, 10min or 1h, or 0"
        )
    number, unit = found
    if unit and unit not in _SECONDS:
        raise InputError(where, f"unknown unit {unit!r} of time", one_of(_SECONDS, unit))
    return float(number) * _SECONDS[unit or "s"]


def parse_latency(text: str, where: str) -> int:
    """Nanoseconds of "1.2 us"."""
    return _whole(_positive(text, where, _LATENCY, "a time", "1.2 us"), text, where, "1 ns to 1 s")


def parse_bandwidth(text: str, where: str) -> int:
    """Picoseconds that a byte takes at "5.1 GB/s"."""
    rate = _positive(text, where, _BANDWIDTH, "a bandwidth", "5.1 GB/s")
    return _whole(10**12 / rate, text, where, "1 kB/s to 1 TB/s")


def parse_speed(text: str, where: str) -> int:
    """Femtoseconds that an operation takes at "18 Gflop/s"."""
    rate = _positive(text, where, _OPERATIONS, "a speed", "18 Gflop/s")
    return _whole(10**15 / rate, text, where, "1 Mop/s to 1 Pop/s")


def _positive(text: str, where: str, units: Mapping[str, int], what: str, example: str) -> Fraction:
    found = _number_and_unit(text)
    if found is None or not found[1]:
        raise InputError(
            where, f"{text!r} is not {what}", f'a number and a unit, such as "{example}"'
        )
    number, unit = found
    if unit not in units:
        raise InputError(where, f"unknown unit {unit!r} of {what}", one_of(units, unit))
    if not Fraction(number):
        raise InputError(where, f"{text!r} is nothing", "more than 0")
    return Fraction(number) * units[unit]


def _whole(value: Fraction, text: str, where: str, range_: str) -> int:
    """The nearest whole number, which must be from 1 to a thousand million: sums of such times stay small."""
    if not 1 <= (whole := round(value)) <= 10**9:
        raise InputError(where, f"{text!r} is out of range", range_)
    return whole


def show_latency(nanoseconds: int) -> str:
    """1234 as 1.23 us."""
    return _scaled(nanoseconds, ("ns", "us", "ms", "s"))


def show_bandwidth(picoseconds: int) -> str:
    """Of a byte: 196 as 5.1 GB/s."""
    return _scaled(10**12 / picoseconds, tuple(_BANDWIDTH))


def show_speed(femtoseconds: int, word: str = "flop") -> str:
    """Of an operation: 55556 as 18 Gflop/s."""
    return _scaled(10**15 / femtoseconds, tuple(f"{prefix}{word}/s" for prefix in _PREFIXES))


def _scaled(value: float, units: tuple[str, ...]) -> str:
    """With three digits, in the unit that leaves the fewest before the point; each is a thousand of the one before."""
    k = 0
    while value >= 999.5 and k < len(units) - 1:
        value, k = value / 1000, k + 1
    return f"{value:.3g} {units[k]}" if value < 999.5 else f"{value:.0f} {units[k]}"


def show_bytes(count: int) -> str:
    """1536 as 1.5 KiB."""
    value, unit = float(count), 0
    while value >= 1024 and unit < 5:
        value, unit = value / 1024, unit + 1
    return (
        f"{count} B"
        if unit == 0
        else f"{value:.1f} {('KiB', 'MiB', 'GiB', 'TiB', 'PiB')[unit - 1]}"
    )


def show_seconds(seconds: float) -> str:
    """0.00123 as 1.23 ms."""
    return _scaled(seconds * 1e9, ("ns", "us", "ms", "s"))


def show_count(count: int) -> str:
    """1234567 as 1,234,567."""
    return f"{count:,}"


def show_shape(extents: Iterable[int]) -> str:
    """(3, 4) as 3×4."""
    return "×".join(map(str, extents)) or "scalar"


def counted(count: int, noun: str) -> str:
    """1 rank, 2 ranks."""
    return f"{count} {noun}{'s' * (count != 1)}"
