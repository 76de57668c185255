"""TOML with positions: the place of each key and string, typed access to values; values as text."""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

from einmpi.errors import InputError, one_of
from einmpi.language.syntax import INTEGER_ARITHMETIC, Source, integer_text

KeyPath: TypeAlias = tuple[str | int, ...]
Token: TypeAlias = tuple[str, int]  # text, offset
Positions: TypeAlias = dict[KeyPath, tuple[int, int]]  # offset of the key, offset of its value
# Where a key of a table is, for messages: place("optimizer", "rate").
Place: TypeAlias = Callable[..., str]
T = TypeVar("T")

# Far above what jobs need: they keep the time and the memory of reading a file within bounds.
MAX_FILE_BYTES = 16 * 2**20
MAX_TOKENS = 1_000_000  # names, numbers, strings and signs; a program is one string
MAX_KEY_PARTS = 16  # of a dotted key; tomllib takes quadratic time and memory for long ones

# tomllib has accepted the text before this is used, so it need not refuse anything.
_TOKEN = re.compile(
    r'''"""(?:\\.|"{1,2}(?!")|[^"\\]++)*+"{3,5} | \'\'\'(?:'{1,2}(?!')|[^']++)*+'{3,5}
      | "(?:\\.|[^"\\\n]++)*+" | '[^'\n]*+' | \#[^\n]*
      | [ \t]+ | [\n\[\]{}=,.] | [^\s"'\#\[\]{}=,.]+''',
    re.VERBOSE | re.DOTALL,
)
_ENDS_OF_KEYS = frozenset("\n[]{}=,")
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
    """A TOML file that was read; `name` is its path as the user gave it."""

    name: str
    text: str
    data: Mapping[str, Any]
    positions: Positions

    @cached_property
    def _line_starts(self) -> list[int]:
        """The offset of the first character of each line."""
        return [0, *(match.end() for match in re.finditer("\n", self.text))]

    def place(self, path: KeyPath) -> str:
        """Return "name:line:column" of a key, or of the nearest key around it."""
        while path and path not in self.positions:
            path = path[:-1]
        return self.position(self.positions[path][0]) if path else self.name

    def lookup(self, path: KeyPath) -> Any:
        """Return the value at a path, None if there is none."""
        found: Any = self.data
        for step in path:
            if isinstance(step, str) and not (isinstance(found, dict | Mapping) and step in found):
                return None
            found = found[step]
        return found

    def line(self, path: KeyPath) -> int:
        """Return the number of the line on which a key is."""
        return bisect_right(self._line_starts, self.positions[path][0])

    def position(self, offset: int) -> str:
        """Return "name:line:column" of an offset in the text."""
        line = bisect_right(self._line_starts, offset)
        column = offset - self._line_starts[line - 1] + 1
        return f"{self.name}:{line}:{column}"

    def source(self, path: KeyPath) -> Source:
        """Return a string value as a Source that knows its place in the file.

        Escapes in the string, such as \\n for a line end, shift the columns and lines after them.
        """
        text = str(self.lookup(path))
        match = _TOKEN.match(self.text, self.positions[path][1])
        assert match is not None
        literal = match[0]
        start = 1  # the first character after the quotes
        if literal.startswith(('"""', "'''")):
            has_escapes = literal[0] == '"'
            # TOML drops a line end right after the quotes, and white space after a backslash
            # that ends a line.
            ignored = r"\n|\\[ \t]*\n\s*" if has_escapes else r"\n"
            dropped = re.compile(ignored).match(literal, 3)
            start = dropped.end() if dropped else 3
            as_written = literal[start:-3]
            if has_escapes and _continues_as_python(as_written):
                text = as_written
        line, column = _line_and_column(self.text, match.start() + start)
        return Source(self.name, text, line, column - 1)


