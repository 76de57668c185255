"""The command `einmpi calibrate`: measure this machine, print the times, write a machine file."""

from __future__ import annotations

import argparse
import contextlib
import platform
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from einmpi.cli.options import MACHINE_FILE
from einmpi.cli.output_files import check_files, print_or_write
from einmpi.errors import InputError
from einmpi.units import counted, show_bandwidth, show_latency, show_speed

if TYPE_CHECKING:
    from einmpi.cli.calibrate.clock import Figure
    from einmpi.comm.base import Comm, Group
    from einmpi.planner.machine import Machine

_LONGEST = 3600  # seconds
# Shares of the time for the parts of the measurement.
_PRODUCTS_SHARE = 0.4
_OTHER_SHARE = 0.05
_INSIDE_SHARE = 0.2
_BETWEEN_SHARE = 0.35


def calibrate(options: argparse.Namespace, comm: Comm) -> int:
    """Measure what messages and kernels take on this machine."""
    from einmpi.comm.agreement import on_first_rank
    from einmpi.files.replace import replace_file
    from einmpi.runtime.threads import threads_of

    def check_options() -> None:
        if not 0 < options.seconds <= _LONGEST:
            expected = f"more than 0 and at most {_LONGEST}"
            raise InputError("--seconds", f"{options.seconds:g} seconds", expected)
        check_files(options)

    on_first_rank(comm, check_options)
    threads = threads_of(comm)
    machine = _measure(comm, threads.count, options.seconds)

    def present() -> None:
        if options.save is not None:
            replace_file(options.save, [str(machine).encode()])
        table = _table(machine, f"{_show_ranks(comm.nodes)}, {threads}")
        data = _as_json(machine, comm.nodes, threads.count)
        print_or_write(options, f"{table}\n{_next_step(options.save)}", data)

    on_first_rank(comm, present)
    return 0


# ---- measuring -----------------------------------------------------------------------------------


def _measure(comm: Comm, threads: int, seconds: float) -> Machine:
    from einmpi.cli.calibrate.clock import measure_figures
    from einmpi.cli.calibrate.kernels import other, products
    from einmpi.cli.calibrate.messages import inside_and_between
    from einmpi.planner.machine import Machine

    inside_group, between_group = inside_and_between(comm.nodes, comm.rank)
    nodes = max(comm.nodes) + 1
    inside = between = None
    if nodes < comm.size:
        inside = _link_figures(comm, inside_group, seconds * _INSIDE_SHARE)
    if nodes > 1:
        between = _link_figures(comm, between_group, seconds * _BETWEEN_SHARE)
    multiply = products(comm, threads, seconds * _PRODUCTS_SHARE)
    element = other(comm, threads, seconds * _OTHER_SHARE)
    measure_figures([*(inside or ()), *(between or ()), *multiply.values(), element])
    latency_inside, byte_inside = _link_times(inside)
    latency_between, byte_between = _link_times(between)
    ranks = f"{_show_ranks(comm.nodes)} of {counted(threads, 'thread')}"
    return Machine(
        latency_inside,
        latency_between,
        byte_inside,
        byte_between,
        {dtype: _to_integer(figure.seconds * 1e15) for dtype, figure in multiply.items()},
        _to_integer(element.seconds * 1e15),
        f"{time.strftime('%Y-%m-%d')} on {ranks}, {_processor()}",
    )


def _link_figures(comm: Comm, group: Group, budget: float) -> tuple[Figure, Figure]:
    """Return the figures of a message and of a byte."""
    from einmpi.cli.calibrate.messages import byte_time, latency

    return latency(comm, group, budget / 4), byte_time(comm, group, budget)


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


def _as_json(machine: Machine, nodes: Sequence[int], threads: int) -> dict[str, Any]:
    """Return the times in seconds, bytes per second and operations per second."""
    data: dict[str, Any] = {
        "measured": machine.source,
        "ranks": len(nodes),
        "nodes": len(set(nodes)),
        "threads": threads,
    }
    for link, (latency, byte) in _links(machine).items():
        data[link] = None
        if byte:
            data[link] = {"latency": latency / 1e9, "bandwidth": 1e12 / byte}
    times = {**machine.multiply, "other": machine.element}
    data["kernels"] = {name: 1e15 / each for name, each in times.items()}
    return data
