"""A zarr store takes the place of an old one whole or not at all, also beside other files."""

import errno
import hashlib
import os
import signal
import warnings

import numpy as np
import pytest
from in_process import einmpi_here
from mpi_helpers import needs_mpirun, run_mpi

import einmpi
from einmpi.arrays.dist_array import DistArray
from einmpi.comm.base import ALONE
from einmpi.files import atomic, journal, writing
from einmpi.files import journal as publishing
from einmpi.files.claims import claimed
from einmpi.files.formats import HDF5, ZARR
from einmpi.files.zarr import arrays as zarr_writing

pytestmark = pytest.mark.usefixtures("in_folder")

ONE = 'program = "Z[i:6] = i + 10"\noutputs.Z = { file = "o.zarr", dataset = "/Z", chunks = [2] }\n'
TWO = (
    'program = "Z[i:6] = i + 10; Y[i:3] = 2 * i + 10"\n'
    'outputs.Z = { file = "o.zarr", dataset = "/Z", chunks = [2] }\noutputs.Y = "y.h5:/Y"\n'
)


def old_files():
    """Write what the outputs replace: numbers below 10."""
    DistArray.from_global(np.zeros(6)).to_zarr("o.zarr", "/Z")
    DistArray.from_global(np.ones(4)).to_zarr("o.zarr", "/kept")
    DistArray.from_global(np.zeros(3)).to_hdf5("y.h5", "Y")


def write_job(text):
    with open("job.toml", "w") as file:
        file.write(text)


def are_new(*tensors):
    """Return for each tensor whether it has new values; all have to be alike."""
    states = []
    for file, name in tensors:
        values = einmpi.open_dataset(file, name).gather()
        states.append(bool((values >= 10).all()))
        assert states[-1] or (values < 10).all()
    assert len(set(states)) == 1
    return states[0]


def tree_digest(folder):
    digest = hashlib.sha256()
    for path, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            digest.update(os.path.join(path, name).encode())
            with open(os.path.join(path, name), "rb") as file:
                digest.update(file.read())
    return digest.hexdigest()


