"""Choose the next token of each sequence from its logits: greedily, or at random by a seed.

A random choice depends on the seed, the sequence and the position only, not on earlier choices.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.errors import EinmpiError, InputError
from einmpi.kernels.reference import plain_array
from einmpi.models.config import GENERATION_FILE
from einmpi.models.json_values import read_values
from einmpi.units import counted

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from einmpi.models.config import Config


Logits: TypeAlias = npt.NDArray[np.floating[Any]]
Tokens: TypeAlias = npt.NDArray[np.int64]

_MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: with temperature 0 the likeliest one, else at random.

    `top_k` keeps the likeliest tokens; 0 keeps all. `top_p` keeps the fewest likeliest tokens whose
    probabilities add up to it. `min_p` keeps those that are at least so many times as likely as the
    likeliest. `repetition_penalty` makes tokens that are in the text less likely: positive logits
    are divided by it, negative ones multiplied.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


# What each number is, whether it is allowed, how messages show one that is not, what is expected.
_RULES: dict[str, tuple[type, Callable[[Any], bool], str, str]] = {
    "temperature": (Real, lambda value: value >= 0, "{:g}", "a number from 0 on"),
    "top_k": (
        Integral,
        lambda value: value >= 0,
        "{} tokens",
        "a number from 0 on; 0 keeps all tokens",
    ),
    "top_p": (Real, lambda value: 0 < value <= 1, "{:g}", "a probability above 0 and up to 1"),
    "min_p": (Real, lambda value: 0 <= value <= 1, "{:g}", "a share from 0 to 1"),
    "repetition_penalty": (
        Real,
        lambda value: value > 0,
        "{:g}",
        "a positive number; 1 has no effect",
    ),
    "seed": (
        Integral,
        lambda value: 0 <= value <= _MAX_SEED,
        "{}",
        "an integer from 0 to 2**64 - 1",
    ),
}


def check_sampling(sampling: Sampling, as_flags: bool = False) -> None:
    """Refuse values out of range. With `as_flags`, messages name flags of the command line."""

    def place(name: str) -> str:
        return "--" + name.replace("_", "-") if as_flags else name

    for name, (kind, is_allowed, shown, expected) in _RULES.items():
        value = getattr(sampling, name)
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if not is_number or (kind is Real and not isfinite(value)):
            number = "a finite number" if kind is Real else "an integer"
            raise InputError(place(name), f"{value!r} requested", number)
        if not is_allowed(value):
            raise InputError(place(name), f"{shown.format(value)} requested", expected)
    if sampling.temperature == 0:
        for name in ("top_k", "top_p", "min_p", "seed"):
            if getattr(sampling, name) != getattr(Sampling, name):
                problem = "the likeliest token is chosen, as the temperature is 0"
                raise InputError(place(name), problem, f"{place('temperature')} above 0 with it")


def choose_tokens(
    logits: Logits,
    sampling: Sampling,
    positions: Iterable[int],
    seen: npt.NDArray[np.bool_] | None = None,
) -> Tokens:
    """Return the next token of each sequence; `positions` are those that the tokens will have.

    `seen` says which tokens of the vocabulary each text has.
    """
    scores = logits.astype(np.float64)
    if np.isnan(scores).any():
        raise EinmpiError("generate: a logit is not a number; the model or its dtype is unsuitable")
    if seen is not None:
        penalty = float(sampling.repetition_penalty)
        scores = np.where(seen, np.where(scores > 0, scores / penalty, scores * penalty), scores)
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
    if sampling.min_p > 0:
        kept = int(np.count_nonzero(probabilities >= sampling.min_p * probabilities[0]))
        order = order[:kept]
        probabilities = probabilities[:kept]
    return order, probabilities


def _random_fraction(seed: int, sequence: int, position: int) -> float:
    """Return the random number from 0 to below 1 that belongs to a position of a sequence."""
    counter = np.array([0, 0, sequence, position], np.uint64)
    key = np.array([seed, 0], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())


def seen_tokens(
    prompts: Prompts, sampling: Sampling, vocabulary: int
) -> npt.NDArray[np.bool_] | None:
    """Return which tokens each text has, if a penalty makes them less likely."""
    if sampling.repetition_penalty == 1:
        return None
    seen = np.zeros((len(prompts.tokens), vocabulary), bool)
    for row, tokens, length in zip(seen, prompts.tokens, prompts.lengths, strict=True):
        row[tokens[:length]] = True
    return seen


def read_sampling(folder: str) -> dict[str, Any]:
    """Return how generation_config.json wants tokens to be chosen: fields of a Sampling."""
    path = os.path.join(folder, GENERATION_FILE)
    if not os.path.exists(path):
        return {}
    values = read_values(path)
    found: dict[str, Any] = {}
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        if values.has(name):
            found[name] = values.number(name, zero=name in ("temperature", "min_p"))
            if name.endswith("_p") and found[name] > 1:
                values.wrong(name, "a number up to 1")
    if values.has("top_k"):
        found["top_k"] = values.count("top_k")
    if not values.truth("do_sample", False):
        found["temperature"] = 0.0
    return {"temperature": 1.0, **found}


# ---- tokens --------------------------------------------------------------------------------------
#
# Text becomes tokens and tokens become text, by the tokenizer.json of a model's folder.


TOKENIZER_FILE = "tokenizer.json"
_SETTINGS_FILE = "tokenizer_config.json"
_INCOMPLETE = "\ufffd"  # what a tokenizer gives for the first bytes of a character


def open_tokenizer(folder: str) -> TextTokenizer:
    """Read the tokenizer of a model's folder. It needs the package tokenizers."""
    try:
        import tokenizers
    except ImportError:
        problem = "the package tokenizers is not installed"
        hint = "install einmpi[llama], or give tokens instead of text: --prompts"
        raise InputError("einmpi llama", problem, hint=hint) from None
    file = os.path.join(folder, TOKENIZER_FILE)
    if not os.path.isfile(file):
        hint = "give tokens instead of text: --prompts"
        raise InputError(folder, f"there is no {TOKENIZER_FILE}", "a folder with it", hint)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(file)
    except Exception as error:  # the library raises plain Exception
        reason = " ".join(str(error).split())
        problem = f"it cannot be read as a tokenizer: {reason:.200}"
        raise InputError(file, problem, "an undamaged file") from None
    return TextTokenizer(tokenizer, _first_word(folder))


