"""Mutations of bytes, of JSON and of TOML documents, each a function of a random generator."""

from __future__ import annotations

import copy
import json
import random
import re
import struct
from typing import Any

# ---- bytes --------------------------------------------------------------------------------------

# What lengths, offsets and counts in headers are replaced by.
EXTREME_INTEGERS = (0, 1, 2, 7, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1)
EXTREME_LONG_INTEGERS = (*EXTREME_INTEGERS, 2**39, 2**47, 2**63 - 1, 2**63, 2**64 - 1)
# The more often a kind of change is listed, the more often it is made.
_BYTE_CHANGES = (
    *("bit", "bit", "byte", "byte", "integer", "integer", "long", "long", "zeros", "cut", "cut"),
    *("insert", "remove", "copy", "swap", "append"),
)


def mutate_bytes(data: bytes, draw: random.Random) -> bytes:
    """Return a copy with one change: bits, bytes, a header field, a splice or a truncation."""
    changed = bytearray(data)
    kind = draw.choice(_BYTE_CHANGES)
    if not changed:
        return draw.randbytes(draw.choice((1, 8, 100)))
    # Headers are at the beginning, where a change has the most effect.
    limit = len(changed) if draw.random() < 0.6 else min(len(changed), 256)
    at = draw.randrange(limit)
    size = draw.choice((1, 2, 4, 8, 16, 64, 512))
    if kind == "bit":
        changed[at] ^= 1 << draw.randrange(8)
    elif kind == "byte":
        changed[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
    elif kind == "integer":
        value = draw.choice(EXTREME_INTEGERS)
        changed[at : at + 4] = struct.pack(draw.choice("<>") + "I", value)
    elif kind == "long":
        aligned = at // 8 * 8
        value = draw.choice(EXTREME_LONG_INTEGERS)
        changed[aligned : aligned + 8] = struct.pack("<Q", value)
    elif kind == "zeros":
        changed[at : at + size] = bytes(size)
    elif kind == "cut":
        del changed[at:]
    elif kind == "insert":
        changed[at:at] = draw.randbytes(size)
    elif kind == "remove":
        del changed[at : at + size]
    elif kind == "copy":
        source = draw.randrange(len(changed))
        changed[at : at + size] = changed[source : source + size]
    elif kind == "swap":
        other = draw.randrange(len(changed))
        first = bytes(changed[at : at + size])
        changed[at : at + size] = changed[other : other + size]
        changed[other : other + size] = first
    else:
        changed += draw.randbytes(size)
    return bytes(changed)


# ---- characters ---------------------------------------------------------------------------------

ODD_CHARACTERS = (
    "\0\x07\x08\x1b\x7f\x9b\r\n\t '\"\\#=[]{}().,;:/*-+%~&|<>!?@$^`_0123456789aZ"
    "é→∑名\u202e\u2028\ufeff🦆"
)


def mutate_text(text: str, draw: random.Random) -> str:
    """Return a copy with a few characters changed, removed, repeated or added."""
    at = draw.randrange(len(text) + 1)
    size = draw.choice((1, 1, 1, 2, 5, 20))
    kind = draw.choice(("replace", "insert", "remove", "repeat", "odd"))
    if kind == "replace":
        return text[:at] + draw.choice(ODD_CHARACTERS) + text[at + 1 :]
    if kind == "insert":
        return text[:at] + draw.choice(ODD_CHARACTERS) + text[at:]
    if kind == "remove":
        return text[:at] + text[at + size :]
    if kind == "repeat":
        return text[:at] + text[at : at + size] * draw.choice((2, 3, 50, 2000)) + text[at + size :]
    return text[:at] + draw.choice(ODD_TEXTS) + text[at:]


ODD_TEXTS = (
    "",
    " ",
    "\x1b[31m",
    "\x1b]0;title\x07",
    "a\nb",
    "é",
    "e\u0301",
    "名前",
    "\u202eabc",
    "🦆",
    "a" * 300,
    "x" * 100_000,
    "../..",
    "/",
    "/dev/null",
    "%s%n{0}",
    "nan",
    "-0",
    "1e400",
    "None",
    "__class__",
)

# ---- JSON ---------------------------------------------------------------------------------------

ODD_JSON_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    3.5,
    float("nan"),
    float("inf"),
    2**31,
    2**39,
    2**63,
    10**40,
    "",
    "A",
    "F64",
    "float64",
    "é\0",
    [],
    {},
    [0],
    [-1, 2],
    [[1]],
    {"a": 1},
)


