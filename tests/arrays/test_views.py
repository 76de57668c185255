"""Views, copies and masks of DistArrays: what numpy's arrays do, on any number of ranks."""

import copy
import re

import numpy as np
import pytest
from mpi_helpers import needs_mpirun, run_mpi
from refusals import error
from view_cases import check_random_views

import einmpi
from einmpi import DistArray
from einmpi.comm.threads import run_threads
from einmpi.planner.mesh import Mesh
from einmpi.schedule.layout import Layout

WHOLE = np.arange(20.0).reshape(5, 4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_random_views(ranks):
    for seed in range(4):
        check_random_views(100 * ranks + seed, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_many_random_views(ranks):
    for seed in range(1000, 1060):
        check_random_views(100 * ranks + seed, ranks)


def on_both(change, ranks, whole=WHOLE):
    """Change an array of numpy and a DistArray; compare them, and all that the function returns."""
    expected = whole.copy()
    expected_parts = change(expected, lambda array: array) or ()

    def on_rank(comm):
        x = DistArray.from_global(whole.copy(), comm)
        parts = change(x, lambda array: DistArray.from_global(array, comm)) or ()
        pairs = [(x, expected), *zip(parts, expected_parts, strict=True)]
        for ours, theirs in pairs:
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            np.testing.assert_array_equal(ours.gather(), theirs)

    run_threads(ranks, on_rank)


def element_of_a_row(x, spread):
    x[0][1] = 99


def all_of_a_slice(x, spread):
    y = x[1:3]
    y[:] = 0
    return (y,)


def row_in_place(x, spread):
    row = x[0]
    row += 1
    return (row,)


def rows_in_a_loop(x, spread):
    for row in x:
        row *= 2


def reshaped(x, spread):
    x.reshape(-1)[3] = 7
    np.reshape(x, (2, 10))[:, ::3] = spread(np.arange(8.0).reshape(2, 4))
    x.ravel()[-1] = 5


def result_of_a_ufunc(x, spread):
    np.add(spread(WHOLE[:3]), 1, out=x[2:])
    np.modf(x[0] + 0.5, out=(x[1], x[2]))


def view_of_a_view(x, spread):
    y = x[1:].T[::2]
    z = y.reshape(2, 2, 2)[1]
    x *= 3
    z[0] = spread(np.array([5.0, 6.0]))
    y.T[-1] -= 1
    return y, z


def columns(x, spread):
    for column in range(4):
        x[:, column] = spread(WHOLE[:, 0]) * column
    x.T[1] += 1
    np.swapaxes(x, 0, 1)[2][1:3] = 4


def reads_after_writes(x, spread):
    views = x[1:4, 1], x.T, x[..., None], x[2, 3, ...], np.diagonal(x), np.flip(x), x.squeeze()
    x += 1
    x[2] = -1
    return views


def copies(x, spread):
    found = x[[0, 1]], x[x > 3], x.copy(), x.flatten(), x.T.ravel(), x[:, :2].reshape(-1)
    for part in (*found, x[1, 2], np.roll(x, 0), np.clip(x, None, None), np.take(x, 1, axis=0)):
        part += 1
    x *= 2
    return found


def tensors_in_a_slice(x, spread):
    end = spread(np.array(2))
    y = x[:end]
    end += 1
    x += 1
    return (y,)


def without_dimensions(x, spread):
    y = x[1, 2, ...]
    y += 5
    x[3, 3] += 1
    return (y,)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "change",
    [
        element_of_a_row,
        all_of_a_slice,
        row_in_place,
        rows_in_a_loop,
        reshaped,
        result_of_a_ufunc,
        view_of_a_view,
        columns,
        reads_after_writes,
        copies,
        tensors_in_a_slice,
        without_dimensions,
    ],
)
def test_writes_and_reads(change, ranks):
    on_both(change, ranks)


@pytest.mark.parametrize("ranks", [1, 3])
def test_parts_of_complex_numbers(ranks):
    def change(x, spread):
        real = x.real
        x.real[1] = spread(np.array([np.inf, 1, 2, 3]))
        x[2:].imag[:, ::2] += 4
        return real, x.imag

    on_both(change, ranks, WHOLE + 1j)


ROWS = np.array([True, False, True, True, False])
COLUMNS = np.array([False, True, True, False])
MASKED = [
    (WHOLE > 7, 5.0),
    (WHOLE > 7, np.arange(12.0)),
    (WHOLE > 7, [3.0]),
    (WHOLE > 99, []),
    ((WHOLE > 7,), np.arange(12.0)),
    ((WHOLE > 7, ...), np.arange(12.0)),
    (ROWS, 1.0),
    (ROWS, np.arange(12.0).reshape(3, 4)),
    (ROWS, [[1.0], [2.0], [3.0]]),
    ([True, False, True, True, False], np.arange(4.0)),
    ((slice(None), COLUMNS), np.arange(10.0).reshape(5, 2)),
    ((ROWS, 1), np.arange(3.0)),
    ((1, COLUMNS), np.arange(2.0)),
    ((slice(1, 4), COLUMNS), 2.0),
    ((ROWS, slice(1, 3)), [1.0, 2.0]),
    ((ROWS, [0, 3, 1]), np.arange(3.0)),
    ((ROWS, None, slice(None, None, 2)), np.arange(2.0)),
    (True, 4.0),
    (np.array(False), 4.0),
    (np.zeros((0, 4), bool), 4.0),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_masks(ranks):
    """Masks of all elements, of rows and of columns: selected, assigned, and changed in place."""

    def on_rank(comm):
        def spread(part):
            return DistArray.from_global(part, comm) if isinstance(part, np.ndarray) else part

        for key, value in MASKED:
            spread_key = tuple(map(spread, key)) if isinstance(key, tuple) else spread(key)
            for own_key, own_value in (
                (key, value),
                (spread_key, DistArray.from_global(np.asarray(value), comm)),
            ):
                x = DistArray.from_global(WHOLE.copy(), comm)
                expected = WHOLE.copy()
                np.testing.assert_array_equal(x[own_key].gather(), expected[key], str(key))
                x[own_key] = own_value
                expected[key] = value
                np.testing.assert_array_equal(x.gather(), expected, str(key))
                x[own_key] += 1
                expected[key] += 1
                np.testing.assert_array_equal(x.gather(), expected, str(key))

    run_threads(ranks, on_rank)


@pytest.mark.parametrize("ranks", [1, 3])
def test_tables_beside_slices(ranks):
    whole = np.arange(120).reshape(2, 3, 4, 5)
    one, two = [0, 2, 1], [[1], [3]]
    keys = [
        (slice(None), one, two),
        (slice(None), one, slice(None), [1, 4, 2]),
        (1, slice(None), one),
        (slice(None), 0, slice(1, 3), two),
        ([0, 1, 1], one, ..., 2),
        (slice(None), [1], ..., 0, [2, 3]),
        (..., whole[0, 0] % 2 == 0),
        (whole[:, :, 0, 0] > 30, slice(None, None, 2)),
        (0, None, one, ..., [4, 0, 1]),
    ]

    def on_rank(comm):
        for key in keys:
            x = DistArray.from_global(whole, comm)
            expected = whole.copy()
            assert x[key].shape == expected[key].shape, key
            np.testing.assert_array_equal(x[key].gather(), expected[key], str(key))
            values = np.arange(expected[key].size).reshape(expected[key].shape)
            x[key] = values if comm.size == 1 else DistArray.from_global(values, comm)
            expected[key] = values
            np.testing.assert_array_equal(x.gather(), expected, str(key))

    run_threads(ranks, on_rank)


@pytest.mark.parametrize("ranks", [1, 2])
def test_values_that_do_not_fit(ranks):
    cases = [
        (WHOLE > 7, [1.0, 2.0], ValueError),
        (WHOLE > 7, WHOLE, TypeError),
        (ROWS, WHOLE, ValueError),
        ((ROWS, 1), [1.0, 2.0], ValueError),
        (np.ones(4, bool), 1.0, IndexError),
        ((slice(None), ROWS), 1.0, IndexError),
        ((ROWS, ROWS), 1.0, IndexError),
        (([0, 1], slice(None), 0), 1.0, IndexError),
    ]

    def on_rank(comm):
        x = DistArray.from_global(WHOLE, comm)
        for key, value, kind in cases:
            for array in (WHOLE.copy(), x):
                with pytest.raises(kind):
                    array[key] = value
        np.testing.assert_array_equal(x.gather(), WHOLE)

    run_threads(ranks, on_rank)


def test_other_elements_keep_their_digits():
    """A mask does not compute in a dtype that holds both the value and the elements."""
    x = DistArray.from_global(np.array([2**62 + 1, 5]))
    x[x < 9] = 1.0
    assert x.tolist() == [2**62 + 1, 1]


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_cannot_be_written_is_read_only(ranks):
    def on_rank(comm):
        x = DistArray.from_global(WHOLE.copy(), comm)
        for view in (
            np.broadcast_to(x, (2, 5, 4)),
            np.diagonal(x),
            np.diagonal(x)[1:],
            np.broadcast_to(x, (2, 5, 4)).T,
            np.imag(x)[0],
            np.broadcast_arrays(x, WHOLE)[0],
        ):
            for write in (lambda: view.fill(1), lambda: np.add(view, 1, out=view)):  # noqa: B023
                with pytest.raises(ValueError, match="assignment destination is read-only"):
                    write()
            x += 1
            assert np.max(view) == np.max(view.gather())
        part = x[1:4, 1:3]
        if comm.size > 1 and part.local.size:
            with pytest.raises(ValueError, match="read-only"):
                part.local[...] = 1

    run_threads(ranks, on_rank)


def test_a_view_moves_elements_when_it_must():
    def on_rank(comm):
        x = DistArray.from_global(np.arange(16.0), comm)
        y = x[1:]
        before = comm.received
        y + y
        np.exp(y)
        assert comm.received == before
        x *= 2
        assert comm.received == before  # nobody has read the view
        y + y
        read = comm.received - before
        before = comm.received
        y + y
        assert comm.received == before
        x[1:] += 1  # the view is read and written back once
        return read, comm.received - before

    assert run_threads(2, on_rank) == [(8, 8), (0, 8)]


def test_printing_waits_for_nobody():
    def on_rank(comm):
        x = DistArray.from_global(WHOLE.copy(), comm)
        row = x[1]
        assert "4." in repr(row) if comm.rank == 0 else True
        x += 1
        if comm.rank == 0:
            assert repr(row) == ("DistArray(changed since it was read, shape=(4,), dtype=float64)")
        np.testing.assert_array_equal(row.gather(), WHOLE[1] + 1)
        assert re.match(r"DistArray\(\[", repr(row))

    run_threads(2, on_rank)


@pytest.mark.parametrize("ranks", [1, 2])
def test_views_of_views_hold_one_copy(ranks):
    """A loop may shorten a vector as often as it likes."""

    def on_rank(comm):
        x = DistArray.from_global(np.arange(200.0), comm)
        rest = x
        for _ in range(150):
            rest = rest[1:]
        x += 1
        rest[0] = -5
        assert rest.base is x
        assert (float(x[150]), float(rest[1])) == (-5, 152)

    run_threads(ranks, on_rank)


def test_ranks_without_a_block_read_a_view_too():
    reads = [
        lambda y: y.sum(0),
        lambda y: y.T + 0,
        lambda y: np.broadcast_to(y, (3, 2, 2)).sum(0),
        lambda y: y @ y,
        lambda y: copy.copy(y) * 1,
    ]

    def on_rank(comm):
        x = DistArray.from_global(WHOLE, comm).redistribute(Layout(Mesh(2), (5, 4), (None,)))
        y = x[:2, 1:3]
        for number, read in enumerate(reads):
            x += 1
            expected = WHOLE[:2, 1:3] + number + 1
            np.testing.assert_array_equal(read(y).gather(), read(expected))

    run_threads(5, on_rank)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_view_of_what_was_given_away(ranks):
    job = einmpi.program("y[i] = x[i] * 2", x=(6,))

    def on_rank(comm):
        step = einmpi.compile(job, comm, carry={"x": "y"}, donate=True)
        x = DistArray.from_global(np.arange(6.0), comm)
        for _ in range(3):  # later calls are prepared
            whole = x[...]
            assert step(x=whole)["y"].tolist() == [0, 2, 4, 6, 8, 10]
            assert "it was given away" in error(lambda: whole + 1)  # noqa: B023
        assert x.tolist() == [0, 1, 2, 3, 4, 5]  # the step wrote into a copy
        part = x[2:]
        step(x=x)
        assert "it was given away" in error(lambda: part + 1)

    run_threads(ranks, on_rank)


@needs_mpirun
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_real_ranks(ranks, tmp_path):
    code = (
        "import numpy as np, einmpi\n"
        "from view_cases import RandomProgram\n"
        "x = einmpi.DistArray.from_global(np.arange(35.0).reshape(7, 5))\n"
        "for seed in range(12):\n"
        "    RandomProgram(seed, x.comm).run(14)\n"
        "part = x.T[1:, ::2]\n"
        "x += 1\n"
        "part.to_hdf5('part.h5', '/part')\n"
        "stored = einmpi.open_dataset('part.h5', '/part').gather()\n"
        "x += 1\n"
        "total = einmpi.run('t = sum(p[i,j])', p=part)['t']\n"
        "assert float(total) == stored.sum() + stored.size\n"
        "print('done', flush=True)\n"
    )
    done = run_mpi(ranks, code, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.split() == ["done"] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_elements_that_are_read_after_they_were_written(ranks):
    """Where source and target overlap, the source is as it was before; numpy's not always is."""
    changes = (
        (lambda x: x, slice(None, None, 2), lambda x: x[:3]),
        (lambda x: x, slice(1, None), lambda x: x[:-1]),
        (lambda x: x, np.array([0, 0, 1, 1, 0, 1], bool), lambda x: x[:3]),
        (lambda x: x[::-1], slice(2, 5), lambda x: x[1:4]),
        (lambda x: x[1:], [0, 2, 1], lambda x: x[2:5]),
    )

    def on_rank(comm):
        for target, key, source in changes:
            expected = np.arange(6)
            found = DistArray.from_global(expected, comm)
            target(expected)[key] = source(expected).copy()
            target(found)[key] = source(found)
            np.testing.assert_array_equal(found.gather(), expected)

    run_threads(ranks, on_rank)
