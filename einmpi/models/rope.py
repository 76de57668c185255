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

Frequencies: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Rope:
    """How positions turn queries and keys: an angle is a position times an inverse frequency.

    `parameters` are the numbers that a kind has besides theta, with the names of config.json.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    attention_factor: float = 1.0  # cosine and sine are multiplied by it
    parameters: Mapping[str, float] | None = None

    def inverse_frequencies(self, head_width: int) -> Frequencies:
        """Return the inverse frequency of each pair of numbers in a head, in float32."""
        exponents = np.arange(0, head_width, 2, dtype=np.float32) / np.float32(head_width)
        powers = np.float32(self.theta) ** exponents
        plain = (np.float32(1) / powers).astype(np.float32)
        return KINDS[self.kind].scale(plain, self, head_width)


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
}
