"""Arguments of a wrong kind: one line of ours, never a raw Python error."""

import numpy as np
import pytest
from refusals import error

import einmpi
from einmpi import DistArray
from einmpi.planner.strategies import STRATEGIES

x = np.zeros((4, 5))
JOB = einmpi.program("Z[i] = X[i,0]", X=x)
WRONG = (
    3,
    1.5,
    "abc",
    b"x",
    None,
    object(),
    [1],
    [[1], 2],
    {"X": 1},
    {"X": None},
    {3: x},
    {"X": ["a"]},
    np.zeros(3),
    (2, -1),
    len,
    True,
)


def calls(folder):
    """Functions with arguments that work, each of which is replaced by a wrong one."""
    array = DistArray.from_global(x)
    settings = {"strategy": None, "memory": None, "pin": None, "machine": None, "strict": None}
    np.save(folder / "x.npy", x)
    return (
        (einmpi.load, ["jobs/chain.toml"], {"dtype": None, "s": 10}),
        (einmpi.program, ["Z[i] = X[i,0]"], {"X": (4, 5), "dtype": "float64", "outputs": None}),
        (einmpi.plan, [JOB, 4], {**settings, "nodes": 1}),
        (einmpi.compile, [JOB, None], {**settings, "fast_math": None}),
        (einmpi.run, [JOB, {"X": x}, None], {**settings, "fast_math": None}),
        (einmpi.run, ["Z[i] = X[i,0]", None, None], {"X": x}),
        (einmpi.reference, [JOB, {"X": x}], {}),
        (einmpi.open_dataset, [folder / "x.npy", None, None, None, None, ()], {}),
        (einmpi.einsum, ["ij->i", x], {"out": None}),
        (DistArray.from_global, [x, None, None], {}),
        (array.gather, [None], {}),
        (array.redistribute, [array.layout], {}),
        (array.to_hdf5, [folder / "x.h5", "/X", None, None], {}),
        (einmpi.compile(JOB), [{"X": x}], {}),
    )


def test_every_argument_of_every_call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some wrong arguments are names of files
    refused = 0
    for function, arguments, keywords in calls(tmp_path):
        for place in (*range(len(arguments)), *keywords):
            for wrong in WRONG:
                changed = list(arguments)
                changed_keywords = dict(keywords)
                if isinstance(place, int):
                    changed[place] = wrong
                else:
                    changed_keywords[place] = wrong
                try:
                    function(*changed, **changed_keywords)
                except einmpi.EinmpiError as refusal:
                    refused += 1
                    assert "\n" not in str(refusal)
    assert refused > 400


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: einmpi.plan("Z[i] = X[i,0]", 4),
            "plan: job is str; expected a Job; einmpi.load and einmpi.program make one",
        ),
        (lambda: einmpi.load(3), "load: int is not a path; expected the name of a file"),
        (
            lambda: einmpi.program("Z[i] = X[i,0]", X=x, outputs="Z"),
            "program: outputs is 'Z'; expected a list of names such as [\"Z\"]",
        ),
        (
            lambda: einmpi.plan(JOB, 4, strategy=3),
            f"strategy: unknown strategy 3; expected one of {', '.join(STRATEGIES)}",
        ),
        (
            lambda: einmpi.plan(JOB, 4, pin=3),
            'pin: int is not a mapping; expected a dict: {"X": …}',
        ),
        (
            lambda: DistArray.from_global(x).redistribute((2, 2)),
            "redistribute: tuple is not a layout; expected the layout of a DistArray",
        ),
        (
            lambda: einmpi.einsum("ij->i", x, out=np.zeros(3)),
            "einsum: out is an array of shape (3,); expected an array of shape (4,)",
        ),
    ],
)
def test_what_they_say(call, message):
    assert error(call) == message
