"""Make a failing script smaller while it still fails in the same way, within a time limit."""

from __future__ import annotations

import ast
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from .arrays_case import KNOWN, ArrayCase, array_text, plain_array


def shrink(case: ArrayCase, still_fails: Callable[[ArrayCase], bool], seconds: float) -> ArrayCase:
    """Return the smallest case found that still fails."""
    deadline = time.monotonic() + seconds
    improved = True
    while improved:
        improved = False
        for candidate in candidates(case):
            if time.monotonic() > deadline:
                return case
            if _size(candidate) < _size(case) and still_fails(candidate):
                case = candidate
                improved = True
                break
    return case


def _size(case: ArrayCase) -> tuple[float, ...]:
    """Return how large a case is: what matters most to a reader comes first."""
    texts = sum(len(step.text) for step in case.steps)
    elements = sum(array.size for array in case.arrays.values())
    values = sum(len(array_text(array)) for array in case.arrays.values())
    parts = len(case.steps) + len(case.arrays) + len(case.parts) + 0.3 * case.ranks
    return parts + 0.1 * texts + 0.2 * elements, values


def candidates(case: ArrayCase) -> Iterator[ArrayCase]:
    yield from _fewer_steps(case)
    yield from _fewer_ranks(case)
    yield from _given_results(case)
    yield from _shorter_texts(case)
    yield from _smaller_arrays(case)


def _with_steps(case: ArrayCase, steps: Any, **changes: Any) -> ArrayCase:
    """Return a case without arrays that no step reads."""
    case = replace(case, steps=tuple(steps), **changes)
    words = set(re.findall(r"\w+", " ".join(step.text for step in case.steps)))
    arrays = {name: array for name, array in case.arrays.items() if name in words}
    parts = {name: cut for name, cut in case.parts.items() if name in arrays}
    return replace(case, arrays=arrays or case.arrays, parts=parts)


def _fewer_steps(case: ArrayCase) -> Iterator[ArrayCase]:
    steps = case.steps
    length = len(steps) - 1
    while length:
        for first in range(len(steps) - length, -1, -1):
            yield _with_steps(case, steps[:first] + steps[first + length :])
        length //= 2


def _fewer_ranks(case: ArrayCase) -> Iterator[ArrayCase]:
    for ranks in range(1, case.ranks):
        yield replace(case, ranks=ranks, parts={})
        yield replace(case, ranks=ranks)
    for name in case.parts:
        yield replace(case, parts={key: cut for key, cut in case.parts.items() if key != name})


def _given_results(case: ArrayCase) -> Iterator[ArrayCase]:
    """Give an array in place of the step that computes it."""
    names: dict[str, Any] = {**KNOWN, "D": plain_array}
    names.update({name: array.copy() for name, array in case.arrays.items()})
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for place, step in enumerate(case.steps):
            try:
                exec(step.text, names)
            except Exception:
                continue
            name, is_binding, _ = step.text.partition(" = ")
            if is_binding and name.isidentifier() and hasattr(names[name], "dtype"):
                arrays = {**case.arrays, name: np.array(names[name])}
                steps = case.steps[:place] + case.steps[place + 1 :]
                yield _with_steps(case, steps, arrays=arrays)


def _shorter_texts(case: ArrayCase) -> Iterator[ArrayCase]:
    """Leave out options and views, and give names or simple values to arrays inside of a step."""
    for place, step in enumerate(case.steps):
        texts = []
        for pattern, other in (
            (r", \w+=(\[[^\]]*\]|\([^()]*\)|[^,()\[\]]+)(?=[,)])", ""),
            (r"\.(T|mT)\b", ""),
            (r"\[(::-1|1:|:-1|\.\.\., ::2|\.\.\.|:, :)\](?! [-+*/&|^<>%]*= )", ""),
            (r"\.(reshape|ravel|squeeze)\([^()]*\)", ""),
            (r"\bnp\.[a-z]+\d+\((\S+?)\)", r"\1"),
        ):
            for match in re.finditer(pattern, step.text):
                changed = (
                    step.text[: match.start()] + match.expand(other) + step.text[match.end() :]
                )
                texts.append(changed)
        for literal in _array_literals(step.text):
            value = np.asarray(eval(literal, dict(KNOWN)))
            for text in (
                f"np.zeros({value.shape})",
                f"np.ones({value.shape}, {value.dtype.name!r})",
            ):
                texts.append(step.text.replace(literal, text))
            name = next(letter for letter in "uvwxyz" if letter not in case.arrays)
            if f"D({literal})" in step.text:
                text = step.text.replace(f"D({literal})", name)
                steps = [*case.steps[:place], replace(step, text=text), *case.steps[place + 1 :]]
                yield _with_steps(case, steps, arrays={**case.arrays, name: value})
        for text in texts:
            steps = [*case.steps[:place], replace(step, text=text), *case.steps[place + 1 :]]
            yield _with_steps(case, steps)


def _array_literals(text: str) -> list[str]:
    """Return the texts of the calls of np.array in a line."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "np.array":
            segment = ast.get_source_segment(text, node)
            if segment is not None:
                found.append(segment)
    return found


def _smaller_arrays(case: ArrayCase) -> Iterator[ArrayCase]:
    for name, array in case.arrays.items():
        smaller = []
        for axis, extent in enumerate(array.shape):
            for length in dict.fromkeys((1, 2, extent // 2, extent - 1)):
                if 0 < length < extent:
                    smaller.append(array.take(range(length), axis))
        smaller.append(np.zeros_like(array))
        smaller.append(np.arange(array.size).reshape(array.shape).astype(array.dtype))
        if array.dtype.kind in "fc":
            smaller.append(np.trunc(array.real).astype(array.dtype))
        for other in map(np.asarray, smaller):
            arrays = {**case.arrays, name: other}
            yield replace(case, arrays=arrays)
