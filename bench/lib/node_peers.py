"""The processes that bench/paper/node.py compares: each waits for orders and answers with seconds.

They are started by bench/paper/node.py, one of them or a group of ranks of mpirun for each peer,
and stay asleep while others compute.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench import ROOT

NAMES = ("A", "B", "C", "D", "E")
SKEWS = {"uniform": 1, "skewed": 10}  # of the two chains
LONGEST_SLEEP = 0.001  # seconds between two looks for an order


def bind(cores: Sequence[int]) -> None:
    """Bind all threads of this process to some cores."""
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), cores)


def shapes(size: int, skew: int) -> dict[str, tuple[int, int]]:
    thin = size // skew
    wide = size * skew
    return {
        "A": (size, thin),
        "B": (thin, size),
        "C": (size, thin),
        "D": (thin, wide),
        "E": (wide, size),
    }


def values(name: str, rows: Any, columns: Any) -> Any:
    """Return the elements of a matrix at some rows and columns: the same ones for all peers."""
    import numpy as np

    seed = 1 + NAMES.index(name)
    rows = np.asarray(rows, float)[:, None]
    columns = np.asarray(columns, float)[None, :]
    found = np.sin((0.37 * seed + rows) * 1.7) * np.cos((columns - seed) * 0.9)
    found += np.sin(rows * 0.31) * np.cos(columns * 1.3 + seed)
    return found


# ---- peers in one process ------------------------------------------------------------------------


def whole_matrices(size: int, skew: int) -> dict[str, Any]:
    return {name: values(name, range(m), range(n)) for name, (m, n) in shapes(size, skew).items()}


def timed_chain(matrices: dict[str, Any]) -> Callable[[], tuple[float, float]]:
    """Return a function that computes the chain and returns the seconds and the sum."""

    def compute() -> tuple[float, float]:
        start = time.perf_counter()
        a, b, c, d, e = (matrices[name] for name in NAMES)
        result = a @ b + c @ (d @ e)
        return time.perf_counter() - start, float(result.sum())

    return compute


def numpy_chain(size: int, skew: int, dtype: str = "float64") -> Callable[[], tuple[float, float]]:
    matrices = {name: m.astype(dtype) for name, m in whole_matrices(size, skew).items()}
    return timed_chain(matrices)


def torch_chain(size: int, skew: int, dtype: str = "float64") -> Callable[[], tuple[float, float]]:
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    matrices = {
        name: torch.from_numpy(m.astype(dtype)) for name, m in whole_matrices(size, skew).items()
    }
    return timed_chain(matrices)


def jax_program(size: int, skew: int, dtype: str) -> tuple[Any, list[Any]]:
    """Return the chain on one device a core and its matrices, all of them in 2-D blocks."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_enable_x64", True)
    devices = jax.devices("cpu")
    mesh = Mesh(np.array(devices).reshape(grid(len(devices))), ("x", "y"))
    blocks = NamedSharding(mesh, PartitionSpec("x", "y"))
    matrices = whole_matrices(size, skew)
    in_blocks = [jax.device_put(matrices[name].astype(dtype), blocks) for name in NAMES]
    return jax.jit(lambda a, b, c, d, e: a @ b + c @ (d @ e), out_shardings=blocks), in_blocks


def jax_chain(size: int, skew: int, dtype: str = "float64") -> Callable[[], tuple[float, float]]:
    """Return the chain by JAX."""
    chain, matrices = jax_program(size, skew, dtype)

    def compute() -> tuple[float, float]:
        start = time.perf_counter()
        result = chain(*matrices).block_until_ready()
        return time.perf_counter() - start, float(result.sum())

    return compute


def attention_inputs(sequence: int) -> list[Any]:
    import numpy as np

    random = np.random.default_rng(0)
    return [random.standard_normal((8, sequence, 64), np.float32) for _ in range(3)]


def torch_attention(sequence: int, fused: bool) -> Callable[[], tuple[float, float]]:
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    q, k, v = (torch.from_numpy(array) for array in attention_inputs(sequence))

    def compute() -> tuple[float, float]:
        start = time.perf_counter()
        if fused:
            result = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0)
        else:
            result = torch.softmax(q @ k.transpose(1, 2), -1) @ v
        return time.perf_counter() - start, float(result.sum())

    return compute


