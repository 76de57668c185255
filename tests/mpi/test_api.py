"""The Python API on real ranks: communicators of the user's own, arrays and files."""

import h5py
import numpy as np
import pytest
from array_cases import DIFFERENT_CALLS

import einmpi
import einmpi.array_api as xp
from einmpi.files import writing as fill

pytestmark = pytest.mark.mpi(min_size=2)


def test_a_part_of_the_world(world):
    """A run on a communicator of some ranks leaves the user's own messages on it alone."""
    colour = world.rank % 2
    half = world.Split(colour, world.rank)
    a = np.arange(42.0).reshape(6, 7) + colour
    b = np.arange(35.0).reshape(7, 5)
    request = half.isend("mine", (half.rank + 1) % half.size, tag=7)
    job = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=a, B=b)
    z = einmpi.run(job, {"A": einmpi.DistArray.from_global(a, half), "B": b}, half)["Z"]
    assert half.recv(tag=7) == "mine"
    request.wait()
    np.testing.assert_allclose(z.gather(), a @ b)
    half.Free()


def test_a_freed_communicator_is_named_in_one_line_and_the_ranks_go_on(world):
    own = world.Dup()
    x = np.ones((40, 4))
    step = einmpi.compile(einmpi.program("Y[i] = sum(X[i,j])", X=x), own)
    y = [step(X=x)["Y"] for _ in range(3)][-1]  # the third call is prepared
    own.Free()
    line = "MPI: the communicator was freed; expected one that is in use"
    uses = (
        lambda: step(X=x),
        lambda: step(X=x.astype("float32")),
        lambda: y.gather(),
        lambda: (y + 1).gather(),
        lambda: y.sum(),
        lambda: einmpi.compile(step.job, own),
        lambda: einmpi.DistArray.from_global(x, own),
    )
    for use in uses:
        with pytest.raises(einmpi.EinmpiError) as caught:
            use()
        assert str(caught.value) == line
    assert world.allreduce(1) == world.size


def test_results_feed_the_next_call(world):
    """A DistArray stays on the ranks between calls, and einsum takes it as it is."""
    x = np.random.default_rng(3).standard_normal((24, 18))
    job = einmpi.program("Y[i,k] = sum(X[i,j] * X[k,j])", X=x)
    y = einmpi.run(job, {"X": x})["Y"]
    z = einmpi.einsum("ij,jk->ik", y, y)
    np.testing.assert_allclose(z.gather(), (x @ x.T) @ (x @ x.T), rtol=1e-10)
    assert (z.gather(root=world.size - 1) is None) == (world.rank != world.size - 1)


def test_datasets_are_read_together(world, shared_folder):
    whole = np.arange(300 * 170).reshape(300, 170) * 1.5
    path = shared_folder / "x.h5"
    if world.rank == 0:
        with h5py.File(path, "w") as file:
            file["whole"] = whole
            file.create_dataset("chunked", data=whole, chunks=(32, 50))
            file.create_dataset("packed", data=whole, chunks=(300, 7), compression="gzip")
        np.save(shared_folder / "f.npy", np.asfortranarray(whole))
    world.barrier()
    for name in ("whole", "chunked", "packed"):
        for parts in (None, (1, world.size), (1, 1)):
            found = einmpi.open_dataset(path, name, parts=parts)
            np.testing.assert_array_equal(found.gather(), whole, f"{name} {parts}")
            rows = einmpi.open_dataset(path, name, parts=parts, rows=slice(7, -4))
            np.testing.assert_array_equal(rows.gather(), whole[7:-4], f"{name} {parts}")
    np.testing.assert_array_equal(einmpi.open_dataset(shared_folder / "f.npy").gather(), whole)


@pytest.mark.parametrize("parts", ["rows", "columns", "whole"])
def test_datasets_are_written_together(parts, world, shared_folder, monkeypatch):
    monkeypatch.setattr(fill, "WINDOW_BYTES", 2**14)  # several rounds
    whole = np.random.default_rng(1).normal(size=(211, 97))
    cut = {"rows": (world.size, 1), "columns": (1, world.size), "whole": (1, 1)}[parts]
    path = shared_folder / "o.h5"
    made = einmpi.DistArray.from_global(whole, world, parts=cut)
    made.to_hdf5(path, "/plain")
    made.to_hdf5(path, "/packed", chunks=(20, 30), compression="gzip")
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["plain"][:], whole)
        np.testing.assert_array_equal(file["packed"][:], whole)
    world.barrier()
    assert [entry.name for entry in shared_folder.iterdir()] == ["o.h5"]


