"""A TOML file with positions: where each key and each string stands, and typed access that says what is wanted."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from einmpi.errors import InputError, one_of
from einmpi.language.syntax import Source, integer_text

KeyPath: TypeAlias = tuple[str | int, ...]
Token: TypeAlias = tuple[str, int]  # text, offset
Spots: TypeAlias = dict[KeyPath, tuple[int, int]]  # offset of the key, offset of its value
T = TypeVar("T")

# tomllib has accepted the text before this is used, so it need not refuse anything.
_TOKEN = re.compile(
    r'''"""(?:\\.|"{1,2}(?!")|[^"\\]++)*+"{3,5} | \'\'\'(?:'{1,2}(?!')|[^']++)*+'{3,5}
      | "(?:\\.|[^"\\\n]++)*+" | '[^'\n]*+' | \#[^\n]* | [ \t]+ | [\n\[\]{}=,.] | [^\s"'\#\[\]{}=,.]+''',
    re.VERBOSE | re.DOTALL,
)
_KINDS = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "a table",
}


@dataclass(frozen=True)
class Document:
    """A TOML file that was read; `name` is the path as the user gave it."""

    name: str
    text: str
    data: Mapping[str, Any]
    spots: Spots

    def place(self, path: KeyPath) -> str:
        """ "name:line:column" of a key, or of the nearest one around it."""
        while path and path not in self.spots:
            path = path[:-1]
        return self.position(self.spots[path][0]) if path else self.name

    def position(self, offset: int) -> str:
        return ":".join(map(str, (self.name, *_line_and_column(self.text, offset))))

    def source(self, path: KeyPath) -> Source:
        """A string value as a Source whose first character stands where it does in the file.

        Escapes in the string, such as \\n for a line end, shift the columns and lines that follow them.
        """
        literal, start, text = (
            _TOKEN.match(self.text, self.spots[path][1]),
            1,
            str(lookup(self, path)),
        )
        assert literal is not None
        if literal[0].startswith(('"""', "'''")):
            # TOML drops a line end right after the quotes, and white space after a backslash that ends a line.
            dropped = re.compile(r"\n|\\[ \t]*\n\s*" if literal[0][0] == '"' else r"\n").match(
                literal[0], 3
            )
            start = dropped.end() if dropped else 3
            if literal[0][0] == '"' and _continues_as_python(literal[0][start:-3]):
                text = literal[0][start:-3]
        line, column = _line_and_column(self.text, literal.start() + start)
        return Source(self.name, text, line, column - 1)


def _continues_as_python(written: str) -> bool:
    """A backslash joins two lines in TOML and in Python alike; as written, the lines keep their numbers."""
    lines = written.split("\n")
    joins = [k for k, line in enumerate(lines) if "\\" in line]
    return all(re.fullmatch(r"[^#\\]*\\", lines[k]) and lines[k + 1].strip() for k in joins)


def _line_and_column(text: str, offset: int) -> tuple[int, int]:
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


# ---- reading --------------------------------------------------------------------------------------------------------


def read_document(path: str, wanted: str = "a job file in TOML") -> Document:
    text = _read_text(path, wanted)
    try:
        data = tomllib.loads(text)
        return Document(path, text, data, key_positions(text))
    except RecursionError:
        raise InputError(
            path, "values are nested too deeply", "a table of strings, numbers and lists"
        ) from None
    except ValueError as error:  # tomllib.TOMLDecodeError, or a number that Python refuses
        found = re.fullmatch(
            r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", str(error), re.DOTALL
        )
        message, line, column = found.groups() if found else (str(error), None, None)
        if found and not line:
            line, column = _line_and_column(text, len(text.rstrip()))
        where = f"{path}:{line}:{column}" if found else path
        raise InputError(
            where, f"this is not TOML: {message}", "KEY = VALUE and [TABLE] lines"
        ) from None


def _read_text(path: str, wanted: str) -> str:
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except FileNotFoundError:
        raise InputError(path, "there is no such file", wanted) from None
    except IsADirectoryError:
        raise InputError(path, "this is a folder", wanted) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(repr(path)[1:-1], f"cannot be read: {reason}", wanted) from None
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode(errors="ignore")
        line, column = _line_and_column(before, len(before))
        raise InputError(f"{path}:{line}:{column}", "this is not UTF-8 text", wanted) from None


def beside(document: Document, file: str) -> str:
    """A path in the document, relative to the document's own folder."""
    return os.path.normpath(os.path.join(os.path.dirname(document.name), file))


# ---- positions ------------------------------------------------------------------------------------------------------


