"""Files behind HDF5 links, virtual datasets and external storage: which are read, which refused."""

import os
import subprocess
import sys

import h5py
import numpy as np
import pytest
from refusals import error

import einmpi
from einmpi.errors import InputError
from einmpi.files.formats import find
from einmpi.files.hdf5.datasets import UnsafeLinkError
from einmpi.files.reading import describe, load_array
from einmpi.files.specs import InputSpec

pytestmark = pytest.mark.usefixtures("in_folder")


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """Run a test in a folder next to another one, `elsewhere`."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path / "job")


def spec(dataset, file="x.h5", follow=()):
    return InputSpec("A", file=file, inside=dataset, place="job.toml:2:8", follow=follow)


def write(file, **datasets):
    with h5py.File(file, "w") as handle:
        for name, value in datasets.items():
            handle[name] = value


def write_virtual(file, name, *sources):
    """Write a virtual dataset with one row of 4 from each source: (file, dataset)."""
    layout = h5py.VirtualLayout((len(sources), 4), "f8")
    for row, (source, dataset) in enumerate(sources):
        layout[row] = h5py.VirtualSource(source, dataset, (4,))
    with h5py.File(file, "a") as handle:
        handle.create_virtual_dataset(name, layout)


def write_numbered(file, pattern, dataset="/A"):
    """Write a virtual dataset whose sources are numbered, as many as there are."""
    unlimited = h5py.h5s.UNLIMITED
    space = h5py.h5s.create_simple((4,), (unlimited,))
    space.select_hyperslab((0,), (unlimited,), (4,), (4,))
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    source = h5py.h5s.create_simple((4,))
    properties.set_virtual(space, pattern.encode(), dataset.encode(), source)
    extents = h5py.h5s.create_simple((0,), (unlimited,))
    with h5py.File(file, "w") as handle:
        h5py.h5d.create(handle.id, b"v", h5py.h5t.IEEE_F64LE, extents, properties)


def write_external_storage(file, storage, nbytes=32):
    with h5py.File(file, "w") as handle:
        handle.create_dataset("A", (nbytes // 8,), "f8", external=[(storage, 0, nbytes)])


READ_ALL = """
import sys
from einmpi.errors import InputError
from einmpi.files.reading import describe, load_array
from einmpi.files.specs import InputSpec

for text in sys.argv[1:]:
    file, _, dataset = text.partition(":")
    spec = InputSpec("A", file=file, inside=dataset)
    try:
        load_array(spec, describe(spec).shape, describe(spec).dtype)
    except InputError as error:
        print(error)
