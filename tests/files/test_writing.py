"""Results in files: all ranks write them, nothing else in a file is lost, and a failed write
changes nothing."""

import errno
import os
import random
import re
import shutil
import stat
import subprocess
import sys
import threading
import tracemalloc
from functools import partial

import h5py
import numpy as np
import pytest
from job_text import PROGRAM, A, read
from mpi_helpers import needs_mpirun, run_mpi
from plan_oracle import R, layouts
from refusals import error

from einmpi.arrays.dist_array import DistArray
from einmpi.comm.base import ALONE
from einmpi.comm.threads import run_threads
from einmpi.compiled import outputs as job_outputs
from einmpi.errors import EinmpiError, InputError
from einmpi.files import formats
from einmpi.files import writing as fill
from einmpi.files import writing as outputs
from einmpi.files.claims import claimed
from einmpi.files.hdf5 import writing as hdf5_writing
from einmpi.files.reading import describe, load_array
from einmpi.graph.dtypes import numpy_dtypes
from einmpi.planner.mesh import Mesh
from einmpi.runtime import transfer as messages
from einmpi.schedule.layout import Layout
from einmpi.version import __version__

pytestmark = pytest.mark.usefixtures("in_folder")


def save(array, file="o.h5", dataset="/Z", **options):
    DistArray.from_global(np.asarray(array), ALONE).to_hdf5(file, dataset, **options)


def write_tensor(file, tensor, file_format):
    """Write a tensor to a file of any format. All ranks call it."""
    with claimed({file: ""}, tensor.array.own_comm) as claim:
        outputs.write([outputs.OutputFile(file, "", file_format, [tensor])], dict, claim)


def found(file="o.h5", dataset="/Z"):
    with h5py.File(file) as handle:
        return handle[dataset][()]


def same(one, two):
    assert (one.shape, one.dtype) == (two.shape, two.dtype)
    np.testing.assert_array_equal(one, two)


# ---- every layout, dtype and shape --------------------------------------------------------------

SHAPES = ((), (1,), (0,), (7,), (701,), (13, 17), (40, 3), (3, 4, 5, 2), (2, 0, 3))


def some_array(shape, dtype, seed=1):
    numbers = np.random.default_rng(seed).normal(size=shape) * 20
    return (
        numbers + 1j * numbers[::-1] if shape and np.dtype(dtype).kind == "c" else numbers
    ).astype(dtype)


def write_on(ranks, mesh, cuts, array, way):
    """Lay an array out on some of the ranks, and write it."""

    def on_rank(comm):
        layout = Layout(Mesh(mesh), array.shape, cuts)
        way(DistArray.from_global(array, comm).redistribute(layout))

    run_threads(ranks, on_rank)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "ranks, mesh", [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (7, 6), (5, 2)]
)
def test_every_layout(ranks, mesh, monkeypatch):
    """Copies, idle ranks, ranks without elements, pieces of a few bytes: the same bytes in the
    file."""
    monkeypatch.setattr(fill, "WINDOW_BYTES", 300)
    choose = random.Random(ranks)
    for shape in SHAPES:
        ways = layouts(mesh, shape)
        for axes in choose.sample(ways, min(4, len(ways))):
            cuts = tuple(None if cut == R else cut for cut in axes)
            array = some_array(shape, choose.choice(numpy_dtypes()), choose.random() > 2)
            write_on(ranks, mesh, cuts, array, lambda made: made.to_hdf5("o.h5", "/g/Z"))
            same(found("o.h5", "/g/Z"), array)
    assert os.listdir() == ["o.h5"]


@pytest.mark.sampled(2, always=["float16", "int8"])
@pytest.mark.parametrize("dtype", numpy_dtypes())
def test_every_dtype_and_storage(dtype, monkeypatch):
    monkeypatch.setattr(fill, "WINDOW_BYTES", 400)
    array = some_array((23, 31), dtype)
    for chunks in (None, (5, 7), (23, 1), (30, 40)):
        for compression in (None, "gzip", "lzf"):
            write_on(
                3,
                3,
                (1,),
                array,
                partial(
                    DistArray.to_hdf5,
                    file="o.h5",
                    dataset="Z",
                    chunks=chunks,
                    compression=compression,
                ),
            )
            same(found(), array)
            with h5py.File("o.h5") as file:
                assert file["Z"].compression == compression
                if chunks:
                    assert file["Z"].chunks == tuple(map(min, chunks, (23, 31)))
                else:
                    assert (file["Z"].chunks is None) == (compression is None)
    write_on(
        3,
        3,
        (0,),
        array,
        lambda made: write_tensor("o.npy", outputs.tensor_of(made, ""), formats.NPY),
    )
    same(np.load("o.npy"), array)