def _first_word(folder: str) -> str | None:
    """Return the token that the settings want in front of every text, as text."""
    settings = read_tokenizer_settings(folder)
    if not settings.get("add_bos_token"):
        return None
    word = settings.get("bos_token")
    if isinstance(word, dict):  # older files write all properties of the token
        word = word.get("content")
    return word if isinstance(word, str) else None


def read_tokenizer_settings(folder: str) -> dict[str, Any]:
    """Return what tokenizer_config.json says; nothing if it is not there or cannot be read."""
    try:
        with open(os.path.join(folder, _SETTINGS_FILE), encoding="utf-8") as opened:
            settings = json.load(opened)
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


class TextTokenizer:
    """A tokenizer, and the token that stands in front of every text, if the model wants one."""

    def __init__(self, tokenizer: Tokenizer, first_word: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.first_token = None
        if first_word is not None:
            self.first_token = tokenizer.token_to_id(first_word)

    def encode(self, text: str, is_complete: bool = False) -> list[int]:
        """Return the tokens of a text, with those that the model wants around it.

        A text that is complete, as a chat template makes it, has these already.
        """
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=not is_complete).ids
        if is_complete:
            return tokens
        if self.first_token is not None and tokens[:1] != [self.first_token]:
            return [self.first_token, *tokens]
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, without tokens that stand for no text."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


class TextStream:
    """The text of tokens that come one by one, in pieces that can be printed one after another.

    A token may be a part of a character, and the text of one may depend on the token before it.
    """

    def __init__(self, tokenizer: TextTokenizer, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.tokens = list(prompt)
        self.context = 0  # the first token that may influence the text that is still to come
        self.printed = len(self.tokens)  # the first token whose text has not been returned

    def add(self, token: int) -> str:
        """Return the text that can be printed after one more token; it may be empty."""
        self.tokens.append(token)
        return self._text(is_last=False)

    def finish(self) -> str:
        """Return the text that is left after the last token."""
        return self._text(is_last=True)

    def _text(self, is_last: bool) -> str:
        before = self.tokenizer.decode(self.tokens[self.context : self.printed])
        text = self.tokenizer.decode(self.tokens[self.context :])
        if not is_last and (len(text) <= len(before) or text.endswith(_INCOMPLETE)):
            return ""
        self.context = self.printed
        self.printed = len(self.tokens)
        return text[len(before) :]


# ---- prompts -------------------------------------------------------------------------------------
#
# Prompts of a model: tokens in one array, padded at their end, and the length of each.


_EXPECTED_TOKENS = "integers [position] or [batch, position]"


@dataclass(frozen=True)
class Prompts:
    """The tokens of each sequence [batch, position], and how many of them count."""

    tokens: Tokens
    lengths: Tokens

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
    switch = config.rope.switch
    if switch is not None and max(counts) <= switch < max(counts) + new - 1:
        problem = f"{counted(max(counts), 'token')} in a prompt and {counted(new, 'new one')}"
        expected = f"{switch + 1} in all, or a longer prompt: rotary positions change there"
        raise InputError("tokens", problem, f"at most {expected}")
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
