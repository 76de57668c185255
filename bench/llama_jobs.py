"""Prefill of LLaMA as a job with random weights, and what experiments 3 and 4 share."""

from __future__ import annotations

import os
import platform
import tempfile
from dataclasses import replace
from datetime import date
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

import einmpi
from einmpi.job.job import Job
from einmpi.models.config import NAMED, Config
from einmpi.models.programs import FREQUENCIES, TOKENS, prefill_program

# A model for machines without a GPU, and for tests.
TINY = replace(
    NAMED["7B"],
    width=128,
    layers=4,
    heads=8,
    groups=8,
    head_width=16,
    hidden=344,
    vocabulary=512,
)
MODELS = {"tiny": TINY, **NAMED}
LOGITS = "logits"


def model_of(name: str, layers: int | None = None) -> Config:
    """Return the sizes of a model; with fewer layers, if their number is given."""
    config = MODELS[name]
    return config if layers is None else replace(config, layers=layers)


def prefill_job(config: Config, batch: int, sequence: int, dtype: str, backend: str) -> Job:
    """Return the job that computes the logits of the last position of every sequence.

    Its weights are resident. Where calls do not give them they are random, and each rank generates
    what it needs.
    """
    program = prefill_program(config, batch, sequence, dtype)
    spread = sqrt(3 / config.width)  # a sum over the width has a variance of about 1
    lines = [f"program = '''\n{program.text}'''", f"run.backend = '{backend}'", "[roles]"]
    for role, labels in program.roles.items():
        lines.append(f"{role} = {list(labels)}")
    lines.append("[inputs]")
    for name, (shape, input_dtype) in program.inputs.items():
        values = f"random = 'zeros', dtype = '{input_dtype}'"
        lines.append(f"{name} = {{ shape = {list(shape)}, {values} }}")
    for name, weight in program.weights.items():
        values = "random = 'ones'"
        if len(weight.shape) > 1:
            values = f"random = 'uniform', low = {-spread}, high = {spread}"
        values += f", dtype = '{dtype}', resident = true"
        lines.append(f"{name} = {{ shape = {list(weight.shape)}, {values} }}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "llama.toml")
        path.write_text("\n".join(lines), encoding="utf-8")
        return einmpi.load(path)


def call_inputs(config: Config, batch: int, sequence: int) -> dict[str, Any]:
    """Return what a call gives: the same random tokens on every rank, and frequencies."""
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, (batch, sequence))
    return {TOKENS: tokens, FREQUENCIES: config.rope.inverse_frequencies(config.head_width)}


def weight_bytes(config: Config, dtype: str) -> int:
    """Return the bytes of all weights."""
    weights = prefill_program(config, 1, 1, dtype).weights.values()
    return sum(int(np.prod(weight.shape)) for weight in weights) * np.dtype(dtype).itemsize


def wait_for(backend: str) -> None:
    """Wait until the GPU has done all that it was given."""
    if backend == "cupy":
        import cupy

        cupy.cuda.Device().synchronize()


def environment() -> dict[str, Any]:
    """Return where and when something is measured."""
    return {
        "einmpi": einmpi.__version__,
        "date": date.today().isoformat(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
    }


def show_row(cells: dict[str, Any], widths: dict[str, int]) -> str:
    """Return a row of a table; text is aligned to the left, numbers to the right."""
    shown = []
    for name, width in widths.items():
        value = cells.get(name)
        text = "–" if value is None else str(value)
        shown.append(text.ljust(width) if isinstance(value, str) else text.rjust(width))
    return "  ".join(shown)
