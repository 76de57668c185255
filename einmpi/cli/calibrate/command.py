"""The command `einmpi calibrate`: measure this machine, print the times, write a machine file."""

from __future__ import annotations

import argparse
import contextlib
import platform
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from einmpi.cli.options import MACHINE_FILE
from einmpi.cli.output_files import check_files, print_or_write
from einmpi.errors import InputError
from einmpi.units import ATTOSECONDS, counted, show_bandwidth, show_latency, show_speed

if TYPE_CHECKING:
    from einmpi.cli.calibrate.clock import Figure
    from einmpi.comm.base import Comm, Group
    from einmpi.compiled.backends import Workplace
    from einmpi.planner.machine import Machine

_LONGEST = 3600  # seconds
_PROCESSORS = "numpy"  # the backend that computes on CPUs
# Shares of the time for the parts of the measurement.
_PRODUCTS_SHARE = 0.4
_OTHER_SHARE = 0.05
_INSIDE_SHARE = 0.2
_BETWEEN_SHARE = 0.35


def calibrate(options: argparse.Namespace, comm: Comm) -> int:
    """Measure what messages and kernels take on this machine."""
    from einmpi.cli.calibrate.kernels import job_to_measure
    from einmpi.comm.agreement import on_first_rank
    from einmpi.compiled.backends import workplace_of
    from einmpi.files.replace import replace_file
    from einmpi.runtime.threads import threads_of

    def check_options() -> None:
        if not 0 < options.seconds <= _LONGEST:
            expected = f"more than 0 and at most {_LONGEST}"
            raise InputError("--seconds", f"{options.seconds:g} seconds", expected)
        check_files(options)

    on_first_rank(comm, check_options)
    job = job_to_measure(options)
    workplace = workplace_of(job, comm)
    threads = threads_of(comm)
    place = _show_ranks(comm.nodes)
    if job.backend == _PROCESSORS:
        source = f"{place} of {counted(threads.count, 'thread')}, {_processor()}"
    else:
        source = f"{place}, {workplace.text}"
    machine = _measure(workplace, comm.nodes, options.seconds, source)
    machine = replace(machine, shared=job.backend == _PROCESSORS)

    def present() -> None:
        if options.save is not None:
            replace_file(options.save, [str(machine).encode()])
        table = _table(machine, f"{place}, {workplace.text}")
        data = _as_json(machine, comm.nodes, job.backend, threads.count)
        print_or_write(options, f"{table}\n{_next_step(options.save)}", data)

    on_first_rank(comm, present)
    return 0


# ---- measuring -----------------------------------------------------------------------------------


def _measure(workplace: Workplace, nodes: Sequence[int], seconds: float, source: str) -> Machine:
    from einmpi.cli.calibrate.clock import measure_figures
    from einmpi.cli.calibrate.kernels import other, products
    from einmpi.cli.calibrate.messages import inside_and_between
    from einmpi.planner.machine import Machine

    inside_group, between_group = inside_and_between(nodes, workplace.comm.rank)
    node_count = max(nodes) + 1
    inside = between = None
    if node_count < len(nodes):
        inside = _link_figures(workplace, inside_group, seconds * _INSIDE_SHARE)
    if node_count > 1:
        between = _link_figures(workplace, between_group, seconds * _BETWEEN_SHARE)
    multiply = products(workplace, seconds * _PRODUCTS_SHARE)
    element = other(workplace, seconds * _OTHER_SHARE)
    measure_figures([*(inside or ()), *(between or ()), *multiply.values(), element])
    latency_inside, byte_inside = _link_times(inside)
    latency_between, byte_between = _link_times(between)
    return Machine(
        latency_inside,
        latency_between,
        byte_inside,
        byte_between,
        {dtype: _to_integer(figure.seconds * ATTOSECONDS) for dtype, figure in multiply.items()},
        _to_integer(element.seconds * ATTOSECONDS),
        f"{time.strftime('%Y-%m-%d')} on {source}",
    )


def _link_figures(workplace: Workplace, group: Group, budget: float) -> tuple[Figure, Figure]:
    """Return the figures of a message and of a byte."""
    from einmpi.cli.calibrate.messages import byte_time, latency

    return latency(workplace, group, budget / 4), byte_time(workplace, group, budget)


def _link_times(figures: tuple[Figure, Figure] | None) -> tuple[int, int]:
    """Return latency and time per byte, in the units of a machine file; zeros if not measured."""
    if figures is None:
        return 0, 0
    latency, byte = figures
    return _to_integer(latency.seconds * 1e9), _to_integer(byte.seconds * 1e12)


def _to_integer(value: float) -> int:
    """Round up to 1 at least: 0 means "not measured"."""
    return max(1, round(value)) if value else 0


def _show_ranks(nodes: Sequence[int]) -> str:
    """Return a text such as 2 nodes × 4 ranks."""
    ranks_per_node = Counter(nodes).values()
    fewest = min(ranks_per_node)
    most = max(ranks_per_node)
    ranks = counted(most, "rank") if fewest == most else f"{fewest} to {most} ranks"
    return f"{counted(len(ranks_per_node), 'node')} × {ranks}"


def _processor() -> str:
    """Return the name of the processor, or else its architecture."""
    with (
        contextlib.suppress(OSError),
        open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file,
    ):
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


# ---- presenting ----------------------------------------------------------------------------------


def _links(machine: Machine) -> dict[str, tuple[int, int]]:
    """Return latency and time per byte, in the units of a machine file."""
    return {
        "inside": (machine.latency_inside, machine.inside),
        "between": (machine.latency_between, machine.between),
    }


def _table(machine: Machine, heading: str) -> str:
    rows = [("messages", "latency", "bandwidth per rank")]
    names = {"inside": "inside a node", "between": "between nodes"}
    for link, (latency, byte) in _links(machine).items():
        if byte:
            rows.append((names[link], show_latency(latency), show_bandwidth(byte)))
        else:
            rows.append((names[link], "not measured", ""))
    rows.append(("", "", ""))
    rows.append(("kernels", "speed per rank", ""))
    for dtype, each in machine.multiply.items():
        rows.append((f"{dtype} product", show_speed(each), ""))
    rows.append(("any other", show_speed(machine.element, "op"), ""))
    lines = [f"{first:<20}{second:<18}{third}".rstrip() for first, second, third in rows]
    return "\n".join([heading, "", *lines, ""])


def _next_step(saved: str | None) -> str:
    if saved is None:
        return f"einmpi calibrate --save writes this to {MACHINE_FILE}, for plans in seconds"
    return (
        f"{saved} is written: einmpi plan JOB.toml -n P --machine {saved}, "
        "or [plan] machine in the job file"
    )


def _as_json(machine: Machine, nodes: Sequence[int], backend: str, threads: int) -> dict[str, Any]:
    """Return the times in seconds, bytes per second and operations per second."""
    data: dict[str, Any] = {
        "measured": machine.source,
        "ranks": len(nodes),
        "nodes": len(set(nodes)),
        "backend": backend,
        "threads": threads,
    }
    for link, (latency, byte) in _links(machine).items():
        data[link] = None
        if byte:
            data[link] = {"latency": latency / 1e9, "bandwidth": 1e12 / byte}
    times = {**machine.multiply, "other": machine.element}
    data["kernels"] = {name: ATTOSECONDS / each for name, each in times.items()}
    return data
