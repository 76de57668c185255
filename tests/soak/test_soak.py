"""The soak: cases follow from their numbers, the oracle sees errors, and failures shrink."""

import hashlib
import itertools
import sys
from dataclasses import replace

import numpy as np
import pytest
from mpi_helpers import needs_mpirun

import einmpi
from tests.soak import __main__ as command
from tests.soak import case as case_module
from tests.soak import drive, running, worker
from tests.soak.case import LAYOUTS, Case, laid_out, make_case
from tests.soak.generate import BFLOAT16, SPECIAL_THEMES
from tests.soak.looping import evaluate_loop
from tests.soak.oracle import Invalid, Value, disagreement, evaluate
from tests.soak.shrink import shrink
from tests.soak.tree import (
    STEP,
    Aggregation,
    Define,
    Input,
    Label,
    Loop,
    Number,
    Operation,
    Program,
    Read,
    Until,
    program_text,
    walk,
)

LABEL = Label(1, "s0")


def product(dtype="int32", left=(1, 2), right=(3, 4)):
    body = Operation("*", (Read("A", (LABEL,)), Read("B", (LABEL,))))
    inputs = (
        Input("A", ("s0",), np.array(left, dtype)),
        Input("B", ("s0",), np.array(right, dtype)),
    )
    return Program({"s0": 2}, inputs, (Define("Z", (), Aggregation("sum", (LABEL,), body, True)),))


# ---- cases --------------------------------------------------------------------------------------


def test_a_case_follows_from_its_seed_and_number():
    """The same on every machine and in every order: the digest is part of the test."""

    def digest(numbers):
        found = {}
        for number in numbers:
            case = make_case(7, number)
            values = b"".join(item.values.tobytes() for item in case.program.inputs)
            shown = program_text(case.program), case.ranks, case.strategy, sorted(case.pins.items())
            found[number] = repr(shown).encode() + values
        return hashlib.sha256(b"".join(found[number] for number in sorted(found))).hexdigest()

    assert digest(range(30)) == digest(reversed(range(30)))
    assert digest(range(30))[:16] == "c925e6cf919093ff"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3), np.array(2.5), np.zeros((0, 2))])
def test_layouts_keep_the_values(array, layout):
    np.testing.assert_array_equal(laid_out(array, layout), array)


def test_every_program_is_accepted():
    for number in range(60):
        case = make_case(3, number)
        arrays = {item.name: item.values for item in case.program.inputs}
        if case.program.loop is not None:
            arrays[STEP] = np.array(0)
        einmpi.program(program_text(case.program), outputs=case.program.outputs, **arrays)


# ---- the oracle ---------------------------------------------------------------------------------


def test_the_oracle_computes_integers_as_numpy():
    assert evaluate(product())["Z"].value == 11
    wrapped = evaluate(product(left=(2**20, 0), right=(2**20, 0)))["Z"]
    assert (int(wrapped.value), wrapped.value.dtype) == (0, np.int64)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 2.0, 0.5])
@pytest.mark.parametrize("dtype", ["bool", "int32", "int64", "float32"])
def test_the_oracle_knows_the_dtype_of_a_power(dtype, exponent):
    """The operator of numpy makes an int8 of a bool array ** 2; np.power does not."""
    power = Operation("**", (Read("A", (LABEL,)), Number(exponent)))
    values = np.array([1, 0], dtype)
    inputs = (Input("A", ("s0",), values),)
    program = Program({"s0": 2}, inputs, (Define("Z", (LABEL,), power),))
    job = einmpi.program(program_text(program), A=values)
    found = einmpi.run(job, {"A": values})["Z"].gather()
    assert disagreement(found, evaluate(program)["Z"]) == ""


def test_the_oracle_marks_what_a_rewrite_may_change():
    odd = product("float64", left=(np.inf, 0), right=(0, 1))
    assert evaluate(odd)["Z"].unsure.all()
    strict = evaluate(odd, strict=True)["Z"]
    assert np.isnan(strict.value)
    assert not strict.unsure.any()


