"""The outputs of a compiled job as DistArrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.arrays.dist_array import DistArray
from einmpi.arrays.record import Origin
from einmpi.comm.base import Comm
from einmpi.files.datasets import Dataset
from einmpi.files.specs import Number
from einmpi.job.job import Job
from einmpi.planner.plan import Plan
from einmpi.schedule.layout import Layout


class Results:
    """Makes the outputs of runs: this rank's blocks, their layouts, and where they come from."""

    def __init__(
        self, job: Job, comm: Comm, files: Mapping[str, Dataset], has_carried: bool
    ) -> None:
        self.job = job
        self.comm = comm
        self.files = files  # in which inputs were found, as of the last call
        self.has_carried = has_carried
        self.parameters = {spec.name for spec in job.inputs if spec.value is not None}
        self.layouts: dict[int, dict[str, Layout]] = {}  # of outputs, by the id of the plan
        self.origins: dict[int, tuple[Plan, Origin]] = {}  # by the id of the plan

    def outputs(
        self, plan: Plan, blocks: Mapping[str, Any], given: Mapping[str, Any]
    ) -> dict[str, DistArray]:
        """Return the outputs of a run, given this rank's blocks of them and the inputs."""
        origin = self.origin(plan, given)
        found = {}
        for name in self.job.graph.outputs:
            found[name] = self.output(plan, name, blocks.get(name), origin)
        return found

    def output(
        self, plan: Plan, name: str, local: npt.NDArray[Any] | None, origin: Origin
    ) -> DistArray:
        """Return an output, given this rank's block of it."""
        if local is None:
            vertex = self.job.graph[name]
            local = np.empty((0,) * (len(vertex.bound) or 1), vertex.dtype)
        result = DistArray(local, self.layout_of(plan, name), self.comm)
        result.origin = origin
        result.tensor = name
        return result

    def layout_of(self, plan: Plan, name: str) -> Layout:
        """Return the layout of an output: the same object for all runs of a plan."""
        plan_layouts = self.layouts.setdefault(id(plan), {})
        layout = plan_layouts.get(name)
        if layout is None:
            layout = Layout(plan.mesh, self.job.graph[name].bound, plan.layouts[name])
            plan_layouts[name] = layout
        return layout

    def origin(self, plan: Plan, given: Mapping[str, Any]) -> Origin:
        """Return where the results of a run with these inputs come from."""
        known = self.origins.get(id(plan))
        if known is not None:
            return known[1]
        values: dict[str, Number | None] = dict.fromkeys(given)
        files = dict(self.files)
        for name, array in given.items():
            if isinstance(array, Dataset):
                files[name] = array
            elif name in self.parameters and isinstance(array, np.ndarray):
                values[name] = array.item()
        origin = Origin(self.job, lambda: plan.digest, values, files)
        if not files and not self.parameters and not self.has_carried:
            # It is the same for all runs of this plan.
            self.origins[id(plan)] = plan, origin
        return origin
