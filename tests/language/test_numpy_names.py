"""What is said about functions of numpy that the language lacks."""

import numpy as np
import pytest
from refusals import error

import einmpi
from einmpi.language.macros import WRITTEN_INSTEAD

GIVEN = {
    "x": (6,),
    "w": (6,),
    "y": (4,),
    "v": (24,),
    "k": np.zeros(6, "int64"),
    "A": (6, 5),
    "B": (5, 4),
    "D": (5, 5),
    "K": (3, 3),
    "P": (2, 6, 5),
    "Q": (2, 5, 4),
    "n": 6,
    "m": 4,
    "low": 0.0,
    "width": 0.5,
}


@pytest.mark.parametrize("name", WRITTEN_INSTEAD)
def test_what_is_suggested_is_a_program(name):
    text = WRITTEN_INSTEAD[name]
    if " = " not in text:
        is_aggregation = text.startswith(("sum", "max", "min"))
        text = f"Z = {text}" if is_aggregation else f"Z[i] = {text}"
    job = einmpi.program(text, **GIVEN)
    assert [str(output) for output in job.graph.outputs] == ["Z"]
    message = error(lambda: einmpi.program(f"Z[i] = {name}(x[i])", x=(6,)))
    assert message == f"program:1:8: unknown function '{name}'; expected {WRITTEN_INSTEAD[name]}"


def test_values_of_some_suggestions():
    x = np.array([1.0, np.nan, 3.0, -1.0, 2.0, 0.5])
    y = np.arange(4.0)
    one_value = {name: "Z = " + WRITTEN_INSTEAD[name] for name in ("nanmean", "nanmax", "nansum")}
    for name, text in one_value.items():
        assert float(einmpi.run(text, x=x)["Z"]) == getattr(np, name)(x)
    joined = einmpi.run(WRITTEN_INSTEAD["concatenate"], x=x, y=y, n=6, m=4)["Z"]
    np.testing.assert_array_equal(joined.gather(), np.concatenate([x, y]))
    rolled = einmpi.run(WRITTEN_INSTEAD["roll"], x=x, n=6)["Z"]
    np.testing.assert_array_equal(rolled.gather(), np.roll(x, 1))


@pytest.mark.parametrize(
    "call, says",
    [
        ("np.exp(x[i])", "unknown function 'np.exp'; expected exp alone"),
        ("np.square(x[i])", "unknown function 'np.square'; expected x[i]**2"),
        (
            "np.sort(x[i])",
            "unknown function 'np.sort'; expected a function of the language; numpy's sort takes "
            "the DistArray that a program returns",
        ),
        (
            "x[i] + max(sum((x[i] - y[j])**2))",
            "max(...) has nothing to aggregate: every label in it is aggregated inside it or also "
            "occurs outside of it; expected max[labels](...)",
        ),
        (
            "sum(x[i], axis=0)",
            "sum is not called like this; expected sum(expression); labels take the place of an "
            "axis: sum[j](X[i,j])",
        ),
        (
            "max(x[i], 0)",
            "max is not called like this; expected max(expression); maximum(x, y) is that of two "
            "values",
        ),
        (
            "x[i] / len(x)",
            "unknown function 'len'; expected a size, such as n in [sizes] or "
            "einmpi.program(..., n=8)",
        ),
        (
            "x[i] + np.random.normal(6)",
            "unknown function 'np.random.normal'; expected normal(seed, i, …)",
        ),
    ],
)
def test_other_habits(call, says):
    message = error(lambda: einmpi.program(f"Z[i] = {call}", x=(6,), y=(4,)))
    assert message.partition(": ")[2] == says


def test_less_of_a_tensor():
    message = error(lambda: einmpi.program("z[i:3] = x[i]", x=(6,)))
    hint = "a slice such as x[:3][i] reads less of a tensor"
    assert message.endswith(f"and 3 in i:3; expected the same extent everywhere; {hint}")
    x = np.arange(6.0)
    found = einmpi.run("z[i:3] = x[:3][i]", x=x)["z"].gather()
    np.testing.assert_array_equal(found, x[:3])
    assert error(lambda: einmpi.program("z[i:9] = x[i]", x=(6,))).endswith("everywhere")
