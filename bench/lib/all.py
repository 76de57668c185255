"""All benchmarks that this machine can run, with their results as files and as a page.

    python -m bench all --out DIR [--quick] [--only NAME …] [--limit 1800]

DIR gets a file NAME.json for each benchmark, NAME.txt with what it printed, and index.html, which
has all rows and their plots and needs no network. What cannot run here is named, with the reason.
--quick takes a few minutes and shows that everything runs; its times mean little. Nothing else
should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench import ROOT
from bench.lib.catalogue import BENCHES, Bench
from bench.lib.needs import reason_to_skip
from bench.lib.own_programs import prefer_own_programs
from bench.lib.results import write_record
from bench.lib.results_page import Outcome, write_page


def command_of(bench: Bench, is_quick: bool) -> list[str]:
    """Return the command that a person would write, run in the folder above bench/."""
    words = shlex.split(bench.quick if is_quick else bench.full)
    start = ["mpirun", "-n", str(bench.ranks)] if bench.ranks else []
    return [*start, "python", "-m", "bench", bench.script, *words]


def run_bench(bench: Bench, folder: Path, is_quick: bool, limit: float) -> Outcome:
    """Run a benchmark, and return its results or why there are none."""
    if reason := reason_to_skip(bench):
        return Outcome(bench, skipped=reason)
    command = command_of(bench, is_quick)
    file = folder / f"{bench.name}.json"
    file.unlink(missing_ok=True)
    words = [sys.executable if word == "python" else word for word in command]
    printed = folder / f"{bench.name}.txt"
    start = time.perf_counter()
    with printed.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*words, "--json", str(file)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()  # mpirun ends its ranks then, which it could not if it were killed
            process.wait()
            return Outcome(bench, failed=f"it was not done after {limit:g} s")
    seconds = time.perf_counter() - start
    if status or not file.exists():
        lines = printed.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing printed")
        return Outcome(bench, failed=f"status {status}: {last}")
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    record = write_record(file, bench.name, shlex.join(command), rows)
    return Outcome(bench, record, seconds, left_out=lines_about_peers(printed))


def lines_about_peers(printed: Path) -> tuple[str, ...]:
    """Return what a benchmark has printed about peers that it could not run, each line once."""
    lines = printed.read_text(encoding="utf-8", errors="replace").splitlines()
    return tuple(dict.fromkeys(line.strip() for line in lines if " is left out" in line))


def run_all(benches: Sequence[Bench], folder: Path, is_quick: bool, limit: float) -> list[Outcome]:
    """Run benchmarks one after another, and print a line for each."""
    found = []
    for bench in benches:
        outcome = run_bench(bench, folder, is_quick, limit)
        found.append(outcome)
        print(f"{bench.name:18} {outcome.summary()}", flush=True)
        write_page(folder / "index.html", found)  # what there is, should a later one be stopped
    return found


def main() -> None:
    prefer_own_programs()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [bench.name for bench in BENCHES]
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="small sizes: a few minutes in all")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--limit", type=float, default=1800, help="seconds of a benchmark")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    chosen = [bench for bench in BENCHES if bench.name in given.only]
    outcomes = run_all(chosen, given.out.resolve(), given.quick, given.limit)
    print(f"{given.out / 'index.html'} is written")
    if any(outcome.failed for outcome in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
