"""HDF5 files: what is read, what is written, and that a failed write changes nothing."""

import os
import stat

import h5py
import numpy as np
import pytest

from einmpi.errors import EinmpiError, InputError
from einmpi.graph.job_tensors import InputSpec
from einmpi.graph.scalar import DTYPES
from einmpi.runtime import hdf5, storage

LISTED = ", ".join(DTYPES)
PLACE = "job.toml:9:1"


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def error(function, *arguments, kind=InputError):
    with pytest.raises(kind) as caught:
        function(*arguments)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def read(file, dataset, place=""):
    """A whole dataset."""
    spec = InputSpec("A", file=file, dataset=dataset, place=place)
    return storage.load(spec, *storage.describe(spec))


def hdf5_input(dataset, file="x.h5"):
    return InputSpec("A", file=file, dataset=dataset, place=PLACE)


# ---- reading ----- ---------------------------------------------------------------------------------------------------

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
    assert storage.describe(hdf5_input(f"/g/{name}")) == (array.shape, native.name)
    found = storage.load(hdf5_input(f"/g/{name}"), array.shape, native.name)
    assert found.dtype == native and found.dtype.isnative
    assert found.flags.c_contiguous and found.flags.writeable
    assert found.shape == array.shape
    assert (found == array).all()


def test_a_compressed_dataset_and_a_link():
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("A", data=np.eye(50), chunks=(8, 8), compression="gzip", shuffle=True)
        file["link"] = h5py.SoftLink("/A")
    assert (storage.load(hdf5_input("/link"), (50, 50), "float64") == np.eye(50)).all()


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
    names = "/bytes, /group/inner, /none, /pairs, /small, /text, /unsigned"
    expected = {
        "/text": f"/text in x.h5 is a string or of variable length, which is not supported; allowed: {LISTED}",
        "/bytes": f"/bytes in x.h5 is a string, which is not supported; allowed: {LISTED}",
        "/pairs": f"/pairs in x.h5 is compound, which is not supported; allowed: {LISTED}",
        "/small": f"/small in x.h5 is int8, which is not supported; allowed: {LISTED}",
        "/unsigned": f"/unsigned in x.h5 is uint32, which is not supported; allowed: {LISTED}",
        "/none": "/none in x.h5 has no values; a dataset with a shape",
        "/type": f"there is no dataset /type in x.h5; did you mean /text? allowed: {names}",
        "/group": "/group in x.h5 is a group; a dataset; allowed: /group/inner",
        "/bare": "/bare in x.h5 is a group; a dataset; it has no datasets",
        "/broken": "/broken in x.h5 is a link to /nowhere, which is not there; a dataset",
        "/smal": f"there is no dataset /smal in x.h5; did you mean /small? allowed: {names}",
        "/small/x": f"there is no dataset /small/x in x.h5; did you mean /small? allowed: {names}",
    }
    for dataset, message in expected.items():
        assert error(storage.describe, hdf5_input(dataset)) == f"{PLACE}: {message}"
        assert error(read, "x.h5", dataset, PLACE) == f"{PLACE}: {message}"


def test_a_long_list_of_datasets_is_cut():
    with h5py.File("x.h5", "w") as file:
        for number in range(20):
            file[f"d{number:02}"] = 1.0
    listed = ", ".join(f"/d{number:02}" for number in range(8))
    assert error(storage.describe, hdf5_input("/q")) == (
        f"{PLACE}: there is no dataset /q in x.h5; allowed: {listed}, …")  # fmt: skip


def test_files_that_cannot_be_read(tmp_path):
    with h5py.File("whole.h5", "w") as file:
        file["A"] = np.zeros(1000)
    whole = (tmp_path / "whole.h5").read_bytes()
    (tmp_path / "cut.h5").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.h5").write_text("hello")
    (tmp_path / "nothing.h5").write_text("")
    (tmp_path / "folder.h5").mkdir()
    expected = {
        "no.h5": "there is no file no.h5; paths are relative to the job file",
        "cut.h5": "cut.h5 cannot be opened as HDF5: truncated file; an HDF5 file",
        "text.h5": "text.h5 cannot be opened as HDF5: file signature not found; an HDF5 file",
        "nothing.h5": "nothing.h5 cannot be opened as HDF5: file signature not found; an HDF5 file",
        "folder.h5": "folder.h5 is not a file; an HDF5 file",
    }
    for file, message in expected.items():
        assert error(storage.describe, hdf5_input("/A", file)) == f"{PLACE}: {message}"
    if os.geteuid() != 0:  # root may read everything
        os.chmod("whole.h5", 0)
        assert error(storage.describe, hdf5_input("/A", "whole.h5")) == (
            f"{PLACE}: whole.h5 may not be read; a file with read permission")  # fmt: skip


