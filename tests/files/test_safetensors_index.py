"""Models in several safetensors files with an index, as job files and `open_dataset` read them."""

import json
import os

import numpy as np
import pytest
from refusals import error

import einmpi
from einmpi.comm.threads import run_threads
from einmpi.files.contiguous import files_of_tensors
from einmpi.files.formats import find
from einmpi.files.specs import InputSpec
from einmpi.graph.dtypes import DTYPES

PLACE = "job.toml:9:1"
INDEX = "model.safetensors.index.json"
pytestmark = pytest.mark.usefixtures("in_folder")
CODES = {"float32": "F32", "float64": "F64", "int32": "I32"}


def write_shard(path, arrays):
    header = {}
    first = 0
    for name, array in arrays.items():
        last = first + array.nbytes
        code = CODES[array.dtype.name]
        header[name] = {"dtype": code, "shape": array.shape, "data_offsets": [first, last]}
        first = last
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(array.tobytes())


def write_index(weight_map, path=INDEX):
    with open(path, "w") as file:
        json.dump({"metadata": {"total_size": 1}, "weight_map": weight_map}, file)


def write_model(folder=""):
    arrays = {
        "layers.0.w": np.arange(24, dtype="float32").reshape(4, 6),
        "layers.1.w": np.arange(24, 48, dtype="float32").reshape(4, 6),
        "bias": np.arange(6, dtype="float32"),
    }
    if folder:
        os.makedirs(folder)
    first = os.path.join(folder, "model-00001-of-00002.safetensors")
    second = os.path.join(folder, "model-00002-of-00002.safetensors")
    write_shard(first, {"layers.0.w": arrays["layers.0.w"]})
    write_shard(second, {name: arrays[name] for name in ("layers.1.w", "bias")})
    shards = {
        "layers.0.w": os.path.basename(first),
        "layers.1.w": os.path.basename(second),
        "bias": os.path.basename(second),
    }
    write_index(shards, os.path.join(folder, INDEX))
    return arrays


JOB = """
program = "Z[i,k] = sum(A[i,j] * B[k,j]) + b[k,0]"

[inputs]
A = { file = "there/model.safetensors.index.json", tensor = "layers.0.w" }
B = { file = "there/model.safetensors.index.json", tensor = "layers.1.w", dtype = "float32" }
b = { file = "there/model.safetensors.index.json", tensor = "bias", shape = [4, 1], rows = "1:5" }
"""


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_inputs_of_a_job_file(ranks):
    arrays = write_model("there")
    with open("job.toml", "w") as file:
        file.write(JOB)
    job = einmpi.load("job.toml")
    expected = arrays["layers.0.w"] @ arrays["layers.1.w"].T + arrays["bias"][1:5]

    def compute(comm):
        return einmpi.run(job, comm=comm)["Z"].gather()

    for found in run_threads(ranks, compute):
        np.testing.assert_allclose(found, expected)


def test_the_short_form_and_open_dataset():
    arrays = write_model()
    with open("job.toml", "w") as file:
        file.write(f'program = "n = sum(w[i])"\ninputs.w = "{INDEX}:bias"\n')
    assert einmpi.run(einmpi.load("job.toml"))["n"].gather() == arrays["bias"].sum()
    found = einmpi.open_dataset(INDEX, "layers.1.w", rows=slice(1, 3)).gather()
    np.testing.assert_array_equal(found, arrays["layers.1.w"][1:3])
    assert error(einmpi.open_dataset, INDEX) == (
        f'open_dataset: the tensor of {INDEX} is missing; expected a second argument such as "NAME"'
    )


def test_links_in_the_folder_are_followed():
    """Download tools keep the files elsewhere and link to them."""
    arrays = write_model("blobs")
    os.mkdir("snapshot")
    for name in os.listdir("blobs"):
        os.symlink(os.path.join("..", "blobs", name), os.path.join("snapshot", name))
    found = einmpi.open_dataset(os.path.join("snapshot", INDEX), "bias").gather()
    np.testing.assert_array_equal(found, arrays["bias"])


