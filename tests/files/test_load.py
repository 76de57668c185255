"""Where tensors come from: safetensors, HDF5, generated ones."""

import subprocess
import sys

import h5py
import ml_dtypes
import numpy as np
import pytest
from paths import ROOT
from refusals import error

from einmpi.files.reading import describe, load_array
from einmpi.files.specs import InputSpec
from einmpi.graph.dtypes import numpy_dtypes

LISTED = ", ".join(numpy_dtypes())
PLACE = "job.toml:9:1"
pytestmark = pytest.mark.usefixtures("in_folder")


def hdf5_input(dataset, file="x.h5"):
    return InputSpec("A", file=file, inside=dataset, place=PLACE)


def test_a_file_that_changed_after_the_plan():
    with h5py.File("x.h5", "w") as file:
        file["A"] = np.zeros((2, 3))
    assert error(load_array, hdf5_input("/A"), (2, 4), "float64") == (
        f"{PLACE}: A in x.h5 is now float64[2, 3]; expected float64[2, 4], as planned"
    )
    assert error(load_array, hdf5_input("/A"), (2, 3), "int32") == (
        f"{PLACE}: A in x.h5 is now float64[2, 3]; expected int32[2, 3], as planned"
    )


def test_generated_inputs():
    spec = InputSpec("A", (2, 3), "int32", "arange")
    assert load_array(spec, (2, 3), "int32").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert load_array(spec, (), "int32").tolist() == 0
    assert load_array(spec, (3, 0), "int32").shape == (3, 0)


# ---- safetensors --------------------------------------------------------------------------------


def tensor_input(tensor, file="m.safetensors"):
    return InputSpec("W", file=file, inside=tensor, place=PLACE)


def test_safetensors(tmp_path):
    numpy_files = pytest.importorskip("safetensors.numpy")
    arrays = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "half": np.ones(2, np.float16),
        "flag": np.array([True]),
        "one": np.array(3.0),
        "tiny": np.array([-7, 5], np.int8),
        "large": np.array([2**64 - 1, 5], np.uint64),
        "quarter": np.zeros(2, ml_dtypes.float8_e4m3fn),
    }
    numpy_files.save_file(arrays, "m.safetensors")
    for name in ("w", "half", "flag", "one", "tiny", "large"):
        shape, dtype = arrays[name].shape, arrays[name].dtype.name
        found = describe(tensor_input(name))
        assert (found.shape, found.dtype) == (shape, dtype)
        found = load_array(tensor_input(name), shape, dtype)
        assert found.shape == shape and (found == arrays[name]).all()
    (tmp_path / "bad.safetensors").write_text("no")
    assert error(describe, tensor_input("quarter")) == (
        f"{PLACE}: quarter in m.safetensors is F8_E4M3, which is not supported; "
        f"expected one of {LISTED}, bfloat16"
    )
    assert error(describe, tensor_input("q")) == (
        f"{PLACE}: there is no tensor q in m.safetensors; "
        "expected one of quarter, flag, half, large, one, …"
    )
    assert error(describe, tensor_input("w", "no.safetensors")) == (
        f"{PLACE}: there is no file no.safetensors; expected a safetensors file; paths are "
        "relative to the job file"
    )
    assert error(describe, tensor_input("w", "bad.safetensors")).startswith(
        f"{PLACE}: bad.safetensors cannot be read as safetensors: "
    )


def test_an_unknown_suffix():
    assert error(describe, hdf5_input("/A", "x.csv")) == (
        f"{PLACE}: 'x.csv' is not a file of a known format; expected a file name that ends "
        "in one of .h5, .hdf5, .he5, .nc, .nc4, .h5ad, .safetensors, .safetensors.index.json, "
        ".npy, .zarr, .npz, .mtx, .tns"
    )


def test_nothing_heavy_is_imported():
    code = (
        "import sys, einmpi.files.reading; "
        "print([m for m in ('h5py', 'scipy', 'safetensors', 'mpi4py', 'numba') if m in "
        "sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == "[]\n"