def test_elements_that_cannot_be_compressed_or_are_all_the_same():
    noise = np.frombuffer(random.Random(1).randbytes(8 * 5000), np.int64).reshape(50, 100)
    for array in (noise, np.zeros_like(noise)):
        for compression in ("gzip", "lzf"):
            write_on(
                2,
                2,
                (0,),
                array,
                lambda made, how=compression: made.to_hdf5("o.h5", "Z", (16, 16), how),
            )
            same(found(), array)


def test_each_element_is_sent_at_most_once(monkeypatch):
    """Row blocks stay where they are but for the borders; copies are not sent at all."""
    monkeypatch.setattr(fill, "WINDOW_BYTES", 2**16)
    array = some_array((512, 512), "float64")
    received = {}
    for name, cuts in {
        "rows": (0, 0),
        "columns": (1, 1),
        "copies": (None, None),
        "both": (None, 1),
    }.items():

        def on_rank(comm, cuts=cuts):
            made = DistArray.from_global(array, comm).redistribute(
                Layout(Mesh(4), array.shape, cuts)
            )
            before = comm.received
            made.to_hdf5("o.h5", "Z")
            return comm.received - before

        received[name] = sum(run_threads(4, on_rank))
        same(found(), array)
    assert received["rows"] <= 3 * 2**16 / 2  # half a stripe at each border
    assert received["copies"] == 0
    assert 0.7 * array.nbytes <= received["columns"] <= array.nbytes
    assert received["both"] <= 0.5 * array.nbytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"chunks": (64, 64)}])
@pytest.mark.parametrize("mesh, cuts", [(1, ()), (3, (1,))])
def test_a_rank_needs_little_memory(monkeypatch, options, mesh, cuts):
    """Wherever the elements are: a window, a message out and one in, chunks as they are stored."""
    for module, name in ((fill, "WINDOW_BYTES"), (messages, "MESSAGE_BUFFER_BYTES")):
        monkeypatch.setattr(module, name, 2**18)
    whole = np.ones((2048, 2048))
    save(np.ones((2, 2)), "first.h5")  # what is imported for the first file does not count

    def on_rank(comm):
        made = DistArray.from_global(whole, comm).redistribute(
            Layout(Mesh(mesh), whole.shape, cuts)
        )
        comm.barrier()
        if comm.rank == 0:
            tracemalloc.start()
        comm.barrier()
        made.to_hdf5("o.h5", "Z", **options)
        comm.barrier()
        return tracemalloc.get_traced_memory()[1]

    try:
        peak = run_threads(3, on_rank)[0]
    finally:
        tracemalloc.stop()
    assert (
        peak < 3 * 12 * 2**18 < whole.nbytes / 3
    )  # about half of it where the ranks have their most in turn
    same(found(), whole)


def test_the_file_can_be_read_by_others():
    """HDF5's own tools, where they are installed."""
    save(np.arange(6.0).reshape(2, 3))
    program = shutil.which("h5dump")
    if program is None:
        pytest.skip("there is no h5dump")
    done = subprocess.run([program, "o.h5"], capture_output=True, text=True, check=True)
    assert "(1,0): 3, 4, 5" in done.stdout


# ---- what is in a file stays --------------------------------------------------------------------


def test_a_new_file_has_the_users_permissions():
    save(1.0)
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(os.stat("o.h5").st_mode) == 0o666 & ~mask
    assert os.listdir() == ["o.h5"]


