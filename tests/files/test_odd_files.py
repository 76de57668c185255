"""Files that are damaged, of another kind, or odd: one line that says what is wrong, and status 2;
or the values."""

import os
import re
import struct

import h5py
import numpy as np
import pytest

from einmpi.cli.main import main
from einmpi.errors import InputError
from einmpi.files.reading import describe, load_array
from einmpi.files.specs import InputSpec

VALUES = np.arange(12.0).reshape(3, 4)
JOB = "program = 'Z[i,j] = A[i,j] + 1'\ninputs.A = {}\noutputs.Z = 'out.h5:/Z'\n"
pytestmark = pytest.mark.usefixtures("in_folder")


def run(source, capfd):
    """(status, standard error) of a job whose input is this."""
    with open("job.toml", "w") as file:
        file.write(JOB.format(source))
    capfd.readouterr()
    status = main(["run", "job.toml", "--quiet"])
    return status, capfd.readouterr().err


# ---- HDF5 ---------------------------------------------------------------------------------------


def h5(make):
    def wrapped():
        with h5py.File("x.h5", "w") as file:
            made = make(file)
        if callable(made):
            made()
        return "'x.h5:/A'"

    return wrapped


def cut(size):
    """A good file, cut off."""

    def make():
        with h5py.File("x.h5", "w") as file:
            file["A"] = VALUES
        whole = os.path.getsize("x.h5")
        os.truncate("x.h5", size if size >= 0 else whole + size)
        return "'x.h5:/A'"

    return make


def raw_type(kind):
    """A dataset of a type that numpy has no word for."""

    def make(file):
        space = h5py.h5s.create_simple((3, 4))
        h5py.h5d.create(file.id, b"A", kind, space)

    return h5(make)


def dataset(**options):
    return h5(lambda file: file.create_dataset("A", **options) and None)


def overwrite(offset, data):
    with open("x.h5", "r+b") as file:
        file.seek(offset)
        file.write(data)


def spoiled_chunk(**options):
    """A chunk whose bytes were changed."""

    def make(file):
        made = file.create_dataset("A", data=VALUES, chunks=(3, 4), **options)
        file.flush()
        where = made.id.get_chunk_info(0)
        return lambda: overwrite(where.byte_offset, b"\xa5" * min(where.size, 16))

    return h5(make)


def virtual(present, inside):
    def make(file):
        if present:
            with h5py.File("source.h5", "w") as source:
                source["data"] = VALUES
        layout = h5py.VirtualLayout((3, 4), "f8")
        layout[:] = h5py.VirtualSource("source.h5", inside, (3, 4))
        file.create_virtual_dataset("A", layout)

    return h5(make)


def external(size):
    def make(file):
        if size:
            with open("values.raw", "wb") as other:
                other.write(VALUES.tobytes()[:size])
        file.create_dataset("A", (3, 4), "f8", external=[(os.path.abspath("values.raw"), 0, 96)])

    return h5(make)


def unknown_filter(file):
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((3, 4))
    plist.set_filter(32099, h5py.h5z.FLAG_OPTIONAL)
    space = h5py.h5s.create_simple((3, 4))
    made = h5py.h5d.create(file.id, b"A", h5py.h5t.IEEE_F64LE, space, dcpl=plist)
    made.write_direct_chunk((0, 0), VALUES.tobytes())


def in_file(name, text=b""):
    def make():
        with open(name, "wb") as file:
            file.write(text)
        return f"'{name}'" if name.endswith(".npy") else f"'{name}:A'"

    return make


def fifo():
    os.mkfifo("x.h5")
    return "'x.h5:/A'"


def folder():
    os.mkdir("x.h5")
    return "'x.h5:/A'"


def no_permission():
    with h5py.File("x.h5", "w") as file:
        file["A"] = VALUES
    os.chmod("x.h5", 0)
    return "'x.h5:/A'"


def linked(link):
    return h5(lambda file: file.__setitem__("A", link))


def damaged_header():
    with h5py.File("x.h5", "w") as file:
        file["A"] = VALUES
        address = h5py.h5o.get_info(file["A"].id).addr
    overwrite(address, b"\xff" * 24)
    return "'x.h5:/A'"


def no_such_rows(rows, data=VALUES):
    def make():
        with h5py.File("x.h5", "w") as file:
            file["A"] = data
        return f"{{ file = 'x.h5', dataset = '/A', rows = '{rows}' }}"

    return make


# ---- .npy and safetensors -----------------------------------------------------------------------


def npy(array, **options):
    def make():
        np.save("x.npy", array, **options)
        return "'x.npy'"

    return make


