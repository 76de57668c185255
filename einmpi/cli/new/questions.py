"""A new job file from the user's answers: the program first, then what it needs and yields."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from einmpi.cli.new.job_text import NewJob, quoted
from einmpi.errors import InputError
from einmpi.files.formats import format_with_suffix, split_short_form, suffix_of
from einmpi.graph.labels import MAX_EXTENT
from einmpi.job.inputs import read_short_form
from einmpi.language.syntax import Source, Statement, entries, statements
from einmpi.language.vocabulary import CONSTANTS, is_callable

T = TypeVar("T")

_INPUT_HELP = (
    "FILE.h5:/DATASET, FILE.zarr:/ARRAY, FILE.npy, or the extents of a random tensor such as 100, n"
)
_OUTPUT_HELP = "FILE.h5:/DATASET, FILE.zarr:/ARRAY or FILE.npy; nothing prints a summary"


def job_from_answers(title: str) -> NewJob:
    """Ask for everything that a job file says."""
    job = NewJob(_ask(f"title [{title}]: ", str) or title, [])
    print("program, one statement a line such as Z[i,k] = sum(X[i,j] * Y[j,k]); then an empty line")
    program = _ask_program()
    job.program = program.text.split("\n")
    tensors, numbers, results = _names_in(program)
    for name in tensors:
        value, sizes = _ask(f"{name} ({_INPUT_HELP}): ", _input_value)
        job.inputs[name] = value
        numbers += [size for size in sizes if size not in numbers]
    for name in numbers:
        job.sizes[name] = _ask(f"size {name} (a whole number): ", _size_value)
    for name in results:
        value = _ask(f"{name} is written to ({_OUTPUT_HELP}): ", _output_value)
        if value:
            job.outputs[name] = value
    return job


def _read_line(question: str) -> str:
    print(question, end="", flush=True)
    line = sys.stdin.readline()
    if not line:
        print()
        what = f"there is no answer to {question.rstrip(' :>')!r}"
        raise InputError("einmpi new", what, "answers on standard input, or --from FILE")
    return line.strip()


def _ask(question: str, convert: Callable[[str], T]) -> T:
    """Ask until the answer can be converted."""
    while True:
        try:
            return convert(_read_line(question))
        except _WrongAnswer as error:
            print(error)


class _WrongAnswer(Exception):
    """An answer that has to be given again."""


def _ask_program() -> Source:
    """Ask for statements until an empty line; ask anew if they cannot be parsed."""
    while True:
        lines: list[str] = []
        while line := _read_line("> "):
            lines.append(line)
        program = Source("program", "\n".join(lines))
        try:
            found = list(statements(program))
            if any(isinstance(item, Statement) for item in found):
                return program
            print("there is no statement yet")
        except InputError as error:
            print(error)


def _names_in(program: Source) -> tuple[list[str], list[str], list[str]]:
    """Return the names of tensors that the program needs, of sizes, and of its results."""
    items = [item for item in statements(program) if isinstance(item, Statement)]
    defined = [item.name for item in items]
    tensors: dict[str, None] = {}
    numbers: dict[str, None] = {}
    labels: set[str] = set()
    used: set[str] = set()
    for item in items:
        for label, extent in item.labels:
            labels.add(label)
            numbers.update(dict.fromkeys(_plain_names(extent)))
        for tree in item.trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                    if not is_callable(node.value.id):
                        tensors[node.value.id] = None
                    for entry in entries(node.slice):
                        label_node = entry.lower if isinstance(entry, ast.Slice) else entry
                        if isinstance(label_node, ast.Name):
                            labels.add(label_node.id)
            names = _plain_names(tree)
            used.update(names)
            numbers.update(dict.fromkeys(names))
    no_size = {*tensors, *labels, *defined, *CONSTANTS}
    sizes = []
    for name in numbers:
        if name not in no_size and not is_callable(name):
            sizes.append(name)
    needed = [name for name in tensors if name not in defined]
    results = [name for name in defined if name not in used]
    return needed, sizes, results


def _plain_names(node: ast.expr | None) -> list[str]:
    if node is None:
        return []
    return [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]


def _input_value(answer: str) -> tuple[str, Sequence[str]]:
    """Return the input as TOML, and the sizes that its shape needs."""
    file, _ = split_short_form(answer)
    if format_with_suffix(suffix_of(file)) is not None:
        return _checked_short_form(answer, writable=False), ()
    extents = [extent.strip() for extent in re.split(r"[,×]", answer.strip("[]() "))]
    shown = []
    sizes = []
    for extent in extents:
        if re.fullmatch(r"[0-9]{1,12}", extent) and int(extent) <= MAX_EXTENT:
            shown.append(str(int(extent)))
        elif re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", extent):
            shown.append(quoted(extent))
            sizes.append(extent)
        else:
            raise _WrongAnswer(f"{answer!r:.60}; expected {_INPUT_HELP}")
    return f'{{ shape = [{", ".join(shown)}], random = "normal" }}', sizes


def _output_value(answer: str) -> str:
    if not answer:
        return ""
    return _checked_short_form(answer, writable=True)


def _checked_short_form(answer: str, writable: bool) -> str:
    try:
        read_short_form(answer, answer, writable)
    except InputError as error:
        raise _WrongAnswer(str(error)) from None
    return quoted(answer)


def _size_value(answer: str) -> int:
    if re.fullmatch(r"[0-9]{1,12}", answer) and 1 <= int(answer) <= MAX_EXTENT:
        return int(answer)
    raise _WrongAnswer(f"{answer!r:.60}; expected a whole number from 1 to {MAX_EXTENT}")
