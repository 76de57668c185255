"""The soak of DistArrays: cases follow from their numbers, errors are seen, and failures shrink."""

from dataclasses import replace

import numpy as np
import pytest
from mpi_helpers import needs_mpirun

import einmpi
from einmpi.arrays.functions import FUNCTIONS
from einmpi.comm.threads import run_threads
from tests.soak import __main__ as command
from tests.soak import arrays_functions, arrays_running, drive, worker
from tests.soak.arrays_case import ArrayCase, Step, python_text, script_lines
from tests.soak.arrays_generate import make_array_case
from tests.soak.arrays_running import check_on_threads
from tests.soak.arrays_shrink import shrink

# ---- cases --------------------------------------------------------------------------------------


def test_a_case_follows_from_its_seed_and_number():
    forwards = {number: make_array_case(7, number) for number in range(20)}
    for number in reversed(range(20)):
        again = make_array_case(7, number)
        assert script_lines(again) == script_lines(forwards[number])
        assert again.ranks == forwards[number].ranks
        # On another number of ranks only the parts of the arrays differ.
        assert make_array_case(7, number, 2).steps == again.steps


def test_every_function_of_dist_arrays_is_called():
    called = {eval(f"np.{name}") for name in arrays_functions.FUNCTIONS}
    assert set(FUNCTIONS) - {np.save} <= called  # files: tests/arrays/test_habits.py
    texts = [step.text for number in range(120) for step in make_array_case(5, number).steps]
    for what in ("+= ", "out=", "D(np.array([", "] = ", ".T", "del ", "...", "None", "sort"):
        assert any(what in text for text in texts), what


# ---- comparisons --------------------------------------------------------------------------------


def case_of(*lines, ranks=2, slack=0.0, ulps=0.0, **arrays):
    steps = tuple(Step(line, "ufunc", slack, ulps) for line in lines)
    return ArrayCase(1, 1, ranks, arrays, steps, {})


def checks_of(case):
    return [check for check, _ in check_on_threads(case).failures]


A = np.arange(6.0).reshape(2, 3)


def test_what_agrees_passes():
    lines = ["r0 = a + 1", "r1 = np.sum(a, axis=0)", "a *= 2", "r2 = a.sum(), r1", "r3 = (len(a),)"]
    outcome = check_on_threads(case_of(*lines, a=A))
    assert outcome.failures == []
    assert outcome.notes == ["run"] * 5
    assert outcome.compared == outcome.elements > 40


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("line", "planted", "check"),
    [
        ("r0 = np.exp(a)", lambda found: found + 1, "value in ufunc"),
        ("r0 = np.exp(a)", lambda found: found.astype("float32"), "dtype in ufunc"),
        ("r0 = np.exp(a)", lambda found: found[:1], "shape in ufunc"),
        ("r0 = np.exp(a)", lambda found: [found], "type in ufunc"),
        ("a -= a + np.exp(a)", lambda found: found * 0, "value in ufunc"),
        ("r0 = np.add(np.exp(a), [1, 2])", lambda found: A[0, :2], "accepted ValueError in ufunc"),
        ("r0 = np.exp(a)", lambda found: found + A[0, :2], "refused ValueError in ufunc"),
        ("r0 = np.exp(a)[9]", lambda found: found / "x", "exception TypeError"),
    ],
)
def test_planted_errors_are_seen(monkeypatch, ranks, line, planted, check):
    apply_ufunc = einmpi.DistArray.__array_ufunc__

    def wrong(array, ufunc, method, *inputs, **options):
        found = apply_ufunc(array, ufunc, method, *inputs, **options)
        return planted(found) if ufunc is np.exp else found

    monkeypatch.setattr(einmpi.DistArray, "__array_ufunc__", wrong)
    (found,) = checks_of(case_of(line, a=A, ranks=ranks))
    assert found.startswith(check)


def test_a_step_that_some_ranks_refuse():
    def refuse(array):
        raise ValueError("no")

    def on_rank(comm):
        run = arrays_running._Run(case_of("r0 = D(a)", a=A), comm)
        run.ours["D"] = refuse if comm.rank == 1 else lambda array: array
        return run.run().failures

    for ((check, text),) in run_threads(3, on_rank):
        assert check == "ranks in ufunc"
        assert "ValueError: no" in text


