"""Sweep faults over every step of a run: killed, stopped, no disk, files replaced, a second run.

`python -m tests.soak faults --minutes 30`; afterwards outputs are old or new, all of them alike."""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import faults_client
from .faults_files import Outputs, make_template, read_outputs
from .faults_inject import (
    ACTIONS,
    FAULT_VARIABLE,
    FORKED_RANK,
    NEW_RANK,
    NO_STEP,
    OF_CHECKPOINTS,
    OF_PROCESSES,
    ON_DISK,
    ON_VOLUME,
    RANK_COMMAND_VARIABLE,
    Fault,
    text_of,
)
from .faults_volume import (
    DiskVolume,
    MemoryVolume,
    PlainVolume,
    make_private_mounts,
    mount_memory,
    unmount,
)
from .fuzz import MPIRUN, OPEN_MPI, ROOT, clean_environment
from .fuzz_oracle import WALL_SECONDS, Outcome

SCENARIOS = ("run", "checkpoint", "resume")
ALONE = "alone"
BY_MPIRUN = "mpirun"
BY_EINMPI = "einmpi run -n"
SECONDS_TO_END = 15.0  # for processes, after the command has returned
SEGMENTS = Path("/dev/shm")


# ---- runs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How a job is run: the scenario, the launcher, and the rank that has the fault."""

    scenario: str
    launcher: str
    ranks: int
    rank: int

    def __str__(self) -> str:
        return f"{self.scenario}, {self.launcher} {self.ranks}, rank {self.rank}"


