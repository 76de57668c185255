"""Machine files: what is read is what was written, and what is wrong in one has its position."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from einmpi.errors import InputError
from einmpi.planner.machine import PRODUCTS, Machine, read_machine
from einmpi.units import (
    parse_bandwidth,
    parse_latency,
    parse_speed,
    show_bandwidth,
    show_latency,
    show_speed,
)

TIME = st.integers(1, 10**9)
FILE = """measured = "here"
[inside]
latency = "1.2 us"
bandwidth = "5.1 GB/s"
[kernels]
float64 = "18 Gflop/s"
other = "1.2 Gop/s"
"""


@given(TIME)
def test_amounts_are_read_back_to_three_digits(time):
    for show, parse in (
        (show_latency, parse_latency),
        (show_bandwidth, parse_bandwidth),
        (show_speed, parse_speed),
    ):
        assert abs(parse(show(time), "x") - time) <= 1 + time / 199


def read(tmp_path, text):
    path = tmp_path / "machine.toml"
    path.write_text(text)
    return read_machine(str(path))


@pytest.mark.slow
@given(st.tuples(TIME, TIME), st.tuples(TIME, TIME) | st.just((0, 0)), TIME, st.text())
def test_a_file_is_read_back(tmp_path_factory, inside, between, operation, source):
    made = Machine(
        inside[0],
        between[0],
        inside[1],
        between[1],
        dict.fromkeys(PRODUCTS, operation),
        operation,
        source,
    )
    found = read(tmp_path_factory.mktemp("machine"), str(made))
    for name in ("latency_inside", "latency_between", "inside", "between", "element"):
        assert abs(getattr(found, name) - getattr(made, name)) <= 1 + getattr(made, name) / 199
    assert list(found.multiply) == list(PRODUCTS)


def test_a_file_says_what_it_means(tmp_path):
    found = read(tmp_path, FILE)
    assert (found.latency_inside, found.inside, found.latency_between, found.between) == (
        1200,
        196,
        0,
        0,
    )
    assert (found.multiply, found.element, found.source) == (
        {"float64": 55_555_556},
        833_333_333,
        "here",
    )


def test_the_digest_is_that_of_the_times(tmp_path):
    found = read(tmp_path, FILE)
    assert read(tmp_path, FILE.replace("here", "there")).digest == found.digest
    assert read(tmp_path, FILE.replace("1.2 us", "1.3 us")).digest != found.digest
    for micro in "\u00b5\u03bc":  # the sign and the Greek letter
        assert read(tmp_path, FILE.replace("1.2 us", f"1.2 {micro}s")) == found


def test_what_was_not_measured_is_refused(tmp_path):
    found = read(tmp_path, FILE)
    found.check(4, 1)
    with pytest.raises(
        InputError,
        match=r"machine\.toml: says nothing about messages between nodes; "
        r"expected a section \[between\]",
    ):
        found.check(4, 2)
    alone = read(tmp_path, FILE[FILE.index("[kernels]") :])
    alone.check(1, 1)
    with pytest.raises(InputError, match="inside a node; expected a section"):
        alone.check(2, 1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[inside]", "[within]", "2:2: unknown key 'within'; expected one of measured, inside"),
        ("latency", "delay", "3:1: unknown key 'delay' in inside"),
        (
            'latency = "1.2 us"',
            "",
            "2:2: there is no latency in [inside]; expected a value such as",
        ),
        (
            'other = "1.2 Gop/s"',
            "",
            "5:2: there is no other in [kernels]; expected a value such as",
        ),
        ("1.2 us", "1.2 GB/s", "3:1: unknown unit 'GB/s' of a time; "),
        ("1.2 us", "1.2", "3:1: '1.2' is not a time; expected a number and a unit"),
        ("5.1 GB/s", "-5.1 GB/s", "4:1: '-5.1 GB/s' is not a bandwidth; "),
        ("5.1 GB/s", "nan GB/s", "4:1: 'nan GB/s' is not a bandwidth; "),
        ("5.1 GB/s", "0.0 GB/s", "4:1: '0.0 GB/s' is zero; expected more than 0"),
        ("5.1 GB/s", "5000 TB/s", "4:1: '5000 TB/s' is out of range; "),
        ('"18 Gflop/s"', "nan", "6:1: float64 is nan; expected a string with a unit"),
        ("float64", "bool", "6:1: unknown key 'bool' in kernels"),
    ],
)
def test_wrong_files(tmp_path, old, new, message):
    with pytest.raises(InputError) as caught:
        read(tmp_path, FILE.replace(old, new))
    assert f"machine.toml:{message}" in str(caught.value) and "\n" not in str(caught.value)