def test_a_lost_write_is_seen(monkeypatch):
    """A slice that is a copy: the array and the slice are compared after each step."""
    select = einmpi.DistArray.__getitem__
    monkeypatch.setattr(
        einmpi.DistArray, "__getitem__", lambda array, key: select(array, key).copy()
    )
    assert checks_of(case_of("r0 = a[:1]", "r0 += 1", a=A)) == ["value in ufunc"]
    assert checks_of(case_of("r0 = a[:1]", "a += 1", a=A)) == ["value in ufunc"]
    # Also where rounding decides about the values.
    assert checks_of(case_of("r0 = a[:1]", "a += 1", a=A, slack=np.inf)) == ["views in ufunc"]


def test_rounding_is_allowed_where_a_step_says_so(monkeypatch):
    apply_ufunc = einmpi.DistArray.__array_ufunc__

    def rounded(array, ufunc, method, *inputs, **options):
        found = apply_ufunc(array, ufunc, method, *inputs, **options)
        return found * (1 + 2**-50) if ufunc is np.exp else found

    monkeypatch.setattr(einmpi.DistArray, "__array_ufunc__", rounded)
    lines = ["r0 = np.exp(a)", "r1 = r0 - r0.T.T"]
    assert checks_of(case_of(*lines, a=A)) == ["value in ufunc"]
    # The next step starts from the same bits, so that errors do not add up.
    case = case_of(*lines, a=A)
    rounding, exact = case.steps
    assert checks_of(replace(case, steps=(replace(rounding, ulps=8.0), exact))) == []


def test_a_documented_refusal_is_skipped():
    """Neither kind of array is changed then; what would use the result is skipped, too."""
    lines = ["r0 = np.exp(a, where=a > 0)", "r1 = r0 + 1", "a += 1"]
    outcome = check_on_threads(case_of(*lines, a=A))
    assert outcome.failures == []
    assert outcome.notes == ["skipped: where=", "skipped: its operand was skipped", "run"]


def test_warnings_of_one_rank(monkeypatch):
    assert checks_of(case_of("r0 = a / 0", a=A, ranks=1)) == []
    apply_ufunc = einmpi.DistArray.__array_ufunc__

    def quiet(*arguments, **options):
        with np.errstate(all="ignore"):
            return apply_ufunc(*arguments, **options)

    monkeypatch.setattr(einmpi.DistArray, "__array_ufunc__", quiet)
    assert checks_of(case_of("r0 = a / 0", a=A, ranks=1)) == ["warnings in ufunc"]


# ---- smaller cases ------------------------------------------------------------------------------


def test_a_failing_case_shrinks(capsys):
    """Say that scripts with np.sort fail: one line remains, on one rank."""

    def fails(case):
        return any("np.sort(" in step.text for step in case.steps)

    number = next(number for number in range(99) if fails(make_array_case(6, number, ranks=3)))
    small = shrink(make_array_case(6, number, ranks=3), fails, 20)
    assert (len(small.steps), len(small.arrays), small.ranks) == (1, 1, 1)
    assert max(array.size for array in small.arrays.values()) <= 1
    exec(python_text(small), {})  # numpy's values, then those of the ranks
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2


# ---- runs ---------------------------------------------------------------------------------------


def check_slice(numbers):
    for number in numbers:
        case = make_array_case(1, number)
        failures = check_on_threads(case).failures
        assert not failures, f"python -m tests.soak arrays --seed 1 --case {number}: {failures}"


@pytest.mark.slow
def test_a_slice_of_the_soak():
    check_slice(range(200, 240))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1400, 100))
def test_slices_of_the_soak(first):
    check_slice(range(first, first + 100))


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
def test_a_case_alone_under_mpirun():
    case = case_of("r0 = a + 1", "a[0] = r0[1]", a=A)
    assert worker.failures_under_mpirun(drive.find_mpirun(), "arrays", case) == []
    wrong = case_of("r0 = a.local + 1", a=A)
    (failure,) = worker.failures_under_mpirun(drive.find_mpirun(), "arrays", wrong)
    assert failure[0] == "accepted AttributeError in ufunc"


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
def test_the_command(capsys, monkeypatch):
    monkeypatch.setattr(command, "CHUNK_CASES", 4)
    options = ["arrays", "--cases", "9", "--mpirun-cases", "5", "--ranks", "2", "--jobs", "1"]
    assert command.main([*options, "--seed", "2"]) == 0
    said = capsys.readouterr().out
    assert "seed 2: 9 cases" in said
    assert "5 of them under mpirun" in said
    assert "failures  none" in said