class Bench:
    """The place of a sweep: a server that forks processes, file systems, and what is expected."""

    def __init__(self, parent: Path, are_mounts_allowed: bool, are_ranks_forked: bool) -> None:
        self.parent = parent
        self.are_mounts_allowed = are_mounts_allowed
        self.impossible: set[str] = set()  # faults for which this machine lacks something
        self._rank_command = FORKED_RANK if are_ranks_forked else NEW_RANK
        (parent / "memory").mkdir()
        (parent / "disk").mkdir()
        (parent / "tmp").mkdir()
        self.memory: PlainVolume
        self.disk: PlainVolume | None = None
        if are_mounts_allowed:
            self.memory = MemoryVolume(parent / "memory")
            self.disk = self._make_disk()
        else:
            self.memory = PlainVolume(parent / "memory")
            self.impossible.update(ON_VOLUME)
        if self.disk is None:
            self.impossible.update(ON_DISK)
        self._templates: dict[str, Path] = {}
        self._note = parent / "note.json"  # what the fault writes down
        self._socket = str(parent / "socket")
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.faults_server", self._socket],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"ready\n"
        self._make_templates()

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        self.memory.close()
        if self.disk is not None:
            self.disk.close()

    def _make_disk(self) -> PlainVolume | None:
        try:
            return DiskVolume(self.parent / "disk")
        except OSError as error:
            print(f"no disk that fails: {error}", flush=True)
            return None

    def _make_templates(self) -> None:
        template = self.parent / "template"
        make_template(template)
        self._templates["run"] = template
        self._templates["checkpoint"] = template
        self.old = read_outputs(template)
        self.new = self._expected(template)
        self.new_of_other_input = self._expected(template, is_input_replaced=True)
        # A run that was killed has left a checkpoint.
        saved = self.parent / "saved-template"
        number = 1
        way = Way("checkpoint", ALONE, 1, 0)
        while not list(saved.glob("saved/0*")):
            self.memory.fill_case(template)
            self.run(way, self.memory, self.fault(way, "kill", number, self.memory))
            number += 5
            assert self.take_note() is not None, "no checkpoint was saved"
            shutil.rmtree(saved, ignore_errors=True)
            shutil.copytree(self.memory.case, saved)
        self._templates["resume"] = saved

    def _expected(self, template: Path, is_input_replaced: bool = False) -> Outputs:
        self.memory.fill_case(template)
        if is_input_replaced:
            os.rename(self.memory.case / "other-x.h5", self.memory.case / "x.h5")
        outcome = self.run_alone(["run", "job.toml", "--quiet"], self.memory.case)
        assert outcome.status == 0, outcome
        return read_outputs(self.memory.case)

    def volume_for(self, action: str) -> PlainVolume:
        if action not in ON_DISK:
            return self.memory
        assert self.disk is not None
        return self.disk

    def prepare(self, scenario: str, volume: PlainVolume) -> None:
        volume.fill_case(self._templates[scenario])

    def restore_input(self, folder: Path) -> None:
        shutil.copy2(self._templates["run"] / "x.h5", folder / "x.h5")

    def command(self, scenario: str, folder: Path) -> list[str]:
        command = ["run", "job.toml", "--quiet"]
        if scenario != "run":
            # The whole path: a mount in the place of the case is not seen from inside it.
            command += ["--checkpoint", str(folder / "saved"), "--every", "0"]
        if scenario == "resume":
            command.append("--resume")
        return command

    def fault(self, way: Way, action: str, number: int, volume: PlainVolume) -> Fault:
        return Fault(
            action=action,
            rank=way.rank,
            number=number,
            folder=str(volume.case),
            error_trigger=volume.error_trigger,
            command=self.command(way.scenario, volume.case),
            note_path=str(self._note),
        )

    def take_note(self) -> dict[str, Any] | None:
        """Return what the fault has noted; None if the run did not reach its step."""
        try:
            text = self._note.read_text()
        except FileNotFoundError:
            return None
        self._note.unlink()
        note: dict[str, Any] = {"step": "unknown", "phase": "unknown"}
        if text:
            note = json.loads(text)
        return note

    def run_alone(self, command: list[str], folder: Path, fault: Fault | None = None) -> Outcome:
        """Run a command in a fork of the server."""
        return self._run_in_fork(command, folder, self._environment(fault))

    def run(self, way: Way, volume: PlainVolume, fault: Fault, mark: str = "") -> Outcome:
        """Run the job of a scenario with a fault."""
        command = self.command(way.scenario, volume.case)
        environment = {**self._environment(fault), "MARK": mark}
        if way.launcher == ALONE:
            return self._run_in_fork(command, volume.case, environment)
        if way.launcher == BY_EINMPI:
            return self._run_in_fork([*command, "-n", str(way.ranks)], volume.case, environment)
        options = []
        if OPEN_MPI:
            options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        words = [str(MPIRUN), *options, "-n", str(way.ranks), *self._rank_command, *command]
        return self._run_mpirun(words, volume.case, environment)

    def _environment(self, fault: Fault | None) -> dict[str, str]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.parent / "tmp"),
            faults_client.SERVER_VARIABLE: self._socket,
            RANK_COMMAND_VARIABLE: json.dumps(self._rank_command),
        }
        if fault is not None:
            environment[FAULT_VARIABLE] = text_of(fault)
        return environment

    def _run_in_fork(
        self, command: list[str], folder: Path, environment: dict[str, str]
    ) -> Outcome:
        start = time.monotonic()
        timed_out = False
        # Pipes hold more than a run says, and unlike files they have no limit of size or disk.
        pipes = [os.pipe(), os.pipe()]
        with open(os.devnull) as devnull:
            descriptors = {0: devnull.fileno(), 1: pipes[0][1], 2: pipes[1][1]}
            answers, _ = faults_client.request(environment, command, descriptors, str(folder))
        try:
            answers.raw._sock.settimeout(WALL_SECONDS)
            status = int(answers.readline())
        except TimeoutError:
            timed_out = True
            status = -signal.SIGKILL
        answers.raw._sock.close()  # the server ends what has not ended
        answers.close()
        texts = [_take_text(*pipe) for pipe in pipes]
        return Outcome(status, *texts, time.monotonic() - start, 0, timed_out)

    def _run_mpirun(self, words: list[str], folder: Path, environment: dict[str, str]) -> Outcome:
        start = time.monotonic()
        timed_out = False
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=WALL_SECONDS)
        except subprocess.TimeoutExpired:
            timed_out = True
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        return Outcome(
            process.returncode,
            out.decode(errors="backslashreplace"),
            err.decode(errors="backslashreplace"),
            time.monotonic() - start,
            0,
            timed_out,
        )

    def temporary_files(self) -> list[str]:
        """Return what is left of launchers and of MPI outside the case."""
        left = os.listdir(self.parent / "tmp")
        if self.are_mounts_allowed:
            left += os.listdir(SEGMENTS)
        return left

    def left_at_end(self, ranks: int) -> list[str]:
        """Run once more without a fault; return the temporary files that are left."""
        if ranks > 1:
            self.steps_of(Way("run", BY_EINMPI, ranks, 0))
        return self.temporary_files()

    def steps_of(self, way: Way) -> list[tuple[str, str]]:
        """Return the phases and names of the steps that a rank has when nothing goes wrong."""
        self.prepare(way.scenario, self.memory)
        outcome = self.run(way, self.memory, self.fault(way, "kill", NO_STEP, self.memory))
        assert outcome.status == 0, (way, outcome)
        found = read_outputs(self.memory.case)
        assert (found.z, found.m) == (self.new.z, self.new.m), way
        note = self.take_note()
        assert note is not None, way
        return [(phase, name) for phase, name in note["steps"]]