OWN = Read("A", (LABEL,))
WIDE = Operation("complex128", (OWN,))  # shows whether 0.1 was rounded to float16 or to float32
POSITIVE = Operation(">", (OWN, Number(0)))


@pytest.mark.parametrize(
    ("dtype", "left", "right"),
    [
        # What is made of numbers alone is a number, which takes the dtype of its neighbour.
        ("int8", OWN, Operation("where", (Number(1), Number(1), Number(6)))),
        # A number beside half precision is not rounded.
        ("float16", WIDE, Operation("where", (POSITIVE, Number(0.1), OWN))),
        ("float16", WIDE, Operation("maximum", (OWN, Number(0.1)))),
    ],
)
def test_the_oracle_knows_numbers(dtype, left, right):
    values = np.array([1, 0], dtype)
    inputs = (Input("A", ("s0",), values),)
    value = Operation("+", (left, right))
    program = Program({"s0": 2}, inputs, (Define("Z", (LABEL,), value),))
    job = einmpi.program(program_text(program), A=values)
    found = einmpi.run(job, {"A": values})["Z"].gather()
    assert disagreement(found, evaluate(program)["Z"]) == ""


def test_the_oracle_knows_bfloat16_beside_integers():
    left = np.array([1.5, 3.0], BFLOAT16)
    found = evaluate(product(left=left, right=np.array([3, 4], "int16"), dtype=None))["Z"].value
    assert (found, found.dtype) == (16.5, np.float32)
    with pytest.raises(Invalid, match="bfloat16"):
        evaluate(product(left=left, right=np.array([3, 4], "int8"), dtype=None))


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        (np.array([1.0, 2.0]), False),
        (np.array([1.0, 2.0 + 1e-9]), False),
        (np.array([1.0, 2.1]), True),
        (np.array([1.0, np.nan]), True),
        (np.array([1.0, 2.0], "float32"), True),
        (np.array([[1.0, 2.0]]), True),
    ],
)
def test_disagreement(found, wrong):
    expected = Value(np.array([1.0, 2.0]), np.array([0.0, 1e-9]), 2.0, np.array([False, False]))
    assert bool(disagreement(found, expected)) is wrong


def test_disagreement_in_integers_and_nan():
    assert disagreement(np.array([3]), Value(np.array([4])))
    assert not disagreement(np.array([3]), Value(np.array([4]), unsure=np.array([True])))
    nothing = np.array([np.nan, np.inf])
    assert not disagreement(nothing, Value(nothing.copy()))
    assert disagreement(-nothing, Value(nothing))


# ---- runs ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_slice_of_the_soak():
    notes = set()
    for number in range(200, 220):
        outcome = running.check_on_threads(make_case(1, number))
        assert not outcome.failures, (number, outcome.failures)
        notes |= set(outcome.notes)
    assert "parts" in notes


def test_inputs_in_zarr_stores(monkeypatch):
    monkeypatch.setattr(case_module, "ZARR_SHARE", 1.0)
    checked = 0
    for number in range(40):
        case = make_case(11, number)
        if case.stores:
            outcome = running.check_on_threads(case)
            assert not outcome.failures, (number, outcome.failures)
            assert "zarr" in outcome.notes
            checked += 1
    assert checked >= 2


def test_inputs_in_bfloat16(monkeypatch):
    monkeypatch.setattr(case_module, "BFLOAT16_SHARE", 1.0)
    checked = 0
    for number in range(32):
        case = make_case(12, number)
        if any(item.values.dtype == BFLOAT16 for item in case.program.inputs):
            outcome = running.check_on_threads(case)
            assert not outcome.failures, (number, outcome.failures)
            checked += 1
    assert checked >= 5


