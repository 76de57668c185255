"""The modules of a layer as statements: norms, projections, rotary positions, attention, MLP.

A layer is the table LAYER. Another architecture is another row in it, or another condition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from einmpi.models.config import Config

HALF_DTYPES = ("float16", "bfloat16")
AT = "at"  # the input with the position of each sequence's token

# Labels: b sequence of the batch, s query position, t key position, u position in a cache, a width,
# g group of heads with one key and value, r query head of a group, d number in a head, f hidden,
# v token of the vocabulary, e expert, m another expert, z gate or other product of joined experts.


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
        """Return the statement of a norm along one or more labels, which is computed in float32."""
        config = self.config
        factor = f"{gain}[{label}]"
        if config.gains_from_one:
            factor = f"(1 + {self.precise(factor)})"
        arguments = f"{self.precise(f'{source}[{labels}]')}, eps={config.epsilon!r}"
        normalised = f"{config.norm}norm[{label}]({arguments}) * {factor}"
        if config.norm == "layer":
            normalised += f" + {norm_bias(gain)}[{label}]"
        return f"{target}[{labels}] = {self.rounded(normalised)}\n"

    def precise(self, element: str) -> str:
        """Return an element in the dtype of the model as one in float32, or float64."""
        return f"float32({element})" if self.dtype in HALF_DTYPES else element

    def added(self, target: str, source: str, change: str, gain: str) -> str:
        """Return the statement that adds what attention or the MLP computes, maybe after a norm."""
        k = self.number
        labels = f"{self.form.query},a"
        if not self.config.post_norms:
            return f"{target}[{labels}] = {source}[{labels}] + {change}\n"
        norm = self.norm(f"n{target}", f"s{target}", f"{gain}_{k}", labels, "a")
        total = f"{target}[{labels}] = {source}[{labels}] + n{target}[{labels}]\n"
        return f"s{target}[{labels}] = {change}\n{norm}{total}"

    @property
    def attention_input(self) -> str:
        """Return the tensor that queries, keys and values are computed from."""
        return f"n1_{self.number}" if self.config.pre_norms else f"x_{self.number - 1}"

    @property
    def mlp_input(self) -> str:
        """Return the element that the MLP reads."""
        tensor = "n2" if self.config.pre_norms else "y"
        return f"{tensor}_{self.number}[{self.form.query},a]"


def norm_bias(gain: str) -> str:
    """Return the input that is the bias of a norm, by that of its gain."""
    return gain.replace("g", "gb", 1)


class Parameter(NamedTuple):
    """A weight of a module: its input, the tensor inside of a layer, and labels of its dimensions.

    `condition` is the attribute of a Config that must be true for it to exist. The tensor is "-"
    for a norm after a module: architectures that have such norms name them.
    """

    name: str
    tensor: str
    labels: str
    condition: str = ""


@dataclass(frozen=True)
class Module:
    """A part of a layer: a function that writes its statements, and its parameters, one a row.

    `condition` is the attribute of a Config that must be true for it to exist, and `mlp` the kind
    of MLP that it is.
    """

    statements: Callable[[Layer], str]
    parameters: str = ""
    condition: str = ""
    mlp: str = ""


# ---- the modules --------------------------------------------------------------------------------


def _attention_norm(layer: Layer) -> str:
    k = layer.number
    return layer.norm(f"n1_{k}", f"x_{k - 1}", f"g1_{k}", f"{layer.form.query},a", "a")


def _projections(layer: Layer) -> str:
    k = layer.number
    query = layer.form.query
    key = layer.form.key
    source = layer.attention_input
    has_bias = layer.config.qkv_bias
    query_bias = layer.bias("bq", "g,r,d", has_bias)
    key_bias = layer.bias("bk", "g,d", has_bias)
    value_bias = layer.bias("bv", "g,d", has_bias)
    return (
        f"q_{k}[{query},g,r,d] = sum({source}[{query},a] * wq_{k}[g,r,d,a]){query_bias}\n"
        f"k_{k}[{key},g,d] = sum({source}[{key},a] * wk_{k}[g,d,a]){key_bias}\n"
        f"v_{k}[{key},g,d] = sum({source}[{key},a] * wv_{k}[g,d,a]){value_bias}\n"
    )


def _head_norms(layer: Layer) -> str:
    k = layer.number
    is_joint = layer.config.joint_norms
    of_query, of_key = ("g,r,d", "g,d") if is_joint else ("d", "d")
    queries = layer.norm(f"qh_{k}", f"q_{k}", f"gq_{k}", f"{layer.form.query},g,r,d", of_query)
    keys = layer.norm(f"kh_{k}", f"k_{k}", f"gk_{k}", f"{layer.form.key},g,d", of_key)
    return queries + keys


def _rope(layer: Layer) -> str:
    """Turn pairs of numbers: number d of a head, and the one half a head further, around the end.

    The sign of the second term is in the sine.
    """
    k = layer.number
    form = layer.form
    config = layer.config
    is_of_window = config.window_rope is not None and config.window_of(k) is not None
    width = config.ropes[is_of_window].width(config.head_width)
    other = f"(d+{width // 2})%{width}"
    cosine, sine = angle_names(is_of_window)
    has_norms = config.head_norms or config.joint_norms
    query = "qh" if has_norms else "q"
    key = "kh" if has_norms else "k"
    query_labels = f"{form.query},g,r"
    key_labels = f"{form.key},g"
    turned_query = (
        f"{query}_{k}[{query_labels},d] * {cosine}[{form.query_angle},d] + "
        f"{query}_{k}[{query_labels},{other}] * {sine}[{form.query_angle},d]"
    )
    turned_key = (
        f"{key}_{k}[{key_labels},d] * {cosine}[{form.key_angle},d] + "
        f"{key}_{k}[{key_labels},{other}] * {sine}[{form.key_angle},d]"
    )
    return (
        f"qr_{k}[{form.turned_query},d] = {layer.rounded(turned_query)}\n"
        f"kr_{k}[{form.turned_key},d] = {layer.rounded(turned_key)}\n"
    )


def angle_names(is_of_window: bool) -> tuple[str, str]:
    """Return the tensors with the cosines and sines of positions, for layers of one kind."""
    return ("cosine_w", "sine_w") if is_of_window else ("cosine", "sine")


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
    config = layer.config
    scale = 1 / math.sqrt(config.attention_scalar or config.head_width)
    seen = f"{layer.precise(scores)} * {scale!r}"
    if config.attention_cap is not None:
        seen = _capped(seen, config.attention_cap)
    seen = f"where({mask}, {seen}, -inf)"
    products = f"{scores} = sum(qr_{k}[{form.turned_query},d] * {keys})\n"
    attended = f"o_{k}[{form.query},g,r,d] = sum({weights} * {values})\n"
    if not config.sinks:
        softmax = f"{weights} = {layer.rounded(f'softmax[{column}]({seen})')}\n"
        return products + softmax + attended
    largest = f"pm_{k}[{form.turned_query}]"
    power = f"pe_{k}[{form.turned_query},{column}]"
    sink = layer.precise(f"sink_{k}[g,r]")
    total = f"sum[{column}]({power}) + exp({sink} - {largest})"
    return (
        f"{products}{largest} = maximum(max[{column}]({seen}), {sink})\n"
        f"{power} = exp({seen} - {largest})\n"
        f"{weights} = {layer.rounded(f'{power} / ({total})')}\n{attended}"
    )


def _capped(number: str, cap: float) -> str:
    """Return an expression that is close to a number, and never beyond a limit."""
    return f"{cap!r} * tanh({number} / {cap!r})"


def logits(layer: Layer, source: str, labels: str, matrix: str, target: str) -> str:
    """Return the product with the matrix of the vocabulary."""
    product = f"sum({source}[{labels},a] * {matrix}[v,a])"
    cap = layer.config.logits_cap
    if cap is not None:
        product = layer.rounded(_capped(layer.precise(product), cap))
    return f"{target}[{labels},v] = {product}\n"


def _attention_output(layer: Layer) -> str:
    k = layer.number
    at = layer.form.query
    bias = layer.bias("bo", "a", layer.config.output_bias)
    product = f"sum(o_{k}[{at},g,r,d] * wo_{k}[a,g,r,d])"
    return layer.added(f"y_{k}", f"x_{k - 1}", product + bias, "g3")


def _mlp_norm(layer: Layer) -> str:
    k = layer.number
    return layer.norm(f"n2_{k}", f"y_{k}", f"g2_{k}", f"{layer.form.query},a", "a")


def _mlp(layer: Layer) -> str:
    k = layer.number
    at = layer.form.query
    has_bias = layer.config.mlp_bias
    gate = f"sum({layer.mlp_input} * w1_{k}[f,a]){layer.bias('b1', 'f', has_bias)}"
    up = f"sum({layer.mlp_input} * w3_{k}[f,a]){layer.bias('b3', 'f', has_bias)}"
    inside = f"{layer.config.activation}({gate})"
    if layer.config.mlp == "gated":
        inside += f" * ({up})"
    down = f"sum(u_{k}[{at},f] * w2_{k}[a,f]){layer.bias('b2', 'a', has_bias)}"
    return f"u_{k}[{at},f] = {inside}\n" + layer.added(f"x_{k}", f"y_{k}", down, "g4")


def _router(layer: Layer) -> str:
    """Weigh the experts of each position: all but the likeliest few have the weight 0.

    An expert is chosen if fewer than so many others are likelier; of equal ones the first counts
    as likelier. So experts can be cut, as a search for the likeliest, one after another, cannot.
    """
    k = layer.number
    at = layer.form.query
    config = layer.config
    bias = layer.bias("br", "e", config.mlp == "joined experts")
    own = f"h_{k}[{at},e]"
    other = f"h_{k}[{at},m]"
    is_likelier = f"({other} > {own}) | (({other} == {own}) & (m < e))"
    is_chosen = f"c_{k}[{at},e] < {config.chosen}"
    if config.scaled_choice:
        weights = f"softmax[e](where({is_chosen}, {layer.precise(own)}, -inf))"
    else:
        weights = f"where({is_chosen}, softmax[e]({layer.precise(own)}), 0)"
    return (
        f"{own} = sum({layer.mlp_input} * wr_{k}[e,a]){bias}\n"
        f"c_{k}[{at},e] = count[m]({is_likelier})\n"
        f"w_{k}[{at},e] = {layer.rounded(weights)}\n"
    )


def _experts(layer: Layer) -> str:
    """Compute every expert at every position, times its weight there, which is mostly 0.

    The sum over experts and hidden numbers is one product, which can be cut along both.
    """
    k = layer.number
    at = layer.form.query
    weight = f"w_{k}[{at},e]"
    gate = f"sum({layer.mlp_input} * w1_{k}[e,f,a])"
    up = f"sum({layer.mlp_input} * w3_{k}[e,f,a])"
    inside = f"{layer.config.activation}({gate}) * ({up})"
    down = f"sum(u_{k}[{at},e,f] * w2_{k}[e,a,f])"
    products = f"u_{k}[{at},e,f] = {weight} * ({inside})\n"
    return _router(layer) + products + layer.added(f"x_{k}", f"y_{k}", down, "g4")


def _joined_experts(layer: Layer) -> str:
    """Compute experts whose gate and other product are the even and odd columns of one tensor."""
    k = layer.number
    at = layer.form.query
    config = layer.config
    both = f"j_{k}[{at},e,f,z]"
    gate = layer.precise(f"j_{k}[{at},e,f,0]")
    up = layer.precise(f"j_{k}[{at},e,f,1]")
    if config.glu_limit is not None:
        gate = f"minimum({gate}, {config.glu_limit!r})"
        up = f"clip({up}, {-config.glu_limit!r}, {config.glu_limit!r})"
    inside = f"({up} + 1) * ({gate}) * sigmoid(({gate}) * {config.glu_alpha or 1.0!r})"
    down = f"sum(u_{k}[{at},e,f] * w2_{k}[e,f,a]) + sum(w_{k}[{at},e] * b2_{k}[e,a])"
    return (
        f"{_router(layer)}{both} = sum({layer.mlp_input} * w1_{k}[e,a,f,z]) + b1_{k}[e,f,z]\n"
        f"u_{k}[{at},e,f] = {layer.rounded(f'w_{k}[{at},e] * ({inside})')}\n"
        f"{layer.added(f'x_{k}', f'y_{k}', down, 'g4')}"
    )


LAYER: tuple[Module, ...] = (
    Module(
        _attention_norm,
        """
        g1    input_layernorm.weight             a
        gb1   input_layernorm.bias               a     norm_biases
        """,
        "pre_norms",
    ),
    Module(
        _projections,
        """
        wq    self_attn.q_proj.weight            grda
        wk    self_attn.k_proj.weight            gda
        wv    self_attn.v_proj.weight            gda
        bq    self_attn.q_proj.bias              grd   qkv_bias
        bk    self_attn.k_proj.bias              gd    qkv_bias
        bv    self_attn.v_proj.bias              gd    qkv_bias
        """,
    ),
    Module(
        _head_norms,
        """
        gq    self_attn.q_norm.weight            d
        gk    self_attn.k_norm.weight            d
        """,
        "head_norms",
    ),
    Module(
        _head_norms,  # over all heads
        """
        gq    self_attn.q_norm.weight            grd
        gk    self_attn.k_norm.weight            gd
        """,
        "joint_norms",
    ),
    Module(_rope),
    Module(_cache),
    Module(
        _attention,
        """
        sink  self_attn.sinks                    gr    sinks
        """,
    ),
    Module(
        _attention_output,
        """
        wo    self_attn.o_proj.weight            agrd
        bo    self_attn.o_proj.bias              a     output_bias
        g3    -                                  a     post_norms
        """,
    ),
    Module(
        _mlp_norm,
        """
        g2    post_attention_layernorm.weight    a
        gb2   post_attention_layernorm.bias      a     norm_biases
        """,
        "pre_norms",
    ),
    Module(
        _mlp,
        """
        w1    mlp.gate_proj.weight               fa
        w3    mlp.up_proj.weight                 fa
        w2    mlp.down_proj.weight               af
        b1    mlp.gate_proj.bias                 f     mlp_bias
        b3    mlp.up_proj.bias                   f     mlp_bias
        b2    mlp.down_proj.bias                 a     mlp_bias
        g4    -                                  a     post_norms
        """,
        mlp="gated",
    ),
    Module(
        _mlp,
        """
        w1    mlp.c_fc.weight                    fa
        w2    mlp.c_proj.weight                  af
        b1    mlp.c_fc.bias                      f     mlp_bias
        b2    mlp.c_proj.bias                    a     mlp_bias
        g4    -                                  a     post_norms
        """,
        mlp="plain",
    ),
    Module(
        _experts,
        """
        wr    mlp.gate.weight                    ea
        w1    mlp.experts.*.gate_proj.weight     efa
        w3    mlp.experts.*.up_proj.weight       efa
        w2    mlp.experts.*.down_proj.weight     eaf
        g4    -                                  a     post_norms
        """,
        mlp="experts",
    ),
    Module(
        _joined_experts,
        """
        wr    mlp.router.weight                  ea
        br    mlp.router.bias                    e
        w1    mlp.experts.gate_up_proj           eafz
        b1    mlp.experts.gate_up_proj_bias      efz
        w2    mlp.experts.down_proj              efa
        b2    mlp.experts.down_proj_bias         ea
        g4    -                                  a     post_norms
        """,
        mlp="joined experts",
    ),
)


def modules_of(config: Config) -> list[Module]:
    """Return the modules that the layers of a model have."""
    found = []
    for module in LAYER:
        is_there = not module.condition or getattr(config, module.condition)
        if is_there and module.mlp in ("", config.mlp):
            found.append(module)
    return found


def parameters_of(config: Config) -> list[Parameter]:
    """Return the parameters that a layer of a model has."""
    found = []
    for module in modules_of(config):
        for row in module.parameters.strip().splitlines():
            parameter = Parameter(*row.split())
            if not parameter.condition or getattr(config, parameter.condition):
                found.append(parameter)
    return found
