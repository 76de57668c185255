"""Slots: the local buffers of a rank, each with its part of a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

import numpy as np

from einmpi.schedule.regions import Region, shape

FINAL_LAYOUT = "'"  # role of a slot that holds a computed tensor in the layout the plan gives it


@dataclass(frozen=True)
class Slot:
    """A local buffer, which holds this rank's part of a tensor.

    A tensor may have several slots: Z as its kernel leaves it, Z' in its final layout, and Z→V.0
    in the layout in which V needs it as its operand 0.
    """

    tensor: str
    shape: tuple[int, ...]
    dtype: str
    role: str = ""  # FINAL_LAYOUT, or operand_role(…)

    name: str = field(init=False, compare=False)  # tensor and role: unique in a schedule
    nbytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # Plain attributes, since every step of a run looks up slots by name.
        object.__setattr__(self, "name", self.tensor + self.role)
        nbytes = prod(self.shape) * np.dtype(self.dtype).itemsize
        object.__setattr__(self, "nbytes", nbytes)

    def __str__(self) -> str:
        return f"{self.name}{list(self.shape)}"


def operand_role(user: str, operand: int) -> str:
    """Return the role of a slot that a vertex reads as the operand with this number."""
    return f"→{user}.{operand}"


Slots: TypeAlias = tuple[Slot, ...]


def names_of(slots: Iterable[Slot]) -> list[str]:
    """Return the names of some slots, in their order."""
    return [slot.name for slot in slots]


def slot_for(tensor: str, region: Region, dtype: str, role: str = "") -> Slot:
    """Return the slot that holds a region of a tensor."""
    return Slot(tensor, shape(region), dtype, role)
