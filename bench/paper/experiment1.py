"""The paper's experiment 1: the matrix chain (A·B) + (C·(D·E)), in seconds and in words.

    python -m bench experiment1 --json experiment1.json --plot experiment1.png
    python -m bench experiment1 --parts words --count-ranks 2 4 8 16

There are three parts:

time           The chain with two ranks, by default, under every strategy of einmpi, and by numpy,
               hand-written mpi4py, ScaLAPACK, Heat, DTensor, Dask and JAX. All have as many threads
               in all as there are ranks, and take turns. Inputs are in memory: in the blocks that
               its plan reads for einmpi, cut as the name says for others.
words          What the ranks of MPI programs send each other for a chain, counted by a layer under
               MPI (bench/lib/pmpi). For einmpi that must be what its plan predicts; ranks share no
               memory here. ScaLAPACK has the best of all grids and of the sizes of --blocks.
               What JAX, DTensor and Dask send without MPI is counted by bench/paper/peer_words.py.
contractions   The ten kernels of Deinsum and four terms of coupled cluster: predicted words,
               counted words, and time on ranks beside opt_einsum in one process.

A peer that is not installed is named and left out. ScaLAPACK is a small program in C, which is
built with the MPI library that Debian's ScaLAPACK has, and started by that library's mpirun.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import einmpi
from bench.lib.node_peers import SKEWS
from bench.lib.own_programs import prefer_own_programs
from bench.lib.packages import HOW_TO_INSTALL, has_package
from bench.lib.pmpi_counts import BuildError, compile_c, mpicc_of
from bench.lib.results import write_results
from bench.paper.chain_words import (
    BY_PMPI,
    NO_SHARING,
    PROGRAM,
    Setup,
    count,
    count_chains,
    grids,
    predicted_row,
)
from bench.paper.contractions import CONTRACTIONS
from bench.paper.node import Peer, describe_machine, take_turns

STRATEGIES = ("eindecomp", "eindecomp-paper", "sqrt", "replicate")
PARTS = ("time", "words", "contractions")
# Peers and the packages that they need; the first ones are processes without MPI.
ALONE = {"numpy": "numpy", "jax": "jax", "dask": "distributed"}
ON_RANKS = {"mpi4py": "mpi4py", "heat": "heat", "dtensor": "torch"}
NOWHERE = {  # peers that are known but that no registry has
    "cosma": "neither PyPI nor Debian has it",
    "ctf": "neither PyPI nor Debian has it",
}
PEERS = (*ALONE, *ON_RANKS, "scalapack", *NOWHERE)


# ---- peers that are here -------------------------------------------------------------------------


def find_peers(names: Sequence[str], options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the peers that can run here; say of each other one why it is left out."""
    found = []
    for name in names:
        problem = NOWHERE.get(name, "")
        package = {**ALONE, **ON_RANKS}.get(name)
        if package is not None:
            problem = problem_with(package)
        if name == "scalapack":
            problem = build_scalapack(options, folder)
        if problem:
            print(f"{name} is left out: {problem}", flush=True)
        else:
            found.append(name)
    return found


