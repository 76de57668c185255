"""Attributes of results that say where they come from, and the digests of the headers of inputs."""

import hashlib
import json
import os
from datetime import UTC, datetime

import h5py
import numpy as np
import pytest
from in_process import einmpi_here
from safetensors.numpy import save_file

import einmpi
from einmpi.files.formats import find
from einmpi.files.specs import InputSpec

pytestmark = pytest.mark.usefixtures("in_folder")

JOB = """
dtype = "float32"
program = '''
Z[i,k] = rate * sum(A[i,j] * B[j,k]) + C[i,k]
n = sum(W[i] * N[i])
'''
[sizes]
s = 6
[parameters]
rate = 0.5
turn = "1+2j"
[inputs]
A = { shape = ["s", 4], random = "uniform", seed = 7, high = 3 }
B = { file = "b.h5", dataset = "/g/B", rows = "1:5" }
C = "c.npy"
W = "w.safetensors:w"
N = { shape = [3], random = "ones" }
[outputs]
Z = "out.h5:/group/result"
n = "out.h5:/n"
"""


def write_inputs():
    with h5py.File("b.h5", "w") as file:
        file["g/B"] = np.ones((9, 5), "float32")
    np.save("c.npy", np.zeros((6, 5), "float32"))
    save_file({"w": np.arange(3, dtype="float32")}, "w.safetensors")
    with open("job.toml", "w") as file:
        file.write(JOB)


def attributes(file, dataset):
    with h5py.File(file) as handle:
        return dict(handle[dataset].attrs)


def header_bytes(file):
    """Return the header of an .npy or safetensors file, found by the text of the formats."""
    with open(file, "rb") as handle:
        content = handle.read()
    if file.endswith(".npy"):
        return content[: 10 + int.from_bytes(content[8:10], "little")]
    return content[: 8 + int.from_bytes(content[:8], "little")]


def test_results_of_a_job_say_where_they_come_from(tmp_path):
    write_inputs()
    done = einmpi_here(tmp_path, ["job.toml", "--set", "rate=0.25", "--set", "s=6"])
    assert done.returncode == 0, done.stderr
    found = attributes("out.h5", "/group/result")
    plan = einmpi.plan(einmpi.load("job.toml"), ranks=1)
    assert found["einmpi_plan"] == plan.digest
    assert found["einmpi_program"] == einmpi.load("job.toml").source.text
    assert (found["einmpi_dtype"], found["einmpi_ranks"]) == ("float32", "1")
    assert found["einmpi_tensor"] == "Z" and attributes("out.h5", "n")["einmpi_tensor"] == "n"
    assert found["einmpi_job"] == str(tmp_path / "job.toml")
    assert json.loads(found["einmpi_sizes"]) == {"s": 6}
    assert json.loads(found["einmpi_parameters"]) == {"rate": 0.25}  # the program has no turn
    software = json.loads(found["einmpi_software"])
    assert software["einmpi"] == einmpi.__version__ and software["numpy"] == np.__version__
    assert software["h5py"] == h5py.__version__
    age = datetime.now(UTC) - datetime.fromisoformat(found["einmpi_date"])
    assert 0 <= age.total_seconds() < 60


def test_inputs_are_described_with_the_digests_of_their_headers(tmp_path):
    write_inputs()
    assert einmpi_here(tmp_path, ["job.toml", "--quiet"]).returncode == 0
    inputs = json.loads(attributes("out.h5", "/n")["einmpi_inputs"])
    assert sorted(inputs) == ["A", "B", "C", "N", "W"]
    assert inputs["A"] == {
        "random": "uniform",
        "seed": 7,
        "low": 0,
        "high": 3,
        "shape": [6, 4],
        "dtype": "float32",
    }
    with h5py.File("b.h5") as file:
        offset = file["g/B"].id.get_offset()
    facts = f'{{"chunks":null,"dataset":"/g/B","dtype":"<f4","offset":{offset},"shape":[9,5]}}'
    modified = datetime.fromtimestamp(int(os.path.getmtime("b.h5")), UTC)
    assert inputs["B"] == {
        "file": str(tmp_path / "b.h5"),
        "dataset": "/g/B",
        "slice": "1:5",
        "header_sha256": hashlib.sha256(facts.encode()).hexdigest(),
        "bytes": os.path.getsize("b.h5"),
        "modified": modified.isoformat(),
        "shape": [4, 5],
        "dtype": "float32",
    }
    for name, file in (("C", "c.npy"), ("W", "w.safetensors")):
        digest = hashlib.sha256(header_bytes(file)).hexdigest()
        assert inputs[name]["header_sha256"] == digest
        assert inputs[name]["file"] == str(tmp_path / file)
    assert inputs["W"]["tensor"] == "w"


def test_a_header_does_not_depend_on_values_or_the_part_that_is_read():
    digests = set()
    for value in (1.0, 2.0):
        np.save("x.npy", np.full((6, 2), value))
        for slices in ((), (2,)):
            digests.add(find(InputSpec("X", file="x.npy", slices=slices)).header)
    assert len(digests) == 1
    np.save("x.npy", np.zeros((2, 6)))
    assert find(InputSpec("X", file="x.npy")).header not in digests


def test_results_of_python_say_where_they_come_from():
    with h5py.File("b.h5", "w") as file:
        file["B"] = np.ones((4, 5))
    job = einmpi.program("Z[i,k] = rate * sum(A[i,j] * B[j,k])", A=(3, 4), B=(4, 5), rate=2.0)
    with h5py.File("b.h5") as file:
        given = {"A": np.ones((3, 4)), "B": file["B"], "rate": 3.0}
        result = einmpi.run(job, given)["Z"]
    result.to_hdf5("out.h5", "Z")
    found = attributes("out.h5", "Z")
    assert found["einmpi_program"] == job.source.text and found["einmpi_tensor"] == "Z"
    assert json.loads(found["einmpi_parameters"]) == {"rate": 3.0}
    inputs = json.loads(found["einmpi_inputs"])
    assert inputs["A"] == {"given": True, "shape": [3, 4], "dtype": "float64"}
    assert inputs["B"]["file"] == os.path.abspath("b.h5") and inputs["B"]["dataset"] == "/B"
    assert "einmpi_job" not in found
    # Another layout or a copy has the same values; what is computed from it has others.
    result.redistribute(result.layout).to_hdf5("out.h5", "moved")
    assert attributes("out.h5", "moved")["einmpi_program"] == job.source.text
    (result + 1).to_hdf5("out.h5", "sum")
    result[0, 0] = 7
    result.to_hdf5("out.h5", "changed")
    for name in ("sum", "changed"):
        assert "einmpi_program" not in attributes("out.h5", name)
        assert attributes("out.h5", name)["einmpi_ranks"] == "1"


def test_the_date_of_a_reproducible_run(monkeypatch):
    array = einmpi.DistArray.from_global(np.ones(3))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    array.to_hdf5("o.h5", "Z")
    assert attributes("o.h5", "Z")["einmpi_date"] == "2023-11-14T22:13:20+00:00"
    size = os.path.getsize("o.h5")
    for date in ("1600000000", "not a date", "", "9" * 30):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", date)
        array.to_hdf5("o.h5", "Z")
        datetime.fromisoformat(attributes("o.h5", "Z")["einmpi_date"])
    assert os.path.getsize("o.h5") == size  # another date takes no more space
