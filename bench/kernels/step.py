"""What small work costs: steps of loops and recurrences, calls of compiled programs and jobs.

    python -m bench step
    mpirun -n 2 python -m bench step

The loop is a power iteration. Times are the least of many repeats, in microseconds, of rank 0:
medians also measure what else the machine does. With --cpu-time they are those of the processor.
The kernels of a step are measured one by one as well, so that the rest of a step can be told apart.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

import einmpi
from bench.lib.results import write_results
from einmpi.api import options_of
from einmpi.comm.base import Comm
from einmpi.comm.mpi import comm_of
from einmpi.job.loop import Loop
from einmpi.kernels.prepared import bound_call
from einmpi.loops.running import LoopRun

POWER = """
y[i]      = sum(S[i,j] * x[j])
value     = sum(x[i] * y[i])
x_next[i] = y[i] / norm(y[k])
turned    = norm(x_next[i] - sign(value) * x[i])
"""


class Stopwatch:
    """Measures the least time of repeated calls, in microseconds."""

    def __init__(self, repeat: int, calls: int, cpu_time: bool) -> None:
        self.repeat = repeat
        self.calls = calls
        self.clock = time.process_time if cpu_time else time.perf_counter

    def least(self, function: Callable[[], object]) -> float:
        found = []
        for _ in range(3):  # they prepare what follows
            function()
        for _ in range(self.repeat):
            start = self.clock()
            for _ in range(self.calls):
                function()
            found.append((self.clock() - start) / self.calls)
        return 1e6 * min(found)


def loop_of(size: int, steps: int, comm: Comm) -> LoopRun:
    """Return the power iteration, ready to run."""
    random = np.random.default_rng(0)
    symmetric = random.random((size, size))
    symmetric += symmetric.T
    job = einmpi.program(POWER, S=(size, size), x=(size,))
    loop = Loop(steps, {"x": "x_next"}, record=("value", "turned"))
    run = LoopRun(replace(job, loop=loop), comm, options_of(job))
    run.prepare({"S": symmetric, "x": np.ones(size)})
    return run


def step_microseconds(size: int, steps: int, watch: Stopwatch, comm: Comm) -> tuple[float, float]:
    """Return the least and the median time of a step."""
    run = loop_of(size, steps, comm)
    ends = []
    run.on_row = lambda number, row: ends.append(watch.clock())
    run.run()
    taken = np.diff(ends)
    return 1e6 * float(taken.min()), 1e6 * float(np.median(taken))


def kernel_microseconds(run: LoopRun, watch: Stopwatch) -> dict[str, float]:
    """Return the time of each kernel of a step on this rank, by the text of the kernel."""
    backend = run.step.backend
    found = {}
    for step in run.schedule.steps:
        kernel = step.only_kernel
        if kernel is not None:
            operands = [np.ones(slot.shape, slot.dtype) for slot in kernel.operands]
            target = np.empty(kernel.target.shape, kernel.target.dtype)

            prepared = backend.prepared_kernel(kernel, operands, target)
            bound = bound_call(prepared, operands, target)
            compute = partial(backend.compute_kernel, kernel, operands, target, bound)
            with np.errstate(all="ignore"):  # as in a step
                found[kernel.assignment()] = watch.least(compute)
    return found


RECURRENT = "h[t,k] = tanh(sum(W[k,l] * where(t > 0, h[t-1,l], 0)) + x[t,k])"
RECURRENT_STEP = "h_next[k] = tanh(sum(W[k,l] * h[l]) + x[k])"


def recurrence_microseconds(size: int, steps: int, watch: Stopwatch, comm: Comm) -> float:
    """Return the least time of a step of a recurrent network, as a recurrence."""
    random = np.random.default_rng(3)
    inputs = {"W": random.normal(size=(size, size)) / size, "x": random.normal(size=(steps, size))}
    compiled = einmpi.compile(einmpi.program(RECURRENT, **inputs))
    once = Stopwatch(watch.repeat, 1, watch.clock is time.process_time)
    return once.least(lambda: compiled(inputs)) / steps


def same_in_loop_microseconds(size: int, steps: int, watch: Stopwatch, comm: Comm) -> float:
    """Return the least time of the same step in a loop, which keeps no other values of h.

    As above, it is the mean of all steps of a run: the least of single steps is that of a moment in
    which nobody else has used the processors.
    """
    random = np.random.default_rng(3)
    inputs = {"W": random.normal(size=(size, size)) / size, "x": random.normal(size=size)}
    inputs["h"] = np.zeros(size)
    job = einmpi.program(RECURRENT_STEP, **inputs)
    loop = Loop(steps, {"h": "h_next"})
    found = []
    for _ in range(watch.repeat):
        run = LoopRun(replace(job, loop=loop), comm, options_of(job))
        run.prepare(inputs)
        ends: list[float] = []
        run.on_row = lambda number, row, ends=ends: ends.append(watch.clock())
        run.run()
        found.append((ends[-1] - ends[0]) / (len(ends) - 1))
    return 1e6 * min(found)


def call_microseconds(watch: Stopwatch, comm: Comm) -> dict[str, float]:
    """Return the time of each way to compute a product of small matrices."""
    left = np.random.default_rng(1).random((10, 10))
    right = np.random.default_rng(2).random((10, 10))
    job = einmpi.program("C[i,k] = sum[j](A[i,j] * B[j,k])", A=(10, 10), B=(10, 10))
    compiled = einmpi.compile(job)
    distributed = compiled(A=left, B=right)["C"]
    traced = einmpi.jit(lambda A, B: A @ B)
    found = {
        "compiled call, 10×10 product": watch.least(lambda: compiled(A=left, B=right)),
        "  one factor is a DistArray": watch.least(lambda: compiled(A=left, B=distributed)),
        "  as a traced function": watch.least(lambda: traced(left, right)),
        "einmpi.run, the same job": watch.least(lambda: einmpi.run(job, A=left, B=right)),
    }
    if comm.size > 1:
        found["  ranks compare a digest"] = watch.least(comm.prepare_compare("known call"))
    subscripts = "ij,jk->ik"
    found["einmpi.einsum, the same"] = watch.least(lambda: einmpi.einsum(subscripts, left, right))
    found["numpy.einsum, the same"] = watch.least(lambda: np.einsum(subscripts, left, right))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=100, help="of the power iteration")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--calls", type=int, default=500, help="of a repeat")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    comm = comm_of()
    watch = Stopwatch(options.repeat, options.calls, options.cpu_time)
    step, median = step_microseconds(options.size, options.steps, watch, comm)
    kernels = kernel_microseconds(loop_of(options.size, 1, comm), watch)
    rows = [("step of a power iteration", step)]
    rows.append(("  the median of all steps", median))
    rows += [(f"  {text}", microseconds) for text, microseconds in kernels.items()]
    rows.append(("  the step without its kernels", step - sum(kernels.values())))
    steps = min(options.steps, 1000)
    recurrence = recurrence_microseconds(options.size, steps, watch, comm)
    rows.append(("step of a recurrent network, as a recurrence", recurrence))
    in_loop = same_in_loop_microseconds(options.size, steps, watch, comm)
    rows.append(("  the same in a loop", in_loop))
    rows += call_microseconds(watch, comm).items()
    if comm.rank == 0:
        clock = "processor time" if options.cpu_time else "time"
        print(f"n = {options.size}, {comm.size} ranks, least {clock} in microseconds")
        for text, microseconds in rows:
            print(f"{microseconds:9.1f}  {text}")
    if options.json and comm.rank == 0:
        found = [{"what": text.strip(), "microseconds": taken} for text, taken in rows]
        write_results(options.json, found)


if __name__ == "__main__":
    main()