"""


def read_in_time(*datasets):
    """Read each FILE:DATASET in another process, which might wait forever or crash.

    Return the line that each is refused with.
    """
    command = [sys.executable, "-c", READ_ALL, *datasets]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout.splitlines()


# ---- what would wait or crash -------------------------------------------------------------------


def test_links_sources_and_storage_that_are_pipes():
    os.mkfifo("pipe0")
    write("x.h5", A=h5py.ExternalLink("pipe0", "/A"), near=h5py.SoftLink("/A"))
    write_virtual("x.h5", "v", ("pipe0", "/A"))
    write_numbered("numbered.h5", "pipe%b")
    write_external_storage("storage.h5", "pipe0")
    given = [
        "x.h5:/A",
        "x.h5:/near",
        "x.h5:/A/inside",
        "x.h5:/v",
        "numbered.h5:/v",
        "storage.h5:/A",
    ]
    expected = []
    for text in given:
        file, _, name = text.partition(":")
        real = os.path.realpath("pipe0")
        expected.append(
            f"{file}: {name} in {file} leads to {real}, which is not a regular file; "
            "expected a link to a file"
        )
    assert read_in_time(*given) == expected


def test_virtual_datasets_of_themselves():
    write_virtual("own.h5", "v", (".", "/v"))
    # The same through another virtual dataset, links of all kinds, and another name of the file.
    write("good.h5", A=np.ones(4))
    write_virtual("x.h5", "v", ("good.h5", "/A"), ("y.h5", "/link"))
    write("y.h5", link=h5py.ExternalLink("z.h5", "/soft"))
    write("z.h5", soft=h5py.SoftLink("/w"))
    os.symlink("x.h5", "other_name.h5")
    write_virtual("z.h5", "w", ("other_name.h5", "/v"))
    end = "is a virtual dataset that contains itself; expected a virtual dataset of other datasets"
    other_name = os.path.abspath("other_name.h5")
    assert read_in_time("own.h5:/v", "x.h5:/v") == [
        f"own.h5: /v in own.h5 {end}",
        f"x.h5: /v in {other_name} {end}",
    ]


def test_virtual_datasets_that_are_nested_too_deeply():
    write("x.h5", v0=np.ones(4))
    for number in range(17):
        with h5py.File("x.h5", "a") as file:
            layout = h5py.VirtualLayout((4,), "f8")
            layout[:] = h5py.VirtualSource(".", f"/v{number}", (4,))
            file.create_virtual_dataset(f"v{number + 1}", layout)
    assert load_array(spec("/v16"), (4,), "float64").tolist() == [1, 1, 1, 1]
    assert "/v1 in x.h5 is inside 16 other virtual datasets" in error(
        describe, spec("/v17"), kind=UnsafeLinkError
    )


def test_links_in_a_circle():
    write("x.h5", A=h5py.ExternalLink("y.h5", "/A"), loop=h5py.SoftLink("/loop"))
    write("y.h5", A=h5py.ExternalLink("x.h5", "/A"))
    assert "is behind more than 32 links" in error(describe, spec("/A"))
    assert "is behind more than 32 links" in error(describe, spec("/loop"))


def test_an_output_at_a_link_to_a_pipe():
    os.mkfifo("pipe.h5")
    write("x.h5", A=h5py.ExternalLink("pipe.h5", "/A"))
    program = (
        "import einmpi\n"
        "Z = einmpi.DistArray.from_global([1.0, 2.0])\n"
        "try:\n"
        "    Z.to_hdf5('x.h5', '/A/inside')\n"
        "except einmpi.InputError as error:\n"
        "    print(error)\n"
        "Z.to_hdf5('x.h5', '/A')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "/A in x.h5 leads to another file; expected a group of x.h5" in ran.stdout
    with h5py.File("x.h5") as file:
        assert isinstance(file.get("A", getlink=True), h5py.HardLink)
        assert file["A"][:].tolist() == [1, 2]


# ---- folders ------------------------------------------------------------------------------------


def refused_folder(dataset, target, file="x.h5"):
    real = os.path.realpath(target)
    return (
        f"job.toml:2:8: {dataset} in {file} leads to {real}, which is in another folder; expected "
        f'a file in the folder of the job or of {file}, or follow = ["{os.path.dirname(real)}"]'
    )


@pytest.mark.parametrize("kind", ["link", "virtual", "storage", "symbolic"])
def test_files_in_other_folders_are_read_only_if_the_job_says_so(kind):
    target = "../elsewhere/y.h5"
    shape = (4,)
    write(target, A=np.arange(4.0))
    if kind == "link":
        write("x.h5", A=h5py.ExternalLink(target, "/A"))
    elif kind == "symbolic":
        os.symlink(target, "near.h5")
        write("x.h5", A=h5py.ExternalLink("near.h5", "/A"))
    elif kind == "virtual":
        write_virtual("x.h5", "A", (target, "/A"))
        shape = (1, 4)
    else:
        target = "../elsewhere/raw"
        np.arange(4.0).tofile(target)
        write_external_storage("x.h5", target)
    assert error(describe, spec("/A")) == refused_folder("/A", target)
    found = load_array(spec("/A", follow=("../elsewhere",)), shape, "float64")
    assert found.reshape(-1).tolist() == [0, 1, 2, 3]
    assert einmpi.open_dataset("x.h5", "/A", follow=["../elsewhere"]).shape == shape
    with pytest.raises(InputError, match="which is in another folder"):
        einmpi.open_dataset("x.h5", "/A")
    with h5py.File("x.h5") as file:  # opened by the caller, who may follow any link
        labels = "i,j"[: 2 * len(shape) - 1]
        job = einmpi.program(f"n = sum(A[{labels}])", A=file["A"])
        given = einmpi.run(job, {"A": file["A"]})
    assert float(given["n"].gather().sum()) == 6


def test_the_key_of_a_job():
    write("../elsewhere/y.h5", A=np.arange(4.0))
    write("x.h5", A=h5py.ExternalLink("../elsewhere/y.h5", "/A"))
    text = "program = 'n = sum(A[i])'\n[inputs]\nA = {file = 'x.h5', dataset = '/A'%s}\n"
    with open("job.toml", "w") as file:
        file.write(text % "")
    assert "which is in another folder" in error(einmpi.load, "job.toml")
    with open("job.toml", "w") as file:
        file.write(text % ", follow = ['../elsewhere']")
    assert float(einmpi.run(einmpi.load("job.toml"))["n"].gather()) == 6


def test_the_folders_of_the_job_and_of_the_named_file():
    os.mkdir("data")
    write("top.h5", A=np.arange(4.0))
    write("data/x.h5", A=h5py.ExternalLink("../top.h5", "/A"))
    with open("job.toml", "w") as file:
        file.write("program = 'n = sum(A[i])'\ninputs.A = 'data/x.h5:/A'\n")
    assert float(einmpi.run(einmpi.load("job.toml"))["n"].gather()) == 6
    # A symbolic link that the job names is the user's choice, and so is the folder it leads to.
    write("../elsewhere/y.h5", A=np.arange(4.0))
    write("../elsewhere/z.h5", A=h5py.ExternalLink("y.h5", "/A"))
    os.symlink("../elsewhere/z.h5", "named.h5")
    assert load_array(spec("/A", "named.h5"), (4,), "float64").sum() == 6


# ---- how HDF5 finds files -----------------------------------------------------------------------


def test_files_are_found_as_hdf5_finds_them(monkeypatch):
    os.mkdir("prefix")
    write("prefix/y.h5", A=np.full(4, 7.0))
    write("y.h5", A=np.full(4, 1.0))
    write("x.h5", A=h5py.ExternalLink("/none/y.h5", "/A"))
    write_virtual("x.h5", "v", ("y.h5", "/A"))
    for name, variable in (("/A", "HDF5_EXT_PREFIX"), ("/v", "HDF5_VDS_PREFIX")):
        assert [os.path.relpath(source.path) for source in find(spec(name)).sources] == [
            "x.h5",
            "y.h5",
        ]
        monkeypatch.setenv(variable, "nowhere:prefix")
        assert [os.path.relpath(source.path) for source in find(spec(name)).sources] == [
            "x.h5",
            "prefix/y.h5",
        ]
    # What is checked is what HDF5 reads.
    assert load_array(spec("/A"), (4,), "float64").tolist() == [7] * 4
    assert load_array(spec("/v"), (1, 4), "float64").tolist() == [[7] * 4]


def test_numbered_sources():
    for number in range(3):
        write(f"part-{number}.h5", A=np.full(4, float(number)))
    write_numbered("x.h5", "part-%b.h5")
    dataset = find(spec("/v"))
    assert [os.path.basename(source.path) for source in dataset.sources] == [
        "x.h5",
        "part-0.h5",
        "part-1.h5",
        "part-2.h5",
    ]
    assert load_array(spec("/v"), (12,), "float64").tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
