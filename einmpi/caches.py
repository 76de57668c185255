"""Caches of the results of functions, for functions that several threads call."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, TypeVar

Function = TypeVar("Function")


def bounded_cache(most: int) -> Callable[[Function], Function]:
    """Return a decorator that keeps about `most` results of a function: a full cache is emptied.

    The function is called without keywords, by several threads if need be.

    `lru_cache` is not for several threads. To give up a result, it takes that out of its list and
    then looks for the key. If another key has the same hash, the two are compared; where Python
    does that, other threads run meanwhile, and may move the result that is on its way out. The list
    is broken then, and the next search for garbage that follows it ends the process.
    """

    def decorate(function: Any) -> Any:
        results: dict[Any, Any] = {}

        def cached(*arguments: Any) -> Any:
            nonlocal results
            try:
                return results[arguments]
            except KeyError:
                pass
            found = function(*arguments)
            if len(results) >= most:
                results = {}  # not cleared: another thread may be about to write to it
            return results.setdefault(arguments, found)

        return update_wrapper(cached, function)

    return decorate
