"""One node at full speed: the matrix chain, small calls and attention, with all cores of a machine.

python -m bench node --json node.json
python -m bench node --sizes 2000 --cores 2 --repeat 7

The chain is computed by einmpi on ranks × threads that fill the cores, by hand-written mpi4py on
the same ranks, and in one process with all cores by numpy, JAX and torch, where they are installed.
Each is a process, or a group of ranks, of its own. Ranks are bound to cores and their threads are
set. Inputs are in memory: in the blocks that its plan reads for einmpi, in 2-D blocks for mpi4py
and JAX. All take turns, and medians are shown. Results are compared.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any

from bench import ROOT
from bench.lib.own_programs import prefer_own_programs
from bench.lib.packages import has_package
from bench.lib.results import processor_name, write_results
from einmpi.process.environment import blas_name, loaded_blas

PEERS = ROOT / "bench" / "lib" / "node_peers.py"
PAUSE = 0.12  # seconds, after which the threads of other processes sleep
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def environment_of_peers() -> dict[str, str]:
    """Return the variables of peers: this copy of einmpi comes before what PYTHONPATH has."""
    folders = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(folder for folder in folders if folder)
    return {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}


class Peer:
    """A process, or a group of ranks, that computes when it is told to."""

    def __init__(
        self,
        kind: str,
        cores: Sequence[int],
        mpirun: Sequence[str] = (),
        ranks: int = 0,
        blas: str = "auto",
        program: Sequence[str] = (sys.executable, str(PEERS)),
        settings: Sequence[str] = (),
    ) -> None:
        self.kind = kind  # what it computes with: einmpi, numpy, …
        self.ranks = ranks  # 0: a process without MPI
        self.threads = max(1, len(cores) // max(1, ranks))
        self.blas = blas
        self.process = self._start(cores, mpirun, program, settings)

    def _start(
        self,
        cores: Sequence[int],
        mpirun: Sequence[str],
        program: Sequence[str],
        settings: Sequence[str],
    ) -> subprocess.Popen[str]:
        """Start a program; `settings` are variables of its ranks, each as NAME=VALUE."""
        environment = environment_of_peers()
        environment["EINMPI_BLAS"] = self.blas
        environment |= dict.fromkeys(THREAD_VARIABLES, str(self.threads))
        if self.kind == "jax":
            devices = f"--xla_force_host_platform_device_count={self.threads}"
            environment["XLA_FLAGS"] = devices
        numbers = ",".join(str(core) for core in cores)
        command = [*program, "--cores", numbers, "--threads", str(self.threads)]
        if self.ranks:
            start = [*mpirun, "-n", str(self.ranks), "env", *settings]
            command = [*start, *command, "--ranks"]
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **order: Any) -> Any:
        """Give an order, and return the answer; raise ConnectionError if there is none."""
        self.tell(**order)
        return self.answer()

    def tell(self, **order: Any) -> None:
        """Give an order whose answer is read later."""
        assert self.process.stdin is not None
        try:
            print(json.dumps(order), file=self.process.stdin, flush=True)
        except OSError as error:
            raise ConnectionError(f"{self.kind} has ended") from error

    def answer(self) -> Any:
        """Return the answer to the first order that has none yet."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise ConnectionError(f"{self.kind} has ended")

    def end(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            self.process.terminate()
            self.process.wait()


def take_turns(
    peers: list[tuple[Peer, str]], order: dict[str, Any], repeat: int, tolerance: float = 1e-3
) -> list[dict[str, Any]]:
    """Return a row for each peer that can compute an order: its times, and their median.

    A peer comes with the name of what it computes with.
    """
    for number, (peer, kind) in enumerate(peers):
        is_first = all(peer is not earlier for earlier, _ in peers[:number])
        with suppress(ConnectionError):  # there will be no answer either
            peer.tell(do="prepare", name=kind, peer=kind, forget=is_first, **order)
    ready = {}
    for number, (peer, kind) in enumerate(peers):
        try:
            problem = peer.answer()
        except ConnectionError as error:
            problem = str(error)
        if problem:
            print(f"  {kind} is left out: {problem}", file=sys.stderr)
        else:
            ready[number] = (peer, kind)
    seconds: dict[int, list[float]] = {number: [] for number in ready}
    checks: dict[int, float] = {}
    for turn in range(repeat + 2):
        for number, (peer, kind) in list(ready.items()):
            time.sleep(PAUSE)
            try:
                taken, check = peer.ask(do="compute", name=kind)
            except ConnectionError as error:
                print(f"  {kind} is left out: {error}", file=sys.stderr)
                del ready[number]
                continue
            checks[number] = check
            if turn > 1:  # the first ones warm up
                seconds[number].append(taken)
    rows = []
    first = next(iter(ready), 0)
    for number, (peer, kind) in ready.items():
        if not math.isclose(checks[number], checks[first], rel_tol=1e-3, abs_tol=tolerance):
            print(f"  {kind} differs: {checks[number]} and {checks[first]}", file=sys.stderr)
        row = {"peer": kind, "ranks": peer.ranks or 1, "threads": peer.threads, **order}
        if kind == "einmpi":
            row["blas"] = peer.blas
        row |= {"seconds": statistics.median(seconds[number]), "all": seconds[number]}
        rows.append(row)
    return rows


def numbers_of_ranks(cores: int) -> list[int]:
    """Return how many ranks fill the cores with one, two, four, and all threads a rank."""
    found = []
    for threads in (1, 2, 4, cores):
        if cores % threads == 0 and cores // threads not in found:
            found.append(cores // threads)
    return found


def print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    print(title)
    base = rows[0]["seconds"]
    for row in rows:
        place = f"{row['ranks']} × {row['threads']}"
        ratio = row["seconds"] / base
        name = row["peer"]
        if row.get("blas", "auto") != "auto":
            name += f", {row['blas']}"
        print(f"  {name:16} {place:>8} {row['seconds']:9.4f} s {ratio:6.2f}", flush=True)


def describe_machine(cores: int) -> dict[str, Any]:
    return {
        "processor": processor_name(),
        "cores": cores,
        "numpy's BLAS": blas_name(loaded_blas()),
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    prefer_own_programs()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", nargs="*", type=int, default=[4000, 1600])
    parser.add_argument("--skews", nargs="*", type=int, default=[1, 10])
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--groups", nargs="*", help="of ranks: RANKS or RANKS:BLAS, as in 16:mkl")
    parser.add_argument("--peers", nargs="*", default=["numpy", "torch", "jax", "mpi4py"])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--calls", type=int, default=300, help="of each small call; 0 for none")
    parser.add_argument("--sequence", type=int, default=2048, help="of attention; 0 for none")
    parser.add_argument("--mpirun", default="mpirun", help="the command that starts ranks")
    parser.add_argument("--json", help="write all times to a file")
    options = parser.parse_args()
    mpirun = options.mpirun.split()
    described = describe_machine(options.cores)
    print(", ".join(f"{name}: {value}" for name, value in described.items()), flush=True)
    alone = [name for name in ("numpy", "torch", "jax") if name in options.peers]
    alone = [name for name in alone if has_package(name, name)]
    cores = sorted(os.sched_getaffinity(0))[: options.cores]
    peers: list[tuple[Peer, str]] = []
    for name in alone:
        peers.append((Peer(name, cores), name))
    with_mpi4py = set()  # numbers of ranks
    for text in options.groups or map(str, numbers_of_ranks(len(cores))):
        ranks, _, blas = text.partition(":")
        group = Peer("einmpi", cores, mpirun, int(ranks), blas or "auto")
        peers.append((group, "einmpi"))
        if "mpi4py" in options.peers and ranks not in with_mpi4py:
            peers.append((group, "mpi4py"))
            with_mpi4py.add(ranks)
    results: list[dict[str, Any]] = []
    try:
        for size in options.sizes:
            for skew in options.skews:
                order = {"case": "chain", "size": size, "skew": skew}
                rows = take_turns(peers, order, options.repeat)
                kind = "uniform" if skew == 1 else f"skewed by {skew}"
                print_rows(f"chain, {kind}, s = {size}, float64", rows)
                results += rows
    finally:
        for peer, _ in peers:
            peer.end()
    if options.sequence:
        rows = attention(options, cores)
        print_rows(f"attention, 8 heads of 64, S = {options.sequence}, float32", rows)
        results += rows
    if options.calls:
        results += small_calls(options.calls, cores, mpirun)
    if options.json:
        write_results(options.json, results)


def attention(options: argparse.Namespace, cores: Sequence[int]) -> list[dict[str, Any]]:
    """Compare attention on all cores in one process."""
    kinds = ["einmpi", "einmpi, unfused"]
    if "torch" in options.peers and find_spec("torch") is not None:
        kinds += ["torch", "torch, fused"]
    peers = [(Peer(kind, cores), kind) for kind in kinds]
    try:
        order = {"case": "attention", "sequence": options.sequence}
        return take_turns(peers, order, options.repeat)
    finally:
        for peer, _ in peers:
            peer.end()


def small_calls(repeat: int, cores: Sequence[int], mpirun: list[str]) -> list[dict[str, Any]]:
    """Print and return the microseconds of small calls, on one rank and on two."""
    found = []
    print("calls with 10×10 matrices, µs")
    for ranks in range(1, min(2, len(cores)) + 1):
        peer = Peer("einmpi", cores[:ranks], mpirun, ranks)
        try:
            calls = peer.ask(do="small calls", repeat=repeat)
        except ConnectionError as error:
            print(f"  {error}", file=sys.stderr)
            continue
        finally:
            peer.end()
        for name, microseconds in calls.items():
            row = {"case": "calls", "peer": name, "ranks": ranks, "matrices": "10×10"}
            found.append(row | {"seconds": microseconds / 1e6})
            print(f"  {name:14} {ranks} × 1 {microseconds:9.1f}", flush=True)
    return found


if __name__ == "__main__":
    main()
