"""What MPI programs send each other, counted between the calls of MPI by bench/lib/pmpi/count.c."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from einmpi.comm.control_messages import CONTROL_TAG

SOURCES = Path(__file__).with_name("pmpi")
# Of einmpi's calls, those by which ranks agree on something. Payload has other ones.
CONTROL_CALLS = ("MPI_Iallreduce", "MPI_Ibcast", "MPI_Iallgather")


class BuildError(Exception):
    """There is no compiler, or it found an error."""


@dataclass(frozen=True)
class Counted:
    """What each rank receives in one section of a program, in bytes."""

    payload: tuple[int, ...]
    control: tuple[int, ...]
    calls: dict[str, int]  # of all ranks


def compile_c(compiler: str, source: Path, target: Path, *flags: str) -> Path:
    """Compile a file of C with the compiler of an MPI library."""
    if shutil.which(compiler) is None:
        raise BuildError(f"there is no {compiler}")
    command = [compiler, "-O2", "-o", str(target), str(source), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line or "cannot" in line]
        raise BuildError(f"{compiler}: {' '.join(lines[:1]) or 'failed'}")
    return target


def build_layer(compiler: str, folder: Path) -> Path:
    """Return the counting layer for the MPI library of a compiler, built once in a folder."""
    target = folder / f"libcount-{Path(compiler).name}.so"
    if target.exists():
        return target
    return compile_c(compiler, SOURCES / "count.c", target, "-shared", "-fPIC")


def settings(layer: Path, folder: Path, has_control: bool) -> list[str]:
    """Return the variables that a rank needs to be counted.

    Only einmpi has messages that are not payload; other programs use its tag for others.
    """
    found = [f"LD_PRELOAD={layer}", f"PMPI_COUNTS={folder}"]
    if has_control:
        found.append(f"PMPI_CONTROL_TAG={CONTROL_TAG}")
    return found


def read_counts(folder: Path, control_calls: Collection[str] = ()) -> list[Counted]:
    """Return what was counted in each section, in their order."""
    files = sorted(folder.glob("*.jsonl"), key=lambda file: int(file.stem))
    lines = [file.read_text(encoding="utf-8").splitlines() for file in files]
    sections = []
    for parts in zip(*lines, strict=True):
        sections.append(_add_ranks([json.loads(part) for part in parts], control_calls))
    return sections


def _add_ranks(ranks: Sequence[dict[str, Any]], control_calls: Collection[str]) -> Counted:
    payload = [sum(column) for column in zip(*(rank["sent"] for rank in ranks), strict=True)]
    control = [
        sum(column) for column in zip(*(rank["sent_control"] for rank in ranks), strict=True)
    ]
    calls: dict[str, int] = {}
    for number, rank in enumerate(ranks):
        for name, (times, received) in rank["calls"].items():
            calls[name] = calls.get(name, 0) + times
            kind = control if name in control_calls else payload
            kind[number] += received
    return Counted(tuple(payload), tuple(control), dict(sorted(calls.items())))


def mpicc_of(mpirun: str) -> str:
    """Return the compiler that belongs to the launcher: the one beside it."""
    path = shutil.which(mpirun) or mpirun
    return os.path.join(os.path.dirname(path), os.path.basename(path).replace("mpirun", "mpicc"))
