"""zarr stores in and out, compared with the package zarr."""

import gzip
import json
import os
import random
import shutil
import sys
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import einmpi_here
from mpi_helpers import needs_mpirun, run_mpi
from numcodecs import Blosc, Zstd
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec

import einmpi
from einmpi.arrays.dist_array import DistArray
from einmpi.comm.threads import run_threads
from einmpi.files import writing as fill
from einmpi.files.formats import ZARR
from einmpi.graph.dtypes import numpy_dtypes

pytestmark = pytest.mark.usefixtures("in_folder")

# The dtypes that the package zarr has too.
DTYPES = [name for name in numpy_dtypes() if name != "bfloat16"]
SHAPES = ((), (1,), (0,), (7,), (13, 17), (2, 0, 3), (3, 4, 5))


def some_array(shape, dtype="float64", seed=1):
    numbers = np.random.default_rng(seed).normal(size=shape) * 20
    if np.dtype(dtype).kind == "c":
        return (numbers + 1j * numbers[::-1] if shape else numbers + 1j).astype(dtype)
    if np.dtype(dtype).kind == "u":
        return np.abs(numbers).astype(dtype)
    return numbers.astype(dtype)


def same(one, two):
    one, two = np.asarray(one), np.asarray(two)
    assert (one.shape, one.dtype) == (two.shape, two.dtype)
    np.testing.assert_array_equal(one, two)


def read(array="/", file="x.zarr", **options):
    return einmpi.open_dataset(file, array, **options).gather()


def write(array, name="/", file="x.zarr", **options):
    DistArray.from_global(np.asarray(array)).to_zarr(file, name, **options)


def metadata(array="", file="x.zarr"):
    with open(os.path.join(file, array, "zarr.json")) as opened:
        return json.load(opened)


def set_metadata(array="", file="x.zarr", **changes):
    content = metadata(array, file)
    content.update(changes)
    with open(os.path.join(file, array, "zarr.json"), "w") as opened:
        json.dump(content, opened)


# ---- reading ------------------------------------------------------------------------------------


