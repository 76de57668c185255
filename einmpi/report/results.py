"""The results and costs of a run, gathered from all ranks: as JSON, as text, as metrics."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arrays.dist_array import DistArray
from einmpi.checkpoint.folder import CheckpointFolder
from einmpi.comm.base import Comm
from einmpi.compiled.running import Measured
from einmpi.errors import printable
from einmpi.files.datasets import Dataset
from einmpi.job.batches import PREFIX as VALIDATION
from einmpi.job.job import Job
from einmpi.kernels.cpu.blas_library.choice import describe_blas_in_use
from einmpi.planner.plan import Cost, Plan, cost_of_all, loop_plan_of
from einmpi.planner.text.explain import certificate_data, one_level
from einmpi.process.environment import current_date, software_versions
from einmpi.report.record import Timeline
from einmpi.report.times import LoopRecord
from einmpi.sparse_array import SparseArray
from einmpi.units import counted, show_bytes, show_seconds, show_shape

# ---- figures -------------------------------------------------------------------------------------
#
# The figures of tensors: norm, least and greatest value of all blocks, for JSON and for people.


NORM_BLOCK_ELEMENTS = 2**20

Array: TypeAlias = npt.NDArray[Any]
Number: TypeAlias = float | int


@dataclass(frozen=True)
class Figures:
    """The norm and extremes of a tensor. Empty and complex tensors have no extremes.

    `value` has all digits of a tensor without dimensions, as text; it is empty for others.
    """

    norm: float
    least: Number | None
    greatest: Number | None
    value: str = ""


def figures(comm: Comm, arrays: Mapping[str, DistArray | SparseArray]) -> dict[str, Figures]:
    """Return norm, least and greatest value of each tensor, on all ranks; of what is stored."""
    own = {}
    for name, tensor in arrays.items():
        array = tensor.values if isinstance(tensor, SparseArray) else tensor
        array._update()
        if array.layout.owns(comm.rank):
            own[name] = _figures_of_block(array.host)
    blocks = [json.loads(text) for text in comm.allgather_text(json.dumps(own))]
    found = {}
    for name in arrays:
        norms = []
        low = []
        high = []
        value = ""
        for block in blocks:
            if name not in block:
                continue
            norm, least, greatest, value = block[name]
            norms.append(norm)
            if least is not None:
                low.append(least)
                high.append(greatest)
        norm = math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)
        found[name] = Figures(
            norm,
            np.min(low).item() if low else None,  # nan wins
            np.max(high).item() if high else None,
            value,
        )
    return found


def _figures_of_block(array: Array) -> tuple[float, Number | None, Number | None, str]:
    if array.size == 0:
        return 0.0, None, None, ""
    is_complex = array.dtype.kind == "c"
    wide = np.complex128 if is_complex else np.float64
    flat = array.reshape(-1)
    norms = []
    with np.errstate(all="ignore"):
        # Block by block: the array may be larger than memory.
        for start in range(0, flat.size, NORM_BLOCK_ELEMENTS):
            block = flat[start : start + NORM_BLOCK_ELEMENTS].astype(wide, copy=False)
            norms.append(float(np.linalg.norm(block)))
    norm = math.hypot(*norms)
    value = "" if array.ndim else str(array[()])
    if is_complex:
        return norm, None, None, value
    return norm, array.min().item(), array.max().item(), value


def as_json_number(value: complex) -> Number | list[Number | None] | None:
    """Return a number for JSON; a complex one as the list of its two parts."""
    if isinstance(value, complex):
        return [finite(value.real), finite(value.imag)]
    return finite(value)


def finite(value: Number | None) -> Number | None:
    """Replace infinity and nan, which JSON does not have."""
    if value is None or not math.isfinite(value):
        return None
    return value


def show_figures(found: Figures, array: DistArray | SparseArray) -> str:
    """Return the figures of a tensor as text."""
    if isinstance(array, SparseArray):
        return f"{len(array.values)} stored  {show_figures(found, array.values)}"
    if array.size == 0:
        return "empty"
    if found.value:
        return found.value
    norm = f"norm {found.norm:.6g}"
    if found.least is None:
        return norm
    return f"{norm}  min {found.least:.6g}  max {found.greatest:.6g}"


def totals(comm: Comm, measured: Sequence[Measured]) -> tuple[Measured, int]:
    """Add up over all ranks what the last of several runs moved; the peak is that of the fullest.

    Inputs are read in the first one only. Return also the bytes that the busiest rank received.
    """
    own = replace(measured[-1], shuffled=measured[0].shuffled)
    texts = comm.allgather_text(json.dumps(asdict(own), default=int))
    of_ranks = [Measured(**json.loads(text)) for text in texts]
    return reduce(Measured.plus, of_ranks), max(each.received for each in of_ranks)


@dataclass(frozen=True)
class Startup:
    """What rank 0 did once and later runs need not do again, in seconds."""

    kernels_compiled: int  # the others were on disk
    seconds_kernels: float
    seconds_generators: float

    def __str__(self) -> str:
        parts = []
        if round(self.seconds_kernels, 2):
            done = "kernels loaded"
            if self.kernels_compiled:
                done = f"{counted(self.kernels_compiled, 'kernel')} compiled"
            parts.append(f"{done} {self.seconds_kernels:.2f} s")
        if round(self.seconds_generators, 2):
            parts.append(f"generators {self.seconds_generators:.2f} s")
        return ", ".join(parts)


@dataclass(frozen=True)
class LoopReport:
    """The steps of a loop."""

    steps: int  # in all
    steps_before: int  # those of them that an earlier run has done
    is_done: bool  # whether the condition holds
    until: str  # the condition; empty if there is none
    history: Mapping[str, Array]  # the values of each recorded tensor, step by step
    once: Cost  # planned, before the first step
    a_step: Cost  # planned
    validation: Cost  # planned, of all validations
    seconds_a_step: float
    peak_planned: int  # before and during the steps
    record: LoopRecord | None = None  # if the steps were recorded
    best_step: int | None = None  # the step after which the best validation was
    keeps_best: bool = False  # whether what is carried has the values of that step

    @property
    def in_all(self) -> Cost:
        """What was planned of all that this run has done."""
        own_steps = self.steps - self.steps_before
        return self.once.plus(self.a_step, own_steps).plus(self.validation)

    def as_json(self) -> dict[str, Any]:
        recorded = {}
        for name, values in self.history.items():
            recorded[name] = [as_json_number(value) for value in values.tolist()]
        data = {
            "steps": self.steps,
            "steps_before": self.steps_before,
            "done": self.is_done,
            "until": self.until,
            "flops_a_step": self.a_step.operations,
            "bytes_once": self.once.nbytes,
            "bytes_a_step": self.a_step.nbytes,
            "bytes_between_a_step": self.a_step.between,
            "bytes_validation": self.validation.nbytes,
            "seconds_a_step": self.seconds_a_step,
            "seconds_predicted_a_step": self.a_step.seconds,
            "best_step": self.best_step,
            "history": recorded,
        }
        if self.record is not None:
            data["steps_traced"] = list(self.record.traced)
            data["vertices"] = [vertex.as_json() for vertex in self.record.times]
        return data

    def lines(self, name: str = "") -> list[str]:
        """Return how many steps there were and why they ended, and what they recorded last.

        `name` is put before them.
        """
        each = show_seconds(self.seconds_a_step)
        end = ""
        if self.is_done:
            end = f" until {printable(self.until)}"
        elif self.until:
            end = f", and {printable(self.until)} does not hold yet"
        pace = f"; {each} a step"
        if self.in_all.nbytes:
            pace = "; " + a_step_text(self.once, self.a_step, f"{each} and ")
        if self.steps == self.steps_before:
            pace = ", done by an earlier run"
        found = [f"  {name}{counted(self.steps, 'step')}{end}{pace}"]
        if self.history:
            last = [f"{name} {values[-1]:.6g}" for name, values in self.history.items()]
            found.append(f"  {' ' * len(name)}last values: {', '.join(last)}")
        if self.keeps_best:
            column = next(each for each in self.history if each.startswith(VALIDATION))
            best = f"{column} {self.history[column][self.best_step]:.6g}"
            found.append(f"  {' ' * len(name)}results of step {self.best_step}, the best: {best}")
        return found


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """The results of a run before they are stored, and what was measured."""

    plan: Plan
    outputs: Mapping[str, DistArray | SparseArray]
    files: Mapping[str, Dataset]  # where inputs were found
    measured: Sequence[Measured]  # in each repeat
    planned_at: float  # when the first step could begin
    work: str  # what computed, for people; on a GPU it names that
    timeline: Timeline | None = None  # if the run was recorded
    loops: Sequence[LoopReport] = ()
    checkpoints: CheckpointFolder | None = None


@dataclass(frozen=True, kw_only=True)
class Report(FinishedRun):
    """All there is to say about a finished run."""

    job: Job
    totals: Measured  # of all ranks
    moved_most: int  # bytes that the busiest rank received
    seconds: Mapping[str, float]  # plan, load, run, checkpoint, store, total
    figures: Mapping[str, Figures]
    thread_count: int  # of a rank
    startup: Startup
    sharing_problem: str = ""  # why ranks of a node could not share memory, if they tried
    date: str = field(default_factory=current_date)  # when the run ended

    @property
    def planned(self) -> Cost:
        """What was planned of all that the run has done."""
        return cost_of_all(loop.in_all for loop in self.loops) if self.loops else self.plan.cost

    @property
    def peak_planned(self) -> int:
        """Bytes of tensors and message buffers on the fullest rank."""
        if self.loops:
            return max(loop.peak_planned for loop in self.loops)
        return self.plan.peak

    @property
    def seconds_hidden(self) -> float:
        """Seconds in which tensors moved while the rank computed, as a mean over the ranks."""
        return self.totals.seconds_hidden / self.plan.mesh.ranks

    def as_json(self) -> dict[str, Any]:
        plan = self.plan
        planned = self.planned
        checkpoints = self.checkpoints
        saved = None if checkpoints is None else checkpoints.saved
        data: dict[str, Any] = {
            "ranks": plan.ranks,
            "nodes": plan.nodes,
            "strategy": plan.strategy,
            "certificate": certificate_data(plan),
            "digest": plan.digest,
            "flops": planned.operations,
            "bytes_predicted": planned.nbytes,
            "bytes_moved": self.totals.received,
            "bytes_moved_max_rank": self.moved_most,
            "bytes_between_predicted": planned.between,
            "bytes_between": self.totals.between,
            "bytes_shared_predicted": self.totals.shared_planned,
            "bytes_shared": self.totals.shared,
            "shared": self.job.shared,
            "shared_problem": self.sharing_problem or None,
            "bytes_shuffled_loading": self.totals.shuffled,
            "bytes_peak_predicted": self.peak_planned,
            "bytes_peak": self.totals.peak,
            "bytes_spilled": self.totals.spilled,
            "bytes_spilled_predicted": self.totals.spilled_planned,
            "bytes_fetched": self.totals.fetched,
            "resumed_from": None if saved is None else saved.place,
            "checkpoints": 0 if checkpoints is None else checkpoints.count,
            "seconds_predicted": planned.seconds,
            "seconds_hidden": self.seconds_hidden,
            "seconds": dict(self.seconds),
            "startup": asdict(self.startup),
            "title": self.job.title,
            "job": self.job.path,
            "sizes": dict(self.job.sizes),
            "backend": self.job.backend,
            "threads": self.thread_count,
            "blas": describe_blas_in_use(),
            "versions": software_versions(),
            "host": platform.node(),
            "date": self.date,
            "outputs": self._outputs_json(),
        }
        for loop, each in zip(self.loops, plan.loops, strict=False):
            loop_data = loop.as_json()
            batches = loop_plan_of(each).batches
            if batches is not None:
                loop_data["batches"] = asdict(batches)
            if len(self.loops) == 1:
                data["loop"] = loop_data
            else:
                data.setdefault("loops", []).append(loop_data)
        if len(self.measured) > 1:
            data["seconds_all"] = [each.seconds for each in self.measured]
        return data

    def _outputs_json(self) -> dict[str, Any]:
        data = {}
        for name, array in self.outputs.items():
            data[name] = {
                "shape": list(array.shape),
                "dtype": array.dtype.name,
                "norm": finite(self.figures[name].norm),
                "min": finite(self.figures[name].least),
                "max": finite(self.figures[name].greatest),
            }
        return data

    def __str__(self) -> str:
        """The time it took, what moved, and a line for each output."""
        lines = [self._time_line()]
        startup = str(self.startup)
        if startup:
            lines.append(f"  startup: {startup}")
        for number, loop in enumerate(self.loops, 1):
            lines += loop.lines(f"loop {number}: " if len(self.loops) > 1 else "")
        if self.plan.ranks > 1:
            lines.append(self._moved_line())
        if self.plan.nodes > 1:
            lines.append(self._between_nodes_line())
        if self.totals.seconds_hidden:
            hidden = show_seconds(self.seconds_hidden)
            lines.append(f"  each rank computed for {hidden} while its tensors moved")
        if self.totals.shared or self.totals.shared_planned:
            shared = show_bytes(self.totals.shared)
            against = _against_plan(self.totals.shared, self.totals.shared_planned)
            lines.append(f"  {shared} of it shared inside nodes, without messages ({against})")
        if self.sharing_problem:
            lines.append(f"  ranks of a node share no memory: {self.sharing_problem}")
        if self.planned.seconds is not None:
            run = show_seconds(self.seconds["run"])
            predicted = show_seconds(self.planned.seconds)
            lines.append(f"  run in {run} ({predicted} predicted)")
        if self.totals.shuffled:
            shuffled = show_bytes(self.totals.shuffled)
            lines.append(f"  {shuffled} of the inputs were read by one rank for another")
        if self.totals.spilled:
            spilled = show_bytes(self.totals.spilled)
            fetched = show_bytes(self.totals.fetched)
            lines.append(f"  {spilled} were written to scratch files, {fetched} read from them")
        targets = {spec.name: f"  → {printable(spec.target)}" for spec in self.job.outputs}
        for name, array in self.outputs.items():
            figures = show_figures(self.figures[name], array)
            target = targets.get(name, "")
            lines.append(f"  {name}  {array.dtype} {show_shape(array.shape)}  {figures}{target}")
        return "\n".join(lines)

    def _time_line(self) -> str:
        phases = ["plan", "load", "run", "store"]
        if self.checkpoints is not None and self.checkpoints.count:
            phases.insert(3, "checkpoint")
        parts = ", ".join(f"{name} {self.seconds[name]:.2f}" for name in phases)
        name = printable(self.job.title or self.job.source.name)
        ranks = counted(self.plan.ranks, "rank")
        total = self.seconds["total"]
        return f"{name}: {total:.2f} s on {ranks} ({parts}); {self.work}"

    def _moved_line(self) -> str:
        moved = show_bytes(self.totals.received)
        against = _against_plan(self.totals.received, self.planned.nbytes)
        busiest = show_bytes(self.moved_most)
        peak = show_bytes(self.totals.peak)
        planned = show_bytes(self.peak_planned)
        return (
            f"  moved {moved} ({against}), {busiest} to the busiest rank; "
            f"peak memory {peak} a rank (planned {planned})"
        )

    def _between_nodes_line(self) -> str:
        note = _against_plan(self.totals.between, self.planned.between)
        if not self.plan.knows_nodes:
            note += f"; {one_level(self.plan)}"
        between = show_bytes(self.totals.between)
        return f"  {between} of it between the {self.plan.nodes} nodes ({note})"


def a_step_text(once: Cost, a_step: Cost, seconds: str = "") -> str:
    """Return what moves before the first step of a loop, and what a step takes and moves."""
    before = f"{show_bytes(once.nbytes)} once, " if once.nbytes else ""
    return f"{before}{seconds}{show_bytes(a_step.nbytes)} a step"


def _against_plan(measured: int, planned: int) -> str:
    return "as planned" if measured == planned else f"planned {show_bytes(planned)}"


# ---- metrics -------------------------------------------------------------------------------------
#
# The figures of a run as OpenMetrics: the text that Prometheus and its relatives read.


# Tables of the JSON whose entries are told apart by a label, and the name of the label.
_METRIC_LABELS = {
    "seconds": "phase",
    "sizes": "size",
    "outputs": "output",
    "vertices": "vertex",
    "loops": "loop",
    "history": "name",
}
_INFO_OF_A_RUN = ("title", "job", "strategy", "digest", "backend", "blas", "host")


def metrics_text(data: Mapping[str, Any]) -> str:
    """Return a gauge for every number of the JSON of a run; labels of one metric name the run."""
    families: dict[str, list[str]] = {}
    _collect_samples(families, "einmpi", {}, data)
    info = {name: str(data[name]) for name in _INFO_OF_A_RUN}
    lines = ["# HELP einmpi_run which run this was", "# TYPE einmpi_run info"]
    lines.append(f"einmpi_run_info{_labels_text(info)} 1")
    for name, samples in families.items():
        words = name.removeprefix("einmpi_").replace("_", " ")
        lines += [f"# HELP {name} {words}", f"# TYPE {name} gauge", *samples]
    return "\n".join([*lines, "# EOF", ""])


def _collect_samples(
    families: dict[str, list[str]], name: str, labels: Mapping[str, str], value: object
) -> None:
    """Add the numbers of a value of the JSON; a metric has all of its samples in one place."""
    if isinstance(value, (int, float)):
        families.setdefault(name, []).append(f"{name}{_labels_text(labels)} {+value!r}")
    elif isinstance(value, dict):
        for key, inner in value.items():
            label = _METRIC_LABELS.get(key)
            if label is None:
                _collect_samples(families, f"{name}_{key}", labels, inner)
                continue
            entries = inner.items() if isinstance(inner, dict) else _numbered(inner)
            for entry, each in entries:
                # Of what a loop has recorded, its last value.
                last = each[-1] if isinstance(each, list) and each else each
                _collect_samples(families, f"{name}_{key}", {**labels, label: entry}, last)


def _numbered(entries: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the entries of a list, each with its name or its number from 1."""
    return [(each.get("name", str(number)), each) for number, each in enumerate(entries, 1)]


def _labels_text(labels: Mapping[str, str]) -> str:
    shown = []
    for name, value in labels.items():
        quoted = printable(value).replace("\\", "\\\\").replace('"', '\\"')
        shown.append(f'{name}="{quoted}"')
    return f"{{{','.join(shown)}}}" if shown else ""