def einmpi_attention(sequence: int, fused: bool) -> Callable[[], tuple[float, float]]:
    """Return attention by einmpi; with all scores as a result, it cannot be fused."""
    import einmpi

    program = """
    S[h,q,k] = sum(Q[h,q,d] * K[h,k,d])
    P[h,q,k] = softmax[k](S[h,q,k])
    O[h,q,d] = sum(P[h,q,k] * V[h,k,d])
    """
    arrays = dict(zip("QKV", attention_inputs(sequence), strict=True))
    outputs = ["O"] if fused else ["O", "S"]
    step = einmpi.compile(einmpi.program(program, outputs=outputs, **arrays))

    def compute() -> tuple[float, float]:
        start = time.perf_counter()
        result = step(arrays)["O"]
        return time.perf_counter() - start, float(result.local.sum())

    return compute


# ---- peers of several ranks ----------------------------------------------------------------------


def grid(ranks: int) -> tuple[int, int]:
    """Return rows and columns of the grid of ranks that is most like a square."""
    rows = max(r for r in range(1, int(ranks**0.5) + 1) if ranks % r == 0)
    return rows, ranks // rows


def timed_on_ranks(work: Callable[[], Any]) -> Callable[[], tuple[float, float]]:
    """Return a function that does work on all ranks; it returns the seconds and the sum.

    The work returns the rank's own elements of the result. Only its messages are counted, where
    bench/lib/pmpi/count.c is loaded.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def compute() -> tuple[float, float]:
        world.Barrier()
        start = time.perf_counter()
        MPI.Pcontrol(1)
        result = work()
        MPI.Pcontrol(0)
        seconds = world.allreduce(time.perf_counter() - start, MPI.MAX)
        return seconds, float(world.allreduce(float(result.sum())))

    return compute


def mpi4py_chain(size: int, skew: int, dtype: str = "float64") -> Callable[[], tuple[float, float]]:
    """Return the chain as people write it: 2-D blocks, an all-gather along rows and columns."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    grid_rows, grid_columns = grid(world.size)
    my_row, my_column = divmod(world.rank, grid_columns)
    row = world.Split(my_row, my_column)
    column = world.Split(grid_rows + my_column, my_row)
    blocks = {}
    for name, (m, n) in shapes(size, skew).items():
        height = m // grid_rows
        width = n // grid_columns
        rows = range(my_row * height, (my_row + 1) * height)
        columns = range(my_column * width, (my_column + 1) * width)
        blocks[name] = values(name, rows, columns).astype(dtype)

    def multiply(left: Any, right: Any) -> Any:
        panels = np.empty((grid_columns, *left.shape), dtype)
        row.Allgather(left, panels)
        whole_columns = np.empty((grid_rows, *right.shape), dtype)
        column.Allgather(right, whole_columns)
        return np.concatenate(list(panels), axis=1) @ whole_columns.reshape(-1, right.shape[1])

    def chain() -> Any:
        a, b, c, d, e = (blocks[name] for name in NAMES)
        return multiply(a, b) + multiply(c, multiply(d, e))

    return timed_on_ranks(chain)


def layout_of_cuts(layout: Any) -> Any:
    """Return a layout without splits in which each rank has as much: each split becomes a cut.

    Unlike a split, a cut has to lie in a window of its dimension. If one does not, each axis cuts
    the first dimension that is long enough. None is for a tensor that is too small for this.
    """
    from einmpi.arrays.moving import first_long_enough
    from einmpi.schedule.layout import Layout

    mesh, bound = layout.mesh, layout.bound
    every_dimension = range(len(bound))
    as_split = {axis: [dimension] for axis, dimension in layout.splits}
    anywhere = dict.fromkeys(sorted(as_split), every_dimension)
    for candidates_of in (as_split, anywhere):
        cuts = list(layout.cuts)
        for axis, candidates in candidates_of.items():
            cuts[axis] = first_long_enough(mesh, bound, cuts, axis, candidates)
        if all(cuts[axis] is not None for axis in as_split):
            return Layout(mesh, bound, tuple(cuts))
    return None


def blocks_of_plan(step: Any, values: Callable[..., Any] = values) -> Mapping[str, Any]:
    """Return the inputs of a compiled program as DistArrays, in the blocks that its plan reads.

    `values` gives the elements of a tensor at some indices of each dimension. The few that no
    DistArray can have in such blocks are left out: the program generates them itself.
    """
    import numpy as np

    from einmpi.arrays.dist_array import DistArray
    from einmpi.runtime.host_memory import aligned_empty
    from einmpi.schedule.regions import indices
    from einmpi.schedule.steps import Load

    _, schedule, _ = step.prepare({})
    inputs = {}
    for load in schedule.steps:
        if not isinstance(load, Load):
            continue
        layout = layout_of_cuts(load.layout)
        if layout is None:
            continue
        region = layout.block(step.comm.rank)
        assert region is not None, "every rank has a block"
        places = [np.asarray(indices(runs)) for runs in region]
        block = aligned_empty(tuple(map(len, places)), load.slot.dtype)
        block[...] = values(load.tensor, *places)
        inputs[load.tensor] = DistArray(block, layout, step.comm)
    return inputs