def test_a_damaged_chunk(tmp_path):
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("A", data=np.arange(1000.0), chunks=(1000,), compression="gzip")
        offset, size = (file["A"].id.get_chunk_info(0).byte_offset, file["A"].id.get_chunk_info(0).size)
    with open("x.h5", "r+b") as raw:
        raw.seek(offset)
        raw.write(b"\xff" * size)
    assert error(storage.load, hdf5_input("/A"), (1000,), "float64").startswith(
        f"{PLACE}: /A in x.h5 cannot be read: ")  # fmt: skip


# ---- writing --------------------------------------------------------------------------------------------------------


def test_a_file_that_is_read_only_stays():
    with h5py.File("o.h5", "w") as file:
        file["Z"] = 1.0
    os.chmod("o.h5", 0o444)
    assert error(hdf5.write, "o.h5", {"/Z": (np.zeros(2), {})}) == (
        "o.h5: o.h5 may not be written; a file and a folder with write permission")  # fmt: skip
    with h5py.File("o.h5") as file:
        assert file["Z"][()] == 1.0


def test_a_new_file_and_its_groups(tmp_path):
    for name, array in ARRAYS.items():
        hdf5.write("o.h5", {f"/g/h/{name}": (array, {})}, {"note": "é"})
    for name, array in ARRAYS.items():
        found = read("o.h5", f"/g/h/{name}")
        assert found.shape == array.shape and (found == array).all()
        with h5py.File("o.h5") as file:
            assert file[f"/g/h/{name}"].attrs["note"] == "é"
    assert os.listdir(tmp_path) == ["o.h5"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(os.stat("o.h5").st_mode) == 0o666 & ~mask


def test_a_target_keeps_its_other_datasets_its_mode_and_its_link(tmp_path):
    with h5py.File("real.h5", "w") as file:
        file["kept"] = np.arange(5)
        file["kept"].attrs["unit"] = "m"
        file["Z"] = np.zeros((1000, 100))
    os.chmod("real.h5", 0o640)
    os.symlink("real.h5", "o.h5")
    before = os.path.getsize("real.h5")
    for _ in range(3):
        hdf5.write("o.h5", {"/Z": (np.ones((1000, 100)), {}), "/new/Y": (np.array(1.0), {})})
    assert os.path.getsize("real.h5") < before + 10_000  # the space of what is replaced is used again
    assert os.path.islink("o.h5") and stat.S_IMODE(os.stat("real.h5").st_mode) == 0o640
    with h5py.File("o.h5") as file:
        assert file["kept"][:].tolist() == [0, 1, 2, 3, 4] and file["kept"].attrs["unit"] == "m"
        assert file["Z"].shape == (1000, 100) and (file["Z"][:] == 1).all()
        assert file["new/Y"][()] == 1
    assert sorted(os.listdir(tmp_path)) == ["o.h5", "real.h5"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_failing_write_changes_nothing(tmp_path, monkeypatch, exists):
    if exists:
        with h5py.File("o.h5", "w") as file:
            file["Z"] = np.zeros(3)
        before = (tmp_path / "o.h5").read_bytes()
    good, bad = (np.ones(3), {}), (np.ones(3), {"chunks": (2, 2)})

    def unchanged():
        assert os.listdir(tmp_path) == (["o.h5"] if exists else [])
        assert not exists or (tmp_path / "o.h5").read_bytes() == before

    assert error(hdf5.write, "o.h5", {"/Z": good, "/Y": bad}, {}, PLACE, kind=EinmpiError) == (
        f"{PLACE}: o.h5 cannot be written: 'chunks' must have same rank as dataset shape")  # fmt: skip
    unchanged()

    def full(*_):
        raise OSError(28, "No space left on device")

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", full)
    assert error(hdf5.write, "o.h5", {"/Z": good}, {}, PLACE, kind=EinmpiError) == (
        f"{PLACE}: o.h5 cannot be written: No space left on device")  # fmt: skip
    unchanged()
    monkeypatch.setattr(os, "replace", stopped)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    with pytest.raises(KeyboardInterrupt):
        hdf5.write("o.h5", {"/Z": good})
    unchanged()


def test_targets_that_cannot_be_written(tmp_path):
    with h5py.File("o.h5", "w") as file:
        file["A"] = np.zeros(3)
        file["g/B"] = np.zeros(3)
    (tmp_path / "text.h5").write_text("hello")
    (tmp_path / "folder.h5").mkdir()
    one = (np.ones(3), {})
    expected = {
        ("no/o.h5", "/Z"): "there is no folder for no/o.h5; a folder that exists",
        ("text.h5", "/Z"): "text.h5 cannot be opened as HDF5: file signature not found; an HDF5 file",
        ("folder.h5", "/Z"): "folder.h5 is not a file; an HDF5 file",
        ("o.h5", "/g"): "/g in o.h5 is a group; a dataset",
        ("o.h5", "/A/Z/Y"): "/A in o.h5 is not a group; a group to hold /A/Z/Y",
    }
    for (file, dataset), message in expected.items():
        assert error(hdf5.write, file, {dataset: one}, {}, PLACE) == f"{PLACE}: {message}"
    assert sorted(os.listdir(tmp_path)) == ["folder.h5", "o.h5", "text.h5"]