def mutate_json(value: Any, draw: random.Random) -> Any:
    """Return a copy of a JSON value with one entry replaced, removed, added, repeated or moved."""
    changed = copy.deepcopy(value)
    containers = _containers(changed)
    if not containers:
        return draw.choice(ODD_JSON_VALUES)
    container = draw.choice(containers)
    keys = list(container) if isinstance(container, dict) else list(range(len(container)))
    kind = draw.choice(("replace", "replace", "number", "remove", "add", "repeat", "swap", "deep"))
    odd = draw.choice(ODD_JSON_VALUES)
    if not keys or kind == "add":
        if isinstance(container, dict):
            container[draw.choice(ODD_TEXTS[:16])] = odd
        else:
            container.insert(draw.randrange(len(container) + 1), odd)
        return changed
    key = draw.choice(keys)
    if kind == "replace":
        container[key] = odd
    elif kind == "number":
        if isinstance(container[key], int):
            container[key] += draw.choice((-8, -1, 1, 8, 64, 2**20))
        else:
            container[key] = draw.choice(EXTREME_LONG_INTEGERS)
    elif kind == "remove":
        del container[key]
    elif kind == "repeat":
        repeated = copy.deepcopy(container[key])
        if isinstance(container, dict):
            container[f"{key}2"] = repeated
        else:
            container.insert(key, repeated)
    elif kind == "swap":
        other = draw.choice(keys)
        container[key], container[other] = container[other], container[key]
    else:
        nested: Any = container[key]
        for _ in range(draw.choice((1, 2, 10))):
            nested = [nested]
        container[key] = nested
    return changed


def _containers(value: Any) -> list[Any]:
    """Return all lists and dicts in a JSON value."""
    found = []
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if isinstance(current, dict):
            found.append(current)
            waiting += current.values()
        elif isinstance(current, list):
            found.append(current)
            waiting += current
    return found


def json_bytes(value: Any, draw: random.Random) -> bytes:
    """Return the JSON text of a value, now and then with its characters changed too."""
    text = json.dumps(value)
    kind = draw.random()
    if kind < 0.2:
        text = mutate_text(text, draw)
    elif kind < 0.25:  # deeper than Python's own functions can go
        depth = draw.choice((100, 1000, 100_000))
        text = text.replace("[", "[" * depth, 1).replace("]", "]" * depth, 1)
    return text.encode(errors="surrogatepass")


# ---- TOML ---------------------------------------------------------------------------------------

# A document is a list of (key, value), both as TOML text: any of them can be changed alone.
TomlEntries = list[tuple[str, str]]


def toml_string(text: str) -> str:
    """Return a TOML string with everything escaped that has to be."""
    escaped = []
    for character in text:
        if character in '"\\':
            escaped.append(f"\\{character}")
        elif character.isprintable() or character > "\x9f":
            escaped.append(character)
        else:
            escaped.append(f"\\u{ord(character):04x}")
    return '"' + "".join(escaped) + '"'


def toml_bytes(entries: TomlEntries) -> bytes:
    """Return the text of a document."""
    lines = []
    for key, value in entries:
        lines.append(f"{key} = {value}\n")
    return "".join(lines).encode(errors="replace")


