"""The command `einmpi calibrate`: measure what messages and kernels take on this machine."""

from __future__ import annotations

import argparse
import contextlib
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial, reduce
from math import inf
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.api import program
from einmpi.cli.job_options import check_files, print_or_write, with_flags
from einmpi.cli.options import MACHINE_FILE
from einmpi.comm.agreement import on_first_rank
from einmpi.comm.base import Comm, Group
from einmpi.compiled.running import Workplace, workplace_of
from einmpi.errors import InputError
from einmpi.files.atomic import replace_file
from einmpi.job.job import Job
from einmpi.planner.machine import PRODUCTS, Machine
from einmpi.runtime.backend import Array
from einmpi.runtime.threads import threads_of
from einmpi.schedule.compute import Kernel
from einmpi.schedule.regions import Slot
from einmpi.units import ATTOSECONDS, counted, show_bandwidth, show_latency, show_speed

_LONGEST = 3600  # seconds
_PROCESSORS = "numpy"  # the backend that computes on CPUs
# Shares of the time for the parts of the measurement.
_PRODUCTS_SHARE = 0.4
_OTHER_SHARE = 0.05
_INSIDE_SHARE = 0.2
_BETWEEN_SHARE = 0.35


def calibrate(options: argparse.Namespace, comm: Comm) -> int:
    """Measure what messages and kernels take on this machine."""

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


# ---- the clock -----------------------------------------------------------------------------------


ROUNDS = 5
# After these, sizes stay: the size that counts is measured in three rounds at least.
_GROWING_ROUNDS = 3
_FEWEST_REPEATS = 3  # of an action, in each round
_MOST_REPEATS = 100
_LONG_ENOUGH = 0.01  # seconds of an action that is large enough to show its speed

Action = Callable[[], object]


class Figure:
    """The seconds for a unit of an action that all ranks do at once, such as a byte of an exchange.

    `action_of` makes the action of a size. The size grows until the action takes long enough, or
    until there is no larger one. All ranks make the same decisions, by the slowest of them.
    """

    def __init__(
        self,
        comm: Comm,
        action_of: Callable[[int], Action],
        units_of: Callable[[int], float],
        sizes: Sequence[int],
        budget: float,  # seconds in all
    ) -> None:
        self.comm = comm
        self.action_of = action_of
        self.units_of = units_of
        self.sizes = sizes
        self.budget = budget / ROUNDS
        self.place = 0  # of the size that is measured
        self.own_best = inf  # the shortest time of a round on this rank
        self.best = inf  # the longest of these on any rank

    @property
    def seconds(self) -> float:
        """The seconds of a unit."""
        return self.best / self.units_of(self.sizes[self.place])

    def measure_round(self, may_grow: bool) -> None:
        """Repeat the action; go on with larger ones if it was too short."""
        self._measure_size()
        long_enough = min(_LONG_ENOUGH, self.budget / _FEWEST_REPEATS)
        while may_grow and self.best < long_enough and self.place + 1 < len(self.sizes):
            self.place += 1
            self.own_best = self.best = inf
            self._measure_size()

    def _measure_size(self) -> None:
        """Take the median of repeats, whose number follows from the best round so far."""
        repeats = int(self.budget / self.best) if 0 < self.best < inf else 0
        repeats = min(max(repeats, _FEWEST_REPEATS), _MOST_REPEATS)
        action = self.action_of(self.sizes[self.place])
        action()  # makes connections, compiles, touches memory
        times = [_time_once(self.comm, action) for _ in range(repeats)]
        self.own_best = min(self.own_best, median(times))
        self.best = _slowest(self.comm, self.own_best)


def measure_figures(figures: Sequence[Figure]) -> None:
    """Measure all figures in turn, again and again. All ranks call this."""
    for number in range(ROUNDS):
        for figure in figures:
            figure.measure_round(may_grow=number < _GROWING_ROUNDS)


def _time_once(comm: Comm, action: Action) -> float:
    comm.barrier()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _slowest(comm: Comm, seconds: float) -> float:
    """Return the largest value of all ranks on all ranks, so that their decisions agree."""
    return max(float(text) for text in comm.allgather_text(repr(seconds)))


# ---- kernels, while all ranks of a node compute --------------------------------------------------


PRODUCT = "Z[i,k] = sum(A[i,j] * B[j,k])"
# Stands for all kernels that are not products: half arithmetic and half memory, as in a softmax.
OTHER = "Z[i,j] = exp(X[i,j] - C[i])"
_COLUMNS = 1024  # of the other kernel
_ROWS = tuple(2**power for power in range(11, 17))
# Rows, and as many columns. The last ones are for GPUs.
_MATRICES = (256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)


def job_to_measure(options: argparse.Namespace) -> Job:
    """Return a job that asks for the backend of the command line."""
    job = program(PRODUCT, A=(1, 1), B=(1, 1))
    return with_flags(replace(job, path="--backend"), options)


def products(workplace: Workplace, budget: float) -> dict[str, Figure]:
    """Return the figures of an operation of a matrix product, by dtype."""
    found = {}
    for dtype in PRODUCTS:
        action_of = partial(_product, workplace, dtype)
        share = budget / len(PRODUCTS)
        found[dtype] = _figure(workplace, action_of, lambda rows: 2 * rows**3, _MATRICES, share)
    return found


