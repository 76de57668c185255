"""Which tests run: `pytest --slice 2/8` is the second eighth of them, and of the cases of a test
marked `sampled` a few are fast.

Both follow from the names of the tests alone, so they are the same on every machine.
"""

import argparse
import zlib
from collections import defaultdict

import pytest


def number_of(name):
    """A number that looks random but is always the same for a name."""
    return zlib.crc32(name.encode())


# ---- slices --------------------------------------------------------------------------------------


def parsed(text):
    """`"2/8"` as numbers."""
    number, _, slices = text.partition("/")
    if not (number.isdecimal() and slices.isdecimal() and 1 <= int(number) <= int(slices)):
        raise argparse.ArgumentTypeError(f"{text!r}; expected K/N, such as 2/8, with 1 ≤ K ≤ N")
    return int(number), int(slices)


def slice_of(name, slices):
    """The number of the slice, from 1, that has the test of this name."""
    return number_of(name) % slices + 1


def divided(items, number, slices):
    """The tests in this slice, and all others."""
    chosen = [item for item in items if slice_of(item.nodeid, slices) == number]
    others = [item for item in items if slice_of(item.nodeid, slices) != number]
    return chosen, others


# ---- samples -------------------------------------------------------------------------------------


def mark_samples(items):
    """Of the cases of each test marked `sampled(n)`, mark all but n as slow."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for found in cases.values():
        (fast,) = found[0].get_closest_marker("sampled").args
        not_slow = [item for item in found if not item.get_closest_marker("slow")]
        for item in sampled_out(not_slow, fast):
            item.add_marker(pytest.mark.slow)


def sampled_out(items, fast):
    """All but a random sample of so many."""
    return sorted(items, key=lambda item: number_of(item.nodeid))[fast:]