def test_wrong_input_is_an_error_on_every_rank(world):
    job = einmpi.program("Z[i] = 2 * X[i]", X=(8,))
    given = np.ones(8 if world.rank else 9)
    with pytest.raises(einmpi.InputError):
        einmpi.run(job, {"X": given})


@pytest.mark.parametrize("name", DIFFERENT_CALLS)
def test_different_calls_are_an_error_on_all_ranks(name, world):
    """With messages of MPI, which would wait for each other, or take one for another."""
    x = einmpi.DistArray.from_global(np.arange(48.0).reshape(8, 6))
    y = einmpi.DistArray.from_global(np.arange(36.0).reshape(6, 6))
    for _ in range(2):  # the second time, some of these calls are known
        with pytest.raises(einmpi.EinmpiError, match="; all ranks must make the same calls"):
            DIFFERENT_CALLS[name](x, y, int(world.rank == 1))
            float((x.sum() + y.sum()).gather())
        assert float(y.sum()) == 36 * 35 / 2


@pytest.mark.parametrize(
    ("setting", "values"),
    {
        "shared": ("auto", "off"),
        "overlap": ("auto", "off"),
        "memory": (None, "1GiB"),
        "strict": (False, True),
        "fast_math": (False, True),
        "strategy": ("eindecomp", "sqrt"),
        "recompute": ("auto", "none"),
        "pin": (None, {"Z": (1, 1)}),
    }.items(),
)
def test_different_settings_are_an_error_on_all_ranks(setting, values, world):
    x = np.arange(48.0).reshape(8, 6)
    value = values[world.rank == 1]
    job = einmpi.program("Z[i,k] = sum(X[i,j] * X[k,j])", X=x)
    compiled = einmpi.compile(job, **{setting: value})
    for call in (lambda: compiled(X=x), lambda: einmpi.run(job, {"X": x}, **{setting: value})):
        with pytest.raises(
            einmpi.EinmpiError, match=f"rank 1 calls compile.*{setting}.*same calls"
        ):
            call()
    np.testing.assert_allclose(einmpi.run(job, {"X": x})["Z"].gather(), x @ x.T)


def test_a_tensor_that_was_given_away_is_an_error_on_all_ranks(world, shared_folder):
    """They can go on: no rank is ended in the middle of a call."""
    job = einmpi.program("Y[i] = 2 * X[i]", X=(8,))
    step = einmpi.compile(job, carry={"X": "Y"}, donate=True)
    x = einmpi.DistArray.from_global(np.arange(8.0))
    layout = x.layout
    y = step(X=x)["Y"]
    uses = (
        lambda: x.gather(),
        lambda: x.gather(1),
        lambda: x.redistribute(layout),
        lambda: x.to_hdf5(shared_folder / "x.h5", "/x"),
        lambda: x.tolist(),
        lambda: x + 1,
        lambda: x.sum(),
        lambda: x[1:],
        lambda: step(X=x),
    )
    for use in uses:
        with pytest.raises(einmpi.InputError, match="it was given away to a compiled call"):
            use()
    np.testing.assert_array_equal(y.gather(), 2 * np.arange(8.0))


def test_arrays_of_the_standard(world):
    """New tensors of einmpi.array_api are on all ranks of the world."""
    x = xp.reshape(xp.arange(60.0), (12, 5))
    whole = np.arange(60.0).reshape(12, 5)
    assert x.comm.size == world.size
    np.testing.assert_array_equal(x[::-2, 1:].gather(), whole[::-2, 1:])
    np.testing.assert_array_equal(xp.roll(x, 7).gather(), np.roll(whole, 7))
    np.testing.assert_array_equal(
        xp.concat([x, x[3:]]).gather(), np.concatenate([whole, whole[3:]])
    )
    shuffled = x[np.random.default_rng(0).permutation(12)]
    np.testing.assert_array_equal(xp.sort(xp.reshape(shuffled, (-1,))).gather(), np.arange(60.0))
    assert xp.asarray([[x[0, 1], 2], [3, x[11, 4]]]).tolist() == [[1, 2], [3, 59]]
    values, counts = xp.unique_counts(x % 7)
    assert values.tolist() == list(range(7)) and int(xp.sum(counts)) == 60
    np.testing.assert_allclose(xp.cumulative_sum(x, axis=0).gather(), np.cumsum(whole, 0))
