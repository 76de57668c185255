"""Programs of language models: logits of whole prompts, and a step that decodes one more token."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from einmpi.api import compile as compile_job
from einmpi.errors import InputError, nearest_of, one_of
from einmpi.files.contiguous import files_of_tensors as files_of_index
from einmpi.files.contiguous import list_tensors
from einmpi.files.datasets import CONVERTIBLE_DTYPES, Dataset
from einmpi.files.formats import find
from einmpi.files.specs import InputSpec, Resident
from einmpi.job.job import Job
from einmpi.models.config import ARCHITECTURES, CONFIG_FILE, NAMED, Config
from einmpi.models.modules import (
    AT,
    DECODE,
    HALF_DTYPES,
    PREFILL,
    Layer,
    angle_names,
    logits,
    modules_of,
    norm_bias,
    parameters_of,
)
from einmpi.planner.planning import TooLittleMemory
from einmpi.units import counted, show_shape

if TYPE_CHECKING:
    from einmpi.comm.base import Comm
    from einmpi.compiled.program import Compiled


TOKENS = "tokens"  # inputs that a call gives
LENGTHS = "lengths"
FREQUENCIES = "frequencies"
LOGITS = "logits"
LAST_HIDDEN = "last_hidden"  # after the last norm, at every position
OUTPUT_HEAD = "lm_head.weight"  # the tensor; checkpoints with tied embeddings may have it too


@dataclass(frozen=True)
class Weight:
    """Where the value of an input is: the name of a tensor in a checkpoint, and its split shape.

    `rows` are the first row of the tensor, and the one after the last, if there are others. A
    tensor with a `*` for a number is that of all such tensors, one after another.
    """

    tensor: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None

    @property
    def tensors(self) -> list[str]:
        """Return the names of all tensors that are read."""
        if "*" not in self.tensor:
            return [self.tensor]
        return [self.tensor.replace("*", str(number)) for number in range(self.shape[0])]


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
    extents.update(e=config.experts, z=2)
    of_vocabulary = (config.vocabulary, config.width)
    weights = {"emb": Weight("model.embed_tokens.weight", of_vocabulary)}
    names = ARCHITECTURES[config.model_type].tensors
    parameters = parameters_of(config)
    places = [names.get(parameter.name, parameter.tensor) for parameter in parameters]
    for number in range(1, config.layers + 1):
        ends: dict[str, int] = {}  # of what is read of a tensor that several parameters share
        for parameter, place in zip(parameters, places, strict=True):
            tensor = f"model.layers.{number - 1}.{place}"
            shape = tuple([extents[label] for label in parameter.labels])
            rows = None
            if places.count(place) > 1:
                start = ends.get(place, 0)
                ends[place] = start + prod(shape[:-1])
                rows = start, ends[place]
            weights[f"{parameter.name}_{number}"] = Weight(tensor, shape, rows)
    weights["gf"] = Weight("model.norm.weight", (config.width,))
    if config.norm_biases:
        weights[norm_bias("gf")] = Weight("model.norm.bias", (config.width,))
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
    text = _embedding(config, "b,s", dtype)
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
        FREQUENCIES: (config.frequencies().shape, "float32"),
    }
    if lengths and not every:
        inputs[LENGTHS] = ((batch,), "int64")
    roles = _roles(config, "s", "t")
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
    text = _embedding(config, "b", dtype)
    text += _angles(config, "b", f"{AT}[b]")
    outputs = [LOGITS]
    inputs: dict[str, tuple[tuple[int, ...], str]] = {
        TOKENS: ((batch,), "int64"),
        AT: ((batch,), "int64"),
        FREQUENCIES: (config.frequencies().shape, "float32"),
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
    roles = _roles(config, "u")
    return ModelProgram(text, tuple(outputs), inputs, weights_of(config), dtype, carry, roles)


def _layer_text(layer: Layer) -> str:
    """Return the statements of a layer, module by module."""
    return "".join([module.statements(layer) for module in modules_of(layer.config)])


def _roles(config: Config, *positions: str) -> dict[str, tuple[str, ...]]:
    """Return the labels that strategies cut: experts before the numbers inside of them."""
    hidden = ("e", "f", "v") if config.experts else ("f", "v")
    return {"batch": ("b",), "sequence": positions, "head": ("g", "r"), "hidden": hidden}


def _embedding(config: Config, labels: str, dtype: str) -> str:
    """Return the numbers of each token. A factor is rounded to their dtype, as it was trained."""
    factor = config.embedding_scale
    if dtype in HALF_DTYPES:
        factor = float(np.array(factor, dtype))
    scaled = "" if factor == 1 else f" * {factor!r}"
    return f"x_0[{labels},a] = emb[{TOKENS}[{labels}], a]{scaled}\n"


def _angles(config: Config, labels: str, position: str) -> str:
    """Return cosines and sines of positions, which are float32 in every model.

    The numbers of a head that are not turned have the angle 0. Frequencies of layers with a window
    follow those of the others.
    """
    text = ""
    first = 0
    for number, rope in enumerate(config.ropes):
        width = rope.width(config.head_width)
        half_width = width // 2
        index = f"d%{half_width}" if first == 0 else f"{first}+d%{half_width}"
        angle = f"float32({position}) * {FREQUENCIES}[{index}]"
        scaled = "" if rope.attention_factor == 1 else f" * {rope.attention_factor!r}"
        cosine = f"cos({angle}){scaled}"
        sine = f"where(d < {half_width}, -sin({angle}), sin({angle})){scaled}"
        if width < config.head_width:
            cosine = f"where(d < {width}, {cosine}, 1)"
            sine = f"where(d < {width}, {sine}, 0)"
        dimensions = f"{labels},d:{config.head_width}"
        names = angle_names(is_of_window=number > 0)
        text += f"{names[0]}[{dimensions}] = {cosine}\n{names[1]}[{dimensions}] = {sine}\n"
        first += half_width
    return text


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
    return norm + logits(layer, "nf", labels, matrix, LOGITS)


# ---- known programs ------------------------------------------------------------------------------
#
# Programs of a model that are compiled and kept: those used last, within a memory limit.


MOST_PROGRAMS = 32  # that are kept; a plan and a schedule of a large model take megabytes
_MOST_LIMITS = 8  # that are tried, until one is enough for all programs


@dataclass(frozen=True)
class Wanted:
    """A program that is about to run: what it is known by, and how it is made."""

    key: Hashable
    make: Callable[[], ModelProgram]


class KnownPrograms:
    """The compiled programs of a model. They share its weights, which are loaded once.

    `make_job` makes the job of a program, with weights that stay loaded or not. All ranks call
    the methods in the same order, so that all of them keep the same programs.
    """

    def __init__(
        self, comm: Comm, memory: int | None, make_job: Callable[[ModelProgram, bool], Job]
    ) -> None:
        self.comm = comm
        self.memory = memory
        self.make_job = make_job
        self.weights_stay = True  # loaded between calls
        self.compiled: dict[Hashable, tuple[ModelProgram, Compiled]] = {}
        self.last: Compiled | None = None  # of the latest call

    def ready(self, *wanted: Wanted) -> list[tuple[ModelProgram, Compiled]]:
        """Return programs that run one after another, planned for calls with plain arrays.

        The program that is planned first chooses how weights are cut, and which of them stay
        loaded. If that leaves too little memory for another one, the last one chooses; and if
        that does not help either, weights are loaded in each call from then on.
        """
        try:
            return self._planned(wanted)
        except TooLittleMemory:
            if not self.weights_stay:
                raise self._refusal(wanted) from None
        self.forget()
        try:
            return self._planned(wanted[::-1])[::-1]
        except TooLittleMemory:
            self.forget()
        self.weights_stay = False
        try:
            return self._planned(wanted)
        except TooLittleMemory:
            self.forget()
            self.weights_stay = True  # shorter prompts may leave enough memory for them
            raise self._refusal(wanted) from None

    def forget(self) -> None:
        """Forget all programs, and with them the weights."""
        self.compiled.clear()
        self.last = None

    def _planned(self, wanted: Sequence[Wanted]) -> list[tuple[ModelProgram, Compiled]]:
        found = []
        for each in wanted:
            known = self.compiled.pop(each.key, None)
            program, compiled = known or self._compile(each, self.weights_stay, self.memory)
            compiled.planning.plan_for_arrays()
            self.compiled[each.key] = program, compiled  # those used last are at the end
            self.last = compiled
            found.append((program, compiled))
        for key in [*self.compiled][:-MOST_PROGRAMS]:
            del self.compiled[key]
        return found

    def _compile(
        self, wanted: Wanted, weights_stay: bool, memory: int | None
    ) -> tuple[ModelProgram, Compiled]:
        program = wanted.make()
        job = replace(self.make_job(program, weights_stay), memory=memory)
        carry = dict(program.carry)
        share = self.last if weights_stay else None  # the weights are loaded once for all programs
        return program, compile_job(job, self.comm, carry=carry, donate=bool(carry), share=share)

    def _refusal(self, wanted: Sequence[Wanted]) -> TooLittleMemory:
        """Return the error that names a limit which is enough for all of these programs."""
        assert self.memory is not None
        limit = self.memory
        for _ in range(_MOST_LIMITS):
            least = limit
            for each in wanted:
                _, compiled = self._compile(each, weights_stay=False, memory=limit)
                try:
                    compiled.planning.plan_for_arrays()
                except TooLittleMemory as error:
                    least = max(least, error.least)
            if least == limit:
                break
            limit = least
        return TooLittleMemory(self.comm.size, self.memory, limit)


# ---- checkpoint ----------------------------------------------------------------------------------
#
# The files of a checkpoint: which tensor lies in which file, as inputs of a job.


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MOST_TENSORS = 10**6
_MOST_NAMED = 3  # tensors that a message about several of them names

# What checkpoints may have besides the weights: tables that old versions of transformers saved.
_IGNORED_ENDINGS = (".rotary_emb.inv_freq", ".attn.bias", ".masked_bias")


def check_folder(folder: str) -> None:
    """Refuse a folder that has no config.json."""
    if not os.path.isdir(folder):
        expected = f"a folder with a checkpoint, or one of {', '.join(NAMED)}"
        raise InputError(folder, "there is no such folder", expected)
    if not os.path.isfile(os.path.join(folder, CONFIG_FILE)):
        expected = "the folder of a model in the format of Hugging Face"
        raise InputError(folder, f"there is no {CONFIG_FILE}", expected)


def files_of_tensors(folder: str) -> dict[str, str]:
    """Return the file of each tensor of a checkpoint."""
    index = os.path.join(folder, INDEX_FILE)
    if os.path.isfile(index):
        return files_of_index(index, index)
    file = os.path.join(folder, SINGLE_FILE)
    if not os.path.isfile(file):
        problem = f"there is neither {SINGLE_FILE} nor {INDEX_FILE}"
        hint = "einmpi reads safetensors, not pytorch_model.bin"
        raise InputError(folder, problem, "a folder with the weights", hint)
    return dict.fromkeys(list_tensors(file, file, _MOST_TENSORS), file)


def weight_inputs(
    folder: str,
    weights: Mapping[str, Weight],
    dtype: str,
    may_be_there: Sequence[str] = (),
    resident: Resident = True,
) -> tuple[InputSpec, ...]:
    """Return the inputs that are weights of a checkpoint, after all of them have been found.

    Tensors that no weight is read from are refused, because the program would not be the model's,
    unless they are in `may_be_there`.
    """
    files = files_of_tensors(folder)
    _check_unused(folder, files, weights, may_be_there)
    found = []
    for name, weight in weights.items():
        for tensor in weight.tensors:
            if tensor not in files:
                expected = nearest_of(sorted(files), tensor)
                raise InputError(folder, f"there is no tensor {tensor}", expected)
        file = _file_of(folder, files, weight)
        dataset = find(InputSpec(name, file=file, inside=weight.tensor, place=file))
        if dataset.dtype.name not in CONVERTIBLE_DTYPES:
            problem = f"{weight.tensor} is {dataset.dtype.name}"
            raise InputError(file, problem, one_of(CONVERTIBLE_DTYPES))
        _check_shape(dataset, weight)
        found.append(
            InputSpec(
                name,
                shape=weight.shape,
                dtype=dtype,
                file=file,
                inside=weight.tensor,
                slices=() if weight.rows is None else ((*weight.rows, 1),),
                declared_shape=weight.shape,
                declared_dtype=dataset.dtype.name,
                convert=None if dataset.dtype.name == dtype else dtype,
                resident=resident,
                place=file,
            )
        )
    return tuple(found)


def random_inputs(
    weights: Mapping[str, Weight], dtype: str, resident: Resident = True
) -> tuple[InputSpec, ...]:
    """Return inputs that are random weights of a size that keeps all numbers small.

    Weights with one dimension, which are factors of normalised numbers, and biases are 1.
    """
    found = []
    for number, (name, weight) in enumerate(weights.items()):
        is_norm = len(weight.shape) == 1 or "norm" in weight.tensor
        if is_norm or weight.tensor.endswith("bias"):
            spec = InputSpec(name, weight.shape, dtype, "ones", resident=resident)
        else:
            limit = (3 / weight.shape[-1]) ** 0.5  # a sum over the last dimension has variance 1
            spec = InputSpec(
                name,
                weight.shape,
                dtype,
                "uniform",
                seed=number,
                low=-limit,
                high=limit,
                resident=resident,
            )
        found.append(spec)
    return tuple(found)


def _file_of(folder: str, files: Mapping[str, str], weight: Weight) -> str:
    """Return the file of a weight: the index, if its tensors are in several files."""
    found = {files[tensor] for tensor in weight.tensors}
    return found.pop() if len(found) == 1 else os.path.join(folder, INDEX_FILE)


def _check_unused(
    folder: str,
    files: Mapping[str, str],
    weights: Mapping[str, Weight],
    may_be_there: Sequence[str],
) -> None:
    used = {tensor for weight in weights.values() for tensor in weight.tensors}
    unused = []
    for tensor in sorted(files):
        is_ignored = tensor in may_be_there or tensor.endswith(_IGNORED_ENDINGS)
        if tensor not in used and not is_ignored:
            unused.append(tensor)
    if unused:
        named = ", ".join(unused[:_MOST_NAMED])
        if len(unused) > _MOST_NAMED:
            named += ", …"
        problem = f"the model that {CONFIG_FILE} describes does not have "
        problem += f"{counted(len(unused), 'tensor')} of the checkpoint: {named}"
        raise InputError(folder, problem, f"a {CONFIG_FILE} that matches the tensors")


def _check_shape(dataset: Dataset, weight: Weight) -> None:
    """Refuse a tensor whose dimensions cannot be split into those of the weight."""
    remaining = list(weight.shape)
    can_be_split = True
    for dimension, extent in enumerate(dataset.shape):
        if dimension == 0 and weight.rows is not None:
            can_be_split = weight.rows[1] <= extent
            extent = weight.rows[1] - weight.rows[0]
        product = 1
        while remaining and product < extent:
            product *= remaining.pop(0)
        if product != extent:
            can_be_split = False
    if not can_be_split or prod(remaining) != 1:
        rows = "" if weight.rows is None else f" in rows {weight.rows[0]}:{weight.rows[1]}"
        raise InputError(
            dataset.file,
            f"{dataset.name} has shape {show_shape(dataset.shape)}",
            f"dimensions that split into {show_shape(weight.shape)}{rows}, as {CONFIG_FILE} says",
        )