def _take_text(reading_end: int, writing_end: int) -> str:
    """Return what is in a pipe, and close it."""
    os.close(writing_end)
    os.set_blocking(reading_end, False)
    data = b""
    with contextlib.suppress(BlockingIOError):
        data = os.read(reading_end, 2**16)
    os.close(reading_end)
    return data.decode(errors="backslashreplace")


@contextlib.contextmanager
def bench(has_mounts: bool = True, are_ranks_forked: bool = True) -> Iterator[Bench]:
    """Make a bench in a folder of its own.

    With mounts, which need root, it is in memory, and this process sees no other files in
    /dev/shm from then on.
    """
    clean_environment()
    parent = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        if has_mounts:
            problem = make_private_mounts()
            if problem:
                print(f"{problem}: faults of file systems are left out", flush=True)
                has_mounts = False
            else:
                mount_memory(str(parent))
                mount_memory(str(SEGMENTS))  # to see what the sweep leaves there
        made = Bench(parent, has_mounts, are_ranks_forked)
        try:
            yield made
        finally:
            made.close()
    finally:
        unmount(str(parent))
        shutil.rmtree(parent, ignore_errors=True)


# ---- the oracle ---------------------------------------------------------------------------------


@dataclass
class Result:
    """What came of one fault: the step at which it was, None if the run did not reach it."""

    way: Way
    action: str
    number: int
    step: str | None = None
    phase: str = ""
    status: int = 0
    seconds: float = 0.0
    problem: str = ""

    def line(self) -> str:
        where = f"{self.way}: {self.action} at step {self.number} ({self.phase}: {self.step})"
        return f"{where}: {self.problem}"


def inject(bench: Bench, way: Way, action: str, number: int) -> Result:
    """Run a job with a fault and judge what happens, then the next runs."""
    volume = bench.volume_for(action)
    bench.prepare(way.scenario, volume)
    mark = str(uuid.uuid4())
    outcome = bench.run(way, volume, bench.fault(way, action, number, volume), mark)
    result = Result(way, action, number, status=outcome.status, seconds=outcome.seconds)
    note = bench.take_note()
    if note is None:
        return result
    result.step = note["step"]
    result.phase = note["phase"]
    are_gone = way.launcher == ALONE or _are_gone(mark)
    volume.restore()
    judge = _Judge(bench, way, action, volume.case, outcome, note)
    result.problem = "" if are_gone else "processes are left"
    result.problem = result.problem or judge.problem()
    if result.problem and outcome.err.strip():
        result.problem += f"; {outcome.err.strip()[-400:]!r}"
    return result


