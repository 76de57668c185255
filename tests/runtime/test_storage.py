"""Where tensors come from and go: HDF5 by a job, safetensors, generated ones."""

import os
import subprocess
import sys

import h5py
import numpy as np
import pytest
from job_text import PROGRAM, read

from einmpi.errors import InputError
from einmpi.graph.job_tensors import InputSpec
from einmpi.graph.scalar import DTYPES
from einmpi.runtime import storage
from einmpi.runtime.comm import ALONE
from einmpi.runtime.dist_array import DistArray
from einmpi.version import __version__

LISTED = ", ".join(DTYPES)
PLACE = "job.toml:9:1"


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def error(function, *arguments):
    with pytest.raises(InputError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def hdf5_input(dataset, file="x.h5"):
    return InputSpec("A", file=file, dataset=dataset, place=PLACE)


def test_a_file_that_changed_after_the_plan():
    with h5py.File("x.h5", "w") as file:
        file["A"] = np.zeros((2, 3))
    assert error(storage.load, hdf5_input("/A"), (2, 4), "float64") == (
        f"{PLACE}: A in x.h5 is float64[2, 3] now; float64[2, 4], as planned")  # fmt: skip
    assert error(storage.load, hdf5_input("/A"), (2, 3), "int32") == (
        f"{PLACE}: A in x.h5 is float64[2, 3] now; int32[2, 3], as planned")  # fmt: skip


def test_generated_inputs():
    spec = InputSpec("A", (2, 3), "int32", "arange")
    assert storage.describe(spec) == ((2, 3), "int32")
    assert storage.load(spec, (2, 3), "int32").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert storage.load(spec, (), "int32").tolist() == 0
    assert storage.load(spec, (3, 0), "int32").shape == (3, 0)


# ---- safetensors ----------------------------------------------------------------------------------------------------


def tensor_input(tensor, file="m.safetensors"):
    return InputSpec("W", file=file, tensor=tensor, place=PLACE)


def test_safetensors(tmp_path):
    numpy_files = pytest.importorskip("safetensors.numpy")
    arrays = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "half": np.ones(2, np.float16),
              "flag": np.array([True]), "one": np.array(3.0), "tiny": np.zeros(2, np.int8)}  # fmt: skip
    numpy_files.save_file(arrays, "m.safetensors")
    for name in ("w", "half", "flag", "one"):
        shape, dtype = arrays[name].shape, arrays[name].dtype.name
        assert storage.describe(tensor_input(name)) == (shape, dtype)
        found = storage.load(tensor_input(name), shape, dtype)
        assert found.shape == shape and (found == arrays[name]).all()
    header = b'{"b":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'
    (tmp_path / "b.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    (tmp_path / "bad.safetensors").write_text("no")
    assert error(storage.describe, tensor_input("tiny")) == (
        f"{PLACE}: tiny in m.safetensors is I8, which is not supported; allowed: {LISTED}")  # fmt: skip
    assert error(storage.describe, tensor_input("b", "b.safetensors")) == (
        f"{PLACE}: b in b.safetensors is bfloat16, which needs a GPU backend and is not available here; "
        f"allowed: {LISTED}")  # fmt: skip
    assert error(storage.describe, tensor_input("q")) == (
        f"{PLACE}: there is no tensor q in m.safetensors; allowed: flag, half, one, tiny, w")  # fmt: skip
    assert error(storage.describe, tensor_input("w", "no.safetensors")) == (
        f"{PLACE}: there is no file no.safetensors; paths are relative to the job file")  # fmt: skip
    assert error(storage.describe, tensor_input("w", "bad.safetensors")).startswith(
        f"{PLACE}: bad.safetensors cannot be read as safetensors: ")  # fmt: skip


def test_an_unknown_suffix():
    assert error(storage.describe, hdf5_input("/A", "x.csv")) == (
        f"{PLACE}: x.csv is not a file of a known kind; allowed: .h5, .hdf5, .he5, .safetensors, .npy")  # fmt: skip


def test_nothing_heavy_is_imported():
    code = ("import sys, einmpi.runtime.storage; "
            "print([m for m in ('h5py', 'scipy', 'safetensors', 'mpi4py', 'numba') if m in sys.modules])")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          cwd=os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))  # fmt: skip
    assert done.stdout == "[]\n"


# ---- a whole job ----------------------------------------------------------------------------------------------------

JOB = """program = '''
Z[i,k] = sum(A[i,j] * B[j,k])
n = sum(Z[i,k])
E[i,l] = A[i,0] * N[l]
'''
[inputs]
A = { shape = [4, 3], random = "arange" }
B = "in.h5:/B"
N = { shape = [0], random = "ones" }
[outputs]
Z = { file = "out.h5", dataset = "/g/Z", chunks = [2, 100], compression = "gzip", dtype = "float32" }
n = { file = "out.h5", dataset = "/n", compression = "lzf" }
E = { file = "other.h5", dataset = "E", compression = "lzf", chunks = [4, 1] }
"""


def test_a_whole_job():
    with h5py.File("in.h5", "w") as file:
        file["B"] = np.arange(6.0).reshape(3, 2)
    job = read(JOB, storage.describe)
    assert job.graph["Z"].bound == (4, 2)
    storage.check_targets(job)
    values = {spec.name: storage.load(spec, spec.shape, spec.dtype) for spec in job.inputs}
    z = values["A"] @ values["B"]
    results = {"Z": z, "n": z.sum(), "E": np.zeros((4, 0))}
    storage.store(job, {name: DistArray.from_global(array, ALONE) for name, array in results.items()})
    with h5py.File("out.h5") as file:
        assert (file["g/Z"][:] == z).all() and file["g/Z"].dtype == np.float32
        assert (file["g/Z"].chunks, file["g/Z"].compression) == ((2, 2), "gzip")
        assert file["n"][()] == z.sum()
        assert dict(file["n"].attrs) == {"einmpi_version": __version__, "einmpi_program": job.source.text,
                                         "einmpi_dtype": "float64"}  # fmt: skip
    with h5py.File("other.h5") as file:
        assert file["E"].shape == (4, 0)


def test_targets_are_checked_before_the_run():
    job = read(PROGRAM + '[inputs]\nA = { shape = [4], random = "ones" }\n[outputs]\nZ = "no/o.h5:/Z"\n')
    assert error(storage.check_targets, job) == (
        "job.toml:5:1: there is no folder for no/o.h5; a folder that exists")  # fmt: skip
