"""Inputs that are replaced or written to while they are read, also behind links."""

import os

import h5py
import numpy as np
import pytest
from mpi_helpers import needs_mpirun, run_mpi
from refusals import error

import einmpi
from einmpi.api import options_of
from einmpi.checkpoint.folder import Saving, identity
from einmpi.checkpoint.resume import Checkpoints, prepare
from einmpi.comm.base import ALONE
from einmpi.files.reading import Reading

pytestmark = pytest.mark.usefixtures("in_folder")

LONG_AGO = (10**9, 10**9)


def write_npy(path, value, columns=4):
    with open(path, "wb") as file:  # np.save would add a suffix
        np.save(file, np.full((8, columns), value))


def write_contiguous(path, value, columns=4):
    with h5py.File(path, "w") as file:
        file["A"] = np.full((8, columns), value)


def write_chunked(path, value):
    with h5py.File(path, "w") as file:
        file.create_dataset("A", data=np.full((8, 4), value), chunks=(1, 4))


def write_raw(path, value):
    np.full((8, 4), value).tofile(path)


def make_link():
    with h5py.File("x.h5", "w") as file:
        file["A"] = h5py.ExternalLink("y.h5", "/A")


def make_virtual():
    layout = h5py.VirtualLayout((8, 4), "f8")
    layout[:] = h5py.VirtualSource("y.h5", "/A", (8, 4))
    with h5py.File("x.h5", "w") as file:
        file.create_virtual_dataset("A", layout)


def make_external_storage():
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("A", (8, 4), "f8", external=[("raw", 0, 256)])


# The input in a job, how its file refers to another one, that other one (or the file itself) and
# how it is written.
KINDS = {
    "npy": ("x.npy", None, "x.npy", write_npy),
    "contiguous": ("x.h5:/A", None, "x.h5", write_contiguous),
    "chunked": ("x.h5:/A", None, "x.h5", write_chunked),
    "link": ("x.h5:/A", make_link, "y.h5", write_contiguous),
    "virtual": ("x.h5:/A", make_virtual, "y.h5", write_contiguous),
    "storage": ("x.h5:/A", make_external_storage, "raw", write_raw),
}


def make_job(kind, *columns):
    """Write the files of a job; return the name of the file with the elements."""
    given, make_first, file, write = KINDS[kind]
    write(file, 1.0, *columns)
    write("new", 2.0, *columns)
    os.utime(file, LONG_AGO)
    os.utime("new", LONG_AGO)
    if make_first is not None:
        make_first()
    with open("job.toml", "w") as job:
        job.write(f"program = 'Z[i,j] = A[i,j]'\ninputs.A = '{given}'\noutputs.Z = 'out.npy'\n")
    return file


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["replaced", "changed", "removed"])
def test_a_file_that_does_not_stay(kind, how, monkeypatch):
    file = make_job(kind)
    job = einmpi.load("job.toml")
    read_box = Reading._read_box

    def read_and_disturb(self, *arguments):
        read_box(self, *arguments)
        if how == "replaced":
            os.replace("new", file)
        elif how == "changed":
            with open(file, "r+b") as opened:
                opened.seek(-8, os.SEEK_END)
                opened.write(bytes(8))
            os.utime(file, LONG_AGO)
        else:
            os.remove(file)

    monkeypatch.setattr(Reading, "_read_box", read_and_disturb)
    said = error(einmpi.run, job)
    assert said.startswith("job.toml:2:8: ") and file in said
    assert said.endswith(f" was {how} during the run; expected a file that stays unchanged")


def test_a_file_may_change_between_calls():
    make_job("npy")
    compiled = einmpi.compile(einmpi.load("job.toml"))
    assert compiled()["Z"].gather().max() == 1
    os.replace("new", "x.npy")
    assert compiled()["Z"].gather().min() == 2


# Rank 0 reads its part and replaces the file; rank 1 reads after that.
TORN = """
import os, sys, time
from einmpi.files import reading

rank = int(os.environ.get("PMI_RANK", os.environ.get("PMIX_RANK", "0")))
read_box = reading.Reading._read_box

def read_in_turn(self, *arguments):
    while rank == 1 and not os.path.exists("replaced"):
        time.sleep(0.01)
    read_box(self, *arguments)
    if rank == 0:
        os.replace("new", sys.argv[1])
        open("replaced", "x").close()

reading.Reading._read_box = read_in_turn
from einmpi.cli.main import main
sys.exit(main(["job.toml"]))
"""


@needs_mpirun
@pytest.mark.mpirun
@pytest.mark.parametrize("kind", ["npy", "link"])
def test_no_result_comes_from_two_versions_of_a_file(kind, tmp_path):
    file = make_job(kind, 2**17)  # large enough that each rank reads its own rows
    done = run_mpi(2, ["-c", TORN, file], cwd=tmp_path)
    said = [line for line in done.stderr.splitlines() if "during the run" in line]
    assert done.returncode != 0 and len(said) == 1
    assert file in said[0] and "was replaced during the run" in said[0]
    assert not os.path.exists("out.npy")


# ---- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["npy", "link", "virtual", "storage"])
def test_a_checkpoint_knows_the_files_behind_links(kind):
    file = make_job(kind)
    job = einmpi.load("job.toml")
    before = identity(job)
    assert identity(job) == before
    os.utime("new", (10**9, 2 * 10**9))
    os.replace("new", file)
    after = identity(job)
    assert before["the input A"] != after["the input A"]


def test_an_input_that_changes_after_it_was_compared_with_the_checkpoint():
    make_job("link")
    job = einmpi.load("job.toml")
    os.mkdir("saved", 0o700)
    checkpoints = Checkpoints(Saving("saved", every=600, resume=True, quiet=True), ALONE, job)
    os.utime("new", (10**9, 2 * 10**9))
    os.replace("new", "y.h5")
    assert error(prepare, job, ALONE, options_of, checkpoints, {}) == (
        "job.toml:2:8: /A in x.h5 was replaced during the run; expected a file that stays unchanged"
    )
