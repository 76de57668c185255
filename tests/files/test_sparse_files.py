"""Sparse tensors in files: those of other libraries, round trips on ranks, damage, and jobs."""

import json
import os
import re

import h5py
import numpy as np
import pytest
import scipy.io
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from mpi_helpers import needs_mpirun, run_mpi

import einmpi
from einmpi.cli.main import main
from einmpi.comm.base import ALONE
from einmpi.comm.threads import run_threads
from einmpi.errors import InputError
from einmpi.files.formats import find_sparse
from einmpi.files.sparse.reading import generate_sparse, read_sparse
from einmpi.files.specs import InputSpec

MATRIX = scipy.sparse.random_array((37, 29), density=0.1, rng=np.random.default_rng(0))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read(file, inside="", ranks=1, **facts):
    spec = InputSpec("A", file=str(file), inside=inside, **facts)
    found = find_sparse(spec)
    read_by_all = run_threads(ranks, lambda comm: read_sparse(found, comm))
    for each in read_by_all:
        np.testing.assert_array_equal(each.dense(), read_by_all[0].dense())
    assert found.stored is None or found.stored >= read_by_all[0].stored
    return read_by_all[0]


def write_group(file, matrix, encoding="csr_matrix", **changed):
    matrix = matrix.asformat(encoding[:3])
    parts = {"data": matrix.data, "indices": matrix.indices, "indptr": matrix.indptr, **changed}
    with h5py.File(file, "w") as handle:
        group = handle.create_group("A")
        group.attrs["encoding-type"] = encoding
        group.attrs["shape"] = parts.pop("shape", np.array(matrix.shape))
        for name, values in parts.items():
            chunks = (10,) if name == "indices" else None
            group.create_dataset(name, data=values, chunks=chunks)


# ---- files of other libraries --------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("encoding", ["csr_matrix", "csc_matrix"])
def test_groups_of_anndata(encoding, ranks):
    write_group("g.h5", MATRIX, encoding)
    np.testing.assert_array_equal(read("g.h5", "/A", ranks).dense(), MATRIX.toarray())


@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
@pytest.mark.parametrize("compressed", [True, False])
def test_npz_of_scipy(form, compressed):
    scipy.sparse.save_npz("a.npz", MATRIX.asformat(form), compressed)
    np.testing.assert_array_equal(read("a.npz", ranks=2).dense(), MATRIX.toarray())


def test_npz_of_blocks_is_refused():
    scipy.sparse.save_npz("a.npz", scipy.sparse.bsr_array(np.ones((6, 8)), blocksize=(2, 4)))
    with pytest.raises(InputError, match=r"has the format 'bsr'; expected .* csr, csc, gcxs, coo"):
        read("a.npz")


@pytest.mark.slow
def test_npz_of_pydata():
    # Without a version it would find the folder tests/sparse.
    sparse = pytest.importorskip("sparse", minversion="0.15")
    tensor = sparse.random((4, 5, 6), density=0.2, random_state=0, fill_value=7.0)
    for number, each in enumerate((tensor, sparse.GCXS(tensor), sparse.GCXS(tensor[0, 0]))):
        sparse.save_npz(f"{number}.npz", each)
        found = read(f"{number}.npz", ranks=2)
        np.testing.assert_array_equal(found.dense(), each.todense())
        assert found.implicit == 7


@pytest.mark.parametrize("symmetry", ["general", "symmetric", "skew-symmetric", "hermitian"])
@pytest.mark.parametrize("field", ["real", "complex", "integer", "pattern"])
def test_matrix_market(field, symmetry):
    values = {"real": "2.5e0", "complex": "1 -2", "integer": "3", "pattern": ""}[field]
    header = f"%%MatrixMarket matrix coordinate {field} {symmetry}\n% a comment\n\n3 3 3\n"
    text = f"{header}2 1 {values}\n\n  3   1 {values}  \n3 2 {values}"
    for name, end in (("b.mtx", "\n"), ("a.mtx", "")):
        with open(name, "w") as file:
            file.write(text + end)
    expected = scipy.io.mmread("b.mtx")  # which crashes if a pattern does not end with a line
    for ranks in (1, 2, 3, 5):
        found = read("a.mtx", ranks=ranks)
        np.testing.assert_array_equal(found.dense(), expected.toarray())
        assert found.dtype == expected.dtype