def other(workplace: Workplace, budget: float) -> Figure:
    """Return the figure of an operation of a kernel that is not a product."""

    def action_of(rows: int) -> Action:
        shapes = {"X": (rows, _COLUMNS), "C": (rows,)}
        return MeasuredKernel(workplace, OTHER, "float64", shapes).compute

    return _figure(workplace, action_of, lambda rows: 2 * rows * _COLUMNS, _ROWS, budget)


def _figure(
    workplace: Workplace,
    action_of: Callable[[int], Action],
    units_of: Callable[[int], int],
    sizes: Sequence[int],
    budget: float,
) -> Figure:
    """Return a figure that makes the arrays of a size once, not in each round."""
    return Figure(workplace.comm, lru_cache(maxsize=1)(action_of), units_of, sizes, budget)


def _product(workplace: Workplace, dtype: str, rows: int) -> Action:
    shapes = {"A": (rows, rows), "B": (rows, rows)}
    return MeasuredKernel(workplace, PRODUCT, dtype, shapes).compute


class MeasuredKernel:
    """The kernel of a statement that computes Z, with the arrays that it reads and writes."""

    def __init__(
        self, workplace: Workplace, text: str, dtype: str, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.backend = workplace.backend
        given: dict[str, Any] = dict(shapes)
        vertex = program(text, **given, dtype=dtype).graph["Z"]
        self.operands = []
        slots = []
        for name in vertex.inputs:
            array = self.backend.allocate(shapes[name], dtype)
            self.backend.from_host(_numbers(shapes[name], dtype), array)
            self.operands.append(array)
            slots.append(Slot(name, shapes[name], dtype))
        self.result = self.backend.allocate(vertex.bound, vertex.dtype)
        target = Slot("Z", vertex.bound, vertex.dtype)
        self.step = Kernel("Z", target, tuple(slots), vertex.computed_einsum, (), ())

    def compute(self) -> None:
        """Compute it, and return when this is done."""
        self.backend.compute_kernel(self.step, self.operands, self.result)
        self.backend.wait()


def _numbers(shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
    """Return an array of numbers from 0 to 6."""
    along = [(np.arange(extent) % 7).astype(np.int8) for extent in shape]
    numbers = reduce(np.add.outer, along)
    numbers %= 7
    return numbers.astype(dtype)


# ---- messages, by the calls of a run -------------------------------------------------------------


_SMALL_MESSAGES = 20  # that are timed together
# Bytes that a rank receives in an exchange, up to the largest of a run.
_EXCHANGES = tuple(4**power for power in range(8, 13))


def inside_and_between(nodes: Sequence[int], rank: int) -> tuple[Group, Group]:
    """Return the ranks on the node of a rank, and the ranks with the same place on all nodes.

    `nodes` is the node of each rank. The ranks of a node are in different groups of the second
    kind, so that they share the network.
    """
    ranks_of_node: dict[int, list[int]] = {}
    for other, node in enumerate(nodes):
        ranks_of_node.setdefault(node, []).append(other)
    inside = ranks_of_node[nodes[rank]]
    place = inside.index(rank)
    between = [ranks[place] for ranks in ranks_of_node.values() if place < len(ranks)]
    return tuple(inside), tuple(sorted(between))


def latency(workplace: Workplace, group: Group, budget: float) -> Figure:
    """Return the figure of a small message.

    The ranks send around a ring: each sends on what it has received, so a round takes one message.
    """
    comm = workplace.comm
    place = group.index(comm.rank)
    following = group[(place + 1) % len(group)]
    preceding = group[place - 1]
    outgoing = _bytes(workplace, 1)
    incoming = _bytes(workplace, 1)

    def send_around(messages: int) -> None:
        if len(group) == 1:
            return
        for _ in range(messages):
            comm.sendrecv(following, outgoing, preceding, incoming)
        workplace.backend.wait()

    return Figure(comm, lambda size: partial(send_around, size), float, (_SMALL_MESSAGES,), budget)


def byte_time(workplace: Workplace, group: Group, budget: float) -> Figure:
    """Return the figure of a byte that a rank receives from the others of its group at once."""
    action_of = partial(_exchange, workplace, group)
    return Figure(workplace.comm, action_of, float, _EXCHANGES, budget)


def _exchange(workplace: Workplace, group: Group, size: int) -> Action:
    """Return a function in which each rank of the group receives `size` bytes from the others."""
    comm = workplace.comm
    others = max(1, len(group) - 1)
    bytes_from_each = -(-size // others)
    counts = [0 if member == comm.rank else bytes_from_each for member in group]
    send = _bytes(workplace, sum(counts))
    receive = _bytes(workplace, sum(counts))

    def exchange() -> None:
        comm.alltoallv(group, send, counts, receive, counts)
        workplace.backend.wait()

    return exchange


def _bytes(workplace: Workplace, count: int) -> Array:
    """Return an array whose memory the system has already provided."""
    array = workplace.backend.allocate((count,), "uint8")
    workplace.backend.from_host(np.ones(count, np.uint8), array)
    return array
