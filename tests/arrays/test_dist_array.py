"""Ways to make DistArrays, numbers and pickles of them, and what they say of themselves."""

import copy
import pickle

import numpy as np
import pytest
from array_cases import DIFFERENT_CALLS
from mpi_helpers import needs_mpirun, run_mpi
from refusals import error

from einmpi import DistArray
from einmpi.comm.threads import run_threads
from einmpi.errors import EinmpiError, InputError

WHOLE = np.arange(42.0).reshape(7, 6)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_filled_arrays(ranks):
    def on_rank(comm):
        np.testing.assert_array_equal(DistArray.zeros((3, 5), "int32", comm).gather(), 0)
        np.testing.assert_array_equal(DistArray.ones(7, comm=comm).gather(), np.ones(7))
        full = DistArray.full((2, 9), 2.5, comm=comm, parts=(1, 1))
        np.testing.assert_array_equal(full.gather(), np.full((2, 9), 2.5))
        ramp = DistArray.from_function(lambda i, j: 6 * i + j, (7, 6), comm=comm)
        np.testing.assert_array_equal(ramp.gather(), WHOLE)
        assert DistArray.from_function(lambda: 3, (), "int64", comm).gather() == 3
        return [
            DistArray.random((9, 4), comm=comm, seed=5).gather(),
            DistArray.random((9, 4), "float32", comm, distribution="normal").gather(),
        ]

    alone = [
        DistArray.random((9, 4), seed=5).gather(),
        DistArray.random((9, 4), "float32", distribution="normal").gather(),
    ]
    for found in run_threads(ranks, on_rank):
        np.testing.assert_equal(found, alone)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6])
def test_from_local_in_order_of_ranks(ranks):
    """Blocks of any lengths, some of them empty."""
    borders = sorted(np.random.default_rng(ranks).integers(0, 8, ranks - 1).tolist())

    def on_rank(comm):
        limits = [0, *borders, 7]
        block = WHOLE[limits[comm.rank] : limits[comm.rank + 1]]
        return DistArray.from_local(block, comm=comm).gather()

    for found in run_threads(ranks, on_rank):
        np.testing.assert_array_equal(found, WHOLE)


def test_from_local_in_a_layout():
    def on_rank(comm):
        cut = DistArray.from_global(WHOLE, comm, parts=(2, 2))
        by_layout = DistArray.from_local(cut.local, cut.layout, comm)
        assert by_layout.local is cut.local and by_layout.layout == cut.layout
        by_parts = DistArray.from_local(cut.local, (2, 2), comm)
        assert by_parts.layout == cut.layout
        np.testing.assert_array_equal(by_parts.gather(), WHOLE)
        wrong = cut.local[:1] if comm.rank == 1 else cut.local
        return error(DistArray.from_local, wrong, cut.layout, comm)

    messages = run_threads(4, on_rank)
    wrong = "from_local: the block of rank 1 has shape (1, 3); expected shape (3, 3)"
    assert messages == [wrong] * 4


def test_blocks_that_do_not_fit():
    def on_rank(comm):
        message = error(DistArray.from_local, np.ones((2, 3 + comm.rank)), None, comm)
        other = error(DistArray.from_local, np.float64(1), None, comm)
        return message, other

    message, other = run_threads(2, on_rank)[1]
    assert message.startswith("from_local: the block of rank 1 has shape (2, 4)")
    assert other == "from_local: block is a number; expected an array with dimensions"


def test_numbers():
    def on_rank(comm):
        x = DistArray.from_global(WHOLE, comm)
        assert x.sum().item() == WHOLE.sum() and float(x[1, 2]) == 8
        assert x.item(2, 3) == 15.0 and int(x.argmax()) == 41
        assert bool((x == x).all()) and complex(x.max()) == 41
        assert [1, 2, 3][DistArray.from_global(np.array(1), comm)] == 2
        assert f"{float(x.norm()):.6f}" == f"{np.linalg.norm(WHOLE):.6f}"
        assert (x.nbytes, x.itemsize, len(x)) == (42 * 8, 8, 7)
        assert [float(row.sum()) for row in x] == WHOLE.sum(1).tolist()
        assert x.tolist() == WHOLE.tolist()
        return True

    assert run_threads(3, on_rank) == [True] * 3


