"""The files of a checkpoint: which tensor lies in which file, as inputs of a job."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from einmpi.errors import InputError, nearest_of, one_of
from einmpi.files import safetensors_index
from einmpi.files.converting import CONVERTIBLE_DTYPES
from einmpi.files.datasets import Dataset
from einmpi.files.safetensors import find, list_tensors
from einmpi.files.specs import InputSpec, Resident
from einmpi.models.config import CONFIG_FILE, NAMED
from einmpi.units import counted, show_shape

if TYPE_CHECKING:
    from einmpi.models.programs import Weight

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
        return safetensors_index.files_of_tensors(index, index)
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
        file = files.get(weight.tensor)
        if file is None:
            expected = nearest_of(sorted(files), weight.tensor)
            raise InputError(folder, f"there is no tensor {weight.tensor}", expected)
        dataset = find(file, weight.tensor, file)
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
        if len(weight.shape) == 1 or weight.tensor.endswith(".bias"):
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


def _check_unused(
    folder: str,
    files: Mapping[str, str],
    weights: Mapping[str, Weight],
    may_be_there: Sequence[str],
) -> None:
    used = {weight.tensor for weight in weights.values()}
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
    for extent in dataset.shape:
        product = 1
        while remaining and product < extent:
            product *= remaining.pop(0)
        if product != extent:
            can_be_split = False
    if not can_be_split or prod(remaining) != 1:
        raise InputError(
            dataset.file,
            f"{dataset.name} has shape {show_shape(dataset.shape)}",
            f"dimensions that split into {show_shape(weight.shape)}, as {CONFIG_FILE} says",
        )