def test_frostt():
    with open("a.tns", "w") as file:
        file.write("# keys count from 1\n1 2 3 0.5\n4 1 1 -2e-3\n\n1 2 3 1\n")
    for shape in (None, (4, 2, 3)):
        found = read("a.tns", ranks=2, declared_shape=shape)
        assert found.shape == (4, 2, 3)
        assert (found.dense()[0, 1, 2], found.dense()[3, 0, 0]) == (1.5, -2e-3)


@pytest.mark.parametrize("form", ["CSR", "CSC", "COO", "COOC", "DCSR", "DCSC"])
def test_binsparse(form):
    by_columns = form.endswith("C")
    matrix = scipy.sparse.csc_array(MATRIX) if by_columns else scipy.sparse.csr_array(MATRIX)
    outer = np.repeat(np.arange(len(matrix.indptr) - 1), np.diff(matrix.indptr))
    starts = matrix.indptr
    with h5py.File("a.h5", "w") as file:
        if form.startswith("COO"):
            file["indices_0"] = outer
        else:
            if form.startswith("D"):
                file["indices_0"], first = np.unique(outer, return_index=True)
                starts = [*first, len(outer)]
            file["pointers_to_1"] = starts
        file["indices_1"] = matrix.indices
        file["values"] = [7]
        file["fill_value"] = [np.inf]
        description = {
            "version": "0.1" if by_columns else "0.1.0",  # as the package binsparse writes it
            "format": form,
            "shape": MATRIX.shape,
            "number_of_stored_values": matrix.nnz,
            "data_types": {"values": "iso[int64]"},
            "fill": True,
        }
        file.attrs["binsparse"] = json.dumps({"binsparse": description})
    spec = InputSpec("A", file="a.h5", inside="/")
    found = find_sparse(spec)
    assert found.implicit == np.inf
    with pytest.raises(InputError, match="the implicit value inf is no int64"):
        read_sparse(found, ALONE)
    stored = read_sparse(find_sparse(InputSpec("A", file="a.h5", inside="/", implicit=0)), ALONE)
    np.testing.assert_array_equal(stored.dense(), 7 * (MATRIX.toarray() != 0))


# ---- round trips ---------------------------------------------------------------------------------


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dtype = draw(st.sampled_from(["float64", "float32", "int64", "uint8", "complex128"]))
    mask = draw(arrays.arrays(bool, shape))
    stored = draw(arrays.arrays(dtype, int(mask.sum()), elements={"allow_nan": False}))
    return np.nonzero(mask), stored, tuple(shape)


@settings(max_examples=30, deadline=None)
@given(tensors(), st.integers(1, 3), st.sampled_from(["t.h5:/a/b", "t.npz", "t.mtx", "t.tns"]))
def test_what_is_written_is_read(tensor, ranks, target):
    keys, values, shape = tensor
    is_refused = target == "t.mtx" and len(shape) != 2
    is_refused |= target == "t.tns" and values.dtype.kind == "c"

    def write(comm):
        array = einmpi.SparseArray.from_keys(keys, values, shape, comm=comm)
        array.save(target)
        return array.coordinates()

    if is_refused:
        with pytest.raises(einmpi.EinmpiError):
            run_threads(ranks, write)
        return
    written = run_threads(ranks, write)[0]
    file, _, inside = target.partition(":")
    found = read(file, inside, ranks, declared_shape=shape)
    for own, other in zip(written.keys, found.keys, strict=True):
        np.testing.assert_array_equal(own, other)
    np.testing.assert_array_equal(written.values, found.values)


