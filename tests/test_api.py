"""The Python interface on many ranks: run, compile, DistArray, einsum; and what ends all ranks
together."""

import subprocess
import sys

import h5py
import numpy as np
import pytest
from distributed import assert_close
from mpi_helpers import ROOT

import einmpi
from einmpi import DistArray
from einmpi.comm.threads import run_threads
from einmpi.planner.mesh import Mesh
from einmpi.schedule.layout import Layout

RNG = np.random.default_rng(1)
A, B = RNG.standard_normal((13, 24)), RNG.standard_normal((24, 10))
PRODUCT = "Z[i,k] = sum(A[i,j] * B[j,k])"
RANKS = (1, 2, 3, 4, 6, 7)


def on_ranks(ranks, function):
    """What rank 0 returns; all ranks must return the same."""
    results = run_threads(ranks, function)
    for result in results[1:]:
        np.testing.assert_equal(result, results[0])
    return results[0]


# ---- DistArray ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (13, 24), (0, 5), (3, 4, 5)])
def test_what_is_cut_comes_together_again(ranks, shape):
    array = RNG.standard_normal(shape)

    def on_rank(comm):
        cut = DistArray.from_global(array, comm)
        assert (cut.shape, cut.dtype, cut.ndim, cut.size) == (
            array.shape,
            array.dtype,
            array.ndim,
            array.size,
        )
        on_last = cut.gather(ranks - 1)
        assert (on_last is not None) == (comm.rank == ranks - 1)
        if on_last is not None:
            np.testing.assert_array_equal(on_last, array)
        return cut.gather()

    np.testing.assert_array_equal(on_ranks(ranks, on_rank), array)


def test_parts_are_those_asked_for():
    def on_rank(comm):
        cut = DistArray.from_global(A, comm, parts=(1, 4))
        assert str(cut.layout) == "[1,4] on 8 ranks"
        assert cut.local.shape == (13, 6)
        np.testing.assert_array_equal(cut.local, A[:, cut.region[1][0][0] : cut.region[1][0][1]])
        with pytest.raises(einmpi.InputError) as caught:
            DistArray.from_global(A, comm, parts=(3, 1))
        assert str(caught.value) == (
            "parts: 13×24 cannot be cut 3×1 over 8 ranks; expected parts out of "
            "(1, 2, 4, 8) × (1, 2, 4, 8), each of the factors 2·2·2 used at most once"
        )
        return cut.gather()

    np.testing.assert_array_equal(on_ranks(8, on_rank), A)


def test_a_distarray_shows_what_the_rank_holds():
    def on_rank(comm):
        return repr(DistArray.from_global(np.arange(6).reshape(3, 2), comm))

    assert run_threads(3, on_rank)[1] == (
        "DistArray([[2, 3]], shape=(3, 2), dtype=int64, layout=[3,1] on 3 ranks; rank 1 of "
        "3 holds [1:2, 0:2])"
    )


def test_redistribute_to_a_smaller_mesh_and_back():
    def on_rank(comm):
        cut = DistArray.from_global(A, comm)
        few = cut.redistribute(Layout(Mesh(2), A.shape, (1,)))
        assert few.local.size == (A.size // 2 if comm.rank < 2 else 0)
        return few.redistribute(cut.layout).gather()

    np.testing.assert_array_equal(on_ranks(5, on_rank), A)


def test_to_hdf5(tmp_path):
    file = tmp_path / "z.h5"
    with h5py.File(file, "w") as handle:
        handle["kept"] = 3
    run_threads(3, lambda comm: DistArray.from_global(A, comm).to_hdf5(file, "/a/b"))
    with h5py.File(file) as handle:
        assert handle["kept"][()] == 3
        np.testing.assert_array_equal(handle["a/b"][:], A)


def test_a_file_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path):
    (tmp_path / "z.h5").mkdir()

    def on_rank(comm):
        with pytest.raises(einmpi.EinmpiError, match=r"z\.h5"):
            DistArray.from_global(A, comm).to_hdf5(tmp_path / "z.h5", "/a")
        return comm.rank

    assert run_threads(3, on_rank) == [0, 1, 2]


# ---- run and compile ----------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
def test_arrays_in_distarrays_out(ranks):
    job = einmpi.program(PRODUCT, A=A, B=B)

    def on_rank(comm):
        out = einmpi.run(job, {"A": A, "B": B}, comm)["Z"]
        assert isinstance(out, DistArray) and out.comm is comm
        return out.gather()

    assert_close({"Z": on_ranks(ranks, on_rank)}, {"Z": A @ B})


def test_arrays_that_every_rank_has_need_not_move():
    job = einmpi.program(PRODUCT, A=A, B=B)

    def on_rank(comm):
        einmpi.run(job, {"A": A, "B": B}, comm)
        return comm.received

    assert on_ranks(6, on_rank) == 0