@pytest.mark.parametrize("theme", SPECIAL_THEMES)
def test_special_programs(monkeypatch, theme):
    monkeypatch.setattr(case_module, "SPECIAL_SHARE", 1.0)
    monkeypatch.setattr(case_module, "SPECIAL_THEMES", (theme,))
    for number in range(8):
        case = make_case(9, number)
        outcome = running.check_on_threads(case)
        assert not outcome.failures, (number, program_text(case.program), outcome.failures)


def test_ranks_that_share_memory_and_spill(monkeypatch):
    """Some of them spill, and others need not."""
    monkeypatch.setattr(case_module, "UNEVEN_SHARE", 1.0)
    monkeypatch.setattr(case_module, "SPECIAL_SHARE", 0.0)
    for number in (39, 142):
        outcome = running.check_on_threads(make_case(9, number))
        assert not outcome.failures, (number, outcome.failures)
        assert {"shared memory", "spilled on some ranks"} <= set(outcome.notes)


def test_planted_errors_are_seen(monkeypatch):
    case = make_case(1, 5)
    gather = einmpi.DistArray.gather
    monkeypatch.setattr(einmpi.DistArray, "gather", lambda array: gather(array) + 1)
    assert {check for check, _ in running.check_on_threads(case).failures} == {"value"}
    monkeypatch.undo()
    monkeypatch.setattr(running, "_run_twice", None)
    assert [check for check, _ in running.check_on_threads(case).failures] == ["error"]


def test_a_failing_case_shrinks():
    """Say that programs with an aggregation by max fail: one remains, of one element."""

    def fails(case):
        parts = [part for item in case.program.statements for part in walk(item.value)]
        return any(isinstance(part, Aggregation) and part.name == "max" for part in parts)

    for number in range(200):
        case = make_case(5, number)
        if fails(case) and len(case.program.statements) > 2:
            break
    small = shrink(case, fails, 20)
    assert fails(small)
    (statement,) = small.program.statements
    assert sum(1 for _ in walk(statement.value)) <= 3
    assert small.ranks == 1
    assert max(small.program.sizes.values()) == 1


# ---- loops --------------------------------------------------------------------------------------


def counting_loop(**changes):
    """A[i] becomes A[i] + step; R is their sum: 3, 3, 5, 9, 15."""
    following = Operation("+", (Read("A", (LABEL,)), Read(STEP, ())))
    total = Aggregation("sum", (LABEL,), Read("N", (LABEL,)), True)
    statements = (Define("N", (LABEL,), following), Define("R", (), total))
    inputs = (Input("A", ("s0",), np.array([1, 2])),)
    return Program({"s0": 2}, inputs, statements, loop=Loop(5, {"A": "N"}, **changes))


def test_the_oracle_unrolls_a_loop():
    found = evaluate_loop(counting_loop(record=("R",)), strict=False)
    assert [int(row.value) for row in found.history["R"]] == [3, 5, 9, 15, 23]
    assert (found.steps, found.is_done, set(found.outputs)) == (5, False, {"A", "R"})
    np.testing.assert_array_equal(found.outputs["A"].value, [11, 12])
    ended = evaluate_loop(counting_loop(until=Until("R", 8.5)), strict=False)
    assert (ended.steps, ended.is_done, int(ended.outputs["R"].value)) == (3, True, 9)


