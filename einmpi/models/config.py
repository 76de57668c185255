"""What a checkpoint's config.json says of a model, and the architectures that are known."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.errors import InputError
from einmpi.models.json_values import Json, Values, read_values

# ---- rope ----------------------------------------------------------------------------------------
#
# Rotary positions: the inverse frequencies of each kind, computed as transformers computes
# them.
#
# Each is a row of KINDS.


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


DTYPES = ("float16", "bfloat16", "float32")
MOST_LAYERS = 1000
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
FULL_LAYER = "full_attention"
WINDOW_LAYER = "sliding_attention"


@dataclass(frozen=True)
class Config:
    """The sizes and options of a model, as its program needs them.

    Attributes
    ----------
    model_type : str
        The architecture, a key of ARCHITECTURES.
    width, layers, heads, hidden, vocabulary : int
        Numbers of each position, layers, query heads, numbers inside of the MLP, tokens.
    groups : int
        Heads of keys and values; `heads // groups` query heads share each of them.
    head_width : int
        Numbers of a head.
    epsilon : float
        What is added to the mean square before its root is taken.
    tied : bool
        Whether logits are computed with the matrix of the embedding.
    rope : Rope
        How positions turn queries and keys.
    qkv_bias, output_bias, mlp_bias : bool
        Which projections have biases: of queries, keys and values; after attention; in the MLP.
    head_norms : bool
        Whether queries and keys are normalised in each head.
    window : int or None
        How many positions, its own included, a position sees in `window_layers`.
    window_layers : tuple of int
        The layers with a window, counted from 1.
    dtype : str
        The dtype of the weights in the files.
    positions : int
        The longest sequence that the model was made for.
    stop_tokens : tuple of int
        Tokens that end a text.
    first_token : int or None
        The token that begins a text.
    """

    model_type: str
    width: int
    layers: int
    heads: int
    groups: int
    head_width: int
    hidden: int
    vocabulary: int
    epsilon: float = 1e-6
    tied: bool = False
    rope: Rope = field(default_factory=Rope)
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    window: int | None = None
    window_layers: tuple[int, ...] = ()
    dtype: str = "float16"
    positions: int = 2048
    stop_tokens: tuple[int, ...] = (2,)
    first_token: int | None = 1

    def window_of(self, layer: int) -> int | None:
        """Return how many positions are seen in a layer, counted from 1; None if all are."""
        return self.window if layer in self.window_layers else None


@dataclass(frozen=True)
class Architecture:
    """What is peculiar to a `model_type`: its biases, norms, window, and missing values.

    Biases are there (True), not there (False), or there if the key of config.json is true.
    `window` is "none", "all" layers, or "some": those that config.json names. `defaults` are values
    that transformers takes for keys that config.json does not have.
    """

    title: str
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    head_norms: bool = False
    window: str = "none"
    defaults: Mapping[str, Json] = field(default_factory=dict)


_OLD_TOKENS: dict[str, Json] = {"bos_token_id": 1, "eos_token_id": 2}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "LLaMA 1 to 3",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={"max_position_embeddings": 2048, **_OLD_TOKENS},
    ),
    "mistral": Architecture(
        "Mistral",
        window="all",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            **_OLD_TOKENS,
        },
    ),
    "qwen2": Architecture(
        "Qwen2",
        qkv_bias=True,
        window="some",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    "qwen3": Architecture(
        "Qwen3",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        head_norms=True,
        window="some",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
}


def llama_1(width: int, layers: int, heads: int, hidden: int, epsilon: float = 1e-6) -> Config:
    """Return the configuration of a LLaMA 1 of some size."""
    head_width = width // heads
    return Config("llama", width, layers, heads, heads, head_width, hidden, 32000, epsilon)


NAMED: dict[str, Config] = {
    "7B": llama_1(4096, 32, 32, 11008),
    "13B": llama_1(5120, 40, 40, 13824),
    "30B": llama_1(6656, 60, 52, 17920),
    "65B": llama_1(8192, 80, 64, 22016, 1e-5),
}


def read_config(folder: str | os.PathLike[str]) -> Config:
    """Read the configuration of a model from a folder, as transformers saves it.

    Parameters
    ----------
    folder : path
        The folder with config.json and maybe generation_config.json.

    Returns
    -------
    Config
        What the files say; for what they do not say, the values that transformers takes.

    Raises
    ------
    InputError
        There is no config.json, its architecture is not known, or one of its values is wrong.
    """
    values = read_values(os.path.join(folder, CONFIG_FILE))
    architecture = ARCHITECTURES[values.name("model_type", ARCHITECTURES)]
    values = Values(values.file, {**architecture.defaults, **values.values})
    if values.has("quantization_config"):
        raise InputError(
            values.file,
            "the weights are quantized",
            f"weights in one of {', '.join(DTYPES)}",
        )
    values.name("hidden_act", ("silu",), "silu")
    width = values.positive("hidden_size")
    layers = values.positive("num_hidden_layers", MOST_LAYERS)
    heads = values.positive("num_attention_heads")
    groups = values.divisor("num_key_value_heads", heads, heads)
    if not values.has("head_dim"):
        values.divisor("num_attention_heads", width)
    head_width = values.even("head_dim", width // heads)
    window, window_layers = _windows(values, architecture, layers)
    dtype_key = "dtype" if values.has("dtype") else "torch_dtype"
    generation = values
    generation_path = os.path.join(folder, GENERATION_FILE)
    if os.path.exists(generation_path):
        generation = read_values(generation_path)
    return Config(
        model_type=values.name("model_type", ARCHITECTURES),
        width=width,
        layers=layers,
        heads=heads,
        groups=groups,
        head_width=head_width,
        hidden=values.positive("intermediate_size"),
        vocabulary=values.positive("vocab_size"),
        epsilon=values.number("rms_norm_eps", 1e-6),
        tied=values.truth("tie_word_embeddings", False),
        rope=_rope(values),
        qkv_bias=_has_bias(values, architecture.qkv_bias),
        output_bias=_has_bias(values, architecture.output_bias),
        mlp_bias=_has_bias(values, architecture.mlp_bias),
        head_norms=architecture.head_norms,
        window=window,
        window_layers=window_layers,
        dtype=values.name(dtype_key, DTYPES, "float32"),
        positions=values.positive("max_position_embeddings"),
        stop_tokens=generation.tokens("eos_token_id") or values.tokens("eos_token_id"),
        first_token=next(iter(values.tokens("bos_token_id")), None),
    )


def _has_bias(values: Values, rule: bool | str) -> bool:
    """Return whether projections have biases: by the architecture, or by a key of the file."""
    return values.truth(rule, False) if isinstance(rule, str) else rule


def _windows(
    values: Values, architecture: Architecture, layers: int
) -> tuple[int | None, tuple[int, ...]]:
    """Return how many positions are seen through a window, and the layers that have one."""
    if architecture.window == "none" or not values.has("sliding_window"):
        return None, ()
    every_layer = tuple(range(1, layers + 1))
    if architecture.window == "all":
        return values.positive("sliding_window"), every_layer
    if not values.truth("use_sliding_window", False):
        return None, ()
    window = values.positive("sliding_window")
    if not values.has("layer_types"):
        full_layers = values.count("max_window_layers")
        return window, every_layer[full_layers:]
    kinds = values.names("layer_types", layers, (FULL_LAYER, WINDOW_LAYER))
    found = [layer for layer, kind in zip(every_layer, kinds, strict=True) if kind == WINDOW_LAYER]
    return window, tuple(found)


def _rope(values: Values) -> Rope:
    """Return how positions turn queries and keys: by rope_parameters, or keys of older files."""
    found = Values(values.file, {})
    for key in ("rope_parameters", "rope_scaling"):
        if values.has(key):
            found = values.inner(key)
            break
    kind_key = "rope_type" if found.has("rope_type") else "type"
    kind = found.name(kind_key, KINDS, "default")
    holder = found if found.has("rope_theta") else values
    theta = holder.number("rope_theta", 10000.0)
    if theta <= 1:
        holder.wrong("rope_theta", "a number above 1")
    for holder in (found, values):
        if holder.number("partial_rotary_factor", 1.0) != 1:
            holder.wrong("partial_rotary_factor", "1")
    positions = values.positive("max_position_embeddings")
    parameters: dict[str, float] = {}
    for key in KINDS[kind].needed:
        if key == "original_max_position_embeddings":
            parameters[key] = found.number(key, values.number(key, float(positions)))
        else:
            parameters[key] = found.number(key)
    for key, default in (KINDS[kind].optional or {}).items():
        if isinstance(default, bool):
            parameters[key] = found.truth(key, default)
        else:
            parameters[key] = found.number(key, default, zero=default == 0)
    if kind == "llama3" and parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
        found.wrong("high_freq_factor", "a number above low_freq_factor")
    factor = parameters.get("factor", 1.0)
    attention_factor = 1.0
    if kind == "yarn":
        attention_factor = parameters["attention_factor"] or yarn_attention_factor(
            factor, parameters["mscale"], parameters["mscale_all_dim"]
        )
    return Rope(kind, theta, factor, attention_factor, parameters)


# ---- paper ---------------------------------------------------------------------------------------
#
# LLaMA as a program: RMSNorm, attention, SwiGLU, residuals (paper, section 9.3).
#
# The prefill of a prompt, and a step of training.


_LAYER = """
n1_{k}[b,s,a]   = rmsnorm[a](x_{p}[b,s,a], eps={eps}) * g1_{k}[a]
q_{k}[b,s,h,d]  = sum(n1_{k}[b,s,a] * wq_{k}[a,h,d])
k_{k}[b,s,h,d]  = sum(n1_{k}[b,s,a] * wk_{k}[a,h,d])
v_{k}[b,s,h,d]  = sum(n1_{k}[b,s,a] * wv_{k}[a,h,d])
t_{k}[b,h,s,t]  = sum(q_{k}[b,s,h,d] * k_{k}[b,t,h,d])
p_{k}[b,h,s,t]  = softmax[t](where(t <= s, t_{k}[b,h,s,t] / sqrt({d}), -inf))
o_{k}[b,s,h,d]  = sum(p_{k}[b,h,s,t] * v_{k}[b,t,h,d])
y_{k}[b,s,a]    = x_{p}[b,s,a] + sum(o_{k}[b,s,h,d] * wo_{k}[h,d,a])
n2_{k}[b,s,a]   = rmsnorm[a](y_{k}[b,s,a], eps={eps}) * g2_{k}[a]
u_{k}[b,s,f]    = silu(sum(n2_{k}[b,s,a] * w1_{k}[a,f])) * sum(n2_{k}[b,s,a] * w3_{k}[a,f])
x_{k}[b,s,a]    = y_{k}[b,s,a] + sum(u_{k}[b,s,f] * w2_{k}[f,a])
"""

# The labels of each weight of a layer.
_WEIGHTS = {
    "wq": "ahd",
    "wk": "ahd",
    "wv": "ahd",
    "wo": "hda",
    "w1": "af",
    "w3": "af",
    "w2": "fa",
    "g1": "a",
    "g2": "a",
}


def llama_program(
    model: Config, batch: int, sequence: int, layers: int | None = None
) -> tuple[str, dict[str, tuple[int, ...]], tuple[str, ...]]:
    """Return the program of the first layers of a model, or of all.

    The result is the text of the program, the shapes of its inputs, and the names of the weights.
    """
    extents = {"a": model.width, "h": model.heads, "d": model.head_width, "f": model.hidden}
    count = model.layers if layers is None else layers
    text = ""
    weights: dict[str, tuple[int, ...]] = {}
    for k in range(1, count + 1):
        text += _LAYER.format(k=k, p=k - 1, eps=model.epsilon, d=model.head_width)
        for name, labels in _WEIGHTS.items():
            weights[f"{name}_{k}"] = tuple([extents[label] for label in labels])
    shapes = {"x_0": (batch, sequence, model.width), **weights}
    return text, shapes, tuple(weights)


def llama_training_program(
    model: Config, batch: int, sequence: int, layers: int | None = None, rate: float = 1e-3
) -> tuple[str, dict[str, tuple[int, ...]], dict[str, str]]:
    """Return a step of gradient descent on the first layers of a model, or on all.

    The loss is the mean squared distance of what the last layer computes to `target`. The result is
    the text of the program, the shapes of its inputs, and what a loop carries: for each weight the
    output that it becomes in the next step.
    """
    text, shapes, weights = llama_program(model, batch, sequence, layers)
    count = model.layers if layers is None else layers
    text += f"\nloss = mean((x_{count}[b,s,a] - target[b,s,a])**2)\n"
    carry = {}
    for name in weights:
        labels = ",".join("ijk"[: len(shapes[name])])
        carry[name] = f"{name}_next"
        text += (
            f"{name}_next[{labels}] = {name}[{labels}] - {rate} * grad(loss, {name}[{labels}])\n"
        )
    shapes["target"] = shapes["x_0"]
    return text, shapes, carry
