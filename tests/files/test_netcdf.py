"""netCDF-4 and openPMD files as inputs, and the coordinates of outputs, as xarray sees them."""

import h5netcdf
import h5py
import numpy as np
import pytest
from in_process import einmpi_here
from mpi_helpers import needs_mpirun, run_mpi

from einmpi.files.formats import HDF5
from einmpi.files.hdf5.opening import _coordinates_of

pytestmark = pytest.mark.usefixtures("in_folder")

LAT = np.linspace(-10, 10, 4)
LON = np.arange(5) * 2.0
TIME = np.arange(3)
JOB = """
program = "M[lat,lon] = mean[time](T[time,lat,lon]); Q[lat] = max(T[time,lat,lon])"
inputs.T = "in.nc:/T"
outputs.M = "out.nc:/M"
outputs.Q = "out.nc:/Q"
"""


@pytest.fixture
def values(in_folder):
    """Write in.nc as xarray does with its engine h5netcdf, and return T."""
    values = np.random.default_rng(1).random((3, 4, 5))
    with h5netcdf.File("in.nc", "w") as file:
        file.dimensions = {"time": 3, "lat": 4, "lon": 5}
        time = file.create_variable("time", ("time",), data=TIME)
        time.attrs["units"] = "days since 2000-01-01"
        lat = file.create_variable("lat", ("lat",), data=LAT, fillvalue=np.nan)
        lat.attrs.update({"units": "degrees_north", "bounds": "lat_bounds"})
        file.create_variable("lon", ("lon",), data=LON)
        file.create_variable("area", ("lat", "lon"), data=np.ones((4, 5)))
        made = file.create_variable("T", ("time", "lat", "lon"), data=values, fillvalue=np.nan)
        made.attrs["coordinates"] = "area"
    return values


def run(folder, job, *words):
    with open("job.toml", "w") as file:
        file.write(job)
    done = einmpi_here(folder, ["job.toml", "--quiet", *words])
    assert done.returncode == 0, done.stderr


def said_by(folder, *words):
    done = einmpi_here(folder, list(words))
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_coordinate(file, name, values, **attributes):
    found = file.variables[name]
    assert found.dimensions == (name,) and found.dtype == values.dtype
    np.testing.assert_array_equal(found[()], values)
    for key, value in attributes.items():
        assert found.attrs[key] == value


def test_outputs_keep_the_coordinates_of_inputs(values, tmp_path):
    for _ in range(2):  # the second run uses the datasets of the first again
        run(tmp_path, JOB)
        with h5netcdf.File("out.nc", "r") as file:
            assert sorted(file.variables) == ["M", "Q", "lat", "lon"]
            assert file["M"].dimensions == ("lat", "lon") and file["Q"].dimensions == ("lat",)
            check_coordinate(file, "lat", LAT, units="degrees_north")
            check_coordinate(file, "lon", LON)
            assert "bounds" not in file["lat"].attrs
            # Sums of three numbers of size 1, in another order than numpy's.
            np.testing.assert_allclose(file["M"][()], values.mean(0), rtol=1e-14)
            np.testing.assert_array_equal(file["Q"][()], values.max((0, 2)))


