"""The model of `einmpi llama` and its files: tokens, logits, hidden states, a job file."""

from __future__ import annotations

import argparse
import io
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from einmpi.cli.job_options import check_files, print_or_write
from einmpi.cli.new import quoted
from einmpi.comm.agreement import on_first_rank, together
from einmpi.comm.base import ALONE, Comm
from einmpi.errors import InputError
from einmpi.files.atomic import check_replaceable, replace_file
from einmpi.files.formats import HDF5, format_with_suffix, known_format, split_short_form, suffix_of
from einmpi.files.reading import describe, load_array
from einmpi.files.specs import InputSpec
from einmpi.files.writing import check_target
from einmpi.job.job import Job
from einmpi.models.llama import Model, load
from einmpi.models.programs import FREQUENCIES, LOGITS, TOKENS
from einmpi.units import show_shape

_USUAL_SEQUENCE = 1024


def load_model(options: argparse.Namespace, comm: Comm, random: bool = False) -> Model:
    """Return the model of a command line. All ranks call it."""
    return load(
        options.model,
        dtype=options.dtype,
        backend=options.backend,
        memory=options.memory,
        strategy=options.strategy,
        comm=comm,
        random=random or options.random,
    )


def prompt_shapes(options: argparse.Namespace, model: Model) -> list[tuple[int, int]]:
    """Return the batches and sequences that --batch and --sequence ask for, one by one."""
    sequences = options.sequence or [min(model.config.positions, _USUAL_SEQUENCE)]
    found = []
    for batch in options.batch:
        for sequence in sequences:
            found.append((batch, sequence))
    return found


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
    spec = file_input(flag, text)
    shape, dtype = describe(spec)
    return load_array(spec, shape, dtype)


def file_input(flag: str, text: str, name: str = "tokens") -> InputSpec:
    """Return the input that a flag names in the short form of job files."""
    place = f"{flag} {text}"
    file, inside = split_short_form(text)
    file_format = known_format(place, file)
    if file_format.key and not inside:
        raise InputError(place, f"the {file_format.key} is missing", "FILE.h5:/PATH")
    return InputSpec(name, file=file, inside=inside, place=place)


def write_arrays(options: argparse.Namespace, comm: Comm) -> None:
    """Compute logits and hidden states and write them to HDF5 files. All ranks call it."""
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
    if text is None:
        return None
    place = f"{flag} {text}"
    file, inside = split_short_form(text)
    if format_with_suffix(suffix_of(file)) is not HDF5 or not inside:
        raise InputError(place, "this names no dataset of an HDF5 file", "FILE.h5:/PATH")
    check_target(os.path.abspath(file), {inside: place}, HDF5)
    return file, inside


# ---- the job file --------------------------------------------------------------------------------


def write_job(options: argparse.Namespace) -> None:
    """Write the job file, and beside it the inverse frequencies of the model."""
    place = f"--job {options.job}"
    if not options.job.endswith(".toml"):
        raise InputError(place, "this is not the name of a job file", "FILE.toml")
    check_replaceable(options.job, place)
    model = load_model(options, ALONE)
    if options.prompts is not None:
        tokens = file_input("--prompts", options.prompts)
        shape, dtype = describe(tokens)
        if len(shape) != 2 or not dtype.startswith(("int", "uint")):
            problem = f"this is {dtype}{list(shape)}"
            raise InputError(tokens.place, problem, "integers [batch, position]")
        batch, sequence = shape
    else:
        shapes = prompt_shapes(options, model)
        if len(shapes) > 1:
            raise InputError(place, f"{len(shapes)} shapes are given", "one --batch and --sequence")
        batch, sequence = shapes[0]
        vocabulary = model.config.vocabulary
        tokens = InputSpec(TOKENS, (batch, sequence), "int64", "uniform", high=vocabulary)
    job = model.job(batch, sequence)
    stem = options.job.removesuffix(".toml")
    frequencies_file = f"{stem}.frequencies.npy"
    outputs = {LOGITS: f"{os.path.basename(stem)}.h5:/{LOGITS}"}
    text = _job_text(model, job, tokens, frequencies_file, outputs, os.path.dirname(options.job))
    stored = io.BytesIO()
    np.save(stored, model.frequencies)
    replace_file(frequencies_file, [stored.getvalue()])
    replace_file(options.job, [text.encode()])
    if not options.quiet:
        print(f"wrote {options.job} and {frequencies_file}; run it: einmpi run {options.job}")


def _job_text(
    model: Model,
    job: Job,
    tokens: InputSpec,
    frequencies_file: str,
    outputs: dict[str, str],
    folder: str,
) -> str:
    """Return the job file. Paths in it are relative to its own folder."""
    inputs = {TOKENS: _input_text(tokens, folder)}
    inputs[FREQUENCIES] = quoted(os.path.basename(frequencies_file))
    for spec in job.inputs:
        inputs[spec.name] = _input_text(spec, folder)
    lines = [
        f"title   = {quoted(job.title)}",
        f"dtype   = {quoted(model.settings.dtype)}",
        f'program = """\n{job.source.text.strip()}\n"""',
    ]
    roles = {role: json.dumps(labels) for role, labels in job.roles.items()}
    plan = {"strategy": quoted(job.strategy)}
    if job.memory is not None:
        plan["memory"] = quoted(f"{job.memory} B")
    tables = {
        "inputs": inputs,
        "outputs": {name: quoted(target) for name, target in outputs.items()},
        "roles": roles,
        "plan": plan,
        "run": {"backend": quoted(job.backend)},
    }
    for heading, entries in tables.items():
        lines += ["", f"[{heading}]"]
        lines += [f"{name} = {value}" for name, value in entries.items()]
    return "\n".join(lines) + "\n"


def _input_text(spec: InputSpec, folder: str) -> str:
    """Return an input as a job file writes it: from its file, or generated."""
    entries = {}
    if spec.file is not None:
        file = os.path.relpath(spec.file, folder or ".")
        entries["file"] = quoted(file)
        if spec.inside:
            entries[known_format(spec.place, file).key] = quoted(spec.inside)
    else:
        entries["random"] = quoted(spec.random or "")
        if spec.random == "uniform":
            entries["seed"] = str(spec.seed)
            entries["low"] = repr(spec.low)
            entries["high"] = repr(spec.high)
    shape = spec.declared_shape if spec.file is not None else spec.shape
    if shape is not None:
        entries["shape"] = json.dumps(shape)
    dtype = spec.declared_dtype if spec.file is not None else spec.dtype
    if dtype is not None:
        entries["dtype"] = quoted(dtype)
    if spec.convert is not None:
        entries["convert"] = quoted(spec.convert)
    if spec.resident:
        entries["resident"] = "true" if spec.resident is True else quoted(spec.resident)
    return "{ " + ", ".join(f"{key} = {value}" for key, value in entries.items()) + " }"