def _continues_as_python(written: str) -> bool:
    """Return whether each backslash joins two lines, in TOML and in Python alike.

    If so, the text as written has the right line numbers.
    """
    lines = written.split("\n")
    for k, line in enumerate(lines):
        if "\\" not in line:
            continue
        if not re.fullmatch(r"[^#\\]*\\", line) or not lines[k + 1].strip():
            return False
    return True


def _line_and_column(text: str, offset: int) -> tuple[int, int]:
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


# ---- reading ------------------------------------------------------------------------------------


def read_document(path: str, wanted: str = "a job file in TOML") -> Entry:
    """Read a TOML file; `wanted` says what it should be, for errors."""
    text = _read_text(path, wanted)
    _check_amount(path, text)
    try:
        data = tomllib.loads(text)
        return Entry(Document(path, text, data, key_positions(text)))
    except RecursionError:
        what = "values are nested too deeply"
        raise InputError(path, what, "a table of strings, numbers and lists") from None
    except ValueError as error:  # tomllib.TOMLDecodeError, or a number that Python refuses
        raise _not_toml(path, text, str(error)) from None


def _check_amount(path: str, text: str) -> None:
    """Refuse a text with too many tokens or too long a dotted key, before tomllib reads it.

    The text need not be valid: after the first thing that is no token nothing more is checked.
    """
    tokens = 0
    parts = 1  # of the dotted key or number that the last tokens belong to
    offset = 0
    match = _TOKEN.match(text)
    while match is not None:
        token = match[0]
        is_open_string = token in ('""', "''") and text.startswith(token[0], match.end())
        if is_open_string:
            return  # three quotes that nothing closes
        if token == ".":
            parts += 1
        elif token in _ENDS_OF_KEYS:
            parts = 1
        if token[0] not in " \t#":
            tokens += 1
        if parts > MAX_KEY_PARTS or tokens > MAX_TOKENS:
            line, column = _line_and_column(text, offset)
            what = f"this file has more than {MAX_TOKENS} names, values and signs"
            expected = "a smaller file"
            if parts > MAX_KEY_PARTS:
                what = "this key has too many parts"
                expected = f"at most {MAX_KEY_PARTS} names with dots between them"
            raise InputError(f"{path}:{line}:{column}", what, expected)
        offset = match.end()
        match = _TOKEN.match(text, offset)


def _not_toml(path: str, text: str, message: str) -> InputError:
    """Return the error for tomllib's message, which ends with a position in words."""
    pattern = r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)"
    found = re.fullmatch(pattern, message, re.DOTALL)
    where = path
    if found is not None:
        message, line, column = found.groups()
        if line is None:
            line, column = _line_and_column(text, len(text.rstrip()))
        where = f"{path}:{line}:{column}"
    return InputError(where, f"this is not TOML: {message}", "KEY = VALUE and [TABLE] lines")


def _read_text(path: str, wanted: str) -> str:
    try:
        raw = _read_bytes(path)
    except FileNotFoundError:
        raise InputError(path or "''", "there is no such file", wanted) from None
    except IsADirectoryError:
        raise InputError(path, "this is a folder", wanted) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(repr(path)[1:-1], f"cannot be read: {reason}", wanted) from None
    if raw is None:
        raise InputError(path, "this is not a regular file", wanted)
    if len(raw) > MAX_FILE_BYTES:
        raise InputError(path, "this file is too large", f"at most {MAX_FILE_BYTES} bytes")
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode(errors="ignore")
        line, column = _line_and_column(before, len(before))
        raise InputError(f"{path}:{line}:{column}", "this is not UTF-8 text", wanted) from None


def _read_bytes(path: str) -> bytes | None:
    """Return the contents of a file; None for a pipe or a device, which might never end.

    What the caller has opened is read to its end, whatever it is: /dev/stdin, or the /dev/fd/63
    that a shell makes of <(COMMAND).
    """
    mode = os.stat(path).st_mode
    is_open = path == "/dev/stdin" or os.path.realpath(os.path.dirname(path)).startswith("/proc/")
    if not is_open and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        return None
    with open(path, "rb") as file:
        return file.read(MAX_FILE_BYTES + 1)


