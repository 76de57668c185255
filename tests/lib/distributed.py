"""Run jobs on ranks that are threads, checking everything a schedule promises."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from schedule_checks import verify

import einmpi
from einmpi.api import options_of
from einmpi.comm.base import Comm
from einmpi.comm.threads import run_threads
from einmpi.compiled.program import Compiled
from einmpi.planner.plan import Plan
from einmpi.report.describe import TOLERANCE, relative_error
from einmpi.runtime.backend import ShapeBackend
from einmpi.runtime.program import Program
from einmpi.schedule.compute import Compute
from einmpi.schedule.lower import lower
from einmpi.schedule.memory import peak_bytes, spilled_bytes
from einmpi.schedule.passes import fuse
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Repeat, Step, Transfer


@dataclass(frozen=True)
class Done:
    """What a run on threads gave, and what it moved on each rank."""

    plan: Plan
    outputs: dict[str, np.ndarray]
    received: list[int]
    between: list[int]
    peaks: list[int]
    spilled: int = 0  # bytes written to the slow tier, by all ranks
    fetched: int = 0

    @property
    def moved(self) -> int:
        return sum(self.received)

    @property
    def imbalance(self) -> float:
        """The busiest rank against the mean of those that the plan uses."""
        return max(self.received) * self.plan.mesh.ranks / self.moved if self.moved else 1.0


def run_on_threads(
    job: einmpi.Job,
    ranks: int,
    inputs: Mapping[str, Any] | None = None,
    nodes: int = 1,
    **options: Any,
) -> Done:
    """Run a job on threads. Verify its schedules, and compare bytes and memory with the plan."""
    planner = Compiled(job, Comm(0, ranks, nodes), options_of(job, **options))
    planner.prepare(dict(inputs or {}))
    ((kinds, (plan, _)),) = planner.ready.items()
    schedules = [lower(plan, rank) for rank in range(ranks)]

    def on_rank(comm: Any) -> Any:
        compiled = Compiled(job, comm, planner.options)
        # Planned once for all: threads share one core.
        compiled.ready[kinds] = (
            plan,
            fuse(schedules[comm.rank], plan, compiled.backend.fusions, overlaps=False),
        )
        outputs = compiled(inputs)
        return {name: array.gather() for name, array in outputs.items()}, compiled

    results = run_threads(ranks, on_rank, nodes=nodes)
    received = [compiled.measured.received for _, compiled in results]
    between = [compiled.measured.between for _, compiled in results]
    peaks = [compiled.measured.peak for _, compiled in results]
    check_schedules(plan, schedules, received, peaks)
    spilled, fetched = (
        sum(getattr(compiled.measured, what) for _, compiled in results)
        for what in ("spilled", "fetched")
    )
    assert (spilled, fetched) == tuple(map(sum, zip(*map(copied, schedules), strict=True)))
    outputs = results[0][0]
    for others, _ in results[1:]:
        for name, array in others.items():
            np.testing.assert_array_equal(array, outputs[name])
    return Done(plan, outputs, received, between, peaks, spilled, fetched)


def run_from_files(
    ranks: int,
    text: str,
    inputs: Mapping[str, np.ndarray],
    sizes: Mapping[str, int] | None = None,
    **options: Any,
) -> tuple[dict[str, np.ndarray], int]:
    """Run a program on threads; return its outputs and the bytes that moved.

    Inputs are files, of which no rank has anything before. Check that the bytes are those of the
    plan, that the peak is within it, and that the schedules fit together.
    """
    with tempfile.TemporaryDirectory() as folder:
        lines = [f'program = """\n{text}\n"""', "[sizes]"]
        for name, size in (sizes or {}).items():
            lines.append(f"{name} = {size}")
        lines.append("[inputs]")
        for name, array in inputs.items():
            np.save(f"{folder}/{name}.npy", array)
            lines.append(f'{name} = {{ file = "{name}.npy" }}')
        Path(folder, "job.toml").write_text("\n".join(lines))
        job = einmpi.load(Path(folder, "job.toml"))
        done = run_on_threads(job, ranks, **options)
    assert done.moved == done.plan.bytes_predicted
    return done.outputs, done.moved


def copied(schedule: Schedule) -> tuple[int, int]:
    """Bytes that a schedule copies to the slow tier and from there."""
    fetched = 0
    for step in schedule.steps:
        fetched += sum(slot.nbytes for slot in step.spills("fetch"))
        if isinstance(step, Compute):
            fetched += step.tiles.fetched
    return spilled_bytes(schedule), fetched


def check_schedules(
    plan: Plan, schedules: list[Schedule], received: list[int], peaks: list[int]
) -> None:
    """Check that schedules fit together, and that ranks moved and held what they say."""
    verify(schedules)
    expected = [
        sum(s.nbytes for s in each.steps if isinstance(s, Transfer | Repeat)) for each in schedules
    ]
    if any(isinstance(s, Transfer) and s.counts for s in every_step(schedules[0])):
        # The values decide who sends how many rows, of which there are as many in any case.
        assert sum(received) == sum(expected)
    else:
        assert received == expected
    for schedule, peak in zip(schedules, peaks, strict=True):
        assert peak <= peak_bytes(schedule) <= plan.peak


def every_step(schedule: Schedule) -> Iterator[Step]:
    """Yield the steps of a schedule, and those that they repeat."""
    for outer in schedule.steps:
        for step, _ in outer.innermost():
            yield step


def dry_run(plan: Plan) -> list[int]:
    """Bytes that each rank receives, by the same loop without any values."""
    return [received for received, _ in dry_run_on_nodes(plan)]


def dry_run_on_nodes(plan: Plan, nodes: int | None = None) -> list[tuple[int, int]]:
    """The same, and how many of them come from other nodes: the plan's, or as many as are given."""
    found = []
    for rank in range(plan.ranks):
        comm = Comm(rank, plan.ranks, nodes or plan.nodes)
        Program(lower(plan, rank), ShapeBackend(), comm).run(NoValues())
        found.append((comm.received, comm.received_between))
    return found


class NoValues:
    def begin(self, step: Any, make: Any, comm: Any, outside: bool) -> None:
        pass

    def fill(self, step: Any, target: Any, comm: Any) -> None:
        pass

    def block(self, step: Any, comm: Any) -> np.ndarray:
        return np.broadcast_to(np.float64(0), step.slot.shape)

    def takes_messages(self, step: Any) -> bool:
        return False


def assert_close(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Compare with a tolerance relative to the largest element: 1e-10 in double, 1e-4 in single.

    Sums are added in another order than by the reference.
    """
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
        error = relative_error(array, found[name])
        assert error <= TOLERANCE.get(array.dtype.name, 0.0), f"{name}: error {error}"
