"""The words of a chain by peers that send without MPI: JAX, DTensor and Dask.

    python -m bench peer_words jax --ranks 4 --size 480
    python -m bench peer_words dask --ranks 4 --size 480
    mpirun -n 4 python -m bench peer_words dtensor --size 480

It prints the words of each chain, over all ranks, as JSON. Collective calls count as in
bench/lib/pmpi/count.c, by the least that any algorithm of them has to move. Those of JAX are in the
compiled program, which is not run. Those of DTensor are seen when it calls torch. A worker of Dask
notes how many bytes it gets from others; that is not the same in every run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from math import prod
from typing import Any

from bench.lib.node_peers import SKEWS

# How the words of each peer are counted, for tables.
WAYS = {
    "jax": "collectives of the compiled program",
    "dtensor": "collectives that torch is asked for",
    "dask": "what workers note",
}


def payload(call: str, elements: int, members: int) -> int:
    """Return the elements that all members of a group receive; each has `elements` afterwards."""
    others = members - 1
    if call in ("all-gather", "all-to-all"):
        return others * elements
    if call == "all-reduce":
        return 2 * others * elements
    if call == "reduce-scatter":
        return others * elements * members
    raise ValueError(f"{call} is not counted")


# ---- JAX -----------------------------------------------------------------------------------------

COLLECTIVE = re.compile(
    r"= (?P<shapes>.+?) (?P<call>all-gather|all-reduce|reduce-scatter|all-to-all|"
    r"collective-permute|collective-broadcast|ragged-all-to-all)(?P<start>-start)?\((?P<rest>.*)"
)
SHAPE = re.compile(r"\w+\[([\d,]*)\]")
GROUPS_LISTED = re.compile(r"replica_groups=\{(\{[\d,{} ]*\})\}")
GROUPS_COUNTED = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=")
GROUPS_OF_MESH = re.compile(r"replica_groups=\w*mesh\[([^\]]*)\] \{([^}]*)\}")
PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{} ]*\})\}")


def words_of_hlo(text: str) -> int:
    """Return the elements that a compiled program of XLA moves between its devices."""
    if " while(" in text:
        raise ValueError("a loop may repeat collectives, which are counted once")
    words = 0
    for line in text.splitlines():
        found = COLLECTIVE.search(line)
        if found is None:
            continue
        if found["start"]:
            raise ValueError(f"{found['call']}-start is not counted")
        elements = 0
        for extents in SHAPE.findall(found["shapes"]):
            elements += prod(int(extent) for extent in extents.split(",") if extent)
        if found["call"] == "collective-permute":
            pairs = re.findall(r"\{(\d+),(\d+)\}", first_group(PAIRS, line))
            words += elements * sum(source != target for source, target in pairs)
            continue
        groups, members = groups_and_members(line)
        words += groups * payload(found["call"], elements, members)
    return words


def groups_and_members(line: str) -> tuple[int, int]:
    """Return how many groups of devices a collective has, and how many devices are in each."""
    if counted := GROUPS_COUNTED.search(line):
        return int(counted[1]), int(counted[2])
    if mesh := GROUPS_OF_MESH.search(line):
        lengths = dict(axis.split("=") for axis in mesh[1].split(","))
        devices = prod(int(length) for length in lengths.values())
        members = prod(int(lengths[axis]) for axis in mesh[2].split(","))
        return devices // members, members
    groups = re.findall(r"\{([\d, ]+)\}", first_group(GROUPS_LISTED, line))
    return len(groups), len(groups[0].split(","))


def first_group(pattern: re.Pattern[str], line: str) -> str:
    found = pattern.search(line)
    if found is None:
        raise ValueError(f"a collective without its devices: {line.strip()}")
    return found[1]


def jax_words(size: int, skew: int, ranks: int) -> int:
    """Return the words of the program that XLA makes for so many devices."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={ranks}"
    from bench.lib.node_peers import jax_program

    chain, matrices = jax_program(size, skew, "float64")
    return words_of_hlo(chain.lower(*matrices).compile().as_text())


# ---- DTensor -------------------------------------------------------------------------------------

CALLS_OF_TORCH = {
    "all_gather_into_tensor": "all-gather",
    "all_reduce": "all-reduce",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "shard_dim_alltoall": "all-to-all",
}

NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")


def dtensor_words(size: int, skew: int, ranks: int) -> int:
    """Return the words of the chain, as one of the ranks of mpirun: all ranks do the same."""
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    from bench.paper.chain_peers import dtensor_work

    work = dtensor_work(size, skew, "float64")
    words = 0

    class Counting(TorchDispatchMode):
        """Sees every operation of torch on the blocks of a rank."""

        def __torch_dispatch__(
            self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
        ) -> Any:
            nonlocal words
            if any(issubclass(each, DTensor) for each in types):
                return NotImplemented  # DTensor makes calls with its blocks of this one
            result = function(*arguments, **(keywords or {}))
            room, _, name = function._schema.name.partition("::")
            is_collective = "c10d" in room or room == "_dtensor"
            if is_collective and name not in NO_COLLECTIVES:
                words += payload(CALLS_OF_TORCH.get(name, name), result.numel(), ranks)
            return result

    with Counting():
        work()
    return words


# ---- Dask ----------------------------------------------------------------------------------------


def dask_words(size: int, skew: int, ranks: int) -> int:
    """Return what so many workers, here threads of this process, get from each other."""
    from bench.paper.chain_peers import dask_client, dask_work

    client = dask_client(ranks, False)
    work = dask_work(size, skew, "float64", ranks)

    def received() -> int:
        return sum(client.run(bytes_received).values())

    before = received()
    work()
    return (received() - before) // 8


def bytes_received(dask_worker: Any) -> int:
    return sum(transfer["total"] for transfer in dask_worker.transfer_incoming_log)


# ---- all -----------------------------------------------------------------------------------------

COUNTERS: dict[str, Callable[[int, int, int], int]] = {
    "jax": jax_words,
    "dtensor": dtensor_words,
    "dask": dask_words,
}


def ask_for_words(
    name: str, size: int, ranks: int, mpirun: list[str], environment: dict[str, str]
) -> dict[str, int]:
    """Return the words of each chain by a peer, which is started; raise ConnectionError."""
    command = [sys.executable, os.path.abspath(__file__), name, "--size", str(size)]
    command += ["--ranks", str(ranks)]
    if name == "dtensor":
        command = [*mpirun, "-n", str(ranks), *command]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Error" in line]
        raise ConnectionError(lines[-1].strip() if lines else f"status {done.returncode}")
    words: dict[str, int] = json.loads(done.stdout.strip().splitlines()[-1])
    return words


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", choices=sorted(COUNTERS))
    parser.add_argument("--size", type=int, default=480)
    parser.add_argument("--ranks", type=int, default=1, help="or devices, or workers")
    options = parser.parse_args()
    ranks = options.ranks
    is_first = True
    if options.peer == "dtensor":
        from mpi4py import MPI

        ranks = MPI.COMM_WORLD.size
        is_first = MPI.COMM_WORLD.rank == 0
    count = COUNTERS[options.peer]
    words = {kind: count(options.size, skew, ranks) for kind, skew in SKEWS.items()}
    if is_first:
        print(json.dumps(words), flush=True)


if __name__ == "__main__":
    main()
