"""Labels and scales of dimensions in HDF5 outputs, as netCDF readers see them."""

import os

import h5netcdf
import h5py
import numpy as np
import pytest
from in_process import einmpi_here
from mpi_helpers import needs_mpirun, run_mpi

import einmpi
from einmpi.files.formats import HDF5

pytestmark = pytest.mark.usefixtures("in_folder")


def run_program(folder, program, outputs, *words):
    """Run a program whose outputs go to files, as lines of a job file."""
    lines = "\n".join(f"{name} = {target}" for name, target in outputs.items())
    with open("job.toml", "w") as file:
        file.write(f'program = """\n{program}\n"""\n[outputs]\n{lines}\n')
    done = einmpi_here(folder, ["job.toml", "--quiet", *words])
    assert done.returncode == 0, done.stderr


def dimensions(file, group=""):
    """Return the dimensions of each variable of a group, as h5netcdf and so xarray name them."""
    with h5netcdf.File(file, "r") as handle:
        variables = (handle[group] if group else handle).variables
        return {name: variables[name].dimensions for name in variables}


def labels(file, dataset):
    with h5py.File(file) as handle:
        return [dimension.label for dimension in handle[dataset].dims]


def test_netcdf_readers_see_the_labels(tmp_path):
    program = "Y[i:4,k:6] = i + k; Z[k] = sum(Y[i,k]) + 0j; n = sum(Z[k]); B[i:4] = i > 2"
    outputs = {"Y": '"o.h5:/g/Y"', "n": '"o.h5:/n"', "B": '"o.h5:/g/B"'}
    outputs["Z"] = '{ file = "o.h5", dataset = "/Z", compression = "gzip", chunks = [4] }'
    run_program(tmp_path, program, outputs)
    assert dimensions("o.h5") == {"Z": ("k",), "n": ()}
    assert dimensions("o.h5", "/g") == {"Y": ("i", "k"), "B": ("i",)}
    assert labels("o.h5", "/g/Y") == ["i", "k"]
    with h5netcdf.File("o.h5", "r") as handle:
        assert handle["g"].dimensions["i"].size == 4
        assert (handle["g"]["Y"][()] == np.add.outer(np.arange(4), np.arange(6))).all()


def test_the_labels_are_those_of_the_program(tmp_path):
    # The two statements become one vertex, which has the labels of the first.
    program = "Y[i:4,k:6] = i + k; Z[a,b] = Y[a,b]"
    run_program(tmp_path, program, {"Z": '"o.h5:/Z"'})
    assert dimensions("o.h5") == {"Z": ("a", "b")}


def test_one_label_with_several_extents(tmp_path):
    program = "X[i:4] = i; Y[i:7] = i; Z[i:4] = 2 * i; E[i:0] = i"
    outputs = {name: f'"o.h5:/{name}"' for name in "XYZE"}
    run_program(tmp_path, program, outputs)
    assert dimensions("o.h5") == {"X": ("i",), "Y": ("i_7",), "Z": ("i",), "E": ("i_0",)}
    assert labels("o.h5", "Y") == ["i"]


def test_a_label_with_the_name_of_a_dataset(tmp_path):
    with h5py.File("o.h5", "w") as file:
        file["i"] = np.arange(4.0)
        file["k"] = h5py.ExternalLink("none.h5", "/k")
        file.create_group("l")
    run_program(tmp_path, "Z[i:4,k:2,l:3] = i + k + l", {"Z": '"o.h5:/Z"'})
    with h5py.File("o.h5") as file:
        assert file["i"][:].tolist() == [0, 1, 2, 3] and not file["i"].is_scale
        assert isinstance(file.get("k", getlink=True), h5py.ExternalLink)
        assert [dimension[0].name for dimension in file["Z"].dims] == ["/i_4", "/k_2", "/l_3"]
        assert [dimension.label for dimension in file["Z"].dims] == ["i", "k", "l"]


def test_an_output_takes_the_name_of_a_scale(tmp_path):
    run_program(tmp_path, "Z[i:4] = i", {"Z": '"o.h5:/Z"'})
    run_program(tmp_path, "i_[k:4] = 2 * k", {"i_": '"o.h5:/i"'})
    with h5py.File("o.h5") as file:
        assert file["i"][:].tolist() == [0, 2, 4, 6]
        assert file["Z"][:].tolist() == [0, 1, 2, 3]
    assert dimensions("o.h5") == {"Z": ("i_4",), "i": ("k",)}


def test_another_size_leaves_no_old_scale(tmp_path):
    sizes = []
    for extent in (4, 5, 4, 5, 5):
        run_program(tmp_path, f"Z[i:{extent},k:2] = i", {"Z": '"o.h5:/Z"'})
        assert dimensions("o.h5") == {"Z": ("i", "k")}
        sizes.append(os.path.getsize("o.h5"))
        with h5py.File("o.h5") as file:
            assert sorted(file) == ["Z", "i", "k"] and file["i"].shape == (extent,)
    assert sizes[-1] == sizes[-2]
    run_program(tmp_path, "Z[a:5,k:2] = a", {"Z": '"o.h5:/Z"'})
    with h5py.File("o.h5") as file:
        assert sorted(file) == ["Z", "a", "k"]


def test_scales_of_the_user_stay(tmp_path):
    with h5py.File("o.h5", "w") as file:
        file["time"] = np.arange(4) / 10
        file["time"].make_scale("time")
        file["Z"] = np.zeros((4, 2))
        file["Z"].dims[0].label = "t"
        file["Z"].dims[0].attach_scale(file["time"])
    run_program(tmp_path, "Z[i:4,k:2] = i + 0.5", {"Z": '"o.h5:/Z"'})
    assert dimensions("o.h5") == {"time": ("time",), "Z": ("time", "k")}
    assert labels("o.h5", "Z") == ["t", "k"]
    with h5py.File("o.h5") as file:
        assert file["Z"].dims[0][0][:].tolist() == [0, 0.1, 0.2, 0.3]


def test_scales_are_no_tensors():
    einmpi.run("Z[i,k] = X[i] * X[k]", X=np.arange(3.0))["Z"].to_hdf5("o.h5", "/g/Z")
    assert dimensions("o.h5", "/g") == {"Z": ("i", "k")}
    assert HDF5.list_names("o.h5", "", 10) == ["/g/Z"]
    with pytest.raises(einmpi.InputError, match="there is no dataset /Y in"):
        einmpi.open_dataset("o.h5", "/Y")


def test_an_array_without_labels():
    einmpi.DistArray.from_global(np.ones((2, 3))).to_hdf5("o.h5", "Z")
    with h5py.File("o.h5") as file:
        assert sorted(file) == ["Z"] and not file["Z"].dims[0].label


@pytest.mark.slow
@needs_mpirun
@pytest.mark.mpirun
def test_ranks_write_beside_the_scales(tmp_path):
    with open("job.toml", "w") as file:
        file.write(
            'program = "Z[i,k] = i - 2 * k"\nsizes = { i = 300, k = 200 }\n'
            'outputs.Z = { file = "o.h5", dataset = "/g/Z" }\n'
        )
    done = run_mpi(3, ["-m", "einmpi", "job.toml", "--quiet"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert dimensions("o.h5", "/g") == {"Z": ("i", "k")}
    with h5py.File("o.h5") as file:
        wanted = np.subtract.outer(np.arange(300), 2 * np.arange(200))
        assert (file["g/Z"][:] == wanted).all()
        assert file["g/Z"].attrs["einmpi_ranks"] == "3"
