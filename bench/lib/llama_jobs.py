"""Prefill of LLaMA as a job with random weights, and what experiments 3 and 4 share."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

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
TEXT_COLUMNS = ("model", "memory", "strategy", "way")


def model_of(name: str, layers: int | None = None) -> Config:
    """Return the sizes of a model; with fewer layers, if their number is given."""
    config = MODELS[name]
    return config if layers is None else replace(config, layers=layers)


def prefill_job(
    config: Config, batch: int, sequence: int, dtype: str, backend: str, *, resident: bool = True
) -> Job:
    """Return the job that computes the logits of the last position of every sequence.

    Resident weights are random, and each rank generates what it needs. Others are given by every
    call, as arrays in host memory.
    """
    program = prefill_program(config, batch, sequence, dtype)
    spread = weight_spread(config)
    tensors: dict[str, Any] = {}
    generated: dict[str, dict[str, Any]] = {}
    for name, (shape, input_dtype) in program.inputs.items():
        tensors[name] = np.broadcast_to(np.zeros((), input_dtype), shape)  # takes no memory
    for name, weight in program.weights.items():
        values: dict[str, Any] = {"shape": list(weight.shape), "dtype": dtype}
        if not resident:
            tensors[name] = weight.shape
        elif len(weight.shape) == 1:
            generated[name] = {**values, "random": "ones"}
        else:
            generated[name] = {**values, "random": "uniform", "low": -spread, "high": spread}
    job = einmpi.program(
        program.text,
        dtype=dtype,
        outputs=program.outputs,
        inputs=generated,
        resident=resident,
        roles=program.roles,
        **tensors,
    )
    return replace(job, backend=backend)


def weight_spread(config: Config) -> float:
    """Return the largest random weight: a sum over the width has a variance of about 1 then."""
    return sqrt(3 / config.width)


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


def on_host(array: Any) -> npt.NDArray[np.float64]:
    """Return an array of numpy or CuPy as numbers in host memory."""
    return np.asarray(array.get() if hasattr(array, "get") else array, np.float64)


def show_row(cells: dict[str, str], widths: dict[str, int]) -> str:
    """Return a row of a table; columns of text are aligned to the left, others to the right."""
    shown = []
    for name, width in widths.items():
        text = cells.get(name, "–")
        shown.append(text.ljust(width) if name in TEXT_COLUMNS else text.rjust(width))
    return "  ".join(shown)
