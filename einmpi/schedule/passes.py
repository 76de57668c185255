"""The passes that turn the steps of a plan into the schedule that a rank carries out, in order.

A pass is a function of a schedule. An optimisation of the execution is one more entry here, or one
more rule in a pass, and an implementation in the table of a backend (docs/how_it_works.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from einmpi.planner.plan import Plan
from einmpi.schedule.blocked_updates import with_blocked_updates, with_product_updates
from einmpi.schedule.compute import Compute, Kernel
from einmpi.schedule.cuts import with_cuts
from einmpi.schedule.groups import GroupingRule, with_groups
from einmpi.schedule.memory import with_begins, with_frees, with_reuses
from einmpi.schedule.overlap import with_overlap
from einmpi.schedule.regions import Slot
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.spill import with_spills
from einmpi.schedule.stencils import with_folds, with_halo_buffers
from einmpi.schedule.steps import Reuse, Step


@dataclass(frozen=True)
class Fusions:
    """What a backend computes in one go; passes make such steps only for a backend that can."""

    groups: GroupingRule | None = None
    groups_in_tiles: GroupingRule | None = None  # inside a tile of other kernels
    # Whether a product, and what updates a tensor by it, are one call.
    is_product_update: Callable[[Kernel, Kernel], bool] | None = None
    reads_halos: Callable[[Compute], bool] | None = None  # where they are
    # Whether a kernel can be computed some rows at a time, and whether one can aggregate a slot so.
    is_map: Callable[[Kernel], bool] | None = None
    is_fold: Callable[[Kernel, Slot], bool] | None = None


class Context(NamedTuple):
    """What passes know besides the schedule."""

    plan: Plan
    reuses: Sequence[Reuse] = ()  # which outputs take the memory of which inputs
    fusions: Fusions = Fusions()
    overlaps: bool = True
    is_repeated: bool = False  # the steps are those that another step repeats


def _cut_transfers(schedule: Schedule, context: Context) -> Schedule:
    plan = context.plan
    return _with(schedule, with_cuts(schedule.steps, plan)) if plan.overlapped else schedule


def _free(schedule: Schedule, context: Context) -> Schedule:
    return _with(schedule, with_frees(schedule.steps))


def _spill(schedule: Schedule, context: Context) -> Schedule:
    plan = context.plan
    return _with(schedule, with_spills(schedule.steps, plan.peak)) if plan.spilled else schedule


def _reuse_inputs(schedule: Schedule, context: Context) -> Schedule:
    return _with(schedule, with_reuses(schedule.steps, context.reuses))


def _read_ahead(schedule: Schedule, context: Context) -> Schedule:
    limit = context.plan.peak - context.plan.overlap
    return _with(schedule, with_begins(schedule.steps, limit))


def _block_updates(schedule: Schedule, context: Context) -> Schedule:
    blocked = context.plan.blocked
    return _with(schedule, with_blocked_updates(schedule.steps, blocked)) if blocked else schedule


def _fuse_updates(schedule: Schedule, context: Context) -> Schedule:
    is_update = context.fusions.is_product_update
    return schedule if is_update is None else with_product_updates(schedule, is_update)


def _buffer_halos(schedule: Schedule, context: Context) -> Schedule:
    reads_halos = context.fusions.reads_halos
    return schedule if reads_halos is None else with_halo_buffers(schedule, reads_halos)


def _group_kernels(schedule: Schedule, context: Context) -> Schedule:
    rule = context.fusions.groups
    return schedule if rule is None else with_groups(schedule, rule, context.is_repeated)


def _fold(schedule: Schedule, context: Context) -> Schedule:
    is_map, is_fold = context.fusions.is_map, context.fusions.is_fold
    if is_map is None or is_fold is None:
        return schedule
    return with_folds(schedule, is_map, is_fold)


def _overlap(schedule: Schedule, context: Context) -> Schedule:
    return with_overlap(schedule, context.plan.peak) if context.overlaps else schedule


def _with(schedule: Schedule, steps: Sequence[Step]) -> Schedule:
    return replace(schedule, steps=tuple(steps))


def with_groups_in_tile(steps: Sequence[Step], fusions: Fusions) -> tuple[Step, ...]:
    """Return the steps of a tile with groups, as a backend computes them best."""
    rule = fusions.groups_in_tiles
    if rule is None:
        return tuple(steps)
    return with_groups(Schedule(0, 1, "", tuple(steps)), rule).steps


# What follows from the plan alone, and is the same for all backends.
LOWERING_PASSES = (
    _cut_transfers,  # transfers between nodes in parts, for kernels to go on meanwhile
    _free,  # slots after their last use
    _spill,  # slots that do not fit into memory, and kernels that do not: out of core
    _reuse_inputs,  # outputs take the memory of inputs
    _read_ahead,  # loads begin while kernels run
    _block_updates,  # large aggregates that only an update needs: fused, block by block
)
# What a backend computes in one go.
FUSION_PASSES = (
    _fuse_updates,  # a matrix product and the update that adds it, as one call of BLAS
    _buffer_halos,  # halos stay beside their block, which is not copied
    _group_kernels,  # kernels that share rows: what passes between them stays in the cache
    _fold,  # aggregates in the same pass over memory as what they aggregate
    _overlap,  # transfers go on in the background
)


def run_passes(
    schedule: Schedule,
    passes: Sequence[Callable[[Schedule, Context], Schedule]],
    context: Context,
) -> Schedule:
    """Return the schedule after some passes, in order."""
    for each in passes:
        schedule = each(schedule, context)
    return schedule


def fuse(schedule: Schedule, plan: Plan, fusions: Fusions, overlaps: bool = True) -> Schedule:
    """Return the schedule as a backend carries it out, and steps that it repeats likewise."""

    def fuse_repeated(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        if any(kernel.part for step in steps for kernel in step.kernels):
            return steps
        inside = replace(schedule, steps=steps, updates=(), lowered_steps=steps)
        context = Context(plan, (), fusions, overlaps=False, is_repeated=True)
        return run_passes(inside, FUSION_PASSES, context).steps

    schedule = _with(schedule, [step.with_repeated(fuse_repeated) for step in schedule.steps])
    return run_passes(schedule, FUSION_PASSES, Context(plan, (), fusions, overlaps))
