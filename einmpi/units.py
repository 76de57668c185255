"""Amounts as people write them: bytes, times and rates with units, numbers with separators.

`where` is the place of a text, for the error if it cannot be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction

from einmpi.errors import InputError, one_of

_BYTES = {
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
# Of a machine. Rates become times, because the planner adds up times, and integers, because these
# are the same on all ranks.
_LATENCY = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9}
_BANDWIDTH = {"B/s": 1, "kB/s": 10**3, "MB/s": 10**6, "GB/s": 10**9, "TB/s": 10**12}
# An operation of a GPU takes one to two femtoseconds: whole ones would be too coarse.
ATTOSECONDS = 10**18
_LONGEST_OPERATION = 10**12
_LONGEST_TIME = 10**9  # of a byte or a message, so that sums of such times are small
_PREFIXES = ("", "k", "M", "G", "T", "P")
_FLOPS = {f"{prefix}flop/s": 1000**k for k, prefix in enumerate(_PREFIXES)}
_OPERATIONS = {**_FLOPS, **{f"{prefix}op/s": 1000**k for k, prefix in enumerate(_PREFIXES)}}


def _number_and_unit(text: str) -> tuple[str, str] | None:
    """Split "1.5 GB" or "25us"; the unit may be missing. None if it is something else."""
    text = text.replace("\u03bc", "µ")  # the Greek letter looks like the micro sign
    found = re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]{0,20})?)\s*([A-Za-zµ/]*)\s*", text)
    return (found[1], found[2]) if found else None


def parse_bytes(text: str, where: str) -> int:
    """Return the bytes of "4 GiB", "512MB", "1.5 GB" or "4096"."""
    found = _number_and_unit(text)
    if found is None:
        raise InputError(
            where, f"{text!r} is not an amount of memory", 'a number and a unit, such as "4 GiB"'
        )
    number, unit = found
    if unit and unit not in _BYTES:
        raise InputError(where, f"unknown unit {unit!r} of memory", one_of(_BYTES, unit))
    if not unit and "." in number:
        raise InputError(
            where, f"{text!r} has no unit", 'an integer number of bytes, or a unit as in "4 GiB"'
        )
    return check_bytes(int(Fraction(number) * _BYTES[unit or "B"]), where)


def check_bytes(size: int, where: str) -> int:
    """Return a number of bytes of memory, or raise InputError if it is out of range."""
    if not 1 <= size < 2**63:
        shown = size if size < 10**30 else "far too many"  # printing a huge number takes long
        raise InputError(where, f"memory of {shown} bytes", "1 byte to 2**63 - 1 bytes")
    return size


def parse_seconds(text: str, where: str) -> float:
    """Return the seconds of "30s", "10 min", "1.5h" or "0"."""
    number, unit = _number_and_unit(text) or ("", "")
    has_no_unit = not unit and number.strip("0.")  # 0 needs none
    if not number or has_no_unit:
        raise InputError(
            where, f"{text!r} is not a time", "a number and a unit, such as 30s, 10min or 1h, or 0"
        )
    if unit and unit not in _SECONDS:
        raise InputError(where, f"unknown unit {unit!r} of time", one_of(_SECONDS, unit))
    return float(number) * _SECONDS[unit or "s"]


def parse_latency(text: str, where: str) -> int:
    """Return the nanoseconds of "1.2 us"."""
    nanoseconds = _positive(text, where, _LATENCY, "a time", "1.2 us")
    return _rounded(nanoseconds, text, where, "1 ns to 1 s")


def parse_bandwidth(text: str, where: str) -> int:
    """Return the picoseconds that a byte takes at "5.1 GB/s"."""
    rate = _positive(text, where, _BANDWIDTH, "a bandwidth", "5.1 GB/s")
    return _rounded(10**12 / rate, text, where, "1 kB/s to 1 TB/s")


def parse_speed(text: str, where: str) -> int:
    """Return the attoseconds that an operation takes at "18 Gflop/s"."""
    rate = _positive(text, where, _OPERATIONS, "a speed", "18 Gflop/s")
    return _rounded(ATTOSECONDS / rate, text, where, "1 Mop/s to 1000 Pop/s", _LONGEST_OPERATION)


def _positive(text: str, where: str, units: Mapping[str, int], what: str, example: str) -> Fraction:
    """Return a number with a unit, in the smallest unit."""
    found = _number_and_unit(text)
    if found is None or not found[1]:
        raise InputError(
            where, f"{text!r} is not {what}", f'a number and a unit, such as "{example}"'
        )
    number, unit = found
    if unit not in units:
        raise InputError(where, f"unknown unit {unit!r} of {what}", one_of(units, unit))
    if not Fraction(number):
        raise InputError(where, f"{text!r} is zero", "more than 0")
    return Fraction(number) * units[unit]


def _rounded(
    value: Fraction, text: str, where: str, allowed: str, largest: int = _LONGEST_TIME
) -> int:
    """Return the nearest integer, or raise InputError if it is not from 1 to `largest`."""
    nearest = round(value)
    if not 1 <= nearest <= largest:
        raise InputError(where, f"{text!r} is out of range", allowed)
    return nearest


def show_latency(nanoseconds: int) -> str:
    """Return a latency as text: 1234 as "1.23 us"."""
    return _scaled(nanoseconds, ("ns", "us", "ms", "s"))


def show_bandwidth(picoseconds: int) -> str:
    """Return the rate at which a byte takes this long: 196 as "5.1 GB/s"."""
    return _scaled(10**12 / picoseconds, tuple(_BANDWIDTH))


def show_speed(attoseconds: int, word: str = "flop") -> str:
    """Return the rate at which an operation takes this long: 55_555_556 as "18 Gflop/s"."""
    return _scaled(ATTOSECONDS / attoseconds, tuple(f"{prefix}{word}/s" for prefix in _PREFIXES))


def _scaled(value: float, units: tuple[str, ...]) -> str:
    """Return a value with three digits in the largest of the units, each 1000 of the last."""
    k = 0
    while value >= 999.5 and k < len(units) - 1:
        value /= 1000
        k += 1
    digits = f"{value:.3g}" if value < 999.5 else f"{value:.0f}"
    return f"{digits} {units[k]}"


def show_bytes(count: int) -> str:
    """Return a number of bytes as text: 1536 as "1.5 KiB"."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    k = 0
    while value >= 1024 and k < len(units) - 1:
        value /= 1024
        k += 1
    return f"{value:.1f} {units[k]}"


def show_seconds(seconds: float) -> str:
    """Return a time as text: 0.00123 as "1.23 ms"."""
    return _scaled(seconds * 1e9, ("ns", "us", "ms", "s"))


def show_count(count: int) -> str:
    """Return a number with separators: 1234567 as "1,234,567"."""
    return f"{count:,}"


def show_shape(extents: Iterable[int]) -> str:
    """Return extents as text: (3, 4) as "3×4"."""
    return "×".join(map(str, extents)) or "scalar"


def plural(count: int, noun: str, many: str = "") -> str:
    """Return the noun as it stands after a number; `many` is its plural if that is irregular."""
    if count == 1:
        return noun
    return many or f"{noun}s"


def counted(count: int, noun: str, many: str = "") -> str:
    """Return a number and a noun, such as "1 rank", "2 ranks" or "2 vertices"."""
    return f"{count} {plural(count, noun, many)}"
