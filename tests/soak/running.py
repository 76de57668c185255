"""Run one case on ranks that are threads, and check everything that the package promises."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import einmpi
from einmpi.api import options_of
from einmpi.checkpoint.folder import Saving
from einmpi.checkpoint.resume import Checkpoints, prepare
from einmpi.comm.mpi import comm_of
from einmpi.comm.threads import run_threads
from einmpi.compiled import planning
from einmpi.compiled.inputs import Inputs
from einmpi.compiled.stored_inputs import plan_with_files
from einmpi.job.job import with_settings
from einmpi.kernels.cpu import dispatch
from einmpi.loops.running import LoopRun
from einmpi.runtime.gpu.copies import on_host
from einmpi.runtime.sharing import inputs as sharing
from einmpi.schedule.lower import lower
from tests.lib.schedule_checks import verify

from .case import Case, laid_out
from .drive import BACKEND_VARIABLE
from .gradients_oracle import evaluate
from .looping import evaluate_loop
from .oracle import Value, disagreement, sure_elements
from .tree import Loop, number_text, program_text

THREAD_SECONDS = 90.0  # for a rank to wait for a message, while another one compiles


@dataclass
class Outcome:
    """What the checks of a case found. A failure is a kind of check and a sentence."""

    failures: list[tuple[str, str]] = field(default_factory=list)
    compared: int = 0  # elements whose value is known
    elements: int = 0
    notes: list[str] = field(default_factory=list)  # what was done besides

    def fail(self, check: str, text: str) -> None:
        self.failures.append((check, text))


class _Killed(BaseException):
    """Ends a rank at once: nothing in the package catches it."""


def check_on_threads(case: Case) -> Outcome:
    """Run a case on threads and return what was wrong."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="einmpi-soak-") as folder, _settings(case):
        try:
            _check(case, Path(folder), outcome, None)
        except Exception as error:
            outcome.fail("error", _last_lines(error))
    return outcome


def check_on_mpi(case: Case, comm: Any, folder: Path) -> Outcome:
    """Run a case on the ranks of a communicator, which all call this. The folder is shared."""
    outcome = Outcome()
    with _settings(case):
        _check(case, folder, outcome, comm)
    return outcome


def _check(case: Case, folder: Path, outcome: Outcome, comm: Any) -> None:
    if case.compiled:
        outcome.notes.append("compiled kernels")
    if case.strict:
        outcome.notes.append("strict")
    if case.stores:
        outcome.notes.append("zarr")
    if case.shared:
        outcome.notes.append("shared memory")
    if case.program.loop is not None:
        check_loop(case, folder, outcome, comm)
        return
    expected = expected_outputs(case)
    count_sure(expected, outcome)
    try:
        job = make_job(case, folder, comm)
    except einmpi.InputError as error:
        outcome.fail("refused", str(error))
        return
    compare(outcome, "reference", einmpi.reference(job, given_to_reference(case)), expected)
    if comm is None:
        found, options = _checked_run(case, job, functools.partial(_on_threads, case), outcome)
    else:
        found, options = _checked_run(case, job, functools.partial(_on_mpi, comm), outcome)
    compare(outcome, "value", found, expected)
    if case.stop_at is not None and comm is None:
        _check_resume(case, job, options, folder, outcome)


def expected_outputs(case: Case) -> dict[str, Value]:
    values = evaluate(case.program, case.strict)
    return {name: values[name] for name in case.program.output_names()}


def count_sure(expected: Mapping[str, Value], outcome: Outcome) -> None:
    for value in expected.values():
        compared, elements = sure_elements(value)
        outcome.compared += compared
        outcome.elements += elements


def compare(
    outcome: Outcome,
    check: str,
    found: Mapping[str, np.ndarray],
    expected: Mapping[str, Value],
) -> None:
    if set(found) != set(expected):
        outcome.fail(check, f"outputs {sorted(found)}; expected {sorted(expected)}")
        return
    for name, value in expected.items():
        problem = disagreement(found[name], value)
        if problem:
            outcome.fail(check, f"{name}{problem}")


# ---- jobs ---------------------------------------------------------------------------------------


def make_job(case: Case, folder: Path, comm: Any = None) -> einmpi.Job:
    """Return the job of a case: from a job file with its inputs in files, or from Python."""
    job = _written_job(case, folder, comm)
    return replace(job, backend=os.environ.get(BACKEND_VARIABLE, job.backend))