def test_others_read_what_is_written():
    array = einmpi.SparseArray.from_keys(MATRIX.coords, MATRIX.data, MATRIX.shape)
    for file in ("a.npz", "a.mtx"):
        array.save(file)
    np.testing.assert_array_equal(scipy.sparse.load_npz("a.npz").toarray(), MATRIX.toarray())
    np.testing.assert_array_equal(scipy.io.mmread("a.mtx").toarray(), MATRIX.toarray())


def test_tiles_and_implicit_values_go_to_groups():
    tiles = np.arange(6.0).reshape(2, 3)
    array = einmpi.SparseArray.from_keys(([3, 1],), tiles, (5, 3), np.inf)
    array.to_hdf5("a.h5", "/rows", compression="gzip")
    found = read("a.h5", "/rows")
    assert (len(found.keys), found.implicit) == (1, np.inf)
    np.testing.assert_array_equal(found.values, tiles[::-1])
    with pytest.raises(InputError, match="has dense tiles; expected an HDF5 file"):
        array.save("a.npz")


def test_each_rank_gives_some_elements():
    def make(comm):
        keys = ([comm.rank, 3], [0, 1])
        return einmpi.SparseArray.from_local(keys, [1.0, 2.0], (4, 4), comm=comm).coordinates()

    found = run_threads(3, make)[1].dense()
    assert (found[:, 0].tolist(), found[3, 1]) == ([1, 1, 1, 0], 6)


# ---- what is wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed, problem",
    [
        ({"indices": MATRIX.tocsr().indices + 40}, "key 4. of dimension 1 is out of range"),
        ({"indices": MATRIX.tocsr().indices - 40}, "key -.* of dimension 1 is out of range"),
        ({"indices": MATRIX.tocsr().indices * 1.0}, "keys of dimension 1 are float64"),
        ({"indices": MATRIX.tocsr().indices[1:]}, "/A/indices in g.h5 has"),
        ({"indptr": MATRIX.tocsr().indptr[::-1]}, "pointers of /A in g.h5"),
        ({"indptr": MATRIX.tocsr().indptr[:-1]}, "pointers of /A in g.h5"),
        ({"shape": np.array([37])}, "the shape of /A in g.h5"),
        ({"data": np.zeros((MATRIX.nnz, 2))}, "/A/data in g.h5 has 2 dimensions"),
    ],
)
def test_damaged_groups(changed, problem):
    write_group("g.h5", MATRIX, **changed)
    with pytest.raises(InputError, match=problem):
        read("g.h5", "/A")


@pytest.mark.parametrize(
    "text, problem",
    [
        ("", "does not begin with %%MatrixMarket"),
        ("%%MatrixMarket matrix array real general\n2 2\n", "in the format array"),
        ("%%MatrixMarket matrix coordinate odd general\n2 2 1\n1 1 1\n", "is odd; expected"),
        ("%%MatrixMarket matrix coordinate real general\n2 2\n", "the sizes of a.mtx are '2 2'"),
        ("%%MatrixMarket matrix coordinate real symmetric\n2 3 0\n", "expected a square matrix"),
        ("%%MatrixMarket matrix coordinate real general\n2 2 2\n1 1 1\n", "has 1 stored elements"),
        (
            "%%MatrixMarket matrix coordinate real general\n2 2 1\n1 x 1\n",
            "line 3 of a.mtx is '1 x",
        ),
        ("%%MatrixMarket matrix coordinate real general\n2 2 1\n1 1.5 1\n", "line 3 of a.mtx"),
        ("%%MatrixMarket matrix coordinate real general\n2 2 1\n1 1 1 1\n", "line 3 of a.mtx"),
        ("%%MatrixMarket matrix coordinate real general\n2 2 1\n3 1 1\n", "key 3 of dimension 0"),
        ("%%MatrixMarket matrix coordinate real general\n2 2 1\n1 0 1\n", "key 0 of dimension 1"),
    ],
)
def test_damaged_text(text, problem):
    with open("a.mtx", "w") as file:
        file.write(text)
    with pytest.raises(InputError, match=problem):
        read("a.mtx")


