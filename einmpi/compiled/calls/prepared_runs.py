"""Runs of a known call with all that is the same in every call worked out ahead: how blocks are
taken from inputs, what is bound to the steps of the schedule, and the layouts of outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arrays.creation import block_of
from einmpi.arrays.dist_array import DistArray
from einmpi.compiled.inputs import Inputs, resident_key
from einmpi.compiled.residents import Residents
from einmpi.job.job import Job
from einmpi.kernels.prepared import address_of, stored_as
from einmpi.runtime.failure import RankFailure
from einmpi.runtime.host_memory import aligned_empty
from einmpi.runtime.program import Program
from einmpi.schedule.layout import Layout
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Load

Array: TypeAlias = npt.NDArray[Any]
TakeBlock: TypeAlias = Callable[[Any], Array]  # this rank's block of a given input
TakeSources: TypeAlias = Callable[[], Inputs]


class PreparedRun:
    """The runs of a schedule on given arrays of numpy and DistArrays that look alike.

    Other inputs stay loaded: their blocks are the same in every run.
    """

    def __init__(
        self,
        program: Program,
        take_blocks: Mapping[str, tuple[str, TakeBlock]],
        overwritten: Sequence[Load],
        resident_blocks: Mapping[str, Array],
        times_forgotten: int,
        layouts: Mapping[str, Layout],
    ) -> None:
        self.program = program
        self.resident_blocks = resident_blocks  # by the name of the slot
        self.times_forgotten = times_forgotten  # what stays loaded, until it was prepared
        self.overwritten = overwritten  # inputs that are written over
        self.layouts = layouts  # of the outputs
        self.take_blocks = []
        for slot, (tensor, take) in take_blocks.items():
            self.take_blocks.append((slot, tensor, take))

    def is_up_to_date(self, times_forgotten: int) -> bool:
        """Return whether the inputs that stay loaded have not been given up since."""
        return not self.resident_blocks or times_forgotten == self.times_forgotten

    def output_blocks(
        self, inputs: Mapping[str, Any], take_sources: TakeSources, failure: RankFailure | None
    ) -> dict[str, Array] | None:
        """Return this rank's blocks of the outputs; None if another thread runs the schedule.

        `take_sources` returns the inputs, with those that were given away taken from the caller.
        It is called if a run writes over some of them.
        """

        def take_all() -> dict[str, Array]:
            blocks = dict(self.resident_blocks)
            for slot, tensor, take in self.take_blocks:
                blocks[slot] = take(inputs[tensor])
            if self.overwritten:
                sources = take_sources()
                for step in self.overwritten:
                    blocks[step.slot.name] = sources.own_block(step, self.program.comm)
            return blocks

        return self.program.run_on_blocks(take_all, failure)


def prepare_run(
    program: Program,
    schedule: Schedule,
    job: Job,
    inputs: Mapping[str, Any],
    residents: Residents,
    layouts: Mapping[str, Layout],
) -> PreparedRun | None:
    """Prepare runs on inputs that look like these; return None if that is not possible.

    `residents` are the inputs that stay loaded, and `layouts` those of the outputs.

    The schedule has been bound before. It takes all its other inputs from arrays and DistArrays on
    the host. Those that it changes are DistArrays, which a caller may give away.
    """
    take_blocks: dict[str, tuple[str, TakeBlock]] = {}
    overwritten = []
    resident_blocks: dict[str, Array] = {}
    blocks = {}
    for step in schedule.steps:
        if not isinstance(step, Load):
            continue
        given = inputs.get(step.tensor)
        if step.tensor not in inputs and step.kept and not step.overwritten:
            block = residents.blocks.get(resident_key(job, step))
            if block is None:
                return None
            resident_blocks[step.slot.name] = block
            blocks[step.slot.name] = block
            continue
        if step.kept and step.overwritten and isinstance(given, DistArray):
            overwritten.append(step)
            blocks[step.slot.name] = aligned_empty(step.slot.shape, step.slot.dtype)
            continue
        take = None
        is_gone = isinstance(given, DistArray) and given._is_given_away
        if step.kept and not step.overwritten and not is_gone:
            take = _prepare_taking(step, given)
        if take is None:
            return None
        take_blocks[step.slot.name] = step.tensor, take
        blocks[step.slot.name] = take(given)
    if not program.accepts(blocks):
        return None
    times = residents.times_forgotten
    return PreparedRun(program, take_blocks, overwritten, resident_blocks, times, layouts)


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
