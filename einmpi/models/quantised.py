"""Weights in 8 and 4 bits: integers with a scale for each group of a row, as plain statements.

The matrices of linear layers, which have names such as q_proj, are quantised while they are read,
or they come quantised from the checkpoint. A program reads `wq_1[g,r,d,a]` as
`float32(wq_1[g,r,d,a]) * wq_1_scale[g,r,d,a//64]`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import TYPE_CHECKING, Any

import numpy as np

from einmpi.errors import InputError
from einmpi.files.quantised import Recipe, stored_matrix
from einmpi.files.specs import InputSpec, Resident
from einmpi.models.json_values import Values

if TYPE_CHECKING:
    from einmpi.models.programs import ModelProgram, Weight

BITS = {"int8": 8, "int4": 4}  # what --weights takes
GROUP = 64  # columns that share a scale, if the last dimension is a multiple
_ENDINGS = ("_proj.weight", ".c_fc.weight")
_METHODS = "gptq or awq with 4 bits, compressed-tensors with int8 or float8 weights, fp8"
# The tensors of a matrix in a checkpoint by the form that they are stored in, and those that say
# nothing about the weights.
_PARTS = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "scaled": ("weight", "weight_scale", "weight_scale_inv"),
}
_IGNORED = ("g_idx", "input_scale", "weight_shape", "activation_scale", "output_scale")


@dataclass(frozen=True)
class Quantisation:
    """How the matrices of a checkpoint are stored.

    Attributes
    ----------
    form : str
        A key of einmpi.files.quantised.FORMS.
    symmetric : bool
        Whether the integers of 4 bits are those from −8 to 7.
    block : tuple of int, optional
        Rows and columns that share a scale, if config.json says it.
    """

    form: str
    symmetric: bool = True
    block: tuple[int, int] | None = None


def read_quantisation(config: Values) -> Quantisation | None:
    """Return how config.json says that weights are stored; None for plain floats."""
    if not config.has("quantization_config"):
        return None
    values = config.inner("quantization_config")
    method = values.values.get("quant_method")
    if method in ("gptq", "awq") and values.values.get("bits") == 4:
        if values.truth("desc_act", False):
            values.wrong("desc_act", "false: columns in the order of the groups")
        if method == "awq":
            version = str(values.values.get("version", "gemm")).lower()
            if version != "gemm":
                values.wrong("version", '"gemm"')
            return Quantisation("awq", symmetric=not values.truth("zero_point", True))
        form = values.name("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        return Quantisation(form, symmetric=values.truth("sym", True))
    if method == "compressed-tensors":
        known = ("int-quantized", "float-quantized", "naive-quantized")
        values.name("format", known)
        return Quantisation("scaled")
    if method == "fp8":
        block: Any = values.values.get("weight_block_size")
        is_block = isinstance(block, list) and len(block) == 2
        return Quantisation("scaled", block=(int(block[0]), int(block[1])) if is_block else None)
    shown = f"{method!r:.40}" + (
        f" with {values.values['bits']} bits" if values.has("bits") else ""
    )
    raise InputError(config.file, f"the weights are quantized by {shown}", _METHODS)


@dataclass(frozen=True)
class Quantised:
    """A matrix as a program reads it.

    `make` is "int8", "int4", or "floats" if small integers do not represent it exactly. `group` is
    the number of columns of a scale.
    """

    make: str
    group: int
    recipe: Recipe | None = None  # None for random weights


def quantised_weights(
    weights: Mapping[str, Weight],
    files: Mapping[str, str] | None,
    stored: Quantisation | None,
    bits: int | None,
    dtype: str,
) -> tuple[dict[str, Quantised], set[str]]:
    """Return the weights that are quantised, and the tensors that they are read from.

    `files` has the file of each tensor of a checkpoint, None for random weights.
    """
    found = {}
    used: set[str] = set()
    for name, weight in weights.items():
        is_plain = weight.tensor.endswith(_ENDINGS) and "*" not in weight.tensor
        if not is_plain or len(weight.shape) < 2:
            continue
        own: Quantised | None = None
        if files is None:
            if bits is not None:
                own = Quantised(f"int{bits}", gcd(GROUP, weight.shape[-1]))
        elif stored is not None:
            own = _stored(weight, files, stored, dtype)
        elif bits is not None and weight.tensor in files:
            own = _rounded(weight, files[weight.tensor], bits, dtype)
        if own is None or (own.make == "int4" and weight.shape[-1] % 2):
            continue
        found[name] = own
        if own.recipe is not None:
            stem = weight.tensor.removesuffix("weight")
            used.update(f"{stem}{ending}" for ending in _IGNORED)
            used.update(tensor for _, tensor in own.recipe.parts.values())
    return found, used


def _rounded(weight: Weight, file: str, bits: int, dtype: str) -> Quantised:
    """Return a weight that is rounded to integers while it is read."""
    first, last = weight.rows or (0, stored_matrix(file, weight.tensor).shape[0])
    group = gcd(GROUP, weight.shape[-1])
    parts = {"weight": (file, weight.tensor)}
    columns = _columns(weight, last - first)
    recipe = Recipe("", "rounded", weight.shape, columns, group, dtype, parts, bits, first=first)
    return Quantised(f"int{bits}", group, recipe)


def _columns(weight: Weight, rows: int) -> int:
    """Return how many of a weight's last dimensions are the columns of the stored matrix."""
    ndim = len(weight.shape)
    split = next((k for k in range(1, ndim) if prod(weight.shape[:k]) == rows), None)
    if split is None:
        problem = f"{weight.tensor} has {rows} rows"
        raise InputError("config.json", problem, f"rows of {list(weight.shape)}")
    return ndim - split


