"""The text that shows a failing case to a person: its job file, and Python that repeats it."""

from __future__ import annotations

import numpy as np

from .case import Case
from .running import job_text
from .tree import program_text


def array_text(array: np.ndarray) -> str:
    values = np.array2string(array, separator=", ", threshold=10**6, floatmode="unique")
    values = " ".join(values.split())
    if array.size == 0:
        return f"np.zeros({array.shape}, {array.dtype.name!r})"
    return f"np.array({values}, {array.dtype.name!r})"


def run_text(case: Case) -> str:
    """Return how a case is run, in words."""
    words = [f"{case.ranks} ranks", f"strategy {case.strategy}"]
    if case.memory is not None:
        words.append(f"memory limit at {case.memory:.2f} between the least and the plan's own")
    if case.pins:
        words.append(f"parts {dict(case.pins)}")
    if case.distributed:
        words.append(f"DistArrays {dict(case.distributed)}")
    odd = {name: layout for name, layout in case.layouts.items() if layout != "plain"}
    if odd:
        words.append(f"layouts {odd}")
    if case.files:
        words.append("inputs in files")
    if case.stores:
        words.append(f"{', '.join(case.stores)} in zarr stores")
    if case.stop_at is not None:
        words.append(f"interrupted at {case.stop_at:.2f} of its steps and resumed")
    if case.compiled:
        words.append("every kernel compiled")
    if case.strict:
        words.append("strict")
    if case.shared:
        words.append("memory shared for slots of any size")
    return ", ".join(words)


def python_text(case: Case) -> str:
    """Return Python that runs the program of a case on threads and prints what it gives."""
    lines = ["import numpy as np", "import einmpi"]
    lines.append("from einmpi.comm.threads import run_threads")
    lines.append("inf, nan = np.inf, np.nan")
    names = []
    for item in case.program.inputs:
        lines.append(f"{item.name} = {array_text(item.values)}")
        names.append(item.name)
    given = ", ".join(f"{name}={name}" for name in names)
    outputs = f"outputs={case.program.outputs!r}, " if case.program.outputs else ""
    lines.append(f'job = einmpi.program("""\n{program_text(case.program)}\n""", {outputs}{given})')
    inputs = ", ".join(f"{name!r}: {name}" for name in names)
    options = f"strategy={case.strategy!r}"
    if case.pins:
        options += f", pin={dict(case.pins)!r}"
    if case.strict:
        options += ", strict=True"
    lines.append(f"print(einmpi.reference(job, {{{inputs}}}))")
    lines.append("def on_rank(comm):")
    lines.append(f"    found = einmpi.run(job, {{{inputs}}}, comm, {options})")
    lines.append("    return {name: array.gather() for name, array in found.items()}")
    lines.append(f"print(run_threads({case.ranks}, on_rank)[0])")
    return "\n".join(lines)


def failure_text(original: Case, smaller: Case, failures: list[tuple[str, str]]) -> str:
    """Return everything a person needs to look at a failure."""
    lines = [f"FAILURE  {original.name}  ({original.theme}; {run_text(original)})"]
    for check, text in failures:
        lines.append(f"  {check}: {text}")
    kind = "" if original.kind == "programs" else f" {original.kind}"
    repeated = f"--seed {original.seed} --case {original.number}"
    lines.append(f"repeat: python -m tests.soak{kind} {repeated}")
    lines.append(f"minimised, {run_text(smaller)}:")
    lines.append("---- job.toml")
    lines.append(job_text(smaller).rstrip())
    lines.append("---- Python")
    lines.append(python_text(smaller))
    lines.append("----")
    return "\n".join(lines)
