"""Choose the next token of each sequence from its logits: greedily, or at random by a seed.

A random choice depends on the seed, the sequence and the position only, not on earlier choices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from numbers import Integral, Real
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.errors import EinmpiError, InputError

Logits: TypeAlias = npt.NDArray[np.floating[Any]]
Tokens: TypeAlias = npt.NDArray[np.int64]

_MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: with temperature 0 the likeliest one, else at random.

    `top_k` keeps the likeliest tokens; 0 keeps all. `top_p` keeps the fewest likeliest tokens whose
    probabilities add up to it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def check_sampling(sampling: Sampling, as_flags: bool = False) -> None:
    """Refuse values out of range. With `as_flags`, messages name flags of the command line."""

    def place(name: str) -> str:
        return "--" + name.replace("_", "-") if as_flags else name

    _check_number(place("temperature"), sampling.temperature)
    if sampling.temperature < 0:
        problem = f"{sampling.temperature:g} requested"
        raise InputError(place("temperature"), problem, "a number from 0 on")
    _check_integer(place("top_k"), sampling.top_k)
    if sampling.top_k < 0:
        problem = f"{sampling.top_k} tokens requested"
        raise InputError(place("top_k"), problem, "a number from 0 on; 0 keeps all tokens")
    _check_number(place("top_p"), sampling.top_p)
    if not 0 < sampling.top_p <= 1:
        problem = f"{sampling.top_p:g} requested"
        raise InputError(place("top_p"), problem, "a probability above 0 and up to 1")
    _check_integer(place("seed"), sampling.seed)
    if not 0 <= sampling.seed <= _MAX_SEED:
        problem = f"{sampling.seed} requested"
        raise InputError(place("seed"), problem, "an integer from 0 to 2**64 - 1")
    if sampling.temperature == 0:
        for name in ("top_k", "top_p", "seed"):
            if getattr(sampling, name) != getattr(Sampling, name):
                problem = "the likeliest token is chosen, as the temperature is 0"
                raise InputError(place(name), problem, f"{place('temperature')} above 0 with it")


def _check_number(place: str, value: object) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not isfinite(value):  # type: ignore[arg-type]  # is_number says so
        raise InputError(place, f"{value!r} requested", "a finite number")


def _check_integer(place: str, value: object) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise InputError(place, f"{value!r} requested", "an integer")


def choose_tokens(logits: Logits, sampling: Sampling, positions: Iterable[int]) -> Tokens:
    """Return the next token of each sequence; `positions` are those that the tokens will have."""
    scores = logits.astype(np.float64)
    if np.isnan(scores).any():
        raise EinmpiError("generate: a logit is not a number; the model or its dtype is unsuitable")
    if sampling.temperature == 0:
        likeliest: Tokens = scores.argmax(axis=-1).astype(np.int64)
        return likeliest
    chosen = np.empty(len(scores), np.int64)
    for sequence, position in enumerate(positions):
        tokens, probabilities = candidates(scores[sequence], sampling)
        fraction = _random_fraction(sampling.seed, sequence, int(position))
        summed = np.cumsum(probabilities)
        place = np.searchsorted(summed, fraction * summed[-1], side="right")
        chosen[sequence] = tokens[min(int(place), len(tokens) - 1)]
    return chosen


def candidates(
    scores: npt.NDArray[np.float64], sampling: Sampling
) -> tuple[Tokens, npt.NDArray[np.float64]]:
    """Return the tokens that may be chosen, the likeliest first, and their probabilities.

    The probabilities add up to 1 before the tokens outside of `top_p` are left out.
    """
    order: Tokens = np.argsort(-scores, kind="stable").astype(np.int64)
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    with np.errstate(over="ignore"):  # a tiny temperature makes them -inf, whose probability is 0
        scaled = (scores[order] - scores[order[0]]) / sampling.temperature
    probabilities = np.exp(scaled)
    probabilities /= probabilities.sum()
    if sampling.top_p < 1:
        before = np.cumsum(probabilities) - probabilities
        kept = max(1, int(np.count_nonzero(before < sampling.top_p)))
        order = order[:kept]
        probabilities = probabilities[:kept]
    return order, probabilities


def _random_fraction(seed: int, sequence: int, position: int) -> float:
    """Return the random number from 0 to below 1 that belongs to a position of a sequence."""
    counter = np.array([0, 0, sequence, position], np.uint64)
    key = np.array([seed, 0], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())
