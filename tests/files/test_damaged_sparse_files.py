"""Files of sparse tensors that are damaged, or no such files: one line, status 2, nothing written.

Every row of a table is a file, how it is wrong, and a part of the message.
"""

import io
import json
import os
import zipfile

import h5py
import numpy as np
import pytest
import scipy.sparse

import einmpi
from einmpi.cli.main import main
from einmpi.comm.threads import run_threads

MATRIX = scipy.sparse.csr_array(
    scipy.sparse.random_array((37, 29), density=0.1, rng=np.random.default_rng(0))
)
STORED = MATRIX.nnz
JOB = """
program = "S[{0}] = 2 * A[{0}]; t = sum(A[{0}])"
[inputs]
A = {1}
[outputs]
S = "out.npz"
t = "out.h5:/t"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def check_refused(capsys, entry, problem, labels="i,j"):
    """The job ends with the status of wrong input, and leaves the folder as it was."""
    with open("job.toml", "w") as file:
        file.write(JOB.format(labels, entry))
    before = sorted(os.listdir())
    assert main(["run", "job.toml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line
    assert sorted(os.listdir()) == before

    def on_rank(comm):
        with pytest.raises(einmpi.InputError) as error:
            einmpi.run(einmpi.load("job.toml"), comm=comm)
        return str(error.value)

    assert len(set(run_threads(3, on_rank))) == 1


# ---- text ----------------------------------------------------------------------------------------

REAL = "%%MatrixMarket matrix coordinate real general\n"


def header(field, symmetry="general"):
    return f"%%MatrixMarket matrix coordinate {field} {symmetry}\n"


MTX = {
    "empty": ("", "does not begin with %%MatrixMarket"),
    "not text": (bytes(range(256)), "does not begin with %%MatrixMarket"),
    "no sizes": (REAL, "the sizes of a.mtx are ''"),
    "no sizes after comments": (REAL + "% a\n% b\n", "the sizes of a.mtx are ''"),
    "a negative size": (REAL + "-3 3 1\n1 1 1\n", "the sizes of a.mtx are '-3 3 1'"),
    "a size beyond all": (REAL + "999999999999 9 1\n1 1 1\n", "A has extent 999999999999"),
    "fewer lines": (REAL + "2 2 2\n1 1 1\n", "has 1 stored elements; expected 2"),
    "far fewer lines": (REAL + "2 2 99999999999\n1 1 1\n", "expected 99999999999, as its"),
    "more lines": (REAL + "3 3 0\n1 1 1\n", "has 1 stored elements; expected 0"),
    "ends in a line": (REAL + "2 2 2\n1 1 1\n2", "line 4 of a.mtx is '2'"),
    "a key that is nan": (REAL + "2 2 1\nnan 1 1\n", "line 3 of a.mtx is 'nan 1 1'"),
    "a key with a point": (REAL + "2 2 1\n1.0 1 1\n", "line 3 of a.mtx is '1.0 1 1'"),
    "a key in hexadecimal": (REAL + "2 2 1\n0x1 1 1\n", "line 3 of a.mtx is '0x1 1 1'"),
    "a key beyond int64": (REAL + f"2 2 1\n{10**30} 1 1\n", "line 3 of a.mtx is '1000"),
    "a negative key": (REAL + "2 2 1\n-1 1 1\n", "key -1 of dimension 0 in a.mtx"),
    "a key beyond the shape": (REAL + "2 2 1\n1 3 1\n", "key 3 of dimension 1 in a.mtx"),
    "keys from 0": (REAL + "2 2 1\n0 1 1\n", "out of range; expected 1 to 2"),
    "zero bytes": (REAL + "2 2 1\n\0\0\0\n", "line 3 of a.mtx is"),
    "a long line": (REAL + "2 2 1\n" + "1" * 10**5, "line 3 of a.mtx is '1111"),
    "too large an integer": (header("integer") + f"2 2 1\n1 1 {10**20}\n", "line 3 of a.mtx"),
    "an integer with a point": (header("integer") + "2 2 1\n1 1 1.5\n", "line 3 of a.mtx"),
    "a pattern with values": (header("pattern") + "2 2 1\n1 1 1\n", "expected 2 numbers"),
    "half a complex number": (header("complex") + "2 2 1\n1 1 1\n", "expected 4 numbers"),
    "both triangles": (
        header("real", "symmetric") + "2 2 2\n1 2 1\n2 1 1\n",
        "a.mtx is symmetric, and has elements on both sides of its diagonal",
    ),
    "unsigned": (
        header("unsigned-integer", "skew-symmetric") + "2 2 1\n2 1 1\n",
        "expected a dtype with signs",
    ),
}


@pytest.mark.parametrize("name", MTX)
def test_matrix_market(capsys, name):
    text, problem = MTX[name]
    with open("a.mtx", "wb") as file:
        file.write(text if isinstance(text, bytes) else text.encode())
    check_refused(capsys, '"a.mtx"', problem)


TNS = {
    "empty": ("", "has no line with keys and a value"),
    "a comment alone": ("# x\n", "has no line with keys and a value"),
    "no value": ("5\n", "has no line with keys and a value"),
    "keys from 0": ("0 1 1 1\n", "key 0 of dimension 0 in a.tns is out of range"),
    "a key that is nan": ("nan 1 1 1\n", "line 1 of a.tns is 'nan 1 1 1'"),
    "a short line": ("1 1 1 1\n\n1 1 1\n", "line 3 of a.tns is '1 1 1'"),
    "a word": ("1 1 1 one\n", "line 1 of a.tns is '1 1 1 one'"),
    "a huge key": (f"{10**13} 1 1 1\n", f"A has extent {10**13}"),
    "ends in a line": ("1 1 1 2\n2 2", "line 2 of a.tns is '2 2'"),
}


@pytest.mark.parametrize("name", TNS)
def test_frostt(capsys, name):
    text, problem = TNS[name]
    with open("a.tns", "w") as file:
        file.write(text)
    check_refused(capsys, '"a.tns"', problem, "i,j,k")


def test_a_shape_that_a_text_does_not_have(capsys):
    with open("a.tns", "w") as file:
        file.write("3 3 3 1\n")
    entry = '{ file = "a.tns", shape = [2, 2, 2] }'
    check_refused(capsys, entry, "key 3 of dimension 0 in a.tns", "i,j,k")
    check_refused(capsys, '{ file = "a.tns", shape = [4, 4] }', "line 1 of a.tns is '3 3 3 1'")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_what_tools_write_between_lines(end):
    """Comments in any encoding, blank lines, tabs, and the ends of lines of other systems."""
    lines = ["%%MatrixMarket matrix coordinate real general", "% é", "", "2\t2 2", "  "]
    lines += ["1 1\t1.5", "% half of it", "", "2 2 -2e0 % the other half", ""]
    with open("a.mtx", "wb") as file:
        file.write(end.join(lines).encode("latin-1"))
    found = einmpi.run(einmpi.program("S[i,j] = A[i,j]", inputs={"A": "a.mtx"}))["S"]
    np.testing.assert_array_equal(found.gather().toarray(), [[1.5, 0], [0, -2]])
    with open("a.tns", "wb") as file:
        file.write(end.join(["# ü", "", "1 1 2\t0.5", "2 1 1 1 # one", ""]).encode())
    found = einmpi.run(einmpi.program("s[i] = sum(A[i,j,k])", inputs={"A": "a.tns"}))["s"]
    assert found.gather().tolist() == [0.5, 1]


# ---- archives ------------------------------------------------------------------------------------

ROWS = {"data": MATRIX.data, "indices": MATRIX.indices, "indptr": MATRIX.indptr}
CSR = {**ROWS, "shape": np.array(MATRIX.shape), "format": np.array(b"csr")}
GCXS = {**CSR, "format": np.array("gcxs"), "compressed_axes": np.array([0])}
COO = {
    "coords": np.array(MATRIX.tocoo().coords),
    "data": MATRIX.data,
    "shape": np.array(MATRIX.shape),
    "format": np.array("coo"),
}
ROWS_WRONG = "the pointers of a.npz do not say where its 37 rows begin"
NPZ = {
    "nothing": ({}, "a.npz says no format"),
    "a dense array": ({"x": np.ones(3)}, "a.npz says no format"),
    "another format": ({**CSR, "format": np.array("bsr")}, "has the format 'bsr'"),
    "formats": ({**CSR, "format": np.array(["csr", "csc"])}, "format in a.npz is a list"),
    "a number": ({**CSR, "format": np.array(3)}, "has the format 3"),
    "no text": ({**CSR, "format": np.array(b"\xff")}, "has the format"),
    "no data": ({"format": CSR["format"], "shape": CSR["shape"]}, "has no indptr"),
    "no shape": ({**ROWS, "format": CSR["format"]}, "the shape of a.npz is None"),
    "a shape with points": ({**CSR, "shape": np.array([37.0, 29.0])}, "the shape of a.npz is"),
    "a negative shape": ({**CSR, "shape": np.array([-37, 29])}, "the shape of a.npz is"),
    "a shape beyond all": ({**CSR, "shape": np.array([2**62, 2**62])}, "A has extent"),
    "more rows": ({**CSR, "shape": np.array([38, 29])}, "do not say where its 38 rows begin"),
    "fewer columns": ({**CSR, "shape": np.array([37, 5])}, "of dimension 1 is out of range"),
    "keys that are nan": ({**CSR, "indices": np.full(STORED, np.nan)}, "are float64"),
    "keys that are bool": ({**CSR, "indices": MATRIX.indices > 3}, "are bool"),
    "negative keys": ({**CSR, "indices": MATRIX.indices - 30}, "key -30 of dimension 1"),
    "keys beyond": ({**CSR, "indices": MATRIX.indices + 29}, "of dimension 1 is out of"),
    "falling pointers": ({**CSR, "indptr": MATRIX.indptr[::-1]}, ROWS_WRONG),
    "pointers beyond": ({**CSR, "indptr": MATRIX.indptr + 1}, ROWS_WRONG),
    "huge pointers": ({**CSR, "indptr": MATRIX.indptr.astype("u8") + 2**63}, ROWS_WRONG),
    "pointers with points": ({**CSR, "indptr": MATRIX.indptr * 1.0}, ROWS_WRONG),
    "no pointers": ({**CSR, "indptr": np.zeros(0, int)}, ROWS_WRONG),
    "fewer data": ({**CSR, "data": MATRIX.data[1:]}, "indices in a.npz has"),
    "a table of data": ({**CSR, "data": np.ones((STORED, 2))}, "data in a.npz has 2 dimensions"),
    "words": ({**CSR, "data": np.array(["a"] * STORED)}, "data in a.npz is str32"),
    "objects": ({**CSR, "data": np.array([None] * STORED)}, "a.npz cannot be read as .npz"),
    "several implicit values": ({**CSR, "fill_value": np.zeros(2)}, "fill_value in a.npz is a"),
    "a word": ({**CSR, "fill_value": np.array("x")}, "the implicit value is 'x'"),
    "an unknown axis": ({**GCXS, "compressed_axes": np.array([5])}, "compresses axes [5] of 2"),
    "an axis twice": ({**GCXS, "compressed_axes": np.array([0, 0])}, "compresses axes [0, 0]"),
    "half an axis": ({**GCXS, "compressed_axes": np.array([0.5])}, "compresses axes [0.5]"),
    "no lists of keys": ({**COO, "coords": MATRIX.indices}, "have 0 dimensions"),
    "too many keys": ({**COO, "coords": np.zeros((3, STORED), int)}, "there are keys of"),
    "fewer keys": ({**COO, "coords": COO["coords"][:, 1:]}, "the values have shape"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of numpy, about objects
@pytest.mark.parametrize("name", NPZ)
def test_npz(capsys, name):
    members, problem = NPZ[name]
    np.savez("a.npz", **members)
    check_refused(capsys, '"a.npz"', problem)


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


DATA = npy(MATRIX.data)
COUNT = f"({STORED},)".encode()
MEMBERS = {
    "junk": b"junk",
    "a longer array": DATA.replace(COUNT, b"(999,)"),
    "a negative length": DATA.replace(COUNT, b"(-07,)"),
    "more than the array": DATA + b"tail",
    "half of it": DATA[: len(DATA) // 2],
}


@pytest.mark.parametrize("name", MEMBERS)
def test_members_of_archives(capsys, name):
    with zipfile.ZipFile("a.npz", "w") as archive:
        for member, array in CSR.items():
            archive.writestr(f"{member}.npy", MEMBERS[name] if member == "data" else npy(array))
    check_refused(capsys, '"a.npz"', "a.npz cannot be read as .npz")


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("file", ["a.npz", "a.h5"])
def test_files_that_are_cut_off(capsys, file, part):
    target = "a.h5:/A" if file == "a.h5" else file
    einmpi.SparseArray.from_keys(MATRIX.tocoo().coords, MATRIX.data, MATRIX.shape).save(target)
    os.truncate(file, int(part * os.path.getsize(file)))
    check_refused(capsys, f'"{target}"', f"{file} cannot be")


def test_archives_of_earlier_versions():
    """The package sparse did not say the format."""
    del (members := dict(COO))["format"]
    np.savez("a.npz", fill_value=np.array(0.0), **members)
    del (members := dict(GCXS))["format"]
    np.savez("b.npz", fill_value=np.array(0.0), **members)
    for file in ("a.npz", "b.npz"):
        found = einmpi.run(einmpi.program("S[i,j] = A[i,j]", inputs={"A": file}))["S"]
        np.testing.assert_array_equal(found.gather().toarray(), MATRIX.toarray())


# ---- HDF5 ----------------------------------------------------------------------------------------

ANNDATA = {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": MATRIX.shape}
GROUP_ROWS = ROWS_WRONG.replace("a.npz", "/A in a.h5")
GROUPS = {
    "no encoding": ({"encoding-type": "array"}, {}, "/A in a.h5 is a group"),
    "a number for it": ({"encoding-type": 3}, {}, "/A in a.h5 is a group"),
    "by columns": ({"encoding-type": "csc_matrix"}, {}, "do not say where its 29 rows begin"),
    "a word for the shape": ({"shape": "37x29"}, {}, "the shape of /A in a.h5 is 37x29"),
    "no shape": ({"shape": h5py.Empty("f8")}, {}, "the shape of /A in a.h5 is"),
    "three extents": ({"shape": (37, 29, 1)}, {}, "the shape of /A in a.h5 is [37 29 1]"),
    "a negative extent": ({"shape": (-37, 29)}, {}, "the shape of /A in a.h5 is [-37 29]"),
    "no data": ({}, {"data": None}, "there is no dataset /A/data in a.h5"),
    "a number": ({}, {"data": 1.0}, "/A/data in a.h5 has 0 dimensions"),
    "nothing": ({}, {"data": h5py.Empty("f8")}, "/A/data in a.h5 has no values"),
    "words": ({}, {"data": np.array([b"a"] * STORED)}, "/A/data in a.h5 is a string"),
    "a link to nothing": ({}, {"data": h5py.SoftLink("/none")}, "which does not exist"),
    "a link to itself": ({}, {"data": h5py.SoftLink("/A/data")}, "more than 32 links"),
    "a link elsewhere": ({}, {"data": h5py.ExternalLink("/etc/passwd", "/")}, "another folder"),
    "keys that are nan": ({}, {"indices": np.full(STORED, np.nan)}, "are float64"),
    "fewer keys": ({}, {"indices": MATRIX.indices[1:]}, "/A/indices in a.h5 has"),
    "keys beyond": ({}, {"indices": MATRIX.indices + 29}, "key 29 of dimension 1"),
    "falling pointers": ({}, {"indptr": MATRIX.indptr[::-1]}, GROUP_ROWS),
    "pointers that are nan": ({}, {"indptr": np.full(38, np.nan)}, GROUP_ROWS),
}


def write_group(attributes, datasets):
    with h5py.File("a.h5", "w") as file:
        group = file.create_group("A")
        for name, value in attributes.items():
            group.attrs[name] = value
        for name, value in datasets.items():
            if value is not None:
                group[name] = value


@pytest.mark.parametrize("name", GROUPS)
def test_groups_of_anndata(capsys, name):
    attributes, datasets, problem = GROUPS[name]
    write_group({**ANNDATA, **attributes}, {**ROWS, **datasets})
    check_refused(capsys, '"a.h5:/A"', problem)


DESCRIPTION = {
    "version": "0.1.0",
    "format": "CSR",
    "shape": MATRIX.shape,
    "number_of_stored_values": STORED,
    "data_types": {"values": "float64"},
}
DESCRIPTIONS = {
    "no JSON": ("{", "is no table"),
    "a list": ("[1]", "is no table"),
    "too deep": ("[" * 10**5, "is no table"),
    "another version": ({"version": "2.0"}, "has version '2.0' of Binsparse"),
    "a number for it": ({"version": 0.1}, "has version 0.1 of Binsparse"),
    "another format": ({"format": "DMAT"}, "has the Binsparse format 'DMAT'"),
    "no format": ({"format": ["CSR"]}, "has the Binsparse format"),
    "lists for the shape": ({"shape": [[1], [2, 3]]}, "the shape of /A in a.h5 is"),
    "a huge shape": ({"shape": [10**30, 5]}, "the shape of /A in a.h5 is"),
    "nothing in the shape": ({"shape": [None, 5]}, "the shape of /A in a.h5 is"),
    "bools": ({"shape": [True, True]}, "the shape of /A in a.h5 is"),
    "another count": ({"number_of_stored_values": 3}, "expected 3, as its description says"),
    "one value": ({"data_types": {"values": "iso[float64]"}}, "expected 1, as the other parts"),
    "pairs": ({"data_types": {"values": "complex[float64]"}}, f"expected {2 * STORED}"),
    "another structure": ({"structure": "odd_lower"}, "is odd, float64[37, 29]"),
    "no square": ({"structure": "symmetric_lower"}, "expected a square matrix"),
    "no fill value": ({"fill": True}, "there is no dataset /A/fill_value"),
    "no rows": ({"format": "DCSR"}, "there is no dataset /A/indices_0"),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_groups_of_binsparse(capsys, name):
    changed, problem = DESCRIPTIONS[name]
    text = changed
    if isinstance(changed, dict):
        text = json.dumps({"binsparse": {**DESCRIPTION, **changed}})
    datasets = {"pointers_to_1": MATRIX.indptr, "indices_1": MATRIX.indices, "values": MATRIX.data}
    write_group({"binsparse": text}, datasets)
    check_refused(capsys, '"a.h5:/A"', problem)