# ---- positions ----------------------------------------------------------------------------------


def key_positions(text: str) -> Positions:
    """Return the positions of every key and every element of a list in a valid TOML text."""
    tokens: list[Token] = []
    for match in _TOKEN.finditer(text):
        if match[0][0] not in " \t#":
            tokens.append((match[0], match.start()))
    positions: Positions = {}
    table: KeyPath = ()
    numbers: dict[KeyPath, int] = {}  # of the last table in each list of tables
    k = 0
    while k < len(tokens):
        token = tokens[k][0]
        if token in ("\n", "]"):
            k += 1
        elif token == "[":
            is_in_list = tokens[k + 1][0] == "["
            in_header: Positions = {}  # of the names as they are written
            k, names = _read_key(tokens, k + 2 if is_in_list else k + 1, (), in_header)
            if is_in_list:
                tables = (*_in_last_tables(names[:-1], numbers), names[-1])
                numbers[tables] = numbers.get(tables, -1) + 1
            for count in range(1, len(names) + 1):
                table = _in_last_tables(names[:count], numbers)
                positions.setdefault(table, in_header[names[:count]])
                if table[-1] != names[count - 1]:  # the number of a table
                    positions.setdefault(table[:-1], in_header[names[:count]])
        else:
            k = _read_pair(tokens, k, table, positions)
    return positions


def _in_last_tables(names: KeyPath, numbers: Mapping[KeyPath, int]) -> KeyPath:
    """Return the path of a table: where a name is that of a list of tables, in its last one."""
    path: KeyPath = ()
    for name in names:
        path = (*path, name)
        if path in numbers:
            path = (*path, numbers[path])
    return path


def _read_key(
    tokens: list[Token], k: int, path: KeyPath, positions: Positions
) -> tuple[int, KeyPath]:
    """Read a dotted key. Return the number of the token after it, and its whole path."""
    while True:
        text, offset = tokens[k]
        is_quoted = text[0] in "\"'"
        name = tomllib.loads(f"key = {text}")["key"] if is_quoted else text
        path = (*path, name)
        positions.setdefault(path, (offset, offset))
        if tokens[k + 1][0] != ".":
            return k + 1, path
        k += 2


def _read_pair(tokens: list[Token], k: int, table: KeyPath, positions: Positions) -> int:
    """Read "key = value". Return the number of the token after it."""
    k, path = _read_key(tokens, k, table, positions)
    key_offset = positions[path][0]
    value_offset = tokens[k + 1][1]
    positions[path] = (key_offset, value_offset)
    return _read_value(tokens, k + 1, path, positions)


def _read_value(tokens: list[Token], k: int, path: KeyPath, positions: Positions) -> int:
    """Read a value. Return the number of the token after it."""
    opening = tokens[k][0]
    if opening not in ("[", "{"):
        while k < len(tokens) and tokens[k][0] not in (",", "]", "}", "\n"):
            k += 1
        return k
    k += 1
    count = 0  # elements of a list
    while tokens[k][0] not in ("]", "}"):
        token, offset = tokens[k]
        if token in (",", "\n"):
            k += 1
        elif opening == "{":
            k = _read_pair(tokens, k, path, positions)
        else:
            element = (*path, count)
            positions[element] = (offset, offset)
            k = _read_value(tokens, k, element, positions)
            count += 1
    return k + 1


# ---- typed access -------------------------------------------------------------------------------


