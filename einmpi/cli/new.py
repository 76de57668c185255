"""The commands that write files to begin with: `einmpi new` and `einmpi examples`."""

from __future__ import annotations

import argparse
import ast
import keyword
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, TypeVar

from einmpi.errors import InputError, on_one_line, printable
from einmpi.files.atomic import check_replaceable, replace_file
from einmpi.files.datasets import Dataset
from einmpi.files.formats import (
    find,
    find_sparse,
    format_with_suffix,
    known_format,
    split_short_form,
    suffix_of,
)
from einmpi.files.reading import describe
from einmpi.files.specs import InputSpec
from einmpi.graph.scalar import MAX_EXTENT
from einmpi.job.inputs import read_short_form
from einmpi.job.job_file import job_text, read_job
from einmpi.language.macros import CONSTANTS, is_callable, is_reserved
from einmpi.language.syntax import Source, Statement, entries, statements
from einmpi.units import counted, show_shape


def new(options: argparse.Namespace) -> None:
    """Write a job file: for the tensors of a file, or from what the user answers."""
    job_file: str = options.job
    data_file: str | None = vars(options)["from"]  # the word is a keyword of Python
    if not job_file.endswith(".toml"):
        raise InputError(job_file, "this is not the name of a job file", "JOB.toml")
    if os.path.lexists(job_file):
        raise InputError(job_file, "this file exists already", "the name of a new file")
    check_replaceable(job_file, job_file)
    title = printable(os.path.basename(job_file).removesuffix(".toml"))
    skipped: list[str] = []
    if data_file is None:
        job = job_from_answers(title)
    else:
        job, skipped = job_of_file(job_file, data_file, title)
    try:
        content = str(job).encode()
    except UnicodeEncodeError:
        problem = "a name for the job file is not valid UTF-8"
        raise InputError(job_file, problem, "names that a job file can contain") from None
    replace_file(job_file, [content])
    if not options.quiet:
        for line in skipped:
            print(line)
        print(f"wrote {job_file}; next: einmpi check {job_file}")
    read_job(job_file, describe)


# ---- from the tensors of a file ------------------------------------------------------------------


MOST_TENSORS = 1000  # inputs of a new job file
MOST_STATEMENTS = 5  # of its program
_LABELS = ("i", "j", "k", "l", "m")


def job_of_file(job_file: str, data_file: str, title: str) -> tuple[NewJob, list[str]]:
    """Return the new job, and a line for each tensor that cannot be an input."""
    place = f"--from {data_file}"
    file_format = known_format(place, data_file)
    names = file_format.list_names(data_file, place, MOST_TENSORS + 1)
    if len(names) > MOST_TENSORS:
        problem = f"it has more than {counted(MOST_TENSORS, 'tensor')}"
        raise InputError(place, problem, "a file with fewer of them")
    folder = os.path.dirname(os.path.abspath(job_file))
    path_in_job = os.path.relpath(os.path.abspath(data_file), folder)
    job = NewJob(title, [])
    statements: list[tuple[str, Sequence[str]]] = []
    skipped = []
    for name in _with_sparse_tensors(data_file, names, place):
        spec = InputSpec("", file=data_file, inside=name, place=place)
        try:
            found = find_sparse(spec) or find(spec)
        except InputError as error:
            skipped.append(on_one_line(f"skipped: {error}"))
            continue
        path = name or os.path.splitext(os.path.basename(data_file))[0]
        own_name = path.rpartition("/")[2]
        dimensions = found.dimensions if isinstance(found, Dataset) else ()
        if dimensions == (own_name,):
            path += "_values"  # of a coordinate: its own name is that of the dimension
        elif own_name in dimensions:
            path = "_".join(path.split("/")[-2:])  # of a vector: E_x along x, y and z
        tensor = _tensor_name(path, job.inputs)
        job.inputs[tensor] = tensor_in_file(path_in_job, name)
        job.notes[tensor] = f"{found.dtype.name} {show_shape(found.shape)}"
        if not isinstance(found, Dataset):
            job.notes[tensor] += ", sparse"
        elif found.packing:
            job.notes[tensor] += f", read as stored: {found.packing}"
        if len(statements) < MOST_STATEMENTS:
            statements.append((tensor, _labels_for(dimensions, len(found.shape))))
    if not statements:
        raise InputError(place, "it has no tensor that can be an input", "a file with tensors")
    job.program = [_sum_of(tensor, labels, job.inputs) for tensor, labels in statements]
    return job, skipped


def _tensor_name(path: str, taken: Collection[str]) -> str:
    """Return a name for the tensor at this path that the language has no other use for."""
    parts = [re.sub(r"[^A-Za-z0-9_]+", "_", part) for part in re.split(r"[/.]", path) if part]
    last = parts[-1] if parts else "X"
    for candidate in (last, "_".join(parts) or last):
        name = candidate if not candidate[0].isdigit() else f"X{candidate}"
        if is_reserved(name) or keyword.iskeyword(name):
            name += "_"
        if name not in taken:
            return name
    number = 2
    while f"{name}_{number}" in taken:
        number += 1
    return f"{name}_{number}"


def _with_sparse_tensors(data_file: str, names: Sequence[str], place: str) -> list[str]:
    """Return the names of tensors with those of sparse ones in place of their parts."""
    found: dict[str, str] = {}  # the folder of a name → that folder, or nothing if it is no tensor
    for folder in dict.fromkeys(name.rpartition("/")[0] or "/" for name in names if "/" in name):
        try:
            sparse = find_sparse(InputSpec("", file=data_file, inside=folder, place=place))
        except InputError:
            sparse = None
        found[folder] = "" if sparse is None else folder
    return [*dict.fromkeys(found.get(name.rpartition("/")[0] or "/") or name for name in names)]