def test_a_rank_alone_reads_what_every_rank_has():
    """A program may print on one rank: the others do nothing, and would be waited for."""
    texts = []

    def on_rank(comm):
        x = DistArray.from_global(WHOLE, comm)
        everywhere = DistArray.from_global(WHOLE, comm, parts=(1, 1))
        total = x.sum()
        place = x.argmax()
        flag = (x > 50).any()
        if comm.rank == 1:
            numbers = (float(total), total.item(), complex(total), int(place), bool(flag))
            texts.append(
                (*numbers, "abc"[place % 3], everywhere.item(2, 3), everywhere.item(-1, 0))
            )
            texts.append(f"{total:.2f} {total / 2:.1f} {np.sqrt(total):.3f}")
            assert "861" in repr(total) and "861" in str(total)
        return (x - total).sum().gather()

    for found in run_threads(3, on_rank, limit=20):
        assert found == WHOLE.sum() - 42 * WHOLE.sum()
    assert texts == [(861, 861, 861, 41, False, "c", 15, 36), "861.00 430.5 29.343"]


@pytest.mark.sampled(19)
@pytest.mark.parametrize("name", DIFFERENT_CALLS)
@pytest.mark.parametrize("is_known", [False, True], ids=["new", "known"])
def test_different_calls_are_an_error_on_all_ranks(name, is_known):
    """At the latest when ranks next send each other something. They can go on afterwards."""
    call = DIFFERENT_CALLS[name]

    def on_rank(comm):
        x = DistArray.from_global(np.arange(48.0).reshape(8, 6), comm)
        y = DistArray.from_global(np.arange(36.0).reshape(6, 6), comm)
        for number in (0, 1) if is_known else ():
            call(x, y, number)
        x.gather()
        with pytest.raises(EinmpiError, match="; all ranks must make the same calls") as caught:
            call(x, y, int(comm.rank == 1))
            (x.sum() + y.sum()).gather()
        assert caught.value.everywhere
        np.testing.assert_array_equal(y.sum(0).gather(), np.arange(36.0).reshape(6, 6).sum(0))
        return str(caught.value)

    for ranks in (2, 3):
        said = run_threads(ranks, on_rank, limit=20)
        assert len(set(said)) == 1 and "rank 1" in said[0]


def test_calls_are_described_by_what_they_mean():
    """Not by how a rank has stored it, or by the names of its objects."""

    def on_rank(comm):
        x = DistArray.from_global(WHOLE, comm)
        index = np.int64(2) if comm.rank else 2
        rows = x[index : index + 2] + (np.float64(3.0) if comm.rank else 3.0)
        columns = np.asfortranarray(WHOLE) if comm.rank else WHOLE
        return np.where(rows > 0, rows, columns[2:4]).gather()

    for found in run_threads(2, on_rank):
        np.testing.assert_array_equal(found, WHOLE[2:4] + 3)


def test_on_one_rank_it_is_an_array():
    x = DistArray.from_global(WHOLE)
    np.testing.assert_array_equal(np.asarray(x), WHOLE)
    assert np.asarray(x, "float32").dtype == np.float32
    np.testing.assert_array_equal(np.from_dlpack(x), WHOLE)

    def on_rank(comm):
        y = DistArray.from_global(WHOLE, comm)
        for call in (np.asarray, np.from_dlpack):
            with pytest.raises((TypeError, BufferError), match=r"gather\(\) returns an array"):
                call(y)

    run_threads(2, on_rank)


def test_numpy_gathers_what_it_may():
    def on_rank(comm):
        y = DistArray.from_global(WHOLE, comm)
        with DistArray.gather_up_to(WHOLE.nbytes):
            np.testing.assert_array_equal(np.asarray(y.T[1:], "float32"), WHOLE.T[1:])
            with DistArray.gather_up_to("1 B"), pytest.raises(TypeError, match="allows 1 B"):
                np.asarray(y)
            whole = np.asarray(y)
            whole[0] = 7  # memory of its own
            np.testing.assert_array_equal(y.gather(), WHOLE)
        with pytest.raises(TypeError, match=r"DistArray.gather_up_to\(size\) lets numpy"):
            np.asarray(y)

    run_threads(3, on_rank)
    with pytest.raises(InputError, match="gather_up_to: 'much' is not an amount of memory"):
        DistArray.gather_up_to("much").__enter__()


def test_copies_and_pickles():
    def on_rank(comm):
        x = DistArray.from_global(WHOLE, comm)
        deep, shallow = copy.deepcopy(x), copy.copy(x)
        x += 1
        np.testing.assert_array_equal(deep.gather(), WHOLE)
        np.testing.assert_array_equal(shallow.gather(), WHOLE)
        data = pickle.dumps(x)
        with DistArray.unpickle_on(comm):
            again = pickle.loads(data)
        assert again.layout == x.layout and again.comm is comm
        np.testing.assert_array_equal(again.gather(), WHOLE + 1)
        if comm.rank == 1:
            assert "the block of rank 1 of 3 is loaded by rank 0 of 1" in error(pickle.loads, data)

    run_threads(3, on_rank)