def test_links_to_folders_are_not():
    """An index that comes with such a link could name any file of the machine."""
    arrays = write_model("elsewhere/inside")
    os.mkdir("there")
    os.symlink("../elsewhere", "there/link")
    os.mkdir("there/folder")
    os.symlink(
        "../../elsewhere/inside/model-00002-of-00002.safetensors", "there/folder/a.safetensors"
    )
    file = "there/" + INDEX
    out = "link/inside/model-00002-of-00002.safetensors"
    write_index({"bias": out}, file)
    expected = "expected a file in the folder of the index"
    says = f"{PLACE}: {file} says that bias is in {out!r}; {expected}"
    assert refusal("bias", file) == says
    assert error(files_of_tensors, file, PLACE) == says
    # A folder that is none, and a link to a file in it.
    write_index({"bias": "folder/a.safetensors"}, file)
    np.testing.assert_array_equal(einmpi.open_dataset(file, "bias").gather(), arrays["bias"])
    os.symlink("folder", "there/within")
    write_index({"bias": "within/a.safetensors"}, file)
    np.testing.assert_array_equal(einmpi.open_dataset(file, "bias").gather(), arrays["bias"])


def refusal(tensor, file=INDEX):
    return error(find, InputSpec("W", file=file, inside=tensor, place=PLACE))


def test_a_tensor_that_is_not_in_the_index():
    write_model()
    assert refusal("layers.2.w") == (
        f"{PLACE}: there is no tensor layers.2.w in {INDEX}; "
        "expected one of bias, layers.0.w, layers.1.w (did you mean layers.0.w?)"
    )


def test_a_shard_that_is_missing_or_lacks_the_tensor():
    write_model()
    os.remove("model-00001-of-00002.safetensors")
    assert refusal("layers.0.w") == (
        f"{PLACE}: there is no file model-00001-of-00002.safetensors, which has layers.0.w "
        f"according to {INDEX}; expected all files of the model, beside their index"
    )
    write_shard("model-00001-of-00002.safetensors", {"other": np.zeros(2)})
    assert refusal("layers.0.w") == (
        f"{PLACE}: there is no tensor layers.0.w in model-00001-of-00002.safetensors; "
        "expected other"
    )


@pytest.mark.parametrize(
    "shard",
    [
        "../outside.safetensors",
        "inside/../../outside.safetensors",
        "..\\outside.safetensors",
        "/etc/outside.safetensors",
        "inside//outside.safetensors",
        "",
        "a\0b.safetensors",
    ],
)
def test_an_index_cannot_lead_out_of_its_folder(shard):
    os.mkdir("there")
    write_shard("outside.safetensors", {"w": np.zeros(2)})
    file = os.path.join("there", INDEX)
    write_index({"w": shard}, file)
    assert refusal("w", file) == (
        f"{PLACE}: {file} says that w is in {shard!r}; expected a file in the folder of the index"
    )


def test_an_index_names_safetensors_files_only():
    write_index({"w": INDEX})
    assert refusal("w") == (
        f"{PLACE}: {INDEX} says that w is in '{INDEX}'; expected a .safetensors file"
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "Expecting value"),
        ("[]", "it has no table weight_map"),
        ("{}", "it has no table weight_map"),
        ('{"weight_map": []}', "it has no table weight_map"),
        ('{"weight_map": {"w": 3}}', "the file of w is not a string"),
        ("[" * 100000, ""),
        ('{"weight_map": "\udc80"}', ""),
    ],
)
def test_damaged_indices(text, reason):
    with open(INDEX, "wb") as file:
        file.write(text.encode(errors="surrogateescape"))
    start = f"{PLACE}: {INDEX} cannot be read as an index of safetensors files: {reason}"
    message = refusal("w")
    assert message.startswith(start)
    assert "\n" not in message


def test_a_changed_index_is_read_again():
    arrays = write_model()
    spec = InputSpec("W", file=INDEX, inside="bias", place=PLACE)
    assert find(spec).shape == (6,)
    assert find(spec).dtype.name in DTYPES
    write_shard("other.safetensors", {"bias": arrays["bias"][:3]})
    write_index({"bias": "other.safetensors"})
    found = find(spec)
    assert found.shape == (3,)
    assert [source.path for source in found.sources] == ["other.safetensors", INDEX]


def test_there_is_no_index():
    assert refusal("w") == (
        f"{PLACE}: there is no file {INDEX}; expected the index of a model in safetensors files; "
        "paths are relative to the job file"
    )
