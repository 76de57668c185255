"""Parts of files: any slice of any format, other shapes of what lies in one piece, and files that
do not exist yet."""

import json

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_process import einmpi_here
from safetensors.numpy import save_file

import einmpi
from einmpi.comm.threads import run_threads
from einmpi.errors import InputError
from einmpi.files import datasets
from einmpi.schedule import shared_reads

pytestmark = pytest.mark.usefixtures("in_folder")


@pytest.fixture
def small(monkeypatch):
    """Cells, rounds and strips so small that small tensors have many."""
    monkeypatch.setattr(shared_reads, "MIN_CELL_BYTES", 64)
    monkeypatch.setattr(shared_reads, "ROUND_BYTES", 200)
    monkeypatch.setattr(shared_reads, "LONG_RUN_BYTES", 64)
    monkeypatch.setattr(datasets, "STRIP_BYTES", 100)
    monkeypatch.setattr(datasets, "LONG_ROW_BYTES", 40)


def store(array):
    """The same tensor in files of every kind: (file, name)."""
    with h5py.File("x.h5", "w") as file:
        file["whole"] = array
        if array.size:
            chunks = tuple(min(3 + d, extent) for d, extent in enumerate(array.shape))
            file.create_dataset("chunked", data=array, chunks=chunks)
    np.save("c.npy", array)
    np.save("f.npy", np.asfortranarray(array))
    save_file({"a": np.ascontiguousarray(array)}, "x.safetensors")
    found = [("x.h5", "/whole"), ("c.npy", None), ("f.npy", None), ("x.safetensors", "a")]
    return found + ([("x.h5", "/chunked")] if array.size else [])


@st.composite
def slices_of(draw, shape):
    """Entries for the first dimensions, as numpy and as a job file write them."""
    index = []
    words = []
    for extent in shape[: draw(st.integers(0, len(shape)))]:
        if extent and draw(st.booleans()):
            number = draw(st.integers(-extent, extent - 1))
            index.append(number)
            words.append(str(number))
            continue
        start = draw(st.integers(0, extent))
        stop = draw(st.integers(start, extent))
        step = draw(st.integers(1, 4))
        index.append(slice(start, stop, step))
        words.append(f"{start}:{stop}" + (f":{step}" if step > 1 else ""))
    return tuple(index), ", ".join(words)


@settings(max_examples=40, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.data())
def test_any_slice_of_any_file(small, data):
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float64).reshape(shape)
    file, name = data.draw(st.sampled_from(store(array)))
    index, _ = data.draw(slices_of(shape))
    wanted = array[index]
    ranks = data.draw(st.integers(1, 4))
    results = run_threads(
        ranks, lambda comm: einmpi.open_dataset(file, name, comm, index=index).gather()
    )
    for found in results:
        np.testing.assert_array_equal(found, wanted)
        assert found.shape == wanted.shape


