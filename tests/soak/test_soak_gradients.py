"""The soak of gradients: complex steps against derivatives by hand, kinks, and a slice of it."""

import hashlib

import numpy as np
import pytest

import einmpi
from tests.soak import __main__ as command
from tests.soak import running
from tests.soak.case import make_gradient_case
from tests.soak.gradients_oracle import SLOPE, evaluate
from tests.soak.gradients_programs import THEMES
from tests.soak.oracle import Invalid
from tests.soak.tree import (
    Aggregation,
    Define,
    Gradient,
    Input,
    Label,
    Number,
    Operation,
    Program,
    Read,
    program_text,
)

LABEL = Label(1, "n3")
OWN = Read("A", (LABEL,))
GRADIENT = Define("dA", (LABEL,), Gradient("loss", OWN))
CUBE = Aggregation("sum", (LABEL,), Operation("**", (OWN, Number(3))))


def program(loss, *more, values=(0.5, -1.25, 2.0)):
    """A program with the gradient of a loss by A."""
    inputs = (Input("A", ("n3",), np.array(values)), Input("V", ("n3",), np.array([1.0, 2.0, -1])))
    return Program({"n3": 3}, inputs, (Define("loss", (), loss), GRADIENT, *more))


# ---- the oracle ---------------------------------------------------------------------------------


def of_all(name, body=OWN):
    return Aggregation(name, (LABEL,), body)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (CUBE, [0.75, 4.6875, 12.0]),
        (of_all("prod"), [-2.5, 1.0, -0.625]),
        (of_all("max"), [0, 0, 1]),
        (of_all("min", Operation("abs", (OWN,))), [1, 0, 0]),
        (of_all("mean", Operation("relu", (OWN,))), [1 / 3, 0, 1 / 3]),
        (of_all("sum", Operation("stop", (OWN,))), [0, 0, 0]),
        (of_all("sum", Operation("%", (OWN, Number(0.75)))), [1, 1, 1]),
        (of_all("sum", Aggregation("cumsum", (LABEL,), OWN)), [3, 2, 1]),
        (of_all("sum", Aggregation("cummax", (LABEL,), OWN)), [2, 0, 1]),
        (of_all("sum", Read("A", (Aggregation("argmax", (LABEL,), OWN),))), [0, 0, 3]),
    ],
)
def test_complex_steps_are_derivatives(loss, expected):
    np.testing.assert_allclose(evaluate(program(loss))["dA"].value, expected, rtol=1e-14)


def test_the_gradient_of_a_slope():
    """Of Σ dA · V + A², where dA is 3 A²."""
    product = Operation("*", (Read("dA", (LABEL,)), Read("V", (LABEL,))))
    total = Operation("+", (product, Operation("**", (OWN, Number(2)))))
    slope = Define(SLOPE, (), Aggregation("sum", (LABEL,), total))
    second = Define("hA", (LABEL,), Gradient(SLOPE, OWN))
    found = evaluate(program(CUBE, slope, second))
    np.testing.assert_allclose(found["hA"].value, [4, -17.5, -8], rtol=1e-9)
    np.testing.assert_allclose(found[SLOPE].value, 0.75 + 9.375 - 12 + 5.8125, rtol=1e-14)


@pytest.mark.parametrize(
    ("loss", "values"),
    [
        (of_all("max"), (1.0, 1.0 + 1e-9, 0.0)),  # which is greater?
        (of_all("sum", Operation("abs", (OWN,))), (0.0, 1.0, 2.0)),
        (of_all("norm"), (0.0, 0.0, 0.0)),
        (of_all("sum", Operation("floor", (OWN,))), (1.0, 0.5, 0.5)),
        (of_all("sum", Read("A", (Number(3),))), (0.5, 1.0, 2.0)),  # outside
        (CUBE, (1e3, 0.5, 0.5)),  # too large to be compared
    ],
)
def test_programs_without_a_sure_gradient_are_not_used(loss, values):
    with pytest.raises(Invalid):
        evaluate(program(loss, values=values))


# ---- cases --------------------------------------------------------------------------------------


def test_a_case_follows_from_its_seed_and_number():
    def digest(numbers):
        found = {}
        for number in numbers:
            case = make_gradient_case(7, number)
            values = b"".join(item.values.tobytes() for item in case.program.inputs)
            shown = program_text(case.program), case.ranks, case.strategy, case.theme
            found[number] = repr(shown).encode() + values
        return hashlib.sha256(b"".join(found[number] for number in sorted(found))).hexdigest()

    assert digest(range(12)) == digest(reversed(range(12)))
    assert digest(range(12))[:16] == "49859d93bed24de9"


def check_cases(seed, numbers):
    ranks = set()
    themes = set()
    for number in numbers:
        case = make_gradient_case(seed, number)
        outcome = running.check_on_threads(case)
        assert not outcome.failures, (number, outcome.failures)
        ranks.add(case.ranks)
        themes.add(case.theme)
    assert ranks == {1, 2, 3, 4}
    assert themes == set(THEMES)


@pytest.mark.slow
def test_a_slice_of_the_soak():
    check_cases(1, range(24))


@pytest.mark.slow
def test_a_larger_slice_of_the_soak():
    check_cases(1, range(24, 324))


def test_a_wrong_gradient_is_seen(monkeypatch):
    case = make_gradient_case(1, 3)
    gather = einmpi.DistArray.gather
    monkeypatch.setattr(einmpi.DistArray, "gather", lambda array: gather(array) + 1e-3)
    assert {check for check, _ in running.check_on_threads(case).failures} == {"value"}


@pytest.mark.slow
def test_the_command(capsys):
    options = ["--cases", "6", "--no-mpirun", "--jobs", "1", "--seed", "2"]
    assert command.main(["gradients", *options]) == 0
    said = capsys.readouterr().out
    assert "seed 2: 6 cases" in said
    assert "failures  none" in said
