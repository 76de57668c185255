"""The words part of bench/paper/experiment1.py: what the ranks of MPI programs send each other."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import einmpi
from bench import ROOT
from bench.lib.node_peers import SKEWS
from bench.lib.pmpi_counts import (
    CONTROL_CALLS,
    Counted,
    build_layer,
    mpicc_of,
    read_counts,
    settings,
)
from bench.paper.node import Peer, environment_of_peers
from bench.paper.peer_words import WAYS, ask_for_words
from einmpi.schedule.lower import lower
from einmpi.schedule.steps import Transfer

JOB = ROOT / "jobs" / "chain.toml"
PROGRAM = (sys.executable, str(Path(__file__).with_name("chain_peers.py")))
BY_PMPI = "the layer under MPI"
NO_SHARING = {"shared": "off"}  # memory that ranks share moves no messages


@dataclass(frozen=True)
class Setup:
    """What all parts need: options, the cores, built programs, a folder for files."""

    options: argparse.Namespace
    cores: list[int]
    folder: Path
    peers: list[str]  # those that are here

    @property
    def mpirun(self) -> list[str]:
        return str(self.options.mpirun).split()

    @property
    def scalapack_mpirun(self) -> list[str]:
        return str(self.options.scalapack_mpirun).split()

    @property
    def scalapack(self) -> Path:
        return self.folder / "scalapack_chain"


def grids(ranks: int) -> list[tuple[int, int]]:
    """Return all grids of so many ranks."""
    return [(rows, ranks // rows) for rows in range(1, ranks + 1) if ranks % rows == 0]


def count(
    setup: Setup, orders: Sequence[dict[str, Any]], ranks: int, block: str = "", grid: str = ""
) -> list[Counted]:
    """Return what the ranks of one program send each other for each of some orders.

    With a block and a grid, ROWS×COLUMNS, the program is ScaLAPACK.
    """
    launcher = setup.mpirun
    program: Sequence[str] = PROGRAM
    if block:
        launcher = setup.scalapack_mpirun
        program = [str(setup.scalapack), block, *grid.split("×")]
    layer = build_layer(mpicc_of(launcher[0]), setup.folder)
    with tempfile.TemporaryDirectory(dir=setup.folder) as name:
        folder = Path(name)
        has_control = all(order["peer"].startswith("einmpi") for order in orders)
        wanted = settings(layer, folder, has_control)
        peer = Peer("counted", setup.cores, launcher, ranks, program=program, settings=wanted)
        try:
            for order in orders:
                if problem := peer.ask(do="prepare", name="counted", forget=True, **order):
                    raise ConnectionError(f"{order['peer']}: {problem}")
                peer.ask(do="compute", name="counted")
        finally:
            peer.end()
        return read_counts(folder, CONTROL_CALLS if has_control else ())


def chain_order(peer: str, size: int, skew: int, dtype: str = "float64") -> dict[str, Any]:
    order = {"case": "chain", "peer": peer, "size": size, "skew": skew, "dtype": dtype}
    return order | NO_SHARING


def count_chains(setup: Setup) -> list[dict[str, Any]]:
    """Return a row of words for each chain, number of ranks and MPI program."""
    options = setup.options
    size = options.count_size
    programs = [[f"einmpi {strategy}" for strategy in options.strategies]]
    programs += [[name] for name in ("mpi4py", "heat") if name in setup.peers]
    rows = []
    for ranks in options.count_ranks:
        rows_here = []
        for names in programs:
            rows_here += count_programs(setup, names, ranks, size)
        if "scalapack" in setup.peers:
            rows_here += count_scalapack(setup, ranks, size)
        for name in WAYS:
            if name in setup.peers:
                rows_here += count_without_mpi(setup, name, ranks, size)
        show_words(ranks, size, rows_here)
        rows += rows_here
    return rows


def count_programs(
    setup: Setup, names: Sequence[str], ranks: int, size: int
) -> list[dict[str, Any]]:
    """Return a row for each chain by each of some programs that the same ranks run."""
    cases = [(kind, name) for kind in SKEWS for name in names]
    orders = [chain_order(name, size, SKEWS[kind]) for kind, name in cases]
    try:
        found = count(setup, orders, ranks)
    except ConnectionError as error:
        if names[0].startswith("einmpi"):
            raise
        print(f"{names[0]} is left out on {ranks} ranks: {error}", flush=True)
        return []
    rows = []
    for (kind, name), counted in zip(cases, found, strict=True):
        rows.append(words_row(kind, name, ranks, counted, size))
    return rows


def count_without_mpi(setup: Setup, name: str, ranks: int, size: int) -> list[dict[str, Any]]:
    """Return a row for each chain by a peer that has other ways to send than MPI."""
    try:
        words = ask_for_words(name, size, ranks, setup.mpirun, environment_of_peers())
    except ConnectionError as error:
        print(f"{name} is left out on {ranks} ranks: {error}", flush=True)
        return []
    rows = []
    for kind in SKEWS:
        row = empty_row(kind, name, ranks, size)
        rows.append(row | {"words": words[kind], "counted_by": WAYS[name]})
    return rows


def empty_row(kind: str, name: str, ranks: int, size: int) -> dict[str, Any]:
    row = {"part": "words", "kind": kind, "peer": name, "ranks": ranks, "size": size}
    return row | {"dtype": "float64"}


def words_row(kind: str, name: str, ranks: int, counted: Counted, size: int) -> dict[str, Any]:
    row = empty_row(kind, name, ranks, size)
    row |= {"words": sum(counted.payload) // 8, "counted_by": BY_PMPI}
    row |= {"control_bytes": sum(counted.control), "calls": counted.calls}
    program, _, strategy = name.partition(" ")
    if program == "einmpi":
        job = einmpi.load(JOB, s=size, skew=SKEWS[kind])
        row |= predicted_row(einmpi.plan(job, ranks, strategy=strategy), counted)
    return row


def predicted_row(plan: einmpi.Plan, counted: Counted) -> dict[str, Any]:
    """Return the words that a plan predicts, and the bytes in its schedules beside those counted.

    Ranks get whole inputs in blocks of their own, so where extents do not divide evenly another
    rank than in these schedules may receive a little more; the sums are the same.
    """
    scheduled = 0
    for rank in range(plan.ranks):
        steps = lower(plan, rank).steps
        scheduled += sum(step.nbytes for step in steps if isinstance(step, Transfer))
    row = {"predicted": plan.words_predicted, "bound": plan.lower_bound}
    return row | {"bytes_predicted": scheduled, "bytes": sum(counted.payload)}


def count_scalapack(setup: Setup, ranks: int, size: int) -> list[dict[str, Any]]:
    """Return what ScaLAPACK sends with the grid and the block that send least."""
    orders = [chain_order("scalapack", size, skew) for skew in SKEWS.values()]
    best: dict[str, dict[str, Any]] = {}
    for rows, columns in grids(ranks):
        for block in setup.options.blocks:
            found = count(setup, orders, ranks, str(block), f"{rows}×{columns}")
            for kind, counted in zip(SKEWS, found, strict=True):
                row = words_row(kind, "scalapack", ranks, counted, size)
                row |= {"grid": [rows, columns], "block": block}
                if kind not in best or row["words"] < best[kind]["words"]:
                    best[kind] = row
    return list(best.values())


def show_words(ranks: int, size: int, rows: list[dict[str, Any]]) -> None:
    print(f"\nwords of the chain, s = {size}, float64, {ranks} ranks")
    for kind in SKEWS:
        of_kind = [row for row in rows if row["kind"] == kind]
        for row in sorted(of_kind, key=lambda row: int(row["words"])):
            note = row["counted_by"]
            if "predicted" in row:
                is_equal = row["predicted"] == row["words"]
                note += f", {'as' if is_equal else 'NOT as'} predicted"
            if row.get("control_bytes"):
                note += f"; {row['control_bytes']:,} B of control"
            if "grid" in row:
                note += f"; grid {row['grid'][0]}×{row['grid'][1]}, blocks up to {row['block']}"
            print(f"  {kind:8} {row['peer']:24} {row['words']:>14,}  {note}".rstrip(), flush=True)
