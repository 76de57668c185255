"""scikit-learn on arrays of several libraries: which results are those that it has with numpy.

    python -m bench scikit_learn [--libraries einmpi dask …] [--ranks 1 2 3 8] [--rows 61]
                                 [--cases PCA Ridge …] [--memory] [--json FILE]

A row is a case of scikit_learn_cases.py, and a column a library, or einmpi on a number of ranks.
"yes" is a result equal to numpy's. With --memory there is also the most memory that any rank has
allocated while a case runs for the second time, divided by the size of the points: with many
--rows, it says what is whole on every rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from bench.lib.packages import has_package
from bench.lib.results import write_results

TIMEOUT = 900  # seconds, for all cases of a library
# scipy asks for it, and scikit-learn for scipy, before either is imported.
ENVIRONMENT = {"SCIPY_ARRAY_API": "1", "OPENBLAS_NUM_THREADS": "1"}


class Library(NamedTuple):
    """How arrays get into a library and out of it."""

    asarray: Callable[[Any], Any]
    to_numpy: Callable[[Any], Any] = np.asarray
    while_running: Callable[[], AbstractContextManager[None]] = nullcontext
    rank: int = 0
    greatest: Callable[[int], int] = int  # of the numbers that ranks have


def by_strict() -> Library:
    import array_api_strict

    return Library(array_api_strict.asarray)


def by_dask() -> Library:
    import dask.array

    return Library(lambda array: dask.array.from_array(array, chunks=-(-len(array) // 2)))


def by_cubed() -> Library:
    import cubed.array_api

    return Library(lambda array: cubed.array_api.asarray(array, chunks=-(-len(array) // 2)))


def by_einmpi() -> Library:
    from mpi4py import MPI

    import einmpi

    def to_numpy(result: Any) -> Any:
        return result.gather() if isinstance(result, einmpi.DistArray) else result

    def gather_vectors() -> AbstractContextManager[None]:
        return einmpi.DistArray.gather_up_to("1 GiB")

    world = MPI.COMM_WORLD
    greatest = lambda number: world.allreduce(number, MPI.MAX)  # noqa: E731
    asarray = einmpi.DistArray.from_global
    return Library(asarray, to_numpy, gather_vectors, world.rank, greatest)


# Each library with the package that it needs.
LIBRARIES: dict[str, tuple[str, Callable[[], Library]]] = {
    "numpy": ("numpy", lambda: Library(np.asarray)),
    "array_api_strict": ("array_api_strict", by_strict),
    "dask": ("dask", by_dask),
    "cubed": ("cubed", by_cubed),
    "einmpi": ("mpi4py", by_einmpi),
}


# ---- one library, in a process of its own or on ranks --------------------------------------------


def run_cases(library: Library, given: argparse.Namespace) -> None:
    """Run cases; the first rank prints a line of JSON for each."""
    from bench.kernels.scikit_learn_cases import CASES, difference, make_data, results_of

    warnings.simplefilter("ignore")
    right_data = make_data(np.asarray, given.rows)
    data = make_data(library.asarray, given.rows)
    for name in given.cases or CASES:
        row = {"case": name, "problem": ""}
        wanted = results_of(name, right_data)
        try:
            with library.while_running():
                found = results_of(name, data)
                row["problem"] = difference(map(library.to_numpy, found), wanted)
                if given.memory:
                    del found
                    tracemalloc.start()
                    results_of(name, data)
                    peak = library.greatest(tracemalloc.get_traced_memory()[1])
                    tracemalloc.stop()
                    row["memory"] = peak / right_data.points.nbytes
        except Exception as error:
            row["problem"] = " ".join(f"{type(error).__name__}: {error}".split())
        if library.rank == 0:
            print(json.dumps(row), flush=True)


# ---- all of them ---------------------------------------------------------------------------------


def ask(name: str, ranks: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of a library, or of those cases that it finishes in time."""
    command = [sys.executable, "-m", "bench", "scikit_learn", "--own", name]
    command += ["--rows", str(given.rows), *(["--memory"] if given.memory else [])]
    command += ["--cases", *given.cases] if given.cases else []
    if ranks:
        command = [*given.mpirun.split(), "-n", str(ranks), *command]
    environment = {**os.environ, **ENVIRONMENT}
    try:
        output = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, timeout=TIMEOUT, check=False
        ).stdout
    except subprocess.TimeoutExpired as error:
        print(f"{name} was not done after {TIMEOUT} s", file=sys.stderr)
        output = error.stdout or b""
    lines = [line for line in output.decode().splitlines() if line.startswith("{")]
    return [{"library": name, "ranks": ranks, **json.loads(line)} for line in lines]


def columns_of(given: argparse.Namespace) -> list[tuple[str, int]]:
    """Return the libraries that are installed, einmpi once for each number of ranks."""
    columns = []
    for name in given.libraries:
        if has_package(name, LIBRARIES[name][0]):
            columns += [(name, ranks) for ranks in (given.ranks if name == "einmpi" else [0])]
    return columns


def show(name: str, ranks: int) -> str:
    return f"{name} {ranks}" if ranks else name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--libraries", nargs="+", default=list(LIBRARIES), choices=LIBRARIES)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 3, 8], help="of einmpi")
    parser.add_argument("--rows", type=int, default=61, help="of the points")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="by default all")
    parser.add_argument("--memory", action="store_true", help="measure it too")
    parser.add_argument("--mpirun", default="mpirun")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    parser.add_argument("--own", choices=LIBRARIES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.own:
        run_cases(LIBRARIES[given.own][1](), given)
        return
    rows = []
    columns = columns_of(given)
    for name, ranks in columns:
        rows += ask(name, ranks, given)
    cases = list(dict.fromkeys(row["case"] for row in rows))
    print("|".join(["", " case ", *(f" {show(*column)} " for column in columns), ""]))
    print("|" + "---|" * (len(columns) + 1))
    found = {(row["library"], row["ranks"], row["case"]): row for row in rows}
    for case in cases:
        shown = []
        for name, ranks in columns:
            row = found.get((name, ranks, case))
            shown.append("—" if row is None else "no" if row["problem"] else "yes")
            if row and "memory" in row:
                shown[-1] += f", {row['memory']:.2f}"
        print(f"| {case} | {' | '.join(shown)} |")
    right = [
        sum(row["library"] == name and row["ranks"] == ranks and not row["problem"] for row in rows)
        for name, ranks in columns
    ]
    print(f"| of {len(cases)} | {' | '.join(map(str, right))} |\n")
    for row in rows:
        if row["problem"]:
            print(f"{show(row['library'], row['ranks'])}, {row['case']}: {row['problem'][:150]}")
    if given.json:
        write_results(given.json, rows)


if __name__ == "__main__":
    main()