@pytest.mark.parametrize("ranks", RANKS)
def test_results_feed_the_next_call_where_they_lie(ranks):
    """A power iteration: planned for the first layout, and once more for that of the results."""
    square = RNG.standard_normal((24, 24)) / 5
    start = RNG.standard_normal(24)
    job = einmpi.program("y[i] = sum(M[i,j] * x[j]); n = sum(x[i] * x[i])", M=square, x=start)

    def on_rank(comm):
        step = einmpi.compile(job, comm)
        matrix, x = DistArray.from_global(square, comm), DistArray.from_global(start, comm)
        for _ in range(5):
            out = step({"M": matrix, "x": x})
            x = out["y"]
        assert len(step.ready) <= 3  # it settles: later calls neither plan nor lower
        return x.gather()

    expected = np.linalg.matrix_power(square, 5) @ start
    assert_close({"y": on_ranks(ranks, on_rank)}, {"y": expected})


def test_a_layout_that_fits_moves_nothing():
    """The planner knows the layouts of what it is given."""
    job = einmpi.program("Z[i,j] = exp(X[i,j]) + Y[i,j]", X=(16, 12), Y=(16, 12))
    X = RNG.standard_normal((16, 12))

    def on_rank(comm):
        x, y = (DistArray.from_global(X, comm, parts=(1, 6)) for _ in range(2))
        before = comm.received
        out = einmpi.run(job, {"X": x, "Y": y}, comm)["Z"]
        assert comm.received == before
        return out.gather()

    assert_close({"Z": on_ranks(6, on_rank)}, {"Z": np.exp(X) + X})


@pytest.mark.sampled(2, always=["5", "8"])
@pytest.mark.parametrize("ranks", [5, 8, 11, 16])
def test_any_layouts_in(ranks):
    """Inputs in different layouts, one of them on fewer ranks."""
    job = einmpi.program(PRODUCT, A=A, B=B)

    def on_rank(comm):
        a = DistArray.from_global(A, comm)
        b = DistArray.from_global(B, comm).redistribute(Layout(Mesh(2), B.shape, (1,)))
        return [
            einmpi.run(job, {"A": one, "B": two}, comm)["Z"].gather()
            for one, two in ((a, b), (a, B), (A, b))
        ]

    for found in on_ranks(ranks, on_rank):
        assert_close({"Z": found}, {"Z": A @ B})


def test_datasets_of_h5py(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["A"], file["B"] = A, B.astype(">f8")
    job = einmpi.program(PRODUCT, A=A, B=B)

    def on_rank(comm):
        with h5py.File(tmp_path / "x.h5") as file:
            return einmpi.run(job, {"A": file["A"], "B": file["B"]}, comm)["Z"].gather()

    assert_close({"Z": on_ranks(4, on_rank)}, {"Z": A @ B})


def test_resident_inputs_are_read_once(tmp_path, monkeypatch):
    with h5py.File(tmp_path / "w.h5", "w") as file:
        file["W"] = B
    (tmp_path / "job.toml").write_text(
        'program = "Z[i,k] = sum(A[i,j] * W[j,k])"\n[inputs]\n'
        'A = { shape = [13, 24], random = "normal" }\n'
        'W = { file = "w.h5", dataset = "/W", resident = true }\n'
    )
    job = einmpi.load(tmp_path / "job.toml")
    step = einmpi.compile(job)
    first = step()["Z"].gather()
    (tmp_path / "w.h5").unlink()
    np.testing.assert_array_equal(step()["Z"].gather(), first)
    assert_close({"Z": step({"A": A})["Z"].gather()}, {"Z": A @ B})
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file["V"] = 2 * B
        assert_close({"Z": step({"A": A, "W": file["V"]})["Z"].gather()}, {"Z": 2 * A @ B})
    assert_close({"Z": step({"A": A})["Z"].gather()}, {"Z": A @ B})


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"A": A}, "inputs: input B is not given; expected B: float64[24, 10]"),
        ({"A": A, "B": B, "C": B}, "inputs: unknown input 'C'; expected one of A, B"),
        ({"A": A, "B": B.T}, "inputs: B is float64[10, 24]; expected B: float64[24, 10]"),
        (
            {"A": A, "B": B.astype("complex64")},
            "inputs: B is complex64[24, 10]; expected B: float64[24, 10]; "
            'convert it with .astype("float64"), which may change values',
        ),
    ],
)
def test_wrong_inputs_are_an_error_on_all_ranks(inputs, message):
    job = einmpi.program(PRODUCT, A=A, B=B)

    def on_rank(comm):
        with pytest.raises(einmpi.InputError) as caught:
            einmpi.run(job, inputs, comm)
        return str(caught.value)

    assert on_ranks(3, on_rank) == message