def npy_bytes(change):
    """A good .npy file with its bytes changed."""

    def make():
        np.save("x.npy", VALUES)
        with open("x.npy", "rb") as file:
            data = file.read()
        with open("x.npy", "wb") as file:
            file.write(change(data))
        return "'x.npy'"

    return make


def safetensors(header, data=bytes(96), length=None):
    def make():
        with open("x.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(header) if length is None else length) + header + data)
        return "'x.safetensors:A'"

    return make


def entry(dtype='"F64"', shape="[3,4]", offsets="[0,96]"):
    return f'{{"A":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}'.encode()


FOREIGN = "which is not supported; expected one of float16,"
REFUSED = {
    "an empty file": (
        in_file("x.h5"),
        "x.h5 cannot be opened as HDF5: file signature not found; expected an HDF5 file",
    ),
    "a text file": (
        in_file("x.h5", b"hello\n" * 900),
        "x.h5 cannot be opened as HDF5: file signature not found",
    ),
    "cut after the signature": (cut(8), "x.h5 cannot be opened as HDF5: "),
    "cut in the superblock": (cut(40), "x.h5 cannot be opened as HDF5: "),
    "cut in the header": (cut(600), "x.h5 cannot be opened as HDF5: truncated file"),
    "cut in the values": (cut(-50), "x.h5 cannot be opened as HDF5: truncated file"),
    "cut by a byte": (cut(-1), "x.h5 cannot be opened as HDF5: truncated file"),
    "a spoiled header": (damaged_header, "/A in x.h5 cannot be read: "),
    "a folder": (folder, "x.h5 is not a file; expected an HDF5 file"),
    "a pipe": (fifo, "x.h5 is not a file; expected an HDF5 file"),
    "nothing": (
        lambda: "'x.h5:/A'",
        "there is no file x.h5; expected an HDF5 file; paths are relative to the job file",
    ),
    "no such dataset": (
        h5(lambda file: file.create_dataset("B", data=VALUES) and None),
        "there is no dataset /A in x.h5; expected /B",
    ),
    "a group": (
        h5(lambda file: file.create_group("A") and None),
        "/A in x.h5 is a group; expected a dataset",
    ),
    "a named type": (
        h5(lambda file: file.__setitem__("A", np.dtype("f8"))),
        "there is no dataset /A in x.h5",
    ),
    "a soft link to nowhere": (
        linked(h5py.SoftLink("/no")),
        "/A in x.h5 is a link to /no, which does not exist; expected a dataset",
    ),
    "an external link to nowhere": (
        linked(h5py.ExternalLink("no.h5", "/B")),
        "/A in x.h5 is a link to no.h5:/B, which does not exist; expected a dataset",
    ),
    "links in a circle": (linked(h5py.SoftLink("/A")), "/A in x.h5 "),
    "no dataspace": (
        h5(lambda file: file.__setitem__("A", h5py.Empty("f8"))),
        "/A in x.h5 has no values; expected a dataset with",
    ),
    "strings": (dataset(data=np.full((3, 4), b"ab")), f"/A in x.h5 is a string, {FOREIGN}"),
    "strings of any length": (
        dataset(data=["a", "b"]),
        f"/A in x.h5 is a string or of variable length, {FOREIGN}",
    ),
    "rows of any length": (
        dataset(shape=(3, 4), dtype=h5py.vlen_dtype("f8")),
        "/A in x.h5 is a string or of variable",
    ),
    "compound": (
        dataset(shape=(3, 4), dtype=[("a", "f4"), ("b", "i4")]),
        f"/A in x.h5 is compound, {FOREIGN}",
    ),
    "an enumeration": (
        dataset(shape=(3, 4), dtype=h5py.enum_dtype({"on": 1}, "i4")),
        "/A in x.h5 is an enumeration,",
    ),
    "references": (
        dataset(shape=(3, 4), dtype=h5py.ref_dtype),
        f"/A in x.h5 is a reference, {FOREIGN}",
    ),
    "opaque": (dataset(shape=(3, 4), dtype="V8"), f"/A in x.h5 is opaque, {FOREIGN}"),
    "arrays": (
        dataset(shape=(3, 4), dtype=np.dtype(("f8", (2,)))),
        f"/A in x.h5 is of an array type, {FOREIGN}",
    ),
    "a time": (raw_type(h5py.h5t.UNIX_D32LE), "/A in x.h5 cannot be read: "),
    "another number of dimensions": (
        dataset(data=np.arange(3.0)),
        "A[i, j] has the wrong number of indices",
    ),
    "a number": (dataset(data=3.0), "A[i, j] has the wrong number of indices"),
    "a spoiled gzip chunk": (spoiled_chunk(compression="gzip"), "/A in x.h5 cannot be read: "),
    "a spoiled lzf chunk": (spoiled_chunk(compression="lzf"), "/A in x.h5 cannot be read: "),
    "a wrong checksum": (spoiled_chunk(fletcher32=True), "/A in x.h5 cannot be read: "),
    "an unknown filter": (h5(unknown_filter), "/A in x.h5 needs the filter 32099"),
    "a virtual dataset without its file": (
        virtual(False, "data"),
        "/A in x.h5 needs source.h5, which is missing or too short",
    ),
    "a virtual dataset without its dataset": (virtual(True, "no"), "there is no dataset no in "),
    "values elsewhere, not there": (external(0), "/A in x.h5 needs /"),
    "values elsewhere, too short": (external(90), "/A in x.h5 needs /"),
    "rows after the last": (
        no_such_rows("0:4"),
        "rows 0:4 of /A in x.h5, which has 3; expected a range within 0:3",
    ),
    "rows before the first": (
        no_such_rows("-4:"),
        "rows -4: of /A in x.h5, which has 3; expected a range within 0:3",
    ),
    "rows backwards": (
        no_such_rows("2:1"),
        "rows 2:1 of /A in x.h5, which has 3; expected a range within 0:3",
    ),
    "rows of a number": (
        no_such_rows("0:1", 3.0),
        "/A in x.h5 has 0 dimensions; expected at least 1, as many as are selected from",
    ),
    "no .npy": (in_file("x.npy", b"PK\x03\x04 is a zip"), "x.npy cannot be read as .npy: "),
    "a name in .npy": (
        lambda: "'x.npy:A'",
        "job.toml:2:8: 'x.npy:A' names a tensor in a file that holds a single tensor",
    ),
    "an empty .npy": (npy_bytes(lambda data: b""), "x.npy cannot be read as .npy: "),
    ".npy of another version": (
        npy_bytes(lambda data: data[:6] + b"\x09" + data[7:]),
        "x.npy cannot be read as .npy: ",
    ),
    ".npy cut in the header": (npy_bytes(lambda data: data[:50]), "x.npy cannot be read as .npy: "),
    ".npy cut in the values": (npy_bytes(lambda data: data[:-1]), "x.npy cannot be read as .npy: "),
    ".npy with code in the header": (
        npy_bytes(lambda data: data.replace(b"False", b"exit()")[:128] + data[128:]),
        "x.npy cannot be read as .npy: ",
    ),
    ".npy with an open bracket": (
        npy_bytes(lambda data: data.replace(b"(3, 4)", b"(3, 4[")),
        "x.npy cannot be",
    ),
    ".npy of a negative shape": (
        npy_bytes(lambda data: data.replace(b"(3, 4), ", b"(-3, 4),")),
        "x.npy cannot be read as .npy: ",
    ),
    ".npy of a shape beyond all": (
        npy_bytes(lambda data: data.replace(b"(3, 4), }" + b" " * 9, b"(3, 4000000000), }")),
        "x.npy cannot be read as .npy: ",
    ),
    ".npy of objects": (
        npy(np.array([[{}]], object), allow_pickle=True),
        "x.npy cannot be read as .npy: ",
    ),
    ".npy of strings": (npy(np.array([["a"]])), f"x.npy is str32, {FOREIGN}"),
    ".npy of records": (npy(np.zeros((3, 4), "f4,f4")), f"x.npy is compound, {FOREIGN}"),
    ".npy of dates": (npy(np.zeros((3, 4), "M8[s]")), f"x.npy is datetime64[s], {FOREIGN}"),
    "an empty safetensors file": (
        in_file("x.safetensors"),
        "x.safetensors cannot be read as safetensors: ",
    ),
    "safetensors without an end": (
        safetensors(entry(), length=2**62),
        "x.safetensors cannot be read as safetensors: its",
    ),
    "safetensors that is no JSON": (
        safetensors(b"{"),
        "x.safetensors cannot be read as safetensors: ",
    ),
    "safetensors that is a list": (
        safetensors(b"[1]"),
        "x.safetensors cannot be read as safetensors: its header is not",
    ),
    "safetensors nested without end": (
        safetensors(b"[" * 100000),
        "x.safetensors cannot be read as safetensors: ",
    ),
    "safetensors without the tensor": (
        safetensors(b"{}"),
        "there is no tensor A in x.safetensors; expected no entry here",
    ),
    "safetensors of an unknown type": (
        safetensors(entry('"F8_E4M3"')),
        f"A in x.safetensors is F8_E4M3, {FOREIGN}",
    ),
    "safetensors of a type that is none": (
        safetensors(entry("[]")),
        "x.safetensors cannot be read as safetensors: ",
    ),
    "safetensors of a negative shape": (
        safetensors(entry(shape="[-3,-4]")),
        "x.safetensors cannot be read as safeten",
    ),
    "safetensors of another size": (
        safetensors(entry(shape="[3,5]")),
        "x.safetensors cannot be read as safetensors: A h",
    ),
    "safetensors cut off": (
        safetensors(entry(), bytes(95)),
        "x.safetensors cannot be read as safetensors: A ends after",
    ),
    "safetensors with turned offsets": (
        safetensors(entry(offsets="[96,0]")),
        "x.safetensors cannot be read as safeten",
    ),
}
if os.geteuid() != 0:  # root may read everything
    REFUSED["no permission"] = (
        no_permission,
        "there is no permission to read x.h5; expected a readable file",
    )


@pytest.mark.sampled(35)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, capfd):
    make, message = REFUSED[name]
    status, said = run(make(), capfd)
    assert status == 2, said
    assert said.endswith("\n") and said.count("\n") == 1, said
    assert said.startswith("job.toml:") and message in said, said
    assert "Traceback" not in said and not os.path.exists("out.h5")


