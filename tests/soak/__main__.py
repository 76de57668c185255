"""`python -m tests.soak`: random programs; `… gradients`: with a loss and its gradients;
`… arrays`: scripts over DistArrays; `… traced`: such a script as one function; `… sparse`: programs
over sparse tensors; `… fuzz`: damaged files; `… faults`: kills, full disks."""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import sys
import time
from collections.abc import Iterator

from .drive import (
    BACKEND_VARIABLE,
    CHUNK_CASES,
    SHOWN_FAILURES,
    Chunk,
    Drive,
    Failure,
    find_mpirun,
    show_failure,
)

OTHERS = {"fuzz": ".fuzz", "faults": ".faults"}
MPI_RANKS = {
    "programs": (2, 3, 4, 5, 8, 1, 7, 6),
    "gradients": (2, 3, 4, 1),
    "arrays": (2, 3, 5, 4, 1),
    "traced": (2, 3, 5, 4, 1),
    "sparse": (2, 3, 4, 7, 1),
}
MPI_CHUNK_CASES = 200
# Of this many chunks one is run under mpirun, unless the command line says how many cases.
CHUNKS_BETWEEN_MPIRUNS = 5
LEAST_CHUNK_CASES = 100


def main(argv: list[str]) -> int:
    if argv and argv[0] in OTHERS:
        return int(importlib.import_module(OTHERS[argv[0]], __package__).main(argv[1:]) or 0)
    arguments = parse(argv)
    kind = arguments.kind
    mpirun = None if arguments.no_mpirun else arguments.mpirun or find_mpirun()
    if arguments.backend is not None:
        os.environ[BACKEND_VARIABLE] = arguments.backend
    if arguments.case is not None:
        ranks = arguments.ranks[0] if arguments.ranks else None
        failure = Failure(arguments.case, [], ranks)
        print(show_failure(failure, arguments.seed, arguments.shrink_seconds, mpirun, kind))
        return 0
    deadline = None
    if arguments.minutes is not None:
        deadline = time.monotonic() + 60 * arguments.minutes
    drive = Drive(
        arguments.seed,
        arguments.ranks[0] if len(arguments.ranks) == 1 else None,
        arguments.jobs,
        mpirun,
        deadline,
        arguments.stop_after,
        kind,
    )
    drive.run(chunks_of(arguments, mpirun))
    for failure in drive.tally.failures[:SHOWN_FAILURES]:
        shown = show_failure(failure, arguments.seed, arguments.shrink_seconds, mpirun, kind)
        print(shown, flush=True)
    for failure in drive.tally.failures[SHOWN_FAILURES:]:
        where = f" --ranks {failure.mpi_ranks}" if failure.mpi_ranks else ""
        first_check = ": ".join(failure.checks[0]).splitlines()[0]
        print(f"--seed {arguments.seed} --case {failure.number}{where}  {first_check}")
    print(drive.tally.summary(drive.seconds()))
    return 1 if drive.tally.failures else 0


def chunks_of(arguments: argparse.Namespace, mpirun: str | None) -> Iterator[Chunk]:
    """Yield the chunks of a soak: on threads, and under mpirun in between."""
    limit = arguments.cases
    number = arguments.first
    mpi_left = 0 if mpirun is None else arguments.mpirun_cases
    mpi_ranks = itertools.cycle(arguments.ranks or MPI_RANKS[arguments.kind])
    for place in itertools.count():
        left = None if limit is None else arguments.first + limit - number
        if left is not None and left <= 0:
            return
        due = place % CHUNKS_BETWEEN_MPIRUNS == 0
        if mpirun is not None and due and (mpi_left is None or mpi_left > 0):
            limits = [each for each in (mpi_left, left) if each is not None]
            count = min([MPI_CHUNK_CASES, *limits])
            yield Chunk(number, count, next(mpi_ranks))
            if mpi_left is not None:
                mpi_left -= count
        else:
            count = CHUNK_CASES
            if left is not None:
                # The last chunks are smaller, so that all processes end at about the same time.
                share = max(LEAST_CHUNK_CASES, left // (2 * arguments.jobs))
                count = min(CHUNK_CASES, share, left)
            yield Chunk(number, count)
        number += count


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description="Run random programs, programs with gradients, or scripts over DistArrays, on "
        "thread ranks and under mpirun, and compare them with numpy. Without --minutes and --cases "
        "it runs for an hour.",
        epilog="python -m tests.soak fuzz and python -m tests.soak faults have options of their "
        "own.",
    )
    parser.add_argument(
        "kind",
        nargs="?",
        choices=list(MPI_RANKS),
        default="programs",
        help="what to run (programs)",
    )
    parser.add_argument("--minutes", type=float, help="how long to run")
    parser.add_argument("--cases", type=int, help="how many cases to run")
    parser.add_argument("--seed", type=int, default=1, help="of all choices (1)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case (0)")
    parser.add_argument("--case", type=int, help="repeat one case and minimise it if it fails")
    parser.add_argument(
        "--ranks",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[],
        metavar="N,N,…",
        help="ranks of the mpiruns; a single number is used on threads, too",
    )
    parser.add_argument("--mpirun", metavar="FILE", help="the mpirun to use")
    parser.add_argument("--no-mpirun", action="store_true", help="use thread ranks only")
    parser.add_argument("--mpirun-cases", type=int, metavar="N", help="cases under mpirun")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time (all cores)"
    )
    parser.add_argument(
        "--shrink-seconds", type=float, default=30.0, help="to minimise each failure (30)"
    )
    parser.add_argument("--backend", help="cupy runs the programs on a GPU (numpy)")
    parser.add_argument("--stop-after", type=int, metavar="N", help="stop after N failures")
    arguments = parser.parse_args(argv)
    if arguments.minutes is None and arguments.cases is None:
        arguments.minutes = 60.0
    return arguments


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