def _labels_for(names: Sequence[str], count: int) -> Sequence[str]:
    """Return labels for a tensor: the names of its dimensions, if they can be labels."""
    if names and len({*names}) == len(names) and all(map(_can_be_label, names)):
        return names
    return _LABELS[:count] if count <= len(_LABELS) else [f"i{number}" for number in range(count)]


def _can_be_label(name: str) -> bool:
    is_word = re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) is not None
    return is_word and not is_reserved(name) and not keyword.iskeyword(name)


def _sum_of(tensor: str, names: Sequence[str], tensors: Collection[str]) -> str:
    """Return a statement that adds up all elements, for the user to replace."""
    total = f"sum_of_{tensor}"
    while total in tensors:
        total += "_"
    if not names:
        return f"{total} = {tensor}"
    labels = []
    for label in names:
        while label in tensors:
            label += "_"
        labels.append(label)
    return f"{total} = sum({tensor}[{','.join(labels)}])"


# ---- from the user's answers ---------------------------------------------------------------------


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
                match node:
                    case ast.Subscript(value=ast.Name(id=name), slice=index):
                        if not is_callable(name):
                            tensors[name] = None
                        for entry in entries(index):
                            match entry:
                                case ast.Name(id=label) | ast.Slice(lower=ast.Name(id=label)):
                                    labels.add(label)
            names = _plain_names(tree)
            used.update(names)
            numbers.update(dict.fromkeys(names))
    no_size = {*tensors, *labels, *defined, *CONSTANTS}
    sizes = [name for name in numbers if name not in no_size and not is_callable(name)]
    needed = [name for name in tensors if name not in defined]
    results = [name for name in defined if name not in used]
    return needed, sizes, results


def _plain_names(node: ast.expr | None) -> list[str]:
    if node is None:
        return []
    return [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]


def _input_value(answer: str) -> tuple[str | dict[str, Any], Sequence[str]]:
    """Return the value of the input, and the sizes that its shape needs."""
    file, _ = split_short_form(answer)
    if format_with_suffix(suffix_of(file)) is not None:
        return _checked_short_form(answer, writable=False), ()
    extents = [extent.strip() for extent in re.split(r"[,×]", answer.strip("[]() "))]
    shape: list[int | str] = []
    sizes = []
    for extent in extents:
        if re.fullmatch(r"[0-9]{1,12}", extent) and int(extent) <= MAX_EXTENT:
            shape.append(int(extent))
        elif re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", extent):
            shape.append(extent)
            sizes.append(extent)
        else:
            raise _WrongAnswer(f"{answer!r:.60}; expected {_INPUT_HELP}")
    return {"shape": shape, "random": "normal"}, sizes


def _output_value(answer: str) -> str:
    if not answer:
        return ""
    return _checked_short_form(answer, writable=True)


def _checked_short_form(answer: str, writable: bool) -> str:
    try:
        read_short_form(answer, answer, writable)
    except InputError as error:
        raise _WrongAnswer(str(error)) from None
    return answer


def _size_value(answer: str) -> int:
    if re.fullmatch(r"[0-9]{1,12}", answer) and 1 <= int(answer) <= MAX_EXTENT:
        return int(answer)
    raise _WrongAnswer(f"{answer!r:.60}; expected a whole number from 1 to {MAX_EXTENT}")


# ---- the text of a job file ----------------------------------------------------------------------


@dataclass
class NewJob:
    """What a new job file says."""

    title: str
    program: Sequence[str]  # statements
    sizes: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # comments after inputs

    def __str__(self) -> str:
        tables = {"sizes": self.sizes, "inputs": self.inputs, "outputs": self.outputs}
        return job_text({"title": self.title}, "\n".join(self.program), tables, self.notes)


def tensor_in_file(file: str, name: str) -> str | dict[str, str]:
    """Return the value of an input that is a tensor in a file: the short form where it works."""
    key = known_format(file, file).key
    if not key:
        return file
    short = f"{file}:{name}"
    if split_short_form(short) == (file, name):
        return short
    return {"file": file, key: name}


# ---- examples ------------------------------------------------------------------------------------


def example_files() -> dict[str, bytes]:
    """Return the example jobs and scripts: their paths in the folder and what they contain."""
    folder = resources.files("einmpi").joinpath("examples")
    found = {path: file.read_bytes() for path, file in _files_in(folder, "")}
    return dict(sorted(found.items()))


def _files_in(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        path = f"{prefix}{entry.name}"
        if entry.is_dir():
            yield from _files_in(entry, f"{path}/")
        elif not entry.name.endswith(".h5"):  # results of examples that were run where they are
            yield path, entry


def examples(options: argparse.Namespace) -> None:
    """Copy the files that are not there yet. A file that differs from its example is an error."""
    folder: str = options.folder

    missing = {}
    for path, content in example_files().items():
        target = os.path.join(folder, path)
        if not os.path.lexists(target):
            missing[target] = content
        elif not _has_content(target, content):
            problem = f"{target} exists and is not the example"
            raise InputError("einmpi examples", problem, "another folder")
    for target, content in missing.items():
        try:
            os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
        except OSError as error:
            problem = f"{os.path.dirname(target)}: {error.strerror}"
            raise InputError("einmpi examples", problem, "a folder to write to") from None
        replace_file(target, [content])
        if target.endswith(".sh"):
            os.chmod(target, os.stat(target).st_mode | 0o111)
    if not options.quiet:
        print(f"{counted(len(missing), 'file')} copied to {folder}")


def _has_content(file: str, content: bytes) -> bool:
    if not os.path.isfile(file):
        return False
    with open(file, "rb") as opened:
        return opened.read(len(content) + 1) == content
