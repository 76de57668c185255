"""Programs of language models: logits of whole prompts, and a step that decodes one more token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from einmpi.models.config import Config
from einmpi.models.modules import (
    AT,
    DECODE,
    PREFILL,
    Layer,
    modules_of,
    parameters_of,
)

TOKENS = "tokens"  # inputs that a call gives
LENGTHS = "lengths"
FREQUENCIES = "frequencies"
LOGITS = "logits"
LAST_HIDDEN = "last_hidden"  # after the last norm, at every position
OUTPUT_HEAD = "lm_head.weight"  # the tensor; checkpoints with tied embeddings may have it too


@dataclass(frozen=True)
class Weight:
    """Where the value of an input is: the name of a tensor in a checkpoint, and its split shape."""

    tensor: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelProgram:
    """A program with all that a job needs besides files.

    Attributes
    ----------
    text : str
        The statements.
    outputs : tuple of str
        The results: logits, and caches or hidden states if they were asked for.
    inputs : mapping of str to (shape, dtype)
        Inputs that a call gives: tokens, lengths or positions, caches, inverse frequencies.
    weights : mapping of str to Weight
        Inputs that come from the checkpoint.
    dtype : str
        The dtype of weights, caches and logits.
    carry : mapping of str to str
        For each cache, the output that it becomes in the next step.
    roles : mapping of str to tuple of str
        The labels that strategies cut.
    """

    text: str
    outputs: tuple[str, ...]
    inputs: Mapping[str, tuple[tuple[int, ...], str]]
    weights: Mapping[str, Weight]
    dtype: str
    carry: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


# ---- weights ------------------------------------------------------------------------------------


def weights_of(config: Config) -> dict[str, Weight]:
    """Return the weights of a model: for each input, a tensor of the checkpoint and its shape.

    The shape is that of the file with dimensions split: nothing is transposed.
    """
    extents = {
        "a": config.width,
        "d": config.head_width,
        "f": config.hidden,
        "g": config.groups,
        "r": config.heads // config.groups,
    }
    of_vocabulary = (config.vocabulary, config.width)
    weights = {"emb": Weight("model.embed_tokens.weight", of_vocabulary)}
    for number in range(1, config.layers + 1):
        for parameter in parameters_of(config):
            tensor = f"model.layers.{number - 1}.{parameter.tensor}"
            shape = tuple([extents[label] for label in parameter.labels])
            weights[f"{parameter.name}_{number}"] = Weight(tensor, shape)
    weights["gf"] = Weight("model.norm.weight", (config.width,))
    if not config.tied:
        weights["lm"] = Weight(OUTPUT_HEAD, of_vocabulary)
    return weights


# ---- programs -----------------------------------------------------------------------------------


def prefill_program(
    config: Config,
    batch: int,
    sequence: int,
    dtype: str,
    *,
    every: bool = False,
    lengths: bool = False,
    caches: bool | int = False,
    hidden: tuple[int, ...] = (),
    last_hidden: bool = False,
) -> ModelProgram:
    """Return the program that computes logits of whole prompts.

    Parameters
    ----------
    config : Config
        The model.
    batch, sequence : int
        The shape of `tokens`.
    dtype : str
        What is computed with: float16, bfloat16, float32 or float64.
    every : bool, optional
        Whether there are logits of every position, or of the last one.
    lengths : bool, optional
        Whether prompts have lengths of their own: the input `lengths`. Tokens after them have no
        influence.
    caches : bool or int, optional
        Whether keys and values are outputs, as the caches that `decode_program` takes; an integer
        is the number of positions of these, at least `sequence`.
    hidden : tuple of int, optional
        Layers after which the numbers of each position are outputs: x_K for layer K, counted from
        1; x_0 is the embedding.
    last_hidden : bool, optional
        Whether the last layer's numbers after the last norm are an output: `last_hidden`.

    Returns
    -------
    ModelProgram
        The program.
    """
    text = f"x_0[b,s,a] = emb[{TOKENS}[b,s], a]\n"
    text += _angles(config, f"s:{sequence}", "s")
    outputs = [LOGITS]
    outputs += [f"x_{number}" for number in hidden]
    cache_length = sequence if isinstance(caches, bool) else caches
    for number in range(1, config.layers + 1):
        text += _layer_text(Layer(config, PREFILL, dtype, number, sequence))
        if caches:
            text += _new_caches(number, sequence, cache_length)
            outputs += [f"kc_{number}", f"vc_{number}"]
    last = Layer(config, PREFILL, dtype, config.layers, sequence)
    if last_hidden:
        text += last.norm(LAST_HIDDEN, f"x_{last.number}", "gf", "b,s,a", "a")
        outputs.append(LAST_HIDDEN)
    text += _head(last, every, lengths)
    inputs: dict[str, tuple[tuple[int, ...], str]] = {
        TOKENS: ((batch, sequence), "int64"),
        FREQUENCIES: ((config.head_width // 2,), "float32"),
    }
    if lengths and not every:
        inputs[LENGTHS] = ((batch,), "int64")
    roles = {"batch": ("b",), "sequence": ("s", "t"), "head": ("g", "r"), "hidden": ("f", "v")}
    return ModelProgram(text, tuple(outputs), inputs, weights_of(config), dtype, roles=roles)


def decode_program(config: Config, batch: int, length: int, dtype: str) -> ModelProgram:
    """Return the program of a step that computes logits for one more token of each sequence.

    Parameters
    ----------
    config : Config
        The model.
    batch : int
        The number of sequences. `tokens` has a token of each, and `at` its position.
    length : int
        How many positions caches have.
    dtype : str
        What is computed with: float16, bfloat16, float32 or float64.

    Returns
    -------
    ModelProgram
        The program. It takes the caches `kc_K` and `vc_K` of each layer K, writes a row of each
        sequence into them, and returns them as `kn_K` and `vn_K`.
    """
    text = f"x_0[b,a] = emb[{TOKENS}[b], a]\n"
    text += _angles(config, "b", f"{AT}[b]")
    outputs = [LOGITS]
    inputs: dict[str, tuple[tuple[int, ...], str]] = {
        TOKENS: ((batch,), "int64"),
        AT: ((batch,), "int64"),
        FREQUENCIES: ((config.head_width // 2,), "float32"),
    }
    carry = {}
    cache_shape = (batch, config.groups, length, config.head_width)
    for number in range(1, config.layers + 1):
        text += _layer_text(Layer(config, DECODE, dtype, number, length))
        for name in ("k", "v"):
            old = f"{name}c_{number}"
            new = f"{name}n_{number}"
            inputs[old] = (cache_shape, dtype)
            outputs.append(new)
            carry[old] = new
    text += _logits(Layer(config, DECODE, dtype, config.layers, length), f"x_{config.layers}", "b")
    roles = {"batch": ("b",), "sequence": ("u",), "head": ("g", "r"), "hidden": ("f", "v")}
    return ModelProgram(text, tuple(outputs), inputs, weights_of(config), dtype, carry, roles)


def _layer_text(layer: Layer) -> str:
    """Return the statements of a layer, module by module."""
    return "".join([module.statements(layer) for module in modules_of(layer.config)])


def _angles(config: Config, labels: str, position: str) -> str:
    """Return cosines and sines of positions, which are float32 in every model."""
    half_width = config.head_width // 2
    angle = f"float32({position}) * {FREQUENCIES}[d%{half_width}]"
    factor = config.rope.attention_factor
    scaled = "" if factor == 1 else f" * {factor!r}"
    cosine = f"cos({angle}){scaled}"
    sine = f"where(d < {half_width}, -sin({angle}), sin({angle})){scaled}"
    dimensions = f"{labels},d:{config.head_width}"
    return f"cosine[{dimensions}] = {cosine}\nsine[{dimensions}] = {sine}\n"


def _new_caches(number: int, sequence: int, length: int) -> str:
    """Return statements for caches that hold the keys and values of prompts, and zeros after."""
    keys = f"kr_{number}[b,g,u,d]"
    values = f"v_{number}[b,u,g,d]"
    if length > sequence:
        keys = f"where(u < {sequence}, {keys}, 0)"
        values = f"where(u < {sequence}, {values}, 0)"
    return f"kc_{number}[b,g,u:{length},d] = {keys}\nvc_{number}[b,g,u:{length},d] = {values}\n"


def _head(layer: Layer, every: bool, lengths: bool) -> str:
    """Return the statements from the last layer to logits."""
    last = f"x_{layer.number}"
    if every:
        return _logits(layer, last, "b,s")
    if lengths:
        # A sum over positions of which one is not zero: it can be cut along them, a gather cannot.
        text = f"xl[b,a] = sum[s](where(s == {LENGTHS}[b] - 1, {last}[b,s,a], 0))\n"
    else:
        text = f"xl[b,a] = {last}[b,{layer.columns - 1},a]\n"
    return text + _logits(layer, "xl", "b")


def _logits(layer: Layer, source: str, labels: str) -> str:
    """Return the last norm and the product with the matrix of the vocabulary."""
    matrix = "emb" if layer.config.tied else "lm"
    norm = layer.norm("nf", source, "gf", f"{labels},a", "a")
    return norm + f"{LOGITS}[{labels},v] = sum(nf[{labels},a] * {matrix}[v,a])\n"
