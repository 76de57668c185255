"""What a checkpoint's config.json says of a model, and the architectures that are known."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from einmpi.models.json_values import Json, Values, read_values
from einmpi.models.quantised import Quantisation, read_quantisation
from einmpi.models.rope import Frequencies, Rope, read_rope, rope_from

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
    head_norms, joint_norms : bool
        Whether queries and keys are normalised in each head, or over all heads together.
    pre_norms, post_norms : bool
        Whether there are norms before attention and the MLP, and after them, before they are added.
    norm : str
        "rms", or "layer" for norms that subtract the mean and have biases.
    gains_from_one : bool
        Whether the weights of norms are what is added to 1.
    mlp : str
        "gated"; "plain", without a gate; "experts"; "joined experts", whose gate and other product
        are one tensor.
    activation : str
        What the MLP applies to the gate, a macro of the language.
    experts, chosen : int
        The experts of an MLP, and how many of them each position goes through.
    scaled_choice : bool
        Whether the weights of the chosen experts add up to 1.
    glu_limit, glu_alpha : float or None
        Of joined experts: where both products are cut off, and a factor inside of the gate.
    embedding_scale : float
        What the numbers of the embedding are multiplied by.
    attention_scalar : float or None
        Scores are divided by its root; None for the numbers of a head.
    attention_cap, logits_cap : float or None
        Limits that scores and logits come close to, and do not exceed.
    sinks : bool
        Whether each head has a score that takes a share of the weights and gives nothing.
    window : int or None
        How many positions, its own included, a position sees in `window_layers`.
    window_layers : tuple of int
        The layers with a window, counted from 1.
    window_rope : Rope or None
        How positions turn queries and keys in these layers, if otherwise than in the others.
    dtype : str
        The dtype of the weights in the files.
    positions : int
        The longest sequence that the model was made for.
    stop_tokens : tuple of int
        Tokens that end a text.
    first_token : int or None
        The token that begins a text.
    quantisation : Quantisation or None
        How the files have the matrices of linear layers, if not as floats.
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
    joint_norms: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    norm: str = "rms"
    gains_from_one: bool = False
    mlp: str = "gated"
    activation: str = "silu"
    experts: int = 0
    chosen: int = 0
    scaled_choice: bool = True
    glu_limit: float | None = None
    glu_alpha: float | None = None
    embedding_scale: float = 1.0
    attention_scalar: float | None = None
    attention_cap: float | None = None
    logits_cap: float | None = None
    sinks: bool = False
    window: int | None = None
    window_layers: tuple[int, ...] = ()
    window_rope: Rope | None = None
    dtype: str = "float16"
    positions: int = 2048
    stop_tokens: tuple[int, ...] = (2,)
    first_token: int | None = 1
    quantisation: Quantisation | None = None

    @property
    def norm_biases(self) -> bool:
        """Whether norms have biases."""
        return self.norm == "layer"

    def window_of(self, layer: int) -> int | None:
        """Return how many positions are seen in a layer, counted from 1; None if all are."""
        return self.window if layer in self.window_layers else None

    def frequencies(self, length: int = 0) -> Frequencies:
        """Return the inverse frequencies of sequences up to a length, of all ropes in one array."""
        width = self.head_width
        return np.concatenate([rope.inverse_frequencies(width, length) for rope in self.ropes])

    @property
    def ropes(self) -> list[Rope]:
        """Return how positions turn queries and keys: the rope of layers with a window is last."""
        return [self.rope] if self.window_rope is None else [self.rope, self.window_rope]


@dataclass(frozen=True)
class Architecture:
    """What is peculiar to a `model_type`, a table of architectures.toml.

    `window` is a key of `_WINDOWS`: which layers have a window. `defaults` are values that
    transformers takes for keys that config.json does not have.

    `features` are fields of a Config that all its models have, `switches` those that are true if
    a key is, and `numbers` those that a key gives, if it is there. `keys` are names of keys where
    LLaMA's is another, and `tensors` those of parameters. Several parameters of one tensor are its
    rows, one after the other. `only` are keys that are missing or have this value: there is no
    module for any other.
    """

    title: str
    window: str = "none"
    defaults: Mapping[str, Json] = field(default_factory=dict)
    features: Mapping[str, Any] = field(default_factory=dict)
    switches: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, Json] = field(default_factory=dict)
    partial_rope: bool = False


# Activations by the names of config.json, as macros of the language.
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def _read_architectures() -> dict[str, Architecture]:
    text = Path(__file__).with_name("architectures.toml").read_text(encoding="utf-8")
    return {name: Architecture(**table) for name, table in tomllib.loads(text).items()}


ARCHITECTURES = _read_architectures()


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
    _check_only(values, architecture)
    keys = architecture.keys
    width = values.positive("hidden_size")
    layers = values.positive("num_hidden_layers", MOST_LAYERS)
    heads = values.positive("num_attention_heads")
    groups = values.divisor("num_key_value_heads", heads, heads)
    if not values.has("head_dim"):
        values.divisor("num_attention_heads", width)
    head_width = values.even("head_dim", width // heads)
    window, window_layers = _windows(values, architecture, layers)
    dtype_key = "dtype" if values.has("dtype") else "torch_dtype"
    rope, window_rope = _ropes(values, architecture, head_width)
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
        hidden=values.positive(keys.get("intermediate_size", "intermediate_size")),
        vocabulary=values.positive("vocab_size"),
        epsilon=values.number(keys.get("rms_norm_eps", "rms_norm_eps"), 1e-6),
        tied=values.truth("tie_word_embeddings", False),
        rope=rope,
        activation=_activation(values, architecture),
        window=window,
        window_layers=window_layers,
        window_rope=window_rope,
        dtype=values.name(dtype_key, DTYPES, "float32"),
        positions=values.positive("max_position_embeddings"),
        stop_tokens=generation.tokens("eos_token_id") or values.tokens("eos_token_id"),
        first_token=next(iter(values.tokens("bos_token_id")), None),
        quantisation=read_quantisation(values),
        **_features(values, architecture, width),
    )


def _activation(values: Values, architecture: Architecture) -> str:
    """Return the macro of the language that the MLP applies."""
    key = architecture.keys.get("hidden_act", "hidden_act")
    default = architecture.defaults.get(key, "silu")
    return ACTIVATIONS[values.name(key, ACTIVATIONS, str(default))]


def _check_only(values: Values, architecture: Architecture) -> None:
    """Refuse values of keys that there is no module for."""
    for key, known in architecture.only.items():
        value = values.values.get(key, known)
        if value is not None and (value != known or type(value) is not type(known)):
            values.wrong(key, json.dumps(known))


def _features(values: Values, architecture: Architecture, width: int) -> dict[str, Any]:
    """Return the fields of a Config that only some architectures have."""
    found = dict(architecture.features)
    for name, key in architecture.switches.items():
        found[name] = values.truth(key, False)
    for name, key in architecture.numbers.items():
        found[name] = values.number(key) if values.has(key) else None
    if architecture.features.get("gains_from_one"):
        found["embedding_scale"] = float(np.sqrt(width))
    if "experts" in found.get("mlp", ""):
        key = "num_experts" if values.has("num_experts") else "num_local_experts"
        found["experts"] = values.positive(key)
        found["chosen"] = values.positive("num_experts_per_tok", found["experts"])
        found["scaled_choice"] = values.truth("norm_topk_prob", True)
    return found


# Which layers see their positions through a window if config.json does not list them: of so many
# layers the last one sees all; 0 if none does. And whether `use_sliding_window` has to be true.
_WINDOWS = {
    "all": (0, False),
    "all if used": (0, True),
    "some": (0, True),  # from layer max_window_layers on
    "every second is full": (2, False),
    "every sixth is full": (6, False),
}


def _windows(
    values: Values, architecture: Architecture, layers: int
) -> tuple[int | None, tuple[int, ...]]:
    """Return how many positions are seen through a window, and the layers that have one."""
    if architecture.window == "none" or not values.has("sliding_window"):
        return None, ()
    every_layer = tuple(range(1, layers + 1))
    period, has_switch = _WINDOWS[architecture.window]
    if has_switch and not values.truth("use_sliding_window", False):
        return None, ()
    window = values.positive("sliding_window")
    if architecture.window.startswith("all"):
        return window, every_layer
    if values.has("layer_types"):
        kinds = values.names("layer_types", layers, (FULL_LAYER, WINDOW_LAYER))
        pairs = zip(every_layer, kinds, strict=True)
        return window, tuple(layer for layer, kind in pairs if kind == WINDOW_LAYER)
    if not period:
        return window, every_layer[values.count("max_window_layers") :]
    if values.has("sliding_window_pattern"):
        period = values.positive("sliding_window_pattern")
    return window, tuple(layer for layer in every_layer if layer % period)


def _ropes(values: Values, architecture: Architecture, head_width: int) -> tuple[Rope, Rope | None]:
    """Return how positions turn queries and keys, and how in layers with a window."""
    if not values.has("rope_local_base_freq"):
        return read_rope(values, head_width, architecture.partial_rope), None
    local = Values(values.file, {"rope_theta": values.number("rope_local_base_freq")})
    parameters = values.inner("rope_parameters") if values.has("rope_parameters") else local
    if not parameters.has(FULL_LAYER):
        return read_rope(values, head_width), rope_from(local, values, head_width)
    if parameters.has(WINDOW_LAYER):
        local = parameters.inner(WINDOW_LAYER)
    full = rope_from(parameters.inner(FULL_LAYER), values, head_width)
    return full, rope_from(local, values, head_width)
