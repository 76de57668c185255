"""The result of a loop: the last values of tensors, and those that were recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from einmpi.arrays.dist_array import DistArray


@dataclass(frozen=True)
class LoopResult:
    """What a loop has computed.

    Attributes
    ----------
    outputs : dict of str to DistArray
        The last values of what is carried, under the names of the inputs, and the outputs of the
        last step.
    history : dict of str to numpy.ndarray
        For each recorded tensor its values, one for each step.
    steps : int
        The number of steps.
    is_done : bool
        Whether the condition holds; False if the steps ended first.
    earlier : tuple of LoopResult
        Of a job with several loops, the results of all but the last, without their outputs.
        `history`, `steps` and `is_done` are those of the last loop.
    """

    outputs: dict[str, DistArray]
    history: dict[str, npt.NDArray[Any]]
    steps: int
    is_done: bool
    earlier: tuple[LoopResult, ...] = ()

    def __repr__(self) -> str:
        names = ", ".join(self.outputs)
        end = "done" if self.is_done else "out of steps"
        return f"<LoopResult of {names} after {self.steps} steps, {end}>"