def test_every_dtype_and_shape_is_read():
    arrays = {dtype: some_array((4, 7), dtype) for dtype in DTYPES}
    arrays |= {f"{len(shape)}-{sum(shape)}": some_array(shape) for shape in SHAPES}
    zarr.open_group("x.zarr", mode="w")
    for name, array in arrays.items():
        chunks = tuple(max(1, -(-extent // 2)) for extent in array.shape)
        zarr.create_array(f"x.zarr/{name}", data=array, chunks=chunks)
    for name, array in arrays.items():
        same(read(f"/{name}"), array)


@pytest.mark.parametrize(
    ("filters", "serializer", "compressors"),
    [
        ([], BytesCodec(endian="big"), []),
        ([TransposeCodec(order=(2, 0, 1))], BytesCodec(), [GzipCodec()]),
        ([TransposeCodec(order=(2, 1, 0))], BytesCodec(endian="big"), [ZstdCodec(checksum=True)]),
        ([], BytesCodec(), [BloscCodec(cname="lz4", shuffle="bitshuffle"), Crc32cCodec()]),
        ([], BytesCodec(), [Crc32cCodec(), ZstdCodec(), GzipCodec()]),
    ],
)
def test_codecs_are_read(filters, serializer, compressors):
    array = some_array((9, 8, 7))
    zarr.create_array(
        "x.zarr",
        data=array,
        chunks=(4, 4, 4),
        filters=filters,
        serializer=serializer,
        compressors=compressors,
    )
    same(read(), array)


@pytest.mark.parametrize(
    "encoding",
    [{"name": "v2", "separator": "."}, {"name": "v2", "separator": "/"}, {"name": "default"}],
)
@pytest.mark.parametrize("shape", [(), (5, 6)])
def test_names_of_chunks(encoding, shape):
    array = some_array(shape)
    chunks = tuple(3 for _ in shape)
    zarr.create_array("x.zarr", data=array, chunks=chunks, chunk_key_encoding=encoding)
    same(read(), array)


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [("float64", np.nan), ("float32", -np.inf), ("int32", -7), ("bool", True), ("complex64", 1j)],
)
def test_a_missing_chunk_has_the_fill_value(dtype, fill):
    stored = zarr.create_array("x.zarr", shape=(5, 6), dtype=dtype, chunks=(2, 6), fill_value=fill)
    stored[2:4] = 1
    wanted = np.full((5, 6), fill, dtype)
    wanted[2:4] = 1
    same(read(), wanted)


def test_a_fill_value_in_hexadecimal():
    zarr.create_array("x.zarr", shape=(3,), dtype="float32", chunks=(3,))
    set_metadata(fill_value="0x40200000")
    assert read().tolist() == [2.5] * 3


def test_parts_of_an_array():
    array = some_array((40, 30))
    zarr.create_array("x.zarr", data=array, chunks=(7, 9))
    for index in (np.s_[3:20], np.s_[::3, 5:29:4], np.s_[-1, ::11], np.s_[8:8], np.s_[2, 3]):
        same(read(index=index if isinstance(index, tuple) else (index,)), array[index])


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_any_box_of_any_chunks(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    chunks = tuple(data.draw(st.integers(1, 10)) for _ in shape)
    index = []
    for extent in shape:
        start = data.draw(st.integers(0, extent))
        index.append(
            slice(start, data.draw(st.integers(start, extent)), data.draw(st.integers(1, 4)))
        )
    array = some_array(shape)
    shutil.rmtree("any.zarr", ignore_errors=True)
    zarr.create_array("any.zarr", data=array, chunks=chunks)
    same(read(file="any.zarr", index=tuple(index)), array[tuple(index)])


# ---- writing ------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("compression", [None, "gzip", "zstd", "blosc"])
def test_every_dtype_and_shape_is_written(compression, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    arrays = [some_array((4, 7), dtype) for dtype in DTYPES]
    arrays += [some_array(shape) for shape in SHAPES]
    for array in arrays:
        write(array, "/g/Z", compression=compression)
        same(zarr.open_array("x.zarr/g/Z")[()], array)
        same(read("/g/Z"), array)


@given(st.data())
@settings(max_examples=12, deadline=None)
def test_ranks_write_each_chunk_once(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    chunks = tuple(data.draw(st.integers(1, 14)) for _ in shape)
    ranks = data.draw(st.integers(1, 5))
    array = some_array(shape)
    shutil.rmtree("any.zarr", ignore_errors=True)

    def on_rank(comm):
        DistArray.from_global(array, comm).to_zarr("any.zarr", "/Z", chunks)

    run_threads(ranks, on_rank)
    stored = zarr.open_array("any.zarr/Z")
    same(stored[()], array)
    assert stored.nchunks_initialized == stored.nchunks
    assert stored.chunks == tuple(map(min, chunks, shape))


def test_many_rounds_of_chunks(monkeypatch):
    monkeypatch.setattr(fill, "WINDOW_BYTES", 200)
    array = some_array((23, 19))

    def on_rank(comm):
        DistArray.from_global(array, comm).to_zarr("x.zarr", "/Z", (5, 4), "gzip")

    run_threads(3, on_rank)
    same(zarr.open_array("x.zarr/Z")[()], array)


def test_new_chunks_are_of_a_moderate_size():
    write(np.zeros((3000, 2500)))
    stored = zarr.open_array("x.zarr")
    assert stored.chunks == (750, 1250)
    write(np.zeros((30, 25)))
    assert zarr.open_array("x.zarr").chunks == (30, 25)


def test_a_store_keeps_everything_else():
    group = zarr.open_group("x.zarr", mode="w", attributes={"who": "me"})
    kept = some_array((8, 8))
    group.create_array("kept", data=kept, chunks=(4, 4), attributes={"unit": "m"})
    group.create_array("sub/Z", data=np.zeros(5), chunks=(5,), compressors=None)
    group["sub/Z"].attrs["note"] = "mine"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this is not part of the format
        zarr.consolidate_metadata("x.zarr")
    os.symlink("kept", "x.zarr/link")
    os.symlink("x.zarr", "there.zarr")
    os.chmod("x.zarr", 0o750)
    inode = os.stat("x.zarr/kept/c/1/1").st_ino
    write(np.arange(5.0), "/sub/Z", "there.zarr")
    write(np.arange(3.0), "/new/W", "there.zarr")
    group = zarr.open_group("x.zarr", mode="r")
    assert dict(group.attrs) == {"who": "me"} and group["kept"].attrs["unit"] == "m"
    same(group["kept"][()], kept)
    assert os.stat("x.zarr/kept/c/1/1").st_ino == inode  # not copied
    assert group["sub/Z"][()].tolist() == [0, 1, 2, 3, 4]
    assert group["sub/Z"].attrs["note"] == "mine"  # stored as before, so attributes stay
    assert group["new/W"][()].tolist() == [0, 1, 2]
    assert os.path.islink("there.zarr") and os.readlink("x.zarr/link") == "kept"
    assert os.stat("x.zarr").st_mode & 0o777 == 0o750
    write(np.arange(6.0), "/sub/Z")
    assert "note" not in zarr.open_array("x.zarr/sub/Z").attrs
    assert sorted(os.listdir()) == ["there.zarr", "x.zarr"]


JOB = """
program = '''
Z[i,k] = sum(A[i,j] * B[j,k])
n = sum(Z[i,k])
'''
[inputs]
A = { file = "in.zarr", dataset = "a", rows = "1:5", columns = "::2" }
B = "root.zarr"
[outputs]
Z.file = "out.zarr"
Z.dataset = "/g/Z"
Z.chunks = [3, 2]
Z.compression = "zstd"
Z.dtype = "float32"
n = "out.zarr:n"
"""


def job_inputs():
    a = some_array((7, 6))
    b = some_array((3, 5), seed=2)
    zarr.open_group("in.zarr", mode="w").create_array("a", data=a, chunks=(2, 4))
    zarr.save("root.zarr", b)
    with open("job.toml", "w") as file:
        file.write(JOB)
    return a[1:5, ::2] @ b


def check_outputs(wanted):
    group = zarr.open_group("out.zarr", mode="r")
    np.testing.assert_allclose(group["g/Z"][()], wanted.astype("float32"), rtol=1e-6)
    np.testing.assert_allclose(group["n"][()], wanted.sum(), rtol=1e-12)
    assert group["g/Z"].chunks == (3, 2) and group["g/Z"].dtype == np.float32
    assert group["g/Z"].metadata.dimension_names == ("i", "k")
    return group


def test_a_job_with_stores(tmp_path):
    wanted = job_inputs()
    assert einmpi_here(tmp_path, ["check", "job.toml"]).returncode == 0
    done = einmpi_here(tmp_path, ["job.toml"])
    assert done.returncode == 0 and "→ out.zarr:/g/Z" in done.stdout, done.stderr
    attributes = check_outputs(wanted)["g/Z"].attrs
    assert attributes["einmpi_tensor"] == "Z" and attributes["einmpi_ranks"] == "1"
    inputs = json.loads(attributes["einmpi_inputs"])
    assert inputs["A"]["dataset"] == "/a" and inputs["A"]["slice"] == "1:5, ::2"
    assert len(inputs["B"]["header_sha256"]) == 64
    assert einmpi_here(tmp_path, ["verify", "job.toml"]).returncode == 0


def test_checkpoints_of_a_job_with_stores(tmp_path):
    wanted = job_inputs()
    words = ["job.toml", "--checkpoint", "saved", "--every", "0"]
    assert einmpi_here(tmp_path, words).returncode == 0
    done = einmpi_here(tmp_path, [*words, "--resume"])
    assert done.returncode == 0, done.stderr
    check_outputs(wanted)


@pytest.mark.slow
@needs_mpirun
@pytest.mark.mpirun
def test_a_job_with_stores_on_ranks(tmp_path):
    wanted = job_inputs()
    done = run_mpi(3, ["-m", "einmpi", "job.toml", "--quiet"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert check_outputs(wanted)["n"].attrs["einmpi_ranks"] == "3"
    assert sorted(os.listdir()) == ["in.zarr", "job.toml", "out.zarr", "root.zarr"]


def test_a_store_that_does_not_exist_yet(tmp_path):
    with open("job.toml", "w") as file:
        file.write(
            'program = "Z[i] = sum(X[i,j])"\ninputs.X = { file = "later.zarr", dataset = "x", '
            'shape = [40, 3], dtype = "float32" }\n'
        )
    assert einmpi_here(tmp_path, ["plan", "job.toml", "-n", "4"]).returncode == 0
    done = einmpi_here(tmp_path, ["job.toml"])
    assert done.returncode == 2
    assert done.stderr == (
        "job.toml:2:8: there is no folder later.zarr; expected a zarr store, which is a folder; "
        "paths are relative to the job file\n"
    )
    write(np.ones((40, 3), "float32"), "/x", "later.zarr")
    assert einmpi_here(tmp_path, ["job.toml"]).returncode == 0


def test_a_new_job_for_a_store(tmp_path):
    job_inputs()
    os.remove("job.toml")
    write(np.ones(3), "/deep/er/b", "in.zarr")
    done = einmpi_here(tmp_path, ["new", "job.toml", "--from", "in.zarr"])
    assert done.returncode == 0, done.stderr
    assert ZARR.list_names("in.zarr", "", 9) == ["/a", "/deep/er/b"]
    assert einmpi_here(tmp_path, ["job.toml"]).returncode == 0
    done = einmpi_here(tmp_path, ["new", "one.toml", "--from", "root.zarr"])
    assert done.returncode == 0 and einmpi_here(tmp_path, ["one.toml"]).returncode == 0


# ---- what is refused ----------------------------------------------------------------------------


def refusal(folder, text):
    """Return what a run of a job with this input or output says: one line, with status 2."""
    with open("job.toml", "w") as file:
        file.write(text)
    done = einmpi_here(folder, ["job.toml"])
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("job.toml:2:")
    return done.stderr


SHARDS = [{"name": "sharding_indexed", "configuration": {}}]
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
REFUSED = {
    "is not JSON": lambda: open("x.zarr/a/zarr.json", "w").close(),
    "there is no array /a in x.zarr; expected /b": lambda: os.remove("x.zarr/a/zarr.json"),
    "its zarr_format is 2": lambda: set_metadata("a", zarr_format=2),
    "its node_type is 'tree'": lambda: set_metadata("a", node_type="tree"),
    "it is stored in shards, which is not supported": lambda: set_metadata("a", codecs=SHARDS),
    "its codec lz77 is not supported": lambda: set_metadata("a", codecs=[LITTLE, {"name": "lz77"}]),
    "its codec gzip is in the wrong place": lambda: set_metadata("a", codecs=["gzip", LITTLE]),
    "it has no codec bytes": lambda: set_metadata("a", codecs=[]),
    "its endian is None": lambda: set_metadata("a", codecs=["bytes"]),
    "is incomplete or wrong": lambda: set_metadata("a", codecs=None),
    "its shape has -1": lambda: set_metadata("a", shape=[-1, 4]),
    "its chunks have 2 dimensions instead of 1": lambda: set_metadata("a", shape=[4]),
    "it is string, which is not supported": lambda: set_metadata("a", data_type="string"),
    "its fill_value 'x' is not float64": lambda: set_metadata("a", fill_value="x"),
    "it has 'spam', which is not supported": lambda: set_metadata("a", spam={}),
    "its chunk grid is 'rectilinear'": lambda: set_metadata("a", chunk_grid="rectilinear"),
    "its separator is '-'": lambda: set_metadata(
        "a", chunk_key_encoding={"name": "default", "configuration": {"separator": "-"}}
    ),
    "c/0/0: gzip: it is cut off": lambda: os.truncate("x.zarr/a/c/0/0", 30),
    "c/0/1: gzip: ": lambda: Path("x.zarr/a/c/0/1").write_text("not gzip"),
    "bytes instead of 64": lambda: set_metadata("a", codecs=[LITTLE]),
    "c/1/1: it is not a regular file": lambda: (
        os.remove("x.zarr/a/c/1/1"),
        os.mkfifo("x.zarr/a/c/1/1"),
    ),
    "c/1/1: it is a symbolic link": lambda: (
        os.remove("x.zarr/a/c/1/1"),
        os.symlink("/etc/passwd", "x.zarr/a/c/1/1"),
    ),
    "behind a link out of the store": lambda: (
        shutil.move("x.zarr/a/c", "elsewhere"),
        os.symlink("../../elsewhere", "x.zarr/a/c"),
    ),
    "is a link out of the store": lambda: (
        shutil.move("x.zarr/a", "elsewhere"),
        os.symlink("../elsewhere", "x.zarr/a"),
    ),
    "x.zarr is not a folder": lambda: (
        shutil.rmtree("x.zarr"),
        open("x.zarr", "w").close(),
    ),
    "/a in x.zarr is a group; expected /a/b": lambda: (
        shutil.rmtree("x.zarr/a"),
        zarr.create_array("x.zarr/a/b", data=np.ones(2)),
        zarr.open_group("x.zarr/a", mode="a"),
    ),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("what", REFUSED)
def test_a_damaged_array_is_refused(what, tmp_path):
    array = some_array((6, 7))
    write(array, "/a", chunks=(2, 4), compression="gzip")
    write(array, "/b")
    REFUSED[what]()
    assert what in refusal(tmp_path, 'program = "Z[i,j] = X[i,j]"\ninputs.X = "x.zarr:a"\n')


def zstd_frame(blocks, block=2**17, fill=7):
    """A frame of zstd that does not say how large it is, made of blocks of one repeated byte."""
    frame = bytes.fromhex("28b52ffd0038")  # magic number, no size, a window of 128 KiB
    for number in range(blocks):
        header = block << 3 | 1 << 1 | (number == blocks - 1)
        frame += header.to_bytes(3, "little") + bytes([fill])
    return frame


MIB = np.full(2**17, np.frombuffer(b"\7" * 8)[0])  # as eight blocks of such a frame
BOMBS = {
    "gzip": lambda zeros: gzip.compress(zeros),
    "zstd": lambda zeros: bytes(Zstd(1).encode(zeros)),
    "zstd without a size": lambda zeros: zstd_frame(len(zeros) // 2**17),
    "zstd in two frames": lambda zeros: bytes(Zstd(1).encode(zeros[:8])) + zstd_frame(512),
    "blosc": lambda zeros: bytes(Blosc("zstd").encode(zeros)),
    "a large file": lambda zeros: zeros,
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_chunk_is_decoded_no_further_than_it_may_be(kind):
    codec = kind.split()[0]
    write(np.ones(8), compression=codec if codec in ("gzip", "zstd", "blosc") else None)
    Path("x.zarr/c/0").write_bytes(BOMBS[kind](bytes(64 * 2**20)))
    tracemalloc.start()
    with pytest.raises(einmpi.InputError, match="c/0: ") as caught:
        read()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 8 * 2**20 and "\n" not in str(caught.value)


@pytest.mark.slow
def test_frames_of_zstd():
    """A frame with or without its size, several frames, and a last byte of any value."""
    write(MIB, chunks=MIB.shape, compression="zstd")
    path = Path("x.zarr/c/0")
    half = bytes(Zstd(1).encode(MIB[: len(MIB) // 2]))
    for frames in (zstd_frame(8), zstd_frame(4) + zstd_frame(4), half + half, half + zstd_frame(4)):
        path.write_bytes(frames)
        same(read(), MIB)
    for wrong in (half, zstd_frame(4), half + half + half, half[:-1], b""):
        path.write_bytes(wrong)
        with pytest.raises(einmpi.InputError, match="c/0: "):
            read()
    for last in range(256):
        numbers = np.array([last], "uint8")
        write(numbers, "/", "y.zarr", compression="zstd")
        same(read(file="y.zarr"), numbers)


def test_version_2_is_refused(tmp_path):
    zarr.create_array("x.zarr", data=np.ones(4), zarr_format=2)
    assert refusal(tmp_path, 'program = "Z[i] = X[i]"\ninputs.X = "x.zarr"\n') == (
        "job.toml:2:8: x.zarr is a zarr store in version 2 of the format; expected version 3; "
        "convert it: zarr migrate v3 x.zarr\n"
    )


@pytest.mark.parametrize(
    ("output", "what"),
    [
        ('"x.zarr:../Z"', "'../Z' is not the path of an array; expected a path such as / or"),
        ('{ file = "x.zarr", compression = "lzf" }', "expected one of gzip, zstd, blosc"),
        ('"x.zarr:/g"', "/g in x.zarr is a group; expected an array to replace"),
        ('"x.zarr:/a/Z"', "/a in x.zarr is an array; expected a group to hold /a/Z"),
        ('"x.zarr"', "/ in x.zarr is a group"),
        ('"folder.zarr:/Z"', "folder.zarr is a folder without zarr.json; expected a zarr store"),
        ('"file.zarr:/Z"', "file.zarr is not a folder"),
        ('"old.zarr:/Z"', "folder without zarr.json"),
    ],
)
def test_a_store_that_cannot_take_an_array(output, what, tmp_path):
    write(np.ones(3), "/a")
    write(np.ones(3), "/g/b")
    os.makedirs("folder.zarr/things")
    open("file.zarr", "w").close()
    zarr.create_array("old.zarr", data=np.ones(4), zarr_format=2)
    assert what in refusal(tmp_path, f'program = "Z[i:4] = i"\noutputs.Z = {output}\n')


def test_an_array_inside_another(tmp_path):
    text = 'program = "Y[i:4] = i; Z[i:4] = i"\noutputs = { Y = "o.zarr", Z = "o.zarr:/a" }\n'
    assert "outputs Y and Z would be one inside the other" in refusal(tmp_path, text)


def test_a_codec_whose_package_is_missing(tmp_path, monkeypatch):
    zarr.save("x.zarr", np.ones(4))
    monkeypatch.setitem(sys.modules, "numcodecs", None)
    missing = "zstd needs the package numcodecs, which is not installed; install einmpi[zarr]\n"
    text = 'program = "Z[i] = X[i]"\ninputs.X = "x.zarr"\n'
    assert refusal(tmp_path, text).endswith(f"cannot be read as zarr: {missing}")
    text = 'program = "Z[i:4] = i"\noutputs.Z = { file = "o.zarr", compression = "zstd" }\n'
    assert refusal(tmp_path, text) == f"job.toml:2:32: {missing}"
    with pytest.raises(einmpi.InputError, match="zstd needs the package numcodecs"):
        write(np.ones(4), compression="zstd")


def test_a_store_that_cannot_be_copied(monkeypatch):
    write(np.ones(3), "/a")
    set_metadata("a", attributes={"note": "mine"})
    copy = shutil.copy2

    def failing(source, *arguments, **options):
        if source.endswith("a/zarr.json"):
            raise PermissionError(13, "Permission denied")
        return copy(source, *arguments, **options)

    monkeypatch.setattr(shutil, "copy2", failing)
    with pytest.raises(einmpi.EinmpiError) as caught:
        write(np.ones(3), "/b")
    assert str(caught.value) == (
        "x.zarr: x.zarr cannot be written: a/zarr.json in it cannot be copied: "
        "[Errno 13] Permission denied; x.zarr is unchanged"
    )
    assert metadata("a")["attributes"] == {"note": "mine"} and os.listdir() == ["x.zarr"]


# ---- random damage ------------------------------------------------------------------------------

ODD_VALUES = (
    *(None, -1, 0, 2, 2**70, 1.5, True, "", "x", "NaN", "0xzz", "int8", "complex64"),
    *([], [1], [3, -2], [[[]]], {}, {"name": "gzip"}, {"name": 5}, {"must_understand": False}),
    {"name": "transpose", "configuration": {"order": "F"}},
)


def places_in(value, path=()):
    """Yield the path to every value in a tree of dicts and lists."""
    items = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        yield (*path, key)
        yield from places_in(inner, (*path, key))


def test_random_damage_is_refused_in_a_line(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    generator = random.Random(7)
    compressions = ("gzip", "zstd", "blosc", None)
    for compression in compressions:
        write(
            np.arange(42.0).reshape(6, 7),
            f"/{compression}",
            "x.zarr",
            chunks=(4, 4),
            compression=compression,
        )
    texts = {name: metadata(str(name)) for name in compressions}
    chunks = {name: Path(f"x.zarr/{name}/c/0/1").read_bytes() for name in compressions}
    refused = 0
    for _ in range(80):
        name = generator.choice(compressions)
        content = json.loads(json.dumps({**texts[name], "attributes": {}}))
        *above, last = generator.choice(list(places_in(content)))
        inner = content
        for key in above:
            inner = inner[key]
        inner[last] = generator.choice(ODD_VALUES)
        data = bytearray(chunks[name])
        if generator.random() < 0.5:
            content = texts[name]
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
            del data[generator.randrange(len(data)) :]
        Path(f"x.zarr/{name}/zarr.json").write_text(json.dumps(content))
        Path(f"x.zarr/{name}/c/0/1").write_bytes(data)
        try:
            read(f"/{name}")
        except einmpi.InputError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 50
