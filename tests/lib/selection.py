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


def mark_samples(items, whole_files):
    """Of the cases of each test marked `sampled(n)`, mark all but n as slow.

    `whole_files` says that no case was asked for by name: then those that a marker names must
    exist.
    """
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, found in cases.items():
        marker = found[0].get_closest_marker("sampled")
        always = marker.kwargs.get("always", ())
        not_slow = [item for item in found if not item.get_closest_marker("slow")]
        unknown = set(always) - set(map(case_of, not_slow))
        if whole_files and unknown:
            raise pytest.UsageError(f"{name} has no fast case {sorted(unknown)[0]}")
        kept = sample(not_slow, marker.args[0], always)
        for item in not_slow:
            if item not in kept:
                item.add_marker(pytest.mark.slow)


def sample(items, size, always=()):
    """Return so many cases of a test: those in `always`, then such that add most to those before.

    A case adds the values of parameters that none before it has, such as a dtype or a number of
    ranks. Where several add as many, their names decide.
    """
    chosen = [item for item in items if case_of(item) in always]
    others = sorted(items, key=lambda item: number_of(item.nodeid))
    others = [item for item in others if item not in chosen]
    while others and len(chosen) < size:
        seen = set().union(*map(values_of, chosen))
        best = max(others, key=lambda item: len(values_of(item) - seen))
        chosen.append(best)
        others.remove(best)
    return chosen


def case_of(item):
    """The name of a case: what stands in brackets."""
    return item.nodeid.partition("[")[2].removesuffix("]")


def values_of(item):
    """The values of a case's parameters, each as a name and a text that every run has alike."""
    found = set()
    for name, value in item.callspec.params.items():
        is_plain = isinstance(value, str | int | float | complex | tuple | list | dict | None)
        text = repr(value) if is_plain else getattr(value, "__name__", type(value).__name__)
        found.add((name, text))
    return found
