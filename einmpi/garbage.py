"""Work without Python's search for garbage, which looks again and again at what stays in use."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_lock = threading.Lock()
_running: list[bool] = []  # calls under way, in any thread: whether each has stopped the search


def without_garbage_search(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function during which Python does not search for cycles of unused objects.

    Graphs and tables of costs are hundreds of thousands of objects that all stay in use, and a
    tenth of the time of making them would go into the search.
    """

    @wraps(function)
    def call(*arguments: P.args, **settings: P.kwargs) -> T:
        with _lock:
            _running.append(gc.isenabled())
            gc.disable()
        try:
            return function(*arguments, **settings)
        finally:
            with _lock:
                has_stopped_search = _running.pop()
                if not _running and has_stopped_search:
                    gc.enable()

    return call