def test_the_same_run_gives_the_same_file(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    contents = []
    for file in ("a.h5", "b.h5"):
        save(np.arange(100.0), file, "/g/Z")
        save(np.arange(100.0), file, "/g/C", chunks=(7,), compression="gzip")
        with open(file, "rb") as handle:
            contents.append(handle.read())
    assert contents[0] == contents[1]


def test_a_target_keeps_everything_else(tmp_path):
    with h5py.File("real.h5", "w", userblock_size=512) as file:
        file["kept"] = np.arange(5)
        file["kept"].attrs["unit"] = "m"
        file["soft"] = h5py.SoftLink("/kept")
        file["x"] = np.arange(100.0)
        file["x"].make_scale("x")
        file["Z"] = np.zeros((1000, 100))
        file["Z"].attrs["note"] = "mine"
        file["Z"].dims[1].attach_scale(file["x"])
        file.create_dataset("text", data="é")
    with open("real.h5", "r+b") as file:
        file.write(b"user block")
    os.chmod("real.h5", 0o640)
    os.symlink("real.h5", "o.h5")
    array = some_array((1000, 100), "float64")
    write_on(3, 3, (1,), array, lambda made: made.to_hdf5("o.h5", "/Z"))
    save(1.0, dataset="/new/Y")
    assert os.path.islink("o.h5") and stat.S_IMODE(os.stat("real.h5").st_mode) == 0o640
    assert (tmp_path / "real.h5").read_bytes().startswith(b"user block")
    with h5py.File("o.h5") as file:
        assert file["kept"][:].tolist() == [0, 1, 2, 3, 4] and file["kept"].attrs["unit"] == "m"
        assert file["soft"][0] == 0 and file["text"].asstr()[()] == "é"
        same(file["Z"][()], array)
        assert file["Z"].attrs["note"] == "mine" and file["Z"].dims[1][0][99] == 99
        assert file["new/Y"][()] == 1
    assert sorted(os.listdir(tmp_path)) == ["o.h5", "real.h5"]


@pytest.mark.parametrize(
    "options", [{}, {"chunks": (10, 100)}, {"chunks": (10, 100), "compression": "gzip"}]
)
def test_a_file_does_not_grow_run_after_run(options):
    save(np.arange(10), dataset="/kept")
    save(some_array((1000, 100), "float64"), **options)
    before = os.path.getsize("o.h5")
    for seed in range(4):
        array = some_array((1000, 100), "float64", seed)
        save(array, **options)
        same(found(), array)
    # Compressed chunks differ in size, and leave gaps.
    assert os.path.getsize("o.h5") <= before * (1.05 if "compression" in options else 1)
    assert found(dataset="/kept")[9] == 9


def test_the_same_run_gives_the_same_file_again(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    job = read(PROGRAM + A + '[outputs]\nZ = "o.h5:/Z"\n')
    files = []
    for _ in range(3):
        stored(job, {"Z": np.ones(4)})
        with open("o.h5", "rb") as file:
            files.append(file.read())
    assert files[0] == files[1] == files[2]
    stored(
        read(PROGRAM.replace("+ 1", "+ 2") + A + '[outputs]\nZ = "o.h5:/Z"\n'), {"Z": np.ones(4)}
    )
    with h5py.File("o.h5") as file:
        assert file["Z"].attrs["einmpi_program"] == "Z[i] = A[i] + 2"


def test_space_is_used_again_for_another_shape():
    save(np.arange(10), dataset="/kept")
    save(np.ones((1000, 100)))
    before = os.path.getsize("o.h5")
    for columns in (99, 100, 98, 100):
        save(np.ones((1000, columns)))
        assert os.path.getsize("o.h5") < before + 10_000
    assert found(dataset="/kept")[9] == 9


OTHERS = {
    "chunked": lambda file: file.create_dataset("Z", data=np.zeros(300), chunks=(10,)),
    "growing": lambda file: file.create_dataset("Z", data=np.zeros(300), maxshape=(None,)),
    "big-endian": lambda file: file.create_dataset("Z", data=np.zeros(300, ">f8")),
    "numbers of 40 bits": lambda file: h5py.h5d.create(
        file.id, b"Z", forty_bits(), h5py.h5s.create_simple((300,))
    ).write(h5py.h5s.ALL, h5py.h5s.ALL, np.zeros(300)),
    "compact": lambda file: h5py.h5d.create(
        file.id, b"Z", h5py.h5t.NATIVE_DOUBLE, h5py.h5s.create_simple((300,)), compact()
    ),
    "external": lambda file: file.create_dataset(
        "Z", (300,), "f8", external=[("raw.bin", 0, 2400)]
    ),
    "never written": lambda file: file.create_dataset("Z", (300,), "f8"),
    "string": lambda file: file.create_dataset("Z", data="text"),
    "a broken link": lambda file: file.__setitem__("Z", h5py.SoftLink("/nowhere")),
    "a link": lambda file: (
        file.create_dataset("W", data=np.zeros(300)),
        file.__setitem__("Z", h5py.SoftLink("/W")),
    ),
    "a second name": lambda file: (
        file.create_dataset("W", data=np.zeros(300)),
        file.__setitem__("Z", file["W"]),
    ),
    "in another file": lambda file: file.__setitem__("Z", h5py.ExternalLink("other.h5", "/W")),
}


def forty_bits():
    """A float64 for h5py, and of its size."""
    stored = h5py.h5t.IEEE_F64LE.copy()
    stored.set_fields(39, 28, 11, 0, 28)
    stored.set_precision(40)
    return stored


def compact():
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.COMPACT)
    return properties


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_stored_otherwise_is_replaced(name):
    """And what it links to, or what links to it, keeps its values."""
    with h5py.File("other.h5", "w") as file:
        file["W"] = np.zeros(300)
    with h5py.File("o.h5", "w") as file:
        OTHERS[name](file)
    save(np.arange(300.0))
    same(found(), np.arange(300.0))
    assert found("other.h5", "W").sum() == 0
    with h5py.File("o.h5") as file:
        assert "W" not in file or file["W"][:].sum() == 0


# ---- what cannot be written ---------------------------------------------------------------------


def test_targets_that_cannot_be_written(tmp_path):
    with h5py.File("o.h5", "w") as file:
        file["A"] = np.zeros(3)
        file["g/B"] = np.zeros(3)
        file["there"] = h5py.ExternalLink("other.h5", "/")
        file["broken"] = h5py.SoftLink("/nowhere")
    with h5py.File("other.h5", "w") as file:
        file["A"] = np.zeros(3)
    (tmp_path / "text.h5").write_text("hello")
    (tmp_path / "folder.h5").mkdir()
    save(1.0, "kept.h5")
    os.chmod("kept.h5", 0o444)
    expected = {
        ("no/o.h5", "/Z"): "there is no folder for no/o.h5; expected a folder that exists",
        (
            "text.h5",
            "/Z",
        ): "text.h5 cannot be opened as HDF5: file signature not found; expected an HDF5 file",
        ("folder.h5", "/Z"): "folder.h5 is not a file; expected an HDF5 file",
        ("o.h5", "/g"): "/g in o.h5 is a group; expected a dataset",
        ("o.h5", "/A/Z/Y"): "/A in o.h5 is not a group; expected a group to hold /A/Z/Y",
        (
            "o.h5",
            "/there/Z",
        ): "/there in o.h5 leads to another file; expected a group of o.h5 to hold /there/Z",
        (
            "o.h5",
            "/broken/Z",
        ): (
            "/broken in o.h5 is a link whose target does not exist; "
            "expected a group to hold /broken/Z"
        ),
        (
            "kept.h5",
            "/Z",
        ): "there is no permission to write kept.h5; expected a writable file and folder",
    }
    before = sorted(os.listdir(tmp_path))
    for (file, dataset), message in expected.items():
        assert error(save, 1.0, file, dataset) == f"{file}: {message}"
    assert sorted(os.listdir(tmp_path)) == before


def test_a_file_that_is_no_longer_hdf5_is_an_input_error():
    """The check before a run has passed; the InputError reaches all ranks as it is."""

    def on_rank(comm):
        made = DistArray.from_global(np.ones(4), comm)
        if comm.rank == 0:
            with open("o.h5", "w") as file:
                file.write("text")
        comm.barrier()
        with pytest.raises(InputError) as caught:
            write_tensor("o.h5", outputs.tensor_of(made, "/Z"), formats.HDF5)
        return str(caught.value)

    end = "o.h5 cannot be opened as HDF5: file signature not found; expected an HDF5 file"
    assert all(message.endswith(end) for message in run_threads(2, on_rank))


def test_wrong_arguments_of_to_hdf5():
    made = DistArray.from_global(np.zeros((2, 3)), ALONE)
    assert (
        error(made.to_hdf5, "o.h5", "/")
        == "to_hdf5: '/' is not the path of a dataset; expected a path such as /Z or /group/Z"
    )
    assert error(made.to_hdf5, "o.h5", "Z", None, "zip") == (
        "to_hdf5: unknown compression 'zip'; expected one of gzip, lzf (did you mean gzip?)"
    )
    for chunks in ((2,), (2, 0), (2, 1.5), 7):
        assert (
            error(made.to_hdf5, "o.h5", "Z", chunks)
            == f"to_hdf5: chunks are {chunks!r}; expected 2 positive integers"
        )
    assert os.listdir() == []


class Broken:
    """Make a function of os fail on some call of some rank; no other rank hangs."""

    def __init__(self, monkeypatch, name, rank, call, number=errno.ENOSPC):
        self.function, self.rank, self.left, self.number = (
            getattr(os, name),
            f"rank {rank}",
            call,
            number,
        )
        monkeypatch.setattr(os, name, self)

    def __call__(self, *arguments, **options):
        if threading.current_thread().name == self.rank:
            self.left -= 1
            if self.left < 0:
                raise OSError(self.number, os.strerror(self.number))
        return self.function(*arguments, **options)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize(
    "name, rank, call",
    [
        ("pwrite", 0, 0),
        ("pwrite", 1, 2),
        ("pwrite", 2, 1),
        ("fsync", 1, 0),
        ("fsync", 0, 0),
        ("replace", 0, 0),
    ],
)
def test_a_failing_rank_changes_nothing(monkeypatch, exists, name, rank, call):
    monkeypatch.setattr(fill, "WINDOW_BYTES", 2**12)
    if exists:
        save(np.zeros(3))
        save(np.arange(2.0), dataset="/kept")
        with open("o.h5", "rb") as file:
            before = file.read()
    array = some_array((64, 256), "float64")
    with pytest.MonkeyPatch.context() as broken:
        Broken(broken, name, rank, call)
        caught = error(
            write_on, 3, 3, (1,), array, lambda made: made.to_hdf5("o.h5", "Z"), kind=EinmpiError
        )
    now = "o.h5 is unchanged" if exists else "nothing was written"
    assert caught == f"o.h5: o.h5 cannot be written: No space left on device; {now}"
    assert os.listdir() == (["o.h5"] if exists else [])
    assert not exists or open("o.h5", "rb").read() == before  # noqa: SIM115
    write_on(3, 3, (1,), array, lambda made: made.to_hdf5("o.h5", "Z"))
    same(found(), array)


def test_a_disk_that_becomes_read_only(monkeypatch):
    """The draft cannot even be removed; the line says why the file was not written."""
    save(np.zeros(3))

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with pytest.MonkeyPatch.context() as read_only:
        for name in ("pwrite", "replace", "remove"):
            read_only.setattr(os, name, refuse)
        caught = error(save, np.ones(3), kind=EinmpiError)
    assert caught == "o.h5: o.h5 cannot be written: Read-only file system; o.h5 is unchanged"
    assert found().sum() == 0
    save(np.ones(3))
    assert os.listdir() == ["o.h5"] and found().sum() == 3


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_cannot_make_its_chunks(monkeypatch, rank):
    made = hdf5_writing.encode

    def encode(*arguments):
        if threading.current_thread().name == f"rank {rank}":
            raise MemoryError
        return made(*arguments)

    monkeypatch.setattr(hdf5_writing, "encode", encode)
    array = some_array((64, 64), "float32")
    caught = error(
        write_on,
        3,
        3,
        (0,),
        array,
        lambda made: made.to_hdf5("o.h5", "Z", (8, 8)),
        kind=EinmpiError,
    )
    assert caught == "o.h5: o.h5 cannot be written: MemoryError; nothing was written"
    assert os.listdir() == []


def test_a_folder_that_cannot_be_flushed(monkeypatch):
    """The file has its new name by then, and some file systems do not flush folders."""
    Broken(monkeypatch, "fsync", 0, 1, errno.EINVAL)
    write_on(2, 2, (0,), np.arange(4.0), lambda made: made.to_hdf5("o.h5", "Z"))
    same(found(), np.arange(4.0))


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENOSPC])
def test_a_disk_that_fails_after_the_rename(monkeypatch, number):
    """The new name is in memory only: a run that said that all is well might lose its result."""
    save(np.zeros(3))
    with pytest.MonkeyPatch.context() as broken:
        Broken(broken, "fsync", 0, 1, number)
        caught = error(
            write_on,
            2,
            2,
            (0,),
            np.ones(4),
            lambda made: made.to_hdf5("o.h5", "Z"),
            kind=EinmpiError,
        )
    reason = os.strerror(number)
    assert (
        caught == f"o.h5: o.h5 cannot be written: {reason}; o.h5 may be old again after a restart"
    )
    assert os.listdir() == ["o.h5"]