def problem_with(package: str) -> str:
    """Return why a package cannot be imported, or nothing."""
    if find_spec(package) is None:
        return f"{package} is not installed; {HOW_TO_INSTALL}"
    command = [sys.executable, "-c", f"import {package}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return f"import {package}: {done.stderr.strip().splitlines()[-1]}"
    return ""


def build_scalapack(options: argparse.Namespace, folder: Path) -> str:
    """Build the chain by ScaLAPACK; return why that is impossible, or nothing."""
    launcher = str(options.scalapack_mpirun).split()[0]
    if shutil.which(launcher) is None:
        debian = "apt-get install libscalapack-mpich-dev mpich"
        return f"there is no {launcher}; Debian has it: {debian}"
    library = str(options.scalapack_library)
    source = Path(__file__).with_name("scalapack_chain.c")
    target = folder / "scalapack_chain"
    try:
        compile_c(mpicc_of(launcher), source, target, f"-l{library}", "-lm")
    except BuildError as error:
        return str(error)
    return ""


# ---- time ----------------------------------------------------------------------------------------


def start_peers(setup: Setup) -> list[tuple[Peer, str]]:
    """Start all peers that are compared in time."""
    options = setup.options
    cores = setup.cores[: options.ranks]
    group = Peer("einmpi", cores, setup.mpirun, options.ranks, program=PROGRAM)
    found = [(group, f"einmpi {strategy}") for strategy in options.strategies]
    for name in setup.peers:
        if name in ALONE:
            found.append((Peer(name, cores, program=PROGRAM), name))
        elif name == "mpi4py":
            found.append((group, name))
        elif name in ON_RANKS:
            peer = Peer(name, cores, setup.mpirun, options.ranks, program=PROGRAM)
            found.append((peer, name))
    if "scalapack" in setup.peers:
        bound = [*setup.scalapack_mpirun, "-bind-to", "core"]
        if options.ranks > len(cores):
            bound = setup.scalapack_mpirun
        for rows, columns in grids(options.ranks):
            numbers = [str(options.blocks[-1]), str(rows), str(columns)]
            program = [str(setup.scalapack), *numbers]
            name = f"scalapack {rows}×{columns}"
            found.append((Peer(name, cores, bound, options.ranks, program=program), name))
    return found


def measure_time(setup: Setup) -> list[dict[str, Any]]:
    """Return a row for each case and peer: medians, and ratios to einmpi's first strategy."""
    options = setup.options
    peers = start_peers(setup)
    rows = []
    try:
        for size in options.sizes:
            for dtype in options.dtypes:
                for kind, skew in SKEWS.items():
                    order = {"case": "chain", "size": size, "skew": skew, "dtype": dtype}
                    order["shared"] = "auto"
                    # Sums in single precision differ by their rounding.
                    tolerance = 1e-3 if dtype == "float64" else 1e-3 * size
                    found = take_turns(peers, order, options.repeat, tolerance)
                    rows += add_ratios(found, {"part": "time", "kind": kind})
                    show_times(f"chain, {kind}, s = {size}, {dtype}", found)
    finally:
        for peer in dict.fromkeys(peer for peer, _ in peers):
            peer.end()
    return rows


def add_ratios(rows: list[dict[str, Any]], more: dict[str, Any]) -> list[dict[str, Any]]:
    """Add to each row its time divided by that of the first one, and other facts."""
    first = rows[0]["seconds"]
    for row in rows:
        row["ratio"] = row["seconds"] / first
        row.update(more)
    return rows


def show_times(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}; medians of {len(rows[0]['all'])}, and their ratio to the first")
    for row in sorted(rows, key=lambda row: float(row["seconds"])):
        place = f"{row['ranks']} × {row['threads']}"
        seconds = f"{row['seconds']:9.4f} s {row['ratio']:6.2f}"
        print(f"  {row['peer']:24} {place:>8} {seconds}", flush=True)


# ---- contractions --------------------------------------------------------------------------------


def measure_contractions(setup: Setup) -> list[dict[str, Any]]:
    """Return rows of words for each contraction and number of ranks, and a row of times."""
    words = count_contractions(setup)
    return words + time_contractions(setup, words)


def count_contractions(setup: Setup) -> list[dict[str, Any]]:
    """Return a row for each contraction and number of ranks: predicted and counted words."""
    scale = setup.options.scale
    cases = [{"contraction": name, "scale": scale} for name in CONTRACTIONS]
    rows = []
    for ranks in setup.options.contraction_ranks:
        orders = []
        for case in cases:
            orders.append(case | {"case": "contraction", "peer": "einmpi"} | NO_SHARING)
        for case, counted in zip(cases, count(setup, orders, ranks), strict=True):
            plan = einmpi.plan(CONTRACTIONS[case["contraction"]].scaled(scale).job(), ranks)
            row = {"part": "contraction words", **case, "ranks": ranks}
            row |= predicted_row(plan, counted)
            row |= {"words": sum(counted.payload) // 8, "counted_by": BY_PMPI}
            rows.append(row | {"control_bytes": sum(counted.control), "calls": counted.calls})
    return rows


def time_contractions(setup: Setup, words: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each contraction: its time on ranks, and that of opt_einsum if it is here.

    Words are printed beside it.
    """
    options = setup.options
    cores = setup.cores[: options.ranks]
    peers = [(Peer("einmpi", cores, setup.mpirun, options.ranks, program=PROGRAM), "einmpi")]
    if has_package("opt_einsum", "opt_einsum"):
        peers.append((Peer("opt_einsum", cores, program=PROGRAM), "opt_einsum"))
    rows = []
    head = f"{'contraction':16}{'ranks':>6}{'predicted':>12}{'counted':>12}"
    print(f"\n{head}{'seconds':>11}{'opt_einsum':>11}{'ratio':>7}")
    try:
        for name in CONTRACTIONS:
            case = {"contraction": name, "scale": options.scale}
            order = {"case": "contraction", "shared": "auto", **case}
            own, *others = take_turns(peers, order, options.repeat)
            row = {"part": "contractions", **case, "ranks": options.ranks}
            row |= {"threads": own["threads"], "seconds": own["seconds"], "all": own["all"]}
            for other in others:
                row |= {"opt_einsum": other["seconds"], "opt_einsum_threads": other["threads"]}
                row |= {"opt_einsum_all": other["all"]}
                row["ratio"] = own["seconds"] / other["seconds"]
            rows.append(row)
            show_contraction(row, [each for each in words if each["contraction"] == name])
    finally:
        for peer, _ in peers:
            peer.end()
    return rows


def show_contraction(row: dict[str, Any], words: list[dict[str, Any]]) -> None:
    """Print a line for each number of ranks; the first one also has the times."""
    times = f"{row['seconds']:>11.4f}"
    if "ratio" in row:
        times += f"{row['opt_einsum']:>11.4f}{row['ratio']:>7.2f}"
    for number, counted in enumerate(words):
        name = row["contraction"] if number == 0 else ""
        numbers = f"{counted['ranks']:>6}{counted['predicted']:>12,}{counted['words']:>12,}"
        print(f"{name:16}{numbers}{times if number == 0 else ''}", flush=True)


# ---- all -----------------------------------------------------------------------------------------


def plot(path: Path, rows: list[dict[str, Any]]) -> None:
    """Draw the times of all peers, one picture for each case of the chain."""
    if find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed")
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["part"] == "time":
            title = f"{row['kind']}, s = {row['size']}, {row['dtype']}"
            cases.setdefault(title, []).append(row)
    if not cases:
        print("no plot: it shows the part time")
        return
    figure, axes = pyplot.subplots(1, len(cases), figsize=(5 * len(cases), 5), squeeze=False)
    for axis, (title, found) in zip(axes[0], cases.items(), strict=True):
        found = sorted(found, key=lambda row: -float(row["seconds"]))
        axis.barh([row["peer"] for row in found], [row["seconds"] for row in found])
        axis.set_title(title)
        axis.set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--sizes", nargs="+", type=int, default=[2000], help="s of the chains that are timed")
    add("--dtypes", nargs="+", default=["float64", "float32"])
    add("--ranks", type=int, default=2, help="with a thread each, where time is measured")
    add("--repeat", type=int, default=5)
    add("--strategies", nargs="+", default=list(STRATEGIES))
    add("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    add("--count-size", type=int, default=480, help="s of the chains whose words are counted")
    add("--count-ranks", nargs="+", type=int, default=[2, 4, 8, 16])
    add("--contraction-ranks", nargs="+", type=int, default=[2, 4])
    add("--scale", type=float, default=1.0, help="of the extents of contractions")
    add(
        "--blocks",
        nargs="+",
        type=int,
        default=[60, 250],
        help="of ScaLAPACK at most; the last is timed",
    )
    add("--mpirun", default="mpirun", help="of mpi4py's MPI library")
    add("--scalapack-mpirun", default="mpirun.mpich", help="of ScaLAPACK's MPI library")
    add("--scalapack-library", default="scalapack-mpich")
    add("--json", metavar="FILE", help="write all rows there")
    add("--plot", metavar="FILE", help="draw the times there, with matplotlib")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all parts; return 1 if einmpi sent other words than planned, or more than a peer."""
    prefer_own_programs()
    options = make_parser().parse_args(argv)
    machine = describe_machine(len(os.sched_getaffinity(0)))
    print(", ".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peers = find_peers(options.peers, options, folder)
        setup = Setup(options, sorted(os.sched_getaffinity(0)), folder, peers)
        if "time" in options.parts:
            rows += measure_time(setup)
        try:
            if "words" in options.parts:
                rows += count_chains(setup)
            if "contractions" in options.parts:
                rows += measure_contractions(setup)
        except BuildError as error:
            sys.exit(f"words cannot be counted: {error}")
    if options.json:
        write_results(options.json, rows)
    if options.plot:
        plot(Path(options.plot), rows)
    problems = [*words_below_ours(rows), *not_as_predicted(rows)]
    for line in problems:
        print(line, flush=True)
    return int(bool(problems))


def not_as_predicted(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for each row of einmpi whose plan said another number of words."""
    found = []
    for row in rows:
        if "predicted" not in row:
            continue
        if row["predicted"] != row["words"] or row["bytes_predicted"] != row["bytes"]:
            what = row.get("contraction") or f"{row['peer']}, {row['kind']}"
            numbers = f"{row['words']:,} words, but {row['predicted']:,} predicted"
            numbers += f"; {row['bytes']:,} bytes, but {row['bytes_predicted']:,} scheduled"
            found.append(f"{what}, {row['ranks']} ranks: {numbers}")
    return found


def words_below_ours(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for each chain that a peer computes with fewer words than our own planner.

    Dask is not compared: it may leave most of the work to one worker, and then moves less.
    """
    own = {}
    for row in rows:
        if row["part"] == "words" and row["peer"] == "einmpi eindecomp":
            own[row["kind"], row["ranks"]] = row["words"]
    found = []
    for row in rows:
        if row["part"] != "words" or row["peer"] == "dask":
            continue
        if row["words"] < own.get((row["kind"], row["ranks"]), 0):
            found.append(f"{row['peer']} moves fewer words: {row['kind']}, {row['ranks']} ranks")
    return found


if __name__ == "__main__":
    sys.exit(main())
