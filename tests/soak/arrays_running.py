"""Run a script on numpy's arrays and on DistArrays, and compare every array after each step."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import einmpi
from einmpi.comm.mpi import comm_of
from einmpi.comm.threads import run_threads

from .arrays_case import KNOWN, ArrayCase, Step, plain_array
from .running import Outcome, planned_once

THREAD_SECONDS = 20.0  # for a rank to wait for a message
# What DistArrays do not do, by what they say, and the words under which a soak counts it.
UNSUPPORTED = {
    r"^norm of a DistArray does not take ord": "other orders of norm",
    r"^(\S+) does not take a DistArray": r"\1",
    r" of a DistArray does not take (\w+)": r"\1=",
    r" of a DistArray cannot be stored in": "out= an array of numpy",
    r"got an unexpected keyword argument '(\w+)'": r"\1= of a method",
    r"copies elements in row-major order": "order=",
    r"are along one axis": "quantiles over several axes",
    r"takes one constant value": "pad with several constants",
    r"takes a number of bins, or their edges": "histogram with named bins",
    r"is not supported here": "several lists beside slices",
    r"not next to each other": "an integer and a list that are not adjacent",
    r"does not take complex numbers": "the order of complex numbers",
    r"read-only": "read-only",
}


def check_on_threads(case: ArrayCase, run: Any = None, limit: float = THREAD_SECONDS) -> Outcome:
    """Run a case on threads, by another function than `run_script` if given: what was wrong."""
    outcome = Outcome()
    with quiet(), planned_once():
        try:
            found = run_threads(case.ranks, functools.partial(run or run_script, case), limit=limit)
        except Exception as error:
            outcome.fail("error", short_error(error))
        else:
            outcome = found[0]
    return outcome


def check_on_mpi(case: ArrayCase, comm: Any, folder: Any, run: Any = None) -> Outcome:
    """Run a case on the ranks of a communicator, which all call this."""
    with quiet():
        return (run or run_script)(case, comm_of(comm))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def run_script(case: ArrayCase, comm: Any) -> Outcome:
    """Run a script on this rank until a step fails. All ranks find the same."""
    with np.errstate(all="warn"):
        return _Run(case, comm).run()


class _Run:
    def __init__(self, case: ArrayCase, comm: Any) -> None:
        self.comm = comm
        self.case = case
        self.outcome = Outcome()

        def distributed(values: Any, parts: Any = None) -> Any:
            if parts is not None:
                with contextlib.suppress(einmpi.InputError):  # these ranks cannot be cut like that
                    return einmpi.DistArray.from_global(np.asarray(values), comm, parts)
            return einmpi.DistArray.from_global(values, comm)

        self.ours: dict[str, Any] = {**KNOWN, "D": distributed}
        self.twins: dict[str, Any] = {**KNOWN, "D": plain_array}
        for name, array in case.arrays.items():
            self.ours[name] = distributed(array, case.parts.get(name))
            self.twins[name] = array.copy()

    def run(self) -> Outcome:
        for step in self.case.steps:
            problem = self.step(step)
            if problem is not None:
                check, text = problem
                self.outcome.fail(f"{check} in {step.kind}", f"{step.text}: {text}")
                return self.outcome
        for name in self.live():
            pairs, problem = self.pairs(name, whole=True)
            for own, twin in pairs:
                problem = problem or self.different_values(own, twin, None)
            if problem:
                self.outcome.fail("gather", f"{name}: {problem}")
        return self.outcome

    def live(self) -> list[str]:
        return [name for name in self.twins if name not in KNOWN and name != "D"]

    def step(self, step: Step) -> tuple[str, str] | None:
        """Run a step on both kinds of array; return what is wrong, which all ranks agree on."""
        error, warned = self.run_line(step.text, self.ours)
        said = self.comm.allgather_text("" if error is None else f"{type(error).__name__}: {error}")
        if len(set(map(bool, said))) > 1:
            return "ranks", f"some ranks raise, others do not: {said}"
        reason = unsupported(error)
        if reason:
            self.outcome.notes.append(f"skipped: {reason}")
        else:
            expected, should_warn = self.run_line(step.text, self.twins)
            if isinstance(expected, NameError):
                self.outcome.notes.append("skipped: its operand was skipped")
                return None
            problem = _other_error(error, expected)
            if problem is not None:
                return problem
            if expected is None and warned != should_warn and self.has_to_warn(step):
                return "warnings", f"{sorted(warned)}; numpy warns of {sorted(should_warn)}"
            self.outcome.notes.append("raised" if expected is not None else "run")
        return self.compare_all(step)

    def run_line(self, line: str, names: dict[str, Any]) -> tuple[Exception | None, set[str]]:
        """Run a line; return what it raised, and the kinds of its warnings.

        Of several ranks, those that have the elements in question warn, so nothing is compared.
        """
        if self.comm.size > 1:
            return _run_line(line, names), set()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            error = _run_line(line, names)
        return error, {each.category.__name__ for each in caught}

    def has_to_warn(self, step: Step) -> bool:
        """Return whether warnings follow numpy's, which warns of scalars and of nothing, too."""
        used = [self.twins[word] for word in re.findall(r"\w+", step.text) if word in self.twins]
        arrays = [value for value in used if isinstance(value, np.ndarray)]
        is_about_nothing = "np.zeros((0" in step.text
        is_usual = all(array.ndim and array.size for array in arrays) and not is_about_nothing
        return step.kind in WARNING and is_usual

    def compare_all(self, step: Step) -> tuple[str, str] | None:
        """Compare every array. Those that differ by rounding are then given the same bits."""
        problems = {}
        rounded = []
        for name in self.live():
            pairs, problem = self.pairs(name)
            for own, twin in pairs:
                problem = problem or self.different_values(own, twin, step)
            if problem:
                problems[name] = problem
            elif not _have_same_bits(pairs):
                rounded.append(name)
        said = self.comm.allgather_text(json.dumps([problems, rounded]))
        for text in said:
            problems.update(json.loads(text)[0])
        if problems:
            name, problem = next(iter(problems.items()))
            return problem.split(" ")[0], f"{name} {problem}"
        names = sorted({name for text in said for name in json.loads(text)[1]})
        if not names:
            return None
        for name in names:
            self.copy_bits(name)
        are_same = [_have_same_bits(self.pairs(name)[0]) for name in self.live()]
        if "False" in self.comm.allgather_text(str(all(are_same))):
            # Giving an array its bits has changed another one, as only a view would be.
            return "views", f"{', '.join(names)} do not share elements as in numpy"
        return None

    def pairs(self, name: str, whole: bool = False) -> tuple[list[tuple[Any, Any]], str]:
        """Return this rank's elements of a result with those that it should have.

        The text says how the results differ in type, shape or dtype, in the same way on all ranks.
        """
        if name not in self.ours:
            return [], "missing"
        is_number = isinstance(self.twins[name], np.generic | bool | int | float | complex)
        if is_number and isinstance(self.ours[name], einmpi.DistArray):
            self.twins[name] = np.asarray(self.twins[name])  # DistArrays have no scalars
        return self.pairs_of(self.ours[name], self.twins[name], whole)

    def pairs_of(self, found: Any, expected: Any, whole: bool) -> tuple[list[Any], str]:
        if isinstance(expected, tuple | list):
            if not isinstance(found, tuple | list) or len(found) != len(expected):
                return [], f"type {type(found).__name__}; expected {type(expected).__name__}"
            pairs = []
            problem = ""
            for one, other in zip(found, expected, strict=True):
                more, different = self.pairs_of(one, other, whole)
                pairs += more
                problem = problem or different
            return pairs, problem
        if isinstance(found, tuple | list):
            return [], f"type {type(found).__name__}; expected {type(expected).__name__}"
        if not isinstance(found, einmpi.DistArray | np.ndarray | np.generic):
            is_same = found == expected or (found != found and expected != expected)
            if not is_same and isinstance(expected, float | complex):
                is_same = abs(found - expected) <= 1e-3 * abs(expected)
            return [], "" if is_same else f"value {found!r}; expected {expected!r}"
        expected = np.asarray(expected)
        if found.shape != expected.shape:
            return [], f"shape {found.shape}; expected {expected.shape}"
        if found.dtype != expected.dtype:
            return [], f"dtype {found.dtype}; expected {expected.dtype}"
        return [_block(found, expected, whole)], ""

    def different_values(self, own: Any, twin: np.ndarray, step: Step | None) -> str:
        """Return how two blocks differ by more than a step allows, or ""."""
        if own.shape != twin.shape or own.dtype != twin.dtype:
            return f"block {own.dtype}{own.shape}; expected {twin.dtype}{twin.shape}"
        self.outcome.elements += twin.size
        is_inexact = twin.dtype.kind in "fc"
        slack = ulps = 0.0
        if step is not None and (is_inexact or step.slack == np.inf):
            slack, ulps = step.slack, step.ulps
        limits = np.finfo(twin.dtype) if is_inexact else None
        if slack == np.inf or (limits is not None and slack > float(limits.max) / 4):
            return ""
        self.outcome.compared += twin.size
        is_same = np.asarray(own == twin)
        if is_inexact:
            is_same |= np.isnan(own) & np.isnan(twin)
            if (slack or ulps) and not is_same.all():
                is_same |= _are_close(own, twin, slack, ulps)
        if is_same.all():
            return ""
        place = tuple(int(number) for number in np.argwhere(~is_same)[0])
        return f"value {own[place]!r} at {place} of a block; expected {twin[place]!r}"

    def copy_bits(self, name: str) -> None:
        """Give numpy's array the bits of the DistArray, so that rounding errors do not add up."""
        pairs = zip(_arrays(self.ours[name]), _arrays(self.twins[name]), strict=False)
        for found, expected in pairs:
            whole = found.gather() if isinstance(found, einmpi.DistArray) else found
            if isinstance(expected, np.ndarray) and expected.flags.writeable:
                expected[...] = whole
            elif not isinstance(self.twins[name], tuple | list):
                self.twins[name] = np.array(whole)


