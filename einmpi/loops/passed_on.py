"""The tensors that loops one after another pass on, and the memory that these take meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from einmpi.graph.eingraph import Vertex
from einmpi.job.job import Job, loop_of
from einmpi.loops.stages import final_names
from einmpi.planner.plan import Options, Plan
from einmpi.planner.plan_data import loop_plan_of
from einmpi.schedule.layout import Layout


@dataclass(frozen=True)
class NamesPassedOn:
    """The tensors that loops of a job pass on."""

    final: tuple[str, ...]  # results of the job
    kept: tuple[frozenset[str], ...]  # for each loop, the results of earlier ones still needed


def names_passed_on(job: Job) -> NamesPassedOn:
    """Return which tensors are results of a job, and which loops have to keep for later ones."""
    loops = job.one_after_another()
    final = final_names(job)
    kept: list[frozenset[str]] = []
    needed = set(final)  # after the loop, going backwards
    for each in reversed(loops):
        made = set(names_made(each))
        read = {vertex.name for vertex in each.written.inputs}
        # What it carries is saved as such; what it makes anew is not needed from before.
        carried = set(loop_of(each).carry)
        before = (needed - made) | (read - carried)
        kept.append(frozenset(before))
        needed = before | carried
    return NamesPassedOn(final, tuple(reversed(kept)))


def names_made(job: Job) -> list[str]:
    """Return the tensors that a loop carries or computes."""
    return [*loop_of(job).carry, *(vertex.name for vertex in job.written.computed)]


def kept_tensors(job: Job) -> list[dict[str, Vertex]]:
    """Return, for each loop, the tensors of earlier loops that are there while it runs."""
    names = names_passed_on(job)
    made: dict[str, Vertex] = {}
    found = []
    for each, kept in zip(job.one_after_another(), names.kept, strict=True):
        found.append({name: vertex for name, vertex in made.items() if name in kept})
        for name in names_made(each):
            made[name] = each.written[name]
    return found


def bytes_kept(
    kept: Mapping[str, Vertex], layouts: Mapping[str, Layout], in_use: Collection[str] = ()
) -> int:
    """Return the memory of a rank for tensors of earlier loops, without those that are in use.

    A tensor whose layout is not known counts as if each rank had all of it.
    """
    total = 0
    for name, vertex in kept.items():
        if name in in_use:
            continue
        layout = layouts.get(name)
        elements = vertex.elements if layout is None else layout.max_elements()
        total += elements * np.dtype(vertex.dtype).itemsize
    return total


def with_less_memory(options: Options, nbytes: int) -> Options:
    """Return the options of a loop that has to leave so much memory to other tensors."""
    if options.memory is None:
        return options
    return replace(options, memory=max(1, options.memory - nbytes))


def with_kept(plan: Plan, nbytes: int) -> Plan:
    """Return the plan of a loop with so much more memory, for tensors of earlier loops."""
    loop = loop_plan_of(plan)
    once = loop.once
    if once is not None:
        once = replace(once, peak=once.peak + nbytes)
    return replace(plan, peak=plan.peak + nbytes, loop=replace(loop, once=once, bytes_kept=nbytes))
