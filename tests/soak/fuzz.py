"""Fuzz the command line with mutated jobs, files, checkpoints and machine files.

`python -m tests.soak fuzz --minutes 30 --seed N --jobs J`; the docs are in CONTRIBUTING.md."""

from __future__ import annotations

import argparse
import collections
import gc
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .fuzz_inputs import Corpus, FuzzInput, make_corpus, make_input, stop_in_the_fourth_kernel
from .fuzz_minimise import minimised
from .fuzz_oracle import (
    STATUS_OF_LARGE_JOB,
    Outcome,
    emptied,
    folder_content,
    judge,
    run_forked,
    run_subprocess,
)

ROOT = Path(__file__).resolve().parents[2]
MPIRUN = Path(sys.executable).with_name("mpirun")
OPEN_MPI = MPIRUN.with_name("ompi_info").exists()
# Variables of an outer launcher, which would make the command a rank.
_OUTER = ("EINMPI", "PMI", "OMPI_", "PRTE", "MPI_", "HYDI_", "HYDRA_", "SLURM")
# Every so many inputs, one is also given to a new interpreter, and to two ranks under mpirun.
SUBPROCESS_EVERY = 250
MPIRUN_EVERY = 1000
PROGRESS_EVERY = 1000  # inputs of a worker between two lines


class Fuzzer:
    """A process that has imported einmpi and forks for each input."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.seed = seed
        self.case = folder / "case"
        clean_environment()
        import_everything()
        self.corpus: Corpus = make_corpus(_run_for_corpus, self.case)
        gc.collect()
        gc.freeze()  # so that children do not copy every object

    def run(self, number: int) -> tuple[FuzzInput, Outcome, str]:
        """Return input `number`, how its command ended, and what is wrong with that, or ""."""
        made, _ = make_input(self.corpus, self.seed, number)
        outcome, problem = self.run_input(made)
        is_repeatable = not problem and outcome.status != STATUS_OF_LARGE_JOB
        if is_repeatable and number % SUBPROCESS_EVERY == 7:
            words = [sys.executable, "-m", "einmpi", *made.command]
            outcome, problem = self.run_input(made, words)
        elif is_repeatable and number % MPIRUN_EVERY == 11 and self.can_run_on_ranks(made):
            words = [str(MPIRUN), "-n", "2", sys.executable, "-m", "einmpi", *made.command]
            outcome, problem = self.run_input(made, words)
        return made, outcome, problem

    def can_run_on_ranks(self, made: FuzzInput) -> bool:
        """Return whether the command can be given to mpirun, whose lines are einmpi's alone."""
        is_quiet_mpirun = MPIRUN.exists() and not OPEN_MPI
        return is_quiet_mpirun and made.kind != "command" and made.command[0] in ("run", "check")

    def run_input(self, made: FuzzInput, words: Sequence[str] = ()) -> tuple[Outcome, str]:
        """Run an input in a fork, or with these words in a new process; return what is wrong."""
        emptied(self.case)
        made.write(self.case)
        before = folder_content(self.case)
        if words:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            outcome = run_subprocess(self.case, words, environment)
        else:
            outcome = run_forked(self.case, made.command)
        problem = judge(made, outcome, before, self.case)
        return outcome, problem

    def minimise(self, number: int, problem: str) -> FuzzInput:
        """Return the smallest input found that has the same problem."""

        def has_problem(candidate: FuzzInput) -> bool:
            return self.run_input(candidate)[1] == problem

        return minimised(self.corpus, self.seed, number, has_problem)


def clean_environment() -> None:
    """Remove what would make this process a rank, or a command different from the user's."""
    for name in list(os.environ):
        if name.startswith(_OUTER):
            del os.environ[name]
    os.environ["OPENBLAS_NUM_THREADS"] = "1"


def import_everything() -> None:
    """Import what commands import when they need it, before the first fork."""
    import h5py  # noqa: F401
    import numba  # noqa: F401
    import opt_einsum  # noqa: F401
    import rich.console  # noqa: F401
    import scipy.special  # noqa: F401

    import einmpi.cli

    package = Path(einmpi.cli.__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package.parent).with_suffix("")
        parts = [part for part in relative.parts if part != "__init__"]
        if "cuda" in parts or "gpu" in parts or parts[-1] == "__main__":
            continue
        importlib.import_module(".".join(parts))


def _run_for_corpus(folder: Path, command: list[str], is_stopped: bool) -> None:
    outcome = run_forked(folder, command, stop_in_the_fourth_kernel if is_stopped else None)
    assert outcome.status == (75 if is_stopped else 0), outcome


# ---- workers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What the command line asks for."""

    seed: int
    first: int
    count: int | None
    deadline: float | None  # by time.monotonic
    jobs: int
    keep: Path  # where failing inputs are saved
    most_failures: int


@dataclass
class Tally:
    """What one worker, or all of them, have seen."""

    inputs: int = 0
    seconds: float = 0.0
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.inputs += other.inputs
        self.seconds = max(self.seconds, other.seconds)
        self.kinds += other.kinds
        self.statuses += other.statuses
        self.failures += other.failures


