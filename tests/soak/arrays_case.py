"""One case of the soak of DistArrays: a script that runs on numpy's arrays and on DistArrays.

A step of the script is a line of Python. In it `D(…)` is an array: of numpy, or a DistArray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Step:
    """One line of Python, and how far its results may be from numpy's.

    A floating-point result may differ by eps × (slack + ulps × its magnitude), where eps is that of
    its dtype. Both are 0 where nothing is added or rounded in another order; a slack of inf means
    that rounding or overflow decides, so that values are not compared.
    """

    text: str
    kind: str
    slack: float = 0.0
    ulps: float = 0.0


@dataclass(frozen=True)
class ArrayCase:
    """Arrays by name, the steps that use them, and the ranks they are on."""

    seed: int
    number: int
    ranks: int
    arrays: Mapping[str, np.ndarray]
    steps: tuple[Step, ...]
    parts: Mapping[str, tuple[int, ...]]  # of arrays that are cut in a way of their own

    @property
    def name(self) -> str:
        return f"seed {self.seed}, case {self.number}"

    @property
    def themes(self) -> list[str]:
        return [step.kind for step in self.steps]

    @property
    def dtypes(self) -> list[str]:
        return sorted({array.dtype.name for array in self.arrays.values()})


def plain_array(values: Any, parts: Any = None) -> np.ndarray:
    """Return what `D` makes for numpy."""
    return np.array(values)


# The names that every step knows; `D` comes with the kind of array.
KNOWN = {"np": np, "inf": np.inf, "nan": np.nan}


def number_text(number: Any) -> str:
    """Return the text of a Python number; complex numbers with inf or nan have no literal."""
    if isinstance(number, complex) and not np.isfinite(number):
        return f"complex({number.real}, {number.imag})"
    return repr(number)


def list_text(values: Any) -> str:
    if isinstance(values, list):
        return f"[{', '.join(map(list_text, values))}]"
    return number_text(values)


def array_text(array: np.ndarray) -> str:
    if not array.size:
        return f"np.zeros({array.shape}, {array.dtype.name!r})"
    if array.size > 8 and (array == array.flat[0]).all():
        return f"np.full({array.shape}, {number_text(array.flat[0].item())}, {array.dtype.name!r})"
    return f"np.array({list_text(array.tolist())}, {array.dtype.name!r})"


def script_lines(case: ArrayCase) -> list[str]:
    """Return the script of a case: its arrays, then its steps."""
    lines = []
    for name, array in case.arrays.items():
        parts = f", {case.parts[name]}" if name in case.parts else ""
        lines.append(f"{name} = D({array_text(array)}{parts})")
    return lines + [step.text for step in case.steps]


def python_text(case: ArrayCase) -> str:
    """Return Python that runs a script on numpy's arrays and on thread ranks."""
    shown = ", ".join(case.arrays)
    for step in case.steps:
        target, is_binding, _ = step.text.partition(" = ")
        if is_binding and target.isidentifier():
            shown += f", {target}"
    body = "\n    ".join([*script_lines(case), f"return {shown}"])
    return f"""\
import numpy as np
import einmpi
from einmpi.comm.threads import run_threads
from numpy import inf, nan

def script(D):
    {body}

def whole(value):
    if isinstance(value, (tuple, list)):
        return [whole(part) for part in value]
    return value.gather() if isinstance(value, einmpi.DistArray) else value

def on_rank(comm):
    D = lambda values, parts=None: einmpi.DistArray.from_global(values, comm, parts)
    return whole(script(D))

print(script(lambda values, parts=None: np.array(values)))
print(run_threads({case.ranks}, on_rank)[0])"""


def failure_text(original: ArrayCase, smaller: ArrayCase, failures: list[tuple[str, str]]) -> str:
    """Return everything a person needs to look at a failure."""
    lines = [f"FAILURE  {original.name}  ({original.ranks} ranks)"]
    for check, text in failures:
        lines.append(f"  {check}: {text}")
    lines.append(
        f"repeat: python -m tests.soak arrays --seed {original.seed} --case {original.number}"
    )
    lines.append(f"minimised, {smaller.ranks} ranks:")
    lines.append("---- Python")
    lines.append(python_text(smaller))
    lines.append("----")
    return "\n".join(lines)
