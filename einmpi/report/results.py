"""What a run gave and what it took, gathered from all ranks: as JSON and as text for people."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from einmpi.comm.base import Comm
from einmpi.compiled.dist_array import DistArray
from einmpi.job.job import Job
from einmpi.planner.make_plan import Plan
from einmpi.planner.text.explain import one_level
from einmpi.report.timeline import Timeline
from einmpi.units import counted, show_bytes, show_seconds, show_shape

PIECE = 2**20  # elements


@dataclass(frozen=True)
class Figures:
    """Of a tensor; None where it has no elements, or no order."""

    norm: float
    least: float | int | None
    greatest: float | int | None


def figures(comm: Comm, arrays: Mapping[str, DistArray]) -> dict[str, Figures]:
    """Norm, least and greatest value of each tensor, on all ranks. Every element counts once."""
    own = {
        name: _of_block(array.host)
        for name, array in arrays.items()
        if array.layout.owns(comm.rank)
    }
    blocks = [json.loads(text) for text in comm.allgather_text(json.dumps(own))]
    found = {}
    for name in arrays:
        parts = [block[name] for block in blocks if name in block]
        ends = [part[1:] for part in parts if part[1] is not None]
        least = _first([low for low, _ in ends], min)
        greatest = _first([high for _, high in ends], max)
        norms = [part[0] for part in parts]
        norm = math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)
        found[name] = Figures(norm, least, greatest)
    return found


def _of_block(array: np.ndarray) -> tuple[float, float | int | None, float | int | None]:
    if array.size == 0:
        return 0.0, None, None
    wide = np.complex128 if array.dtype.kind == "c" else np.float64
    flat = array.reshape(-1)
    with np.errstate(all="ignore"):
        # Piece by piece: the array may be larger than memory.
        pieces = (flat[k : k + PIECE].astype(wide, copy=False) for k in range(0, flat.size, PIECE))
        norm = math.hypot(*(float(np.linalg.norm(piece)) for piece in pieces))
    if array.dtype.kind == "c":
        return norm, None, None
    return norm, array.min().item(), array.max().item()


def _first(values: Sequence[Any], choose: Any) -> Any:
    """The least or greatest; a value that is no number wins, as in numpy."""
    odd = [value for value in values if value != value]
    return odd[0] if odd else choose(values) if values else None


@dataclass(frozen=True)
class Totals:
    """What all ranks together, and the busiest of them, moved and held."""

    moved: int
    moved_most: int
    peak: int
    shuffled: int = 0  # by ranks that read files for each other
    between: int = 0  # of what was moved: from node to node
    spilled: int = 0  # written to the slow tier
    spilled_planned: int = 0
    fetched: int = 0  # copied from there


def totals(comm: Comm, received: int, peak: int, *others: int) -> Totals:
    """`others` are those of Totals that are added up over the ranks, in their order."""
    own = " ".join(map(str, (received, peak, *others)))
    moved, peaks, *added = zip(
        *(map(int, text.split()) for text in comm.allgather_text(own)), strict=True
    )
    return Totals(sum(moved), max(moved), max(peaks), *map(sum, added))


@dataclass(frozen=True)
class Report:
    """Everything about a finished run."""

    job: Job
    plan: Plan
    totals: Totals
    seconds: Mapping[str, float]  # plan, load, run, checkpoint, store, total
    seconds_all: Sequence[float]  # of each repeat
    outputs: Mapping[str, DistArray]
    figures: Mapping[str, Figures]
    threads: str
    kernels: str = ""  # what was compiled
    resumed_from: str | None = None  # the last vertex that an earlier run has done
    checkpoints: int = 0
    timeline: Timeline | None = None  # where the run was recorded

    def as_json(self) -> dict[str, Any]:
        plan = self.plan
        data: dict[str, Any] = {
            "ranks": plan.ranks,
            "nodes": plan.nodes,
            "strategy": plan.strategy,
            "certificate": {"kind": plan.kind, "lower_bound_words": plan.lower_bound},
            "digest": plan.digest,
            "flops": plan.graph.operations(),
            "bytes_predicted": plan.bytes_predicted,
            "bytes_moved": self.totals.moved,
            "bytes_moved_max_rank": self.totals.moved_most,
            "bytes_between_predicted": plan.bytes_between,
            "bytes_between": self.totals.between,
            "bytes_shuffled_loading": self.totals.shuffled,
            "bytes_peak_predicted": plan.peak,
            "bytes_peak": self.totals.peak,
            "bytes_spilled": self.totals.spilled,
            "bytes_spilled_predicted": self.totals.spilled_planned,
            "bytes_fetched": self.totals.fetched,
            "resumed_from": self.resumed_from,
            "checkpoints": self.checkpoints,
            "seconds_predicted": plan.seconds_predicted,
            "seconds": dict(self.seconds),
            "outputs": {
                name: {
                    "shape": list(array.shape),
                    "dtype": array.dtype.name,
                    "norm": _finite(self.figures[name].norm),
                }
                for name, array in self.outputs.items()
            },
        }
        if len(self.seconds_all) > 1:
            data["seconds_all"] = list(self.seconds_all)
        return data

    def __str__(self) -> str:
        """The time it took, what moved, and a line for each output."""
        plan, seconds = self.plan, self.seconds
        ranks = counted(plan.ranks, "rank")
        kinds = ("plan", "load", "run", *(("checkpoint",) if self.checkpoints else ()), "store")
        parts = ", ".join(f"{name} {seconds[name]:.2f}" for name in kinds)
        name = self.job.title or self.job.source.name
        lines = [
            f"{name}: {seconds['total']:.2f} s on {ranks} ({parts}); {self.threads}{self.kernels}"
        ]
        if plan.ranks > 1:
            moved, busiest, peak, planned = map(
                show_bytes, (self.totals.moved, self.totals.moved_most, self.totals.peak, plan.peak)
            )
            against = (
                "as planned"
                if self.totals.moved == plan.bytes_predicted
                else (f"planned {show_bytes(plan.bytes_predicted)}")
            )
            lines.append(
                f"  moved {moved} ({against}), {busiest} to the busiest rank; "
                f"peak memory {peak} a rank (planned {planned})"
            )
        if plan.nodes > 1:
            between = show_bytes(self.totals.between)
            lines.append(
                f"  {between} of it between the {plan.nodes} nodes ({self._between_planned()}"
                f"{'' if plan.knows_nodes else '; ' + one_level(plan)})"
            )
        if plan.seconds_predicted is not None:
            lines.append(
                f"  run in {show_seconds(seconds['run'])} ({show_seconds(plan.seconds_predicted)} predicted)"
            )
        if self.totals.shuffled:
            lines.append(
                f"  {show_bytes(self.totals.shuffled)} of the inputs were read by one rank for another"
            )
        if self.totals.spilled:
            lines.append(
                f"  {show_bytes(self.totals.spilled)} were written to scratch files, "
                f"{show_bytes(self.totals.fetched)} read from them"
            )
        targets = {spec.name: f"  → {spec.target}" for spec in self.job.outputs}
        for name, array in self.outputs.items():
            figures = f"{_show(self.figures[name], array)}{targets.get(name, '')}"
            lines.append(f"  {name}  {array.dtype} {show_shape(array.shape)}  {figures}")
        return "\n".join(lines)

    def _between_planned(self) -> str:
        predicted = self.plan.bytes_between
        assert predicted is not None  # ranks that run count it where the plan could not
        return (
            "as planned" if predicted == self.totals.between else f"planned {show_bytes(predicted)}"
        )


def _finite(value: float) -> float | None:
    """JSON knows no infinity and no nan."""
    return value if math.isfinite(value) else None


def _show(found: Figures, array: DistArray) -> str:
    if array.size == 0:
        return "empty"
    norm = f"norm {found.norm:.6g}"
    return (
        norm if found.least is None else f"{norm}  min {found.least:.6g}  max {found.greatest:.6g}"
    )
