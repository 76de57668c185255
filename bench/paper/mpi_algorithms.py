"""What MPI's own algorithms send, beside the payload that has to move: a table of ratios.

    python -m bench mpi_algorithms --ranks 2 3 4 8 [--kib 1 1000] [--json FILE]

Each call of MPI is made by ranks that talk by TCP alone, and what they write to their sockets is
counted by bench/lib/pmpi/wire.c. The payload is that of count.c beside it, by which programs are
compared. A ratio of 1 says that the algorithm moves no more than the payload; headers of messages
are part of it. A pair of numbers is for small and for large pieces. It needs MPICH with UCX, as
`pip install mpich` brings it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib.own_programs import prefer_own_programs
from bench.lib.pmpi_counts import SOURCES, compile_c
from bench.lib.results import write_results
from bench.paper.node import environment_of_peers

# Sockets are the only way between ranks, also on one machine.
BY_TCP = ("UCX_TLS=tcp,self", "MPIR_CVAR_NOLOCAL=1")


def calls(elements: int) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return the calls that are made, and the elements that all ranks together must receive."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    p = world.size
    piece = np.zeros(elements)
    other_piece = np.zeros(elements)
    whole = np.zeros(elements * p)
    other_whole = np.zeros(elements * p)
    pieces = [elements] * p
    to_all = p * (p - 1) * elements
    to_others = (p - 1) * elements
    return {
        "Bcast": (lambda: world.Bcast(piece), to_others),
        "Gather": (lambda: world.Gather(piece, whole), to_others),
        "Scatter": (lambda: world.Scatter(whole, piece), to_others),
        "Allgather": (lambda: world.Allgather(piece, whole), to_all),
        "Iallgatherv": (lambda: world.Iallgatherv(piece, [whole, pieces]).Wait(), to_all),
        "Alltoall": (lambda: world.Alltoall(whole, other_whole), to_all),
        "Reduce": (lambda: world.Reduce(piece, other_piece), to_others),
        "Allreduce": (lambda: world.Allreduce(piece, other_piece), 2 * to_others),
        "Reduce_scatter": (lambda: world.Reduce_scatter(whole, piece, pieces), to_all),
        "Ireduce_scatter": (lambda: world.Ireduce_scatter(whole, piece, pieces).Wait(), to_all),
    }


def count_on_ranks(kibibytes: Sequence[int]) -> None:
    """Print, as one of the ranks, the bytes of every call and size as JSON."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    layer = ctypes.CDLL(None)
    layer.wire_bytes.restype = ctypes.c_longlong
    rows = []
    for size in kibibytes:
        for name, (call, elements) in calls(size * 128).items():
            call()  # connections are made, and their messages are not counted
            world.Barrier()
            before = layer.wire_bytes()
            call()
            world.Barrier()
            sent = world.allreduce(layer.wire_bytes() - before)
            rows.append({"call": name, "kib": size, "payload": 8 * elements, "sent": sent})
    if world.rank == 0:
        print(json.dumps(rows))


def measure(mpirun: str, ranks: int, kibibytes: Sequence[int], layer: Path) -> list[Any]:
    """Return a row for each call and size on so many ranks."""
    command = [*mpirun.split(), "-n", str(ranks), "env", f"LD_PRELOAD={layer}", *BY_TCP]
    command += [sys.executable, str(Path(__file__).resolve()), "--on-ranks", "--kib"]
    command += [str(size) for size in kibibytes]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=environment_of_peers()
    )
    rows = json.loads(done.stdout.splitlines()[-1])
    return [{"part": "algorithms", "ranks": ranks, **row} for row in rows]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each call, and a column for each number of ranks."""
    all_ranks = sorted({row["ranks"] for row in rows})
    print(f"{'sent / payload':16}" + "".join(f"{f'{ranks} ranks':>16}" for ranks in all_ranks))
    for name in dict.fromkeys(row["call"] for row in rows):
        line = f"{name:16}"
        for ranks in all_ranks:
            ratios = []
            for row in rows:
                if row["call"] == name and row["ranks"] == ranks:
                    ratios.append(f"{row['sent'] / row['payload']:.2f}")
            line += f"{', '.join(ratios):>16}"
        print(line)


def main(argv: Sequence[str] | None = None) -> int:
    prefer_own_programs()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3, 4, 8])
    parser.add_argument("--kib", nargs="+", type=int, default=[1, 1000], help="of a rank's piece")
    parser.add_argument("--mpirun", default="mpirun")
    parser.add_argument("--json", metavar="FILE", help="write all rows there")
    parser.add_argument("--on-ranks", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.on_ranks:
        count_on_ranks(options.kib)
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        layer = Path(folder) / "libwire.so"
        compile_c("cc", SOURCES / "wire.c", layer, "-shared", "-fPIC", "-ldl")
        for ranks in options.ranks:
            rows += measure(options.mpirun, ranks, options.kib, layer)
    show(rows)
    if options.json:
        write_results(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
