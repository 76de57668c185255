"""The command `einmpi calibrate`: measures, prints what it found, and writes it to a machine file."""

from __future__ import annotations

import argparse
import contextlib
import platform
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from einmpi.cli.output_files import check_files, print_or_write
from einmpi.errors import InputError
from einmpi.units import counted

if TYPE_CHECKING:
    from einmpi.comm.base import Comm
    from einmpi.planner.machine import Machine

FILE = "machine.toml"
_SECONDS = 5.0
_SHARES = {"products": 0.4, "other": 0.05, "inside": 0.2, "between": 0.35}  # of the time


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-n", "--ranks", type=int, metavar="P", help="start this many ranks with mpirun"
    )
    command.add_argument(
        "--seconds",
        type=float,
        default=_SECONDS,
        metavar="S",
        help=f"about how long to measure; {_SECONDS:g} by default",
    )
    command.add_argument(
        "--save", nargs="?", const=FILE, metavar="FILE", help=f"write a machine file; {FILE}"
    )
    command.add_argument(
        "--json", metavar="FILE", help="write what is printed as JSON; - is standard output"
    )


def calibrate(options: argparse.Namespace, comm: Comm) -> int:
    """measure this machine, for plans that count in seconds"""
    from einmpi.comm.base import on_first_rank
    from einmpi.files.replace import replace_file
    from einmpi.runtime.threads import threads_of

    def check() -> None:
        if not 0 < options.seconds <= 3600:
            raise InputError(
                "--seconds", f"{options.seconds:g} seconds", "more than 0, at most 3600"
            )
        check_files(options)

    on_first_rank(comm, check)
    threads = threads_of(comm)
    machine = _measure(comm, threads.count, options.seconds)

    def tell() -> None:
        if options.save is not None:
            replace_file(options.save, [str(machine).encode()])
        table = _table(machine, f"{_ranks(comm.nodes)}, {threads}")
        data = _as_json(machine, comm.nodes, threads.count)
        print_or_write(options, f"{table}\n{_what_now(options.save)}", data)

    on_first_rank(comm, tell)
    return 0


# ---- measuring ------------------------------------------------------------------------------------------------------


def _measure(comm: Comm, threads: int, seconds: float) -> Machine:
    from einmpi.cli.calibrate.kernels import other_time, product_times
    from einmpi.cli.calibrate.messages import byte_time, inside_and_between, latency
    from einmpi.planner.machine import Machine

    inside, between = inside_and_between(comm.nodes, comm.rank)
    nodes = max(comm.nodes) + 1
    links = []
    for name, group, some in (
        ("inside", inside, nodes < comm.size),
        ("between", between, nodes > 1),
    ):
        budget = seconds * _SHARES[name]
        links.append(
            (latency(comm, group, budget / 4), byte_time(comm, group, budget))
            if some
            else (0.0, 0.0)
        )
    multiply = product_times(comm, threads, seconds * _SHARES["products"])
    other = other_time(comm, threads, seconds * _SHARES["other"])
    ranks = f"{_ranks(comm.nodes)} of {counted(threads, 'thread')}"
    source = f"{time.strftime('%Y-%m-%d')} on {ranks}, {_processor()}"
    (latency_inside, byte_inside), (latency_between, byte_between) = links
    return Machine(
        _whole(latency_inside * 1e9),
        _whole(latency_between * 1e9),
        _whole(byte_inside * 1e12),
        _whole(byte_between * 1e12),
        {dtype: _whole(each * 1e15) for dtype, each in multiply.items()},
        _whole(other * 1e15),
        source,
    )


def _whole(value: float) -> int:
    """0 is what was not measured."""
    return max(1, round(value)) if value else 0


def _ranks(nodes: Sequence[int]) -> str:
    """2 nodes × 4 ranks."""
    counts = Counter(nodes).values()
    some = " to ".join(map(str, sorted({min(counts), max(counts)})))
    return f"{counted(len(counts), 'node')} × {some} rank{'s' * (max(counts) > 1)}"


def _processor() -> str:
    """Its name, as Linux knows it, or its kind."""
    with (
        contextlib.suppress(OSError),
        open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file,
    ):
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


# ---- telling --------------------------------------------------------------------------------------------------------


def _table(machine: Machine, heading: str) -> str:
    from einmpi.units import show_bandwidth, show_latency, show_speed

    rows = [("messages", "latency", "bandwidth of a rank")]
    links = {
        "inside a node": (machine.latency_inside, machine.inside),
        "between nodes": (machine.latency_between, machine.between),
    }
    for name, (latency, byte) in links.items():
        rows.append(
            (name, show_latency(latency), show_bandwidth(byte))
            if byte
            else (name, "not measured", "")
        )
    rows += [("", "", ""), ("kernels", "speed of a rank", "")]
    rows += [(f"{dtype} product", show_speed(each), "") for dtype, each in machine.multiply.items()]
    rows += [("any other", show_speed(machine.element, "op"), "")]
    lines = (f"{first:<20}{second:<18}{third}".rstrip() for first, second, third in rows)
    return "\n".join([heading, "", *lines, ""])


def _what_now(saved: str | None) -> str:
    if saved is None:
        return f"einmpi calibrate --save writes this to {FILE}, for plans that count in seconds"
    return f"{saved} is written: einmpi plan JOB.toml -n P --machine {saved}, or [plan] machine in the job file"


def _as_json(machine: Machine, nodes: Sequence[int], threads: int) -> dict[str, Any]:
    """In seconds, bytes a second and operations a second."""
    links = {
        "inside": (machine.latency_inside, machine.inside),
        "between": (machine.latency_between, machine.between),
    }
    speeds = {**machine.multiply, "other": machine.element}
    return {
        "measured": machine.source,
        "ranks": len(nodes),
        "nodes": len(set(nodes)),
        "threads": threads,
        **{
            name: {"latency": latency / 1e9, "bandwidth": 1e12 / byte} if byte else None
            for name, (latency, byte) in links.items()
        },
        "kernels": {name: 1e15 / each for name, each in speeds.items()},
    }