def einmpi_chain(
    size: int,
    skew: int,
    dtype: str = "float64",
    strategy: str = "eindecomp",
    shared: str = "auto",
) -> Callable[[], tuple[float, float]]:
    """Return the chain by einmpi."""
    from dataclasses import replace

    import einmpi
    from einmpi.api import options_of
    from einmpi.comm.mpi import comm_of
    from einmpi.compiled.program import Compiled

    path = ROOT / "jobs" / "chain.toml"
    job = replace(einmpi.load(path, dtype=dtype, s=size, skew=skew), shared=shared)
    step = Compiled(job, comm_of(), options_of(job, strategy=strategy))
    inputs = blocks_of_plan(step)

    return timed_on_ranks(lambda: step(inputs)["Z"].local)


def small_calls(repeat: int) -> dict[str, float]:
    """Return the microseconds of calls with 10×10 matrices: medians of the slowest rank."""
    import statistics

    import numpy as np
    from mpi4py import MPI

    import einmpi

    world = MPI.COMM_WORLD
    x = np.arange(100.0).reshape(10, 10)
    y = x + 1
    job = einmpi.program("Z[i,k] = sum(X[i,j] * Y[j,k])", X=(10, 10), Y=(10, 10))
    step = einmpi.compile(job)
    calls: dict[str, Callable[[], object]] = {
        "numpy.einsum": lambda: np.einsum("ij,jk->ik", x, y),
        "compiled call": lambda: step({"X": x, "Y": y}),
        "einmpi.einsum": lambda: einmpi.einsum("ij,jk->ik", x, y),
        "einmpi.run": lambda: einmpi.run(job, {"X": x, "Y": y}),
    }
    found = {}
    for name, call in calls.items():
        times = []
        for _ in range(repeat + 20):
            world.Barrier()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        own = statistics.median(times[20:])
        found[name] = 1e6 * world.allreduce(own, MPI.MAX)
    return found


# ---- orders --------------------------------------------------------------------------------------

CHAINS = {
    "numpy": numpy_chain,
    "torch": torch_chain,
    "jax": jax_chain,
    "mpi4py": mpi4py_chain,
    "einmpi": einmpi_chain,
}


def prepare(order: dict[str, Any]) -> Callable[[], tuple[float, float]]:
    """Return the computation that an order names."""
    if order["case"] == "chain":
        dtype = order.get("dtype", "float64")
        return CHAINS[order["peer"]](order["size"], order["skew"], dtype)
    if order["peer"].startswith("einmpi"):
        return einmpi_attention(order["sequence"], order["peer"] == "einmpi")
    return torch_attention(order["sequence"], order["peer"] == "torch, fused")


def next_order(world: Any) -> dict[str, Any]:
    """Return the next order, which the first rank reads. The others sleep until it is there."""
    line = ""
    if world is None or world.rank == 0:
        line = sys.stdin.readline()
    if world is not None:
        request = world.Ibarrier()
        while not request.Test():
            time.sleep(LONGEST_SLEEP)
        line = world.bcast(line)
    found: dict[str, Any] = json.loads(line or '{"do": "end"}')
    return found


def one_line(error: Exception) -> str:
    """Return what went wrong as one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def serve(prepare: Callable[[dict[str, Any]], Callable[[], Any]]) -> None:
    """Wait for orders and answer them, until there are no more."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cores", required=True, help="of all ranks: their numbers")
    parser.add_argument("--threads", type=int, required=True, help="of a rank")
    parser.add_argument("--ranks", action="store_true", help="it is one of the ranks of mpirun")
    options = parser.parse_args()
    local_rank = 0
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_RANK"):
        if options.ranks and name in os.environ:
            local_rank = int(os.environ[name])
            break
    cores = [int(number) for number in options.cores.split(",")]
    first = local_rank * options.threads % len(cores)
    bind(cores[first : first + options.threads])
    world = None
    if options.ranks:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
    known: dict[str, Callable[[], tuple[float, float]]] = {}
    while True:
        order = next_order(world)
        answer: Any = None
        if order["do"] == "end":
            return
        if order["do"] == "prepare":
            if order["forget"]:
                known.clear()
            try:
                known[order["name"]] = prepare(order)
            except Exception as error:  # of a package that belongs to a peer, for instance
                answer = one_line(error)
            if world is not None:  # what one rank cannot do, none of them does
                answer = next(filter(None, world.allgather(answer)), None)
        elif order["do"] == "small calls":
            answer = small_calls(order["repeat"])
        else:
            answer = known[order["name"]]()
        if world is None or world.rank == 0:
            print(f"answer {json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    serve(prepare)
