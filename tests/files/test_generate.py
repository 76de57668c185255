"""Generated inputs: the same values however they are cut, the right distribution, a stream that
never changes."""

from itertools import pairwise, product
from math import prod

import numpy as np
import pytest

from einmpi.files import reading as module
from einmpi.files.reading import GENERATORS, generate, words
from einmpi.files.specs import InputSpec
from einmpi.graph.dtypes import numpy_dtypes
from einmpi.job.inputs import RANDOM

CASES = [
    (random, dtype)
    for random in GENERATORS
    for dtype in numpy_dtypes()
    if random != "normal" or np.dtype(dtype).kind in "fc"
]

WORDS_OF_SEED_1 = [
    5599841837815857887,
    15655913098571550255,
    2880178291573394738,
    573812481542357666,
]
UNIFORM = [0.3035680343067586, 0.8487087496857769, 0.1561347780434731]
INTEGERS = [531, 37, 492, 262, 132]
BOOLS = [True, True, False, False, False, True, False, True]
NORMAL = [-0.5141658112314124, 1.0309111217613403, -1.0104712725037317]
COMPLEX = [(-0.5141658112314124 + 1.0309111217613403j)]


def spec(random, dtype, seed=7):
    high = 1000 if np.dtype(dtype).kind == "i" else 1
    return InputSpec("A", random=random, seed=seed, low=-3 if high == 1000 else 0, high=high)


def test_every_kind_the_job_file_knows_is_made():
    assert (*GENERATORS, "sparse") == RANDOM


@pytest.mark.parametrize("random, dtype", CASES)
def test_any_split_gives_the_values_of_the_whole(random, dtype, monkeypatch):
    whole = generate(spec(random, dtype), dtype, 0, 203)
    assert whole.dtype == np.dtype(dtype)
    assert whole.shape == (203,)
    for cuts in ([0, 203], [0, 1, 2, 3, 4, 5, 203], [0, 7, 7, 100, 202, 203], [0, 64, 128, 203]):
        parts = [generate(spec(random, dtype), dtype, a, b) for a, b in pairwise(cuts)]
        assert np.concatenate(parts).tobytes() == whole.tobytes()
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 13)
    assert generate(spec(random, dtype), dtype, 0, 203).tobytes() == whole.tobytes()
    assert generate(spec(random, dtype), dtype, 150, 180).tobytes() == whole[150:180].tobytes()


def test_a_range_far_inside_is_made_directly():
    far = 2**52
    near = generate(spec("uniform", "float64"), "float64", far - 3, far + 5)
    assert (
        near[3:].tobytes()
        == generate(spec("uniform", "float64"), "float64", far, far + 5).tobytes()
    )


def test_words_are_those_of_numpys_own_philox():
    assert (words(7, 0, 64) == np.random.Philox(key=7).random_raw(64)).all()


def test_the_stream_never_changes():
    assert words(1, 0, 4).tolist() == WORDS_OF_SEED_1
    assert generate(spec("uniform", "float64", 1), "float64", 0, 3).tolist() == UNIFORM
    assert generate(spec("uniform", "int64", 1), "int64", 0, 5).tolist() == INTEGERS
    assert generate(spec("uniform", "bool", 1), "bool", 0, 8).tolist() == BOOLS
    # The inverse of the normal distribution may change in the last digits with the library that
    # computes it.
    np.testing.assert_allclose(
        generate(spec("normal", "float64", 1), "float64", 0, 3), NORMAL, rtol=1e-13
    )
    np.testing.assert_allclose(
        generate(spec("normal", "complex128", 1), "complex128", 0, 1), COMPLEX, rtol=1e-13
    )


def test_a_float32_is_a_rounded_float64():
    wide, narrow = (
        generate(spec("normal", dtype), dtype, 0, 50) for dtype in ("float64", "float32")
    )
    assert (wide.astype(np.float32) == narrow).all()


def test_seeds_differ():
    first, second = (
        generate(spec("normal", "float64", seed), "float64", 0, 10_000) for seed in (1, 2)
    )
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05  # five standard deviations


