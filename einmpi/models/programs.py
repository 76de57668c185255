"""Programs of language models: the prefill of prompts, and a step that decodes one token of each.

A layer is the table of modules LAYER; each module has statements and parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from einmpi.models.config import Config

HALF_DTYPES = ("float16", "bfloat16")
TOKENS = "tokens"  # inputs that a call gives
LENGTHS = "lengths"
AT = "at"
FREQUENCIES = "frequencies"
LOGITS = "logits"

# Labels: b sequence of the batch, s query position, t key position, u position in a cache, a width,
# g group of heads with one key and value, r query head of a group, d number in a head, f hidden,
# v token of the vocabulary.


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


@dataclass(frozen=True)
class Form:
    """How the statements of a layer are written: for whole prompts, or for one token of each.

    Entries are labels, in the order of a tensor's dimensions.
    """

    query: str  # of what queries are computed from
    key: str  # of what keys and values are computed from
    turned_query: str  # of queries, before the number in a head
    turned_key: str
    query_angle: str  # of cosine and sine, before the number in a head
    key_angle: str
    column: str  # position that scores have a column for
    keys: str  # the tensor of all keys, without its layer, and its labels
    values: str
    row: str  # the position of a query as a number


PREFILL = Form(
    query="b,s",
    key="b,t",
    turned_query="b,g,r,s",
    turned_key="b,g,t",
    query_angle="s",
    key_angle="t",
    column="t",
    keys="kr_{k}[b,g,t,d]",
    values="v_{k}[b,t,g,d]",
    row="s",
)
DECODE = Form(
    query="b",
    key="b",
    turned_query="b,g,r",
    turned_key="b,g",
    query_angle="b",
    key_angle="b",
    column="u",
    keys="kn_{k}[b,g,u,d]",
    values="vn_{k}[b,g,u,d]",
    row=f"{AT}[b]",
)


@dataclass(frozen=True)
class Layer:
    """One layer of a program: its number, counted from 1, and how it is written."""

    config: Config
    form: Form
    dtype: str
    number: int
    columns: int  # extent of the positions that scores have columns for

    def bias(self, name: str, labels: str, is_there: bool) -> str:
        """Return the term of a bias in a sum; nothing if there is none."""
        return f" + {name}_{self.number}[{labels}]" if is_there else ""

    def rounded(self, expression: str) -> str:
        """Return an expression in float32 as one in the dtype of the model."""
        return f"{self.dtype}({expression})" if self.dtype in HALF_DTYPES else expression

    def norm(self, target: str, source: str, gain: str, labels: str, label: str) -> str:
        """Return the statement of an RMSNorm along a label, which is computed in float32."""
        element = f"{source}[{labels}]"
        if self.dtype in HALF_DTYPES:
            element = f"float32({element})"
        normalised = f"rmsnorm[{label}]({element}, eps={self.config.epsilon!r}) * {gain}[{label}]"
        return f"{target}[{labels}] = {self.rounded(normalised)}\n"


@dataclass(frozen=True)
class Parameter:
    """A weight of a module: its input, the tensor inside of a layer, and labels of its dimensions.

    `condition` is the attribute of a Config that must be true for it to exist.
    """

    name: str
    tensor: str
    labels: str
    condition: str = ""


@dataclass(frozen=True)
class Module:
    """A part of a layer: its parameters, and a function that writes its statements.

    `condition` is the attribute of a Config that must be true for it to exist.
    """

    title: str
    parameters: tuple[Parameter, ...]
    statements: Callable[[Layer], str]
    condition: str = ""


# ---- the modules --------------------------------------------------------------------------------


def _attention_norm(layer: Layer) -> str:
    k = layer.number
    return layer.norm(f"n1_{k}", f"x_{k - 1}", f"g1_{k}", f"{layer.form.query},a", "a")


def _projections(layer: Layer) -> str:
    k = layer.number
    query = layer.form.query
    key = layer.form.key
    has_bias = layer.config.qkv_bias
    query_bias = layer.bias("bq", "g,r,d", has_bias)
    key_bias = layer.bias("bk", "g,d", has_bias)
    value_bias = layer.bias("bv", "g,d", has_bias)
    return (
        f"q_{k}[{query},g,r,d] = sum(n1_{k}[{query},a] * wq_{k}[g,r,d,a]){query_bias}\n"
        f"k_{k}[{key},g,d] = sum(n1_{k}[{key},a] * wk_{k}[g,d,a]){key_bias}\n"
        f"v_{k}[{key},g,d] = sum(n1_{k}[{key},a] * wv_{k}[g,d,a]){value_bias}\n"
    )


def _head_norms(layer: Layer) -> str:
    k = layer.number
    queries = layer.norm(f"qh_{k}", f"q_{k}", f"gq_{k}", f"{layer.form.query},g,r,d", "d")
    keys = layer.norm(f"kh_{k}", f"k_{k}", f"gk_{k}", f"{layer.form.key},g,d", "d")
    return queries + keys


def _rope(layer: Layer) -> str:
    """Turn pairs of numbers: number d of a head, and the one half a head further, around the end.

    The sign of the second term is in the sine.
    """
    k = layer.number
    form = layer.form
    width = layer.config.head_width
    other = f"(d+{width // 2})%{width}"
    query = "qh" if layer.config.head_norms else "q"
    key = "kh" if layer.config.head_norms else "k"
    query_labels = f"{form.query},g,r"
    key_labels = f"{form.key},g"
    return (
        f"qr_{k}[{form.turned_query},d] = {query}_{k}[{query_labels},d] * "
        f"cosine[{form.query_angle},d] + "
        f"{query}_{k}[{query_labels},{other}] * sine[{form.query_angle},d]\n"
        f"kr_{k}[{form.turned_key},d] = {key}_{k}[{key_labels},d] * "
        f"cosine[{form.key_angle},d] + "
        f"{key}_{k}[{key_labels},{other}] * sine[{form.key_angle},d]\n"
    )


def _cache(layer: Layer) -> str:
    """Write one row of keys and one of values into the caches."""
    if layer.form is not DECODE:
        return ""
    k = layer.number
    return (
        f"kn_{k}[b,g,u,d] = where(u == {AT}[b], kr_{k}[b,g,d], kc_{k}[b,g,u,d])\n"
        f"vn_{k}[b,g,u,d] = where(u == {AT}[b], v_{k}[b,g,d], vc_{k}[b,g,u,d])\n"
    )


def _attention(layer: Layer) -> str:
    k = layer.number
    form = layer.form
    column = form.column
    window = layer.config.window_of(k)
    mask = f"{column} <= {form.row}"
    if window is not None and window < layer.columns:
        mask = f"({mask}) & ({column} > {form.row} - {window})"
    keys = form.keys.format(k=k)
    values = form.values.format(k=k)
    scores = f"t_{k}[{form.turned_query},{column}]"
    weights = f"p_{k}[{form.turned_query},{column}]"
    scale = 1 / math.sqrt(layer.config.head_width)
    seen = f"float32({scores})" if layer.dtype in HALF_DTYPES else scores
    softmax = f"softmax[{column}](where({mask}, {seen} * {scale!r}, -inf))"
    return (
        f"{scores} = sum(qr_{k}[{form.turned_query},d] * {keys})\n"
        f"{weights} = {layer.rounded(softmax)}\n"
        f"o_{k}[{form.query},g,r,d] = sum({weights} * {values})\n"
    )


def _attention_output(layer: Layer) -> str:
    k = layer.number
    at = layer.form.query
    bias = layer.bias("bo", "a", layer.config.output_bias)
    product = f"sum(o_{k}[{at},g,r,d] * wo_{k}[a,g,r,d])"
    return f"y_{k}[{at},a] = x_{k - 1}[{at},a] + {product}{bias}\n"


def _mlp_norm(layer: Layer) -> str:
    k = layer.number
    return layer.norm(f"n2_{k}", f"y_{k}", f"g2_{k}", f"{layer.form.query},a", "a")


def _mlp(layer: Layer) -> str:
    k = layer.number
    at = layer.form.query
    has_bias = layer.config.mlp_bias
    gate = f"sum(n2_{k}[{at},a] * w1_{k}[f,a]){layer.bias('b1', 'f', has_bias)}"
    up = f"sum(n2_{k}[{at},a] * w3_{k}[f,a]){layer.bias('b3', 'f', has_bias)}"
    down = f"sum(u_{k}[{at},f] * w2_{k}[a,f]){layer.bias('b2', 'a', has_bias)}"
    return f"u_{k}[{at},f] = silu({gate}) * ({up})\nx_{k}[{at},a] = y_{k}[{at},a] + {down}\n"


LAYER: tuple[Module, ...] = (
    Module(
        "norm before attention",
        (Parameter("g1", "input_layernorm.weight", "a"),),
        _attention_norm,
    ),
    Module(
        "queries, keys and values",
        (
            Parameter("wq", "self_attn.q_proj.weight", "grda"),
            Parameter("wk", "self_attn.k_proj.weight", "gda"),
            Parameter("wv", "self_attn.v_proj.weight", "gda"),
            Parameter("bq", "self_attn.q_proj.bias", "grd", "qkv_bias"),
            Parameter("bk", "self_attn.k_proj.bias", "gd", "qkv_bias"),
            Parameter("bv", "self_attn.v_proj.bias", "gd", "qkv_bias"),
        ),
        _projections,
    ),
    Module(
        "norms of queries and keys",
        (
            Parameter("gq", "self_attn.q_norm.weight", "d"),
            Parameter("gk", "self_attn.k_norm.weight", "d"),
        ),
        _head_norms,
        "head_norms",
    ),
    Module("rotary positions", (), _rope),
    Module("rows of the caches", (), _cache),
    Module("attention", (), _attention),
    Module(
        "output of attention",
        (
            Parameter("wo", "self_attn.o_proj.weight", "agrd"),
            Parameter("bo", "self_attn.o_proj.bias", "a", "output_bias"),
        ),
        _attention_output,
    ),
    Module(
        "norm before the MLP",
        (Parameter("g2", "post_attention_layernorm.weight", "a"),),
        _mlp_norm,
    ),
    Module(
        "MLP",
        (
            Parameter("w1", "mlp.gate_proj.weight", "fa"),
            Parameter("w3", "mlp.up_proj.weight", "fa"),
            Parameter("w2", "mlp.down_proj.weight", "af"),
            Parameter("b1", "mlp.gate_proj.bias", "f", "mlp_bias"),
            Parameter("b3", "mlp.up_proj.bias", "f", "mlp_bias"),
            Parameter("b2", "mlp.down_proj.bias", "a", "mlp_bias"),
        ),
        _mlp,
    ),
)


def _modules_of(config: Config) -> list[Module]:
    """Return the modules of a model's layers, with the parameters that they have."""
    found = []
    for module in LAYER:
        if not module.condition or getattr(config, module.condition):
            found.append(module)
    return found


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
        for module in _modules_of(config):
            for parameter in module.parameters:
                if parameter.condition and not getattr(config, parameter.condition):
                    continue
                tensor = f"model.layers.{number - 1}.{parameter.tensor}"
                shape = tuple([extents[label] for label in parameter.labels])
                weights[f"{parameter.name}_{number}"] = Weight(tensor, shape)
    weights["gf"] = Weight("model.norm.weight", (config.width,))
    if not config.tied:
        weights["lm"] = Weight("lm_head.weight", of_vocabulary)
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

    Returns
    -------
    ModelProgram
        The program.
    """
    text = f"x_0[b,s,a] = emb[{TOKENS}[b,s], a]\n"
    text += _angles(config, f"s:{sequence}", "s", dtype)
    outputs = [LOGITS]
    outputs += [f"x_{number}" for number in hidden]
    cache_length = sequence if isinstance(caches, bool) else caches
    for number in range(1, config.layers + 1):
        text += _layer_text(Layer(config, PREFILL, dtype, number, sequence))
        if caches:
            text += _new_caches(number, sequence, cache_length)
            outputs += [f"kc_{number}", f"vc_{number}"]
    text += _head(config, dtype, sequence, every, lengths)
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
    text += _angles(config, "b", f"{AT}[b]", dtype)
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
    return "".join([module.statements(layer) for module in _modules_of(layer.config)])


def _angles(config: Config, labels: str, position: str, dtype: str) -> str:
    """Return cosines and sines of positions, in float32 and then in the dtype of the model."""
    half_width = config.head_width // 2
    angle = f"float32({position}) * {FREQUENCIES}[d%{half_width}]"
    factor = config.rope.attention_factor
    scaled = "" if factor == 1 else f" * {factor!r}"
    cosine = f"cos({angle}){scaled}"
    sine = f"where(d < {half_width}, -sin({angle}), sin({angle})){scaled}"
    if dtype in HALF_DTYPES:
        cosine = f"{dtype}({cosine})"
        sine = f"{dtype}({sine})"
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


def _head(config: Config, dtype: str, sequence: int, every: bool, lengths: bool) -> str:
    """Return the statements from the last layer to logits."""
    layer = Layer(config, PREFILL, dtype, config.layers, sequence)
    last = f"x_{config.layers}"
    if every:
        return _logits(layer, last, "b,s")
    if lengths:
        # A sum over positions of which one is not zero: it can be cut along them, a gather cannot.
        text = f"xl[b,a] = sum[s](where(s == {LENGTHS}[b] - 1, {last}[b,s,a], 0))\n"
    else:
        text = f"xl[b,a] = {last}[b,{sequence - 1},a]\n"
    return text + _logits(layer, "xl", "b")


def _logits(layer: Layer, source: str, labels: str) -> str:
    """Return the last norm and the product with the matrix of the vocabulary."""
    matrix = "emb" if layer.config.tied else "lm"
    norm = layer.norm("nf", source, "gf", f"{labels},a", "a")
    return norm + f"{LOGITS}[{labels},v] = sum(nf[{labels},a] * {matrix}[v,a])\n"
