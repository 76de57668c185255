"""The modules of a layer as statements: norms, projections, rotary positions, attention, MLP.

A layer is the table LAYER. Another architecture is another row in it, or another condition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from einmpi.models.config import Config

HALF_DTYPES = ("float16", "bfloat16")
AT = "at"  # the input with the position of each sequence's token

# Labels: b sequence of the batch, s query position, t key position, u position in a cache, a width,
# g group of heads with one key and value, r query head of a group, d number in a head, f hidden,
# v token of the vocabulary.


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
    turned_query = (
        f"{query}_{k}[{query_labels},d] * cosine[{form.query_angle},d] + "
        f"{query}_{k}[{query_labels},{other}] * sine[{form.query_angle},d]"
    )
    turned_key = (
        f"{key}_{k}[{key_labels},d] * cosine[{form.key_angle},d] + "
        f"{key}_{k}[{key_labels},{other}] * sine[{form.key_angle},d]"
    )
    return (
        f"qr_{k}[{form.turned_query},d] = {layer.rounded(turned_query)}\n"
        f"kr_{k}[{form.turned_key},d] = {layer.rounded(turned_key)}\n"
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


def _linear(condition: str, *projections: tuple[str, str, str, str]) -> tuple[Parameter, ...]:
    """Return a weight of each projection, and a bias of each where `condition` holds.

    A projection is the end of the inputs' names, its place in a layer, the labels of what it
    computes, and those of what it sums over.
    """
    weights = []
    biases = []
    for end, place, computed, summed in projections:
        weights.append(Parameter(f"w{end}", f"{place}.weight", computed + summed))
        biases.append(Parameter(f"b{end}", f"{place}.bias", computed, condition))
    return (*weights, *biases)


LAYER: tuple[Module, ...] = (
    Module(
        "norm before attention",
        (Parameter("g1", "input_layernorm.weight", "a"),),
        _attention_norm,
    ),
    Module(
        "queries, keys and values",
        _linear(
            "qkv_bias",
            ("q", "self_attn.q_proj", "grd", "a"),
            ("k", "self_attn.k_proj", "gd", "a"),
            ("v", "self_attn.v_proj", "gd", "a"),
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
        _linear("output_bias", ("o", "self_attn.o_proj", "a", "grd")),
        _attention_output,
    ),
    Module(
        "norm before the MLP",
        (Parameter("g2", "post_attention_layernorm.weight", "a"),),
        _mlp_norm,
    ),
    Module(
        "MLP",
        _linear(
            "mlp_bias",
            ("1", "mlp.gate_proj", "f", "a"),
            ("3", "mlp.up_proj", "f", "a"),
            ("2", "mlp.down_proj", "a", "f"),
        ),
        _mlp,
    ),
)


def modules_of(config: Config) -> list[Module]:
    """Return the modules that the layers of a model have."""
    found = []
    for module in LAYER:
        if not module.condition or getattr(config, module.condition):
            found.append(module)
    return found


def parameters_of(config: Config) -> list[Parameter]:
    """Return the parameters that a layer of a model has."""
    found = []
    for module in modules_of(config):
        for parameter in module.parameters:
            if not parameter.condition or getattr(config, parameter.condition):
                found.append(parameter)
    return found