def test_one_rank_with_wrong_inputs_ends_all():
    job = einmpi.program(PRODUCT, A=A, B=B)

    def on_rank(comm):
        with pytest.raises(einmpi.InputError) as caught:
            einmpi.run(job, {"A": A, "B": B if comm.rank != 2 else B.T}, comm)
        return str(caught.value)

    assert (
        run_threads(4, on_rank) == ["inputs: B is float64[10, 24]; expected B: float64[24, 10]"] * 4
    )


def test_a_call_after_an_error_on_one_rank():
    job = einmpi.program(PRODUCT, A=A, B=B)

    def on_rank(comm):
        step = einmpi.compile(job, comm)
        for wrong in (A.T, [[1, 2], [3]]):
            with pytest.raises(einmpi.InputError):
                step({"A": wrong if comm.rank == 1 else A, "B": B})
        return step({"A": A, "B": B})["Z"].gather()

    assert_close({"Z": on_ranks(3, on_rank)}, {"Z": A @ B})


@pytest.mark.parametrize("number", [3.5, np.array(3.5), np.array(3.5, ">f8"), np.float64(3.5)])
def test_numbers_as_inputs(number):
    job = einmpi.program("Z[i] = s * a[i]", a=(6,), s=())

    def on_rank(comm):
        spread = DistArray.from_global(np.array(3.5), comm)
        inputs = [{"a": np.ones(6), "s": given} for given in (number, spread)]
        return [einmpi.run(job, given, comm)["Z"].gather() for given in inputs]

    for found in on_ranks(3, on_rank):
        np.testing.assert_array_equal(found, np.full(6, 3.5))
    np.testing.assert_array_equal(einmpi.einsum(",i->i", 2.0, np.ones(3)), np.full(3, 2.0))


def test_another_program_on_one_rank_ends_all_before_anything_moves():
    jobs = [einmpi.program(text, A=A, B=B) for text in (PRODUCT, PRODUCT.replace("*", "+"))]

    def on_rank(comm):
        with pytest.raises(einmpi.EinmpiError) as caught:
            einmpi.run(jobs[comm.rank == 1], {"A": A, "B": B}, comm)
        assert comm.received == 0
        return str(caught.value)

    assert on_ranks(3, on_rank) == (
        "einmpi: rank 1 has another command, job, BLAS or version of einmpi than rank 0; all "
        "ranks must do the same"
    )


# ---- einsum -------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", RANKS)
def test_einsum_of_distarrays(ranks):
    def on_rank(comm):
        a, b = DistArray.from_global(A, comm), DistArray.from_global(B, comm)
        out = einmpi.einsum("ij,jk->ik", a, b)
        assert isinstance(out, DistArray)
        mixed = einmpi.einsum("ij,jk->k", a, B)
        return out.gather(), einmpi.einsum("ik->", out).gather(), mixed.gather()

    product, total, mixed = on_ranks(ranks, on_rank)
    assert_close(
        {"product": product, "total": total, "mixed": mixed},
        {"product": A @ B, "total": (A @ B).sum(), "mixed": np.einsum("ij,jk->k", A, B)},
    )


def test_einsum_of_arrays_is_each_ranks_own():
    def on_rank(comm):
        mine = A + comm.rank
        np.testing.assert_allclose(einmpi.einsum("ij,jk->ik", mine, B), mine @ B, rtol=1e-12)
        return True

    run_threads(3, on_rank)


# ---- processes ----------------------------------------------------------------------------------


def test_one_process_needs_no_mpi_library():
    code = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "from einmpi.cli.main import main\n"
        "sys.exit(main(['jobs/softmax.toml', '--quiet']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_call_is_checked():
    """Also those after one with arrays that look alike."""
    step = einmpi.compile(einmpi.program("Y[i] = X[i] * 2", X=(3,)))
    for given in (
        np.arange(3.0),
        np.ones(3),
        [1.0, 2.0, 3.0],
        einmpi.DistArray.from_global(np.ones(3)),
    ):
        expected = 2 * np.asarray(given.gather() if isinstance(given, einmpi.DistArray) else given)
        np.testing.assert_array_equal(step({"X": given})["Y"].gather(), expected)
    for wrong in (np.arange(3) * 1j, np.arange(4.0), np.zeros((3, 1))):
        with pytest.raises(einmpi.EinmpiError, match="inputs: X is"):
            step({"X": wrong})
    with pytest.raises(einmpi.EinmpiError, match="unknown input"):
        step({"X": np.ones(3), "W": np.ones(3)})
    with pytest.raises(einmpi.EinmpiError, match="not given"):
        step({})
