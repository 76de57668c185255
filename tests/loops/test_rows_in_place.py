"""Rows that a compiled step writes into tensors which the caller has given away."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import einmpi
from einmpi.comm.threads import run_threads
from einmpi.kernels import updates as placed_rows
from einmpi.kernels.cpu import row_updates as row_writes
from einmpi.kernels.prepared import address_of
from einmpi.kernels.updates import find_placed_rows

# Programs with the values that they write: at index at[b] of u, for each b.
VALUES = {
    "row[b,d]": lambda row, at, other: row,
    "row[b,d] * 2 + b": lambda row, at, other: row * 2 + np.arange(len(at))[:, None],
    "other[d,0] - row[b,d]": lambda row, at, other: other[:, 0] - row,
    "row[at[b] % n,d]": lambda row, at, other: row[at % len(at)],
}
PLACES = {
    "u == at[b]": lambda at: at,
    "at[b] == u": lambda at: at,
    "u == (at[b] + shift) % 4": lambda at: (at + 1) % 4,
    "u == shift + 2": lambda at: np.full_like(at, 3),
}


def written_by_numpy(cache, places, values):
    found = cache.copy()
    for number, place in enumerate(places):
        if 0 <= place < cache.shape[1]:
            found[number, place] = values[number]
    return found


@settings(max_examples=25, deadline=None)
@given(
    value=st.sampled_from(list(VALUES)),
    place=st.sampled_from(list(PLACES)),
    ranks=st.integers(1, 6),
    batch=st.integers(1, 4),
    positions=st.integers(1, 7),
    seed=st.integers(0, 99),
)
def test_rows_of_a_cache(value, place, ranks, batch, positions, seed):
    rng = np.random.default_rng(seed)
    cache = rng.normal(size=(batch, positions, 3))
    row = rng.normal(size=(batch, 3))
    other = rng.normal(size=(3, 2))
    text = f"next[b,u,d] = where({place}, {value}, cache[b,u,d])\ntotal[b] = sum(next[b,u,d])"
    inputs = {"cache": cache, "row": row, "other": other, "shift": np.array(1)}
    inputs["at"] = np.zeros(batch, int)
    job = einmpi.program(text, outputs=["next", "total"], n=batch, **inputs)
    assert find_placed_rows(job.graph["next"].computed_einsum) is not None
    used = {name: array for name, array in inputs.items() if name in job.graph.by_name}
    calls = [rng.integers(-2, positions + 2, batch) for _ in range(5)]

    def on_rank(comm):
        step = einmpi.compile(job, comm=comm, carry={"cache": "next"}, donate=True)
        found = []
        current = cache
        received = []
        for at in calls:
            given_now = {**used, "cache": current}
            if "at" in given_now:
                given_now["at"] = at
            made = step(given_now)
            current = made["next"]
            received.append(step.measured.received)
            found.append((current.gather().copy(), made["total"].gather()))
        (plan, _) = next(iter(step.ready.values()))
        return found, received, plan.bytes_predicted

    results = run_threads(ranks, on_rank)
    expected = cache
    for number, at in enumerate(calls):
        values = VALUES[value](row, at, other)
        expected = written_by_numpy(expected, PLACES[place](at), values)
        for found, _, _ in results:
            np.testing.assert_array_equal(found[number][0], expected)
            np.testing.assert_allclose(found[number][1], expected.sum(axis=(1, 2)))
        moved = sum(received[number] for _, received, _ in results)
        assert moved == results[0][2]


@pytest.mark.parametrize(
    "text",
    [
        "where(u == at[b], row[b,u], cache[b,u])",
        "where(u == at[u % n], row[b,0], cache[b,u])",
        "where(u == at[b] + u, row[b,0], cache[b,u])",
        "where(u <= at[b], row[b,0], cache[b,u])",
        "where(u == at[b], row[b,0], cache[b,u] + 1)",
    ],
)
def test_what_is_not_a_write_of_rows(text):
    shapes = {"row": (2, 4), "cache": (2, 4), "at": np.zeros(2, int)}
    job = einmpi.program(f"next[b,u] = {text}", n=2, **shapes)
    assert find_placed_rows(job.graph["next"].computed_einsum) is None


def test_places_that_are_no_integers_are_compared_as_numbers():
    text = "next[b,u] = where(u == at[b], row[b], cache[b,u])"
    cache = np.zeros((2, 3))
    at = np.array([1.0, 1.5])
    job = einmpi.program(text, row=np.ones(2), cache=cache, at=at)
    step = einmpi.compile(job, carry={"cache": "next"}, donate=True)
    made = step(row=np.ones(2), cache=cache, at=at)["next"]
    for _ in range(3):
        made = step(row=np.ones(2), cache=made, at=at)["next"]
    np.testing.assert_array_equal(made.gather(), [[0, 1, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("place", "places"),
    [
        ("at[b] / 2", [0.5, 1.0, 1.5]),
        ("at[b] * 0.5", [0.5, 1.0, 1.5]),
        ("sqrt(at[b])", np.sqrt([1, 2, 3])),
        ("log(at[b] - 1)", [-np.inf, 0, np.log(2)]),
        ("1.5", [1.5, 1.5, 1.5]),
    ],
)
def test_places_computed_from_integers_that_are_none_themselves(place, places):
    at = np.array([1, 2, 3])
    cache = np.arange(12.0).reshape(3, 4)
    row = np.array([100.0, 200.0, 300.0])
    text = f"next[b,u] = where(u == {place}, row[b], cache[b,u])"
    job = einmpi.program(text, cache=cache, row=row, at=at)
    inputs = {"cache": cache, "row": row, "at": at}
    used = {name: array for name, array in inputs.items() if name in job.graph.by_name}
    is_place = np.arange(4) == np.reshape(places, (3, 1))

    def on_rank(comm):
        step = einmpi.compile(job, comm=comm, carry={"cache": "next"}, donate=True)
        made = cache
        for _ in range(4):
            made = step({**used, "cache": made})["next"]
        return made.gather()

    for found in run_threads(2, on_rank):
        np.testing.assert_array_equal(found, np.where(is_place, row[:, None], cache))


def test_calls_with_given_caches_are_prepared():
    """The cache stays where it is, and arrays that were given away cannot be used again."""
    text = "next[b,u,d] = where(u == at[b], row[b,d], cache[b,u,d])"
    cache = np.zeros((2, 8, 4))
    row = np.ones((2, 4))
    job = einmpi.program(text, cache=cache, row=row, at=np.zeros(2, int))
    step = einmpi.compile(job, carry={"cache": "next"}, donate=True)
    current = step(cache=cache, row=row, at=np.zeros(2, int))["next"]
    addresses = set()
    for number in range(1, 8):
        before = current
        current = step(cache=before, row=row * number, at=np.array([number, 0]))["next"]
        addresses.add(address_of(current.local))
        with pytest.raises(einmpi.EinmpiError, match="given away"):
            before.gather()
    assert len(addresses) == 1
    assert any(known.prepared is not None for known in step.known_calls.calls.values())
    expected = np.zeros((2, 8, 4))
    expected[0] = np.arange(8)[:, None]
    expected[:, 0] = [[1] * 4, [7] * 4]
    np.testing.assert_array_equal(current.gather(), expected)


def test_a_cache_that_is_given_twice_stays_as_it_is():
    """What another input shares is copied, in prepared calls as in all others."""
    text = "next[u,d] = where(u == at, row[d], cache[u,d])\nold[u,d] = other[u,d] * 2"
    job = einmpi.program(text, cache=(4, 3), other=(4, 3), row=(3,), at=np.array(0))
    step = einmpi.compile(job, carry={"cache": "next"}, donate=True)
    cache = step(cache=np.ones((4, 3)), other=np.ones((4, 3)), row=np.ones(3), at=np.array(0))
    current = cache["next"]
    for number in range(1, 6):
        made = step(cache=current, other=current, row=np.full(3, number), at=np.array(1))
        np.testing.assert_array_equal(made["old"].gather()[1], np.full(3, 2 * max(1, number - 1)))
        current = made["next"]


@pytest.mark.parametrize("place", ["at[b] / 2", "at[b] + 0.5", "sqrt(at[b])", "1.5"])
def test_a_place_between_two_indices_writes_nothing(place):
    cache = np.zeros((3, 4, 2))
    at = np.array([2, 3, 4])
    used = {"row": np.ones((3, 2)), "at": at} if "at" in place else {"row": np.ones((3, 2))}
    text = f"next[b,u,d] = where(u == {place}, row[b,d], cache[b,u,d])"
    job = einmpi.program(text, cache=cache, **used)
    step = einmpi.compile(job, carry={"cache": "next"}, donate=True)
    indices = {"at[b] / 2": at / 2, "at[b] + 0.5": at + 0.5, "sqrt(at[b])": np.sqrt(at)}
    places = indices.get(place, np.full(3, 1.5))
    is_written = np.arange(4) == places[:, None]
    current = cache
    for _ in range(4):
        current = step({**used, "cache": current})["next"]
    expected = np.where(is_written[:, :, None], 1.0, cache)
    np.testing.assert_array_equal(current.gather(), expected)


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("factor", [1, 2])
def test_values_that_take_much_memory_are_not_computed_at_once(monkeypatch, factor, fits):
    """No plan counts them. Values that are rows of an input need no memory of their own."""
    cache = np.zeros((3, 5, 64))
    row = np.arange(3 * 64.0).reshape(3, 64)
    at = np.array([4, 0, 2])
    made = []

    class CountedNumpy:  # for one module: numba, imported meanwhile, would know another np.empty
        def __getattr__(self, name):
            return getattr(np, name)

        def empty(self, *arguments):
            made.append(np.empty(*arguments))
            return made[-1]

    monkeypatch.setattr(placed_rows, "MOST_VALUE_BYTES", row.nbytes if fits else row.nbytes - 1)
    monkeypatch.setattr(row_writes, "np", CountedNumpy())
    value = "row[b,d]" if factor == 1 else "row[b,d] * 2"
    text = f"next[b,u,d] = where(u == at[b], {value}, cache[b,u,d])"
    job = einmpi.program(text, cache=cache, row=row, at=at)
    step = einmpi.compile(job, carry={"cache": "next"}, donate=True)
    current = einmpi.DistArray.from_global(cache)
    for _ in range(3):
        current = step({"cache": current, "row": row, "at": at})["next"]
    np.testing.assert_array_equal(current.gather(), written_by_numpy(cache, at, factor * row))
    computes_all_rows = any(array.shape == row.shape for array in made)
    assert computes_all_rows == (fits and factor == 2)