@pytest.mark.parametrize(
    "make", [npy(VALUES), safetensors(entry(), VALUES.tobytes())], ids=["npy", "safetensors"]
)
def test_any_damage(make):
    """Other values, or an error of ours; never another one."""
    file, _, tensor = make().strip("'").partition(":")
    with open(file, "rb") as source:
        good = source.read()
    rng, refused = np.random.default_rng(5), 0
    for _ in range(300):
        data = np.frombuffer(good, np.uint8).copy()
        data[rng.integers(0, len(good), rng.integers(1, 5))] = rng.integers(0, 256)
        with open(file, "wb") as target:
            target.write(
                data[: rng.integers(1, len(good))].tobytes()
                if rng.random() < 0.2
                else data.tobytes()
            )
        spec = InputSpec("A", file=file, inside=tensor, place="job.toml:1:1")
        try:
            load_array(spec, describe(spec).shape, describe(spec).dtype)
        except InputError as error:
            refused += 1
            assert "\n" not in str(error)
    assert 100 < refused < 300


def late(file):
    file.create_dataset("A", (3, 4), "f8", fillvalue=7.0)  # no value was ever written


def virtual_with_gaps(file):
    with h5py.File("source.h5", "w") as source:
        source["data"] = VALUES[:2]
    layout = h5py.VirtualLayout((3, 4), "f8")
    layout[:2] = h5py.VirtualSource("source.h5", "data", (2, 4))
    file.create_virtual_dataset("A", layout, fillvalue=9.0)