def test_damaged_archives():
    scipy.sparse.save_npz("a.npz", MATRIX.tocsr())
    with open("a.npz", "rb") as file:
        content = bytearray(file.read())
    for place in range(0, len(content), 97):
        damaged = bytearray(content)
        damaged[place] ^= 255
        with open("b.npz", "wb") as file:
            file.write(damaged)
        try:
            found = read("b.npz").dense()
        except InputError:
            continue
        np.testing.assert_array_equal(found, MATRIX.toarray())  # it was a byte that says nothing


def test_what_is_given_twice():
    with open("a.tns", "w") as file:
        file.write("1 1 2\n1 1 3\n")
    assert read("a.tns").dense().tolist() == [[5]]
    with pytest.raises(InputError, match="stored twice"):
        read("a.tns", implicit=np.inf)


# ---- jobs ----------------------------------------------------------------------------------------


def test_random_tensors_do_not_depend_on_anything_else():
    spec = InputSpec("A", shape=(11, 12), dtype="float64", random="sparse", key_dimensions=2)
    for stored in (0, 1, 5, 32, 33, 34, 131, 132):
        found = generate_sparse(InputSpec(**{**vars(spec), "stored": stored}))
        assert found.stored == stored
        again = generate_sparse(InputSpec(**{**vars(spec), "stored": stored}))
        np.testing.assert_array_equal(found.dense(), again.dense())


JOB = """
program = "y[i] = sum(A[i,j] * x[j]); S[i,j] = A[i,j] * B[i,j]"
[inputs]
A = "g.h5:/A"
B = { random = "sparse", shape = [37, 29], nnz = 500 }
x = { random = "uniform", shape = [29] }
[outputs]
"""


def test_a_job_reads_and_writes_them(capsys):
    write_group("g.h5", MATRIX)
    with open("job.toml", "w") as file:
        file.write(JOB + 'y = "y.npy"\nS = "s.h5:/S"\n')
    for _ in range(2):
        assert main(["run", "job.toml"]) == 0
    job = einmpi.load("job.toml")
    reference = einmpi.reference(job)
    np.testing.assert_allclose(np.load("y.npy"), reference["y"])
    np.testing.assert_allclose(read("s.h5", "/S").dense(), reference["S"])
    results = einmpi.run(job)
    np.testing.assert_allclose(results["S"].coordinates().dense(), reference["S"])
    assert einmpi.plan(job, ranks=2).words_predicted > 0