def _stored(
    weight: Weight, files: Mapping[str, str], stored: Quantisation, dtype: str
) -> Quantised | None:
    """Return a weight that comes quantised; None if the checkpoint has it as floats."""
    stem = weight.tensor.removesuffix("weight")
    form = stored.form
    parts = {}
    for part in _PARTS["gptq" if form.startswith("gptq") else form]:
        if stem + part in files:
            parts[part.replace("weight_scale_inv", "scale").replace("weight_scale", "scale")] = (
                files[stem + part],
                stem + part,
            )
    if form == "scaled":
        if "scale" not in parts:
            return None
        matrix = stored_matrix(*parts["weight"])
        rows, columns = matrix.shape
        make = "int8" if matrix.dtype.name == "int8" else "floats"
        scales = stored_matrix(*parts["scale"]).shape
        tall, wide = rows, columns
        if stored.block is not None:
            tall, wide = stored.block
        elif scales[1] > 1 and scales != (1, rows):
            wide = columns // scales[1]
        if scales != (1, 1):
            tall = tall if stored.block is not None else 1
        block: tuple[int, int] | None = (tall, wide)
    else:
        if "qweight" not in parts:
            return None
        high, wide_words = stored_matrix(*parts["qweight"]).shape
        rows = wide_words * 8 if form == "awq" else wide_words
        columns = high if form == "awq" else high * 8
        make = "int4" if stored.symmetric else "int8"
        wide = columns // stored_matrix(*parts["scales"]).shape[0]
        if "g_idx" in parts:
            _check_order(*parts.pop("g_idx"), columns, wide)
        block = None
    group = gcd(wide, weight.shape[-1])
    first, last = weight.rows or (0, rows)
    split = _columns(weight, last - first)
    if prod(weight.shape[-split:]) != columns:
        problem = f"{stem}* is a matrix of {rows}×{columns}"
        raise InputError(files[next(iter(parts.values()))[1]], problem, f"{list(weight.shape)}")
    recipe = Recipe("", form, weight.shape, split, group, dtype, parts, block=block, first=first)
    return Quantised(make, group, recipe)


def _check_order(file: str, tensor: str, columns: int, wide: int) -> None:
    """Refuse groups whose columns do not follow one another."""
    groups = stored_matrix(file, tensor).whole.ravel()
    if not np.array_equal(groups, np.arange(columns) // wide):
        raise InputError(file, f"{tensor} has columns in another order", "columns by groups")


def with_quantised(
    program: ModelProgram, quantised: Mapping[str, Quantised]
) -> tuple[str, dict[str, tuple[tuple[int, ...], str]]]:
    """Return the text that reads quantised weights, and their inputs: shapes and dtypes."""
    inputs = {}

    def read(match: re.Match[str]) -> str:
        name = match[1]
        if name not in quantised or quantised[name].make == "floats":
            return match[0]
        *others, last = match[2].split(",")
        own = quantised[name]

        def element(tensor: str, index: str) -> str:
            return f"{tensor}[{','.join([*others, index])}]"

        integer = element(name, last)
        if own.make == "int4":
            integer = f"({element(name, f'{last}//2')} >> 4*({last}%2) & 15) - 8"
        scale = element(f"{name}_scale", f"{last}//{own.group}")
        return f"({program.dtype}({integer}) * {scale})"

    for name, weight in program.weights.items():
        own = quantised.get(name)
        if own is None or own.make == "floats":
            inputs[name] = weight.shape, program.dtype
            continue
        for made, tensor in ((own.make, name), ("scales", f"{name}_scale")):
            recipe = Recipe(made, "", weight.shape, 1, own.group, program.dtype, {})
            inputs[tensor] = recipe.result
    return re.sub(r"\b(\w+)\[([\w,]+)\]", read, program.text), inputs


def quantised_inputs(
    quantised: Mapping[str, Quantised],
    weights: Mapping[str, Weight],
    inputs: Mapping[str, tuple[tuple[int, ...], str]],
    resident: Resident,
) -> tuple[InputSpec, ...]:
    """Return the inputs that are quantised weights and their scales."""
    found = []
    for number, (name, own) in enumerate(quantised.items()):
        tensors = {name: own.make}
        if own.make != "floats":
            tensors[f"{name}_scale"] = "scales"
        for tensor, make in tensors.items():
            shape, dtype = inputs[tensor]
            spec = InputSpec(tensor, shape, dtype, resident=resident)
            if own.recipe is None:  # random, and of about the size of other random weights
                low, high = {"int4": (1.0, 250.0), "int8": (-127.0, 127.0)}.get(make, (0.0, 0.0))
                if make == "scales":
                    high = (3 / weights[name].shape[-1]) ** 0.5 / (4 if own.make == "int4" else 64)
                found.append(replace(spec, random="uniform", seed=number, low=low, high=high))
                continue
            recipe = replace(own.recipe, make=make)
            file = next(iter(recipe.parts.values()))[0]
            found.append(
                replace(
                    spec,
                    file=file,
                    inside=recipe.text,
                    declared_shape=shape,
                    declared_dtype=dtype,
                    place=file,
                )
            )
    return tuple(found)