def _block(found: Any, expected: np.ndarray, whole: bool) -> tuple[Any, np.ndarray]:
    """Return the elements of an array that this rank has, and those that it should have."""
    if not isinstance(found, einmpi.DistArray):
        return np.asarray(found), expected
    if whole:
        return found.gather(), expected
    local = found.local
    if found.region is None or not found.size:
        return local.reshape(-1), np.empty(0, expected.dtype)
    indices = []
    for runs in found.region:
        indices.append(np.concatenate([np.arange(start, stop) for start, stop in runs]))
    return local, expected[np.ix_(*indices)] if indices else expected


def _have_same_bits(pairs: list[tuple[Any, np.ndarray]]) -> bool:
    return all(own.tobytes() == twin.tobytes() for own, twin in pairs)


def _arrays(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [array for part in value for array in _arrays(part)]
    if isinstance(value, einmpi.DistArray | np.ndarray):
        return [value]
    if isinstance(value, np.generic):
        return [np.asarray(value)]
    return []


def _are_close(own: Any, twin: np.ndarray, slack: float, ulps: float) -> Any:
    """Return where two numbers differ by no more than rounding: of finite ones, and of inf."""
    limits = np.finfo(twin.dtype)
    wide = np.complex128 if twin.dtype.kind == "c" else np.float64
    own = np.asarray(own).astype(wide)
    twin = twin.astype(wide)
    allowed = float(limits.eps) * (slack + ulps * np.abs(twin)) + 4 * float(
        limits.smallest_subnormal
    )
    return np.isfinite(own) & np.isfinite(twin) & (np.abs(own - twin) <= allowed)


@functools.lru_cache(4096)
def _compiled(line: str) -> Any:
    return compile(line, "<step>", "exec")


def _run_line(line: str, names: dict[str, Any]) -> Exception | None:
    try:
        exec(_compiled(line), names)
    except Exception as error:
        return error
    finally:
        names.pop("__builtins__", None)
        names.pop("__warningregistry__", None)
    return None


def unsupported(error: Exception | None) -> str:
    """Return what a documented refusal is about; "" for no error, and for any other."""
    if not isinstance(error, TypeError | ValueError):
        return ""
    for pattern, words in UNSUPPORTED.items():
        match = re.search(pattern, str(error))
        if match:
            return match.expand(words)
    return ""


# The kinds of steps that warn as numpy does: numpy computes them, or they convert elements.
WARNING = ("operators", "ufunc", "in place", "out=", "assign", "elements")
# Where a shape is wrong, a dtype may be wrong as well, and either of the two is said.
TWO_MISTAKES = "shape|broadcast|dimension|read-only"
FAMILIES = (IndexError, OverflowError, TypeError, ValueError, ZeroDivisionError)


def _other_error(error: Exception | None, expected: Exception | None) -> tuple[str, str] | None:
    """Return how two errors differ. An InputError may take the place of any of numpy's."""
    if error is None and expected is None:
        return None
    if error is None:
        return (
            f"accepted {type(expected).__name__}",
            f"numpy raises {type(expected).__name__}: {expected}",
        )
    if expected is None:
        return f"refused {type(error).__name__}", short_error(error)
    if isinstance(error, einmpi.InputError):
        return None
    if re.search(TWO_MISTAKES, f"{error} {expected}"):
        return None
    for family in FAMILIES:
        if isinstance(error, family) and isinstance(expected, family):
            return None
    return (
        f"exception {type(error).__name__}",
        f"{short_error(error)}; numpy raises {type(expected).__name__}: {expected}",
    )


def short_error(error: BaseException) -> str:
    """Return what went wrong, and the last place where it did."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
