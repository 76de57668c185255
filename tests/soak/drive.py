"""Deal cases out to processes and mpiruns, count what they did, and show what failed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CHUNK_CASES = 400  # cases of a process; its start, numba included, takes as long as about 25
SILENT_SECONDS = 200.0  # without a line from a process: its case hangs
SHOWN_FAILURES = 5
BACKEND_VARIABLE = "EINMPI_SOAK_BACKEND"  # set by --backend, for all processes of a soak
# What an outer launcher has set would make the inner one part of its own job.
OUTER = ("PMI", "OMPI_COMM", "PRTE", "MPI_", "HYDI_", "HYDRA_", "SLURM")


@dataclass(frozen=True)
class Chunk:
    """Consecutive cases for one process, or for one mpirun on a number of ranks."""

    first: int
    count: int
    mpi_ranks: int | None = None


@dataclass(frozen=True)
class Failure:
    number: int
    checks: list[tuple[str, str]]
    mpi_ranks: int | None


@dataclass
class Tally:
    """What the cases were, and what failed."""

    seed: int
    cases: int = 0
    mpi_cases: int = 0
    compared: int = 0
    elements: int = 0
    themes: Counter[str] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    ranks: Counter[int] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, line: dict[str, Any], mpi_ranks: int | None) -> None:
        with self.lock:
            self.cases += 1
            self.mpi_cases += mpi_ranks is not None
            self.compared += line["compared"]
            self.elements += line["elements"]
            self.themes.update(line["themes"])
            self.dtypes.update(line["dtypes"])
            self.ranks[line["ranks"]] += 1
            self.notes.update(line["notes"])
            if line["failures"]:
                self.failures.append(Failure(line["done"], line["failures"], mpi_ranks))

    def add_lost(self, number: int, check: str, text: str, mpi_ranks: int | None) -> None:
        with self.lock:
            self.cases += 1
            self.failures.append(Failure(number, [(check, text)], mpi_ranks))

    def progress(self, seconds: float) -> str:
        rate = self.cases / seconds if seconds else 0.0
        failed = f"{len(self.failures)} failed"
        if self.failures:
            failed += f", the last one was case {self.failures[-1].number}"
        return f"soak: {self.cases} cases in {seconds:.0f} s ({rate:.1f}/s), {failed}"

    def summary(self, seconds: float) -> str:
        rate = self.cases / seconds if seconds else 0.0
        certain = 100 * self.compared / self.elements if self.elements else 100.0
        lines = [
            f"seed {self.seed}: {self.cases} cases in {seconds:.0f} s, {rate:.1f} a second; "
            f"{self.mpi_cases} of them under mpirun",
            f"elements compared: {self.compared} of {self.elements} ({certain:.0f} %; for the "
            "others rounding, overflow or a rewrite decides)",
            _row("kinds", self.themes),
            _row("dtypes", self.dtypes),
            _row("ranks", dict(sorted(self.ranks.items()))),
            _row("also", self.notes),
        ]
        checks: Counter[str] = Counter()
        for failure in self.failures:
            checks.update({check for check, _ in failure.checks})
        lines.append(_row("failures", checks) if checks else "failures  none")
        return "\n".join(lines)


def _row(name: str, counts: Any) -> str:
    shown = ", ".join(f"{key} {count}" for key, count in counts.items())
    return f"{name:9} {shown or 'none'}"


class Drive:
    """Runs chunks of cases in several processes at a time until there is nothing left to do."""

    def __init__(
        self,
        seed: int,
        ranks: int | None,
        jobs: int,
        mpirun: str | None,
        deadline: float | None,
        stop_after: int | None,
        kind: str = "programs",
    ) -> None:
        self.tally = Tally(seed)
        self.kind = kind
        self.ranks = ranks
        self.jobs = jobs
        self.mpirun = mpirun
        self.deadline = deadline
        self.stop_after = stop_after  # failures
        self.is_broken = False  # whether a process ended before its first case
        self.started = time.monotonic()

    def run(self, chunks: Iterator[Chunk]) -> None:
        lock = threading.Lock()
        errors: list[Exception] = []  # of the soak itself

        def work() -> None:
            while not self._is_over() and not errors:
                with lock:
                    chunk = next(chunks, None)
                if chunk is None:
                    return
                self._run_chunk(chunk)

        def work_and_report() -> None:
            try:
                work()
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work_and_report, daemon=True) for _ in range(self.jobs)]
        for thread in threads:
            thread.start()
        next_line = time.monotonic() + 10
        for thread in threads:
            while thread.is_alive():
                thread.join(0.5)
                if time.monotonic() > next_line:
                    next_line = time.monotonic() + 30
                    print(self.tally.progress(self.seconds()), flush=True)
        if errors:
            raise errors[0]

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def _is_over(self) -> bool:
        if self.is_broken:
            return True
        if self.stop_after is not None and len(self.tally.failures) >= self.stop_after:
            return True
        return self.deadline is not None and time.monotonic() > self.deadline

    def _run_chunk(self, chunk: Chunk) -> None:
        """Run a chunk; after a crash or a hang the cases that follow go to a new process."""
        next_number = chunk.first
        last = chunk.first + chunk.count
        while next_number < last and not self._is_over():
            started, finished, ending = self._run_process(next_number, last, chunk.mpi_ranks)
            if finished == last - 1:
                return
            if started < next_number:
                self.tally.add_lost(next_number, "start", ending, chunk.mpi_ranks)
                self.is_broken = True
                return
            lost = max(started, next_number)
            if finished < lost:
                check = "hang" if ending.startswith("hang") else "crash"
                self.tally.add_lost(lost, check, ending, chunk.mpi_ranks)
            next_number = max(lost, finished) + 1

    def _run_process(self, first: int, last: int, mpi_ranks: int | None) -> tuple[int, int, str]:
        """Return the last case that started, the last that finished, and how the process ended."""
        command = worker_command(self.mpirun if mpi_ranks else None, mpi_ranks)
        command += ["--kind", self.kind, "--seed", str(self.tally.seed), "--first", str(first)]
        command += ["--count", str(last - first)]
        if self.ranks is not None and mpi_ranks is None:
            command += ["--ranks", str(self.ranks)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=worker_environment(),
            start_new_session=True,
        )
        started = first - 1
        finished = first - 1
        problems: list[str] = []
        errors = threading.Thread(target=lambda: problems.extend(process.stderr), daemon=True)
        errors.start()
        watch = _Watch(process)
        assert process.stdout is not None
        for text in process.stdout:
            watch.touch()
            try:
                line = json.loads(text)
            except ValueError:
                problems.append(text)
                continue
            if "start" in line:
                started = line["start"]
                if self._is_over():
                    watch.end()
                    return started, last - 1, ""
            else:
                finished = line["done"]
                self.tally.add(line, mpi_ranks)
        status = process.wait()
        watch.stop()
        errors.join(5)
        said = "".join(problems)[-1500:].strip()
        if watch.is_late:
            return started, finished, f"hang: no answer in {SILENT_SECONDS:g} s\n{said}"
        return started, finished, f"the process ended with status {status}\n{said}"


class _Watch:
    """Ends a process that has been silent for too long."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.is_late = False
        self._last = time.monotonic()
        self._over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def touch(self) -> None:
        self._last = time.monotonic()

    def stop(self) -> None:
        self._over.set()

    def end(self) -> None:
        """End the process, and with it the ranks of an mpirun."""
        self.stop()
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            if time.monotonic() - self._last > SILENT_SECONDS:
                self.is_late = True
                self.end()
                return


