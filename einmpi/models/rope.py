"""Rotary positions: the inverse frequencies of each kind, computed as transformers computes them.

Each is a row of KINDS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.models.json_values import Values

Frequencies: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Rope:
    """How positions turn queries and keys: an angle is a position times an inverse frequency.

    `parameters` are the numbers that a kind has besides theta, with the names of config.json.
    `factors` are what the kind longrope divides frequencies by: in sequences of up to
    `original_max_position_embeddings` positions, and in longer ones.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    attention_factor: float = 1.0  # cosine and sine are multiplied by it
    parameters: Mapping[str, float] | None = None
    partial: float = 1.0  # the share of a head that is turned
    factors: tuple[tuple[float, ...], ...] = ()

    def width(self, head_width: int) -> int:
        """Return how many numbers of a head are turned."""
        return int(head_width * self.partial)

    @property
    def switch(self) -> int | None:
        """Return the length of the longest sequences with the first `factors`, if it matters."""
        if not self.factors:
            return None
        assert self.parameters is not None
        return int(self.parameters["original_max_position_embeddings"])

    def inverse_frequencies(self, head_width: int, length: int = 0) -> Frequencies:
        """Return the inverse frequency of each pair of numbers that are turned, in float32.

        `length` is the number of positions of the longest sequence.
        """
        width = self.width(head_width)
        exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
        powers = np.float32(self.theta) ** exponents
        if self.switch is not None:
            powers = powers * np.array(self.factors[length > self.switch], np.float32)
        plain = (np.float32(1) / powers).astype(np.float32)
        return KINDS[self.kind].scale(plain, self, width)


@dataclass(frozen=True)
class RopeKind:
    """A kind of rotary positions: the keys of config.json that it needs, and what it computes.

    `optional` are keys with the values that they have if they are missing.
    """

    scale: Callable[[Frequencies, Rope, int], Frequencies]
    needed: tuple[str, ...] = ()
    optional: Mapping[str, float] | None = None


def _unchanged(plain: Frequencies, rope: Rope, head_width: int) -> Frequencies:
    """Return inverse frequencies that do not depend on the length of a sequence."""
    return plain


def _linear(plain: Frequencies, rope: Rope, head_width: int) -> Frequencies:
    """Return inverse frequencies for positions that are divided by a factor."""
    return plain / np.float32(rope.factor)


