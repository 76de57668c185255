"""The text of a new job file. Words of the user become TOML strings, whatever they contain."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from einmpi.files.formats import known_format, split_short_form


@dataclass
class NewJob:
    """What a new job file says. The values of inputs and outputs are written as TOML."""

    title: str
    program: Sequence[str]  # statements
    sizes: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # comments after inputs

    def __str__(self) -> str:
        lines = [f"title   = {quoted(self.title)}", f"program = {_program_text(self.program)}"]
        sizes = {name: str(value) for name, value in self.sizes.items()}
        for heading, entries in (("sizes", sizes), ("inputs", self.inputs)):
            lines += _table_lines(heading, entries, self.notes)
        lines += _table_lines("outputs", self.outputs, {})
        return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    """Return the text as a TOML string on one line."""
    # The escapes of JSON are escapes of TOML too, but JSON does not escape DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def tensor_in_file(file: str, name: str) -> str:
    """Return the value of an input that is a tensor in a file: the short form where it works."""
    key = known_format(file, file).key
    if not key:
        return quoted(file)
    short = f"{file}:{name}"
    if split_short_form(short) == (file, name):
        return quoted(short)
    return f"{{ file = {quoted(file)}, {key} = {quoted(name)} }}"


def _program_text(statements: Sequence[str]) -> str:
    text = "\n".join(statements)
    if "\\" in text or '"""' in text or not all(line.isprintable() for line in statements):
        return quoted(text)
    return f'"""\n{text}\n"""'


def _table_lines(heading: str, entries: Mapping[str, str], notes: Mapping[str, str]) -> list[str]:
    if not entries:
        return []
    lines = ["", f"[{heading}]"]
    width = max(len(name) for name in entries)
    for name, value in entries.items():
        note = f"  # {notes[name]}" if name in notes else ""
        lines.append(f"{name:<{width}} = {value}{note}")
    return lines
