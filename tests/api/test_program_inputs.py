"""`einmpi.program` with inputs from files, residents and roles: as in a job file."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import error

import einmpi
from einmpi.comm.threads import run_threads

TEXT = "Z[i,k] = sum(X[i,g,c] * W[g,c,k])"
pytestmark = pytest.mark.usefixtures("in_folder")


def program(**arguments):
    return einmpi.program(TEXT, X=(3, 2, 2), **arguments)


def test_the_job_is_that_of_a_job_file():
    np.save("W.npy", np.arange(24.0).reshape(4, 6))
    with open("job.toml", "w") as file:
        file.write(
            f'program = "{TEXT}"\n'
            'inputs.X = { random = "normal", shape = [3, 2, 2], seed = 4 }\n'
            'inputs.W = { file = "W.npy", shape = [2, 2, 6], dtype = "float64", resident = true }\n'
            'roles.batch = ["i"]\n'
        )
    from_file = einmpi.load("job.toml")
    made = einmpi.program(
        TEXT,
        inputs={
            "X": {"random": "normal", "shape": (np.int64(3), 2, 2), "seed": 4, "low": None},
            "W": {"file": Path("W.npy"), "shape": [2, 2, 6], "dtype": np.float64},
        },
        resident=["W"],
        roles={"batch": ("i",)},
    )
    assert made.graph == from_file.graph
    assert made.roles == from_file.roles
    for spec, expected in zip(made.inputs, from_file.inputs, strict=True):
        assert spec.resident == expected.resident == (spec.name == "W")
        assert (spec.shape, spec.dtype, spec.seed) == (
            expected.shape,
            expected.dtype,
            4 * (spec.name == "X"),
        )
        assert os.path.normpath(spec.file or "") == os.path.normpath(expected.file or "")
    assert einmpi.plan(made, 4).digest == einmpi.plan(from_file, 4).digest
    found = einmpi.run(made)["Z"].gather()
    np.testing.assert_array_equal(found, einmpi.run(from_file)["Z"].gather())


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 6)
)
def test_results_on_several_ranks(i, g, c, k, ranks):
    random = np.random.default_rng(7)
    weights = random.standard_normal((g * c, k))
    x = random.standard_normal((i, g, c))
    np.save("weights.npy", weights)
    job = einmpi.program(
        TEXT,
        X=x,
        inputs={"W": {"file": "weights.npy", "shape": (g, c, k)}},
        resident=True,
    )

    def call_twice(comm):
        compiled = einmpi.compile(job, comm)
        compiled({"X": x})
        found = compiled({"X": x})["Z"].gather()
        plan = next(iter(compiled.ready.values()))[0]
        return found, compiled.measured.received, compiled.measured.peak, plan

    results = run_threads(ranks, call_twice)
    for found, _, peak, plan in results:
        np.testing.assert_allclose(found, x.reshape(i, g * c) @ weights, atol=1e-12)
        assert peak <= plan.peak
    assert sum(received for _, received, _, _ in results) == results[0][3].bytes_predicted


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            {"inputs": {"W": {"file": "W.npy", "shape": (2, 2, 7)}}},
            'inputs["W"]: W.npy has shape [4, 6]; expected shape [2, 2, 7], as declared',
        ),
        (
            {"inputs": {"W": {"file": "W.npy", "shape": ("2*q", 2, 6)}}},
            'inputs["W"]["shape"][0]:1:3: unknown size \'q\'; '
            "expected a number, because there are no sizes yet",
        ),
        (
            {"inputs": {"W": {"file": "W.npy", "batch": 2, "shape": (2, 2, 6)}}},
            'inputs["W"]: W comes in batches, but no step is repeated; expected a [loop]',
        ),
        (
            {"inputs": {"W": {"random": "ones", "shape": (2, object())}}},
            'inputs["W"]["shape"][1]: extent object in shape; '
            "expected an integer from 0 to 2**39 = 549755813888",
        ),
        (
            {"inputs": {"W": {"file": 3}}},
            'inputs["W"]["file"]: file is 3; expected a string',
        ),
        (
            {"inputs": {"W": {3: 3}}},
            'inputs["W"]: 3 is not a name; expected names as keys: {"X": …}',
        ),
        ({"inputs": 3}, 'inputs: int is not a mapping; expected a dict: {"X": …}'),
        (
            {"inputs": {"W": {"random": "ones", "shape": (2, 2, 6)}}, "resident": ["V"]},
            "program: 'V' in resident is not one of the inputs; expected W",
        ),
        (
            {"inputs": {"X": {"random": "ones", "shape": (3, 2, 2)}}},
            'inputs["X"]: X is given twice; expected each input once',
        ),
        (
            {"inputs": {"W": {"random": "ones", "shape": (2, 2, 6)}}, "W": 3.0},
            'inputs["W"]: W is a parameter and cannot name a tensor; expected another name',
        ),
        (
            {"roles": {"batch": ["i j"]}},
            "roles[\"batch\"][0]: 'i j' is not a label; "
            'expected a list of labels such as batch = ["b"]',
        ),
    ],
)
def test_messages_name_the_argument(arguments, message):
    np.save("W.npy", np.zeros((4, 6)))
    assert error(lambda: program(**arguments)) == message


def test_a_file_that_is_missing():
    assert error(lambda: program(inputs={"W": {"file": "V.npy"}})) == (
        'inputs["W"]: there is no file V.npy; expected an .npy file; paths start where Python runs'
    )
