"""A file format is one record: a new one is registered at run time and works everywhere."""

import os

import numpy as np
import pytest
from refusals import error

import einmpi
from einmpi.comm.threads import run_threads
from einmpi.compiled.outputs import check_targets, claim_outputs, store
from einmpi.errors import InputError
from einmpi.files.atomic import make_draft
from einmpi.files.datasets import Dataset, check_file
from einmpi.files.formats import (
    FileFormat,
    WriteMethods,
    all_formats,
    known_format,
    register_format,
    split_short_form,
    unregister_format,
)

pytestmark = pytest.mark.usefixtures("in_folder")
HEADER_BYTES = 64


# ---- a format with a header and contiguous elements: read and written -------------------------


def find_block(file, name, place):
    """The first 64 bytes are text: dtype and extents."""
    check_file(file, place, "a .block file")
    with open(file, "rb") as opened:
        dtype, *extents = opened.read(HEADER_BYTES).decode().split()
    shape = tuple(int(extent) for extent in extents)
    return Dataset(file, name, place, shape, np.dtype(dtype).str, offset=HEADER_BYTES)


def lay_out_block(draft, target, tensors, attributes):
    (spec,) = tensors.values()
    make_draft(draft, target, None)
    words = [spec.dtype, *map(str, spec.shape)]
    with open(draft, "wb") as opened:
        opened.write(" ".join(words).encode().ljust(HEADER_BYTES))
    elements = int(np.prod(spec.shape))
    os.truncate(draft, HEADER_BYTES + elements * np.dtype(spec.dtype).itemsize)
    return [(HEADER_BYTES, None)]


BLOCK = FileFormat(
    name="block",
    suffixes=(".block",),
    key="",
    documentation="a header of 64 bytes, then the elements",
    find=find_block,
    write=WriteMethods(lay_out_block),
)


# ---- a format of named columns of text, with a reader of its own: only read --------------------


def read_column(file, name):
    with open(file) as opened:
        names = opened.readline().strip().split(",")
        rows = [line.split(",") for line in opened]
    return np.array([float(row[names.index(name)]) for row in rows])


class ColumnReader:
    def __init__(self, dataset):
        self.values = read_column(dataset.file, dataset.name)

    def read(self, there, target, here):
        target[here] = self.values[there]

    def close(self):
        pass


def find_column(file, name, place):
    check_file(file, place, "a .csv file")
    return Dataset(file, name, place, read_column(file, name).shape, "<f8")


COLUMNS = FileFormat(
    name="CSV",
    suffixes=(".csv",),
    key="column",
    documentation="named columns of numbers",
    find=find_column,
    open_reader=ColumnReader,
)


@pytest.fixture
def new_formats():
    register_format(BLOCK)
    register_format(COLUMNS)
    yield
    unregister_format(BLOCK)
    unregister_format(COLUMNS)


# ---- end to end ---------------------------------------------------------------------------------

JOB = """
program = "Z[i,j] = X[i,j] * (j + 1) + w[i]"

[inputs]
X = "x.block"
w = { file = "w.csv", column = "second" }

[outputs]
Z = { file = "z.block", dtype = "float32" }
"""


def write_inputs():
    values = np.arange(12.0).reshape(4, 3)
    with open("x.block", "wb") as file:
        file.write(b"float64 4 3".ljust(HEADER_BYTES) + values.tobytes())
    with open("w.csv", "w") as file:
        file.write("first,second\n1,10\n2,20\n3,30\n4,40\n")
    with open("job.toml", "w") as file:
        file.write(JOB)
    return values * [1, 2, 3] + np.array([[10], [20], [30], [40]])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_new_format_end_to_end(new_formats, ranks):
    expected = write_inputs()
    job = einmpi.load("job.toml")
    np.testing.assert_array_equal(einmpi.reference(job)["Z"], expected)

    def on_rank(comm):
        check_targets(job)
        with claim_outputs(job, comm) as claimed:
            results = einmpi.run(job, comm=comm)
            store(job, "digest", results, claimed)
        stored = einmpi.open_dataset("z.block", comm=comm)
        column = einmpi.open_dataset("w.csv", "first", comm=comm, rows=slice(1, 3))
        return stored.gather(), column.gather()

    for stored, column in run_threads(ranks, on_rank):
        assert stored.dtype == np.float32
        np.testing.assert_array_equal(stored, expected)
        np.testing.assert_array_equal(column, [2.0, 3.0])