def fuzz_share(settings: Settings, worker: int) -> Tally:
    """Run every `jobs`-th input, from number `first + worker` on."""
    tally = Tally()
    seen: set[str] = set()
    folder = Path(tempfile.mkdtemp(prefix="einmpi-fuzz-"))
    start = time.monotonic()
    try:
        fuzzer = Fuzzer(folder, settings.seed)
        number = settings.first + worker
        while not _is_over(settings, number, tally):
            made, outcome, problem = fuzzer.run(number)
            tally.inputs += 1
            tally.kinds[made.kind] += 1
            tally.statuses[_status_word(outcome.status)] += 1
            if problem and problem not in seen:  # the first input with each problem is enough
                seen.add(problem)
                tally.failures.append(_report_failure(settings, fuzzer, number, problem, outcome))
            elif problem:
                tally.failures.append(f"seed {settings.seed} number {number}: {problem} (again)")
            if tally.inputs % PROGRESS_EVERY == 0:
                print(f"worker {worker}: {tally.inputs} inputs, up to number {number}", flush=True)
            number += settings.jobs
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    tally.seconds = time.monotonic() - start
    return tally


def _is_over(settings: Settings, number: int, tally: Tally) -> bool:
    if settings.count is not None and number >= settings.first + settings.count:
        return True
    if len(tally.failures) >= settings.most_failures:
        return True
    return settings.deadline is not None and time.monotonic() >= settings.deadline


def _status_word(status: int) -> str:
    return "large" if status == STATUS_OF_LARGE_JOB else str(status)


def _report_failure(
    settings: Settings, fuzzer: Fuzzer, number: int, problem: str, outcome: Outcome
) -> str:
    """Save the smallest input with this problem; print and return a line about it."""
    made = fuzzer.minimise(number, problem)
    place = settings.keep / f"{settings.seed}-{number}"
    emptied(place)
    made.write(place)
    notes = {
        "seed": settings.seed,
        "number": number,
        "problem": problem,
        "kind": made.kind,
        "command": made.command,
        "changed file": made.main_file,
        "status": outcome.status,
        "standard error": outcome.err[-4000:],
    }
    (place / "failure.json").write_text(json.dumps(notes, indent=1, ensure_ascii=True))
    line = f"seed {settings.seed} number {number}: {problem}; saved in {place}"
    print(line, flush=True)
    return line


def fuzz(settings: Settings) -> Tally:
    """Run inputs in `jobs` processes; return what all of them have seen."""
    tally = Tally()
    if settings.jobs == 1:
        tally.add(fuzz_share(settings, 0))
        return tally
    # Workers are forked before anything is imported that starts threads.
    context = multiprocessing.get_context("spawn")
    with context.Pool(settings.jobs) as pool:
        shares = [(settings, worker) for worker in range(settings.jobs)]
        for share in pool.starmap(fuzz_share, shares, chunksize=1):
            tally.add(share)
    return tally


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line of the fuzzer; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, help="how long to go on")
    parser.add_argument("--count", type=int, help="how many inputs to run; 2000 without --minutes")
    parser.add_argument("--first", type=int, default=0, help="the number of the first input")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes")
    parser.add_argument("--keep", type=Path, default=ROOT / "build/fuzz", help="for failing inputs")
    parser.add_argument("--most-failures", type=int, default=100, help="of a process, then it ends")
    parser.add_argument("--show", type=int, metavar="NUMBER", help="run one input, show everything")
    options = parser.parse_args(arguments)
    if options.show is not None:
        return _show(options.seed, options.show)
    count = options.count
    deadline = None
    if options.minutes is not None:
        deadline = time.monotonic() + options.minutes * 60
    elif count is None:
        count = 2000
    settings = Settings(
        options.seed,
        options.first,
        count,
        deadline,
        options.jobs,
        options.keep.resolve(),
        options.most_failures,
    )
    tally = fuzz(settings)
    kinds = ", ".join(f"{name} {number}" for name, number in tally.kinds.most_common())
    statuses = ", ".join(f"{name}: {number}" for name, number in sorted(tally.statuses.items()))
    print(f"{tally.inputs} inputs of seed {options.seed} in {tally.seconds:.0f} s: {kinds}")
    print(f"statuses {statuses}; {len(tally.failures)} failures")
    for failure in tally.failures:
        print(f"  {failure}")
    return 1 if tally.failures else 0


def _show(seed: int, number: int) -> int:
    """Run one input and print its files, its command and how it ended."""
    folder = Path(tempfile.mkdtemp(prefix="einmpi-fuzz-"))
    try:
        fuzzer = Fuzzer(folder, seed)
        made, outcome, problem = fuzzer.run(number)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{made.kind}: {' '.join(map(repr, made.command))}")
    print(f"{made.main_file}:")
    print(made.files.get(made.main_file, b"")[:4000].decode(errors="backslashreplace"))
    print(f"status {outcome.status} after {outcome.seconds:.2f} s")
    print(f"{outcome.out[:2000]}{outcome.err[:4000]}")
    print(problem or "as it should be")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
