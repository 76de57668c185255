"""Find a smaller input with the same problem: fewer mutations, then less text."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from .fuzz_inputs import Corpus, FuzzInput, make_input

_MOST_SECONDS = 60.0
_MOST_BYTES = 20_000  # of a text that is worth cutting


def minimised(
    corpus: Corpus, seed: int, number: int, has_problem: Callable[[FuzzInput], bool]
) -> FuzzInput:
    """Return the smallest input found with the same problem as input `number`."""
    deadline = time.monotonic() + _MOST_SECONDS
    best, count = make_input(corpus, seed, number)
    kept = list(range(count))
    for step in range(count):
        fewer = [other for other in kept if other != step]
        candidate, _ = make_input(corpus, seed, number, fewer)
        if fewer and has_problem(candidate):
            best = candidate
            kept = fewer
    if best.main_file.endswith(".toml"):
        best = _with_less_text(best, has_problem, deadline)
    return best


def _with_less_text(
    best: FuzzInput, has_problem: Callable[[FuzzInput], bool], deadline: float
) -> FuzzInput:
    """Remove ever smaller pieces of the mutated file as long as the problem stays."""
    content = best.files.get(best.main_file, b"")
    if len(content) > _MOST_BYTES:
        return best
    size = max(1, len(content) // 2)
    while size >= 1 and time.monotonic() < deadline:
        at = 0
        while at < len(content) and time.monotonic() < deadline:
            shorter = content[:at] + content[at + size :]
            candidate = dataclasses.replace(best, files={**best.files, best.main_file: shorter})
            if has_problem(candidate):
                best = candidate
                content = shorter
            else:
                at += size
        size //= 2
    return best
