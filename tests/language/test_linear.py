"""Reading a program takes time in proportion to its length. Calls are counted, not seconds."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
from calls import calls_of

import einmpi
from einmpi.graph import scalar as labels
from einmpi.language import parse, syntax
from einmpi.language.syntax import Source

X = "\n[inputs]\nX = { random = 'ones', shape = [8] }\n"


def balanced(parts: list[str], operator: str) -> str:
    """Return an expression of few levels: ((a + b) + (c + d))."""
    while len(parts) > 1:
        odd = parts[-1:] if len(parts) % 2 else []
        pairs = zip(parts[::2], parts[1::2], strict=False)
        parts = [f"({left} {operator} {right})" for left, right in pairs] + odd
    return parts[0]


def chain(count: int) -> str:
    return "T0[i] = X[i]\n" + "\n".join(f"T{k}[i] = T{k - 1}[i] + {k}" for k in range(1, count))


def independent(count: int) -> str:
    return "\n".join(f"T{k}[i] = X[i] + {k}" for k in range(count))


def one_for_all(count: int) -> str:
    return "S = sum(X[i])\n" + "\n".join(f"T{k}[i] = S * X[i] + {k}" for k in range(count))


def all_for_one(count: int) -> str:
    tensors = "\n".join(f"T{k}[i] = exp(X[i] * {k})" for k in range(count))
    return f"{tensors}\nZ[i] = {balanced([f'T{k}[i]' for k in range(count)], '+')}"


def product_of_all(count: int) -> str:
    tensors = "\n".join(f"T{k}[i] = exp(X[i] * {k})" for k in range(count))
    return f"{tensors}\nZ = sum({balanced([f'T{k}[i]' for k in range(count)], '*')})"


def long_expression(count: int) -> str:
    return f"Z[i] = {balanced([f'X[i] * {k}' for k in range(count)], '+')}"


def many_aggregations(count: int) -> str:
    return f"Z = {balanced([f'sum(X[i] * {k})' for k in range(count)], '+')}"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "program",
    [
        chain,
        independent,
        one_for_all,
        all_for_one,
        product_of_all,
        long_expression,
        many_aggregations,
    ],
)
def test_twice_the_program_takes_twice_the_calls(program, tmp_path):
    """The calls that come with more statements double: in quadratic time there are four times."""
    counts = []
    for length in (10, 30, 60, 120):
        path = tmp_path / f"{length}.toml"
        path.write_text(f'program = """\n{program(length)}\n"""{X}')
        counts.append(calls_of(lambda path=path: einmpi.load(path)))
    _, small, middle, large = counts  # the first run also fills caches
    assert (large - middle) / (middle - small) < 2.5


def test_new_names_do_not_try_all_the_old_ones():
    lines = 0

    def count_lines(frame: FrameType, event: str, argument: object) -> object:
        nonlocal lines
        lines += event == "line"
        return count_lines

    def trace(frame: FrameType, event: str, argument: object) -> object:
        code = frame.f_code
        is_of_names = code.co_filename == labels.__file__ and code.co_qualname.startswith("Names.")
        return count_lines if is_of_names else None

    before = sys.gettrace()
    text = many_aggregations(300)
    sys.settrace(trace)
    try:
        parse.parse_program(Source("p", text), {"X": ((8,), "float64")}, {})
    finally:
        sys.settrace(before)
    assert lines < 300 * 60


def test_names_of_temporaries():
    names = labels.Names(["Z", "Z_2"])
    assert [names.take_new("Z") for _ in range(3)] == ["Z_1", "Z_3", "Z_4"]
    names.add("Z_5")
    assert [names.take_new("Z"), names.take_new("Y"), names.take_new("Y")] == ["Z_6", "Y", "Y_1"]


def test_a_program_is_parsed_once(tmp_path, monkeypatch):
    parsed = []
    original = syntax.parse

    def count_parse(source):
        parsed.append(source)
        return original(source)

    monkeypatch.setattr(syntax, "parse", count_parse)
    path = tmp_path / "job.toml"
    path.write_text(f'program = """{"; ".join(independent(5).splitlines())}"""{X}')
    assert einmpi.load(path).graph.outputs == ("T0", "T1", "T2", "T3", "T4")
    assert len(parsed) == 1


@pytest.mark.parametrize("line_end", ["\n", "\n\n", "\n# é ×\n"])
def test_places_of_keys(line_end, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(line_end.join(["program = 'Z = 1'", "", "plan.memory = 'x'", "run.fast = 1"]))
    line = 1 + path.read_text().split("run.fast")[0].count("\n")
    with pytest.raises(einmpi.InputError) as caught:
        einmpi.load(path)
    assert str(caught.value).startswith(f"{path}:{line}:5: unknown key 'fast'")