@pytest.mark.slow
def test_loops_agree_with_their_unrolled_values(monkeypatch):
    monkeypatch.setattr(case_module, "LOOP_SHARE", 1.0)
    ends = set()
    for number in range(12):
        case = make_case(4, number)
        outcome = running.check_on_threads(case)
        assert not outcome.failures, (number, outcome.failures)
        if case.program.loop is not None:
            assert "loop" in outcome.notes
            ends.add(case.program.loop.until is not None)
    assert ends == {True, False}


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"record": ("R",)}, "history"),
        ({"until": Until("R", 6.5)}, "steps"),
        ({}, "value"),
    ],
)
def test_a_wrong_loop_is_seen(monkeypatch, changes, check):
    """The oracle is given other values here."""
    case = Case(1, 1, "none", counting_loop(**changes), ranks=2, files=True)
    assert not running.check_on_threads(case).failures
    right = evaluate_loop

    def wrong(program, strict):
        inputs = tuple(replace(item, values=item.values + 1) for item in program.inputs)
        return right(replace(program, inputs=inputs), strict)

    monkeypatch.setattr(running, "evaluate_loop", wrong)
    assert check in {name for name, _ in running.check_on_threads(case).failures}


# ---- processes ----------------------------------------------------------------------------------

DIES = """
import json, os, signal, sys
first = int(sys.argv[sys.argv.index("--first") + 1])
count = int(sys.argv[sys.argv.index("--count") + 1])
for number in range(first, first + count):
    print(json.dumps({"start": number}), flush=True)
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    line = {"done": number, "themes": [], "ranks": 1, "dtypes": [], "failures": [],
            "notes": [], "compared": 0, "elements": 0}
    print(json.dumps(line), flush=True)
"""


def test_a_crash_is_told_from_the_cases_around_it(monkeypatch):
    monkeypatch.setattr(drive, "worker_command", lambda *_: [sys.executable, "-c", DIES])
    run = drive.Drive(1, None, 2, None, None, None)
    run.run(iter([drive.Chunk(0, 4), drive.Chunk(4, 4)]))
    assert run.tally.cases == 8
    (failure,) = run.tally.failures
    assert (failure.number, failure.checks[0][0]) == (5, "crash")


def test_chunks_without_a_limit():
    chunks = command.chunks_of(command.parse(["--minutes", "1"]), "mpirun")
    first = [next(chunks) for _ in range(command.CHUNKS_BETWEEN_MPIRUNS + 1)]
    assert [chunk.mpi_ranks is not None for chunk in first] == [True, *[False] * 4, True]
    assert all(one.first + one.count == two.first for one, two in itertools.pairwise(first))


def test_chunks_of_a_number_of_cases():
    """Every case is in one chunk, and the last chunks are small."""
    given = ["--cases", "5007", "--mpirun-cases", "400", "--jobs", "2", "--first", "3"]
    chunks = list(command.chunks_of(command.parse(given), "mpirun"))
    numbers = [range(chunk.first, chunk.first + chunk.count) for chunk in chunks]
    assert list(itertools.chain(*numbers)) == list(range(3, 5010))
    assert sum(chunk.count for chunk in chunks if chunk.mpi_ranks) == 400
    assert chunks[1].count == drive.CHUNK_CASES
    assert chunks[-1].count <= command.LEAST_CHUNK_CASES


def test_an_error_of_the_soak_itself_is_raised():
    def chunks():
        raise ZeroDivisionError
        yield

    with pytest.raises(ZeroDivisionError):
        drive.Drive(1, None, 1, None, None, None).run(chunks())


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
def test_a_case_alone_under_mpirun():
    case = make_case(2, 3, ranks=2)
    assert worker.failures_under_mpirun(drive.find_mpirun(), "programs", case) == []
    broken = replace(case, strategy="no such strategy")
    (failure,) = worker.failures_under_mpirun(drive.find_mpirun(), "programs", broken)
    assert failure[0] == "error"


@pytest.mark.mpirun
@needs_mpirun
@pytest.mark.slow
def test_the_command(capsys, monkeypatch):
    monkeypatch.setattr(command, "CHUNK_CASES", 4)
    options = ["--cases", "9", "--mpirun-cases", "5", "--ranks", "2", "--jobs", "1", "--seed", "2"]
    assert command.main(options) == 0
    said = capsys.readouterr().out
    assert "seed 2: 9 cases" in said
    assert "5 of them under mpirun" in said
    assert "failures  none" in said