class Renames:
    """Counts all renames, and ends the process before or after one of them."""

    def __init__(self, monkeypatch, can_exchange):
        self.count = 0
        self.fatal = None  # (number of the rename, whether it is done)
        self.calls = {"rename": os.rename, "replace": os.replace}
        self.exchange = atomic.exchange_names
        for name in self.calls:
            monkeypatch.setattr(os, name, lambda *paths, name=name: self.call(name, *paths))
        for module in (atomic, publishing, journal):
            exchange = self.exchanged if can_exchange else lambda *_: False
            monkeypatch.setattr(module, "exchange_names", exchange)

    def call(self, name, *paths):
        return self.counted(self.calls[name], *paths)

    def exchanged(self, *paths):
        return self.counted(self.exchange, *paths)

    def counted(self, function, *paths):
        number = self.count
        self.count += 1
        if self.fatal == (number, False):
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*paths)
        if self.fatal == (number, True):
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def in_child(function, *arguments):
    """Call a function in a copy of this process; return its exit status, negative for a signal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads only wait
        child = os.fork()
    if child == 0:
        try:
            os._exit(function(*arguments))
        finally:
            os._exit(70)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def write_all(value, files):
    """Write a number to tensors in files, all or none. Return 0 as a process that has done it."""
    outputs = []
    for file, name in files:
        file_format = ZARR if file.endswith(".zarr") else HDF5
        tensor = writing.tensor_of(DistArray.from_global(np.full(3, value)), name)
        outputs.append(writing.OutputFile(file, "", file_format, [tensor]))
    with claimed({file: "" for file, _ in files}, ALONE) as claim:
        writing.write(outputs, dict, claim)
    return 0


STORE = [("o.zarr", "/Z")]
STORE_AND_FILE = [*STORE, ("y.h5", "/Y")]


@pytest.mark.parametrize(
    ("files", "exist", "can_exchange"),
    [
        (STORE, True, False),
        (STORE_AND_FILE, True, True),
        pytest.param(STORE, True, True, marks=pytest.mark.slow),
        pytest.param(STORE_AND_FILE, True, False, marks=pytest.mark.slow),
        pytest.param(STORE, False, True, marks=pytest.mark.slow),
        pytest.param(STORE_AND_FILE, False, True, marks=pytest.mark.slow),
        pytest.param(STORE_AND_FILE, False, False, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_at_any_rename(files, exist, can_exchange, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a killed process is no power cut
    renames = Renames(monkeypatch, can_exchange)
    outcomes = set()
    number = 0
    status = -signal.SIGKILL
    while status == -signal.SIGKILL:
        for is_done in (False, True):
            for file, _ in files:
                if os.path.exists(file):
                    atomic.remove_path(file)
            if exist:
                write_all(1.0, files)
                write_all(1.0, [("o.zarr", "/kept")])
            renames.count = 0
            renames.fatal = (number, is_done)
            status = in_child(write_all, 10.0, files)
            renames.fatal = None
            # A file that does not exist cannot be read; if one does, the others do too then.
            readable = [each for each in files if os.path.exists(each[0])]
            is_new = bool(readable) and are_new(readable[0]) and are_new(*files)
            outcomes.add(is_new)
            if exist:
                assert einmpi.open_dataset("o.zarr", "kept").gather().tolist() == [1] * 3
            write_all(11.0, files)
            assert are_new(*files) and sorted(os.listdir()) == [file for file, _ in files]
        number += 1
    assert status == 0 and outcomes == {True, False}


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_rename_that_fails(can_exchange, monkeypatch, tmp_path):
    old_files()
    write_job(TWO)
    before = tree_digest("o.zarr")
    renames = Renames(monkeypatch, can_exchange)
    counted = renames.counted

    def failing(function, *paths):
        if paths[1].endswith("/y.h5"):
            raise OSError(errno.EIO, "broken")
        return counted(function, *paths)

    monkeypatch.setattr(renames, "counted", failing)
    done = einmpi_here(tmp_path, ["job.toml"])
    assert done.returncode == 1
    assert done.stderr == (
        "job.toml:3:9: y.h5 cannot be written: Input/output error; "
        "all 2 output files are unchanged\n"
    )
    assert tree_digest("o.zarr") == before and not are_new(("o.zarr", "Z"), ("y.h5", "Y"))
    assert sorted(os.listdir()) == ["job.toml", "o.zarr", "y.h5"]


def test_a_full_disk_leaves_the_old_store(monkeypatch, tmp_path):
    old_files()
    write_job(TWO)
    before = tree_digest("o.zarr")

    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(zarr_writing.ChunkFiles, "_write_file", full)
    done = einmpi_here(tmp_path, ["job.toml"])
    assert done.returncode == 1
    assert done.stderr == (
        "job.toml:2:9: o.zarr cannot be written: No space left on device; o.zarr is unchanged\n"
    )
    assert tree_digest("o.zarr") == before
    assert sorted(os.listdir()) == ["job.toml", "o.zarr", "y.h5"]


def test_a_store_that_another_program_changes_is_not_replaced(monkeypatch, tmp_path):
    old_files()
    write_job(ONE)
    flush = zarr_writing.ChunkFiles.flush

    def change_then_flush(files):
        os.mkdir("o.zarr/more")
        flush(files)

    monkeypatch.setattr(zarr_writing.ChunkFiles, "flush", change_then_flush)
    done = einmpi_here(tmp_path, ["job.toml"])
    assert done.returncode == 1 and "another program has changed it" in done.stderr
    assert not are_new(("o.zarr", "Z")) and os.path.isdir("o.zarr/more")


KILLED = """
import os, signal, sys
from einmpi.cli.main import main
from einmpi.comm.mpi_library import world
from einmpi.files.zarr import arrays as writing

write = writing.ChunkFiles.write

def write_then_die(files, index, chunk):
    write(files, index, chunk)
    if world().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

writing.ChunkFiles.write = write_then_die
sys.exit(main(["job.toml"]))
"""


@pytest.mark.slow
@needs_mpirun
@pytest.mark.mpirun
def test_a_killed_rank_leaves_the_old_store(tmp_path):
    old_files()
    write_job(ONE)
    before = tree_digest("o.zarr")
    assert run_mpi(2, KILLED, cwd=tmp_path).returncode != 0
    assert tree_digest("o.zarr") == before
    assert einmpi_here(tmp_path, ["job.toml", "--quiet"]).returncode == 0
    assert are_new(("o.zarr", "Z"))
    assert sorted(os.listdir()) == ["job.toml", "o.zarr", "y.h5"]
