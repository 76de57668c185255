"""The random numbers of the language as its documentation defines them, for arrays of integers.

No code of the package is used here: words have 32 bits, logarithms and sines are numpy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# What each function adds to four times the number of its index values.
CODES = {"uniform": 0, "uniform32": 0, "normal": 1, "bernoulli": 2}
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def philox4x32(counter: Sequence[Any], key: Sequence[Any]) -> tuple[np.ndarray, ...]:
    """Return the four words that ten rounds make of four words and a key of two words."""
    c0, c1, c2, c3 = (np.atleast_1d(np.asarray(word, np.uint32)) for word in counter)
    k0, k1 = (np.atleast_1d(np.asarray(word, np.uint32)) for word in key)
    for _ in range(10):
        high0, low0 = _product(c0, 0xD2511F53)
        high1, low1 = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = k0 + np.uint32(0x9E3779B9)
        k1 = k1 + np.uint32(0xBB67AE85)
    return c0, c1, c2, c3


def _product(word: np.ndarray, factor: int) -> tuple[np.ndarray, np.ndarray]:
    product = word.astype(np.uint64) * np.uint64(factor)
    return (product >> np.uint64(32)).astype(np.uint32), product.astype(np.uint32)


def splitmix64(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def words_of(name: str, seed: Any, *values: Any) -> tuple[np.ndarray, ...]:
    """Return the four words for a seed and index values, which are broadcast together."""
    arrays = [np.asarray(value).astype(np.int64) for value in (seed, *values)]
    key, *rest = (
        array.astype(np.uint64).reshape(-1) for array in map(np.copy, np.broadcast_arrays(*arrays))
    )
    code = np.uint64(CODES[name] + 4 * len(values))
    key = splitmix64(key + np.atleast_1d(code) * GOLDEN)
    while len(rest) > 2:
        key = splitmix64(key + rest.pop(0) * GOLDEN)
    counter = []
    for value in [*rest, np.zeros_like(key), np.zeros_like(key)][:2]:
        counter += [value.astype(np.uint32), (value >> np.uint64(32)).astype(np.uint32)]
    found = philox4x32(counter, (key.astype(np.uint32), (key >> np.uint64(32)).astype(np.uint32)))
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    return tuple(word.reshape(shape) for word in found)


def random_numbers(name: str, *arguments: Any) -> np.ndarray:
    """Return what a call of uniform, uniform32, normal or bernoulli means.

    normal is that of exact arithmetic up to a few units in the last place.
    """
    integers = arguments[1:] if name == "bernoulli" else arguments
    w0, w1, w2, w3 = (word.astype(np.uint64) for word in words_of(name, *integers))
    first = (w0 | (w1 << np.uint64(32))) >> np.uint64(11)
    if name == "normal":
        second = ((w2 | (w3 << np.uint64(32))).astype(np.int64) >> 11).astype(np.float64)
        radius = np.sqrt(-2 * np.log((first.astype(np.float64) + 1) / 2.0**53))
        return radius * np.sin(np.pi * (second / 2.0**53))
    uniform = first.astype(np.float64) / 2.0**53
    if name == "bernoulli":
        return np.asarray(uniform < np.asarray(arguments[0], np.float64))
    if name == "uniform32":
        return (np.floor(uniform * 2**24) / 2**24).astype(np.float32)
    return uniform
