"""Parameters: numbers that take the dtype of what they meet, and on which no plan depends."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_process import einmpi_here

import einmpi
from einmpi.checkpoint.folder import identity
from einmpi.comm.threads import run_threads
from einmpi.errors import InputError
from einmpi.files.reading import load_array
from einmpi.job.job_file import parse_number
from einmpi.kernels.cpu import compiled

pytestmark = pytest.mark.usefixtures("in_folder")

JOB = """
program = '''
Z[i,j] = X[i,j] - rate * sum(X[i,k] * X[j,k]) * where(flip, -1.0, 1.0)
W[i] = X[i,0] ** power + shift * 2
'''
dtype = "float32"
sizes.n = 6
inputs.X = { shape = ["n", "n"], random = "normal", seed = 1 }
[parameters]
rate = 0.1
power = 3
flip = false
shift = "1+2j"
"""


def write_job(text=JOB):
    with open("job.toml", "w") as file:
        file.write(text)


def by_numpy(X, rate=0.1, power=3, flip=False, shift=1 + 2j):
    sign = -1.0 if flip else 1.0
    return {"Z": X - rate * (X @ X.T) * sign, "W": X[:, 0] ** power + shift * 2}


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rate": 0.5, "flip": True},
        {"rate": 2, "power": 2, "shift": 0.5},
        {"rate": float("inf"), "n": 4},
    ],
)
def test_values_equal_numpy(ranks, settings):
    write_job()
    job = einmpi.load("job.toml", **settings)
    values = {name: value for name, value in settings.items() if name != "n"}
    wanted = by_numpy(input_of(job), **values)
    for found in run_threads(ranks, lambda comm: gathered(job, comm)):
        for name, expected in wanted.items():
            assert found[name].dtype == (np.float32 if name == "Z" else np.complex64)
            np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-4)
    for name, array in einmpi.reference(job).items():
        np.testing.assert_allclose(array, wanted[name], rtol=1e-4, atol=1e-4)


def input_of(job):
    spec = next(spec for spec in job.inputs if spec.name == "X")
    return load_array(spec, spec.shape, spec.dtype)


def gathered(job, comm):
    return {name: array.gather() for name, array in einmpi.run(job, comm=comm).items()}


def test_neither_the_plan_nor_kernels_depend_on_values():
    write_job(JOB.replace("[i,0] ** power", "[i,0] * power"))
    digests = set()
    compiled_kernels = []
    for rate in (0.1, 0.7, 1e30):
        job = einmpi.load("job.toml", rate=rate, n=40)
        digests.add(einmpi.plan(job, 4).digest)
        einmpi.run(job)
        compiled_kernels.append(len(compiled.KERNELS))
    assert len(digests) == 1
    assert len(set(compiled_kernels)) == 1


def test_parameters_are_not_sent():
    """Every rank knows them: a program that moves nothing without them moves nothing with them."""
    job = einmpi.program("Z[i] = rate * X[i]", X=(64,), rate=0.5)
    assert einmpi.plan(job, 4).bytes_predicted == 0
    x = np.arange(64.0)

    def received(comm):
        result = einmpi.run(job, {"X": x}, comm=comm)["Z"]
        return comm.received, result.gather()

    for count, result in run_threads(4, received):
        assert count == 0
        np.testing.assert_array_equal(result, 0.5 * x)


@pytest.mark.parametrize(
    ("value", "dtype", "wanted"),
    [
        (0.5, "float32", "float32"),
        (0.5, "float16", "float16"),
        (0.5, "int32", "float64"),
        (2j, "float32", "complex64"),
        (True, "int32", "int32"),
        (0.5, "complex64", "complex64"),
    ],
)
def test_dtypes_are_those_of_constants(value, dtype, wanted):
    array = np.arange(4).astype(dtype)
    job = einmpi.program("Z[i] = a * X[i]; Y[i] = (a + a) * X[i]", X=array, a=value)
    results = einmpi.run(job, {"X": array})
    constant = einmpi.program(f"Z[i] = {value!r} * X[i]", X=array)
    assert results["Z"].dtype == results["Y"].dtype == constant.graph["Z"].dtype == wanted
    np.testing.assert_array_equal(results["Z"].gather(), value * array)


def test_calls_give_other_values():
    x = np.arange(4, dtype="float32")
    job = einmpi.program("Z[i] = rate * X[i]", X=x, rate=0.5)
    call = einmpi.compile(job)
    np.testing.assert_array_equal(call({"X": x})["Z"].gather(), 0.5 * x)
    np.testing.assert_array_equal(call({"X": x, "rate": 2.0})["Z"].gather(), 2 * x)
    np.testing.assert_array_equal(call({"X": x})["Z"].gather(), 0.5 * x)
    for rate in (0.25, 3.0):
        found = einmpi.run("Z[i] = rate * X[i]", X=x, rate=rate)["Z"].gather()
        np.testing.assert_array_equal(found, rate * x)
        assert found.dtype == np.float32


def test_a_checkpoint_belongs_to_its_parameters():
    write_job()
    first = identity(einmpi.load("job.toml"))
    assert first == identity(einmpi.load("job.toml"))
    changed = identity(einmpi.load("job.toml", rate=0.2))
    assert [part for part in first if first[part] != changed[part]] == ["the input rate"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"power": 1.5}, "parameter power is set to 1.5; expected an integer"),
        ({"flip": 1}, "parameter flip is set to 1; expected true or false"),
        ({"rate": True}, "parameter rate is set to true; expected a real number"),
        ({"rate": 1j}, "parameter rate is set to 1j; expected a real number"),
        ({"rte": 1.0}, r"there is no size or parameter 'rte' to set; expected .*rate"),
        ({"n": 1.5}, "size n is set to 1.5; expected an integer from 1"),
    ],
)
def test_wrong_settings(setting, message):
    write_job()
    with pytest.raises(InputError, match=message):
        einmpi.load("job.toml", **setting)


def test_the_command_line_sets_them():
    write_job()
    words = ["--set", "rate=2.5e-1", "--set", "flip=true", "--set", "shift=0.5+1j", "--set", "n=3"]
    done = einmpi_here(".", ["check", "job.toml", *words])
    assert (done.returncode, done.stderr) == (0, "")
    for text in ("parameter 0.25", "parameter True", "parameter (0.5+1j)", "X float32 3×3"):
        assert text in done.stdout
    assert einmpi_here(".", ["verify", "job.toml", *words]).returncode == 0


@given(st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.booleans()))
def test_numbers_are_read_as_python_writes_them(number):
    text = str(number).lower() if isinstance(number, bool) else repr(number)
    found = parse_number(text)
    assert found == number and type(found) is type(number)


@pytest.mark.slow
@given(st.text(max_size=12))
def test_other_texts_are_not_numbers(text):
    found = parse_number(text)
    assert found is None or complex(text.replace("true", "1").replace("false", "0")) is not None