def key_positions(text: str) -> Spots:
    """Where every key and every element of a list stands in a valid TOML text."""
    found = ((match[0], match.start()) for match in _TOKEN.finditer(text))
    tokens = [token for token in found if token[0][0] not in " \t#"]
    spots: Spots = {}
    table: KeyPath = ()
    k = 0
    while k < len(tokens):
        if tokens[k][0] in ("\n", "]"):
            k += 1
        elif tokens[k][0] == "[":
            k += 2 if tokens[k + 1][0] == "[" else 1
            k, table = _key(tokens, k, (), spots)
        else:
            k = _pair(tokens, k, table, spots)
    return spots


def _key(tokens: list[Token], k: int, path: KeyPath, spots: Spots) -> tuple[int, KeyPath]:
    while True:
        text, offset = tokens[k]
        name = tomllib.loads(f"key = {text}")["key"] if text[0] in "\"'" else text
        path = (*path, name)
        spots.setdefault(path, (offset, offset))
        if tokens[k + 1][0] != ".":
            return k + 1, path
        k += 2


def _pair(tokens: list[Token], k: int, table: KeyPath, spots: Spots) -> int:
    k, path = _key(tokens, k, table, spots)
    spots[path] = (spots[path][0], tokens[k + 1][1])
    return _value(tokens, k + 1, path, spots)


def _value(tokens: list[Token], k: int, path: KeyPath, spots: Spots) -> int:
    """Step over a value; number of the token after it."""
    opening, count = tokens[k][0], 0
    if opening not in ("[", "{"):
        while k < len(tokens) and tokens[k][0] not in (",", "]", "}", "\n"):
            k += 1
        return k
    k += 1
    while tokens[k][0] not in ("]", "}"):
        if tokens[k][0] in (",", "\n"):
            k += 1
        elif opening == "{":
            k = _pair(tokens, k, path, spots)
        else:
            spots[(*path, count)] = (tokens[k][1], tokens[k][1])
            k, count = _value(tokens, k, (*path, count), spots), count + 1
    return k + 1


# ---- typed access ---------------------------------------------------------------------------------------------------


def lookup(document: Document, path: KeyPath) -> Any:
    """The value, None where there is none."""
    found: Any = document.data
    for step in path:
        if isinstance(step, str) and not (isinstance(found, dict | Mapping) and step in found):
            return None
        found = found[step]
    return found


def show(value: object) -> str:
    """A value for a message, short whatever it is."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 128:
        return f"about {'-' if value < 0 else ''}2**{value.bit_length() - 1}"
    shown = repr(value) if type(value) in _KINDS else str(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def kind_of(value: object) -> str:
    """A value that is not of the wanted kind."""
    return _KINDS[type(value)] if isinstance(value, list | dict) else show(value)


def get(document: Document, path: KeyPath, kind: type[T]) -> T | None:
    """The value, which must be of this kind; None where there is none."""
    found = lookup(document, path)
    if found is None or type(found) is kind:
        return found
    raise InputError(
        document.place(path), f"{path[-1]} is {kind_of(found)}", _KINDS[kind]
    )


def choice(document: Document, path: KeyPath, allowed: Iterable[str], default: str) -> str:
    found = get(document, path, str)
    if found is None:
        return default
    names = list(allowed)
    if found not in names:
        raise InputError(
            document.place(path), f"unknown {path[-1]} {show(found)}", one_of(names, found)
        )
    return found


def table(
    document: Document, path: KeyPath, keys: Iterable[str] | None = None
) -> Mapping[str, Any]:
    """A table, with keys that are not in `keys` refused; empty where there is none."""
    found = get(document, path, dict) if path else document.data
    names = None if keys is None else list(keys)
    for key in found or {}:
        if names is not None and key not in names:
            inside = f" in {'.'.join(map(str, path))}" if path else ""
            raise InputError(
                document.place((*path, key)), f"unknown key {show(key)}{inside}", one_of(names, key)
            )
    return found or {}


def whole_number(document: Document, path: KeyPath, sizes: Mapping[str, int]) -> int | None:
    """A whole number, or a string of whole-number arithmetic over sizes; None where it is neither."""
    found = lookup(document, path)
    if not isinstance(found, str):
        return found if type(found) is int else None
    try:
        return integer_text(document.source(path), sizes)
    except InputError as error:
        if not error.what.startswith("syntax error"):
            raise
        allowed = "whole numbers, earlier sizes, + - * // % ** and brackets"
        raise InputError(
            error.where, f"{show(found)} is not whole-number arithmetic", allowed
        ) from None