def test_the_short_form(new_formats):
    write_inputs()
    text = 'program = "n = sum(w[i])"\ninputs.w = "w.csv:second"\noutputs.n = "n.block"\n'
    with open("job.toml", "w") as file:
        file.write(text)
    job = einmpi.load("job.toml")
    assert (job.inputs[0].inside, job.outputs[0].target) == ("second", "n.block")
    assert einmpi.reference(job)["n"] == 100


def job_error(**tables):
    with open("job.toml", "w") as file:
        file.write('program = "Z[i] = w[i]"\n')
        for name, value in tables.items():
            file.write(f"{name} = {value}\n")
    return error(einmpi.load, "job.toml")


def test_messages_list_it(new_formats):
    write_inputs()
    suffixes = (
        ".h5, .hdf5, .he5, .nc, .nc4, .h5ad, .safetensors, .safetensors.index.json, .npy, .zarr"
    )
    suffixes += ", .npz, .mtx, .tns, .block, .csv"
    assert job_error(inputs='{ w = "w.txt" }') == (
        "job.toml:2:12: 'w.txt' is not a file of a known format; "
        f"expected a file name that ends in one of {suffixes}"
    )
    assert job_error(inputs='{ w = "w.csv" }') == (
        "job.toml:2:12: 'w.csv' names a file but no column in it; expected \"FILE.csv:NAME\""
    )
    assert job_error(inputs='{ w = { file = "w.csv", dataset = "second" } }') == (
        "job.toml:2:34: dataset cannot be combined with a .csv file; expected column"
    )
    assert job_error(inputs='{ w = { file = "w.csv", rows = "0:1" } }') == (
        "job.toml:2:12: input w does not say which column of the file to use; "
        'expected column = "NAME"'
    )
    given = '{ w = "w.csv:second" }'
    assert job_error(inputs=given, outputs='{ Z = "z.csv:a" }') == (
        "job.toml:3:13: CSV files can be read but not written; "
        "expected a file name that ends in one of .h5, .hdf5, .he5, .nc, .nc4, .h5ad, .npy, .zarr, "
        ".npz, .mtx, .tns, .block"
    )
    assert job_error(inputs=given, outputs='{ Z = { file = "z.block", chunks = [2] } }') == (
        "job.toml:3:37: chunks cannot be combined with a .block file; "
        "expected one of file, dtype, parts"
    )
    assert error(einmpi.open_dataset, "w.csv") == (
        'open_dataset: the column of w.csv is missing; expected a second argument such as "NAME"'
    )


def test_it_is_gone_afterwards():
    sparse = ["sparse NumPy", "MatrixMarket", "FROSTT"]
    names = [known.name for known in all_formats()]
    assert names == ["HDF5", "safetensors", "safetensors index", "NumPy", "zarr", *sparse]
    with pytest.raises(InputError, match="not a file of a known format"):
        known_format("here", "z.block")


def test_suffixes_have_one_owner():
    for suffix, message in {
        ".npy": "suffix '.npy' already belongs to NumPy",
        ".NPY": "suffix '.NPY': expected a dot and lower-case letters or digits",
        "npy": "suffix 'npy': expected a dot and lower-case letters or digits",
    }.items():
        taken = FileFormat("other", (suffix,), "", "", find_block)
        with pytest.raises(ValueError) as caught:
            register_format(taken)
        assert str(caught.value) == message
        assert taken not in all_formats()


@pytest.mark.parametrize(
    "text, file, name",
    [
        ("a.h5:/A", "a.h5", "/A"),
        ("A.H5:/A", "A.H5", "/A"),
        ("a:b.h5:/A:c", "a:b.h5", "/A:c"),
        ("m.safetensors:layer:0", "m.safetensors", "layer:0"),
        ("m.safetensors.index.json:a.b", "m.safetensors.index.json", "a.b"),
        ("m.Safetensors.Index.JSON:a", "m.Safetensors.Index.JSON", "a"),
        ("index.json:a", "index.json", ""),
        ("a.npy", "a.npy", ""),
        ("a.h5:", "a.h5", ""),
        ("a:b.npy", "a:b.npy", ""),
        ("a.txt:/A", "a.txt", ""),
    ],
)
def test_splitting_the_short_form(text, file, name):
    assert split_short_form(text) == (file, name)


def test_the_short_form_as_the_name_of_a_file():
    with pytest.raises(InputError) as caught:
        known_format("job.toml:3:1", "u.h5:/u")
    assert str(caught.value).endswith("; the short form 'u.h5:/u' stands alone, without file =")
