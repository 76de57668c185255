"""The only device of new DistArrays: the memory of the ranks."""

from __future__ import annotations

from typing import Any

CPU = "cpu"


def check_device(device: Any) -> None:
    """Refuse devices other than the ranks' own memory."""
    if device is not None and device != CPU:
        raise ValueError(f"there is no device {device!r}; new DistArrays are on {CPU!r}")