@settings(max_examples=25, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.data())
def test_slices_of_job_files(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    array = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    np.save("x.npy", array)
    index, words = data.draw(slices_of(shape))
    wanted = array[index]
    labels = ",".join("ijk"[: wanted.ndim])
    element = f"X[{labels}]" if labels else "X"
    target = f"Z[{labels}]" if labels else "Z"
    selecting = f", slice = {json.dumps(words)}" if words else ""
    with open("job.toml", "w") as file:
        file.write(f'program = "{target} = 2 * {element}"\n')
        file.write(f'inputs.X = {{ file = "x.npy"{selecting} }}\n')
    job = einmpi.load("job.toml")
    assert job.inputs[0].shape == wanted.shape
    for results in run_threads(2, lambda comm: einmpi.run(job, comm=comm)["Z"].gather()):
        np.testing.assert_array_equal(results, 2 * wanted)


@pytest.mark.parametrize(
    ("keys", "index"),
    [
        ('rows = "1:3"', np.s_[1:3]),
        ('columns = "n:"', np.s_[:, 2:]),
        ('rows = "::2", columns = "-3:-1"', np.s_[::2, -3:-1]),
        ('slice = ":, n, 1:4:2"', np.s_[:, 2, 1:4:2]),
        ('slice = "n + 1"', np.s_[3]),
    ],
)
def test_keys_of_job_files(keys, index):
    array = np.arange(120.0).reshape(4, 5, 6)
    wanted = array[index]
    np.save("x.npy", array)
    labels = "i,j,k"[: 2 * wanted.ndim - 1]
    with open("job.toml", "w") as file:
        file.write(f'program = "Z[{labels}] = X[{labels}]"\nsizes.n = 2\n')
        file.write(f'inputs.X = {{ file = "x.npy", {keys} }}\n')
    np.testing.assert_array_equal(einmpi.run(einmpi.load("job.toml"))["Z"].gather(), wanted)


def test_long_rows_between_two_selected_ones_are_not_read(monkeypatch):
    array = np.arange(64.0 * 4096).reshape(64, 4096)
    np.save("x.npy", array)
    counted = []
    read = datasets.RawReader._read_box

    def count(self, bounds, out):
        counted.append(out.size)
        read(self, bounds, out)

    monkeypatch.setattr(datasets.RawReader, "_read_box", count)
    found = einmpi.open_dataset("x.npy", rows=slice(0, 64, 8)).gather()
    np.testing.assert_array_equal(found, array[::8])
    assert sum(counted) == found.size


@pytest.mark.parametrize("index", [np.s_[::-1], np.s_[0:2.0], ["a"], 1.5, (None,)])
def test_wrong_indices(index):
    np.save("x.npy", np.arange(4.0))
    with pytest.raises(InputError, match=r"open_dataset: index is .*; expected integers"):
        einmpi.open_dataset("x.npy", index=index)


# ---- another shape -------------------------------------------------------------------------------


def job_with(entry, labels="i,j"):
    with open("job.toml", "w") as file:
        file.write(f'program = "Z[{labels}] = X[{labels}]"\nsizes.n = 3\ninputs.X = {entry}\n')
    return einmpi.load("job.toml")


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_lies_in_one_piece_takes_another_shape(ranks):
    array = np.arange(24.0).reshape(4, 6)
    store(array)
    for entry, wanted in (
        ('{ file = "c.npy", shape = ["n", 8] }', array.reshape(3, 8)),
        ('{ file = "x.h5", dataset = "/whole", shape = [12, 2] }', array.reshape(12, 2)),
        ('{ file = "x.safetensors", tensor = "a", shape = [1, 24] }', array.reshape(1, 24)),
        ('{ file = "c.npy", rows = "1:3", shape = [4, 3] }', array[1:3].reshape(4, 3)),
        ('{ file = "c.npy", slice = "2, 1:5", shape = [2, 2] }', array[2, 1:5].reshape(2, 2)),
        ('{ file = "f.npy", shape = [4, 6] }', array),
    ):
        job = job_with(entry)
        for found in run_threads(
            ranks, lambda comm, job=job: einmpi.run(job, comm=comm)["Z"].gather()
        ):
            np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(einmpi.reference(job)["Z"], wanted)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            '{ file = "c.npy", shape = [5, 5] }',
            r"has shape \[4, 6\]; expected shape \[5, 5\]",
        ),
        ('{ file = "f.npy", shape = [6, 4] }', "only a tensor that lies in one piece"),
        ('{ file = "x.h5", dataset = "/chunked", shape = [6, 4] }', "lies in one piece"),
        ('{ file = "c.npy", columns = "1:3", shape = [2, 4] }', "lies in one piece"),
        ('{ file = "c.npy", rows = "::2", shape = [6, 2] }', "lies in one piece"),
        (
            '{ file = "c.npy", dtype = "float32" }',
            "is float64; expected float32, as declared",
        ),
    ],
)
def test_shapes_and_dtypes_that_do_not_fit(entry, message):
    store(np.arange(24.0).reshape(4, 6))
    with pytest.raises(InputError, match=message):
        job_with(entry)


# ---- files that do not exist yet -----------------------------------------------------------------

LATER = '{ file = "later.h5", dataset = "/X", shape = [40, 30], dtype = "float64" }'


def test_plans_before_the_file_exists():
    job = job_with(LATER)
    assert (job.inputs[0].shape, job.inputs[0].dtype) == ((40, 30), "float64")
    before = einmpi.plan(job, 4).digest
    done = einmpi_here(".", ["check", "job.toml"])
    assert "later.h5 (does not exist yet)" in done.stdout
    assert einmpi_here(".", ["plan", "job.toml", "-n", "4"]).returncode == 0
    words = ["sbatch", "job.toml", "--nodes", "2", "--ntasks-per-node", "2", "--out", "x.sbatch"]
    assert einmpi_here(".", words).returncode == 0
    done = einmpi_here(".", ["job.toml"])
    assert done.returncode == 2
    assert done.stderr.startswith("job.toml:3:8: there is no file later.h5; expected an HDF5 file")
    array = np.arange(1200.0).reshape(40, 30)
    with h5py.File("later.h5", "w") as file:
        file["X"] = array
    # The job that was loaded before the file existed runs now, with the same plan.
    assert einmpi.plan(job, 4).digest == before
    np.testing.assert_array_equal(einmpi.run(job)["Z"].gather(), array)
    assert einmpi_here(".", ["job.toml"]).returncode == 0


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((40, 31)), r"/X in later.h5 has shape \[40, 31\]; expected shape \[40, 30\]"),
        (np.zeros((40, 30), "float32"), "/X in later.h5 is float32; expected float64, as declared"),
    ],
)
def test_the_file_must_be_as_declared(array, message):
    job = job_with(LATER)
    with h5py.File("later.h5", "w") as file:
        file["X"] = array
    with pytest.raises(InputError, match=message):
        einmpi.run(job)
    with pytest.raises(InputError, match=message):
        einmpi.load("job.toml")


@pytest.mark.parametrize("key", ["shape = [40, 30]", 'dtype = "float64"'])
def test_half_a_declaration_is_not_enough(key):
    with pytest.raises(InputError, match=r"there is no file later\.h5"):
        job_with(f'{{ file = "later.h5", dataset = "/X", {key} }}')