def test_moments():
    # 200,000 values: a mean strays by σ/447, so five standard deviations are 0.012 σ; variances a
    # little more.
    normal = generate(spec("normal", "float64"), "float64", 0, 200_000)
    assert abs(normal.mean()) < 0.012
    assert abs(normal.var() - 1) < 0.016
    assert abs((normal**4).mean() - 3) < 0.11
    uniform = generate(spec("uniform", "float64"), "float64", 0, 200_000)
    assert abs(uniform.mean() - 1 / 2) < 0.0033
    assert abs(uniform.var() - 1 / 12) < 0.001
    pairs = generate(spec("normal", "complex128"), "complex128", 0, 200_000)
    assert abs(np.corrcoef(pairs.real, pairs.imag)[0, 1]) < 0.012
    assert abs(generate(spec("uniform", "bool"), "bool", 0, 200_000).mean() - 1 / 2) < 0.006


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
def test_uniform_stays_below_high(dtype):
    wide = InputSpec("A", random="uniform", seed=1, low=-2.5, high=3)
    values = generate(wide, dtype, 0, 100_000).view(np.dtype(dtype).type(0).real.dtype)
    assert values.min() >= -2.5
    assert values.max() < 3  # float16 would round to 3 about once in a thousand


def test_uniform_over_all_numbers_there_are():
    ends = InputSpec("A", random="uniform", seed=1, low=-1.7e308, high=1.7e308)
    assert np.isfinite(generate(ends, "float64", 0, 1000)).all()


@pytest.mark.parametrize("low, high", [(-3, 4), (0, 1), (-(2**63), 2**63 - 1), (2**62, 2**62 + 3)])
def test_uniform_integers(low, high):
    values = generate(
        InputSpec("A", random="uniform", seed=3, low=low, high=high), "int64", 0, 1000
    )
    assert low <= int(values.min()) and int(values.max()) < high
    if high - low < 10:
        assert set(values.tolist()) == set(range(low, high))


def test_normal_is_finite_at_both_ends_of_the_words(monkeypatch):
    monkeypatch.setattr(
        module, "words", lambda seed, start, stop: np.array([0, 2**64 - 1], np.uint64)
    )
    values = generate(spec("normal", "float64"), "float64", 0, 2)
    assert values[0] == pytest.approx(-8.2095, abs=1e-4)
    assert values[1] == pytest.approx(8.2095, abs=1e-4)


def test_constants_and_counting():
    assert generate(spec("zeros", "complex64"), "complex64", 5, 8).tolist() == [0, 0, 0]
    assert generate(spec("ones", "bool"), "bool", 5, 7).tolist() == [True, True]
    assert generate(spec("arange", "int32"), "int32", 5, 8).tolist() == [5, 6, 7]
    assert generate(spec("arange", "bool"), "bool", 0, 3).tolist() == [False, True, True]
    assert generate(spec("arange", "float16"), "float16", 70_000, 70_001).tolist() == [np.inf]


@pytest.mark.parametrize(("spare", "chunk"), [(0, 2**20), (2**12, 2**20), (2**12, 60), (7, 1)])
@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_boxes_are_those_of_the_whole(monkeypatch, spare, chunk, dtype):
    """Row by row, many rows at once, or less than one."""
    bound = (3, 4, 5, 6)
    whole = generate(spec("normal", dtype), dtype, 0, prod(bound)).reshape(bound)
    monkeypatch.setattr(module, "SPARE_ELEMENTS", spare)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk)
    for number in range(len(bound) + 1):
        for cuts in product((slice(1, 3), slice(2, 3)), repeat=number):
            for place in (0, len(bound) - number):
                box = [slice(0, extent) for extent in bound]
                box[place : place + number] = cuts
                target = (
                    np.full(whole[tuple(box)].shape, np.nan, dtype).T.copy().T
                )  # not one run of memory
                module.fill_box(spec("normal", dtype), bound, tuple(box), target)
                np.testing.assert_array_equal(target, whole[tuple(box)])


@pytest.mark.parametrize(
    ("bound", "box"),
    [
        ((40, 50), (slice(10, 40), slice(0, 50))),
        ((2, 1000), (slice(0, 2), slice(1, 999))),
        ((2, 1000), (slice(0, 2), slice(500, 900))),
    ],
)
def test_a_large_box_is_made_in_parts(monkeypatch, bound, box):
    """A box may be as large as it is because it lies in a file, so nothing of its size is made in
    memory."""
    made = []

    def count(spec, name, start, stop):
        made.append(stop - start)
        return np.zeros(stop - start)

    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 64)
    monkeypatch.setattr(module, "generate", count)
    module.fill_box(
        spec("zeros", "float64"), bound, box, np.empty([along.stop - along.start for along in box])
    )
    assert max(made) <= 64 and sum(made) == prod(along.stop - along.start for along in box)


def test_nothing_at_all():
    assert generate(spec("normal", "float32"), "float32", 4, 4).shape == (0,)
