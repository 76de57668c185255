"""Prompts of a model: tokens in one array, padded at their end, and the length of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from einmpi.errors import InputError
from einmpi.kernels.given import plain_array
from einmpi.models.sampling import Tokens
from einmpi.units import counted

if TYPE_CHECKING:
    from einmpi.models.config import Config

_EXPECTED_TOKENS = "integers [position] or [batch, position]"


@dataclass(frozen=True)
class Prompts:
    """The tokens of each sequence [batch, position], and how many of them count."""

    tokens: Tokens
    lengths: Tokens

    @property
    def is_padded(self) -> bool:
        """Whether a sequence is shorter than the array."""
        return bool((self.lengths < self.tokens.shape[1]).any())

    def padded(self, width: int) -> Prompts:
        """Return the prompts in an array of another width."""
        count = min(width, self.tokens.shape[1])
        tokens = np.zeros((len(self.tokens), width), np.int64)
        tokens[:, :count] = self.tokens[:, :count]
        return Prompts(tokens, self.lengths)


def rounded_length(length: int) -> int:
    """Return the length that prompts of this length are padded to: at most an eighth is added.

    Prompts of all lengths then need few programs, each of which has to be planned.
    """
    power = 1 << (length - 1).bit_length()  # the lowest power of two that is not below
    step = max(1, power // 16)
    return -(-length // step) * step


def make_prompts(tokens: Any, lengths: Any, config: Config, new: int = 0) -> Prompts:
    """Return the prompts as an array; refuse tokens and lengths that the model cannot take.

    `new` tokens will follow each of them.
    """
    if not isinstance(new, Integral) or isinstance(new, bool) or new < 0:
        raise InputError("new", f"{new!r} tokens requested", "a number of tokens from 0 on")
    rows = _rows(tokens)
    if not rows:
        raise InputError("tokens", "there are no prompts", "at least one")
    counts = [len(row) for row in rows]
    if lengths is not None:
        counts = _checked_lengths(lengths, counts)
    padded = np.zeros((len(rows), max(counts)), np.int64)
    for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if count == 0:
            raise InputError("tokens", f"prompt {number} is empty", "at least one token")
        counting = row[:count]
        outside = (counting < 0) | (counting >= config.vocabulary)
        if outside.any():
            problem = f"token {int(counting[outside][0])} is outside of the vocabulary"
            raise InputError("tokens", problem, f"tokens from 0 to {config.vocabulary - 1}")
        padded[number, :count] = counting
    # The last token is chosen, but nothing is computed with it.
    if max(counts) + max(0, new - 1) > config.positions:
        problem = f"{counted(max(counts), 'token')} in a prompt"
        if new:
            problem += f" and {counted(new, 'new one')}"
        raise InputError("tokens", problem, f"at most {config.positions}, the model's positions")
    return Prompts(padded, np.array(counts, np.int64))


def _rows(tokens: Any) -> list[npt.NDArray[np.integer[Any]]]:
    """Return the prompts one by one: a single one may be given without a list around it."""
    if hasattr(tokens, "redistribute"):  # a DistArray
        tokens = tokens.gather()
    tokens = plain_array("tokens", "a prompt", tokens)
    is_one_array = isinstance(tokens, np.ndarray) and tokens.ndim <= 1
    is_single = is_one_array or not isinstance(tokens, Iterable)
    items: list[Any] = [tokens] if is_single else list(tokens)
    if not is_single and items and np.ndim(_array("tokens", items[0])) == 0:
        items = [items]
    rows = []
    for item in items:
        row = _array("tokens", item)
        if row.size == 0:
            row = row.astype(np.int64)
        if row.ndim != 1 or row.dtype.kind not in "iu":
            problem = f"a prompt is {row.dtype.name} with {counted(row.ndim, 'dimension')}"
            raise InputError("tokens", problem, _EXPECTED_TOKENS)
        rows.append(row)
    return rows


def _array(place: str, values: Any) -> npt.NDArray[Any]:
    """Return values as an array; refuse lists of unequal lengths."""
    try:
        return np.asarray(values)
    except ValueError:
        problem = "numbers and lists, or lists of unequal lengths, are mixed"
        raise InputError(place, problem, "integers in one list") from None


def _checked_lengths(lengths: Any, counts: Sequence[int]) -> list[int]:
    """Return the lengths that the caller gives, if the prompts have as many tokens."""
    given = _array("lengths", lengths)
    if given.dtype.kind not in "iu" or given.shape != (len(counts),):
        expected = f"{counted(len(counts), 'integer')}, one for each prompt"
        raise InputError("lengths", f"they are {given.dtype.name}{list(given.shape)}", expected)
    found = [int(length) for length in given]
    for number, (length, count) in enumerate(zip(found, counts, strict=True)):
        if not 1 <= length <= count:
            problem = f"prompt {number} has length {length}"
            raise InputError("lengths", problem, f"a length from 1 to {count}")
    return found


def checked_layers(layers: Sequence[int], config: Config, before_norm: bool) -> tuple[int, ...]:
    """Return the layers whose hidden states are computed; refuse those that do not exist."""
    given = _array("layers", layers)
    if given.size and (given.dtype.kind not in "iu" or given.ndim != 1):
        raise InputError("layers", f"{layers!r} requested", "a list of integers")
    chosen = tuple(int(layer) for layer in given)
    for layer in chosen:
        if not 0 <= layer <= config.layers:
            expected = f"a layer from 0, the embedding, to {config.layers}"
            raise InputError("layers", f"there is no layer {layer}", expected)
    if len(set(chosen)) != len(chosen):
        raise InputError("layers", f"{list(chosen)} requested", "different layers")
    if before_norm and config.layers not in chosen:
        problem = f"layer {config.layers} is not asked for, and no norm follows the others"
        raise InputError("before_norm", problem, f"layer {config.layers} among the layers")
    return chosen


def checked_stop_tokens(stop: Any) -> Tokens:
    """Return the tokens after which a sequence ends; refuse what is not a list of integers."""
    is_list = isinstance(stop, list | tuple) or (isinstance(stop, np.ndarray) and stop.ndim > 0)
    if not is_list or not all(isinstance(token, int | np.integer) for token in stop):
        raise InputError("stop", f"{stop!r:.60} requested", "a list of tokens such as [2]")
    return np.array(list(stop), np.int64)