def _written_job(case: Case, folder: Path, comm: Any) -> einmpi.Job:
    text = program_text(case.program)
    if case.files:
        if comm is None or comm.rank == 0:
            for item in case.program.inputs:
                if item.name in case.stores:
                    write_store(folder / f"{item.name}.zarr", item.values)
                else:
                    np.save(folder / f"{item.name}.npy", item.values)
            (folder / "job.toml").write_text(job_text(case))
        if comm is not None:
            comm.barrier()
        return einmpi.load(folder / "job.toml")
    arrays = {item.name: item.values for item in case.program.inputs}
    job = einmpi.program(text, outputs=case.program.outputs, **arrays)
    return with_settings(job, {"strict": case.strict})


def write_store(path: Path, values: np.ndarray) -> None:
    """Write an array to a zarr store, in up to two chunks along each dimension."""
    import zarr  # slow to import, and few cases need it

    chunks = tuple(max(1, (extent + 1) // 2) for extent in values.shape)
    array = zarr.create_array(
        path, name="values", shape=values.shape, dtype=values.dtype, chunks=chunks
    )
    array[...] = values


def job_text(case: Case) -> str:
    """Return the job file of a case; its inputs are .npy files and zarr stores beside it."""
    lines = [f'program = """\n{program_text(case.program)}\n"""', "", "[inputs]"]
    for item in case.program.inputs:
        if item.name in case.stores:
            lines.append(f'{item.name} = "{item.name}.zarr:/values"')
        else:
            lines.append(f'{item.name} = {{ file = "{item.name}.npy" }}')
    if case.strict:
        lines += ["", "[run]", "strict = true"]
    if case.program.loop is not None:
        return "\n".join([*lines, "", *_loop_lines(case.program.loop)]) + "\n"
    lines += ["", "[outputs]"]
    for name in case.program.output_names():
        lines.append(f'{name} = "out.h5:/{name}"')
    return "\n".join(lines) + "\n"


def _loop_lines(loop: Loop) -> list[str]:
    """Return the table of a loop in a job file."""
    carry = ", ".join(f'{name} = "{output}"' for name, output in loop.carry.items())
    lines = ["[loop]", f"steps = {loop.steps}", f"carry = {{ {carry} }}"]
    if loop.until is not None:
        lines.append(f'until = "{loop.until.tensor} > {number_text(loop.until.limit)}"')
    if loop.record:
        names = ", ".join(f'"{name}"' for name in loop.record)
        lines.append(f"record = [{names}]")
    return lines


def given_to_reference(case: Case) -> dict[str, Any]:
    if case.files:
        return {}
    return given_arrays(case)


def given_arrays(case: Case) -> dict[str, Any]:
    """Return the inputs that the outputs need, in their layouts."""
    arrays = {}
    needed = case.program.needed()
    for item in case.program.inputs:
        if item.name not in needed:
            continue
        arrays[item.name] = laid_out(item.values, case.layouts.get(item.name, "plain"))
    return arrays


def given_on_rank(case: Case, comm: Any) -> dict[str, Any] | None:
    """Return what a rank gives to a run: arrays, and DistArrays where the case says so."""
    if case.files:
        return None
    given = given_arrays(case)
    for name, parts in case.distributed.items():
        if name not in given:
            continue
        with contextlib.suppress(einmpi.InputError):  # these ranks cannot be cut like that
            given[name] = einmpi.DistArray.from_global(np.asarray(given[name]), comm, parts)
    return given


# ---- runs ---------------------------------------------------------------------------------------

# Calls a function of a communicator on every rank and returns the results of those in this process.
OnRanks: TypeAlias = Callable[[Callable[[Any], Any]], list[Any]]


def _on_threads(case: Case, function: Callable[[Any], Any]) -> list[Any]:
    return run_threads(case.ranks, function, limit=THREAD_SECONDS)


def _on_mpi(comm: Any, function: Callable[[Any], Any]) -> list[Any]:
    return [function(comm_of(comm))]


def _checked_run(
    case: Case, job: einmpi.Job, on_ranks: OnRanks, outcome: Outcome
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Run twice and check bits, bytes and memory; return the outputs and the options used.

    Parts that the planner refuses are left out.
    """
    options: dict[str, Any] = {"strategy": case.strategy}
    if case.memory is not None:
        limit = _memory_limit(case, job, on_ranks)
        if limit is not None:
            options["memory"] = limit
            outcome.notes.append("memory limit")
    pins = {}
    for name, parts in case.pins.items():
        if name in job.graph.by_name and name not in case.distributed:
            pins[name] = parts
    run_twice = functools.partial(_run_twice, case, job)
    if pins:
        try:
            results = on_ranks(functools.partial(run_twice, {**options, "pin": pins}))
        except einmpi.InputError:
            outcome.notes.append("parts refused")
        else:
            outcome.notes.append("parts")
            _check_run(case, results, options, outcome)
            return results[0].outputs, {**options, "pin": pins}
    results = on_ranks(functools.partial(run_twice, options))
    _check_run(case, results, options, outcome)
    return results[0].outputs, options


def _memory_limit(case: Case, job: einmpi.Job, on_ranks: OnRanks) -> int | None:
    """Return a limit between the least that is possible and what a plan without limit takes."""

    def plan_with(**options: Any) -> Any:
        def plan_on_rank(comm: Any) -> Any:
            compiled = einmpi.compile(job, comm, strategy=case.strategy, **options)
            return compiled.prepare(given_on_rank(case, comm) or {})[0]

        return on_ranks(plan_on_rank)[0]

    free = plan_with().peak
    try:
        plan_with(memory=1)
    except einmpi.InputError as error:
        named = re.search(r"at least (\d+) bytes", str(error))
        least = int(named[1]) if named else 0
        if case.memory is not None and 0 < least <= free:
            return round(least * (free / least) ** case.memory)
    return None


@dataclass(frozen=True)
class _RankResult:
    """What one rank saw in two runs of a case."""

    outputs: dict[str, np.ndarray]
    same_bits: bool
    received: int
    total_received: int  # by all ranks
    peak: int
    spilled: int
    plan: Any


def _run_twice(case: Case, job: einmpi.Job, options: dict[str, Any], comm: Any) -> _RankResult:
    compiled = einmpi.compile(job, comm, **options)
    given = given_on_rank(case, comm)
    first = compiled(given)
    measured = compiled.measured
    assert measured is not None
    whole = _gathered(first)
    second = compiled(given)
    blocks = {name: array.local.tobytes() for name, array in first.items()}
    repeated = {name: array.local.tobytes() for name, array in second.items()}
    ((plan, _),) = compiled.ready.values()
    total = sum(int(text) for text in comm.allgather_text(str(measured.received)))
    return _RankResult(
        whole, blocks == repeated, measured.received, total, measured.peak, measured.spilled, plan
    )


def _gathered(outputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return whole outputs in memory that numpy reads, also from a GPU."""
    return {name: on_host(array.gather()) for name, array in outputs.items()}


def _check_run(
    case: Case, results: list[_RankResult], options: dict[str, Any], outcome: Outcome
) -> None:
    first = results[0]
    plan = first.plan
    if not all(result.same_bits for result in results):
        outcome.fail("bits", "a second run gave other bits")
    for result in results[1:]:
        for name, array in result.outputs.items():
            if array.tobytes() != first.outputs[name].tobytes():
                outcome.fail("bits", f"{name} differs between ranks after gather()")
    if first.total_received != plan.bytes_predicted:
        outcome.fail(
            "bytes", f"{first.total_received} bytes moved; the plan says {plan.bytes_predicted}"
        )
    peak = max(result.peak for result in results)
    if peak > plan.peak:
        outcome.fail("peak", f"{peak} bytes in use; the plan says {plan.peak}")
    if "memory" in options and plan.peak > options["memory"]:
        outcome.fail("peak", f"a peak of {plan.peak}; the limit is {options['memory']}")
    if any(result.spilled for result in results):
        is_even = all(result.spilled for result in results)
        outcome.notes.append("spilled" if is_even else "spilled on some ranks")
    if case.verify:
        verify([lower(plan, rank) for rank in range(case.ranks)])


def _check_resume(
    case: Case, job: einmpi.Job, options: dict[str, Any], folder: Path, outcome: Outcome
) -> None:
    """Interrupt a run that saves checkpoints, and compare the resumed run with a whole one."""
    assert case.stop_at is not None
    steps = [0]
    whole = _run_with_checkpoints(case, job, options, None, steps, None)
    stop_after = int(case.stop_at * steps[0])
    saved = folder / "saved"
    with contextlib.suppress(_Killed):
        _run_with_checkpoints(case, job, options, saved, [0], stop_after)
    resumed = _run_with_checkpoints(case, job, options, saved, [0], None)
    shutil.rmtree(saved, ignore_errors=True)
    for name, array in whole.items():
        if resumed[name].tobytes() != array.tobytes():
            outcome.fail("resume", f"{name} has other bits after resuming at step {stop_after}")
    outcome.notes.append("resumed")


def _run_with_checkpoints(
    case: Case,
    job: einmpi.Job,
    options: dict[str, Any],
    folder: Path | None,
    steps: list[int],
    stop_after: int | None,
) -> dict[str, np.ndarray]:
    """Run the job, saving after every vertex; rank 0 is killed after this many of its steps."""

    def on_rank(comm: Any) -> Any:
        checkpoints = None
        if folder is not None:
            checkpoints = Checkpoints(Saving(str(folder), 0.0, resume=True, quiet=True), comm, job)
        compiled, plan, schedule, given = prepare(
            job, comm, lambda rest: options_of(rest, **options), checkpoints, {}
        )

        def count_step(_: Any) -> None:
            if comm.rank == 0:
                if stop_after is not None and steps[0] >= stop_after:
                    raise _Killed
                steps[0] += 1

        compiled.runner.on_step = count_step
        sources = Inputs(compiled.job, given, compiled.files)
        outputs, _ = compiled.run_schedule(plan, schedule, sources, checkpoints)
        return _gathered(outputs)

    return run_threads(case.ranks, on_rank, limit=THREAD_SECONDS)[0]


# ---- loops --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LoopOnRank:
    """What one rank saw of a loop."""

    result: Any
    outputs: dict[str, np.ndarray]
    received: int  # by all ranks, in all steps and before the first one
    predicted: int  # the bytes of the plans


def check_loop(case: Case, folder: Path, outcome: Outcome, comm: Any) -> None:
    """Run a loop twice, and compare it with its unrolled value; bytes, bits and rows too."""
    outcome.notes.append("loop")
    expected = evaluate_loop(case.program, case.strict)
    count_sure(expected.outputs, outcome)
    try:
        job = make_job(case, folder, comm)
    except einmpi.InputError as error:
        outcome.fail("refused", str(error))
        return
    compare(outcome, "reference", einmpi.reference(job), expected.outputs)
    on_ranks: OnRanks = functools.partial(_on_threads, case)
    if comm is not None:
        on_ranks = functools.partial(_on_mpi, comm)

    def on_rank(own: Any) -> _LoopOnRank:
        run = LoopRun(job, own, options_of(job, strategy=case.strategy))
        run.prepare({})
        result = run.run()
        total = sum(int(text) for text in own.allgather_text(str(run.measured.received)))
        predicted = result.steps * run.plan.bytes_predicted
        if run.once_plan is not None:
            predicted += run.once_plan.bytes_predicted
        return _LoopOnRank(result, _gathered(result.outputs), total, predicted)

    ranks = on_ranks(on_rank)
    repeated = on_ranks(on_rank)
    first = ranks[0]
    compare(outcome, "value", first.outputs, expected.outputs)
    found_end = (first.result.steps, first.result.is_done)
    if found_end != (expected.steps, expected.is_done):
        wanted = f"{expected.steps} steps, done {expected.is_done}"
        outcome.fail("steps", f"{found_end[0]} steps, done {found_end[1]}; expected {wanted}")
        return
    for name, rows in expected.history.items():
        for number, row in enumerate(rows):
            problem = disagreement(np.asarray(first.result.history[name][number]), row)
            if problem:
                outcome.fail("history", f"{name} of step {number}{problem}")
    for rank in (*ranks[1:], *repeated):
        for name, array in rank.outputs.items():
            if array.tobytes() != first.outputs[name].tobytes():
                outcome.fail("bits", f"{name} differs between ranks, or in a second run")
    if first.received != first.predicted:
        outcome.fail(
            "bytes", f"{first.received} bytes moved in all steps; planned were {first.predicted}"
        )


# ---- settings -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _settings(case: Case) -> Iterator[None]:
    """Plan once for all threads of a case, and compile and share everything if the case says so."""
    thresholds = dispatch.WORTH_COMPILING, sharing.MIN_SHARED_BYTES
    if case.compiled:
        dispatch.WORTH_COMPILING = 0
    if case.shared:
        sharing.MIN_SHARED_BYTES = 1
    try:
        with planned_once():
            yield
    finally:
        dispatch.WORTH_COMPILING, sharing.MIN_SHARED_BYTES = thresholds


@contextlib.contextmanager
def planned_once() -> Iterator[None]:
    """Plan once for all ranks that are threads: they share a core."""
    plans: dict[Any, Any] = {}
    lock = threading.Lock()

    def plan_once(graph: Any, ranks: int, options: Any) -> Any:
        # Every rank of a loop makes graphs of its own, which are alike.
        # Not pickled: another thread may just be adding a cached property to the graph.
        key = (repr(graph), ranks, repr(options))
        with lock:
            if key not in plans:
                plans[key] = plan_with_files(graph, ranks, options)
            return plans[key]

    planning.plan_with_files = plan_once
    try:
        yield
    finally:
        planning.plan_with_files = plan_with_files


def _last_lines(error: BaseException) -> str:
    """Return what went wrong, then where."""
    lines = "".join(traceback.format_exception(error))
    return f"{type(error).__name__}: {error}\n{lines[-1500:].strip()}"