def worker_command(mpirun: str | None, mpi_ranks: int | None) -> list[str]:
    """Return the command of a worker, or of an mpirun that starts the ranks of one."""
    worker = [sys.executable, "-m", "tests.soak.worker"]
    if mpirun is None or mpi_ranks is None:
        return worker
    options = []
    if Path(mpirun).resolve().with_name("ompi_info").exists():
        options = ["--oversubscribe", "--bind-to", "none", "--allow-run-as-root"]
    return [mpirun, *options, "-n", str(mpi_ranks), *worker, "--mpi"]


def worker_environment() -> dict[str, str]:
    kept = {}
    for name, value in os.environ.items():
        if not name.startswith(OUTER):
            kept[name] = value
    search = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(search),
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
    }


def find_mpirun() -> str | None:
    """Return the mpirun beside the Python interpreter, or that of the search path."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def show_failure(
    failure: Failure, seed: int, seconds: float, mpirun: str | None, kind: str = "programs"
) -> str:
    """Return the text of a failure with a minimised case, made in a process of its own."""
    command = [*worker_command(None, None), "--kind", kind]
    command += ["--seed", str(seed), "--first", str(failure.number), "--shrink", str(seconds)]
    if failure.mpi_ranks is not None:
        command += ["--ranks", str(failure.mpi_ranks)]
        if mpirun is not None:
            command += ["--mpirun", mpirun]
    found = "\n".join(f"  {check}: {text}" for check, text in failure.checks)
    where = f" under mpirun on {failure.mpi_ranks} ranks" if failure.mpi_ranks else ""
    head = f"seed {seed}, case {failure.number}{where}:\n{found}"
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=worker_environment(),
            timeout=seconds * 2 + 300,
        )
    except subprocess.TimeoutExpired:
        return f"{head}\n(it could not be minimised in time)"
    return f"{head}\n{done.stdout}{done.stderr[-1500:]}"
