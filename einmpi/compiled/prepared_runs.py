"""Runs of a known call with all that is the same in every call worked out ahead: how blocks are
taken from inputs, what is bound to the steps of the schedule, and the layouts of outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.compiled.dist_array import DistArray
from einmpi.compiled.inputs import block_of
from einmpi.kernels.prepared import address_of, stored_as
from einmpi.runtime.failure import RankFailure
from einmpi.runtime.repeated import RepeatedSchedule
from einmpi.schedule.layout import Layout
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Load

Array: TypeAlias = npt.NDArray[Any]
TakeBlock: TypeAlias = Callable[[Any], Array]  # this rank's block of a given input


class PreparedRun:
    """The runs of a schedule on given arrays of numpy and DistArrays that look alike."""

    def __init__(
        self,
        repeated: RepeatedSchedule,
        take_blocks: Mapping[str, tuple[str, TakeBlock]],
        layouts: Mapping[str, Layout],
    ) -> None:
        self.repeated = repeated
        self.layouts = layouts  # of the outputs
        self.take_blocks = []
        for slot, (tensor, take) in take_blocks.items():
            self.take_blocks.append((slot, tensor, take))

    def output_blocks(
        self, inputs: Mapping[str, Any], failure: RankFailure | None
    ) -> dict[str, Array] | None:
        """Return this rank's blocks of the outputs; None if another thread runs the schedule."""
        blocks = {slot: take(inputs[tensor]) for slot, tensor, take in self.take_blocks}
        return self.repeated.run_on_blocks(blocks, failure)


def prepare_run(
    repeated: RepeatedSchedule,
    schedule: Schedule,
    inputs: Mapping[str, Any],
    layouts: Mapping[str, Layout],
) -> PreparedRun | None:
    """Prepare runs on inputs that look like these; return None if that is not possible.

    `layouts` are those of the outputs.

    The schedule has been bound before. It takes all its inputs from arrays and DistArrays on the
    host, which it does not change.
    """
    take_blocks: dict[str, tuple[str, TakeBlock]] = {}
    blocks = {}
    for step in schedule.steps:
        if not isinstance(step, Load):
            continue
        given = inputs.get(step.tensor)
        take = None
        if step.kept and not step.overwritten:
            take = _prepare_taking(step, given)
        if take is None:
            return None
        take_blocks[step.slot.name] = step.tensor, take
        blocks[step.slot.name] = take(given)
    return PreparedRun(repeated, take_blocks, layouts) if repeated.accepts(blocks) else None


def _prepare_taking(step: Load, given: Any) -> TakeBlock | None:
    """Return what takes a block of an input; None if it is not on the host."""
    if isinstance(given, DistArray):
        is_usable = type(given.local) is np.ndarray and given.local.flags.c_contiguous
        return attrgetter("local") if is_usable else None
    if type(given) is not np.ndarray:
        return None
    if given.flags.c_contiguous and given.dtype.isnative and given.shape == step.slot.shape:
        return _whole
    block = block_of(given, step.region, step.slot.dtype).reshape(step.slot.shape)
    if given.ndim and all(len(runs) == 1 for runs in step.region):
        part = itemgetter(tuple(slice(*runs[0]) for runs in step.region))
        view = part(given)
        is_same = view.shape == block.shape and stored_as((view,)) == stored_as((block,))
        if is_same and address_of(view) == address_of(block):
            return part
    return lambda array: block_of(array, step.region, step.slot.dtype).reshape(step.slot.shape)


def _whole(array: Array) -> Array:
    return array
