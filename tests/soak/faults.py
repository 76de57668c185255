"""Sweep faults over every step of a run: killed, stopped, no disk, files replaced, a second run.

`python -m tests.soak faults --minutes 30`; afterwards outputs are old or new, all of them alike."""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .faults_bench import ALONE, BY_EINMPI, BY_MPIRUN, SCENARIOS, Bench, Way, bench
from .faults_inject import ACTIONS, OF_CHECKPOINTS, OF_PROCESSES
from .faults_oracle import Result, inject
from .fuzz import MPIRUN


def all_ways(ranks: Sequence[int], scenarios: Sequence[str]) -> list[Way]:
    """Return the ways to run: on one rank, and on several by launcher and rank with the fault."""
    ways = []
    for scenario in scenarios:
        for count in ranks:
            if count == 1:
                ways.append(Way(scenario, ALONE, 1, 0))
                continue
            for launcher in (BY_MPIRUN, BY_EINMPI):
                for rank in (0, count - 1):
                    ways.append(Way(scenario, launcher, count, rank))
    return ways


def possible_actions(bench: Bench, way: Way, actions: Sequence[str]) -> list[str]:
    """Return the faults that can happen to a way of running.

    What happens to files happens to all ranks, so rank 0 alone sees to it.
    """
    possible = []
    for action in actions:
        if action in bench.impossible:
            continue
        if action in OF_CHECKPOINTS and way.scenario == "run":
            continue
        if action not in OF_PROCESSES and way.rank != 0:
            continue
        possible.append(action)
    return possible


def all_faults(
    bench: Bench, ways: Sequence[Way], actions: Sequence[str], seed: int
) -> list[tuple[Way, str, int]]:
    """Return every fault at every step, by its number. First comes one step of each kind."""
    order = random.Random(seed)
    numbered = []
    steps_of: dict[tuple[str, int, int], list[tuple[str, str]]] = {}
    for way in ways:
        # A launcher makes a difference of a step or two.
        key = (way.scenario, way.ranks, way.rank)
        if key not in steps_of:
            steps_of[key] = bench.steps_of(way)
            print(f"{way}: {len(steps_of[key])} steps, {len(set(steps_of[key]))} kinds", flush=True)
        steps = steps_of[key]
        occurrences: collections.Counter[tuple[str, str]] = collections.Counter()
        for number, step in enumerate(steps, 1):
            occurrences[step] += 1
            for action in possible_actions(bench, way, actions):
                place = (occurrences[step], order.random())
                numbered.append((place, (way, action, number)))
    numbered.sort(key=lambda pair: pair[0])
    return [fault for _, fault in numbered]


def print_table(results: Sequence[Result]) -> None:
    """Print how many faults of each kind were tried, have hit, and have gone wrong, by ranks."""
    ranks = sorted({result.way.ranks for result in results})
    print(f"{'':<22}" + "".join(f"{f'{count} ranks':>24}" for count in ranks))
    for action in ACTIONS:
        cells = []
        for count in ranks:
            chosen = [each for each in results if (each.action, each.way.ranks) == (action, count)]
            hits = [each for each in chosen if each.step is not None]
            wrong = sum(bool(each.problem) for each in hits)
            cells.append(f"{len(hits)} of {len(chosen)}, {wrong} wrong")
        print(f"{action:<22}" + "".join(f"{cell:>24}" for cell in cells))
    hits = [each for each in results if each.step is not None]
    phases = collections.Counter(each.phase for each in hits)
    steps = collections.defaultdict(set)
    for each in hits:
        steps[each.phase].add(each.step)
    for phase, count in sorted(phases.items()):
        print(f"{phase}: {count} faults at {len(steps[phase])} kinds of steps")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line of the fault sweep; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak faults", description=__doc__)
    parser.add_argument("--action", choices=list(ACTIONS), action="append", help="only this fault")
    parser.add_argument("--scenario", choices=SCENARIOS, action="append", help="only this one")
    parser.add_argument(
        "--ranks",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[1, 2, 3],
        metavar="N,N,…",
        help="numbers of ranks (1,2,3)",
    )
    parser.add_argument("--minutes", type=float, help="stop after this time")
    parser.add_argument("--faults", type=int, metavar="N", help="stop after so many")
    parser.add_argument(
        "--new-interpreters", action="store_true", help="start ranks as users do, which is slow"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the order of the faults (1)")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="the I-th of N shares, from 0")
    parser.add_argument("--log", type=Path, help="a file for one line of JSON for each fault")
    options = parser.parse_args(arguments)
    ranks = options.ranks
    if not MPIRUN.exists():
        print("no mpirun beside the interpreter: only one rank is swept")
        ranks = [1]
    start = time.monotonic()
    deadline = start + 60 * options.minutes if options.minutes else float("inf")
    results = []
    with (
        bench(are_ranks_forked=not options.new_interpreters) as made,
        contextlib.ExitStack() as stack,
    ):
        log = stack.enter_context(open(options.log or os.devnull, "w"))
        ways = all_ways(ranks, options.scenario or SCENARIOS)
        faults = all_faults(made, ways, options.action or list(ACTIONS), options.seed)
        share, shares = map(int, options.part.split("/"))
        chosen = faults[share::shares][: options.faults]
        print(f"{len(faults)} faults, {len(chosen)} of them to try", flush=True)
        for way, action, number in chosen:
            if time.monotonic() > deadline:
                break
            result = inject(made, way, action, number)
            results.append(result)
            print(json.dumps(_as_json(result)), file=log, flush=True)
            if result.problem:
                print(result.line(), flush=True)
        left = made.left_at_end(ranks[-1])
    print_table(results)
    hits = sum(result.step is not None for result in results)
    wrong = sum(bool(result.problem) for result in results)
    seconds = time.monotonic() - start
    print(f"{len(results)} faults in {seconds:.0f} s, {hits} have hit, {wrong} with a wrong end")
    if left:
        print(f"after all runs there is still {', '.join(left)}")
    return 1 if wrong or left else 0


def _as_json(result: Result) -> dict[str, Any]:
    return {**vars(result), "way": vars(result.way)}


if __name__ == "__main__":
    sys.exit(main())