def test_an_interrupt_changes_nothing(monkeypatch):
    save(np.zeros(3))

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        save(np.ones(3))
    assert os.listdir() == ["o.h5"] and found().sum() == 0


# ---- one run a file -----------------------------------------------------------------------------


def test_what_a_killed_run_left_is_removed():
    leftover, lock = f".o.h5.{'0f' * 8}.part", ".o.h5.lock"
    others = [f".o.h5.{'0g' * 8}.part", f".p.h5.{'0f' * 8}.part", "o.h5.part"]
    for name in (leftover, lock, *others):
        with open(name, "w") as file:
            file.write("something")
    save(1.0)
    assert sorted(os.listdir()) == sorted([*others, "o.h5"])


def test_two_runs_at_once():
    """The second one is refused at once; what the first has written so far stays."""
    busy = "x: o.h5 cannot be written: another run is writing it"
    with claimed({"o.h5": "x"}, ALONE):
        draft = f".o.h5.{'0f' * 8}.part"
        open(draft, "w").close()
        code = (
            "from einmpi.comm.base import ALONE; from einmpi.files.claims import claimed\n"
            "with claimed({'o.h5': 'x'}, ALONE): pass"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stderr.splitlines()[-1].endswith(busy)

        def nothing():
            with claimed({"./o.h5": "x"}, ALONE):
                pass

        assert error(nothing, kind=EinmpiError) == busy.replace("o.h5", "./o.h5")
        assert os.path.exists(draft)
    os.remove(draft)
    assert os.listdir() == []
    save(1.0)


def test_many_runs_at_once_never_mix():
    """Each writes, or is refused; the file is always one of theirs."""
    arrays = [np.full(20_000, float(number)) for number in range(6)]
    refused = []

    def run(number):
        for _ in range(8):
            try:
                save(arrays[number])
            except EinmpiError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    values = found()
    assert (values == values[0]).all()
    assert set(refused) <= {"o.h5: o.h5 cannot be written: another run is writing it"}
    assert os.listdir() == ["o.h5"]


def test_a_file_system_without_locks(monkeypatch):
    def no_locks(*_):
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr("fcntl.flock", no_locks)
    left = f".o.h5.{'0f' * 8}.part"  # perhaps of a run that is going on: nobody knows
    open(left, "w").close()
    save(2.0)
    assert found() == 2 and sorted(os.listdir()) == [left, "o.h5"]


# ---- a whole job --------------------------------------------------------------------------------

JOB = """program = '''
Z[i,k] = sum(A[i,j] * B[j,k])
n = sum(Z[i,k])
E[i,l] = A[i,0] * N[l]
'''
[inputs]
A = { shape = [4, 3], random = "arange" }
B = "in.h5:/B"
N = { shape = [0], random = "ones" }
[outputs]
Z.file = "out.h5"
Z.dataset = "/g/Z"
Z.chunks = [2, 100]
Z.compression = "gzip"
Z.dtype = "float32"
n = { file = "out.h5", dataset = "/n", compression = "lzf" }
E = { file = "other.h5", dataset = "E", compression = "lzf", chunks = [4, 1] }
"""


def stored(job, results):
    job_outputs.check_targets(job)
    arrays = {name: DistArray.from_global(array, ALONE) for name, array in results.items()}
    with job_outputs.claim_outputs(job, ALONE) as claim:
        job_outputs.store(job, "digest", arrays, claim)


def test_a_whole_job():
    with h5py.File("in.h5", "w") as file:
        file["B"] = np.arange(6.0).reshape(3, 2)
    job = read(JOB, describe)
    assert job.graph["Z"].bound == (4, 2)
    values = {spec.name: load_array(spec, spec.shape, spec.dtype) for spec in job.inputs}
    z = values["A"] @ values["B"]
    stored(job, {"Z": z, "n": z.sum(), "E": np.zeros((4, 0))})
    with h5py.File("out.h5") as file:
        assert (file["g/Z"][:] == z).all() and file["g/Z"].dtype == np.float32
        assert (file["g/Z"].chunks, file["g/Z"].compression) == ((2, 2), "gzip")
        assert file["n"][()] == z.sum()
        wanted = {
            "einmpi_version": __version__,
            "einmpi_program": job.source.text,
            "einmpi_plan": "digest",
            "einmpi_dtype": "float64",
        }
        assert wanted.items() <= dict(file["n"].attrs).items()
    with h5py.File("other.h5") as file:
        assert file["E"].shape == (4, 0)
    assert sorted(os.listdir()) == ["in.h5", "job.toml", "other.h5", "out.h5"]


def test_npy_outputs():
    job = read(
        'program = "Z[i:3,j:2] = i + 2.5*j; n = sum(Z[i,j])"\n'
        'outputs.Z = "z.npy"\noutputs.n = { file = "n.npy", dtype = "float32" }\n'
    )
    z = np.arange(3.0)[:, None] + 2.5 * np.arange(2)
    np.save("z.npy", np.zeros(1000))
    os.chmod("z.npy", 0o600)
    stored(job, {"Z": z, "n": z.sum()})
    same(np.load("z.npy"), z)
    same(np.load("n.npy"), np.float32(z.sum()))
    assert stat.S_IMODE(os.stat("z.npy").st_mode) == 0o600
    os.remove("z.npy")
    os.mkdir("z.npy")
    assert (
        error(job_outputs.check_targets, job)
        == "job.toml:2:9: z.npy is not a regular file; expected a file to replace"
    )


def test_all_files_or_none(monkeypatch):
    job = read(
        PROGRAM.replace('"\n', '; Y[i] = Z[i]"\n') + A + '[outputs]\nZ = "z.npy"\nY = "y.h5:/Y"\n'
    )
    lay_out = hdf5_writing.lay_out

    def full(*arguments):
        lay_out(*arguments)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(hdf5_writing, "lay_out", full)
    assert error(stored, job, {"Z": np.ones(4), "Y": np.ones(4)}, kind=EinmpiError) == (
        "job.toml:6:1: y.h5 cannot be written: No space left on device; nothing was written"
    )
    assert os.listdir() == ["job.toml"]


def test_a_long_program_is_no_reason_to_lose_a_result():
    job = read(
        "program = '''\nZ[i:4] = 1\n" + "# a remark\n" * 10_000 + "'''\noutputs.Z = 'o.h5:/Z'\n"
    )
    stored(job, {"Z": np.zeros(4)})
    with h5py.File("o.h5") as file:
        assert file["Z"].attrs["einmpi_program"] == job.source.text[:60_000]


def test_a_number_too_large_for_the_stored_dtype():
    job = read(
        'program = "Z[i:2] = 1e300*(i - 1)"\n'
        'outputs.Z = { file = "o.h5", dataset = "/Z", dtype = "float16" }\n'
    )
    stored(job, {"Z": np.array([-1e300, 0])})
    assert found().tolist() == [-np.inf, 0]


def test_targets_are_checked_before_the_run():
    inputs = '[inputs]\nA = { shape = [4], random = "ones" }\n[outputs]\n'
    job = read(PROGRAM + inputs + 'Z = "no/o.h5:/Z"\n')
    assert error(job_outputs.check_targets, job) == (
        "job.toml:5:1: there is no folder for no/o.h5; expected a folder that exists"
    )
    os.symlink("o.h5", "link.h5")
    job = read(
        PROGRAM.replace('"\n', '; Y[i] = Z[i]"\n') + inputs + 'Z = "o.h5:/Z"\nY = "link.h5:/Z"\n'
    )
    assert error(job_outputs.check_targets, job) == (
        "job.toml:6:1: different paths of outputs Z and Y lead to the same file; expected "
        "one path for each file"
    )


@pytest.mark.parametrize(
    "one, two, fine",
    [
        ("/g/Z", "/soft/Z", False),
        ("/hard/Z", "/g/Z", False),
        ("/Z", "/root/Z", False),
        ("/g/new/Z", "/soft/new", False),
        ("/g/new", "/soft/new/Z", False),
        ("/g/Z", "/soft/Y", True),
        ("/Z", "/soft/Z", True),
    ],
)
def test_two_outputs_are_not_one_dataset_by_a_link(one, two, fine):
    with h5py.File("o.h5", "w") as file:
        file["hard"] = file.create_group("g")
        file["soft"], file["root"] = h5py.SoftLink("/g"), h5py.SoftLink("/")
    job = read(
        'program = "Z[i:4] = i; Y[i:400] = i"\n[outputs]\n'
        + f'Z = "o.h5:{one}"\nY = "o.h5:{two}"\n'
    )
    if fine:
        job_outputs.check_targets(job)
    else:
        assert error(job_outputs.check_targets, job) == (
            f"job.toml:4:1: a link makes {two} in o.h5 the same as another output; expected "
            "a separate dataset for each output"
        )


# ---- processes ----------------------------------------------------------------------------------

BIG_JOB = 'program = "Z[i,k] = A[i,k] + 1"\ninputs.A = { shape = [512, 512], random = "uniform" }\n'
# A limit on the size of files is what a full disk looks like from inside, and needs no disk. Of a
# module that is imported then, Python would leave a part of the bytecode, and others fail by that.
LIMITED = """
import resource, signal, sys
from einmpi.comm.mpi_library import world
import einmpi
from einmpi.cli.main import main
if world().rank == {rank}:
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most}))
sys.exit(main(["job.toml"]))
"""


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
@pytest.mark.parametrize(
    "rank, most, options",
    [
        (1, 2**20, ""),
        (0, 1000, ""),
        (0, 2**21, ""),
        (0, 2**18, ', chunks = [32, 32], compression = "gzip"'),
    ],
)
def test_a_full_disk(rank, most, options, tmp_path):
    """Whoever meets it, and when: one line, and the file is unchanged."""
    (tmp_path / "job.toml").write_text(
        BIG_JOB + f'outputs.Z = {{ file = "o.h5", dataset = "/Z"{options} }}\n'
    )
    save(np.zeros(3))
    before = (tmp_path / "o.h5").read_bytes()
    done = run_mpi(3, LIMITED.format(rank=rank, most=most), cwd=tmp_path)
    assert done.returncode != 0 and done.stdout == ""
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("job.toml")]
    what = "job.toml:3:9: o.h5 cannot be written: File too large; o.h5 is unchanged"
    assert re.fullmatch(rf"{what}( \(on rank .\))?", line)
    assert (tmp_path / "o.h5").read_bytes() == before
    assert sorted(os.listdir()) == ["job.toml", "o.h5"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("old", [True, False])
def test_a_disk_without_room(ranks, old, tmp_path):
    """Where HDF5 itself meets the end of the disk, the library may end the process."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=64k tmpfs {disk} 2> {os.devnull}"):
        pytest.skip("only root makes small disks")
    try:
        (tmp_path / "job.toml").write_text(
            'program = "Z[i,j] = A[i,j] * 2"\n'
            'inputs.A = { random = "normal", shape = [300, 300] }\n'
            'outputs.Z = "disk/o.h5:/Z"\n'
        )
        if old:
            save(np.zeros(3), disk / "o.h5")
        done = run_mpi(ranks, ["-m", "einmpi", "job.toml"], cwd=tmp_path)
        state = "disk/o.h5 is unchanged" if old else "nothing was written"
        line = f"job.toml:3:9: disk/o.h5 cannot be written: No space left on device; {state}"
        assert done.returncode == 1
        assert line in done.stderr.splitlines()
        assert os.listdir(disk) == ["o.h5"] * old
    finally:
        os.system(f"umount {disk}")


KILLED = """
import os, signal, sys
from einmpi.compiled import outputs as job_outputs
from einmpi.files import writing as fill
from einmpi.comm.mpi_library import world
from einmpi.cli.main import main
def killed(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
if world().rank == {rank}:
    fill.write_at = killed
sys.exit(main(["job.toml"]))
"""


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_while_it_writes(rank, tmp_path):
    """The draft may stay; the next run removes it."""
    (tmp_path / "job.toml").write_text(BIG_JOB + 'outputs.Z = "o.h5:/Z"\n')
    save(np.zeros(3))
    before = (tmp_path / "o.h5").read_bytes()
    done = run_mpi(2, KILLED.format(rank=rank), cwd=tmp_path)
    assert done.returncode != 0
    assert (tmp_path / "o.h5").read_bytes() == before
    done = run_mpi(2, ["-m", "einmpi", "job.toml", "--quiet"], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert found().shape == (512, 512)
    assert sorted(os.listdir()) == ["job.toml", "o.h5"]


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
def test_a_run_while_another_one_writes(tmp_path):
    (tmp_path / "job.toml").write_text(BIG_JOB + 'outputs.Z = "o.h5:/Z"\n')
    with claimed({"o.h5": ""}, ALONE):
        done = run_mpi(2, ["-m", "einmpi", "job.toml"], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr.splitlines()[0]
        == "job.toml:3:9: o.h5 cannot be written: another run is writing it"
    )
    assert os.listdir() == ["job.toml"]
