"""HDF5 files: what is read, and what is refused."""

import os
from dataclasses import replace

import h5py
import numpy as np
import pytest
from in_process import einmpi_here
from refusals import error

import einmpi
from einmpi.files.reading import describe, load_array
from einmpi.files.specs import InputSpec
from einmpi.graph.dtypes import numpy_dtypes
from einmpi.planner.planning import TooLittleMemory

LISTED = ", ".join(numpy_dtypes())
PLACE = "job.toml:9:1"
pytestmark = pytest.mark.usefixtures("in_folder")


def read(file, dataset, place=""):
    """A whole dataset."""
    spec = InputSpec("A", file=file, inside=dataset, place=place)
    return load_array(spec, describe(spec).shape, describe(spec).dtype)


def hdf5_input(dataset, file="x.h5"):
    return InputSpec("A", file=file, inside=dataset, place=PLACE)


# ---- reading ----- ------------------------------------------------------------------------------

ARRAYS = {
    "float16": np.arange(6, dtype=np.float16).reshape(2, 3),
    "big": np.arange(6, dtype=">f8").reshape(3, 2),
    "big_integers": np.array([1, -2], ">i4"),
    "complex64": np.array([1 + 2j], np.complex64),
    "complex128": np.array([[1 - 2j]]),
    "bool": np.array([True, False, True]),
    "scalar": np.array(2.5, np.float32),
    "empty": np.zeros((0, 3)),
    "int64": np.array([-(2**63), 2**63 - 1]),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_what_is_read(name):
    array = ARRAYS[name]
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("g/" + name, data=array)
    native = array.dtype.newbyteorder("=")
    found = describe(hdf5_input(f"/g/{name}"))
    assert (found.shape, found.dtype) == (array.shape, native.name)
    found = load_array(hdf5_input(f"/g/{name}"), array.shape, native.name)
    assert found.dtype == native and found.dtype.isnative
    assert found.flags.c_contiguous and found.flags.writeable
    assert found.shape == array.shape
    assert (found == array).all()


def test_a_compressed_dataset_and_a_link():
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("A", data=np.eye(50), chunks=(8, 8), compression="gzip", shuffle=True)
        file["link"] = h5py.SoftLink("/A")
    assert (load_array(hdf5_input("/link"), (50, 50), "float64") == np.eye(50)).all()


def test_datasets_that_cannot_be_used():
    with h5py.File("x.h5", "w") as file:
        file["text"] = "hello"
        file["bytes"] = np.array([b"ab"])
        file["pairs"] = np.zeros(2, [("a", "f4"), ("b", "i4")])
        file["small"] = np.zeros(2, np.int8)
        file["unsigned"] = np.zeros(2, np.uint32)
        file["none"] = h5py.Empty("f4")
        file["type"] = np.dtype("f8")
        file["group/inner"] = np.zeros(2)
        file["broken"] = h5py.SoftLink("/nowhere")
        file.create_group("bare")
    expected = {
        "/text": (
            "/text in x.h5 is a string or of variable length, which is not supported; "
            f"expected one of {LISTED}"
        ),
        "/bytes": f"/bytes in x.h5 is a string, which is not supported; expected one of {LISTED}",
        "/pairs": f"/pairs in x.h5 is compound, which is not supported; expected one of {LISTED}",
        "/none": "/none in x.h5 has no values; expected a dataset with a shape",
        "/type": (
            "there is no dataset /type in x.h5; "
            "expected one of /text, /bytes, /none, /pairs, /group/inner, …"
        ),
        "/group": "/group in x.h5 is a group; expected /group/inner",
        "/bare": "/bare in x.h5 is a group; expected a dataset",
        "/broken": (
            "/broken in x.h5 is a link to /nowhere, which does not exist; expected a dataset"
        ),
        "/smal": (
            "there is no dataset /smal in x.h5; "
            "expected one of /small, /pairs, /bytes, /unsigned, /none, … (did you mean /small?)"
        ),
        "/small/x": (
            "there is no dataset /small/x in x.h5; "
            "expected one of /small, /text, /pairs, /bytes, /unsigned, … (did you mean /small?)"
        ),
    }
    for dataset, message in expected.items():
        assert error(describe, hdf5_input(dataset)) == f"{PLACE}: {message}"
        assert error(read, "x.h5", dataset, PLACE) == f"{PLACE}: {message}"


def test_a_long_list_of_datasets_is_cut():
    with h5py.File("x.h5", "w") as file:
        for number in range(20):
            file[f"d{number:02}"] = 1.0
    listed = ", ".join(f"/d{number:02}" for number in range(5))
    assert error(describe, hdf5_input("/q")) == (
        f"{PLACE}: there is no dataset /q in x.h5; expected one of {listed}, …"
    )


def test_files_that_cannot_be_read(tmp_path):
    with h5py.File("whole.h5", "w") as file:
        file["A"] = np.zeros(1000)
    whole = (tmp_path / "whole.h5").read_bytes()
    (tmp_path / "cut.h5").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.h5").write_text("hello")
    (tmp_path / "nothing.h5").write_text("")
    (tmp_path / "folder.h5").mkdir()
    expected = {
        "no.h5": (
            "there is no file no.h5; expected an HDF5 file; paths are relative to the job file"
        ),
        "cut.h5": "cut.h5 cannot be opened as HDF5: truncated file; expected an HDF5 file",
        "text.h5": (
            "text.h5 cannot be opened as HDF5: file signature not found; expected an HDF5 file"
        ),
        "nothing.h5": (
            "nothing.h5 cannot be opened as HDF5: file signature not found; expected an HDF5 file"
        ),
        "folder.h5": "folder.h5 is not a file; expected an HDF5 file",
    }
    for file, message in expected.items():
        assert error(describe, hdf5_input("/A", file)) == f"{PLACE}: {message}"
    if os.geteuid() != 0:  # root may read everything
        os.chmod("whole.h5", 0)
        assert error(describe, hdf5_input("/A", "whole.h5")) == (
            f"{PLACE}: there is no permission to read whole.h5; expected a readable file"
        )


def test_a_damaged_chunk(tmp_path):
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("A", data=np.arange(1000.0), chunks=(1000,), compression="gzip")
        offset, size = (
            file["A"].id.get_chunk_info(0).byte_offset,
            file["A"].id.get_chunk_info(0).size,
        )
    with open("x.h5", "r+b") as raw:
        raw.seek(offset)
        raw.write(b"\xff" * size)
    assert error(load_array, hdf5_input("/A"), (1000,), "float64").startswith(
        f"{PLACE}: /A in x.h5 cannot be read: "
    )


UNKNOWN = 32768 - 1  # the number of a filter that nobody has


def write_with_unknown_filter(name="A", applied=True):
    with h5py.File("x.h5", "a") as file:
        made = file.create_dataset(
            name, (4,), "float64", chunks=(4,), compression=UNKNOWN, allow_unknown_filter=True
        )
        made.id.write_direct_chunk((0,), np.arange(4.0).tobytes(), 0 if applied else 1)
        layout = h5py.VirtualLayout((4,), "float64")
        layout[:] = h5py.VirtualSource(made)
        file.create_virtual_dataset(f"virtual {name}", layout)


def test_a_filter_that_is_not_installed(tmp_path):
    write_with_unknown_filter()
    (tmp_path / "job.toml").write_text('program = "n = sum(A[i])"\ninputs.A = "x.h5:/A"\n')
    done = einmpi_here(tmp_path, ["check", "job.toml"])
    assert done.returncode == 2
    folders = ":".join(h5py.h5pl.get(place).decode() for place in range(h5py.h5pl.size()))
    says = (
        f"x.h5 needs the filter {UNKNOWN}; expected a plugin for it in HDF5_PLUGIN_PATH, "
        f"which is {folders!r}; pip install hdf5plugin brings many; their folder is "
        "hdf5plugin.PLUGIN_PATH"
    )
    assert done.stderr == f"job.toml:2:8: /A in {says}\n"
    assert error(describe, hdf5_input("/virtual A")) == f"{PLACE}: /A in {says}"


def test_a_filter_that_was_left_out():
    write_with_unknown_filter("B", applied=False)
    with h5py.File("x.h5", "a") as file:  # without a chunk there is nothing to decode
        file.create_dataset(
            "C", (4,), "float64", chunks=(4,), compression=UNKNOWN, allow_unknown_filter=True
        )
    assert load_array(hdf5_input("/B"), (4,), "float64").tolist() == [0, 1, 2, 3]
    assert load_array(hdf5_input("/C"), (4,), "float64").tolist() == [0] * 4


CHUNK = 2**18  # elements
STORED = {
    "x.h5": lambda: h5_dataset(compression="gzip"),
    "plain.h5": lambda: h5_dataset("plain.h5"),
    "virtual.h5": lambda: h5_virtual(),
    "x.zarr": lambda: einmpi.DistArray.zeros(CHUNK).to_zarr("x.zarr", "A", chunks=(CHUNK,)),
}


def h5_dataset(name="x.h5", **options):
    with h5py.File(name, "w") as file:
        file.create_dataset("A", (CHUNK,), "float64", chunks=(CHUNK,), **options)[:] = 0


def h5_virtual():
    h5_dataset("source.h5", shuffle=True)
    with h5py.File("virtual.h5", "w") as file:
        layout = h5py.VirtualLayout((CHUNK,), "float64")
        layout[:] = h5py.VirtualSource("source.h5", "A", (CHUNK,))
        file.create_virtual_dataset("A", layout)


@pytest.mark.parametrize("file", STORED)
def test_the_memory_that_chunks_take(tmp_path, file):
    """A few rows of a chunk that is decoded whole: the plan counts it."""
    STORED[file]()
    text = (
        f'program = "n = sum(A[i])"\ninputs.A = {{ file = "{file}", dataset = "A", rows = "0:9" }}'
    )
    (tmp_path / "job.toml").write_text(text)
    decoded = 0 if file == "plain.h5" else 2 * CHUNK * 8
    job = einmpi.load("job.toml")
    enough = einmpi.plan(job, 1).peak + decoded
    assert einmpi.plan(job, 1, memory=enough).spilled == 0
    assert einmpi.run(job, memory=enough)["n"].gather() == 0
    if decoded:
        assert einmpi.plan(job, 1, memory=enough - 1).spilled == 1
        with pytest.raises(TooLittleMemory) as caught:
            einmpi.run(job, memory=decoded)
        assert decoded < caught.value.least < enough
        assert str(caught.value) == (
            f"memory: no plan on 1 rank was found below {decoded} bytes a rank; expected at least "
            f"{caught.value.least} bytes, or more ranks; {decoded} of them decode a chunk of a "
            "file, which is done whole"
        )
    on_gpu = replace(job, backend="cupy")  # the limit is that of its memory
    assert einmpi.plan(on_gpu, 1, memory=enough - decoded).spilled == 0


def test_a_dataset_without_space_in_a_file_with_a_user_block():
    with h5py.File("x.h5", "w", userblock_size=512) as file:
        file.create_dataset("X", (4,), "float64", fillvalue=2.5)
    assert read("x.h5", "/X").tolist() == [2.5] * 4
