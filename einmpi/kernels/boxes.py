"""Boxes: parts of a space of labels, given by a slice of each label."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any, TypeAlias

Box: TypeAlias = dict[str, slice]

_WHOLE = slice(None)


def part_of_array(array: Any, entries: Iterable[Any], box: Mapping[str, slice]) -> Any:
    """Return the part of an array, of any library, that lies in a box: a view in any case.

    Dimensions that are not indexed by labels of the box are taken whole.
    """
    return array[(*[box.get(entry, _WHOLE) for entry in entries], ...)]


def halve_step(steps: dict[str, int], label: str, most_elements: int, least: int = 1) -> None:
    """Halve the step of a label until a box has few enough elements, or the step is `least`."""
    while prod(steps.values()) > most_elements and steps[label] > least:
        steps[label] = -(-steps[label] // 2)


def boxes(extent: Mapping[str, int], steps: Mapping[str, int]) -> Iterator[Box]:
    """Yield the boxes that together cover some labels.

    A box reaches at most `steps[label]` along a label; those at the end may be smaller. They come
    in the order of nested loops over the labels.
    """
    cuts = []
    for label, step in steps.items():
        stop = extent[label]
        cuts.append([slice(start, min(start + step, stop)) for start in range(0, stop, step)])
    for slices in itertools.product(*cuts):
        yield dict(zip(steps, slices, strict=True))
