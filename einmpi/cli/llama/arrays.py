"""Tokens from files, and logits and hidden states to files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy.typing as npt

from einmpi.cli.llama.models import load_model
from einmpi.cli.output_files import check_files, print_or_write
from einmpi.errors import InputError
from einmpi.units import show_shape

if TYPE_CHECKING:
    from einmpi.comm.base import Comm
    from einmpi.files.specs import InputSpec
    from einmpi.models.llama import Model


def read_prompts(
    options: argparse.Namespace,
) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
    """Return the tokens and the lengths that flags name."""
    tokens = _read("--prompts", options.prompts)
    lengths = None
    if options.lengths is not None:
        lengths = _read("--lengths", options.lengths)
    return tokens, lengths


def _read(flag: str, text: str) -> npt.NDArray[Any]:
    from einmpi.files.load import describe, load_array

    spec = file_input(flag, text)
    shape, dtype = describe(spec)
    return load_array(spec, shape, dtype)


def file_input(flag: str, text: str, name: str = "tokens") -> InputSpec:
    """Return the input that a flag names in the short form of job files."""
    from einmpi.files.formats import known_format, split_short_form
    from einmpi.files.specs import InputSpec

    place = f"{flag} {text}"
    file, inside = split_short_form(text)
    file_format = known_format(place, file)
    if file_format.key and not inside:
        raise InputError(place, f"the {file_format.key} is missing", "FILE.h5:/PATH")
    return InputSpec(name, file=file, inside=inside, place=place)


def write_arrays(options: argparse.Namespace, comm: Comm) -> None:
    """Compute logits and hidden states and write them to HDF5 files. All ranks call it."""
    from einmpi.comm.agreement import on_first_rank, together

    on_first_rank(comm, lambda: check_files(options))
    logits_target = together(comm, lambda: _target("--logits", options.logits))
    hidden_target = together(comm, lambda: _target("--hidden", options.hidden))
    tokens, lengths = together(comm, lambda: read_prompts(options))
    model = load_model(options, comm)
    layers = _layers(options, model)
    together(comm, lambda: _check_separate(options, logits_target, hidden_target, layers))
    logits, states = model.prefill(
        tokens, lengths, options.every_position, layers, options.before_norm
    )
    targets = {}
    if logits_target is not None:
        file, dataset = logits_target
        logits.to_hdf5(file, dataset)
        targets["logits"] = (f"{file}:{dataset}", logits)
    if hidden_target is not None:
        file, folder = hidden_target
        for layer, state in zip(layers, states, strict=True):
            dataset = _dataset_of(folder, layer)
            state.to_hdf5(file, dataset)
            targets[f"layer {layer}"] = (f"{file}:{dataset}", state)
    lines = []
    data = {}
    for name, (target, array) in targets.items():
        lines.append(f"{name}  {show_shape(array.shape)} {array.dtype}  {target}")
        shape = list(array.shape)
        data[name] = {"shape": shape, "dtype": str(array.dtype), "target": target}
    on_first_rank(comm, lambda: print_or_write(options, "\n".join(lines), data))


def _dataset_of(folder: str, layer: int) -> str:
    """Return the path of a layer's hidden states in a file."""
    return f"{folder.rstrip('/')}/{layer}"


class _Dataset(NamedTuple):
    """A dataset that a flag names, and what it holds."""

    place: str
    content: str
    file: str
    path: str

    def is_apart_from(self, other: _Dataset) -> bool:
        """Return whether neither is the other, nor would have to lie inside of it."""
        if os.path.realpath(self.file) != os.path.realpath(other.file):
            return True
        one = "/" + self.path.strip("/") + "/"
        two = "/" + other.path.strip("/") + "/"
        return not one.startswith(two) and not two.startswith(one)


def _check_separate(
    options: argparse.Namespace,
    logits_target: tuple[str, str] | None,
    hidden_target: tuple[str, str] | None,
    layers: Sequence[int],
) -> None:
    """Refuse results that would replace tokens or each other, or would have to lie in them."""
    used = []
    for flag, text in (("--prompts", options.prompts), ("--lengths", options.lengths)):
        if text is not None:
            spec = file_input(flag, text)
            used.append(_Dataset(spec.place, flag, str(spec.file), spec.inside))
    written = []
    if logits_target is not None:
        written.append(_Dataset(f"--logits {options.logits}", "the logits", *logits_target))
    if hidden_target is not None:
        file, folder = hidden_target
        for layer in layers:
            place = f"--hidden {options.hidden}"
            written.append(_Dataset(place, f"layer {layer}", file, _dataset_of(folder, layer)))
    for result in written:
        for other in used:
            if not result.is_apart_from(other):
                problem = (
                    f"{result.content} and {other.content} would be the same dataset, "
                    "or one in the other"
                )
                raise InputError(result.place, problem, "separate datasets")
        used.append(result)


def _layers(options: argparse.Namespace, model: Model) -> list[int]:
    if options.hidden is None:
        return []
    return list(options.layers) or [model.config.layers]


def _target(flag: str, text: str | None) -> tuple[str, str] | None:
    """Return the file and the path that a flag names, if they can be written."""
    from einmpi.files.formats import HDF5, format_with_suffix, split_short_form, suffix_of
    from einmpi.files.writing import check_target

    if text is None:
        return None
    place = f"{flag} {text}"
    file, inside = split_short_form(text)
    if format_with_suffix(suffix_of(file)) is not HDF5 or not inside:
        raise InputError(place, "this names no dataset of an HDF5 file", "FILE.h5:/PATH")
    check_target(os.path.abspath(file), {inside: place}, HDF5)
    return file, inside
