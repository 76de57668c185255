"""Which tests run: slices, and samples of the cases of a test."""

import argparse
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from paths import ROOT
from selection import parsed, sample, slice_of

HERE = "tests/test_selection.py"
CASES = [f"{HERE}::test_a_sampled_case[{number}]" for number in range(12)]


FAST = [
    CASES[number] for number in (4, 5, 10)
]  # as recorded: their names decide where all add one value


def collected(*options, test=f"{HERE}::test_a_sampled_case"):
    """The names of the cases that pytest collects."""
    command = [sys.executable, "-m", "pytest", "--collect-only", *options, test]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(12))
def test_a_sampled_case(number, request):
    """The cases that the tests below choose from."""
    if request.node.nodeid in FAST:
        assert request.node.get_closest_marker("slow") is None


@pytest.mark.slow
def test_few_cases_are_fast():
    assert collected() == FAST
    assert collected("-m", "slow") == [name for name in CASES if name not in FAST]


class Case:
    """A case of a test with two parameters, as pytest describes it."""

    def __init__(self, name, dtype, ranks):
        self.nodeid = f"tests/test_x.py::test_y[{name}]"
        self.callspec = SimpleNamespace(params={"dtype": dtype, "ranks": ranks})


GRID = [Case(f"{dtype}-{ranks}", dtype, ranks) for dtype in "abcd" for ranks in (1, 2, 3)]


def names(cases):
    return [case.nodeid.partition("[")[2][:-1] for case in cases]


def test_a_sample_has_as_many_values_of_each_parameter_as_possible():
    for size in range(1, 13):
        cases = sample(GRID, size)
        assert len(set(names(cases))) == size
        assert len({case.callspec.params["dtype"] for case in cases}) == min(size, 4)
        assert len({case.callspec.params["ranks"] for case in cases}) == min(size, 3)


def test_cases_that_are_always_in_a_sample():
    cases = sample(GRID, 3, ["b-2", "b-3"])
    assert names(cases)[:2] == ["b-2", "b-3"]
    assert cases[2].callspec.params["dtype"] != "b" and cases[2].callspec.params["ranks"] == 1


def test_a_case_that_no_test_has_cannot_be_named(tmp_path):
    text = "import pytest\n@pytest.mark.sampled(1, always=['b'])\n"
    text += "@pytest.mark.parametrize('x', ['a', 'c'])\ndef test_it(x): pass\n"
    (tmp_path / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT]
    command += ["--confcutdir", ROOT, "-p", "conftest", "--collect-only", tmp_path / "test_it.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "tests")
    assert "test_it has no fast case b" in done.stdout + done.stderr
    assert done.returncode != 0


def test_a_case_that_is_asked_for_by_name_runs():
    assert collected(test=CASES[0]) == [CASES[0]]


@pytest.mark.slow
def test_each_case_is_in_one_slice():
    """Whether it is slow or not."""
    every = ("-m", "slow or not slow")
    first, second = collected("--slice=1/2", *every), collected("--slice=2/2", *every)
    assert first == [name for name in CASES if slice_of(name, 2) == 1]
    assert second == [name for name in CASES if slice_of(name, 2) == 2]
    assert first and second and sorted(first + second) == sorted(CASES)


def test_names_alone_decide():
    """As recorded: another machine or version of Python gives no other slices, nor empty ones."""
    assert [slice_of(name, 8) for name in ("a.py::b", "a.py::c", "a.py::b[1]")] == [4, 6, 8]
    sizes = Counter(slice_of(f"tests/x/test_y.py::test_z[{k}]", 8) for k in range(8000))
    assert sorted(sizes) == list(range(1, 9))
    assert all(900 < size < 1100 for size in sizes.values())


@pytest.mark.parametrize("text", ["0/8", "9/8", "2", "2/0", "-1/8", ""])
def test_what_is_no_slice(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected K/N"):
        parsed(text)