def compact(file):
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.COMPACT)
    made = h5py.h5d.create(
        file.id, b"A", h5py.h5t.IEEE_F64LE, h5py.h5s.create_simple((3, 4)), dcpl=plist
    )
    made.write(h5py.h5s.ALL, h5py.h5s.ALL, VALUES)


def behind_a_user_block():
    with h5py.File("x.h5", "w", userblock_size=1024) as file:
        file["A"] = VALUES
    return "'x.h5:/A'"


def odd_bool():
    """Bytes that are neither 0 nor 1 are true."""
    np.save("x.npy", np.array([[False, True, False, True]] * 3))
    with open("x.npy", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x07")
    return "'x.npy'"


def in_another_file(path):
    """Behind an external link. Where they lie there, this file has other values."""

    def make(file):
        file["others"] = np.full(2000, 5.0)
        file["A"] = h5py.ExternalLink("other.h5", path)
        with h5py.File("other.h5", "w") as other:
            other["before"] = np.zeros(300)
            other["g/A"] = VALUES

    return h5(make)


def virtual_in_another_folder(file):
    """Its sources are found from where it is."""
    os.mkdir("far")
    file["A"] = h5py.ExternalLink("far/other.h5", "/A")
    with h5py.File("far/source.h5", "w") as source:
        source["data"] = VALUES[:2]
    with h5py.File("far/other.h5", "w") as other:
        other["own"] = VALUES[2:]
        layout = h5py.VirtualLayout((3, 4), "f8")
        layout[:2] = h5py.VirtualSource("source.h5", "data", (2, 4))
        layout[2:] = h5py.VirtualSource(".", "own", (1, 4))
        other.create_virtual_dataset("A", layout)


def odd_type(change, kind="IEEE_F64LE", values=VALUES):
    """Numbers that HDF5 stores otherwise than numpy."""

    def make(file):
        stored = getattr(h5py.h5t, kind).copy()
        change(stored)
        made = h5py.h5d.create(file.id, b"A", stored, h5py.h5s.create_simple((3, 4)))
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, values)

    return h5(make)


