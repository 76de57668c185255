"""How much memory and time to request from a batch system, and why. Too much beats too little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from einmpi.graph.eingraph import Vertex
from einmpi.planner.plan import Plan
from einmpi.planner.plan_data import PlanData
from einmpi.units import show_bytes

MIB = 2**20
# Bytes of a rank without its tensors: Python, MPI, compiled kernels and their workspace, files.
OVERHEAD_BYTES = 512 * MIB
START_SECONDS = 300  # many ranks import from a slow file system, and kernels are compiled
MARGIN = 2  # Slurm kills a job at its time limit: request twice the prediction
# Assumed speeds without a measured machine, slow on purpose: operations per second of a core or of
# a GPU, and bytes per second of a file system or a network.
OPERATIONS_PER_SECOND = {"numpy": 10**9, "cupy": 10**12}
BYTES_PER_SECOND = 10**8
_SPEED = f"{BYTES_PER_SECOND // 10**6} MB/s"


@dataclass(frozen=True)
class Estimate:
    """The needs of a run."""

    memory_mib: int  # per node
    seconds: int  # of the whole run
    explanation: Sequence[str]  # lines for people


def estimate(plan: Plan, backend: str, threads: int) -> Estimate:
    """Estimate memory and time of a run with this many threads per rank."""
    ranks_per_node = plan.ranks // plan.nodes
    peak = _peak(plan, backend)
    memory_mib = ceil(ranks_per_node * (peak + OVERHEAD_BYTES) / MIB)
    memory_text = (
        f"Memory: {ranks_per_node} × {show_bytes(peak)} for the tensors of a rank, "
        f"by the plan, each plus {OVERHEAD_BYTES // MIB} MiB for Python, MPI, kernels and files."
    )
    run_seconds, time_text = _run_seconds(plan, backend, threads)
    file_seconds = _bytes_of_files(plan) / (plan.nodes * BYTES_PER_SECOND)
    time_text.append(
        f"inputs and outputs at {_SPEED} per node: {_show(file_seconds)}; "
        f"{MARGIN} times that, plus {START_SECONDS // 60} minutes for the start."
    )
    seconds = ceil(MARGIN * (run_seconds + file_seconds)) + START_SECONDS
    return Estimate(memory_mib, seconds, [memory_text, *time_text])


def _peak(plan: PlanData, backend: str) -> int:
    """Return the bytes that the tensors of a rank take in host memory."""
    peak = plan.peak_in_all
    if backend != "numpy":
        ahead = [0]  # in host memory, which the plan does not count
        for each in plan.loops:
            if each.loop is not None and each.loop.batches is not None:
                ahead.append(each.loop.batches.bytes_ahead)
        peak += max(ahead)
    return peak


def _bytes_of_files(plan: PlanData) -> int:
    """Return the bytes of all inputs and outputs, as if all were in files."""
    tensors: dict[str, Vertex] = {}
    bytes_of_batches = 0  # of all but the first ones
    for each in plan.loops or (plan,):
        for name in (*(vertex.name for vertex in each.graph.inputs), *each.graph.outputs):
            tensors[name] = each.graph[name]
        if each.loop is not None and each.loop.batches is not None:
            bytes_of_batches += (each.loop.steps - 1) * each.loop.batches.nbytes
    return sum(vertex.nbytes for vertex in tensors.values()) + bytes_of_batches


def _run_seconds(plan: PlanData, backend: str, threads: int) -> tuple[float, list[str]]:
    """Return the seconds without files, and lines that say what they are based on."""
    cost = plan.cost_in_all
    if cost.seconds is not None and plan.machine is not None:
        seconds = cost.seconds
        source = plan.machine.source
        return seconds, [f"Time: {_show(seconds)} by the plan, from measured times: {source};"]
    per_second = OPERATIONS_PER_SECOND[backend]
    if backend == "numpy":
        per_second *= threads
    computing = cost.operations / (per_second * plan.mesh.ranks)
    moving = cost.nbytes / (BYTES_PER_SECOND * plan.mesh.ranks)
    return computing + moving, [
        "Time: assumes a slow machine; `einmpi calibrate` measures yours, for --machine:",
        f"{per_second / 1e9:g} Gop/s per rank: {_show(computing)}; "
        f"{_SPEED} to each rank: {_show(moving)};",
    ]


def _show(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds / 60:.0f} min"
    if seconds >= 1:
        return f"{seconds:.0f} s"
    return "less than 1 s"
