"""Floating-point inputs that are converted while they are read, against numpy's casts."""

import h5py
import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

import einmpi
from einmpi.comm.threads import run_threads
from einmpi.errors import InputError
from einmpi.files import datasets
from einmpi.files import datasets as converting
from einmpi.files.reading import describe, load_array
from einmpi.files.specs import InputSpec

ARRAY = np.random.default_rng(4).normal(size=(37, 3, 10))


@pytest.fixture
def files(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["plain"] = ARRAY
        file["big"] = ARRAY.astype(">f4")
        file.create_dataset("chunked", data=ARRAY.astype(np.float16), chunks=(5, 2, 4))
        file["scalar"] = np.float64(0.1)
        file["whole"] = np.arange(4)
    np.save(tmp_path / "fortran.npy", np.asfortranarray(ARRAY))
    save_file({"half": ARRAY.astype(bfloat16)}, tmp_path / "data.safetensors")
    return tmp_path


CASES = (
    ("data.h5", "/plain", ARRAY),
    ("data.h5", "/big", ARRAY.astype(np.float32)),
    ("data.h5", "/chunked", ARRAY.astype(np.float16)),
    ("data.h5", "/scalar", np.float64(0.1)),
    ("fortran.npy", "", ARRAY),
    ("data.safetensors", "half", ARRAY.astype(bfloat16)),
)


@pytest.mark.parametrize(("file", "name", "stored"), CASES)
@pytest.mark.parametrize("dtype", converting.CONVERTIBLE_DTYPES)
def test_elements_equal_those_that_numpy_converts(files, monkeypatch, file, name, stored, dtype):
    monkeypatch.setattr(datasets, "STRIP_BYTES", 300)  # several strips
    spec = InputSpec("X", file=str(files / file), inside=name, convert=dtype)
    described = describe(spec)
    shape, found = described.shape, described.dtype
    assert (shape, found) == (np.shape(stored), dtype)
    np.testing.assert_array_equal(load_array(spec, shape, dtype), stored.astype(np.dtype(dtype)))


def test_parts_on_several_ranks(files, monkeypatch):
    monkeypatch.setattr(datasets, "STRIP_BYTES", 300)
    job_file = files / "job.toml"
    job_file.write_text(
        'program = "Z[i,j,k] = X[i,j,k]"\n'
        'inputs.X = { file = "data.safetensors", tensor = "half", rows = "2:33:3",'
        ' convert = "float32" }\n'
    )
    expected = ARRAY.astype(bfloat16).astype(np.float32)[2:33:3]

    def compute(comm):
        return einmpi.run(einmpi.load(job_file), comm=comm)["Z"].gather()

    for found in run_threads(3, compute):
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)


def test_integers_are_not_converted(files):
    spec = InputSpec("X", file=str(files / "data.h5"), inside="/whole", convert="float32")
    with pytest.raises(InputError, match=r"is int64, which is not converted; expected one of"):
        describe(spec)