ODD_NUMBERS = (
    *("0", "-1", "1", "2", "3", "7", "64", "100000", "-0", "+5", "1_000", "0x10", "0b11"),
    *("2147483648", "549755813888", "549755813889", "9223372036854775807", "9223372036854775808"),
    *("1" + "0" * 40, "9" * 5000, "0.5", "-1e308", "1e308", "1e-320", "nan", "inf", "-inf"),
)
ODD_VALUES = (
    *("true", "false", "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "[]", "{}", '""'),
    *("[[]]", "[0]", "[1, 2, 3]", '["s"]', '["s", "t"]', "{ a = 1 }", "[{ }]", "''", '"""\n"""'),
)
# Strings that mean something somewhere in a job or machine file.
ODD_WORDS = (
    *("float16", "bfloat16", "float32", "complex64", "int8", "uint64", "bool", "object", "O", "V8"),
    *("eindecomp", "eindecomp-paper", "sqrt", "data", "megatron", "replicate", "numpy", "cupy"),
    *(
        "normal",
        "uniform",
        "zeros",
        "ones",
        "arange",
        "gzip",
        "lzf",
        "szip",
        "1:2",
        "-1:",
        ":",
        "2:1",
    ),
    *("0 B", "-1 GiB", "1 KiB", "20 KiB", "4 GiB", "1e30 TiB", "1e400 B", "nan B", "inf GB/s"),
    *(
        "0 us",
        "1 ns",
        "1e-30 s",
        "1e300 s",
        "-1 us",
        "0 GB/s",
        "1e-300 B/s",
        "1e300 Gop/s",
        "1 us us",
    ),
    *("s", "s // 0", "s % 0", "s - s", "-s", "s * s", "2 ** 39", "2**40", "9**9**9", "s ** 100000"),
    *(
        "(" * 300 + "s" + ")" * 300,
        "-" * 5000 + "1",
        "1 +" * 3000 + "1",
        "import os",
        "s.real",
        "a := 1",
    ),
    *("x.h5:/A", "x.h5:A/../A", "x.h5:", "x.h5", ":/A", "x.npy", "x.npy:/A", "x.safetensors:A"),
    *(
        "out.h5:/Z",
        "out.h5:/group",
        "out.h5:/",
        "out.npy",
        "none/out.npy",
        "none.h5:/A",
        "folder.h5:/A",
    ),
    *("/", ".", "..", "job.toml", "fifo.h5:/A", "fifo.npy", "loop.npy", "machine.toml", "x.txt"),
)


def odd_toml_value(draw: random.Random) -> str:
    """Return a TOML value that few places accept."""
    kind = draw.choice(("number", "value", "word", "word", "text", "deep", "long"))
    if kind == "number":
        return draw.choice(ODD_NUMBERS)
    if kind == "value":
        return draw.choice(ODD_VALUES)
    if kind == "word":
        return toml_string(draw.choice(ODD_WORDS))
    if kind == "text":
        return toml_string(draw.choice(ODD_TEXTS))
    if kind == "deep":
        depth = draw.choice((2, 10, 200, 3000))
        return draw.choice(("[" * depth + "]" * depth, "{a=" * depth + "1" + "}" * depth))
    count = draw.choice((10, 33, 2000))
    return "[" + "1," * count + "]"


ODD_KEYS = (
    *(
        "titel",
        "program",
        "dtype",
        "sizes",
        "inputs",
        "outputs",
        "plan",
        "run",
        "roles",
        '""',
        '"a b"',
    ),
    *(
        "sizes.s",
        "sizes.i",
        "sizes.A",
        "sizes.Z",
        "sizes.sum",
        "sizes.inf",
        "sizes.lambda",
        "sizes.'é'",
    ),
    *(
        "inputs.A",
        "inputs.A.shape",
        "inputs.A.rows",
        "inputs.A.parts",
        "inputs.A.seed",
        "inputs.A.low",
    ),
    *(
        "inputs.A.resident",
        "inputs.Z",
        "inputs.'A[i]'",
        "outputs.Z",
        "outputs.Z.chunks",
        "outputs.A",
    ),
    *(
        "outputs.Z.parts",
        "outputs.Z.dtype",
        "outputs.Z.compression",
        "plan.strategy",
        "plan.memory",
    ),
    *("plan.machine", "run.backend", "run.fast_math", "run.scratch", "run.strict", "roles.batch"),
    *(
        "roles.head",
        "roles.nothing",
        "kernels.other",
        "inside.latency",
        "between.bandwidth",
        "measured",
    ),
    *("a" + ".a" * 500, '"\\u001b[31m"', '"\\u0000"', "'" + "k" * 5000 + "'", "sizes.'名'"),
)


_ENTRY_CHANGES = (
    *("value", "value", "value", "part", "part", "part", "key", "text", "remove", "repeat"),
    *("add", "swap", "many", "table"),
)


def mutate_entries(entries: TomlEntries, draw: random.Random) -> TomlEntries:
    """Return a copy of a document with one entry changed."""
    changed = list(entries)
    if not changed:
        return [(draw.choice(ODD_KEYS), odd_toml_value(draw))]
    at = draw.randrange(len(changed))
    key, value = changed[at]
    kind = draw.choice(_ENTRY_CHANGES)
    if kind == "value":
        changed[at] = (key, odd_toml_value(draw))
    elif kind == "part":
        changed[at] = (key, _mutate_part(value, draw))
    elif kind == "key":
        changed[at] = (draw.choice(ODD_KEYS), value)
    elif kind == "text":
        changed[at] = (key, mutate_text(value, draw))
    elif kind == "remove":
        del changed[at]
    elif kind == "repeat":
        changed.insert(draw.randrange(len(changed) + 1), (key, value))
    elif kind == "add":
        changed.insert(at, (draw.choice(ODD_KEYS), odd_toml_value(draw)))
    elif kind == "swap":
        other = draw.randrange(len(changed))
        changed[at] = (key, changed[other][1])
        changed[other] = (changed[other][0], value)
    elif kind == "many":
        count = draw.choice((3, 40, 400))
        table = key.rpartition(".")[0] or "sizes"
        added = [(f"{table}.n{number}", value) for number in range(count)]
        changed[at:at] = added
    else:
        header = draw.choice(("[sizes]", "[[inputs]]", "[inputs.A]", "[plan.plan]", "[run]", "[]"))
        changed[at] = (f"{header}\n{key}", value)
    return changed


_PART = re.compile(r'"[^"]*"|[\w.+-]+')


def _mutate_part(value: str, draw: random.Random) -> str:
    """Replace one string, number or word inside a value."""
    parts = list(_PART.finditer(value))
    if not parts:
        return odd_toml_value(draw)
    part = draw.choice(parts)
    return value[: part.start()] + odd_toml_value(draw) + value[part.end() :]


# ---- programs -----------------------------------------------------------------------------------

_TOKEN = re.compile(r"\w+|\*\*|//|==|[<>!]=|\n|[^\s\w]")
PROGRAM_TOKENS = (
    *(
        "A",
        "B",
        "X",
        "Y",
        "Z",
        "K",
        "i",
        "j",
        "k",
        "l",
        "s",
        "t",
        "n",
        "inf",
        "pi",
        "0",
        "1",
        "2",
        "-1",
    ),
    *(
        "0.5",
        "1e308",
        "1e400",
        "9" * 60,
        "2j",
        "True",
        "None",
        "'a'",
        "f'{i}'",
        "...",
        "é",
        "_",
        "__",
    ),
    *(
        "sum",
        "prod",
        "max",
        "min",
        "any",
        "all",
        "mean",
        "sum[i]",
        "max[j]",
        "sum[i:4]",
        "sum[i:0]",
    ),
    *("exp", "log", "sqrt", "abs", "where", "maximum", "conj", "real", "sign", "erf", "softmax[j]"),
    *(
        "rmsnorm",
        "layernorm[i]",
        "var",
        "logsumexp",
        "relu",
        "gelu",
        "nothing",
        "lambda",
        "if",
        "for",
    ),
    *("+", "-", "*", "/", "**", "%", "//", "@", "<<", "&", "|", "~", "==", "<", "<=", "!=", "and"),
    *(
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        ",",
        ":",
        ";",
        "=",
        ":=",
        ".",
        "#",
        "\n",
        "\t",
        "\\\n",
        "\0",
        "\r",
    ),
)


_PROGRAM_CHANGES = (
    *("replace", "replace", "replace", "replace", "remove", "insert", "insert", "swap", "copy"),
    *("brackets", "labels", "statements", "rename", "nest"),
)


def mutate_program(text: str, draw: random.Random) -> str:
    """Return a copy of a program with tokens changed, or with statements repeated or nested."""
    tokens = _TOKEN.findall(text)
    if not tokens:
        return draw.choice(PROGRAM_TOKENS)
    at = draw.randrange(len(tokens))
    kind = draw.choice(_PROGRAM_CHANGES)
    if kind == "replace":
        tokens[at] = draw.choice(PROGRAM_TOKENS)
    elif kind == "remove":
        del tokens[at : at + draw.choice((1, 1, 2, 5))]
    elif kind == "insert":
        tokens.insert(at, draw.choice(PROGRAM_TOKENS))
    elif kind == "swap":
        other = draw.randrange(len(tokens))
        tokens[at], tokens[other] = tokens[other], tokens[at]
    elif kind == "copy":
        source = draw.randrange(len(tokens))
        tokens[at:at] = tokens[source : source + draw.choice((1, 3, 10))]
    elif kind == "brackets":
        depth = draw.choice((1, 3, 60, 150, 2000))
        tokens[at] = draw.choice(("(", "-", "~", "abs(")) * depth + tokens[at] + ")" * depth
    elif kind == "labels":
        count = draw.choice((3, 12, 20, 33))
        tokens[at] = "[" + ",".join(f"l{number}:2" for number in range(count)) + "]"
    elif kind == "statements":
        count = draw.choice((2, 10, 100))
        added = [f"\nS{number}[i,j] = A[i,j] + {number}" for number in range(count)]
        return text + "".join(added) + "\n"
    elif kind == "rename":
        new = draw.choice(PROGRAM_TOKENS)
        old = tokens[at]
        tokens = [new if token == old else token for token in tokens]
    else:
        names = [match.start() for match in re.finditer("=", text)]
        if names:
            place = draw.choice(names) + 1
            outer = draw.choice(("sum", "max", "exp", "abs", "mean", "softmax[i]", "all"))
            lines = text[place:].split("\n", 1)
            return f"{text[:place]} {outer}({lines[0]})" + "".join(
                f"\n{rest}" for rest in lines[1:]
            )
    return " ".join(tokens).replace(" \n ", "\n")
