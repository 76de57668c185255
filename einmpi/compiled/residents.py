"""Inputs that stay loaded between calls: of one compiled job, or of several that share them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from einmpi.compiled.inputs import Blocks
from einmpi.errors import InputError
from einmpi.files.datasets import Dataset
from einmpi.files.specs import InputSpec
from einmpi.job.job import Job
from einmpi.planner.mesh import Mesh
from einmpi.planner.plan import Options, Plan
from einmpi.schedule.layout import Layout
from einmpi.schedule.lower import arrival_layout


@dataclass
class Residents:
    """The inputs of one rank that stay loaded, and how they are cut.

    Jobs that share them have the same object. The job that is planned first chooses the layouts,
    and the plans of the others keep to them. Memory is freed with the last of these jobs.
    """

    blocks: Blocks = field(default_factory=dict)  # in host memory
    files: dict[str, Dataset] = field(default_factory=dict)  # where they were found
    layouts: dict[str, Layout] = field(default_factory=dict)
    sources: dict[str, InputSpec] = field(default_factory=dict)  # where jobs say they come from
    is_shared: bool = False
    is_decided: bool = False  # whether a plan has chosen which inputs stay loaded
    times_forgotten: int = 0  # how often what was loaded has been given up

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of the layouts, None as long as there are none."""
        for layout in self.layouts.values():
            return layout.mesh
        return None

    def add_sources(self, job: Job) -> None:
        """Note where the inputs come from that stay loaded for a job."""
        for spec in _resident_specs(job):
            self.sources.setdefault(spec.name, spec)

    def check_sources(self, job: Job) -> None:
        """Refuse a job that has nothing to share, or takes an input from another source."""
        common = [spec for spec in _resident_specs(job) if spec.name in self.sources]
        if not common:
            what = "the two jobs have no resident input in common"
            raise InputError("compile", what, "inputs of the same name that are resident in both")
        for spec in common:
            known = self.sources[spec.name]
            if _source_of(spec) != _source_of(known):
                what = f"{spec.name} is {_shown(spec)} here"
                what += f" and {_shown(known)} in the job to share with"
                raise InputError("compile", what, "the same source in both jobs")

    def add_layouts(self, plan: Plan, names: tuple[str, ...]) -> None:
        """Note how a plan cuts inputs that stay loaded, unless an earlier plan has cut them."""
        self.is_decided = True
        if self.mesh not in (None, plan.mesh):
            return  # this plan leaves other ranks idle
        for name in names:
            if plan.graph.consumers.get(name):
                self.layouts.setdefault(name, arrival_layout(plan, name))

    def with_layouts(self, options: Options, names: tuple[str, ...]) -> Options:
        """Return options for a plan that takes these inputs as they lie.

        What the first plan could not keep is not kept by the others: all have the same limit.
        """
        layouts = {}
        for name in names:
            if name in self.layouts and name not in options.given:
                layouts[name] = self.layouts[name].cuts
        return replace(
            options,
            mesh=self.mesh or options.mesh,
            given={**options.given, **layouts},
            resident=tuple(name for name in options.resident if name not in layouts),
            fitting=() if self.is_decided else options.fitting,
            pins={name: parts for name, parts in options.pins.items() if name not in layouts},
            shared=tuple(layouts),
        )


def _resident_specs(job: Job) -> list[InputSpec]:
    """Return the inputs that stay loaded. Parameters are numbers that calls may give anew."""
    found = []
    for spec in job.inputs:
        is_used = spec.name in job.graph.by_name
        if spec.resident and spec.value is None and is_used:
            found.append(spec)
    return found


def _source_of(spec: InputSpec) -> InputSpec:
    """Return an input with only what its values depend on."""
    return replace(
        spec,
        file=None if spec.file is None else os.path.abspath(spec.file),
        declared_shape=None,
        declared_dtype=None,
        follow=(),
        resident=True,
        parts=None,
        place="",
    )


def _shown(spec: InputSpec) -> str:
    """Return where an input comes from, for a message."""
    tensor = f"{spec.dtype}{list(spec.shape or ())}"
    if spec.file is None:
        return f"{tensor}, {spec.random} with seed {spec.seed},"
    inside = f":{spec.inside}" if spec.inside else ""
    selected = " (a part)" if spec.slices else ""
    return f"{tensor} of {spec.file}{inside}{selected}"
