"""The processes that experiment1.py compares, beyond those of node.py: the chain by einmpi with
each strategy, and by Heat, PyTorch's DTensor and Dask.

They are started by experiment1.py and wait for orders as those of bench/lib/node_peers.py do.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from bench.lib.node_peers import CHAINS as CHAINS_OF_A_NODE
from bench.lib.node_peers import (
    NAMES,
    einmpi_chain,
    serve,
    shapes,
    timed_on_ranks,
    values,
    whole_matrices,
)
from bench.paper.contractions import CONTRACTIONS, einmpi_contraction, opt_einsum_contraction

Timed = Callable[[], tuple[float, float]]


def rows_of_rank(size: int, skew: int, dtype: str, rank: int, ranks: int) -> dict[str, Any]:
    """Return a rank's share of the rows of every matrix."""
    found = {}
    for name, (rows, columns) in shapes(size, skew).items():
        own = range(rows * rank // ranks, rows * (rank + 1) // ranks)
        found[name] = values(name, own, range(columns)).astype(dtype)
    return found


def heat_chain(size: int, skew: int, dtype: str) -> Timed:
    """Return the chain by Heat, with all matrices cut by rows."""
    import heat
    import torch
    from mpi4py import MPI

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    world = MPI.COMM_WORLD
    blocks = rows_of_rank(size, skew, dtype, world.rank, world.size)
    a, b, c, d, e = (heat.array(blocks[name], is_split=0) for name in NAMES)
    return timed_on_ranks(lambda: (a @ b + c @ (d @ e)).larray)


def dtensor_work(size: int, skew: int, dtype: str) -> Callable[[], Any]:
    """Return the chain by DTensor over gloo, with all matrices cut by rows."""
    import torch
    from mpi4py import MPI
    from torch.distributed._functional_collectives import wait_tensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    world = MPI.COMM_WORLD
    if not torch.distributed.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        meeting = world.bcast(os.path.join(tempfile.mkdtemp(), "gloo"))
        torch.distributed.init_process_group(
            "gloo", f"file://{meeting}", rank=world.rank, world_size=world.size
        )
    mesh = init_device_mesh("cpu", (world.size,))
    blocks = rows_of_rank(size, skew, dtype, world.rank, world.size)
    by_rows = [Shard(0)]
    a, b, c, d, e = (
        DTensor.from_local(torch.from_numpy(blocks[name]), mesh, by_rows) for name in NAMES
    )

    def chain() -> Any:
        product = a @ b + c @ (d @ e)
        # The block may still be on its way: its sum would wait, but outside of what is timed.
        return wait_tensor(product.redistribute(mesh, by_rows).to_local())

    return chain


def dtensor_chain(size: int, skew: int, dtype: str) -> Timed:
    return timed_on_ranks(dtensor_work(size, skew, dtype))


@cache
def dask_client(workers: int, processes: bool) -> Any:
    """Return the client of a new cluster, which is the default of all calls from then on."""
    from distributed import Client, LocalCluster

    cluster = LocalCluster(
        n_workers=workers, threads_per_worker=1, processes=processes, dashboard_address=None
    )
    return Client(cluster)


def dask_work(size: int, skew: int, dtype: str, workers: int) -> Callable[[], Any]:
    """Return the chain by Dask on so many workers.

    A and C are cut by rows, B and E by columns, and D is whole: so no product has to be summed.
    """
    import dask.array
    from distributed import wait

    chunks = {"A": (workers, 1), "B": (1, workers), "C": (workers, 1)}
    chunks |= {"D": (1, 1), "E": (1, workers)}
    matrices = {}
    for name, matrix in whole_matrices(size, skew).items():
        parts = zip(matrix.shape, chunks[name], strict=True)
        shape = tuple(-(-extent // number) for extent, number in parts)
        matrices[name] = dask.array.from_array(matrix.astype(dtype), shape).persist()
    wait(list(matrices.values()))

    def chain() -> Any:
        a, b, c, d, e = (matrices[name] for name in NAMES)
        result = (a @ b + c @ (d @ e)).persist()
        wait(result)
        return result

    return chain


def dask_chain(size: int, skew: int, dtype: str) -> Timed:
    """Return the chain by Dask on a worker for each core."""
    workers = len(os.sched_getaffinity(0))
    client = dask_client(workers, True)
    work = dask_work(size, skew, dtype, workers)

    def compute() -> tuple[float, float]:
        start = time.perf_counter()
        result = work()
        return time.perf_counter() - start, float(client.compute(result.sum()).result())

    return compute


CHAINS: dict[str, Callable[[int, int, str], Timed]] = {
    **CHAINS_OF_A_NODE,
    "heat": heat_chain,
    "dtensor": dtensor_chain,
    "dask": dask_chain,
}


def prepare(order: dict[str, Any]) -> Timed:
    """Return the computation that an order names; "einmpi sqrt" is one of einmpi's strategies."""
    if order["case"] == "contraction":
        contraction = CONTRACTIONS[order["contraction"]].scaled(order["scale"])
        if order["peer"] == "opt_einsum":
            return opt_einsum_contraction(contraction)
        return einmpi_contraction(contraction, order["shared"])
    case = (order["size"], order["skew"], order["dtype"])
    program, _, strategy = order["peer"].partition(" ")
    if program == "einmpi":
        return einmpi_chain(*case, strategy, order["shared"])
    return CHAINS[program](*case)


if __name__ == "__main__":
    serve(prepare)
