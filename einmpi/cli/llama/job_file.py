"""The job file of a model's prefill: all of it to read and to change, weights by their files."""

from __future__ import annotations

import argparse
import io
import json
import os
from typing import TYPE_CHECKING

import numpy as np

from einmpi.cli.llama.arrays import file_input
from einmpi.cli.llama.models import load_model, prompt_shapes
from einmpi.cli.new.job_text import quoted
from einmpi.errors import InputError
from einmpi.files.specs import InputSpec

if TYPE_CHECKING:
    from einmpi.job.job import Job
    from einmpi.models.llama import Model


def write_job(options: argparse.Namespace) -> None:
    """Write the job file, and beside it the inverse frequencies of the model."""
    from einmpi.comm.local import ALONE
    from einmpi.files.load import describe
    from einmpi.files.replace import check_replaceable, replace_file
    from einmpi.models.programs import LOGITS, TOKENS

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
    from einmpi.models.programs import FREQUENCIES, TOKENS

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
    from einmpi.files.formats import known_format

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