KILLED = """
import os, signal, sys
from einmpi.cli.main import main
from einmpi.comm.mpi_library import world
from einmpi.files import writing
def killed(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
if world().rank == {rank}:
    writing.write_at = killed
sys.exit(main(["job.toml"]))
"""


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("file", ["S.h5", "S.npz", "S.mtx", "S.tns"])
def test_a_rank_killed_while_it_writes(tmp_path, rank, file):
    """The old file stays whole. The draft may stay, too; the next run removes it."""
    write_group("g.h5", MATRIX)
    target = f"{file}:/S" if file == "S.h5" else file
    with open("job.toml", "w") as job:
        job.write(f'{JOB}S = "{target}"\n')
    einmpi.SparseArray.from_keys(([0], [1]), [2.0], (2, 3)).save(target)
    before = (tmp_path / file).read_bytes()
    done = run_mpi(2, KILLED.format(rank=rank), cwd=tmp_path)
    assert done.returncode != 0
    assert (tmp_path / file).read_bytes() == before
    done = run_mpi(2, ["-m", "einmpi", "job.toml", "--quiet"], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    found = read(file, target.partition(":")[2], declared_shape=(37, 29))
    np.testing.assert_allclose(found.dense(), einmpi.reference(einmpi.load("job.toml"))["S"])
    assert sorted(os.listdir()) == sorted(["g.h5", "job.toml", file])


@pytest.mark.parametrize(
    "outputs, problem",
    [
        ('S = "s.npy"', "S is sparse; expected an .h5"),
        ('y = "y.mtx"', "y is dense, and .*y.mtx holds a sparse tensor"),
        ('S = { file = "s.h5", dataset = "/S", chunks = [2, 2] }', "S is sparse, and has chunks"),
        ('S = "s.h5:/"', "is all of a file"),
    ],
)
def test_refused_outputs(capsys, outputs, problem):
    write_group("g.h5", MATRIX)
    with open("job.toml", "w") as file:
        file.write(JOB + outputs)
    assert main(["run", "job.toml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(problem, line)


@pytest.mark.parametrize(
    "entry, problem",
    [
        ('{ random = "sparse", shape = [3, 3] }', "does not say how many elements are stored"),
        ('{ random = "sparse", shape = [3, 3], nnz = 10 }', "nnz is 10; expected an integer"),
        ('{ random = "sparse", shape = [3, 3], density = 1.5 }', "density is 1.5"),
        ('{ random = "uniform", shape = [3, 3], nnz = 1 }', "cannot be combined with random"),
        ('{ keys = ["k.npy"], shape = [3, 3] }', "does not say where keys and values are"),
        ('{ file = "a.npy", implicit = "x" }', "implicit is 'x'"),
    ],
)
def test_refused_inputs(entry, problem):
    np.save("a.npy", np.ones((3, 3)))
    with open("job.toml", "w") as file:
        file.write(f'program = "y = sum(A[i,j])"\n[inputs]\nA = {entry}\n')
    with pytest.raises(InputError, match=problem):
        einmpi.load("job.toml")


def test_keys_in_files_of_their_own():
    for name, values in (("row", MATRIX.row), ("column", MATRIX.col), ("value", MATRIX.data)):
        np.save(f"{name}.npy", values)
    with open("job.toml", "w") as file:
        entry = '{ keys = ["row.npy", "column.npy"], values = "value.npy", shape = [37, 29] }'
        file.write(f'program = "y[i] = sum(A[i,j])"\n[inputs]\nA = {entry}\n')
    found = einmpi.run(einmpi.load("job.toml"))["y"].gather()
    np.testing.assert_allclose(found, MATRIX.toarray().sum(axis=1))


@pytest.mark.parametrize(
    "program, outputs, problem",
    [
        ("y[e,j] = A[k[e],j]", "", "y reads A by a gather"),
        ("y[i] = min(A[i,j] + x[j])", "", "min needs the elements that are not stored"),
        ("S[i,j] = 2 * A[i,j]", 'S = "s.npy"', "S is sparse; expected an .h5"),
        ("S[i,j] = 2 * A[i,j]", 'S = "s.mtx"', ""),
    ],
)
def test_a_check_refuses_what_a_run_refuses(capsys, program, outputs, problem):
    write_group("g.h5", MATRIX)
    with open("job.toml", "w") as file:
        file.write(f'program = "{program}"\n[inputs]\nA = "g.h5:/A"\n')
        file.write('x = { random = "uniform", shape = [29] }\n')
        file.write('k = { random = "arange", shape = [3], dtype = "int64" }\n')
        file.write(f"[outputs]\n{outputs}\n")
    for command in ("check", "run"):
        assert main([command, "job.toml"]) == (2 if problem else 0)
        printed = capsys.readouterr()
        assert problem in printed.err
        if command == "check" and not problem:
            stored = f"A float64 37×29  g.h5:/A, sparse: {MATRIX.nnz} stored, others 0"
            assert stored.replace(":/A", "") in printed.out
