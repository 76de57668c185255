"""bfloat16: what its dtype becomes, where it comes from and goes to."""

import h5py
import numpy as np
import pytest

import einmpi
from einmpi.errors import InputError
from einmpi.files.reading import describe, generate, load_array
from einmpi.graph.dtypes import numpy_dtypes


def dtype_of(text, **tensors):
    return einmpi.program(text, **tensors).graph["Z"].dtype


@pytest.mark.parametrize(
    "text",
    [
        "X[i] + Y[i]",
        "X[i] * Y[i]",
        "exp(X[i]) / Y[i]",
        "where(X[i] > 1, X[i], Y[i])",
        "maximum(X[i], Y[i]) ** 2",
        "sum(X[j] * Y[i])",
        "max(X[j]) - Y[i] + 0.5",
    ],
)
def test_its_place_is_that_of_float16(text):
    for other in numpy_dtypes():
        x, y = np.empty(3, "bfloat16"), np.empty(3, other)
        try:
            expected = dtype_of(f"Z[i] = {text}", X=np.empty(3, np.float16), Y=y)
        except InputError:
            with pytest.raises(InputError):
                dtype_of(f"Z[i] = {text}", X=x, Y=y)
            continue
        if expected == "float16":
            expected = "float32" if other == "float16" else "bfloat16"
        assert dtype_of(f"Z[i] = {text}", X=x, Y=y) == expected, other


def test_casts():
    x = np.arange(4.0)
    job = einmpi.program("Z[i] = bfloat16(X[i] + 1.001); Y[i] = float16(bfloat16(X[i]))", X=x)
    found = einmpi.reference(job, {"X": x})
    assert (found["Z"].dtype.name, found["Y"].dtype.name) == ("bfloat16", "float16")
    np.testing.assert_array_equal(found["Z"], (x + 1.001).astype("bfloat16"))


@pytest.mark.parametrize("random", ["normal", "uniform", "ones", "arange"])
def test_generated(tmp_path, random):
    limits = "low = -1.0, high = 1.0, " if random == "uniform" else ""
    (tmp_path / "job.toml").write_text(f"""
dtype = "bfloat16"
program = "Z[i] = X[i]"
inputs.X = {{ shape = [2000], random = "{random}", {limits}seed = 3 }}
""")
    spec = einmpi.load(tmp_path / "job.toml").inputs[0]
    whole = generate(spec, "bfloat16", 0, 2000)
    np.testing.assert_array_equal(generate(spec, "bfloat16", 700, 900), whole[700:900])
    np.testing.assert_allclose(whole.astype(float), generate(spec, "float32", 0, 2000), rtol=2**-8)
    if random == "uniform":
        assert whole.min() >= -1 and whole.max() < 1


def test_files(tmp_path, monkeypatch):
    safetensors = pytest.importorskip("safetensors.numpy")
    monkeypatch.chdir(tmp_path)
    values = np.arange(12).reshape(3, 4).astype("bfloat16")
    safetensors.save_file({"w": values}, "m.safetensors")
    spec = einmpi.job.inputs.InputSpec("X", file="m.safetensors", inside="w")
    assert (describe(spec).shape, describe(spec).dtype) == ((3, 4), "bfloat16")
    np.testing.assert_array_equal(load_array(spec, (3, 4), "bfloat16"), values)
    array = einmpi.DistArray.from_global(values)
    np.testing.assert_array_equal(array.gather(), values)
    array.to_hdf5("o.h5", "/Z")
    with h5py.File("o.h5") as file:
        assert file["Z"].dtype == np.float32
        np.testing.assert_array_equal(file["Z"][...], values.astype(np.float32))
