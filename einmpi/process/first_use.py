"""The time that goes into first uses: kernels are compiled, libraries are loaded. Runs that follow
do not need it, so it is measured apart from computing and loading."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

COMPILING = "kernels"
LOADING_GENERATORS = "generators"


class _FirstUses(threading.local):
    """What the first uses of a thread took. Ranks may be threads of one process."""

    def __init__(self) -> None:
        self.seconds = {COMPILING: 0.0, LOADING_GENERATORS: 0.0}
        self.total = 0.0
        self.is_measuring = False


_FIRST_USES = _FirstUses()


@contextmanager
def first_use(what: str) -> Iterator[None]:
    """Count the time of this block as a first use. In a block inside another, only that counts."""
    if _FIRST_USES.is_measuring:
        yield
        return
    _FIRST_USES.is_measuring = True
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - start
        _FIRST_USES.seconds[what] += seconds
        _FIRST_USES.total += seconds
        _FIRST_USES.is_measuring = False


def first_use_seconds() -> float:
    """Return what all first uses of this thread have taken so far."""
    return _FIRST_USES.total


def first_uses() -> Mapping[str, float]:
    """Return the seconds of each kind of first use of this thread."""
    return dict(_FIRST_USES.seconds)