@pytest.mark.slow
@needs_mpirun
@pytest.mark.mpirun
def test_ranks_keep_them_too(values, tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    done = run_mpi(2, ["-m", "einmpi", "job.toml", "--quiet"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with h5netcdf.File("out.nc", "r") as file:
        check_coordinate(file, "lat", LAT, units="degrees_north")


def test_coordinates_follow_the_input(values, tmp_path):
    """Other values, other attributes, and none at all: no old coordinates are left."""
    run(tmp_path, JOB)
    with h5py.File("in.nc", "r+") as file:
        file["lat"][:] = LAT + 1
        file["lon"].attrs["units"] = "degrees_east"
    run(tmp_path, JOB)
    with h5netcdf.File("out.nc", "r") as file:
        check_coordinate(file, "lat", LAT + 1)
        check_coordinate(file, "lon", LON, units="degrees_east")
    with h5py.File("in.nc", "w") as file:
        file["T"] = values
    run(tmp_path, JOB)
    with h5netcdf.File("out.nc", "r") as file:
        assert sorted(file.variables) == ["M", "Q"]
        assert file["M"].dimensions == ("lat", "lon")
    with h5py.File("out.nc") as file:
        assert sorted(file) == ["M", "Q", "lat", "lon"]


@pytest.mark.parametrize(("rows", "chosen"), [('"0:2"', slice(0, 2)), ('"1:4:2"', slice(1, 4, 2))])
def test_a_part_has_its_part_of_the_coordinates(values, tmp_path, rows, chosen):
    """`rows` are those of the first dimension, here the latitude."""
    run(
        tmp_path,
        f"""
program = "Z[lat,lon] = 2 * A[lat,lon]"
inputs.A = {{ file = "in.nc", dataset = "/area", rows = {rows} }}
outputs.Z = "out.nc:/g/Z"
""",
    )
    with h5netcdf.File("out.nc", "r") as file:
        assert file["g/Z"].dimensions == ("lat", "lon")
        check_coordinate(file["g"], "lat", LAT[chosen])
        check_coordinate(file["g"], "lon", LON)


def test_labels_of_another_name_or_extent_have_none(values, tmp_path):
    job = JOB.replace("M[lat,lon]", "M[y,lon]").replace("T[time,lat,lon])", "T[time,y,lon])", 1)
    run(tmp_path, job.replace("Q[lat] = max(T[time,lat,lon])", "Q[lat:7] = lat"))
    with h5netcdf.File("out.nc", "r") as file:
        assert sorted(file.variables) == ["M", "Q", "lon"]
        assert file["Q"].dimensions == ("lat",) and file.dimensions["lat"].size == 7


def test_a_coordinate_of_words(tmp_path):
    with h5py.File("in.nc", "w") as file:
        file["X"] = np.arange(3.0)
        file["city"] = np.array(["Bergen", "Oslo", "Tromsø"], h5py.string_dtype())
        file["city"].make_scale("city")
        file["X"].dims[0].attach_scale(file["city"])
    run(
        tmp_path,
        'program = "Z[city] = 2 * X[city]"\ninputs.X = "in.nc:/X"\noutputs.Z = "out.nc:/Z"\n',
    )
    with h5py.File("out.nc") as file:
        assert file["city"].asstr()[:].tolist() == ["Bergen", "Oslo", "Tromsø"]
        assert file["Z"].dims[0][0].name == "/city"


def test_an_input_that_is_gone_leaves_no_coordinates(values, tmp_path):
    """They are extras: the result is stored without them."""
    source = HDF5.find("in.nc", "/T", "")
    assert set(_coordinates_of([source])) == {("time", 3), ("lat", 4), ("lon", 5)}
    (tmp_path / "in.nc").unlink()
    assert _coordinates_of([source]) == {}
    (tmp_path / "in.nc").write_bytes(b"no HDF5")
    assert _coordinates_of([source]) == {}


def test_new_takes_the_names_of_dimensions(values, tmp_path):
    said_by(tmp_path, "new", "n.toml", "--from", "in.nc")
    text = (tmp_path / "n.toml").read_text()
    assert "sum_of_T = sum(T[time,lat,lon])" in text
    assert "sum_of_lat_values = sum(lat_values[lat])" in text
    assert 'lat_values  = "in.nc:/lat"' in text
    said_by(tmp_path, "check", "n.toml")


@pytest.mark.parametrize("names", [("sum", "b"), ("a b", "c"), ("if", "b")])
def test_new_uses_other_labels_for_names_that_cannot_be_labels(tmp_path, names):
    with h5py.File("in.h5", "w") as file:
        file["X"] = np.zeros((2, 3))
        for dimension, name in zip(file["X"].dims, names, strict=True):
            dimension.label = name
    said_by(tmp_path, "new", "n.toml", "--from", "in.h5")
    assert "sum_of_X = sum(X[i,j])" in (tmp_path / "n.toml").read_text()


def test_packed_values_are_noted(tmp_path):
    with h5netcdf.File("in.nc", "w") as file:
        file.dimensions = {"x": 4}
        data = np.array([1, 2, -99, 4], "i2")
        packed = file.create_variable("T", ("x",), data=data, fillvalue=np.int16(-99))
        packed.attrs.update({"scale_factor": 0.5, "add_offset": 3.0})
    note = "read as stored: scale_factor 0.5, add_offset 3, _FillValue -99"
    said_by(tmp_path, "new", "n.toml", "--from", "in.nc")
    assert f'T = "in.nc:/T"  # int16 4, {note}' in (tmp_path / "n.toml").read_text()
    assert f"input    T int16 4, 8 B  in.nc, {note}" in said_by(tmp_path, "check", "n.toml")
    program = "V[x] = where(T[x] == -99, 0/0, 0.5 * T[x] + 3)"
    run(tmp_path, f'program = "{program}"\ninputs.T = "in.nc:/T"\noutputs.V = "out.nc:/V"\n')
    with h5netcdf.File("out.nc", "r") as file:
        np.testing.assert_array_equal(file["V"][()], [3.5, 4, np.nan, 5])


def test_openpmd(tmp_path):
    """A vector record, whose components are datasets of a group, and a scalar one."""
    with h5py.File("in.h5", "w") as file:
        field = file.create_group("data/0/meshes/E")
        field.attrs["axisLabels"] = np.array([b"z", b"x"])
        for name in "xz":
            field[name] = np.ones((2, 3))
            field[name].attrs["unitSI"] = 5.0
        file["data/0/meshes/rho"] = np.ones((2, 3))
        file["data/0/meshes/rho"].attrs.update({"axisLabels": ["z", "x"], "unitSI": 1.0})
    said_by(tmp_path, "new", "n.toml", "--from", "in.h5")
    text = (tmp_path / "n.toml").read_text()
    for name in ("E_x", "E_z", "rho"):
        assert f"sum_of_{name} = sum({name}[z,x])" in text
    assert '"in.h5:/data/0/meshes/E/x"  # float64 2×3, read as stored: unitSI 5\n' in text
    assert '"in.h5:/data/0/meshes/rho"  # float64 2×3\n' in text
    said_by(tmp_path, "check", "n.toml")


@pytest.mark.parametrize("labels", [["z"], [1, 2], "zx", b"\xff\xfe", [["z", "x"]]])
def test_odd_attributes_are_no_errors(tmp_path, labels):
    with h5py.File("in.h5", "w") as file:
        file["X"] = np.ones((2, 3))
        file["X"].attrs["axisLabels"] = labels
        file["X"].attrs["scale_factor"] = np.array([])
    found = HDF5.find("in.h5", "/X", "")
    assert found.shape == (2, 3) and len(found.dimensions) in (0, 2)