@needs_mpirun
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_on_real_ranks(ranks):
    code = (
        "import pickle\n"
        "import numpy as np, einmpi\n"
        "from mpi4py import MPI\n"
        "from array_cases import CASES, inputs\n"
        "from einmpi import DistArray\n"
        "world = MPI.COMM_WORLD\n"
        "arrays = inputs()\n"
        "cut = {name: DistArray.from_global(array) for name, array in arrays.items()}\n"
        "assert cut['x'].comm is world or cut['x'].comm == world\n"
        "assert DistArray.ones(3, comm=cut['x'].comm).own_comm is cut['x'].own_comm\n"
        "for name, function in CASES.items():\n"
        "    found = np.asarray(function(**cut).gather())\n"
        "    np.testing.assert_allclose(found, function(**arrays), 1e-11, 1e-11, err_msg=name)\n"
        "block = np.full((world.rank + 1, 2), world.rank)\n"
        "joined = DistArray.from_local(block).gather()\n"
        "assert joined[:, 0].tolist() == [r for r in range(world.size) for _ in range(r + 1)]\n"
        "again = pickle.loads(pickle.dumps(cut['x']))\n"
        "np.testing.assert_array_equal(again.gather(), arrays['x'])\n"
        "half = world.Split(world.rank // 2)\n"
        "y = DistArray.random((5, 3), comm=half)\n"
        "with DistArray.unpickle_on(half):\n"
        "    z = pickle.loads(pickle.dumps(y))\n"
        "assert float((y - z).norm()) == 0 and z.comm == half\n"
        "print('done', flush=True)\n"
    )
    done = run_mpi(ranks, code)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.split() == ["done"] * ranks


def test_blocks_that_are_not_of_one_tensor():
    """Every rank raises the same error, which names the block."""

    def on_rank(comm):
        odd = comm.rank == 1
        blocks = {
            "the block of rank 1 is float32; expected float64, as on rank 0": np.zeros(
                3, "float32" if odd else "float64"
            ),
            "the block of rank 1 has shape (2, 2); expected 1 dimension, as on rank 0": np.zeros(
                (2, 2) if odd else 4
            ),
            "the block of rank 1 has shape (2, 4); expected shape (n, 3)": np.zeros(
                (2, 4) if odd else (3, 3)
            ),
        }
        for says, block in blocks.items():
            message = error(lambda block=block: DistArray.from_local(block, comm=comm))
            assert message == f"from_local: {says}"

    run_threads(3, on_rank)


def test_a_function_of_indices_that_returns_another_shape():
    message = error(lambda: DistArray.from_function(lambda i, j: np.ones(7), (4, 3)))
    assert message == (
        "from_function: the function returns shape (7,); expected shape (4, 3), that of its "
        "indices together"
    )
    assert DistArray.from_function(lambda i, j: 2 * j, (4, 3)).tolist() == [[0, 2, 4]] * 4


def test_odd_values_and_numbers_of_other_kinds():
    def on_rank(comm):
        x = DistArray.from_global(np.arange(6.0), comm)
        for value in (b"abc", np.array([b"a", b"b", b"c"]), np.array([1, "q", 2], object)):
            with pytest.raises(ValueError, match="could not convert string to float"):
                x[:3] = value  # on all ranks, whichever of them has these elements
        x[:3] = np.array([1, 2.5, 2], object)
        np.testing.assert_array_equal(x.gather(), [1, 2.5, 2, 3, 4, 5])
        swapped = x.astype(">f8")
        assert swapped.dtype.isnative
        np.testing.assert_array_equal(swapped[1:].gather(), [2.5, 2, 3, 4, 5])
        for shape in ((2.7, 3), "23"):
            with pytest.raises(TypeError):
                x.reshape(shape)
        with pytest.raises(ValueError, match="cannot reshape"):
            x[:0].reshape(0, -1)
        assert np.average(x[:2], weights=[1, 2]) == np.average([1, 2.5], weights=[1, 2])
        large = np.full(7, 3e4, np.float16)
        assert DistArray.from_global(large, comm).mean() == large.mean() == 3e4

    run_threads(3, on_rank)
