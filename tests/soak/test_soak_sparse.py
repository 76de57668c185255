"""The soak of sparse tensors: a slice of it, and that a wrong value is seen."""

import pytest

import einmpi
from tests.soak.sparse_programs import check_on_threads, make_case


def check_cases(numbers):
    compared = 0
    for number in numbers:
        case = make_case(1, number)
        outcome = check_on_threads(case)
        assert not outcome.failures, (number, case.program.text, outcome.failures)
        compared += outcome.compared > 0
    assert compared > len(numbers) / 4  # some are refused


@pytest.mark.slow
def test_a_slice_of_the_soak():
    check_cases(range(40))


@pytest.mark.slow
def test_a_larger_slice_of_the_soak():
    check_cases(range(40, 640))


def test_a_wrong_value_is_seen(monkeypatch):
    gather = einmpi.DistArray.gather
    monkeypatch.setattr(einmpi.DistArray, "gather", lambda array: gather(array) * 3 + 1)
    outcomes = [check_on_threads(make_case(1, number)) for number in range(12)]
    assert any(outcome.failures for outcome in outcomes)
