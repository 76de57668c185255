"""Loops one after another: each has a program, which reads what earlier ones carried or put out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from einmpi.errors import InputError
from einmpi.files.specs import InputSpec, OutputSpec
from einmpi.graph.labels import unique
from einmpi.job.loop_table import LoopTable
from einmpi.job.program_text import ProgramText, read_program_text
from einmpi.job.train_table import ReadInputs
from einmpi.language.toml_document import Document, get, kind_of


class LoopText(NamedTuple):
    """One of several loops: its program, and the tensors of its last step that are results."""

    program: ProgramText
    results: tuple[str, ...]


def read_loop_texts(
    document: Document,
    inputs: Sequence[InputSpec],
    sizes: Mapping[str, int],
    steps: int | None,
    read_others: ReadInputs,
) -> list[ProgramText]:
    """Return the programs of all [[loop]] tables, in order."""
    count = len(document.data["loop"])
    if "program" in document.data:
        what = "there is a program besides those of the loops"
        raise InputError(document.place(("program",)), what, "a program in each [[loop]]")
    if not count:
        raise InputError(document.place(("loop",)), "there is no loop in the list", "[[loop]]")
    programs: list[ProgramText] = []
    carried_on: dict[str, InputSpec] = {}  # what earlier loops carried or computed
    for number in range(count):
        path = ("loop", number)
        given = document.data["loop"][number]
        if not isinstance(given, dict):
            raise InputError(document.place(path), f"loop has {kind_of(given)}", "[[loop]] tables")
        loop_table = LoopTable(document, path, read_others)
        if get(document, (*path, "program"), str) is None:
            expected = 'program = "NAME[labels] = expression"'
            raise InputError(document.place(path), "this loop has no program", expected)
        source = document.source((*path, "program"))
        program = read_program_text(source, inputs, sizes, loop_table, steps, carried_on)
        programs.append(program)
        carried_on |= _results_of(program)
    return programs


def _results_of(program: ProgramText) -> dict[str, InputSpec]:
    """Return the tensors of a loop as inputs of later ones: they are where the loop leaves them."""
    program.loop(program.written)  # refuses a loop that does not fit its program
    found = {}
    for name in (*program.carried, *program.computed):
        vertex = program.written[name]
        found[name] = InputSpec(name, shape=vertex.bound, dtype=vertex.dtype, resident=True)
    return found


def with_results(programs: Sequence[ProgramText], outputs: Sequence[OutputSpec]) -> list[LoopText]:
    """Return the loops with their results: outputs of the job, and what later loops read.

    Without outputs of the job, the tensors that no statement uses are results.
    """
    found = []
    stored = [spec.name for spec in outputs]
    for number, program in enumerate(programs):
        later = programs[number + 1 :]
        default = program.default_outputs
        own = []
        for name in program.computed:
            is_wanted = name in stored if stored else name in default
            if is_wanted and not any(_makes(other, name) for other in later):
                own.append(name)
        read_later = [name for name in program.computed if _is_read(name, later)]
        found.append(LoopText(program, unique(own, read_later)))
    return found


def _makes(program: ProgramText, name: str) -> bool:
    return name in program.computed or name in program.carried


def _is_read(name: str, later: Sequence[ProgramText]) -> bool:
    """Return whether one of the later loops reads a tensor before another one makes it anew."""
    for program in later:
        inputs = [vertex.name for vertex in program.written.inputs]
        if name in inputs:
            return True
        if _makes(program, name):
            return False
    return False


def maker_of(programs: Sequence[ProgramText], name: str) -> int:
    """Return the number of the last loop that carries or computes a tensor."""
    numbers = range(len(programs))
    return max(number for number in numbers if _makes(programs[number], name))