class _Judge:
    """What must hold after a run with a fault."""

    def __init__(
        self,
        bench: Bench,
        way: Way,
        action: str,
        folder: Path,
        outcome: Outcome,
        note: dict[str, Any],
    ) -> None:
        self.bench = bench
        self.way = way
        self.action = action
        self.folder = folder
        self.outcome = outcome
        self.note = note
        self.old = bench.old
        self.new = bench.new
        self.accepted = [bench.new]
        if action == "replaced input":
            self.accepted.append(bench.new_of_other_input)

    def problem(self) -> str:
        """Return what is wrong, or ""."""
        problem = self._problem_of_end() or self._problem_of_files()
        if problem:
            return problem
        if not self._leftovers():
            return self._problem_of_mixture()  # the next run would begin as any other does
        problem = self._problem_of_reading() or self._problem_of_mixture()
        return problem or self._problem_of_next_run()

    def _problem_of_end(self) -> str:
        outcome = self.outcome
        if outcome.timed_out:
            return "hang"
        if "Traceback" in outcome.err or "shows the traceback" in outcome.err:
            return "an error without an explanation"
        lines = re.findall(r"^(?:einmpi|job\.toml|--checkpoint|/).*$", outcome.err, re.MULTILINE)
        last_lines = [line for line in lines if "the run continues" not in line]
        if len(last_lines) > 1 or (outcome.status == 1 and not last_lines):
            return f"status {outcome.status} with {len(last_lines)} lines"
        if "Traceback" in self.note.get("second said", ""):
            return f"the second run has a traceback: {self.note['second said']}"
        if self.way.launcher == BY_EINMPI:
            left = self.bench.temporary_files()
            if left:
                return f"the launcher leaves {', '.join(left)}"
        return ""

    def _problem_of_files(self) -> str:
        found = read_outputs(self.folder)
        z_states = {"old": self.old.z, "new": self.new.z}
        m_states = {"old": self.old.m, "new": self.new.m}
        for other in self.accepted[1:]:
            z_states["other input"] = other.z
            m_states["other input"] = other.m
        if self.action == "replaced output":
            z_states["replaced"] = np.ones((8, 8)).tobytes()
        if self.action == "removed output":
            m_states["removed"] = "removed"
        z_state = _name_of(found.z, z_states)
        m_state = _name_of(found.m, m_states)
        if not z_state or not m_state:
            return f"an output is neither old nor new: {found.z[:80]!r}, {found.m[:80]!r}"
        if not found.keeps:
            return "another dataset of the file is lost"
        # A file that was replaced or removed after the run had put it in place stays so.
        states = {z_state, m_state} - {"replaced", "removed"}
        if self.outcome.status == 0 and states not in ({"new"}, {"other input"}):
            return f"status 0, but the outputs are {z_state} and {m_state}"
        if "is unchanged" in self.outcome.err and z_state == "new" and "same" not in self.note:
            return "the line says unchanged, the file is new"
        if self.note.get("same") == 0 and states != {"new"}:
            return f"the second run has exited 0, but the outputs are {z_state} and {m_state}"
        if self.note.get("second") == 0 and found.second != np.arange(1.0, 6.0).tobytes():
            return "the second run has exited 0 without its data"
        return ""

    def _problem_of_reading(self) -> str:
        """Return what is wrong with a job that reads the outputs, and finishes what was begun."""
        if self.action == "removed output":
            return ""
        reading = self.bench.run_alone(["run", "reading.toml", "--quiet"], self.folder)
        if reading.status != 0:
            return f"a job cannot read the outputs: {reading.err}"
        return ""

    def _problem_of_mixture(self) -> str:
        found = read_outputs(self.folder)
        is_z_old = found.z == self.old.z
        is_m_old = found.m == self.old.m
        if "output" not in self.action and is_z_old != is_m_old:
            return "one output is old, the other one is new"
        return ""

    def _problem_of_next_run(self) -> str:
        """Run the same job again, which must find everything in order and leave nothing."""
        if self.action == "removed input":
            self.bench.restore_input(self.folder)
        saved = self.folder / "saved"
        if self.action == "replaced input":
            shutil.rmtree(saved, ignore_errors=True)
        command = self.bench.command(self.way.scenario, self.folder)
        if self.way.scenario == "checkpoint":
            command.append("--resume")
        again = self.bench.run_alone(command, self.folder)
        if self.action == "replaced checkpoint" and again.status in (1, 2):
            if again.err.count("\n") != 1:
                return f"the next run refuses the checkpoint with other lines: {again.err}"
            shutil.rmtree(saved, ignore_errors=True)
            again = self.bench.run_alone(command, self.folder)
        if again.status != 0:
            return f"the next run fails: {again.err}"
        found = read_outputs(self.folder)
        if not any((found.z, found.m) == (each.z, each.m) for each in self.accepted):
            return "the next run gives other results"
        left = self._leftovers()
        if left:
            return f"the next run leaves {', '.join(left)}"
        return ""

    def _leftovers(self) -> list[str]:
        """Return what is in the folder besides inputs and outputs."""
        saved = self.folder / "saved"
        left = [path.name for path in self.folder.glob(".*")]
        if saved.exists():
            left += os.listdir(saved)
        return left


def _name_of(found: bytes | str, states: dict[str, bytes | str]) -> str:
    for name, content in states.items():
        if found == content:
            return name
    return ""


def _are_gone(mark: str) -> bool:
    """Wait until no process has this mark in its environment; return whether all are gone."""
    deadline = time.monotonic() + SECONDS_TO_END
    while True:
        if not _marked_processes(mark):
            return True
        if time.monotonic() > deadline:
            for pid in _marked_processes(mark):
                os.kill(pid, signal.SIGKILL)
            return False
        time.sleep(0.05)


def _marked_processes(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"MARK={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


# ---- all faults ---------------------------------------------------------------------------------


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
