"""Masked arrays are refused: the language has no masks, and numpy drops them silently."""

from __future__ import annotations

import sys
from typing import Any

from einmpi.errors import InputError


def check_not_masked(where: str, name: str, given: Any) -> None:
    """Refuse a masked array, or a list that contains one."""
    # Without this module there are no masked arrays; to import it would take a while. Another
    # thread may be importing it at this moment.
    kind = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    if kind is not None and _contains(given, kind):
        raise InputError(
            where,
            f"{name} is a masked array",
            "an array without a mask",
            "fill masked elements with filled(VALUE), or use where() with the mask as an input",
        )


def _contains(given: Any, kind: type) -> bool:
    if isinstance(given, list | tuple):
        return any(_contains(item, kind) for item in given)
    return isinstance(given, kind)
