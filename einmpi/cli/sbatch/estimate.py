"""How much memory and time to ask a batch system for, and what that is based on. Rather too much than too little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from einmpi.planner.plan import Plan
from einmpi.units import show_bytes

MIB = 2**20
# What a rank takes beside its tensors: Python, MPI and compiled kernels; workspace of kernels; files being read.
BESIDE = 512 * MIB
START = 300  # seconds: many ranks import from a slow file system, kernels are compiled
MARGIN = 2  # a time limit ends a job: twice of what is predicted
# Without a measured machine: operations a second of a rank's core, or of its GPU, and bytes a second. Slow on purpose.
OPERATIONS = {"numpy": 10**9, "cupy": 10**12}
BYTES = 10**8


@dataclass(frozen=True)
class Estimate:
    """`why` are lines for people."""

    memory: int  # MiB a node
    seconds: int
    why: Sequence[str]


def estimate(plan: Plan, backend: str, threads: int) -> Estimate:
    """For a node and the whole run. `threads` are those of a rank."""
    each = plan.ranks // plan.nodes
    memory = ceil(each * (plan.peak + BESIDE) / MIB)
    why = [
        f"Memory: {each} times {show_bytes(plan.peak)} for the tensors of a rank, by the plan, and "
        f"{BESIDE // MIB} MiB for Python, MPI, kernels and files."
    ]
    ends = [*plan.graph.inputs, *(plan.graph[name] for name in plan.graph.outputs)]
    passing = sum(vertex.nbytes for vertex in ends) / (plan.nodes * BYTES)
    start = f"{MARGIN} times that, and {START // 60} minutes for the start"
    rate_of_bytes = f"{BYTES // 10**6} MB/s"
    if plan.seconds_predicted is not None and plan.machine is not None:
        run = plan.seconds_predicted
        why += [
            f"Time: {_shown(run)} by the plan, from times that were measured: {plan.machine.source};",
            f"inputs and outputs at {rate_of_bytes} a node: {_shown(passing)}; {start}.",
        ]
    else:
        rate = OPERATIONS[backend] * (threads if backend == "numpy" else 1)
        computing = plan.graph.operations() / (rate * plan.mesh.ranks)
        moving = plan.bytes_predicted / (BYTES * plan.mesh.ranks)
        run = computing + moving
        why += [
            "Time: guessed for a slow machine; `einmpi calibrate` measures yours, and --machine makes this better:",
            f"{rate / 1e9:g} Gop/s a rank: {_shown(computing)}; {rate_of_bytes} to a rank: {_shown(moving)};",
            f"inputs and outputs at {rate_of_bytes} a node: {_shown(passing)}; {start}.",
        ]
    return Estimate(memory, ceil(MARGIN * (run + passing)) + START, why)


def _shown(seconds: float) -> str:
    return (
        f"{seconds / 60:.0f} min"
        if seconds >= 100
        else f"{seconds:.0f} s"
        if seconds >= 1
        else "less than 1 s"
    )