def _llama3(plain: Frequencies, rope: Rope, head_width: int) -> Frequencies:
    """Return inverse frequencies of LLaMA 3.1: long waves are stretched, short ones are kept."""
    assert rope.parameters is not None
    factor = np.float32(rope.factor)
    low = rope.parameters["low_freq_factor"]
    high = rope.parameters["high_freq_factor"]
    context = rope.parameters["original_max_position_embeddings"]
    wave_length = np.float32(2 * math.pi) / plain
    smooth = (np.float32(context) / wave_length - np.float32(low)) / np.float32(high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    found = np.where(wave_length > context / low, plain / factor, between)
    return np.where(wave_length < context / high, plain, found).astype(np.float32)


def _yarn(plain: Frequencies, rope: Rope, head_width: int) -> Frequencies:
    """Return inverse frequencies of YaRN: a ramp from kept to stretched frequencies."""
    assert rope.parameters is not None
    context = rope.parameters["original_max_position_embeddings"]

    def pair_with(rotations: float) -> float:
        """Return which pair turns so often within the original context."""
        waves = context / (rotations * 2 * math.pi)
        return head_width * math.log(waves) / (2 * math.log(rope.theta))

    first = pair_with(rope.parameters["beta_fast"])
    last = pair_with(rope.parameters["beta_slow"])
    if rope.parameters["truncate"]:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, head_width - 1)
    if first == last:
        last += 0.001
    pairs = np.arange(head_width // 2, dtype=np.float32)
    ramp = np.clip((pairs - np.float32(first)) / np.float32(last - first), 0, 1)
    kept = 1 - ramp
    stretched = plain / np.float32(rope.factor)
    mixed: Frequencies = (stretched * (1 - kept) + plain * kept).astype(np.float32)
    return mixed


def yarn_attention_factor(factor: float, mscale: float, mscale_all: float) -> float:
    """Return what YaRN multiplies cosine and sine by, if config.json does not say it.

    `mscale` and `mscale_all` are 0 if they are not given.
    """

    def magnitude(weight: float) -> float:
        if factor <= 1:
            return 1.0
        return 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all:
        return magnitude(mscale) / magnitude(mscale_all)
    return magnitude(1.0)


KINDS: dict[str, RopeKind] = {
    "default": RopeKind(_unchanged),
    "linear": RopeKind(_linear, needed=("factor",)),
    "llama3": RopeKind(
        _llama3,
        needed=(
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
    ),
    "yarn": RopeKind(
        _yarn,
        needed=("factor", "original_max_position_embeddings"),
        optional={
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": True,
            "attention_factor": 0.0,
            "mscale": 0.0,
            "mscale_all_dim": 0.0,
        },
    ),
    # `Rope.factors` have scaled the frequencies.
    "longrope": RopeKind(
        _unchanged,
        needed=("original_max_position_embeddings",),
        optional={"factor": 0.0, "attention_factor": 0.0},
    ),
}
# Names that older files have.
_OTHER_NAMES = {"su": "longrope"}


def read_rope(values: Values, head_width: int, partial: bool = False) -> Rope:
    """Return how positions turn queries and keys: by rope_parameters, or keys of older files.

    `partial` says whether the architecture can turn a part of each head.
    """
    found = Values(values.file, {})
    for key in ("rope_parameters", "rope_scaling"):
        if values.has(key):
            found = values.inner(key)
            break
    return rope_from(found, values, head_width, partial)


def rope_from(found: Values, values: Values, head_width: int, partial: bool = False) -> Rope:
    """Return the rotary positions that some parameters describe, `values` what is missing there."""
    kind_key = "rope_type" if found.has("rope_type") else "type"
    kind = found.name(kind_key, (*KINDS, *_OTHER_NAMES), "default")
    kind = _OTHER_NAMES.get(kind, kind)
    holder = found if found.has("rope_theta") else values
    theta = holder.number("rope_theta", 10000.0)
    if theta <= 1:
        holder.wrong("rope_theta", "a number above 1")
    share = 1.0
    for holder in (values, found):
        share = holder.number("partial_rotary_factor", share)
        if share != 1 and not (partial and share < 1 and _is_even(head_width * share)):
            expected = "a share of a head that is an even number" if partial else "1"
            holder.wrong("partial_rotary_factor", expected)
    parameters = _parameters(kind, found, values)
    if kind == "llama3" and parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
        found.wrong("high_freq_factor", "a number above low_freq_factor")
    factor = parameters.get("factor", 1.0)
    attention_factor = 1.0
    if kind == "yarn":
        attention_factor = parameters["attention_factor"] or yarn_attention_factor(
            factor, parameters["mscale"], parameters["mscale_all_dim"]
        )
    factors: tuple[tuple[float, ...], ...] = ()
    if kind == "longrope":
        pairs = int(head_width * share) // 2
        factors = tuple(found.numbers(key, pairs) for key in ("short_factor", "long_factor"))
        context = parameters["original_max_position_embeddings"]
        if context < 2:
            found.wrong("original_max_position_embeddings", "a number of positions from 2 on")
        factor = factor or values.positive("max_position_embeddings") / context
        attention_factor = parameters["attention_factor"]
        if not attention_factor:
            attention_factor = math.sqrt(1 + math.log(max(factor, 1)) / math.log(context))
    return Rope(kind, theta, factor, attention_factor, parameters, share, factors)


def _is_even(width: float) -> bool:
    """Return whether so many numbers make pairs."""
    return int(width) >= 2 and int(width) % 2 == 0


def _parameters(kind: str, found: Values, values: Values) -> dict[str, float]:
    """Return the numbers that a kind of rotary positions has besides theta."""
    parameters: dict[str, float] = {}
    for key in KINDS[kind].needed:
        if key == "original_max_position_embeddings":
            positions = values.positive("max_position_embeddings")
            parameters[key] = found.number(key, values.number(key, float(positions)))
        else:
            parameters[key] = found.number(key)
    for key, default in (KINDS[kind].optional or {}).items():
        if isinstance(default, bool):
            parameters[key] = found.truth(key, default)
        else:
            parameters[key] = found.number(key, default, zero=default == 0)
    return parameters