def show(value: object) -> str:
    """Return a value as text for a message, shortened if it is long."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 128:
        return f"about {'-' if value < 0 else ''}2**{value.bit_length() - 1}"
    shown = repr(value) if type(value) in _KINDS else str(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def check_count(where: str, name: str, value: object, most: int) -> None:
    """Refuse what is not an integer from 1 to a power of 2."""
    if type(value) is not int or not 1 <= value <= most:
        expected = f"an integer from 1 to 2**{most.bit_length() - 1} = {most}"
        raise InputError(where, f"{name} is {show(value)}", expected)


def kind_of(value: object) -> str:
    """Return what a value is, for a message: the kind of a list or a table, else the value."""
    return _KINDS[type(value)] if isinstance(value, list | dict) else show(value)


@dataclass(frozen=True)
class Entry:
    """What a document has at a path, if anything; without a path it is the document as a whole.

    `entry["key"]` is what is inside of it.
    """

    document: Document
    path: KeyPath = ()

    def __getitem__(self, key: str | int) -> Entry:
        return Entry(self.document, (*self.path, key))

    @property
    def key(self) -> str | int:
        """Its own name, or its number in a list."""
        return self.path[-1]

    @property
    def value(self) -> Any:
        """The value, None if there is none."""
        return self.document.lookup(self.path)

    @property
    def place(self) -> str:
        """Where it is, or would be, for messages."""
        return self.document.place(self.path)

    def place_of(self, *keys: str | int) -> str:
        """Return where something inside of it is, or would be."""
        return self.document.place((*self.path, *keys))

    @property
    def source(self) -> Source:
        """A string as a Source that knows its place in the file."""
        return self.document.source(self.path)

    def wrong(self, what: str, expected: str = "", hint: str = "") -> InputError:
        """Return the error that says what is wrong here."""
        return InputError(self.place, what, expected, hint)

    def relative_path(self, file: str) -> str:
        """Return a path that the document names, relative to the document's own directory."""
        return os.path.normpath(os.path.join(os.path.dirname(self.document.name), file))

    def get(self, kind: type[T]) -> T | None:
        """Return the value, None if there is none; InputError if it is of another kind."""
        found = self.value
        if found is None or type(found) is kind:
            return found
        name = self.key
        if isinstance(name, int):
            name = f"entry {name + 1} of {self.path[-2]}"
        raise self.wrong(f"{name} is {kind_of(found)}", _KINDS[kind])

    def choice(self, allowed: Iterable[str], default: str) -> str:
        """Return a string that must be one of the allowed ones."""
        found = self.get(str)
        if found is None:
            return default
        names = list(allowed)
        if found not in names:
            raise self.wrong(f"unknown {self.key} {show(found)}", one_of(names, found))
        return found

    def table(self, keys: Iterable[str] | None = None) -> Mapping[str, Any]:
        """Return a table, empty if there is none; InputError for a key that is not in `keys`."""
        found = self.get(dict) if self.path else self.document.data
        if not found:
            return {}
        if keys is None:
            return found
        names = list(keys)
        for key in found:
            if key not in names:
                tables = [part for part in self.path if isinstance(part, str)]
                inside = f" in {'.'.join(tables)}" if tables else ""
                raise self[key].wrong(f"unknown key {show(key)}{inside}", one_of(names, key))
        return found

    def whole_number(self, sizes: Mapping[str, int]) -> int | None:
        """Return an integer, or the value of a string of integer arithmetic; None for all else."""
        found = self.value
        if not isinstance(found, str):
            return found if type(found) is int else None
        try:
            return integer_text(self.source, sizes)
        except InputError as error:
            if not error.what.startswith("syntax error"):
                raise
            what = f"{show(found)} is not integer arithmetic"
            raise InputError(error.where, what, INTEGER_ARITHMETIC) from None


# ---- writing ------------------------------------------------------------------------------------


def toml_text(value: Any) -> str:
    """Return a value as TOML, on one line."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {toml_text(each)}' for key, each in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_text, value))}]"
    if isinstance(value, float):
        return repr(float(value))  # JSON has no inf and nan
    # Otherwise JSON is TOML, but it does not escape DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