def bfloat16(stored):
    stored.set_fields(15, 7, 8, 0, 7)
    stored.set_ebias(127)


def three_bytes_of_eight(stored):
    stored.set_precision(24)
    stored.set_offset(8)


def complex_with_a_gap(file):
    stored = h5py.h5t.create(h5py.h5t.COMPOUND, 24)
    stored.insert(b"r", 0, h5py.h5t.IEEE_F64LE)
    stored.insert(b"i", 16, h5py.h5t.IEEE_F64LE)
    made = h5py.h5d.create(file.id, b"A", stored, h5py.h5s.create_simple((3, 4)))
    made.write(h5py.h5s.ALL, h5py.h5s.ALL, VALUES + 2j)


READ = {
    "in another file": (in_another_file("/g/A"), VALUES + 1),
    "virtual in another folder": (h5(virtual_in_another_folder), VALUES + 1),
    "numbers of 16 bits that numpy does not have": (odd_type(bfloat16, "IEEE_F16LE"), VALUES + 1),
    "numbers of 24 bits": (
        odd_type(three_bytes_of_eight, "STD_I64LE", VALUES.astype("i8") - 5),
        VALUES - 4,
    ),
    "complex numbers with a gap": (h5(complex_with_a_gap), VALUES + 1 + 2j),
    "late allocation": (h5(late), np.full((3, 4), 8.0)),
    "a virtual dataset": (virtual(True, "data"), VALUES + 1),
    "a virtual dataset with gaps": (
        h5(virtual_with_gaps),
        np.vstack([VALUES[:2] + 1, np.full((1, 4), 10.0)]),
    ),
    "values elsewhere": (external(96), VALUES + 1),
    "a compact dataset": (h5(compact), VALUES + 1),
    "a user block": (behind_a_user_block, VALUES + 1),
    "no elements": (dataset(data=np.zeros((0, 4))), np.zeros((0, 4))),
    "a chunk larger than the dataset": (
        dataset(data=VALUES, chunks=(3, 4), maxshape=(None, None)),
        VALUES + 1,
    ),
    "the other byte order": (npy(VALUES.astype(">f8")), VALUES + 1),
    "the other order of dimensions": (npy(np.asfortranarray(VALUES)), VALUES + 1),
    ".npy without elements": (npy(np.zeros((3, 0))), np.zeros((3, 0))),
    "odd bytes for true": (odd_bool, np.array([[1, 2, 1, 2]] * 3)),
    "the last rows": (no_such_rows("-2:"), VALUES[1:] + 1),
    "safetensors": (safetensors(entry(), VALUES.tobytes()), VALUES + 1),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", READ)
def test_read(name, capfd):
    make, values = READ[name]
    assert run(make(), capfd) == (0, "")
    with h5py.File("out.h5") as file:
        np.testing.assert_array_equal(file["Z"][()], values)


def test_an_output_file_whose_list_of_names_is_damaged(capfd):
    """It is refused in one line and stays as it is."""
    with h5py.File("x.h5", "w", libver="earliest") as file:
        file["A"] = VALUES
    tree = 144  # where the neighbours and entries of the root group's list of names are
    overwrite(tree, bytes(40))
    with open("x.h5", "rb") as file:
        before = file.read()
    with open("job.toml", "w") as file:
        file.write(JOB.format("{ shape = [3, 4], random = 'ones' }").replace("out.h5", "x.h5"))
    status = main(["run", "job.toml", "--quiet"])
    err = capfd.readouterr().err
    assert status == 2
    assert re.fullmatch(r"job.toml:3:9: /Z in x.h5 cannot be read: .*\n", err), err
    with open("x.h5", "rb") as file:
        assert file.read() == before


@pytest.mark.parametrize("address", [0, 2**40, 2**63, 2**64 - 9])
def test_an_address_of_elements_that_are_in_another_file(capfd, address):
    """HDF5 ignores the address, so a wrong one is no reason to read there."""
    source = external(96)()
    with open("x.h5", "rb") as file:
        content = file.read()
    undefined = struct.pack("<QQ", 2**64 - 1, VALUES.nbytes)
    assert content.count(undefined) == 1
    overwrite(content.index(undefined), struct.pack("<Q", address))
    assert run(source, capfd) == (0, "")
    with h5py.File("out.h5") as file:
        np.testing.assert_array_equal(file["Z"], VALUES + 1)
