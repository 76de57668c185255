"""Run a script as one traced function of its arrays, and compare its results with numpy's.

The language rewrites floating-point expressions, and rounding errors of a step reach the next ones.
So a result may differ by what numpy's own result changes if the arrays change in their last bits.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import einmpi

from . import arrays_running
from .arrays_case import KNOWN, ArrayCase, Step, plain_array
from .arrays_running import unsupported
from .running import Outcome

THREAD_SECONDS = 60.0  # for a rank to wait for a message
MOST_STEPS = 5


def check_on_threads(case: ArrayCase) -> Outcome:
    """Run a case on threads and return what was wrong."""
    return arrays_running.check_on_threads(case, run_script, THREAD_SECONDS)


def check_on_mpi(case: ArrayCase, comm: Any, folder: Any) -> Outcome:
    """Run a case on the ranks of a communicator, which all call this."""
    return arrays_running.check_on_mpi(case, comm, folder, run_script)


def run_script(case: ArrayCase, comm: Any) -> Outcome:
    """Trace those steps that numpy computes and that can be traced, and run them."""
    outcome = Outcome()
    with np.errstate(all="ignore"):
        steps, refused = traceable(case, comm)
        outcome.notes += [f"refused: {reason}" for reason in refused]
        expected = by_numpy(steps, case.arrays)
        others = [by_numpy(steps, _moved(case.arrays, seed)) for seed in (1, 2)]
        given = {
            name: einmpi.DistArray.from_global(array, comm) for name, array in case.arrays.items()
        }
        # Without `strict`, inf and nan may become others of the three.
        function = einmpi.jit(functools.partial(computed, steps), strict=True)
        try:
            found = function(given)
        except TypeError as error:
            reason = unsupported(error)  # by a DistArray, in a call between two programs
            if not reason:
                raise
            outcome.notes.append(f"refused: {reason}")
            return outcome
        for name, own in found.items():
            if not isinstance(own, einmpi.DistArray) or name not in expected:
                continue
            whole = own.gather()
            twins = [each.get(name, expected[name]) for each in others]
            problem = difference(whole, expected[name], twins, steps)
            if problem:
                outcome.fail("value", f"{name}: {problem}; {[step.text for step in steps]}")
            outcome.elements += whole.size
            outcome.compared += whole.size
        outcome.notes += ["run"] * len(steps)
    return outcome


def computed(steps: list[Step], arrays: dict[str, Any], refused: Any = None) -> dict[str, Any]:
    """Return the arrays that some steps leave. Steps that fail are noted, if someone asks."""
    names: dict[str, Any] = {**KNOWN, "D": plain_array}
    names.update({name: array.copy() for name, array in arrays.items()})
    for step in steps:
        try:
            exec(step.text, names)
        except Exception as error:
            if refused is None:
                raise
            refused.append((step, error))
    arrays_now = (einmpi.DistArray, np.ndarray, np.generic)
    return {name: value for name, value in names.items() if isinstance(value, arrays_now)}


def by_numpy(steps: list[Step], arrays: Any) -> dict[str, Any]:
    return computed(steps, arrays, refused=[])


def traceable(case: ArrayCase, comm: Any) -> tuple[list[Step], list[str]]:
    """Return the first steps that numpy and a traced function compute, and what was refused."""
    failing: list[tuple[Step, Exception]] = []
    computed(list(case.steps), case.arrays, failing)
    without = [step for step, _ in failing]
    steps = [step for step in case.steps if step not in without][:MOST_STEPS]
    reasons: list[str] = []
    while True:
        refused: list[tuple[Step, Exception]] = []
        given = {
            name: einmpi.DistArray.from_global(array, comm) for name, array in case.arrays.items()
        }
        einmpi.jit(functools.partial(computed, steps, refused=refused), strict=True).trace(given)
        failing = []
        computed(steps, case.arrays, failing)  # a step may need one that was refused
        refused = [*refused, *failing]
        if not refused:
            return steps, reasons
        for step, error in refused:
            if step in steps:
                steps.remove(step)
                if not isinstance(error, NameError):
                    reasons.append(f"{step.kind}: {type(error).__name__}")


def _moved(arrays: Any, seed: int) -> dict[str, np.ndarray]:
    """Return arrays with other last bits."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, array in arrays.items():
        if array.dtype.kind in "fc":
            eps = np.finfo(array.dtype).eps
            factor = 1 + 8 * eps * rng.choice([-1, 1], array.shape)
            array = (array * factor).astype(array.dtype)
        found[name] = array
    return found


def difference(own: Any, wanted: Any, others: list[Any], steps: list[Step]) -> str:
    """Return how a result differs from numpy's by more than its last bits explain, or ""."""
    own, wanted = np.asarray(own), np.asarray(wanted)
    if (own.dtype, own.shape) != (wanted.dtype, wanted.shape):
        return f"{own.dtype}{own.shape}; expected {wanted.dtype}{wanted.shape}"
    if any(step.slack == np.inf for step in steps):
        return ""  # rounding or overflow decides
    others = [np.asarray(each) for each in others]
    is_sensitive = any(
        each.shape != wanted.shape or not _equal_kinds(each, wanted) for each in others
    )
    if wanted.dtype.kind not in "fc":
        if is_sensitive or any((each != wanted).any() for each in others):
            return ""
        return "" if np.array_equal(own, wanted) else f"{own.ravel()[:4]}, not {wanted.ravel()[:4]}"
    if is_sensitive:
        return ""
    is_finite = np.isfinite(wanted)
    if not _equal_kinds(own, wanted):
        return f"{own.ravel()[:4]}, not {wanted.ravel()[:4]}"
    scale = np.abs(wanted[is_finite]).max(initial=0)
    slack = sum(step.slack + step.ulps for step in steps)
    allowed = np.finfo(wanted.dtype).eps * (64 * (1 + scale) + 4 * slack)
    for each in others:
        allowed = max(allowed, 16 * np.abs(each - wanted)[is_finite].max(initial=0))
    worst = np.abs(own - wanted)[is_finite].max(initial=0)
    return "" if worst <= allowed else f"differs by {worst} where {allowed} is allowed"


def _equal_kinds(own: np.ndarray, wanted: np.ndarray) -> bool:
    """Return whether both are finite, inf and nan at the same places."""
    if wanted.dtype.kind not in "fc":
        return True
    is_finite = np.isfinite(wanted)
    if not np.array_equal(np.isfinite(own), is_finite):
        return False
    rest, wanted_rest = own[~is_finite], wanted[~is_finite]
    is_same = (rest == wanted_rest) | (np.isnan(rest) & np.isnan(wanted_rest))
    return bool(is_same.all())
